"""The report: what it shows is what the files say, it needs nothing but itself, and no name in it is markup."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from helpers.cli import process
from helpers.evaluated import EXPERIMENT, LABELS
from PIL import Image

from salcli.errors import MissingArtifactError
from salcli.params.schema import Params, load_params
from salcli.pipeline.inputs import wild_samples
from salcli.pipeline.review import reviewed
from salcli.progress import Silent
from salcli.report.charts import histogram_chart, roc_chart
from salcli.report.findings import Findings, MethodScores, read_findings
from salcli.report.page import Report, collect, fit_warning, render, tiles, write_page
from salcli.store.files import Found
from salcli.store.formats import read_candidates, read_samples, write_samples
from salcli.store.layout import Workspace, prepared_set

SCORES_FILE = EXPERIMENT.evaluation("scores.h5")
METRICS_FILE = EXPERIMENT.evaluation("metrics.json")

EVIL = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a\nb", os.fsdecode(b"\xff"), "{{ 7 * 7 }}"]
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
def root(evaluated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with its report."""
    root = tmp_path_factory.mktemp("report") / "workspace"
    shutil.copytree(evaluated, root)
    write_page(root / "report.html", collected(root, top=120))
    return root


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "report.html").read_text(encoding="utf-8")


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
    assert all(len(str(own["aria-label"])) > 30 for own in charts)
    assert len(outline.all("svg")) == len(outline.all("svg", aria_hidden="true")) == len(charts) > 0
    assert all(own.get("scope") in ("col", "row") for own in outline.all("th"))
    levels = [int(tag[1]) for tag, _ in outline.elements if re.fullmatch(r"h\d", tag)]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(after <= before + 1 for before, after in pairwise(levels))
    tags = [tag for tag, _ in outline.elements]
    assert {tags.count(landmark) for landmark in ("header", "nav", "main", "footer")} == {1}
    assert {own["for"] for own in outline.all("label")} == {own["id"] for own in outline.all("select")}
    assert outline.all("html", lang="en")


# --- no name is markup, nothing private is told


