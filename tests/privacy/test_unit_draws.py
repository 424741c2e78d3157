"""`unit_of`: units of several records are drawn, clipped and accounted for as one."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

import gramian
from gramian.oracles.clipped_sum import clip
from gramian.privacy.clipping.clip_factors import SLACK
from gramian.privacy.sampling.poisson import PoissonBatchSampler
from gramian.privacy.sampling.record_units import RecordUnits
from gramian.privacy.sampling.row_order import reorders
from tests.kit.refusals import refusal
from tests.privacy.problems import assert_sums, clip_norm
from tests.statistics.problems import problem

pytestmark = pytest.mark.few_proofs
KEY = bytes(range(32))
USERS = np.array([5, 9, 5, 2, 9, 9, 5, 30, 9, 9])
RECORDS_OF = {0: [3], 1: [0, 2, 6], 2: [1, 4, 5, 8, 9], 3: [7]}
"""{unit: its records} in the order of the ids 2, 5, 9, 30."""


def sampler(rate: float, *, most: int | None = None, **options: Any) -> PoissonBatchSampler:
    units = RecordUnits.of(USERS, most, len(USERS))
    return PoissonBatchSampler(KEY, len(units), rate, 1, units=units, **options)


def test_units_are_drawn_at_the_rate_and_their_records_together() -> None:
    draws, found = 1000, np.zeros(4)
    one = sampler(0.3)
    for number in range(draws):
        (piece,) = one.pieces_of(number)
        drawn = sorted(set(piece.units or []))
        assert piece.count == len(drawn)
        assert sorted(piece.indices) == sorted(index for unit in drawn for index in RECORDS_OF[unit])
        assert all(index in RECORDS_OF[unit] for index, unit in zip(piece.indices, piece.units or [], strict=True))
        found[drawn] += 1
    assert (abs(found / draws - 0.3) < 5 * (0.21 / draws) ** 0.5).all()


def test_of_a_large_unit_a_random_subset_is_drawn_by_key() -> None:
    draws, found, subsets = 400, np.zeros(10), set()
    one = sampler(1.0, most=2)
    for number in range(draws):
        (piece,) = one.pieces_of(number)
        assert piece == one.pieces_of(number)[0]
        for unit, records in RECORDS_OF.items():
            own = [index for index, owner in zip(piece.indices, piece.units or [], strict=True) if owner == unit]
            assert len(own) == min(2, len(records)) and set(own) <= set(records) and own == sorted(own)
        subsets.add(tuple(index for index in piece.indices if index in RECORDS_OF[2]))
        found[piece.indices] += 1
    for records in RECORDS_OF.values():
        share = min(2, len(records)) / len(records)
        assert (abs(found[records] / draws - share) <= 5 * (share * (1 - share) / draws) ** 0.5).all()
    assert len(subsets) == 10  # every pair of five


@pytest.mark.parametrize("parts", [None, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_unit_is_in_one_piece_of_one_rank(ranks: int, parts: int | None) -> None:
    whole = sampler(0.6)
    mine = [sampler(0.6, rank=rank, world_size=ranks, max_physical_batch=5) for rank in range(ranks)]
    for one in mine:
        one.parts = parts
    for number in range(30):
        pieces = [one.pieces_of(number) for one in mine]
        assert len({len(of_rank) for of_rank in pieces}) == 1
        assert parts is None or all(len(of_rank) == parts for of_rank in pieces)
        owners = [
            (unit, rank, piece.piece)
            for rank, own in enumerate(pieces)
            for piece in own
            for unit in set(piece.units or [])
        ]
        assert len(owners) == len({unit for unit, _, _ in owners})
        assert sorted(i for own in pieces for piece in own for i in piece.indices) == sorted(
            whole.pieces_of(number)[0].indices
        )
        assert parts is not None or all(len(piece.indices) <= 5 for own in pieces for piece in own)
        assert [piece.last for piece in pieces[0]] == [False] * (len(pieces[0]) - 1) + [True]


def make(p: Any, model: nn.Module, limit: float, **options: Any) -> tuple[gramian.PrivacyEngine, Any, Any]:
    engine = gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=4)
    optimizer = SGD(model.parameters(), lr=1.0)
    settings: dict[str, Any] = {"noise_multiplier": 0.0, "max_grad_norm": limit, "loss_reduction": "sum", **options}
    loader: Any = settings.pop("loader", DataLoader(TensorDataset(*p.batch), batch_size=2))
    _, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **settings)
    return engine, optimizer, loader


@pytest.mark.oracle
@pytest.mark.parametrize(
    "options", [{}, {"max_physical_batch": 5}, {"max_records_per_unit": 1, "max_physical_batch": 1}]
)
def test_a_step_moves_by_the_clipped_sum_of_the_drawn_units(options: dict[str, Any]) -> None:
    p = problem("mlp", 10)
    model, limit = p.model(), 1.5 * clip_norm(p)
    engine, optimizer, loader = make(p, model, limit, unit_of=torch.from_numpy(USERS), expected_batch=1.6, **options)
    assert (engine.sample_rate, engine.expected_batch) == (0.4, 1.6)
    drawn, sizes = [], set()
    for pieces in loader.draws():
        with torch.no_grad():
            for name, q in p.model().named_parameters():
                model.get_parameter(name).copy_(q)  # the oracle's gradients are at these weights
        by_unit: dict[int, list[int]] = {}
        for batch in pieces:
            optimizer.zero_grad()
            p.case.loss(model, *batch, reduction="sum").backward()
            piece = loader._last[0]
            for index, unit in zip(piece.indices, piece.units, strict=True):
                by_unit.setdefault(unit, []).append(index)
            optimizer.step()
        drawn.append(len(by_unit))
        sizes |= {len(records) for records in by_unit.values()}
        if not by_unit:
            continue
        gradients = {name: torch.stack([g[own].sum(0) for own in by_unit.values()]) for name, g in p.gradients.items()}
        want = clip(gradients, limit / (1 + SLACK[torch.float64])).totals
        moved = {name: (q - model.get_parameter(name)) * 1.6 for name, q in p.model().named_parameters()}
        assert_sums({name: m.detach() for name, m in moved.items()}, want, 1e-9)
    assert len(drawn) == len(loader) == 2  # 4 units, 1.6 in a draw
    assert engine.steps == 2
    assert options.get("max_records_per_unit") is None or sizes <= {1}
    engine.detach()


def test_other_forwards_between_the_steps_have_rows_of_their_own() -> None:
    p = problem("mlp", 10)
    model = p.model()
    engine, optimizer, loader = make(p, model, 1.0, unit_of=USERS, expected_batch=4.0)
    for x, y in loader:
        with torch.no_grad():
            model(x[:3])
        p.case.loss(model, x, y, reduction="sum").backward()
        model(x[:3])
        optimizer.step()
    engine.detach()


def test_adjacency_and_epsilon_are_of_units() -> None:
    p = problem("mlp", 10)
    engine, optimizer, loader = make(p, p.model(), 1.0, unit_of=USERS.tolist(), noise_multiplier=1.0)
    model = engine._model.module  # type: ignore[union-attr]
    assert engine.sample_rate == 0.5  # 2 of 4 units
    for batch in loader:
        optimizer.zero_grad()
        p.case.loss(model, *batch, reduction="sum").backward()
        optimizer.step()
    assert engine.plan is None or "adjacency: add or remove one unit" in str(engine.plan)
    assert engine._ledger.chain.runs[-1][0]["adjacency"] == "add or remove one unit"
    plain = gramian.PrivacyEngine("rdp")
    plain._ledger.accounting.record(1.0, 0.5)
    plain._ledger.accounting.set_steps(engine.steps)
    assert engine.get_epsilon(0.01) == pytest.approx(plain.get_epsilon(0.01))
    with pytest.warns(UserWarning, match="delta: 0.25 is not below 1/4"):
        engine.get_epsilon(0.25)
    engine.detach()


def test_noise_for_a_target_counts_units() -> None:
    p = problem("mlp", 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = gramian.PrivacyEngine("rdp")
        optimizer = SGD((model := p.model()).parameters(), lr=1.0)
        engine.make_private_with_epsilon(
            target_epsilon=3.0, target_delta=0.01, epochs=2, module=model, optimizer=optimizer, unit_of=USERS,
            data_loader=DataLoader(TensorDataset(*p.batch), batch_size=2), max_grad_norm=1.0,
        )  # fmt: skip
    assert engine.sample_rate == 0.5
    for _ in range(4):  # two epochs of two draws
        engine._ledger.refuse_past_limit()
        engine._ledger.begin()
    assert engine.get_epsilon(0.01) <= 3.0
    engine.detach()


def test_rows_that_are_not_records_need_ids_of_as_many_units() -> None:
    p = problem("mlp", 10)
    model = p.model()
    engine, _, loader = make(p, model, 1.0, unit_of=USERS, expected_batch=4.0)  # all of them
    batch = next(iter(loader))
    joined = [t[:6] for t in batch]
    with refusal(r"^ids: expected integers of shape \[6\] or \[6, T\], got torch.int64 of shape \[10\]"):
        p.case.loss(model, *joined, reduction="sum").backward()
    with (
        refusal(r"^ids: are of 3 units, and 4 units were drawn, so that one of them would move the sum by more"),
        engine.units([0, 0, 1, 1, 2, 2]),
    ):
        p.case.loss(model, *joined, reduction="sum").backward()
    with engine.units([0, 3, 1, 1, 2, 2]):
        p.case.loss(model, *joined, reduction="sum").backward()
    engine.detach()


def test_units_of_several_records_under_draws_of_records_are_refused() -> None:
    p = problem("mlp", 10)
    model = p.model()
    engine, _, loader = make(p, model, 1.0, expected_batch=10.0)  # all of them
    batch = next(iter(loader))
    with (
        refusal(r"^ids: are of 4 units, and 10 records were drawn, so that one of them would move the sum by more"),
        engine.units(USERS),
    ):
        p.case.loss(model, *batch, reduction="sum").backward()
    engine.detach()


class Stream(IterableDataset[Any]):
    """Records without a number."""

    def __iter__(self) -> Any:
        return iter([torch.zeros(3)])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"unit_of": USERS[:9]}, r"unit_of: expected 10 integers, one for each record .*, got int64 of shape \[9\]"),
        ({"unit_of": USERS * 0.5}, "unit_of: expected 10 integers"),
        ({"unit_of": "users"}, "unit_of: expected 10 integers"),
        ({"unit_of": [[1], [1, 2]]}, "unit_of: expected 10 integers"),
        ({"unit_of": USERS - 5}, "unit_of: expected ids from 0, got -3"),
        ({"unit_of": USERS, "max_records_per_unit": 0}, "max_records_per_unit: expected a number of records or None, got 0"),
        ({"max_records_per_unit": 2}, "max_records_per_unit: is 2 without unit_of"),
        ({"unit_of": USERS, "poisson_sampling": False}, "unit_of: has no effect on the loader's own batches"),
        ({"unit_of": USERS, "max_physical_batch": 4}, "max_physical_batch: is 4, and a unit has 5 records"),
        ({"unit_of": USERS, "loader": DataLoader(Stream(), batch_size=2)}, "unit_of: Stream has no length"),
        ({"unit_of": USERS, "expected_batch": 5.0}, "sample_rate: is 1.25; expected at most 1"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    p = problem("mlp", 10)
    with refusal(f"^{message}"):
        make(p, p.model(), 1.0, **options)


def test_a_replay_with_other_units_is_refused() -> None:
    p = problem("mlp", 10)
    engine, _, _ = make(p, p.model(), 1.0, unit_of=USERS)
    state = engine.state_dict()
    engine.detach()
    for unit_of, message in (
        (USERS[::-1].copy(), "replay: unit_of is"),
        (None, "replay: (adjacency|unit_of|sample_rate) is"),
    ):
        other, _, _ = make(p, p.model(), 1.0, unit_of=unit_of)
        with refusal(message):
            other.load_state_dict(state, replay=True)
        other.detach()


def test_one_account_has_one_unit_of_privacy() -> None:
    p = problem("mlp", 10)
    first, optimizer, loader = make(p, model := p.model(), 1.0, unit_of=USERS, noise_multiplier=1.0)
    for batch in loader:
        optimizer.zero_grad()
        p.case.loss(model, *batch, reduction="sum").backward()
        optimizer.step()
    state = first.state_dict()
    first.detach()
    second, _, _ = make(p, p.model(), 1.0)
    with refusal(
        "^compose: epsilon of one engine is for add or remove one record and of the other for add or remove one unit"
    ):
        second.compose(first)
    message = (
        '^unit_of: epsilon of earlier releases is for "add or remove one unit", and would now be for "add or remove'
    )
    with refusal(message):
        second.load_state_dict(state)
    second.detach()
    with refusal(message):
        first.make_private(
            module=(other := p.model()), optimizer=SGD(other.parameters()), noise_multiplier=1.0, max_grad_norm=1.0,
            data_loader=DataLoader(TensorDataset(*p.batch), batch_size=2),
        )  # fmt: skip
    third, _, _ = make(p, p.model(), 1.0, unit_of=USERS, noise_multiplier=1.0)
    third.compose(first)
    third.load_state_dict(state)
    third.detach()


def test_a_collate_function_that_sorts_records_is_refused_unless_ids_say_whose_rows_are_whose() -> None:
    torch.manual_seed(0)
    records, users = [(torch.randn(4), i) for i in range(40)], torch.arange(40) % 8
    model, engine = nn.Linear(4, 2), gramian.PrivacyEngine("rdp", insecure_reproducible=True)

    def longest_first(some: Any) -> Any:
        return default_collate(sorted(some, key=lambda record: -float(record[0].norm())))

    _, optimizer, loader = engine.make_private(
        module=model, optimizer=SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0, unit_of=users,
        data_loader=DataLoader(records, batch_size=4, collate_fn=longest_first), loss_reduction="sum",
    )  # fmt: skip
    for number, (x, indices) in enumerate(loader):
        optimizer.zero_grad()
        if number % 2:
            with engine.units(users[indices]):
                model(x).square().sum().backward()
            optimizer.step()
        elif len(users[indices].unique()) > 1:
            with refusal("^data_loader: its collate_fn reorders records.*; expected rows in the order"):
                model(x)
            break
    else:
        pytest.fail("no draw of several units")
    engine.detach()


@pytest.mark.parametrize("masks", [False, True])
def test_collation_in_order_and_collation_that_shows_no_order_are_taken(masks: bool) -> None:
    def collate(some: Any) -> Any:
        x, _ = default_collate(some)
        return x * torch.rand_like(x) if masks else x, torch.arange(len(x))[: 0 if masks else None]

    assert not reorders(collate, [(torch.randn(3), i) for i in range(5)])
