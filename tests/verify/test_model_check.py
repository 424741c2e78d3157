"""`gramian.check`: what of a user's model is exact, approximated, coupled or refused; the model stays as it was."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.taps import hub
from gramian.verify.user_model.model_report import ModelCheck
from gramian.verify.user_model.model_runs import ModelRuns
from tests.kit.refusals import refusal

X = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))


def verdicts(report: ModelCheck) -> dict[str, str]:
    return {found.subject: found.verdict for found in report.findings}


EXACT = {"samples apart": "exact", "per-sample norms": "exact", "private sum": "exact", "K-FAC": "approximated"}


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)


class Own(nn.Module):
    """Two layers with a function of the user's between them, and a parameter of its own."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.inner, self.head, self.table = nn.Linear(5, 7), nn.Linear(7, 3), nn.Parameter(torch.ones(20, 7))
        self.between = between
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.between(self.inner(x) * self.table[:1]))


def test_a_model_of_known_layers_is_exact_and_is_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Tanh(), nn.BatchNorm1d(7).eval(), nn.Linear(7, 3))
    model[4].bias.requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("ran"))
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    hooks = dict(model[0]._forward_hooks)
    report = gramian.check(model, X)
    printed = capsys.readouterr().out
    assert report.ok and verdicts(report) == {"examined": "note", **EXACT, "frozen": "not trained"}
    assert "dropout off" in report.finding("examined").text and "loss=" in report.finding("examined").text
    assert report.finding("frozen").text == "4.bias"
    assert [(g.layers, g.count, g.formula, g.parameters, g.frozen, g.verdict) for g in report.layers] == [
        ("Linear", 2, "linear", 63, 3, "exact"),
        ("BatchNorm1d", 1, "norm", 14, 0, "exact"),
    ]
    assert report.layers[0].error is not None and report.layers[0].error < 1e-4
    assert report.layers[0].kfac == {"kronecker": 63} and report.layers[1].kfac == {"block": 14}
    assert "Linear ×2" in printed and "nothing is refused or wrong (3 samples" in printed
    assert json.loads(json.dumps(report.to_dict()))["ok"] and "private sum" in str(report)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(model[0].weight.grad, torch.ones(7, 5)) and model[4].weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model] == [True, True, True, False, True]
    assert dict(model[0]._forward_hooks) == hooks and all("forward" not in vars(module) for module in model.modules())
    assert model not in hub._hub_of  # no proof of the check counts for what the user does later


