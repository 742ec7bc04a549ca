"""The report: what it shows is what the files say, it needs nothing but itself, and no name in it is markup."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
from conftest import OOD, REPOSITORY, SEED
from PIL import Image
from test_cli import here, salcli  # noqa: F401

from salcli.artifacts import layout
from salcli.artifacts.candidates import Candidates, read_candidates
from salcli.artifacts.images import read_image_set, write_image_set
from salcli.artifacts.layout import Found, Workspace
from salcli.compute.image_rows import ImageRows
from salcli.errors import BadArtifactError
from salcli.params import load_params
from salcli.progress import Silent
from salcli.reporting.report.collect import collect
from salcli.reporting.report.experiment import MethodScores, read_experiment
from salcli.reporting.report.galleries import _thumbnails, misses
from salcli.reporting.report.page import render
from salcli.reporting.report.safe_text import clean, without_secrets
from salcli.reporting.report.score_charts import histogram_chart, roc_chart, tau_chart
from salcli.reporting.report.summary import fit_warning, tiles
from salcli.reporting.results_table import label

if TYPE_CHECKING:
    from salcli.reporting.report.page import Report

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


@pytest.fixture(scope="module")
def made(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with its report, the theory measured, and the figures beside it."""
    root = tmp_path_factory.mktemp("report") / "workspace"
    shutil.copytree(built, root)
    params, one = ("--params", str(root / "params.yaml")), ("--ood", OOD, "--seed", str(SEED))
    assert salcli("theory", *params, *one).exit_code == 0
    out, figures = ("--out", str(root / "report.html")), ("--figures", str(root / "figures"))
    result = salcli("report", *params, *one, *out, *figures)
    assert result.exit_code == 0, result.stderr
    return root


