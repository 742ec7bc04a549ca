"""Every row of a table. A method is declared once, in the module of its family, together with its formula.

`sal` is SAL and its filter. Post-hoc scores: `logits`, `activations`, `features`, `odin`, and those made of others,
`combined`. Trained with wild data: `wild`, and the rival STEP, `rival_step`. Trained on ID data: `contrastive`.
"""

# Of the committee, and so of SAL+. A score that joins changes the numbers of both.
MEMBERS = ("msp", "knn", "mahalanobis-plus", "rmds", "vim", "fdbd")
LEAST_CALIBRATION = 20  # samples that SAL+ learns from
