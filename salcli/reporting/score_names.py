"""How the filter's scores are written."""

from __future__ import annotations

from salcli.reporting.results_table import LABELS


def score_label(name: str) -> str:
    """τ, or another method's score, which is higher for ID data, negated: −Energy."""
    return "τ" if name == "sal" else f"−{LABELS.get(name, name)}"
