"""What operators leave alone, what they refuse, what they hold in memory, and how other libraries see them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gramian
from gramian.curvature import (
    EmpiricalFisherOperator,
    GGNOperator,
    HessianOperator,
    KFACOperator,
    ShiftedOperator,
    from_curvlinops,
    to_curvlinops,
)
from gramian.curvature.operators.parameter_space import ParameterSpace
from gramian.linalg import wide
from gramian.linalg.spectra.operator import DenseOperator
from gramian.taps.hub import hub_of
from tests.curvature.operator_problems import OPERATORS, PROBLEMS, close, dense, probe
from tests.kit.memory import measured
from tests.kit.models import CASES
from tests.kit.refusals import refused

# ---- left alone ------------------------------------------------------------------------------------------------------


class Alive(nn.Module):
    """Everything that a pass could leave a trace in: dropout, running statistics, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(4, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.norm(self.frozen(x)).tanh()))


def _alive() -> tuple[Alive, list[tuple[Tensor, Tensor]]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Alive().double(), [(torch.randn(5, 3, dtype=torch.float64), torch.randint(3, (5,)))]


MADE = {
    "hessian": lambda model, batches: HessianOperator(model, "cross_entropy", batches),
    "ggn": GGNOperator,
    "fisher": EmpiricalFisherOperator,
}


@pytest.mark.parametrize("operator", MADE)
def test_the_user_s_model_and_random_state_stay_as_they_are(operator: str) -> None:
    model, batches = _alive()
    model.dropout.eval()  # modes differ inside the model
    F.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    called: list[Tensor] = []
    model.head.weight.register_hook(called.append)
    parameters = dict(model.named_parameters())
    before = [
        [(m.training, m) for m in model.modules()],
        {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()},
        {name: p.requires_grad for name, p in parameters.items()},
        {name: t.clone() for name, t in model.state_dict().items()},
        torch.get_rng_state(),
    ]
    made = MADE[operator](model, batches)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        first = made.matmat(probe(made))
    close(made.matmat(probe(made)), first, 1e-14)  # no dropout, no autocast, whatever mode of gradients
    assert not called and not first.requires_grad
    assert before[0] == [(m.training, m) for m in model.modules()]
    assert all(p is parameters[name] for name, p in model.named_parameters())
    for name, p in parameters.items():
        assert p.requires_grad == before[2][name]
        assert (p.grad is None) == (before[1][name] is None)
        assert p.grad is None or torch.equal(p.grad, before[1][name])
    assert all(torch.equal(t, before[3][name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before[4])
    close(first, MADE[operator](model.eval(), batches).matmat(probe(made)), 1e-14)


@pytest.mark.parametrize("operator", MADE)
def test_what_runs_out_of_memory_raises_and_leaves_the_model_whole(operator: str) -> None:
    """Zeros in its place would be a spectrum that is silently wrong."""
    model, batches = _alive()
    made = MADE[operator](model, batches)
    parameters = list(model.parameters())

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    handle = model.head.register_forward_hook(no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        made.matmat(probe(made))
    handle.remove()
    assert model.training and all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert made.matmat(probe(made)).abs().max() > 0


def test_products_are_those_of_the_model_as_it_is_now() -> None:
    model, batches = _alive()
    made = GGNOperator(model, batches)
    before = made.matmat(probe(made))
    with torch.no_grad():
        model.head.weight *= 2
    after = made.matmat(probe(made))
    assert (after - before).abs().max() > 1e-3
    close(after, GGNOperator(model, batches).matmat(probe(made)), 1e-14)


def test_taps_that_nobody_listens_to_change_nothing_and_open_captures_are_refused() -> None:
    model, batches = _alive()
    made = GGNOperator(model, batches)
    expected = made.matmat(probe(made))
    hub_of(model).install()
    try:
        close(made.matmat(probe(made)), expected, 1e-14)
    finally:
        hub_of(model).uninstall()
    with refused("model: is inside an open capture"), gramian.per_sample_norms(model):
        made.matmat(probe(made))
    close(made.matmat(probe(made)), expected, 1e-14)


@pytest.mark.parametrize("name", ["padded_embedding", "mha", "unused"])
def test_forward_and_backward_derivatives_are_transposes(name: str) -> None:
    """Padding rows, fast paths of attention, tied weights, layers that nothing reaches: ⟨u, M v⟩ = ⟨M u, v⟩."""
    case = CASES[name]
    model = case.make(torch.float64)
    x, y = case.make_batch(2, torch.float64, torch.Generator().manual_seed(0))
    for made in (GGNOperator(model, [(x, y)]), EmpiricalFisherOperator(model, [(x, y)], per="token")):
        y_NK = probe(made)
        product_NK = made.matmat(y_NK)
        left, right = y_NK[:, 0] @ product_NK[:, 1], y_NK[:, 1] @ product_NK[:, 0]
        assert float((left - right).abs()) < 1e-12 * float(y_NK[:, 0].norm() * product_NK[:, 1].norm())
        assert product_NK.abs().max() > 1e-6


class _Cubed(torch.autograd.Function):
    """x³ with a backward that can be differentiated, and no forward mode."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradients[0]


class Cubed(nn.Module):
    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.plain = plain
        self.unused, self.layer = nn.Linear(2, 2), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x, x, x, need_weights=False)[0]
        return h**3 if self.plain else _Cubed.apply(h)


@pytest.mark.parametrize("operator", MADE)
def test_a_layer_without_forward_mode_has_the_products_of_its_backward(operator: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain, custom = Cubed(plain=True).double(), Cubed(plain=False).double()
        custom.load_state_dict(plain.state_dict())
        batches = [(torch.randn(b, 3, 4, dtype=torch.float64), torch.randint(4, (b, 3))) for b in (2, 1)]
    made = MADE[operator](plain, batches)
    close(MADE[operator](custom, batches).matmat(probe(made, 3)), made.matmat(probe(made, 3)), 1e-12)


@pytest.mark.full
def test_a_compiled_model_is_run_as_it_was_written() -> None:
    model, batches = _alive()
    made = GGNOperator(model, batches)
    expected = made.matmat(probe(made))
    close(GGNOperator(torch.compile(model, backend="eager"), batches).matmat(probe(made)), expected, 1e-14)
    model.head.compile(backend="eager")
    close(made.matmat(probe(made)), expected, 1e-14)


def test_a_checkpointed_model_has_the_same_products() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Sequential(*plain[:2])), plain[2])
    batches = [(torch.randn(5, 3, dtype=torch.float64), torch.randint(3, (5,)))]
    for make in (*MADE.values(), lambda m, b: GGNOperator(m, b, lambda name, p: name.endswith("weight"))):
        made = make(plain, batches)
        close(make(wrapped, batches).matmat(probe(made)), made.matmat(probe(made)), 1e-13)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["ggn", "fisher_of_tokens", "fisher_of_sequences"])
def test_products_do_not_depend_on_the_chunks_of_rows(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = OPERATORS[operator](PROBLEMS["words"]())
    expected = made.matmat(probe(made))
    monkeypatch.setattr(wide, "BLOCK", 2 * 5)
    close(made.matmat(probe(made)), expected, 1e-13)


def logits_alive(operator: str, columns: int) -> float:
    """Memory at the peak of a product, in units of all logits."""
    rows, classes = 512, 4096
    model = nn.Linear(2, classes, bias=False)
    batches = [(torch.ones(rows, 2), torch.zeros(rows, dtype=torch.long))]
    made = GGNOperator(model, batches) if operator == "ggn" else EmpiricalFisherOperator(model, batches)
    y_NK = probe(made, columns)
    with measured() as memory:
        made.matmat(y_NK)
    return memory.peak / (4 * rows * classes)


def _few_alive(operator: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wide, "BLOCK", 2**16)
        logits_alive(operator, 1)  # what torch keeps from its first use on is not counted
        assert logits_alive(operator, 1) < 4.1
        assert logits_alive(operator, 2) < 5.1


def test_four_copies_of_the_logits_are_alive_at_most_of_the_gauss_newton_matrix() -> None:
    _few_alive("ggn")


def test_four_copies_of_the_logits_are_alive_at_most_of_the_fisher() -> None:
    _few_alive("fisher")


# ---- refused ---------------------------------------------------------------------------------------------------------


def _wrong(**told: Any) -> None:
    model, batches = _alive()
    made = GGNOperator(told.pop("model", model), **({"batches": batches} | told))
    made.matmat(probe(made))


MODEL, [(X, Y)] = _alive()
REFUSED: dict[str, tuple[str, Any]] = {
    "one batch": ("batches: is one batch", lambda: _wrong(batches=(X, Y))),
    "no batch": ("batches: is empty", lambda: _wrong(batches=[])),
    "no term": ("batches: no position has a target", lambda: _wrong(batches=[(X, torch.full_like(Y, -100))])),
    "no labels": ("labels: expected them", lambda: _wrong(batches=[{"x": X}])),
    "shape of labels": ("labels: have shape [5, 1]", lambda: _wrong(batches=[(X, Y[:, None])])),
    "unknown class": ("labels: hold 7", lambda: _wrong(batches=[(X, Y.fill_(7).clone())])),
    "classes as numbers": ("labels: expected numbers", lambda: _wrong(loss="mse")),
    "unknown loss": ("loss: got 'hinge'", lambda: _wrong(loss="hinge")),
    "weights": ("token_weights: got [3]", lambda: _wrong(batches=[(X, Y, torch.ones(3))])),
    "negative weights": ("token_weights: hold negative", lambda: _wrong(batches=[(X, Y, -torch.ones(5))])),
    "unknown name": ("parameters: head.beight is not a parameter", lambda: _wrong(parameters=["head.beight"])),
    "frozen name": ("parameters: frozen.weight is not a parameter", lambda: _wrong(parameters=["frozen.weight"])),
    "one name": ("parameters: is the text 'head.weight'", lambda: _wrong(parameters="head.weight")),
    "nothing left": ("parameters: none is left", lambda: _wrong(parameters=lambda name, p: False)),
    "half precision": ("model: is in torch.bfloat16", lambda: _wrong(model=_alive()[0].bfloat16())),
    "no model": ("model: expected an nn.Module", lambda: _wrong(model=3)),
    "per": ("per: got 'word'", lambda: EmpiricalFisherOperator(MODEL, [(X, Y)], per="word")),
    "shape of a vector": ("vector: has shape [3, 1]", lambda: GGNOperator(MODEL, [(X, Y)]).matmat(torch.ones(3, 1))),
    "terms unknown": ("num_terms: expected the loss", lambda: HessianOperator(MODEL, F.cross_entropy, [1, 2])),
    "terms too few": (
        "num_terms: expected a list of 2",
        lambda: HessianOperator(MODEL, F.cross_entropy, [1, 2], num_terms=[3]),
    ),
    "terms of a named loss": (
        "num_terms: terms of a named loss",
        lambda: HessianOperator(MODEL, "cross_entropy", [(X, Y)], num_terms=[5]),
    ),
    "reduction": (
        "loss_reduction: expected",
        lambda: HessianOperator(MODEL, F.cross_entropy, [1], num_terms=[1], loss_reduction="median"),
    ),
    "no number": (
        "loss_fn: did not return a number",
        lambda: HessianOperator(MODEL, lambda m, b: m(b), [X]).to_dense(),
    ),
    "no gradient": (
        "loss_fn: its loss has no gradient",
        lambda: HessianOperator(MODEL, lambda m, b: m(b).detach().sum(), [X]).to_dense(),
    ),
    "no factors": ("kfac: has no factors yet", lambda: KFACOperator(gramian.KFACNaturalGradient())),
    "shift": ("shift: expected a finite number", lambda: ShiftedOperator(DenseOperator(torch.eye(2)), float("nan"))),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_argument_is_refused_by_name(what: str) -> None:
    message, attempt = REFUSED[what]
    with refused(message, "expected"):
        attempt()


# ---- spaces, shifts, adapters ----------------------------------------------------------------------------------------


def test_vectors_and_named_tensors_are_two_forms_of_one_thing() -> None:
    space = ParameterSpace.of(PROBLEMS["words"]().model)
    flat = torch.randn(space.dim, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    named = space.unflatten(flat)
    assert "head.weight" not in named  # it is the table's
    assert torch.equal(space.flatten(named), flat)
    assert torch.equal(space.flatten(space.unflatten(flat[:, 0])), flat[:, 0])
    only = space.flatten({"fc.bias": named["fc.bias"]})
    assert torch.equal(space.unflatten(only)["fc.bias"], named["fc.bias"]) and int((only != 0).sum()) == 2 * 4


def test_a_shift_adds_the_identity() -> None:
    made = OPERATORS["ggn"](PROBLEMS["mlp"]())
    y_NK = probe(made)
    close(ShiftedOperator(made, 0.5).matmat(y_NK), made.matmat(y_NK) + 0.5 * y_NK, 1e-14)


@pytest.mark.oracle
def test_scipy_and_curvlinops_see_the_same_matrix() -> None:
    from scipy.sparse.linalg import eigsh

    made, expected = OPERATORS["ggn"](PROBLEMS["mlp"]()), dense("ggn", "mlp")
    values = torch.linalg.eigvalsh(expected)
    found = torch.tensor(eigsh(made.to_scipy(), k=3, return_eigenvectors=False).copy())
    close(found.sort().values, values[-3:], 1e-8)
    theirs = to_curvlinops(made)
    y_NK = probe(made)
    close(theirs @ y_NK, expected @ y_NK)
    named = made.space.unflatten(y_NK[:, 0])
    for part, want in zip(
        theirs @ list(named.values()), made.space.unflatten(expected @ y_NK[:, 0]).values(), strict=True
    ):
        close(part, want)
    close((theirs + theirs) @ y_NK[:, 0], 2 * expected @ y_NK[:, 0])
    close(from_curvlinops(theirs).matmat(y_NK), expected @ y_NK)
    close(to_curvlinops(ShiftedOperator(made, 1.0)) @ y_NK, expected @ y_NK + y_NK)
