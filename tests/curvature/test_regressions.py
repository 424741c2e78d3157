"""Bugs that were found by reading and trying, each with the smallest case that showed it."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gramian
from tests.curvature.problems import narrow
from tests.kit.refusals import refusal
from tests.kit.toys import Toy


def net(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [m for i, o in zip(widths, widths[1:], strict=False) for m in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def classify(model: nn.Module, kfac: gramian.KFACNaturalGradient, seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, model[0].in_features, generator=generator, dtype=torch.float64)
    y = torch.randint(model[-1].out_features, (count,), generator=generator)
    with kfac.capture(model, num_terms=count):
        F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("head", [False, True], ids=["estimated head", "exact head"])
def test_a_long_average_of_wide_sides_neither_grows_nor_fades(monkeypatch: pytest.MonkeyPatch, head: bool) -> None:
    narrow(monkeypatch, 20)
    model = net(40, 64, 30)
    kfac = gramian.KFACNaturalGradient(
        update_freq=1, ema_decay=0.9, kfac_auto_t_max=16, kfac_true_fisher_head=head, max_condition_number=1e12
    )
    traces = []
    for seed in range(60):
        classify(model, kfac, seed, 16)
        model.zero_grad()
        traces.append([float(f.trace()) for block in kfac.kfac_factors.values() for f in block.factors.values()])
    late, early = torch.tensor(traces[40:]).mean(0), torch.tensor(traces[:20]).mean(0)
    assert ((late / early - 1).abs() < 0.5).all()
    assert kfac.kfac_factors["2"].G.rank <= 16


def test_a_side_that_may_be_dense_becomes_so_when_an_average_has_too_many_columns() -> None:
    model, average = net(40, 64, 30), gramian.KFACNaturalGradient(update_freq=1, ema_decay=0.5, kfac_auto_t_max=8)
    whole = gramian.KFACNaturalGradient(update_freq=1, ema_decay=0.5, kfac_policy="small_only")
    for seed in range(3):
        for kfac in (average, whole):
            classify(model, kfac, seed, 8)
            model.zero_grad()
    for name, block in whole.kfac_factors.items():
        for side, factor in block.factors.items():
            assert average.kfac_factors[name].factors[side].kind == "dense"
            torch.testing.assert_close(average.kfac_factors[name].factors[side].to_dense(), factor.to_dense())


def test_weights_that_sum_to_less_than_one_scale_nothing() -> None:
    model, w = net(5, 4), torch.arange(1.0, 7.0, dtype=torch.float64)
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randint(4, (6,))
    found = []
    for scale in (1.0, 0.5 / float(w.sum())):
        kfac = gramian.KFACNaturalGradient()
        with kfac.capture(model, token_weights=scale * w[:, None]):
            ((w * F.cross_entropy(model(x), y, reduction="none")).sum() / w.sum()).backward()
        found.append(kfac.kfac_factors["0"].G.to_dense())
    torch.testing.assert_close(found[1], found[0])


def test_passes_of_our_own_are_refused_inside_another_capture() -> None:
    model, kfac = net(5, 4), gramian.KFACNaturalGradient()
    batch = torch.randn(6, 5, dtype=torch.float64), torch.randint(4, (6,))
    with gramian.per_sample_norms(model) as norms:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        with refusal("model: is inside an open capture"):
            kfac.collect_kfac_factors(model, batch)
    assert len(norms.values) == 6
    assert kfac.steps == 0


def with_positions() -> Toy:
    """A root with a parameter of its own, so that the root is tapped too."""
    return Toy(
        lambda net, x: net.head(net.inner(x + net.offset).tanh()),
        offset=nn.Parameter(torch.zeros(5)),
        inner=nn.Linear(5, 6),
        head=nn.Linear(6, 40),
    )


def test_the_head_is_found_behind_a_root_with_parameters_of_its_own() -> None:
    model, kfac = with_positions().double(), gramian.KFACNaturalGradient(kfac_true_fisher_head=True)
    with kfac.capture(model, num_terms=6):
        F.cross_entropy(model(torch.randn(6, 5, dtype=torch.float64)), torch.randint(40, (6,))).backward()
    assert kfac.head == "head"
    assert kfac.kfac_factors["head"].G.kind == "diagonal minus low rank"


def test_a_frozen_head_is_refused_as_such() -> None:
    model, kfac = with_positions().double(), gramian.KFACNaturalGradient(kfac_true_fisher_head=True)
    model.head.requires_grad_(False)
    with refusal("head: no trained layer was seen"), kfac.capture(model, num_terms=6):
        F.cross_entropy(model(torch.randn(6, 5, dtype=torch.float64)), torch.randint(40, (6,))).backward()


def test_one_object_serves_one_model() -> None:
    kfac, first, second = gramian.KFACNaturalGradient(update_freq=1), net(5, 4), net(5, 4)
    classify(first, kfac, 0, 6)
    with refusal("model: the factors here are those of another model"):
        classify(second, kfac, 0, 6)
    assert kfac.steps == 1


def test_a_pickle_has_the_factors_and_no_model() -> None:
    kfac, model = gramian.KFACNaturalGradient(), net(5, 4)
    classify(model, kfac, 0, 6)
    again = pickle.loads(pickle.dumps(kfac))
    got, want = again.compute_natural_gradient(model), kfac.compute_natural_gradient(model)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("told", [{"loss_reduction": "median"}, {"batch_size": -1}, {"loss_scale": 0.0}])
def test_a_step_without_a_refresh_checks_its_arguments(told: dict) -> None:
    kfac, model = gramian.KFACNaturalGradient(update_freq=10), net(5, 4)
    classify(model, kfac, 0, 6)
    with refusal(next(iter(told))):
        kfac.capture(model, num_terms=6, **told)
    assert kfac.steps == 1


def test_a_state_that_is_not_finite_is_refused_and_changes_nothing() -> None:
    kfac, model = gramian.KFACNaturalGradient(), net(5, 4)
    classify(model, kfac, 0, 6)
    state, before = copy.deepcopy(kfac.state_dict()), kfac.kfac_factors["0"]
    state["factors"]["0"]["body"][0, 0] = float("nan")
    with refusal("0: A holds NaN"):
        kfac.load_state_dict(state)
    assert kfac.kfac_factors["0"] is before


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_long_average_in_half_precision_keeps_moving(dtype: str) -> None:
    model = net(6, 4).float()
    kfac = gramian.KFACNaturalGradient(update_freq=1, ema_decay=0.99, woodbury_dtype=dtype)
    x, y = torch.randn(64, 6), torch.randint(4, (64,))
    for scale in [1.0] * 20 + [1.05] * 500:
        with kfac.capture(model, num_terms=64):
            F.cross_entropy(model(scale * x), y).backward()
        model.zero_grad()
    expected = 1.05**2 * float(x.square().sum() / 64) + 1
    assert float(kfac.kfac_factors["0"].A.trace()) == pytest.approx(expected, rel=5e-3)


def test_tokens_whose_own_target_is_ignored_count_where_later_ones_look_at_them() -> None:
    """A head on all tokens, a loss on the last: every token's gradient is in the hidden layers' factors."""

    torch.manual_seed(0)
    model = Toy(
        lambda net, x: net.head(net.inner(x).tanh().cumsum(1)), inner=nn.Linear(5, 6), head=nn.Linear(6, 3)
    ).double()
    kfac = gramian.KFACNaturalGradient()
    x, y = torch.randn(4, 7, 5, dtype=torch.float64), torch.randint(3, (4,))
    with kfac.capture(model, num_terms=4):
        F.cross_entropy(model(x)[:, -1], y).backward()
    assert kfac.record()["layers"]["inner"]["T"] == 28
    assert kfac.record()["layers"]["head"]["T"] == 4


def test_a_root_that_is_its_own_head_is_found() -> None:
    model, kfac = nn.Linear(5, 40).double(), gramian.KFACNaturalGradient(kfac_true_fisher_head=True)
    with kfac.capture(model, num_terms=6):
        F.cross_entropy(model(torch.randn(6, 5, dtype=torch.float64)), torch.randint(40, (6,))).backward()
    assert kfac.kfac_factors["model"].G.kind == "diagonal minus low rank"


def test_a_layer_may_be_frozen_and_trained_again() -> None:
    model, kfac = net(5, 4, 3), gramian.KFACNaturalGradient(update_freq=1)
    model[0].requires_grad_(False)
    classify(model, kfac, 0, 6)
    model[0].requires_grad_(True)
    model.zero_grad()
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randint(3, (6,))
    F.cross_entropy(model(x), y).backward()
    natural = kfac.compute_natural_gradient(model)  # "0" has no curvature yet: handed on, and recorded
    assert torch.equal(natural["0.weight"], model[0].weight.grad)
    assert kfac.record()["identity"] == ["0.bias", "0.weight"]
    classify(model, kfac, 1, 6)
    model[0].requires_grad_(False)
    classify(model, kfac, 2, 6)
    assert kfac.refreshes == 3


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda k, m: k.capture(None, num_terms=1), "model"),
        (lambda k, m: k.compute_natural_gradient("x"), "model"),
        (lambda k, m: k.compute_natural_gradient(m, power=None), "power"),
        (lambda k, m: k.compute_natural_gradient(m, power=float("nan")), "power"),
        (lambda k, m: k.compute_natural_gradient(m, gradients=[1]), "gradients"),
        (lambda k, m: k.compute_natural_gradient(m, gradients={"0.weight": None}), "gradients"),
        (lambda k, m: k.compute_fisher_vector_product(None), "vector"),
        (lambda k, m: k.trust_region_scale({}, kl="x"), "kl"),
        (lambda k, m: k.collect_kfac_factors(m, BATCH, "mc", generator=5), "generator"),
        (lambda k, m: k.collect_kfac_factors(m, BATCH, "mc", sample_ids=torch.arange(3), force=True), "sample_ids"),
        (lambda k, m: k.collect_kfac_factors(m, BATCH, causal_shift="x"), "causal_shift"),
        (lambda k, m: k.collect_kfac_factors(m, (BATCH[0], BATCH[1] + 100), force=True), "labels"),
        (lambda k, m: k.save("/no such folder/x"), "path"),
        (lambda k, m: k.load(5), "5"),
        (lambda k, m: gramian.precondition(torch.optim.SGD(m.parameters()), 5, k), "model"),
        (lambda k, m: gramian.precondition(torch.optim.SGD(m.parameters()), m, 5), "kfac"),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(call, field: str) -> None:
    model, kfac = net(5, 4), gramian.KFACNaturalGradient()
    classify(model, kfac, 0, 6)
    with refusal(rf"^{field}: ") as caught:
        call(kfac, model)
    assert "\n" not in str(caught.value)


def test_passes_of_our_own_leave_every_buffer_as_it_was() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)), nn.BatchNorm1d(6), nn.Linear(6, 4))
    model = model.double().train()
    before = [buffer.clone() for buffer in model.buffers()]
    with contextlib.suppress(
        gramian.GramianError
    ):  # a parametrised weight has no layer of its own; buffers stay all the same
        gramian.KFACNaturalGradient().collect_kfac_factors(model, (torch.randn(8, 5).double(), torch.randint(4, (8,))))
    assert all(torch.equal(new, old) for new, old in zip(model.buffers(), before, strict=True))


def test_a_step_without_a_closure_may_say_so() -> None:
    model, kfac = net(5, 4), gramian.KFACNaturalGradient()
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, kfac)
    classify(model, kfac, 0, 6)
    optimizer.step(None)


BATCH = torch.zeros(6, 5, dtype=torch.float64), torch.zeros(6, dtype=torch.long)


class Padded(nn.Module):
    """Tokens in, classes out, with a head that is plain, frozen, behind other operations, called in pieces or pooled."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.fc, self.head = way, nn.Linear(6, 5), nn.Linear(5, 4)
        self.head.requires_grad_(way != "frozen head")
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x).tanh()
        if self.way == "pooled":
            return self.head(h.mean(1))
        if self.way == "in pieces":
            return torch.cat([self.head(piece) for piece in h.split(2, dim=1)], dim=1)
        return (self.head(h) / 2).log_softmax(-1) if self.way == "scaled" else self.head(h)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("way", ["plain", "frozen head", "scaled", "in pieces", "pooled"])
