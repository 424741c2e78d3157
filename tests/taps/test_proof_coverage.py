"""What a proof covers: batches that could show more than it was shown, or that go another way, are proven anew or refused."""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gramian
from gramian.taps.hub import hub_of
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.taps.test_row_proof import Normalising

COUPLED = "changes when other samples are replaced"


class Mode(enum.Enum):
    """A flag."""

    APART = 0
    MIXED = 1


class Mixing(nn.Module):
    """Two layers; on demand the samples are centred between them."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(4, 5), nn.Linear(5, 3), act or nn.Tanh()

    def forward(self, x: Tensor, mixes: Any = False) -> Tensor:
        h = self.act(self.first(x))
        mixes = mixes() if callable(mixes) else mixes is Mode.MIXED if isinstance(mixes, Mode) else mixes
        return self.last(h - h.mean(0) if mixes else h)


def centred() -> Toy:
    """Centres samples."""
    return Toy(lambda net, h: h - h.mean(0))


def norms(model: nn.Module, *arguments: Any, **options: Any) -> Tensor:
    with gramian.per_sample_norms(model, "sum", **options) as found:
        model(*arguments).square().sum().backward()
    return found.values


FLAGS: dict[str, tuple[Any, Any]] = {
    "bool of numpy": (np.bool_(False), np.bool_(True)),
    "integer of numpy": (np.int64(0), np.int64(1)),
    "array": (np.array(0), np.array(1)),
    "enumeration": (Mode.APART, Mode.MIXED),
    "tensor": (torch.tensor(False), torch.tensor(True)),
    "tensor of one element": (torch.tensor([0]), torch.tensor([1])),
    "bytes": (b"", b"mix"),
    "set": (set(), {"mix"}),
    "complex": (0j, 1 + 0j),
    "function": (lambda: False, lambda: True),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_of_any_kind_is_part_of_what_is_proven(flag: str) -> None:
    model, x = Mixing(), torch.randn(6, 4)
    apart, mixed = FLAGS[flag]
    assert norms(model, x, apart).isfinite().all()
    with refusal(COUPLED):
        norms(model, x, mixed)


def test_a_module_in_the_memory_of_one_that_is_gone_is_another_module() -> None:
    model, x = Mixing(), torch.randn(6, 4)
    for kind in (nn.Tanh, nn.ReLU):
        model.act = kind()  # of two that were there before, the place of the first is free again
        norms(model, x)
    model.act = centred()
    with refusal(COUPLED):
        norms(model, x)


def pairs() -> Toy:
    """Rows 0 and 1, 2 and 3, … depend on each other."""
    return Toy(
        lambda net, x: net.layer(
            (x.unflatten(0, (-1, 2)) - x.unflatten(0, (-1, 2)).mean(1, keepdim=True)).flatten(0, 1)
        ),
        layer=nn.Linear(4, 3),
    )


@pytest.mark.parametrize("later", [[0, 1, 2, 3, 4, 5], [0, 1, 1, 2, 2, 0]])
def test_rows_that_depend_on_each_other_inside_of_units_are_proven_for_these_units_alone(later: list[int]) -> None:
    model, x = pairs(), torch.randn(6, 4)
    assert norms(model, x, sample_ids=torch.tensor([0, 0, 1, 1, 2, 2])).isfinite().all()
    assert norms(model, x, sample_ids=torch.tensor([2, 2, 0, 0, 1, 1])).isfinite().all()
    with refusal(COUPLED):
        norms(model, x, sample_ids=torch.tensor(later))


def test_rows_that_depend_on_themselves_are_proven_for_all_units() -> None:
    model, x = Mixing(), torch.randn(6, 4)
    for ids in ([0, 0, 1, 1, 2, 2], [0, 1, 1, 2, 2, 0]):
        norms(model, x, sample_ids=torch.tensor(ids))
    assert len(hub_of(model).proof.proven) == 1


def test_a_batch_with_a_sample_that_is_not_finite_covers_no_other() -> None:
    model, x = Normalising(), torch.randn(6, 4)
    spoilt = x.clone()
    spoilt[2] = torch.nan
    norms(model, spoilt)
    with refusal("a backward that is linear"):
        norms(model, x)


class Detector(nn.Module):
    """Each sample's boxes divided by their number, or by that of the whole batch."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.layer, self.whole = nn.Linear(4, 4), whole

    def forward(self, x: Tensor, targets: list[Any]) -> Tensor:
        boxes = [target["boxes"] if isinstance(target, dict) else target for target in targets]
        h, every = self.layer(x), sum(map(len, boxes))
        return torch.stack([(h[i] - b).square().sum() / (every if self.whole else len(b)) for i, b in enumerate(boxes)])


TARGETS: dict[str, Callable[[Tensor], Any]] = {"dicts": lambda b: {"boxes": b, "label": 1}, "tensors": lambda b: b}


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("counts", [(1, 2, 3, 5), (4, 8, 1, 4)])
def test_targets_in_a_list_go_with_their_samples(kind: str, counts: tuple[int, ...]) -> None:
    x, targets = torch.randn(4, 4), [TARGETS[kind](torch.randn(count, 4)) for count in counts]
    found = norms(Detector(False), x, targets)
    assert found.shape == (4,)
    with refusal(COUPLED):
        norms(Detector(True), x, targets)


def test_norms_of_samples_with_targets_are_those_of_each_alone() -> None:
    model, x = Detector(False).double(), torch.randn(3, 4).double()
    targets = [{"boxes": torch.randn(count, 4).double()} for count in (1, 2, 4)]
    expected = []
    for i in range(3):
        model.zero_grad()
        model(x[i : i + 1], targets[i : i + 1]).square().sum().backward()
        expected.append(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())
    torch.testing.assert_close(norms(model, x, targets), torch.stack(expected))


