"""State: what was saved and loaded goes on bit for bit, what does not fit changes nothing, and one seed is one result."""

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gramian
from gramian.curvature.persist import factor_folder
from tests.curvature.small import FEW, MANY, Net, assert_same, differs, kept, loss_of, net, opened, refresh, words
from tests.kit.refusals import one_line, refused

State = dict[str, Any]
KFAC = gramian.KFACNaturalGradient


def make(**options: Any) -> KFAC:
    return KFAC(**{"update_freq": 1, "damping": 1e-3, "ema_decay": 0.9, **options})


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int], set[str]]] = {
    "dense": ({}, {}, MANY, {"dense", "diagonal"}),
    "low rank": ({}, {}, FEW, {"low rank", "diagonal", "dense"}),
    "exact head, low rank": ({"kfac_true_fisher_head": True}, {}, FEW, {"diagonal minus low rank"}),
    "exact head, dense": ({"kfac_true_fisher_head": True}, {}, MANY, {"dense"}),
    "tied, low rank": ({}, {"tied": True}, FEW, {"diagonal plus low rank"}),
    "tied, dense": ({}, {"tied": True}, MANY, {"dense"}),
    "float64": ({}, {"dtype": torch.float64}, FEW, {"low rank"}),
    "bf16": ({"woodbury_dtype": "bf16"}, {}, FEW, {"low rank"}),
    "fp32": ({"woodbury_dtype": "fp32"}, {}, FEW, {"low rank"}),
    "joint": ({"damping_mode": "joint"}, {}, FEW, {"low rank"}),
    "diagonals": ({"min_layer_size": 13}, {"width": 12}, MANY, {"diagonal", "dense"}),
}
VARIANT = pytest.mark.parametrize("variant", VARIANTS)


def trained(variant: str, refreshes: int = 1) -> tuple[KFAC, Net]:
    """An object with factors of this kind, and the model with a gradient."""
    options, sizes, shape, kinds = VARIANTS[variant]
    kfac, model = make(**options), net(**sizes)
    for seed in range(refreshes):
        refresh(kfac, model, words(shape, seed))
    if refreshes == 1:
        assert kinds <= {factor.kind for block in kfac.kfac_factors.values() for factor in block.factors.values()}
    return kfac, model


def through_memory(kfac: KFAC, folder: Path) -> State:
    return kfac.state_dict()


def through_torch(kfac: KFAC, folder: Path) -> State:
    buffer = io.BytesIO()
    torch.save(kfac.state_dict(), buffer)
    buffer.seek(0)
    loaded: State = torch.load(buffer, weights_only=True)
    return loaded


def loaded(kfac: KFAC, saved: State, model: nn.Module | None) -> KFAC:
    """Another object with the same options and this state."""
    options = {name: value for name, value in vars(kfac.options).items()}
    other = KFAC(**options)
    other.load_state_dict(saved, model)
    return other


def through_file(kfac: KFAC, model: nn.Module | None, folder: Path) -> KFAC:
    other = KFAC(**vars(kfac.options))
    kfac.save(str(folder / "kfac.safetensors"))
    other.load(str(folder / "kfac.safetensors"), model)
    return other


def naturals(kfac: KFAC, model: nn.Module, powers: tuple[float, ...] = (-1.0, -0.5)) -> dict[str, Tensor]:
    return {
        f"{name} ({power})": t
        for power in powers
        for name, t in kfac.compute_natural_gradient(model, power=power).items()
    }


def without_time(record: dict[str, Any]) -> dict[str, Any]:
    """All but how long it took, and how rows of captured models are known: a loaded object has captured none."""
    return {name: value for name, value in record.items() if name not in ("seconds", "shared_rows")}


# ---- round trips -----------------------------------------------------------------------------------------------------


@VARIANT
@pytest.mark.parametrize("refreshes", [1, 2])
@pytest.mark.parametrize("way", [through_memory, through_torch])
def test_a_state_goes_through_memory_and_torch_save_bit_for_bit(
    way: Callable[[KFAC, Path], State], refreshes: int, variant: str, tmp_path: Path
) -> None:
    kfac, model = trained(variant, refreshes)
    other = loaded(kfac, way(kfac, tmp_path), model)
    assert_same(kept(other), kept(kfac))
    assert without_time(other.record()) == without_time(kfac.record())
    assert_same(naturals(other, model), naturals(kfac, model))
    vector = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    assert_same(other.compute_fisher_vector_product(vector), kfac.compute_fisher_vector_product(vector))
    assert other.coverage == kfac.coverage