def test_names_from_the_data_are_text_and_nothing_private_is_told(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(workspace.root))
    params = workspace.root / "params.yaml"
    weights = f"weights: {workspace.root}/net.pt"
    params.write_text(
        re.sub(r"weights:.*", weights, params.read_text()) + "# https://me:secret@example.org/x <script>\n"
    )
    found, name = workspace.find(prepared_set("digits-0-7")), "".join(EVIL)
    samples = read_samples(found)
    names = (*EVIL, *samples.class_names[len(EVIL) :])
    write_samples(found.path, replace(samples, array=np.array(samples.array), class_names=names), "digits-0-7")
    report, scores = collected(workspace.root, top=8), np.random.default_rng(0).normal(1, 1, 50)
    first = report.galleries.candidates
    assert first
    assert {picture.class_name for picture in first.pictures} & set(EVIL)
    one = MethodScores(name, name, scores, scores - 1, {"fpr95": 0.1, "auroc": None})
    charts = [histogram_chart(one), roc_chart(one), replace(report.tau, title=name, summary=name, name=name)]
    assert all(re.fullmatch(r"[a-z0-9-]+", chart.slug) for chart in charts[:2])
    odd = replace(first.pictures[0], file=name, class_name=name)
    changed = {
        "title": name, "main_method": name, "facts": [*report.facts, (name, name)], "files": [(name, name, name)],
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
    assert "~/net.pt" in page
    assert not [private for private in (str(workspace.root), "secret") if private in page]
    assert os.uname().nodename not in dict(report.facts)["machine of the report"]


# --- what is not there, and what is too much


def test_what_is_missing_is_left_out_with_a_word_on_how_to_make_it(workspace: Workspace) -> None:
    for pattern in ("*.csv", "scores.h5", "metrics.json", "theory.json"):
        for path in (workspace.root / "runs").rglob(pattern):
            path.unlink()
    outline = Outline(render(collected(workspace.root)))
    for sentence in ("make one with salcli evaluate", EXPERIMENT.theory("json").made_by, "no training curve"):
        assert sentence in outline.words
    assert len(outline.all("div", role="img")) == 1  # τ
    (workspace.root / EXPERIMENT.candidates.path).unlink()
    with pytest.raises(MissingArtifactError, match=f"make it with: {EXPERIMENT.candidates.made_by}"):
        collected(workspace.root)


def test_where_the_truth_is_unknown_it_says_so_and_a_poor_classifier_is_warned_of(workspace: Workspace) -> None:
    """As with custom wild data: no errors of the filter, no OOD test set, no FPR95."""
    assert fit_warning(findings_of(workspace)) == ""
    path = workspace.root / EXPERIMENT.filter_metrics.path
    unknown = {"err_in": None, "err_out": None, "calibration_accuracy": 0.5}
    path.write_text(json.dumps({**json.loads(path.read_text()), **unknown}))
    row = dict.fromkeys(("fpr95", "auroc", "aupr_in", "aupr_out")) | {"id_accuracy": 0.9}
    metrics = {**dict.fromkeys(LABELS, row), "samples": {"id_test": 288, "ood_test": 0}}
    (workspace.root / METRICS_FILE.path).write_text(json.dumps(metrics))
    with h5py.File(workspace.root / SCORES_FILE.path, "r+") as file:
        for method in file:
            del file[method]["ood"]
    findings = findings_of(workspace)
    assert "50.0% of calibration data right" in fit_warning(findings)
    assert [tile.value for tile in tiles(findings)[2:]] == ["unknown", "unknown", "90.0%"]
    assert findings.evaluation
    assert [one.roc for one in findings.evaluation.methods] == [None] * len(LABELS)
    assert "unknown" in Outline(render(collected(workspace.root))).words


# --- in a real browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# what a reader does; what is seen goes into the title
STEPS = """<script>addEventListener("load", async () => {
  const one = (selector) => document.querySelector(selector);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const items = all("#candidate-pictures li"), shown = () => items.filter((item) => item.offsetParent);
  const { color, backgroundColor } = getComputedStyle(document.body), select = one("#candidate-pictures select");
  const seen = { colours: [color, backgroundColor], fits: document.documentElement.scrollWidth <= innerWidth };
  seen.broken = all("img").filter((image) => !image.naturalWidth).length;
  seen.first = shown().length;
  one("#candidate-pictures .more button").click();
  seen.rest = [shown().length === items.length, document.activeElement === items[seen.first]];
  select.selectedIndex = 1;
  select.dispatchEvent(new Event("change"));
  const classes = new Set(shown().map((item) => item.dataset.predicted));
  seen.filtered = [select.selectedOptions[0].textContent, `${[...classes]} (${shown().length})`];
  seen.picked = ["candidate", "below"].map((name) => {
    const button = all(`#${name}-pictures li button`)[2];
    button.click();
    return Number(button.closest("li").dataset.index);
  });
  seen.changes = one("[data-changes]").textContent;
  HTMLAnchorElement.prototype.click = () => {};
  const blob = await new Promise((done) => { URL.createObjectURL = done; one("[data-download]").click(); });
  document.title = JSON.stringify({ ...seen, list: await blob.text() });
})</script>"""


def in_browser(page: Path, *options: str) -> Outline:
    """The page after its scripts have run."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", *options]
    done = process(*command, f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", page.as_uri())
    return Outline(done.stdout)


def test_its_own_policy_allows_its_script(root: Path) -> None:
    controls = [own for _, own in in_browser(root / "report.html").elements if "js" in str(own.get("class")).split()]
    assert controls
    assert not [own for own in controls if "hidden" in own]


@pytest.mark.parametrize(("width", "dark", "n_first"), [(1200, False, 45), (500, True, 18)], ids=["wide", "dark phone"])
def test_a_reader_filters_the_gallery_and_decides(
    root: Path, page: str, tmp_path: Path, width: int, dark: bool, n_first: int
) -> None:
    """The decisions become a list that train-ood accepts."""
    policy = re.search("<meta http-equiv=[^>]*>", page)  # it would not allow ours
    assert policy
    (tmp_path / "page.html").write_text(page.replace(policy[0], STEPS), encoding="utf-8")
    look = f"--window-size={width},800", f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    title = next(text for text in in_browser(tmp_path / "page.html", *look).text if text.startswith("{"))
    seen = json.loads(title)
    assert (seen["fits"], seen["broken"], seen["first"], seen["rest"]) == (True, 0, n_first, [True, True])
    assert seen["filtered"][0] == seen["filtered"][1]
    assert seen["changes"] == "1 to drop, 1 to add"
    ink, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in seen["colours"])
    assert (ink > paper) == dark
    (root / "review.csv").write_text(seen["list"])
    found = Workspace(root).find(EXPERIMENT.candidates)
    candidates = read_candidates(found)
    outcome = reviewed(root / "review.csv", candidates, found, EXPERIMENT)
    assert outcome
    assert set(outcome.is_candidate.nonzero()[0]) == ({*candidates.index} - {seen["picked"][0]}) | {seen["picked"][1]}
