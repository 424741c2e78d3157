"""Taps in a compiled graph: one whole graph, the same numbers, no recompilation from capture to capture."""

from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import gramian
from gramian.core.errors import GramianError
from gramian.taps import Withheld, hub_of
from tests.kit import networks
from tests.kit.matrix import FULL
from tests.kit.models import CASES
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.taps.checks import assert_norms, captured, gradients, loop_norms, problem

pytestmark = [pytest.mark.oracle, pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]

GENERIC = ("vit", "mha")
"""Cases with a layer that is run again sample by sample, which a graph cannot do."""
OFTEN = ("mlp", "tied_gpt", "reused", "convnet", "lora", "padded_embedding", "hf_gpt2", "hf_llama")
ORDERS = ("taps first", "compiled first")
AOT_EAGER = (
    list(product((name for name in CASES if name not in GENERIC), ORDERS))
    if FULL
    else [("padded_embedding", "compiled first"), ("convnet", "taps first")]
)
INDUCTOR = list(product((*OFTEN, "gpt"), ORDERS)) if FULL else [("mlp", "taps first")]


one_worker = pytest.mark.xdist_group("inductor")
"""Of xdist, which then starts inductor once."""


@pytest.fixture(autouse=True)
def _fresh_graphs() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def scalar_kernels(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the short run inductor does without vectors of the processor: to find them takes longer than all else it does."""
    if backend == "inductor" and not FULL:
        monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)
        monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _squares(model: nn.Module, x: Tensor, reduction: str = "sum") -> Tensor:
    return model(x).square().sum() / (len(x) if reduction == "mean" else 1)


def _compile(model: nn.Module, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True, **options)


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, order, backend",
    [
        *((name, order, "aot_eager") for name, order in AOT_EAGER),
        *(pytest.param(name, order, "inductor", marks=one_worker) for name, order in INDUCTOR),
    ],
)
@pytest.mark.usefixtures("scalar_kernels")
def test_norms_and_gradients_of_a_whole_compiled_graph_are_exact(name: str, order: str, backend: str) -> None:
    case = CASES[name]
    tolerance = 1e-6 if case.computes_in_float32 else 1e-9
    model, batch, loss = problem(case)
    untouched = deepcopy(model)
    if order == "taps first":
        with gramian.per_sample_norms(model) as norms:
            compiled = _compile(model, backend)
            loss(compiled, *batch, reduction="mean").backward()
        assert _graphs() == 1
    else:
        compiled = _compile(model, backend)
        loss(compiled, *batch, reduction="mean").backward()
        model.zero_grad()
        norms = captured(compiled, loss, batch)
        assert _graphs() == 2  # without and with taps
    assert_norms(norms.values, loop_norms(untouched, loss, batch), tolerance)
    loss(untouched, *batch, reduction="mean").backward()
    for (parameter, found), expected in zip(gradients(model).items(), gradients(untouched).values(), strict=True):
        assert (found is None) == (expected is None), parameter
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.norm()))
    statuses = {n: cover.status for n, cover in norms.coverage.items()}
    assert statuses == {
        n: "frozen" if not p.requires_grad else "unused" if n.startswith("spare.") else "covered"
        for n, p in model.named_parameters()
    }


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["direct", "gram"])
def test_a_forced_algorithm_is_exact_under_compile(algorithm: str) -> None:
    model, batch, loss = problem(CASES["padded_embedding"])
    with gramian.per_sample_norms(_compile(model), algorithm=algorithm) as norms:
        loss(_compile(model), *batch, reduction="mean").backward()
    assert_norms(norms.values, loop_norms(model, loss, batch))
    assert norms.coverage["1.weight"].algorithm == algorithm


@pytest.mark.full
def test_coverage_counts_uses_under_compile() -> None:
    model, batch, loss = problem(CASES["reused"])
    compiled = _compile(model)
    norms = captured(compiled, loss, batch)
    assert {n: c.uses for n, c in norms.coverage.items()} == {
        "inner.weight": 1, "inner.bias": 1, "shared.weight": 3, "shared.bias": 3, "head.weight": 1, "head.bias": 1,
    }  # fmt: skip


@pytest.mark.full
def test_autocast_inside_a_compiled_graph_is_within_half_precision() -> None:
    model, batch, loss = problem(CASES["tied_gpt"], dtype=torch.float32)
    compiled = _compile(model)
    with gramian.per_sample_norms(compiled) as norms:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(compiled, *batch, reduction="mean")
        value.backward()
    assert_norms(norms.values, loop_norms(model, loss, batch), 1e-2)


@pytest.mark.full
def test_hugging_face_models_called_by_keyword_compile_and_are_exact() -> None:
    model, (ids, _), _ = problem(CASES["hf_gpt2"])

    def loss(model: nn.Module, ids: Tensor, reduction: str) -> Tensor:
        terms_B = F.cross_entropy(model(input_ids=ids).logits.transpose(1, 2), ids, reduction="none").sum(1)
        return terms_B.sum() if reduction == "sum" else terms_B.mean()

    compiled = _compile(model)
    with gramian.per_sample_norms(compiled) as norms:
        loss(compiled, ids, "mean").backward()
    assert_norms(norms.values, loop_norms(model, loss, (ids,)))


@pytest.mark.full
def test_an_empty_batch_compiles() -> None:
    model, batch, loss = problem(CASES["mlp"], samples=0)
    compiled = _compile(model)
    norms = captured(compiled, loss, batch, "sum", loss_reduction="sum")
    assert norms.values.shape == (0,)


@pytest.mark.parametrize("how", ["model.compile()", "model.forward = torch.compile(model.forward)"])
def test_a_model_compiled_in_place_is_exact_in_every_capture(how: str) -> None:
    model, batch, loss = problem(CASES["padded_embedding"])
    expected = loop_norms(model, loss, batch)
    if how == "model.compile()":
        model.compile(backend="aot_eager", fullgraph=True)
    else:
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        norms = captured(model, loss, batch)
        assert_norms(norms.values, expected)
    assert _graphs() == 1


@pytest.mark.full
def test_a_loss_function_compiled_around_the_model_is_exact() -> None:
    model, batch, loss = problem(CASES["mlp"])
    step = torch.compile(lambda *b: loss(model, *b, reduction="mean"), backend="aot_eager", fullgraph=True)
    with gramian.per_sample_norms(model) as norms:
        step(*batch).backward()
    assert_norms(norms.values, loop_norms(model, loss, batch))


def test_compiled_and_eager_passes_of_one_capture_are_concatenated() -> None:
    model, batch, loss = problem(CASES["mlp"])
    compiled = _compile(model)
    with gramian.per_sample_norms(model) as norms:
        loss(compiled, *batch, reduction="mean").backward()
        loss(model, *batch, reduction="mean").backward()
    expected = loop_norms(model, loss, batch)
    assert_norms(norms.values, torch.cat([expected, expected]))


@pytest.mark.full
@pytest.mark.parametrize(
    "order", ["one backward", pytest.param("forward order", marks=pytest.mark.full), "reverse order"]
)
def test_several_compiled_forwards_before_a_backward_are_distinguished(order: str) -> None:
    model, batch, loss = problem(CASES["padded_embedding"], samples=5)
    compiled = _compile(model, dynamic=True)
    with gramian.per_sample_norms(compiled, loss_reduction="sum") as norms:
        losses = [loss(compiled, *(t[p] for t in batch), reduction="sum") for p in (slice(0, 2), slice(2, 5))]
        if order == "one backward":
            (losses[0] + losses[1]).backward()
        else:
            for value in losses if order == "forward order" else reversed(losses):
                value.backward()
    assert_norms(norms.values, loop_norms(model, loss, batch))


@pytest.mark.full
def test_batch_size_and_units_hold_under_compile() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    compiled = _compile(model)
    with gramian.per_sample_norms(compiled, loss_reduction="sum", batch_size=3) as norms:
        _squares(compiled, x.flatten(0, 1)).backward()
    assert_norms(norms.values, loop_norms(model, _squares, (x,)))
    model.zero_grad()
    with gramian.per_sample_norms(compiled, loss_reduction="sum", sample_ids=torch.zeros(3, dtype=torch.long)) as norms:
        _squares(compiled, x).backward()
    total = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    assert_norms(norms.values, total[None])


def test_withheld_gradients_are_not_formed_under_compile() -> None:
    model, batch, loss = problem(CASES["padded_embedding"])
    compiled = _compile(model)
    with hub_of(model).governed_by(Withheld()), gramian.per_sample_norms(compiled) as norms:
        loss(compiled, *batch, reduction="mean").backward()
    assert all(p.grad is None for p in model.parameters())
    assert_norms(norms.values, loop_norms(model, loss, batch))


# ---- how often a graph is built -------------------------------------------------------------------------------------


def test_entering_captures_again_builds_no_graph() -> None:
    model, batch, loss = problem(CASES["padded_embedding"])
    compiled = _compile(model)
    expected = loop_norms(model, loss, batch)
    for options in ({}, {"algorithm": "gram"}, {"loss_reduction": 0.25}, {"loss_scale": 1.0}, {}):
        norms = captured(compiled, loss, batch, **options)
        assert_norms(norms.values, expected)
        assert _graphs() == 1
    with gramian.per_sample_norms(compiled), gramian.observe(compiled, gramian.DiagonalFisher(), gramian.NoiseScale()):
        loss(compiled, *batch, reduction="mean").backward()
    assert _graphs() == 1


def test_going_back_and_forth_between_captured_and_plain_steps_builds_two_graphs_in_all() -> None:
    model, batch, loss = problem(CASES["mlp"])
    compiled = _compile(model)
    for _ in range(3):
        loss(compiled, *batch, reduction="mean").backward()
        captured(compiled, loss, batch)
    assert _graphs() == 2


def test_batches_of_many_sizes_build_one_graph_more() -> None:
    model, batch, loss = problem(CASES["padded_embedding"], samples=18)
    compiled = _compile(model)
    with gramian.per_sample_norms(compiled) as norms:
        start = 0
        for size in (4, 3, 5, 6):
            loss(compiled, *(t[start : start + size] for t in batch), reduction="mean").backward()
            start += size
    assert_norms(norms.values, loop_norms(model, loss, batch))
    assert _graphs() <= 2


class Stack(networks.GPT):
    """A tied GPT of more blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__(tied=True)
        self.blocks = nn.Sequential(*(networks.Block(12, 3, 15, causal=True) for _ in range(blocks)))


def _next_token(model: nn.Module, ids: Tensor, reduction: str = "mean") -> Tensor:
    terms_B = F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none").sum(1)
    return terms_B.sum() if reduction == "sum" else terms_B.mean()


@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if FULL else [])])
def test_blocks_compiled_one_by_one_share_their_graphs(backend: str) -> None:
    torch.manual_seed(0)
    model, ids = Stack(6).double(), torch.randint(13, (4, 6))
    expected = loop_norms(model, _next_token, (ids,))
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    for _ in range(2):
        with gramian.per_sample_norms(model) as norms:
            _next_token(model, ids).backward()
        assert_norms(norms.values, expected)
    assert _graphs() <= 2
    _next_token(model, ids).backward()
    assert _graphs() <= 3