@VARIANT
@pytest.mark.parametrize("refreshes", [1, 2])
@pytest.mark.parametrize("checked", [True, False], ids=["with the model", "without"])
def test_a_state_goes_through_a_safetensors_file_bit_for_bit(
    checked: bool, refreshes: int, variant: str, tmp_path: Path
) -> None:
    kfac, model = trained(variant, refreshes)
    other = through_file(kfac, model if checked else None, tmp_path)
    assert_same(kept(other), kept(kfac))
    assert without_time(other.record()) == without_time(kfac.record())
    assert_same(naturals(other, model), naturals(kfac, model))


def test_sides_that_were_shared_are_shared_again(tmp_path: Path) -> None:
    kfac, model = trained("dense")
    for other in (loaded(kfac, kfac.state_dict(), model), through_file(kfac, model, tmp_path)):
        factors = other.kfac_factors
        assert factors["q"].A is factors["k"].A is factors["v"].A is not None
        assert other.record()["bytes"] == kfac.record()["bytes"]
    assert len(kfac.state_dict()["factors"]) == 6 * 2 - 2 + 2  # two of three inputs saved; two exact blocks


def test_an_object_without_factors_goes_through_too(tmp_path: Path) -> None:
    kfac = make(seed=5)
    other = through_file(kfac, None, tmp_path)
    assert other.kfac_factors == {} and other.steps == 0
    model = net()
    assert_same(kept(refresh(other, model)), kept(refresh(kfac, model)))


def test_a_state_is_plain_values_and_does_not_change_afterwards() -> None:
    kfac, model = trained("dense")
    saved = kfac.state_dict()
    before, factors = copy.deepcopy(saved["counters"]), kept(kfac)
    other = loaded(kfac, saved, model)
    with opened(kfac, model, words()):
        (float("nan") * loss_of(model, words())).backward()
    refresh(kfac, model, words(seed=3))
    assert saved["counters"] == before and other.dropped == [] and other.refreshes == 1
    assert_same(kept(other), factors)
    tensors = {type(v) for parts in saved["factors"].values() for v in parts.values()}
    assert tensors <= {Tensor, str, int}
    json.dumps({name: saved[name] for name in ("schema", "options", "counters", "layers")})


# ---- going on --------------------------------------------------------------------------------------------------------


def _go_on(kfac: KFAC, model: nn.Module, kind: str, steps: range) -> list[dict[str, Tensor]]:
    found = []
    for step in steps:
        if kind == "capture":
            refresh(kfac, model, words(seed=step))
        else:
            kfac.collect_kfac_factors(model, words(seed=step), kind, n_samples=2)
        found.append({**kept(kfac), "refreshes": torch.tensor([kfac.refreshes])})
    return found


@pytest.mark.parametrize("kind", ["capture", "empirical", "mc", "true"])
@pytest.mark.parametrize("options", [{}, {"max_tokens": 7}, {"update_freq": 3}], ids=str)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(options: dict[str, Any], kind: str, tmp_path: Path) -> None:
    model = net()
    whole, first = make(**options), make(**options)
    expected = _go_on(whole, model, kind, range(6))
    _go_on(first, model, kind, range(2))
    second = through_file(first, model, tmp_path)
    actual = _go_on(second, model, kind, range(2, 6))
    for mine, theirs in zip(actual, expected[2:], strict=True):
        assert_same(mine, theirs)
    assert (second.steps, second.refreshes) == (whole.steps, whole.refreshes)


def test_drawn_labels_after_a_load_are_those_that_would_have_been_drawn() -> None:
    model, kfac = net(), make(ema_decay=0.0)
    kfac.collect_kfac_factors(model, words(), "mc")
    saved = kfac.state_dict()
    kfac.collect_kfac_factors(model, words(), "mc")
    after, repeated, fresh = kept(kfac), loaded(kfac, saved, model), make(ema_decay=0.0)
    repeated.collect_kfac_factors(model, words(), "mc")
    assert_same(kept(repeated), after)
    fresh.collect_kfac_factors(model, words(), "mc")
    assert differs(kept(fresh), after)  # the first draw again


