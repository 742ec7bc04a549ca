"""Data sets, their splits, and the wild mixture."""
