"""params.yaml: the only home of defaults; everything wrong with it is reported at once, a line for each key."""

# ruff: noqa: E501  (messages are compared as they are)
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import process
from helpers.quick import REPOSITORY
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from ruamel.yaml import YAML

from salcli.data.catalogue import DATA_SETS, labeled_sets
from salcli.errors import ParamsError
from salcli.methods.base import IdTrained, InputScore, PostHoc, Trained, WildTrained, built_in
from salcli.params.reading import lookup, parse_assignment, read_yaml, with_overrides
from salcli.params.schema import NOT_VARIANTS, MethodsParams, Override, Params, load_params, separators, validated

FILE = REPOSITORY / "params.yaml"
CONTENT = read_yaml(FILE)
LABELED = ", ".join(sorted(labeled_sets()))
DEVICES = "known: auto, cpu, cuda, cuda:0, mps"
BACKBONES = (
    "known: mlp, resnet18, resnet34, small-cnn, torchvision:resnet50, wrn-16-4, wrn-28-10, wrn-40-2, "
    "any other wrn-DEPTH-WIDTH, torchvision:NAME, timm:NAME, MODULE:NAME"
)
ONE_FOR_EACH = "must be auto, or a list with one"
SHARES = "must be shares above 0 and at most 1, or [unknown], got"


