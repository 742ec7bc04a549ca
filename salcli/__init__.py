"""Separate And Learn: out-of-distribution detection with unlabeled wild data."""

__version__ = "0.1.0"
