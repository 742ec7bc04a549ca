"""One params.yaml for each table of the paper. Written by tools/make_presets.py, read here."""

from salcli.presets.registry import DEFAULT, Preset, preset, presets

__all__ = ["DEFAULT", "Preset", "preset", "presets"]