@pytest.mark.parametrize("wrong", ["norms", "sum", "nan"])
def test_numbers_that_are_not_those_of_single_samples_are_wrong(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ModelRuns.private

    def private(runs: ModelRuns, limit: float, own_mode: bool = False) -> Any:
        norms, gradient = right(runs, limit, own_mode)
        if wrong == "norms":
            return norms * torch.tensor([1, 1.001, 1]), gradient
        gradient._left[runs.names.index("head.bias")][0] += 1e-2 if wrong == "sum" else float("nan")
        return norms, gradient

    monkeypatch.setattr(ModelRuns, "private", private)
    report = gramian.check(Own(), X, show=False)
    assert report.bad == (["per-sample norms"] if wrong == "norms" else ["private sum", "Linear"]) and not report.ok
    assert wrong == "norms" or "head.bias" in report.finding("private sum").text


def test_batch_norm_is_refused_by_name_with_what_to_change_and_is_exact_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    report = gramian.check(model, X, show=False)
    found = report.finding("per-sample norms")
    assert found.verdict == "refused" and "1 (BatchNorm1d) mixes the samples" in found.text
    assert found.change == "GroupNorm, or eval()" and report.finding("private sum").verdict == "refused"
    assert report.bad == ["per-sample norms", "private sum", "BatchNorm1d"]
    assert report.finding("K-FAC").verdict == "approximated"
    assert int(model[1].num_batches_tracked) == 0
    assert gramian.check(model.eval(), X, show=False).ok


def test_a_model_that_couples_samples_is_said_to_be_coupled_and_its_layer_is_named() -> None:
    centred = Function(lambda h: h - h.mean(0))
    report = gramian.check(nn.Sequential(nn.Linear(5, 7), centred, nn.Tanh(), nn.Linear(7, 3)), X, show=False)
    found = report.finding("samples apart")
    assert found.verdict == "coupled" and "the model couples" in found.text and "no tool" in found.text
    assert report.bad == ["samples apart", "private sum", "per-sample norms"]
    assert report.finding("private sum").text.startswith("3: the input of sample ")


def test_a_loss_is_examined_with_the_model_and_one_that_couples_samples_is_found() -> None:
    model, y = Own(), torch.arange(8) % 3
    mean = gramian.check(model, (X, y), lambda z, batch: F.cross_entropy(z, batch[1]), show=False)
    assert mean.ok and "your loss, a mean over samples" in mean.finding("examined").text
    each = gramian.check(
        model, {"x": X, "y": y}, lambda z, batch: F.cross_entropy(z, batch["y"], reduction="none"), show=False
    )
    assert each.ok and "mean" not in each.finding("examined").text
    total = gramian.check(model, (X, y), lambda z, b: F.cross_entropy(z, b[1], reduction="sum"), show=False)
    assert total.ok and "mean" not in total.finding("examined").text
    pairs = gramian.check(model, X, lambda z, _: F.cross_entropy(z @ z.T, torch.arange(len(z))), show=False)
    assert pairs.bad == ["samples apart"] and "the loss couples" in pairs.finding("samples apart").text
    assert verdicts(pairs)["private sum"] == "not examined"


def test_an_error_of_the_forward_is_a_finding_with_its_message_and_line() -> None:
    model = Own(lambda h: h.T)
    report = gramian.check(model, X, show=False)
    found = report.finding("forward")
    assert found.verdict == "failed" and "shapes cannot be multiplied" in found.text
    assert "test_model_check.py, line" in found.text and report.bad == ["forward"] and model.calls == 0


def test_a_backward_that_fails_is_a_finding_and_a_sample_that_does_not_run_alone_is_said() -> None:
    broken = gramian.check(Own(lambda h: h.detach()), X, lambda z, _: z.detach().sum(), show=False)
    assert "does not require grad" in broken.finding("samples apart").text and not broken.ok

    def pair(h: Tensor) -> Tensor:
        return h.squeeze().flatten(1)  # of one sample there is one axis alone

    report = gramian.check(nn.Sequential(nn.Linear(5, 7), Function(pair), nn.Linear(7, 3)), X, show=False)
    assert report.ok and "a sample does not run alone: IndexError" in report.finding("samples apart").text
    assert verdicts(report)["private sum"] == "not examined"


@pytest.mark.usefixtures("root_not_taken")
def test_a_refusal_of_the_taps_is_a_finding() -> None:
    model = Own()
    model.between = lambda h: F.linear(h, model.inner.weight).square()  # used outside its layer
    model.head = nn.Linear(7, 3)
    model.inner = nn.Linear(7, 7)
    report = gramian.check(model, torch.randn(4, 7), show=False)
    assert verdicts(report)["samples apart"] == "exact"
    assert [verdicts(report)[name] for name in ("private sum", "per-sample norms", "K-FAC")] == ["refused"] * 3
    assert "inner.weight" in report.finding("per-sample norms").text and report.finding("K-FAC").change
    frozen = nn.Linear(5, 3).requires_grad_(False)
    assert gramian.check(frozen, X, show=False).finding("layers").text == "model: has no trainable parameter"


def test_what_is_only_a_diagonal_and_what_gets_no_gradient_are_named() -> None:
    class Gained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head, self.gain = nn.Linear(5, 140), nn.Linear(140, 3), nn.Parameter(torch.ones(140))
            self.spare = nn.Linear(7, 20)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.inner(x)) * self.gain)

    report = gramian.check(Gained(), X, show=False)
    assert report.ok and report.finding("diagonal only").text == "gain"
    assert report.finding("unused").text.endswith("spare.weight, spare.bias")
    assert report.finding("K-FAC").text == "Fisher of the trained entries: 81 % Kronecker, 9 % diagonal, 10 % none"