def test_ignored_targets_are_seen_whatever_the_head_is(way: str, forwards: int, sharing: str) -> None:
    if way == "in pieces" and (sharing == "reduce" or forwards == 2):
        return
    model, kfac = Padded(way), gramian.KFACNaturalGradient(weight_sharing=sharing, kfac_policy="small_only")
    x, y = torch.randn(4, 5, 6).double(), torch.randint(4, (4, 5))
    y[0, 2:], y[1], y[3, :1] = -100, -100, -100
    y = y[:, 0] if way == "pooled" else y
    kept = y >= 0
    with kfac.capture(model, num_terms=forwards * int(kept.sum())):
        losses = [F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum") for _ in range(forwards)]
        (sum(losses) / (forwards * kept.sum())).backward()
    if way == "pooled":
        rows = x[kept].flatten(0, 1) if sharing == "expand" else x[kept].mean(1)
    elif sharing == "expand":
        rows = x[kept]
    else:
        rows = torch.stack([a[m].mean(0) for a, m in zip(x, kept, strict=True) if m.any()])
    rows = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
    torch.testing.assert_close(kfac.kfac_factors["fc"].A.to_dense(), rows.mT @ rows / len(rows))
    assert ("head" in kfac.record()["padding_counted"]) == (way == "in pieces" and forwards == 1)


def test_a_term_whose_gradient_underflows_is_not_taken_for_an_ignored_target(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Padded("plain"), torch.randn(2, 5, 6).double()
    logits_of = model.head.forward
    for strict in (False, True):
        kfac = gramian.KFACNaturalGradient(strict=strict, kfac_policy="small_only")
        with contextlib.ExitStack() as stack:
            if strict:
                stack.enter_context(refusal(r"token_weights: .*10 tokens for 9 loss"))
            stack.enter_context(kfac.capture(model, num_terms=9))
            out = model(x)[:, :4]  # the last token of each sample is ignored: eight answer, nine were to
            (out.square().sum() / 9).backward()
        model.zero_grad()
        assert strict or kfac.record()["layers"]["fc"]["T"] == 10
    assert "token_weights" in caplog.text and logits_of == model.head.forward


@pytest.mark.parametrize("p", [-1.0, -1.5, -2.0])
@pytest.mark.parametrize("damping", [3e-3, 3e-5])
def test_both_sides_of_a_block_are_applied_in_float64_where_one_needs_it(p: float, damping: float) -> None:
    model = net(40, 64, 30).float()
    kfac = gramian.KFACNaturalGradient(
        damping_A=damping, damping_G=damping, damping_mode="factored", woodbury_dtype="fp32",
        use_eigenvalue_correction=False,
    )  # fmt: skip
    with kfac.capture(model, num_terms=6):
        F.cross_entropy(model(20 * torch.randn(6, 40)), torch.arange(6)).backward()
    found = kfac.compute_natural_gradient(model, power=p)
    for name, block in kfac.kfac_factors.items():
        layer, sides = model.get_submodule(name), {}
        for side, factor in block.factors.items():
            u = factor.columns.stored.load(dtype=torch.float64)
            left, s, _ = torch.linalg.svd(u)
            values = torch.zeros(len(u), dtype=torch.float64)
            values[: len(s)] = s.square()
            sides[side] = left * (values + damping).pow(p) @ left.mT
        y = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], dim=1).double()
        expected = sides["G"] @ y @ sides["A"]
        actual = torch.cat([found[f"{name}.weight"], found[f"{name}.bias"][:, None]], dim=1)
        assert (actual - expected).norm() <= 1e-5 * expected.norm()


def test_a_first_refresh_that_comes_to_nothing_leaves_the_parameters_alone() -> None:
    model, kfac = net(4, 6, 3), gramian.KFACNaturalGradient(update_freq=1)
    optimizer = gramian.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, kfac)
    before = copy.deepcopy(model.state_dict())
    for x in (torch.full((5, 4), torch.nan).double(), torch.randn(5, 4).double()):
        torch.testing.assert_close(dict(model.state_dict()), dict(before))
        optimizer.zero_grad()
        with kfac.capture(model, num_terms=5):
            F.cross_entropy(model(x), torch.tensor([0, 1, 2, 0, 1])).backward()
        optimizer.step()
    assert not torch.equal(model[0].weight, before["0.weight"])
