"""ChaCha20: RFC 8439's vector, three implementations word for word, and normals that no split can change."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gramian.core.errors import GramianError
from gramian.kernels import chacha, normal_tail

KEY = bytes(range(32))
RFC_NONCE = int.from_bytes(bytes.fromhex("000000090000004a00000000"), "little")
# RFC 8439, section 2.3.2: the block with counter 1.
RFC_BLOCK = """
    e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3
    466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2
"""


def stream(key, nonce, start, count):
    """The oracle: `cryptography` from the beginning of the block that holds `start`."""
    first = start // 16
    cipher = Cipher(algorithms.ChaCha20(key, first.to_bytes(4, "little") + nonce.to_bytes(12, "little")), mode=None)
    text = cipher.encryptor().update(bytes(4 * (start % 16 + count)))
    return np.frombuffer(text, "<u4")[start % 16 :]


def test_words_are_those_of_rfc_8439():
    want = [int(word, 16) for word in RFC_BLOCK.split()]
    assert chacha.words(KEY, RFC_NONCE, 16, 16).tolist() == want
    assert chacha.numpy_blocks(KEY, RFC_NONCE, 1, 1).ravel().tolist() == want


@pytest.mark.parametrize("start, count", [(0, 0), (0, 1), (5, 40), (15, 2), (2**35 - 9, 30), (2**36 - 17, 17)])
def test_words_and_the_twin_are_those_of_cryptography_at_any_place(start, count, monkeypatch):
    nonce = (1 << 95) + 0x1234567890ABCDEF01
    want = stream(KEY, nonce, start, count)
    got = chacha.words(KEY, nonce, start, count)
    assert got.dtype == torch.uint32 and np.array_equal(got.numpy(), want)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)  # as where it is not installed
    assert np.array_equal(chacha.words(KEY, nonce, start, count).numpy(), want)


def test_the_twin_works_in_chunks(monkeypatch):
    monkeypatch.setattr(chacha, "_CHUNK", 64)
    assert np.array_equal(chacha.numpy_blocks(KEY, 3, 2, 11).ravel(), stream(KEY, 3, 32, 176))


INTERPRETED = """
import sys
import numpy as np, torch
before = set(sys.modules)
from gramian.kernels import chacha, normal_tail
assert not {"triton", "cryptography"} & (set(sys.modules) - before), "loaded on first use only"
from gramian.kernels import _triton_chacha
key, nonce = bytes(range(255, 223, -1)), (7 << 64) + 2**63 + 5
words = chacha._arguments(key, nonce)
def add_normals(tensor, start, std):
    scales = torch.tensor([std, 1.0], dtype=torch.float64)
    _triton_chacha.add_normals([tensor], [tensor], scales, *words, [start])
for start, count in [(0, 1), (15, 2100), (2**35 - 20, 50), (2**36 - 40, 40)]:
    out = torch.full((count + 2,), -1, dtype=torch.int32)
    _triton_chacha.write_words(out[1:-1], *words, start)
    assert np.array_equal(out[1:-1].view(torch.uint32).numpy(), chacha.words(key, nonce, start, count).numpy()), start
    assert out[0] == out[-1] == -1, "wrote outside"
for start, count, dtype, tolerance in [
    (15, 2100, torch.float32, 2e-6),
    (2**36 - 41, 40, torch.float64, 2e-6),
    (1, 7, torch.bfloat16, 2**-6),
    (0, 33, torch.float16, 2**-9),
]:
    before = torch.linspace(-2, 2, count + 2).to(dtype)
    got = before.clone()
    add_normals(got[1:-1], start, 0.5)
    want = before[1:-1].double() + 0.5 * chacha.normals(key, nonce, start, count).double()
    assert (got[1:-1].double() - want).abs().max() <= tolerance, dtype
    assert got[0] == before[0] and got[-1] == before[-1], "wrote outside"
