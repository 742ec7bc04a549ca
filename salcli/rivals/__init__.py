"""Other methods' scores and losses, from their definitions. Scores have our sign: higher = more ID-like."""
