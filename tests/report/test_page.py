"""The report: what it shows is what the files say, it needs nothing but itself, and no name in it is markup."""

import base64
import hashlib
import io
import json
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from helpers.cli import process
from helpers.quick import EXPERIMENT
from PIL import Image

from salcli.errors import MissingArtifactError
from salcli.params.schema import Params, load_params
from salcli.pipeline.loading import wild_samples
from salcli.progress import Silent
from salcli.report.figures import histogram_chart, roc_chart
from salcli.report.page import collect, render
from salcli.report.page_data import MethodScores
from salcli.store.files import Found
from salcli.store.formats import read_candidates
from salcli.store.layout import Workspace
from salcli.store.review import reviewed

SCORES_FILE = EXPERIMENT.evaluation("scores.h5")
METRICS_FILE = EXPERIMENT.evaluation("metrics.json")
LABELS = {"sal": "SAL", "msp": "MSP"}

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


def collected(root: Path, top: int = 30) -> dict[str, Any]:
    return collect(Workspace(root), params_of(root), root / "params.yaml", EXPERIMENT, Silent(), top=top)


@pytest.fixture(scope="module")
def report(evaluated: Path) -> dict[str, Any]:
    return collected(evaluated, top=120)


@pytest.fixture(scope="module")
def page(report: dict[str, Any]) -> str:
    return render(report)


@pytest.fixture(scope="module")
def outline(page: str) -> Outline:
    return Outline(page)


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
    for kind, scores in (("OOD", ood_scores), ("ID", -id_scores)):
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
    assert all(own["alt"] for own in outline.all("img"))
    assert all(len(str(own["aria-label"])) > 30 for own in outline.all("div", role="img"))


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


def test_names_from_the_data_are_text_and_nothing_private_is_told(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    name, scores = "".join(EVIL), np.random.default_rng(0).normal(1, 1, 50)
    one = MethodScores(name, name, scores, scores - 1, {"fpr95": 0.1, "auroc": None})
    findings, galleries = report["findings"], report["galleries"]
    charts = [histogram_chart(one), roc_chart(one), replace(report["tau"], title=name, summary=name, name=name)]
    assert all(re.fullmatch(r"[a-z0-9-]+", chart.slug) for chart in charts[:2])
    first = galleries["candidates"]
    odd = [{**first["pictures"][0], "file": evil, "class_name": evil} for evil in (name, *EVIL)]
    changed = {
        "title": name, "facts": [*report["facts"], (name, name)],
        "findings": replace(findings, experiment=replace(EXPERIMENT, ood=name), main=one),
        "training": charts,
        "galleries": {**galleries, "candidates": {**first, "pictures": [*odd, *first["pictures"]]}},
        "params": f"weights: {tmp_path}/net.pt  # https://me:secret@example.org/x <script>",
    }  # fmt: skip
    page = render(report | changed)
    page.encode()  # as text that UTF-8 can write
    outline = Outline(page)
    assert len(outline.all("script")) == 1
    assert not [own for _, own in outline.elements if "onerror" in own]
    assert all("data:image/" in str(own["src"]) for own in outline.all("img"))
    assert "49" not in " ".join(outline.text[:40])  # nobody computed {{ 7 * 7 }}
    assert "~/net.pt" in page
    assert not [private for private in (str(tmp_path), "secret") if private in page]
    assert os.uname().nodename not in str(report["facts"])


def test_what_is_missing_is_left_out_with_a_word_on_how_to_make_it(evaluated: Path, tmp_path: Path) -> None:
    root = shutil.copytree(evaluated, tmp_path / "copy")
    for pattern in ("*.csv", "scores.h5", "metrics.json", "theory.json"):
        for path in (root / "runs").rglob(pattern):
            path.unlink()
    outline = Outline(render(collected(root)))
    for sentence in ("make one with salcli evaluate", EXPERIMENT.theory("json").made_by, "no training curve"):
        assert sentence in outline.words
    assert len(outline.all("div", role="img")) == 2  # the score, and the certificate
    (root / EXPERIMENT.candidates.path).unlink()
    with pytest.raises(MissingArtifactError, match=f"make this file alone: {EXPERIMENT.candidates.made_by}"):
        collected(root)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# what a reader does; what is seen goes into the title
STEPS = """<script>addEventListener("load", async () => {
  const one = (selector) => document.querySelector(selector);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const items = all("#candidate-pictures li"), shown = () => items.filter((item) => item.offsetParent);
  const select = one("#candidate-pictures select");
  const seen = { fits: document.documentElement.scrollWidth <= innerWidth };
  seen.controls = [all(".js").length > 0, all(".js[hidden]").length];
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


@pytest.mark.parametrize(("width", "n_first"), [(1200, 45), (500, 18)], ids=["wide", "phone"])
def test_a_reader_filters_the_gallery_and_decides(
    evaluated: Path, page: str, tmp_path: Path, width: int, n_first: int
) -> None:
    """Under the page's own policy, which allows its script and here ours. train-ood accepts the list of decisions."""
    steps = re.search(r"<script>(.*)</script>", STEPS, re.DOTALL)
    assert steps
    digest = base64.b64encode(hashlib.sha256(steps[1].encode()).digest()).decode()
    allowed = page.replace("script-src ", f"script-src 'sha256-{digest}' ").replace("</head>", f"{STEPS}</head>")
    (tmp_path / "page.html").write_text(allowed, encoding="utf-8")
    seen_page = in_browser(tmp_path / "page.html", f"--window-size={width},800")
    title = next(text for text in seen_page.text if text.startswith("{"))
    seen = json.loads(title)
    assert seen["controls"] == [True, 0]
    assert (seen["fits"], seen["broken"], seen["first"], seen["rest"]) == (True, 0, n_first, [True, True])
    assert seen["filtered"][0] == seen["filtered"][1]
    assert seen["changes"] == "1 to drop, 1 to add"
    (tmp_path / "review.csv").write_text(seen["list"])
    found = Workspace(evaluated).find(EXPERIMENT.candidates)
    candidates = read_candidates(found)
    outcome = reviewed(tmp_path / "review.csv", candidates, found, EXPERIMENT)
    assert outcome
    assert set(outcome.is_candidate.nonzero()[0]) == ({*candidates.index} - {seen["picked"][0]}) | {seen["picked"][1]}
