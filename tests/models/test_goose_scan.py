"""The parallel scan is the sequential recurrence: states, gradients, documents, and no division anywhere."""

import pytest
import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.models.goose.scan import scan, sequential_scan
from tests.kit.matrix import sample

CASES = [
    (chunk, length, documents, given)
    for chunk in (2, 3, 16, 64)
    for length in (1, 2, 15, 16, 17, 100, 300)
    for documents in (False, True)
    for given in (False, True)
]


def drawn(
    length: int, documents: bool, given: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    generator = torch.Generator().manual_seed(length)
    input_BTD = torch.randn(3, length, 7, generator=generator, dtype=torch.float64)
    decay_D = torch.tensor([0.0, 1e-6, 0.3775, 0.5, 0.9, 0.999, 1.0], dtype=torch.float64)
    keep_BT = (torch.rand(3, length, generator=generator) > 0.1).double() if documents else None
    initial_BD = torch.randn(3, 7, generator=generator, dtype=torch.float64) if given else None
    found = [None if t is None else t.to(dtype) for t in (input_BTD, decay_D, keep_BT, initial_BD)]
    return found[0], found[1], found[2], found[3]  # type: ignore[return-value]


@pytest.mark.oracle
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("chunk", "length", "documents", "given"), sample(CASES, 24))
def test_states_and_gradients_are_those_of_the_sequential_form(
    chunk: int, length: int, documents: bool, given: bool, dtype: torch.dtype, tolerance: float
) -> None:
    ways = []
    for way, kind in ((scan, dtype), (sequential_scan, torch.float64)):
        input_BTD, decay_D, keep_BT, initial_BD = drawn(length, documents, given, kind)
        leaves = [t.requires_grad_() for t in (input_BTD, decay_D, initial_BD) if t is not None]
        more = {"chunk": chunk} if way is scan else {}
        states_BTD = way(input_BTD, decay_D, keep_BT, initial_BD, **more)
        weights_BTD = torch.randn(states_BTD.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        ways.append([states_BTD, *torch.autograd.grad((states_BTD * weights_BTD.to(kind)).sum(), leaves)])
    for found, expected in zip(*ways, strict=True):
        assert found.dtype == dtype
        scale = expected.abs().max().item() + 1.0
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("decay", [0.05, 0.3775, 0.5, 0.73, 0.88, 0.999])
def test_a_token_is_remembered_by_its_own_decay_and_nothing_is_lost_past_twenty_tokens(decay: float) -> None:
    """The form that divides by d^t + 1e-8 forgets everything where d^t is below 1e-8: at token 19 for 0.3775."""
    length = 256
    states_BTD = scan(torch.ones(1, length, 1), torch.tensor([decay]))
    t = torch.arange(1, length + 1, dtype=torch.float64)
    torch.testing.assert_close(states_BTD[0, :, 0].double(), (1 - decay**t) / (1 - decay), rtol=1e-5, atol=0)


@pytest.mark.parametrize("documents", [pytest.param(False, marks=pytest.mark.full), True])
def test_first_and_second_derivatives_agree_with_differences(documents: bool) -> None:
    input_BTD, decay_D, keep_BT, initial_BD = drawn(7, documents, True, torch.float64)
    decay_D = decay_D.clamp(0.05, 0.95)
    leaves = [t.requires_grad_() for t in (input_BTD, decay_D, initial_BD)]

    def states(u: Tensor, d: Tensor, s: Tensor) -> Tensor:
        return scan(u, d, keep_BT, s, chunk=3)

    assert torch.autograd.gradcheck(states, leaves)
    assert torch.autograd.gradgradcheck(states, leaves)


def test_two_halves_joined_by_their_state_are_the_whole() -> None:
    input_BTD, decay_D, keep_BT, _ = drawn(41, True, False, torch.float64)
    first = scan(input_BTD[:, :13], decay_D, keep_BT[:, :13])
    second = scan(input_BTD[:, 13:], decay_D, keep_BT[:, 13:], first[:, -1])
    torch.testing.assert_close(torch.cat([first, second], 1), scan(input_BTD, decay_D, keep_BT), rtol=1e-12, atol=1e-12)


def test_half_precision_is_summed_in_float32() -> None:
    ones_BTD = torch.ones(1, 1000, 1, dtype=torch.bfloat16)
    states_BTD = scan(ones_BTD, torch.ones(1, dtype=torch.bfloat16))
    assert states_BTD.dtype == torch.float32
    assert states_BTD[0, -1, 0] == 1000  # bfloat16 cannot count past 256


def test_vmap_over_samples_gives_the_same_gradients() -> None:
    input_BTD, decay_D, _, _ = drawn(20, False, False, torch.float64)

    def loss(d: Tensor, u_TD: Tensor) -> Tensor:
        return scan(u_TD.unsqueeze(0), d, chunk=4).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(decay_D, input_BTD)
    for row, u_TD in zip(found, input_BTD, strict=True):
        d = decay_D.clone().requires_grad_()
        (expected,) = torch.autograd.grad(sequential_scan(u_TD.unsqueeze(0), d).square().sum(), d)
        torch.testing.assert_close(row, expected, rtol=1e-10, atol=1e-10)


def test_an_empty_batch_passes() -> None:
    assert scan(torch.zeros(0, 40, 3), torch.full((3,), 0.5)).shape == (0, 40, 3)


def test_a_chunk_of_one_token_is_refused() -> None:
    with pytest.raises(GramianError, match="^chunk: .*expected"):
        scan(torch.zeros(1, 4, 3), torch.full((3,), 0.5), chunk=1)
