"""Utility of private fine-tuning on real text, beside Opacus: accuracy over ε, and seconds, at one σ for both.

SST-2 (60,614 phrases, each a record) and the MiniLM encoder of 22.6 M parameters with a head of two classes, all of it trained
or by LoRA of rank 8. Texts are cut to 32 tokens (5 % are longer). Poisson draws of 1,010 on average, 60 steps, a cosine to
zero, bf16 autocast, C = 1, δ = 1e-5. σ is what Opacus' PRV accountant asks for, and both libraries get it: sampling rate,
steps and σ are the same, and ε with them. ε = ∞ is σ = 0 with clipping; "plain" is training without clipping, draws of the
same size. "metric" is SGD in the metric of K-FAC factors from 512 texts of AG News, labels drawn from the model, with
"automatic" clipping.

Every method has four learning rates on seed 0, at ε = 3 (whose best also serves 1 and 8) and ∞; the best on one half of the
held-out lines runs with three more seeds, whose accuracy on the other half counts. The choice is not in ε. The split is of
phrases, so that held-out ones may be of sentences that training phrases are of. Seconds are of training alone, without the
warm-up of a first run, but with what the first batch costs (row proof, plan), which "seconds per later step", of the second
half of a run, leaves out; both are null where other runs shared the GPU. Opacus runs by ghost clipping; "opacus hooks"
(per-sample gradients, in pieces of 256) is only timed.

    python -m benchmarks.private_utility --data FOLDER --prepare --sst2 DIR --public FILE --model DIR
    python -m benchmarks.private_utility --data FOLDER --tune --part 0/4 --beside utility_0      # and 1/4, 2/4, 3/4
    python -m benchmarks.private_utility --data FOLDER --merge utility_0 … --seeds 3             # shared out likewise
    python -m benchmarks.private_utility --data FOLDER --time                                    # alone
    python -m benchmarks.private_utility --figure
"""

import argparse
import copy
import functools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler

import gramian
from benchmarks._private_text import Texts, classifier, joined, load, prepare
from benchmarks._timing import RESULTS, synchronize, write

FIGURE = Path(__file__).parent / "figures" / "private_utility.png"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DELTA, CLIP, EPSILONS = 1e-5, 1.0, (1.0, 3.0, 8.0, None)
TUNED = {1.0: 3.0, 3.0: 3.0, 8.0: 3.0, None: None}
"""{ε: the ε whose runs choose its learning rate}."""
PUBLIC, EVERY, HOOKS_PIECE, TIMED_EPSILON = 512, 20, 256, 3.0
RATES: dict[tuple[str, str], tuple[float, ...]] = {
    ("full", "sgd"): (0.03, 0.1, 0.3, 1.0),
    ("full", "adamw"): (1e-4, 3e-4, 1e-3, 3e-3),
    ("full", "metric"): (0.3, 1.0, 3.0, 10.0),
    ("lora", "sgd"): (0.1, 0.3, 1.0, 3.0),
    ("lora", "adamw"): (3e-4, 1e-3, 3e-3, 1e-2),
    ("lora", "metric"): (1.0, 3.0, 10.0, 30.0),
}
"""{(what is trained, optimizer): learning rates}, the same for both libraries."""
PLAIN: dict[tuple[str, str], tuple[float, ...]] = {
    ("full", "sgd"): (0.003, 0.01, 0.03, 0.1),
    ("full", "adamw"): (3e-5, 1e-4, 3e-4, 1e-3),
    ("lora", "sgd"): (0.03, 0.1, 0.3, 1.0),
    ("lora", "adamw"): (3e-4, 1e-3, 3e-3, 1e-2),
}
"""The same without clipping."""


@dataclass(frozen=True)
class Trial:
    """One run."""

    library: str
    parameters: str
    optimizer: str
    epsilon: float | None
    """None: σ = 0."""
    lr: float
    seed: int = 0
    steps: int = 60
    batch: int = 1024
    records: int = 0
    length: int = 32


