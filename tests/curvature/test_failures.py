"""Whatever goes wrong, factors are those from before or those from after, never a mixture, and the record says which."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gramian
from gramian.curvature import Block
from gramian.curvature.blocks import damping
from gramian.curvature.estimate import token_moments
from gramian.curvature.refresh import build_factors
from gramian.linalg import Dense, LowRank
from tests.curvature.small import (
    FEW,
    MANY,
    Net,
    assert_near,
    assert_same,
    differs,
    free,
    kept,
    loss_of,
    net,
    opened,
    refresh,
    sides,
    words,
)
from tests.kit.refusals import one_line, refusal, refused

NAN, INF = float("nan"), float("inf")


def make(**options: Any) -> gramian.KFACNaturalGradient:
    return gramian.KFACNaturalGradient(**{"update_freq": 1, "damping": 1e-3, "ema_decay": 0.9, **options})


def fails_at(number: int, function: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """A function that raises instead of its n-th call."""
    calls = 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error
        return function(*args, **kwargs)

    return called


@contextmanager
def unchanged(kfac: gramian.KFACNaturalGradient, model: nn.Module) -> Iterator[None]:
    """The factors, what they give and the model's forwards are afterwards what they were; one refresh was dropped."""
    factors, head, refreshes, drops = kept(kfac), kfac.head, kfac.refreshes, len(kfac.dropped)
    gradients = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    natural = kfac.compute_natural_gradient(model, gradients=gradients) if factors else {}
    ages = {name: facts["age"] for name, facts in kfac.record()["layers"].items()}
    yield
    assert_same(kept(kfac), factors)
    if factors:
        assert_same(kfac.compute_natural_gradient(model, gradients=gradients), natural)
    assert (kfac.head, kfac.refreshes) == (head, refreshes)
    assert free(model)
    record = kfac.record()
    assert len(record["dropped"]) == drops + 1 and record["dropped"][-1]["step"] == kfac.steps - 1
    assert {name: facts["age"] for name, facts in record["layers"].items()} == {n: a + 1 for n, a in ages.items()}


# ---- numbers that are none -------------------------------------------------------------------------------------------


