"""Private training and curvature in the loop of Lightning's Trainer, against the same loop by hand."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gramian
from gramian.oracles.clipped_sum import clipped_sum
from tests.integrations.trainers import drawn
from tests.kit.processes import run_on_ranks
from tests.kit.refusals import refusal
from tests.privacy.problems import assert_sums, largest_error, weights

lightning = pytest.importorskip("lightning", reason="needs lightning: pip install 'gramian[test-integrations]'")
pytestmark = [pytest.mark.few_proofs, pytest.mark.filterwarnings("ignore")]
RECORDS, BATCH = 32, 8


class Module(lightning.LightningModule):
    def __init__(self, lr: float = 0.1, manual: bool = False, adam: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.lr, self.adam = lr, adam
        self.automatic_optimization = not manual

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        if self.automatic_optimization:
            self.log("loss", loss)
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        optimizer = (torch.optim.Adam if self.adam else torch.optim.SGD)(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, 5, generator=generator).double()
    return TensorDataset(x, torch.randint(3, (RECORDS,), generator=generator))


def callback(folder: Path, **options: Any) -> Any:
    from gramian.integrations.lightning import PrivacyCallback

    usual = {"noise_multiplier": 0.5, "max_grad_norm": 0.8, "target_delta": 1e-3, "accountant": "rdp"}
    return PrivacyCallback(folder=folder, **{**usual, "insecure_reproducible": True, "seed": 0, **options})


def fit(
    folder: Path, module: Any, *, batch: int = BATCH, callbacks: Any, ckpt: str | None = None, **options: Any
) -> Any:
    usual = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, "log_every_n_steps": 1}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    trainer = lightning.Trainer(default_root_dir=folder, callbacks=callbacks, **{**usual, **quiet, **options})
    trainer.fit(module, DataLoader(data(), batch_size=batch, shuffle=True), ckpt_path=ckpt)
    return trainer


def by_hand(steps: int, **options: Any) -> tuple[dict[str, Tensor], float]:
    module = Module(**options)
    (optimizer,), (schedule,) = module.configure_optimizers()
    engine = gramian.PrivacyEngine("rdp", insecure_reproducible=True, seed=0)
    loader = DataLoader(data(), batch_size=BATCH)
    made = engine.make_private(
        module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=0.5, max_grad_norm=0.8
    )
    while engine.steps < steps:
        for x, y in made[2]:
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            schedule["scheduler"].step()
            if engine.steps == steps:
                break
    return weights(module), engine.get_epsilon(1e-3)


@pytest.mark.oracle
def test_a_step_moves_by_the_loops_clipped_sum(tmp_path: Path, monkeypatch: Any) -> None:
    found, module = drawn(monkeypatch), Module(lr=1.0)
    before, start = weights(module), Module()
    fit(
        tmp_path,
        module,
        callbacks=[callback(tmp_path, noise_multiplier=0.0, max_grad_norm=1.5)],
        max_steps=1,
        max_epochs=None,
    )
    x, y = data().tensors
    rows = [i for piece in found for i in piece]
    want = clipped_sum(start, lambda model, x, y: F.cross_entropy(model(x), y), (x[rows], y[rows]), 1.5)
    assert (want.factors_B < 1).any() and (want.factors_B == 1).any()
    assert largest_error({n: (before[n] - now) * BATCH for n, now in weights(module).items()}, want.totals) < 1e-9


@pytest.mark.parametrize(
    "batch, parts, manual", [(BATCH, 1, False), (BATCH // 4, 4, False), (BATCH // 2, 2, False), (BATCH, 1, True)]
)
def test_closures_accumulation_and_manual_steps_are_the_loop_by_hand(
    tmp_path: Path, batch: int, parts: int, manual: bool
) -> None:
    module, privacy = Module(manual=manual), callback(tmp_path)
    fit(tmp_path, module, batch=batch, callbacks=[privacy], accumulate_grad_batches=parts)
    want, spent = by_hand(8, lr=0.1)
    if not manual:  # a manual loop steps its scheduler itself, or not
        assert_sums(weights(module), want, 1e-9)
    assert privacy.engine.steps == 8 and privacy.epsilon() == spent
    assert privacy.engine._installed is None


def test_epsilon_is_logged_and_meets_its_target(tmp_path: Path) -> None:
    privacy = callback(tmp_path, noise_multiplier=None, target_epsilon=5.0)
    trainer = fit(tmp_path, Module(), callbacks=[privacy])
    assert 4.8 < privacy.epsilon() <= 5.0
    assert abs(float(trainer.callback_metrics["epsilon"]) - privacy.epsilon()) < 1e-5


def test_a_resumed_fit_that_repeats_its_steps_is_the_uninterrupted_one(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    def run(ckpt: str | None = None) -> tuple[dict[str, Tensor], Any]:
        module, privacy = Module(adam=True, lr=1e-2), callback(tmp_path, replay=True)
        saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
        fit(tmp_path, module, batch=4, callbacks=[privacy, saver], enable_checkpointing=True, ckpt=ckpt,
            accumulate_grad_batches=2)  # fmt: skip
        return weights(module), privacy

    whole, first = run()
    again, second = run(str(tmp_path / "step=3.ckpt"))
    assert second.engine.not_replayed is None
    assert all(torch.equal(now, whole[name]) for name, now in again.items())
    assert second.engine.steps == first.engine.steps == 8 and second.epsilon() == first.epsilon()
    files = list(tmp_path.glob("*_step_3.pt"))
    assert files and stat.S_IMODE(files[0].stat().st_mode) == 0o600
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["callbacks"]["PrivacyCallback"]
    assert set(saved) == {"run", "file", "epsilon", "delta"}  # no key in it


def fit_on_rank(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    from lightning.pytorch.strategies import DDPStrategy

    before = dict(os.environ)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "NODE_RANK": 0, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in names.items()} | {"TORCHELASTIC_RUN_ID": "tests"})
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    try:
        module, privacy = Module(), callback(Path(folder))
        options = {"strategy": DDPStrategy(process_group_backend="gloo"), "devices": world_size}
        fit(
            Path(folder),
            module,
            batch=BATCH // world_size // 2,
            callbacks=[privacy],
            accumulate_grad_batches=2,
            **options,
        )
        return {"weights": weights(module), "epsilon": privacy.epsilon()}
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.dist
@pytest.mark.xdist_group("processes")
def test_two_processes_are_one(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, fit_on_rank, str(tmp_path))
    want, spent = by_hand(8, lr=0.1)
    assert_sums(first["weights"], want, 1e-9)
    assert all(torch.equal(first["weights"][name], now) for name, now in second["weights"].items())
    assert first["epsilon"] == second["epsilon"] == spent


def test_curvature_in_the_steps_of_lightning(tmp_path: Path) -> None:
    from gramian.integrations.lightning import CurvatureCallback

    kfac = gramian.KFACNaturalGradient(update_freq=3)
    curvature, plain, module = CurvatureCallback(kfac), Module(), Module()
    torch.manual_seed(0)
    fit(tmp_path, plain, callbacks=[])
    torch.manual_seed(0)
    trainer = fit(tmp_path, module, callbacks=[curvature])
    assert kfac.steps == 8 and kfac.refreshes == 3
    assert float(trainer.callback_metrics["curvature/trace"]) > 0
    assert all(torch.equal(now, weights(plain)[name]) for name, now in weights(module).items())  # it only looks
    with refusal("callbacks: PrivacyCallback trains privately"):
        fit(tmp_path, Module(), callbacks=[CurvatureCallback(), callback(tmp_path)])


@pytest.mark.oracle
@pytest.mark.parametrize("parts", [1, 2])
def test_with_users_a_step_moves_by_the_sum_of_their_clipped_gradients(
    tmp_path: Path, monkeypatch: Any, parts: int
) -> None:
    found, module, user_of = drawn(monkeypatch), Module(lr=1.0), [i * 5 % 11 for i in range(RECORDS)]
    before, start = weights(module), Module()
    secret = callback(tmp_path, noise_multiplier=0.0, max_grad_norm=2.65, unit_of=user_of)
    options = {"max_steps": 1, "max_epochs": None, "accumulate_grad_batches": parts, "batch": 6 // parts}
    fit(tmp_path, module, callbacks=[secret], **options)
    x, y = data().tensors
    rows, want, norms = [i for piece in found for i in piece], {n: 0.0 for n in before}, []
    for user in {user_of[i] for i in rows}:
        own = [i for i in range(RECORDS) if user_of[i] == user]
        g = clipped_sum(start, lambda model, x, y: F.cross_entropy(model(x), y), (x[own], y[own]), 1e9).totals
        norms.append(float(torch.cat([t.flatten() for t in g.values()]).norm()))
        want = {n: want[n] + min(1.0, 2.65 / norms[-1]) * g[n] for n in want}
    assert max(norms) > 2.65 > min(norms) and secret.engine._ledger.accounting.history[0][1] == 6 / 11
    assert largest_error({n: (before[n] - now) * 6 for n, now in weights(module).items()}, want) < 1e-9


def test_draws_are_cut_to_max_draw_and_accounted_for_as_such(tmp_path: Path, monkeypatch: Any) -> None:
    found = drawn(monkeypatch)
    secret = callback(tmp_path, accountant="pld", noise_multiplier=None, target_epsilon=6.0, max_draw=6)
    fit(tmp_path, Module(), callbacks=[secret], max_steps=3, max_epochs=None, batch=6)
    assert max(map(len, found)) == 6
    assert secret.engine._ledger.accounting.history[0][3:] == (RECORDS, 6) and 5.9 < secret.epsilon() <= 6.0


@pytest.mark.parametrize(
    "secret, options, words",
    [
        ({}, {"gradient_clip_val": 1.0}, "gradient_clip_val"),
        ({"max_grad_norm": None}, {}, "max_grad_norm: is not given"),
        ({"unit_of": [0, 1]}, {}, "unit_of: expected 32 integers"),
        ({"max_physical_batch": 2}, {}, "max_physical_batch: is for Hugging Face"),
        ({"noise_multiplier": None, "target_epsilon": 1.0}, {"max_epochs": -1}, "max_epochs: is not set"),
    ],
)
def test_what_does_not_go_with_privacy_is_refused(tmp_path: Path, secret: Any, options: Any, words: str) -> None:
    with refusal(words):
        fit(tmp_path, Module(), callbacks=[callback(tmp_path, **secret)], **options)
