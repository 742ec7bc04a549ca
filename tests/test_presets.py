"""One readable params.yaml for each table of the paper, and what it will cost."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

import pytest
from conftest import REPOSITORY
from rich.console import Console
from test_cli import salcli

from salcli.errors import UnknownNameError
from salcli.fetching.registry import SOURCES
from salcli.paper import figures
from salcli.params_file import edited, read_yaml
from salcli.presets import DEFAULT, preset, presets
from salcli.presets.estimate import estimated_gigabytes, estimated_images
from salcli.reporting.preset_table import preset_syntax

if TYPE_CHECKING:
    from types import ModuleType

PARAMS_TEXT = (REPOSITORY / "params.yaml").read_text(encoding="utf-8")
WITHOUT_FIGURES = {DEFAULT, "global-reference"}  # which the paper describes and does not measure
OF_THE_PAPER = [name for name in presets() if name not in WITHOUT_FIGURES]
FIVE_SETS = ["svhn", "places365", "lsun-c", "lsun-r", "textures"]


def keys(section: dict[str, Any]) -> dict[str, Any]:
    """The keys alone, nested."""
    return {name: keys(value) if isinstance(value, dict) else None for name, value in section.items()}


def comments(text: str) -> list[str]:
    return [line.partition("# ")[2] for line in text.splitlines() if "# " in line]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = spec_from_file_location("make_presets", REPOSITORY / "tools" / "make_presets.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    return module


# --- the files


def test_there_is_one_for_every_table_of_the_paper_and_none_else() -> None:
    assert set(OF_THE_PAPER) == {figure.setting.table for figure in figures()}


def test_the_default_is_the_repositorys_own_params_file() -> None:
    assert preset(DEFAULT).text == PARAMS_TEXT


def test_the_files_are_what_the_tool_writes(tool: ModuleType) -> None:
    assert {name: one.text for name, one in presets().items()} == tool.texts()


@pytest.mark.parametrize("name", presets())
def test_a_preset_has_every_key_in_its_place_and_every_comment(name: str) -> None:
    ours, expected = preset(name), read_yaml(REPOSITORY / "params.yaml")
    assert keys(ours.params) == keys(expected)
    assert [list(section) for section in ours.params.values() if isinstance(section, dict)] == [
        list(section) for section in expected.values() if isinstance(section, dict)
    ]
    assert comments(ours.text)[-len(comments(PARAMS_TEXT)) :] == comments(PARAMS_TEXT)


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_the_first_lines_say_what_it_is_and_where_the_paper_has_it(name: str) -> None:
    ours = preset(name)
    assert ours.text.startswith(f"# {name}: {ours.title}\n# Paper: {ours.paper} (Du et al., ICLR 2024)\n# Note: ")
    assert ours.paper.startswith(("Table", "Section", "Figure", "Appendix"))
    assert ours.note
    assert "#" not in ours.note


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_id_set_backbone_and_share_are_those_of_its_table(name: str) -> None:
    """So that `table --paper` finds the table that the folder was made for."""
    ours = preset(name).params
    settings = {figure.setting for figure in figures() if figure.setting.table == name}
    wanted = (ours["data"]["id"], ours["model"]["backbone"])
    assert any((one.id, one.backbone) == wanted and one.pi in (None, ours["data"]["pi"]) for one in settings)


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_the_papers_ood_sets_are_the_presets_in_the_same_order(name: str) -> None:
    data = preset(name).params["data"]
    in_paper = [one.test for one in figures() if one.setting.table == name and one.test not in ("-", "average")]
    shown = [*data["test_ood"], *(ood for ood in data["ood"] if ood not in data["test_ood"])]
    if name == "unseen-tin":  # the one table that starts with the other crop
        shown = shown[::-1]
    assert [ood.removesuffix("-2d") for ood in shown] == list(dict.fromkeys(in_paper))


def test_the_methods_are_the_rows_of_its_table_that_exist() -> None:
    wild, encoders = ["oe", "energy-oe", "woods"], ["knn-plus", "csi"]
    rows = ["sal", *wild, *encoders, "msp", "odin", "mahalanobis", "energy", "knn", "react", "dice"]
    expected = {
        "main-cifar100": [*rows, "ash"],
        "cifar10": [*rows, "ash"],
        "resnet18": rows,
        "resnet34": rows,
        "mixing-ratio": ["sal", *wild],
        "near-cifar100": ["sal", "woods"],
        "near-cifar50": ["sal", "woods"],
        "unseen-300k": ["sal", *wild],
        "unseen-tin": ["sal", "step"],
        "weakly-supervised": ["sal", "step"],
        "post-hoc-cifar10": ["sal", "sal-posthoc"],
        "post-hoc-cifar100": ["sal", "sal-posthoc"],
    }
    for name in OF_THE_PAPER:
        params, methods = preset(name).params, expected.get(name, ["sal"])
        assert params["evaluate"]["methods"] == methods, name
        assert params["rivals"] == [method for method in methods if method in (*wild, "step")], name
        assert params["encoders"] == [method for method in methods if method in encoders], name


@pytest.mark.parametrize("name", sorted(set(OF_THE_PAPER) - {"toy"}))
def test_the_protocol_is_that_of_the_paper(name: str) -> None:
    params = preset(name).params
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
    assert params["evaluate"]["knn_k"] == (50 if params["data"]["id"] == "cifar10" else 200)
    assert params["numerics"] == {"precision": "float32", "deterministic": False, "compile": False}
    assert params["model"]["drop_rate"] == (0.3 if params["model"]["backbone"] == "wrn-40-2" else 0.0)
    assert len(params["seeds"]) == (5 if name in ("main-cifar100", "cifar10") else 1)


@pytest.mark.parametrize(
    ("name", "section", "key", "value"),
    [
        ("gradnorm-filter", "filter", "score", "gradnorm"),
        ("class-agnostic-svd", "filter", "svd", "class-agnostic"),
        ("candidate-id", "train_ood", "candidate_id", True),
        ("random-labels", "filter", "labels", "random"),
        ("resnet18", "model", "backbone", "resnet18"),
        ("resnet34", "model", "backbone", "resnet34"),
        ("mixing-ratio", "data", "pi", 0.05),
        ("unseen-300k", "data", "ood_wild_share", 0.99),
        ("unseen-300k", "data", "test_ood", FIVE_SETS),
        ("unseen-tin", "data", "test_ood", ["tin-crop", "tin-resize"]),
        ("near-cifar50", "data", "id", "cifar100-first50"),
        ("toy", "model", "backbone", "mlp"),
        ("toy", "train_id", "weight_decay", 0.4),
    ],
)
def test_what_its_table_is_about_is_set_and_nowhere_else_by_chance(
    name: str, section: str, key: str, value: object
) -> None:
    assert preset(name).params[section][key] == value
    assert preset("main-cifar100").params[section][key] != value


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"no preset is called main-cifar10 \(did you mean main-cifar100\?\)"):
        preset("main-cifar10")


# --- changing values in a file with comments


def test_only_the_lines_of_changed_keys_change() -> None:
    changed = edited(PARAMS_TEXT, {"seeds": [7, 8], "data.pi": 0.25, "train_id.weights": "net.pt"})
    different = [
        after for before, after in zip(PARAMS_TEXT.splitlines(), changed.splitlines(), strict=True) if before != after
    ]
    assert different == [
        "seeds: [7, 8]               # one run for each; the table shows mean ± std",
        "  pi: 0.25                  # share of OOD in the wild data, in (0, 1]; "
        "unknown: the sets of ood are wild data as they come",
        "  weights: net.pt           # a state dict (.safetensors or .pt) to start from; "
        "with epochs: 0, to use as it is",
    ]


@pytest.mark.parametrize("name", presets())
def test_setting_a_key_to_what_it_is_changes_nothing(name: str) -> None:
    ours = preset(name)
    assert edited(ours.text, {"data.pi": ours.params["data"]["pi"]}) == ours.text


# --- what it will cost


@pytest.mark.parametrize("name", presets())
def test_every_set_is_known_and_every_cost_is_positive(name: str) -> None:
    ours = preset(name)
    data = ours.params["data"]
    assert {data["id"], *data["ood"], *data["test_ood"]} <= set(SOURCES)
    assert estimated_gigabytes(ours.params) > 0
    assert estimated_images(ours.params) > 0


def test_work_is_counted_as_by_hand() -> None:
    """near-cifar100: 22,500 training images; the wild set is limited by its 25,000 ID images; SAL and WOODS."""
    train_id, train_ood = 22_500 * 100, 2 * (2 * 22_500 * 100)
    passes = 22_500 + 2_500 + round(25_000 / 0.9) + 3 * (10_000 + 10_000)
    assert estimated_images(preset("near-cifar100").params) == train_id + train_ood + passes


def test_work_grows_with_seeds() -> None:
    params = preset("resnet18").params
    assert estimated_images({**params, "seeds": [0, 1, 2]}) == pytest.approx(3 * estimated_images(params), rel=1e-6)


def test_a_wild_set_without_id_data_is_as_large_as_the_ood_data() -> None:
    params = preset("theory").params
    all_ood = {**params, "data": {**params["data"], "pi": 1.0}}
    mixed_wild, ood_wild = 0.7 * 5_640 / 0.1, 0.7 * 5_640  # the mixture is limited by 25,000 / 0.9
    expected = min(mixed_wild, 25_000 / 0.9) - ood_wild
    assert estimated_images(params) - estimated_images(all_ood) == pytest.approx(expected, abs=1)


def test_memory_is_counted_as_by_hand() -> None:
    expected = 0.5 + 12 * 2.2e6 / 1e9 + 4 * 2.4e6 * 256 / 1e9
    assert estimated_gigabytes({**preset("cifar10").params, "encoders": []}) == pytest.approx(expected)


def test_encoders_are_counted_by_their_views() -> None:
    params = preset("cifar10").params
    assert params["encoders"] == ["knn-plus", "csi"]
    expected = 0.5 + 12 * 2.2e6 / 1e9 + 4 * 2.4e6 * 1024 / 1e9  # 512 images in two views, or 128 in eight
    assert estimated_gigabytes(params) == pytest.approx(expected)
    params = {**params, "data": {**params["data"], "ood": ["svhn"]}}
    more = estimated_images(params) - estimated_images({**params, "encoders": []})
    of_tests = 2 * (10_000 + 26_032)
    assert more == 5 * (22_500 * (500 * 2 + 100 + 700 * 8 + 100 * 4) + of_tests)


def test_unknown_sets_and_networks_are_refused() -> None:
    params = preset("toy").params
    with pytest.raises(UnknownNameError, match="no network of a preset is called own"):
        estimated_gigabytes({**params, "model": {"backbone": "own"}})
    with pytest.raises(UnknownNameError, match="no data set is called own"):
        estimated_images({**params, "data": {**params["data"], "id": "own"}})


# --- on the command line


def test_the_list_fits_100_columns_and_names_every_preset() -> None:
    shown = salcli("presets")
    assert shown.exit_code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 100
    for name, one in presets().items():
        line = next(line for line in shown.stdout.splitlines() if line.startswith(f" {name} "))
        assert one.paper.split(",")[0].split(" (")[0] in line
    assert "estimated" in shown.stdout
    assert "salcli data fetch" in shown.stdout


def test_one_preset_is_printed_as_it_is_when_piped() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "salcli", "presets", "theory"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == preset("theory").text


def test_one_preset_is_coloured_in_a_terminal() -> None:
    console = Console(width=130, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(preset_syntax(preset("theory")))
    assert "\x1b[" in capture.get()


def test_an_unknown_preset_is_an_error_of_two() -> None:
    result = salcli("presets", "theorie")
    assert result.exit_code == 2
    assert "did you mean theory?" in result.stderr
