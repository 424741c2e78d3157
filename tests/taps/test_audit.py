"""The audit of every backward: silent where the taps explain the gradient, by name where they do not."""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramian
from gramian.taps.audit import TURNS, Audit, Projections
from gramian.taps.gradients import Outer, PerSampleGradient, Summed
from gramian.taps.sites import site_registry
from gramian.taps.sites.site import tokens
from tests.kit.matrix import sample
from tests.kit.models import CASES
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.statistics.problems import assert_norms, problem

MATRIX = [(name, dtype) for name in CASES for dtype in (torch.float64, torch.float32, torch.bfloat16)]
pytestmark = pytest.mark.usefixtures("root_not_taken")
BOTH = pytest.mark.parametrize("proof", ["off", "auto"])
"""By the audit alone, and with the proof, which looks at the same sums before it."""


def _step(model: nn.Module, loss: Callable[[nn.Module], Tensor], **options: Any) -> None:
    with gramian.per_sample_norms(model, "sum", **options):
        loss(model).backward()


@pytest.mark.few_proofs
@pytest.mark.parametrize("name, dtype", sample(MATRIX, 46))
def test_every_case_passes(name: str, dtype: torch.dtype) -> None:
    p = problem(name, 4, dtype) if dtype != torch.bfloat16 else problem(name, 4, torch.float64)
    model = p.case.make(dtype)
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in p.batch)
    with gramian.per_sample_norms(model):
        p.backward(model, batch)


class _Outside(nn.Module):
    """The head reads the embedding's weight behind the module's back."""

    def __init__(self, outside: bool = True) -> None:
        super().__init__()
        self.table, self.mix, self.outside = nn.Embedding(7, 5), nn.Linear(5, 5), outside

    def forward(self, ids_BT: Tensor) -> Tensor:
        h_BTD = self.mix(self.table(ids_BT)).tanh()
        return F.linear(h_BTD, self.table.weight if self.outside else self.table.weight.detach())


_IDS = torch.tensor([[0, 1, 2], [3, 3, 6]])


def _text_loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(_IDS).flatten(0, 1), _IDS.flatten(), reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_weight_used_outside_its_layer_is_named(dtype: torch.dtype) -> None:
    for proof in ("off", "auto"):  # by the audit, and before it by the proof
        with refusal(r"^table\.weight: the taps explain .*used through its own module"):
            _step(_Outside().to(dtype), _text_loss, proof=proof)


def test_a_weight_used_only_outside_its_layer_is_named() -> None:
    with refusal(r"^layer\.weight: got a gradient, but none through its layer"):
        _step(
            Toy(lambda net, x: F.linear(net.other(x), net.layer.weight), layer=nn.Linear(4, 4), other=nn.Linear(4, 4)),
            lambda model: model(torch.randn(3, 4)).square().sum(),
        )


def test_a_penalty_on_a_weight_is_no_sample_and_is_named() -> None:
    model = nn.Linear(4, 3)
    with refusal(r"^weight: the taps explain"):
        _step(model, lambda model: model(torch.randn(3, 4)).square().sum() + model.weight.square().sum())


def test_the_error_can_be_switched_off_together_with_that_of_the_proof() -> None:
    _step(_Outside(), _text_loss, audit=False, proof="off")
    for one in ({"audit": False}, {"proof": "off"}):
        with refusal(r"^table\.weight: the taps explain"):
            _step(_Outside(), _text_loss, **one)


