"""Memory: a head of V classes costs V·T at rest, nothing of V² is ever made, and no activation outlives its capture.

The largest tensor that any operator returns is watched by a dispatch mode: a transient of V² would show even where it is freed
at once, and nothing has to be large for that.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gramian
from gramian.curvature.estimate import token_moments
from gramian.linalg import WIDEST_DENSE
from tests.curvature.small import FEW, MANY, Net, kept, loss_of, net, opened, refresh, words
from tests.kit.refusals import refused
from tests.kit.toys import Toy

MB = 1e6


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that was made, in elements, and by what."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.operator = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() // leaf.element_size() > self.elements:
                self.elements = leaf.untyped_storage().nbytes() // leaf.element_size()
                self.operator = str(func)
        return result


def head(classes: int, width: int = 32) -> Toy:
    """A small layer and a head of many classes."""
    return Toy(
        lambda net, x_BTD: net.head(net.fc(x_BTD).tanh()),
        fc=nn.Linear(width, width),
        head=nn.Linear(width, classes, bias=False),
    )


def captured(
    classes: int, tokens: int, width: int = 32, **options: Any
) -> tuple[gramian.KFACNaturalGradient, nn.Module]:
    """A float32 model and its factors from so many tokens."""
    torch.manual_seed(0)
    model = head(classes, width)
    kfac = gramian.KFACNaturalGradient(**{"damping": 1e-2, "ema_decay": 0.9, **options})
    x, y = torch.randn(2, tokens // 2, width), torch.randint(classes, (tokens,))
    with kfac.capture(model, num_terms=tokens):
        F.cross_entropy(model(x).flatten(0, 1), y).backward()
    return kfac, model


def held(kfac: gramian.KFACNaturalGradient) -> int:
    found: int = kfac.record()["layers"]["head"]["bytes"]
    return found


# ---- at rest ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2_head() -> dict[str, int]:
    """Bytes of a head of 50,257 classes at 1,024 tokens: its tensors at rest, and what the record says then and after use."""
    kfac, model = captured(50_257, 1024)
    factors = kfac.state_dict()["factors"].values()
    at_rest = sum(t.nbytes for parts in factors for t in parts.values() if isinstance(t, Tensor))
    told = held(kfac)
    kfac.compute_natural_gradient(model)
    return {"at rest": at_rest, "captured": told, "solved": held(kfac)}


@pytest.mark.full
@pytest.mark.xdist_group("gpt2_head")
@pytest.mark.parametrize("moment", ["at rest", "captured", "solved"])
def test_the_head_of_gpt2_at_a_thousand_tokens_is_a_hundred_megabytes(moment: str, gpt2_head: dict[str, int]) -> None:
    assert gpt2_head[moment] <= 110 * MB  # against 10 GB of a dense one, and 103 MB of U in half precision


USES: dict[str, Callable[[gramian.KFACNaturalGradient, nn.Module], Any]] = {
    "captured": lambda kfac, model: None,
    "recorded": lambda kfac, model: kfac.record(),
    "solved": lambda kfac, model: kfac.compute_natural_gradient(model),
    "decomposed": lambda kfac, model: kfac.compute_natural_gradient(model, power=-0.5),
}


@pytest.mark.parametrize("use, exact", [*((use, False) for use in USES), ("recorded", True), ("solved", True)], ids=str)
def test_bytes_grow_as_classes_times_tokens_and_tokens_squared(use: str, exact: bool) -> None:
    points = []
    for classes in (2000, 4000, 8000):
        for tokens in (32, 64, 128):
            kfac, model = captured(classes, tokens, kfac_true_fisher_head=exact)
            USES[use](kfac, model)
            diagonal = 8 * classes if exact else 0  # of the exact head, float64
            points.append((classes * tokens, tokens**2, held(kfac) - diagonal))
    terms = np.array([[first, second] for first, second, _ in points], dtype=float)
    wanted = np.array([size for *_, size in points], dtype=float)
    fit, *_ = np.linalg.lstsq(terms / wanted[:, None], np.ones(len(points)), rcond=None)
    assert np.abs(terms @ fit / wanted - 1).max() <= 0.05
    assert 1.9 <= fit[0] <= 2.2  # half precision
    assert fit[1] <= 20  # a small float64 matrix or two


# ---- on the way ------------------------------------------------------------------------------------------------------

WIDE, TOKENS, WIDTH = 20_000, 16, 4


@pytest.mark.parametrize("mode", ["pi", "factored", "joint"])
@pytest.mark.parametrize("exact", [False, True], ids=["empirical", "exact head"])
@pytest.mark.parametrize("active", [False, True], ids=["idle clip", "active clip"])
def test_nothing_near_classes_squared_is_ever_made(active: bool, exact: bool, mode: str) -> None:
    assert WIDE > WIDEST_DENSE
    clip = {"max_condition_number": 3.0, "damping": 1e-12} if active else {}
    options = {"kfac_true_fisher_head": exact, "damping_mode": mode, "update_freq": 1, **clip}
    with Largest() as largest:
        kfac, model = captured(WIDE, TOKENS, WIDTH, **options)
        kfac.compute_natural_gradient(model)
        if not (
            exact and mode == "joint"
        ):  # by conjugate gradients for every column and pole: the same tensors, slowly
            kfac.compute_natural_gradient(model, power=-0.5)
        vector = {"head.weight": torch.ones(WIDE, WIDTH)}
        kfac.compute_fisher_vector_product(vector)
        kfac.compute_fisher_vector_product(vector, damped=True)
        kfac.trust_region_scale(vector, 1e-3)
        facts = kfac.record()["layers"]["head"]
        kfac.load_state_dict(kfac.state_dict(), model)
        x, y = torch.randn(2, TOKENS // 2, WIDTH), torch.randint(WIDE, (TOKENS,))
        with kfac.capture(model, num_terms=TOKENS):  # an average
            F.cross_entropy(model(x).flatten(0, 1), y).backward()
        kfac.compute_natural_gradient(model)
    assert kfac.refreshes == 2
    told = facts["clip_joint"] if mode == "joint" else facts["sides"]["G"]["clip"]
    assert (told["count"] > 0) is active
    most = 2 * WIDE * 2 * TOKENS  # the columns of two refreshes, and twice that for the eigenvectors' products
    assert largest.elements <= most, f"{largest.elements} elements by {largest.operator}"


@pytest.mark.parametrize("options", [{"kfac_use_woodbury": False}, {"kfac_policy": "small_only"}], ids=str)
@pytest.mark.parametrize("exact", [False, True], ids=["empirical", "exact head"])
def test_without_low_rank_a_wide_side_is_its_diagonal(exact: bool, options: dict[str, Any]) -> None:
    with Largest() as largest:
        kfac, model = captured(WIDE, TOKENS, kfac_true_fisher_head=exact, **options)
        kfac.compute_natural_gradient(model)
        kfac.compute_natural_gradient(model, power=-0.5)
    assert kfac.record()["layers"]["head"]["sides"]["G"]["representation"] == "diagonal"
    assert largest.elements <= 2 * WIDE * TOKENS, f"{largest.elements} elements by {largest.operator}"


@pytest.mark.parametrize("kind", ["empirical", "mc", "true"])
def test_a_collection_makes_nothing_near_classes_squared_either(kind: str) -> None:
    torch.manual_seed(0)
    model, kfac = head(WIDE), gramian.KFACNaturalGradient()
    x, y = torch.randn(2, TOKENS // 2, 32), torch.randint(WIDE, (2, TOKENS // 2))
    with Largest() as largest:
        kfac.collect_kfac_factors(model, (x, y), kind)
    assert largest.elements <= 4 * WIDE * TOKENS, f"{largest.elements} elements by {largest.operator}"


@pytest.mark.parametrize("exact", [False, True], ids=["empirical", "exact head"])
def test_a_wide_side_is_not_written_out(exact: bool) -> None:
    factor = captured(WIDE, TOKENS, kfac_true_fisher_head=exact)[0].kfac_factors["head"].G
    with Largest() as largest, refused("to_dense", str(WIDE), str(WIDEST_DENSE)):
        factor.to_dense()
    assert largest.elements == 0


# ---- afterwards ------------------------------------------------------------------------------------------------------


class _Owned(torch.autograd.Function):
    """Identity whose result lies in an array of its own, so that one can see when its memory is let go."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arrays: list[Any]) -> Tensor:
        array = x.detach().numpy().copy()
        arrays.append(weakref.ref(array))
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        array = gradient.detach().numpy().copy()
        return torch.from_numpy(array), None


