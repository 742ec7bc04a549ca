"""params.yaml: the only home of defaults; everything wrong with it is reported at once, a line for each key."""

# ruff: noqa: E501  (messages are compared as they are)
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.quick import REPOSITORY
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from salcli.errors import ParamsError
from salcli.methods.base import InputScore, PostHoc, built_in
from salcli.params.checks import NOT_VARIANTS
from salcli.params.reading import lookup, parse_assignment, read_yaml, with_overrides
from salcli.params.schema import MethodsParams, Override, Params, load_params, validated

FILE = REPOSITORY / "params.yaml"
CONTENT = read_yaml(FILE)


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


def loaded(overrides: dict[str, Any], folder: Path = REPOSITORY) -> Params:
    return validated(with_overrides(CONTENT, overrides), "params.yaml", folder)


def complaints(overrides: dict[str, Any], folder: Path = REPOSITORY) -> dict[str, str]:
    """The message for each key, one line each."""
    with pytest.raises(ParamsError) as caught:
        loaded(overrides, folder)
    head, *lines = str(caught.value).splitlines()
    assert head == "params.yaml is not valid"
    assert all(line.startswith("  ") and line[2] != " " for line in lines), lines
    return {key: message.strip() for key, _, message in (line.strip().partition(" ") for line in lines)}


# --- keys


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
    assert len(KEYS) > 100
    *parents, last = key.split(".")
    del (lookup(content, ".".join(parents)) if parents else content)[last]
    with pytest.raises(ParamsError, match=rf"^params.yaml is not valid\n  {key}  is missing$"):
        validated(content, "params.yaml")


# --- values


BAD_VALUES: list[tuple[str, object, str]] = [
    ("filter.threshold_quantile", 95, "must be less than 1, got 95 (did you mean 0.95?)"),
    ("filter.calibration", "hold-out", "must be 'holdout', 'train' or 'id-svd', got 'hold-out' (did you mean holdout?)"),
    ("threshold_quantile", 0.9, "no such key (did you mean filter.threshold_quantile?)"),
    ("filter", 3, "must be a section of keys and values, got 3"),
    ("data.pi", 0.1, "must be a list, got 0.1 (did you mean [0.1]?)"),
    ("data.groups", {"near": ["digits-89"]}, "no set of data.ood and data.test_ood is called digits-89 (did you mean digits-8-9?)"),
    ("data.pi", [0.1, 10], "must be shares above 0 and at most 1, or [unknown], got 10"),
    ("data.pi", [1.0], "write 1 instead of 1.0"),
    ("data.id", "digits-8-9", "no ID set is called digits-8-9 (did you mean digits-0-7?); known: "),
    ("data.ood", ["svhn", "digits-0-7"], "must not name the ID set, got digits-0-7"),
    ("data.custom", {"Mine": "x"}, "a set's name must be of a-z, 0-9, - and _, and start with a letter, got 'Mine'"),
    ("model.backbone", "small-cn", "no backbone is called small-cn (did you mean small-cnn?); known: "),
    ("model.std", [0.2, 0.0], "must be auto, or a list with one positive number for each channel, got [0.2, 0.0]"),
    ("train_id.lr", float("inf"), "must be less than or equal to 1"),
    ("device", "cuda:9999", "no device is called cuda:9999 (did you mean cuda:0?); known: auto, cpu, cuda, cuda:0, mps"),
    ("evaluate.methods", ["csi"], "names csi, which has to be trained; name it in encoders, too"),
    ("evaluate.methods", ["knn@all-id"], "knn@all-id is a row of evaluate.methods, with all-id named in encoders, too"),
    ("variants", ["sal-3"], "names sal-3, which variant does not define (did you mean sal"),
]  # fmt: skip
# inside a list, or between values
BAD_TOGETHER: list[tuple[dict[str, Any], str, str]] = [
    ({"seeds": ["0"]}, "seeds.0", "must be a valid integer, got '0'"),
    ({"seeds": [0, -1]}, "seeds.1", "must be greater than or equal to 0, got -1"),
    ({"data.pi": ["unknown"]}, "data", "pi is unknown: the wild data come as they are, so id_shares.wild must be 0"),
    ({"model.backbone": "resnet18", "model.drop_rate": 0.3}, "model", "drop_rate must be 0 for resnet18: only a wide ResNet (wrn-40-2) has dropout"),
    ({"filter.score": "knn", "filter.calibration": "id-svd"}, "filter", "calibration id-svd is about singular vectors, which only score sal has, not knn; use holdout or train"),
    ({"rivals": ["csi"]}, "rivals.0", "csi belongs in encoders"),
    ({"filter.directions": "wild", "filter.fdr": 0.1}, "filter", "fdr needs p-values"),
    ({"filter.directions": "wild", "filter.certified": 0.8}, "filter", "certified needs p-values"),
    ({"filter.fdr": 0.1, "filter.certified": 0.8}, "filter", "fdr and certified are two rules for one list"),
    ({"filter.calibration": "train"}, "filter", "calibration train has no held-out ID data to pool; use directions wild"),
    ({"filter.threshold_quantile": None}, "filter", "threshold_quantile null means P(outlier) > ½, which only score sal-plus has"),
    ({"filters": ["sal"]}, "filters", "names sal, which is filtered already"),
    ({"filters": ["sal-pluss"]}, "filters", "names sal-pluss, which variant does not define (did you mean sal-plus?)"),
    ({"filter.score": "sal-posthoc"}, "filter.score", "no score is called sal-posthoc"),  # needs the wild data itself
    ({"variant.sal-2": {"filter": {"n_vector": 2}}}, "variant.sal-2.filter.n_vector", "no such key (did you mean n_vectors?)"),
    ({"variant.sal-2": {"filter": {"score": "committee", "calibration": "train"}}}, "variant.sal-2.filter", "score committee compares wild with held-out ID data"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "key", "message"), [*(({key: value}, key, told) for key, value, told in BAD_VALUES), *BAD_TOGETHER]
)
def test_a_bad_value_is_named_with_what_is_right(overrides: dict[str, Any], key: str, message: str) -> None:
    found = complaints(overrides)
    assert list(found) == [key]
    assert found[key].startswith(message)


