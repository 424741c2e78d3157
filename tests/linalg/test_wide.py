"""Precision of float32 products, whichever of torch's switches the user sets it by."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gramian
from gramian.linalg.wide import exact_convolutions, exact_float32, exact_products, product_rounding, tensor_float32

B = torch.backends
PRODUCTS = ("cuda", "matmul"), ("mkldnn", "matmul")
ALL = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"), *PRODUCTS)

WAYS = {
    "none": "",
    "older": "torch.set_float32_matmul_precision('medium')",
    "allow_tf32": "B.cuda.matmul.allow_tf32 = True",
    "newer": "B.cuda.matmul.fp32_precision = 'tf32'",
    "of all": "B.fp32_precision = 'tf32'",
    "of cuda": "B.cudnn.fp32_precision = 'tf32'",
    "of a CPU": "B.mkldnn.matmul.fp32_precision = 'bf16'",
    "older, then newer": "torch.set_float32_matmul_precision('high'); B.cuda.matmul.fp32_precision = 'ieee'",
    "newer, then older": "B.fp32_precision = 'tf32'; B.cuda.matmul.allow_tf32 = False",
    "all and products": "B.fp32_precision = 'tf32'; B.cuda.matmul.fp32_precision = 'tf32'",
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The settings of a new process, before and after."""
    as_new()
    yield
    as_new()


def as_new() -> None:
    """Set every switch as a new process has it."""
    for switch in ALL:
        torch._C._set_fp32_precision_setter(*switch, "none")
    torch.set_float32_matmul_precision("highest")
    for switch in PRODUCTS:
        torch._C._set_fp32_precision_setter(*switch, "none")
    assert settings()["older"] == "highest"


def settings() -> dict[object, object]:
    """What every switch says: as it is, and without what it inherits."""
    found: dict[object, object] = {}
    for name in ("older", "allow_tf32"):
        try:
            found[name] = torch.get_float32_matmul_precision() if name == "older" else B.cuda.matmul.allow_tf32
        except RuntimeError:
            found[name] = "cannot be read"
    own = {}
    for switch in ALL:  # outer ones first, which the next would inherit
        own[switch] = torch._C._get_fp32_precision_getter(*switch)
        torch._C._set_fp32_precision_setter(*switch, "none")
    for switch, value in own.items():
        torch._C._set_fp32_precision_setter(*switch, value)
    return found | own


@pytest.mark.parametrize("way", WAYS)
def test_products_are_exact_inside_and_every_switch_is_as_it_was_afterwards(way: str) -> None:
    exec(WAYS[way])
    before, rounding = settings(), product_rounding()
    assert rounding == {"none": 0.0, "older": 2.0**-8, "of a CPU": 2.0**-8}.get(way, 2.0**-10)
    for exact in (lambda: exact_products("cpu"), exact_float32):
        with exact():
            assert product_rounding() == 0.0 and torch.get_float32_matmul_precision() == "highest"
            with tensor_float32():
                assert product_rounding() == 2.0**-10 and torch.get_float32_matmul_precision() == "high"
            with exact_convolutions():
                assert not B.cudnn.enabled
            assert product_rounding() == 0.0
        assert settings() == before
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(6, 2))
    with gramian.per_sample_norms(model) as norms:
        model(torch.randn(4, 2, 3)).square().mean().backward()
    assert norms.values.isfinite().all() and settings() == before
