"""The page in headless Chromium: every chart is drawn, toggles work, at both widths and in both themes. `make test-browser`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gramian.report import write_report
from tests.report import run_folders

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not Path(CHROMIUM).is_file(), reason="needs Chromium: apt install chromium, or CHROMIUM=path"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("runs")
    teacher = run_folders.plain(base / "teacher")
    run_folders.curved(teacher / "curvature")
    folders = [teacher, run_folders.distilled(base / "goose", teacher), run_folders.private(base / "private")]
    return write_report(folders, base / "page.html")


@pytest.fixture
def opened(browser: Any, report: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, drawn; at the end there was no error, no warning, and no request but for the file."""
    width, theme = getattr(request, "param", (1280, "light"))
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    said: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda one: requests.append(one.url))
    page.goto(report.as_uri())
    page.wait_for_function("document.documentElement.dataset.drawn !== undefined")
    yield page
    assert said == [] and requests == [report.as_uri()]
    page.close()


VIEWS = [(width, theme) for width in (390, 1280) for theme in ("light", "dark")]


@pytest.mark.parametrize("opened", VIEWS, indirect=True, ids=lambda view: f"{view[0]}-{view[1]}")
def test_every_chart_has_marks_and_fits(opened: Any) -> None:
    charts = opened.evaluate(
        """[...document.querySelectorAll('.chart')].map(chart => ({
            label: chart.getAttribute('aria-label'), svg: chart.querySelectorAll('svg').length,
            marks: [...chart.querySelectorAll('.role-mark path, .role-mark line')].filter(
                mark => { const box = mark.getBBox(); return box.width + box.height > 0; }).length,
            wide: chart.querySelector('svg').getBoundingClientRect().right > innerWidth }))"""
    )
    assert len(charts) >= 20
    assert [chart for chart in charts if chart["svg"] != 1 or not chart["marks"] or chart["wide"]] == []
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("opened", [(1280, "light"), (390, "dark")], indirect=True, ids=("light", "dark"))
def test_the_theme_follows_the_system_and_its_button(opened: Any) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    label = "getComputedStyle(document.querySelector('.chart svg .role-axis-label text')).fill"
    button = opened.locator("#theme")
    before, text, pressed = opened.evaluate(colour), opened.evaluate(label), button.get_attribute("aria-pressed")
    button.focus()
    opened.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") != pressed
    assert opened.evaluate(colour) != before and opened.evaluate(label) != text
    opened.keyboard.press("Space")
    assert (opened.evaluate(colour), opened.evaluate(label)) == (before, text)


def test_a_run_is_hidden_and_shown_by_its_button(opened: Any) -> None:
    lines = "document.querySelectorAll('.chart')[0].querySelectorAll('.mark-line path').length"
    button = opened.locator("button.run[data-run=private]")
    before = opened.evaluate(lines)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert opened.evaluate(lines) < before
    assert opened.locator("article[data-run=private]:visible").count() == 0
    button.click()
    assert opened.evaluate(lines) == before and button.get_attribute("aria-pressed") == "true"


def test_all_runs_may_be_hidden(opened: Any) -> None:
    for button in opened.locator("button.run").all():
        button.click()
    assert opened.evaluate("document.querySelectorAll('.chart')[0].querySelectorAll('.mark-line path').length") == 0


def test_the_summary_sorts(opened: Any) -> None:
    cells = "[...document.querySelectorAll('table.summary tbody tr')].map(row => row.cells[0].textContent.trim())"
    head = opened.locator("table.summary th[data-field=run]")
    for expected in (["goose", "private", "teacher"], ["teacher", "private", "goose"]):
        head.locator("button").focus()
        opened.keyboard.press("Enter")
        assert opened.evaluate(cells) == expected
    assert head.get_attribute("aria-sort") == "descending"


def test_tables_open_by_the_keyboard_and_points_have_tooltips(opened: Any) -> None:
    article = opened.locator("article", has=opened.locator("h3", has_text="Perplexity"))
    article.locator("summary").focus()
    opened.keyboard.press("Enter")
    assert article.locator("table").is_visible()
    mark = article.locator(".chart .mark-symbol path").nth(30)
    mark.hover(force=True)
    assert "step" in opened.locator("#vg-tooltip-element.visible").inner_text()