def test_a_compiled_head_tied_to_an_embedding_that_runs_eagerly_is_exact() -> None:
    model, batch, loss = problem(CASES["tied_gpt"])
    expected = loop_norms(model, loss, batch)
    model.head.compile(backend="aot_eager", fullgraph=True)
    norms = captured(model, loss, batch)
    assert_norms(norms.values, expected)
    assert norms.coverage["tokens.weight"].uses == 2


@pytest.mark.parametrize("twice", [False, True])
def test_a_tied_weight_inside_a_layer_that_no_graph_has_is_exact(twice: bool) -> None:
    """As the head of BERT, which adds a bias of its own and breaks the graph; `twice`: it also begins the model."""

    class Head(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.decoder, self.bias = nn.Linear(5, 5, bias=False), nn.Parameter(torch.randn(5))
            self.decoder.weight = weight

        def forward(self, h: Tensor) -> Tensor:
            return self.decoder(h) * self.bias.cos()

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(net.first((net.head(x) if twice else x).tanh()).tanh())

    first = nn.Linear(5, 5)
    model, x = Toy(forward, first=first, head=Head(first.weight)).double(), torch.randn(3, 4, 5, dtype=torch.float64)
    compiled = torch.compile(model, backend="aot_eager")
    with gramian.per_sample_norms(compiled, loss_reduction="sum") as norms:
        _squares(compiled, x).backward()
    assert_norms(norms.values, loop_norms(model, _squares, (x,)))
    assert norms.coverage["first.weight"].uses == 2 + twice


@pytest.mark.full
def test_a_layer_whose_number_of_uses_changes_from_graph_to_graph_is_exact() -> None:
    def repeated(net: Any, x: Tensor) -> Tensor:
        for _ in range(net.times):
            x = net.layer(x).tanh()
        return x

    model, x = Toy(repeated, layer=nn.Linear(5, 5), times=1).double(), torch.randn(3, 4, 5, dtype=torch.float64)
    compiled = _compile(model)
    for times in (1, 3, 2, 1, 3):
        model.times = times
        with gramian.per_sample_norms(compiled, loss_reduction="sum") as norms:
            _squares(compiled, x).backward()
        assert norms.coverage["layer.weight"].uses == times
        assert_norms(norms.values, loop_norms(model, _squares, (x,)))


def test_a_use_that_gets_no_gradient_in_a_compiled_graph_is_left_out() -> None:
    model = Toy(lambda net, x: (net.layer(x), net.layer(x.tanh())), layer=nn.Linear(5, 5)).double()
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    compiled = _compile(model)

    def loss(model: nn.Module, x: Tensor, reduction: str) -> Tensor:
        return model(x)[1].square().sum()

    with gramian.per_sample_norms(compiled, loss_reduction="sum") as norms:
        loss(compiled, x, "sum").backward()
    assert_norms(norms.values, loop_norms(model, loss, (x,)))


# ---- graph breaks ---------------------------------------------------------------------------------------------------


class Broken(nn.Module):
    """The graph breaks between two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.head(self.second(h))


@pytest.mark.full
def test_a_graph_that_breaks_between_tied_layers_is_exact() -> None:
    model, x = Broken().double(), torch.randn(3, 4, 5, dtype=torch.float64)
    compiled = torch.compile(model, backend="aot_eager")
    with gramian.per_sample_norms(compiled, loss_reduction="sum") as norms:
        _squares(compiled, x).backward()
    assert_norms(norms.values, loop_norms(model, _squares, (x,)))


def test_a_module_compiled_by_itself_and_called_several_times_is_exact_or_refused_by_name() -> None:
    model, batch, loss = problem(CASES["reused"])
    expected = loop_norms(model, loss, batch)
    model.shared.compile(backend="aot_eager", fullgraph=True)
    try:
        norms = captured(model, loss, batch)
    except GramianError as error:
        assert str(error).startswith("shared.") and "expected" in str(error)  # noqa: PT017
    else:
        assert_norms(norms.values, expected)


@pytest.mark.parametrize("name", GENERIC)
def test_generic_sites_without_fullgraph_are_exact_or_refused_by_name(name: str) -> None:
    model, batch, loss = problem(CASES[name])
    expected = loop_norms(model, loss, batch)
    compiled = torch.compile(model, backend="aot_eager")
    try:
        norms = captured(compiled, loss, batch)
    except GramianError as error:
        assert "expected" in str(error) and "\n" not in str(error)  # noqa: PT017
    else:
        assert_norms(norms.values, expected)


# ---- checkpointing --------------------------------------------------------------------------------------------------


def checkpointed() -> Toy:
    return Toy(
        lambda net, x: net.head(checkpoint(net.inner, x, use_reentrant=False)),
        inner=nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 6)),
        head=nn.Linear(6, 4),
    )


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_layers_inside_a_checkpoint_of_a_compiled_graph_are_counted_once_and_exact(backend: str) -> None:
    model, x = checkpointed().double(), torch.randn(3, 5, 6, dtype=torch.float64)
    compiled = _compile(model, backend)
    with gramian.per_sample_norms(compiled, loss_reduction="sum") as norms:
        _squares(compiled, x).backward()
    assert_norms(norms.values, loop_norms(model, _squares, (x,)))
    assert all(cover.status == "covered" and cover.uses == 1 for cover in norms.coverage.values())


@pytest.mark.full
def test_a_compiled_block_inside_an_eager_checkpoint_is_counted_once_and_exact() -> None:
    model, x = checkpointed().double(), torch.randn(3, 5, 6, dtype=torch.float64)
    expected = loop_norms(model, _squares, (x,))
    model.inner.compile(backend="aot_eager", fullgraph=True)
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        _squares(model, x).backward()
    assert_norms(norms.values, expected)
    assert all(cover.status == "covered" and cover.uses == 1 for cover in norms.coverage.values())


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, line", [("vit", "model (ViT) "), ("mha", "attention (MultiheadAttention) ")])
def test_generic_sites_are_refused_by_name_in_a_whole_graph(name: str, line: str) -> None:
    model, batch, loss = problem(CASES[name])
    compiled = _compile(model)
    with pytest.raises(RuntimeError, match="expected a registered site") as caught, gramian.per_sample_norms(compiled):
        loss(compiled, *batch, reduction="mean").backward()
    assert line in str(caught.value)
    assert "forward" not in model.head.__dict__


def test_batch_norm_in_training_mode_is_refused_by_name_while_tracing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    compiled = _compile(model)
    with pytest.raises(Exception, match="GramianError") as caught, gramian.per_sample_norms(compiled):
        _squares(compiled, torch.randn(3, 4)).backward()
    assert "1 (BatchNorm1d) mixes the samples" in str(caught.value)


@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if FULL else [])])
def test_a_second_backward_through_one_compiled_forward_is_refused(backend: str) -> None:
    model, batch, loss = problem(CASES["mlp"])
    compiled = _compile(model, backend)
    with (
        pytest.raises(RuntimeError, match="ran twice through one forward|second time"),
        gramian.per_sample_norms(compiled),
    ):
        value = loss(compiled, *batch, reduction="mean")
        value.backward(retain_graph=True)
        value.backward()
    norms = captured(compiled, loss, batch)
    assert_norms(norms.values, loop_norms(model, loss, batch))


def test_create_graph_through_a_compiled_model_is_refused() -> None:
    model, batch, loss = problem(CASES["mlp"])
    compiled = _compile(model)
    with refusal(r"^backward: create_graph=True .*expected"), gramian.per_sample_norms(compiled):
        loss(compiled, *batch, reduction="mean").backward(create_graph=True)


def test_rows_that_are_not_a_multiple_of_the_batch_are_refused_by_name_under_compile() -> None:
    compiled = _compile(
        Toy(lambda net, x: net.head(x) + net.mix(x[:4]).sum(), mix=nn.Linear(5, 5), head=nn.Linear(5, 3))
    )
    with refusal(r"^mix \(Linear\) saw 4 rows.*expected"), gramian.per_sample_norms(compiled):
        _squares(compiled, torch.randn(6, 5)).backward()


def test_a_weight_used_outside_its_layer_is_noticed_and_named_under_compile() -> None:
    compiled = _compile(
        Toy(
            lambda net, ids: F.linear(net.mix(net.table(ids)), net.table.weight),
            table=nn.Embedding(7, 4),
            mix=nn.Linear(4, 4),
        )
    )
    with refusal(r"^table\.weight: .*expected"), gramian.per_sample_norms(compiled):
        _squares(compiled, torch.randint(7, (4, 5))).backward()


def test_position_ids_without_a_batch_axis_are_refused_by_name_under_compile() -> None:
    compiled = _compile(
        Toy(
            lambda net, ids: net.table(ids) + net.positions(torch.arange(ids.shape[1])),
            table=nn.Embedding(7, 4),
            positions=nn.Embedding(8, 4),
        )
    )
    with refusal(r"^positions: returns no batch axis.*eager mode"), gramian.per_sample_norms(compiled):
        _squares(compiled, torch.randint(7, (4, 8))).backward()


def test_a_root_that_dynamo_gives_up_on_is_refused_in_the_words_of_eager_mode() -> None:
    model = nn.Sequential(nn.Conv1d(4, 3, 1), nn.BatchNorm1d(3))
    model.compile(backend="aot_eager")
    with refusal(r"^1 \(BatchNorm1d\) mixes the samples.*expected"), gramian.per_sample_norms(model):
        _squares(model, torch.randn(5, 4, 6)).backward()


def test_norms_of_a_root_that_dynamo_gives_up_on_are_those_of_single_samples() -> None:
    model, x_BTI = nn.GRU(4, 3, batch_first=True).double(), torch.randn(5, 6, 4, dtype=torch.float64)
    loop = [torch.autograd.grad(_squares(lambda x: model(x)[0], x[None]), list(model.parameters())) for x in x_BTI]
    model.compile(backend="aot_eager")
    with gramian.per_sample_norms(model, loss_reduction="sum") as norms:
        _squares(lambda x: model(x)[0], x_BTI).backward()
    expected_B = torch.stack([torch.cat([g.flatten() for g in own]).norm() for own in loop])
    torch.testing.assert_close(norms.values, expected_B, rtol=1e-9, atol=0)


# ---- leaving --------------------------------------------------------------------------------------------------------


def test_a_compiled_model_runs_untapped_after_a_capture_and_after_an_error() -> None:
    model, batch, loss = problem(CASES["mlp"])
    compiled = _compile(model)
    captured(compiled, loss, batch)
    with pytest.raises(ValueError, match="user"), gramian.per_sample_norms(compiled):
        loss(compiled, *batch, reduction="mean")
        raise ValueError("user")
    assert all("forward" not in m.__dict__ for m in model.modules())
    model.zero_grad()
    loss(compiled, *batch, reduction="mean").backward()
    found = gradients(model)
    untouched = CASES["mlp"].make(torch.float64)
    loss(untouched, *batch, reduction="mean").backward()
    for name, gradient in gradients(untouched).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


def test_a_compiled_backward_after_the_capture_is_left_is_an_ordinary_one() -> None:
    model, batch, loss = problem(CASES["mlp"])
    compiled = _compile(model)
    with gramian.per_sample_norms(compiled) as norms:
        loss(compiled, *batch, reduction="mean").backward()
        late = loss(compiled, *batch, reduction="mean")
    late.backward()
    assert norms.values.shape == (4,)
    untouched = CASES["mlp"].make(torch.float64)
    loss(untouched, *batch, reduction="mean").backward()
    for name, gradient in gradients(untouched).items():
        torch.testing.assert_close(gradients(model)[name], 2 * gradient, rtol=1e-9, atol=1e-12)