def sections(section: type[BaseModel] = Params, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section with the dotted prefix of its keys."""
    yield prefix, section
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from sections(field.annotation, f"{prefix}{field.alias or name}.")


KEYS = [
    prefix + (field.alias or name)
    for prefix, section in sections()
    for name, field in section.model_fields.items()
    if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
    if field.alias != "MODULE:NAME"  # where custom methods are kept; no key of the file
]


def complaints(overrides: dict[str, Any]) -> dict[str, str]:
    """The message for each key, one line each."""
    with pytest.raises(ParamsError) as caught:
        validated(with_overrides(CONTENT, overrides), "params.yaml", REPOSITORY)
    head, *lines = str(caught.value).splitlines()
    assert head == "params.yaml is not valid"
    assert all(line.startswith("  ") and line[2] != " " for line in lines), lines
    return {key: message.strip() for key, _, message in (line.strip().partition(" ") for line in lines)}


def loaded(overrides: dict[str, Any]) -> Params:
    return validated(with_overrides(CONTENT, overrides), "params.yaml", REPOSITORY)


# --- keys


def test_no_default_stands_anywhere_but_in_params_yaml() -> None:
    assert len(KEYS) > 100
    for prefix, section in sections():
        for name, field in section.model_fields.items():
            assert field.is_required() or field.alias == "MODULE:NAME", prefix + name


def test_the_files_values_arrive_unchanged() -> None:
    params, changed = load_params(FILE)
    arrived, in_file = json.loads(json.dumps(params.model_dump(by_alias=True))), read_yaml(FILE)
    assert in_file["evaluate"].pop("methods") == "all"  # spelt out when it arrives
    assert "sal" in arrived["evaluate"].pop("methods")
    assert arrived["methods"].pop("MODULE:NAME") == {}
    assert complaints({"methods.custom": {}})["methods.custom"].startswith("no such key")  # its name in the code
    assert arrived == in_file
    assert changed == []
    with pytest.raises(ValueError, match="frozen"):
        params.filter.threshold_quantile = 0.5  # type: ignore[misc]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_needed_and_named_when_it_is_missing(key: str) -> None:
    content = with_overrides(CONTENT, {})
    *parents, last = key.split(".")
    del (lookup(content, ".".join(parents)) if parents else content)[last]
    with pytest.raises(ParamsError, match=rf"^params.yaml is not valid\n  {key}  is missing$"):
        validated(content, "params.yaml")


@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_a_wrong_type_is_named_by_its_key(key: str) -> None:
    for wrong in ({"a": [1]}, [[None]], 3 + 4j):
        if key in ("variant", "data.custom") and isinstance(wrong, dict):
            continue  # whose keys are names: they have their own tests
        found = complaints({key: wrong})
        assert [one for one in found if one == key or one.startswith(f"{key}.")], found


@settings(max_examples=60)
@given(st.sampled_from(KEYS), st.data())
def test_a_misspelt_key_is_reported_with_its_right_name(key: str, data: st.DataObject) -> None:
    """One letter dropped, doubled or swapped with its neighbour."""
    *parents, last = key.split(".")
    i = data.draw(st.integers(0, len(last) - 2)) if len(last) > 2 else 0
    misspelt = data.draw(
        st.sampled_from([last[:i] + last[i + 1 :], last[: i + 1] + last[i:], last[:i] + last[i : i + 2][::-1] + last[i + 2 :]])
    )  # fmt: skip
    siblings = {other.split(".")[-1] for other in KEYS if other.split(".")[:-1] == parents}
    if misspelt in siblings or len(last) < 3:
        return
    wrong = ".".join([*parents, misspelt])
    assert complaints({wrong: 1})[wrong] == f"no such key (did you mean {last}?)"


# --- values


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("filter.threshold_quantile", 95, "must be less than 1, got 95 (did you mean 0.95?)"),
        ("filter.threshold_quantile", 0, "must be greater than 0, got 0"),
        ("filter.threshold_quantile", "high", "must be a valid number, got 'high'"),
        ("filter.threshold_quantile", True, "must be a valid number, got True"),
        ("filter.threshold_quantile", float("nan"), "must be less than 1, got nan"),
        ("filter.calibraton", "train", "no such key (did you mean calibration?)"),
        ("filter.calibration", "hold-out", "must be 'holdout', 'train' or 'id-svd', got 'hold-out' (did you mean holdout?)"),
        ("fliter", {}, "no such key (did you mean filter?)"),
        ("threshold_quantile", 0.9, "no such key (did you mean filter.threshold_quantile?)"),
        ("zzz", 1, "no such key"),
        ("methods.energy_oe", {}, "no such key (did you mean energy-oe?)"),
        ("methods.knnplus", {}, "no such key (did you mean knn-plus?)"),
        ("methods.knn-plus.head.epoch", 1, "no such key (did you mean epochs?)"),
        ("filter.n_vectors", 0, "must be greater than or equal to 1, got 0"),
        ("filter.n_vectors", 2.0, "must be a valid integer, got 2.0"),
        ("filter", 3, "must be a section of keys and values, got 3"),
        ("data.pi", 0.1, "must be a list, got 0.1 (did you mean [0.1]?)"),
        ("data.pi", "unknown", "must be a list, got 'unknown' (did you mean [unknown]?)"),
        ("data.pi", [0.1, 10], f"{SHARES} 10"),
        ("data.pi", [0], f"{SHARES} 0"),
        ("data.pi", [True], f"{SHARES} True"),
        ("data.pi", [float("nan")], f"{SHARES} nan"),
        ("data.pi", [1.0], "write 1 instead of 1.0"),
        ("data.pi", [0.1, 0.1], "must name each item once, got 0.1 more than once"),
        ("data.pi", [], "must name at least one item, got []"),
        ("data.pi", [0.1, "unknown"], "must be either shares or [unknown]"),
        ("data.id", "digits-07", f"no ID set is called digits-07 (did you mean digits-0-7?); known: {LABELED}"),
        ("data.id", "digits-8-9", f"no ID set is called digits-8-9 (did you mean digits-0-7?); known: {LABELED}"),
        ("data.ood", ["svhn", "digits-0-7"], "must not name the ID set, got digits-0-7"),
        ("data.test_ood", ["digits-0-7"], "must not name the ID set, got digits-0-7"),
        ("data.ood", [], "must name at least one item, got []"),
        ("data.ood", "digits-8-9", "must be a list, got 'digits-8-9'"),
        ("data.ood", ["digits-8-9", "digits-8-9"], "must name each item once, got digits-8-9 more than once"),
        ("data.custom", {"Mine": "x"}, "a set's name must be of a-z, 0-9, - and _, and start with a letter, got 'Mine'"),
        ("data.custom", {"svhn": "x"}, "svhn is taken; choose another name"),
        ("model.backbone", "small-cn", f"no backbone is called small-cn (did you mean small-cnn?); {BACKBONES}"),
        ("model.backbone", "wrn-41-2", "a wide ResNet's depth must be 6n + 4 with n of at least 1, got 41; use wrn-40-2"),
        ("model.std", [0.2, 0.0], f"{ONE_FOR_EACH} positive number for each channel, got [0.2, 0.0]"),
        ("model.mean", [], f"{ONE_FOR_EACH} number for each channel, got []"),
        ("model.mean", 0.5, f"{ONE_FOR_EACH} number for each channel, got 0.5"),
        ("data.id_shares.test", "oficial", "must be official, or a share between 0 and 1, got 'oficial'"),
        ("data.id_shares.test", 0, "must be official, or a share between 0 and 1, got 0"),
        ("train_id.batch_size", 1, "must be greater than or equal to 2, got 1"),
        ("train_id.lr", float("inf"), "must be a finite number, got inf"),
        ("train_id.momentum", 1, "must be less than 1, got 1"),
        ("methods.react.percentile", 0.9, "must be greater than or equal to 1, got 0.9"),
        ("methods.ash.percentile", 100, "must be less than 100, got 100"),
        ("methods.odin.temperature", 0, "must be greater than 0, got 0"),
        ("methods.odin.epsilon", -0.1, "must be greater than or equal to 0, got -0.1"),
        ("train_ood.candidate_id", 1, "must be a valid boolean, got 1"),
        ("launcher", "", "String should have at least 1 character, got ''"),
        ("device", "cud", f"no device is called cud (did you mean cuda?); {DEVICES}"),
        ("device", "cuda:9999", f"no device is called cuda:9999 (did you mean cuda:0?); {DEVICES}"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_with_what_is_right(key: str, value: object, message: str) -> None:
    assert complaints({key: value}) == {key: message}


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ({"seeds": [0, -1]}, "seeds.1", "must be greater than or equal to 0, got -1"),
        ({"data.id_shares.train": 0.5}, "data.id_shares", "must add up to 1, got 1.18"),
        ({"data.pi": ["unknown"]}, "data", "pi is unknown: the wild data come as they are, so id_shares.wild must be 0"),
        ({"data.id_shares.wild": 0, "data.id_shares.train": 0.72}, "data", "id_shares.wild is 0, which is for wild data that come as they are: set pi to [unknown]"),
        ({"model.backbone": "resnet18", "model.drop_rate": 0.3}, "model", "drop_rate must be 0 for resnet18: only a wide ResNet (wrn-40-2) has dropout"),
        ({"model.head": "fc"}, "model", "head must be null for small-cnn: only MODULE:NAME and timm:NAME have one to name"),
        ({"train_id.epochs": 0}, "train_id", "epochs is 0, so weights must name a file; or train for at least one epoch"),
        ({"filter.score": "knn", "filter.calibration": "id-svd"}, "filter", "calibration id-svd is about singular vectors, which only score sal has, not knn; use holdout or train"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_each_other_are_named_by_their_section(
    overrides: dict[str, Any], key: str, message: str
) -> None:
    assert complaints(overrides) == {key: message}


def test_all_mistakes_are_reported_together() -> None:
    mistakes = {
        "data.ood": ["digits-89"],
        "filter.threshold_quantile": 95,
        "filter.calibraton": "x",
        "train_id.epochs": "many",
        "methods.knn.k": 0,
        "device": "gpu",
    }
    assert complaints(mistakes) == {
        "device": f"no device is called gpu (did you mean cpu?); {DEVICES}",
        "data.ood.0": f"no OOD set is called digits-89 (did you mean digits-8-9?); known: {', '.join(sorted(DATA_SETS))}",
        "train_id.epochs": "must be a valid integer, got 'many'",
        "filter.threshold_quantile": "must be less than 1, got 95 (did you mean 0.95?)",
        "filter.calibraton": "no such key (did you mean calibration?)",
        "methods.knn.k": "must be greater than or equal to 1, got 0",
    }  # fmt: skip


@given(st.floats() | st.integers(-2, 3))
def test_pi_is_taken_just_when_it_is_a_share_written_as_in_paths(pi: float) -> None:
    if 0 < pi <= 1 and str(pi) == f"{pi:g}":
        assert loaded({"data.pi": [pi]}).data.pi == (pi,)
    else:
        assert list(complaints({"data.pi": [pi]})) == ["data.pi"]


def test_every_ood_set_of_the_catalogue_can_be_named() -> None:
    names = [name for name in DATA_SETS if name != "digits-0-7"]
    assert loaded({"data.ood": names}).data.ood == tuple(names)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=5,
)
PLACES = [*KEYS, "data", "filter", "data.id_shares", "variant.sal", "variant.sal.filter", "methods", "x", "data.x"]


@given(st.dictionaries(st.sampled_from(PLACES), VALUES, max_size=3))
def test_any_value_at_any_key_is_taken_or_refused_with_a_message(overrides: dict[str, Any]) -> None:
    with suppress(ParamsError):
        assert isinstance(loaded(overrides), Params)


# --- variants

TWO = {"variants": ["sal", "sal-2"], "variant.sal-2": {"filter": {"n_vectors": 2}, "train_ood": {"loss_weight": 3}}}


def test_a_variant_has_its_overrides_and_the_rest_of_the_file() -> None:
    params = loaded(TWO)
    plain, other = params.for_variant("sal"), params.for_variant("sal-2")
    assert plain == params
    assert (other.filter.n_vectors, other.train_ood.loss_weight) == (2, 3)
    assert other.filter == plain.filter.model_copy(update={"n_vectors": 2})
    assert params.method("sal-2").params.loss_weight == 3
    assert [one.variant for one in params.experiments()][:2] == ["sal", "sal-2"]
    assert {"sal", "sal-2"} <= {*params.evaluate.methods}


@pytest.mark.parametrize(
    ("variant", "key", "message"),
    [
        ({"filter": {"n_vector": 2}}, "filter.n_vector", "no such key (did you mean n_vectors?)"),
        ({"filter": {"threshold_quantile": 95}}, "filter.threshold_quantile", "must be less than 1, got 95 (did you mean 0.95?)"),
        ({"filter": {"score": "gradnrom"}}, "filter.score", f"no score is called gradnrom (did you mean gradnorm?); known: {', '.join(sorted([*separators(), 'auto']))}"),
        ({"filter": {"score": "auto", "calibration": "train"}}, "filter", "score auto needs calibration holdout: on the data that scores are fitted to, the one that overfits most would win"),
        ({"train_ood": {"augment": "flip"}}, "train_ood.augment", "must be 'none' or 'flip-crop', got 'flip' (did you mean flip-crop?)"),
        ({"train_od": {}}, "", "may override filter and train_ood, got train_od"),
        ({"filter": 3}, "filter", "must be a valid dictionary, got 3"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_variant_is_named_with_the_variant(variant: dict[str, Any], key: str, message: str) -> None:
    """Also where the variant is not used."""
    for variants in (["sal"], ["sal", "sal-2"]):
        found = complaints({"variants": variants, "variant.sal-2": variant})
        assert found == {f"variant.sal-2.{key}".rstrip("."): message}


def test_a_variant_that_is_not_defined_is_named_with_the_nearest() -> None:
    found = complaints({**TWO, "variants": ["sal", "sal-3"]})
    assert found["variants"].startswith("names sal-3, which variant does not define (did you mean sal")


@pytest.mark.parametrize("name", [*sorted(NOT_VARIANTS), "woods", "knn", "Sal", "2-sal", "sal/2", "a b", ""])
def test_a_name_that_is_taken_or_cannot_be_a_folder_is_no_variant(name: str) -> None:
    content = {**CONTENT, "variants": [name], "variant": {**CONTENT["variant"], name: {}}}
    with pytest.raises(ParamsError, match=r"\n  variants  .*cannot be a variant's name; use a-z, 0-9, -, _ and \."):
        validated(content, "params.yaml")


# --- methods


def test_the_sections_of_methods_are_those_of_the_methods_own_params() -> None:
    with_params = {name: found for name, found in built_in().items() if found.has_params()}
    assert CONTENT["methods"].keys() == with_params.keys()
    fields = {field.alias: field.annotation for field in MethodsParams.model_fields.values()}
    assert {name: found.Params for name, found in with_params.items()}.items() <= fields.items()
    params = load_params(FILE)[0]
    for name, found in built_in().items():
        made = params.method(name)
        assert isinstance(made, found)
        if name in with_params and name != "sal-posthoc":
            assert made.params == found.Params.model_validate(CONTENT["methods"][name])


def test_all_methods_are_those_that_there_is_a_network_for() -> None:
    of_classifier = {*built_in(PostHoc), *built_in(InputScore)}
    assert {*loaded({"rivals": []}).evaluate.methods} == {"sal", *of_classifier}
    assert {*loaded({"rivals": ["scone"]}).evaluate.methods} == {"sal", "scone", *of_classifier}
    both = {"rivals": ["oe"], "encoders": ["csi"]}
    assert {*loaded(both).evaluate.methods} == {"sal", "oe", "csi", *of_classifier}
    assert {*built_in()} == {*of_classifier, *built_in(Trained)}


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ({"evaluate.methods": ["sal", "woods"], "rivals": []}, "evaluate.methods", "names woods, which has to be trained; name it in rivals, too"),
        ({"evaluate.methods": ["csi"]}, "evaluate.methods", "names csi, which has to be trained; name it in encoders, too"),
        ({"evaluate.methods": ["odni"]}, "evaluate.methods", "no method is called odni (did you mean odin?); known: "),
        ({"evaluate.methods": []}, "evaluate.methods", "must name at least one item, got []"),
        ({"evaluate.methods": "some"}, "evaluate.methods", "must be a list, got 'some'"),
        ({"rivals": ["wods"]}, "rivals.0", f"no method is called wods (did you mean woods?); known: {', '.join(sorted(built_in(WildTrained)))}"),
        ({"rivals": ["knn"]}, "rivals.0", "no method is called knn"),
        ({"rivals": ["oe", "oe"]}, "rivals", "must name each item once, got oe more than once"),
        ({"encoders": ["oe"]}, "encoders.0", f"no method is called oe (did you mean {{}}); known: {', '.join(sorted(built_in(IdTrained)))}"),
        ({"filter.score": "sall"}, "filter", "no score is called sall (did you mean sal?); known: ash, auto, "),
        ({"filter.score": "sal-posthoc"}, "filter", "no score is called sal-posthoc"),  # needs the wild data itself
    ],
)  # fmt: skip
def test_a_method_that_cannot_be_used_there_is_named(overrides: dict[str, Any], key: str, message: str) -> None:
    found = complaints(overrides)
    assert list(found) == [key]
    assert found[key].startswith(message.partition(" (did you mean {}")[0])


CUSTOM = """
from salcli.methods.base import Count, PostHoc, Section, Share

class Mine(PostHoc):
    label = "My score"
    class Params(Section):
        k: Count
        share: Share = 0.5
    def score(self, x):
        return x.feature.sum(1)

class Plain(PostHoc):
    def score(self, x):
        return x.logits.sum(1)

class NotOne:
    pass
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose custom code is in a folder of its own."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_scores.py").write_text(CUSTOM)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_scores", None)


