"""params.yaml: one place for defaults, and everything wrong with it said at once."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args

import pytest
from conftest import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from ruamel.yaml import YAML

from salcli import params as module
from salcli.data.catalogue import DATA_SETS, labeled_sets
from salcli.errors import ParamsError
from salcli.models.backbone_names import check_backbone_name
from salcli.params import ModelParams, Override, Params, load_params
from salcli.params_file import lookup, parse_assignment, read_yaml, with_overrides
from salcli.stages import evaluate, train_ood

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from salcli.artifacts.layout import Workspace

FILE = REPOSITORY / "params.yaml"
DEPTH = "a wide ResNet's depth must be 6n + 4 with n of at least 1, got 41; use wrn-40-2"
ONE_FOR_EACH = "must be auto, or a list with one"
FILTER_SCORES = (
    "'sal', 'gradnorm', 'msp', 'odin', 'mahalanobis', 'energy', 'knn', 'react', 'dice', 'ash', 'vim' or 'auto'"
)
BACKBONES = (
    "known: mlp, resnet18, resnet34, small-cnn, torchvision:resnet50, wrn-16-4, wrn-28-10, wrn-40-2, "
    "any other wrn-DEPTH-WIDTH, torchvision:NAME, timm:NAME, MODULE:NAME"
)
LABELED = ", ".join(sorted(labeled_sets()))
METHODS = (
    "'sal', 'oe', 'energy-oe', 'woods', 'scone', 'step', 'knn-plus', 'csi', 'sal-posthoc', 'msp', 'odin', "
    "'mahalanobis', 'energy', 'knn', 'react', 'dice', 'ash', 'gradnorm' or 'vim'"
)


def sections(section: type[BaseModel] = Params, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section with the dotted prefix of its keys."""
    yield prefix, section
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from sections(field.annotation, f"{prefix}{field.alias or name}.")


KEYS = [
    prefix + name
    for prefix, section in sections()
    for name, field in section.model_fields.items()
    if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
]


def complaints(overrides: dict[str, Any]) -> dict[str, str]:
    """The message for each key."""
    with pytest.raises(ParamsError) as caught:
        load_params(FILE, overrides)
    head, *lines = str(caught.value).splitlines()
    assert head == "params.yaml with its overrides is not valid"
    return {key: message.strip() for key, _, message in (line.strip().partition(" ") for line in lines)}


def test_no_default_stands_anywhere_but_in_params_yaml() -> None:
    for prefix, section in sections():
        for name, field in section.model_fields.items():
            assert field.is_required(), prefix + name


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_needed_and_named_when_it_is_missing(key: str, tmp_path: Path) -> None:
    content = read_yaml(FILE)
    *parents, last = key.split(".")
    del (lookup(content, ".".join(parents)) if parents else content)[last]
    path = tmp_path / "params.yaml"
    with path.open("w") as file:
        YAML().dump(content, file)
    with pytest.raises(ParamsError, match=rf"^params.yaml is not valid\n  {key}  is missing$"):
        load_params(path)


def test_the_files_values_arrive_unchanged() -> None:
    params, changed = load_params(FILE)
    arrived, in_file = params.model_dump(mode="json", by_alias=True), read_yaml(FILE)
    assert in_file["evaluate"].pop("methods") == "all"  # spelt out when it arrives
    assert "sal" in arrived["evaluate"].pop("methods")
    assert arrived == in_file
    assert changed == []


def test_params_cannot_be_changed_afterwards() -> None:
    params, _ = load_params(FILE)
    with pytest.raises(ValueError, match="frozen"):
        params.filter.threshold_quantile = 0.5  # type: ignore[misc]


def test_the_known_backbones_are_those_that_can_be_built() -> None:
    for name in get_args(ModelParams.model_fields["backbone"].annotation):
        assert check_backbone_name(name) == name


ONE_EPOCH = {"train_ood.epochs": 1, "train_rival.step.epochs": 1, "train_rival.step.structure.steps": 5}


def test_the_known_methods_are_those_that_evaluate_can_score(workspace: Workspace) -> None:
    rivals = list(get_args(module.WildRival))
    params, _ = load_params(workspace.root / "params.yaml", {"rivals": rivals, **ONE_EPOCH})
    for rival in rivals:
        train_ood.run(workspace, params, "digits-8-9", 0, method=rival)
    assert set(params.evaluate.methods) == set(get_args(module.Method)) - set(get_args(module.Encoder))
    assert list(evaluate.run(workspace, params, "digits-8-9", 0).metrics) == list(params.evaluate.methods)


