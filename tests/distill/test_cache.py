"""Caches of every kind: row i is window i, errors are those that the manifest states, other inputs are refused by name."""

import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.data import Windows
from gramian.distill.cache import Cache, CacheOptions, Hidden, Samples, TopK, build_cache, check_rows, open_cache
from gramian.distill.loss.sparse_tail import tail_at
from gramian.distill.teacher.live_teacher import LiveTeacher
from gramian.distill.teacher.signal import DenseSignal, SampledSignal, Signal, SparseSignal, tensors_of
from tests.distill.teachers import TEACHERS, VOCABULARY, WIDTH, batch_of, contents, gpt, windows
from tests.distill.test_proof import projected
from tests.kit.matrix import examples, sample

KINDS = {
    "hidden": Hidden(),
    "hidden bf16": Hidden("bf16"),
    "hidden fp32": Hidden("fp32"),
    "topk": TopK(k=8),
    "topk all": TopK(k=VOCABULARY),
    "sampled": Samples(draws=5, temperature=2.0),
}
kinds = pytest.mark.parametrize("kind", KINDS)
DATA = windows()


def small(kind: str, **options: object) -> CacheOptions:
    return CacheOptions(KINDS[kind], **{"batch": 3, "shard_windows": 7, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def teacher() -> LiveTeacher:
    return LiveTeacher(gpt(), layers=(0, 2))


@pytest.fixture(scope="module")
def built(teacher: LiveTeacher, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    done: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in done:
            done[kind] = tmp_path_factory.mktemp("cache") / kind
            build_cache(done[kind], teacher, DATA, small(kind))
        return done[kind]

    return folder


def opened(folder: Path) -> Cache:
    return open_cache(folder, tokenizer_hash="words", windows_digest=DATA.digest, verify="full")


def rows_of(signal: Signal, row: int) -> list[Tensor]:
    return [tensor[row] for tensor in tensors_of(signal)]


def true_logits(live: DenseSignal) -> Tensor:
    """In float64."""
    return live.hidden_BTD.double() @ live.head.weight_VD.double().T


@kinds
@settings(max_examples=examples(12))
@given(index=st.lists(st.integers(0, len(DATA) - 1), min_size=1, max_size=9), ahead=st.booleans())
def test_any_order_and_batch_reads_the_same_rows(
    built: Callable[[str], Path], kind: str, index: list[int], ahead: bool
) -> None:
    cache = opened(built(kind))
    batch = batch_of(DATA, index)
    if ahead:
        between = batch_of(DATA, [11, 0])
        expected = cache(between)
        cache.upcoming(batch)
        for one, other in zip(tensors_of(cache(between)), tensors_of(expected), strict=True):
            assert torch.equal(one, other)
    signal = cache(batch)
    for row, window in enumerate(index):
        for one, other in zip(rows_of(signal, row), rows_of(cache(batch_of(DATA, [window])), 0), strict=True):
            assert torch.equal(one, other)
    cache.close()


def test_batches_are_announced_and_asked_for_in_any_order(built: Callable[[str], Path]) -> None:
    """Two at once, of equal windows too: each is read once, and none is another's."""
    cache, reads = opened(built("hidden")), []
    plain = cache._gathered
    cache._gathered = lambda windows_B: (reads.append(windows_B), plain(windows_B))[1]  # type: ignore[method-assign,func-returns-value]
    batches = [batch_of(DATA, index) for index in ([3, 22], [5, 1], [5, 1])]
    expected = [list(tensors_of(opened(built("hidden"))(batch))) for batch in batches]
    for order in ([0, 1, 2], [2, 0, 1]):
        reads.clear()
        for batch in batches:
            cache.upcoming(batch)
        for number in order:
            for one, other in zip(tensors_of(cache(batches[number])), expected[number], strict=True):
                assert torch.equal(one, other)
        assert len(reads) == 3 and all(one is batch["windows"] for one, batch in zip(reads, batches, strict=True))
        assert len(cache._ahead) == 0
    cache.close()


def test_rows_that_were_announced_are_gone_with_their_batch(built: Callable[[str], Path]) -> None:
    cache = opened(built("hidden"))
    kept, left = batch_of(DATA, [3, 22]), batch_of(DATA, [5, 1])
    cache.upcoming(kept)
    cache.upcoming(left)
    rows = weakref.ref(cache._ahead[left["windows"]].result()["hidden"])
    assert cache._thread is not None
    cache._thread.submit(int).result()  # the thread holds nothing of the read before
    assert len(cache._ahead) == 2
    del left
    assert len(cache._ahead) == 1 and rows() is None
    cache.close()
    assert len(cache._ahead) == 0


def test_closing_does_not_read_what_was_announced(built: Callable[[str], Path]) -> None:
    cache, begun, go = opened(built("hidden")), threading.Event(), threading.Event()
    reads, plain = [], cache._gathered

    def gathered(windows_B: Tensor) -> dict[str, Tensor]:
        reads.append(windows_B)
        begun.set()
        go.wait(60)
        return plain(windows_B)

    cache._gathered = gathered  # type: ignore[method-assign]
    batches = [batch_of(DATA, [row]) for row in (0, 1)]
    for batch in batches:
        cache.upcoming(batch)
    begun.wait()
    cache._ahead[batches[1]["windows"]].add_done_callback(lambda _: go.set())  # cancelled before the first is read
    cache.close()
    assert len(reads) == 1
    assert cache(batches[1]) is not None and len(reads) == 2  # a closed cache can be read all the same


def test_a_window_that_is_not_there_is_refused_when_it_is_asked_for(built: Callable[[str], Path]) -> None:
    cache = opened(built("hidden"))
    batch = {"windows": torch.tensor([len(DATA)])}
    cache.upcoming(batch)
    with pytest.raises(GramianError, match=r"^windows: the cache .* has no window"):
        cache(batch)
    cache.close()


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["hidden", "hidden bf16"])
def test_logits_of_cached_hidden_states_err_as_the_manifest_says(
    built: Callable[[str], Path], teacher: LiveTeacher, kind: str
) -> None:
    cache, batch = opened(built(kind)), batch_of(DATA, list(range(len(DATA))))
    live, stored = teacher(batch), cache(batch)
    assert isinstance(stored, DenseSignal) and stored.hidden_BTD.dtype == torch.float32
    worst = float((true_logits(stored) - true_logits(live)).abs().max())
    mean = float((true_logits(stored) - true_logits(live)).abs().mean())
    errors = cache.manifest.errors
    assert 0 < worst <= errors.worst["logit"] * 1.01 + 1e-6 and errors.worst["logit"] <= 1.5 * worst
    assert errors.means["logit"] == pytest.approx(mean, rel=0.05)
    assert cache.manifest.measured_windows == len(DATA)
    assert worst < (0.05 if kind == "hidden bf16" else 0.006)


def test_hidden_states_in_the_models_own_type_are_exact(built: Callable[[str], Path], teacher: LiveTeacher) -> None:
    cache, batch = opened(built("hidden fp32")), batch_of(DATA, [3, 22, 0])
    stored, live = cache(batch), teacher(batch)
    assert isinstance(stored, DenseSignal)
    assert torch.allclose(stored.hidden_BTD, live.hidden_BTD, atol=1e-5)  # forwards of other batches round elsewhere
    assert torch.equal(stored.head.weight_VD, live.head.weight_VD)
    assert cache.manifest.errors.worst["logit"] == 0.0
    assert cache.manifest.bytes_per_token == 4 * WIDTH + 2 * 2 * WIDTH


@pytest.mark.oracle
def test_top_logits_and_tail_err_as_the_manifest_says(built: Callable[[str], Path], teacher: LiveTeacher) -> None:
    cache, batch = opened(built("topk")), batch_of(DATA, list(range(len(DATA))))
    live, stored = teacher(batch), cache(batch)
    assert isinstance(stored, SparseSignal) and stored.tail is not None
    logits_BTV = true_logits(live)
    logits_BTV -= logits_BTV.amax(-1, keepdim=True)
    kept_BTK = logits_BTV.gather(-1, stored.ids_BTK)
    assert torch.allclose(kept_BTK, logits_BTV.topk(8).values, atol=1e-5)
    assert torch.allclose(stored.logits_BTK.double(), kept_BTK, rtol=2**-11, atol=1e-5)
    normaliser = mass = 0.0
    for temperature in torch.linspace(1.0, 5.0, 41).tolist():
        told_BT = tail_at(stored.tail, 1.0 / temperature)[0].double()
        told_all_BT = torch.logaddexp((stored.logits_BTK.double() / temperature).logsumexp(-1), told_BT)
        all_BT = (logits_BTV / temperature).logsumexp(-1)
        true_mass_BT = 1.0 - (kept_BTK / temperature - all_BT.unsqueeze(-1)).exp().sum(-1)
        normaliser = max(normaliser, float((told_all_BT - all_BT).abs().max()))
        mass = max(mass, float(((told_BT - told_all_BT).exp() - true_mass_BT).abs().max()))
    stated = cache.manifest.errors.worst
    assert normaliser <= 1.02 * stated["log_normaliser"] + 2e-6 and stated["log_normaliser"] <= 3 * normaliser
    assert mass <= 1.02 * stated["tail_mass"] + 2e-6 and stated["tail_mass"] <= 3 * mass
    assert stated["log_normaliser"] < 1e-3


def test_everything_kept_needs_no_tail(built: Callable[[str], Path], teacher: LiveTeacher) -> None:
    cache, batch = opened(built("topk all")), batch_of(DATA, [1, 2])
    stored = cache(batch)
    assert isinstance(stored, SparseSignal) and stored.tail is None
    whole_BTV = torch.zeros(2, DATA.length, VOCABULARY).scatter(-1, stored.ids_BTK, stored.logits_BTK)
    expected_BTV = true_logits(teacher(batch)).float()
    assert torch.allclose(whole_BTV, expected_BTV - expected_BTV.amax(-1, keepdim=True), atol=0.01)


def test_sampled_weights_sum_to_one_on_distinct_ids(built: Callable[[str], Path]) -> None:
    stored = opened(built("sampled"))(batch_of(DATA, list(range(len(DATA)))))
    assert isinstance(stored, SampledSignal) and stored.temperature == 2.0
    assert torch.allclose(stored.weights_BTK.sum(-1), torch.tensor(1.0))
    used_BTK = stored.weights_BTK > 0
    for ids_K, used_K in zip(stored.ids_BTK.flatten(0, 1), used_BTK.flatten(0, 1), strict=True):
        assert len(set(ids_K[used_K].tolist())) == int(used_K.sum())


@kinds
def test_layers_are_the_teachers_up_to_their_rounding(
    built: Callable[[str], Path], teacher: LiveTeacher, kind: str
) -> None:
    batch = batch_of(DATA, [20, 4, 8])
    stored, live = opened(built(kind))(batch), teacher(batch)
    assert set(stored.layers) == {0, 2}
    for layer, stream_BTD in stored.layers.items():
        assert stream_BTD.dtype == torch.float16
        assert torch.allclose(stream_BTD.float(), live.layers[layer], rtol=2**-10, atol=1e-4)


@kinds
def test_a_check_of_rows_passes_and_sees_another_teacher(
    built: Callable[[str], Path], teacher: LiveTeacher, kind: str
) -> None:
    cache = opened(built(kind))
    good = check_rows(cache, teacher, DATA, n=6, seed=1)
    assert good.holds() and len(set(good.windows)) == 6
    assert good.windows != check_rows(cache, teacher, DATA, n=6, seed=2).windows
    model = gpt()
    with torch.no_grad():
        model.head.weight.mul_(1.05)
    assert not check_rows(cache, LiveTeacher(model, layers=(0, 2)), DATA, n=6).holds()
    assert not check_rows(cache, teacher, windows(seed=9), n=6).holds()  # other text


@pytest.mark.parametrize("family", ["phi, with a bias", "gemma2, capped", "cohere, scaled", "goose"])
def test_heads_of_all_sorts_come_back(family: str, tmp_path: Path) -> None:
    teacher, batch = LiveTeacher(TEACHERS[family]()), batch_of(DATA, [0, 5])
    build_cache(tmp_path, teacher, DATA, small("hidden fp32"))
    stored, live = opened(tmp_path)(batch), teacher(batch)
    assert isinstance(stored, DenseSignal)
    assert torch.allclose(stored.head.logits(stored.hidden_BTD), live.head.logits(live.hidden_BTD), atol=1e-4)


def test_a_half_precision_teacher_is_stored_exactly(tmp_path: Path) -> None:
    teacher, batch = LiveTeacher(gpt().bfloat16()), batch_of(DATA, [0, 1, 2])
    manifest = build_cache(tmp_path, teacher, DATA, small("hidden"))
    stored = opened(tmp_path)(batch)
    assert isinstance(stored, DenseSignal) and manifest.errors.worst["logit"] == 0.0
    assert torch.equal(stored.hidden_BTD, teacher(batch).hidden_BTD) and stored.hidden_BTD.dtype == torch.bfloat16


def test_isolated_documents_reach_the_teacher(tmp_path: Path) -> None:
    teacher, data = LiveTeacher(gpt()), windows(isolate=True)
    build_cache(tmp_path, teacher, data, small("hidden fp32"))
    assert check_rows(open_cache(tmp_path), teacher, data).holds()


@pytest.mark.parametrize("last", [65_535, 65_536])
def test_ids_on_both_sides_of_two_bytes_come_back(last: int, tmp_path: Path) -> None:
    teacher = LiveTeacher(gpt(vocabulary=last + 1, width=8, heads=1, layers=1))
    with torch.no_grad():
        teacher.head.weight_VD[last] = torch.tensor([3.0, -3.0] * 4)
        teacher.head.weight_VD[last - 1] = -teacher.head.weight_VD[last]  # one of the two is large
    data = windows(2)
    for kind in (TopK(k=3), Samples(draws=300)):
        build_cache(tmp_path / kind.name, teacher, data, CacheOptions(kind))
        cache = open_cache(tmp_path / kind.name)
        assert check_rows(cache, teacher, data).holds()
        stored = cache(batch_of(data, [0, 1]))
        assert not isinstance(stored, DenseSignal) and last in stored.ids_BTK


def test_padding_of_a_head_can_be_left_out(tmp_path: Path) -> None:
    teacher = LiveTeacher(gpt())
    for kind in (TopK(k=8, vocabulary=30), Samples(draws=64, vocabulary=30)):
        build_cache(tmp_path / kind.name, teacher, DATA, CacheOptions(kind))
        cache = open_cache(tmp_path / kind.name, vocabulary=30)
        stored = cache(batch_of(DATA, list(range(len(DATA)))))
        assert not isinstance(stored, DenseSignal) and int(stored.ids_BTK.max()) == 29
        assert check_rows(cache, teacher, DATA).holds()
        with pytest.raises(GramianError, match="^vocabulary: .* knows 30 ids, 31 are needed"):
            open_cache(tmp_path / kind.name, vocabulary=31)


# ---- what is refused -------------------------------------------------------------------------------------------------------


def test_opening_with_another_source_names_the_field(built: Callable[[str], Path], teacher: LiveTeacher) -> None:
    folder = built("topk")
    open_cache(folder, teacher_hash=teacher.hash, tokenizer_hash="words", windows_digest=DATA.digest, kind="topk")
    for field, told in (
        ("teacher", {"teacher_hash": LiveTeacher(gpt(tied=True)).hash}),
        ("tokenizer", {"tokenizer_hash": "letters"}),
        ("windows", {"windows_digest": windows(length=11).digest}),
        ("windows", {"windows_digest": windows(seed=1).digest}),
        ("kind", {"kind": "hidden"}),
        ("vocabulary", {"vocabulary": VOCABULARY + 1}),
        ("layers", {"layers": (1,)}),
    ):
        with pytest.raises(GramianError, match=f"^{field}: the cache .*expected") as caught:
            open_cache(folder, **told)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


CHANGES: list[tuple[str, Callable[[], tuple[LiveTeacher, Windows, CacheOptions]]]] = [
    ("teacher", lambda: (LiveTeacher(gpt(tied=True)), DATA, small("topk"))),
    ("autocast", lambda: (LiveTeacher(gpt(), autocast=torch.bfloat16), DATA, small("topk"))),
    ("layers", lambda: (LiveTeacher(gpt(), layers=(1,)), DATA, small("topk"))),
    ("tokenizer", lambda: (LiveTeacher(gpt()), windows(tokenizer="letters"), small("topk"))),
    ("windows", lambda: (LiveTeacher(gpt()), windows(seed=3), small("topk"))),
    ("windows", lambda: (LiveTeacher(gpt()), windows(24), small("topk"))),
    ("windows", lambda: (LiveTeacher(gpt()), windows(length=6), small("topk"))),
    ("kind", lambda: (LiveTeacher(gpt()), DATA, small("hidden"))),
    ("k", lambda: (LiveTeacher(gpt()), DATA, CacheOptions(TopK(k=9), batch=3, shard_windows=7))),
    ("knots", lambda: (LiveTeacher(gpt()), DATA, CacheOptions(TopK(k=8, knots=5), batch=3, shard_windows=7))),
    (
        "knots",
        lambda: (LiveTeacher(gpt()), DATA, CacheOptions(TopK(k=8, temperatures=(1, 4)), batch=3, shard_windows=7)),
    ),
    ("shard_windows", lambda: (LiveTeacher(gpt()), DATA, small("topk", shard_windows=6))),
]


@pytest.mark.parametrize(
    ("field", "change", "complete"), sample([(*told, complete) for told in CHANGES for complete in (True, False)], 10)
)
def test_building_something_else_into_a_folder_names_the_field_and_changes_nothing(
    field: str, change: Callable[[], tuple[LiveTeacher, Windows, CacheOptions]], complete: bool, tmp_path: Path
) -> None:
    build_cache(tmp_path, LiveTeacher(gpt()), DATA, small("topk"))
    if not complete:
        (tmp_path / "shards/00001.json").unlink()
    before = contents(tmp_path)
    teacher, data, options = change()
    with pytest.raises(
        GramianError, match=rf"^cache: .* holds another cache \({field} is .* there, .* here\); expected"
    ):
        build_cache(tmp_path, teacher, data, options)
    assert contents(tmp_path) == before


def test_temperatures_outside_the_curve_are_refused(built: Callable[[str], Path]) -> None:
    cache = opened(built("topk"))
    cache.require_temperatures(1.0, 5.0)
    opened(built("hidden")).require_temperatures(0.01, 100.0)
    for low, high in ((0.9, 2.0), (2.0, 5.1)):
        with pytest.raises(GramianError, match="^temperature: .* is right from 1 to 5"):
            cache.require_temperatures(low, high)
    opened(built("sampled")).require_temperatures(2.0, 2.0)
    with pytest.raises(GramianError, match="^temperature:"):
        opened(built("sampled")).require_temperatures(1.0, 2.0)
    signal = cache(batch_of(DATA, [0]))
    assert isinstance(signal, SparseSignal) and signal.tail is not None
    with pytest.raises(GramianError, match="^temperature:"):
        tail_at(signal.tail, 1.0 / 6.0)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("k", CacheOptions(TopK(k=0))),
        ("k", CacheOptions(TopK(k=VOCABULARY + 1))),
        ("knots", CacheOptions(TopK(k=4, knots=1))),
        ("temperatures", CacheOptions(TopK(k=4, temperatures=(2.0, 2.0)))),
        ("temperatures", CacheOptions(TopK(k=4, temperatures=(0.0, 2.0)))),
        ("vocabulary", CacheOptions(TopK(k=4, vocabulary=VOCABULARY + 1))),
        ("draws", CacheOptions(Samples(draws=0))),
        ("draws", CacheOptions(Samples(draws=70_000))),
        ("temperature", CacheOptions(Samples(temperature=0.0))),
        ("dtype", CacheOptions(Hidden("int4"))),
        ("batch", CacheOptions(batch=0)),
        ("shard_windows", CacheOptions(shard_windows=0)),
        ("measure_every", CacheOptions(measure_every=0)),
    ],
)
def test_options_that_make_no_cache_are_refused_by_name(field: str, options: CacheOptions, tmp_path: Path) -> None:
    with pytest.raises(GramianError, match=f"^{field}: .*expected"):
        build_cache(tmp_path / "new", LiveTeacher(gpt()), DATA, options)
    assert not (tmp_path / "new").exists()


