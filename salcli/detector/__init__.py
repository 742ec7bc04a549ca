"""Predictions for new images from one detector file: neither the training data nor DVC are needed."""