# Many tensors in one launch, each from a place of its own, rounded to another dtype.
counts, starts = [1, 0, 5000, 33, 2048], [7, 0, 2**36 - 5000, 16, 2**35 - 3]
sources = [torch.linspace(-1, 1, count) for count in counts]
targets = [torch.full((count + 2,), 9.0, dtype=torch.bfloat16) for count in counts]
inner = [target[1:-1] for target in targets]
scales = torch.tensor([0.5, 0.25], dtype=torch.float64)
_triton_chacha.add_normals(sources, inner, scales, *words, starts)
for source, target, start, count in zip(sources, targets, starts, counts):
    want = (source.double() + 0.5 * chacha.normals(key, nonce, start, count).double()) * 0.25
    assert ((target[1:-1].double() - want).abs() <= 2**-8).all(), start
    assert target[0] == target[-1] == 9, "wrote outside"
# The ends of the radius, a few parts in 2^20 from 0 and from 1, keep their relative accuracy.
first = chacha.words(key, nonce, 0, 2**21).numpy()[::2]
for pair in (first.argmin(), first.argmax()):
    got = torch.zeros(2)
    add_normals(got, 2 * int(pair), 1.0)
    want = chacha.normals(key, nonce, 2 * int(pair), 2)
    assert ((got - want) / want).abs().max() < 1e-5, (pair, got, want)
# Pairs of the stream whose radius takes bits of the other nonce, and their neighbours.
tail = np.flatnonzero(first < normal_tail.TAIL_WORDS)
assert len(tail) > 2
for pair in tail[:3]:
    got = torch.zeros(40)
    add_normals(got, 2 * int(pair) - 17, 1.0)
    assert (got - chacha.normals(key, nonce, 2 * int(pair) - 17, 40)).abs().max() < 2e-6, pair
# Radii of chosen words, in and out of the tail, against the logarithm of the exact ratio.
import triton, triton.language as tl
from fractions import Fraction
from math import log
@triton.jit
def radii(high, low, out, N: tl.constexpr):
    at = tl.arange(0, N)
    high, low = tl.load(high + at).to(tl.uint32, bitcast=True), tl.load(low + at).to(tl.uint32, bitcast=True)
    tl.store(out + at, _triton_chacha._radius(high, low))
end = normal_tail.TAIL_WORDS
highs = (0, 1, 2, 77, end - 1, end, end + 1, 2**31, 2**32 - 2**27, 2**32 - 1)
chosen = [(h, l) for h in highs for l in (0, 1, 2**31, 2**32 - 1)]
chosen += [(0, 2**i) for i in range(24)]
high, low = (torch.tensor(column, dtype=torch.uint32).view(torch.int32) for column in zip(*chosen))
got = torch.zeros(len(chosen))
radii[(1,)](high, low, got, N=len(chosen))
for (h, l), r in zip(chosen, got.tolist()):
    u = Fraction(2 * (h * 2**32 + l) + 1, 2**65) if h < end else Fraction(2 * h + 1, 2**33)
    near = 1 - u
    want = (-2 * log(u) if u < 0.5 else 2 * sum(float(near) ** k / k for k in range(1, 60))) ** 0.5
    assert abs(r / want - 1) < 1e-6, (h, l, r, want)
print("agree")
"""


@pytest.mark.full
def test_triton_kernels_give_the_same_words_and_normals():
    """In a process of its own: the interpreter is chosen when triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "agree", done.stderr


def test_normals_are_box_muller_of_their_pair():
    words = stream(KEY, 9, 0, 64).astype(np.float64).reshape(-1, 2)
    assert (words[:, 0] >= normal_tail.TAIL_WORDS).all()
    radius = np.sqrt(-2 * np.log((words[:, 0] + 0.5) / 2**32))
    angle = 2 * np.pi * words[:, 1] / 2**32
    want = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).ravel()
    got = chacha.normals(KEY, 9, 0, 64)
    assert got.dtype == torch.float32
    assert np.abs(got.numpy() - want).max() < 1e-6


@settings(max_examples=40)
@given(
    start=st.one_of(st.integers(0, 100), st.integers(2**35, 2**36 - 400)),
    cuts=st.lists(st.integers(0, 300), max_size=5),
    nonce=st.integers(0, 2**95 - 1),
)
def test_any_split_gives_the_same_normals_bit_for_bit(start, cuts, nonce):
    whole = chacha.normals(KEY, nonce, start, 300)
    edges = [0, *sorted(cuts), 300]
    parts = [chacha.normals(KEY, nonce, start + a, b - a) for a, b in zip(edges, edges[1:], strict=False)]
    assert torch.equal(torch.cat(parts), whole)


