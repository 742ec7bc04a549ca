"""How fast salcli is, beside the other ways to do the same: `make bench`."""
