"""Clipping and noise in the metric of public K-FAC factors, against dense float64 roots and a loop over single samples."""

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramian
from gramian.privacy.clipping.clip_factors import SLACK
from tests.kit.matrix import FULL, sample
from tests.kit.models import CASES
from tests.kit.refusals import refusal
from tests.privacy.poisson_runs import RECORDS, drawn_steps, flat_of, poisson_run
from tests.privacy.problems import Run, assert_sums, private
from tests.statistics.problems import Problem, problem

pytestmark = [pytest.mark.few_proofs, pytest.mark.oracle]
STORAGES = ("auto", "bookkeeping", "keep", "two_pass")
MODES: dict[str, dict[str, Any]] = {
    "pi": {"damping_mode": "pi", "damping": 0.03},
    "factored": {"damping_mode": "factored", "damping_A": 0.2, "damping_G": 0.05},
}
NAMES = [name for name, case in CASES.items() if not case.computes_in_float32]
MATRIX = list(itertools.product(NAMES, STORAGES, MODES))


def public_factors(p: Problem, model: nn.Module, mode: str = "pi", **options: Any) -> gramian.KFACNaturalGradient:
    """Factors from other samples than the problem's."""
    kfac = gramian.KFACNaturalGradient(use_eigenvalue_correction=False, woodbury_dtype="fp64", **MODES[mode], **options)
    batch = p.case.make_batch(5, p.dtype, torch.Generator().manual_seed(77))
    with kfac.capture(model, loss_reduction="sum", num_terms=5):
        p.case.loss(model, *batch, reduction="sum").backward()
    model.zero_grad()
    kfac.public = True
    return kfac


