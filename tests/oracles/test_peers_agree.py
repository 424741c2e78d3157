"""The single-sample loop equals torch.func, Opacus and BackPACK, in float64, on every model each of them supports.

A case that a peer does not support is expected to fail, with the reason; the day it agrees, the entry must move.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from gramian.oracles import single_sample
from tests.kit.models import CASES, Case
from tests.oracles import sample_statistics
from tests.oracles.peers import backpack_norms, opacus_norms, torch_func_gradients

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

OPACUS_AGREES = (
    "mlp", "linear_3d", "linear_4d", "hf_llama", "vit", "conv2d", "conv1d", "conv3d", "reused", "tied_linears", "lora",
    "rmsnorm", "partially_frozen", "pooled",
)  # fmt: skip
OPACUS_DIFFERS = {
    "gpt": "a layer that sees one row has one gradient, not B",
    "tied_gpt": "a layer that sees one row has one gradient, not B",
    "hf_gpt2": "a layer that sees one row has one gradient, not B",
    "broadcast": "a layer that sees one row has one gradient, not B",
    "windows": "a layer that sees W·B rows has W·B gradients, not B",
    "convnet": "padding_mode is ignored: the input is unfolded with zeros",
    "padded_embedding": "padding_idx is ignored: the row of the padding token gets a gradient",
    "mha": "nn.MultiheadAttention must be replaced by Opacus' own module",
    "unused": "a parameter that is not reached has no grad_sample",
}
BACKPACK_AGREES = ("mlp", "linear_3d", "linear_4d", "conv2d", "lora")
BACKPACK_DIFFERS = {
    "gpt": "no BatchL2Grad for LayerNorm; for Embedding in float32 only",
    "tied_gpt": "no BatchL2Grad for LayerNorm; for Embedding in float32 only",
    "hf_gpt2": "no BatchL2Grad for LayerNorm and Conv1D; for Embedding in float32 only",
    "hf_llama": "no BatchL2Grad for LlamaRMSNorm; for Embedding in float32 only",
    "vit": "no BatchL2Grad for LayerNorm and for raw parameters",
    "convnet": "padding by name is not understood; no BatchL2Grad for norms",
    "conv1d": "the weight of a grouped convolution is unfolded as if it had one group",
    "conv3d": "the weight of a grouped convolution is unfolded as if it had one group",
    "reused": "a module called more than once is not supported",
    "tied_linears": "the uses of a tied weight are not added before squaring",
    "padded_embedding": "padding_idx is not supported",
    "rmsnorm": "no BatchL2Grad for RMSNorm",
    "mha": "no BatchL2Grad for LayerNorm and MultiheadAttention",
    "partially_frozen": "no BatchL2Grad for LayerNorm",
    "unused": "a parameter that is not reached has no batch_l2",
    "broadcast": "a layer that sees one row has one norm, not B; for Embedding in float32 only",
    "windows": "a layer that sees W·B rows has W·B norms, not B",
    "pooled": "no BatchL2Grad for LayerNorm; for Embedding in float32 only",
}


def _cases(agrees: tuple[str, ...], differs: dict[str, str]) -> list[object]:
    return [pytest.param(CASES[name], id=name) for name in agrees] + [
        pytest.param(CASES[name], id=name, marks=pytest.mark.xfail(strict=True, reason=reason))
        for name, reason in differs.items()
    ]


def _problem(case: Case) -> tuple[torch.nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]:
    batch = case.make_batch(4, torch.float64, torch.Generator().manual_seed(1))
    return case.make(torch.float64), partial(case.loss, reduction="sum"), batch


def _assert_equal(case: Case, actual: object, expected: object) -> None:
    tolerance = 1e-5 if case.computes_in_float32 else 1e-9
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-3 * tolerance)


@pytest.mark.parametrize("agrees, differs", [(OPACUS_AGREES, OPACUS_DIFFERS), (BACKPACK_AGREES, BACKPACK_DIFFERS)])
def test_every_case_is_listed_once(agrees: tuple[str, ...], differs: dict[str, str]) -> None:
    assert sorted([*agrees, *differs]) == sorted(CASES)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_gradient_of_the_loop_equals_torch_func(case: Case) -> None:
    model, loss, batch = _problem(case)
    expected = torch_func_gradients(model, loss, batch)
    _assert_equal(case, single_sample.per_sample_gradients(model, loss, batch), expected)


@pytest.mark.parametrize("case", _cases(OPACUS_AGREES, OPACUS_DIFFERS))
def test_norms_of_the_loop_equal_opacus(case: Case) -> None:
    model, loss, batch = _problem(case)
    _assert_equal(case, sample_statistics.per_sample_norms(model, loss, batch), opacus_norms(model, loss, batch))


@pytest.mark.parametrize("case", _cases(BACKPACK_AGREES, BACKPACK_DIFFERS))
def test_norms_of_the_loop_equal_backpack(case: Case) -> None:
    model, loss, batch = _problem(case)
    _assert_equal(case, sample_statistics.per_sample_norms(model, loss, batch), backpack_norms(model, loss, batch))
