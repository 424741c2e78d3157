"""Operators are the matrices they are called after: against dense float64 oracles, torch's own Hessian, and curvlinops."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import gramian
from gramian.curvature import (
    EmpiricalFisherOperator,
    GGNOperator,
    HessianOperator,
    KFACOperator,
    ShiftedOperator,
)
from tests.curvature.operator_problems import IGNORE, OPERATORS, PROBLEMS, close, dense, hessian, probe
from tests.curvature.small import net, refresh, words
from tests.kit.matrix import sample
from tests.kit.refusals import refusal, refused
from tests.kit.toys import Toy
from tests.oracles import dense_curvature

SLOW = [("hessian", "gpt"), ("hessian", "hugging_face")]
"""A backward for each of hundreds of parameters."""
PAIRS = [pair for pair in itertools.product(OPERATORS, PROBLEMS) if pair not in SLOW]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("operator", "problem"),
    [*sample(PAIRS, 7, case=lambda pair: pair[1]), *(pytest.param(*pair, marks=pytest.mark.full) for pair in SLOW)],
)
def test_the_matrix_is_that_of_the_oracle(operator: str, problem: str) -> None:
    made = OPERATORS[operator](PROBLEMS[problem]())
    y_NK = probe(made, 3)
    close(made.matmat(y_NK), dense(operator, problem) @ y_NK)
    close(made.matvec(y_NK[:, 1]), made.matmat(y_NK)[:, 1])


@pytest.mark.oracle
@pytest.mark.parametrize("operator", sample([*OPERATORS], 1, case=lambda _: 0))
def test_the_dense_matrix_is_symmetric_and_known_entry_by_entry(operator: str) -> None:
    matrix = OPERATORS[operator](PROBLEMS["words"]()).to_dense()
    close(matrix, dense(operator, "words"))
    close(matrix, matrix.mT, 1e-12)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products_are_symmetric(operator: str, dtype: torch.dtype) -> None:
    problem = PROBLEMS["gpt"]()
    problem.model.to(dtype)
    try:
        made = OPERATORS[operator](problem)
        y_NK = probe(made)
        product_NK = made.matmat(y_NK)
    finally:
        problem.model.double()
    assert product_NK.dtype == made.dtype == dtype
    left, right = y_NK[:, 0] @ product_NK[:, 1], y_NK[:, 1] @ product_NK[:, 0]
    scale = y_NK[:, 0].norm() * product_NK[:, 1].norm()
    assert abs(float((left - right) / scale)) < (1e-13 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("operator", OPERATORS)
def test_uneven_batches_with_masks_are_one_big_batch_in_any_order(operator: str) -> None:
    problem = PROBLEMS["words"]()
    big = tuple(torch.cat(parts) for parts in zip(*problem.batches, strict=True))
    made = [
        OPERATORS[operator](problem, batches=batches)
        for batches in (problem.batches, problem.batches[::-1], iter(problem.batches), [big])
    ]
    products = [each.matmat(probe(each, 1)) for each in made]
    for product in products[1:]:
        close(product, products[0], 1e-12)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_batch_without_a_loss_term_adds_nothing(operator: str) -> None:
    problem = PROBLEMS["mlp"]()
    x, y = problem.batches[0]
    silent = (x, torch.full_like(y, IGNORE))
    made, more = OPERATORS[operator](problem), OPERATORS[operator](problem, batches=[*problem.batches, silent])
    close(more.matmat(probe(made)), made.matmat(probe(made)), 1e-12)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("operator", "problem"),
    sample([*itertools.product(OPERATORS, ["words", "hugging_face"])], 2, case=lambda pair: pair[1] != "words"),
)
def test_a_filter_is_the_sub_block_of_the_dense_matrix(operator: str, problem: str) -> None:
    told = PROBLEMS[problem]()
    named = [name for name, p in told.model.named_parameters()]
    chosen = [named[3], named[1]]
    rows = [
        i
        for i, name in enumerate(name for name, p in told.model.named_parameters() for _ in range(p.numel()))
        if name in chosen
    ]
    expected = dense(operator, problem)[rows][:, rows]
    by_name = OPERATORS[operator](told, parameters=chosen)
    assert by_name.dim == len(rows) and [*by_name.space.shapes] == [named[1], named[3]]
    close(by_name.to_dense(), expected)
    by_rule = OPERATORS[operator](told, parameters=lambda name, p: name in chosen and p.numel() > 0)
    close(by_rule.matmat(probe(by_name)), expected @ probe(by_name))


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_tied_parameter_answers_to_all_of_its_names(operator: str) -> None:
    told = PROBLEMS["words"]()
    first, other = (OPERATORS[operator](told, parameters=[name]) for name in ("table.weight", "head.weight"))
    assert [*other.space.shapes] == ["table.weight"]
    close(other.matmat(probe(first)), first.matmat(probe(first)), 1e-14)
    both = OPERATORS[operator](told, parameters=iter(["head.weight", "table.weight"]))
    assert both.dim == first.dim


MODEL, BATCHES = PROBLEMS["mlp"]().model, PROBLEMS["mlp"]().batches
NO_OPERATOR = "operator: is of type NoneType; expected an Operator such as DenseOperator(matrix)"
REFUSED: dict[str, tuple[str, Any]] = {
    "no batches": ("batches: is of type NoneType; expected a list of batches", lambda: GGNOperator(MODEL, None)),
    "a number of batches": ("batches: is of type int", lambda: HessianOperator(MODEL, F.cross_entropy, 3)),
    "a number of parameters": ("parameters: is 3; expected", lambda: GGNOperator(MODEL, BATCHES, parameters=3)),
    "numbers for names": ("parameters: is [3]; expected", lambda: GGNOperator(MODEL, BATCHES, parameters=[3])),
    "lists for names": ("parameters: is [['x']]; expected", lambda: GGNOperator(MODEL, BATCHES, parameters=[["x"]])),
    "no curvature": ("kfac: is of type NoneType; expected a KFACNaturalGradient", lambda: KFACOperator(None)),
    "nothing to shift": (NO_OPERATOR, lambda: ShiftedOperator(None, 1.0)),
    "a list for a vector": ("vector: is of type list; expected", lambda: GGNOperator(MODEL, BATCHES).matvec([1])),
    "a list for columns": ("vector: is of type list; expected", lambda: GGNOperator(MODEL, BATCHES).matmat([1])),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_argument_is_refused_by_name(what: str) -> None:
    message, attempt = REFUSED[what]
    with refused(message, "expected"):
        attempt()


def test_the_gauss_newton_matrix_has_the_rank_of_the_outputs() -> None:
    """Not that of one gradient: g gᵀ with the gradient of the mean loss has rank one."""
    made = OPERATORS["ggn"](PROBLEMS["mlp"]())
    image_NK = made.matmat(probe(made, 14))
    assert int(torch.linalg.matrix_rank(image_NK, rtol=1e-8)) == 6 * (3 - 1)


# ---- other libraries -------------------------------------------------------------------------------------------------


def _peer(kind: str, model: nn.Module, loss: nn.Module, batches: list[Any]) -> Any:
    import curvlinops

    parameters = [p for p in model.parameters() if p.requires_grad]
    return getattr(curvlinops, kind)(model, loss, parameters, batches, check_deterministic=False)


@pytest.mark.oracle
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_products_are_those_of_curvlinops(loss: str) -> None:
    problem = PROBLEMS["regression" if loss == "mse" else "mlp"]()
    batches = [tuple(batch[:2]) for batch in problem.batches]
    if loss == "cross_entropy":
        batches = [(x, y.clamp(min=0)) for x, y in batches]
    else:
        batches = [(x.flatten(0, 1), y.flatten(0, 1)) for x, y in batches]
    criterion = nn.MSELoss() if loss == "mse" else nn.CrossEntropyLoss()
    for kind, ours in (
        ("GGNLinearOperator", GGNOperator(problem.model, batches, loss=loss)),
        ("HessianLinearOperator", HessianOperator(problem.model, loss, batches)),
        ("EFLinearOperator", EmpiricalFisherOperator(problem.model, batches, loss=loss)),
        ("EFLinearOperator", EmpiricalFisherOperator(problem.model, batches, per="token", loss=loss)),
    ):
        y_NK = probe(ours)
        close(ours.matmat(y_NK), (_peer(kind, problem.model, criterion, batches) @ y_NK).detach())


@pytest.mark.oracle
def test_the_gauss_newton_matrix_of_attention_is_that_of_curvlinops() -> None:
    problem = PROBLEMS["gpt"]()
    batches = [(x, y.clamp(min=0)) for x, y in problem.batches]

    flat = Toy(lambda net, x_BT: net.inner(x_BT).flatten(0, 1), inner=problem.model).eval()
    ours = GGNOperator(problem.model, batches)
    y_NK = probe(ours)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = _peer("GGNLinearOperator", flat, nn.CrossEntropyLoss(), [(x, y.flatten()) for x, y in batches])
        expected = (theirs @ y_NK).detach()
    problem.model.train()
    close(ours.matmat(y_NK), expected)


@pytest.mark.oracle
def test_the_hessian_is_that_of_torch() -> None:
    problem = PROBLEMS["mlp"]()
    x, y = problem.batches[0]
    sizes = {name: p.shape for name, p in problem.model.named_parameters()}

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in sizes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(sizes.items(), parts, strict=True)}
        return F.cross_entropy(functional_call(problem.model, named, (x,)), y)

    flat = torch.cat([p.detach().reshape(-1) for p in problem.model.parameters()])
    close(hessian(problem, batches=[(x, y)]).to_dense(), torch.autograd.functional.hessian(loss, flat))


@pytest.mark.oracle
def test_labels_of_a_causal_model_are_shifted_as_the_model_does() -> None:
    """Against the loss that Hugging Face's model computes from the same batch."""
    problem = PROBLEMS["hugging_face"]()
    problem.model.eval()
    terms = [float((batch["labels"][:, 1:] != IGNORE).sum()) for batch in problem.batches]
    own = HessianOperator(problem.model, lambda model, batch: model(**batch).loss, problem.batches, num_terms=terms)
    read = hessian(problem)
    assert read.num_terms == own.num_terms == sum(terms)
    close(read.matmat(probe(read)), own.matmat(probe(own)), 1e-6)  # it casts its logits to float32


