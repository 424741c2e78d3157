"""Influence beside its peers: equal scores where the definition is the same, seconds, and the linear datamodelling score (LDS).

A byte-level GPT of 2 layers of width 32 is trained on passages of the embedded corpus, and again on random halves of them. A
method predicts the loss of a query under a half as the sum of its passages' scores; the LDS is the rank correlation of truth
and prediction over halves, averaged over queries. "kronfluence" is the package, with the empirical Fisher and damping of 0.1 of
the mean eigenvalue, as here; "random projection" is TRAK's estimator (projected gradients, inverse of their second moment) on
the same gradients. "bergson" is the package, by its collectors: EK-FAC with drawn labels, and gradients projected to 16 × 16 in
each layer with the inverse of their second moment, as its `trackstar` has it (there with unit norms). All methods see the
linear layers of the blocks alone. Runs on a CPU; rows of packages that are not installed are left out.
"""

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._timing import write
from gramian.data import load_windows
from gramian.data.options import DataSection
from gramian.influence import BuildOptions, Index, PassageCorpus, Query, build_index
from gramian.influence.passage_loss import nats_of
from gramian.models.gpt import GPT, GPTConfig

LENGTH = 32
SHAPE = GPTConfig(vocabulary=257, context=LENGTH, layers=2, width=32, heads=2)


def trained(tokens_NT: Tensor, targets_NT: Tensor, seed: int, steps: int) -> GPT:
    """A model trained on passages, all of them in every step."""
    model = GPT(SHAPE, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens_NT).flatten(0, 1), targets_NT.flatten()).backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    """Train the halves, score by every method, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passages", type=int, default=256)
    parser.add_argument("--queries", type=int, default=24)
    parser.add_argument("--halves", type=int, default=40)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    windows, held = load_windows(DataSection(limit_bytes=2_000_000, length=LENGTH))
    places = torch.linspace(0, len(windows) - 1, options.passages).long().numpy()
    rows, asked = windows.stack(places), held.stack(places[: options.queries] % len(held))
    tokens, targets = rows["tokens"], rows["targets"]
    query_tokens, query_targets = asked["tokens"], asked["targets"]
    model = trained(tokens, targets, 0, options.steps)
    generator = torch.Generator().manual_seed(0)
    halves = [torch.randperm(len(tokens), generator=generator)[: len(tokens) // 2] for _ in range(options.halves)]
    losses = []
    for number, half in enumerate(halves):
        found = [trained(tokens[half], targets[half], seed, options.steps) for seed in (2 * number, 2 * number + 1)]
        with torch.no_grad():
            batch = {"tokens_BT": query_tokens, "labels": query_targets}
            losses.append(torch.stack([nats_of(one, batch) for one in found]).mean(0))
        print(f"half {number + 1} of {len(halves)}", flush=True)
    truth_HQ = torch.stack(losses)
    result: dict[str, Any] = {}

    def note(name: str, scores_QN: Tensor, seconds: float) -> None:
        predicted_HQ = torch.stack([scores_QN[:, half].sum(1) for half in halves])
        each = [_spearman(predicted_HQ[:, q], truth_HQ[:, q]) for q in range(truth_HQ.shape[1])]
        lds = torch.tensor(each)
        error = float(lds.std() / len(each) ** 0.5)
        result[name] = {"lds": float(lds.mean()), "standard_error": error, "seconds": seconds}
        print(name, json.dumps(result[name]), flush=True)

    corpus = PassageCorpus(model, tokens, targets, decode=_decode, encode=_encode)
    seen = {id(p) for layer in _layers(model).values() for p in layer.parameters()}
    for p in model.parameters():
        p.requires_grad_(id(p) in seen)
    queries = [
        Query(_decode([int(t[0])]), _decode(y.tolist())) for t, y in zip(query_tokens, query_targets, strict=True)
    ]
    ours = {}
    for name, more in (
        ("EK-FAC, empirical", {"fisher": "empirical"}),
        ("EK-FAC, mc", {}),
        ("K-FAC, mc", {"factors": "kfac"}),
        ("EK-FAC, mc, 64 KB", {"gradients": 64_000}),
        ("EK-FAC, mc, 1 MB", {"gradients": 1_000_000}),
    ):
        begun = time.perf_counter()
        folder = Path(tempfile.mkdtemp()) / "index"
        build_index(corpus, folder, BuildOptions(batch=32, **more))
        values = Index(corpus, folder).ask(queries).scores().values_QN
        ours[name] = values
        note(f"gramian, {name}", values, time.perf_counter() - begun)
    for name, score in (("gradient product", _products), ("random projection, 512", _projected)):
        begun = time.perf_counter()
        note(name, score(model, tokens, targets, query_tokens, query_targets), time.perf_counter() - begun)
    products = _products(model, tokens, targets, query_tokens, query_targets)
    for name, values, built, asked in _bergson(model, tokens, targets, query_tokens, query_targets):
        if name == "product of gradients":  # the same definition as above
            off = float((values + products).norm() / products.norm())
            result["bergson"] = {"relative_difference": off}
            print(name, off)
            continue
        note(f"bergson, {name}", -values, built + asked)
        result[f"bergson, {name}"] |= {"seconds_to_build": built, "seconds_to_query": asked}
    peer = _kronfluence(model, tokens, targets, query_tokens, query_targets)
    if peer is not None:
        values, seconds = peer
        note("kronfluence, EK-FAC, empirical", -values, seconds)
        ratio = (-LENGTH * values.double() / ours["EK-FAC, empirical"].double()).flatten()
        off = (-LENGTH * values.double() - ours["EK-FAC, empirical"].double()).norm() / ours[
            "EK-FAC, empirical"
        ].double().norm()
        result["kronfluence"] = {"relative_difference": float(off), "median_ratio": float(ratio.median())}
        print(result["kronfluence"])
    print(write("influence_peers", {"options": vars(options), "methods": result}))


def _layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith("blocks")}


def _decode(ids: Any) -> str:
    return " ".join(str(int(one)) for one in ids)


def _encode(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def _spearman(one: Tensor, other: Tensor) -> float:
    ranks = torch.stack([values.argsort().argsort().double() for values in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])


def _gradients(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Gradients of all samples, [B, P], by a loop."""
    found = []
    for x, y in zip(tokens, targets, strict=True):
        model.zero_grad()
        nats_of(model, {"tokens_BT": x[None], "labels": y[None]}).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return torch.stack(found)


