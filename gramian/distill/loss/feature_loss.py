"""Losses that pull the residual stream of the student at some layers towards that of the teacher.

Legend: B windows, T tokens, N = B·T, D width of the student, E of the teacher.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from gramian.core.dtypes import wide_dtype
from gramian.core.errors import GramianError
from gramian.distill.loss.features import Projector, cka_loss

FeatureKind = Literal["cka", "increments", "hidden"]


class FeatureLoss(nn.Module):
    """The mean over pairs (student layer, teacher layer) of a distance between their residual streams.

    "cka": 1 − linear CKA of the two streams. "increments": 1 − CKA of the differences between the streams of successive pairs.
    "hidden": mean square of W h_s + b − h_t, with a trained map W, b for each pair.

    Example:
        >>> loss = FeatureLoss("cka", [(1, 2), (2, 4)], width=8, teacher_width=16)
        >>> streams = {1: torch.randn(2, 5, 8), 2: torch.randn(2, 5, 8)}
        >>> targets = {2: torch.randn(2, 5, 16), 4: torch.randn(2, 5, 16)}
        >>> loss(streams, targets, torch.ones(2, 5, dtype=torch.bool)).shape
        torch.Size([])
    """

    def __init__(
        self, kind: FeatureKind, pairs: Sequence[tuple[int, int]], width: int, teacher_width: int, seed: int = 0
    ) -> None:
        """Make the loss and, for "hidden", its trained projectors from the student's to the teacher's width.

        Args:
            kind: the distance: "cka", "increments" or "hidden".
            pairs: (student layer, teacher layer); 0 is the embedding, l is after transformer block l.
            width: channels D of the student.
            teacher_width: channels E of the teacher.
            seed: seed of the projectors' initial weights.

        Raises:
            GramianError: if there are too few pairs, a layer occurs twice, or layers do not rise for "increments".
        """
        super().__init__()
        self.kind, self.pairs = kind, tuple((int(s), int(t)) for s, t in pairs)
        if len(self.pairs) < (2 if kind == "increments" else 1):
            raise GramianError(
                f'teacher.feature_pairs: expected {2 if kind == "increments" else 1} or more for "{kind}"'
            )
        if len({s for s, _ in self.pairs}) < len(self.pairs) or len({t for _, t in self.pairs}) < len(self.pairs):
            raise GramianError("teacher.feature_pairs: names a layer twice; expected each once")
        if kind == "increments" and any(sorted(layers) != list(layers) for layers in zip(*self.pairs, strict=True)):
            raise GramianError(
                'teacher.feature_pairs: goes back in depth; expected layers that rise on both sides for "increments"'
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # Not a ModuleList: `blocks_of` takes the largest one for the model's blocks, and projectors may be larger.
            self.projectors = nn.ModuleDict(
                {f"{s}-{t}": Projector(width, teacher_width) for s, t in self.pairs if kind == "hidden"}
            )

    @property
    def student_layers(self) -> tuple[int, ...]:
        """Numbers of the student's layers whose streams `forward` needs."""
        return tuple(s for s, _ in self.pairs)

    def forward(self, student: Mapping[int, Tensor], teacher: Mapping[int, Tensor], counted_BT: Tensor) -> Tensor:
        """The mean distance over all pairs of layers, 0-dim, over the tokens where `counted_BT` is true.

        `student` is {layer: [B, T, D]}, `teacher` {layer: [B, T, E]} without gradient; raises if the teacher lacks a layer.
        """
        missing = [layer for _, layer in self.pairs if layer not in teacher]
        if missing:
            raise GramianError(
                f"teacher: its signal has no layer {missing[0]}; expected a cache with it, or a live teacher"
            )
        counted_N = counted_BT.flatten()
        x = [student[s].flatten(0, 1) for s, _ in self.pairs]
        # A cache may be narrower than the student, and differences of narrow numbers have few digits.
        dtype = wide_dtype(*x, *(teacher[t] for _, t in self.pairs))
        y = [teacher[t].flatten(0, 1).detach().to(dtype) for _, t in self.pairs]
        if self.kind != "hidden":
            x = [stream.to(dtype) for stream in x]
        if self.kind == "increments":
            x, y = ([after - before for before, after in pairwise(h)] for h in (x, y))
        if self.kind != "hidden":
            return torch.stack([cka_loss(a, b, counted_N) for a, b in zip(x, y, strict=True)]).mean()
        total = counted_N.sum().clamp(min=1)
        parts = [
            ((project(a).to(dtype) - b).square().mean(1) * counted_N).sum() / total
            for project, a, b in zip(self.projectors.values(), x, y, strict=True)
        ]
        return torch.stack(parts).mean()