def test_pieces_of_the_host_do_not_change_the_normals(monkeypatch):
    whole = chacha.normals(KEY, 1, 3, 5000)
    added = chacha.add_normals_(torch.zeros(5000), KEY, 1, 3, 1.0)
    monkeypatch.setattr(chacha, "_CHUNK", 48)
    assert torch.equal(chacha.normals(KEY, 1, 3, 5000), whole)
    assert torch.equal(chacha.add_normals_(torch.zeros(5000), KEY, 1, 3, 1.0), added)
    assert torch.equal(added, whole)


@pytest.fixture
def chosen_words(monkeypatch):
    """Put words in the place of the key stream: first and second words of the pairs, and further bits of the radius."""

    def choose(high, angle, low):
        pairs = np.stack([high, angle], 1).astype(np.uint32).ravel()
        further = np.repeat(low, 2).astype(np.uint32)
        monkeypatch.setattr(
            chacha,
            "_host_words",
            lambda key, nonce, start, count: (further if nonce >= normal_tail.TAIL_NONCE else pairs)[
                start : start + count
            ],
        )

    return choose


def test_the_ends_of_the_uniform_are_finite(chosen_words):
    chosen_words([0, 2**32 - 1], [0, 2**32 - 1], [0, 0])
    got = chacha.normals(KEY, 0, 0, 4).double()
    assert torch.isfinite(got).all()
    assert got[0] == pytest.approx(normal_tail.BOUND, rel=1e-6) and normal_tail.BOUND > 9.4, "the far end of the tail"
    assert 0 < got[2] == pytest.approx(2**-16, rel=1e-6), "never exactly 0"


def test_a_radius_has_64_bits_in_the_tail(chosen_words):
    """And 32 outside: at most 7 units in the last place of a float32 apart, and in the order of the words across the edge."""
    end, words = normal_tail.TAIL_WORDS, [0, 1, 2**31, 2**32 - 1]
    high = np.repeat([0, 1, end - 1, end, end + 1], len(words))
    low = np.tile(words, 5)
    chosen_words(high, np.zeros_like(high), low)
    got = chacha.normals(KEY, 3, 0, 2 * len(high)).double().numpy()[::2]
    exact = high.astype(object) * 2**32 + low
    want = [(-2 * (np.log(float(2 * w + 1)) - 65 * np.log(2))) ** 0.5 for w in exact]
    assert np.allclose(got[: 3 * len(words)], want[: 3 * len(words)], rtol=1e-7, atol=0)
    assert np.allclose(got[3 * len(words) :], want[3 * len(words) :], rtol=0, atol=1 / (end * 4.7))
    assert (np.diff(got) <= 0).all() and (np.diff(got)[: len(words) - 1] < 0).all()
    assert 1 / (end * got[-1]) < 7 * 2.0**-21


def test_the_tail_is_that_of_a_normal_far_beyond_what_32_bits_reach(chosen_words):
    """Words of the cipher with the first of every pair 0: the 2⁻³² of all pairs that 32 bits would give one radius.

    Given |x| > √(64 ln 2) = 6.66 and hence for every x beyond, counts are Poisson. False alarm: 1e-6 each.
    """
    pairs, alarm = 100_000, 1e-6
    angle, low = stream(KEY, 5, 0, pairs), stream(KEY, 6, 0, pairs)
    chosen_words(np.zeros(pairs), angle, low)
    x = chacha.normals(KEY, 0, 0, 2 * pairs).double().numpy()
    radius = np.hypot(x[::2], x[1::2])
    assert stats.kstest(radius**2 / 2 - 32 * np.log(2), "expon").pvalue > alarm, "−ln u − 32 ln 2 is exponential"
    for bound in (6.8, 7.0, 7.25, 7.5):
        for side in (x, -x):
            mean, count = 2 * pairs * 2**32 * stats.norm.sf(bound), (side > bound).sum()
            assert stats.poisson.ppf(alarm, mean) <= count <= stats.poisson.isf(alarm, mean), (bound, count, mean)