def test_all_methods_are_those_that_there_is_a_network_for() -> None:
    of_classifier = set(get_args(module.PosthocMethod))
    assert set(load_params(FILE, {"rivals": []})[0].evaluate.methods) == {"sal", *of_classifier}
    assert set(load_params(FILE, {"rivals": ["scone"]})[0].evaluate.methods) == {"sal", "scone", *of_classifier}
    both = {"rivals": ["oe"], "encoders": ["csi"]}
    assert set(load_params(FILE, both)[0].evaluate.methods) == {"sal", "oe", "csi", *of_classifier}


def test_a_method_that_nothing_is_trained_for_is_named() -> None:
    found = complaints({"rivals": ["oe"], "evaluate.methods": ["sal", "woods", "oe", "scone"]})
    message = "methods names woods, scone, which needs training with the wild data; name it in rivals, too"
    assert found == {"evaluate": message}
    message = "methods names csi, which needs training from scratch; name it in encoders, too"
    assert complaints({"encoders": ["knn-plus"], "evaluate.methods": ["csi", "knn-plus"]}) == {"evaluate": message}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("filter.threshold_quantile", 95, "must be less than 1, got 95 (did you mean 0.95?)"),
        ("filter.threshold_quantile", 0, "must be greater than 0, got 0"),
        ("filter.threshold_quantile", "high", "must be a valid number, got 'high'"),
        ("filter.threshold_quantile", True, "must be a valid number, got True"),
        ("filter.threshold_quantile", float("nan"), "must be less than 1, got nan"),
        ("filter.calibraton", "train", "no such key (did you mean calibration?)"),
        ("fliter", {}, "no such key (did you mean filter?)"),
        ("threshold_quantile", 0.9, "no such key (did you mean filter.threshold_quantile?)"),
        ("zzz", 1, "no such key"),
        ("train_rival.energy_oe", {}, "no such key (did you mean energy-oe?)"),
        ("train_encoder.knnplus", {}, "no such key (did you mean knn-plus?)"),
        ("filter.score", "sall", f"must be {FILTER_SCORES}, got 'sall' (did you mean sal?)"),
        ("filter.n_vectors", 0, "must be greater than or equal to 1, got 0"),
        ("filter.n_vectors", 2.0, "must be a valid integer, got 2.0"),
        ("filter", 3, "must be a section of keys and values, got 3"),
        ("data.pi", 10, "must be less than or equal to 1, got 10 (did you mean 0.1?)"),
        ("data.pi", 0, "must be greater than 0, got 0"),
        ("data.id", "digits-07", f"no ID set is called digits-07 (did you mean digits-0-7?); known: {LABELED}"),
        ("data.id", "digits-8-9", f"no ID set is called digits-8-9 (did you mean digits-0-7?); known: {LABELED}"),
        ("data.ood", ["svhn", "digits-0-7"], "must not name the ID set, got digits-0-7"),
        ("data.test_ood", ["digits-0-7"], "must not name the ID set, got digits-0-7"),
        ("data.ood", [], "must name at least one item, got []"),
        ("data.ood", "digits-8-9", "must be a list, got 'digits-8-9'"),
        ("data.ood", ["digits-8-9", "digits-8-9"], "must name each item once, got digits-8-9 more than once"),
        ("model.backbone", "small-cn", f"no backbone is called small-cn (did you mean small-cnn?); {BACKBONES}"),
        ("model.backbone", "wrn-41-2", DEPTH),
        ("model.std", [0.2, 0.0], f"{ONE_FOR_EACH} positive number for each channel, got [0.2, 0.0]"),
        ("model.mean", [], f"{ONE_FOR_EACH} number for each channel, got []"),
        ("model.mean", 0.5, f"{ONE_FOR_EACH} number for each channel, got 0.5"),
        ("data.id_shares.test", "oficial", "must be official, or a share between 0 and 1, got 'oficial'"),
        ("data.id_shares.test", 0, "must be official, or a share between 0 and 1, got 0"),
        ("train_id.batch_size", 1, "must be greater than or equal to 2, got 1"),
        ("train_id.lr", float("inf"), "must be a finite number, got inf"),
        ("train_id.momentum", 1, "must be less than 1, got 1"),
        ("evaluate.react_percentile", 0.9, "must be greater than or equal to 1, got 0.9"),
        ("evaluate.ash_percentile", 100, "must be less than 100, got 100"),
        ("evaluate.odin_temperature", 0, "must be greater than 0, got 0"),
        ("evaluate.odin_epsilon", -0.1, "must be greater than or equal to 0, got -0.1"),
        ("evaluate.vim_dim", 0, "must be auto or an integer of at least 1, got 0"),
        ("evaluate.vim_dim", "half", "must be auto or an integer of at least 1, got 'half'"),
        ("evaluate.vim_dim", True, "must be auto or an integer of at least 1, got True"),
        ("train_ood.candidate_id", 1, "must be a valid boolean, got 1"),
        ("device", "cud", "no device is called cud (did you mean cuda?); known: auto, cpu, cuda, cuda:0, mps"),
        ("device", "cuda:9999", "no device is called cuda:9999 (did you mean cuda:0?); known: auto, cpu, cuda, cuda:0, mps"),  # noqa: E501
    ],
)  # fmt: skip
def test_a_bad_value_is_named_with_what_is_right(key: str, value: object, message: str) -> None:
    assert complaints({key: value}) == {key: message}


