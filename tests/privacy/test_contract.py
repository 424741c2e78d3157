"""The lines of the contract as a user writes them, and the one-line refusals of what cannot be private."""

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import gramian
from gramian.oracles.clipped_sum import clipped_sum
from tests.kit import networks
from tests.kit.private import attach
from tests.kit.refusals import refusal
from tests.kit.toys import Toy
from tests.privacy.problems import assert_sums, clip_norm, gradients, private, wanted, weights
from tests.statistics.problems import problem

# ---- as written ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"clipping": "keep", "max_physical_batch": 1}, {"max_physical_batch": 4}])
def test_the_loop_of_the_contract_trains(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    before = F.cross_entropy(model(x), y).item()
    given = (model, optimizer)

    engine = gramian.PrivacyEngine(accountant="prv", insecure_reproducible=True, seed=0)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=1.0,
        **{"clipping": "auto", "norm_algorithm": "auto", "loss_reduction": "mean", "poisson_sampling": True,
           "max_physical_batch": None, "memory_budget": None, **options})  # fmt: skip
    assert (model, optimizer) == given and len(loader) == 4
    for _ in range(5):
        for x_B, y_B in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x_B), y_B)
            loss.backward()
            optimizer.step()
    assert engine.steps == 20
    assert 0 < engine.get_epsilon(delta=1e-5) < 100
    assert engine.detach() is model
    assert F.cross_entropy(model(x), y).item() < before


def test_the_expected_batch_and_the_sample_rate_follow_from_the_loader_or_are_given() -> None:
    model = problem("mlp", 2).model()
    for options, batch, rate in (
        ({"batch_size": 5}, 5.0, 5 / 40),
        ({"expected_batch": 8}, 8.0, 8 / 40),
        ({"expected_batch": 3.5, "sample_rate": 0.2}, 3.5, 0.2),
    ):
        with private(model, 1.0, **options) as run:
            assert (run.engine.expected_batch, run.engine.sample_rate) == (batch, rate)


@pytest.mark.parametrize("options", [{"batch_size": 5}, {"expected_batch": 4, "sample_rate": 0.1}])
def test_what_a_step_divides_by_does_not_tell_whether_a_record_is_there(options: dict[str, Any]) -> None:
    divisors = set()
    for records in (40, 41):
        with private(problem("mlp", 2).model(), 1.0, data=[torch.zeros(records, 7)], **options) as run:
            divisors.add(run.engine.expected_batch)
    assert len(divisors) == 1


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from torch.zeros(40, 7, dtype=torch.float64)


def test_an_iterable_data_set_must_be_given_batch_and_rate() -> None:
    model = problem("mlp", 2).model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"module": model, "optimizer": optimizer, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    loader = DataLoader(_Stream(), batch_size=4)
    engine = gramian.PrivacyEngine()
    with refusal("sample_rate: the data set has no length"):
        engine.make_private(data_loader=loader, poisson_sampling=False, **given)
    with refusal("^expected_batch: .*; expected it as an argument"):
        engine.make_private(data_loader=loader, poisson_sampling=False, sample_rate=0.1, **given)
    with refusal("IterableDataset; expected one with indices"):
        engine.make_private(data_loader=loader, expected_batch=4, sample_rate=0.1, **given)
    with pytest.warns(UserWarning, match="poisson_sampling: is off"):
        *_, same = engine.make_private(
            data_loader=loader, expected_batch=4, sample_rate=0.1, poisson_sampling=False, **given
        )
    assert same is loader and (engine.expected_batch, engine.sample_rate) == (4, 0.1)
    engine.detach()


# ---- two passes and the budget ---------------------------------------------------------------------------------------------


def test_forced_two_pass_raises_on_a_plain_backward() -> None:
    p = problem("gpt", 3)
    model = p.model()
    with private(model, 1.0, clipping="two_pass"):
        with refusal(r'clipping: "two_pass" needs two backwards; expected engine.back'):
            p.backward(model, p.batch)
        assert all(q.grad is None for q in model.parameters())