class Perceptron(nn.Sequential):
    """Numbers in, so that a batch can hold one that is none."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 4))


def _step(kfac: gramian.KFACNaturalGradient, model: nn.Module, bad: float | None, where: str, tokens: int = 30) -> None:
    x, y = torch.randn(tokens, 5), torch.randint(4, (tokens,))
    if bad is not None and where == "input":
        x[tokens // 2, 2] = bad
    model.zero_grad()
    with kfac.capture(model, num_terms=tokens):
        terms = F.cross_entropy(model(x), y, reduction="none")
        if bad is not None and where == "loss":
            terms = terms * torch.where(torch.arange(tokens) == 1, bad, 1.0)
        terms.mean().backward()


@pytest.mark.parametrize("tokens", [3, 30], ids=["low rank", "dense"])
@pytest.mark.parametrize("where", ["input", "loss"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_batch_that_is_not_finite_is_dropped_as_a_whole(bad: float, where: str, tokens: int) -> None:
    torch.manual_seed(0)
    model, kfac = Perceptron(), make(update_freq=2)
    _step(kfac, model, None, where, tokens)
    _step(kfac, model, None, where, tokens)  # not due
    with unchanged(kfac, model):
        _step(kfac, model, bad, where, tokens)
    assert "not finite" in kfac.record()["dropped"][0]["reason"]
    before = kept(kfac)
    _step(kfac, model, None, where, tokens)  # due, as the last one came to nothing
    assert kfac.refreshes == 2 and differs(kept(kfac), before)
    assert {facts["age"] for facts in kfac.record()["layers"].values()} == {0}


def test_one_bad_side_drops_the_sides_that_are_good() -> None:
    # tanh(inf) is 1: only the first layer's inputs hold an infinity.
    torch.manual_seed(0)
    model, kfac = Perceptron(), make()
    _step(kfac, model, None, "input")
    with unchanged(kfac, model):
        _step(kfac, model, INF, "input")
    assert kfac.record()["dropped"][0]["reason"].startswith("0:")


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_batch_raises_if_strict_and_changes_as_little(bad: float) -> None:
    torch.manual_seed(0)
    model, kfac = Perceptron(), make(strict=True)
    _step(kfac, model, None, "input")
    with unchanged(kfac, model), refused("refresh", "not finite", "strict=True"):
        _step(kfac, model, bad, "input")
    _step(kfac, model, None, "input")
    assert kfac.refreshes == 2


def test_a_bad_first_batch_leaves_no_factors() -> None:
    torch.manual_seed(0)
    model, kfac = Perceptron(), make(update_freq=10)
    _step(kfac, model, NAN, "input")
    assert kfac.kfac_factors == {} and kfac.refreshes == 0
    with refusal("no factors yet"):
        kfac.compute_natural_gradient(model)
    _step(kfac, model, None, "input")
    assert kfac.refreshes == 1


@pytest.mark.parametrize("kind", ["empirical", "mc", "true"])
def test_a_model_that_is_not_finite_is_dropped_by_a_collection_too(kind: str) -> None:
    model, kfac = net(), make()
    kfac.collect_kfac_factors(model, words(), kind)
    before = kept(kfac)
    with torch.no_grad():
        model.fc.bias[0] = NAN
    assert kfac.collect_kfac_factors(model, words(), kind) is kfac.kfac_factors
    assert_same(kept(kfac), before)
    assert "not finite" in kfac.record()["dropped"][0]["reason"] and free(model)


def test_a_gradient_that_overflows_its_square_is_dropped() -> None:
    model, kfac = net(), refresh(make(), net())
    before = kept(kfac)
    with opened(kfac, model, words()):
        (1e30 * loss_of(model, words())).backward()  # 1e60 is no float32
    assert_same(kept(kfac), before)
    assert len(kfac.dropped) == 1


def test_a_pass_without_terms_is_dropped() -> None:
    model, kfac = net(), refresh(make(), net())
    with unchanged(kfac, model), kfac.capture(model, num_terms=0):
        (0.0 * loss_of(model, words())).backward()
    assert kfac.record()["dropped"][0]["reason"] == "no loss terms"


# ---- exceptions in the block -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the forward", "after the forward", "after the backward"])
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), torch.OutOfMemoryError("no more")], ids=str)
def test_an_exception_in_the_block_drops_the_refresh_and_goes_on(error: BaseException, when: str) -> None:
    model, kfac = net(), refresh(make(), net())
    with unchanged(kfac, model), pytest.raises(type(error)), opened(kfac, model, words(seed=2)):
        if when == "before the forward":
            raise error
        loss = loss_of(model, words(seed=2))
        if when == "after the forward":
            raise error
        loss.backward()
        raise error
    assert type(error).__name__ in kfac.record()["dropped"][0]["reason"]
    before = kept(kfac)
    refresh(kfac, model, words(seed=2))
    assert kfac.refreshes == 2 and differs(kept(kfac), before)


@contextmanager
def broken_half_way(model: Net) -> Iterator[None]:
    """The backward raises behind the layers and before the norm and the table."""

    def boom(gradient: Tensor) -> Tensor:
        raise OSError("out of something")

    handle = model.norm.register_forward_hook(lambda module, args, output: output.register_hook(boom) and None)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
@pytest.mark.parametrize("then", [False, True], ids=["alone", "followed by a good one"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_swallowed_half_backward_drops_the_refresh(strict: bool, then: bool, shape: tuple[int, int]) -> None:
    batch = words(shape, seed=2)
    model, kfac = net(), refresh(make(strict=strict), net(), words(shape))

    def step() -> None:
        with opened(kfac, model, batch) as cap:
            with broken_half_way(model), pytest.raises(OSError, match="out of something"):
                loss_of(model, batch).backward()
            if then:
                cap.next(num_terms=batch[1].numel())
                loss_of(model, batch).backward()

    with unchanged(kfac, model):
        if strict:
            with refused("refresh", "half-way", "strict=True"):
                step()
        else:
            step()
    assert "half-way" in kfac.record()["dropped"][0]["reason"]
    refresh(kfac, model, batch)
    assert kfac.refreshes == 2


# ---- exceptions in the library ---------------------------------------------------------------------------------------

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
@pytest.mark.parametrize("number", [1, 2, 5, 8])
def test_no_memory_in_the_middle_of_the_sums_drops_the_refresh(
    number: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = words(shape, seed=2)
    model, kfac = net(), refresh(make(), net(), words(shape))
    with unchanged(kfac, model), monkeypatch.context() as patch:
        patch.setattr(token_moments.TokenMoment, "add", fails_at(number, token_moments.TokenMoment.add, NO_MEMORY))
        with pytest.raises(torch.OutOfMemoryError):
            refresh(kfac, model, batch)
    assert "OutOfMemoryError" in kfac.record()["dropped"][0]["reason"]
    _heals(kfac, model, batch)


@pytest.mark.parametrize("again", [False, True], ids=["alone", "followed by another try"])
def test_no_memory_inside_a_backward_that_the_user_catches_drops_the_refresh(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kfac = net(), refresh(make(), net())
    monkeypatch.setattr(token_moments.TokenMoment, "add", fails_at(3, token_moments.TokenMoment.add, NO_MEMORY))
    with unchanged(kfac, model), opened(kfac, model, words(seed=2)) as cap:
        with pytest.raises(torch.OutOfMemoryError):
            loss_of(model, words(seed=2)).backward()
        if again:  # which works, and does not mend the sums
            cap.next(num_terms=24)
            loss_of(model, words(seed=2)).backward()
    assert "half-way" in kfac.record()["dropped"][0]["reason"]


@pytest.mark.parametrize("number", [1, 2, 4, 7])
@pytest.mark.parametrize("kind, shape", [(LowRank, FEW), (Dense, MANY)])
@pytest.mark.parametrize("own_pass", [False, True], ids=["capture", "collection"])
def test_no_memory_in_the_middle_of_building_drops_the_refresh(
    own_pass: bool, kind: type[Any], shape: tuple[int, int], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = words(shape, seed=2)
    model, kfac = net(), refresh(make(), net(), words(shape))

    def step() -> None:
        if own_pass:
            kfac.collect_kfac_factors(model, batch)
        else:
            refresh(kfac, model, batch)

    with unchanged(kfac, model), monkeypatch.context() as patch:
        patch.setattr(kind, "of", fails_at(number, kind.of, NO_MEMORY))
        with pytest.raises(torch.OutOfMemoryError):
            step()
    assert "OutOfMemoryError" in kfac.record()["dropped"][0]["reason"]
    _heals(kfac, model, batch)


@pytest.mark.parametrize("number", [1, 3, 8])
@pytest.mark.parametrize("owner, name", [(build_factors, "merge"), (Block, "with_factors"), (damping, "Damping")])
def test_an_error_while_factors_are_averaged_or_damped_drops_the_refresh(
    owner: Any, name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kfac = net(), refresh(make(), net())
    with unchanged(kfac, model), monkeypatch.context() as patch:
        patch.setattr(owner, name, fails_at(number, getattr(owner, name), NO_MEMORY))
        with pytest.raises(torch.OutOfMemoryError):
            refresh(kfac, model, words(seed=2))
    _heals(kfac, model, words(seed=2))


def _heals(kfac: gramian.KFACNaturalGradient, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """The next refresh is what it would have been without the failure."""
    other = make()
    other.load_state_dict(kfac.state_dict(), model)
    refresh(kfac, model, batch)
    refresh(other, model, batch)
    assert kfac.refreshes == 2
    assert_same(kept(kfac), kept(other))


# ---- eigendecomposition ----------------------------------------------------------------------------------------------


@contextmanager
def no_eigh(monkeypatch: pytest.MonkeyPatch, error: BaseException, only: torch.dtype | None = None) -> Iterator[None]:
    """`eigh` raises, always or in one precision."""
    real = torch.linalg.eigh

    def eigh(matrix: Tensor, *args: Any, **kwargs: Any) -> Any:
        if only is None or matrix.dtype == only:
            raise error
        return real(matrix, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", eigh)
        yield


NEVER = torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")


@pytest.mark.parametrize("error", [NEVER, NO_MEMORY], ids=["no convergence", "no memory"])
def test_without_eigenvalues_a_low_rank_side_goes_by_singular_values(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(dtype=torch.float64)
    plain, kfac = (refresh(make(), model, words(FEW)) for _ in range(2))
    expected, before = plain.compute_natural_gradient(model, power=-0.5), kept(kfac)
    with no_eigh(monkeypatch, error):
        found = kfac.compute_natural_gradient(model, power=-0.5)
    for layer in ("q", "fc", "head"):
        assert_near(found[f"{layer}.weight"], expected[f"{layer}.weight"], 1e-8)
        for about in kfac.record()["layers"][layer]["sides"].values():
            assert about["fallback"].startswith("singular values"), about
    assert_same(kept(kfac), before)
    assert free(model)


@pytest.mark.parametrize("error", [NEVER, NO_MEMORY], ids=["no convergence", "no memory"])
def test_without_eigenvectors_a_dense_side_goes_by_its_diagonal(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(damping_mode="factored", damping=1e-2, use_eigenvalue_correction=False), model)
    before = kept(kfac)
    with no_eigh(monkeypatch, error):
        found = kfac.compute_natural_gradient(model, power=-0.5)["q.weight"]
    a_side, g_side = sides(kfac, "q")
    scale = ((g_side.diagonal() + 1e-2)[:, None] * (a_side.diagonal() + 1e-2)[None, :]) ** -0.5
    assert_near(found, scale * model.q.weight.grad, 1e-12)
    for about in kfac.record()["layers"]["q"]["sides"].values():
        assert about["fallback"].startswith("diagonal in place of eigenvectors"), about
    assert_same(kept(kfac), before)
    assert all(facts["sides"]["G"]["fallback"] == "" for facts in refresh(kfac, model).record()["layers"].values())


@pytest.mark.parametrize("shape", [FEW, MANY], ids=["low rank", "dense"])
def test_a_fallback_raises_if_strict_and_names_the_layer(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(strict=True), model, words(shape))
    before, gradients = kept(kfac), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with no_eigh(monkeypatch, NEVER), pytest.raises(gramian.GramianError) as caught:
        kfac.compute_natural_gradient(model, power=-0.5)
    name = str(caught.value).split(":")[0]
    assert name in kfac.kfac_factors
    one_line(caught.value, name, "in place of", "strict=True")
    assert_same(kept(kfac), before)
    assert_same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, gradients)


def test_a_second_precision_that_converges_is_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    kfac = refresh(make(strict=True), model)
    with no_eigh(monkeypatch, NEVER, only=torch.float32):
        kfac.compute_natural_gradient(model, power=-0.5)
    about = kfac.record()["layers"]["q"]["sides"]["A"]
    assert (about["eigendecomposition"], about["fallback"]) == ("float64 on cpu", "")


def test_no_algorithm_at_all_is_one_line_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(make(), model, words(FEW))
    before = kept(kfac)
    with no_eigh(monkeypatch, NEVER), monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "svd", fails_at(1, torch.linalg.svd, NEVER))
        with pytest.raises(gramian.GramianError) as caught:
            kfac.compute_natural_gradient(model, power=-0.5)
    one_line(caught.value, "svd", "expected")
    assert_same(kept(kfac), before)
    kfac.compute_natural_gradient(model, power=-0.5)
    assert all(about["fallback"] == "" for about in kfac.record()["layers"]["fc"]["sides"].values())


# ---- nesting ---------------------------------------------------------------------------------------------------------


def test_the_same_object_twice_is_refused_and_the_outer_capture_goes_on() -> None:
    model, kfac, alone = net(), make(), refresh(make(), net())
    with opened(kfac, model, words()):
        with refused("capture", "already", "expected"), opened(kfac, model, words()):
            pass
        with refusal("already"):
            kfac.collect_kfac_factors(model, words())
        loss_of(model, words()).backward()
    assert (kfac.steps, kfac.refreshes, kfac.dropped) == (1, 1, [])
    assert_same(kept(kfac), kept(alone))


def test_the_same_object_twice_is_refused_also_where_the_inner_one_would_be_idle() -> None:
    model, kfac = net(), refresh(make(update_freq=10), net())
    with opened(kfac, model, words(), force=True):
        with refusal("already"):
            opened(kfac, model, words())
        loss_of(model, words()).backward()
    assert (kfac.steps, kfac.refreshes) == (2, 2)


def test_two_captures_made_in_advance_cannot_both_be_entered() -> None:
    model, kfac = net(), make()
    first, second = opened(kfac, model, words()), opened(kfac, model, words())
    with first:
        with refusal("already"), second:
            pass
        loss_of(model, words()).backward()
    assert kfac.refreshes == 1 and free(model)


def test_a_capture_that_is_never_entered_does_no_harm() -> None:
    model, kfac = net(), make()
    opened(kfac, model, words())
    assert refresh(kfac, model).refreshes == 1


def test_a_capture_that_cannot_be_entered_does_no_harm() -> None:
    model, kfac = net(), make()
    with gramian.per_sample_norms(model, batch_size=4) as norms:
        with refusal("batch_size"), opened(kfac, model, words(), batch_size=5):
            pass
        loss_of(model, words()).backward()
    assert len(norms.values) == 4 and free(model)
    assert refresh(kfac, model).refreshes == 1


class _Counted(torch.autograd.Function):
    """Identity that counts its backward."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        _Counted.calls += 1
        return g