def custom(project: Path, methods: dict[str, Any], **overrides: Any) -> Params:
    changes = {"model.code": "code", "evaluate.methods": ["my_scores:Mine", "my_scores:Plain"], "rivals": []}
    content = with_overrides(CONTENT, {**changes, **overrides})
    return validated({**content, "methods": {**content["methods"], **methods}}, "params.yaml", project)


def test_a_custom_method_is_imported_from_model_code_with_its_own_params(project: Path) -> None:
    params = custom(project, {"my_scores:Mine": {"k": 3}})
    mine, plain = params.method("my_scores:Mine"), params.method("my_scores:Plain")
    assert (mine.label, mine.params.k, mine.params.share) == ("My score", 3, 0.5)
    assert (plain.label, plain.name) == ("Plain", "my_scores:Plain")
    assert "my_scores:Mine" not in custom(project, {"my_scores:Mine": {"k": 3}}, **{"evaluate.methods": "all"}).evaluate.methods  # fmt: skip


@pytest.mark.parametrize(
    ("methods", "overrides", "line"),
    [
        ({"my_scores:Mine": {"k": 0}}, {}, "methods.my_scores:Mine.k  must be greater than or equal to 1, got 0"),
        ({"my_scores:Mine": {"k": 1, "shar": 1}}, {}, "methods.my_scores:Mine.shar  no such key (did you mean share?)"),
        ({"my_scores:Mine": {}}, {}, "methods.my_scores:Mine.k  is missing"),
        ({"my_scores:Mine": 3}, {}, "methods.my_scores:Mine  must be a section of keys and values, got 3"),
        ({}, {"evaluate.methods": ["my_scores:Nine"]}, "evaluate.methods  the custom method my_scores:Nine: my_scores has no Nine"),
        ({}, {"evaluate.methods": ["my_scors:Mine"]}, "evaluate.methods  the custom method my_scors:Mine"),
        ({}, {"evaluate.methods": ["my_scores:NotOne"]}, "evaluate.methods  my_scores:NotOne is not a class derived from"),
        ({}, {"rivals": ["my_scores:Plain"]}, "rivals.0  my_scores:Plain is not a class derived from salcli.methods.base.WildTrained"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_custom_method_is_one_line(
    project: Path, methods: dict[str, Any], overrides: dict[str, Any], line: str
) -> None:
    with pytest.raises(ParamsError) as caught:
        custom(project, methods, **overrides)
    head, *lines = str(caught.value).splitlines()
    assert head == "params.yaml is not valid"
    assert len(lines) == 1
    assert line in lines[0]


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
        (b"[" * 100_000, r"params.yaml is not valid YAML: maximum recursion depth exceeded"),
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


@settings(max_examples=30)  # the file takes a while to parse
@given(st.lists(st.sampled_from(ODD_PIECES), max_size=20).map("".join), st.floats(0, 1), st.booleans())
def test_whatever_stands_in_the_file_is_taken_or_refused(
    tmp_path_factory: pytest.TempPathFactory, odd: str, position: float, alone: bool
) -> None:
    """Odd text alone, or in the middle of the real file."""
    text = FILE.read_text()
    cut = int(position * len(text))
    path = tmp_path_factory.getbasetemp() / "odd.yaml"
    path.write_text(odd if alone else text[:cut] + odd + text[cut:])
    with suppress(ParamsError):
        assert isinstance(load_params(path)[0], Params)


def test_numbers_are_read_as_dvc_reads_them(tmp_path: Path) -> None:
    """YAML 1.2: 1e-3 is a number, `no` and 010 are not false and 8."""
    path = tmp_path / "params.yaml"
    path.write_text("a: 1e-3\nb: no\nc: 010\n")
    assert read_yaml(path) == {"a": 0.001, "b": "no", "c": 10}


# --- overrides


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("filter.threshold_quantile=0.9", "filter.threshold_quantile", 0.9),
        ("train_id.lr=1e-3", "train_id.lr", 0.001),
        ("train_ood.candidate_id=true", "train_ood.candidate_id", True),
        ("seeds=[3, 4]", "seeds", [3, 4]),
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
    before = with_overrides(CONTENT, {})
    merged = with_overrides(CONTENT, {key: value})
    assert lookup(merged, key) == value
    assert all(lookup(merged, other) == lookup(CONTENT, other) for other in KEYS if other != key)
    assert before == CONTENT


def test_overrides_that_change_something_are_told_apart_from_those_that_do_not() -> None:
    overrides = {"filter.threshold_quantile": 0.9, "filter.n_vectors": 1, "train_ood.loss_weight": 10.0}
    assert load_params(FILE, overrides)[1] == [Override("filter.threshold_quantile", 0.9, 0.95)]
    with pytest.raises(ParamsError, match=r"^params\.yaml with its overrides is not valid\n  device  "):
        load_params(FILE, {"device": "gpu"})


@pytest.mark.slow
def test_bad_params_are_refused_in_a_process_of_their_own(tmp_path: Path) -> None:
    """The exit code and the streams as a shell sees them."""
    changed = with_overrides(CONTENT, {"filter.threshold_quantile": 95, "filter.calibraton": "train"})
    with (tmp_path / "params.yaml").open("w") as file:
        YAML().dump(changed, file)
    done = process(sys.executable, "-m", "salcli", "filter", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: params.yaml is not valid\n"
        "  filter.threshold_quantile  must be less than 1, got 95 (did you mean 0.95?)\n"
        "  filter.calibraton          no such key (did you mean calibration?)\n"
    )