@pytest.mark.slow
def test_forced_two_pass_raises_on_a_plain_backward_of_a_compiled_model() -> None:
    p = problem("mlp", 3)
    model = torch.compile(p.model(), backend="aot_eager", fullgraph=True)
    with private(model, 1.0, clipping="two_pass"), refusal("two_pass"):
        p.backward(model, p.batch)


@pytest.mark.slow
def test_a_budget_that_is_too_small_for_a_compiled_model_raises_in_one_line() -> None:
    p = problem("mlp", 3)
    model = p.model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with private(compiled, 1.0, memory_budget=10) as run:
        with refusal("memory_budget"):
            run.engine.backward(p.case.loss(compiled, *p.batch, reduction="mean"))
        assert all(q.grad is None for q in model.parameters())


@pytest.mark.parametrize("clipping", ["auto", "bookkeeping", "keep"])
def test_a_plan_over_the_budget_raises_with_its_table_and_engine_backward_takes_two_passes(clipping: str) -> None:
    p = problem("tied_gpt", 4)
    limit, model = clip_norm(p), p.model()
    with private(model, limit, clipping=clipping, memory_budget=100) as run:
        with refusal("memory_budget: the plan does not fit; expected") as raised:
            p.backward(model, p.batch)
        lines = str(raised.value).splitlines()
        assert lines[1].split()[:2] == ["parameter", "shape"] and "two passes" in lines[-1]
        assert {line.split()[0] for line in lines[2:-1]} == {name for name, _ in model.named_parameters()}
        assert all(q.grad is None for q in model.parameters())
        run.engine.backward(p.case.loss(model, *p.batch, reduction="mean"))
        assert run.engine.plan is not None and run.engine.plan.two_pass and run.engine.plan.held == 0
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)
        with refusal("memory_budget"):  # and it is not remembered as allowed
            p.backward(model, p.batch)


def test_a_budget_that_fits_is_kept_to() -> None:
    p = problem("gpt", 4)
    limit, model = clip_norm(p), p.model()
    with private(model, limit, memory_budget="1MB") as run:
        p.backward(model, p.batch)
        assert run.engine.plan is not None and not run.engine.plan.two_pass and run.engine.plan.held <= 10**6
        assert run.engine.plan.budget == 10**6


# ---- refusals ----------------------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"noise_multiplier": -1.0}, "noise_multiplier: expected a number of at least 0, got -1.0"),
    ({"noise_multiplier": math.nan}, "noise_multiplier: expected"),
    ({"noise_multiplier": "1"}, "noise_multiplier: expected"),
    ({"noise_multiplier": True}, "noise_multiplier: expected"),
    ({"max_grad_norm": 0.0}, "max_grad_norm: expected a number above 0"),
    ({"max_grad_norm": math.inf}, "max_grad_norm: expected"),
    ({"max_grad_norm": [1.0, 2.0]}, "max_grad_norm: expected"),
    ({"clipping": "ghost"}, 'clipping: expected one of "auto", "bookkeeping", "keep", "two_pass", got \'ghost\''),
    ({"clipping": None}, "clipping: expected one of"),
    ({"norm_algorithm": "fast"}, 'norm_algorithm: expected one of "auto", "gram", "direct", got \'fast\''),
    ({"loss_reduction": "avg"}, 'loss_reduction: expected "mean", "sum"'),
    ({"loss_reduction": 0.0}, "loss_reduction: expected"),
    ({"poisson_sampling": "yes"}, "poisson_sampling: expected True, False or \"truncated\", got 'yes'"),
    ({"max_physical_batch": 0}, "max_physical_batch: expected a number of samples or None, got 0"),
    ({"max_physical_batch": 2.5}, "max_physical_batch: expected"),
    ({"max_physical_batch": True}, "max_physical_batch: expected"),
    ({"memory_budget": "8 apples"}, "memory_budget: expected bytes, such as 8000000000 or \"8GB\", got '8 apples'"),
    ({"memory_budget": -1}, "memory_budget: expected bytes"),
    ({"memory_budget": 1.5}, "memory_budget: expected bytes"),
    ({"loss_scale": 0.0}, "loss_scale: expected a positive number"),
    ({"loss_scale": -2.0}, "loss_scale: expected a positive number"),
    ({"expected_batch": 0}, "expected_batch: expected a number above 0, got 0"),
    ({"expected_batch": "4"}, "expected_batch: expected"),
    ({"sample_rate": -0.1}, "sample_rate: expected a number above 0, got -0.1"),
    ({"expected_batch": 4, "sample_rate": 1.5}, "sample_rate: is 1.5; expected at most 1"),
    ({"sample_rate": 0.1}, "expected_batch: is not given, and sample_rate × records"),
    ({"sample_rate": 0.1, "poisson_sampling": False}, "expected_batch: is not given, and sample_rate × records"),
    ({"batch_size": 50}, "sample_rate: is 1.25; expected at most 1"),
]


