"""The report in a real browser: no complaint, filters by class, decisions become a list that train-ood accepts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.browser import CHROMIUM, Browser
from helpers.evaluated import EXPERIMENT

from salcli.params.schema import load_params
from salcli.pipeline.review import reviewed
from salcli.progress import Silent
from salcli.report.page import collect, write_page
from salcli.store.formats import read_candidates
from salcli.store.layout import Workspace

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

SHOWN = "[...document.querySelectorAll('#candidate-pictures li')].filter(item => item.offsetParent)"
SPACE = (" ", 32, " ")


@pytest.fixture(scope="module")
def root(evaluated: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with its report."""
    root = tmp_path_factory.mktemp("browser") / "workspace"
    shutil.copytree(evaluated, root)
    params, _ = load_params(root / "params.yaml")
    report = collect(Workspace(root), params, root / "params.yaml", EXPERIMENT, Silent(), top=120)
    write_page(root / "report.html", report)
    return root


@pytest.fixture(scope="module")
def browser(root: Path) -> Iterator[Browser]:
    with Browser() as browser:
        browser.look(1200)
        yield browser


@pytest.fixture
def page(browser: Browser, root: Path) -> Browser:
    """Loaded again for each test."""
    browser.look(1200)
    browser.open(root / "report.html")
    return browser


def test_it_loads_without_a_complaint_and_its_policy_forbids_what_is_not_its_own(page: Browser) -> None:
    assert page.complaints == []
    assert page.run("document.images.length") > 50
    assert page.run("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert page.run("[...document.querySelectorAll('.js')].every(control => !control.hidden)")
    page.run("document.body.append(Object.assign(document.createElement('img'), {src: 'http://localhost:9/x.png'})); 0")
    page.run("new Promise(done => setTimeout(done, 100))")
    complaints, page.complaints = page.complaints, []
    assert any("Content Security Policy" in one for one in complaints)


def test_the_gallery_filters_by_class_from_the_keyboard(page: Browser) -> None:
    page.run("document.querySelector('#candidate-pictures select').focus()")
    page.press("ArrowDown", 40)
    chosen = page.run("document.querySelector('#candidate-pictures select').selectedOptions[0].textContent")
    name, n = chosen.removesuffix(")").split(" (")
    assert page.run(f"{SHOWN}.length") == int(n) > 0
    assert page.run(f"new Set({SHOWN}.map(item => item.dataset.predicted)).size") == 1
    assert page.run(f"{SHOWN}[0].dataset.predicted") == name
    assert page.run("document.querySelector('#candidate-pictures output').textContent").startswith(f"{n} of ")
    assert page.complaints == []


def test_the_first_tab_skips_to_the_report_and_what_is_kept_back_comes_with_a_button(page: Browser) -> None:
    page.press("Tab", 9)
    assert page.run("document.activeElement.className") == "skip"
    page.press("Enter", 13, "\r")
    assert page.run("location.hash") == "#main"
    n_all = page.run("document.querySelectorAll('#candidate-pictures li').length")
    assert page.run(f"{SHOWN}.length") == 45 < n_all
    page.run("document.querySelector('#candidate-pictures .more button').focus()")
    page.press(*SPACE)
    assert page.run(f"{SHOWN}.length") == n_all
    assert page.run("document.activeElement === document.querySelectorAll('#candidate-pictures li')[45]")


def test_decisions_become_a_list_that_train_ood_accepts(page: Browser, root: Path) -> None:
    page.run("window.made = null; URL.createObjectURL = blob => { window.made = blob; return 'data:,' }; 0")
    assert page.run("document.querySelector('[data-download]').disabled")
    picked = []
    for gallery in ("candidate", "below"):
        button = f"document.querySelectorAll('#{gallery}-pictures li button')[2]"
        picked.append(int(page.run(f"{button}.closest('li').dataset.index")))
        page.run(f"{button}.focus()")
        page.press(*SPACE)
        assert page.run(f"{button}.getAttribute('aria-pressed')") == "true"
    assert page.run("document.querySelector('[data-changes]').textContent") == "1 to drop, 1 to add"
    page.run("document.querySelector('[data-download]').click()")
    (root / "review.csv").write_text(page.run("window.made.text()"))
    found = Workspace(root).find(EXPERIMENT.candidates)
    candidates = read_candidates(found)
    outcome = reviewed(root / "review.csv", candidates, found, EXPERIMENT)
    assert outcome
    assert set(outcome.is_candidate.nonzero()[0]) == ({*candidates.index} - {picked[0]}) | {picked[1]}


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_and_follows_the_dark(dark: bool, browser: Browser, root: Path) -> None:
    browser.look(390, 844, dark=dark, phone=True)
    browser.open(root / "report.html")
    assert browser.run("document.documentElement.scrollWidth") <= 390
    ink, paper = (browser.run(f"getComputedStyle(document.body).{what}") for what in ("color", "backgroundColor"))
    brightness = [sum(int(part) for part in one[4:-1].split(",")[:3]) for one in (ink, paper)]
    assert (brightness[0] > brightness[1]) == dark
    # lines and text of the charts follow
    line = browser.run("getComputedStyle(document.querySelector('.chart svg text')).fill")
    assert (line == ink) or (sum(int(part) for part in line[4:-1].split(",")[:3]) > 382) == dark
    assert browser.complaints == []
