"""Private training on CUDA: the loop's sums, the same bits twice, the CPU's noise, autocast, compile, NCCL with one process."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gramian
from gramian.kernels.chacha import normals
from gramian.models.gpt import GPT, GPTConfig
from gramian.oracles.single_sample import per_sample_gradients
from tests.kit.refusals import refusal
from tests.privacy import packed

pytestmark = pytest.mark.gpu

CONFIG = GPTConfig(vocabulary=96, context=48, layers=2, width=64, heads=4)
TIED = GPTConfig(vocabulary=96, context=48, layers=1, width=64, heads=4, tied=True)
WAYS = [("auto", "auto"), ("bookkeeping", "gram"), ("bookkeeping", "direct"), ("keep", "auto"), ("two_pass", "auto")]


def loss_of(model, x, autocast=False):
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        logits = model(x)
    return F.cross_entropy(
        logits.flatten(0, 1).float() if logits.dtype != torch.float64 else logits.flatten(0, 1), x.flatten()
    )


def private(model, **options):
    warnings.simplefilter("ignore")
    engine = gramian.PrivacyEngine(insecure_reproducible=True, seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.zeros(40, 1)), batch_size=4)
    given = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "poisson_sampling": False, **options}
    model, optimizer, _ = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **given)
    return engine, model, optimizer


def expected(config, x, limit):
    """Σ c_i g_i by a loop of single samples in float64, and the norms."""
    model = GPT(config).cuda().double()
    found = per_sample_gradients(model, lambda m, x: loss_of(m, x), (x,))
    norms = torch.stack([g.flatten(1).square().sum(1) for g in found.values()]).sum(0).sqrt()
    factors = (limit / norms).clamp(max=1)
    sums = {n: (g * factors.reshape(-1, *[1] * (g.dim() - 1))).sum(0) for n, g in found.items()}
    return sums, norms


def error(model, sums):
    parts = [(p.grad.double() - sums[n]).square().sum() for n, p in model.named_parameters()]
    return float(torch.stack(parts).sum().sqrt() / torch.stack([s.square().sum() for s in sums.values()]).sum().sqrt())


def tokens(config, batch=4, seed=1):
    return torch.randint(
        config.vocabulary, (batch, config.context), generator=torch.Generator().manual_seed(seed)
    ).cuda()


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype, close", [(torch.float64, 1e-9), (torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("clipping, algorithm", WAYS)
def test_clipped_sums_are_those_of_the_loop(clipping, algorithm, dtype, close, config):
    x = tokens(config)
    _, norms = expected(config, x, 1.0)
    limit = float(norms.median())
    sums, _ = expected(config, x, limit)
    engine, model, _ = private(
        GPT(config).cuda().to(dtype), max_grad_norm=limit, clipping=clipping, norm_algorithm=algorithm
    )
    loss = loss_of(model, x)
    engine.backward(loss) if clipping == "two_pass" else loss.backward()
    assert error(model, sums) <= close
    torch.testing.assert_close(engine.last.norms_B.double(), norms, rtol=close, atol=0)
    engine.detach()


def test_autocast_keeps_what_autograd_keeps():
    x = tokens(CONFIG)
    _, norms = expected(CONFIG, x, 1.0)
    sums, _ = expected(CONFIG, x, float(norms.median()))
    for clipping in ("bookkeeping", "keep"):
        engine, model, _ = private(GPT(CONFIG).cuda(), max_grad_norm=float(norms.median()), clipping=clipping)
        loss_of(model, x, autocast=True).backward()
        assert error(model, sums) <= 3e-2
        engine.detach()


def test_a_compiled_model_gives_the_sums_of_eager_mode():
    x = tokens(CONFIG)
    _, norms = expected(CONFIG, x, 1.0)
    sums, _ = expected(CONFIG, x, float(norms.median()))
    model = GPT(CONFIG).cuda()
    engine, compiled, _ = private(torch.compile(model), max_grad_norm=float(norms.median()))
    for _ in range(2):
        model.zero_grad()
        loss_of(compiled, x).backward()
        assert error(model, sums) <= 1e-4
    engine.detach()


def test_a_sample_that_is_not_finite_is_left_out_and_counted():
    x = tokens(CONFIG)
    engine, model, _ = private(GPT(CONFIG).cuda(), max_grad_norm=0.5, loss_reduction="sum")
    weights = torch.ones(4, device="cuda")
    weights[2] = torch.nan
    losses = F.cross_entropy(model(x).transpose(1, 2), x, reduction="none").mean(1)
    (losses * weights).sum().backward()
    assert engine.nonfinite == 1
    sums, _ = expected(CONFIG, x[[0, 1, 3]], 0.5)
    assert error(model, sums) <= 2e-5
    engine.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clipping", ["auto", "bookkeeping", "keep"])
def test_two_runs_are_bitwise_equal(clipping, dtype):
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(2):
            engine, model, optimizer = private(GPT(CONFIG).cuda().to(dtype), noise_multiplier=1.0, clipping=clipping)
            for seed in (1, 2, 3):
                optimizer.zero_grad()
                loss_of(model, tokens(CONFIG, seed=seed)).backward()
                optimizer.step()
            found.append({n: p.detach().clone() for n, p in model.named_parameters()})
            engine.detach()
        assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("fused", [False, True])
def test_noise_is_the_cpus_and_a_fused_optimizer_unscales_it(fused):
    steps = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = torch.nn.Linear(33, 17).to(device)
        before = copy.deepcopy(model.state_dict())
        engine = gramian.PrivacyEngine(insecure_reproducible=True, seed=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
        loader = DataLoader(TensorDataset(torch.zeros(40, 1)), batch_size=4)
        scaler = torch.amp.GradScaler(device, init_scale=8.0)
        engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=2.0, max_grad_norm=0.5,
            poisson_sampling=False, loss_scale=scaler,
        )  # fmt: skip
        scaler.scale(model(torch.rand(4, 33).to(device)).square().mean()).backward()
        scaler.step(optimizer)
        steps[device] = {n: (before[n] - p.detach()).cpu() for n, p in model.named_parameters()}
        engine.detach()
    for n in steps["cpu"]:
        torch.testing.assert_close(steps["cuda"][n], steps["cpu"][n], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(  # torch unscales no bfloat16 gradients on CUDA
    "scaled, dtype", [(False, torch.float32), (False, torch.bfloat16), (True, torch.float32)]
)
def test_only_gradients_with_other_values_are_refused(scaled, dtype):
    scaler = torch.amp.GradScaler("cuda", init_scale=3.0, enabled=scaled)
    model = GPT(CONFIG).cuda().to(dtype)
    engine, model, optimizer = private(model, noise_multiplier=1.0, loss_scale=scaler)
    x = torch.randint(96, (4, 48), device="cuda")
    for change in (False, True):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        if not change:
            scaler.step(optimizer)
            assert engine.stepped
            scaler.update()
            continue
        before = copy.deepcopy(model.state_dict())
        model.blocks[1].fc.weight.grad.data[0, 0].mul_(-1)
        with refusal(r"^blocks\.1\.fc\.weight: its \.grad was changed"):
            scaler.step(optimizer)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    engine.detach()


def test_normals_are_the_same_on_both_devices():
    cpu, cuda = (normals(bytes(range(32)), 5, 1001, 100_003, device) for device in ("cpu", "cuda"))
    torch.testing.assert_close(cuda.cpu(), cpu, rtol=1e-5, atol=1e-6)


@pytest.fixture
def nccl():
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())  # no port that another worker has
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_every_collective_runs_under_nccl(nccl, way):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    x = tokens(CONFIG)
    _, norms = expected(CONFIG, x, 1.0)
    limit = float(norms.median())
    sums, _ = expected(CONFIG, x, limit)
    model = GPT(CONFIG).cuda()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    if way == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        wrapped = fully_shard(model)
    engine, wrapped, optimizer = private(wrapped, max_grad_norm=limit)
    loss_of(wrapped, x).backward()
    optimizer.step()
    for n, p in model.named_parameters():
        now = p.full_tensor() if isinstance(p, DTensor) else p.detach()
        moved = (before[n] - now).double() * engine.expected_batch
        assert float((moved - sums[n]).norm()) <= 1e-3 * float(torch.stack([s.norm() for s in sums.values()]).norm())
    # what only several processes need, once
    from gramian.parallel.process_grid import ProcessGrid

    parallel = ProcessGrid(0, 2, torch.device("cuda"), way, group=dist.group.WORLD)  # as if there were two
    assert parallel.differing({"a": 3, "b": -4}, torch.device("cuda")) is None
    assert parallel.from_first(b"key", torch.device("cuda")) == b"key"
    t = torch.ones(4, device="cuda")
    parallel.start_sum(t).wait()
    assert torch.equal(t, torch.ones_like(t))
    engine.detach()


@pytest.mark.parametrize("kind", packed.KINDS)
@pytest.mark.parametrize("dtype, close", [(torch.float64, 1e-9), (torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("clipping, algorithm", WAYS)
def test_clipped_sums_of_packed_documents_are_those_of_the_loop(clipping, algorithm, dtype, close, kind):
    limit = float(packed.norms(kind).median())
    rows = packed.packed([[0, 1, 2], [3, 4], [5]])
    rows = packed.Rows(rows.tokens.cuda(), rows.ids.cuda(), rows.labels.cuda())
    options = {"max_grad_norm": limit, "clipping": clipping, "norm_algorithm": algorithm, "loss_reduction": "sum"}
    engine, model, _ = private(packed.model_of(kind).cuda().to(dtype), **options)
    with engine.units(rows.ids):
        engine.backward(packed.loss_of(model, rows))
    sums = {name: total.cuda() for name, total in packed.wanted(kind, limit).totals.items()}
    assert error(model, sums) < close
    engine.detach()
