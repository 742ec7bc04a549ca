"""Custom methods in stages: a score in filter and evaluate, a rival, and what is refused."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.quick import EXPERIMENT
from helpers.stages import params_of, stored

from salcli.errors import ParamsError
from salcli.pipeline import evaluate, train_ood
from salcli.pipeline import filter as filter_stage
from salcli.store.files import read_arrays
from salcli.store.layout import Workspace

CODE = """
from torch.nn.functional import cross_entropy
from salcli.methods.base import Positive, PostHoc, Section
from salcli.methods.wild import WildLossMethod

class Spread(PostHoc):
    class Params(Section):
        power: Positive
    def fit(self, known):
        self.mean = known.features.double().mean(0)
    def score(self, x):
        return -(x.feature.double() - self.mean).abs().pow(self.params.power).sum(1)

class Small(WildLossMethod):
    label = "Small logits"
    def prepare(self, start):
        self.scale = 1 / len(start.wild)
    def loss(self, id_logits, labels, wild_logits):
        return cross_entropy(id_logits, labels) + self.scale * wild_logits.square().sum()
    def score(self, network, outputs):
        return outputs[0].double().amax(1)
"""
SPREAD, SMALL = "extra_methods:Spread", "extra_methods:Small"
VALUES = {"rivals": [SMALL], f"methods.{SMALL}": {}, f"methods.{SPREAD}": {"power": 2}}


@pytest.fixture
def project(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    (workspace.root / "extra_methods.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield workspace
    sys.modules.pop("extra_methods", None)


def slow_spread(project: Workspace, features: np.ndarray) -> np.ndarray:
    mean = stored(project, EXPERIMENT.id_representation("train"))["feature"].astype(float).mean(0)
    return np.square(features.astype(float) - mean).sum(1)


def test_a_custom_score_separates_and_is_evaluated_beside_a_custom_rival(project: Workspace) -> None:
    values = {**VALUES, "filter.score": SPREAD, "train_ood.epochs": 1, "evaluate.methods": ["sal", SPREAD, SMALL]}
    params = params_of(project, values)
    found = filter_stage.run(project, params, EXPERIMENT).candidates
    expected = slow_spread(project, stored(project, EXPERIMENT.wild_representation)["feature"])
    np.testing.assert_allclose(found.wild_score, expected, rtol=1e-6)
    assert train_ood.run(project, params, EXPERIMENT).n_outliers == len(found.index)
    assert train_ood.run(project, params, EXPERIMENT, rival=SMALL).label == "Small logits"
    done = evaluate.run(project, params, EXPERIMENT)
    assert [own.label for own in done.scores.values()] == ["SAL", "Spread", "Small logits"]
    scores = read_arrays(project.find(EXPERIMENT.evaluation("scores.h5")), evaluate.SCORES)
    expected = slow_spread(project, stored(project, EXPERIMENT.test_representation())["feature"])
    np.testing.assert_allclose(scores[f"{SPREAD}/ood"], -expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"evaluate.methods": [SPREAD]}, r"methods +has no entry for extra_methods:Spread; add .*: \{power: …\}"),
        ({**VALUES, "filter.score": SMALL}, "extra_methods:Small cannot separate the wild data"),
        ({**VALUES, "evaluate.methods": [SMALL], "rivals": []}, "which has to be trained; name it in rivals, too"),
    ],
    ids=["no entry", "not a score", "not trained"],
)
def test_a_custom_method_that_cannot_be_used_is_refused(
    project: Workspace, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParamsError, match=message):
        params_of(project, values)
