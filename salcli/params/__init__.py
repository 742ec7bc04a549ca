"""params.yaml: its schema, reading it, presets."""
