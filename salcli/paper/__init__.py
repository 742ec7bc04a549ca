"""Every figure that the paper reports."""

from salcli.paper.figures import Figure, Setting, figures, settings

__all__ = ["Figure", "Setting", "figures", "settings"]
