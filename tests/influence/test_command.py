"""`gramian influence`: a model folder and a run's config, what is written, what is refused in one line."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gramian.cli import main
from gramian.influence.corpus import from_folder
from gramian.influence.influence_page import page_html
from tests.cli.test_curvature import TINY, hf_folder, text_file
from tests.train.conftest import untouched_process  # noqa: F401
from tests.train.runs import run, small


def build(folder: Path, *more: str) -> int:
    made = folder / "model"
    if not made.exists():
        hf_folder(made, "gpt2")
        text_file(folder)
    where = ["--model", str(made), "--text", str(folder / "text.txt"), "--out", str(folder / "index")]
    return main(["influence", "build", *where, "--length", "8", "--batch", "4", "--device", "cpu", *more])


def test_a_model_folder_is_built_and_queried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(tmp_path, "--gradients", "1MB", "--passages", "12") == 0
    assert "compressed gradients of rank" in capsys.readouterr().out
    asked = tmp_path / "queries.jsonl"
    words = (tmp_path / "text.txt").read_text().split()
    lines = [{"prompt": " ".join(words[:3]), "completion": words[3]}, {"prompt": words[0]}]
    asked.write_text("\n".join(json.dumps(line) for line in lines))
    common = ["influence", "query", str(tmp_path / "index"), "--queries", str(asked), "--top", "2", "--device", "cpu"]
    assert main(common) == 0
    assert main([*common, "--exact", "--self", "--out", str(tmp_path / "exact")]) == 0
    found = [json.loads((tmp_path / name / "influence.json").read_text()) for name in ("index/query", "exact")]
    assert [one["source"] for one in found] == ["gradients", "passages"]
    first, second = (one["queries"][0] for one in found)
    assert first["nats"] == second["nats"] and first["likelier"] and len(first["likelier"]) <= 2
    for side in ("likelier", "less_likely"):
        for query in second[side]:
            assert sum(query["token_scores"]) == pytest.approx(query["score"], rel=1e-3, abs=1e-4)
    exact = {one["passage"]: one["score"] for one in second["likelier"]}
    for one in first["likelier"]:
        assert one["passage"] not in exact or one["score"] == pytest.approx(exact[one["passage"]], rel=1e-5)
    assert len(found[1]["self_influence"]) == 2
    assert load_file(tmp_path / "exact" / "scores.safetensors")["scores"].shape == (2, 12)
    page = (tmp_path / "exact" / "influence.html").read_text()
    assert "Made it likelier" in page and "Largest self-influence" in page and "http" not in page.split("</style>")[1]


def test_a_run_is_built_and_queried(tmp_path: Path) -> None:
    config = small(tmp_path / "run", **TINY, run={"steps": 2}, schedule={"warmup": 0})
    run(config)
    path = tmp_path / "run.toml"
    path.write_text(config.toml())
    index = str(tmp_path / "index")
    options = ["--passages", "6", "--factors", "kfac", "--device", "cpu", "--out", index]
    assert main(["influence", "build", str(path), *options]) == 0
    assert main(["influence", "query", index, "--prompt", "def ", "--completion", "main", "--device", "cpu"]) == 0
    found = json.loads((Path(index) / "query" / "influence.json").read_text())
    assert found["passages"] == 6 and found["queries"][0]["completion"] == "main"


def test_a_page_shows_text_and_not_what_it_says() -> None:
    token = "<script>alert(1)</script>"
    one = {"passage": 0, "score": -1.0, "tokens": [token], "token_scores": [-1.0], "modules": {"<b>": -1.0}}
    query = {"prompt": token, "completion": token, "nats": 1.0, "likelier": [one], "less_likely": []}
    page = page_html(token, {"passages": 1, "tokens": 1, "source": "passages", "queries": [query]})
    assert "<script" not in page and page.count("&lt;script&gt;") >= 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["build", "--out", "index"], "influence build: expected either CONFIG.toml or --model PATH --text FILE…"),
        (["build", "--model", "m", "--out", "index"], "argument --text: none given; expected text files for --model"),
        (["build", "c.toml", "--length", "4", "--out", "i"], "argument --length: is for --model"),
        (
            ["build", "c.toml", "--factors", "all", "--out", "i"],
            "argument --factors: 'all'; expected one of kfac, ekfac",
        ),
        (["build", "c.toml", "--memory-budget", "x", "--out", "i"], "argument --memory-budget: expected bytes"),
        (["query", "nowhere", "--prompt", "a"], "argument INDEX: nowhere has no index.json"),
        (["query", "nowhere"], "influence query: expected --prompt, --completion or --queries FILE.jsonl"),
        (["query"], "INDEX: none given; expected"),
        ([], "build | query: none given; expected"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["influence", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.removeprefix("gramian: ").startswith(message), said


def test_what_a_model_folder_or_a_file_of_queries_lacks_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(tmp_path, "--passages", "4", "--factors", "kfac") == 0
    (tmp_path / "bad.jsonl").write_text('{"prompt": 3}\n')
    index = str(tmp_path / "index")
    for arguments, message in (
        (["--queries", str(tmp_path / "bad.jsonl")], "argument --queries: line 1 of"),
        (["--queries", str(tmp_path / "none.jsonl")], "argument --queries: "),
        (["--queries", str(tmp_path / "bad.jsonl"), "--prompt", "a"], "argument --queries: beside --prompt"),
        (["--prompt", "a", "--device", "tpu"], "argument --device: 'tpu'; expected cpu or cuda"),
    ):
        capsys.readouterr()
        assert main(["influence", "query", index, *arguments]) == 2
        assert capsys.readouterr().err.removeprefix("gramian: ").startswith(message)
    assert build(tmp_path, "--passages", "4", "--factors", "ekfac") == 2
    assert "argument --out: " in capsys.readouterr().err


def test_passages_are_the_windows_of_the_text(tmp_path: Path) -> None:
    import torch

    hf_folder(tmp_path / "model", "gpt2")
    found = from_folder(str(tmp_path / "model"), [str(text_file(tmp_path))], torch.device("cpu"), 8, None)
    assert torch.equal(found.tokens_NT[:, 1:], found.targets_NT[:, :-1]) and found.tokens_NT.shape[1] == 8
    assert found.text(0).split() == (tmp_path / "text.txt").read_text().split()[:9]
