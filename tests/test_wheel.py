"""The walk of docs/how-to/first_run.md from the wheel: installed alone, in an empty folder, text in and model out."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.full  # building a wheel needs the package index, for setuptools


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "gramian", source / "gramian", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(source)]
    subprocess.run(command, check=True)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("gramian/")}
    there = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "gramian").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == there


def test_text_goes_in_and_a_model_comes_out(wheel: Path, tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    (work / "book.txt").write_text("The owl and the pussycat went to sea in a beautiful pea-green boat.\n" * 400)
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def gramian(*arguments: str) -> str:
        command = [sys.executable, "-m", "gramian", *arguments]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = subprocess.run(
        [sys.executable, "-c", "import gramian; print(gramian.__file__)"],
        cwd=work, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(site)
    assert "book.txt" in gramian("init", "--text", "book.txt")
    short = ("run.steps=20", "schedule.warmup=2", "model.layers=1", "model.width=32", "model.heads=2", "data.length=32")
    assert "done at step 20" in gramian("train", "run.toml", *short)
    assert "perplexity" in gramian("eval", "runs/run")
    assert gramian("eval", "runs/run", "--prompt", "The ").splitlines()[1].startswith("The ")
    gramian("export", "runs/run", "my-model")
    assert (work / "my-model" / "model.safetensors").exists() and (work / "runs/run/report.html").exists()
    assert "private" in gramian("init", "second", "--example", "private")
