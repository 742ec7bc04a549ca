"""Every method declares what tables, params and fingerprints need, and is found by its name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

from salcli.errors import ModelError, SalError, UnknownNameError
from salcli.methods.base import (
    Head,
    IdTrained,
    InputScore,
    Method,
    PostHoc,
    Section,
    Trained,
    WildTrained,
    built_in,
    find_method,
)
from salcli.methods.logits import Energy
from salcli.methods.sal import Sal
from salcli.params.schema import Params
from salcli.pipeline.fingerprints import method_families
from salcli.sal.gradients import Representation

KINDS = (PostHoc, InputScore, WildTrained, IdTrained)
METHODS = built_in()


@pytest.mark.parametrize("declared", [*METHODS.values(), Sal], ids=lambda declared: declared.name)
def test_every_method_declares_a_label_a_paper_a_docstring_and_params(declared: type[Method]) -> None:
    assert all((declared.name, declared.label, declared.paper, declared.__doc__))
    assert declared.paper.rsplit(", ", 1)[1].isdigit()
    assert "__doc__" in vars(declared)
    assert issubclass(declared.Params, Section)
    assert declared.has_params() == bool(declared.Params.model_fields)
    assert sum(issubclass(declared, kind) for kind in KINDS) == 1
    assert not declared.__abstractmethods__


def test_the_names_and_labels_of_methods_differ() -> None:
    labels = [declared.label for declared in (*METHODS.values(), Sal)]
    assert len(set(labels)) == len(labels)
    assert all(declared.name == name for name, declared in METHODS.items())


def test_params_yaml_holds_just_the_methods_that_have_params(quick_params: Params) -> None:
    for name, declared in METHODS.items():
        own = quick_params.methods.of(name)
        assert isinstance(own, declared.Params) if declared.has_params() else own is None
        assert isinstance(declared.from_params(quick_params), declared)


def test_built_in_methods_are_those_of_a_kind_in_a_fixed_order() -> None:
    assert list(METHODS) == sorted(METHODS)
    by_kind = [built_in(kind) for kind in KINDS]
    assert sorted(chain(*by_kind)) == list(METHODS)
    assert list(built_in(Trained)) == sorted([*built_in(WildTrained), *built_in(IdTrained)])
    assert list(built_in(InputScore)) == ["odin"]
    assert list(built_in(IdTrained)) == ["csi", "knn-plus"]


def test_the_family_of_each_method_is_found_without_importing_it() -> None:
    """Fingerprints are made without torch, so they look for declarations in the text."""
    expected = {name: declared.__module__.rsplit(".", 1)[1] for name, declared in METHODS.items()}
    assert method_families() == expected


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_found_by_its_name_if_it_is_of_the_kind(name: str) -> None:
    declared = METHODS[name]
    for kind in KINDS:
        if issubclass(declared, kind):
            assert find_method(name) is find_method(name, kind) is declared
        else:
            with pytest.raises(UnknownNameError, match=f"no method is called {name}"):
                find_method(name, kind)


@pytest.mark.parametrize(
    ("typed", "kind", "meant"),
    [("mahalanobi", Method, "mahalanobis"), ("knn+", Method, "knn"), ("knn+", IdTrained, "knn-plus")],
)
def test_an_unknown_method_is_an_error_that_suggests_a_near_name(typed: str, kind: type[Method], meant: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        find_method(typed, kind)
    known = ", ".join(built_in(kind))
    assert str(error.value) == f"no method is called {typed} (did you mean {meant}?); known: {known}"


# --- custom methods


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "custom_scores.py").write_text(
        "from salcli.methods.base import PostHoc\n"
        "class Longest(PostHoc):\n"
        "    def score(self, x):\n"
        "        return x.feature.norm(dim=1)\n"
        "class Named(Longest):\n"
        "    label = 'My score'\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "custom_scores"
    sys.modules.pop("custom_scores", None)


def test_a_custom_method_is_imported_by_its_module_and_name(custom: str) -> None:
    found = find_method(f"{custom}:Longest", PostHoc)
    assert (found.name, found.label) == (f"{custom}:Longest", "Longest")
    assert find_method(f"{custom}:Named").label == "My score"
    x = Representation(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2), torch.tensor([0]))
    assert isinstance(method := found(), PostHoc)
    assert method.scores(x).tolist() == [5]
    assert f"{custom}:Longest" not in built_in()


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("custom_scores:number", Method, "is not a class derived from salcli.methods.base.Method"),
        ("custom_scores:Longest", WildTrained, "is not a class derived from salcli.methods.base.WildTrained"),
    ],
)
def test_a_custom_object_of_another_kind_is_refused(custom: str, name: str, kind: type[Method], message: str) -> None:
    with pytest.raises(SalError, match=message):
        find_method(name, kind)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("custom_scores:Shortest", "has no Shortest; it has PostHoc, Longest"),
        ("no_such_module:X", "cannot be imported"),
    ],
)
def test_a_custom_method_that_does_not_exist_is_an_error_that_says_what_does(
    custom: str, name: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        find_method(name)


# --- what methods share


class InFours(Representation):
    """Read four rows at a time, as a file would be."""

    def chunks(self) -> Iterator[Representation]:
        yield from (self.take(rows) for rows in torch.arange(len(self)).split(4) if len(rows))


@pytest.mark.parametrize("n", [0, 1, 10])
def test_scores_of_chunks_come_in_the_order_of_the_samples(n: int) -> None:
    logits = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    found = Energy().scores(InFours(torch.zeros(n, 2), logits, torch.zeros(n, dtype=torch.int64)))
    torch.testing.assert_close(found, logits.double().logsumexp(1))


def test_a_head_is_the_layer_in_double_precision() -> None:
    layer, features = nn.Linear(5, 3), torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Head.of(layer).logits(features), layer.double()(features.double()).detach())