def root_of(M: Tensor, damping: float, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(M.double() + damping * torch.eye(len(M), dtype=torch.float64))
    return (vectors * values.clamp(min=0).pow(power)) @ vectors.mT


class DenseMetric:
    """W^p of every block, from dense factors and the formulas of the damping modes."""

    def __init__(self, kfac: gramian.KFACNaturalGradient, mode: str, trained: Mapping[str, Any]) -> None:
        self.blocks = []
        for block in kfac.kfac_factors.values():
            if block.A is None or not set(block.spec.parameters) <= set(trained):
                continue
            A, G = block.A.to_dense().double(), block.G.to_dense().double()
            lambda_A, lambda_G = 0.2, 0.05
            if mode == "pi":
                ratio = float(A.trace() / len(A) / (G.trace() / len(G))) ** 0.5
                lambda_A, lambda_G = ratio * 0.03**0.5, 0.03**0.5 / ratio
            self.blocks.append((block.spec, (A, lambda_A), (G, lambda_G)))

    def times(self, gradients: Mapping[str, Tensor], power: float) -> dict[str, Tensor]:
        """(F + damping)^power g."""
        found = dict(gradients)
        for spec, (A, lambda_A), (G, lambda_G) in self.blocks:
            weight, shape = spec.parameters[0], spec.shapes[0]
            y = gradients[weight].double().flatten(1)
            y = y.mT if spec.layout in ("in_out", "table") else y
            if spec.has_bias:
                y = torch.cat([y, gradients[spec.parameters[1]].double()[:, None]], 1)
            y = root_of(G, lambda_G, power) @ y @ root_of(A, lambda_A, power)
            if spec.has_bias:
                y, found[spec.parameters[1]] = y[:, :-1], y[:, -1]
            found[weight] = (y.mT if spec.layout in ("in_out", "table") else y).reshape(shape)
        return found

    def norms(self, gradients: Mapping[str, Tensor]) -> Tensor:
        count = len(next(iter(gradients.values())))
        each = [self.times({n: g[i] for n, g in gradients.items()}, -0.5) for i in range(count)]
        return torch.stack([torch.cat([g.flatten() for g in one.values()]).norm() for one in each])


def backward(run: Run, p: Problem, batch: Any, storage: str) -> dict[str, Tensor]:
    run.optimizer.zero_grad()
    loss = p.case.loss(run.model, *batch, reduction="sum")
    run.engine.backward(loss) if storage == "two_pass" else loss.backward()
    return run.gradients()


@pytest.mark.parametrize(
    "name, storage, mode",
    MATRIX
    if FULL
    else [
        *sample(MATRIX, 6), ("tied_gpt", "auto", "pi"), ("hf_gpt2", "bookkeeping", "pi"),
        ("gpt", "two_pass", "factored"), ("padded_embedding", "auto", "factored"),
    ],
)  # fmt: skip
def test_samples_are_clipped_by_their_norms_in_the_metric_and_move_the_sum_by_C_at_most(
    name: str, storage: str, mode: str
) -> None:
    p = problem(name, 6)
    model = p.model()
    kfac = public_factors(p, model, mode)
    metric = DenseMetric(kfac, mode, p.gradients)
    norms_B = metric.norms(p.gradients)
    limit = float(norms_B.median())
    options = {"clipping": storage, "loss_reduction": "sum", "metric": kfac}
    with private(model, limit, **options) as run:
        whole = backward(run, p, p.batch, storage)
        torch.testing.assert_close(run.engine.last.norms_B.double(), norms_B, rtol=1e-9, atol=0)
        factors_B = (limit / (1 + SLACK[torch.float64]) / norms_B).clamp(max=1.0)
        want = {n: torch.einsum("b,b...->...", factors_B, g) for n, g in p.gradients.items()}
        for n, total in want.items():
            torch.testing.assert_close(whole[n], total, rtol=1e-9, atol=1e-9 * float(p.gradients[n].norm()))
        for left in (int(norms_B.argmax()), int(norms_B.argmin())):
            without = backward(run, p, p.rows([i for i in range(6) if i != left]), storage)
            moved = metric.times({n: whole[n] - without[n] for n in whole}, -0.5)
            assert float(torch.cat([g.flatten() for g in moved.values()]).norm()) <= limit * (1 + 1e-9)


@pytest.mark.parametrize("name", NAMES if FULL else ("mlp", "conv2d"))
def test_noise_is_the_inverse_root_of_the_metric_times_that_of_a_run_without_one(name: str) -> None:
    p = problem(name, RECORDS)
    noise: dict[bool, dict[str, Tensor]] = {}
    for in_metric in (False, True):
        moved = []
        for sigma in (2.0, 0.0):
            model = p.model()
            kfac = public_factors(p, model)
            with poisson_run(p, model, 0.5, noise_multiplier=sigma, **({"metric": kfac} if in_metric else {})) as run:
                next(drawn_steps(run, p, 1))
                moved.append({n: q.detach().clone() for n, q in model.named_parameters() if q.requires_grad})
        noise[in_metric] = {n: q - moved[1][n] for n, q in moved[0].items()}
    metric = DenseMetric(kfac, "pi", noise[True])
    assert_sums(metric.times(noise[True], -0.5), noise[False], 1e-9)


@pytest.mark.parametrize("pieces", [None, 1, 2])
def test_pieces_of_a_draw_are_one_draw_and_new_factors_count_from_the_next_draw_on(pieces: int | None) -> None:
    p, found = problem("mlp", RECORDS), []
    for splits in (5, pieces):
        model, twin = p.model(), p.model()
        kfac = public_factors(p, twin, update_freq=1, ema_decay=0.0)
        with poisson_run(p, model, 0.5, noise_multiplier=0.5, metric=kfac, max_physical_batch=splits) as run:
            for _ in drawn_steps(run, p, 3):
                public_factors_again(p, kfac, twin)
            found.append(flat_of(model).detach().clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-10)


def public_factors_again(p: Problem, kfac: gramian.KFACNaturalGradient, twin: nn.Module) -> None:
    """New factors, from other weights than those of the private model."""
    with torch.no_grad():
        for q in twin.parameters():
            q.mul_(1.1)
    batch = p.case.make_batch(5, p.dtype, torch.Generator().manual_seed(78))
    with kfac.capture(twin, loss_reduction="sum", num_terms=5):
        p.case.loss(twin, *batch, reduction="sum").backward()
    twin.zero_grad()


def test_the_samples_of_a_draw_have_one_metric() -> None:
    p = problem("mlp", 6)
    model, twin = p.model(), p.model()
    kfac = public_factors(p, twin, update_freq=1, ema_decay=0.0)
    old = DenseMetric(kfac, "pi", p.gradients).norms(p.gradients)
    with private(model, 1e-3, loss_reduction="sum", metric=kfac) as run:
        backward(run, p, p.rows([0]), "auto")
        public_factors_again(p, kfac, twin)
        p.case.loss(run.model, *p.rows([1]), reduction="sum").backward()
        torch.testing.assert_close(run.engine.last.norms_B, old[[1]], rtol=1e-9, atol=0)
        run.optimizer.zero_grad()
        run.optimizer.step()
        new = DenseMetric(kfac, "pi", p.gradients).norms(p.gradients)
        backward(run, p, p.rows([1]), "auto")
        torch.testing.assert_close(run.engine.last.norms_B, new[[1]], rtol=1e-9, atol=0)
    assert float((new / old - 1).abs().min()) > 1e-3


def test_tokens_that_cancel_are_measured_and_summed_alike_in_the_metric() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 6))
    public = torch.randn(8, 16, 12)
    kfac = gramian.KFACNaturalGradient(damping=1e-2)
    with kfac.capture(model, loss_reduction="sum", num_terms=8):
        model(public).square().sum().backward()
    model.zero_grad()
    kfac.public = True
    x, signs = 100 + torch.randn(4, 16, 12), torch.tensor([1.0, -1.0]).repeat(8)[None, :, None]
    x = x[:, :1].expand(4, 16, 12) + 1e-4 * torch.randn(4, 16, 12)

    def loss_of(net: nn.Module, rows: Tensor) -> Tensor:
        return (1e3 * signs.to(rows) * net(rows)).sum()

    metric = kfac.kfac_factors
    blocks = {q: block for block in metric.values() for q in block.spec.parameters}
    with private(model, 0.25, loss_reduction="sum", metric=kfac, proof="off", clipping="bookkeeping") as run:
        for i in range(4):
            run.optimizer.zero_grad()
            loss_of(run.model, x[i : i + 1]).backward()
            given = {n: g.double() for n, g in run.gradients().items()}
            squares = 0.0
            for block in {id(b): b for b in blocks.values()}.values():
                assert block.A is not None and block.damping is not None
                y = block.spec.matrix({n: given[n] for n in block.spec.parameters})
                left = root_of(block.G.to_dense(), block.damping.lambda_G, -0.5)
                squares += float((left @ y @ root_of(block.A.to_dense(), block.damping.lambda_A, -0.5)).square().sum())
            assert squares**0.5 <= 0.25 * (1 + 1e-6)


