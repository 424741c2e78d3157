"""Bugs that libraries of private training have had, each of which must turn a test red.

A bug is put back into the package, by an edit of one function or another in its place, while a test of the suite runs; the
same test is green without it. `docs/internals/privacy_bugs.md` is the list for people, with the bugs that this design
cannot have and why; it is checked against this one.
"""

import functools
import inspect
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.data import SubsetRandomSampler

import gramian
from gramian.kernels.norms import direct_squares
from gramian.oracles.clipped_sum import clipped_sum
from gramian.parallel.process_grid import ProcessGrid
from gramian.parallel.shared_refusals import SharedRefusals
from gramian.privacy.accounting.epsilon import epsilon_of
from gramian.privacy.accounting.ledger import SHARED
from gramian.privacy.clipping import gradient_sums
from gramian.privacy.clipping.gradient_sums import GradientSums
from gramian.privacy.clipping.loss_scaling import Scaling
from gramian.privacy.clipping.step_timing import Stopwatch
from gramian.privacy.noise.element_noise import NoisePlan
from tests.dist import private_bodies as bodies
from tests.dist import test_private
from tests.kernels import interpreted, test_chacha, test_direct_squares, test_gram_squares
from tests.kit.matrix import FULL, sample
from tests.kit.mutations import RED, Edit, Mutation, Swap, package_identity, turns_red
from tests.kit.private import add_noise
from tests.kit.processes import run_on_ranks
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.kit.whole_roots import never_the_root
from tests.oracles.sample_statistics import per_sample_norms
from tests.privacy import (
    test_account,
    test_accounting,
    test_clip_functions,
    test_clipping,
    test_contract,
    test_correlated_noise,
    test_engine,
    test_engine_state,
    test_integrity,
    test_ledger,
    test_loader,
    test_metric,
    test_noise,
    test_opacus_cases,
    test_peft,
    test_plan,
    test_population,
    test_properties,
    test_regressions,
    test_sampling,
    test_secrets,
    test_single_unit,
    test_truncated,
    test_unit_draws,
    test_unit_refusals,
    test_units,
)
from tests.privacy.problems import assert_sums, private
from tests.statistics.problems import problem
from tests.taps import test_row_proof
from tests.test_mutations import _square_of_every_token

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "internals" / "privacy_bugs.md"
KEY = bytes(range(32))
ALL_RED = (*RED, LookupError, ValueError)
"""What a bug may raise, beside what a failing test raises."""


# ---- tests that no other file has --------------------------------------------------------------------------------------


def _branches() -> Toy:
    """y = a(x) + b(x): autograd hands one gradient tensor to both."""
    return Toy(lambda net, x: net.a(x) + net.b(x), a=nn.Linear(7, 5), b=nn.Linear(7, 5))


def _squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1).mean()


@pytest.mark.oracle
@pytest.mark.parametrize("storage", test_clipping.STORAGES)
def test_branches_that_share_input_and_output_gradient_are_each_scaled_once(storage: str) -> None:
    torch.manual_seed(0)
    model, x = _branches().double(), torch.randn(4, 3, 7, dtype=torch.float64)
    limit = float(per_sample_norms(model, _squares, (x,)).median()) / 2
    want = clipped_sum(model, _squares, (x,), limit)
    with private(model, limit, clipping=storage) as run:
        run.engine.backward(_squares(model, x))
        assert_sums(run.gradients(), want.totals, 1e-9)


@pytest.mark.oracle
@pytest.mark.parametrize("storage", test_clipping.STORAGES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_are_summed_wide(dtype: torch.dtype, storage: str) -> None:
    """A thousand tokens whose squares add up to more than float16 has, in steps that bfloat16 would lose."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, 1000, 5, generator=generator).to(dtype)
    g = torch.rand(2, 1000, 3, generator=generator).to(dtype)
    model = nn.Linear(5, 3).to(dtype)
    exact_BOI = torch.einsum("bto,bti->boi", g.double(), x.double())
    exact = (exact_BOI.square().sum((1, 2)) + g.double().sum(1).square().sum(1)).sqrt()
    with private(model, 1.0, clipping=storage, loss_reduction="sum") as run:
        run.engine.backward((model(x) * g).sum())
        seen = run.engine.last
    assert seen.nonfinite == 0 and seen.norms_B.dtype == torch.float32
    torch.testing.assert_close(seen.norms_B.double(), exact, rtol=2e-3, atol=0)


@pytest.mark.parametrize("name", ["tied_gpt", "vit"])
def test_clipped_samples_of_half_precision_are_within_C(name: str) -> None:
    limit = 0.3 * float(problem(name, 6, torch.bfloat16).norms().min())
    for i in range(6):
        assert float(test_properties._summed(name, torch.bfloat16, [i], limit).norm()) <= limit


@pytest.mark.parametrize("storage", test_clipping.STORAGES)
def test_samples_that_cancel_a_little_are_within_C(storage: str) -> None:
    """Too little to be in doubt; but tokens that are weighted and rounded one by one no longer cancel as they did."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        x = (torch.randn(1, 5, 3, generator=generator) + 3).bfloat16()
        g = torch.randn(1, 5, 1, generator=generator)
        g = (g - 0.95 * g.mean(1, keepdim=True)).bfloat16()
        limit = 0.3 * float(torch.einsum("bto,bti->oi", g.double(), x.double()).norm())
        model = nn.Linear(3, 1, bias=False).bfloat16()
        with private(model, limit, clipping=storage, loss_reduction="sum") as run:
            run.engine.backward((model(x) * g).sum())
            assert float(model.weight.grad.double().norm()) <= limit


class _Doubled(nn.Linear):
    """A subclass whose forward is another."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input.tanh())


@pytest.mark.oracle
def test_a_subclass_that_computes_something_else_is_not_a_linear_layer() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(_Doubled(7, 5), nn.Linear(5, 3)).double(), torch.randn(4, 7, dtype=torch.float64)
    want = clipped_sum(model, _squares, (x,), 0.5)
    with private(model, 0.5) as run:
        _squares(model, x).backward()
        assert_sums(run.gradients(), want.totals, 1e-9)


class _NoGradient(torch.autograd.Function):
    """Takes a weight, and gives it no gradient: what a compiled backward does with the weights of tapped layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


@pytest.mark.oracle
def test_a_weight_that_gets_no_gradient_is_not_a_bypass() -> None:
    model = Toy(lambda net, x: _NoGradient.apply(net.layer(x), net.layer.weight), layer=nn.Linear(7, 5)).double()
    x = torch.randn(4, 7, dtype=torch.float64)
    want = clipped_sum(model, _squares, (x,), 0.1)
    with private(model, 0.1) as run:
        _squares(model, x).backward()
        assert_sums(run.gradients(), want.totals, 1e-9)


def test_detach_gives_back_what_was_given() -> None:
    model = torch.compile(problem("mlp", 2).model(), backend="eager")
    with private(model, 1.0) as run:
        assert run.engine.detach() is model


def test_independence_of_a_loss_that_takes_the_rest_of_its_arguments() -> None:
    p = problem("mlp", 4)
    with private(p.model(), 1.0) as run:
        run.engine.check_independence(lambda model, *batch: p.case.loss(model, *batch, reduction="mean"), p.batch)


class _Swaps(nn.Module):
    """Two samples change places around a layer. Noise leaves the reversed batch and the sample alone out."""

    def __init__(self, one: int, other: int, samples: int) -> None:
        super().__init__()
        self.order = [{one: other, other: one}.get(i, i) for i in range(samples)]
        self.layer = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x[self.order])
        return (h + torch.rand_like(h))[self.order]


@pytest.mark.parametrize("samples", [2, 4, 5, 8])
def test_whichever_two_samples_change_places_they_are_found(samples: int) -> None:
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(0)).double()
    for one, other in itertools.combinations(range(samples), 2):
        model = _Swaps(one, other, samples)
        with private(model, 1.0), refusal(f"^layer: the input of sample [{one}{other}]"):
            model(x)


