"""The full analysis of a 124M-parameter GPT, stage by stage, and one GGN product beside curvlinops, in one run.

GPT of 12 layers, width 768, vocabulary 50,257, context 1,024, tied head, random weights and tokens, float32 without TF32. The
stages are those of `gramian curvature`: K-FAC with drawn labels, capacity metrics, the largest eigenvalues of K-FAC, EK-FAC,
both ends of the GGN by Lanczos, its density by quadrature, its trace by Hutch++. On a CPU a small model stands in.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gramian
from benchmarks._timing import ratio, seconds, synchronize, take_turns, write
from gramian.curvature import GGNOperator, lanczos, spectral_density, stochastic_trace
from gramian.models.gpt import GPT, GPTConfig

SHAPES = {
    "cuda": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50_257, "context": 1024, "tied": True, "batch": 4},
    "cpu": {"layers": 2, "width": 64, "heads": 2, "vocabulary": 512, "context": 32, "tied": True, "batch": 2},
}


class Logits(nn.Module):
    """[B·T, V], as the peer wants them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the one that has forward derivatives; gramian chooses it by itself
            logits: Tensor = self.model(tokens_BT).flatten(0, 1)
        return logits


def peak_of(device: str, work: Callable[[], Any]) -> float | None:
    """GB that a call needs at most beyond what is there before it."""
    if device != "cuda":
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def products(device: str, model: nn.Module, batch: tuple[Tensor, Tensor], rounds: int) -> dict[str, Any]:
    """One GGN product: seconds, memory and how far the two are apart."""
    import curvlinops

    tokens_BT, targets_BT = batch
    ours = GGNOperator(model, [(tokens_BT, targets_BT)])
    trained = [p for p in model.parameters() if p.requires_grad]
    data = [(tokens_BT, targets_BT.flatten())]
    peer = curvlinops.GGNLinearOperator(Logits(model), nn.CrossEntropyLoss(), trained, data, check_deterministic=False)
    generator = torch.Generator(device).manual_seed(0)
    v_N1 = torch.randn(ours.dim, 1, device=device, generator=generator)
    left, right = ours.matmat(v_N1), peer @ v_N1
    variants = {"gramian": lambda: ours.matmat(v_N1), "curvlinops": lambda: peer @ v_N1}
    times = take_turns(variants, rounds=rounds, steps=2, warm_up=1)
    return {
        "seconds": {name: statistics.median(found) for name, found in times.items()},
        "curvlinops_over_gramian": ratio(times["curvlinops"], times["gramian"]),
        "peak_GB": {name: peak_of(device, product) for name, product in variants.items()},
        "logits_GB": targets_BT.numel() * int(model.config.vocabulary) * 4 / 1e9,  # type: ignore[union-attr, arg-type]
        "relative_difference": float((left - right).norm() / right.norm()),
    }


def analysis(device: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Seconds of every stage and what it found."""
    stages: dict[str, float] = {}
    found: dict[str, Any] = {}

    def stage(name: str, work: Callable[[], Any]) -> Any:
        out: list[Any] = []
        stages[name] = seconds(lambda: out.append(work()), 1)
        print(f"{name}: {stages[name]:.2f} s", flush=True)
        return out[0]

    kfac = gramian.KFACNaturalGradient(update_freq=1, damping_mode="joint")
    stage("K-FAC, drawn labels", lambda: kfac.collect_kfac_factors(model, batch, "mc"))
    metrics = stage("capacity metrics", lambda: kfac.compute_capacity_metrics())
    found["K-FAC top eigenvalues"] = stage("K-FAC's largest eigenvalues", lambda: kfac.top_eigenvalues(20)).tolist()
    corrected = gramian.KFACNaturalGradient(update_freq=1, damping_mode="joint", ekfac=True)
    short = tuple(part[:, : part.shape[1] // 4] for part in batch)
    stage("EK-FAC, a quarter of the tokens", lambda: corrected.collect_kfac_factors(model, short, "mc"))
    operator = GGNOperator(model, [batch])
    ends = stage("GGN, 10 largest eigenvalues", lambda: lanczos(operator, 10, tol=1e-3, search_copies=False))
    density = stage("GGN density, 4 probes of 30 steps", lambda: spectral_density(operator, 4, 30, block_size=1))
    trace = stage("GGN trace, Hutch++ of 30 products", lambda: stochastic_trace(operator, 30, block_size=1))
    found["capacity"] = {
        key: metrics["model"][key] for key in ("trace", "max_eigenvalue", "participation_ratio", "log_det")
    }
    found["GGN largest"] = {"eigenvalues": ends.eigenvalues.tolist(), "residual_bounds": ends.residual_bounds.tolist()}
    found["GGN largest"] |= {"products": ends.matvecs, "converged": ends.converged}
    found["GGN trace"] = {"value": trace.value, "standard_error": trace.standard_error}
    found["GGN density"] = {"trace": density.trace_of(lambda nodes: nodes).value, "products": density.matvecs}
    return {"seconds": stages, "total_seconds": sum(stages.values()), "found": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    shape = dict(SHAPES[arguments.device])
    batch_size = shape.pop("batch")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model = GPT(GPTConfig(**shape)).to(arguments.device).eval()
    tokens = torch.randint(shape["vocabulary"], (batch_size, shape["context"] + 1), device=arguments.device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    results = {
        "model": {**shape, "parameters": sum(p.numel() for p in model.parameters()), "tokens": batch[0].numel()},
        "product": products(arguments.device, model, batch, arguments.rounds),
        "analysis": analysis(arguments.device, model, batch),
    }
    for name, found in results.items():
        print(name, found)
    if arguments.device == "cuda":
        print(write("curvature_analysis", results))


if __name__ == "__main__":
    main()
