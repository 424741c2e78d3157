"""Private training on meshes, on real processes: against a loop of single-sample backwards through the model of one process."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import gramian
from gramian.privacy.noise.element_noise import NoisePlan
from tests.dist.tp_bodies import CASES, mesh_of, spread
from tests.dist.worlds import whole

LAYOUTS = ("hsdp", "tp", "fsdp2 x tp", "fsdp2")


def placed(layout: str, model: nn.Module, name: str, style: str) -> tuple[nn.Module, int, int]:
    """(model on the mesh, number of this process's samples among those of others, how many have other samples)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if layout == "tp":
        return spread(model, name, style, 1, size), 0, 1
    if layout == "fsdp2 x tp":
        return spread(model, name, style, size // 2, 2), rank // 2, size // 2
    mesh = mesh_of(2, size // 2) if layout == "hsdp" else mesh_of(1, size)["tp"]
    if hasattr(model, "block"):
        fully_shard(model.block, mesh=mesh)
    return fully_shard(model, mesh=mesh), rank, size


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over samples of each sample's mean loss."""
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten()) if len(inputs) else logits.sum() * 0


def gradients_alone(name: str, samples: int) -> dict[str, Tensor]:
    """{parameter: per-sample gradients [B, …]} from a loop of single-sample backwards through the model of one process."""
    case = CASES[name]
    model, (inputs, targets) = case.model(), case.data(samples)
    targets = targets.view(samples, -1)
    found: dict[str, list[Tensor]] = {key: [] for key, _ in model.named_parameters()}
    for i in range(samples):
        model.zero_grad()
        loss_of(model, inputs[i : i + 1], targets[i : i + 1]).backward()
        for key, p in model.named_parameters():
            assert p.grad is not None
            found[key].append(p.grad.clone())
    return {key: torch.stack(gs) for key, gs in found.items()}


def clipped(gradients: dict[str, Tensor], function: str, limit: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms [B], and the clipped sum by the formula of each clipping function."""
    squares = {key: g.flatten(1).square().sum(1) for key, g in gradients.items()}
    norms = torch.stack([*squares.values()]).sum(0).sqrt()
    layers = list(dict.fromkeys(key.rpartition(".")[0] for key in gradients))
    weights = {}
    for key in gradients:
        if function == "per_layer":
            own = sum(squares[other] for other in gradients if other.rpartition(".")[0] == key.rpartition(".")[0])
            weights[key] = (limit / len(layers) ** 0.5 / torch.as_tensor(own).sqrt()).clamp(max=1)
        else:
            weights[key] = limit / (norms + 0.01) if function == "automatic" else (limit / norms).clamp(max=1)
    return norms, {key: torch.einsum("b,b...->...", weights[key], g) for key, g in gradients.items()}


def private_step(
    rank: int,
    layout: str,
    name: str,
    style: str,
    samples: int,
    function: str = "flat",
    clipping: str = "auto",
    noise: float = 0.0,
    **options: Any,
) -> dict[str, Tensor]:
    """One step of SGD at rate 1: norms, and how far every parameter went, are those of the loop, and the noise that of one process."""
    case = CASES[name]
    gradients = gradients_alone(name, samples)
    limit = float(clipped(gradients, "flat", 1.0)[0].median())
    norms, sums = clipped(gradients, function, limit)
    inputs, targets = case.data(samples)
    targets = targets.view(samples, -1)
    model, number, groups = placed(layout, case.model(), name, style)
    start = {key: p.detach().clone() for key, p in case.model().named_parameters()}
    engine = gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=3)
    optimizer = SGD(model.parameters(), lr=1.0)
    engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=2),
        noise_multiplier=noise,
        max_grad_norm=limit,
        clip_function=function,
        clipping=clipping,
        poisson_sampling=False,
        expected_batch=3.0,
        **options,
    )
    mine = list(range(number, samples, groups))
    loss = loss_of(model, inputs[mine], targets[mine])
    engine.backward(loss) if clipping == "two_pass" else loss.backward()
    last = engine.last
    assert last is not None
    share = mine
    if groups < dist.get_world_size():
        tensor = dist.get_world_size() // groups
        each, more = divmod(len(mine), tensor)
        at = dist.get_rank() % tensor
        begin = at * each + min(at, more)
        share = mine[begin : begin + each + (at < more)]
    torch.testing.assert_close(last.norms_B.double(), norms[share], rtol=1e-9, atol=0)
    optimizer.step()
    moved = {key: p - start[key] for key, p in whole({k: p.detach() for k, p in model.named_parameters()}).items()}
    plan = NoisePlan(engine._ledger.secrets.noise_key, [(key, tuple(g.shape)) for key, g in sums.items()])
    for key, total in sums.items():
        drawn = torch.zeros_like(total)
        if noise:
            plan.add_noise_(drawn, key, noise * limit, engine._ledger.counter.released - 1)
        expected = -(total + drawn) / 3.0
        scale = max(float(torch.stack([g.norm() for g in sums.values()]).norm()) / 3.0, 1e-30)
        assert float((moved[key] - expected).norm()) < 1e-9 * scale, (layout, key)
    engine.detach()
    return moved
