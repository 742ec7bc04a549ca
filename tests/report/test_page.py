"""The report: what it shows is what the files say, it needs nothing but itself, and no name in it is markup."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from helpers.evaluated import EXPERIMENT, LABELS
from PIL import Image

from salcli.engine.batches import Rows
from salcli.errors import BadArtifactError, MissingArtifactError
from salcli.params.schema import Params, load_params
from salcli.pipeline.inputs import wild_samples
from salcli.progress import Silent
from salcli.report.charts import clean, histogram_chart, roc_chart, tau_chart
from salcli.report.findings import Findings, MethodScores, read_findings
from salcli.report.galleries import misses, thumbnails
from salcli.report.page import Report, collect, fit_warning, render, tiles, without_secrets, write_page
from salcli.store.files import Found
from salcli.store.formats import Candidates, read_candidates, read_samples, write_samples
from salcli.store.layout import Workspace, prepared_set

SCORES_FILE = EXPERIMENT.evaluation("scores.h5")
METRICS_FILE = EXPERIMENT.evaluation("metrics.json")

EVIL = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a\nb",
    os.fsdecode(b"\xff\xfe"),
    "{{ 7 * 7 }}",
    "$\\frac$",
]
VOID = {"meta", "img", "input", "br", "hr", "link"}


class Outline(HTMLParser):
    """The elements of a page, and whether each is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        wanted = {name.replace("_", "-"): value for name, value in attributes.items()}
        return [own for name, own in self.elements if name == tag and wanted.items() <= own.items()]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def params_of(root: Path) -> Params:
    return load_params(root / "params.yaml")[0]


def findings_of(workspace: Workspace) -> Findings:
    return read_findings(workspace, params_of(workspace.root), EXPERIMENT)


def collected(root: Path, top: int = 30) -> Report:
    return collect(Workspace(root), params_of(root), root / "params.yaml", EXPERIMENT, Silent(), top=top)


