"""Clipped sums against the loop: every layer, algorithm, storage, reduction and dtype; and what a backward may meet."""

import copy
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gramian
from gramian.oracles.clipped_sum import clip, clipped_sum
from gramian.privacy.clipping import sample_norms, weighted_sums
from gramian.privacy.clipping.clip_factors import SLACK
from gramian.taps.gradients import Joined, Outer
from gramian.taps.gradients.outer import weighted_totals
from gramian.taps.model.whole_layers import whole_classes
from tests.kit.matrix import FULL, sample, some
from tests.kit.models import CASES
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.oracles.sample_statistics import per_sample_norms
from tests.privacy.problems import assert_sums, clip_norm, gradients, largest_error, private, reduced, wanted, weights
from tests.statistics.problems import Problem, assert_norms, problem

pytestmark = [pytest.mark.oracle, pytest.mark.few_proofs]

STORAGES = ("auto", "bookkeeping", "keep", "two_pass")
ALGORITHMS = ("auto", "gram", "direct")
REDUCTIONS = ("mean", "sum", 0.375)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
MATRIX = [
    cell
    for cell in product(CASES, STORAGES, ALGORITHMS, REDUCTIONS, DTYPES, ("loss.backward", "engine.backward"))
    if cell[1] != "two_pass" or cell[5] == "engine.backward"
]
EXPECTED_BATCH = 5  # of batches of 4 samples: nobody may divide by the actual number
FEW = ("mlp", "tied_gpt", "convnet", "vit", "reused")


def _tolerance(p: Problem) -> float:
    return 5e-2 if p.dtype == torch.bfloat16 else p.tolerance


def _backward(run: Any, loss: Tensor, how: str = "loss.backward") -> None:
    run.engine.backward(loss) if how == "engine.backward" else loss.backward()


# ---- the matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, storage, algorithm, reduction, dtype, how", sample(MATRIX, 120))
def test_backward_gains_the_clipped_sum_and_a_step_moves_by_it_over_the_expected_batch(
    name: str, storage: str, algorithm: str, reduction: str | float, dtype: torch.dtype, how: str
) -> None:
    p = problem(name, 4, dtype)
    limit, model, tolerance = clip_norm(p), p.model(), _tolerance(p)
    want = wanted(p, limit)
    options = {"clipping": storage, "norm_algorithm": algorithm, "loss_reduction": reduction}
    with private(model, limit, batch_size=EXPECTED_BATCH, **options) as run:
        _backward(run, reduced(p, model, p.batch, reduction), how)
        found, before = gradients(model), weights(model)
        assert {q.grad.dtype for q in model.parameters() if q.grad is not None} == {dtype}
        run.optimizer.step()
        divided, after = gradients(model), weights(model)
        seen = run.engine.last
    at_most = max(tolerance, 1e-5) if p.case.computes_in_float32 else tolerance
    assert largest_error(found, clip(p.gradients, limit).totals) <= at_most
    if dtype == torch.bfloat16:
        return
    assert_sums(found, want.totals, tolerance)
    assert_sums({key: g * EXPECTED_BATCH for key, g in divided.items()}, want.totals, tolerance)
    for key, g in divided.items():
        assert torch.equal(after[key], before[key] - g), key
    assert_norms(seen.norms_B, want.norms_B, tolerance)
    assert_norms(seen.factors_B, want.factors_B, tolerance)


@pytest.mark.parametrize("name", some(CASES, 0))
def test_a_step_at_rate_1_moves_by_exactly_the_mean_of_the_clipped_gradients(name: str) -> None:
    p = problem(name, 4)
    limit, model = clip_norm(p), p.model()
    before = weights(model)
    with private(model, limit, batch_size=EXPECTED_BATCH) as run:
        p.backward(model, p.batch)
        run.optimizer.step()
    moved = {key: (before[key] - now) * EXPECTED_BATCH for key, now in weights(model).items()}
    assert_sums(moved, wanted(p, limit).totals, p.tolerance)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("limit", ["none is clipped", "all are clipped"])
