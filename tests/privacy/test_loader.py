"""The private loader: the user's settings, draws told when they are handed over, zero-row batches of the right kind."""

import collections
import dataclasses
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from gramian.privacy.sampling.dataset_fingerprint import dataset_fingerprint as fingerprint
from gramian.privacy.sampling.empty_batch import without_rows
from gramian.privacy.sampling.poisson import PoissonBatchSampler, draw
from gramian.privacy.sampling.private_loader import PrivateLoader, records_of
from tests.kit.refusals import refusal

KEY = bytes(range(32))


def numbered(size=24):
    return TensorDataset(torch.arange(size), torch.arange(size, dtype=torch.float64)[:, None].expand(size, 3))


def private(loader, rate=0.25, expected=6, at=0, told=None, **settings):
    size = records_of(loader)
    counter = at if callable(at) else lambda: at
    draws = PoissonBatchSampler(KEY, size, rate, max(1, round(size / expected)), next_draw=counter, **settings)
    return PrivateLoader(loader, draws, lambda piece: None if told is None else told.append(piece))


@pytest.mark.parametrize("settings", [{}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}])
def test_batches_are_the_draws_in_pieces_told_when_handed_over(settings):
    told, at = [], [3]
    loader = private(
        DataLoader(numbered(), batch_size=6, shuffle=True, **settings),
        rate=0.1,
        told=told,
        at=lambda: at[0],
        max_physical_batch=2,
    )
    assert len(loader) == 4
    for first in (3, 7):  # two epochs: persistent workers begin anew
        at[0] = first
        want = [
            piece
            for number in range(first, first + 4)
            for piece in PoissonBatchSampler(KEY, 24, 0.1, 1, max_physical_batch=2).pieces_of(number)
        ]
        assert len(want) > 4
        told.clear()
        for seen, ((x, y), piece) in enumerate(zip(loader, want, strict=True)):
            assert len(told) == seen + 1 and told[-1] == piece
            assert x.tolist() == piece.indices and y.shape == (len(piece.indices), 3) and y.dtype == torch.float64


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_was_left_is_taken_up_at_the_counter(workers):
    told, at = [], [0]
    settings = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = private(DataLoader(numbered(), batch_size=6, **settings), told=told, at=lambda: at[0])
    first = [batch[0].tolist() for batch in loader]
    for _ in loader:
        break
    at[0] = 1
    told.clear()
    assert [batch[0].tolist() for batch in loader][:3] == first[1:]
    assert [piece.draw for piece in told] == [1, 2, 3, 4]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_every_draw_and_run_as_many_pieces(world):
    told = [[] for _ in range(world)]
    loaders = [
        private(
            DataLoader(numbered(), batch_size=6 // world),
            told=told[rank],
            rank=rank,
            world_size=world,
            max_physical_batch=2,
        )
        for rank in range(world)
    ]
    found = collections.defaultdict(list)
    for rank, loader in enumerate(loaders):
        for (x, _), piece in zip(loader, told[rank], strict=False):
            found[piece.draw] += x.tolist()
    pieces = [[(piece.draw, piece.piece, piece.last) for piece in mine] for mine in told]
    assert pieces.count(pieces[0]) == world, "the same pieces on every rank"
    for number in range(4):
        assert sorted(found[number]) == draw(KEY, number, 24, 0.25).tolist()


def test_settings_of_the_users_loader_are_kept():
    def collate(samples):
        return len(samples)

    def start(worker):
        pass

    generator = torch.Generator()
    loader = DataLoader(
        numbered(), batch_size=6, drop_last=True, num_workers=1, collate_fn=collate, pin_memory=False, timeout=7,
        worker_init_fn=start, multiprocessing_context="fork", generator=generator, prefetch_factor=5,
        persistent_workers=True,
    )  # fmt: skip
    kept = private(loader)
    assert isinstance(kept, DataLoader) and kept.dataset is loader.dataset
    for name in (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "generator",
        "prefetch_factor",
    ):
        assert getattr(kept, name) == getattr(loader, name), name
    assert kept.persistent_workers and kept.multiprocessing_context.get_start_method() == "fork"
    assert not hasattr(private(DataLoader(numbered(), batch_size=6)), "noise_key")
    assert private(DataLoader(numbered(), batch_size=6, pin_memory=True)).pin_memory


@pytest.mark.parametrize("size, expected, steps", [(24, 6, 4), (25, 6, 4), (10, 100, 1), (7, 2, 4), (24, 5.0, 5)])
def test_the_length_is_the_number_of_steps(size, expected, steps):
    loader = private(DataLoader(numbered(size), batch_size=2), expected=expected)
    assert len(loader) == steps == sum(1 for _ in loader)


class NoEmptyLists(Dataset):
    """Like many data sets, it cannot index nothing."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"ids": torch.ones(5, dtype=torch.long), "text": f"{index}", "label": index}

    def __getitems__(self, indices):
        assert indices, "an empty list"
        return [self[i] for i in indices]


@pytest.mark.parametrize("workers", [0, 1])
def test_empty_draws_are_batches_of_zero_rows(workers):
    told = []
    loader = private(DataLoader(NoEmptyLists(), batch_size=1, num_workers=workers), rate=0.05, expected=0.1, told=told)
    batches = list(loader)
    sizes = [len(draw(KEY, number, 3, 0.05)) for number in range(30)]
    assert [len(batch["label"]) for batch in batches] == sizes and 0 in sizes and max(sizes) > 0
    assert sizes[-1] == 0 or sizes[0] == 0, "an empty one at an end"
    assert [(piece.draw, len(piece.indices)) for piece in told] == [(number, sizes[number]) for number in range(30)]
    assert all(piece.piece == 0 and piece.last for piece in told)
    empty = batches[sizes.index(0)]
    assert empty["ids"].shape == (0, 5) and empty["ids"].dtype == torch.long and empty["text"] == []


def test_an_epoch_may_be_all_empty():
    loader = private(DataLoader(numbered(2), batch_size=1), rate=1e-9, expected=0.5)
    assert [x.shape[0] for x, _ in loader] == [0, 0, 0, 0]


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    names: list


def test_without_rows_keeps_structure_dtypes_and_shapes():
    x, h = torch.ones(1, 4, 2), torch.ones(1, 7, dtype=torch.bfloat16)
    batch = {
        "a": [x, (h, "tag")],
        "b": Pair(x.int(), None),
        "c": Record(x.bool(), ["n"]),
        "d": np.ones((1, 2), np.int16),
    }
    got = without_rows({**batch, "e": torch.tensor(3), "f": ["s"], "g": 5})
    assert got["a"][0].shape == (0, 4, 2) and isinstance(got["a"][1], tuple)
    assert got["a"][1][0].dtype == torch.bfloat16 and got["a"][1][0].shape == (0, 7) and got["a"][1][1] == "tag"
    assert isinstance(got["b"], Pair) and got["b"].a.dtype == torch.int32 and got["b"].b is None
    assert isinstance(got["c"], Record) and got["c"].x.shape == (0, 4, 2) and got["c"].names == []
    assert got["d"].shape == (0, 2) and got["d"].dtype == np.int16
    assert got["e"] == 3 and got["f"] == [] and got["g"] == 5
    assert batch["a"][0].shape == (1, 4, 2), "the batch itself is not changed"


def test_without_rows_of_a_hugging_face_batch():
    from transformers import BatchEncoding

    batch = BatchEncoding({"input_ids": torch.ones(1, 6, dtype=torch.long), "labels": torch.ones(1, 6)})
    got = without_rows(batch)
    assert type(got) is BatchEncoding and got.input_ids.shape == (0, 6) and got["labels"].dtype == torch.float32
    assert batch["input_ids"].shape == (1, 6)


class Endless(IterableDataset):
    def __iter__(self):
        yield 1


@pytest.mark.parametrize(
    "message, make",
    [
        ("data_loader: Endless is an IterableDataset; expected", lambda: private(DataLoader(Endless()))),
        ("data_loader: batch_size=None .*; expected", lambda: private(DataLoader(numbered(), batch_size=None))),
        ("data_loader: list has no records; expected", lambda: private(DataLoader([]))),
        ("sample_rate: 1.5; expected", lambda: list(private(DataLoader(numbered()), rate=1.5))),
        ("max_physical_batch: 0; expected", lambda: private(DataLoader(numbered()), max_physical_batch=0)),
        ("rank: 2 of 2; expected", lambda: private(DataLoader(numbered()), rank=2, world_size=2)),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(message, make):
    with refusal(f"^{message}"):
        make()


class Augmented(Dataset):
    def __init__(self, shift=0.0):
        self.shift = shift

    def __len__(self):
        return 5

    def __getitem__(self, index):
        random.random(), np.random.rand()
        return torch.rand(3) if index == 0 else {"x": torch.full((2,), index + self.shift), "name": "é"}


def test_fingerprints_tell_data_sets_apart():
    plain = numbered()
    assert fingerprint(plain) == fingerprint(numbered()) and fingerprint(plain)[0] == 24
    assert 0 <= fingerprint(plain)[1] < 2**63
    for other in (numbered(23), TensorDataset(torch.arange(24)), TensorDataset(*numbered().tensors[::-1])):
        assert fingerprint(other)[1] != fingerprint(plain)[1]
    last = numbered()
    last.tensors[0][-1] += 1
    assert fingerprint(last) != fingerprint(plain)
    halves = [[torch.ones(2, dtype=torch.bfloat16), (1, "a"), np.ones(2), object]]
    assert fingerprint(halves) == fingerprint(halves) != fingerprint([[torch.ones(2), (1, "a"), np.ones(2), object]])


def test_random_records_and_generators_do_not_disturb_fingerprints():
    found = set()
    for seed in (1, 2):  # ranks stand at different places of their generators
        torch.manual_seed(seed)
        found.add(fingerprint(Augmented()))
    assert len(found) == 1 and fingerprint(Augmented(0.5)) not in found
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    want = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    fingerprint(Augmented())
    private(DataLoader(Augmented(), collate_fn=list)).empty_batch()
    assert (torch.rand(1), random.random(), np.random.rand()) == want


@pytest.mark.parametrize("parts", [1, 3, 30])
def test_a_draw_in_a_fixed_number_of_pieces_has_its_records_once(parts):
    told = []
    loaders = [private(DataLoader(numbered(), batch_size=3), told=told, rank=rank, world_size=2) for rank in (0, 1)]
    found = {}
    for loader in loaders:
        loader.split(parts)
        told.clear()
        assert sum(1 for _ in loader) == 4 * parts
        for piece in told:
            assert piece.last == (piece.piece == parts - 1)
            found.setdefault(piece.draw, []).extend(piece.indices)
        sizes = [[len(piece.indices) for piece in told if piece.draw == number] for number in range(4)]
        assert all(max(row) <= -(-13 // parts) for row in sizes)
    assert {number: sorted(rows) for number, rows in found.items()} == {
        number: draw(KEY, number, 24, 0.25).tolist() for number in range(4)
    }


def test_a_loop_that_reads_ahead_tells_of_a_batch_when_it_begins_it():
    told = []
    loader = private(DataLoader(numbered(), batch_size=6), told=told, max_physical_batch=2)
    ahead = list(loader.pieces())
    assert told == []
    for piece, batch in ahead:
        loader.begin(piece, batch)
        assert told[-1] == piece and loader.last_batch().batch is batch
    assert len(told) == len(ahead)


def test_a_loader_with_a_device_puts_batches_there():
    plain = DataLoader(numbered(), batch_size=6)
    plain.device = torch.device("meta")
    assert all(part.is_meta for batch in private(plain, rate=0.05) for part in batch)
