"""The formulas against what torch holds: saved tensors, optimizer states, the peak of a whole step."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from gramian.models import GPT, GPTConfig
from gramian.plan.transformer_memory import Kind, Needs, gpt
from gramian.train.loop.objective import Objective

TOLERANCE = 0.02
"""Token ids and norm statistics of these tiny shapes; ten times as much would still be a useful plan."""
SHAPES = [  # windows, tokens, vocabulary, layers, width, heads
    (2, 64, 300, 3, 64, 4),
    (3, 32, 1000, 5, 32, 2),
    (1, 128, 64, 2, 96, 8),
]


def model_of(shape: tuple[int, ...], kind: Kind = "fp32", dropout: float = 0.0, blocks: int = 0) -> GPT:
    _, tokens, vocabulary, layers, width, heads = shape
    model = GPT(GPTConfig(vocabulary, tokens, layers, width, heads, dropout=dropout))
    model.checkpoint_blocks = blocks
    return model.double() if kind == "fp64" else model


def needs_of(shape: tuple[int, ...], kind: Kind = "fp32", dropout: float = 0.0, blocks: int = 0) -> Needs:
    windows, tokens, vocabulary, layers, width, heads = shape
    described = gpt(vocabulary, tokens, layers, width, heads, dropout=dropout)
    return Needs(described, kind, tokens, windows, checkpoint_blocks=blocks, device="cpu")


def saved_bytes(model: nn.Module, run: Callable[[], object], half: bool = False) -> int:
    """Bytes of all storages that a forward keeps for the backward, those of parameters aside."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in known:
            kept.setdefault(address, tensor)  # alive, so that no later one takes its place
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16) if half else nullcontext(),
    ):
        result = run()
    del result
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def step_of(
    model: nn.Module, windows: int, length: int, vocabulary: int, isolated: bool = False
) -> Callable[[], Tensor]:
    tokens = torch.randint(vocabulary, (windows, length), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(length) // 20).expand(windows, -1) if isolated else None
    objective = Objective(model)
    return lambda: objective(tokens, tokens, 1.0, documents)[0]


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_of_the_reference_gpt_are_counted_exactly(shape: tuple[int, ...], tied: bool) -> None:
    _, tokens, vocabulary, layers, width, heads = shape
    model = GPT(GPTConfig(vocabulary, tokens, layers, width, heads, tied=tied))
    described = gpt(vocabulary, tokens, layers, width, heads, tied=tied)
    assert described.parameters == model.num_parameters()
    assert described.block_parameters == sum(parameter.numel() for parameter in model.blocks[0].parameters())


@pytest.mark.parametrize("kind, momentum", [("adamw", False), ("sgd", False), ("sgd", True)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_optimizers_keep_what_is_planned(kind: str, momentum: bool, precision: Kind) -> None:
    model = model_of(SHAPES[0], precision)
    made = (
        torch.optim.AdamW(model.parameters())
        if kind == "adamw"
        else torch.optim.SGD(model.parameters(), momentum=0.9 * momentum)
    )
    step_of(model, *SHAPES[0][:3])().backward()
    made.step()
    states = [value for state in made.state.values() for value in state.values() if isinstance(value, Tensor)]
    held = sum(state.nbytes for state in states if state.dim())
    needs = Needs(needs_of(SHAPES[0]).shape, precision, 64, 2, optimizer=kind, momentum=momentum)  # type: ignore[arg-type]
    assert held == needs.states * needs.weights
    assert needs.weights == sum(parameter.nbytes for parameter in model.parameters())


# ---- activations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_what_the_reference_gpt_keeps_for_the_backward_is_what_is_planned(
    shape: tuple[int, ...], kind: Kind, dropout: float, blocks: int
) -> None:
    model = model_of(shape, kind, dropout, blocks)
    measured = saved_bytes(model, step_of(model, *shape[:3]), half=kind == "bf16")
    planned = needs_of(shape, kind, dropout, blocks).activations(shape[0])
    assert planned.kept + planned.casts + planned.loss == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_mask_between_documents_is_planned(kind: Kind) -> None:
    windows, tokens, vocabulary, layers, width, heads = SHAPES[2]
    model = model_of(SHAPES[2])
    measured = saved_bytes(model, step_of(model, windows, tokens, vocabulary, isolated=True), half=kind == "bf16")
    described = gpt(vocabulary, tokens, layers, width, heads)
    planned = Needs(described, kind, tokens, windows, isolated=True, device="cpu").activations(windows)
    assert planned.kept + planned.casts + planned.loss == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_block_keeps_what_is_planned_for_a_recomputed_one(shape: tuple[int, ...], kind: Kind) -> None:
    windows, tokens, _, _, width, _ = shape
    model = model_of(shape)
    given = torch.randn(windows, tokens, width, requires_grad=True)
    measured = saved_bytes(model, lambda: model.blocks[0](given), half=kind == "bf16")
    needs = needs_of(shape, kind)
    casts = needs.shape.block_matrices * 2 if kind == "bf16" else 0
    assert needs.block(windows) + casts == pytest.approx(measured, rel=TOLERANCE)


def test_attention_without_a_fused_kernel_keeps_its_probabilities() -> None:
    """As float64 on a GPU: planned for there, measured here."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    windows, tokens, vocabulary, layers, width, heads = SHAPES[0]
    model = model_of(SHAPES[0], "fp64")
    with sdpa_kernel(SDPBackend.MATH):
        measured = saved_bytes(model, step_of(model, windows, tokens, vocabulary))
    planned = Needs(gpt(vocabulary, tokens, layers, width, heads), "fp64", tokens, windows).activations(windows)
    assert planned.kept + planned.loss == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize(
    "kind, blocks, vocabulary",
    [
        ("fp32", 0, 64),
        ("fp32", 0, 1000),
        ("fp32", 2, 64),
        *(pytest.param("bf16", n, 1000, marks=pytest.mark.full) for n in (0, 1)),
    ],
)
def test_a_step_peaks_below_the_plan_by_at_most_its_gradients(kind: Kind, blocks: int, vocabulary: int) -> None:
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")
    shape = (4, 64, vocabulary, 4, 64, 4)
    model = model_of(shape, kind, blocks=blocks)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    forward = step_of(model, *shape[:3])

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16"):
            loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    memory = tracker.MemTracker()
    memory.track_external(model, optimizer)
    with memory:
        step()
    measured = memory.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    needs = needs_of(shape, kind, blocks=blocks)
    planned = (2 + needs.states) * needs.weights + needs.activations(shape[0]).total
    assert measured * (1 - TOLERANCE) <= planned <= (measured + needs.weights) * (1 + TOLERANCE)


# ---- micro-batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch, micro_batch, processes, windows",
    [(16, 0, 1, 16), (16, 0, 3, 6), (16, 4, 1, 4), (16, 4, 8, 2), (3, 0, 8, 1)],
)
def test_a_process_takes_its_share_of_a_step_but_no_more_than_a_micro_batch(
    batch: int, micro_batch: int, processes: int, windows: int
) -> None:
    needs = Needs(gpt(64, 8, 1, 8, 1), "fp32", 8, batch, micro_batch)
    assert needs.windows(processes) == windows
