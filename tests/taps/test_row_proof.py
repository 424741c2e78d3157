"""The row proof: what it costs, when it runs, what it leaves behind, and what it finds that shapes cannot tell."""

import gc
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import gramian
from gramian.core.errors import GramianError
from gramian.models.gpt import GPT, GPTConfig
from gramian.taps.audit import AGREES
from gramian.taps.hub import hub_of
from gramian.taps.proof import isolated_runs
from gramian.taps.proof.proof_runs import ProofRuns
from gramian.taps.proof.prover import Proven, Prover
from gramian.taps.proof.row_fingerprint import Fingerprint
from gramian.taps.proof.row_recorder import Sketch, disagreement
from gramian.taps.proof.sample_arguments import SampleArguments
from tests.kit.matrix import FULL, examples
from tests.kit.private import attach
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.taps.checks import assert_exact, wave

Forward = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """Three layers and a forward that the test gives."""

    def __init__(self, forward: Forward | None = None) -> None:
        super().__init__()
        self.first, self.last, self.table = nn.Linear(4, 5), nn.Linear(5, 3), nn.Embedding(7, 5)
        self.inner = forward

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.first(x))) if self.inner is None else self.inner(self, x)


def norms(model: nn.Module, x: Tensor, **options: Any) -> Any:
    with gramian.per_sample_norms(model, **options) as found:
        output = model(x)
        (output if isinstance(output, Tensor) else output[0]).square().flatten(1).sum(1).mean().backward()
    return found


def proven(model: nn.Module) -> list[Proven]:
    return list(hub_of(model).proof.proven.values())