def methods() -> Iterator[tuple[Trial, tuple[float, ...]]]:
    """(method, its learning rates): every method at every ε."""
    for (parameters, optimizer), rates in RATES.items():
        for library in ("gramian", "opacus") if optimizer != "metric" else ("gramian",):
            for epsilon in EPSILONS:
                yield Trial(library, parameters, optimizer, epsilon, 0.0), rates
    for (parameters, optimizer), rates in PLAIN.items():
        yield Trial("plain", parameters, optimizer, None, 0.0), rates


@functools.cache
def noise_multiplier(epsilon: float | None, rate: float, steps: int) -> float:
    """σ by Opacus' PRV accountant; 0 for ε = None."""
    from opacus.accountants.utils import get_noise_multiplier

    if epsilon is None:
        return 0.0
    found = get_noise_multiplier(
        target_epsilon=epsilon, target_delta=DELTA, sample_rate=rate, steps=steps, accountant="prv"
    )
    return float(found)


def train(trial: Trial, texts: dict[str, Texts], folder: Path) -> dict[str, Any]:
    """Train one model; returns the trial, σ, ε by the library's own account, accuracies, and the seconds of training."""
    model = classifier(folder, trial.parameters, trial.seed, DEVICE)
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = trial.optimizer == "adamw"
    optimizer: Any = (
        torch.optim.AdamW(trained, lr=trial.lr, weight_decay=0.0)
        if adamw
        else torch.optim.SGD(trained, lr=trial.lr, momentum=0.9)
    )
    loader = DataLoader(texts["train"], batch_size=trial.batch, collate_fn=joined)
    rate = 1 / len(loader)
    sigma = noise_multiplier(trial.epsilon, rate, trial.steps)
    begin = {"gramian": _gramian, "plain": _plain}.get(trial.library, _opacus)
    run = begin(trial, model, optimizer, loader, sigma, texts["public"])
    synchronize()
    begun, half, step = time.perf_counter(), 0.0, 0
    while step < trial.steps:
        for batch in run.batches():
            for group in run.optimizer.param_groups:
                group["lr"] = trial.lr * 0.5 * (1 + math.cos(math.pi * step / trial.steps))
            run.before(step)
            run.optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16):
                logits = run.model(batch[0], batch[1])
            run.criterion(logits.float(), batch[2]).backward()
            run.optimizer.step()
            step += run.released()
            if step == trial.steps // 2 and run.released():
                synchronize()
                half = time.perf_counter()
            if step == trial.steps:
                break
    synchronize()
    ended = time.perf_counter()
    seconds, later = ended - begun, (ended - half) / (trial.steps - trial.steps // 2)
    spent = run.end()
    right = evaluate(model, texts["dev"])
    return {
        **asdict(trial), "sigma": sigma, "spent": spent, "chosen by": right[0], "accuracy": right[1], "seconds": seconds,
        "seconds per later step": later,
    }  # fmt: skip


@torch.no_grad()
def evaluate(model: nn.Module, texts: Texts) -> tuple[float, float]:
    """Accuracies on the even lines, by which a learning rate is chosen, and on the odd ones, which are reported."""
    model.eval()
    right = []
    for part in torch.arange(len(texts), device=DEVICE).split(1024):
        ids, mask, labels = texts[part]
        with torch.autocast(DEVICE, torch.bfloat16):
            right.append(model(ids, mask).argmax(1) == labels)
    every = torch.cat(right).float()
    return float(every[::2].mean()), float(every[1::2].mean())


# ---- libraries -------------------------------------------------------------------------------------------------------


def _nothing(step: int) -> None:
    """What a loop calls before a step that needs nothing."""


@dataclass
class Run:
    """What the loop calls."""

    model: nn.Module
    optimizer: Any
    batches: Callable[[], Any]
    end: Callable[[], float | None]
    """Give the model back, and say ε."""
    criterion: Any = F.cross_entropy
    before: Callable[[int], Any] = _nothing
    released: Callable[[], bool] = lambda: True


def _plain(trial: Trial, model: nn.Module, optimizer: Any, loader: Any, sigma: float, public: Texts) -> Run:
    draws = RandomSampler(loader.dataset, generator=torch.Generator().manual_seed(trial.seed))
    shuffled = DataLoader(loader.dataset, batch_size=trial.batch, sampler=draws, collate_fn=joined, drop_last=True)
    return Run(model, optimizer, lambda: shuffled, lambda: None)


def _gramian(trial: Trial, model: nn.Module, optimizer: Any, loader: Any, sigma: float, public: Texts) -> Run:
    options: dict[str, Any] = {}
    refresh: Callable[[int], Any] = _nothing
    if trial.optimizer == "metric":
        twin = copy.deepcopy(model)
        kfac = gramian.KFACNaturalGradient(
            damping=1e-3, update_freq=1, ema_decay=0.0, woodbury_dtype="fp32", seed=trial.seed
        )
        kfac.public = True
        some = {name: value[:PUBLIC] for name, value in public.inputs().items()}
        options = {"metric": kfac, "clip_function": "automatic"}

        def refresh(step: int) -> None:
            if step % EVERY == 0:
                twin.load_state_dict(model.state_dict())
                with torch.autocast(DEVICE, torch.bfloat16):
                    kfac.collect_kfac_factors(twin, some, fisher_type="mc", loss="cross_entropy")

    engine = gramian.PrivacyEngine("prv")
    _, optimizer, draws = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=sigma, max_grad_norm=CLIP,
        sample_rate=1 / len(loader), expected_batch=int(len(loader.dataset) / len(loader)), **options,
    )  # fmt: skip

    def end() -> float | None:
        engine.detach()
        return engine.get_epsilon(DELTA) if sigma else None

    return Run(model, optimizer, lambda: draws, end, before=refresh)


