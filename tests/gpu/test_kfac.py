"""K-FAC on a GPU: the CPU's numbers, the same bits twice, half-precision storage, tensor-core products, placement."""

import copy

import pytest
import torch
from torch.nn import functional as F

import gramian
from gramian.models.gpt import GPT, GPTConfig
from gramian.oracles import dense_kfac

pytestmark = pytest.mark.gpu

SHAPES = {"low rank": GPTConfig(vocabulary=300, context=8, layers=2, width=64, heads=4)}
SHAPES["dense"] = GPTConfig(vocabulary=50, context=64, layers=2, width=32, heads=4)
SHAPES["tied"] = GPTConfig(vocabulary=300, context=8, layers=1, width=64, heads=4, tied=True)


def refreshed(model, config, autocast=False, **settings):
    """One refresh on fixed tokens, on the device of the model."""
    device = next(model.parameters()).device
    tokens = torch.randint(config.vocabulary, (4, config.context + 1), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(device)
    kfac = gramian.KFACNaturalGradient(update_freq=1, **settings)
    model.zero_grad()
    with kfac.capture(model, num_terms=4 * config.context):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits = model(tokens[:, :-1])
        F.cross_entropy(
            logits.flatten(0, 1).float() if autocast else logits.flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
    return kfac


def relative(got, want):
    return float((got.double().cpu() - want.double().cpu()).norm() / want.double().cpu().norm().clamp(min=1e-300))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", [False, True], ids=["estimated head", "exact head"])
def test_factors_stored_in_float32_agree_with_the_cpu(shape, head):
    config = SHAPES[shape]
    on_cpu = refreshed(GPT(config), config, woodbury_dtype="fp32", kfac_true_fisher_head=head)
    on_gpu = refreshed(GPT(config).cuda(), config, woodbury_dtype="fp32", kfac_true_fisher_head=head)
    for name, block in on_cpu.kfac_factors.items():
        for side, factor in block.factors.items():
            assert relative(on_gpu.kfac_factors[name].factors[side].to_dense(), factor.to_dense()) < 1e-5, (name, side)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", ["pi", "joint"])
@pytest.mark.parametrize("power", [-1.0, -0.5])
def test_natural_gradients_in_float64_agree_with_the_cpu(shape, mode, power):
    config = SHAPES[shape]
    models = GPT(config).double(), GPT(config).double().cuda()
    want, got = (refreshed(m, config, damping_mode=mode).compute_natural_gradient(m, power=power) for m in models)
    for name in want:
        assert got[name].is_cuda
        assert relative(got[name], want[name]) < 1e-5, name


@pytest.mark.parametrize("shape", SHAPES)
def test_two_runs_are_bitwise_equal(shape):
    config = SHAPES[shape]
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            model = GPT(config).cuda()
            kfac = refreshed(model, config, max_tokens=20, kfac_true_fisher_head=True)
            runs.append(kfac.compute_natural_gradient(model))
        assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("damping", "tolerance"), [(1e-1, 3e-2), (1e-3, 1e-1)])
def test_default_storage_and_products_stay_near_float64(shape, damping, tolerance):
    """fp16 factors and TF32 products against the float64 CPU on the same float32 gradients."""
    config = SHAPES[shape]
    exact_model = GPT(config).double()
    exact = refreshed(exact_model, config, damping=damping)
    model = GPT(config).cuda()
    kfac = refreshed(model, config, damping=damping)
    want = exact.compute_natural_gradient(exact_model)
    got = kfac.compute_natural_gradient(model)
    for name in want:
        assert relative(got[name], want[name]) < tolerance, name


def test_bf16_autocast_gives_factors_to_bf16_accuracy():
    config = SHAPES["low rank"]
    exact = refreshed(GPT(config).double(), config)
    kfac = refreshed(GPT(config).cuda(), config, autocast=True)
    for name, block in exact.kfac_factors.items():
        for side, factor in block.factors.items():
            assert relative(kfac.kfac_factors[name].factors[side].to_dense(), factor.to_dense()) < 5e-2, (name, side)


def test_factors_kept_on_the_cpu_give_the_same_answer_on_the_gpu_and_stay_there():
    config = SHAPES["low rank"]
    model = GPT(config).double().cuda()
    answers = {}
    for place in ("cuda", "cpu"):
        kfac = refreshed(model, config, woodbury_store_device=place)
        answers[place] = kfac.compute_natural_gradient(model)
        sides = [s for layer in kfac.record()["layers"].values() for s in layer["sides"].values()]
        assert {side["device"] for side in sides} == {place}
        assert all(t.is_cuda for t in answers[place].values())
    for name in answers["cuda"]:
        assert relative(answers["cpu"][name], answers["cuda"][name]) < 1e-9, name


def test_monte_carlo_labels_are_those_of_the_cpu():
    config = SHAPES["dense"]
    model = GPT(config).double()
    tokens = torch.randint(config.vocabulary, (4, config.context), generator=torch.Generator().manual_seed(1))
    factors = []
    for m, t in ((model, tokens), (copy.deepcopy(model).cuda(), tokens.cuda())):
        kfac = gramian.KFACNaturalGradient()
        kfac.collect_kfac_factors(m, {"input_ids": t, "labels": t}, "mc")
        factors.append(kfac.kfac_factors["head"].G.to_dense())
    assert relative(factors[1], factors[0]) < 1e-9


def test_a_solve_on_the_gpu_is_the_dense_algebra():
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(200, 30, generator=generator, dtype=torch.float64)
    y = torch.randn(200, 7, generator=generator, dtype=torch.float64)
    factor = gramian.linalg.LowRank.of(columns.cuda())
    want = dense_kfac.matrix_power(columns @ columns.mT, -1, 1e-2) @ y
    assert relative(factor.solve(y.cuda(), 1e-2), want) < 1e-10
