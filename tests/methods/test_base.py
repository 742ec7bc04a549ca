"""Every method declares what tables, params and fingerprints need, and is found by its name."""

import pytest
import torch
from helpers.representations import InFours

from salcli.errors import UnknownNameError
from salcli.methods.base import IdTrained, Method, Section, built_in, find_method
from salcli.methods.logits import Energy
from salcli.methods.sal import Sal
from salcli.pipeline.fingerprints import method_families

METHODS = built_in()


@pytest.mark.parametrize("declared", [*METHODS.values(), Sal], ids=lambda declared: declared.name)
def test_every_method_declares_a_label_a_paper_a_docstring_and_params(declared: type[Method]) -> None:
    assert all((declared.name, declared.label, declared.paper, declared.__doc__))
    assert declared.paper.rsplit(", ", 1)[1].isdigit()
    assert issubclass(declared.Params, Section)


def test_the_family_of_each_method_is_found_without_importing_it() -> None:
    """Fingerprints are made without torch, so they look for declarations in the text."""
    expected = {name: declared.__module__.rsplit(".", 1)[1] for name, declared in METHODS.items()}
    assert method_families() == expected


def test_a_method_is_found_by_its_name_if_it_is_of_the_kind() -> None:
    assert list(METHODS) == sorted(METHODS)
    assert all(find_method(name) is declared for name, declared in METHODS.items())
    with pytest.raises(UnknownNameError) as error:
        find_method("knn", IdTrained)
    assert str(error.value) == "no method is called knn (did you mean knn-plus?); known: all-id, csi, knn-plus"


@pytest.mark.parametrize("n", [0, 1, 10])
def test_scores_of_chunks_come_in_the_order_of_the_samples(n: int) -> None:
    logits = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    found = Energy().scores(InFours(torch.zeros(n, 2), logits, torch.zeros(n, dtype=torch.int64)))
    torch.testing.assert_close(found, -logits.double().logsumexp(1))