class _Centred(torch.autograd.Function):
    """The identity, whose gradient is centred over all samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


def centred_head(net: Any, x: Tensor) -> Tensor:
    h = net.layer(x)
    return _Centred.apply(h + torch.rand_like(h))


def test_a_gradient_that_is_centred_over_the_batch_is_found() -> None:
    model = Toy(centred_head, layer=nn.Linear(5, 3).double())
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()
    with private(model, 1.0), refusal("^layer: the output gradient of sample"):
        model(x)


def test_frozen_parameters_of_the_optimizer_stay_as_they_are() -> None:
    p = problem("partially_frozen", 4)
    model = p.model()
    before = {name: q.detach().clone() for name, q in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with private(model, 1.0, optimizer=optimizer, noise_multiplier=1.0) as run:
        p.backward(model, p.batch)
        run.optimizer.step()
    for name, q in model.named_parameters():
        assert torch.equal(q, before[name]) != q.requires_grad, name


def test_a_counter_with_a_mark_can_be_bound_before_make_private(tmp_path: Path) -> None:
    (tmp_path / "releases.json").write_text(json.dumps({"begun": 3}))
    engine = gramian.PrivacyEngine("rdp")
    engine.bind_counter(str(tmp_path / "releases.json"), must_exist=True)
    with private(problem("mlp", 2).model(), 1.0, engine=engine, noise_multiplier=1.0):
        assert engine.steps == 3


# ---- one process that takes itself for the second of two -----------------------------------------------------------------


@dataclass(frozen=True)
class _SecondOfTwo(ProcessGrid):
    """The other process holds the same sums, KEY, and five releases; it was told what the first call here was told."""

    kind: str = "ddp"
    rank: int = 1
    size: int = 2
    told: dict[str, int] = field(default_factory=dict)

    def differing(self, values: Any, device: Any) -> str | None:
        if not self.told:
            self.told.update(values)
        return next((name for name, value in values.items() if value != self.told[name]), None)

    def from_first(self, data: bytes, device: Any) -> bytes:
        if len(data) == SHARED.size:
            _, *account, _, _ = SHARED.unpack(data)
            return SHARED.pack(KEY, *account, 5, 5)
        return KEY if len(data) == len(KEY) else data

    def start_sum(self, t: Tensor) -> None:
        t.mul_(2)


@contextmanager
def _second_of_two() -> Iterator[None]:
    other = _SecondOfTwo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gramian.privacy.private_model.grid_of", lambda model, root: other)
        patch.setattr("gramian.privacy.private_model.SharedRefusals", lambda grid=None: SharedRefusals())
        yield


def _private_draws(records: int = 12, **options: Any) -> Any:
    given = {"noise_multiplier": 1.0, "poisson_sampling": True, "max_grad_norm": 1.0, "expected_batch": 4.0, **options}
    data = (torch.zeros(records, 7, dtype=torch.float64), torch.zeros(records, dtype=torch.long))
    return private(problem("mlp", 2).model(), data=data, **given)


def test_the_second_process_takes_the_key_of_the_first() -> None:
    with _second_of_two(), _private_draws() as run:
        assert bytes(run.engine.state_dict()["secrets"]["key"].tolist()) == KEY


def test_the_second_process_counts_as_the_first_does() -> None:
    with _second_of_two(), _private_draws() as run:
        assert run.engine.steps == run.engine.released == 5


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"max_grad_norm": 2.0}, "max_grad_norm: is not the same"),
        ({"expected_batch": 5.0}, "expected_batch: is not the same"),
        ({"max_physical_batch": 2}, "max_physical_batch: is not the same"),
        ({"records": 13}, "data_loader: its data set is not the same"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_differs_between_processes_is_refused_by_its_name(options: dict[str, Any], complaint: str) -> None:
    with _second_of_two():
        with _private_draws():
            pass
        with refusal(f"^{complaint}"), _private_draws(**options):
            pass


def test_noise_is_added_once_after_the_sum_over_processes() -> None:
    p = nn.Parameter(torch.zeros(40))
    p.grad = torch.ones(40)
    plan = NoisePlan(KEY, [("w", (40,))])
    GradientSums({"w": p}, _SecondOfTwo(), Stopwatch(on=False)).release(plan, 3, 0.5, 4.0, Scaling())
    drawn = add_noise(plan, torch.zeros(40), "w", 0.5, 3)
    torch.testing.assert_close(p.grad, (2 + drawn) / 4)


# ---- several processes ---------------------------------------------------------------------------------------------------


def _every_sum_is_reduced(rank: int, world_size: int = 2) -> None:
    """What would be reduced, without communication, since a process that leaves one out would leave the others waiting."""
    bare = bodies.Sometimes().double()
    bare.skips = rank == 1
    model = fully_shard(bare)
    reduced: list[tuple[int, ...]] = []

    def note(full: Tensor, like: DTensor) -> DTensor:
        reduced.append(tuple(full.shape))
        return torch.zeros_like(like)

    engine, _ = bodies.private_squares(model, expected_batch=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_sums, "reduce_to_shard", note)
        model(torch.eye(2, 4, dtype=torch.float64)).square().sum().backward()
    engine.detach()
    of_all: list[Any] = [None] * world_size
    dist.all_gather_object(of_all, reduced)
    assert of_all[0] == of_all[1] == [tuple(q.shape) for q in model.parameters()]


@pytest.mark.dist
@pytest.mark.xdist_group("processes")
def test_every_process_reduces_every_sum_in_one_order_whatever_it_used() -> None:
    run_on_ranks(2, _every_sum_is_reduced)


@contextmanager
def _world_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _alone(test: Callable[..., Any], *arguments: Any) -> Callable[[], None]:
    """A test of several processes, or its body, where one shows the bug."""

    @functools.wraps(test)
    def check() -> None:
        with _world_of_one():
            inspect.unwrap(test)(*arguments)

    return check


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:proof")
def test_a_bypass_in_a_compiled_sharded_model_is_named_without_a_proof_too() -> None:
    torch.compiler.reset()
    with _world_of_one():
        model = torch.compile(fully_shard(bodies.Bypassing()), backend="aot_eager")
        engine, _ = bodies.private_squares(model, proof="off")
        with refusal(r"^second\.weight: got a gradient that did not come through"):
            model(torch.randn(3, 4)).square().sum().backward()
        assert all(q.grad is None for q in model.parameters())
        engine.detach()


# ---- checks --------------------------------------------------------------------------------------------------------------


def _sums(
    name: str, storage: str = "auto", algorithm: str = "auto", reduction: str | float = "mean"
) -> Callable[[], None]:
    """The matrix of sums against the loop, at one cell."""
    how = "engine.backward" if storage == "two_pass" else "loss.backward"
    test = test_clipping.test_backward_gains_the_clipped_sum_and_a_step_moves_by_it_over_the_expected_batch
    return partial(test, name, storage, algorithm, reduction, torch.float64, how)


def _by_its_layers(check: Callable[..., None], *arguments: Any) -> None:
    """A check where no model is tapped as one layer itself, which would be exact whatever the taps of its layers count."""
    with never_the_root():
        check(*arguments)


def _cancelling(storage: str, algorithm: str) -> Callable[[], None]:
    return partial(test_clipping.test_norms_survive_cancellation_in_float32, storage, algorithm, 1e4)


def _correlated_matrix(name: str, bands: int) -> Callable[[], None]:
    return partial(
        test_correlated_noise.test_over_t_releases_the_noise_is_c_inverse_times_the_draws_of_the_key_stream, name, bands
    )


def _uncached(test: Callable[..., None], *case: Any) -> Callable[[], None]:
    """A test of numbers that are cached."""

    @functools.wraps(test)
    def check() -> None:
        epsilon_of.cache_clear()
        try:
            test(*case)
        finally:
            epsilon_of.cache_clear()

    return check


def _in_folder(test: Callable[..., None], *case: Any) -> Callable[[], None]:
    """A test that takes a folder."""

    @functools.wraps(test)
    def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            test(Path(folder), *case)

    return check


def _after_a_run(test: Callable[..., None], *case: Any) -> Callable[[], None]:
    """A test that takes what a run left."""
    return functools.wraps(test)(_in_folder(lambda folder: test(test_ledger.past_run(folder), *case)))


def _patching(test: Callable[..., None], *case: Any) -> Callable[[], None]:
    """A test that wants a monkeypatch."""

    @functools.wraps(test)
    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(*case, patch)

    return check


def _compiled(test: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """A test that compiles, from scratch."""

    @functools.wraps(test)
    def check() -> None:
        torch.compiler.reset()
        try:
            test(*arguments)
        finally:
            torch.compiler.reset()

    return check


def _norms_of_this_rank(rank: int) -> None:
    bodies.one_step(rank, "ddp", "mlp", (3, 3))


def _shards_of_all_sums(rank: int) -> None:
    bodies.one_step(rank, "fsdp2", "mlp", (3, 1))


def _gram_at_the_edges() -> None:
    """Where kernels are interpreted; the test itself asks another process to do so."""
    left, right = test_gram_squares.case(1, 17, 7, 5, layout="amid nan")
    got = test_gram_squares.gram_squares_kernel(left, right, tiles=test_gram_squares.SMALL, group=3)
    test_gram_squares.close(got, left, right)


def _direct_at_the_edges() -> None:
    left, right = test_direct_squares.case(2, 17, 7, 5, layout="amid nan")
    got = direct_squares.direct_squares_kernel(left, right, tiles=test_direct_squares.SMALL)
    test_direct_squares.close(got, left, right)


# ---- bugs that are more than an edit -------------------------------------------------------------------------------------


def _scaled_in_place(x: Tensor, weights_B: Tensor) -> Tensor:
    return x.mul_(weights_B.to(x.dtype).view(-1, *[1] * (x.dim() - 1)))


def _own_part(full: Tensor, like: DTensor) -> DTensor:
    """This process's sum taken for everybody's."""
    whole = DTensor.from_local(full, like.device_mesh, [Replicate()], run_check=False)
    return whole.redistribute(like.device_mesh, like.placements)


def _normals_of_the_process(
    targets: Any, sources: Any, key: bytes, nonce: int, starts: Any, std: Any, factor: float
) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_((source + torch.randn_like(source) * std) * factor)


def _first_by_position(args: Any, kwargs: Any) -> Tensor:
    if not args:
        raise gramian.GramianError("forward: got no tensor argument")
    return args[0]


def _refused_by_all(rank: int) -> None:
    """Rank 1 writes into a gradient; every rank must refuse the step."""
    p = problem("mlp", 4)
    made = bodies.make_private(p, bodies.wrap("ddp", p.model()))
    made.backward(slice(2 * rank, 2 * rank + 2))
    if rank == 1:
        next(made.model.parameters()).grad.data.mul_(2)
    refused = torch.zeros(1)
    try:
        made.optimizer.step()
    except gramian.GramianError:
        refused += 1
    dist.all_reduce(refused)
    made.engine.detach()
    assert refused == 2


def _narrow(*tensors: Tensor) -> torch.dtype:
    return tensors[0].dtype


BUGS = (
    # ---- norms ----
    Mutation(
        "bias norm of the tokens",
        (
            Edit("Clipping.parameter", 'row.way == "sum":', 'row.way == "sum" and not record.gradient.tokens:'),
            Swap("Summed.squared_norms", _square_of_every_token),
        ),
        _sums("linear_3d"),
    ),
    Mutation(
        "norm a little off",
        Edit("sample_norms:set_factors", ".sqrt() * work.info.scale", ".sqrt() * work.info.scale * 1.001"),
        _sums("mlp"),
    ),
    Mutation(
        "mean loss taken for a sum", Edit("Clipping.pass_info", '"mean": float(batch)', '"mean": 1.0'), _sums("mlp")
    ),
    Mutation(
        "batch of a mean loss missing in the sum",
        Edit("weighted_sums:_weights", "work.factors[group] * work.info.factor", "work.factors[group]"),
        _sums("mlp"),
    ),
    Mutation(
        "module called twice keeps its last call",
        Edit("PassBook._deliver", "gradient = join([part for _, part in parts])", "gradient = parts[-1][1]"),
        _sums("reused"),
    ),
    Mutation(
        "tied weights as a sum of squares",
        Edit(
            "Joined.squares",
            "apart_B + 2 * sum(inner(left, right) for left, right in combinations(self.parts, 2))",
            "apart_B.clone()",
        ),
        _sums("tied_gpt", "bookkeeping"),
    ),
    Mutation(
        "padding in the norm of an embedding",
        Edit("Embedding.gradients", "if module.padding_idx is not None:", "if module.max_norm:"),
        _sums("padded_embedding"),
    ),
    Mutation(
        "embedding left out of the norm",
        Edit(
            "sample_norms:add_norms",
            "work.add(name, gradient.squared_norms())",
            "type(gradient).__name__ == 'Indexed' or work.add(name, gradient.squared_norms())",
        ),
        _sums("padded_embedding", "bookkeeping"),
    ),
    Mutation(
        "groups of a convolution ignored in the norm",
        Edit("Convolved.per_sample", "groups=count * self.geometry.groups", "groups=count"),
        _sums("conv1d"),
    ),
    Mutation(
        "positions of one row for all samples",
        Edit("layer_forward:run_layer", "if rows == 1:", "if model.batch == -1:"),
        partial(_by_its_layers, _sums("gpt")),
        red="tests/privacy/test_clipping.py::"
        "test_backward_gains_the_clipped_sum_and_a_step_moves_by_it_over_the_expected_batch",
    ),
    Mutation(
        "inputs of four axes not flattened",
        Swap("site:tokens", lambda t, batch: t.reshape(batch, t.shape[1], -1)),
        _sums("linear_4d"),
    ),
    Mutation(
        "arguments by keyword not seen",
        Swap("site:first_tensor", _first_by_position),
        test_engine_state.test_a_hugging_face_batch_by_keyword,
    ),
    Mutation(
        "subclass with another forward taken for its base",
        Edit(
            "site_registry:site_for", 'getattr(type(module), "forward", None) is getattr(base, "forward", None)', "True"
        ),
        test_a_subclass_that_computes_something_else_is_not_a_linear_layer,
    ),
    Mutation(
        "layers without a formula dropped",
        Edit("site_registry:site_for", "if site is not None), Generic(whole=False))", "if site is not None), None)"),
        partial(test_clipping.test_further_layers_with_a_formula_or_without, "PReLU", "auto"),
    ),
    Mutation(
        "children of a module with its own parameter dropped",
        Edit("find_layers:discover", "if site.whole:", 'if site.whole or site.kind == "generic":'),
        _sums("vit"),
    ),
    Mutation(
        "checkpointed layers counted twice",
        (
            Edit("observer:open_use", "if in_backward():", "if False:"),
            Edit(
                "PassBook._deliver",
                "pass_.delivered.add(name)",
                "pass_.delivered.add(name); parts = parts * (pass_.uses[name] // len(parts))",
            ),
        ),
        partial(test_clipping.test_checkpointed_blocks, "gpt", "auto"),
    ),
    Mutation(
        "plan of the first batch for all",
        Edit(
            "ClippingPlanner._planned",
            "key = (batch, *((tap.name, inputs, made) for tap, inputs, made in uses), str(products))",
            "key = 0",
        ),
        test_plan.test_the_plan_follows_the_batch_and_the_sequence_length,
    ),
    # ---- rounding ----
    Mutation(
        "norms summed in half precision",
        Swap("dtypes:wide_dtype", _narrow),
        partial(test_norms_of_half_precision_are_summed_wide, torch.float16, "auto"),
    ),
    Mutation(
        "Gram trusted under cancellation",
        Swap("outer:cancels", lambda squares_B, diagonal_B: diagonal_B < 0),
        _cancelling("bookkeeping", "gram"),
    ),
    Mutation(
        "Gram done again on top of itself",
        Edit("sample_norms:_with_doubtful", "work.squares = dict(sure)", "pass"),
        _cancelling("bookkeeping", "gram"),
    ),
    Mutation(
        "weighted side rounded to half precision",
        Edit(
            "Outer.weighted_total",
            "if torch.float16 in (left.dtype, right.dtype) or torch.bfloat16 in (left.dtype, right.dtype):",
            "if False:",
        ),
        partial(test_samples_that_cancel_a_little_are_within_C, "bookkeeping"),
    ),
    Mutation(
        "doubtful samples summed otherwise than measured",
        Edit("weighted_sums:_weighted_sum", "if name in work.recomputed:", "if False:"),
        partial(test_properties.test_tokens_whose_gradients_cancel_stay_within_C, "bookkeeping", torch.float32, 1e7),
    ),
    Mutation(
        "no slack for rounding",
        Edit("ClipFunction.factors", "self.limits[group] / (1 + slack)", "self.limits[group]"),
        partial(test_clipped_samples_of_half_precision_are_within_C, "vit"),
    ),
    Mutation(
        "sum rounded to half precision before its noise",
        Edit("GradientSums._round", "self._wide_sums |= sums", "pass"),
        partial(
            test_regressions.test_without_a_sample_what_is_noised_changes_by_the_clip_norm_also_in_half_precision,
            torch.bfloat16,
            "auto",
            None,
        ),
    ),
    Mutation(
        "wide sum released after its gradient was zeroed",
        Edit("GradientSums._drop_zeroed", "del self._wide_sums[name]", "pass"),
        partial(test_integrity.test_a_gradient_may_be_dropped, "zeros", torch.bfloat16),
    ),
    Mutation(
        "gradient written to before its noise",
        Edit("GradientSums.compare", "if number:", "if False:"),
        partial(
            test_integrity.test_a_gradient_with_other_values_is_refused_and_nothing_is_released,
            torch.float32,
            None,
            "data.mul_",
        ),
    ),
    Mutation(
        "write that leaves the values taken for a change",
        Edit(
            "ChangeDetector.changed_gradients",
            "now = checksums(self._ordered_gradients())",
            "now = checksums(self._ordered_gradients()) + self._trained['0.weight'].grad._version",
        ),
        partial(
            test_integrity.test_a_write_that_leaves_the_values_changes_no_bit_of_the_step,
            torch.float32,
            "clipped at infinity",
        ),
    ),
    Mutation(
        "change forgotten when another backward adds to it",
        Edit("ChangeDetector._marked", "if self._changed is None", "if True"),
        partial(test_integrity.test_a_change_before_another_backward_is_refused_in_the_step, torch.float32),
    ),
    Mutation(
        "scaler's own division taken for a change",
        Edit("GradientSums.settle", "self.watch.take(self._inverse_scale())", "self.watch.take()"),
        partial(test_integrity.test_a_scaler_may_unscale_and_nobody_else, "unscaled by step", torch.float32),
    ),
    Mutation(
        "weights changed by a gradient without noise",
        Edit("GradientSums.compare", "self.watch.changed_weights()", "torch.zeros_like(changed)"),
        partial(test_integrity.test_weights_that_change_between_backward_and_step_are_refused, None, "p -= p.grad"),
    ),
    Mutation(
        "weights changed where no version moves",
        Edit(
            "ChangeDetector.changed_weights",
            "self._weights_now() != self._weights",
            "torch.zeros_like(self._weights, dtype=torch.bool)",
        ),
        partial(
            test_integrity.test_weights_that_change_between_backward_and_step_are_refused, None, "p.data -= p.grad.data"
        ),
    ),
    Mutation(
        "training by hand in place of the step",
        (
            Edit("GradientSums.begin", "if written:", "if False:"),
            Edit("GradientSums.settle", "if any(changed):", "if False:"),
        ),
        partial(test_integrity.test_training_by_hand_in_place_of_the_step_is_refused_at_the_next_backward, True),
    ),
    Mutation(
        "second optimizer of the same parameters",
        Edit("OutsideParameters._before_any_step", "and self._unreleased()", "and False"),
        partial(test_integrity.test_another_optimizer_of_the_same_parameters_is_refused_before_it_acts, False),
    ),
    Mutation(
        "head that trains plainly",
        Edit("OutsideParameters._before_any_step", "self._other_optimizers.add(optimizer)", "pass"),
        partial(test_integrity.test_a_head_that_trains_plainly_is_refused_at_the_second_backward, None, False),
    ),
    Mutation(
        "trunk that trains plainly",
        Edit("OutsideParameters.look_behind", "self._behind[p] = True", "pass"),
        partial(test_integrity.test_a_private_head_on_a_trunk_that_trains_plainly_is_refused, None),
    ),
    Mutation(
        "closure run again by the optimizer",
        Edit("PrivateStep.hook", "_once(loss)", "closure"),
        partial(
            test_integrity.test_a_closure_runs_once_and_makes_the_step_that_a_backward_before_it_makes,
            False,
            False,
            None,
        ),
    ),
    Mutation(
        "private step traced by a compiler",
        Edit("PrivateModel._install", "torch.compiler.disable(self.step.hook, reason=EAGER)", "self.step.hook"),
        test_regressions.test_a_compiled_step_draws_the_noise_of_an_eager_one,
    ),
    # ---- clipping and sums ----
    Mutation(
        "norm layers get no gradient",
        Edit("weighted_sums:take_sum", "return work.totals.pop(name, None)", "work.totals.pop(name, None)"),
        _sums("rmsnorm", "bookkeeping"),
    ),
    Mutation(
        "every parameter clipped by itself",
        Edit(
            "weighted_sums:_weighted_sum",
            "weights_B = _weights(work, gradient, name)",
            "weights_B = (work.clip.limits[0] / (gradient.squared_norms().sqrt() * work.info.scale)).clamp(max=1.0)"
            " * work.info.factor",
        ),
        _sums("mlp"),
    ),
    Mutation(
        "output gradients scaled in place",
        (
            Swap("scaled_rows:scaled_rows", _scaled_in_place),
            Swap("SavedForClipping.check", lambda self, parameter: None),
        ),
        partial(test_branches_that_share_input_and_output_gradient_are_each_scaled_once, "bookkeeping"),
    ),
    Mutation(
        "only the last backward survives",
        Edit("GradientSums._add", "p.grad += total", "p.grad = total"),
        partial(test_clipping.test_backwards_before_a_step_accumulate, "mlp", "auto"),
    ),
    Mutation(
        "only the last piece of a draw survives",
        Edit("GradientSums.move", "self.moved[name] += part", "self.moved[name] = part"),
        partial(test_engine.test_a_step_is_one_draw_whatever_its_pieces, "mlp", 2),
    ),
    Mutation(
        "sample that is not a number weighted by NaN",
        (
            Edit(
                "ClipFunction.factors",
                "torch.where(norms.isfinite(), factors, 0.0)",
                "factors",
            ),
            Edit("weighted_sums:_weighted_sum", "if work.finite_runs is None:", "if True:"),
        ),
        partial(
            test_clipping.test_a_sample_that_is_not_finite_counts_for_nothing_and_is_counted,
            "mlp",
            "auto",
            float("nan"),
        ),
    ),
    Mutation(
        "weight 0 times infinity",
        Edit("weighted_sums:_weighted_sum", "if work.finite_runs is None:", "if True:"),
        partial(
            test_clipping.test_a_sample_that_is_not_finite_counts_for_nothing_and_is_counted,
            "mlp",
            "auto",
            float("inf"),
        ),
    ),
    Mutation(
        "loss scale left in the norm",
        Edit("sample_norms:set_factors", ".sqrt() * work.info.scale", ".sqrt() * work.info.factor"),
        partial(test_engine.test_a_float_as_loss_scale_stays_in_the_gradient, "auto"),
    ),
    Mutation(
        "samples weighted by a negative coefficient",
        Edit("PrivacyOptions.__post_init__", "self.loss_reduction < 0", "False"),
        test_regressions.test_a_negative_coefficient_is_refused,
    ),
    # ---- gradients that are not private ----
    Mutation(
        "weight gradients of the first pass left",
        (
            Edit("layer_forward:run_layer", "if withholds:\n        keep", "if False:\n        keep"),
            Swap("bypass:_refuse", lambda name, gradient: None),
        ),
        _sums("mlp", "two_pass"),
    ),
    Mutation(
        "weights not detached",
        Edit("layer_forward:run_layer", "if withholds:\n        keep", "if False:\n        keep"),
        _sums("mlp"),
    ),
    Mutation(
        "weight used past its layer",
        Swap("BypassDetector._refuse", lambda self, name, gradient: None),
        partial(
            _by_its_layers,
            test_contract.test_a_weight_used_past_its_layer_is_an_error_that_names_it_on_every_step,
            "auto",
        ),
        red="tests/privacy/test_contract.py::test_a_weight_used_past_its_layer_is_an_error_that_names_it_on_every_step",
    ),
    Mutation(
        "weight without a gradient refused",
        Edit("BypassDetector._refuse", "if gradient is None or not", "if not"),
        test_a_weight_that_gets_no_gradient_is_not_a_bypass,
    ),
    Mutation(
        "gradients of a backward that broke off",
        Edit("SingleSampleClipping._take", "p.grad = self._earlier.pop(p)", "pass"),
        test_single_unit.test_a_backward_that_breaks_off_leaves_no_gradient_even_for_a_moment,
    ),
    Mutation(
        "two forwards clipped as one sample",
        Edit("SingleSampleClipping.reach", "if self._reached is not None:", "if False:"),
        partial(
            test_single_unit.test_a_backward_through_two_forwards_is_refused_and_adds_nothing, test_single_unit.plain
        ),
    ),
    Mutation(
        "backward of no forward clipped as one sample",
        Edit("SingleSampleClipping._end", "self._reached,", "self._reached or max(self._forwards),"),
        test_single_unit.test_a_graph_that_is_of_no_forward_is_refused_after_a_forward_too,
    ),
    Mutation(
        "auxiliary loss of a layer without a formula dropped",
        Edit("layer_forward:run_layer", "keep = None if compiling or site.compiles else", "keep = None if True else"),
        partial(
            test_regressions.test_a_gradient_past_the_outputs_of_a_layer_without_a_formula_is_named,
            False,
            "auto",
            "off",
        ),
    ),
    Mutation(
        "checkpointed layer without a formula saves less the second time",
        Edit(
            "layer_forward:run_layer",
            "keep = None if compiling or site.compiles",
            "keep = None if compiling or site.compiles or in_backward()",
        ),
        partial(test_peft.test_checkpointed_blocks, "gpt2, DoRA", "auto"),
    ),
    Mutation(
        "hook on a parameter never called",
        Edit("trained_parameters:trained_parameters", "elif p._backward_hooks:", "elif False:"),
        test_regressions.test_hooks_on_a_parameter_are_refused,
    ),
    Mutation(
        "parameters outside the optimizer not spoken of",
        Edit("trained_parameters:trained_parameters", "if left_out:", "if False:"),
        partial(test_regressions.test_parameters_outside_the_optimizer_are_named_and_get_nothing, None),
    ),
    Mutation(
        "raw gradients of parameters outside the optimizer",
        Edit("SingleSampleClipping.__init__", "if p.requires_grad:", "if p in names:"),
        partial(test_regressions.test_parameters_outside_the_optimizer_are_named_and_get_nothing, 1),
    ),
    Mutation(
        "gradient of other tensors given to the parameters",
        Edit("Clipping.watch", "if known is not None and", "if False and"),
        test_regressions.test_another_tensor_in_place_of_a_parameter_is_refused,
    ),
    Mutation(
        "gradients of inputs add to the sums",
        Edit("Clipping._open", "ignored=not accumulates(self._leaf),", "ignored=False,"),
        partial(test_contract.test_gradients_of_inputs_leave_the_parameters_alone, {}),
    ),
    Mutation(
        "layers that couple samples accepted until data comes",
        Edit("PrivateModel.__init__", "refuse_mixing(layers_with_sites(self.root))", "pass"),
        partial(test_integrity.test_layers_that_mix_or_store_samples_are_refused_before_any_data, None, "BatchNorm1d"),
    ),
    Mutation(
        "layers that couple samples accepted",
        Edit("layer_forward:_run_site", "if reason is not None:", "if False:"),
        partial(test_integrity.test_layers_that_begin_to_mix_later_are_refused_in_the_forward, None),
    ),
    Mutation(
        "layers that carry samples on accepted one sample at a time",
        Edit("SingleSampleClipping.enter_root", "refuse_mixing(self._layers)", "pass"),
        partial(test_integrity.test_layers_that_begin_to_mix_later_are_refused_in_the_forward, 1),
    ),
    Mutation(
        "arguments of Opacus taken for what they do not mean",
        Edit("privacy/options:check_opacus", "if not fits:", "if False:"),
        partial(
            test_integrity.test_opacus_arguments_that_mean_something_else_are_refused_with_their_counterpart,
            "noise_generator",
        ),
    ),
    Mutation(
        "frozen table written to by its forward",
        Edit("embedding:check_norm", "if limited else None", "if False else None"),
        partial(test_opacus_cases.test_a_table_that_its_forward_changes_is_refused, nn.Embedding, False),
    ),
    Mutation(
        "sparse bag ends in a raw error",
        Edit("EmbeddingBag.check", "check_table(module) or super().check(module)", "super().check(module)"),
        test_opacus_cases.test_a_sparse_bag_is_refused_by_name,
    ),
    Mutation(
        "packed sequence blamed on its shape",
        Edit(
            "Generic.run",
            "if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):",
            "if False:",
        ),
        partial(test_opacus_cases.test_packed_sequences_are_refused_by_name_or_right, "LSTM", "torch", [3, 1, 1, 1]),
    ),
    Mutation(
        "rows of another order shared out silently",
        (
            Swap("RowComparison.first_change", lambda *_, **__: None),
            Swap("single_unit:compare_alone", lambda *_: "not looked at"),
        ),
        test_regressions.test_rows_of_a_sample_that_lie_apart_are_its_own_too,
    ),
    Mutation(
        "two samples that no run tells apart",
        Edit("Prover.separating_sets", "for bit in range(bits)", "for bit in range(bits - 1)"),
        partial(test_whichever_two_samples_change_places_they_are_found, 4),
    ),
    Mutation(
        "samples replaced without their gradients",
        Edit("ProofRuns._moved", "if not self.rows_of(cotangent):", "if True:"),
        test_a_gradient_that_is_centred_over_the_batch_is_found,
    ),
    Mutation(
        "batch that proves nothing accepted",
        Swap("Clipping.proof_stays_open", lambda self: None),
        test_row_proof.test_equal_samples_prove_nothing_and_private_training_refuses_them,
    ),
    Mutation(
        "losses that couple samples accepted",
        Edit("independence:_shows", "prove(lambda _: [0])", "prove(lambda _: [0], sums_only=True)"),
        test_contract.test_losses_that_couple_samples_are_found,
    ),
    Mutation(
        "two passes silently taken as one",
        Edit("Clipping._refuse_over_budget", "unplanned = work.plan is None and", "unplanned = False and"),
        _compiled(test_contract.test_forced_two_pass_raises_on_a_plain_backward_of_a_compiled_model),
    ),
    Mutation(
        "plan that reads numbers breaks off",
        Edit("ClippingPlanner._shares", "except RuntimeError:", "except MemoryError:"),
        test_contract.test_running_statistics_couple_nothing,
    ),
    Mutation(
        "submodule by itself ends in a KeyError",
        Edit("ClippingPlanner.see", "self._uses.setdefault(self._number, [])", "self._uses[self._number]"),
        test_contract.test_a_submodule_called_by_itself_is_refused_in_one_line,
    ),
    Mutation(
        "loss with further arguments called wrongly",
        Edit("independence:_call", "if any(p.kind is p.VAR_POSITIONAL for p in takes):", "if False:"),
        test_independence_of_a_loss_that_takes_the_rest_of_its_arguments,
    ),
    # ---- steps ----
    Mutation(
        "divided by the actual batch",
        Edit(
            "PrivateStep._before_step",
            "std, self._rate.expected_batch, scaling,",
            "std, float(len(self._clipping.last.factors_B)), scaling,",
        ),
        partial(test_engine.test_a_step_is_one_draw_whatever_its_pieces, "mlp", None),
    ),
    Mutation(
        "empty batch skipped",
        Edit(
            "PrivateStep._before_step",
            "    options = self._options\n",
            "    if self._clipping.last is None or not len(self._clipping.last.norms_B):\n"
            "        return\n"
            "    options = self._options\n",
        ),
        partial(test_engine.test_draws_without_a_record_step_with_noise, None),
    ),
    Mutation(
        "empty draws left out by the loader",
        Edit("PoissonBatchSampler._filled", "begun.append(piece)", "piece.indices and begun.append(piece)"),
        test_loader.test_an_epoch_may_be_all_empty,
    ),
    Mutation(
        "model that cannot run on no rows",
        Edit(
            "RootForward.enter",
            "model.blank = model.rule.withholds and not first.shape[0] and given is None",
            "model.blank = False",
        ),
        partial(test_regressions.test_a_model_that_cannot_run_on_no_rows_steps_on_an_empty_draw, None, False),
    ),
    Mutation(
        "model that cannot run on no rows, one sample at a time",
        Edit(
            "SingleSampleClipping.enter_root",
            "return None if self._batch else with_a_row((args, kwargs))",
            "return None",
        ),
        partial(test_regressions.test_a_model_that_cannot_run_on_no_rows_steps_on_an_empty_draw, 1, False),
    ),
    Mutation(
        "row of zeros counts as a sample",
        Edit("Clipping._open", "info.number in self._placeholders", "False"),
        partial(test_regressions.test_a_model_that_cannot_run_on_no_rows_steps_on_an_empty_draw, None, True),
    ),
    Mutation(
        "scaler finds no gradient in an empty draw",
        Edit("GradientSums.settle", "if all(p.grad is None for p in self.trained.values()):", "if False:"),
        partial(test_engine.test_a_grad_scaler_steps_on_an_empty_draw, False),
    ),
    Mutation(
        "unequal numbers of pieces",
        Edit("PoissonBatchSampler.pieces_of", "most = len(share(indices, 0, self.world_size))", "most = len(mine)"),
        test_sampling.test_a_rank_with_a_smaller_share_runs_an_empty_piece,
    ),
    Mutation(
        "draw that is begun again counts twice",
        Edit("DrawProgress.begin", "again = piece.draw in self.draws and piece.piece == 0", "again = False"),
        partial(test_engine.test_a_draw_that_is_begun_again_counts_no_sample_twice, "after a step", 2),
    ),
    Mutation(
        "one batch counts twice",
        Edit(
            "DrawProgress.begin",
            "self.piece, self.passes_of_piece = piece, 0",
            "self.piece, self.passes_of_piece = piece, -(2**60)",
        ),
        partial(test_engine.test_two_backwards_on_one_batch_of_the_loader_are_refused, None),
    ),
    Mutation(
        "several records clipped as one row",
        Edit("DrawProgress.check_backward", "elif rows != records:", "elif rows > records:"),
        test_regressions.test_rows_that_stand_for_several_records_are_refused,
    ),
    Mutation(
        "step of noise alone after a backward past the layers",
        Edit("DrawProgress.ends_draw", "if records and", "if False and"),
        test_regressions.test_a_step_without_a_backward_of_its_batch_is_refused,
    ),
    Mutation(
        "pieces of an abandoned draw in the next release",
        Edit("PrivateStep._forget", "self._sums.forget()", "pass"),
        test_regressions.test_pieces_of_an_abandoned_draw_are_not_released_with_the_next,
    ),
    # ---- noise ----
    Mutation(
        "noise without the clip norm",
        Edit("PrivateStep._before_step", "std = sigma * self._clip.sensitivity", "std = sigma"),
        partial(test_engine.test_the_noise_of_a_step_has_the_promised_variance, torch.float32),
    ),
    Mutation(
        "noise of the process's generator",
        Swap("chacha:add_normals_to", _normals_of_the_process),
        test_engine.test_noise_is_not_that_of_the_global_generator_and_leaves_it_alone,
    ),
    Mutation(
        "noise of every process",
        Edit(
            "GradientSums.release",
            "total = self._sum_of_pieces(name, scaling)",
            "total = self._sum_of_pieces(name, scaling); "
            "noise.add_noise_to([total], [total], [noise.place(name, total.shape)], std, number)",
        ),
        test_noise_is_added_once_after_the_sum_over_processes,
    ),
    Mutation(
        "noise of every piece",
        Edit("DrawProgress.ends_draw", "return self.piece.last", "return True"),
        partial(test_engine.test_on_all_but_the_last_piece_the_optimizer_does_nothing, torch.optim.SGD),
    ),
    Mutation(
        "noise in the dtype of the parameter",
        Edit("chacha:_add_on_host", "noise.double().mul_(std)", "noise.to(part.dtype).mul_(std)"),
        partial(test_chacha.test_noise_is_added_in_place_and_rounded_once, torch.bfloat16, False),
    ),
    Mutation(
        "noise that ends at 6.8",
        Edit("chacha:_host_normals", "words_P2[:, 0] < TAIL_WORDS", "words_P2[:, 0] < 0"),
        test_chacha.test_the_tail_of_the_key_stream_takes_its_further_bits_from_the_other_nonce,
    ),
    Mutation(
        "noise of layers that are clipped apart as if C were one layer's",
        Edit("ClipFunction.sensitivity", "math.hypot(*self.limits)", "self.limits[0]"),
        partial(test_clip_functions.test_a_list_has_a_clip_norm_for_each_layer_and_noise_for_their_root, "auto"),
    ),
    Mutation(
        "quantile of adaptive clipping for nothing",
        Edit("PrivateStep._before_step", "self._quantile.noise_multiplier", "options.noise_multiplier"),
        test_clip_functions.test_the_gradients_have_the_noise_that_is_left_and_both_together_are_one_mechanism,
    ),
    Mutation(
        "noise of a metric drawn without it",
        Edit("NoisedRelease.noised", "if self._noises and name not in self._blocks}", "if self._noises}"),
        partial(test_metric.test_noise_is_the_inverse_root_of_the_metric_times_that_of_a_run_without_one, "mlp"),
    ),
    Mutation(
        "metric that changes inside a draw",
        Edit("PublicMetric.begin_draw", "if not self._draws:", "if True:"),
        test_metric.test_the_samples_of_a_draw_have_one_metric,
    ),
    Mutation(
        "factors of private data in a metric",
        Edit("PublicMetric._take", "if self._kfac.state.private:", "if False:"),
        test_metric.test_factors_that_saw_a_private_backward_are_refused_also_from_a_file,
    ),
    Mutation(
        "rows of one user clipped apart",
        Edit("Clipping.pass_info", "if self.sample_ids is not None and", "if False and"),
        partial(test_units.test_rows_of_one_user_are_clipped_as_one, "mlp", "bookkeeping", "gram"),
    ),
    Mutation(
        "embedding of packed documents without its cross term",
        Edit("joined:_inner_of_segments", "found[b] =", "found[b] = 0 *"),
        partial(test_units.test_packed_documents_are_clipped_one_by_one, "tied gpt", "bookkeeping", "gram"),
    ),
    Mutation(
        "gradient of padding left out",
        Edit("sample_norms:set_factors", "work.padding, total_B", "_, total_B"),
        test_unit_refusals.test_padding_with_a_gradient_is_refused,
    ),
    Mutation(
        "documents of one row not proven",
        Edit("TappedModel.units_in", "return max([batch, *(len(ids.unique()) for ids in by_token)])", "return batch"),
        test_unit_refusals.test_a_missing_document_mask_is_refused_also_in_one_row,
    ),
    Mutation(
        "proof of single documents taken for packed ones",
        Edit("Units.share_rows", "return bool((highest_B > lowest_B).any())", "return False"),
        test_unit_refusals.test_a_proof_of_unpacked_rows_does_not_cover_packed_ones,
    ),
    Mutation(
        "positions that follow the packing",
        Edit("Prover._turn", "if not self._private or not self._samples.turns:", "if True:"),
        test_unit_refusals.test_positions_that_do_not_begin_anew_with_a_document_are_refused,
    ),
    Mutation(
        "labels across documents",
        Edit("CrossingLabels.refuse", "if len(found) < 2 or ids.shape[1] < 2:", "if True:"),
        partial(test_unit_refusals.test_labels_across_documents_are_refused, True),
    ),
    Mutation(
        "units of several records under draws of records",
        Edit("DrawProgress._check_units", "if units != piece.count:", "if units > piece.count:"),
        test_unit_draws.test_units_of_several_records_under_draws_of_records_are_refused,
    ),
    Mutation(
        "records of a unit drawn apart",
        Edit("PoissonBatchSampler.pieces_of", "if self._units is not None:", "if False:"),
        test_unit_draws.test_units_are_drawn_at_the_rate_and_their_records_together,
    ),
    Mutation(
        "unit split between pieces",
        Edit("poisson:_filled", "groups[-1].append(unit)", "groups[max(0, len(groups) - 2)].append(unit)"),
        partial(test_unit_draws.test_a_unit_is_in_one_piece_of_one_rank, 2, None),
    ),
    Mutation(
        "the same records of a large unit in every draw",
        Edit("RecordUnits.drawn", "chacha.words(own, draw_number,", "chacha.words(own, 0 * draw_number,"),
        test_unit_draws.test_of_a_large_unit_a_random_subset_is_drawn_by_key,
    ),
    Mutation(
        "truncated draws accounted as whole ones",
        Edit("epsilon:event_of", "if len(run) == 3:", "if True:"),
        _uncached(test_truncated.test_epsilon_bounds_the_mechanism_itself_and_that_of_poisson_draws_does_not, 0.5, 1),
    ),
    Mutation(
        "steps of a composed account left out",
        Edit("Accounting.epsilon", "(*history, *self.others)", "history"),
        test_account.test_a_load_into_the_other_engine_is_seen,
    ),
    Mutation(
        "tails of the noise missing in delta",
        Edit("epsilon:left_for_normal_noise", "(delta - tails)", "delta"),
        _patching(test_accounting.test_delta_with_the_tails_is_valid_for_noise_that_is_cut_off, 1.0, 0.1),
    ),
    Mutation(
        "noise of a shard begins at the first row",
        Edit("NoisePlan.place", "self.offsets[name] + start * prod(whole[1:])", "self.offsets[name]"),
        test_noise.test_any_box_has_the_noise_of_its_elements,
    ),
    Mutation(
        "one noise for all parameters",
        Edit("NoisePlan.__init__", "place += prod(shape) + prod(shape) % 2", "pass"),
        test_noise.test_elements_have_places_of_their_own_that_start_even,
    ),
    Mutation(
        "unused parameters without noise",
        Edit(
            "GradientSums.release",
            "for name in self.trained:",
            "for name in (n for n, q in self.trained.items() if q.grad is not None):",
        ),
        test_engine.test_an_unused_parameter_gets_noise_like_any_other,
    ),
    Mutation(
        "frozen parameters with noise",
        Edit(
            "trained_parameters:trained_parameters",
            "if p.requires_grad and id(p) not in seen:",
            "if id(p) not in seen:",
        ),
        test_frozen_parameters_of_the_optimizer_stay_as_they_are,
    ),
    Mutation(
        "noise of a number without its loss scale",
        Edit("loss_scaling:scaling_at", "left=float(loss_scale)", "left=1.0"),
        partial(test_engine.test_noise_is_scaled_as_the_sum_is, "float"),
    ),
    Mutation(
        "noise on gradients that are still scaled",
        Edit("loss_scaling:scaling_at", "stage is OptState.READY", "False"),
        partial(test_engine.test_noise_is_scaled_as_the_sum_is, "GradScaler whose step was forgotten"),
    ),
    # ---- releases and secrets ----
    Mutation(
        "noise used again after a resume",
        Edit("ReleaseCounter.restore", "released if replay else mark", "released"),
        test_engine_state.test_rolling_back_noise_never_meets_another_sum,
    ),
    Mutation(
        "one noise for two copies of a run",
        Edit("Ledger._renew_key", "self.secrets.renew()", "self.counter.bound or self.secrets.renew()"),
        _in_folder(test_regressions.test_a_resume_without_replay_has_another_key_also_with_a_counter),
    ),
    Mutation(
        "replay on other data",
        Edit("PrivateModel._open_ledger", "dataset_fingerprint(records) if drawn else None", "None"),
        test_regressions.test_a_replay_on_other_data_is_refused,
    ),
    Mutation(
        "refused replay forgotten",
        Edit(
            "Ledger.open",
            "check_replay(self._replayed_options, digests)",
            "before, self._replayed_options = self._replayed_options, None\n        check_replay(before, digests)",
        ),
        _after_a_run(test_ledger.test_a_refused_replay_stays_refused_until_it_is_one, {"noise_multiplier": 2.0}),
    ),
    Mutation(
        "noise of a replay after its end",
        Edit("PrivacyEngine.detach", "self._ledger.end_replay()", "pass"),
        _after_a_run(test_ledger.test_a_replay_ends_with_detach, 2, True),
    ),
    Mutation(
        "key of a state that was refused",
        Edit("Ledger.load_state_dict", "secrets.load_state_dict(", "self.secrets.load_state_dict("),
        _after_a_run(test_ledger.test_after_a_refused_state_the_key_is_the_engines_own),
    ),
    Mutation(
        "counter bound late ends a replay",
        Edit("Ledger.bind", "self.counter.restore(released, replay=True)", "pass"),
        _after_a_run(test_ledger.test_a_counter_may_be_bound_after_a_replay_was_loaded),
    ),
    Mutation(
        "replay on other weights",
        Edit("Ledger._same_weights", "mark == now[2]", "True"),
        _in_folder(test_ledger.test_nothing_is_replayed_on_other_weights, "weight", False),
    ),
    Mutation(
        "replay without the optimizer's state",
        Edit("weights_digest:_tensors", "isinstance(value, Tensor)", "False"),
        _in_folder(test_ledger.test_nothing_is_replayed_on_other_weights, "no momentum", True),
    ),
    Mutation(
        "weights changed after the load of a replay",
        Edit("Ledger.begin", "self._checks_weights and", "False and"),
        _in_folder(test_ledger.test_weights_that_change_between_the_load_and_the_first_step_are_refused),
    ),
    Mutation(
        "replay by another generator",
        Edit("Ledger.load_state_dict", 'state.get("generator") == NORMALS_VERSION', "True"),
        _in_folder(test_ledger.test_noise_of_another_generator_is_not_replayed, 1, False),
    ),
    Mutation(
        "one noise in two forked processes",
        Edit("Secrets.refuse_forks", "os.getpid() != self._process", "False"),
        test_ledger.test_a_forked_process_takes_no_step_and_the_parent_goes_on,
    ),
    Mutation(
        "divided by the rate times the records",
        Edit("privacy/options:sampling_rate", "if sample_rate is not None and expected_batch is None:", "if False:"),
        partial(
            test_contract.test_bad_options_are_refused_in_one_line_that_names_them,
            {"sample_rate": 0.1},
            "expected_batch: is not given, and sample_rate × records",
        ),
    ),
    Mutation(
        "draws past the user's sampler",
        Edit("population:population", "_goes_over(sampler) != size", "False"),
        partial(
            test_population.test_poisson_draws_do_not_replace_a_sampler_that_chooses, SubsetRandomSampler(range(10))
        ),
    ),
    Mutation(
        "rate of a subset from the whole data set",
        Edit("population:population", "None if yielded is None else min(size, yielded)", "size"),
        partial(
            test_population.test_without_poisson_the_rate_is_not_below_that_of_any_record,
            SubsetRandomSampler(range(12)),
            12,
        ),
    ),
    Mutation(
        "noise used again in the next step",
        Edit("ReleaseCounter.begin", "self._next = release + 1", "self._next = 0"),
        test_secrets.test_numbers_follow_each_other_and_are_counted,
    ),
    Mutation(
        "epsilon refunded by a rollback",
        Edit(
            "ReleaseCounter.restore",
            "mark = max(self._spent, spent, released, recorded)",
            "mark = max(spent, released, recorded)",
        ),
        test_engine_state.test_a_replay_in_the_same_process_is_bit_for_bit_the_same_and_refunds_nothing,
    ),
    Mutation(
        "old draws with restored noise",
        Edit(
            "PrivateModel.restart",
            "self.loader.rekey(self._ledger.secrets.sampling_key, self.noise.groups_key())",
            "pass",
        ),
        test_engine_state.test_a_state_loaded_after_make_private_draws_and_noises_with_its_own_key,
    ),
    Mutation(
        "old noise correlated across a lost release",
        Edit("CorrelatedNoise._of", "self._past[key].next != release", "False"),
        partial(test_correlated_noise.test_after_a_gap_or_with_a_new_key_the_correlation_begins_anew, "bandmf", 4),
    ),
    Mutation(
        "band of another release",
        Edit("CorrelatedNoise._next_noise", "(release - lag) % rows", "(release - rows) % rows"),
        _correlated_matrix("bandmf", 4),
    ),
    Mutation(
        "past draws of the wrong sign",
        Edit("CorrelatedNoise._add_earlier_draws", "-1.0 if lag == 1 else 1.0", "1.0"),
        _correlated_matrix("bisr", 3),
    ),
    Mutation(
        "records of all groups in every draw",
        Edit("Groups.cyclic_draw", "indices[self.of(size)[indices] == number % self.count]", "indices"),
        test_correlated_noise.test_a_record_is_drawn_from_its_own_group_at_the_rate_of_the_group,
    ),
    Mutation(
        "amplification at the rate of all records",
        Edit("epsilon:plain_run", "min(1.0, rate * groups)", "rate"),
        _uncached(test_correlated_noise.test_epsilon_of_banded_noise_is_the_published_one_of_amplification),
    ),
    Mutation(
        "one participation of several accounted",
        Edit("noise_strategy:sensitivity_of_roots", "np.cumsum(np.pad(", "(lambda t, axis: t)(np.pad("),
        _uncached(
            test_correlated_noise.test_sensitivity_is_the_largest_over_all_participations_and_directions, "bisr", 3, 3
        ),
    ),
    Mutation(
        "two runs of correlated noise accounted as one",
        Edit("accountant:_merged", "if len(run) == 6:", "if False:"),
        test_correlated_noise.test_runs_of_correlated_noise_pay_for_participations_of_their_own,
    ),
    Mutation(
        "releases beyond those that noise was made for",
        Edit("Ledger.refuse_past_limit", "fixed is not None and", "False and"),
        _in_folder(test_correlated_noise.test_lost_releases_use_up_the_fixed_number_and_past_it_a_step_is_refused),
    ),
    Mutation(
        "buffers of noise lost in a replay",
        Edit("PrivateNoise.resume", "noise.load_state_dict(state or {}, self._trained)", "pass"),
        partial(
            test_correlated_noise.test_a_replay_goes_on_with_the_same_noise_and_a_resume_without_begins_anew,
            test_correlated_noise.CORRELATED["bandmf"],
        ),
    ),
    Mutation(
        "groups drawn anew after a resume",
        Edit("PrivateNoise.groups_key", "self._ledger.signing.subkey", "self._ledger.secrets.subkey"),
        test_correlated_noise.test_the_group_of_a_record_outlives_the_key_of_the_draws,
    ),
    Mutation(
        "counter file of no kind refused",
        Edit("Ledger._count", "self.accounting.history or self._parallel is not None", "True"),
        _in_folder(test_a_counter_with_a_mark_can_be_bound_before_make_private),
    ),
    Mutation(
        "key in the text of an object",
        Swap("Secrets.__repr__", lambda self: f"Secrets({self._key.hex()})"),
        test_secrets.test_neither_text_nor_pickle_shows_the_key,
    ),
    Mutation(
        "key that a seed gives",
        Edit("Secrets.__init__", "os.urandom(KEY_BYTES)", "bytes(KEY_BYTES)"),
        test_engine_state.test_two_engines_have_two_keys_and_the_insecure_one_is_recorded,
    ),
    # ---- processes ----
    Mutation(
        "every process its own key",
        Edit("Secrets.load_state_dict", "self._key, self._process = bytes(key.tolist()),", "_ ="),
        test_the_second_process_takes_the_key_of_the_first,
    ),
    Mutation(
        "every process its own count of releases",
        Edit("Ledger._share", "if parallel.rank:", "if False:"),
        test_the_second_process_counts_as_the_first_does,
    ),
    Mutation(
        "processes told different things",
        Edit(
            "Ledger._agree",
            'digests = {**self._digests, "accountant": digest(self.accounting.mechanism)}',
            'digests = {"accountant": digest(self.accounting.mechanism)}',
        ),
        partial(
            test_what_differs_between_processes_is_refused_by_its_name,
            {"max_grad_norm": 2.0},
            "max_grad_norm: is not the same",
        ),
    ),
    Mutation(
        "wrong cause named for another data set",
        Edit("Ledger.open", "{**first, **options}.items()", "{**options, **first}.items()"),
        partial(
            test_what_differs_between_processes_is_refused_by_its_name,
            {"records": 13},
            "data_loader: its data set is not the same",
        ),
    ),
    Mutation(
        "wrapper lost by detach",
        Edit("PrivacyEngine.detach", "return model.module", "return model.root"),
        test_detach_gives_back_what_was_given,
    ),
    Mutation(
        "reducer of DDP left on",
        Edit(
            "ReducerOff.__init__",
            "self._wrapper.require_backward_grad_sync = False",
            "self._wrapper.require_backward_grad_sync = True",
        ),
        _alone(test_private.test_the_reducer_is_off_while_private_and_on_again_afterwards, 0),
    ),
    Mutation(
        "unsharded weights not watched",
        Edit("PrivateModel._install_taps", "if self.parallel.uses_fsdp2:", "if False:"),
        test_a_bypass_in_a_compiled_sharded_model_is_named_without_a_proof_too,
    ),
    Mutation(
        "norms summed over processes",
        Edit(
            "sample_norms:set_factors",
            "device = next(iter(work.squares.values())).device\n",
            "device = work.squares[0].device; torch.distributed.all_reduce(work.squares[0])\n",
        ),
        _norms_of_this_rank,
        red="tests/dist/test_private.py::test_a_step_moves_by_the_clipped_sum_of_all_ranks",
        on_ranks=True,
    ),
    Mutation(
        "change of one process's gradient",
        Edit("GradientSums.compare", "self._parallel.start_sum(found)", "None"),
        _refused_by_all,
        red="tests/dist/test_private.py::test_what_one_rank_changes_is_refused_by_all",
        on_ranks=True,
    ),
    Mutation(
        "shards of one process's own sum",
        Swap("data_parallel:reduce_to_shard", _own_part),
        _shards_of_all_sums,
        red="tests/dist/test_private_fsdp2.py::"
        "test_gradient_shards_are_the_clipped_sum_of_all_ranks_and_a_step_moves_by_it",
        on_ranks=True,
    ),
    Mutation(
        "unused layer not reduced",
        Edit("GradientSums.receive", "total = torch.zeros(p.shape, dtype=wide_dtype(p), device=p.device)", "return"),
        _every_sum_is_reduced,
        red="tests/privacy/test_bugs.py::test_every_process_reduces_every_sum_in_one_order_whatever_it_used",
        on_ranks=True,
    ),
    # ---- kernels ----
    Mutation(
        "Gram kernel without a mask beyond the width",
        Edit(
            "gram_squares:gram_squares_kernel",
            "*strides(lefts[0], descriptor), left.shape[2], *strides(rights[0], descriptor), right.shape[2],",
            "*left.stride(), -(-left.shape[2] // tiles.depth) * tiles.depth, "
            "*right.stride(), -(-right.shape[2] // tiles.depth) * tiles.depth,",
        ),
        _gram_at_the_edges,
        red="tests/kernels/test_gram_squares.py::test_kernel_at_the_edges_of_tiles",
    ),
    Mutation(
        "direct kernel without a mask beyond the tokens",
        Edit(
            "direct_squares:direct_squares_kernel",
            "tokens, -(-rows // tiles.rows),",
            "-(-tokens // tiles.depth) * tiles.depth, -(-rows // tiles.rows),",
        ),
        _direct_at_the_edges,
        red="tests/kernels/test_direct_squares.py::test_kernel_in_every_layout",
    ),
)
BY_NAME = {bug.name: bug for bug in BUGS}
IN_KERNELS = [bug.name for bug in BUGS if bug.check in (_gram_at_the_edges, _direct_at_the_edges)]
ON_RANKS = [bug.name for bug in BUGS if bug.on_ranks]
HERE = [bug for bug in BUGS if bug.name not in (*IN_KERNELS, *ON_RANKS)]


# ---- the tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("bug", sample(HERE, 60, case=lambda bug: None), ids=lambda bug: bug.name)
def test_a_bug_that_is_put_back_turns_its_test_red(bug: Mutation) -> None:
    turns_red(bug, ALL_RED)


def _is_red(name: str, applied: bool, *arguments: Any) -> bool:
    """True if the check fails in this process."""
    bug = BY_NAME[name]
    with bug.applied() if applied else nullcontext():
        try:
            bug.check(*arguments)
        except ALL_RED:
            return True
    return False


def _is_red_on_a_rank(rank: int, world_size: int, name: str, applied: bool) -> bool:
    """All ranks fail in the same place, so that none is left waiting."""
    return _is_red(name, applied, rank)


@pytest.mark.dist
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("name", ON_RANKS)
def test_a_bug_that_is_put_back_turns_its_test_red_on_every_rank(name: str) -> None:
    for applied in (False, True, False) if FULL else (True,):
        assert run_on_ranks(2, _is_red_on_a_rank, name, applied) == [applied, applied]


@pytest.mark.xdist_group("kernels")
@pytest.mark.parametrize("name", IN_KERNELS)
def test_a_bug_that_is_put_back_into_a_kernel_turns_its_test_red(name: str) -> None:
    pytest.importorskip("triton")
    for applied in (False, True, False) if FULL else (True,):
        assert interpreted(_is_red, name, applied) == applied


def test_a_bug_leaves_nothing_behind() -> None:
    before = package_identity()
    for bug in sample(BUGS, 15, case=lambda bug: None):
        with bug.applied():
            assert package_identity() != before, bug.name
        assert package_identity() == before, bug.name


def _rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the document."""
    _, _, text = DOCUMENT.read_text(encoding="utf-8").partition(f"## {heading}\n")
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[1:]]


def test_the_document_lists_every_bug_with_its_test() -> None:
    rows = _rows("Bugs that are put back")
    assert all(len(row) == 4 and all(row) for row in rows)
    assert [(row[0], row[3].strip("`")) for row in rows] == [(bug.name, bug.test) for bug in BUGS]


def test_the_document_gives_a_reason_for_every_bug_that_is_not_put_back() -> None:
    rows = _rows("Bugs that this design cannot have")
    assert len(rows) > 10 and all(len(row) == 3 and all(row) for row in rows)
    assert not {row[0] for row in rows} & BY_NAME.keys()


def test_every_test_that_is_named_exists() -> None:
    for bug in BUGS:
        file, _, function = bug.test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), bug.name
    assert len(BY_NAME) == len(BUGS)
