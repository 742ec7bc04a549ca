"""The paper as pure functions on tensors: no files, no configuration, no printing.

Letters follow the paper: n labeled ID samples, m wild samples, K classes, D features;
G the centred gradient matrix, v its top singular vector, τ the filtering score, T the threshold.
"""
