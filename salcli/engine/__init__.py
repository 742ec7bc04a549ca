"""Training and inference on any device, in one process or several: nothing here reads params.yaml or writes files."""