class Dropping(nn.Module):
    """Random in every mode, or in training mode by code of its own."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.inner, self.always = nn.Linear(5, 3), always

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(len(x), 1) > 0.5
        return self.inner(x) * (keep if self.training or self.always else 1)


def test_randomness_is_switched_off_for_the_comparison_or_it_is_not_made() -> None:
    once = gramian.check(Dropping(always=False), X, show=False)
    assert once.ok and verdicts(once)["private sum"] == "exact" and "evaluation mode" in once.finding("examined").text
    always = gramian.check(Dropping(always=True), X, show=False)
    assert always.ok and verdicts(always)["private sum"] == "not examined"
    assert "random" in always.finding("private sum").text and "samples apart" not in verdicts(always)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x_BTD: Tensor, mask_TT: Tensor) -> Tensor:
        h = self.inner(x_BTD)
        return self.head(F.scaled_dot_product_attention(h, h, h, attn_mask=mask_TT))


@pytest.mark.parametrize("batch", [3, pytest.param(6, marks=pytest.mark.full)])
def test_a_mask_that_looks_like_samples_is_not_cut(batch: int) -> None:
    mask = torch.ones(6, 6).tril().bool()
    report = gramian.check(Masked(), (torch.randn(batch, 6, 5), mask), show=False)
    assert verdicts(report)["private sum"] == "exact"


@pytest.mark.full
def test_a_compiled_model_is_examined_eagerly() -> None:
    report = gramian.check(torch.compile(nn.Sequential(nn.Linear(5, 3)), backend="eager"), X, show=False)
    assert report.ok and report.finding("compiled").verdict == "note"


def test_half_precision_has_its_own_tolerance_and_double_is_exact_to_nine_digits() -> None:
    half = gramian.check(Own().bfloat16(), X.bfloat16(), show=False)
    double = gramian.check(Own().double(), X.double(), show=False)
    assert half.ok and "tolerance 5e-02" in half.finding("private sum").text
    assert double.ok and "tolerance 1e-09" in double.finding("private sum").text


@pytest.mark.parametrize(
    "model, batch, words",
    [
        ("Linear", X, "model: expected an nn.Module, got str"),
        (nn.Linear(5, 3), X[:1], "batch: has 1 samples.*expected at least two"),
        (nn.Linear(5, 3), X[:1].expand(8, 5), "batch: its first 3 samples are equal"),
        (nn.Linear(5, 3), 3, "batch: expected a tensor, .* got int"),
        (nn.Linear(5, 3), (), "got no tensor argument"),
    ],
)
def test_bad_arguments_are_one_line(model: Any, batch: Any, words: str) -> None:
    with refusal(words):
        gramian.check(model, batch, show=False)


def test_a_model_inside_a_capture_is_refused_and_the_capture_goes_on() -> None:
    model = nn.Linear(5, 3)
    with gramian.per_sample_norms(model) as norms:
        with refusal("model: is private, or inside an open capture"):
            gramian.check(model, X)
        model(X).sum().backward()
    assert len(norms.values) == 8


# ---- Hugging Face ------------------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


def test_a_llama_and_a_t5_are_exact() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    ids = torch.randint(3, 50, (4, 6), generator=torch.Generator().manual_seed(0))
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=1, **SMALL))
    report = gramian.check(llama, {"input_ids": ids, "labels": ids}, lambda z, _: z.loss, show=False)
    assert report.ok and {g.layers: g.formula for g in report.layers}["LlamaRMSNorm"] == "norm"
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, dropout_rate=0.0)
    )
    report = gramian.check(t5, {"input_ids": ids, "decoder_input_ids": ids[:, :4], "use_cache": False}, show=False)
    assert report.ok and verdicts(report) == {"examined": "note", **EXACT}
    assert not [group for group in report.layers if group.verdict != "exact"]


@pytest.mark.full
def test_labels_that_count_differently_many_tokens_couple_samples_through_the_mean() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = torch.randint(3, 50, (3, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(6) < torch.tensor([[1], [3], [4]]), -100)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=1, **SMALL))
    report = gramian.check(llama, {"input_ids": ids, "labels": labels}, lambda z, _: z.loss, show=False)
    assert "the loss couples" in report.finding("samples apart").text