@pytest.mark.parametrize("options, complaint", BAD, ids=[f"{[*o][0]}={[*o.values()][0]}" for o, _ in BAD])
def test_bad_options_are_refused_in_one_line_that_names_them(options: dict[str, Any], complaint: str) -> None:
    model, given = problem("mlp", 2).model(), {"max_grad_norm": 1.0, **options}
    with pytest.raises(gramian.GramianError) as raised, private(model, **given):
        pass
    assert str(raised.value).startswith(complaint.split(", got")[0]) and complaint in str(raised.value)
    assert "\n" not in str(raised.value)
    assert all("forward" not in vars(module) for module in model.modules())
    with private(model, 1.0):  # nothing of it is left in the way
        pass


@pytest.mark.parametrize("budget", [8_000_000_000, "8GB", "8 gb", "8e9", "8000MB"])
def test_budgets_as_people_write_them(budget: int | str) -> None:
    p = problem("mlp", 2)
    model = p.model()
    with private(model, 1.0, memory_budget=budget) as run:
        p.backward(model, p.batch)
        assert run.engine.plan is not None and run.engine.plan.budget == 8 * 10**9


def test_an_unknown_accountant_is_refused() -> None:
    with refusal('accountant: "moments"; expected one of prv, pld, rdp, gdp'):
        gramian.PrivacyEngine(accountant="moments")


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"noise_multiplier": 1.0}, "noise_multiplier: follows from target_epsilon"),
        ({"epochs": 0}, "epochs: expected a number above 0, got 0"),
        ({"target_epsilon": -1.0}, "target_epsilon: expected a number above 0, got -1.0"),
        ({"target_delta": 2.0}, "target_delta: 2.0; expected"),
    ],
)
def test_bad_targets_are_refused(options: dict[str, Any], complaint: str) -> None:
    model = problem("mlp", 2).model()
    given: dict[str, Any] = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 1, **options}
    loader = DataLoader(TensorDataset(torch.zeros(40, 1)), batch_size=4)
    with refusal(complaint):
        gramian.PrivacyEngine("rdp").make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            max_grad_norm=1.0,
            **given,
        )


def test_one_engine_for_one_model_and_one_model_for_one_engine() -> None:
    model, other = problem("mlp", 2).model(), problem("mlp", 2).model()
    with private(model, 1.0) as run:
        with refusal("module: is private already"), private(model, 1.0):
            pass
        with refusal("engine: makes a model private already"):
            run.engine.make_private(
                module=other, optimizer=run.optimizer, data_loader=run.loader, noise_multiplier=1.0, max_grad_norm=1.0
            )
    engine = gramian.PrivacyEngine()
    for call in (engine.detach, lambda: engine.backward(torch.zeros((), requires_grad=True))):
        with refusal("engine: makes no model private"):
            call()


def test_a_module_or_optimizer_of_another_type_or_another_models_is_refused() -> None:
    model = problem("mlp", 2).model()
    foreign = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    frozen = problem("mlp", 2).model().requires_grad_(False)
    for module, optimizer, complaint in (
        ("model", foreign, "module: expected an nn.Module, got str"),
        (model, "sgd", "optimizer: expected a torch.optim.Optimizer, got str"),
        (model, foreign, "optimizer: has parameters that are not in the module"),
        (frozen, torch.optim.SGD(frozen.parameters(), lr=0.1), "optimizer: trains no parameter of the module"),
    ):
        with refusal(complaint):
            attach(
                gramian.PrivacyEngine(),
                module,
                DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=2),
                optimizer=optimizer,
                poisson_sampling=True,
            )