@pytest.mark.parametrize("name", FEW)
def test_any_clip_norm(name: str, limit: str, storage: str) -> None:
    p = problem(name, 4)
    norms, model = p.norms(), p.model()
    bound = float(norms.max()) * 2 if limit == "none is clipped" else float(norms.min()) / 1000
    with private(model, bound, clipping=storage) as run:
        run.engine.backward(p.case.loss(model, *p.batch, reduction="mean"))
        assert_sums(run.gradients(), wanted(p, bound).totals, p.tolerance)
        # Unclipped samples keep their gradient to the last bit: the slack is for those that are clipped.
        assert (run.engine.last.factors_B == 1).all() == (limit == "none is clipped")


@pytest.mark.parametrize("name, storage", sample(list(product(some(CASES, 1), STORAGES)), 12))
def test_backwards_before_a_step_accumulate(name: str, storage: str) -> None:
    p = problem(name, 6)
    limit, model = clip_norm(p), p.model()
    with private(model, limit, clipping=storage, loss_reduction="mean") as run:
        for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
            run.engine.backward(p.case.loss(model, *p.rows(part), reduction="mean"))
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_what_was_in_the_gradient_before_stays(name: str) -> None:
    p = problem(name, 3)
    limit, model = clip_norm(p), p.model()
    earlier = {}
    with private(model, limit):
        for key, q in model.named_parameters():
            q.grad = torch.full_like(q, 0.5)
            earlier[key] = q.grad
        p.backward(model, p.batch)
        want = {key: total + 0.5 for key, total in wanted(p, limit).totals.items()}
        assert_sums(gradients(model), want, p.tolerance)
        assert all(q.grad is earlier[key] for key, q in model.named_parameters())


@pytest.mark.parametrize("samples", [1, 2, 7])
@pytest.mark.parametrize("name", ["mlp", "tied_gpt", "conv2d", "windows", "broadcast"])
def test_any_number_of_samples(name: str, samples: int) -> None:
    p = problem(name, samples)
    limit, model = 0.7 * float(p.norms().mean()), p.model()
    with private(model, limit):
        p.backward(model, p.batch)
        assert_sums(gradients(model), wanted(p, limit).totals, p.tolerance)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LSTM": (lambda: nn.LSTM(5, 6, batch_first=True), (4, 7, 5)),
    "GRU": (lambda: nn.GRU(5, 6, batch_first=True), (4, 7, 5)),
    "PReLU": (lambda: nn.Sequential(nn.Linear(5, 6), nn.PReLU(6), nn.Linear(6, 3), nn.PReLU()), (4, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), (4, 3, 5, 5)),
    "channels last": (lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), (4, 3, 7, 7)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (4, 5, 8)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)), (4, 3, 5)),
    "one token": (lambda: nn.Linear(5, 6), (4, 1, 5)),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", LAYERS)