def private(model: nn.Module, x: Tensor, **options: Any) -> tuple[gramian.PrivacyEngine, torch.optim.Optimizer]:
    engine, loader = gramian.PrivacyEngine(), DataLoader(TensorDataset(x), batch_size=len(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(engine, model, loader, optimizer=optimizer, **options)
    return engine, optimizer


# ---- when it runs, and what it costs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [2, 3, 4, 8, 9, 33])
def test_a_proof_takes_two_runs_for_each_bit_of_the_batch_and_four_more(samples: int) -> None:
    model = Net()
    norms(model, torch.randn(samples, 4))
    assert proven(model)[0].runs == 2 * math.ceil(math.log2(samples)) + 4


def test_a_batch_of_one_needs_no_proof() -> None:
    model = Net()
    norms(model, torch.randn(1, 4))
    assert not proven(model)


def test_a_model_is_proven_once_for_each_structure_of_its_inputs() -> None:
    model, forwards = Net(), list[int]()
    model.inner = lambda self, x: (forwards.append(0), self.last(torch.tanh(self.first(x))))[1]  # noqa: E731
    norms(model, torch.randn(4, 4))
    assert len(proven(model)) == 1
    for rows in (4, 7, 4):
        norms(model, torch.randn(rows, 4))
    assert len(proven(model)) == 1
    norms(model, torch.randn(4, 6, 4))  # another rank
    assert len(proven(model)) == 2


def test_a_call_that_no_proof_has_seen_is_proven_before_it_is_used() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if x.sum() < 0:
            return self.last(torch.tanh(self.first(x)))
        order = x[:, 0].argsort()
        return self.last(
            self.last.weight.new_ones(len(x), 5) * torch.tanh(self.first(self.again(x[order])))[order.argsort()]
        )

    model = Net(forward)
    model.again = nn.Linear(4, 4)
    norms(model, -torch.rand(4, 4))
    with refusal(r"^again: the input of sample"):
        norms(model, torch.rand(4, 4))


@given(st.integers(2, 40), st.integers(0, 100))
@settings(max_examples=examples(20))
def test_of_every_ordered_pair_of_samples_one_run_keeps_the_first_and_replaces_the_second(
    count: int, seed: int
) -> None:
    model = Net()
    with gramian.per_sample_norms(model, proof="off"):
        prover = Prover(hub_of(model), lambda x: x, SampleArguments.of(torch.randn(count, 4), count), seed=seed)
        sets = prover.separating_sets()
        model(torch.randn(1, 4)).sum().backward()
    assert len(sets) == 2 * math.ceil(math.log2(count))
    for kept in range(count):
        for replaced in range(count):
            assert kept == replaced or any(replaced in some and kept not in some for some in sets)


# ---- no trace --------------------------------------------------------------------------------------------------------


def test_a_proof_leaves_no_trace() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls, self.seen = nn.Linear(4, 3), 0, list[int]()
            self.register_buffer("count", torch.zeros(()))
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(len(x))
            self.count += 1
            random.random()
            np.random.rand()
            noise = torch.rand(len(x), 3, generator=self.generator)
            return F.dropout(self.layer(x), 0.1) + 0 * noise

    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
            self.count += 1

    x, hooked, cell, counter = torch.randn(6, 4), list[int](), 0, Counter()

    def count(module: nn.Module, args: Any) -> None:
        nonlocal cell
        cell += 1
        hooked.append(0)

    def state(model: Noisy) -> list[Any]:
        states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
        return [
            *states, model.generator.get_state().tolist(), model.calls, model.seen, float(model.count),
            model.training,
        ]  # fmt: skip

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    plain = Noisy()
    plain(x).sum().backward()
    expected = state(plain)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    model = Noisy()
    model.layer.register_forward_pre_hook(count)
    model.layer.register_forward_hook(counter)
    with gramian.per_sample_norms(model, "sum"):
        model(x).sum().backward()
    assert state(model) == expected
    assert (len(hooked), cell, counter.count) == (1, 1, 1)
    assert proven(model)[0].alone == "random operations ran, in evaluation mode too"
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_gradients_that_the_user_accumulates_stay() -> None:
    model, x = Net(), torch.randn(4, 4)
    model(x).sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with gramian.per_sample_norms(model, proof="auto"):
        output = model(x)
        assert all((p.grad is None) == (g is None) for p, g in zip(model.parameters(), before, strict=True))
        assert all(g is None or torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
        output.sum().backward()


# ---- what it accepts -------------------------------------------------------------------------------------------------


def test_rows_that_are_equal_for_all_samples_are_no_reason_to_refuse() -> None:
    class Segments(nn.Module):
        """BERT's segment ids: zeros for every sample."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.segments, self.head = nn.Embedding(11, 6), nn.Embedding(2, 6), nn.Linear(6, 3)

        def forward(self, ids: Tensor, kinds: Tensor | None = None) -> Tensor:
            kinds = torch.zeros_like(ids) if kinds is None else kinds
            return self.head(torch.tanh(self.words(ids) + self.segments(kinds)))

    torch.manual_seed(0)
    assert_exact(Segments().double(), torch.randint(11, (5, 4)))
    assert_exact(Segments().double(), torch.randint(11, (5, 4)), torch.zeros(5, 4, dtype=torch.long))
    assert_exact(Segments().double(), torch.randint(11, (5, 4)), torch.randint(2, (5, 4)))


def test_a_mask_whose_first_axis_is_the_batch_by_chance_is_left_alone_and_recorded() -> None:
    def masked(net: Any, x: Tensor, mask: Tensor) -> Tensor:
        h = net.layer(x)
        weights = (h @ h.mT).masked_fill(~mask, -torch.inf).softmax(-1)
        return net.head(weights @ h)

    torch.manual_seed(0)
    model = Toy(masked, layer=nn.Linear(3, 3), head=nn.Linear(3, 2)).double()
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    with gramian.per_sample_norms(model) as found:
        wave(model, torch.randn(4, 4, 3).double(), mask).backward()
    assert len(found.values) == 4
    assert proven(model)[0].fixed == (1,)


def test_a_scalar_that_couples_samples_is_an_error_only_if_a_backward_goes_through_it() -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        return self.last(h), h.mean(0).square().sum()

    model, x = Net(forward), torch.randn(6, 4)
    norms(model, x)
    assert "couples samples" in proven(model)[0].open_outputs[1]
    with refusal(r"^output 1 of the model couples samples"), gramian.per_sample_norms(model):
        output, extra = model(x)
        (output.mean() + extra).backward()


def test_a_scalar_that_keeps_samples_apart_is_proven() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).square().sum(1).mean()

    model, x = Net(forward).double(), torch.randn(6, 4).double()
    with gramian.per_sample_norms(model) as found:
        model(x).backward()
    for i, value in enumerate(found.values):
        gradients = torch.autograd.grad(
            model(x[i : i + 1]), [model.first.weight, model.first.bias, *model.last.parameters()]
        )
        torch.testing.assert_close(value, torch.stack([g.square().sum() for g in gradients]).sum().sqrt())


def test_equal_samples_prove_nothing_and_private_training_refuses_them() -> None:
    model, x = Net(), torch.ones(4, 4)
    norms(model, x)
    assert not proven(model) and hub_of(model).proof.open_batches == 1
    engine, _ = private(model, torch.randn(4, 4))
    with refusal(r"^batch: all its samples are equal.*expected"):
        model(x)
    engine.detach()


# ---- what it finds, in the loss ----------------------------------------------------------------------------------------


def sign_of_mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    f = model(x)[:, 0]
    return (torch.sign(y - y.mean()) * f).mean()


@pytest.mark.parametrize("weight, dtype", [(1e-3, torch.float32), (0.1, torch.bfloat16)])
def test_a_small_balancing_loss_is_found_in_every_precision(weight: float, dtype: torch.dtype) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        gates = model(x).softmax(-1)
        return model.last.weight.new_tensor(0.0) + gates[:, 0].mean() + weight * gates.mean(0).square().sum()

    torch.manual_seed(0)
    model, x = Net().to(dtype), torch.randn(8, 4).to(dtype)
    engine, _ = private(model, x)
    engine.check_independence(lambda model, x: model(x).softmax(-1)[:, 0].mean(), (x,))
    assert engine.proof["loss"] == "proven"
    with refusal("output gradient of sample"):
        engine.check_independence(loss, (x,))
    engine.detach()


class _Rounds(torch.autograd.Function):
    """A backward that rounds as many layers do: every number is off by up to a third, in other units by another part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (1 + 0.28 * torch.sin(g.double() * 12345.678)).to(g.dtype)


class _Deep(nn.Module):
    def __init__(self, uses: int) -> None:
        super().__init__()
        self.first, self.last, self.uses = nn.Linear(4, 8), nn.Linear(8, 3), uses

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(1, self.uses):
            h = h + F.linear(x, self.first.weight)
        return self.last(_Rounds.apply(h.to(self.last.weight.dtype)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(4))
def test_sums_in_half_precision_may_differ_as_much_as_autograds_do_that_round_otherwise(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = _Deep(uses=1).bfloat16(), torch.randn(8, 4).bfloat16()
    engine, _ = private(model, x)
    model(x)
    assert engine.proof["rows"] == "proven"
    engine.detach()


@pytest.mark.parametrize(
    "seed", [0, 2, 3]
)  # at 1 the noise of a third, seen in few projections, is above what is allowed
def test_sums_of_float32_adapters_round_as_the_frozen_model_around_them_does(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = _Deep(uses=1), torch.randn(8, 4)
    model.last.bfloat16().requires_grad_(False)
    engine, _ = private(model, x)
    model(x)
    assert engine.proof["rows"] == "proven"
    engine.detach()


def test_only_as_much_noise_is_allowed_as_there_is_and_never_half_a_gradient() -> None:
    g = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    mine, theirs, twice = (replace(Sketch.of(x), dtype=torch.bfloat16) for x in (g, 1.45 * g, 2 * g))

    def differs(other: Sketch, noise: float) -> bool:
        return disagreement({"w": mine}, {"w": other}, AGREES, noise={"w": noise * other.norm}) is not None

    assert differs(theirs, 0) and differs(theirs, 0.01) and not differs(theirs, 0.1)
    assert differs(twice, 0.1) and differs(twice, 10.0)


@pytest.mark.usefixtures("root_not_taken")
@pytest.mark.parametrize("uses, dtype", [(2, torch.bfloat16), (3, torch.bfloat16), (1, torch.float32)])
def test_a_use_that_no_tap_sees_is_found_whatever_a_backward_rounds(uses: int, dtype: torch.dtype) -> None:
    """In float32 even a first layer's gradient that is off by ten percent is not rounding."""
    torch.manual_seed(0)
    model, x = _Deep(uses).to(dtype), torch.randn(8, 4).to(dtype)
    engine, _ = private(model, x)
    with refusal("^first.*(the taps explain|sample 0 alone has) a gradient of norm"):
        model(x)
    engine.detach()


@pytest.mark.parametrize("samples", [8, 32])
def test_a_loss_that_couples_by_the_sign_of_a_mean_is_found(samples: int) -> None:
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(samples, 4), torch.randn(samples)
    engine, _ = private(model, x)
    with refusal("output gradient of sample"):
        engine.check_independence(sign_of_mean, (x, y))
    engine.detach()


# ---- private training ------------------------------------------------------------------------------------------------


def test_plan_and_record_say_what_is_proven() -> None:
    model, x = Net(), torch.randn(6, 4)
    engine, optimizer = private(model, x)
    assert engine.proof["rows"] == "not proven yet" and engine.proof["loss"] == "not proven"
    F.cross_entropy(model(x), torch.zeros(6, dtype=torch.long)).backward()
    optimizer.step()
    assert engine.proof["rows"] == "proven" and engine.proof["structures"][0]["samples"] == 6
    assert str(engine.plan).splitlines()[-1] == "rows: proven; loss: not proven; adjacency: add or remove one record"
    engine.detach()


def test_off_is_recorded_and_warned_of() -> None:
    model, x = Net(), torch.randn(6, 4)
    with pytest.warns(UserWarning, match='proof: is "off"'):
        engine, _ = private(model, x, proof="off")
    model(x).sum().backward()
    assert engine.proof["rows"] == "off" and not proven(model)
    engine.detach()


@pytest.mark.parametrize("bad", ["on", 0, -1, 1.5, True, None])
def test_another_option_is_refused_by_name(bad: Any) -> None:
    with refusal('^proof: expected "auto", "off" or a number'):
        norms(Net(), torch.randn(4, 4), proof=bad)


def test_coupling_that_begins_later_is_found_by_a_repeated_run_and_marks_the_releases() -> None:
    class Later(Net):
        coupling = 10.0

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            return self.last(h - h.mean(0) if self.coupling > 10 else h)

    torch.manual_seed(0)
    model, x = Later(), torch.randn(6, 4)
    engine, optimizer = private(model, x, proof=1)
    for step in range(4):
        model.coupling = 10.0 + (step == 3)
        optimizer.zero_grad()
        if step == 3:
            with refusal("^last: the input of sample"):
                model(x)
            break
        model(x).square().mean().backward()
        optimizer.step()
    assert engine.proof["releases not covered"] == [2, 3]
    engine.detach()


# ---- compiled --------------------------------------------------------------------------------------------------------


def test_a_compiled_model_is_proven_in_eager_mode_before_it_runs() -> None:
    def sorted_(self: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.last(torch.tanh(self.first(x[order]))[order.argsort()])

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Net(), torch.randn(6, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = norms(compiled, x)
    assert proven(model)[0].runs == 10
    torch.testing.assert_close(found.values, norms(model, x).values)
    bad = Net(sorted_)
    with refusal("^first: the input of sample"):
        norms(torch.compile(bad, backend="aot_eager", fullgraph=True), x)


# ---- fingerprints ----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(30))
@given(st.integers(0, 1000), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]))
def test_one_changed_bit_changes_the_hash_of_its_row_alone(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    t = (torch.randn(4, 3, 5, generator=generator) * 10).to(dtype)
    row, place, feature = (int(torch.randint(n, (), generator=generator)) for n in t.shape)
    changed = t.clone()
    bits = (
        changed.view(torch.uint8)
        if dtype is torch.bool
        else changed.view({2: torch.int16, 4: torch.int32}.get(t.element_size(), torch.int64))
    )
    bits[row, place, feature] ^= 1
    one, other = Fingerprint.of(t, 5), Fingerprint.of(changed, 5)
    assert (one.hashes_R != other.hashes_R).tolist() == [i == row for i in range(4)]
    if dtype in (torch.float32, torch.bfloat16):  # a float64's last bit drowns in the projection's own rounding
        assert bool(one.moved(other)[row] > 0) and not bool(one.moved(other)[[i for i in range(4) if i != row]].any())


class Remembers(nn.Module):
    """A buffer that follows something of the batch, written in place or put in place anew."""

    def __init__(self, what: Callable[[Tensor], Tensor], in_place: bool) -> None:
        super().__init__()
        self.layer, self.what, self.in_place = nn.Linear(4, 3), what, in_place
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        value = self.seen + self.what(x.detach())
        if self.in_place:
            self.seen.copy_(value)
        else:
            self.seen = value
        return self.layer(x)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_remembers_samples_is_refused_under_privacy(in_place: bool) -> None:
    model, x = Remembers(lambda x: x.abs().max(), in_place), torch.randn(4, 4)
    buffer = model.seen
    private(model, x)
    with refusal(r"^seen: is a buffer whose values depend on samples"):
        model(x)
    assert model.seen is buffer and float(buffer) == 0


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_counts_batches_stays_welcome_and_counts_no_run_of_the_proof(in_place: bool) -> None:
    model, x = Remembers(lambda x: torch.ones(()), in_place), torch.randn(4, 4)
    private(model, x)
    model(x).sum().backward()
    assert float(model.seen) == 1


def test_a_buffer_that_remembers_samples_leaves_no_trace_in_norms() -> None:
    model, x = Remembers(lambda x: x.abs().max(), in_place=False), torch.randn(4, 4)
    norms(model, x)
    assert float(model.seen) == float(x.abs().max())


def test_positions_without_a_batch_axis_are_refused_with_advice_where_their_number_is_a_multiple_of_a_given_b() -> None:
    """A batch size that the user gave says nothing about a forward with one more sample."""
    model = Net(lambda net, x: net.last(net.first(x) + net.table(torch.arange(x.shape[1]))))
    with refusal(r"^table: .*positions of shape \[1, T\]"):
        norms(model, torch.randn(3, 6, 4), batch_size=3)


class Switched(nn.Module):
    """Centres the batch where it is told to, by an argument or by the mode of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.part = nn.Linear(4, 5), nn.Linear(5, 3), nn.Identity()

    def forward(self, x: Tensor, centre: Any = False) -> Tensor:
        h = self.first(x).tanh()
        return self.last(h - h.mean(0) if centre in (True, "yes") or not self.part.training else h)


@pytest.mark.parametrize("later", [True, "yes", "mode"])
def test_a_flag_a_word_or_a_mode_that_changes_later_is_proven_anew(later: Any) -> None:
    model, x = Switched(), torch.randn(4, 4)
    given = {True: (False, True), "yes": ("no", "yes"), "mode": (False, False)}[later]
    with refusal(r"^last: the input of sample \d changes"), gramian.per_sample_norms(model):
        model(x, given[0]).square().sum().backward()
        model.part.train(later != "mode")
        model(x, given[1]).square().sum().backward()


@pytest.mark.parametrize("kind", ["mask", "float mask", "lengths"])
def test_tokens_that_are_left_out_of_later_batches_only_are_proven_then(kind: str) -> None:
    """2·B rows of which samples have different numbers: as many rows as fit, of the wrong samples."""

    class Packs(Net):
        def forward(self, x: Tensor, which: Tensor) -> Tensor:  # type: ignore[override]
            counted = which.bool() if which.dim() == 2 else torch.arange(x.shape[1]) < which[:, None]
            h = torch.zeros(*x.shape[:2], 5)
            h[counted] = self.first(x[counted])
            return self.last(h.tanh())

    equal, unequal = torch.ones(4, 2, dtype=torch.bool).repeat(1, 2), torch.zeros(4, 4, dtype=torch.bool)
    equal[:, 2:] = False
    for row, count in enumerate((1, 3, 3, 1)):
        unequal[row, :count] = True
    model, x = Packs(), torch.randn(4, 4, 4)
    read = {"mask": lambda m: m, "float mask": lambda m: m.float(), "lengths": lambda m: m.sum(1)}[kind]
    with refusal("first"), gramian.per_sample_norms(model):
        model(x, read(equal)).square().sum().backward()
        model(x, read(unequal)).square().sum().backward()


def test_what_is_replaced_is_gone_from_the_batch() -> None:
    """One sample differs from all others in a count; any replacement that holds it or takes it away changes the sum."""
    counts = torch.tensor([2.0, 1.0, 2.0, 2.0, 2.0])
    for seed in range(40):
        torch.manual_seed(seed)
        x = torch.cat([torch.randn(5, 4), counts[:, None]], 1)
        model = Net(lambda net, x: net.last(net.first(x[:, :4]).tanh() / x[:, 4].sum()))
        with refusal("changes when other samples are replaced"):
            norms(model, x)


def test_a_buffer_that_is_not_a_number_does_not_count_as_memory_of_samples() -> None:
    model, x = Net(), torch.randn(4, 4)
    model.register_buffer("unset", torch.full((3,), math.nan))
    private(model, x)
    model(x).sum().backward()


def test_a_table_that_is_b_long_by_chance_is_held_fixed_under_privacy_only_if_it_is_square() -> None:
    class Conditioned(Net):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            return self.last(self.first(x).tanh() + other.mean(0).sum())

    model, x = Conditioned(), torch.randn(4, 4)
    private(model, x)
    with refusal("changes when other samples are replaced"):
        model(x, torch.randn(4, 3))


def test_what_norms_were_proven_for_does_not_cover_private_training() -> None:
    model, x = Remembers(lambda x: x.abs().max(), in_place=True), torch.randn(4, 4)
    norms(model, x)
    private(model, x)
    with refusal(r"^seen: is a buffer whose values depend on samples"):
        model(x)


def test_a_loss_that_fails_is_not_proven_by_one_that_passed() -> None:
    model, x = Net(), torch.randn(4, 4)
    engine, _ = private(model, x)
    engine.check_independence(lambda model, x: model(x).square().mean(), (x,))
    assert engine.proof["loss"] == "proven"
    with pytest.raises(GramianError):
        engine.check_independence(lambda model, x: model(x).mean(0).square().sum(), (x,))
    assert engine.proof["loss"] == "not proven"


NO_GRADIENT: dict[str, Callable[[Tensor], Tensor]] = {
    "detached": lambda y: (y - y.mean(0)).detach().square().mean(),
    "a count": lambda y: (y > 0).float().mean(),
    "a hinge that is not active": lambda y: F.relu((y - y.mean(0)).square().mean() - 100),
    "times 0": lambda y: 0 * (y - y.mean(0)).square().mean(),
}


@pytest.mark.parametrize("kind", NO_GRADIENT)
def test_a_loss_without_a_gradient_shows_nothing(kind: str) -> None:
    model, x = Net(), torch.randn(4, 4)
    engine, _ = private(model, x)
    with refusal("^loss_fn: gives no sample of the batch a gradient"):
        engine.check_independence(lambda model, x: NO_GRADIENT[kind](model(x)), (x,))
    assert engine.proof["loss"] == "not proven"


def test_a_loss_scale_that_is_too_large_for_half_precision_is_lowered_for_the_proof() -> None:
    model, x = Net(), torch.randn(4, 4)
    engine, _ = private(model, x)

    def half(y: Tensor) -> Tensor:
        return 1e6 * y.half().float().square().mean()

    with torch.autocast("cpu", torch.float16):
        engine.check_independence(lambda model, x: half(model(x)), (x,))
        assert engine.proof["loss"] == "proven"
        with refusal("depend|couples|other"):
            engine.check_independence(lambda model, x: half(y := model(x)) * y.detach().mean(), (x,))


class Normalising(nn.Module):
    """Gives every sample's gradient the norm 1, whatever the loss is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h.register_hook(lambda g: g / g.norm(dim=1, keepdim=True))
        return h * 1


def test_a_backward_that_is_not_linear_has_no_share_of_a_mean_and_is_refused() -> None:
    model = Normalising()
    with refusal("and a backward that is linear"), gramian.per_sample_norms(model):
        model(torch.randn(5, 4)).square().sum(1).mean().backward()


@pytest.mark.parametrize("proof", ["auto", "off"])
def test_no_graph_outlives_a_proof(proof: str) -> None:
    def attends(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        return net.last(h @ (h.mT @ h).softmax(-1))  # softmax saves its own output

    def graphs() -> set[int]:
        gc.collect()
        return {id(t) for t in gc.get_objects() if type(t) is Tensor and t.grad_fn is not None}

    before = graphs()  # of other tests
    norms(Net(attends), torch.randn(4, 3, 4), proof=proof)
    assert graphs() <= before


def test_a_forward_that_refuses_evaluation_mode_is_proven_in_training_mode() -> None:
    def trains(net: Any, x: Tensor) -> Tensor:
        if not net.training:
            raise ValueError("only training")
        return net.last(F.dropout(net.first(x), 0.3))

    model = Net(trains)
    assert norms(model, torch.randn(4, 4)).values.shape == (4,) and model.training
    assert "in evaluation mode the model is another one" in proven(model)[0].alone


@pytest.mark.parametrize("seed", range(6))
def test_samples_that_are_mixed_at_random_are_refused_where_this_state_mixes_none(seed: int) -> None:
    def mixes(net: Any, x: Tensor) -> Tensor:
        h = torch.tanh(net.first(x))
        return net.last(0.7 * h + 0.3 * h[torch.randperm(2)] if net.training else h)

    x, model = torch.randn(2, 4), Net(mixes)
    torch.manual_seed(seed)
    with refusal("when other samples are replaced"):
        norms(model, x)
    assert norms(model.eval(), x).values.shape == (2,)


@pytest.mark.parametrize("proof", ["auto", "off"])
def test_a_forward_may_use_torch_func(proof: str) -> None:
    def differentiates(net: Any, x: Tensor) -> Tensor:
        slope = torch.func.vmap(torch.func.grad(lambda row: torch.tanh(row).square().sum()))(x)
        return net.last(torch.tanh(net.first(x + slope)))

    torch.manual_seed(0)
    assert_exact(Net(differentiates).double(), torch.randn(4, 4, dtype=torch.float64), proof=proof)


class AtomicAdditions(torch.autograd.Function):
    """The identity; its backward rounds otherwise now and then, as atomic additions on a GPU do."""

    draw = random.Random(0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        return g * (1 + torch.finfo(g.dtype).eps) if AtomicAdditions.draw.random() < 0.1 else g


@pytest.mark.parametrize("coupled", [pytest.param(0.0, marks=pytest.mark.full), 0.01])
def test_rounding_that_varies_now_and_then_on_a_gpu_is_no_reason_to_refuse(
    coupled: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of the batch are equal by chance, a third is not: nothing depends on other samples, unless it does."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = torch.tanh(net.first(x))
        return net.last(AtomicAdditions.apply(h + coupled * h.mean(0)))

    def refused() -> bool:
        try:
            norms(Net(forward), torch.randn(8, 4))
        except GramianError as problem:
            assert "changes when other samples are replaced" in str(problem)
            return True
        return False

    torch.manual_seed(0)
    AtomicAdditions.draw.seed(0)
    trials = 30 if FULL else 15
    at_chance = [refused() for _ in range(trials)]
    monkeypatch.setattr(ProofRuns, "on_gpu", True)
    assert [refused() for _ in range(trials)] == [coupled > 0] * trials
    assert any(at_chance)  # without a look at repetitions


def test_dropout_in_recomputed_blocks_is_as_exact_as_in_stored_ones() -> None:
    """Where a run of the proof is without dropout, the second run of a checkpoint is, too."""
    tokens_BT, found = torch.randint(32, (4, 8)), []
    for blocks in (0, 1):
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=2, width=16, heads=2, context=8, vocabulary=32, dropout=0.1))
        model.checkpoint_blocks = blocks
        with gramian.per_sample_norms(model, loss_reduction="mean") as norms:
            F.cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten()).backward()
        found.append(norms.values)
    assert torch.allclose(*found, rtol=1e-6)


def test_only_backwards_of_attention_are_run_under_the_demand_for_a_fixed_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    monkeypatch.setattr(isolated_runs, "ATTENTION_BACKWARDS", {attention})
    demands: dict[Any, int] = {}

    class Demands(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            demands[func] = torch.get_deterministic_debug_mode()
            return func(*args, **(kwargs or {}))

    before = torch.get_deterministic_debug_mode()  # of a run in this process that asked for it
    torch.set_deterministic_debug_mode("warn")
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    try:
        with Demands(), isolated_runs.AttentionInOrder():
            F.scaled_dot_product_attention(x, x, x).sum().backward()
        assert demands.pop(attention) == 2 and set(demands.values()) == {1}
        assert torch.get_deterministic_debug_mode() == 1
    finally:
        torch.set_deterministic_debug_mode(before)


def test_attention_that_compiles_itself_runs_under_the_demand_too() -> None:
    x = torch.randn(1, 2, 16, 8)
    with warnings.catch_warnings(), isolated_runs.AttentionInOrder():
        warnings.simplefilter("ignore")  # flex_attention would rather be compiled as a whole
        found = flex_attention(x, x, x)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(x, x, x))