class Counted(Net):
    """Knows how often it ran."""

    forwards = 100  # above the numbers that an axis can have, which are proven when they change

    def forward(self, x_BT: Tensor) -> Tensor:
        self.forwards += 1
        return _Counted.apply(super().forward(x_BT))


@pytest.mark.parametrize("outside", [True, False], ids=["K-FAC outside", "K-FAC inside"])
def test_captures_of_other_objects_share_one_backward_and_see_what_they_see_alone(outside: bool) -> None:
    torch.manual_seed(0)
    model, batch, fisher = Counted(), words(), gramian.DiagonalFisher()
    loss_of(model, batch).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with gramian.per_sample_norms(model) as alone:
        loss_of(model, batch).backward()
    with gramian.observe(model, fisher) as seen:
        loss_of(model, batch).backward()
    by_itself, expected = refresh(make(), model, batch), seen[fisher]
    model.zero_grad()
    model.forwards, _Counted.calls = 100, 0
    kfac, other = make(), make(kfac_true_fisher_head=True)
    first, last = opened(kfac, model, batch), gramian.per_sample_norms(model)
    again = gramian.DiagonalFisher()
    outer, inner = (first, last) if outside else (last, first)
    with outer, gramian.observe(model, again) as middle, opened(other, model, batch, head="head"), inner:
        loss_of(model, batch).backward()
    assert (model.forwards, _Counted.calls) == (101, 1)
    assert_same(kept(kfac), kept(by_itself))
    assert torch.equal(last.values, alone.values)
    assert_same(middle[again], expected)
    assert_same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, gradients)
    assert other.refreshes == 1 and free(model)


