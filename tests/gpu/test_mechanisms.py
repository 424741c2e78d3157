"""Units, correlated noise and the metric of public data on CUDA: the sums and the noise of the CPU, in every precision."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gramian
from gramian.models.gpt import GPT
from gramian.oracles.single_sample import per_sample_gradients
from gramian.privacy.noise.correlated_noise import CorrelatedNoise
from gramian.privacy.noise.element_noise import NoisePlan
from gramian.privacy.noise.noise_strategy import NoiseStrategy
from tests.gpu.test_private import CONFIG, WAYS, error, loss_of, private, tokens

pytestmark = pytest.mark.gpu
KEY = bytes(range(32))
SHAPES = {"w": (3, 5), "b": (4,), "table": (60, 20)}
PRECISIONS = [(torch.float64, 1e-9), (torch.float32, 3e-5), (torch.bfloat16, 4e-2)]


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(96, 24), nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 96))


def terms(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    logits = model(x)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.transpose(1, 2), x.flip(1), reduction="none").sum(1)


def rows_of(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of each sample's own loss in float64."""
    return per_sample_gradients(net().cuda().double(), lambda m, x: terms(m, x).sum(), (x,))


@pytest.mark.parametrize("dtype, close", PRECISIONS)
@pytest.mark.parametrize("clipping, algorithm", WAYS)
def test_rows_of_one_user_are_clipped_as_one(clipping, algorithm, dtype, close):
    x, ids = tokens(CONFIG, batch=7), torch.tensor([4, 9, 4, 4, 1, 9, 0]).cuda()
    of_unit = {n: torch.stack([g[ids == unit].sum(0) for unit in (0, 1, 4, 9)]) for n, g in rows_of(x).items()}
    norms = torch.stack([g.flatten(1).square().sum(1) for g in of_unit.values()]).sum(0).sqrt()
    limit = float(norms.median())
    factors = (limit / norms).clamp(max=1)
    sums = {n: torch.einsum("u,u...->...", factors, g) for n, g in of_unit.items()}
    engine, model, _ = private(
        net().cuda().to(dtype),
        max_grad_norm=limit,
        clipping=clipping,
        norm_algorithm=algorithm,
        loss_reduction="sum",
    )
    with engine.units(ids):
        engine.backward(terms(model, x).sum())
    assert error(model, sums) < close
    assert engine.last.norms_B.numel() == 4
    engine.detach()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, bands", [("bandmf", 4), ("bisr", 5)])
def test_correlated_noise_is_the_cpus(name, bands, dtype):
    found = {}
    for device in ("cpu", "cuda"):
        noise = CorrelatedNoise(NoisePlan(KEY, SHAPES.items()), NoiseStrategy.of(name, bands, 9))
        places = [noise.place(parameter, shape) for parameter, shape in SHAPES.items()]
        released = []
        for release in range(9):
            sums = [torch.full(shape, 7.0, dtype=dtype, device=device) for shape in SHAPES.values()]
            targets = [torch.empty_like(t) for t in sums]
            noise.add_noise_to(targets, sums, places, 0.5, release, 0.25)
            released.append(torch.cat([t.double().flatten() for t in targets]).cpu())
        found[device] = torch.stack(released)
    assert found["cuda"].std() > 0.1
    close = 2 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=close, atol=4e-6)


@pytest.mark.parametrize("dtype, close", PRECISIONS)
@pytest.mark.parametrize("clipping, algorithm", WAYS)
def test_sums_in_a_metric_are_those_of_the_cpu(clipping, algorithm, dtype, close):
    x, public = tokens(CONFIG, batch=6), tokens(CONFIG, batch=5, seed=9)
    sums, norms = {}, {}
    for device, kind, way in (("cpu", torch.float64, "auto"), ("cuda", dtype, clipping)):
        model = net().to(device).to(kind)
        factors = deepcopy(net()).to(device).double()
        kfac = gramian.KFACNaturalGradient(use_eigenvalue_correction=False, woodbury_dtype="fp64", damping=0.03)
        with kfac.capture(factors, loss_reduction="sum", num_terms=public.numel()):
            terms(factors, public.to(device)).sum().backward()
        kfac.public = True
        options = {"clipping": way, "loss_reduction": "sum", "metric": kfac, "max_grad_norm": 40.0}
        engine, model, _ = private(model, norm_algorithm="auto" if device == "cpu" else algorithm, **options)
        engine.backward(terms(model, x.to(device)).sum())
        sums[device], norms[device] = {n: p.grad.double() for n, p in model.named_parameters()}, engine.last.norms_B
        if device == "cuda":
            assert error(model, {n: total.cuda() for n, total in sums["cpu"].items()}) < close
        engine.detach()
    torch.testing.assert_close(norms["cuda"].double().cpu(), norms["cpu"].double(), rtol=close, atol=0)
    assert bool((norms["cpu"] > 40).any())


def test_noise_in_a_metric_is_the_cpus():
    steps = {}
    for device in ("cpu", "cuda"):
        model = net().to(device)
        before = deepcopy(model.state_dict())
        kfac = gramian.KFACNaturalGradient(use_eigenvalue_correction=False, damping=0.03)
        with kfac.capture(model, loss_reduction="sum", num_terms=5 * 48):
            terms(model, tokens(CONFIG, batch=5, seed=9).to(device)).sum().backward()
        model.zero_grad()
        kfac.public = True
        engine, model, optimizer = private(model, noise_multiplier=1.0, loss_reduction="sum", metric=kfac)
        terms(model, tokens(CONFIG, batch=4).to(device)).sum().backward()
        optimizer.step()
        steps[device] = {n: (before[n] - p.detach()).cpu() for n, p in model.named_parameters()}
        engine.detach()
    for n, step in steps["cpu"].items():
        assert float((steps["cuda"][n] - step).norm()) < 2e-3 * float(step.norm()), n


def test_the_metric_of_a_language_model_bounds_what_a_sample_adds():
    """‖W (sum with − sum without a sample)‖ ≤ C, in float32 with TF32 allowed outside."""
    x = tokens(CONFIG, batch=4)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        model = GPT(CONFIG).cuda()
        kfac = gramian.KFACNaturalGradient(use_eigenvalue_correction=False, damping=0.1)
        with kfac.capture(model, num_terms=4 * CONFIG.context):
            loss_of(model, tokens(CONFIG, seed=3)).backward()
        model.zero_grad()
        kfac.public = True
        engine, model, _ = private(model, metric=kfac, loss_reduction="sum", max_grad_norm=0.5)
        found = []
        for rows in (slice(None), slice(1, None)):
            model.zero_grad()
            loss_of(model, x[rows]).mul(len(x[rows]) / 4).backward()
            found.append({n: p.grad.clone() for n, p in model.named_parameters()})
        moved = engine._installed.metric.whitened({n: g - found[1][n] for n, g in found[0].items()})
        assert float(torch.cat([g.flatten().double() for g in moved.values()]).norm()) <= 0.5 * (1 + 1e-3)
        engine.detach()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
