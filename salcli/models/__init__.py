"""Networks that expose their features and end in a linear head."""