def test_a_capture_changes_neither_the_loss_nor_the_gradients() -> None:
    model, batch = net(), words()
    plain = loss_of(model, batch)
    plain.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    with opened(make(), model, batch):
        loss = loss_of(model, batch)
        loss.backward()
    assert torch.equal(loss, plain)
    assert_same({n: p.grad for n, p in model.named_parameters()}, gradients)


# ---- what is asked of the user ---------------------------------------------------------------------------------------


def test_a_capture_without_a_backward_is_refused() -> None:
    model, kfac = net(), refresh(make(), net())
    with unchanged(kfac, model), refused("capture", "no backward", "loss.backward()"), opened(kfac, model, words()):
        loss_of(model, words())


def test_neither_terms_nor_weights_is_refused_and_either_is_enough() -> None:
    model, batch = net(), words()
    with refused("num_terms", "token_weights", "expected"):
        make().capture(model)
    with_terms, with_weights = refresh(make(), model, batch), make()
    with with_weights.capture(model, token_weights=torch.ones(MANY)):
        loss_of(model, batch).backward()
    assert_same(kept(with_weights), kept(with_terms))


def test_a_second_backward_needs_its_own_terms() -> None:
    model, kfac, batch = net(), refresh(make(), net()), words(seed=2)
    with (
        unchanged(kfac, model),
        refused("capture", "second backward", "cap.next(num_terms=...)"),
        opened(kfac, model, batch),
    ):
        loss_of(model, batch).backward()
        loss_of(model, batch).backward()


