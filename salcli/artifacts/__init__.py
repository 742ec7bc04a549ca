"""Every file that passes between stages: written atomically, checked when read."""