def test_further_layers_with_a_formula_or_without(name: str, storage: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(shape, dtype=torch.float64)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        return (out[0] if isinstance(out, tuple) else out).square().flatten(1).sum(1).mean()

    limit = 0.9 * float(per_sample_norms(model, loss, (x,)).median())
    want = clipped_sum(model, loss, (x,), limit)
    with private(model, limit, clipping=storage) as run:
        run.engine.backward(loss(model, x))
        assert_sums(run.gradients(), want.totals, 1e-9)


# ---- batches of one sample: whole gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("clipping", ["auto", "keep"])
@pytest.mark.parametrize("name", some(CASES, 1))
def test_whole_gradients_of_single_samples(name: str, clipping: str, dtype: torch.dtype) -> None:
    p = problem(name, 3, dtype)
    limit, model = clip_norm(p), p.model()
    with private(model, limit, clipping=clipping, max_physical_batch=1) as run:
        norms = []
        for i in range(3):
            p.backward(model, p.rows([i]))
            norms.append(run.engine.last.norms_B)
        assert_sums(run.gradients(), wanted(p, limit, dtype=dtype).totals, p.tolerance)
        assert_norms(torch.cat(norms), p.norms(), p.tolerance)
        assert run.engine.plan is None


class Outside(nn.Module):
    """A weight used outside its layer, a tied one, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.scale = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, ids_BT: Tensor) -> Tensor:
        h_BTD = torch.tanh(self.body(self.table(ids_BT))) * self.scale
        return F.linear(h_BTD, self.table.weight)


def _text(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none").mean(1).mean()


def _outside() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Outside().double(), torch.randint(11, (4, 5))


@pytest.mark.parametrize("clipping", ["auto", "keep"])
def test_a_weight_used_outside_its_layer_is_right_at_one_sample(clipping: str) -> None:
    model, ids = _outside()
    want = clipped_sum(model, _text, (ids,), 0.5)
    with private(model, 0.5, clipping=clipping, max_physical_batch=1) as run:
        for i in range(4):
            _text(model, ids[i : i + 1]).backward()
        assert_sums(run.gradients(), want.totals, 1e-9)
    assert want.factors_B.max() < 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_of_single_samples(reentrant: bool) -> None:
    p = problem("tied_gpt", 3)
    limit, model = clip_norm(p), p.model()
    for block in model.blocks:
        inner = type(block).forward.__get__(block)
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)
    with private(model, limit, max_physical_batch=1) as run:
        for i in range(3):
            p.backward(model, p.rows([i]))
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)


def test_two_samples_where_one_was_announced_are_refused() -> None:
    p = problem("mlp", 2)
    model = p.model()
    with private(model, 1.0, max_physical_batch=1):
        with refusal("batch: has 2 samples, but max_physical_batch=1"):
            p.case.loss(model, *p.batch, reduction="mean")
        with torch.no_grad():
            p.case.loss(model, *p.batch, reduction="mean")  # evaluation may be of any size


# ---- checkpoints, compile, autocast --------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["gpt", "tied_gpt"])
def test_checkpointed_blocks(name: str, storage: str) -> None:
    p = problem(name, 4)
    limit, model = clip_norm(p), p.model()
    for block in model.blocks:
        inner = type(block).forward.__get__(block)
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    with private(model, limit, clipping=storage) as run:
        run.engine.backward(p.case.loss(model, *p.batch, reduction="mean"))
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)
    assert not whole_classes(model)  # which would be exact whatever the taps count


def test_reentrant_checkpoints_are_refused() -> None:
    p = problem("gpt", 4)
    model = p.model()
    for block in model.blocks:
        inner = type(block).forward.__get__(block)
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=True)
    with private(model, 1.0), refusal("use_reentrant=False"):
        p.backward(model, p.batch)
    assert all(q.grad is None for q in model.parameters())


@pytest.fixture
def _fresh_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


COMPILED = [(name, "aot_eager", storage) for name in FEW if name != "vit" for storage in ("auto", "keep")]
COMPILED = [*COMPILED, ("tied_gpt", "aot_eager", "bookkeeping")] if FULL else [("mlp", "aot_eager", "auto")]
INDUCTOR = [("tied_gpt", "inductor", "bookkeeping")] * FULL
INDUCTOR += [(name, "inductor", s) for name in ("mlp", "gpt", "reused") for s in ("auto", "keep", "bookkeeping")] * FULL


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("_fresh_graphs")
@pytest.mark.parametrize(
    "name, backend, storage",
    [*COMPILED, *(pytest.param(*cell, marks=pytest.mark.xdist_group("inductor")) for cell in INDUCTOR)],
)
def test_a_compiled_graph_gives_the_sums_of_eager_mode_batch_after_batch(name: str, backend: str, storage: str) -> None:
    # The graph may reuse the memory of what was stashed: a second and third batch would overwrite it.
    p, model = problem(name, 8), CASES[name].make(torch.float64)
    limit = clip_norm(p)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    parts = [slice(0, 3), slice(3, 6), slice(5, 8)]
    with private(compiled, limit, clipping=storage) as run:
        assert run.model is compiled
        for part in parts:
            model.zero_grad()
            p.backward(compiled, p.rows(part))
            assert_sums(gradients(model), wanted(p, limit, part).totals, p.tolerance)
        model.zero_grad()
        for part in parts:
            p.backward(compiled, p.rows(part))
        sums = [wanted(p, limit, part).totals for part in parts]
        assert_sums(gradients(model), {key: sum(s[key] for s in sums) for key in sums[0]}, p.tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("_fresh_graphs")
def test_a_compiled_graph_in_two_passes_or_an_error_but_no_wrong_sum() -> None:
    p, model = problem("mlp", 4), CASES["mlp"].make(torch.float64)
    limit = clip_norm(p)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with private(compiled, limit, clipping="two_pass") as run:
        try:
            run.engine.backward(p.case.loss(compiled, *p.batch, reduction="mean"))
        except gramian.GramianError:
            assert all(q.grad is None for q in model.parameters())
            return
        assert_sums(gradients(model), wanted(p, limit).totals, p.tolerance)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["mlp", "tied_gpt", "convnet", "hf_gpt2", "lora"])
def test_bf16_autocast_is_within_half_precision_of_its_own_loop(name: str, storage: str) -> None:
    p = problem(name, 4, torch.float32)
    limit, model = clip_norm(p), p.model()

    def loss(model: nn.Module, *batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return p.case.loss(model, *batch, reduction="mean")

    want = clipped_sum(model, loss, p.batch, limit / (1 + SLACK[torch.bfloat16]))
    with private(model, limit, clipping=storage) as run:
        run.engine.backward(loss(model, *p.batch))
        found = run.gradients()
    assert {g.dtype for g in found.values()} == {torch.float32}
    assert largest_error(found, want.totals) < 4e-3


# ---- stashes that somebody writes to ------------------------------------------------------------------------------------


class _Spoils(torch.autograd.Function):
    """A backward that writes into the gradient it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.mul_(7.0)


@pytest.mark.parametrize("storage", ["auto", "bookkeeping", "keep"])
def test_a_backward_that_writes_into_gradients_gives_the_right_sum_or_an_error(storage: str) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(5, 6), nn.Linear(6, 3)

    model = Toy(lambda net, x: net.second(torch.tanh(_Spoils.apply(net.first(x)))), first=first, second=second).double()
    x = torch.randn(4, 3, 5, dtype=torch.float64)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().flatten(1).sum(1).mean()

    want = clipped_sum(model, loss, (x,), 1.0)
    with private(model, 1.0, clipping=storage) as run:
        try:
            loss(model, x).backward()
        except gramian.GramianError as problem:
            assert "changed in place" in str(problem)
            assert all(q.grad is None for q in model.parameters())
        else:
            assert_sums(run.gradients(), want.totals, 1e-9)


@pytest.mark.parametrize("storage", STORAGES)
def test_an_activation_in_place_between_layers(storage: str) -> None:
    p = problem("convnet", 4)  # ReLU(inplace=True) after norms and convolutions
    limit, model = clip_norm(p), p.model()
    with private(model, limit, clipping=storage) as run:
        run.engine.backward(p.case.loss(model, *p.batch, reduction="sum") / 4)
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)