def _opacus(trial: Trial, model: nn.Module, optimizer: Any, loader: Any, sigma: float, public: Texts) -> Run:
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    torch.manual_seed(1000 + trial.seed)
    engine, hooks = PrivacyEngine(accountant="prv"), trial.library == "opacus hooks"
    made = engine.make_private(
        module=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), data_loader=loader, noise_multiplier=sigma,
        max_grad_norm=CLIP, grad_sample_mode="hooks" if hooks else "ghost",
    )  # fmt: skip
    wrapped, private, criterion, draws = (made[0], made[1], F.cross_entropy, made[2]) if hooks else made

    def pieces() -> Iterator[Any]:
        with BatchMemoryManager(data_loader=draws, max_physical_batch_size=HOOKS_PIECE, optimizer=private) as split:
            yield from split

    def end() -> float | None:
        return float(engine.get_epsilon(DELTA)) if sigma else None

    batches = pieces if hooks else lambda: draws
    return Run(wrapped, private, batches, end, criterion, released=lambda: not private._is_last_step_skipped)


# ---- rows ------------------------------------------------------------------------------------------------------------


FIELDS = tuple(Trial.__dataclass_fields__)


def _known(name: str) -> list[dict[str, Any]]:
    file = RESULTS / f"{name}.json"
    return list(json.loads(file.read_text())["results"]) if file.exists() else []


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[field] for field in FIELDS)


