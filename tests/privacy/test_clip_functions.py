"""Clipping functions: per layer, automatic and adaptive, against a loop over single samples in float64."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gramian
from gramian.oracles.clipped_sum import clip
from gramian.oracles.single_sample import per_sample_gradients
from gramian.privacy.clipping.clip_factors import GAMMA, SLACK, ClipFunction
from gramian.privacy.clipping.private_quantile import RATE
from gramian.privacy.noise.element_noise import NoisePlan
from tests.kit.matrix import FULL
from tests.kit.models import CASES
from tests.kit.private import add_noise
from tests.kit.refusals import refusal
from tests.privacy.poisson_runs import EXPECTED, RECORDS, drawn_steps, flat_of, poisson_run, seeded_engine
from tests.privacy.problems import assert_sums, clip_norm, private
from tests.statistics.problems import Problem, problem

pytestmark = [pytest.mark.few_proofs, pytest.mark.oracle]
STORAGES = ("auto", "bookkeeping", "keep", "two_pass")
FUNCTIONS = ("per_layer", "automatic", "adaptive")
SHORT = [
    ("mlp", "per_layer", "bookkeeping"), ("mlp", "automatic", "two_pass"), ("mlp", "adaptive", "keep"),
    ("tied_gpt", "per_layer", "auto"), ("tied_gpt", "automatic", "keep"), ("reused", "per_layer", "two_pass"),
]  # fmt: skip
ALL = [(name, function, storage) for name in CASES for function in FUNCTIONS for storage in STORAGES]
cells = pytest.mark.parametrize("name, function, storage", ALL if FULL else SHORT)


def slack_of(p: Problem) -> float:
    return SLACK[torch.float32 if p.case.computes_in_float32 else p.dtype]


def oracle(p: Problem, limit: float, function: str, index: Any = slice(None)) -> Any:
    rows = {name: g[index] for name, g in p.gradients.items()}
    return clip(rows, limit / (1 + slack_of(p)), "flat" if function == "adaptive" else function)


def backward(run: Any, p: Problem, batch: Any, storage: str) -> dict[str, Tensor]:
    run.optimizer.zero_grad()
    loss = p.case.loss(run.model, *batch, reduction="sum")
    run.engine.backward(loss) if storage == "two_pass" else loss.backward()
    return run.gradients()


@cells
def test_the_sum_is_that_of_the_loop_and_one_sample_moves_it_by_its_sensitivity_at_most(
    name: str, function: str, storage: str
) -> None:
    p = problem(name, 6)
    limit = clip_norm(p)
    with private(p.model(), limit, clip_function=function, clipping=storage, loss_reduction="sum") as run:
        whole = backward(run, p, p.batch, storage)
        want = oracle(p, limit, function)
        rounding = 1e-5 if p.case.computes_in_float32 else 1e-9
        for parameter, total in want.totals.items():
            error = float((whole[parameter].double() - total).norm())
            assert error <= rounding * (want.sizes[parameter] + 1e-12), parameter
        torch.testing.assert_close(run.engine.last.norms_B.double(), want.norms_B, rtol=1e-5, atol=0)
        torch.testing.assert_close(run.engine.last.factors_B.double(), want.factors_B, rtol=1e-5, atol=1e-12)
        assert run.engine.clip_norm == pytest.approx(limit)
        for left in range(6) if FULL else (int(want.norms_B.argmax()), int(want.norms_B.argmin())):
            rest = [i for i in range(6) if i != left]
            without = backward(run, p, p.rows(rest), storage)
            moved = math.sqrt(sum(float((whole[n] - without[n]).double().square().sum()) for n in whole))
            assert moved <= limit * (1 + rounding)


@pytest.mark.parametrize("storage", STORAGES if FULL else ("auto", "two_pass"))
def test_a_list_has_a_clip_norm_for_each_layer_and_noise_for_their_root(storage: str) -> None:
    p = problem("mlp", 6)
    model = p.model()
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters()))
    limits = [0.5 * clip_norm(p) * (i + 1) for i in range(len(layers))]
    options = {"clip_function": "per_layer", "clipping": storage, "loss_reduction": "sum"}
    with private(model, limits, **options) as run:  # type: ignore[arg-type]
        totals = backward(run, p, p.batch, storage)
        aimed = [limit / (1 + slack_of(p)) for limit in limits]
        assert_sums(totals, clip(p.gradients, aimed, "per_layer").totals, 1e-9)
        assert run.engine.clip_norm == pytest.approx(math.hypot(*limits))
    with (
        refusal(r"^max_grad_norm: has 1 clip norms for \d layers with trained parameters; expected one for each of"),
        private(p.model(), [1.0], **options),  # type: ignore[arg-type]
    ):
        pass


@pytest.mark.parametrize("function", FUNCTIONS)
def test_single_samples_without_taps_are_clipped_by_the_same_function(function: str) -> None:
    p = problem("mlp", 4)
    limit = clip_norm(p)
    options = {"clip_function": function, "max_physical_batch": 1, "loss_reduction": "sum"}
    with private(p.model(), limit, **options) as run:
        for i in range(4):
            p.case.loss(run.model, *p.rows([i]), reduction="sum").backward()
        assert_sums(run.gradients(), oracle(p, limit, function).totals, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_in_few_digits_one_sample_stays_within_its_sensitivity(function: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.LayerNorm(30), nn.Linear(30, 5)).to(dtype)
    with private(model, 0.1, clip_function=function, loss_reduction="sum") as run:
        for scale in (1e-4, 1.0, 100.0):
            run.optimizer.zero_grad()
            model(scale * torch.randn(1, 20, dtype=dtype)).float().square().sum().backward()
            wide = run.engine._installed.sums._wide_sums  # the sums that get the noise, if gradients are rounded
            parts = [wide.get(n, g).double().square().sum() for n, g in run.gradients().items()]
            assert float(torch.stack(parts).sum().sqrt()) <= 0.1


@pytest.mark.parametrize("storage", STORAGES if FULL else ("auto",))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_sample_that_is_not_finite_in_one_layer_is_left_out_of_all(function: str, storage: str) -> None:
    p = problem("mlp", 4)
    limit = clip_norm(p)
    options = {"clip_function": function, "clipping": storage, "loss_reduction": "sum", "proof": "off"}
    with private(p.model(), limit, **options) as run:
        first = next(module for module in run.model.modules() if isinstance(module, nn.Linear))
        poison = torch.tensor([1.0, math.inf, 1.0, 1.0], dtype=p.dtype)[:, None]
        handle = first.register_forward_hook(
            lambda module, args, out: out.register_hook(lambda g: g * poison[: len(g)]) and None
        )
        totals = backward(run, p, p.batch, storage)
        handle.remove()
        assert_sums(totals, oracle(p, limit, function, [0, 2, 3]).totals, 1e-9)
        assert run.engine.nonfinite == 1


def test_automatic_keeps_the_order_of_small_gradients_and_stays_below_C() -> None:
    norms = torch.logspace(-6, 6, 50, dtype=torch.float64)
    sizes = norms * ClipFunction("automatic", 2.0, ["a.weight"]).factors(norms, 0.0)
    assert (sizes.diff() > 0).all() and float(sizes.max()) < 2.0
    assert float(sizes[0] / norms[0]) == pytest.approx(2.0 / GAMMA, rel=1e-3)


# ---- adaptive ----------------------------------------------------------------------------------------------------------------


def adaptive(p: Problem, model: nn.Module, engine: Any = None, **options: Any) -> Any:
    given = {"noise_multiplier": 0.5, "clip_function": "adaptive", "max_physical_batch": 4, **options}
    return poisson_run(p, model, 0.05, engine=engine or seeded_engine(accountant="rdp"), **given)


def test_the_clip_norm_follows_the_median_by_the_noised_counts() -> None:
    """Step by step: norms by single samples, the count's noise from its own key, C times exp(-0.2 (b - 1/2))."""
    p = problem("mlp", RECORDS)
    model = p.model()
    with adaptive(p, model) as run:
        engine, limit = run.engine, 0.05
        plan = NoisePlan(engine._ledger.secrets.subkey("quantile"), [("count", (1,))])
        for number in range(6):
            before = copy.deepcopy(model)
            drawn = next(drawn_steps(run, p, 1))
            rows = p.rows(drawn)
            found = (
                per_sample_gradients(before, lambda m, *b: p.case.loss(m, *b, reduction="sum"), rows) if drawn else {}
            )
            norms = clip(found, 1.0).norms_B if drawn else torch.zeros(0)
            noise = add_noise(plan, torch.zeros(1, dtype=torch.float64), "count", EXPECTED / 20, number)
            below = float((norms <= limit).double().sum()) - len(drawn) / 2 + float(noise)
            limit *= math.exp(-RATE * below / EXPECTED)
            assert engine.clip_norm == pytest.approx(limit, rel=1e-12)
        assert limit > 0.05, "most norms are above the first one"
        history, sigma = engine.accountant.history, 0.5
        assert history == ((sigma, EXPECTED / RECORDS, 6),), "the quantile is paid for out of σ"