def test_all_mistakes_are_reported_together() -> None:
    mistakes = {"data.ood": ["digits-89"], "filter.threshold_quantile": 95, "methods.knn.k": 0, "device": "gpu"}
    assert list(complaints(mistakes)) == ["device", "data.ood.0", "filter.threshold_quantile", "methods.knn.k"]
    between_sections = {"train_id.solver": "lbfgs", "model.weights": "pretrained", "evaluate.methods": ["csi", "odim"]}
    assert list(complaints(between_sections)) == ["train_id", "model.weights", "evaluate.methods"]


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
    only_filtered = params.for_variant("sal-plus").filter
    assert (only_filtered.score, only_filtered.threshold_quantile) == ("sal-plus", None)
    assert params.incumbent == "sal-plus"
    assert loaded({"filters": []}).incumbent == "sal"
    assert "sal-plus" in [one.variant for one in params.experiments()]


@pytest.mark.parametrize("name", [*sorted(NOT_VARIANTS), "woods", "knn", "Sal", "2-sal", "sal/2", "a b", ""])
def test_a_name_that_is_taken_or_cannot_be_a_folder_is_no_variant(name: str) -> None:
    content = {**CONTENT, "variants": [name], "variant": {**CONTENT["variant"], name: {}}}
    with pytest.raises(ParamsError, match=r"\n  variants  .*cannot be a variant's name; use a-z, 0-9, -, _ and \."):
        validated(content, "params.yaml")


# --- methods


