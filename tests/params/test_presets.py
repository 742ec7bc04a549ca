"""The paper's experiments as overrides of the default params.yaml."""

import csv
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest

from salcli.data.catalogue import DATA_SETS
from salcli.errors import ParamsError, SalError
from salcli.methods.base import built_in
from salcli.params.presets import DEFAULT, additions, default_params, default_text, preset, presets, resolved, text
from salcli.params.reading import edited, read_yaml
from salcli.params.schema import load_params, validated

REPOSITORY = Path(__file__).parents[2]
RESULTS = [*csv.DictReader((files("salcli.report") / "paper.csv").read_text(encoding="utf-8").splitlines())]
# the paper describes the second and reports no numbers; two are Table 1 in a protocol of their own; it has no ImageNet
WITHOUT_RESULTS = {DEFAULT, "global-reference", "paper-text", "released", "imagenet200", "imagenet1k"}
OF_THE_PAPER = [name for name in presets() if name not in WITHOUT_RESULTS]
assert {*OF_THE_PAPER} == {row["table"] for row in RESULTS}, "there is one for every table"
PROTOCOLS = ["sal", "sal-paper", "sal-released"]
NOT_THE_PAPERS = {"sal-auto", "sal-random-both"}
# what the paper calls our rows
ROWS = {
    **dict.fromkeys(PROTOCOLS, "SAL"),
    "energy-vos": "Energy-OE",
    "sal-gradnorm": "SAL (gradnorm)",
    "sal-class-agnostic": "SAL (class-agnostic)",
    "sal-candidate-id": "SAL (candidate-id)",
    "sal-random-labels": "SAL (random-labels)",
    **{f"sal-{c}": f"SAL (c={c})" for c in range(2, 7)},
}


def in_paper(name: str, column: str) -> list[str]:
    """The values of a column of the paper's table, each once, in order."""
    return list(dict.fromkeys(row[column] for row in RESULTS if row["table"] == name))


@cache
def text_of(name: str) -> str:
    return text(preset(name))


def comments(written: str) -> list[str]:
    return [line.partition(" # ")[2] for line in written.splitlines() if " # " in line]


# --- all of them


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_valid_and_its_text_says_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(text_of(name), encoding="utf-8")
    params, _ = load_params(tmp_path / "params.yaml")
    assert read_yaml(tmp_path / "params.yaml") == resolved(preset(name))
    assert params == validated(resolved(preset(name)), name)
    assert {params.data.id, *params.data.ood, *params.data.test_ood} <= set(DATA_SETS)


# --- what the paper says


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_data_network_and_methods_are_those_of_its_table(name: str) -> None:
    """So that `table --paper` finds the table that the project was created for."""
    params = resolved(preset(name))
    data, methods = params["data"], params["evaluate"]["methods"]
    assert data["id"] in in_paper(name, "id")
    assert [params["model"]["backbone"]] == in_paper(name, "backbone")
    assert {float(pi) for pi in in_paper(name, "pi") if pi} <= {*map(float, data["pi"])}
    shown = [*data["test_ood"], *(ood for ood in data["ood"] if ood not in data["test_ood"])]
    sets = [ood for ood in in_paper(name, "ood") if ood not in ("-", "average")]
    order = -1 if name == "unseen-tin" else 1  # the only table that starts with the other crop
    assert [ood.removesuffix("-2d") for ood in shown[::order]] == sets
    labels = {**{method: found.label for method, found in built_in().items()}, **ROWS}
    rows = {"SAL" if row == "SAL (c=1)" else row for row in in_paper(name, "method")}
    ours = {labels[method.removesuffix("@all-id")] for method in methods if method not in NOT_THE_PAPERS}
    assert ours == rows & {*labels.values()}
    trained = [*params["variants"], *params["rivals"], *params["encoders"]]
    assert methods[: len(trained) - ("all-id" in trained)] == [one for one in trained if one != "all-id"]
    assert params["variants"][:3] == PROTOCOLS, "none stands for SAL alone"


