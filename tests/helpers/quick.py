"""A pipeline of seconds: the same code on the same data, with fewer epochs."""

from pathlib import Path

from salcli.store.layout import Experiment

REPOSITORY = Path(__file__).parents[2]
OOD = "digits-8-9"
SEED = 0
QUICK = {"seeds": [SEED], "variants": ["sal"], "rivals": [], "train_id.epochs": 8, "train_ood.epochs": 3}
EXPERIMENT = Experiment(SEED, OOD, 0.1)
