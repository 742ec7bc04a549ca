"""Data sets: the catalogue, readers, decoding, splits and downloads."""