@pytest.mark.parametrize("name", sorted(set(OF_THE_PAPER) - {"toy"}))
def test_the_protocol_is_that_of_the_paper(name: str) -> None:
    params = resolved(preset(name))
    assert params["data"]["id_shares"] == {"train": 0.45, "calibration": 0.05, "wild": 0.5, "test": "official"}
    assert (params["data"]["image_size"], params["data"]["channels"]) == (32, 3)
    assert [round(255 * value, 1) for value in params["model"]["mean"]] == [125.3, 123.0, 113.9]
    assert [round(255 * value, 1) for value in params["model"]["std"]] == [63.0, 62.1, 66.7]
    first, second = params["train_id"], params["train_ood"]
    assert (first["epochs"], first["lr"], first["batch_size"]) == (100, 0.1, 128)
    assert (second["epochs"], second["lr"], second["batch_size"]) == (50 if name == "unseen-300k" else 100, 0.001, 128)
    assert second["loss_weight"] == 10
    for training in (first, second):
        assert (training["momentum"], training["weight_decay"], training["augment"]) == (0.9, 0.0005, "flip-crop")
    assert params["methods"]["knn"]["k"] == (50 if params["data"]["id"] == "cifar10" else 200)
    assert params["numerics"] == {"precision": "float32", "deterministic": False, "compile": False}
    assert params["model"]["drop_rate"] == (0.3 if params["model"]["backbone"] == "wrn-40-2" else 0.0)
    assert len(params["seeds"]) == (10 if name in ("main-cifar100", "cifar10") else 1)
    assert params["data"]["ood_wild_share"] == (0.99 if name == "unseen-300k" else 0.7)


def test_the_protocols_are_those_of_the_text_and_of_the_released_code() -> None:
    """In `released` ID images recur, which no other preset allows; where nothing needs them, none are held out."""
    params = validated(resolved(preset("main-cifar100")), "main-cifar100")
    ours, paper, released = (params.for_variant(name) for name in PROTOCOLS)
    assert (ours.filter.calibration, paper.filter.calibration, released.filter.calibration) == (
        "holdout",
        "train",
        "id-svd",
    )
    assert (paper.filter.gradient, released.filter.gradient) == ("full", "predicted-row")
    assert (paper.train_ood.augment, released.train_ood.augment) == ("flip-crop", "none")
    assert [name for name in presets() if resolved(preset(name))["data"]["mixing"] == "recycle"] == ["released"]
    for name in ("paper-text", "released"):
        assert resolved(preset(name))["data"]["id_shares"]["train"] == 0.5, "25,000 images"
    with pytest.raises(ParamsError, match=r"data\.mixing +is recycle, .* but sal, sal-paper, sal-plus is not"):
        validated(resolved(preset("theory"), {"data.mixing": "recycle"}), "params.yaml")
    shares = {"train": 0.5, "calibration": 0, "wild": 0.5, "test": "official"}
    with pytest.raises(ParamsError, match=r"data\.id_shares\.calibration +is 0, but sal, sal-plus needs held-out"):
        validated(resolved(preset("theory"), {"data.id_shares": shares}), "params.yaml")


def test_the_schedules_of_rivals_are_added_to_an_experiment_and_named_in_its_text() -> None:
    captions, own = additions()["caption-schedules"].values, additions()["own-schedules"].values
    main, both = preset("main-cifar100"), preset("main-cifar100", "own-schedules")
    assert captions.items() <= main.values.items()
    assert captions.keys() == own.keys() == {key for key in both.values if both.values[key] != main.values[key]}
    assert both.values["methods.knn-plus.epochs"] == default_params()["methods"]["knn-plus"]["epochs"], "its authors'"
    assert text(both).startswith("# main-cifar100 + own-schedules: CIFAR-100")
    named = "(caption-schedules)"
    assert [named in text_of(name) for name in ("main-cifar100", "mixing-ratio", "theory")] == [True, True, False]
    assert named not in text(both), "one schedule is named"
    assert resolved(preset("own-schedules"))["data"] == default_params()["data"]
    with pytest.raises(SalError, match="main-cifar100 and cifar10 are experiments: take one"):
        preset("main-cifar100", "cifar10")


# --- editing the text


def test_only_the_lines_of_changed_keys_change() -> None:
    before = default_text()
    assert before == (REPOSITORY / "params.yaml").read_text(encoding="utf-8") == text(preset(DEFAULT))
    changed = edited(before, {"seeds": [7, 8], "data.pi": [0.25], "model.weights": "net.pt"})
    pairs = zip(before.splitlines(), changed.splitlines(), strict=True)
    different = [after.partition(" #")[0].rstrip() for before, after in pairs if before != after]
    assert different == ["seeds: [7, 8]", "  pi: [0.25]", "  weights: net.pt"]
    assert comments(changed) == comments(before)
    toy, variant = preset("toy"), {"filter": {"n_vectors": 3}}
    assert text(toy, {"train_id.epochs": resolved(toy)["train_id"]["epochs"]}) == text_of("toy")
    assert "  sal-3: {filter: {n_vectors: 3}}\n" in text(toy, {"variant.sal-3": variant})
    assert resolved(toy, {"variant.sal-3": variant})["variant"] == {**resolved(toy)["variant"], "sal-3": variant}
    assert default_params() == resolved(preset(DEFAULT)), "the defaults stay as they are"
