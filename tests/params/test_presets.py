"""The paper's experiments as overrides of the default params.yaml."""

import csv
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest

from salcli.data.catalogue import DATA_SETS
from salcli.errors import UnknownNameError
from salcli.methods.base import built_in
from salcli.params.presets import DEFAULT, OVERRIDES, default_params, default_text, preset, presets, resolved, text
from salcli.params.reading import edited, read_yaml
from salcli.params.schema import load_params, validated

REPOSITORY = Path(__file__).parents[2]
RESULTS = [*csv.DictReader((files("salcli.report") / "results.csv").read_text(encoding="utf-8").splitlines())]
WITHOUT_RESULTS = {DEFAULT, "global-reference"}  # the paper describes it and reports no numbers
OF_THE_PAPER = [name for name in presets() if name not in WITHOUT_RESULTS]
FIVE_SETS = ["svhn", "places365", "lsun-c", "lsun-r", "textures"]
# what the paper calls our variants
VARIANTS = {
    "sal-gradnorm": "SAL (gradnorm filter)",
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


def test_there_is_one_for_every_table_of_the_paper() -> None:
    assert set(OF_THE_PAPER) == {row["table"] for row in RESULTS}


@pytest.mark.parametrize("name", sorted(set(presets()) - {DEFAULT}))
def test_the_first_lines_say_what_it_is_and_where_the_paper_has_it(name: str) -> None:
    ours = preset(name)
    assert text_of(name).startswith(f"# {name}: {ours.title}\n# Paper: {ours.paper} (Du et al., ICLR 2024)\n# Note: ")
    assert ours.paper.startswith(("Table", "Section", "Figure", "Appendix"))
    header, _, body = text_of(name).partition("\n\n")
    assert " ".join(line.removeprefix("# ") for line in header.splitlines()[2:]) == f"Note: {ours.note}"
    assert max(map(len, header.splitlines())) <= 120
    assert body.startswith("seeds: ")


@pytest.mark.parametrize("name", presets())
def test_every_comment_is_that_of_the_default_or_its_own(name: str) -> None:
    ours, default = comments(text_of(name).partition("\n\n")[2]), comments(default_text().partition("\n\n")[2])
    replaced = {*preset(name).comments.values()}
    assert replaced <= {*ours}
    assert {*ours} <= {*default} | replaced


def test_the_default_is_the_repositorys_own_params_file() -> None:
    assert text(preset(DEFAULT)) == (REPOSITORY / "params.yaml").read_text(encoding="utf-8")
    assert preset(DEFAULT).values == {}


def test_the_overrides_are_a_short_file() -> None:
    lines = OVERRIDES.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 500
    assert max(map(len, lines)) <= 125


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"no preset is called main-cifar10 \(did you mean main-cifar100\?\)"):
        preset("main-cifar10")


# --- what the paper says


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_id_set_backbone_and_shares_are_those_of_its_table(name: str) -> None:
    """So that `table --paper` finds the table that the project was created for."""
    ours = resolved(preset(name))
    assert ours["data"]["id"] in in_paper(name, "id")
    assert [ours["model"]["backbone"]] == in_paper(name, "backbone")
    assert {float(pi) for pi in in_paper(name, "pi") if pi} <= {*map(float, ours["data"]["pi"])}


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_the_ood_sets_are_those_of_its_table_in_the_same_order(name: str) -> None:
    data = resolved(preset(name))["data"]
    shown = [*data["test_ood"], *(ood for ood in data["ood"] if ood not in data["test_ood"])]
    if name == "unseen-tin":  # the only table that starts with the other crop
        shown = shown[::-1]
    sets = [ood for ood in in_paper(name, "ood") if ood not in ("-", "average")]
    assert [ood.removesuffix("-2d") for ood in shown] == sets


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_the_methods_are_the_rows_of_its_table_that_salcli_has(name: str) -> None:
    params = resolved(preset(name))
    labels = {"sal": "SAL", **{method: found.label for method, found in built_in().items()}, **VARIANTS}
    rows = {"SAL" if row == "SAL (c=1)" else row for row in in_paper(name, "method")}
    methods = params["evaluate"]["methods"]
    assert {labels[method] for method in methods} == rows & {*labels.values()}
    trained = [*params["variants"], *params["rivals"], *params["encoders"]]
    assert methods[: len(trained)] == trained


