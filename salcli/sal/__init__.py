"""The paper as pure functions on tensors: no files, no configuration, no printing.

Letters follow the paper: n labeled ID samples, m wild samples, K classes, D features;
G the centred gradient matrix, v its top singular vector, τ the filtering score, T the threshold.

`gradients`: g and ∇̄. `spectrum`: v. `separation`: τ, T, ERR_in and ERR_out. `objective`: the loss of Eq. 8. `metrics`:
FPR95, AUROC, AUPR. `theory`: ζ and the bounds. How params become arguments of these: methods/sal.py.

What can be known without labels: `score_choice` (which score separates best), `filter_verdict` (whether the filter
found anything), `outlier_share` (π̂), `estimates` (FPR95 and AUROC).
"""
