"""`gramian init`: a config that trains what is there, with comments, and one line for what cannot be."""

import gzip
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gramian.cli import main
from gramian.train.config.config import load_config
from gramian.train.config.example_configs import example_names, example_text, fill
from tests.train.test_examples import save_model

TINY = [
    "run.steps=2",
    "run.device=cpu",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "data.length=16",
    "data.workers=0",
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def book(folder: Path, name: str = "book.txt", lines: int = 400) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(f"line {number} of a book\n" for number in range(lines)))


def test_one_text_file_trains_with_two_commands(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book(here)
    assert main(["init"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run.toml: trains a small GPT on book.txt (1 file, 7.5 KB)" and lines[2].split()[:3] == [
        "gramian",
        "train",
        "run.toml",
    ]
    config = load_config("run.toml")
    assert (config.data.source, config.data.files, config.run.folder) == ("text", ("book.txt",), "runs/run")
    assert config.data.batch <= 16 and "# of its residual stream" in Path("run.toml").read_text()
    assert main(["train", "run.toml", *TINY, "schedule.warmup=0"]) == 0


def test_a_model_folder_is_fine_tuned_with_its_tokenizer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(here / "gpt2")
    book(here / "texts")
    assert main(["init", "new", "--model", "gpt2", "--text", "texts"]) == 0
    assert capsys.readouterr().out.startswith("new/run.toml: fine-tunes gpt2 on texts")
    config = load_config("new/run.toml")
    assert (config.model.kind, config.model.path, config.data.tokenizer) == ("huggingface", "gpt2", "gpt2")
    assert (config.data.length, config.run.folder) == (32, "runs/new")  # its context
    assert main(["train", "new/run.toml", "run.steps=2", "run.device=cpu", "data.workers=0", "schedule.warmup=0"]) == 0


def test_without_anything_the_embedded_corpus_is_trained_on(here: Path) -> None:
    assert main(["init", "a"]) == 0
    assert load_config("a/run.toml").data.source == "embedded"


def test_json_lines_are_found(here: Path) -> None:
    (here / "chat.jsonl").write_text('{"id": "a long name", "text": "one"}\n' * 99)
    lines = [json.dumps({"title": "short", "body": f"a longer text {number}"}) for number in range(99)]
    (here / "posts.ndjson").write_text("\n".join(lines))
    for name, field in (("chat.jsonl", "text"), ("posts.ndjson", "body")):
        assert main(["init", name[:4], "--text", name]) == 0
        config = load_config(f"{name[:4]}/run.toml")
        assert (config.data.source, config.data.field) == ("jsonl", field)
    save_model(here / "gpt2")
    assert main(["init", "tuned", "--model", "gpt2", "--text", "posts.ndjson"]) == 0
    assert load_config("tuned/run.toml").data.field == "body"
    assert (
        main(["train", "tuned/run.toml", "run.steps=1", "run.device=cpu", "data.workers=0", "schedule.warmup=0"]) == 0
    )


def test_a_short_text_has_short_windows(here: Path) -> None:
    book(here, lines=20)
    assert main(["init"]) == 0
    config = load_config("run.toml")
    assert (
        config.data.length < 32 and main(["train", "run.toml", *TINY[:-2], "data.workers=0", "schedule.warmup=0"]) == 0
    )


def test_what_cannot_be_trained_on_is_refused_before_a_config_is_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "ein Bär läuft\n" * 99
    (here / "empty.txt").touch()
    (here / "wide.txt").write_text(words, encoding="utf-16")
    (here / "unmarked.txt").write_text(words, encoding="utf-16-le")
    (here / "latin.txt").write_text(words, encoding="latin-1")
    (here / "packed.txt").write_bytes(gzip.compress(words.encode()))
    (here / "numbers.jsonl").write_text("[1]\n" * 99)
    (here / "broken.jsonl").write_text("{'text': 1}\n" * 99)
    (here / "blank.jsonl").write_text("\n\n")
    (here / "one.jsonl").write_text('{"one": "text"}\n' * 99)
    (here / "two.jsonl").write_text('{"two": "text"}\n' * 99)
    (here / "half.jsonl").write_text('{"\\ud800k": "text"}\n' * 99)
    (here / "mixed").mkdir()
    (here / "mixed" / "a.md").write_text(words)
    (here / "mixed" / "b.jsonl").write_text('{"one": "text"}\n' * 99)
    (here / "none").mkdir()
    (here / "none" / "picture.png").write_bytes(b"x" * 999)
    for names, line in (
        (["empty.txt"], "0 bytes are about 0 tokens; expected at least 256"),
        (["wide.txt"], "wide.txt: is UTF-16 and not UTF-8; expected text in UTF-8"),
        (["unmarked.txt"], "unmarked.txt: "),
        (["latin.txt"], "latin.txt: byte 5 is not UTF-8; expected text in UTF-8"),
        (["packed.txt"], "packed.txt: is compressed by gzip and not UTF-8; expected text in UTF-8"),
        (["numbers.jsonl"], "numbers.jsonl: its first lines are no objects; expected one JSON object per line"),
        (["broken.jsonl"], "broken.jsonl: its first lines are not JSON; expected one JSON object per line"),
        (["blank.jsonl"], "blank.jsonl: is empty; expected one JSON object per line"),
        (
            ["one.jsonl", "two.jsonl"],
            "two.jsonl: no key of its lines holds text or messages in all files; expected such a key",
        ),
        (["mixed"], "text (mixed/a.md) and jsonl (mixed/b.jsonl); expected files of one kind"),
        (["none"], "none has no file to read; expected files ending in .txt, .md"),
        (["half.jsonl"], "a name or a key is not UTF-8; expected one that is"),
    ):
        assert main(["init", "--text", *names]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"gramian: argument --text: {line}") and error.count("\n") == 1, error
    assert not Path("run.toml").exists()


def test_the_key_of_json_lines_is_found_and_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = "https://example.org/" + "x" * 200
    rows = [{"url": address, "n": 1, "body": "short"}, {"url": address, "body": "text " * 40, "n": 2}] * 9
    content = "\ufeff" + "".join(json.dumps(row) + "\n" for row in rows)  # with the mark of Windows' editors
    (here / "posts.jsonl").write_text(content)
    (here / "books.jsonl").write_text(json.dumps({"title": "t", "body": "word " * 300_000}) + "\n")
    assert main(["init", "a", "--text", "posts.jsonl", "books.jsonl"]) == 0
    assert 'texts under "body")' in capsys.readouterr().out
    assert main(["train", "a/run.toml", *TINY, "schedule.warmup=0"]) == 0


def test_odd_names_and_project_folders(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book(here, "b\x7fk 'ü\".txt")
    assert main(["init", "a", "--text", "b\x7fk 'ü\".txt"]) == 0
    assert load_config("a/run.toml").data.files == ("b\x7fk 'ü\".txt",)
    (here / "pyproject.toml").touch()
    assert main(["init"]) == 0 and load_config("run.toml").data.source == "embedded"
    for number, content in enumerate(("[]", '{"n_positions": 0}', '{"n_positions": -1}')):
        (here / f"m{number}").mkdir()
        (here / f"m{number}" / "config.json").write_text(content)
        assert main(["init", f"c{number}", "--model", f"m{number}", "--text", "b\x7fk 'ü\".txt"]) == 0
        assert tomllib.loads(Path(f"c{number}/run.toml").read_text())["data"]["length"] == 117


@pytest.mark.parametrize("name", example_names())
def test_every_example_can_be_written(here: Path, name: str) -> None:
    assert main(["init", "--example", name]) == 0
    assert Path("run.toml").read_text() == example_text(name)


def test_bad_input_exits_2_with_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(here / "one")
    save_model(here / "two")
    (here / "odd").mkdir()
    capsys.readouterr()
    for arguments, words in (
        (["--example", "none"], "argument --example: 'none' is unknown; expected chat, distill, "),
        (["--text", "missing.txt"], "argument --text: missing.txt does not exist; expected"),
        (["--model", "odd"], "argument --model: odd has no readable config.json; expected"),
        (["--example", "kfac", "--model", "one"], "argument --example: is written as it is; expected"),
        ([], "argument --model: one, two are models; expected one of them"),
        (
            ["--model", "one"],
            "argument --text: none given, and no text file in .; expected what to train --model one on",
        ),
    ):
        assert main(["init", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"gramian: {words}") and error.count("\n") == 1, error
    assert not Path("run.toml").exists()
    assert main(["init", "--example", "kfac"]) == 0 and main(["init"]) == 2
    assert capsys.readouterr().err.startswith("gramian: run.toml: is already there; expected another DIR")


@pytest.mark.parametrize("value", ["a b", 'quo"te', "ü\\", ["a", "b"], [], 3, 0.5, True])
def test_values_are_filled_in_and_comments_stay(value: Any) -> None:
    text = '[run]  # one\nfolder = "x"   # where\nsteps = 1  # how many\n# [teacher]\n# path = 1  # of it\n'
    filled = fill(text, {"run.folder": value})
    assert tomllib.loads(filled) == {"run": {"folder": value, "steps": 1}} and "# where" in filled
    with pytest.raises(KeyError, match="run.other"):
        fill(text, {"run.other": 1})
