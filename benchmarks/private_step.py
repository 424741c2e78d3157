"""A private step (forward, backward, clip; no optimizer) over the plain step, beside Opacus' ghost clipping, in one run.

GPT of 16 layers, width 2048, vocabulary 32000, untied head, 937 M parameters in bf16, all of them trained, 16,384 tokens a
step. On a CPU: 4 layers of width 256, vocabulary 4096, float32, 2,048 tokens. Each row takes turns with the plain step; the
plan of ours is kept beside the times, and the time of `step()` (noise from the key stream, division, AdamW) beside the private
step. "busy" is the time in which the GPU works on a step, "host" the time until Python has said all of it: where the host is
not well below the GPU, its noise shows.
"""

import argparse
import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import gramian
from benchmarks._timing import ratio, seconds, synchronize, take_turns, write
from gramian.models.gpt import GPT, GPTConfig


class Positions(nn.Module):
    """Position ids with a row for every sample, as Opacus wants them."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.batch = embedding, 1

    def forward(self, positions_1T: Tensor) -> Tensor:
        out: Tensor = self.embedding(positions_1T.expand(self.batch, -1).contiguous())
        return out


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Mean over samples of the mean over tokens."""
    logits = model(x)
    logits = getattr(logits, "logits", logits)  # of a model of transformers
    return F.cross_entropy(logits.flatten(0, 1), x.flatten())


def plain(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward."""

    def step() -> None:
        for p in model.parameters():
            p.grad = None
        loss_of(model, x).backward()

    return step


def ours(model: nn.Module, x: Tensor, two_pass: bool = False, **options: Any) -> tuple[Callable[[], None], Any, Any]:
    """The private step of an engine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=x.is_cuda)
    loader = DataLoader(TensorDataset(torch.zeros(100 * len(x), 1)), batch_size=len(x))
    engine = gramian.PrivacyEngine(insecure_reproducible=True, seed=0)
    engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
        poisson_sampling=False, **options,
    )  # fmt: skip

    def step() -> None:
        for p in model.parameters():
            p.grad = None
        loss = loss_of(model, x)
        engine.backward(loss) if two_pass else loss.backward()

    return step, engine, optimizer


def opacus_ghost(model: GPT, x: Tensor) -> Callable[[], None]:
    """Opacus' fast gradient clipping: norms in a first backward, the clipped loss in a second."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    positions = Positions(model.position_embedding)
    positions.batch = len(x)
    model.position_embedding = positions  # type: ignore[assignment]
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=len(x)
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), loss_reduction="mean")

    def step() -> None:
        optimizer.zero_grad()
        logits = wrapped(x)
        criterion(logits.flatten(0, 1), x.flatten(), shape=x.shape).backward()

    return step


def peak(step: Callable[[], None]) -> float:
    """GiB at the top of one step."""
    if not torch.cuda.is_available():
        return 0.0
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def busy_and_host(step: Callable[[], None]) -> tuple[float, float] | None:
    """Milliseconds of one step that a GPU works, streams counted once, and until the host has begun all of it."""
    if not torch.cuda.is_available():
        return None
    synchronize()
    begun = time.perf_counter()
    step()
    host = time.perf_counter() - begun
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as told:
        step()
        synchronize()
    spans = sorted(
        (e.time_range.start, e.time_range.end) for e in told.events() or [] if e.device_type == DeviceType.CUDA
    )
    busy = end = 0.0
    for start, stop in spans:
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
    return busy / 1e3, 1e3 * host


def measure(base: GPT, length: int, tokens: int, rounds: int, peers: bool) -> dict[str, Any]:
    """All variants at one length, each on a copy of the model."""
    device = base.head.weight.device.type
    x = torch.randint(base.config.vocabulary, (max(1, tokens // length), length), device=device)
    found: dict[str, Any] = {"batch": len(x)}
    baseline = plain(base, x)
    _let_go()
    found["plain_peak_gib"] = peak(baseline)

    def against(name: str, make: Callable[[], tuple[Callable[[], None], Any, Any]]) -> None:
        try:
            step, engine, optimizer = make()
            times = take_turns({"plain": baseline, name: step}, rounds, 2, 2)
            row: dict[str, Any] = {
                "milliseconds": 1e3 * statistics.median(times[name]),
                "plain_milliseconds": 1e3 * statistics.median(times["plain"]),
                "ratio": ratio(times[name], times["plain"]),
                "by_round": [one / other for one, other in zip(times[name], times["plain"], strict=True)],
            }
            base.zero_grad()
            row["peak_gib"] = peak(step)
            row["busy_and_host_milliseconds"] = busy_and_host(step)
            if engine is not None:
                row["plan"] = None if engine.plan is None else str(engine.plan).splitlines()
                row["step_milliseconds"] = 1e3 * _step_alone(step, optimizer)
                engine.detach()
        except (RuntimeError, NotImplementedError) as error:
            row = {"error": " ".join(str(error).split())[:200]}
        found[name] = row
        print(length, name, {key: value for key, value in row.items() if key not in ("plan", "by_round")}, flush=True)

    def another() -> GPT:
        base.zero_grad()
        _let_go()
        return copy.deepcopy(base)

    against("gramian", lambda: ours(another(), x))
    if peers:
        against("Opacus ghost", lambda: (opacus_ghost(another(), x), None, None))
        if length == 1024:
            against("gramian, two passes", lambda: ours(another(), x, True, clipping="two_pass"))
    return found


def _let_go() -> None:
    """Free the models of rows before, so that no peak holds them."""
    gc.collect()
    torch.cuda.empty_cache() if torch.cuda.is_available() else None


def _step_alone(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> float:
    """Seconds of `optimizer.step()`: reduction, noise, division and the update."""
    times = []
    for _ in range(3):
        step()
        times.append(seconds(optimizer.step, 1))
    return statistics.median(times)


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = arguments.lengths or ([256, 1024, 4096, 8192, 16384] if device == "cuda" else [32, 128, 512])
    shape = (
        {"vocabulary": 32000, "layers": 16, "width": 2048, "heads": 16}
        if device == "cuda"
        else {"vocabulary": 4096, "layers": 4, "width": 256, "heads": 4}
    )
    config = GPTConfig(context=max(lengths), **shape)
    tokens = 16384 if device == "cuda" else 2048
    base = GPT(config).to(device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    results: dict[str, Any] = {"config": vars(config), "tokens": tokens, "lengths": {}}
    for length in lengths:
        peers = not arguments.no_peers and length <= 8192
        results["lengths"][length] = measure(base, length, tokens, arguments.rounds, peers)
        print(write("private_step" if device == "cuda" else "private_step_cpu", results))


if __name__ == "__main__":
    main()
