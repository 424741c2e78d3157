"""Losses that hold layers of the student to layers of the teacher.

Legend: B windows, T tokens, N = B·T, D width of the student, E of the teacher.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.distill.loss.features import Projector, cka_loss, increments
from gramian.linalg.wide import wide_dtype

Kind = Literal["cka", "increments", "hidden"]
Pair = tuple[int, int]


class FeatureLoss(nn.Module):
    """The mean over pairs (student layer, teacher layer) of a distance between what they hold.

    "cka": 1 − linear CKA of the residual streams. "increments": the same of what was added since the pair before; the first
    is the origin. "hidden": mean square of W h_s − h_t, with a trained W for each pair.
    """

    def __init__(self, kind: Kind, pairs: Sequence[Pair], width: int, teacher_width: int, seed: int = 0) -> None:
        """Make the projectors.

        Args:
            kind: of the distance.
            pairs: layers of student and teacher; 0 is the embedding, l is after block l.
            width: of the student.
            teacher_width: of the teacher.
            seed: of the projectors.

        Raises:
            GramianError: if there are too few pairs.
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
            # No ModuleList: the largest of those in a module is taken for its blocks, and projectors may be larger than them.
            self.projectors = nn.ModuleDict(
                {f"{s}-{t}": Projector(width, teacher_width) for s, t in self.pairs if kind == "hidden"}
            )

    @property
    def student_layers(self) -> tuple[int, ...]:
        """That `forward` wants of the student."""
        return tuple(s for s, _ in self.pairs)

    @property
    def teacher_layers(self) -> tuple[int, ...]:
        """That it wants of the teacher."""
        return tuple(t for _, t in self.pairs)

    def forward(self, student: Mapping[int, Tensor], teacher: Mapping[int, Tensor], counted_BT: Tensor) -> Tensor:
        """The distance over the tokens that count.

        Args:
            student: layer -> [B, T, D].
            teacher: layer -> [B, T, E], detached.
            counted_BT: which tokens count.

        Raises:
            GramianError: if the teacher's signal lacks a layer.
        """
        missing = [layer for layer in self.teacher_layers if layer not in teacher]
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
            x, y = (list(increments(dict(enumerate(h))).values()) for h in (x, y))
        if self.kind != "hidden":
            return torch.stack([cka_loss(a, b, counted_N) for a, b in zip(x, y, strict=True)]).mean()
        total = counted_N.sum().clamp(min=1)
        parts = [
            ((project(a).to(dtype) - b).square().mean(1) * counted_N).sum() / total
            for project, a, b in zip(self.projectors.values(), x, y, strict=True)
        ]
        return torch.stack(parts).mean()