def test_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = gpt()
    with torch.no_grad():
        model.final_norm.weight.fill_(1e6)
    with pytest.raises(GramianError, match="^cache: hidden is not finite in float16.*expected.*bf16"):
        build_cache(tmp_path / "a", LiveTeacher(model), DATA)
    build_cache(tmp_path / "b", LiveTeacher(model), DATA, CacheOptions(Hidden("bf16")))
    assert not list((tmp_path / "a").rglob(".tmp-*"))


@pytest.mark.parametrize("kind", ["hidden", "topk", "sampled"])
def test_what_is_not_a_number_is_refused_whatever_is_stored(kind: str, tmp_path: Path) -> None:
    model = gpt()
    with torch.no_grad():
        model.token_embedding.weight[40] = torch.nan  # no token of the proof
    with pytest.raises(GramianError, match="^cache: .*expected a teacher without NaN"):
        build_cache(tmp_path, LiveTeacher(model), DATA, small(kind))
    assert not list(tmp_path.rglob(".tmp-*"))


def test_layers_wider_than_what_the_head_reads_come_back(tmp_path: Path) -> None:
    teacher, batch = LiveTeacher(projected(), layers=(0, 3)), batch_of(DATA, [22, 3])
    build_cache(tmp_path, teacher, DATA, small("hidden fp32", layer_dtype="fp32"))
    stored, live = opened(tmp_path)(batch), teacher(batch)
    for layer, stream_BTD in live.layers.items():
        assert stream_BTD.shape[-1] == 16 and torch.allclose(stored.layers[layer], stream_BTD, atol=1e-5)


