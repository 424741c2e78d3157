"""Checksums of values: equal for equal values, kernel and twin alike, and different for every kind of change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramian.kernels.checksums import CHUNK, checksums, checksums_kernel, checksums_twin
from tests.kernels import interpreted, random
from tests.kit.matrix import FULL

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_is_its_twin(dtype):
    tensors = [
        random(n, seed=n).to(dtype) for n in (0, 1, 2, 7, 1024, *((CHUNK, 2 * CHUNK + 5) if FULL else (CHUNK + 5,)))
    ]
    tensors[3][::2] = -0.0
    tensors[4][3] = float("nan")
    assert interpreted(checksums_kernel, tensors).tolist() == checksums_twin(tensors).tolist()


def test_the_checksum_is_a_sum_of_words_with_odd_multipliers_of_their_own():
    """The bits of 1.5 are 255 · 2²²: where one element is 1.5, the checksum is 255 · 2²² m, modulo 2⁶⁴."""
    alone = checksums(list(1.5 * torch.eye(40))).tolist()
    multipliers = [number % 2**64 * pow(255, -1, 2**64) % 2**64 >> 22 for number in alone]
    assert len(set(multipliers)) == 40 and all(m % 2 for m in multipliers)
    assert int(checksums([torch.full((40,), 1.5)])) % 2**64 == sum(alone) % 2**64


CHANGES = {
    "negated": lambda t: t.neg(),
    "reversed": lambda t: t.flip(0),
    "two swapped": lambda t: torch.cat([t[[1, 0]], t[2:]]),
    "scaled": lambda t: t * 100,
    "two negated": lambda t: torch.cat([-t[:2], t[2:]]),
    "one changed by a bit": lambda t: torch.cat([t[:1] * (1 + torch.finfo(t.dtype).eps), t[1:]]),
    "another's sign": lambda t: torch.cat([t[:-1], -t[-1:]]),
    "last two swapped": lambda t: torch.cat([t[:-2], t[[-1, -2]]]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [2, 3, 64, CHUNK + 2, 3 * CHUNK])
@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_show(dtype, size, change):
    before = (random(size, seed=size).abs() + torch.linspace(1, 2, size)).to(dtype)
    after = CHANGES[change](before)
    assert not torch.equal(before, after)
    assert int(checksums([before])) != int(checksums([after]))


@settings(deadline=None, max_examples=50)
@given(size=st.integers(1, 300), seed=st.integers(0, 2**20), dtype=st.sampled_from(DTYPES), data=st.data())
def test_equal_values_have_equal_checksums_and_others_have_not(size, seed, dtype, data):
    before = random(size, seed=seed).to(dtype)
    before[data.draw(st.integers(0, size - 1))] = 0.0
    copied = torch.empty(size + 1, dtype=dtype)[1:].copy_(before)  # at another address, within a word
    copied[copied == 0] = -0.0
    assert checksums([before, copied]).unique().numel() == 1
    place = data.draw(st.integers(0, size - 1))
    copied[place] = copied[place] + 1
    assert checksums([before, copied]).unique().numel() == 2


def test_zeros_have_checksum_0_and_tensors_of_all_kinds_come_in_their_order():
    tensors = [torch.zeros(5), -torch.zeros(3).double(), random(9), torch.zeros(3).half(), random(9).half(), random(4)]
    got = checksums(tensors)
    assert got.dtype == torch.int64
    assert got.tolist() == [int(checksums([flat])) for flat in tensors]
    assert [number == 0 for number in got.tolist()] == [True, True, False, True, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [1, 5, CHUNK])
def test_only_the_first_elements_count_where_it_is_asked_for(most, dtype):
    tensors = [random(n, 3, seed=n).to(dtype) for n in (0, 1, 3, CHUNK)]
    cut = [t.flatten()[:most].clone() for t in tensors]
    assert checksums(tensors, most).tolist() == checksums(cut).tolist()
    assert interpreted(checksums_kernel, tensors, most).tolist() == checksums(cut).tolist()