class _Mix(nn.Module):
    """y = x Wᵀ + b, a class that only this file knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _MixSite(gramian.Site):
    """A site with one mistake, or none."""

    kind = "mix"

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def gradients(
        self, module: nn.Module, kept: list[Tensor], output_gradients: list[Tensor], batch: int, extra: Any
    ) -> dict[str, PerSampleGradient]:
        a_BTI, g_BTO = tokens(kept[0], batch), tokens(output_gradients[0], batch)
        weight = Outer(a_BTI, g_BTO) if self.mistake == "orientation" else Outer(g_BTO, a_BTI)
        if self.mistake == "double count":
            weight = Outer(torch.cat([g_BTO, g_BTO], 1), torch.cat([a_BTI, a_BTI], 1))
        if self.mistake == "one token":
            weight = Outer(g_BTO[:, :1], a_BTI[:, :1])
        found: dict[str, PerSampleGradient] = {"weight": weight}
        if self.mistake != "forgotten bias":
            found["bias"] = Summed(2 * g_BTO if self.mistake == "scale" else g_BTO)
        return found


_MISTAKES = {
    "none": None,
    "orientation": r"^1\.weight: the taps explain",
    "double count": r"^1\.weight: the taps explain",
    "one token": r"^1\.weight: the taps explain",
    "scale": r"^1\.bias: the taps explain",
    "forgotten bias": r"^1\.bias: (got a gradient, but none through its layer|the taps explain a gradient of norm 0,)",
}


@BOTH
@pytest.mark.parametrize("mistake", _MISTAKES)
def test_a_registered_site_with_a_mistake_is_named(mistake: str, proof: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_registry, "_BY_CLASS", dict(site_registry._BY_CLASS))
    gramian.register_site(_Mix, _MixSite(mistake))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), _Mix(5), nn.Linear(5, 2))
    x = torch.randn(3, 6, 4)
    if _MISTAKES[mistake] is None:
        _step(model, lambda model: model(x).square().sum(), proof=proof)
        return
    with refusal(_MISTAKES[mistake]):
        _step(model, lambda model: model(x).square().sum(), proof=proof)


def test_a_gradient_of_another_shape_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(_Mix):
        def __init__(self) -> None:
            super().__init__(4)
            self.weight, self.bias = nn.Parameter(torch.randn(7, 4)), nn.Parameter(torch.randn(7))

    monkeypatch.setattr(site_registry, "_BY_CLASS", {**site_registry._BY_CLASS, Wide: _MixSite("orientation")})
    with refusal(r"1\.weight"):
        _step(nn.Sequential(nn.Linear(4, 4), Wide()), lambda model: model(torch.randn(3, 6, 4)).square().sum())


@pytest.mark.parametrize("name", ["mlp", "tied_gpt", "reused"])
def test_gradients_that_were_there_before_do_not_matter(name: str) -> None:
    p = problem(name, 6)
    model = p.model()
    p.backward(model, p.rows(slice(0, 3)))
    with gramian.per_sample_norms(model) as norms:
        p.backward(model, p.rows(slice(3, 6)))
    assert_norms(norms.values, p.norms(slice(3, 6)), p.tolerance)
    reference = p.model()
    p.backward(reference, p.rows(slice(0, 3)))
    p.backward(reference, p.rows(slice(3, 6)))
    for key, q in model.named_parameters():
        assert torch.equal(q.grad, reference.get_parameter(key).grad), key


@BOTH
def test_a_mistake_is_found_whatever_was_accumulated_before(proof: str) -> None:
    model = _Outside()
    _text_loss(model).backward()
    with refusal(r"^table\.weight"):
        _step(model, _text_loss, proof=proof)


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the audit asks for Σ_i g_i."""
    counts: Counter[str] = Counter()
    for form in (Outer, Summed):
        compute = form.total
        monkeypatch.setattr(form, "total", lambda self, c=compute, n=form.__name__: counts.update([n]) or c(self))
    return counts


def test_it_runs_on_the_first_batch_of_a_model_only(totals: Counter[str]) -> None:
    p = problem("mlp", 4)
    model = p.model()
    with gramian.per_sample_norms(model, proof="off"):  # which asks for sums of its own
        p.backward(model, p.batch)
        assert totals == {"Outer": 3, "Summed": 2}
        p.backward(model, p.batch)
    with gramian.per_sample_norms(model, proof="off"):
        p.backward(model, p.batch)
    assert totals == {"Outer": 3, "Summed": 2}
    other = p.model()
    with gramian.per_sample_norms(other, proof="off"):
        p.backward(other, p.batch)
    assert totals == {"Outer": 6, "Summed": 4}