# ---- which parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_the_norm_covers_the_parameters_of_the_optimizer_and_no_others(storage: str) -> None:
    p = problem("gpt", 4)
    model = p.model()
    chosen = {key: g for key, g in p.gradients.items() if "blocks.1" in key or key == "head.weight"}
    norms = torch.cat([g.flatten(1) for g in chosen.values()], 1).norm(dim=1)
    limit = float(norms.median())
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD([named[key] for key in chosen], lr=1.0)
    before = {key: q.detach().clone() for key, q in named.items()}
    with private(model, limit, optimizer=optimizer, clipping=storage, batch_size=4) as run:
        run.engine.backward(p.case.loss(model, *p.batch, reduction="mean"))
        assert_norms(run.engine.last.norms_B, norms, p.tolerance)
        want = wanted(Problem(p.case, p.batch, chosen, p.dtype), limit)
        assert_sums({key: named[key].grad for key in chosen}, want.totals, p.tolerance)
        assert all(q.grad is None for key, q in named.items() if key not in chosen)
        run.optimizer.step()
    assert all(torch.equal(q, before[key]) == (key not in chosen) for key, q in named.items())


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["partially_frozen", "lora", "unused"])
def test_frozen_and_unused_parameters_get_nothing(name: str, storage: str) -> None:
    p = problem(name, 4)
    limit, model = clip_norm(p), p.model()
    with private(model, limit, clipping=storage) as run:
        run.engine.backward(p.case.loss(model, *p.batch, reduction="mean"))
        for key, q in model.named_parameters():
            if not q.requires_grad or key.startswith("spare"):
                assert q.grad is None, key
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)
        run.optimizer.step()
        assert all(q.grad is None for q in model.parameters() if not q.requires_grad)