def test_a_second_backward_is_noticed_also_if_its_forward_ran_before_the_first() -> None:
    model, kfac, batch = net(), refresh(make(), net()), words(seed=2)
    with (
        unchanged(kfac, model),
        refused("capture", "second backward", "cap.next(num_terms=...)"),
        opened(kfac, model, batch),
    ):
        first, second = loss_of(model, batch), loss_of(model, batch)
        first.backward()
        second.backward()


def test_next_without_terms_is_refused() -> None:
    model = net()
    with refusal("num_terms"), opened(make(), model, words()) as cap:
        loss_of(model, words()).backward()
        cap.next()


def test_a_second_backward_through_one_forward_is_refused() -> None:
    model, kfac = net(), refresh(make(), net())
    with unchanged(kfac, model), refusal("ran twice"), opened(kfac, model, words()):
        loss = loss_of(model, words())
        loss.backward(retain_graph=True)
        loss.backward()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_is_refused() -> None:
    model, kfac = net(), refresh(make(), net())
    with unchanged(kfac, model), refusal("create_graph"), opened(kfac, model, words()):
        loss_of(model, words()).backward(create_graph=True)


class Checkpointed(Net):
    def forward(self, x_BT: Tensor) -> Tensor:
        h = checkpoint(self.norm, self.table(x_BT), use_reentrant=True)
        return self.head(self.fc(h)[..., :-1])