@BOTH
def test_what_starts_to_train_later_is_audited_then(proof: str) -> None:
    model = _Outside()
    model.table.weight.requires_grad_(False)
    _step(model, _text_loss, proof=proof)
    model.table.weight.requires_grad_(True)
    with refusal(r"^table\.weight"):
        _step(model, _text_loss, proof=proof)


@BOTH
def test_a_failed_audit_is_repeated_and_a_repaired_model_passes(proof: str) -> None:
    model = _Outside()
    for _ in range(2):
        with refusal(r"^table\.weight"):
            _step(model, _text_loss, proof=proof)
    model.outside = False
    _step(model, _text_loss, proof=proof)
    model.outside = True  # found right once, and looked at again
    with refusal(r"^table\.weight"):
        for _ in range(TURNS):
            _step(model, _text_loss, proof=proof)


@BOTH
def test_an_audit_that_failed_leaves_the_model_untouched(proof: str) -> None:
    model = _Outside()
    with refusal(r"^table\.weight"):
        _step(model, _text_loss, proof=proof)
    assert all("forward" not in vars(module) for module in model.modules())
    plain = torch.autograd.grad(_text_loss(model), model.table.weight)[0]
    assert plain.isfinite().all()
    assert not model.table.weight._backward_hooks


def test_it_compares_one_backward_even_if_several_follow() -> None:
    p = problem("gpt", 6)
    model = p.model()
    with gramian.per_sample_norms(model) as norms:
        losses = [p.case.loss(model, *p.rows(rows), reduction="mean") for rows in (slice(0, 2), slice(2, 6))]
        for loss in losses:
            loss.backward()
    assert_norms(norms.values, p.norms(), p.tolerance)


def test_one_backward_over_two_forwards_is_compared_as_a_whole() -> None:
    p = problem("gpt", 6)
    model = p.model()
    with gramian.per_sample_norms(model) as norms:
        sum(p.case.loss(model, *p.rows(rows), reduction="mean") for rows in (slice(0, 2), slice(2, 6))).backward()
    assert_norms(norms.values, p.norms(), p.tolerance)
    broken = _Outside()
    with refusal(r"^table\.weight"):
        _step(broken, lambda model: _text_loss(model) + _text_loss(model), proof="off")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_is_no_evidence(value: float) -> None:
    model, x = _wide(), torch.randn(3, 4)
    x[0, 0] = value
    _step(model, lambda model: model(x).square().sum())


@BOTH
def test_a_batch_that_is_not_finite_does_not_use_up_the_audit(proof: str) -> None:
    model = _Outside()
    with torch.no_grad():
        model.mix.bias[0] = float("nan")
    _step(model, _text_loss, proof=proof)
    with torch.no_grad():
        model.mix.bias[0] = 0.0
    with refusal(r"^table\.weight"):
        _step(model, _text_loss, proof=proof)


@BOTH
def test_an_empty_batch_does_not_use_up_the_audit(proof: str) -> None:
    model = _Outside()
    with gramian.per_sample_norms(model, "sum", proof=proof):
        model(_IDS[:0]).sum().backward()
    with refusal(r"^table\.weight"):
        _step(model, _text_loss, proof=proof)


def test_rounding_is_no_mistake_when_a_gradient_cancels() -> None:
    # Output gradients of a sample sum to zero over tokens that share a large activation: the gradient is all rounding.
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    x_BTI, g_BTO = torch.randn(2, 32, 64) + 1e3, torch.randn(2, 32, 64)
    g_BTO -= g_BTO.mean(1, keepdim=True)
    _step(model, lambda model: (model(x_BTI.mean(1, keepdim=True).expand(-1, 32, -1)) * g_BTO).sum())


