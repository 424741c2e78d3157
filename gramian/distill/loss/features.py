r"""Linear CKA between the features of a student and a teacher, as a measure and as a loss.

Linear CKA of column-centred X [N, D] and Y [N, E]:

    CKA = ‖XᵀY‖_F² / (‖XᵀX‖_F ‖YᵀY‖_F),        HSIC(X, Y) = ‖XᵀY‖_F²

It is 1 for features that agree up to an orthogonal map and a scale, and does not change under either. With few tokens for many
channels it is near 1 for unrelated features too. The debiased CKA replaces each HSIC by its unbiased estimate (Song et al.
2012), which for K = XXᵀ and L = YYᵀ with their diagonals set to 0, and n tokens, is

    HSIC₁ = [tr KL + (1ᵀK1)(1ᵀL1) / (n−1)(n−2) − 2·1ᵀKL1 / (n−2)] / n(n−3).

Both are computed without an N × N matrix: tr KL = ‖XᵀY‖_F² − Σ_i ‖x_i‖²‖y_i‖², and K1 = X(Xᵀ1) − ‖x_i‖².
Cost: O(N·(D² + E² + D·E)) FLOPs and O(D² + E²) memory, in float32 or wider, also under autocast.

Rows of X and Y must be the same tokens in the same order.

Legend: N tokens, D channels of the student, E channels of the teacher.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from gramian.core.errors import GramianError
from gramian.linalg.wide import exact_float32, wide

TINY = 1e-12
"""A HSIC (‖XᵀY‖_F² of centred features with a largest entry of 1 or more) up to this counts as 0: features are constant."""


def linear_cka(x_ND: Tensor, y_NE: Tensor, counted_N: Tensor | None = None, *, standardise: bool = False) -> Tensor:
    """Linear CKA of two sets of features of the same tokens, from 0 to 1; 0 if one of them is constant.

    Args:
        x_ND: features of the first model, [N, D] or [B, T, D].
        y_NE: features of the second model, [N, E] or [B, T, E].
        counted_N: True for the tokens that count, [N] or [B, T]; None: all. No shape depends on its values.
        standardise: divide every channel by its standard deviation, so that a few huge channels do not dominate; CKA is
            then invariant to the scale of every channel, but no longer to orthogonal maps.

    Returns:
        A 0-dim tensor, differentiable in both features.

    Raises:
        GramianError: if the number of tokens of the arguments differs.
    """
    with torch.autocast(x_ND.device.type, enabled=False), _precise():
        x, y, _ = _prepared(x_ND, y_NE, counted_N, standardise)
        return _ratio(_squared_norm(x, y), _squared_norm(x, x), _squared_norm(y, y))


def debiased_cka(x_ND: Tensor, y_NE: Tensor, counted_N: Tensor | None = None, *, standardise: bool = True) -> Tensor:
    """CKA from unbiased estimates of HSIC: about 0 for unrelated features, however few the tokens; it can be below 0.

    Arguments and result are those of `linear_cka`; with fewer than 4 counted tokens the result is 0.
    """
    with torch.autocast(x_ND.device.type, enabled=False), _precise():
        x, y, n = _prepared(x_ND, y_NE, counted_N, standardise)
        cka = _ratio(_unbiased(x, y, n), _unbiased(x, x, n), _unbiased(y, y, n))
        return torch.where(n >= 4, cka, 0.0)


def cka_loss(x_ND: Tensor, y_NE: Tensor, counted_N: Tensor | None = None, *, standardise: bool = False) -> Tensor:
    """The loss 1 − CKA of student features x [N, D] and teacher features y [N, E], with the arguments of `linear_cka`."""
    return 1.0 - linear_cka(x_ND, y_NE, counted_N, standardise=standardise)


class Projector(nn.Module):
    """A linear map from the student's features to the teacher's, trained with the student: W h_s + b ≈ h_t."""

    def __init__(self, student: int, teacher: int) -> None:
        """Make the map from width `student` D to `teacher` E: W is drawn from N(0, 1/D) by the global generator, b is 0."""
        super().__init__()
        self.linear = nn.Linear(student, teacher)
        nn.init.normal_(self.linear.weight, std=student**-0.5)
        nn.init.zeros_(self.linear.bias)

    def forward(self, student_ND: Tensor) -> Tensor:
        """Map student features [..., D] to [..., E]."""
        projected_NE: Tensor = self.linear(student_ND)
        return projected_NE


def _precise() -> AbstractContextManager[None]:
    """Context manager that switches TF32 off; inside a compiled graph, which cannot change the precision, it does nothing."""
    return nullcontext() if torch.compiler.is_compiling() else exact_float32()


def _prepared(x: Tensor, y: Tensor, counted: Tensor | None, standardise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Centre and scale x and y (see `_centred`) and set tokens that do not count to zero.

    Returns x [N, D], y [N, E] and the number of counted tokens.
    """
    if x.shape[:-1] != y.shape[:-1] or (counted is not None and counted.numel() * x.shape[-1] != x.numel()):
        shapes = [list(t.shape) for t in (x, y, *(() if counted is None else (counted,)))]
        raise GramianError(
            f"features: got the shapes {shapes}; expected the same tokens, that is the same leading sizes"
        )
    if counted is None:
        counted = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    counted_N1 = counted.flatten().bool().unsqueeze(1)
    count = counted_N1.sum()
    x_ND, y_NE = (_centred(t.flatten(0, -2), counted_N1, count, standardise) for t in (x, y))
    return x_ND, y_NE, count