def _bypassed() -> tuple[nn.Module, Tensor, dict[str, bool]]:
    bypasses = {"now": True}

    class Model(nn.Module):
        def past_its_layer(self) -> bool:  # no attribute of a layer: those are proven anew when they change
            return bypasses["now"]

        def __init__(self) -> None:
            super().__init__()
            self.emb, self.body = nn.Embedding(11, 6), nn.Linear(6, 6)

        def forward(self, ids_BT: Tensor) -> Tensor:
            weight = self.emb.weight if self.past_its_layer() else self.emb.weight.detach()
            return F.linear(torch.tanh(self.body(self.emb(ids_BT))), weight)

    torch.manual_seed(0)
    return Model().double(), torch.randint(11, (4, 5)), bypasses


@pytest.mark.usefixtures("root_not_taken")
@pytest.mark.parametrize("clipping", ["auto", "bookkeeping", "keep", "two_pass"])
def test_a_weight_used_past_its_layer_is_an_error_that_names_it_on_every_step(clipping: str) -> None:
    model, ids, bypasses = _bypassed()
    with private(model, 1.0, clipping=clipping) as run:
        for _ in range(3):  # by the proof, before anything is computed
            with refusal(r"emb\.weight: the taps explain a gradient of norm"):
                model(ids)
            assert all(q.grad is None for q in model.parameters())
        bypasses["now"] = False
        run.engine.backward(F.cross_entropy(model(ids).transpose(1, 2), ids))
        assert model.emb.weight.grad is not None
        kept, bypasses["now"] = run.gradients(), True
        for _ in range(3):  # and where it begins after the proof, by the backward
            loss = F.cross_entropy(model(ids).transpose(1, 2), ids)
            with refusal(r"emb\.weight: got a gradient that did not come through"):
                run.engine.backward(loss)
            assert all(torch.equal(g, kept[key]) for key, g in run.gradients().items())


@pytest.mark.usefixtures("root_not_taken")
@pytest.mark.slow
def test_a_weight_used_past_its_layer_is_found_in_a_compiled_graph() -> None:
    model, ids, bypasses = _bypassed()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with private(compiled, 1.0) as run:
        for _ in range(2):  # by the proof, before the graph runs
            with refusal(r"emb\.weight: the taps explain a gradient of norm"):
                compiled(ids)
            assert all(q.grad is None for q in model.parameters())
        bypasses["now"] = False
        F.cross_entropy(compiled(ids).transpose(1, 2), ids).backward()
        kept, bypasses["now"] = run.gradients(), True
        for _ in range(2):  # and where it begins after the proof, by the backward
            with refusal(r"emb\.weight: got a gradient that did not come through"):
                F.cross_entropy(compiled(ids).transpose(1, 2), ids).backward()
            assert all(torch.equal(g, kept[key]) for key, g in run.gradients().items())


@pytest.mark.usefixtures("root_not_taken")
def test_earlier_gradients_survive_a_refused_backward() -> None:
    model, ids, bypasses = _bypassed()
    with private(model, 1.0):
        kept = {}
        for name, q in model.named_parameters():
            q.grad = torch.full_like(q, 0.25)
            kept[name] = q.grad.clone()
        with refusal(r"emb\.weight"):
            F.cross_entropy(model(ids).transpose(1, 2), ids).backward()
        assert all(torch.equal(q.grad, kept[name]) for name, q in model.named_parameters())


def test_a_penalty_on_the_weights_is_a_bypass_too() -> None:
    p = problem("mlp", 3)
    model = p.model()
    with private(model, 1.0), refusal(r"\d\.(weight|bias): got a gradient"):
        (p.case.loss(model, *p.batch, reduction="mean") + model[0].weight.square().sum()).backward()


def test_running_statistics_couple_nothing() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double().eval(),
        torch.randn(4, 7).double(),
    )

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum(1).mean()

    want = clipped_sum(model, loss, (x,), 0.1)
    with private(model, 0.1) as run:
        loss(model, x).backward()
        assert_sums(run.gradients(), want.totals, 1e-9)