def test_the_tail_of_the_key_stream_takes_its_further_bits_from_the_other_nonce():
    """Also where a split falls next to the pair, and in the twin of the cipher."""
    high = stream(KEY, 8, 0, 2**19)[::2]
    pairs = np.flatnonzero(high < normal_tail.TAIL_WORDS)
    assert len(pairs) > 1
    for pair in pairs.tolist():
        low = int(stream(KEY, 8 + 2**95, 2 * pair, 1)[0])
        want = (-2 * (np.log(float(2 * (int(high[pair]) * 2**32 + low) + 1)) - 65 * np.log(2))) ** 0.5
        whole = chacha.normals(KEY, 8, 2 * pair - 3, 9)
        assert float(whole[3:5].double().norm()) == pytest.approx(want, rel=1e-7)
        assert torch.equal(chacha.normals(KEY, 8, 2 * pair + 1, 5), whole[4:])
        assert torch.equal(chacha.normals(KEY, 8, 2 * pair - 3, 4), whole[:4])


@pytest.mark.parametrize("dtype", chacha.DTYPES)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_noise_is_added_in_place_and_rounded_once(dtype, as_tensor):
    before = torch.linspace(-3, 3, 77).to(dtype).view(7, 11)
    tensor = before.clone()
    std = torch.tensor(0.3, dtype=torch.float64) if as_tensor else 0.3
    assert chacha.add_normals_(tensor, KEY, 4, 5, std) is tensor
    want = before.double() + 0.3 * chacha.normals(KEY, 4, 5, 77).double().view(7, 11)
    assert torch.equal(tensor, want.to(dtype))


def test_many_tensors_get_the_noise_of_each_in_the_dtype_of_its_target():
    counts, starts = (77, 0, 5), (5, 9, 2**36 - 5)
    sources = [torch.linspace(-3, 3, count) for count in counts]
    targets = [torch.empty(count, dtype=dtype) for count, dtype in zip(counts, chacha.DTYPES[1:], strict=True)]
    chacha.add_normals_to(targets, sources, KEY, 4, starts, 0.3, 0.5)
    for target, source, start in zip(targets, sources, starts, strict=True):
        want = (source.double() + 0.3 * chacha.normals(KEY, 4, start, len(source)).double()) * 0.5
        assert torch.equal(target, want.to(target.dtype))


def test_no_noise_and_no_elements_change_nothing():
    tensor = torch.randn(5)
    assert torch.equal(chacha.add_normals_(tensor.clone(), KEY, 0, 0, 0.0), tensor)
    assert chacha.add_normals_(torch.empty(0, 3), KEY, 0, 7, 1.0).shape == (0, 3)
    assert chacha.normals(KEY, 0, 2**36, 0).shape == (0,)


def test_a_leaf_that_requires_grad_can_be_given():
    leaf = torch.zeros(4, requires_grad=True)
    chacha.add_normals_(leaf, KEY, 0, 0, 1.0)
    assert leaf.requires_grad and leaf.grad_fn is None and leaf.abs().sum() > 0


@pytest.mark.parametrize(
    "field, call",
    [
        ("key", lambda: chacha.words(KEY[:31], 0, 0, 1)),
        ("key", lambda: chacha.words(3, 0, 0, 1)),
        ("nonce", lambda: chacha.words(KEY, 2**96, 0, 1)),
        ("nonce", lambda: chacha.words(KEY, -1, 0, 1)),
        ("nonce", lambda: chacha.normals(KEY, 2**95, 0, 1)),
        ("nonce", lambda: chacha.add_normals_(torch.zeros(4), KEY, 2**95, 0, 1.0)),
        ("start", lambda: chacha.words(KEY, 0, -1, 1)),
        ("start", lambda: chacha.normals(KEY, 0, 2**36 - 1, 2)),
        ("tensor", lambda: chacha.add_normals_(torch.zeros(4, dtype=torch.int32), KEY, 0, 0, 1.0)),
        ("tensor", lambda: chacha.add_normals_(torch.zeros(4, 4).T[:, :2], KEY, 0, 0, 1.0)),
        ("std", lambda: chacha.add_normals_(torch.zeros(4), KEY, 0, 0, torch.ones(4))),
        ("std", lambda: chacha.add_normals_(torch.zeros(4), KEY, 0, 0, -1.0)),
        ("std", lambda: chacha.add_normals_(torch.zeros(4), KEY, 0, 0, float("nan"))),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(field, call):
    with pytest.raises(GramianError, match=rf"^{field}: .*; expected .*$") as error:
        call()
    assert "\n" not in str(error.value)