# ---- what does not fit -----------------------------------------------------------------------------------------------


def _as_before(kfac: KFAC, model: nn.Module, load: Callable[[], None]) -> gramian.GramianError:
    """Loading raises, and the object is what it was."""
    factors, record, generator = kept(kfac), without_time(kfac.record()), kfac.state_dict()["generator"]
    specs, blocks = kfac.state.specs, dict(kfac.kfac_factors)
    with pytest.raises(gramian.GramianError) as caught:
        load()
    assert_same(kept(kfac), factors)
    assert kfac.kfac_factors == blocks and kfac.state.specs is specs
    assert without_time(kfac.record()) == record
    assert torch.equal(kfac.state_dict()["generator"], generator)
    kfac.compute_natural_gradient(model)
    return caught.value


def _without(*path: str) -> Callable[[State], Any]:
    def change(state: State) -> Any:
        inner = state
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        return state

    return change


def _with(value: Any, *path: str) -> Callable[[State], Any]:
    def change(state: State) -> Any:
        inner = state
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return state

    return change


@pytest.mark.parametrize(
    "change, beginning, word",
    [
        (_with(2, "schema"), "state", "schema 2"),
        (_without("schema"), "state", "no schema"),
        (lambda state: 7, "state", "no schema"),
        (lambda state: net().state_dict(), "state", "no schema"),
        (_without("factors"), "state", "factors"),
        (_without("layers"), "state", "layers"),
        (_without("counters"), "state", "counters"),
        (_without("generator"), "state", "generator"),
        (_without("counters", "steps"), "state", "steps"),
        (_without("factors", "0"), "state", "'0'"),
        (_without("factors", "1", "body"), "state", "body"),
        (_with("sparse", "factors", "1", "kind"), "state", "sparse"),
        (_with("A", "layers", "q", "sides", "A"), "state", "'A'"),
        (_with(torch.zeros(3), "generator"), "state", "expected"),
        (_with(3, "layers", "q", "facts", "colour"), "state", "colour"),
        (_with({}, "layers", "q", "spec"), "state", "expected"),
    ],
)
def test_an_invalid_state_is_refused_in_one_line_and_changes_nothing(
    change: Callable[[State], Any], beginning: str, word: str
) -> None:
    kfac, model = trained("dense")
    foreign = change(copy.deepcopy(trained("low rank")[0].state_dict()))
    one_line(_as_before(kfac, model, lambda: kfac.load_state_dict(foreign, model)), beginning, word, "expected")


def test_a_factor_of_another_width_is_refused_by_the_layers_name() -> None:
    kfac, model = trained("dense")
    state = copy.deepcopy(kfac.state_dict())
    state["layers"]["fc"]["sides"]["G"] = state["layers"]["head"]["sides"]["G"]
    one_line(_as_before(kfac, model, lambda: kfac.load_state_dict(state)), "fc", "11", "expected 9")


def _file(folder: Path, what: str) -> str:
    path = folder / "state.safetensors"
    if what == "text":
        path.write_text("not a file of ours")
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "foreign":
        save_file(net().state_dict(), str(path))
    elif what == "damaged":
        save_file({"generator": torch.zeros(3)}, str(path), metadata={"gramian": "{"})
    elif what == "half":
        save_file({"1.body": torch.zeros(3)}, str(path), metadata={"gramian": '{"schema": 1, "factors": {}}'})
    elif what == "cut":
        trained("dense")[0].save(str(path))
        path.write_bytes(path.read_bytes()[:-100])
    elif what == "folder":
        path.mkdir()
    return str(path)


@pytest.mark.parametrize("what", ["missing", "text", "empty", "foreign", "damaged", "half", "cut", "folder"])
def test_a_file_of_somebody_else_is_refused_by_its_name(what: str, tmp_path: Path) -> None:
    kfac, model = trained("dense")
    path = _file(tmp_path, what)
    one_line(_as_before(kfac, model, lambda: kfac.load(path, model)), path, "expected a file written by kfac.save")


