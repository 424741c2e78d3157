"""A K-FAC refresh (capture, factors, decomposition, natural gradient) over the plain step, beside peers, in one run.

GPT of 4 layers, width 2048, vocabulary 32000, 16 × 1024 tokens, float32 weights, bf16 autocast; the plain step is a forward and
a backward, and "gramian.optim.KFAC" includes roots and the whole step of the default recipe. The peers do not touch the
head (a dense factor of its outputs would be 32000²); gramian covers it and every other parameter. "kfac-pytorch style" is
its recipe in a few lines: hooks, dense float32 covariances of all linear layers but the head, inverses of the damped factors
(or their eigendecompositions), gradients multiplied from both sides. On a CPU a small model stands in.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from benchmarks._timing import ratio, take_turns, write
from gramian.models.gpt import GPT, GPTConfig


class DenseKFAC:
    """The recipe of kfac-pytorch on one process."""

    def __init__(self, model: nn.Module, damping: float, eigen: bool) -> None:
        self.layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "head"}
        self.damping, self.eigen = damping, eigen
        self.sums: dict[str, dict[str, Tensor]] = {}

    def hooks(self) -> list[Any]:
        handles = []
        for name, layer in self.layers.items():
            self.sums[name] = {}

            def forward(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                a = args[0].detach().flatten(0, -2)
                a = torch.cat([a, a.new_ones(len(a), 1)], dim=1)
                self.sums[name]["A"] = (a.mT @ (a / len(a))).float()

            def backward(module: nn.Module, grads_in: Any, grads_out: Any, name: str = name) -> None:
                g = grads_out[0].flatten(0, -2)
                self.sums[name]["G"] = (g.mT @ (g / len(g))).float()

            handles += [layer.register_forward_hook(forward), layer.register_full_backward_hook(backward)]
        return handles

    def natural(self) -> dict[str, Tensor]:
        found = {}
        for name, layer in self.layers.items():
            y = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], dim=1)
            sides = self.sums[name]
            if self.eigen:
                (a, qa), (g, qg) = torch.linalg.eigh(sides["A"]), torch.linalg.eigh(sides["G"])
                inner = (qg.mT @ y @ qa) / (g.clamp(min=0)[:, None] * a.clamp(min=0)[None, :] + self.damping)
                found[name] = qg @ inner @ qa.mT
            else:
                for side in sides.values():
                    side.diagonal().add_(self.damping)
                found[name] = torch.linalg.inv(sides["G"]) @ y @ torch.linalg.inv(sides["A"])
        return found


def curvlinops_factors(model: nn.Module, tokens: Tensor) -> Callable[[], Any]:
    """Empirical K-FAC factors of all linear layers but the head, by curvlinops; no inverse, no natural gradient."""
    from curvlinops import KFACLinearOperator

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).flatten(0, 1)

    flat = Flat()
    layers = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "head"]
    params = [p for m in layers for p in (m.weight, m.bias)]
    data = [(tokens[:, :-1], tokens[:, 1:].flatten())]

    def run() -> Any:
        operator = KFACLinearOperator(
            flat,
            nn.CrossEntropyLoss(),
            params,
            data,
            fisher_type="empirical",
            check_deterministic=False,
            separate_weight_and_bias=False,
            num_per_example_loss_terms=tokens.shape[1] - 1,
        )
        operator.compute_kronecker_factors()
        return operator

    return run


def main() -> None:
    """Run the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip", nargs="*", default=[])
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    big = GPTConfig(vocabulary=32000, context=1024, layers=4, width=2048, heads=16)
    config = big if cuda else GPTConfig(vocabulary=500, context=64, layers=2, width=64, heads=4)
    batch = 16 if cuda else 4
    model = GPT(config).to(device)
    tokens = torch.randint(config.vocabulary, (batch, config.context + 1), device=device)
    terms = batch * config.context
    subset = min(2048, terms // 2)

    def loss() -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def plain() -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()

    def ours(update_freq: int = 1, **settings: Any) -> Callable[[], Any]:
        kfac = gramian.KFACNaturalGradient(update_freq=update_freq, **settings)

        def run() -> Any:
            model.zero_grad(set_to_none=True)
            with kfac.capture(model, num_terms=terms):
                loss().backward()
            return kfac.compute_natural_gradient(model)

        return run

    def step(max_tokens: int | None) -> Callable[[], Any]:
        optimizer = gramian.optim.KFAC(model, lr=1e-6, update_freq=1, max_tokens=max_tokens)

        def run() -> None:
            model.zero_grad(set_to_none=True)
            with optimizer.capture(num_terms=terms):
                loss().backward()
            optimizer.step()

        return run

    def dense(eigen: bool) -> Callable[[], Any]:
        peer = DenseKFAC(model, 1e-3, eigen)

        def run() -> Any:
            model.zero_grad(set_to_none=True)
            handles = peer.hooks()
            loss().backward()
            for handle in handles:
                handle.remove()
            return peer.natural()

        return run

    all_tokens = {"kfac_auto_t_max": 16384}
    variants: dict[str, Callable[[], Any]] = {
        "gramian.optim.KFAC, subset, with its step": step(subset),
        "gramian.optim.KFAC, all tokens, with its step": step(None),
        "gramian, subset of tokens": ours(max_tokens=subset),
        "gramian, all tokens": ours(**all_tokens),
        "gramian, subset, step without a refresh": ours(update_freq=10**9, max_tokens=subset),
        "gramian, subset, exact head": ours(max_tokens=subset, kfac_true_fisher_head=True),
        "gramian, subset, averaged (0.9)": ours(max_tokens=subset, ema_decay=0.9),
        "gramian, subset, joint damping": ours(max_tokens=subset, damping_mode="joint"),
        "kfac-pytorch style, inverse (no head)": dense(eigen=False),
        "kfac-pytorch style, eigen (no head)": dense(eigen=True),
        "curvlinops factors (no head)": curvlinops_factors(model, tokens),
    }
    results: dict[str, Any] = {"config": vars(config), "batch": batch, "subset": subset, "rows": {}}
    slow = {"kfac-pytorch style, eigen (no head)", "gramian, subset, joint damping"}
    for name, run in variants.items():
        if any(word in name for word in options.skip):
            continue
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            rounds = 3 if name in slow else options.rounds
            times = take_turns({"plain": plain, "this": run}, rounds, 1, warm_up=2)
        except torch.OutOfMemoryError as error:
            results["rows"][name] = {"failed": str(error).splitlines()[0][:200]}
            print(f"{name}: out of memory")
            continue
        row = {
            "milliseconds": statistics.median(times["this"]) * 1e3,
            "plain_milliseconds": statistics.median(times["plain"]) * 1e3,
            "ratio": ratio(times["this"], times["plain"]),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        }
        results["rows"][name] = row
        path = write("kfac_refresh" if cuda else "kfac_refresh_cpu", results)  # after every row: peers may take long
        print(
            f"{name}: {row['milliseconds']:.1f} ms = {row['ratio']:.2f} x plain ({row['plain_milliseconds']:.1f} ms)",
            flush=True,
        )
    print(path)


if __name__ == "__main__":
    main()
