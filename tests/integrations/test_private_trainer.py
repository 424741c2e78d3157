"""Private training in the loop of Hugging Face's Trainer, against a float64 loop over single records and a loop by hand."""

import copy
import json
import math
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import gramian
from gramian.oracles.clipped_sum import clipped_sum
from tests.integrations.trainers import (
    LENGTH,
    RECORDS,
    arguments,
    drawn,
    gpt2,
    privacy,
    records,
    stacked,
    summed_loss,
    trainer,
)
from tests.kit.processes import run_on_ranks
from tests.kit.refusals import refusal
from tests.privacy.problems import assert_sums, largest_error, weights

pytestmark = [pytest.mark.few_proofs, pytest.mark.filterwarnings("ignore")]
CLIP = 12.0


# ---- one step -------------------------------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("size, shares, physical", [(8, 1, None), (4, 2, None), (8, 1, 2)])
def test_a_step_moves_by_the_loops_clipped_sum_whatever_the_label_counts(
    tmp_path: Path, monkeypatch: Any, size: int, shares: int, physical: int | None
) -> None:
    found, model = drawn(monkeypatch), gpt2()
    before, start = weights(model), copy.deepcopy(model).double()
    made = trainer(
        tmp_path, model, secret={"max_physical_batch": physical},
        per_device_train_batch_size=size, gradient_accumulation_steps=shares, max_steps=1,
    )  # fmt: skip
    made.train()
    rows = [i for piece in found for i in piece]
    batch = stacked(records(), rows)
    assert len(rows) > 2 and len({int(label.ne(-100).sum()) for label in batch[1]}) > 1
    assert len(found) > 1 or not (physical or shares > 1)
    want = clipped_sum(start, summed_loss, batch, CLIP)
    assert (want.factors_B < 1).any() and (want.factors_B == 1).any()
    expected = size * shares
    moved = {name: (before[name] - now).double() * expected for name, now in weights(model).items()}
    assert largest_error(moved, want.totals) < 3e-5


@pytest.mark.oracle
def test_with_users_a_step_moves_by_the_sum_of_their_clipped_gradients(tmp_path: Path, monkeypatch: Any) -> None:
    found, model, limit = drawn(monkeypatch), gpt2(), 20.0
    before, start = weights(model), copy.deepcopy(model).double()
    user_of = [i * 7 % 9 for i in range(RECORDS)]
    made = trainer(
        tmp_path, model, secret={"unit_of": user_of, "max_physical_batch": 6, "max_grad_norm": limit}, max_steps=1
    )
    made.train()
    rows = [i for piece in found for i in piece]
    users = sorted({user_of[i] for i in rows})
    assert sorted(rows) == [i for i in range(RECORDS) if user_of[i] in users] and len(users) > 2
    own = [[i for i in rows if user_of[i] == user] for user in users]
    each = [clipped_sum(start, summed_loss, stacked(records(), theirs), 1e9).totals for theirs in own]
    norms = [float(torch.cat([g.flatten() for g in one.values()]).norm()) for one in each]
    assert max(norms) > limit > min(norms)
    want = {
        name: sum(min(1.0, limit / norm) * one[name] for one, norm in zip(each, norms, strict=True)) for name in each[0]
    }
    moved = {name: (before[name] - now).double() * 4 for name, now in weights(model).items()}
    assert largest_error(moved, want) < 3e-5
    ledger = made.engine._ledger
    assert ledger.accounting.history[0][1] == 4 / 9
    assert ledger.chain.runs[0][0]["adjacency"] == "add or remove one unit"


def test_draws_are_cut_to_max_draw_and_accounted_for_as_such(tmp_path: Path, monkeypatch: Any) -> None:
    found, options = drawn(monkeypatch), {"per_device_train_batch_size": 8, "max_steps": 3}
    secret = {"max_draw": 8, "accountant": "pld", "noise_multiplier": None, "target_epsilon": 6.0, "target_delta": 1e-3}
    made = trainer(tmp_path, secret=secret, **options)
    made.train()
    assert len(found) == 3 and max(map(len, found)) == 8
    assert made.engine._ledger.accounting.history[0][1:] == (8 / RECORDS, 3, RECORDS, 8)
    assert 5.9 < made.epsilon() <= 6.0
    for value, accountant, words in ((8, "rdp", "has no bound in rdp"), (0, "pld", "expected a number of records")):
        with refusal(f"^privacy: max_draw: {words}"):
            trainer(tmp_path, secret={"max_draw": value, "accountant": accountant})