@VARIANT
def test_a_folder_holds_the_same_state_as_a_dict(variant: str, tmp_path: Path) -> None:
    kfac, model = trained(variant)
    kfac.save_sharded(str(tmp_path / "kfac"))
    again = make(**VARIANTS[variant][0])
    again.load_sharded(str(tmp_path / "kfac"), model)
    assert_same(kept(again), kept(kfac))
    for name, step in kfac.compute_natural_gradient(model).items():
        assert torch.equal(step, again.compute_natural_gradient(model)[name])


@pytest.mark.parametrize("what", ["missing", "kfac.json", "kfac-00000.safetensors"])
def test_a_folder_that_is_not_whole_is_refused_by_its_name(what: str, tmp_path: Path) -> None:
    kfac, model = trained("dense")
    if what != "missing":
        kfac.save_sharded(str(tmp_path))
        content = bytearray((tmp_path / what).read_bytes())
        content[len(content) // 2] ^= 1
        (tmp_path / what).write_bytes(content)
    error = _as_before(kfac, model, lambda: kfac.load_sharded(str(tmp_path), model))
    one_line(error, "folder", "kfac.json" if what == "missing" else what, "kfac.save_sharded")


def test_a_file_with_another_number_in_it_is_refused(tmp_path: Path) -> None:
    kfac, model = trained("dense")
    path = tmp_path / "state.safetensors"
    kfac.save(str(path))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    one_line(_as_before(kfac, model, lambda: kfac.load(str(path), model)), str(path), "is damaged", "kfac.save")


FORGED: dict[str, Callable[[Any], Any]] = {
    "no files": lambda body: body.pop("files"),
    "no state": lambda body: body.pop("state"),
    "tensors": lambda body: body.update(tensors=[]),
    "dtype": lambda body: body["tensors"].update({"0.body": ["float77", [1, 1]]}),
    "format": lambda body: body.update(format=2),
}


@pytest.mark.parametrize("what", FORGED)
def test_an_index_that_says_something_else_is_refused(what: str, tmp_path: Path) -> None:
    kfac, model = trained("dense")
    kfac.save_sharded(str(tmp_path))
    body = json.loads((tmp_path / "kfac.json").read_text())["body"]
    FORGED[what](body)
    (tmp_path / "kfac.json").write_text(json.dumps({"body": body, "sha256": factor_folder._digest(body)}))
    one_line(_as_before(kfac, model, lambda: kfac.load_sharded(str(tmp_path), model)), "folder", "kfac.json", "damaged")


def test_a_folder_with_tensors_of_somebody_else_is_refused(tmp_path: Path) -> None:
    kfac, model = trained("dense")
    kfac.save_sharded(str(tmp_path))
    save_file({"0.body": torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    error = _as_before(kfac, model, lambda: kfac.load_sharded(str(tmp_path), model))
    one_line(error, "folder", "a.safetensors", "is not a file of this state")


@pytest.mark.parametrize("folder", [None, 5, b"x"])
def test_a_path_of_another_type_is_refused(folder: Any) -> None:
    kfac, _ = trained("dense")
    for act in (kfac.save_sharded, kfac.load_sharded):
        with refused("folder: expected a path", repr(folder)):
            act(folder)


@pytest.mark.parametrize("steps", [-1, "3", None])
def test_an_invalid_number_of_steps_is_refused(steps: Any) -> None:
    kfac, model = trained("dense")
    saved = kfac.state_dict()
    saved["counters"]["steps"] = steps
    one_line(_as_before(kfac, model, lambda: kfac.load_state_dict(saved, model)), "state: steps", "expected an integer")


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another width": (lambda: net(width=10), "table"),
    "more words": (lambda: net(words=13), "table"),
    "no such layer": (lambda: nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)), "table"),
    "tied": (lambda: net(tied=True), "head"),
    "no bias": (lambda: _without_bias(), "fc"),
}


def test_a_frozen_layers_factors_wait_in_the_state_and_come_back() -> None:
    saved, model = trained("dense")
    model.get_submodule("q").requires_grad_(False)
    refresh(saved, model)
    fresh = make()
    for kfac in (saved, fresh):
        kfac.load_state_dict(saved.state_dict(), model)
        kfac.load_state_dict(kfac.state_dict())
        assert "q" in kfac.kfac_factors
    other = make()
    refresh(other, model)  # knows nothing of q
    without = other.state_dict()
    model.get_submodule("q").requires_grad_(True)
    fresh.load_state_dict(without, model)
    assert "q" not in fresh.kfac_factors
    model.zero_grad()
    refresh(fresh, model)
    assert "q" in fresh.kfac_factors