@pytest.mark.parametrize("name", sorted(set(OF_THE_PAPER) - {"toy"}))
def test_the_protocol_is_that_of_the_paper(name: str) -> None:
    params = resolved(preset(name))
    assert params["data"]["id_shares"] == {"train": 0.45, "calibration": 0.05, "wild": 0.5, "test": "official"}
    assert (params["data"]["image_size"], params["data"]["channels"]) == (32, 3)
    assert [round(255 * value, 1) for value in params["model"]["mean"]] == [125.3, 123.0, 113.9]
    assert [round(255 * value, 1) for value in params["model"]["std"]] == [63.0, 62.1, 66.7]
    first, second = params["train_id"], params["train_ood"]
    assert (first["epochs"], first["lr"], first["batch_size"], first["weights"]) == (100, 0.1, 128, None)
    assert (second["epochs"], second["lr"], second["batch_size"]) == (50 if name == "unseen-300k" else 100, 0.001, 128)
    assert second["loss_weight"] == 10
    for training in (first, second):
        assert (training["momentum"], training["weight_decay"], training["augment"]) == (0.9, 0.0005, "flip-crop")
    assert params["methods"]["knn"]["k"] == (50 if params["data"]["id"] == "cifar10" else 200)
    assert params["numerics"] == {"precision": "float32", "deterministic": False, "compile": False}
    assert params["model"]["drop_rate"] == (0.3 if params["model"]["backbone"] == "wrn-40-2" else 0.0)
    assert len(params["seeds"]) == (5 if name in ("main-cifar100", "cifar10") else 1)


@pytest.mark.parametrize(
    ("name", "variant", "section", "key", "value"),
    [
        ("gradnorm-filter", "sal-gradnorm", "filter", "score", "gradnorm"),
        ("class-agnostic-svd", "sal-class-agnostic", "filter", "svd", "class-agnostic"),
        ("global-reference", "sal-global", "filter", "reference", "global"),
        ("candidate-id", "sal-candidate-id", "train_ood", "candidate_id", True),
        ("random-labels", "sal-random-labels", "filter", "labels", "random"),
        *(("singular-vectors", f"sal-{c}", "filter", "n_vectors", c) for c in range(2, 7)),
    ],
)
def test_a_variant_differs_from_sal_in_what_its_table_is_about(
    name: str, variant: str, section: str, key: str, value: object
) -> None:
    params = validated(resolved(preset(name)), name)
    plain, other = params.for_variant("sal"), params.for_variant(variant)
    assert getattr(getattr(other, section), key) == value
    assert getattr(getattr(plain, section), key) != value
    assert plain == params


@pytest.mark.parametrize(
    ("name", "section", "key", "value"),
    [
        ("mixing-ratio", "data", "pi", [0.05, 0.1, 0.2, 0.5, 0.9]),
        ("unseen-300k", "data", "ood_wild_share", 0.99),
        ("unseen-300k", "data", "test_ood", FIVE_SETS),
        ("toy", "train_id", "weight_decay", 0.4),
    ],
)
def test_what_else_its_table_is_about_is_set(name: str, section: str, key: str, value: object) -> None:
    assert resolved(preset(name))[section][key] == value
    assert resolved(preset("main-cifar100"))[section][key] != value


# --- editing the text


def test_only_the_lines_of_changed_keys_change() -> None:
    before = default_text()
    changed = edited(before, {"seeds": [7, 8], "data.pi": [0.25], "train_id.weights": "net.pt"})
    pairs = zip(before.splitlines(), changed.splitlines(), strict=True)
    different = [after.partition(" #")[0].rstrip() for before, after in pairs if before != after]
    assert different == ["seeds: [7, 8]", "  pi: [0.25]", "  weights: net.pt"]
    assert comments(changed) == comments(before)


@pytest.mark.parametrize("name", [DEFAULT, "toy", "singular-vectors"])
def test_setting_a_key_to_its_own_value_changes_nothing(name: str) -> None:
    epochs = resolved(preset(name))["train_id"]["epochs"]
    assert text(preset(name), {"train_id.epochs": epochs}) == text_of(name)


def test_values_win_over_the_preset_and_the_defaults_stay_as_they_are() -> None:
    before = resolved(preset(DEFAULT))
    changed = resolved(preset("toy"), {"seeds": [5], "variant.sal-3": {"filter": {"n_vectors": 3}}})
    assert (changed["seeds"], changed["data"]["id"]) == ([5], "gaussians-2d")
    assert changed["variant"] == {"sal": {}, "sal-3": {"filter": {"n_vectors": 3}}}
    assert default_params() == before
    assert "  sal-3: {filter: {n_vectors: 3}}\n" in text(preset("toy"), {"variant.sal-3": {"filter": {"n_vectors": 3}}})