# ---- bad samples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name, storage", list(product(("mlp", "linear_3d", "conv2d", "rmsnorm", "mha"), STORAGES)))
def test_a_sample_that_is_not_finite_counts_for_nothing_and_is_counted(name: str, storage: str, value: float) -> None:
    p = problem(name, 5)
    limit, model = clip_norm(p), p.model()
    batch = [t.clone() for t in p.batch]
    batch[0][1].view(-1)[2] = value
    batch[0][4].view(-1)[0] = value
    with private(model, limit, clipping=storage) as run:
        run.engine.backward(p.case.loss(model, *batch, reduction="mean"))
        assert_sums(run.gradients(), wanted(p, limit, [0, 2, 3]).totals, p.tolerance)
        assert run.engine.nonfinite == run.engine.last.nonfinite == 2
        assert run.engine.last.factors_B[[1, 4]].tolist() == [0.0, 0.0]
        run.optimizer.step()
        assert all(q.isfinite().all() for q in model.parameters())


@pytest.mark.parametrize("together", [2, 3, 9])
@pytest.mark.parametrize("bad", ["none", "not finite", "tokens cancel"])
def test_layers_of_one_launch_get_the_sums_of_each_alone(
    bad: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of one layout are summed together; each alone where a sample is not finite, or had to be formed again."""
    torch.manual_seed(0)
    linears = [nn.Linear(6, n, bias=False) for n in (6, 6, 4)] + [
        nn.Linear(4, 6, bias=False),
        nn.Linear(6, 6, bias=False),
    ]
    model = nn.Sequential(*linears).double()
    x, g = torch.randn(5, 7, 6, dtype=torch.float64), torch.randn(5, 7, 6, dtype=torch.float64)
    if bad == "not finite":
        x[2, 3] = float("nan")
    if bad == "tokens cancel":  # equal inputs, and output gradients of sum 0 up to 1e-9
        x[1] = x[1, :1]
        g[1] -= g[1].mean(0) - 1e-9
    alone = _sums_of(copy.deepcopy(model), x, g, monkeypatch, 1)
    several = _sums_of(model, x, g, monkeypatch, together)
    for name, total in alone[0].items():
        torch.testing.assert_close(several[0][name], total, rtol=1e-10, atol=1e-13)
    assert alone[1] == 1 and several[1] == (min(together, 3) if bad == "none" else 1), several


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("together", [2, 9])
def test_a_layer_of_a_launch_whose_samples_are_formed_again_is_summed_alone(
    together: int, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(6, 6, bias=False), nn.Tanh()))).double()
    x, g = torch.randn(5, 7, 6, dtype=torch.float64), torch.randn(5, 7, 6, dtype=torch.float64)
    alone, _ = _sums_of(copy.deepcopy(model), x, g, monkeypatch, 1)
    gram = sample_norms.gram_of

    def doubting(outers: list[Outer]) -> tuple[Tensor, Tensor]:
        squares_KB, doubtful_KB = gram(outers)
        doubtful_KB[place, 2] = True
        return squares_KB, doubtful_KB

    monkeypatch.setattr(sample_norms, "gram_of", doubting)
    several, _ = _sums_of(model, x, g, monkeypatch, together)
    for name, total in alone.items():
        torch.testing.assert_close(several[name], total, rtol=1e-10, atol=1e-13)


def _sums_of(
    model: nn.Module, x: Tensor, g: Tensor, monkeypatch: pytest.MonkeyPatch, together: int
) -> tuple[dict[str, Tensor], int]:
    """Clipped sums, where a launch forms so many products, and the largest number of products that one did form."""
    monkeypatch.setattr(weighted_sums, "products_of_one_launch", lambda left, right: together)
    with (
        mock.patch.object(weighted_sums, "weighted_totals", wraps=weighted_totals) as launches,
        private(model, 0.5, norm_algorithm="gram") as run,
    ):
        run.engine.backward((model(x) * g).sum((1, 2)).mean())
        return run.gradients(), max((len(call.args[0]) for call in launches.call_args_list), default=1)


@pytest.mark.parametrize("storage", ["auto", "two_pass"])
def test_uses_of_a_tied_table_that_seem_to_cancel_are_measured_again(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which samples those are is read with what else is in doubt; their sums stay as they are."""
    p, found = problem("tied_gpt", 4), []
    exact = Joined.exact_squares
    monkeypatch.setattr("gramian.taps.gradients.joined.CANCELLED", float("inf"))
    monkeypatch.setattr(
        Joined, "exact_squares", lambda self, samples: found.append(len(samples)) or exact(self, samples)
    )
    model, limit = p.model(), clip_norm(p)
    with private(model, limit, clipping=storage) as run:
        run.engine.backward(p.case.loss(model, *p.batch, reduction="mean"))
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)
    assert found and set(found) == {4}


