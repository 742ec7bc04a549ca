"""Every row of a table. A method is declared once, in the module of its family, together with its formula.

`sal` is SAL and its filter. Post-hoc scores: `logits`, `activations`, `features`, `odin`, and those made of others,
`combined`. Trained with wild data: `wild`, and the rival STEP, `rival_step`. Trained on ID data: `contrastive`.
"""