def test_users_that_do_not_fit_the_data_set_or_a_backward_are_refused(tmp_path: Path) -> None:
    large, update = [i // 8 for i in range(RECORDS)], "per_device_train_batch_size"
    for users, options, words in (
        ([0, 1], {}, "unit_of: expected 24 integers"),
        (large, {update: 2}, "max_physical_batch: is 2, and a unit has 8 records"),
        (large, {}, f"{update}: an update expects 4 units and the data set has 3"),
    ):
        with refusal(words):
            trainer(tmp_path, secret={"unit_of": users}, **options).train()


@pytest.mark.oracle
def test_the_unit_of_the_clip_norm_is_the_tokens_of_a_record(tmp_path: Path, monkeypatch: Any) -> None:
    found, model = drawn(monkeypatch), gpt2()
    before, start = weights(model), copy.deepcopy(model).double()
    trainer(tmp_path, model, secret={"tokens_per_record": LENGTH, "max_grad_norm": CLIP / LENGTH}, max_steps=1).train()
    want = clipped_sum(start, summed_loss, stacked(records(), [i for piece in found for i in piece]), CLIP)
    moved = {name: (before[name] - now).double() * 4 * LENGTH for name, now in weights(model).items()}
    assert largest_error(moved, want.totals) < 3e-5


@pytest.mark.oracle
def test_a_loss_function_with_the_mean_of_each_record(tmp_path: Path, monkeypatch: Any) -> None:
    from gramian.integrations.transformers import PrivateTrainer

    def own_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        losses = nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        return (losses.sum(1) / labels[:, 1:].ne(-100).sum(1)).mean()

    found, model = drawn(monkeypatch), gpt2()
    before, start = weights(model), copy.deepcopy(model).double()
    secret = privacy(loss_reduction="mean", max_grad_norm=2.5)
    options = {"model": model, "args": arguments(tmp_path, max_steps=1, per_device_train_batch_size=8)}
    PrivateTrainer(**options, train_dataset=records(), privacy=secret, compute_loss_func=own_mean).train()

    def loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return own_mean(model(input_ids=ids), labels)

    want = clipped_sum(start, loss, stacked(records(), [i for piece in found for i in piece]), 2.5)
    moved = {name: (before[name] - now).double() * 8 for name, now in weights(model).items()}
    assert largest_error(moved, want.totals) < 3e-5


class _Classifier(nn.Module):
    """A model that knows nothing of `num_items_in_batch`: it returns the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}


@pytest.mark.oracle
def test_a_model_with_its_own_mean_over_the_batch(tmp_path: Path, monkeypatch: Any) -> None:
    from gramian.integrations.transformers import PrivateTrainer

    torch.manual_seed(0)
    found, model = drawn(monkeypatch), _Classifier()
    start, before = copy.deepcopy(model).double(), weights(model)
    x, y = torch.randn(RECORDS, 5), torch.randint(3, (RECORDS,))
    data = [{"x": row, "labels": label} for row, label in zip(x, y, strict=True)]
    options = arguments(tmp_path, gradient_accumulation_steps=2, max_steps=1)
    PrivateTrainer(model=model, args=options, train_dataset=data, privacy=privacy(max_grad_norm=1.0)).train()
    rows = [i for piece in found for i in piece]

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model.linear(x), y)

    want = clipped_sum(start, loss, (x[rows].double(), y[rows]), 1.0)
    moved = {name: (before[name] - now).double() * 8 for name, now in weights(model).items()}
    assert largest_error(moved, want.totals) < 1e-5


# ---- many steps -----------------------------------------------------------------------------------------------------------


def test_accumulation_is_one_large_batch_and_a_loop_by_hand_with_noise(tmp_path: Path) -> None:
    ends, losses = [], []
    for size, shares in ((8, 1), (2, 4)):
        made = trainer(
            tmp_path, secret={"noise_multiplier": 0.5}, per_device_train_batch_size=size,
            gradient_accumulation_steps=shares, max_steps=4, optim="adamw_torch", learning_rate=1e-2,
        )  # fmt: skip
        made.train()
        ends.append(weights(made.model))
        losses.append([line["loss"] for line in made.state.log_history if "loss" in line])
        assert made.engine.steps == 4
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    engine = gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=0)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(records(), batch_size=8), noise_multiplier=0.5,
        max_grad_norm=CLIP, loss_reduction="sum",
    )  # fmt: skip
    by_hand = []
    while engine.steps < 4:
        for batch in loader:
            loss = summed_loss(model, batch["input_ids"], batch["labels"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            by_hand.append(float(loss) / int(batch["labels"].ne(-100).sum()))
            if engine.steps == 4:
                break
    for end in ends:
        assert_sums(end, weights(model), 1e-4)
    # Trainer counts the tokens that it takes to have a label; of some models also the first one, which predicts nothing.
    ratios = torch.tensor(losses) / torch.tensor([by_hand])
    assert ((ratios > 0.95) & (ratios < 1.3)).all()
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=0)
    assert made.epsilon() == engine.get_epsilon(1e-3)


@pytest.mark.full
def test_a_resumed_run_that_repeats_its_steps_is_the_uninterrupted_one(tmp_path: Path) -> None:
    options = {
        "max_steps": 7, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-2,
        "lr_scheduler_type": "linear", "gradient_accumulation_steps": 2,
    }  # fmt: skip
    first = trainer(tmp_path, secret={"noise_multiplier": 0.5, "replay": True}, **options)
    first.train()
    spent = first.epsilon()
    again = trainer(tmp_path, secret={"noise_multiplier": 0.5, "replay": True}, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.engine.not_replayed is None
    assert all(torch.equal(now, weights(first.model)[name]) for name, now in weights(again.model).items())
    assert again.state.global_step == 7 and again.engine.steps == 7 and again.epsilon() == spent

    # What was begun after the checkpoint counts, and the noise is new.
    other = trainer(tmp_path, secret={"noise_multiplier": 0.5, "insecure_reproducible": False, "seed": None}, **options)
    with refusal("insecure_reproducible"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    fresh = trainer(tmp_path, secret={"noise_multiplier": 0.5}, **options)
    fresh.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert fresh.engine.steps == 10 and fresh.epsilon() > spent


@pytest.mark.few_proofs(every=1)
def test_checkpoints_have_the_state_in_a_file_of_their_owner_alone(tmp_path: Path) -> None:
    made = trainer(tmp_path, secret={"noise_multiplier": 1.0}, save_strategy="steps", save_steps=1)
    made.train()
    file = tmp_path / "checkpoint-2" / "_privacy_engine.pt"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    record = state["stateful_callbacks"]["PrivacyState"]["attributes"]["record"]
    assert record["epsilon"] == made.epsilon() and record["releases"] == 2 and record["delta"] == 1e-3
    assert record["proof"] == {"rows": "proven", "loss": "not proven"}
    assert [line["epsilon"] for line in state["log_history"]] == [
        made.engine.get_epsilon(1e-3, releases) for releases in (1, 2)
    ]
    assert not hasattr(made.model, "_is_private") and made.engine._installed is None  # the model is the user's again


def test_only_noised_numbers_are_not_labelled(tmp_path: Path) -> None:
    from gramian.integrations.transformers import NormsCallback

    made = trainer(tmp_path, secret={"noise_multiplier": 1.0}, max_steps=1, include_num_input_tokens_seen="all")
    made.add_callback(NormsCallback(made))
    before = weights(made.model)
    made.train()
    norms, losses, end = made.state.log_history
    moved = torch.cat([(before[name] - now).flatten() for name, now in weights(made.model).items()]).norm()
    assert math.isclose(losses["grad_norm"], float(moved), rel_tol=1e-4)  # with its noise: lr 1
    covered = {"grad_norm", "learning_rate", "epsilon", "epoch", "step", "train_runtime", "not_covered_by_epsilon"}
    speeds = {"train_samples_per_second", "train_steps_per_second"}
    for line in (norms, losses, end):
        assert set(line) - covered - speeds == set(line["not_covered_by_epsilon"])
    assert "loss" in losses and "gradient_norms/max" in norms and "train_loss" in end


@pytest.mark.full
def test_target_epsilon_is_met_by_the_steps_of_the_run(tmp_path: Path) -> None:
    target = {"noise_multiplier": None, "target_epsilon": 4.0}
    made = trainer(tmp_path, secret=target, max_steps=-1, num_train_epochs=2)
    made.train()
    assert made.engine.steps == made.state.max_steps == 12
    assert 3.8 < made.epsilon() <= 4.0
    with refusal("target_epsilon: was spent"):
        made.train()


def test_evaluation_goes_between_private_steps(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=2)
    made.eval_dataset, made.args.eval_strategy, made.args.eval_steps = records(5), "steps", 1
    made.train()
    lines = [line for line in made.state.log_history if "eval_loss" in line]
    assert len(lines) == 2 and all("not_covered_by_epsilon" not in line for line in lines)


# ---- several processes ----------------------------------------------------------------------------------------------------


def train_on_rank(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Three steps with noise on this process; the weights and ε at the end."""
    import os

    from accelerate.state import AcceleratorState

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in names.items()})
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        made = trainer(
            Path(folder), secret={"noise_multiplier": 0.5}, per_device_train_batch_size=2, max_steps=3,
            gradient_accumulation_steps=2, save_strategy="steps", save_steps=2, ddp_backend="gloo",
        )  # fmt: skip
        assert made.args.world_size == world_size
        made.train()
        losses = [line["loss"] for line in made.state.log_history if "loss" in line]
        return {"weights": weights(made.model), "epsilon": made.epsilon(), "losses": losses}
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.xdist_group("processes")
def test_two_processes_are_one(tmp_path: Path) -> None:
    alone = trainer(
        tmp_path / "one", secret={"noise_multiplier": 0.5}, per_device_train_batch_size=4, max_steps=3,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    alone.train()
    first, second = run_on_ranks(2, train_on_rank, str(tmp_path / "two"))
    assert_sums(first["weights"], weights(alone.model), 1e-4)
    assert all(torch.equal(first["weights"][name], now) for name, now in second["weights"].items())
    assert first["epsilon"] == second["epsilon"] == alone.epsilon()
    losses = [line["loss"] for line in alone.state.log_history if "loss" in line]
    torch.testing.assert_close(torch.tensor(first["losses"]), torch.tensor(losses), rtol=1e-4, atol=0)
    assert (tmp_path / "two" / "checkpoint-2" / "_privacy_engine.pt").exists()


@pytest.mark.full
def test_correlated_noise_is_passed_on(tmp_path: Path) -> None:
    options = {"noise_multiplier": 0.5, "noise": "bandmf", "bands": 2, "releases": 3}
    made = trainer(tmp_path, secret=options, per_device_train_batch_size=4, max_steps=3)
    made.train()
    ((_, _, steps, *kind),) = made.engine.accountant.history
    assert (steps, *kind) == (3, "bandmf", 2, 2)


# ---- refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "secret, options, words",
    [
        ({"target_delta": 0}, {}, "target_delta: expected a number above 0"),
        ({"nose": 1}, {}, "does not know 'nose'"),
        ({"target_epsilon": 1.0}, {}, "expected one of target_epsilon and noise_multiplier"),
        ({}, {"auto_find_batch_size": True}, "auto_find_batch_size: True does not go with privacy"),
        ({}, {"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy: 'group_by_length'"),
    ],
)
def test_what_does_not_go_with_privacy_is_refused_by_name(
    tmp_path: Path, secret: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with refusal(words):
        trainer(tmp_path, secret=secret, **options)


def test_uneven_labels_behind_a_mean_of_the_model_are_refused(tmp_path: Path) -> None:
    model = gpt2()
    model.accepts_loss_kwargs = False
    with refusal("labels: records have different numbers"):
        trainer(tmp_path, model).train()


def test_a_batch_larger_than_the_data_and_a_loss_function_without_reduction(tmp_path: Path) -> None:
    from gramian.integrations.transformers import PrivateTrainer

    large = {"per_device_train_batch_size": RECORDS + 1}
    with refusal("per_device_train_batch_size"):
        trainer(tmp_path, **large).train()
    made = {"model": gpt2(), "args": arguments(tmp_path), "train_dataset": records(), "privacy": privacy()}
    with refusal("loss_reduction"):
        PrivateTrainer(**made, compute_loss_func=lambda *given, **kw: None)