def _centred(t_ND: Tensor, counted_N1: Tensor, count: Tensor, standardise: bool) -> Tensor:
    """Features with columns of mean 0, scaled to a largest entry of 1; with `standardise`, every column has variance 1.

    The rounding residue of a constant column is set to 0, not scaled up.
    """
    t_ND = torch.where(counted_N1, wide(t_ND), 0.0)
    rounding_D = 4.0 * torch.finfo(t_ND.dtype).eps * t_ND.detach().abs().amax(dim=0)
    t_ND = torch.where(counted_N1, t_ND - t_ND.sum(dim=0) / count.clamp(min=1), 0.0)
    t_ND = torch.where(t_ND.detach().abs().amax(dim=0) > rounding_D, t_ND, 0.0)
    # Neither CKA nor its gradient depends on a common factor.
    t_ND = t_ND / t_ND.detach().abs().amax().clamp(min=torch.finfo(t_ND.dtype).tiny)
    if standardise:
        variance_D = t_ND.square().sum(dim=0) / count.clamp(min=1)
        t_ND = t_ND / torch.where(variance_D > 0, variance_D, 1.0).sqrt()
    return t_ND


def _squared_norm(x_ND: Tensor, y_NE: Tensor) -> Tensor:
    return (x_ND.T @ y_NE).square().sum()


def _unbiased(x_ND: Tensor, y_NE: Tensor, n: Tensor) -> Tensor:
    """n(n−3) times the unbiased estimate HSIC₁ (Song et al. 2012) of centred features x and y of n tokens."""
    n = n.clamp(min=4)
    own_x_N, own_y_N = x_ND.square().sum(dim=1), y_NE.square().sum(dim=1)
    rows_x_N, rows_y_N = x_ND @ x_ND.sum(dim=0) - own_x_N, y_NE @ y_NE.sum(dim=0) - own_y_N
    trace = _squared_norm(x_ND, y_NE) - own_x_N @ own_y_N
    sums = rows_x_N.sum() * rows_y_N.sum() / ((n - 1) * (n - 2))
    return trace + sums - 2.0 * (rows_x_N @ rows_y_N) / (n - 2)


def _ratio(xy: Tensor, xx: Tensor, yy: Tensor) -> Tensor:
    """xy / √(xx·yy) of three HSICs; 0 with gradient 0 if features are constant or an estimate of HSIC is not positive."""
    usable = (xx > TINY) & (yy > TINY)
    size = torch.where(usable, xx, 1.0).sqrt() * torch.where(usable, yy, 1.0).sqrt()
    return torch.where(usable, xy / size, 0.0)
