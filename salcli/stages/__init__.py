"""One function for each stage: declared inputs to declared outputs. The CLI, DVC and Python use the same."""
