"""Properties of the embedded corpus."""

from pathlib import Path

import pytest
import torch

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
    first, again = load_corpus(limit_bytes=500_000), load_corpus(limit_bytes=500_000)
    assert torch.equal(first.train, again.train)
    assert torch.equal(first.validation, again.validation)
    assert (first.files, first.validation_files, first.digest) == (again.files, again.validation_files, again.digest)


def test_only_source_of_the_library_itself_is_read(library: Path) -> None:
    corpus = load_corpus(root=library)
    assert len(corpus.files) == 200
    assert all(path.startswith("package") and path.endswith(".py") for path in corpus.files)
    assert list(corpus.files) == sorted(corpus.files)


def test_split_is_disjoint_complete_and_about_the_asked_fraction() -> None:
    corpus = load_corpus()
    assert set(corpus.validation_files) < set(corpus.files)
    part = len(corpus.validation_files) / len(corpus.files)
    assert part == pytest.approx(VALIDATION_FRACTION, abs=0.03)


def test_splits_hold_exactly_their_files_in_the_order_of_paths(library: Path) -> None:
    corpus = load_corpus(root=library)
    training_files = [path for path in corpus.files if path not in corpus.validation_files]
    assert bytes(corpus.train.tolist()) == b"".join((library / path).read_bytes() for path in training_files)
    assert bytes(corpus.validation.tolist()) == b"".join((library / p).read_bytes() for p in corpus.validation_files)


def test_a_file_keeps_its_side_when_the_limit_changes(library: Path) -> None:
    large, small = load_corpus(root=library), load_corpus(10_000, root=library)
    assert set(small.files) < set(large.files)
    assert set(small.validation_files) == set(large.validation_files) & set(small.files)


@pytest.mark.parametrize("limit", [10_000, 10_099])
def test_limit_bounds_the_bytes_read(library: Path, limit: int) -> None:
    corpus = load_corpus(limit, root=library)
    assert len(corpus.train) + len(corpus.validation) == 10_000


def test_digest_sees_a_changed_byte(library: Path) -> None:
    before = load_corpus(root=library)
    path = library / before.files[0]
    path.write_bytes(path.read_bytes().replace(b".", b",", 1))
    assert load_corpus(root=library).digest != before.digest


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