# ---- a loss of the user's --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["mean", "sum", 0.25])
def test_the_hessian_does_not_depend_on_how_the_loss_is_written(written: str | float) -> None:
    problem = PROBLEMS["mlp"]()
    counts = [int((y != IGNORE).sum()) for _, y in problem.batches]

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        reduction = written if isinstance(written, str) else "sum"
        loss = F.cross_entropy(model(batch[0]), batch[1], ignore_index=IGNORE, reduction=reduction)
        return loss if isinstance(written, str) else written * loss

    made = HessianOperator(problem.model, loss_fn, problem.batches, loss_reduction=written, num_terms=counts)
    close(made.matmat(probe(made)), dense("hessian", "mlp") @ probe(made))


def test_a_loss_without_curvature_has_none() -> None:
    model = nn.Linear(3, 1, bias=False)
    made = HessianOperator(model, lambda model, x: model(x).sum(), [torch.ones(2, 3)])
    assert torch.equal(made.to_dense(), torch.zeros(3, 3))


# ---- K-FAC -----------------------------------------------------------------------------------------------------------


def _dense_kfac(kfac: gramian.KFACNaturalGradient, model: nn.Module, damped: bool) -> Tensor:
    """Every block written out, G ⊗ A on [weight | bias], in the order of the model's parameters."""
    places: dict[str, range] = {}
    start = 0
    for name, p in model.named_parameters():
        places[name] = range(start, start + p.numel())
        start += p.numel()
    matrix = torch.zeros(start, start, dtype=torch.float64)
    for block in kfac.kfac_factors.values():
        G = block.G.to_dense().double()
        damping, eye = block.damping, partial(torch.eye, dtype=torch.float64)
        if block.A is None:
            rows = list(places[block.spec.parameters[0]])
            matrix[torch.tensor(rows)[:, None], rows] = G + (damping.lambda_G * eye(len(G)) if damped else 0)
            continue
        A = block.A.to_dense().double()
        if damped:
            A, G = A + damping.lambda_A * eye(len(A)), G + damping.lambda_G * eye(len(G))
        o, m = len(G), len(A)
        weight = places[block.spec.parameters[0]]
        index_OM = torch.empty(o, m, dtype=torch.long)
        width = m - block.spec.has_bias
        flat = torch.tensor(weight)
        index_OM[:, :width] = flat.view(width, o).mT if block.spec.layout == "table" else flat.view(o, width)
        if block.spec.has_bias:
            index_OM[:, width] = torch.tensor(places[block.spec.parameters[1]])
        rows = index_OM.reshape(-1)
        matrix[rows[:, None], rows] = torch.kron(G, A)
    return matrix