def test_a_bad_item_is_named_by_its_place_in_the_list() -> None:
    assert complaints({"seeds": [0, -1], "evaluate.methods": ["odni", "sal"]}) == {
        "seeds.1": "must be greater than or equal to 0, got -1",
        "evaluate.methods.0": f"must be {METHODS}, got 'odni' (did you mean odin?)",
    }


def test_shares_that_do_not_add_up_are_named_together() -> None:
    assert complaints({"data.id_shares.train": 0.5}) == {"data.id_shares": "must add up to 1, got 1.18"}


def test_all_mistakes_are_reported_together() -> None:
    mistakes = {
        "data.ood": ["digits-89"],
        "filter.threshold_quantile": 95,
        "filter.calibraton": "x",
        "train_id.epochs": "many",
        "model.backbone": "resnet",
        "device": "gpu",
    }
    assert complaints(mistakes) == {
        "data.ood.0": "no OOD set is called digits-89 (did you mean digits-8-9?); known: "
        + ", ".join(sorted(DATA_SETS)),
        "filter.threshold_quantile": "must be less than 1, got 95 (did you mean 0.95?)",
        "filter.calibraton": "no such key (did you mean calibration?)",
        "train_id.epochs": "must be a valid integer, got 'many'",
        "model.backbone": f"no backbone is called resnet (did you mean resnet34?); {BACKBONES}",
        "device": "no device is called gpu (did you mean cpu?); known: auto, cpu, cuda, cuda:0, mps",
    }


def test_dropout_that_a_network_does_not_have_is_refused() -> None:
    assert complaints({"model.backbone": "resnet18", "model.drop_rate": 0.3}) == {
        "model": "drop_rate must be 0 for resnet18: only a wide ResNet (wrn-40-2) has dropout"
    }
    load_params(FILE, {"model.backbone": "wrn-40-2", "model.drop_rate": 0.3})


@given(st.sampled_from(KEYS), st.data())
def test_a_misspelt_key_is_reported_with_its_right_name(key: str, data: st.DataObject) -> None:
    """One letter dropped, doubled or swapped with its neighbour."""
    *parents, last = key.split(".")
    place = data.draw(st.integers(0, len(last) - 2))
    misspelt = data.draw(
        st.sampled_from(
            [
                last[:place] + last[place + 1 :],
                last[:place] + last[place] + last[place:],
                last[:place] + last[place + 1] + last[place] + last[place + 2 :],
            ]
        )
    )
    siblings = {other.split(".")[-1] for other in KEYS if other.split(".")[:-1] == parents}
    if misspelt in siblings or len(last) < 3:
        return
    wrong = ".".join([*parents, misspelt])
    assert complaints({wrong: 1})[wrong] == f"no such key (did you mean {last}?)"


@given(st.floats() | st.integers())
def test_pi_is_taken_just_when_it_lies_between_0_and_1(pi: float) -> None:
    if 0 < pi <= 1:
        assert load_params(FILE, {"data.pi": pi})[0].data.pi == pi
    else:
        assert list(complaints({"data.pi": pi})) == ["data.pi"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*KEYS, "data", "filter", "data.id_shares", "x", "data.x"]), VALUES, max_size=3))
def test_any_value_at_any_key_is_taken_or_refused_with_a_message(overrides: dict[str, Any]) -> None:
    with suppress(ParamsError):
        assert isinstance(load_params(FILE, overrides)[0], Params)