@BOTH
def test_a_product_in_float32_whose_gradient_is_rounded_for_its_weight_is_no_mistake(proof: str) -> None:
    """Routers of mixtures of experts: a bfloat16 weight, and logits in float32."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 40, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.float(), self.weight.float())

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(40, 40), Router()).bfloat16(), torch.randn(5, 40).bfloat16()
    _step(model, lambda net: net(x).tanh().sum(), proof=proof)


@pytest.mark.parametrize("dtype, apart, agrees", [
    (torch.bfloat16, 1e-5, True), (torch.bfloat16, 1e-3, False), (torch.float32, 1e-5, False),
])  # fmt: skip
def test_a_gradient_that_is_nothing_but_rounding_counts_beside_all_others(
    dtype: torch.dtype, apart: float, agrees: bool
) -> None:
    """One of relative size 10⁻⁵, all of which differs, is rounding in bfloat16 (ε² = 6·10⁻⁵), and a mistake in float32."""
    audit = Audit(dict.fromkeys(("large", "small")), Projections({}, 0.0))  # type: ignore[arg-type]
    audit._arrived = {"large": torch.ones(4, dtype=dtype), "small": torch.full((4,), apart, dtype=dtype)}
    audit._totals = {"large": torch.ones(4), "small": torch.full((4,), -apart)}
    audit._rounding = dict.fromkeys(("large", "small"), (torch.tensor(0.0), dtype, 0))
    with contextlib.nullcontext() if agrees else refusal("^small: the taps explain"):
        audit.verdict()


def test_numbers_below_the_normal_ones_are_no_mistake() -> None:
    """Autograd rounds them to multiples of 6e-8 in float16."""
    for seed in range(8):
        torch.manual_seed(seed)
        model = nn.Linear(3, 2).half()
        with gramian.per_sample_norms(model):
            (1e-6 * model(torch.randn(5, 3).half()).float().log_softmax(-1)[:, 0].mean()).backward()


def test_a_capture_keeps_its_model() -> None:
    captures = [gramian.per_sample_norms(nn.Linear(3, 2))]
    with refusal("no backward ran inside the block"), captures[0]:
        pass


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


# ---- later batches -----------------------------------------------------------------------------------------------------

PRECISIONS = [torch.float64, torch.float32, torch.bfloat16]


class _Net(nn.Module):
    """A table, a convolution, norms, matrices and their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(11, 8), nn.Conv1d(8, 8, 3, padding=1, groups=2)
        self.norm, self.up, self.head = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 11)

    def forward(self, ids_BT: Tensor) -> Tensor:
        h = self.conv(self.table(ids_BT).transpose(1, 2)).transpose(1, 2)
        return self.head(self.up(self.norm(h)).relu())


def _next_token(model: nn.Module, ids_BT: Tensor) -> Tensor:
    return F.cross_entropy(model(ids_BT).flatten(0, 1).float(), ids_BT.roll(-1, 1).flatten())


def _net(dtype: torch.dtype) -> tuple[_Net, Tensor]:
    torch.manual_seed(3)
    return _Net().to(dtype), torch.randint(11, (5, 12))


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", [name for name, _ in _Net().named_parameters()])
def test_a_penalty_on_any_weight_that_enters_the_loss_later_is_named(name: str, dtype: torch.dtype) -> None:
    model, ids = _net(dtype)
    weight = model.get_parameter(name)
    gradient = torch.autograd.grad(_next_token(model, ids), weight)[0]
    beside = torch.randn_like(gradient)
    beside *= (
        gradient.norm() / beside.norm() * (100 if dtype == torch.bfloat16 else 1)
    )  # norms are summed in it on a CPU
    with refusal(rf"^{name}: got a gradient .*penalty"), gramian.per_sample_norms(model):
        for batch in range(2 + TURNS):
            loss = _next_token(model, ids)
            (loss + (beside * weight).sum() if batch > 1 else loss).backward()


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_many_ordinary_batches_are_no_false_alarm(dtype: torch.dtype) -> None:
    model, _ = _net(dtype)
    with gramian.per_sample_norms(model) as norms:
        for batch in range(40):
            ids = torch.randint(11, (1 + batch % 5, 3 + batch), generator=torch.Generator().manual_seed(batch))
            _next_token(model, ids).backward()
    assert norms.values.isfinite().all()


def test_a_small_penalty_is_found_in_float32() -> None:
    model, ids = _net(torch.float32)
    with refusal("penalty"), gramian.per_sample_norms(model):
        for batch in range(2):
            penalty = sum(p.square().sum() for p in model.parameters())
            (_next_token(model, ids) + 1e-3 * batch * penalty).backward()