def rotated_run(dtype: torch.dtype, **options: Any) -> tuple[Any, gramian.KFACNaturalGradient, Tensor, Tensor]:
    """A layer whose public inputs are 10⁴ times longer in one direction, which is none of the axes, than in another.

    With it the row of inputs in the long direction, and the one of output gradients.
    """
    torch.manual_seed(0)
    turn, right = (torch.linalg.qr(torch.randn(n, n))[0] for n in (10, 4))
    model, kfac = nn.Sequential(nn.Linear(10, 4)).to(dtype), gramian.KFACNaturalGradient(damping=1e-7)
    public = (torch.randn(64, 10) * torch.logspace(0, -4, 10) @ turn).to(dtype)
    with kfac.capture(model, loss_reduction="sum", num_terms=64):
        (model(public).float() @ right * torch.logspace(0, -3, 4)).square().sum().backward()
    model.zero_grad()
    kfac.public = True
    run = private(model, 1.0, loss_reduction="sum", metric=kfac, expected_batch=1.0, **options)
    return run, kfac, turn[:1].to(dtype), 1e4 * right[:, 0]


@pytest.mark.parametrize("pieces", [None, 1])
def test_in_half_precision_a_sample_moves_the_sum_by_C_at_most_in_the_metric(pieces: int | None) -> None:
    made, kfac, x, y = rotated_run(torch.bfloat16, max_physical_batch=pieces)
    with made as run:
        (run.model(x).float() @ y).sum().backward()
        block = next(iter(kfac.kfac_factors.values()))
        assert block.A is not None and block.damping is not None
        sums = run.engine._model.sums._wide_sums
        g = block.spec.matrix({name: sums[name] for name in block.spec.parameters})
        limits = block.damping.max_condition
        g = block.A.power(g.mT, -0.5, block.damping.lambda_A, limits).mT
        assert float(block.G.power(g, -0.5, block.damping.lambda_G, limits).norm()) <= 1.0