def test_two_forwards_in_one_backward_are_refused() -> None:
    p = problem("mlp", 4)
    limit, model = clip_norm(p), p.model()
    with private(model, limit) as run:
        first = p.case.loss(model, *p.rows(slice(0, 2)), reduction="mean")
        second = p.case.loss(model, *p.rows(slice(2, 4)), reduction="mean")
        with refusal("backward: goes through two forwards of the model"):
            (first + second).backward()
        assert all(q.grad is None for q in model.parameters())
        p.backward(model, p.batch)
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)


@pytest.mark.parametrize("clipping", ["auto", "two_pass"])
def test_a_second_backward_through_one_forward_is_refused(clipping: str) -> None:
    p = problem("mlp", 4)
    model = p.model()
    with private(model, 1.0, clipping=clipping) as run:
        loss = p.case.loss(model, *p.batch, reduction="mean")
        if clipping == "auto":
            loss.backward(retain_graph=True)
        else:
            run.engine.backward(loss)
        kept = gradients(model)
        with pytest.raises((gramian.GramianError, RuntimeError)):
            run.engine.backward(loss)
        assert all(torch.equal(g, kept[key]) for key, g in gradients(model).items())


@pytest.mark.parametrize("options", [{}, {"max_physical_batch": 1}], ids=["taps", "whole gradients"])
def test_gradients_of_inputs_leave_the_parameters_alone(options: dict[str, Any]) -> None:
    p = problem("linear_3d", 1)
    model, x = p.model(), p.batch[0].clone().requires_grad_()
    plain = p.model()
    with private(model, 1e-2, **options) as run:
        try:
            (g,) = torch.autograd.grad(p.case.loss(model, x, p.batch[1], reduction="mean"), x)
        except gramian.GramianError:
            pass
        else:
            (want,) = torch.autograd.grad(p.case.loss(plain, x, p.batch[1], reduction="mean"), x)
            assert torch.equal(g, want)
        assert all(q.grad is None for q in model.parameters())
        p.backward(model, p.batch)
        assert_sums(run.gradients(), wanted(p, 1e-2).totals, p.tolerance)


def test_a_submodule_called_by_itself_is_refused_in_one_line() -> None:
    p = problem("gpt", 3)
    model = p.model()
    with private(model, 1.0), refusal("tokens: ran outside a forward"):
        model.tokens(p.batch[0]).sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_is_refused() -> None:
    p = problem("mlp", 4)
    model = p.model()
    with private(model, 1.0), refusal("create_graph"):
        p.case.loss(model, *p.batch, reduction="mean").backward(create_graph=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"clipping": "keep"}, {"clipping": "two_pass"}, {"max_physical_batch": 1}],
    ids=["taps", "keep", "two passes", "whole gradients"],
)
def test_a_backward_that_breaks_off_leaves_nothing_behind(options: dict[str, Any]) -> None:
    p = problem("gpt", 3)
    limit, model = clip_norm(p), p.model()

    def fail(*_: Any) -> None:
        raise ValueError("stop")

    with private(model, limit, **options) as run:
        run.engine.backward(p.case.loss(model, *p.rows([0]), reduction="mean"))
        kept = run.gradients()
        handle = model.blocks[0].attention.register_full_backward_hook(fail)
        loss = p.case.loss(model, *p.rows([1]), reduction="mean")
        with pytest.raises(ValueError, match="stop"):
            run.engine.backward(loss)
        handle.remove()
        loss = p.case.loss(model, *p.rows([1]), reduction="mean")
        assert all(torch.equal(g, kept[key]) for key, g in run.gradients().items())
        run.engine.backward(loss)
        run.engine.backward(p.case.loss(model, *p.rows([2]), reduction="mean"))
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)


