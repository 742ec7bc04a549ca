"""The names of all methods: of the rows in a table, and of the scores that can separate."""

from __future__ import annotations

from typing import Literal

PosthocMethod = Literal[
    "sal-posthoc",
    "msp",
    "odin",
    "mahalanobis",
    "energy",
    "knn",
    "react",
    "dice",
    "ash",
    "gradnorm",
    "vim",
]
Encoder = Literal["knn-plus", "csi"]  # trained from scratch on the ID data
WildRival = Literal["oe", "energy-oe", "woods", "scone", "step"]  # trained with the wild data, as SAL is
Method = Literal["sal", WildRival, Encoder, PosthocMethod]
FilterScore = Literal[
    "sal", "gradnorm", "msp", "odin", "mahalanobis", "energy", "knn", "react", "dice", "ash", "vim", "auto"
]
