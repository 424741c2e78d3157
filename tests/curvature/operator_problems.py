"""Small models with batches that curvature operators are compared on, and the same data as the dense oracle wants it.

Batches are uneven, some labels are ignored, some tokens weigh more: what an operator can get wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gramian.curvature import EmpiricalFisherOperator, GGNOperator, HessianOperator
from gramian.linalg.spectra.operator import Operator
from gramian.models import GPT, GPTConfig
from tests.curvature.small import Net
from tests.kit import models
from tests.kit.toys import Toy
from tests.oracles import dense_curvature

IGNORE = -100


@dataclass(frozen=True)
class Problem:
    """A float64 model, its batches, and what they come to."""

    model: nn.Module
    batches: list[Any]
    """As users write them."""
    forward: Callable[[nn.Module], Tensor]
    """Outputs of all batches, one sample after another."""
    targets: Tensor
    """Aligned with them."""
    weights: Tensor
    loss: str = "cross_entropy"


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """The same float64 weights every time."""
    return models.seeded(lambda: build().double(), 0.3)


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _ids(count: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


def _split(*tensors: Tensor, sizes: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(t.split(sizes) for t in tensors), strict=True))


def mlp() -> Problem:
    """Classes, one per sample."""
    x, y = _numbers(7, 4), _ids(3, 7)
    y[2] = IGNORE
    model = _seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    return Problem(model, _split(x, y, sizes=(4, 1, 2)), lambda m: m(x), y, (y != IGNORE).double())


def gain_net() -> Toy:
    """One number for all features, of no axis."""
    return Toy(lambda net, x: net.scale * x, scale=nn.Parameter(torch.tensor(1.0)))


def gain() -> Problem:
    """A parameter without an axis."""
    x, y = _numbers(5, 3), _ids(3, 5)
    model = _seeded(lambda: nn.Sequential(nn.Linear(3, 2), gain_net(), nn.Tanh(), nn.Linear(2, 3)))
    return Problem(model, _split(x, y, sizes=(2, 3)), lambda m: m(x), y, torch.ones(5, dtype=torch.float64))


def regression() -> Problem:
    """Numbers at every position, with fractional weights."""
    x, y, w = _numbers(5, 3, 4), _numbers(5, 3, 2, seed=1), _numbers(5, 3, seed=2).abs()
    w[0] = w[1, 2] = 0.0
    model = _seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)))
    return Problem(model, _split(x, y, w, sizes=(3, 2)), lambda m: m(x), y, w, "mse")


def words() -> Problem:
    """Tokens with weights and ignored labels; a table, a norm, layers with and without a bias; head and table are tied."""
    x, y = _ids(5, 4, 3), _ids(5, 4, 3, seed=1)
    w = torch.tensor([[1.0, 1, 1], [2, 2, 2], [0, 1, 0.5], [1, 0, 1]], dtype=torch.float64)
    y[0, 1] = IGNORE
    model = _seeded(lambda: Net(tied=True, words=5, width=3))
    return Problem(model, _split(x, y, w, sizes=(1, 3)), lambda m: m(x), y, w * (y != IGNORE))


def gpt() -> Problem:
    """Attention that torch would fuse, and dropout, which must rest."""
    x, y = _ids(5, 3, 4), _ids(5, 3, 4, seed=1)
    y[1, 2:] = IGNORE
    config = GPTConfig(vocabulary=5, context=4, layers=1, width=4, heads=2, dropout=0.3)
    return Problem(_seeded(lambda: GPT(config)), _split(x, y, sizes=(2, 1)), lambda m: m(x), y, (y != IGNORE).double())


def hugging_face() -> Problem:
    """A causal model: position t predicts label t+1, prompts are -100 and the end is padding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=6, n_positions=5, n_embd=4, n_layer=1, n_head=2, n_inner=5, bos_token_id=0, eos_token_id=0
    )
    ids = _ids(6, 3, 5)
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    labels = ids.masked_fill(mask == 0, IGNORE)
    labels[0, :2] = IGNORE
    batches = [
        {"input_ids": i, "attention_mask": m, "labels": y} for i, m, y in _split(ids, mask, labels, sizes=(2, 1))
    ]
    return Problem(
        _seeded(lambda: GPT2LMHeadModel(config)),
        batches,
        lambda m: m(input_ids=ids, attention_mask=mask).logits[:, :-1],
        labels[:, 1:],
        (labels[:, 1:] != IGNORE).double(),
    )


PROBLEMS = {made.__name__: cache(made) for made in (mlp, gain, regression, words, gpt, hugging_face)}


def hessian(problem: Problem, parameters: Any = None, batches: Any = None) -> HessianOperator:
    return HessianOperator(problem.model, problem.loss, batches or problem.batches, parameters)


def ggn(problem: Problem, parameters: Any = None, batches: Any = None) -> GGNOperator:
    return GGNOperator(problem.model, batches or problem.batches, parameters, loss=problem.loss)


def fisher_of_sequences(problem: Problem, parameters: Any = None, batches: Any = None) -> EmpiricalFisherOperator:
    return EmpiricalFisherOperator(problem.model, batches or problem.batches, parameters, loss=problem.loss)


def fisher_of_tokens(problem: Problem, parameters: Any = None, batches: Any = None) -> EmpiricalFisherOperator:
    return EmpiricalFisherOperator(
        problem.model, batches or problem.batches, parameters, per="token", loss=problem.loss
    )


OPERATORS = {made.__name__: made for made in (hessian, ggn, fisher_of_sequences, fisher_of_tokens)}


@cache
def dense(operator: str, problem: str) -> Tensor:
    """The matrix by the oracle."""
    told = PROBLEMS[problem]()
    given = (told.model, told.forward, told.targets, told.weights, told.loss)
    if operator == "hessian":
        return dense_curvature.dense_hessian(*given)
    if operator == "ggn":
        return dense_curvature.dense_ggn(*given)
    return dense_curvature.dense_empirical_fisher(*given, per=operator.removeprefix("fisher_of_").removesuffix("s"))


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Within a tolerance of the largest entry, which is not zero."""
    assert actual.shape == expected.shape and expected.abs().max() > 1e-6
    error = float((actual - expected).abs().max() / expected.abs().max())
    assert error < tolerance, error


def probe(operator: Operator, columns: int = 2, seed: int = 3) -> Tensor:
    """Y, [n, k]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(operator.dim, columns, dtype=torch.float64, generator=generator).to(operator.dtype)
