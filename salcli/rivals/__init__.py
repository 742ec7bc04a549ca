"""Other methods' scores, turned to our sign: higher = more ID-like. On top of pytorch-ood."""