def best(rows: list[dict[str, Any]], method: Trial) -> Trial | None:
    """The method with the learning rate that was best on seed 0; None if it was never tuned."""
    tuned = replace(method, epsilon=TUNED[method.epsilon])
    own = [row for row in rows if _key({**row, "lr": 0.0}) == _key(asdict(tuned))]
    return None if not own else replace(method, lr=max(own, key=lambda row: row["chosen by"])["lr"])


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row of each method and ε: accuracies of the seeds beyond 0, by the learning rate that seed 0 chose."""
    found = []
    for shape in sorted({tuple(row[field] for field in ("steps", "batch", "records", "length")) for row in rows}):
        for method, _ in methods():
            steps, batch, records, length = shape
            chosen = best(rows, replace(method, steps=steps, batch=batch, records=records, length=length))
            own = [] if chosen is None else [
                row for row in rows if row["seed"] > 0 and _key({**row, "seed": 0}) == _key(asdict(chosen))
            ]  # fmt: skip
            if own and chosen is not None:
                accuracies = [row["accuracy"] for row in own]
                found.append({
                    **asdict(chosen), "seed": len(own), "accuracy": statistics.mean(accuracies), "low": min(accuracies),
                    "high": max(accuracies), "sigma": own[0]["sigma"],
                    "seconds": next((row["seconds"] for row in own if row["seconds"] is not None), None),
                    "seconds per later step": next(
                        (row["seconds per later step"] for row in own if row["seconds"] is not None), None
                    ),
                })  # fmt: skip
    return found


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Accuracy over ε, mean and range of the seeds; training without clipping as a line across."""
    import matplotlib.pyplot as plt

    styles = {
        ("gramian", "sgd"): ("gramian DP-SGD", "#c1272d", "o-"), ("opacus", "sgd"): ("Opacus DP-SGD", "#eea0a4", "s--"),
        ("gramian", "adamw"): ("gramian DP-AdamW", "#0000a7", "o-"),
        ("opacus", "adamw"): ("Opacus DP-AdamW", "#8f9be8", "s--"),
        ("gramian", "metric"): ("gramian, public metric", "#008176", "o-"),
    }  # fmt: skip
    own, places = table(rows), {epsilon: place for place, epsilon in enumerate(EPSILONS)}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    for axis, (parameters, title) in zip(axes, {"full": "all parameters", "lora": "LoRA, rank 8"}.items(), strict=True):
        for turn, ((library, optimizer), (label, colour, style)) in enumerate(styles.items()):
            line = [
                row
                for row in own
                if (row["library"], row["parameters"], row["optimizer"]) == (library, parameters, optimizer)
            ]
            if line:
                mean = [100 * row["accuracy"] for row in line]
                below = [100 * (row["accuracy"] - row["low"]) for row in line]
                above = [100 * (row["high"] - row["accuracy"]) for row in line]
                at = [places[row["epsilon"]] + 0.05 * (turn - 2) for row in line]
                axis.errorbar(at, mean, [below, above], label=label, color=colour, fmt=style, capsize=3, markersize=5)
        top = [row for row in own if (row["library"], row["parameters"]) == ("plain", parameters)]
        if top:
            highest = max(top, key=lambda row: row["accuracy"])
            label = f"without clipping ({highest['optimizer']})"
            axis.axhline(100 * highest["accuracy"], color="#555555", linestyle=":", label=label)
        axis.set_xticks(list(places.values()), [f"{epsilon:g}" if epsilon else "∞ (σ = 0)" for epsilon in places])
        axis.set(title=f"SST-2, MiniLM, {title}", xlabel=f"ε at δ = {DELTA:g}")
        axis.set_xlim(-0.4, len(places) - 0.6)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel("accuracy, % (mean and range of the seeds)")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    print(file)