def test_a_weight_that_is_read_beside_its_layer_later_is_named() -> None:
    model, ids = _net(torch.float32)
    with refusal(r"^up\.weight: got a gradient"), gramian.per_sample_norms(model):
        for batch in range(1 + TURNS):
            beside = F.linear(torch.ones(1, 8), model.up.weight).square().mean()
            (_next_token(model, ids) + min(batch, 1) * beside).backward()


def test_an_unused_weight_that_a_penalty_reaches_is_named() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "idle": nn.Linear(3, 3)})
    model.forward = lambda x: model["used"](x)
    x = torch.randn(4, 3)
    with refusal(r"^idle\.weight: got a gradient"), gramian.per_sample_norms(model):
        for batch in range(2 + TURNS):
            penalty = model["idle"].weight.square().sum()
            (model(x).square().sum() + (1e-3 if batch > 1 else 0.0) * penalty).backward()


def test_k_fac_sees_a_penalty_that_enters_later() -> None:
    model, ids = _net(torch.float32)
    kfac = gramian.KFACNaturalGradient(damping=1e-2, update_freq=1)
    with refusal("penalty"):
        for batch in range(1 + TURNS):
            with kfac.capture(model, num_terms=ids.numel()):
                (_next_token(model, ids) + 0.1 * batch * model.up.weight.square().sum()).backward()


def test_a_compiled_model_is_audited_in_every_backward() -> None:
    torch._dynamo.reset()
    model, ids = _net(torch.float32)
    compiled = torch.compile(model, backend="aot_eager")
    with refusal(r"^up\.weight: .*penalty"), gramian.per_sample_norms(compiled):
        for batch in range(1 + TURNS):
            (_next_token(compiled, ids) + batch * model.up.weight.square().sum()).backward()


def test_the_users_leave_to_round_products_to_tf32_counts_in_every_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = _net(torch.float32)
    seen = []

    def projections(directions: Any, product_rounding: float) -> Projections:
        seen.append(product_rounding)
        return Projections(directions, product_rounding)

    monkeypatch.setattr("gramian.taps.capture.Projections", projections)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with gramian.per_sample_norms(model):
            for _ in range(3):
                _next_token(model, ids).backward()
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [2.0**-10] * 3


def test_products_that_the_user_lets_round_to_bfloat16_are_no_false_alarm() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), torch.randn(4, 200, 64)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")  # which processors without such products ignore
    try:
        for _ in range(4):
            with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
                model(x).square().sum().backward()
    finally:
        torch.set_float32_matmul_precision(before)
    alone = torch.stack([torch.cat([g.flatten() for g in _gradients(model, x[i])]).norm() for i in range(4)])
    torch.testing.assert_close(norms.values, alone, rtol=0.02, atol=0.0)


def _gradients(model: nn.Module, sample: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(model(sample[None]).square().sum(), list(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_first_backward_whose_many_tokens_a_cpu_adds_up_in_half_precision_is_no_false_alarm(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3, 32), nn.LayerNorm(32), nn.Linear(32, 4)).to(dtype)
    ids = torch.randint(3, (32, 256))
    for _ in range(2):
        with gramian.per_sample_norms(model):
            model(ids).float().square().sum((1, 2)).mean().backward()


@pytest.mark.parametrize("name", [name for name, _ in _Net().named_parameters()])
def test_with_one_capture_for_each_backward_every_parameter_takes_its_turn(name: str) -> None:
    model, ids = _net(torch.float32)
    weight = model.get_parameter(name)
    with refusal(rf"^{name}: got a gradient"):
        for batch in range(1 + TURNS):
            with gramian.per_sample_norms(model):
                (_next_token(model, ids) + min(batch, 1) * (weight * torch.ones_like(weight)).sum()).backward()


@pytest.mark.parametrize("every", [1, TURNS])
def test_sums_of_many_tokens_one_after_the_other_are_no_false_alarm(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gramian.taps.capture.TURNS", every)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4 * 8 * 8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(30):
        with gramian.per_sample_norms(model):
            model(torch.randn(6, 3, 12, 12)).logsumexp(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
