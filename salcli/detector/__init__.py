"""Predictions for new images, from a detector file alone: neither the data nor DVC are needed."""