def main() -> None:
    """Prepare a folder, tune, run more seeds, time, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the prepared folder")
    parser.add_argument("--prepare", action="store_true", help="write it")
    parser.add_argument("--sst2", type=Path, help="with --prepare: folder of train.tsv and dev.tsv")
    parser.add_argument("--public", type=Path, help="with --prepare: file of public texts, one a line")
    parser.add_argument("--model", type=Path, help="with --prepare: folder of the encoder and its tokenizer")
    parser.add_argument("--tune", action="store_true", help="run all learning rates on seed 0")
    parser.add_argument("--seeds", type=int, default=0, help="more seeds of the best learning rates")
    parser.add_argument(
        "--time", action="store_true", help=f"run the best at ε = {TIMED_EPSILON:g} again, for the seconds"
    )
    parser.add_argument("--figure", nargs="?", type=Path, const=FIGURE, help="draw what is known")
    parser.add_argument(
        "--only", nargs="*", metavar="WORD", help="methods with all of these words, such as: opacus lora"
    )
    parser.add_argument("--epsilon", nargs="*", type=float, help="only these (0: no noise)")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="of the runs only I, I + N, …")
    parser.add_argument(
        "--beside", metavar="NAME", help="other runs share the GPU: write to results/NAME.json, no seconds"
    )
    parser.add_argument(
        "--merge", nargs="*", default=[], metavar="NAME", help="first take over rows of results/NAME.json"
    )
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further run begins")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--records", type=int, default=0, help="only the first of each part (0: all), to try it")
    parser.add_argument("--length", type=int, default=32, help="tokens that a text is cut to")
    parser.add_argument("--results", default="private_utility", metavar="NAME", help="results/NAME.json")
    options, begun = parser.parse_args(), time.perf_counter()
    if options.prepare:
        prepare(options.data, options.sst2, options.public, options.model)
        return
    warnings.simplefilter("ignore")
    rows = _known(options.results)
    known = {_key(row) for row in rows}
    rows += [row for name in options.merge for row in _known(name) if _key(row) not in known]
    begin, name = (len(rows), options.beside) if options.beside else (0, options.results)
    rows += _known(options.beside) if options.beside else []
    part, parts = map(int, options.part.split("/"))
    texts: dict[str, Texts] = {}
    warm: set[tuple[str, ...]] = set()

    def go(trial: Trial, again: bool = False) -> None:
        same = [row for row in rows if _key(row) == _key(asdict(trial))]
        if any(row["seconds"] is not None or not again for row in same) or time.perf_counter() - begun > options.limit:
            return
        if not texts:
            texts.update(load(options.data, DEVICE, options.length, options.records or 10**9))
        kind = (trial.library, trial.parameters, trial.optimizer)
        if kind not in warm and not options.beside:  # kernels that are built at their first call are not timed
            train(replace(trial, steps=3), texts, options.data)
        warm.add(kind)
        row = train(trial, texts, options.data)
        row |= {"seconds": None, "seconds per later step": None} if options.beside else {}
        rows[:] = [row for row in rows if row not in same]
        rows.append(row)
        print(json.dumps(row), flush=True)
        write(name, rows[begin:])

    def wanted(method: Trial) -> bool:
        words = f"{method.library} {method.parameters} {method.optimizer}".split()
        return set(options.only or ()) <= set(words) and (
            options.epsilon is None or (method.epsilon or 0.0) in options.epsilon
        )

    shape = {"steps": options.steps, "batch": options.batch, "records": options.records, "length": options.length}
    asked = [(replace(method, **shape), rates) for method, rates in methods() if wanted(method)]
    if options.tune:
        tuned = [(method, rates) for method, rates in asked if TUNED[method.epsilon] == method.epsilon]
        for trial in [replace(method, lr=rate) for method, rates in tuned for rate in rates][part::parts]:
            go(trial)
    chosen = [found for method, _ in asked if (found := best(rows, method))]
    for trial in [replace(one, seed=1 + seed) for seed in range(options.seeds) for one in chosen][part::parts]:
        go(trial)
    if options.time:
        timed = [one for one in chosen if one.epsilon == TIMED_EPSILON or one.library == "plain"]
        for one in timed:
            go(replace(one, seed=1), again=True)
            if one.library == "opacus":
                go(replace(one, library="opacus hooks", seed=1), again=True)
    if options.merge and not options.beside:
        write(name, rows)
    for row in table(rows):
        print(json.dumps(row))
    if options.figure:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