def _without_bias() -> nn.Module:
    model = net()
    model.fc.bias = None
    return model


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_model_is_refused_by_the_layers_name(other: str, tmp_path: Path) -> None:
    build, layer = OTHERS[other]
    saved, _ = trained("dense")
    model = build()
    fresh = make()
    before = fresh.state_dict()
    with refused(layer, "expected"):
        fresh.load_state_dict(saved.state_dict(), model)
    assert fresh.kfac_factors == {} and fresh.state_dict()["counters"] == before["counters"]

    fresh.load_state_dict(saved.state_dict())  # nothing to compare with yet; the first use does
    with refused(layer, "expected"):
        fresh.compute_natural_gradient(model, gradients={n: torch.ones_like(p) for n, p in model.named_parameters()})
    with refused(layer, "expected"):
        refresh(fresh, model)


def test_an_object_in_use_refuses_the_state_of_another_model() -> None:
    kfac, model = trained("dense")
    foreign = refresh(make(), net(width=10)).state_dict()
    error = _as_before(kfac, model, lambda: kfac.load_state_dict(foreign))
    one_line(error, "table", "expected the layer as at the capture")
    fewer = copy.deepcopy(kfac.state_dict())
    del fewer["layers"]["v"]
    one_line(_as_before(kfac, model, lambda: kfac.load_state_dict(fewer, model)), "v", "not in the state")


# ---- one seed, one result --------------------------------------------------------------------------------------------


def _run(kind: str, noise: int, **options: Any) -> dict[str, Tensor]:
    """Factors, natural gradients and weights after a few preconditioned steps."""
    torch.manual_seed(noise)  # whatever the user's own generator does
    model, kfac = net(), make(**options)
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, kfac)
    for step in range(3):
        if kind == "capture":
            refresh(kfac, model, words(seed=step))
        else:
            kfac.collect_kfac_factors(model, words(seed=step), kind)
            model.zero_grad()
            loss_of(model, words(seed=step)).backward()
        found = naturals(kfac, model)
        optimizer.step()
    return {**kept(kfac), **found, **model.state_dict()}


@pytest.mark.parametrize("kind", ["capture", "empirical", "mc", "true"])
@pytest.mark.parametrize("options", [{}, {"max_tokens": 9}, {"kfac_true_fisher_head": True}], ids=str)
def test_one_seed_is_one_result_bit_for_bit(options: dict[str, Any], kind: str) -> None:
    first = _run(kind, noise=1, seed=3, **options)
    assert_same(_run(kind, noise=2, seed=3, **options), first)
    drawn = kind in ("mc", "true") or "max_tokens" in options
    assert differs(_run(kind, noise=1, seed=4, **options), first) is drawn


@pytest.mark.parametrize("kind", ["mc", "true"])
def test_a_generator_of_the_users_decides_the_draws(kind: str) -> None:
    def drawn(seed: int) -> dict[str, Tensor]:
        kfac, generator = make(), torch.Generator().manual_seed(seed)
        kfac.collect_kfac_factors(net(), words(), kind, generator=generator)
        return kept(kfac)

    assert_same(drawn(1), drawn(1))
    assert differs(drawn(2), drawn(1))


class Dropping(Net):
    """Uses the global generator in its forward."""

    def forward(self, x_BT: Tensor) -> Tensor:
        h = nn.functional.dropout(self.norm(self.table(x_BT)), 0.3, self.training)
        return self.head(self.fc(self.q(h) + self.k(h) * self.v(h))[..., :-1])


@pytest.mark.parametrize("kind", ["empirical", "mc", "true"])
def test_a_collection_leaves_no_trace_in_the_model_and_the_global_generator(kind: str) -> None:
    model = Dropping()
    loss_of(model, words()).backward()
    gradients, weights = {n: p.grad.clone() for n, p in model.named_parameters()}, copy.deepcopy(model.state_dict())
    before = torch.get_rng_state()
    make().collect_kfac_factors(model, words(), kind)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same({n: p.grad for n, p in model.named_parameters()}, gradients)
    assert_same(model.state_dict(), weights)
    assert model.training
