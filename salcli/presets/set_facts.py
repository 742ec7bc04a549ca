"""What is known of the presets' data sets without having them: their sizes, and whether they come with salcli."""

from __future__ import annotations

from dataclasses import dataclass

from salcli.errors import unknown_name


@dataclass(frozen=True)
class SetFacts:
    """Published sizes. n_test: of the official test split, 0 where a set has none and is dealt as a whole."""

    n: int
    n_test: int = 0
    comes_with_salcli: bool = False


SET_FACTS = {
    "digits-0-7": SetFacts(1_443, comes_with_salcli=True),
    "digits-8-9": SetFacts(354, comes_with_salcli=True),
    "photo-patches": SetFacts(2_000, comes_with_salcli=True),
    "gaussians-2d": SetFacts(15_000, comes_with_salcli=True),
    "ring-2d": SetFacts(1_000, comes_with_salcli=True),
    "cluster-2d": SetFacts(1_000, comes_with_salcli=True),
    "cifar10": SetFacts(50_000, 10_000),
    "cifar100": SetFacts(50_000, 10_000),
    "cifar100-first50": SetFacts(25_000, 5_000),
    "cifar100-last50": SetFacts(25_000, 5_000),
    "svhn": SetFacts(73_257, 26_032),
    "places365": SetFacts(10_000),
    "lsun-c": SetFacts(10_000),
    "lsun-r": SetFacts(10_000),
    "textures": SetFacts(5_640),
    "300k-random": SetFacts(300_000),
    "tin-crop": SetFacts(10_000),
    "tin-resize": SetFacts(10_000),
}


def set_facts(name: str) -> SetFacts:
    """Look a data set up."""
    if name not in SET_FACTS:
        raise unknown_name("data set of a preset", name, SET_FACTS)
    return SET_FACTS[name]


def has_to_be_fetched(name: str) -> bool:
    """Whether somebody has to get the data; own folders, which nobody can fetch, are there already."""
    return name in SET_FACTS and not SET_FACTS[name].comes_with_salcli