@pytest.mark.oracle
@pytest.mark.parametrize("damped", [False, True])
@pytest.mark.parametrize("shape", sample([(2, 3), (4, 6)], 1, case=lambda _: 0))
def test_the_operator_of_k_fac_is_its_kronecker_product(damped: bool, shape: tuple[int, int]) -> None:
    """Low-rank and dense sides, weight and bias jointly, norms by their exact blocks."""
    model = net(dtype=torch.float64)
    kfac = refresh(gramian.KFACNaturalGradient(use_eigenvalue_correction=False), model, words(shape))
    kfac.compute_natural_gradient(model)
    made = KFACOperator(kfac, damped=damped)
    assert [*made.space.shapes] == [name for name, _ in model.named_parameters()]
    y_NK = probe(made, 3)
    close(made.matmat(y_NK), _dense_kfac(kfac, model, damped) @ y_NK)
    left, right = (y_NK[:, i] @ made.matvec(y_NK[:, 1 - i]) for i in range(2))
    assert float((left - right).abs() / left.abs()) < 1e-10


@pytest.mark.oracle
def test_half_a_layer_of_k_fac_is_the_sub_block() -> None:
    model = net(dtype=torch.float64)
    kfac = refresh(gramian.KFACNaturalGradient(), model)
    named = [name for name, p in model.named_parameters() for _ in range(p.numel())]
    rows = [i for i, name in enumerate(named) if name in ("fc.bias", "norm.bias")]
    made = KFACOperator(kfac, parameters=["fc.bias", "norm.bias"])
    close(made.to_dense(), _dense_kfac(kfac, model, False)[rows][:, rows])
    assert [*KFACOperator(kfac, parameters=lambda name, p: p.dim() == 2).space.shapes] == [
        name for name, p in model.named_parameters() if p.dim() == 2
    ]