@pytest.mark.filterwarnings("ignore:backward. no sample")
def test_a_whole_gradient_that_is_not_finite_counts_for_nothing() -> None:
    p = problem("mlp", 3)
    limit, model = clip_norm(p), p.model()
    x, y = p.batch[0].clone(), p.batch[1]
    x[1, 3] = float("nan")
    with private(model, limit, max_physical_batch=1) as run:
        for i in range(3):
            p.backward(model, (x[i : i + 1], y[i : i + 1]))
        assert_sums(run.gradients(), wanted(p, limit, [0, 2]).totals, p.tolerance)
        assert run.engine.nonfinite == 1


@pytest.mark.parametrize("storage", STORAGES)
def test_a_batch_of_bad_samples_alone_changes_nothing(storage: str) -> None:
    p = problem("mlp", 3)
    model = p.model()
    before = weights(model)
    with private(model, 1.0, clipping=storage) as run:
        bad = p.batch[0].clone()
        bad[:, 0] = float("nan")
        with pytest.warns(UserWarning, match="no sample of a batch had a finite gradient"):
            run.engine.backward(p.case.loss(model, bad, p.batch[1], reduction="mean"))
        run.optimizer.step()
        assert run.engine.nonfinite == 3
    assert all(torch.equal(before[key], now) for key, now in weights(model).items())


@pytest.mark.parametrize("storage", STORAGES)
def test_a_sample_without_a_gradient_has_factor_1(storage: str) -> None:
    p = problem("linear_4d", 4)
    model, (x, y) = p.model(), p.batch
    with torch.no_grad():
        y = torch.cat([model(x[:1]), y[1:]])  # its error is 0
    limit = clip_norm(p)
    with private(model, limit, clipping=storage) as run:
        run.engine.backward(p.case.loss(model, x, y, reduction="mean"))
        assert run.engine.last.norms_B[0] == 0
        assert_sums(run.gradients(), wanted(p, limit, [1, 2, 3]).totals, p.tolerance)
        assert run.engine.nonfinite == 0