@pytest.fixture(scope="module")
def made(evaluated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page and its figures, in a folder of their own."""
    folder = tmp_path_factory.mktemp("report")
    report = collected(evaluated, top=120)
    write_page(folder / "report.html", report)
    for chart in report.charts:
        chart.write(folder / "figures")
    return folder


@pytest.fixture(scope="module")
def page(made: Path) -> str:
    return (made / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def outline(page: str) -> Outline:
    return Outline(page)


# --- it shows what the files say


def test_the_gallery_is_the_candidates_by_score(evaluated: Path, outline: Outline) -> None:
    candidates = read_candidates(Found(evaluated / EXPERIMENT.candidates.path))
    shown = [int(item["data-index"] or "") for item in outline.all("li") if "data-predicted" in item]
    order = sorted(range(len(candidates.wild_score)), key=lambda i: -candidates.wild_score[i])
    n = min(len(candidates.index), 120)
    assert shown[:n] == order[:n]
    below = order[len(candidates.index) :]
    assert shown[n : n + 48] == below[:48]
    rows = wild_samples(Workspace(evaluated), params_of(evaluated), EXPERIMENT)
    content = base64.b64decode(str(outline.all("img")[0]["src"]).removeprefix("data:image/png;base64,"))
    with Image.open(io.BytesIO(content)) as picture:
        assert np.array_equal(np.asarray(picture), rows[shown[0]][0].numpy()), "small images are shown as they are"


def test_mistakes_are_the_extreme_scores_of_the_test_set(evaluated: Path, page: str) -> None:
    with h5py.File(evaluated / SCORES_FILE.path) as file:
        id_scores, ood_scores = np.asarray(file["sal/id"]), np.asarray(file["sal/ood"])
    for kind, scores in (("OOD", -ood_scores), ("ID", id_scores)):
        shown = [int(index) for index in re.findall(rf'alt="{kind} test image (\d+),', page)]
        assert shown == sorted(range(len(scores)), key=lambda i: scores[i])[:36]


def test_the_threshold_is_that_of_fpr95(evaluated: Path) -> None:
    """The share of OOD at or above it is what `evaluate` wrote down."""
    evaluation = findings_of(Workspace(evaluated)).evaluation
    assert evaluation
    for one in evaluation.methods:
        assert np.mean(one.ood >= one.threshold) == pytest.approx(one.metrics["fpr95"])
        assert np.mean(one.id >= one.threshold) >= 0.95


def test_every_method_and_section_is_there(evaluated: Path, outline: Outline) -> None:
    metrics = json.loads((evaluated / METRICS_FILE.path).read_text())
    for name in LABELS.values():
        assert sum(f"Scores of {name}." in str(own.get("aria-label")) for _, own in outline.elements) == 1
        assert sum(f"ROC of {name}." in str(own.get("aria-label")) for _, own in outline.elements) == 1
    sections = {own["id"] for own in outline.all("section")}
    assert sections == {"summary", "candidates", "methods", "mistakes", "training", "theory", "provenance"}
    assert {str(own["href"])[1:] for own in outline.all("a")} == sections | {"main"}
    sal = metrics["sal"]
    assert f"SAL: AUROC {sal['auroc']:.1%}, FPR95 {sal['fpr95']:.1%}" in outline.words
    assert "no evaluation" not in outline.words
    assert "ERR_in, estimated" in outline.words


def test_the_same_charts_are_png_and_svg(made: Path, outline: Outline) -> None:
    files = {path.name for path in (made / "figures").iterdir()}
    assert len(files) == 2 * len(outline.all("div", role="img"))
    assert {"filter-scores.png", "filter-scores.svg", "roc-sal.png", "scores-msp.svg"} <= files
    with Image.open(made / "figures" / "roc-sal.png") as picture:
        assert len(picture.convert("L").getcolors(256) or []) > 3


# --- it needs nothing but itself


def test_nothing_is_loaded_from_anywhere(page: str, outline: Outline) -> None:
    assert not outline.all("link")
    assert all(str(own["src"]).startswith("data:image/") for own in outline.all("img"))
    assert all(str(own["href"]).startswith("#") for own in outline.all("a"))
    assert not [own for own in outline.all("script") if own]
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, nothing is loaded
    (policy,) = outline.all("meta", http_equiv="Content-Security-Policy")
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert script
    digest = base64.b64encode(hashlib.sha256(script.group(1).encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in str(policy["content"])
    assert str(policy["content"]).startswith("default-src 'none'")


def test_people_who_do_not_see_it_can_read_it(outline: Outline) -> None:
    ids = [own["id"] for _, own in outline.elements if "id" in own]
    assert len(ids) == len(set(ids))
    assert all(own["alt"] for own in outline.all("img"))
    charts = outline.all("div", role="img")
    assert charts
    assert all(len(str(own["aria-label"])) > 30 for own in charts)
    assert len(outline.all("svg")) == len(outline.all("svg", aria_hidden="true")) == len(charts)
    assert all(own.get("scope") in ("col", "row") for own in outline.all("th"))
    levels = [int(tag[1]) for tag, _ in outline.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for landmark in ("header", "nav", "main", "footer"):
        assert len([tag for tag, _ in outline.elements if tag == landmark]) == 1
    labels = {own["for"] for own in outline.all("label")}
    assert labels == {own["id"] for own in outline.all("select")}
    assert outline.all("output", aria_live="polite")
    assert outline.all("html", lang="en")


# --- no name is markup, nothing private is told


def test_names_from_the_data_are_text(workspace: Workspace) -> None:
    found = workspace.find(prepared_set("digits-0-7"))
    samples = read_samples(found)
    names = (*EVIL, *samples.class_names[len(EVIL) :])
    write_samples(found.path, replace(samples, array=np.array(samples.array), class_names=names), "digits-0-7")
    report = collected(workspace.root, top=8)
    first, scores = report.galleries.candidates, np.random.default_rng(0).normal(1, 1, 50)
    assert first
    assert {picture.class_name for picture in first.pictures} & set(EVIL)
    for name in EVIL:
        one = MethodScores(name, name, scores, scores - 1, {"fpr95": 0.1, "auroc": None})
        charts = [histogram_chart(one), roc_chart(one), replace(report.tau, title=name, summary=name, name=name)]
        assert all(re.fullmatch(r"[a-z0-9-]+", chart.slug) for chart in charts[:2])
        odd = replace(first.pictures[0], file=name, class_name=name)
        changed = {
            "title": name, "main_method": name, "params": name, "facts": [(name, name)], "files": [(name, name, name)],
            "findings": replace(report.findings, experiment=replace(EXPERIMENT, ood=name)), "training": charts,
            "galleries": replace(report.galleries, candidates=replace(first, pictures=[odd, *first.pictures])),
        }  # fmt: skip
        page = render(replace(report, **changed))
        page.encode()  # as text that UTF-8 can write
        outline = Outline(page)
        assert len(outline.all("script")) == 1
        assert not [own for _, own in outline.elements if "onerror" in own]
        assert all("data:image/" in str(own["src"]) for own in outline.all("img"))
        assert "49" not in " ".join(outline.text[:40])  # nobody computed {{ 7 * 7 }}


def test_nothing_private_is_told(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(workspace.root))
    params = workspace.root / "params.yaml"
    weights = f"weights: {workspace.root}/net.pt"
    params.write_text(re.sub(r"weights:.*", weights, params.read_text()) + "# https://me:secret@example.org/x\n")
    report = collected(workspace.root)
    page = render(report)
    assert str(workspace.root) not in page
    assert "~/net.pt" in page
    assert "secret" not in page
    assert os.uname().nodename not in dict(report.facts)["machine of the report"]
    assert clean("a\ud800\x00b") == "a��b"
    assert without_secrets("s3://key:word@bucket") == "s3://…@bucket"


# --- what is not there, and what is too much


def test_what_is_missing_is_left_out_with_a_word_on_how_to_make_it(workspace: Workspace) -> None:
    root = workspace.root
    for pattern in ("*.csv", "scores.h5", "metrics.json", "theory.json"):
        for path in (root / "runs").rglob(pattern):
            path.unlink()
    outline = Outline(render(collected(root)))
    words = outline.words
    for sentence in ("make one with salcli evaluate", EXPERIMENT.theory("json").made_by, "no training curve"):
        assert sentence in words
    assert len(outline.all("div", role="img")) == 1  # τ
    assert outline.all("li", data_index=str(collected(root).galleries.candidates.pictures[0].index))  # type: ignore[union-attr]


def test_where_the_truth_is_unknown_it_says_so_and_a_poor_classifier_is_warned_of(workspace: Workspace) -> None:
    """As with custom wild data: no errors of the filter, no OOD test set, no FPR95."""
    root = workspace.root
    assert fit_warning(findings_of(workspace)) == ""
    path = root / EXPERIMENT.filter_metrics.path
    unknown = {"err_in": None, "err_out": None, "calibration_accuracy": 0.5}
    path.write_text(json.dumps({**json.loads(path.read_text()), **unknown}))
    path = root / METRICS_FILE.path
    row = dict.fromkeys(("fpr95", "auroc", "aupr_in", "aupr_out")) | {"id_accuracy": 0.9}
    path.write_text(json.dumps({"sal": row, "msp": row, "samples": {"id_test": 288, "ood_test": 0}}))
    with h5py.File(root / SCORES_FILE.path, "r+") as file:
        del file["knn"]
        for method in list(file):
            del file[method]["ood"]
    findings = findings_of(workspace)
    assert "50.0% of calibration data right" in fit_warning(findings)
    assert [tile.value for tile in tiles(findings)[2:]] == ["unknown", "unknown", "90.0%"]
    assert findings.evaluation
    assert not findings.evaluation.has_ood
    assert [one.roc for one in findings.evaluation.methods] == [None, None]
    assert "OOD" not in histogram_chart(findings.evaluation.main).summary
    assert "unknown" in Outline(render(collected(root))).words


def test_damaged_and_foreign_scores_are_one_message(workspace: Workspace) -> None:
    path = workspace.root / SCORES_FILE.path
    with h5py.File(path, "r+") as file:
        for method in list(file):
            short = np.asarray(file[method]["ood"])[:-1]
            del file[method]["ood"]
            file[method]["ood"] = short
    with pytest.raises(BadArtifactError, match="scores of 105 test images on digits-8-9, but 106 images"):
        misses(workspace, params_of(workspace.root), findings_of(workspace), 3)
    for damage in (b"", b"not HDF5", b"\x89HDF\r\n\x1a\n"):
        path.write_bytes(damage)
        with pytest.raises(BadArtifactError, match=r"scores.h5 is damaged"):
            collected(workspace.root)
    (workspace.root / EXPERIMENT.candidates.path).unlink()
    with pytest.raises(MissingArtifactError, match=f"make it with: {EXPERIMENT.candidates.made_by}"):
        collected(workspace.root)


def test_charts_of_fifty_thousand_wild_images_are_small() -> None:
    rng, n = np.random.default_rng(0), 50_000
    scores = rng.exponential(1, n)
    candidates = Candidates(np.flatnonzero(scores > 2), scores, np.zeros(n, np.int64), scores[:5000], 2.0, "sal")
    one = MethodScores("sal", "SAL", rng.normal(1, 1, n), rng.normal(0, 1, n), {})
    assert sum(len(chart.svg) for chart in (tau_chart(candidates), histogram_chart(one), roc_chart(one))) < 150_000
    noise = rng.integers(0, 256, (4, 3, 224, 224), dtype=np.uint8)  # the worst that can be compressed
    made = thumbnails(Rows((noise,), np.arange(4)), np.arange(4))
    assert sum(len(source) for source, _ in made) < 4 * 40_000
