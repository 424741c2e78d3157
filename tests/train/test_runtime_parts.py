"""Parts of the runtime that fit on a page each: precision, optimizers, nested states, files."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gramian.core.durable_files import replace_text
from gramian.core.errors import GramianError
from gramian.train.build.build_optimizer import build_optimizer
from gramian.train.config import config_sections as config
from gramian.train.loop.deferred_metrics import DeferredMetrics, StepAttempt
from gramian.train.loop.precision import Precision, resolve_precision, set_globals
from gramian.train.state.nested import merge, split
from gramian.train.state.run_folder import JsonLines, RunFolder, difference, read_lines
from gramian.train.state.run_log import flops_per_token, perplexity
from tests.kit.matrix import examples
from tests.train.runs import small

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    "kind, device, capability, expected",
    [
        ("auto", CPU, None, "fp32"),
        ("auto", CUDA, (7, 0), "fp16"),
        ("auto", CUDA, (7, 5), "fp16"),
        ("auto", CUDA, (8, 0), "bf16"),
        ("auto", CUDA, (9, 0), "bf16"),
        ("fp32", CUDA, (9, 0), "fp32"),
        ("bf16", CPU, None, "bf16"),
    ],
)
def test_precision_follows_the_hardware(kind: Any, device: torch.device, capability: Any, expected: str) -> None:
    numbers = resolve_precision(config.PrecisionSection(kind), device, capability)
    assert numbers.kind == expected
    assert numbers.scales == (expected == "fp16")


def test_bf16_on_a_gpu_that_has_none_is_refused() -> None:
    with pytest.raises(GramianError, match="precision.kind: this GPU has no bf16"):
        resolve_precision(config.PrecisionSection("bf16"), CUDA, (7, 5))


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_set_whatever_it_was(tf32: bool) -> None:
    torch.set_float32_matmul_precision("medium")
    set_globals(config.PrecisionSection(tf32=tf32), deterministic=False)
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("kind, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)])
def test_weights_stay_wide_and_products_are_narrow(kind: str, dtype: torch.dtype) -> None:
    numbers = Precision(kind, "cpu")
    layer = nn.Linear(4, 4).to(numbers.weights)
    with numbers.autocast():
        assert layer(torch.ones(2, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32


def test_matrices_decay_and_the_rest_does_not() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = build_optimizer(model, config.OptimizerSection(weight_decay=0.3), CPU)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decays[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.3, "1.weight": 0.3, "1.bias": 0.0, "2.weight": 0.0, "2.bias": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_implementations_of_an_optimizer_step_alike(kind: Any) -> None:
    def stepped(implementation: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        options = config.OptimizerSection(
            kind=kind, implementation=implementation, momentum=0.9 if kind == "sgd" else 0.0
        )
        optimizer = build_optimizer(model, options, CPU)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        return model.weight.detach()

    expected = stepped("loop")
    for implementation in ("fused", "foreach", "auto"):
        torch.testing.assert_close(stepped(implementation), expected, rtol=1e-6, atol=1e-7)


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(GramianError, match="no trainable parameter"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), config.OptimizerSection(), CPU)


plain = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False), st.text(max_size=4))
names = st.text("abcde", min_size=1, max_size=3)
leaves = st.one_of(plain, st.integers(0, 3).map(lambda n: torch.arange(n)))
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(names, inner, max_size=3),
        st.dictionaries(st.integers(0, 9), inner, min_size=1, max_size=2),
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@settings(max_examples=examples(60))
@given(states)
def test_a_nested_state_comes_back_from_flat_tensors_and_json(state: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    facts = json.loads(json.dumps(split("state", {"root": state}, tensors)))
    assert same(merge(facts, tensors.__getitem__), {"root": state})


def test_values_are_read_in_order_and_averaged_over_tokens() -> None:
    late = DeferredMetrics()
    for i in range(3):
        late.add(StepAttempt(i, i, i, 0.1, True, None), torch.tensor([6.0 * (i + 1), float(i == 1), 3.0, 0.5]))
    found = late.read(wait=False)
    assert [(o.attempt.step, o.loss, o.flagged, o.tokens, o.grad_norm) for o in found] == [
        (0, 2.0, False, 3, 0.5),
        (1, 4.0, True, 3, 0.5),
        (2, 6.0, False, 3, 0.5),
    ]
    assert late.read(wait=True) == []


def test_perplexity_is_never_cut_off() -> None:
    assert perplexity(12.0) == math.exp(12.0)
    assert perplexity(1e4) == math.inf


def test_flops_count_every_multiplied_weight_six_times() -> None:
    from gramian.models.gpt import GPT, GPTConfig

    model = GPT(GPTConfig(vocabulary=10, context=8, layers=2, width=4, heads=1))
    tables = (10 + 8) * 4
    assert flops_per_token(model, 8) == 6.0 * (model.num_parameters() - tables) + 6.0 * 8 * 4 * 2
    tied = GPT(GPTConfig(vocabulary=10, context=8, layers=2, width=4, heads=1, tied=True))
    assert flops_per_token(tied, 8) == flops_per_token(model, 8)


# ---- files ---------------------------------------------------------------------------------------------------------------


def test_lines_are_cut_where_a_run_is_resumed_and_half_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"attempt": 0}\n{"attempt": 1}\n{"attempt": 2}\n{"atte')
    lines = JsonLines(path, upto=1)
    lines.write({"attempt": 2, "again": True})
    lines.close()
    assert read_lines(path) == [{"attempt": 0}, {"attempt": 1}, {"attempt": 2, "again": True}]
    assert read_lines(tmp_path / "none") == []


def test_lines_after_half_a_line_stand_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "a"}\n12\n\xff\xfe\0\n{"event": "b')
    lines = JsonLines(path)
    lines.write({"event": "c"})
    lines.close()
    assert read_lines(path) == [{"event": "a"}, {"event": "c"}]


def test_lines_that_a_full_disk_refuses_are_written_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, full = os.write, [0, 3, 0]

    def write(handle: int, content: bytes) -> int:
        room = full.pop(0) if full else len(content)
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(handle, content[:room])

    lines = JsonLines(tmp_path / "metrics.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        for step in range(3):
            lines.write({"step": step})
    lines.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": step} for step in range(3)]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_folder_in_place_of_lines_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(GramianError, match=f"{name}: cannot be written"):
        JsonLines(tmp_path / name, upto=3 if name == "metrics.jsonl" else None)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    replace_text(tmp_path / "a", "one")
    replace_text(tmp_path / "a", "two")
    assert (tmp_path / "a").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_is_free_again_when_it_was_left(tmp_path: Path) -> None:
    told = small(tmp_path / "run")
    for _ in range(2):
        with RunFolder(told), pytest.raises(GramianError, match="in use"), RunFolder(told):
            pass


def test_a_folder_with_remains_of_a_run_without_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(GramianError, match="holds a run without its config"), RunFolder(small(tmp_path / "run")):
        pass


def test_a_config_that_no_run_wrote_is_not_overwritten(tmp_path: Path) -> None:
    told = small(tmp_path)
    (tmp_path / "config.toml").write_text(f"# notes\n{told.toml()}")
    with pytest.raises(GramianError, match="was not written by a run"), RunFolder(told):
        pass
    assert (tmp_path / "config.toml").read_text().startswith("# notes")


def test_a_config_of_another_version_names_its_folder(tmp_path: Path) -> None:
    with RunFolder(small(tmp_path / "run")):
        pass
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace("[guard]", "[guard]\nmagic = 1"))
    with pytest.raises(GramianError, match=r"run.folder: .*config.toml is not a config of this version \(guard.magic"):
        RunFolder(small(tmp_path / "run")).__enter__()


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(GramianError, match="run.folder: .* cannot be written"), RunFolder(small(tmp_path / "run")):
        pass


def test_the_first_difference_of_two_configs_is_named() -> None:
    assert difference(small("a"), small("b", optimizer={"lr": 1.0})) == "optimizer.lr is 0.003 there, 1.0 here"
    assert difference(small("a"), small("a", kfac={})) == "[kfac] is not in it"