def test_reentrant_checkpoints_are_refused() -> None:
    model, kfac = Checkpointed(), make()
    with refusal("use_reentrant=False"), opened(kfac, model, words()):
        loss_of(model, words()).backward()
    assert free(model) and len(kfac.dropped) == 1


class Bypassed(Net):
    """The table's weight is the head, too, and nobody was told."""

    def forward(self, x_BT: Tensor) -> Tensor:
        return F.linear(self.norm(self.fc(self.table(x_BT))[..., :-1]), self.table.weight)


@pytest.mark.parametrize("own_pass", [False, True], ids=["capture", "collection"])
def test_a_weight_used_past_its_layer_is_noticed(own_pass: bool) -> None:
    torch.manual_seed(0)
    model, kfac = Bypassed(), make()
    with refused("table.weight", "its own module only"):
        if own_pass:
            kfac.collect_kfac_factors(model, words())
        else:
            refresh(kfac, model)
    assert kfac.kfac_factors == {} and len(kfac.dropped) == 1 and free(model)
    assert own_pass is all(p.grad is None for p in model.parameters())


class FullyShardedDataParallel(nn.Module):
    """Goes by the name of the obsolete wrapper."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.trace(nn.Linear(8, 11), torch.randn(2, 8))


@pytest.mark.parametrize(
    "wrap, complaint",
    [
        (nn.DataParallel, "DataParallel"),
        (FullyShardedDataParallel, "FSDP1"),
        (lambda model: Scripted(), "TorchScript"),
        (lambda model: model.requires_grad_(False), "no trainable parameter"),
    ],
)
def test_what_the_taps_refuse_is_refused_here_too(wrap: Callable[[nn.Module], nn.Module], complaint: str) -> None:
    kfac, model = make(), wrap(net())
    with pytest.raises(gramian.GramianError) as caught:
        kfac.capture(model, num_terms=24)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)
    with refusal(complaint):
        kfac.collect_kfac_factors(model, words())
    assert refresh(kfac, net()).refreshes == 1


def test_another_model_is_refused_before_it_is_touched() -> None:
    kfac, model = refresh(make(), net()), net()
    other = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 11))
    before = kept(kfac)
    with refused("table", "expected the captured model"):
        refresh(kfac, other)
    with refusal("expected the captured model"):
        kfac.compute_natural_gradient(other, gradients={"1.weight": torch.ones(11, 5)})
    assert_same(kept(kfac), before)
    assert refresh(kfac, model).refreshes == 2


def test_gradients_under_unknown_names_are_refused() -> None:
    model = net()
    kfac = refresh(make(), model)
    for ask in (
        lambda: kfac.compute_natural_gradient(model, gradients={"lm_head.weight": torch.ones(3)}),
        lambda: kfac.compute_fisher_vector_product({"lm_head.weight": torch.ones(3)}),
    ):
        with refused("lm_head.weight", "expected"):
            ask()
    with refused("q.weight", "[3, 8]", "[8, 8]"):
        kfac.compute_natural_gradient(model, gradients={"q.weight": torch.ones(3, 8)})
    with refusal("no parameter has a gradient"):
        model.zero_grad()
        kfac.compute_natural_gradient(model)