def test_the_gradients_have_the_noise_that_is_left_and_both_together_are_one_mechanism() -> None:
    p = problem("mlp", RECORDS)
    with adaptive(p, p.model(), noise_multiplier=0.5) as run:
        grad, count = run.engine._installed.quantile.noise_multiplier, EXPECTED / 20
        assert grad > 0.5 and grad**-2 + (0.5 / count) ** 2 == pytest.approx(0.5**-2, rel=1e-12)
        release, used = run.engine._installed.sums.release, []
        run.engine._installed.sums.release = lambda noise, number, std, *rest: (  # type: ignore[method-assign]
            used.append(std / run.engine.clip_norm), release(noise, number, std, *rest),
        )[1]  # fmt: skip
        next(drawn_steps(run, p, 1))
    assert used == pytest.approx([grad])


def test_a_run_goes_on_from_its_clip_norm_bit_for_bit() -> None:
    p = problem("mlp", RECORDS)
    first, model = seeded_engine(accountant="rdp"), p.model()
    with adaptive(p, model, first) as run:
        list(drawn_steps(run, p, 3))
        saved, at = copy.deepcopy(first.state_dict()), copy.deepcopy(model)
        reached = first.clip_norm
        list(drawn_steps(run, p, 3))
        ended = first.clip_norm
    assert first.state_dict()["clip_norm"] == ended, "also after detach"
    for early in (True, False):
        again, other = gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=5), copy.deepcopy(at)
        if early:
            again.load_state_dict(saved, replay=True)
        with adaptive(p, other, again) as run:
            if not early:
                again.load_state_dict(saved, replay=True)
            assert again.clip_norm == reached != 0.05
            list(drawn_steps(run, p, 3))
            assert again.clip_norm == ended and torch.equal(flat_of(other), flat_of(model))
    with adaptive(p, p.model(), first) as run:
        assert first.clip_norm == 0.05, "another run begins with its own"


@pytest.mark.parametrize(
    "message, options",
    [
        ('clip_function: "adaptive" needs an expected batch above 10 times', {"noise_multiplier": 0.61}),
        ('clip_function: expected one of "flat", "per_layer"', {"clip_function": "median"}),
        ("max_grad_norm: expected a number above 0", {"limit": [1.0, 2.0]}),
        ("max_grad_norm: expected a number above 0", {"limit": [1.0, -2.0], "clip_function": "per_layer"}),
        (
            'clipping: "adaptive" is a clipping function; expected it as clip_function="adaptive"',
            {"clipping": "adaptive"},
        ),
    ],
)
def test_what_does_not_fit_is_refused(message: str, options: dict[str, Any]) -> None:
    p = problem("mlp", RECORDS)
    given = {"clip_function": "adaptive", **options}
    limit = given.pop("limit", 1.0)
    with refusal(f"^{message}"), poisson_run(p, p.model(), limit, **given):
        pass