# --- the file itself


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"params.yaml is empty"),
        (b"# nothing but a comment\n", r"params.yaml is empty"),
        (b"[1, 2]", r"params.yaml must hold keys and values, got \[1, 2\]"),
        (b"just text", r"params.yaml must hold keys and values, got 'just text'"),
        (b"a: 1\nfilter: [1, 2\nb: 3\n", r"params.yaml is not valid YAML: expected ',' or '\]', .* \(line \d\)"),
        (b"seeds: [0]\ndevice: cpu\nseeds: [1]\n", r'not valid YAML: found duplicate key "seeds" .* \(line 3\)'),
        (b"a: 1\n---\nb: 2\n", r"params.yaml is not valid YAML: but found another document"),
        (b"a: !!python/object/apply:os.system [ls]", r"not valid YAML: could not determine a constructor for the tag"),
        (b"a: 2026-13-45", r"params.yaml is not valid YAML: month must be in 1..12"),
        (b"a: !!bool perhaps", r"params.yaml is not valid YAML: 'perhaps'"),
        (b"[" * 5000, r"params.yaml is not valid YAML: maximum recursion depth exceeded"),
        (b"a: \x00", r"not valid YAML: unacceptable character #x0000"),
        (b"\x89HDF\r\n\x1a\n\x00\xff", r"params.yaml cannot be read: 'utf-8' codec can't decode byte 0x89"),
        (b"1: 2\n", r"no such key|Keys should be strings"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_params_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    with pytest.raises(ParamsError, match=message):
        load_params(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"params.yaml does not exist; start salcli in a folder with a params.yaml"):
        load_params(tmp_path / "params.yaml")
    with pytest.raises(ParamsError, match=r"cannot be read: .*Is a directory"):
        load_params(tmp_path)


ODD_PIECES = [*" \n\t:-[]{}&*!|>'\"%@`#,?<=.~a0_\x00\x07é", "!!", "---", "<<: ", "!!float ", "!!bool ", "2026-13-45"]


@given(st.lists(st.sampled_from(ODD_PIECES), max_size=20).map("".join), st.floats(0, 1), st.booleans())
def test_whatever_stands_in_the_file_it_is_taken_or_refused(
    tmp_path_factory: pytest.TempPathFactory, odd: str, place: float, alone: bool
) -> None:
    """Odd text alone, or in the middle of the real file."""
    text = FILE.read_text()
    cut = int(place * len(text))
    path = tmp_path_factory.getbasetemp() / "odd.yaml"
    path.write_text(odd if alone else text[:cut] + odd + text[cut:])
    with suppress(ParamsError):
        assert isinstance(load_params(path)[0], Params)


def test_numbers_are_read_as_dvc_reads_them(tmp_path: Path) -> None:
    """YAML 1.2: 1e-3 is a number, `no` and 010 are not false and 8."""
    path = tmp_path / "params.yaml"
    path.write_text("a: 1e-3\nb: no\nc: 010\n")
    assert read_yaml(path) == {"a": 0.001, "b": "no", "c": 10}


# --- --set KEY=VALUE


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("filter.threshold_quantile=0.9", "filter.threshold_quantile", 0.9),
        ("train_id.lr=1e-3", "train_id.lr", 0.001),
        ("train_ood.candidate_id=true", "train_ood.candidate_id", True),
        ("seeds=[3, 4]", "seeds", [3, 4]),
        ("filter.score=sal", "filter.score", "sal"),
        ("device='cpu'", "device", "cpu"),
        ("a=b=c", "a", "b=c"),
        (" a = 1 ", "a", 1),
        ("data.id_shares={train: 0.4, test: 0.6}", "data.id_shares", {"train": 0.4, "test": 0.6}),
        ("a=", "a", None),
    ],
)
def test_an_assignment_has_a_dotted_key_and_a_yaml_value(text: str, key: str, value: object) -> None:
    assert parse_assignment(text) == (key, value)


@pytest.mark.parametrize("text", ["", "foo", "=3", " =3", ".=3", "a.=3", ".a=3", "a..b=3"])
def test_an_assignment_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(ParamsError, match=r"^--set .*: must be KEY=VALUE, for example --set filter\.thresh"):
        parse_assignment(text)


@pytest.mark.parametrize("value", ["[", "{", "a: b: c", "*x", "!!bool x", "2026-13-45", "'"])
def test_an_assignment_with_a_broken_value_is_refused(value: str) -> None:
    with pytest.raises(ParamsError, match=r"^--set filter.score=.*: the value is not valid YAML: "):
        parse_assignment(f"filter.score={value}")


@given(st.sampled_from(KEYS), st.booleans() | st.integers() | st.floats(allow_nan=False) | st.lists(st.integers()))
def test_what_is_set_is_found_again_and_nothing_else_changes(key: str, value: object) -> None:
    content = read_yaml(FILE)
    merged = with_overrides(content, {key: value})
    assert lookup(merged, key) == value
    assert all(lookup(merged, other) == lookup(content, other) for other in KEYS if other != key)
    assert content == read_yaml(FILE)


def test_overrides_that_change_something_are_told_apart_from_those_that_do_not() -> None:
    _, changed = load_params(
        FILE, {"filter.threshold_quantile": 0.9, "filter.n_vectors": 1, "train_ood.loss_weight": 10.0}
    )
    assert changed == [Override("filter.threshold_quantile", 0.9, 0.95)]


def test_every_ood_set_of_the_catalogue_can_be_named() -> None:
    names = [name for name in DATA_SETS if name != "digits-0-7"]
    assert load_params(FILE, {"data.ood": names})[0].data.ood == tuple(names)
