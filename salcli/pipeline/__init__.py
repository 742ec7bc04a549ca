"""The stages: each is a function of declared inputs to declared outputs, for the CLI, DVC and Python alike."""