@pytest.mark.parametrize("pieces", [None, 1])
def test_the_metric_is_exact_inside_of_autocast(pieces: int | None) -> None:
    found = []
    for enabled in (False, True):
        engine = gramian.PrivacyEngine(insecure_reproducible=True)
        options = {"engine": engine, "noise_multiplier": 1.0, "max_physical_batch": pieces}
        made, _, x, y = rotated_run(torch.float32, **options)
        with made as run:
            with torch.autocast("cpu", torch.bfloat16):
                loss = (run.model(x).float() * y).sum()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss.backward()
                norm = run.engine.last.norms_B.clone()
                run.optimizer.step()
            found.append([norm, flat_of(run.model).detach().clone()])
    assert all(map(torch.equal, *found))


def test_what_a_metric_rests_on_is_refused_by_name() -> None:
    p = problem("mlp", 6)
    model = p.model()
    make = partial(private, loss_reduction="sum")
    kfac = public_factors(p, model)
    kfac.public = False
    with refusal(r"^metric: factors of private data .* kfac.public = True"), make(model, 1.0, metric=kfac):
        pass
    joint = gramian.KFACNaturalGradient(damping_mode="joint")
    joint.public = True
    with refusal(r'^metric: damping_mode="joint" .*"pi" or "factored"'), make(model, 1.0, metric=joint):
        pass
    empty = gramian.KFACNaturalGradient()
    empty.public = True
    with refusal(r"^metric: has no factors of trained layers"), make(p.model(), 1.0, metric=empty) as run:
        backward(run, p, p.batch, "auto")
    with refusal(r"^metric: expected a gramian.KFACNaturalGradient, got dict"), make(model, 1.0, metric={}):
        pass
    other = public_factors(problem("conv2d", 6), problem("conv2d", 6).model())
    with refusal(r"expected the layer as at the capture"), make(model, 1.0, metric=other):
        pass
    with make(model, 1.0, metric=public_factors(p, model)) as run:
        assert run.engine.metric["share of trained elements"] == 1.0
        assert run.engine.metric["factors"] == "public, as the user says"


def test_factors_that_saw_a_private_backward_are_refused_also_from_a_file() -> None:
    p = problem("mlp", 6)
    model, twin = p.model(), p.model()
    kfac = public_factors(p, twin, update_freq=1)
    with private(model, 1.0, loss_reduction="sum", metric=kfac) as run:
        backward(run, p, p.batch, "auto")
        kfac.collect_kfac_factors(twin, {"input": p.batch[0]}, fisher_type="mc", loss="cross_entropy", force=True)
        run.optimizer.step()
        backward(run, p, p.batch, "auto")
        with private(twin, 1.0, loss_reduction="sum"), kfac.capture(twin, loss_reduction="sum", num_terms=6):
            p.case.loss(twin, *p.batch, reduction="sum").backward()
        run.optimizer.step()  # of the draw that began before
        with refusal(r"^metric: a capture observed a model in private training"):
            backward(run, p, p.batch, "auto")
    loaded = gramian.KFACNaturalGradient(use_eigenvalue_correction=False, woodbury_dtype="fp64", **MODES["pi"])
    loaded.load_state_dict(kfac.state_dict())
    loaded.public = True
    with refusal(r"^metric: a capture observed"), private(model, 1.0, metric=loaded):
        pass