@pytest.mark.parametrize("options", [{}, {"max_physical_batch": 1}], ids=["taps", "whole"])
def test_a_step_after_a_backward_that_broke_off_releases_nothing_of_it(options: dict[str, Any]) -> None:
    p = problem("gpt", 3)
    model = p.model()

    def fail(*_: Any) -> None:
        raise ValueError("stop")

    before = weights(model)
    with private(model, 1e-3, **options) as run:
        model.blocks[0].attention.register_full_backward_hook(fail)
        with pytest.raises(ValueError, match="stop"):
            p.backward(model, p.rows([1]))
        with contextlib.suppress(gramian.GramianError):
            run.optimizer.step()
    assert all(torch.equal(now, before[key]) for key, now in weights(model).items())


# ---- independence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "tied_gpt",
        pytest.param("convnet", marks=pytest.mark.full),
        pytest.param("hf_llama", marks=pytest.mark.full),
    ],
)
def test_samples_that_do_not_depend_on_each_other_pass(name: str) -> None:
    p = problem(name, 4)
    limit, model = clip_norm(p), p.model()
    with private(model, limit) as run:
        run.engine.check_independence(lambda m, x, y: p.case.loss(m, x, y, reduction="mean"), p.batch)
        run.engine.check_independence(lambda *batch: p.case.loss(model, *batch, reduction="mean"), p.batch)
        assert all(q.grad is None for q in model.parameters()) and run.engine.steps == 0
        p.backward(model, p.batch)
        assert_sums(run.gradients(), wanted(p, limit).totals, p.tolerance)


def test_losses_that_couple_samples_are_found() -> None:
    p = problem("linear_3d", 4)
    model, (x, y) = p.model(), p.batch

    def standardized(x: Tensor, y: Tensor) -> Tensor:
        out = model(x).flatten(1)
        return ((out - out.mean(0)) / out.std(0)).square().sum(1).mul(torch.arange(4.0)).mean()

    def contrastive(x: Tensor, y: Tensor) -> Tensor:
        out = F.normalize(model(x).flatten(1), dim=1)
        return F.cross_entropy(out @ out.T, torch.arange(4))

    def by_valid_tokens(batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=-100)

    with private(model, 1.0) as run:
        for loss in (standardized, contrastive):
            with refusal(r"2: the output gradient of sample \d changes when other"):
                run.engine.check_independence(loss, (x, y))
        y = y.clone()
        y[0, 1:] = -100
        with refusal(r"2: the output gradient of sample \d changes when other"):
            run.engine.check_independence(by_valid_tokens, {"x": x, "y": y})
        with refusal("batch: has 1 samples; expected at least two"):
            run.engine.check_independence(standardized, (x[:1], y[:1]))


def test_a_model_that_couples_samples_in_its_own_code_is_found() -> None:
    def mixing(net: Any, x_BTD: Tensor) -> Tensor:
        h = net.inner(x_BTD)
        return net.head(h - h.mean(0, keepdim=True))

    model, (x, y) = Toy(mixing, inner=nn.Linear(7, 9), head=nn.Linear(9, 5)).double(), problem("linear_3d", 4).batch
    found = r"head: the input of sample \d changes when other samples are replaced"
    with private(model, 1.0) as run, refusal(found):
        run.engine.check_independence(
            lambda x, y: F.cross_entropy(model(x).transpose(1, 2), y, reduction="none").mean(1).mean(), (x, y)
        )


def test_dropout_does_not_look_like_dependence() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(networks.linears(), nn.Dropout(0.5)).double()
    p = problem("linear_3d", 4)
    with private(model, 1.0) as run:
        state = torch.get_rng_state()
        run.engine.check_independence(lambda *batch: p.case.loss(model, *batch, reduction="mean"), p.batch)
        assert torch.equal(torch.get_rng_state(), state)


def test_a_warning_says_when_batches_are_not_poisson_draws() -> None:
    model = problem("mlp", 2).model()
    loader = DataLoader(TensorDataset(torch.zeros(40, 1)), batch_size=4)
    options = {"data_loader": loader, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    for poisson in (True, False):
        engine = gramian.PrivacyEngine()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine.make_private(module=model, optimizer=optimizer, poisson_sampling=poisson, **options)
        engine.detach()
        assert any("poisson_sampling: is off" in str(w.message) for w in said) == (not poisson)