def _products(model: nn.Module, x: Tensor, y: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
    return -_gradients(model, qx, qy) @ _gradients(model, x, y).mT


def _projected(model: nn.Module, x: Tensor, y: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
    """TRAK's estimator: −φ_qᵀ (ΦᵀΦ)⁻¹ φ_i for gradients projected to 512 random directions."""
    samples, asked = _gradients(model, x, y), _gradients(model, qx, qy)
    directions = torch.randn(samples.shape[1], 512, generator=torch.Generator().manual_seed(0)) / 512**0.5
    samples, asked = samples @ directions, asked @ directions
    gram = samples.mT @ samples
    return -asked @ torch.linalg.solve(gram + 1e-3 * gram.diagonal().mean() * torch.eye(512), samples.mT)


def _kronfluence(model: nn.Module, x: Tensor, y: Tensor, qx: Tensor, qy: Tensor) -> tuple[Tensor, float] | None:
    """Scores [Q, N] of the package, and seconds; None where it is not installed."""
    try:
        from kronfluence.analyzer import Analyzer, prepare_model
        from kronfluence.arguments import FactorArguments, ScoreArguments
        from kronfluence.task import Task
    except ImportError:
        return None

    class Language(Task):
        """Next-token loss, summed."""

        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            return nats_of(model, {"tokens_BT": batch[0], "labels": batch[1]}).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

        def get_influence_tracked_modules(self) -> list[str]:
            return [*_layers(model)]

    task = Language()
    begun = time.perf_counter()
    kept = {name: p.requires_grad for name, p in model.named_parameters()}
    prepared = prepare_model(model, task)
    analyzer = Analyzer("peers", prepared, task, cpu=True, output_dir=tempfile.mkdtemp(), disable_tqdm=True)
    data, asked = (torch.utils.data.TensorDataset(a, b) for a, b in ((x, y), (qx, qy)))
    arguments = FactorArguments(strategy="ekfac", use_empirical_fisher=True)
    analyzer.fit_all_factors("f", data, per_device_batch_size=32, factor_args=arguments, overwrite_output_dir=True)
    analyzer.compute_pairwise_scores(
        "s", "f", asked, data, per_device_query_batch_size=len(qx), per_device_train_batch_size=32,
        score_args=ScoreArguments(damping_factor=None), overwrite_output_dir=True,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    for name, p in model.named_parameters():
        p.requires_grad_(kept.get(name, True))
    found: Tensor = analyzer.load_pairwise_scores("s")["all_modules"]
    return found, seconds


class _Causal(nn.Module):
    """A GPT as bergson calls it: passages with their last target, T + 1 tokens, `.logits` that it shifts, `.device`.

    The position table has a row more. Nothing before the last position depends on it, and its logits are not used.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.model.config = replace(model.config, context=LENGTH + 1)
        rows = model.position_embedding.weight.detach()
        self.model.position_embedding = nn.Embedding.from_pretrained(torch.cat([rows, rows[:1]]))

    base_model = property(lambda self: self)
    device = property(lambda self: torch.device("cpu"))
    dtype = property(lambda self: torch.float32)

    def forward(self, x_BT: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.model(x_BT))


def _bergson(model: GPT, x: Tensor, y: Tensor, qx: Tensor, qy: Tensor) -> Iterator[tuple[str, Tensor, float, float]]:
    """(method, products [Q, N], seconds to build, seconds to query) of the package; nothing where it is not installed."""
    try:
        import bergson
        from bergson.config.config import HessianConfig, InversionConfig
        from bergson.hessians.hessian_approximations import fit_factored_hessians
        from bergson.hessians.preconditioner import DensePreconditioner, load_preconditioner
        from datasets import Dataset
        from datasets.table import InMemoryTable
    except ImportError:
        return
    causal = _Causal(model)
    modules = {f"model.{name}" for name in _layers(model)}
    damping = InversionConfig(damping_factor=0.1)

    def opened(tokens: Tensor, targets: Tensor, width: int) -> tuple[Any, Any, list[list[int]]]:
        rows = torch.cat([tokens, targets[:, -1:].clamp(min=0)], 1).tolist()  # a target that does not count is below 0
        labels = torch.cat([tokens[:, :1], targets], 1).tolist()
        table = InMemoryTable.from_pydict({"input_ids": rows, "labels": labels, "length": [LENGTH + 1] * len(rows)})
        folder = Path(tempfile.mkdtemp()) / "run"
        config = bergson.IndexConfig(run_path=str(folder), projection_dim=width, include_bias=True)
        config.partial_run_path.mkdir(parents=True)
        batches = [list(range(i, min(i + 32, len(rows)))) for i in range(0, len(rows), 32)]
        return Dataset(table, fingerprint="rows"), config, batches

    def collected(tokens: Tensor, targets: Tensor, width: int, moments: bool = False) -> tuple[dict[str, Tensor], Any]:
        data, config, batches = opened(tokens, targets, width)
        processor = bergson.GradientProcessor(projection_dim=width, include_bias=True)
        collector = bergson.InMemoryCollector(
            model=causal, cfg=config, data=data, processor=processor, target_modules=modules, skip_hessians=not moments
        )
        computer = bergson.CollectorComputer(model=causal, data=data, collector=collector, batches=batches, cfg=config)
        computer.run_with_collector_hooks()
        return {name: g.float() for name, g in collector.gradients.items()}, processor

    def products(left: dict[str, Tensor], right: dict[str, Tensor]) -> Tensor:
        return torch.stack([left[name] @ g.mT for name, g in right.items()]).sum(0)

    def unit(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        norm = torch.cat([*gradients.values()], 1).norm(dim=1, keepdim=True)
        return {name: g / norm for name, g in gradients.items()}

    times = [time.perf_counter()]
    samples, _ = collected(x, y, 0)
    data, config, batches = opened(x, y, 0)
    hessian = HessianConfig(method="kfac", ev_correction=True)
    fit_factored_hessians(
        causal, data, config, hessian, target_modules=modules, attention_cfgs={}, batches=batches,
        path=str(config.partial_run_path), do_eigendecomposition=True,
    )  # fmt: skip
    times.append(time.perf_counter())
    asked, _ = collected(qx, qy, 0)
    inverse = load_preconditioner(str(config.partial_run_path), inversion_cfg=damping, ev_correction=True)
    found = products(inverse.apply(asked), samples)
    times.append(time.perf_counter())
    yield "EK-FAC, mc", found, times[1] - times[0], times[2] - times[1]
    yield "product of gradients", products(asked, samples), 0.0, 0.0
    for name, power in (("projected, inverse", -1.0), ("projected, trackstar", -0.5)):
        times = [time.perf_counter()]
        samples, processor = collected(x, y, 16, moments=True)
        inverse = DensePreconditioner.from_processor(processor, inversion_cfg=damping, power=power)
        if power == -0.5:
            samples = unit(inverse.apply(samples))
        times.append(time.perf_counter())
        asked = inverse.apply(collected(qx, qy, 16)[0])
        found = products(unit(asked) if power == -0.5 else asked, samples)
        times.append(time.perf_counter())
        yield name, found, times[1] - times[0], times[2] - times[1]


if __name__ == "__main__":
    main()
