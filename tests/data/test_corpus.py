"""Properties of the embedded corpus."""

from pathlib import Path

import pytest

from gramian.core.errors import GramianError
from gramian.data.embedded_corpus import VALIDATION_FRACTION, load_corpus


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder with 200 source files of 100 bytes, and files that do not belong to the corpus."""
    for index in range(200):
        content = f"# module {index:03d} ".encode().ljust(99, b".") + b"\n"
        path = tmp_path / f"package{index % 7}" / f"module{index:03d}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    for stray in (
        "site-packages/other.py",
        "dist-packages/other.py",
        "package0/test/test_it.py",
        "package0/tests/test_it.py",
        "idlelib/idle_test/test_it.py",
        "package0/__pycache__/cached.py",
        "config-3.0-some-build/config.py",
        "_sysconfigdata_some_build.py",
        "sitecustomize.py",
        "package0/data.txt",
    ):
        path = tmp_path / stray
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"stray")
    return tmp_path


def test_two_readings_are_equal() -> None:
    assert load_corpus(limit_bytes=500_000) == load_corpus(limit_bytes=500_000)


def test_only_source_of_the_library_itself_is_read(library: Path) -> None:
    corpus = load_corpus(root=library)
    files = [*corpus.train, *corpus.validation]
    assert len(set(files)) == len(files) == 200
    assert all(path.startswith("package") and path.endswith(".py") for path in files)


def test_split_is_about_the_asked_fraction() -> None:
    corpus = load_corpus()
    part = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
    assert part == pytest.approx(VALIDATION_FRACTION, abs=0.03)


def test_splits_hold_exactly_their_files_in_the_order_of_paths(library: Path) -> None:
    corpus = load_corpus(root=library)
    for files in (corpus.train, corpus.validation):
        assert list(files) == sorted(files)
        assert all(content == (library / path).read_bytes() for path, content in files.items())


def test_a_file_keeps_its_side_when_the_limit_changes(library: Path) -> None:
    large, small = load_corpus(root=library), load_corpus(10_000, root=library)
    assert small.train.items() < large.train.items() and small.validation.items() <= large.validation.items()


@pytest.mark.parametrize("limit", [10_000, 10_099])
def test_limit_bounds_the_bytes_read(library: Path, limit: int) -> None:
    corpus = load_corpus(limit, root=library)
    assert sum(len(content) for content in [*corpus.train.values(), *corpus.validation.values()]) == 10_000


@pytest.mark.parametrize("case", ["missing", "zip", "no source", "limit"])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, case: str) -> None:
    root = tmp_path / "library"
    if case == "zip":
        root.write_bytes(b"PK")
    elif case != "missing":
        root.mkdir()
    if case == "limit":
        (root / "module.py").write_bytes(b"x" * 100)
    with pytest.raises(GramianError) as caught:
        load_corpus(limit_bytes=50, root=root)
    assert "expected" in str(caught.value)
    assert "\n" not in str(caught.value)
