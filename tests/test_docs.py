"""Code blocks in the README and the docs run as written."""

import importlib
import logging
import re
from pathlib import Path

import pytest

from benchmarks import optimizer_tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


@pytest.fixture(autouse=True)
def levels():
    """Pages show how to hear more of a logger; tests that come later hear what they did."""
    loggers = [logging.getLogger(name) for name in ("", "gramian", "gramian.curvature")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_python_blocks_of_a_page_run_in_order(page):
    namespace = {"__name__": "page"}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    for target in re.findall(
        r"\b((?:gramian|tests|benchmarks|docs|examples)/[\w/]+\.(?:py|md|toml))\b", page.read_text()
    ):
        assert (ROOT / target).exists(), target


def test_tables_of_the_optimizer_race_are_those_of_its_rows():
    """`python -m benchmarks.optimizer_tables` writes them."""
    text = optimizer_tables.PAGE.read_text()
    assert "<!-- race -->" in text and optimizer_tables.page(text) == text


def test_the_table_of_changes_names_files_that_exist():
    rows = re.findall(r"^\| (?!to add|-)(.*?) \| (.*?) \| (.*?) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    named = {
        folder: re.findall(r"`([\w/]+(?:\.py|\.md|/))`", " ".join(row[column] for row in rows))
        for column, folder in ((1, "gramian"), (2, "tests"))
    }
    assert len(rows) >= 20 and all(len(paths) > 10 for paths in named.values())
    for folder, paths in named.items():
        for path in paths:
            places = (ROOT / folder, ROOT, ROOT / "gramian/privacy/clipping")
            assert any((place / path).exists() for place in places), path


def test_the_table_of_traps_names_tests_that_exist():
    rows = re.findall(r"^\| .*? \| .*? \| (`.*?`) \|$", (ROOT / "docs/concepts/batch_rules.md").read_text(), re.M)
    paths = re.findall(r"`([\w./]+\.py)`", " ".join(rows))
    assert len(rows) > 30 and not {path for path in paths if not (ROOT / "tests/taps" / path).exists()}


@pytest.mark.parametrize("page", sorted((ROOT / "gramian/examples").iterdir()), ids=lambda page: page.name)
def test_what_an_example_imports_exists(page):
    for module, names in re.findall(r"from (gramian[\w.]*) import ([\w, ]+)", page.read_text(encoding="utf-8")):
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), (module, name)
