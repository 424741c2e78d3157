"""ChaCha20 on a GPU: word for word the cipher written down here once more, and noise that no split and no host wait touches."""

import struct

import numpy as np
import pytest
import torch

from gramian.kernels import chacha, normal_tail

triton = pytest.importorskip("triton")
tl = triton.language

from gramian.kernels import _triton_chacha  # noqa: E402

pytestmark = pytest.mark.gpu

KEY = bytes((37 * i + 11) % 256 for i in range(32))
NONCE = (3 << 64) + 2**63 + 12345
SPLITS = [(0, 1), (0, 16), (3, 5), (15, 100_003), (2**35 - 20, 50), (2**36 - 4096, 4096)]


def turn(value, bits):
    return ((value << bits) & 0xFFFFFFFF) | (value >> (32 - bits))


def plain_block(counter, nonce=NONCE):
    """One block in Python integers, from the text of RFC 8439."""
    initial = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", KEY), counter]
    initial += struct.unpack("<3I", nonce.to_bytes(12, "little"))
    s = list(initial)
    for round_ in range(20):
        for column in range(4):
            shift = round_ % 2
            a, b, c, d = (4 * row + (column + row * shift) % 4 for row in range(4))
            s[a] = (s[a] + s[b]) & 0xFFFFFFFF
            s[d] = turn(s[d] ^ s[a], 16)
            s[c] = (s[c] + s[d]) & 0xFFFFFFFF
            s[b] = turn(s[b] ^ s[c], 12)
            s[a] = (s[a] + s[b]) & 0xFFFFFFFF
            s[d] = turn(s[d] ^ s[a], 8)
            s[c] = (s[c] + s[d]) & 0xFFFFFFFF
            s[b] = turn(s[b] ^ s[c], 7)
    return [(x + y) & 0xFFFFFFFF for x, y in zip(s, initial, strict=True)]


