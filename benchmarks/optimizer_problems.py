"""The problems of `optimizer_race`: what is trained, on which data, and what is held out. Everything lies on the GPU.

| problem | model | a step | held out |
|---|---|---|---|
| bytes | GPT of 6 layers of width 384, 11 M parameters | 64 × 256 bytes of the embedded corpus | nats per byte |
| bpe | GPT of 8 layers of width 512, 34 M parameters | 64 × 256 tokens of `text_tokens`, in one epoch | nats per token |
| autoencoder | 784-1000-500-250-30 and back, 2.8 M parameters | 500 images of MNIST | cross entropy per image |
| cnn | three convolutions and two linear layers, 0.5 M parameters | 250 images of MNIST | cross entropy per image |
"""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._timing import RESULTS
from gramian.data import load_windows
from gramian.data.options import DataSection
from gramian.models.gpt import GPT, GPTConfig

BATCH, LENGTH = 64, 256


@dataclass(frozen=True)
class Problem:
    """A model to train, its batches and its losses."""

    name: str
    steps: int
    """Steps of a tuning run."""
    terms: int
    """Loss terms of one batch."""
    model: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Any]]
    """Endless batches for a seed."""
    head: str | None
    """Name of the output layer, which a compiled model hides."""
    loss: Callable[[nn.Module, Any], Tensor]
    held_out: Callable[[nn.Module], float]
    facts: dict[str, Any]
    """What the data are, for the record."""

    def hidden(self, model: nn.Module) -> list[nn.Parameter]:
        """Weights of two dimensions or more of the hidden layers: all but embeddings and the last layer's."""
        weights = [p for n, p in model.named_parameters() if p.dim() > 1 and "embedding" not in n]
        return [p for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2] or weights[:-1]


def load(name: str, data: Path | None) -> Problem:
    """The problem of that name; "bpe" reads the file of `text_tokens`, the others those of MNIST, gzipped."""
    if name == "bytes":
        windows = load_windows(DataSection(limit_bytes=16_000_000, length=LENGTH))
        streams = [torch.from_numpy(w.stream.read(0, len(w.stream))).to("cuda", torch.int16) for w in windows]
        config = GPTConfig(vocabulary=257, context=LENGTH, layers=6, width=384, heads=6)
        return _language("bytes", 800, config, streams[0], streams[1], _anywhere, {"tokens": len(streams[0])})
    assert data is not None, "--data is needed"
    if name == "bpe":
        stored = np.load(data)
        training, validation = (
            torch.from_numpy(stored[part].astype(np.int16)).to("cuda") for part in ("training", "held_out")
        )
        facts = json.loads(stored["facts"].tobytes())
        assert facts == json.loads((RESULTS / "text_tokens.json").read_text()), f"{data}: not the tokens of the results"
        config = GPTConfig(vocabulary=facts["vocabulary"], context=LENGTH, layers=8, width=512, heads=8)
        return _language("bpe", len(training) // (BATCH * LENGTH + BATCH), config, training, validation, _once, facts)
    return _images(name, data)


# ---- language --------------------------------------------------------------------------------------------------------


def _language(
    name: str,
    steps: int,
    config: GPTConfig,
    training: Tensor,
    validation: Tensor,
    begins: Callable[[Tensor, int], Iterator[Tensor]],
    facts: dict[str, Any],
) -> Problem:
    places = torch.arange(LENGTH + 1, device="cuda")
    shown = torch.arange(0, 512 * LENGTH, LENGTH, device="cuda")[:, None] + places

    def batches(seed: int) -> Iterator[Tensor]:
        for begin in begins(training, seed):
            yield training[begin.pin_memory().to("cuda", non_blocking=True)[:, None] + places].long()  # no step waits

    def loss(model: nn.Module, window: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(window[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())

    @torch.no_grad()
    def held_out(model: nn.Module) -> float:
        return sum(float(loss(model, validation[part].long())) for part in shown.split(BATCH)) / (512 // BATCH)

    return Problem(name, steps, BATCH * LENGTH, lambda: GPT(config).to("cuda"), batches, "head", loss, held_out, facts)


def _anywhere(stream: Tensor, seed: int) -> Iterator[Tensor]:
    """Begins of random windows."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(len(stream) - LENGTH - 1, (BATCH,), generator=generator)


def _once(stream: Tensor, seed: int) -> Iterator[Tensor]:
    """Begins of windows that do not overlap, in random order, each once an epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        begins = torch.randperm((len(stream) - 1) // LENGTH, generator=generator) * LENGTH
        yield from begins[: len(begins) // BATCH * BATCH].split(BATCH)


# ---- images ----------------------------------------------------------------------------------------------------------


def _images(name: str, folder: Path) -> Problem:
    def read(file: str, begin: int) -> Tensor:
        raw = gzip.decompress((folder / f"{file}.gz").read_bytes())
        return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8)[begin:].copy()).to("cuda")

    x, y = read("train-images-idx3-ubyte", 16).view(-1, 784) / 255, read("train-labels-idx1-ubyte", 8).long()
    test_x, test_y = read("t10k-images-idx3-ubyte", 16).view(-1, 784) / 255, read("t10k-labels-idx1-ubyte", 8).long()
    size = 500 if name == "autoencoder" else 250

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            for part in torch.randperm(len(x), generator=generator).to("cuda").split(size):
                yield x[part], y[part]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        with torch.autocast("cuda", torch.bfloat16):
            out = model(images)
        if name == "cnn":
            return F.cross_entropy(out.float(), labels)
        return F.binary_cross_entropy_with_logits(out.float(), images, reduction="sum") / len(images)

    @torch.no_grad()
    def held_out(model: nn.Module) -> float:
        model.eval()
        parts = torch.arange(len(test_x), device="cuda").split(2000)
        found = sum(float(loss(model, (test_x[part], test_y[part]))) for part in parts) / len(parts)
        model.train()
        return found

    make = _autoencoder if name == "autoencoder" else _cnn
    facts = {"training": len(x), "held_out": len(test_x)}
    return Problem(
        name,
        1200,
        size,
        lambda: make().to("cuda"),
        batches,
        "13",
        loss,
        held_out,
        facts,
    )


def _autoencoder() -> nn.Module:
    widths = [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    layers: list[nn.Module] = []
    for place, (into, out) in enumerate(zip(widths, widths[1:], strict=False)):
        layers += [nn.Linear(into, out)] + ([nn.Tanh()] if place not in (3, 7) else [])
    return nn.Sequential(*layers)


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 9, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