def test_the_sections_of_methods_are_those_of_the_methods_own_params() -> None:
    with_params = {name: found for name, found in built_in().items() if found.Params.model_fields}
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
    trained = loaded({"rivals": ["oe"], "encoders": ["csi"]}).evaluate.methods
    assert {*trained} == {"sal", "oe", "csi", *built_in(PostHoc), *built_in(InputScore)}


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
"""
CUSTOM_CODE: dict[str, Any] = {
    "model.code": "code",
    "evaluate.methods": ["my_scores:Mine", "my_scores:Plain"],
    "rivals": [],
    "methods.my_scores:Mine": {"k": 3},
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose custom code is in a folder of its own."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_scores.py").write_text(CUSTOM)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_scores", None)


def test_a_custom_method_is_imported_from_model_code_with_its_own_params(project: Path) -> None:
    params = loaded(CUSTOM_CODE, project)
    mine, plain = params.method("my_scores:Mine"), params.method("my_scores:Plain")
    assert (mine.label, mine.params.k, mine.params.share) == ("My score", 3, 0.5)
    assert (plain.label, plain.name) == ("Plain", "my_scores:Plain")
    assert "my_scores:Mine" not in loaded(CUSTOM_CODE | {"evaluate.methods": "all"}, project).evaluate.methods


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"methods.my_scores:Mine": {"k": 0}}, "methods.my_scores:Mine.k must be greater than or equal to 1, got 0"),
        ({"methods.my_scores:Mine": {"k": 3, "shar": 0.1}}, "methods.my_scores:Mine.shar no such key (did you mean share?)"),
        ({"evaluate.methods": ["my_scores:Nine"]}, "evaluate.methods the custom method my_scores:Nine: my_scores has no Nine"),
        ({"rivals": ["my_scores:Plain"]}, "rivals.0 my_scores:Plain is not a class derived from salcli.methods.base.WildTrained"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_custom_method_is_one_line(project: Path, overrides: dict[str, Any], line: str) -> None:
    ((key, message),) = complaints(CUSTOM_CODE | overrides, project).items()
    assert f"{key} {message}".startswith(line)


# --- the file itself


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, 2]", r"params.yaml must hold keys and values, got \[1, 2\]"),
        (b"a: 1\nfilter: [1, 2\nb: 3\n", r"params.yaml is not valid YAML: expected ',' or '\]', .* \(line \d\)"),
        (b"seeds: [0]\ndevice: cpu\nseeds: [1]\n", r'not valid YAML: found duplicate key "seeds" .* \(line 3\)'),
        (b"a: !!python/object/apply:os.system [ls]", r"not valid YAML: could not determine a constructor for the tag"),
        (None, r"params.yaml does not exist; start salcli in a folder with a params.yaml"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_params_file_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "params.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ParamsError, match=message):
        load_params(path)


# --- overrides


def test_an_assignment_has_a_dotted_key_and_a_yaml_value() -> None:
    assert parse_assignment("train_id.lr=1e-3") == ("train_id.lr", 0.001)
    assert parse_assignment("seeds=[3, 4]") == ("seeds", [3, 4])
    assert parse_assignment("a=b=c") == ("a", "b=c")
    assert parse_assignment(" a = no ") == ("a", "no")  # YAML 1.2, as DVC reads it
    assert parse_assignment("a=") == ("a", None)
    for wrong in ("", "foo", "=3", "a..b=3", "a=["):
        with pytest.raises(ParamsError, match=r"^--set .*: (must be KEY=VALUE, for ex|the value is not valid YAML: )"):
            parse_assignment(wrong)


def test_overrides_that_change_something_are_told_apart_from_those_that_do_not() -> None:
    overrides = {"filter.threshold_quantile": 0.9, "filter.n_vectors": 1, "train_ood.loss_weight": 10.0}
    assert load_params(FILE, overrides)[1] == [Override("filter.threshold_quantile", 0.9, 0.95)]
    with pytest.raises(ParamsError, match=r"^params\.yaml with its overrides is not valid\n  device  "):
        load_params(FILE, {"device": "gpu"})