@pytest.fixture(scope="module")
def page(made: Path) -> str:
    return (made / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def outline(page: str) -> Outline:
    return Outline(page)


# --- it shows what the files say


def test_the_gallery_is_the_candidates_by_score(made: Path, outline: Outline) -> None:
    candidates = read_candidates(Found(made / layout.candidates(OOD, SEED).name))
    shown = [int(item["data-index"] or "") for item in outline.all("li") if "data-predicted" in item]
    order = sorted(range(len(candidates.wild_score)), key=lambda i: -candidates.wild_score[i])
    n = min(len(candidates.index), 120)
    assert shown[:n] == order[:n]
    below = order[len(candidates.index) :]
    assert shown[n : n + 48] == below[:48]


def test_mistakes_are_the_extreme_scores_of_the_test_set(made: Path, page: str) -> None:
    with h5py.File(made / layout.evaluation_scores(OOD, SEED).name) as file:
        id_scores, ood_scores = np.asarray(file["sal/id"]), np.asarray(file["sal/ood"])
    for kind, scores in (("OOD", -ood_scores), ("ID", id_scores)):
        shown = [int(index) for index in re.findall(rf'alt="{kind} test image (\d+),', page)]
        assert shown == sorted(range(len(scores)), key=lambda i: scores[i])[:36]


def test_thumbnails_of_small_images_are_those_images(made: Path, outline: Outline) -> None:
    workspace = Workspace(made)
    params, _ = load_params(made / "params.yaml")
    from salcli.stages.inputs import wild_images

    rows = wild_images(workspace, params.data.id, OOD, SEED)
    first = next(item for item in outline.all("li") if "data-predicted" in item)
    source = str(outline.all("img")[0]["src"])
    content = base64.b64decode(source.removeprefix("data:image/png;base64,"))
    (made / "thumbnail.png").write_bytes(content)
    with Image.open(made / "thumbnail.png") as picture:
        assert np.array_equal(np.asarray(picture), rows[int(first["data-index"] or "")][0].numpy())


def test_the_threshold_is_that_of_fpr95(made: Path) -> None:
    """The share of OOD at or above it is what `evaluate` wrote down."""
    params, _ = load_params(made / "params.yaml")
    evaluation = read_experiment(Workspace(made), params, OOD, SEED).evaluation
    assert evaluation
    for one in evaluation.methods:
        assert np.mean(one.ood >= one.threshold) == pytest.approx(one.figures["fpr95"])
        assert np.mean(one.id >= one.threshold) >= 0.95


def test_every_method_and_section_is_there(made: Path, outline: Outline) -> None:
    metrics = json.loads((made / layout.metrics(OOD, SEED).name).read_text())
    methods = [label(name) for name in metrics if name != "samples"]
    for name in methods:
        assert sum(f"Scores of {name}." in str(own.get("aria-label")) for _, own in outline.elements) == 1
        assert sum(f"ROC of {name}." in str(own.get("aria-label")) for _, own in outline.elements) == 1
    sections = {own["id"] for own in outline.all("section")}
    assert sections == {"summary", "candidates", "methods", "mistakes", "training", "theory", "provenance"}
    assert {str(own["href"])[1:] for own in outline.all("a")} == sections | {"main"}
    sal = metrics["sal"]
    assert f"SAL: AUROC {sal['auroc']:.1%}, FPR95 {sal['fpr95']:.1%}" in outline.words
    assert "No evaluation" not in outline.words
    assert "ERR_in, estimated" in outline.words


def test_the_same_figures_are_png_and_svg(made: Path, outline: Outline) -> None:
    charts = outline.all("div", role="img")
    files = sorted(path.name for path in (made / "figures").iterdir())
    assert len(files) == 2 * len(charts)
    assert {"filter-scores.png", "filter-scores.svg", "roc-sal.png", "scores-msp.svg", "training-classifier.png"} <= {
        *files
    }
    with Image.open(made / "figures" / "roc-sal.png") as picture:
        assert len(picture.convert("L").getcolors(256) or []) > 3


# --- it needs nothing but itself


def test_nothing_is_loaded_from_anywhere(page: str, outline: Outline) -> None:
    assert not outline.all("link")
    assert all(str(own["src"]).startswith("data:image/") for own in outline.all("img"))
    assert all(str(own["href"]).startswith("#") for own in outline.all("a"))
    assert not [own for own in outline.all("script") if own]
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, not places
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


def contrast(one: str, other: str) -> float:
    """WCAG 2's ratio of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_the_paper(scheme: int) -> None:
    style = (REPOSITORY / "salcli" / "templates" / "report" / "report.css").read_text()
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", style.split("@media (prefers-color-scheme: dark)")[scheme]))
    for paper in ("paper", "card"):
        assert all(contrast(colours[name], colours[paper]) >= 4.5 for name in ("ink", "soft", "accent"))
        lines = ("orange", "purple", "green", "blue", "grey", "vermilion", "focus")
        assert all(contrast(colours[name], colours[paper]) >= 2.8 for name in lines), colours
    assert contrast(colours["ink"], colours["accent-soft"]) >= 4.5
    assert contrast(colours["card"], colours["vermilion"]) >= 4.5  # a pressed button


# --- no name is markup, nothing private is told


def with_class_names(root: Path, names: list[str]) -> None:
    found = Workspace(root).find(layout.prepared_set("digits-0-7"))
    image_set = read_image_set(found)
    padded = (*names, *image_set.class_names[len(names) :])
    write_image_set(found.path, replace(image_set, images=np.array(image_set.images), class_names=padded), "digits-0-7")


def collected(root: Path, top: int = 30) -> Report:
    params, _ = load_params(root / "params.yaml")
    return collect(Workspace(root), params, root / "params.yaml", OOD, SEED, Silent(), top=top)


def test_names_from_the_data_are_text(workspace: Workspace) -> None:
    with_class_names(workspace.root, EVIL)
    report = collected(workspace.root)
    assert report.candidates
    shown = {picture.class_name for picture in report.candidates.pictures}
    assert shown & set(EVIL)
    odd = replace(report.candidates.pictures[0], file=EVIL[1], class_name=EVIL[0])
    experiment = replace(report.experiment, ood=EVIL[1])
    charts = [replace(report.tau, title=EVIL[0], summary=EVIL[1], name=EVIL[1])]
    for name in EVIL:
        page = render(
            replace(
                report,
                title=name,
                experiment=experiment,
                main_method=name,
                params=name,
                facts=[(name, name)],
                files=[(name, name, name)],
                training=charts,
                candidates=replace(report.candidates, pictures=[odd, *report.candidates.pictures]),
            )
        )
        page.encode()  # as text that UTF-8 can write
        found = Outline(page)
        assert len(found.all("script")) == 1
        assert not [own for _, own in found.elements if "onerror" in own]
        assert all("data:image/" in str(own["src"]) for own in found.all("img"))
        assert "49" not in " ".join(found.text[:40])  # nobody computed {{ 7 * 7 }}


def test_method_names_may_be_anything(made: Path) -> None:
    rng = np.random.default_rng(0)
    for name in EVIL:
        one = MethodScores(name, rng.normal(1, 1, 50), rng.normal(0, 1, 40), {"fpr95": 0.1, "auroc": None})
        for chart in (histogram_chart(one), roc_chart(one)):
            found = Outline(str(chart.svg))
            assert not found.all("script")
            assert not [own for _, own in found.elements if "onerror" in own]
            assert re.fullmatch(r"[a-z0-9-]+", chart.slug)


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


def test_the_commit_is_that_of_the_workspace(workspace: Workspace) -> None:
    from salcli.reporting.report.provenance import provenance

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=workspace.root, check=True, capture_output=True, text=True
        ).stdout.strip()

    assert dict(provenance(workspace, OOD, SEED))["commit of the workspace"] == "not under git"
    git("init", "-q")
    git("add", "params.yaml")
    git("commit", "-qm", "one")
    commit = dict(provenance(workspace, OOD, SEED))["commit of the workspace"]
    assert commit == f"{git('rev-parse', '--short=12', 'HEAD')}, with changes that are not committed"


# --- what is not there, and what is too much


def test_what_is_missing_is_left_out_with_a_word_on_how_to_make_it(workspace: Workspace) -> None:
    root = workspace.root
    for path in [*root.glob("runs/*/*/*.csv"), *root.glob("runs/*/*/scores.h5"), *root.glob("runs/*/*/metrics.json")]:
        path.unlink()
    for path in root.glob("runs/*/train-id.csv"):
        path.unlink()
    outline = Outline(render(collected(root)))
    words = outline.words
    for sentence in ("make one with salcli evaluate", f"salcli theory --ood {OOD} --seed {SEED}", "No training curve"):
        assert sentence in words
    assert len(outline.all("div", role="img")) == 1  # τ
    assert outline.all("li", data_index=str(collected(root).candidates.pictures[0].index))  # type: ignore[union-attr]


def test_a_poor_classifier_is_warned_of(workspace: Workspace) -> None:
    params, _ = load_params(workspace.root / "params.yaml")
    experiment = read_experiment(workspace, params, OOD, SEED)
    assert fit_warning(experiment) == ""
    poor = replace(experiment, filter={**experiment.filter, "calibration_accuracy": 0.5})
    assert "50.0% of calibration data right" in fit_warning(poor)


def test_without_candidates_there_is_nothing_to_report(here: Path) -> None:  # noqa: F811
    (here / layout.candidates(OOD, SEED).name).unlink()
    result = salcli("report", "--ood", OOD, "--no-open")
    assert result.exit_code == 2
    assert f"make it with: salcli filter --ood {OOD} --seed {SEED}" in result.stderr
    assert not (here / "report.html").exists()


def test_where_the_truth_is_unknown_it_says_so(workspace: Workspace) -> None:
    """As with wild data of one's own: no errors of the filter, no OOD test set, no FPR95."""
    root = workspace.root
    path = root / layout.filter_metrics(OOD, SEED).name
    path.write_text(json.dumps({**json.loads(path.read_text()), "err_in": None, "err_out": None}))
    path = root / layout.metrics(OOD, SEED).name
    figures = {"fpr95": None, "auroc": None, "id_accuracy": 0.9}
    path.write_text(json.dumps({"sal": figures, "msp": figures, "samples": {"id_test": 288, "ood_test": 0}}))
    with h5py.File(root / layout.evaluation_scores(OOD, SEED).name, "r+") as file:
        for method in list(file):
            if method not in ("sal", "msp"):
                del file[method]
            else:
                del file[method]["ood"]
    params, _ = load_params(root / "params.yaml")
    experiment = read_experiment(workspace, params, OOD, SEED)
    assert [tile.value for tile in tiles(experiment)[2:]] == ["unknown", "unknown", "90.0%"]
    assert experiment.evaluation
    assert not experiment.evaluation.has_ood
    assert [one.roc for one in experiment.evaluation.methods] == [None, None]
    assert "OOD" not in histogram_chart(experiment.evaluation.main).summary


def test_scores_of_other_test_data_are_refused(workspace: Workspace) -> None:
    path = workspace.root / layout.evaluation_scores(OOD, SEED).name
    with h5py.File(path, "r+") as file:
        for method in list(file):
            short = np.asarray(file[method]["ood"])[:-1]
            del file[method]["ood"]
            file[method]["ood"] = short
    params, _ = load_params(workspace.root / "params.yaml")
    experiment = read_experiment(workspace, params, OOD, SEED)
    with pytest.raises(BadArtifactError, match="scores of 105 test images, but 106 images"):
        misses(workspace, params, experiment, 3)


@pytest.mark.parametrize("damage", [b"", b"not HDF5", b"\x89HDF\r\n\x1a\n"])
def test_damaged_scores_are_one_message(damage: bytes, here: Path) -> None:  # noqa: F811
    (here / layout.evaluation_scores(OOD, SEED).name).write_bytes(damage)
    result = salcli("report", "--ood", OOD, "--no-open")
    assert result.exit_code == 2
    assert "scores.h5 is damaged or not ours" in result.stderr


def test_fifty_thousand_wild_images_make_a_page_of_a_few_megabytes(made: Path) -> None:
    """Charts do not grow with the data, and only what is shown is read."""
    rng = np.random.default_rng(0)
    n = 50_000
    scores = rng.exponential(1, n)
    index = np.flatnonzero(scores > 2)
    candidates = Candidates(index, scores[index], index * 0, scores, scores[:5000], 2.0, "sal", "", "")
    one = MethodScores("sal", rng.normal(1, 1, n), rng.normal(0, 1, n), {})
    charts = sum(len(chart.svg) for chart in (tau_chart(candidates), histogram_chart(one), roc_chart(one)))
    assert charts < 150_000
    noise = rng.integers(0, 256, (4, 3, 224, 224), dtype=np.uint8)  # the worst that can be compressed

    class Counted(np.ndarray[Any, Any]):
        n_read = 0

        def __getitem__(self, rows: Any) -> Any:
            Counted.n_read += len(rows)
            return np.asarray(self)[rows % 4]

        def __len__(self) -> int:
            return n

    rows = ImageRows((noise.view(Counted),), np.arange(n))
    thumbnails = _thumbnails(rows, np.arange(240) * 7)
    assert Counted.n_read == 240
    assert sum(len(source) for source, _ in thumbnails) + 20 * charts < 10_000_000


def test_out_must_be_a_file(here: Path) -> None:  # noqa: F811
    result = salcli("report", "--out", str(here), "--no-open")
    assert result.exit_code == 2
    assert "is a folder; name a file" in result.stderr
