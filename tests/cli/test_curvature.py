"""`gramian curvature`: configs, runs, Hugging Face folders; what is written, what is refused, what an interruption leaves."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gramian.analysis import Settings, Subject, measure
from gramian.analysis.plots import available
from gramian.cli import main
from gramian.cli.curvature import curvature
from gramian.cli.terminal import make_console
from gramian.core.byte_amounts import format_bytes
from gramian.parallel.process_grid import ProcessGrid
from gramian.train.config.config import load_config
from tests.train.conftest import untouched_process  # noqa: F401
from tests.train.distilled import WORDS
from tests.train.runs import run, small

TINY = {"model": {"layers": 1, "width": 8, "heads": 1}, "data": {"length": 8, "limit_bytes": 100_000}}
QUICK = ["--tokens", "16", "--eigenvalues", "2", "--steps", "2", "--probes", "2", "--device", "cpu"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config whose run there is not."""
    path = tmp_path / "tiny.toml"
    path.write_text(small(tmp_path / "run", **TINY).toml())
    return path


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of drawing that a test does not look at."""
    monkeypatch.setattr("gramian.analysis.plots.available", lambda: False)


def text_file(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(" ".join(WORDS * 9))
    return path


def hf_folder(folder: Path, kind: str) -> Path:
    """A tiny GPT-2, or a tiny BERT with or without a head, with a tokenizer of words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]", "[END]"]
    words = {word: i for i, word in enumerate([*special, *dict.fromkeys(" ".join(WORDS).split())])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    named |= (
        {"eos_token": "[END]"}
        if kind == "gpt2"
        else {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    torch.manual_seed(0)
    if kind == "gpt2":
        shape = transformers.GPT2Config(vocab_size=len(words), n_positions=16, n_embd=8, n_layer=2, n_head=2)
        transformers.GPT2LMHeadModel(shape).save_pretrained(folder)
        return folder
    shape = transformers.BertConfig(
        vocab_size=len(words), hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=24,
    )  # fmt: skip
    (transformers.BertForMaskedLM if kind == "bert-mlm" else transformers.BertModel)(shape).save_pretrained(folder)
    return folder


def result_of(folder: Path) -> dict:
    return json.loads((folder / "curvature.json").read_text())


@pytest.mark.full
def test_a_config_without_a_run_has_fresh_weights_and_says_so(config: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["curvature", str(config), "--methods", "--out", str(out), *QUICK]) == 0
    told, result = capsys.readouterr().out, result_of(out)
    assert "fresh weights" in told and "stages one after another" in told and "whole model" in told
    for layer in ("token_embedding", "blocks.0.qkv", "blocks.0.mlp_out", "head"):
        assert layer in told
    assert result["complete"] and result["model"]["weights"] == "fresh" and result["data"]["tokens"] == 16
    assert result["kfac"]["record"]["layers"]["head"]["estimate"] == "mc"
    pictures = {"spectra.png", "depth.png", "density.png"} if available() else set()
    assert {path.name for path in out.iterdir()} == {"curvature.json", "methods.md"} | pictures
    assert all((out / name).stat().st_size > 10_000 for name in pictures)


@pytest.mark.usefixtures("no_pictures")
def test_the_pac_bayes_proxy_needs_its_n_and_is_called_no_bound(config: Path, tmp_path: Path, capsys) -> None:
    for asked in ([], ["--samples", "400"]):
        out = tmp_path / f"out{len(asked)}"
        assert main(["curvature", str(config), "--methods", "--out", str(out), *QUICK, "--probes", "0", *asked]) == 0
        told, metrics = capsys.readouterr().out, result_of(out)["kfac"]["metrics"]
        for found in (metrics["model"], metrics["layers"]["head"]):
            assert ("pac_bayes" in found) == bool(asked)
            assert not asked or found["pac_bayes"] == pytest.approx((found["trace"] / 400) ** 0.5)
        assert ("√(trace/n), n = 400; no bound" in told) == bool(asked)
        assert ("n = 400 is reported as a heuristic" in (out / "methods.md").read_text()) == bool(asked)


@pytest.mark.usefixtures("no_pictures")
def test_the_weights_are_those_of_the_run_s_checkpoint(config: Path, tmp_path: Path, capsys) -> None:
    path = tmp_path / "trained.toml"
    told = small(tmp_path / "run", **TINY, run={"steps": 6}, schedule={"warmup": 1}, eval={"every": 3, "windows": 2})
    path.write_text(told.toml())
    run(load_config(path))
    out = tmp_path / "out"
    assert main(["curvature", str(path), "--out", str(out), *QUICK, "--probes", "0"]) == 0
    assert result_of(out)["model"]["weights"].startswith("step ") and "step " in capsys.readouterr().out
    assert main(["curvature", str(config), *QUICK]) == 2  # another config, the same folder
    assert "run.folder: " in (line := capsys.readouterr().err) and "holds a run of another config" in line


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("kind", "probes"),
    [("bert", 0), *(pytest.param(kind, 2, marks=pytest.mark.full) for kind in ("bert", "bert-mlm"))],
)
def test_an_encoder_is_scored_on_masked_tokens_and_labelled_so(kind: str, probes: int, tmp_path: Path, capsys) -> None:
    folder, out = hf_folder(tmp_path / "model", kind), tmp_path / "out"
    asked = ["--model", str(folder), "--masked", "--text", str(text_file(tmp_path)), "--length", "20", "--methods"]
    assert main(["curvature", *asked, "--out", str(out), *QUICK, "--probes", str(probes)]) == 0
    label = {"bert": "scored against the model's own input embeddings", "bert-mlm": "scored by the model's own head"}[
        kind
    ]
    told, result = capsys.readouterr().out, result_of(out)
    assert label in told and label in result["notes"][0] and label in (out / "methods.md").read_text()
    assert result["data"]["terms"] == 3 * result["data"]["windows"]  # 15 % of the 18 tokens between the ends
    layers = result["kfac"]["record"]["layers"]
    assert not any("pooler" in name for name in layers) and result["kfac"]["metrics"]["model"]["coverage"]["none"] == 0
    inside = layers[f"model.{'' if kind == 'bert' else 'bert.'}encoder.layer.0.output.dense"]
    assert inside["T"] == 20 * result["data"]["windows"]  # tokens that are not masked count, too
    assert ("ggn" in result) == bool(probes) and "gramian[plot]" in told


@pytest.mark.full
def test_a_causal_model_is_scored_on_the_next_token(tmp_path: Path) -> None:
    """By hand: the loss of the library's own labels, and the number of terms."""
    import transformers

    folder, out = hf_folder(tmp_path / "model", "gpt2"), tmp_path / "out"
    text = text_file(tmp_path)
    asked = ["--model", str(folder), "--text", str(text), "--length", "9", "--tokens", "100000", "--batch", "3"]
    assert main(["curvature", *asked, "--out", str(out), "--device", "cpu", "--probes", "0", "--hessian"]) == 0
    result = result_of(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([*tokenizer.encode(text.read_text()), tokenizer.eos_token_id])
    windows = ids[: len(ids) // 10 * 10].view(-1, 10)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        loss = model(input_ids=windows, labels=windows).loss
    assert result["kfac"]["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert result["data"]["terms"] == 9 * len(windows) and result["notes"] == []
    assert main(["curvature", "--model", str(hf_folder(tmp_path / "bert", "bert")), "--text", str(text)]) == 2


@pytest.mark.usefixtures("no_pictures")
def test_policy_and_budget_are_those_of_the_config_unless_an_option_gives_them(config: Path, tmp_path: Path) -> None:
    told = ["kfac.kfac_policy=small_only", "kfac.memory_budget=700KB"]
    for name, asked, policy, budget in (
        ("config", [], "small_only", "700KB"),
        ("options", ["--policy", "auto", "--memory-budget", "2GB"], "auto", "2GB"),
    ):
        out = tmp_path / name
        assert main(["curvature", str(config), *told, "--out", str(out), *QUICK, "--probes", "0", *asked]) == 0
        record = result_of(out)["kfac"]["record"]
        assert (record["options"]["kfac_policy"], record["options"]["memory_budget"]) == (policy, budget)
        assert record["bytes"] <= 700e3 or name == "options"


@pytest.mark.usefixtures("no_pictures")
def test_an_analysis_that_does_not_fit_on_the_gpu_runs_on_the_cpu_and_says_so(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan that says "cuda" stands for the GPU: it has a kilobyte."""
    plan_of, plans = measure.plan_of, []

    def planned(*given):
        plans.append(plan_of(*given))
        return plans[-1] if len(plans) > 1 else replace(plans[0], device=torch.device("cuda"))

    monkeypatch.setattr(measure, "plan_of", planned)
    monkeypatch.setattr("gramian.analysis.analysis_plan._free", lambda device: 1000 if device.type == "cuda" else 10**9)
    assert main(["curvature", str(config), "--out", str(tmp_path / "out"), *QUICK, "--probes", "0"]) == 0
    result, told = result_of(tmp_path / "out"), capsys.readouterr().out
    line = f"Moved to the CPU: K-FAC takes {format_bytes(plans[0].most)}, 1.0 KB are free on the GPU."
    assert line in told.splitlines() and line in result["notes"] and result["plan"]["device"] == "cpu"


def test_a_gpu_that_turns_out_to_be_full_hands_the_analysis_to_the_cpu(monkeypatch, capsys) -> None:
    """A model on the meta device stands for one on a GPU."""
    subjects: list[Subject] = []

    def analysed(subject: Subject, *_: object) -> dict:
        subjects.append(subject)
        if len(subjects) == 1:
            raise torch.OutOfMemoryError
        return {"notes": subject.notes}

    with torch.device("meta"):
        full = Subject(torch.nn.Linear(2, 2), [{"labels": torch.zeros(1)}], notes=["before"])
    there = Subject(torch.nn.Linear(2, 2), [{"labels": torch.zeros(1)}])
    monkeypatch.setattr(measure, "analyse", analysed)
    monkeypatch.setattr(Subject, "to", lambda self, device, note: replace(there, notes=[*self.notes, note]))
    gpu = ProcessGrid(device=torch.device("cuda"))
    result = curvature._analysed(full, Settings(), make_console(), lambda result: None, gpu)
    assert result["notes"] == ["before", curvature.GPU_FULL] and subjects[1].model is there.model
    assert capsys.readouterr().out == f"{curvature.GPU_FULL}\n"
    subjects.clear()
    with pytest.raises(torch.OutOfMemoryError):  # the others would wait for this process
        curvature._analysed(full, Settings(), make_console(), lambda result: None, replace(gpu, size=2))


@pytest.mark.parametrize(("kind", "asked"), [("gpt2", []), ("bert-mlm", ["--masked"])])
def test_a_folder_without_a_tokenizer_is_refused(kind: str, asked: list[str], tmp_path: Path, capsys) -> None:
    folder, text = hf_folder(tmp_path / "model", kind), text_file(tmp_path)
    for file in folder.glob("*token*"):
        file.unlink()
    assert main(["curvature", "--model", str(folder), "--text", str(text), *asked, *QUICK]) == 2
    assert f"argument --model: {folder} has no tokenizer; expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "asked", "message"),
    [
        ("bert-mlm", [], "is an encoder; expected a causal language model, or --masked"),
        ("gpt2", ["--masked"], "is a causal language model; expected an encoder, or no --masked"),
    ],
)
def test_a_model_of_the_other_kind_is_refused(
    kind: str, asked: list[str], message: str, tmp_path: Path, capsys
) -> None:
    """An encoder sees the token that comes next; a causal model does not see what follows a mask."""
    folder, text = hf_folder(tmp_path / "model", kind), text_file(tmp_path)
    assert main(["curvature", "--model", str(folder), "--text", str(text), *asked, *QUICK]) == 2
    assert f"argument --model: {folder} {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([], "curvature: expected either CONFIG.toml or --model PATH --text FILE"),
        (["CONFIG", "--model", "x"], "curvature: expected either CONFIG.toml or --model"),
        (["--model", "x"], "argument --text: none given; expected text files"),
        (["CONFIG", "--masked"], "argument --masked: is for --model"),
        (["CONFIG", "--tokens", "0"], "argument --tokens: got '0'; expected an integer of at least 1"),
        (["CONFIG", "--dtype", "bf16"], "argument --dtype: 'bf16'; expected fp32 or fp64"),
        (["CONFIG", "--device", "tpu"], "argument --device: 'tpu'; expected cpu or cuda"),
        (["CONFIG", "--fisher", "exact"], "argument --fisher: 'exact'; expected one of empirical, mc, true"),
        (["CONFIG", "--samples", "-3"], "argument --samples: -3.0; expected a number above 0"),
        (["CONFIG", "--policy", "some"], "argument --policy: 'some'; expected one of all, auto, hybrid, small_only"),
        (["CONFIG", "--memory-budget", "2 parsecs"], "argument --memory-budget: expected bytes, such as 8000000000"),
        (["CONFIG", "--memory-budget", "0"], "argument --memory-budget: '0'; expected more than 0 bytes"),
        (["CONFIG", "--memory-budget", "1KB"], "argument --memory-budget: "),
        (["CONFIG", "--probes", "1"], "argument --probes: 1; expected 0, or at least 2"),
        (["CONFIG", "model.width=x"], "model.width: expected int"),
        (["missing.toml"], "missing.toml"),
        (["CONFIG", "--out", "FULL"], "argument --out: FULL is not empty; expected a new folder"),
        (["--model", "FULL", "--text", "CONFIG"], "argument --model: FULL has no config.json"),
    ],
)
def test_bad_input_is_one_line_that_names_it(asked, message, config: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "curvature.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    named = {"CONFIG": str(config), "FULL": str(full)}
    assert main(["curvature", *(named.get(word, word) for word in asked)]) == 2
    error = capsys.readouterr().err
    assert message.replace("FULL", str(full)) in error and error.count("\n") == 1
    assert (full / "curvature.json").read_text() == "{}" and not (tmp_path / "runs").exists()


def test_what_was_computed_before_an_interruption_is_kept(config: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def interrupted(*_):
        raise KeyboardInterrupt

    def out_of_memory(*_):
        raise torch.OutOfMemoryError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gramian.analysis.measure._Stages.ggn", interrupted)
    assert main(["curvature", str(config), *QUICK]) == 1
    error = capsys.readouterr().err
    assert "interrupted; runs/curvature/curvature.json holds K-FAC, and says that it is not complete" in error
    result = result_of(tmp_path / "runs" / "curvature")
    assert not result["complete"] and result["kfac"]["loss"] > 0 and "ggn" not in result
    monkeypatch.setattr("gramian.analysis.measure._Stages.ggn", out_of_memory)
    assert main(["curvature", str(config), "--out", "full", *QUICK]) == 1
    assert (
        "out of memory; expected fewer --tokens, or a smaller --batch; full/curvature.json holds K-FAC"
        in capsys.readouterr().err
    )
    monkeypatch.setattr("gramian.analysis.measure._Stages.kfac", interrupted)
    assert main(["curvature", str(config), *QUICK]) == 1
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert os.listdir(tmp_path / "runs") == ["curvature"]


@pytest.mark.full
def test_private_and_taught_runs_are_labelled(config: Path, tmp_path: Path, capsys) -> None:
    private = ["privacy.noise_multiplier=1.0", "data.isolate=true"]
    assert main(["curvature", str(config), *private, "--out", str(tmp_path / "a"), *QUICK]) == 0
    assert "not covered by ε" in capsys.readouterr().out and "not covered by ε" in result_of(tmp_path / "a")["notes"][0]
    taught = ["teacher.path=x", "--out", str(tmp_path / "b"), *QUICK, "--ekfac", "--fisher", "true", "--dtype", "fp64"]
    assert main(["curvature", str(config), *taught]) == 0
    result = result_of(tmp_path / "b")
    assert "the teacher has no part in it" in result["notes"][0] and result["model"]["dtype"] == "fp64"
    assert "EK-FAC" in capsys.readouterr().out