@pytest.mark.filterwarnings("ignore:backward. no sample")
@pytest.mark.parametrize("size", [1e-30, 1e25])
@pytest.mark.parametrize("storage", STORAGES)
def test_squares_beyond_float32_do_not_become_wrong_sums(storage: str, size: float) -> None:
    # ‖g‖² underflows or overflows float32: the sum must stay within C, and a tiny gradient must not be blown up.
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3), torch.randn(4, 2, 5)
    g = torch.randn(4, 2, 3) * size
    with private(model, 1.0, clipping=storage, loss_reduction="sum") as run:
        run.engine.backward((model(x) * g).sum())
        found = torch.cat([t.double().flatten() for t in run.gradients().values()])
    assert found.isfinite().all()
    assert float(found.norm()) <= 4.0
    if size < 1:
        assert float(found.norm()) <= 1e-25


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.accepts_empty_batch])
@pytest.mark.parametrize("storage", STORAGES)
def test_an_empty_batch_adds_nothing(name: str, storage: str) -> None:
    p = problem(name, 0)
    model = p.model()
    with private(model, 1.0, clipping=storage, loss_reduction="sum") as run:
        run.engine.backward(p.case.loss(model, *p.batch, reduction="sum"))
        assert all(not g.any() for g in run.gradients().values())


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("storage", ["auto", "bookkeeping", "two_pass"])
def test_norms_survive_cancellation_in_float32(storage: str, algorithm: str, offset: float) -> None:
    # Tokens share a large activation and their gradients sum to almost nothing: a Gram alone loses all digits.
    generator = torch.Generator().manual_seed(0)
    x_BTI = torch.randn(3, 16, 40, generator=generator) + offset
    g_BTO = torch.randn(3, 16, 40, generator=generator)
    g_BTO = g_BTO - g_BTO.mean(1, keepdim=True)
    layer = nn.Linear(40, 40, bias=False)
    g_BOI = torch.einsum("bto,bti->boi", g_BTO.double(), x_BTI.double())
    norms_B = g_BOI.flatten(1).norm(dim=1)
    limit = float(norms_B.median()) / 2
    with private(layer, limit, clipping=storage, norm_algorithm=algorithm, loss_reduction="sum") as run:
        run.engine.backward((layer(x_BTI) * g_BTO).sum())
        seen, total = run.engine.last.norms_B.double(), run.gradients()["weight"].double()
    unavoidable = (g_BTO.double().norm(dim=2) * x_BTI.double().norm(dim=2)).sum(1) * 2**-24 / norms_B
    assert ((seen / norms_B - 1).abs() <= 1e-5 + unavoidable).all()
    clipped_BOI = g_BOI * (limit / norms_B).clamp(max=1.0)[:, None, None]
    assert (total - clipped_BOI.sum(0)).norm() <= (2e-5 + 2 * unavoidable.max()) * limit * len(norms_B)


# ---- peers --------------------------------------------------------------------------------------------------------------


def _opacus_sum(model: nn.Module, loss: Callable[[nn.Module], Tensor], limit: float) -> dict[str, Tensor]:
    """Σ of the gradients that Opacus' hooks form and its optimizer clips."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model, loss_reduction="mean")
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=limit, expected_batch_size=1
    )
    loss(wrapped).backward()
    optimizer.clip_and_accumulate()
    return {key.removeprefix("_module."): q.summed_grad.detach() for key, q in wrapped.named_parameters()}


def text_classifier() -> Toy:
    """Every layer of it has a grad sampler in Opacus."""
    return Toy(
        lambda net, ids_BT: net.head(torch.tanh(net.inner(net.norm(net.table(ids_BT))))),
        table=nn.Embedding(13, 8),
        norm=nn.LayerNorm(8),
        inner=nn.Linear(8, 9),
        head=nn.Linear(9, 5),
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", ["mlp", "linear_3d", "conv1d", "conv2d", "conv3d", "text", "pooled"])
def test_parity_with_opacus(name: str, storage: str) -> None:
    pytest.importorskip("opacus")
    if name == "text":
        torch.manual_seed(0)
        base, ids = text_classifier().double(), torch.randint(13, (5, 6))

        def loss(model: nn.Module) -> Tensor:
            return (
                F.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 5, reduction="none").view(5, 6).mean(1).mean()
            )

        limit = float(
            per_sample_norms(base, lambda m, i: F.cross_entropy(m(i).flatten(0, 1), i.flatten() % 5), (ids,)).median()
        )
    else:
        p = problem(name, 5)
        base, limit = p.model(), clip_norm(p)

        def loss(model: nn.Module) -> Tensor:
            return p.case.loss(model, *p.batch, reduction="mean")

        for module in base.modules():  # its hooks sit on the outputs
            if hasattr(module, "inplace"):
                module.inplace = False
    theirs = _opacus_sum(copy.deepcopy(base), loss, limit)
    with private(base, limit, clipping=storage) as run:
        run.engine.backward(loss(base))
        ours = run.gradients()
    assert_sums(ours, theirs, 3e-6)  # they add 1e-6 to every norm
