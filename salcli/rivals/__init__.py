"""Other methods' scores and losses, on top of pytorch-ood. Scores are turned to our sign: higher = more ID-like.

pytorch-ood is imported inside functions: it takes seconds, and stages load these modules that need nothing of it.
"""