def test_a_parameter_without_curvature_has_no_place_in_k_fac() -> None:
    """No placeholder stands for it: the largest eigenvalue is one of the factors'."""

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Toy(lambda net, x: net.used(x), used=nn.Linear(3, 2), unused=nn.Linear(4, 4)).double()
        x, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(2, (5,))
    kfac = gramian.KFACNaturalGradient()
    with kfac.capture(model, num_terms=5):
        (1e-4 * F.cross_entropy(model(x), y)).backward()
    made = KFACOperator(kfac)
    assert [*made.space.shapes] == ["used.weight", "used.bias"]
    block = kfac.kfac_factors["used"]
    top = block.A.eigenvalues().max() * block.G.eigenvalues().max()
    assert torch.linalg.eigvalsh(made.to_dense()).max() == pytest.approx(float(top), rel=1e-10) and top < 1e-3
    with refusal("parameters: unused.weight is not a parameter with curvature"):
        KFACOperator(kfac, parameters=["unused.weight"])


def test_a_tied_parameter_of_k_fac_answers_to_all_of_its_names() -> None:
    model = net(tied=True, dtype=torch.float64)
    kfac = refresh(gramian.KFACNaturalGradient(), model)
    first, other = (KFACOperator(kfac, parameters=[name]) for name in ("table.weight", "head.weight"))
    assert [*other.space.shapes] == ["table.weight"]
    close(other.matmat(probe(first)), first.matmat(probe(first)), 1e-14)


@pytest.mark.oracle
def test_the_fisher_of_sequences_is_k_fac_s_where_its_blocks_are_exact() -> None:
    """Two ways to one matrix: per-sample gradients by taps, and products."""
    model, (x, y) = net(dtype=torch.float64), words()
    kfac = refresh(gramian.KFACNaturalGradient(), model, (x, y))
    for name in ("norm.weight", "norm.bias"):
        made = EmpiricalFisherOperator(model, [(x, y)], [name])
        close(made.to_dense(), kfac.kfac_factors[name].G.to_dense().double(), 1e-9)


def test_the_oracles_agree_where_they_must() -> None:
    """A linear model has GGN = Hessian; of one token each, sequences are tokens."""
    x, y = PROBLEMS["mlp"]().batches[0][0], torch.tensor([0, 2, 1, 1])
    model = nn.Linear(4, 3, dtype=torch.float64)
    close(dense_curvature.dense_ggn(model, lambda m: m(x), y), dense_curvature.dense_hessian(model, lambda m: m(x), y))
    by_token, by_sequence = (
        dense_curvature.dense_empirical_fisher(model, lambda m: m(x), y, per=per) for per in ("token", "sequence")
    )
    close(by_token, by_sequence, 1e-14)