class Watched(Net):
    """Its activations in front of every layer can be told dead from alive."""

    def __init__(self) -> None:
        super().__init__()
        self.arrays: list[Any] = []

    def forward(self, x_BT: Tensor) -> Tensor:
        def own(h: Tensor) -> Tensor:
            return _Owned.apply(h, self.arrays)

        h = own(self.norm(own(self.table(x_BT))))
        h = own(self.q(h) * self.k(h).sigmoid() + self.v(h))
        return own(self.head(own(self.fc(h)[..., :-1].tanh())))


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
@pytest.mark.parametrize("options", [{}, {"kfac_true_fisher_head": True}, {"max_tokens": 4}], ids=str)
def test_no_activation_outlives_the_capture(options: dict[str, Any], shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, batch = Watched(), words(shape)
    kfac = gramian.KFACNaturalGradient(update_freq=1, woodbury_dtype="fp32", **options)  # nothing is rounded, so copied
    with opened(kfac, model, batch, head="head") as cap:  # the user's variable stays
        F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()).backward()
    gc.collect()
    assert len(model.arrays) == 5 and [array() for array in model.arrays] == [None] * 5
    assert cap.coverage["fc.weight"].status == "covered"
    assert kfac.refreshes == 1


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
def test_a_capture_that_was_left_holds_none_of_its_sums(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []
    add = token_moments.TokenMoment.add

    def watched(self: token_moments.TokenMoment, *args: Any) -> None:
        made.append(weakref.ref(self))
        add(self, *args)

    monkeypatch.setattr(token_moments.TokenMoment, "add", watched)
    model, batch, kfac = net(), words(shape), gramian.KFACNaturalGradient()
    with opened(kfac, model, batch) as cap:
        loss_of(model, batch).backward()
        assert len(made) == 11 and all(moment() is not None for moment in made)
    gc.collect()
    assert cap is not None and not any(moment() is not None for moment in made)


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
def test_no_activation_outlives_a_capture_that_failed(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, batch, kfac = Watched(), words(shape), gramian.KFACNaturalGradient(update_freq=1)
    with opened(kfac, model, batch) as cap:
        (float("nan") * F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())).backward()
    gc.collect()
    assert [array() for array in model.arrays] == [None] * 5
    assert len(kfac.dropped) == 1 and cap is not None


def test_a_graph_that_the_user_keeps_keeps_its_activations_and_no_more() -> None:
    torch.manual_seed(0)
    model, batch, kfac = Watched(), words(FEW), gramian.KFACNaturalGradient(update_freq=1)
    with opened(kfac, model, batch):
        loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
        loss.backward(retain_graph=True)
    gc.collect()
    assert any(array() is not None for array in model.arrays)
    del loss
    gc.collect()
    assert [array() for array in model.arrays] == [None] * 5


@pytest.mark.parametrize("tokens", [4, 30], ids=["low rank", "dense"])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_what_is_written_over_after_a_backward_is_not_in_the_factors(dtype: str, tokens: int) -> None:
    # Rows wait for the end of the capture; a loader may reuse its buffer at once, and an optimizer may zero gradients in place.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 5))
    batches = [(torch.randn(tokens, 40), torch.randint(5, (tokens,))) for _ in range(2)]

    def factors(reuse: bool) -> dict[str, Tensor]:
        kfac, buffer = gramian.KFACNaturalGradient(woodbury_dtype=dtype), torch.empty(tokens, 40)
        model.zero_grad()
        with kfac.capture(model, num_terms=tokens) as cap:
            for i, (x, y) in enumerate(batches):
                if i:
                    cap.next(num_terms=tokens)
                F.cross_entropy(model(buffer.copy_(x) if reuse else x), y).backward()
                if reuse:
                    buffer.fill_(7.0)
                    model.zero_grad(set_to_none=False)
        return kept(kfac)

    expected = factors(reuse=False)
    for name, actual in factors(reuse=True).items():
        assert torch.equal(actual, expected[name]), name


def test_factors_share_no_memory_with_the_model() -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(gramian.KFACNaturalGradient(update_freq=1), model, words(FEW))
    before = kept(kfac)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(3.0)
            p.grad.fill_(5.0)
    for name, t in kept(kfac).items():
        assert torch.equal(t, before[name]), name


@pytest.mark.parametrize("mode", ["pi", "joint"])
@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
def test_a_natural_gradient_holds_its_own_memory_and_no_more(shape: tuple[int, int], mode: str) -> None:
    model = net(width=24)
    kfac = refresh(gramian.KFACNaturalGradient(damping_mode=mode), model, words(shape))
    vector = {name: p.grad for name, p in model.named_parameters()}
    for found in (kfac.compute_natural_gradient(model), kfac.compute_fisher_vector_product(vector)):
        for name, t in found.items():
            assert t.untyped_storage().nbytes() <= 1.1 * t.nbytes, name
