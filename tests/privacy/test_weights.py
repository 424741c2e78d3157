"""The digest of a model's weights: any bit of any tensor changes it, and how a tensor lies in memory does not."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gramian.parallel.process_grid import ProcessGrid
from gramian.privacy.audit import weights_digest
from gramian.privacy.audit.weights_digest import weight_digest
from tests.kit.matrix import examples

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]


class Tensors(nn.Module):
    """A parameter that trains, and a buffer of every kind."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(6, 4, generator=generator))
        for dtype in DTYPES:
            values = torch.randint(0, 2, (5, 3), generator=generator).to(dtype)
            self.register_buffer(f"of_{str(dtype)[6:]}", values)


def digest(model: nn.Module, optimizer: Any = None) -> int:
    optimizer = optimizer or torch.optim.SGD([model.w], lr=0.1)
    processes, process, found = weight_digest(model, optimizer, {"w": model.w}, ProcessGrid()).tolist()
    assert (processes, process) == (1, 0)
    return found


def flipped(t: Tensor, bit: int) -> None:
    data = t.detach().view(-1)
    data = torch.view_as_real(data).view(-1) if data.is_complex() else data
    octets = data.view(torch.uint8)
    octets[bit // 8 % len(octets)] ^= 1 if t.dtype == torch.bool else 1 << bit % 8


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_every_bit_counts(data: st.DataObject) -> None:
    model = Tensors()
    before = digest(model)
    tensors = dict(model.state_dict())
    name = data.draw(st.sampled_from(sorted(tensors)))
    bit = data.draw(st.integers(0, 8 * tensors[name].nbytes - 1))
    flipped(tensors[name], bit)
    assert digest(model) != before
    flipped(tensors[name], bit)
    assert digest(model) == before


def test_names_and_places_count_and_strides_do_not() -> None:
    model = Tensors()
    before = digest(model)
    moved = copy.deepcopy(model)
    moved.w.data = moved.w.data.T.contiguous().T
    assert digest(moved) == before
    moved.w.data = moved.w.data.flip(0)
    assert digest(moved) != before
    renamed = copy.deepcopy(model)
    renamed._buffers["other"] = renamed._buffers.pop("of_float64")
    assert digest(renamed) != before


def test_signs_that_flip_together_do_not_cancel() -> None:
    model = Tensors()
    before = digest(model)
    model.w.data.neg_()
    assert digest(model) != before


@pytest.mark.parametrize("chunk", [1, 7, 24])
def test_tensors_longer_than_a_chunk_count_to_their_end(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_digest, "CHUNK", chunk)
    model = Tensors()
    before = digest(model)
    for place in range(24):
        other = copy.deepcopy(model)
        other.w.data.view(-1)[place] += 1
        assert digest(other) != before
    other = copy.deepcopy(model)
    other.w.data = other.w.data.view(-1).roll(chunk).view(6, 4)
    assert chunk == 24 or digest(other) != before


def test_the_state_of_the_optimizer_counts_and_its_options_do_not() -> None:
    model = Tensors()
    optimizer = torch.optim.Adam([model.w], lr=0.1)
    model.w.grad = torch.ones_like(model.w)
    optimizer.step()
    before = digest(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    assert digest(model, optimizer) == before
    for name in ("step", "exp_avg", "exp_avg_sq"):
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][0][name] += 1
        other = torch.optim.Adam([model.w], lr=0.1)
        other.load_state_dict(state)
        assert digest(model, other) != before, name


def test_shards_are_of_their_process_and_number() -> None:
    model = Tensors()
    parallel = ProcessGrid(2, 4, kind="fsdp2")
    found = weight_digest(model, torch.optim.SGD([model.w], lr=0.1), {"w": model.w}, parallel)
    assert found.tolist() == [4, 2, digest(model)]