def test_windows_that_do_not_exist_are_refused(built: Callable[[str], Path]) -> None:
    cache = opened(built("topk"))
    for window in (-1, len(DATA)):
        with pytest.raises(GramianError, match=f"^windows: .* has no window {window}; expected 0 to {len(DATA) - 1}"):
            cache({"windows": torch.tensor([0, window])})


def test_only_some_windows_may_be_measured(teacher: LiveTeacher, tmp_path: Path) -> None:
    # Both are built here: a bfloat16 product on a processor without it makes torch take other products from then on.
    full = build_cache(tmp_path / "all", teacher, DATA, small("topk"))
    manifest = build_cache(tmp_path / "some", teacher, DATA, small("topk", measure_every=5))
    assert manifest.measured_windows == 5 == len(range(0, len(DATA), 5))
    assert manifest.errors.counts["logit"] == 5 * DATA.length * 8
    assert 0 < manifest.errors.worst["log_normaliser"] <= full.errors.worst["log_normaliser"]
    for name in full.files:
        assert manifest.files[name] == full.files[name], name


def test_the_manifest_tells_all(built: Callable[[str], Path], teacher: LiveTeacher) -> None:
    body = json.loads((built("topk") / "manifest.json").read_text())["body"]
    assert body["format"] == 1 and body["complete"] and body["bytes_per_token"] == 8 * (2 + 2) + 6 * 8 + 4 * WIDTH
    told = body["identity"]
    assert (told["kind"], told["teacher"], told["tokenizer"]) == ("topk", teacher.hash, "words")
    assert (told["windows"], told["count"], told["length"]) == (DATA.digest, len(DATA), DATA.length)
    assert told["facts"]["k"] == 8 and told["facts"]["vocabulary"] == VOCABULARY and told["layers"] == [0, 2]
    assert np.allclose(told["facts"]["knots"], np.linspace(0.2**0.5, 1.0, 6) ** 2)
    assert set(body["errors"]["worst"]) == {"log_normaliser", "tail_mass", "logit"}


@pytest.mark.gpu
@kinds
def test_rows_arrive_on_a_gpu(built: Callable[[str], Path], kind: str) -> None:
    cache, batch = opened(built(kind)), batch_of(DATA, [7, 3, 22])
    there = {name: rows.cuda() for name, rows in batch.items()}
    there["windows"] = batch["windows"]
    here = list(tensors_of(cache(batch)))
    for _ in range(3):
        cache.upcoming(there)
        for one, other in zip(tensors_of(cache(there)), here, strict=True):
            assert one.is_cuda and torch.equal(one.cpu(), other)