def plain_words(start, count):
    blocks = range(start // 16, -(-(start + count) // 16))
    stream = np.array([plain_block(counter) for counter in blocks], np.uint32).ravel()
    return stream[start % 16 : start % 16 + count]


def plain_normals(start, count):
    first, stop = start - start % 2, start + count + (start + count) % 2
    words = plain_words(first, stop - first).astype(np.float64).reshape(-1, 2)
    uniform, angle = (words[:, 0] + 0.5) / 2**32, 2 * np.pi * words[:, 1] / 2**32
    for pair in np.flatnonzero(words[:, 0] < 2**16):
        low = plain_block((first + 2 * int(pair)) // 16, NONCE + 2**95)[(first + 2 * int(pair)) % 16]
        uniform[pair] = (words[pair, 0] * 2**32 + low + 0.5) / 2**64
    radius = np.sqrt(-2 * np.log(uniform))
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).ravel()[start - first : start - first + count]


@pytest.mark.parametrize("start, count", SPLITS)
def test_words_are_the_ciphers(start, count):
    got = chacha.words(KEY, NONCE, start, count, "cuda")
    assert got.is_cuda and got.dtype == torch.uint32
    assert np.array_equal(got.cpu().numpy(), plain_words(start, count))


@pytest.mark.parametrize("start, count", SPLITS)
def test_normals_are_box_muller_of_those_words(start, count):
    got = chacha.normals(KEY, NONCE, start, count, "cuda").cpu().numpy()
    assert np.abs(got - plain_normals(start, count)).max() < 5e-6


def test_pairs_in_the_tail_have_the_further_bits_of_the_other_nonce():
    """Some of four million pairs do; the host's normals are compared with the cipher in tests/kernels."""
    high = chacha.words(KEY, NONCE, 0, 2**23)[::2].numpy()
    tail = np.flatnonzero(high < normal_tail.TAIL_WORDS).tolist()
    assert len(tail) > 20
    for pair in tail:
        start = max(0, 2 * pair - 17)
        got = chacha.normals(KEY, NONCE, start, 40, "cuda").cpu()
        assert (got - chacha.normals(KEY, NONCE, start, 40)).abs().max() < 5e-6, pair


@triton.jit
def radii(high, low, out, N: tl.constexpr):
    at = tl.arange(0, N)
    high, low = tl.load(high + at).to(tl.uint32, bitcast=True), tl.load(low + at).to(tl.uint32, bitcast=True)
    tl.store(out + at, _triton_chacha._radius(high, low))


def test_radii_of_chosen_words_are_accurate_at_both_ends():
    end = normal_tail.TAIL_WORDS
    highs = [0, 1, 77, end - 1, end, 2**31, 2**32 - 2**27, 2**32 - 1]
    chosen = [(h, low) for h in highs for low in (0, 1, 2**20, 2**32 - 1)]
    high, low = (
        torch.tensor(column, dtype=torch.uint32).view(torch.int32).cuda() for column in zip(*chosen, strict=True)
    )
    got = torch.zeros(len(chosen), device="cuda")
    radii[(1,)](high, low, got, N=len(chosen))
    for (h, low_word), r in zip(chosen, got.tolist(), strict=True):
        bits, width = (h * 2**32 + low_word, 64) if h < end else (h, 32)
        rest = (2**width - bits - 0.5) / 2**width
        want = (-2 * (np.log1p(-rest) if rest < 0.5 else np.log(bits + 0.5) - width * np.log(2))) ** 0.5
        assert abs(r / want - 1) < 1e-6, (h, low_word, r, want)


@pytest.mark.parametrize("dtype", chacha.DTYPES)
def test_any_split_adds_the_same_noise_bit_for_bit(dtype):
    before = torch.linspace(-3, 3, 10_007, device="cuda").to(dtype)
    whole = chacha.add_normals_(before.clone(), KEY, NONCE, 9, 0.7)
    for cut in (1, 2, 16, 4097, 10_006):
        parts = before.clone()
        chacha.add_normals_(parts[:cut], KEY, NONCE, 9, 0.7)
        chacha.add_normals_(parts[cut:], KEY, NONCE, 9 + cut, 0.7)
        assert torch.equal(parts, whole), cut
    want = before.double().cpu().numpy() + 0.7 * plain_normals(9, 10_007)
    ulp = {torch.float64: 0, torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert (np.abs(whole.double().cpu().numpy() - want) <= 5e-6 + ulp * np.abs(want)).all()


def test_the_deviation_may_be_a_tensor_and_nothing_waits_for_the_device():
    tensor, std = torch.zeros(1000, device="cuda"), torch.tensor(0.25, device="cuda")
    chacha.add_normals_(tensor.clone(), KEY, NONCE, 0, std)  # compiled
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        by_tensor = chacha.add_normals_(tensor.clone(), KEY, NONCE, 0, std)
        by_number = chacha.add_normals_(tensor.clone(), KEY, NONCE, 0, 0.25)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.equal(by_tensor, by_number)
    assert np.abs(by_tensor.cpu().numpy() - 0.25 * plain_normals(0, 1000)).max() < 2e-6


def test_many_tensors_in_one_launch_get_what_each_gets_alone_rounded_to_its_target():
    counts, starts = (100_003, 0, 17, 4096), (9, 3, 2**36 - 17, 2**35 - 2)
    for source_dtype in (torch.float32, torch.float64):
        sources = [torch.linspace(-3, 3, count, device="cuda", dtype=source_dtype) for count in counts]
        targets = [torch.empty(n, device="cuda", dtype=d) for n, d in zip(counts, chacha.DTYPES, strict=True)]
        chacha.add_normals_to(targets, sources, KEY, NONCE, starts, 0.7, 0.25)
        for target, source, start in zip(targets, sources, starts, strict=True):
            alone = chacha.add_normals_(source.clone(), KEY, NONCE, start, 0.7, 0.25)
            assert torch.equal(target, alone.to(target.dtype))


def test_neighbours_in_memory_stay():
    buffer = torch.zeros(1000, device="cuda")
    chacha.add_normals_(buffer[17:983], KEY, NONCE, 5, 1.0)
    assert (buffer[:17] == 0).all() and (buffer[983:] == 0).all() and (buffer[17:983] != 0).all()


def test_ten_million_normals_have_the_moments_of_a_normal():
    """Six standard errors: a false alarm in 1e9 for each of the three, for a fresh key."""
    x = chacha.normals(KEY, 1, 0, 10**7, "cuda").double()
    assert abs(x.mean()) < 6 / 10**3.5
    assert abs((x**2).mean() - 1) < 6 * 2**0.5 / 10**3.5
    assert abs((x**4).mean() - 3) < 6 * 96**0.5 / 10**3.5
    assert (chacha.normals(KEY, 1, 0, 10**7, "cuda").double() == x).all()


def test_a_new_key_or_release_compiles_nothing_new():
    tensor = torch.zeros(100, device="cuda")
    chacha.add_normals_(tensor, KEY, 1, 0, 1.0)
    device = torch.cuda.current_device()
    caches = _triton_chacha._add_normals_kernel.device_caches[device]
    before = len(caches[0])
    for release in range(5):
        chacha.add_normals_(tensor, bytes([release, 0, 0, 0] * 8), release, 16 * release, 1.0)
        chacha.add_normals_(tensor, bytes([255 - release] * 32), 2**94 + release, release, 1.0)
    assert len(caches[0]) == before