class LowRank(nn.Module):
    """W + B A with B = 0, as fine-tuning begins."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.layer = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False), nn.Linear(4, 3)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def test_autocast_remembers_no_weights_that_stood_in_for_zeros() -> None:
    x = torch.randn(6, 4)
    losses, gradients = [], []
    for captured in (False, True):
        torch.manual_seed(0)
        model = LowRank()
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            gramian.per_sample_norms(model) if captured else torch.enable_grad(),
        ):
            loss = model(x).float().square().sum(1).mean()
            loss.backward()
        losses.append(float(loss))
        gradients.append(model.down.weight.grad.norm())
    assert losses[0] == losses[1] and gradients[0] == gradients[1] == 0


UNFIT = {
    "sparse": lambda: torch.randn(6, 4).to_sparse(),
    "meta": lambda: torch.randn(6, 4, device="meta"),
    "8 bits": lambda: torch.randn(6, 4).to(torch.float8_e4m3fn),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_tensor_whose_rows_cannot_be_taken_is_refused_in_one_line(kind: str) -> None:
    with refusal(r"^model: is given a tensor that is .*; expected dense tensors"):
        norms(Mixing(), torch.randn(6, 4), UNFIT[kind]())


def test_a_complex_parameter_is_refused_by_its_name() -> None:
    model = Mixing()
    model.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    with refusal("^phase: is a complex parameter; expected a real one"):
        norms(model, torch.randn(6, 4))


def test_a_layer_without_outputs_is_no_obstacle() -> None:
    class Narrow(Mixing):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Linear(4, 0)

        def forward(self, x: Tensor, mixes: Any = False) -> Tensor:
            return super().forward(x) + self.none(x).sum(1, keepdim=True)

    torch.manual_seed(0)
    narrow = Narrow()
    x = torch.randn(6, 4)
    plain = Mixing()
    plain.load_state_dict({key: value for key, value in narrow.state_dict().items() if "none" not in key})
    torch.testing.assert_close(norms(narrow, x), norms(plain, x))


def test_ids_outside_the_batch_are_refused() -> None:
    with refusal("^sample_ids: expected ids below"):
        norms(Mixing(), torch.randn(3, 4), sample_ids=torch.tensor([0, 1, 10**9]))


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_recurrent_layers_under_autocast_are_compared_as_they_round(kind: str) -> None:
    torch.manual_seed(0)
    # oneDNN has no LSTM in bfloat16 on a CPU without it
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
        assert (
            norms(
                Toy(
                    lambda net, x: net.head(net.layer(x)[0][:, -1]),
                    layer=getattr(nn, kind)(4, 4, batch_first=True),
                    head=nn.Linear(4, 2),
                ),
                torch.randn(6, 9, 4),
            )
            .isfinite()
            .all()
        )


class Table(nn.Module):
    """A position table of one row, which a flag or a number sends through a sum of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, weight: Any = 0) -> Tensor:
        row = self.table(torch.ones(1, 2))
        h = x + row
        return self.layer(h + weight * row.pow(2).sum() if weight else h)


@pytest.mark.parametrize("weight", [True, 0.5, torch.tensor(0.5)])
@pytest.mark.parametrize("compiled", [False, True])
def test_sums_look_at_a_shared_row_again_where_flags_change(weight: Any, compiled: bool) -> None:
    torch.manual_seed(0)
    model, x = Table(), torch.randn(6, 4)
    called = torch.compile(model, backend="eager") if compiled else model
    zero = torch.zeros(()) if isinstance(weight, Tensor) else type(weight)(0)

    def loss(given: Any) -> Tensor:
        return called(x, given).square().sum(1).mean()

    plain = float(loss(zero))
    kfac = gramian.KFACNaturalGradient(update_freq=1, strict=True)
    with kfac.capture(model, loss_reduction="mean", num_terms=6):
        first = loss(zero)
        first.backward()
    assert float(first) == pytest.approx(plain)
    with refusal("table: returns one row"), kfac.capture(model, loss_reduction="mean", num_terms=6):
        loss(weight).backward()


class Pair(NamedTuple):
    """A batch."""

    x: Tensor


def test_a_compiled_model_with_a_class_of_the_users_own_is_refused() -> None:
    def reads(net: Any, batch: Any) -> Tensor:
        h = net.layer(batch[0])
        return h - h.mean(0) if isinstance(batch, Pair) else h

    torch.compiler.reset()  # past its limit of graphs of one forward, torch runs it eagerly
    model = torch.compile(Toy(reads, layer=nn.Linear(4, 3)), backend="eager")
    with refusal("^model: is compiled and gets an argument that no graph can pass"):
        norms(model, Pair(torch.randn(6, 4)))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_integers_are_arguments_like_others(dtype: torch.dtype) -> None:
    assert (
        norms(
            Toy(lambda net, x, counts: net.layer(x) * counts.long().sum(1, keepdim=True), layer=nn.Linear(4, 3)),
            torch.randn(6, 4),
            torch.ones(6, 2).to(dtype),
        )
        .isfinite()
        .all()
    )


def test_a_hook_that_comes_and_goes_with_every_step_is_proven_once() -> None:
    model, x = Mixing(), torch.randn(6, 4)
    for _ in range(3):
        handle = model.first.register_forward_hook(lambda *given: None)
        norms(model, x)
        handle.remove()
    assert len(hub_of(model).proof.proven) == 1
