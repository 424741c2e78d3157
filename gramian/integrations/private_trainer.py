"""Private training in the loop of Hugging Face's `Trainer`, or of a subclass such as TRL's `SFTTrainer`.

One update of the loop is one Poisson draw. The loop asks for `gradient_accumulation_steps` batches at once; it is given the
draw in as many shares, each a list of micro-batches. The loop's own loader only counts.

A Hugging Face model divides the sum of its token losses by `num_items_in_batch`, which depends on every record of the draw. It
is given a constant N in its place, so that the loss is Σ_i L_i / N with L_i the sum over the tokens of record i, and each
gradient g_i is exact. What is logged as "loss" is divided by the tokens of the draw, as in Trainer, and is not covered by ε.
"""

import os
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader, IterableDataset

from gramian.core.errors import GramianError
from gramian.integrations.trainer_callbacks import PrivacyState
from gramian.integrations.trainer_privacy import TrainerPrivacy
from gramian.privacy.engine import PrivacyEngine
from gramian.privacy.noise.secrets import load_private, save_private
from gramian.privacy.sampling.dataset_fingerprint import preserved_generators
from gramian.privacy.sampling.poisson import Piece
from gramian.privacy.sampling.private_loader import PrivateLoader, loading_options

STATE = "_privacy_engine.pt"
"""File of the engine's state in a checkpoint folder, of mode 0600: it has the key of the noise."""
NOT_COVERED = (
    "loss", "train_loss", "num_input_tokens_seen", "num_tokens", "mean_token_accuracy", "entropy", "total_flos",
    "train_tokens_per_second", "gradient_norms/mean", "gradient_norms/median", "gradient_norms/max",
)  # fmt: skip
"""Logged numbers that are computed on private records without noise."""


class DrawShare(dict[str, Any]):
    """A share of a Poisson draw, one of the batches of an update; as a dict it is its first micro-batch."""

    def __init__(self, pieces: list[tuple[Piece, Any]]) -> None:
        """Store the micro-batches."""
        super().__init__(pieces[0][1] if pieces else {})
        self.pieces = pieces


class Numbers(torch.utils.data.Dataset[int]):
    """The data set behind the loop's own loader: as many numbers as records, which nobody reads."""

    def __init__(self, size: int) -> None:
        """Store the length."""
        self.size = size

    def __len__(self) -> int:
        """Number of records."""
        return self.size

    def __getitem__(self, index: int) -> int:
        """The number itself."""
        return index


class PrivateLoop:
    """Mixin in front of a Trainer class: its loop takes private steps. Use it through `private_trainer`."""

    # Members of Trainer.
    args: Any
    model: Any
    optimizer: Any
    accelerator: Any
    state: Any
    callback_handler: Any
    compute_loss_func: Any
    label_smoother: Any
    _train_batch_size: int

    def __init__(self, *args: Any, privacy: Mapping[str, Any], **kwargs: Any) -> None:
        """Create the trainer and an engine; `privacy` has the fields of `TrainerPrivacy`, the rest is the base class's."""
        self.privacy = TrainerPrivacy.of(privacy)
        self.engine: PrivacyEngine = self.privacy.new_engine()
        """The engine, with the account of ε; it makes the model private while `train` runs."""
        self._run_id = os.urandom(4).hex()
        self._plain: DataLoader[Any] | None = None
        self._private: PrivateLoader | None = None
        self._draws: Iterator[list[tuple[Piece, Any]]] = iter(())
        self._noised_norm = torch.zeros(())
        self._items = self._rows = 1
        self.update_norms: list[Tensor] = []
        """Norms of the records' gradients before clipping, by micro-batch of the last draw; not covered by ε."""
        super().__init__(*args, **kwargs)
        self._refuse_arguments()
        self.loss_is_scaled_for_ga = True  # the loop divides nothing: the engine knows the coefficient of a record
        self.add_callback(PrivacyState())  # type: ignore[attr-defined]

    def _refuse_arguments(self) -> None:
        args = self.args
        refused = {
            "auto_find_batch_size": (args.auto_find_batch_size, "False; max_physical_batch bounds the memory"),
            "train_sampling_strategy": (
                args.train_sampling_strategy not in ("random", "sequential"),
                '"random", which Poisson draws replace',
            ),
            "deepspeed": (bool(args.deepspeed), "no DeepSpeed; gradients must be ordinary tensors"),
            "fsdp": (getattr(self.accelerator.state, "fsdp_plugin", None) is not None, "DDP, or a loop of your own"),
            "n_gpu": (args.n_gpu > 1, "one GPU for each process (torchrun)"),
            "hub_strategy": (
                args.push_to_hub and "checkpoint" in str(args.hub_strategy),
                '"every_save" or "end": checkpoints have the key of the noise',
            ),
        }
        for name, (wrong, expected) in refused.items():
            if wrong:
                raise GramianError(f"{name}: {getattr(args, name)!r} does not go with privacy; expected {expected}")
        if self.compute_loss_func is not None and self.privacy.loss_reduction is None:
            raise GramianError(
                "privacy: has no loss_reduction beside compute_loss_func; expected the coefficient of one record's loss"
            )

    # ---- before the loop ---------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader of numbers with the length of an epoch in shares; the loop counts with it, and reads no record from it."""
        made: Any = super().get_train_dataloader()  # type: ignore[misc]
        if isinstance(made.dataset, IterableDataset):
            raise GramianError("train_dataset: is an IterableDataset; expected one with a length, for Poisson draws")
        shares = self.args.gradient_accumulation_steps
        self._plain = DataLoader(made.dataset, self._train_batch_size * shares, **loading_options(made))
        draws = max(1, round(self.privacy.population(self._plain) / self._expected_batch()))
        each = self._train_batch_size * self.args.world_size
        return DataLoader(Numbers(draws * shares * each), batch_size=each)

    def _expected_batch(self) -> int:
        return int(self._train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Let Trainer wrap and load model and optimizer, then make them private and load the engine's state."""
        model, counting = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]
        assert self._plain is not None
        privacy, saved = self.privacy, self._saved(resume_from_checkpoint)
        size = privacy.population(self._plain)
        rate = self._expected_batch() / size
        if rate > 1:
            what = "records" if privacy.engine.get("unit_of") is None else "units"
            raise GramianError(
                f"per_device_train_batch_size: an update expects {self._expected_batch()} {what} and the data set has {size}; "
                "expected no more than it has"
            )
        if self.engine.steps and saved is None and privacy.target_epsilon is not None:
            raise GramianError("target_epsilon: was spent by an earlier train(); expected a new trainer, or a resume")
        noise = privacy.noise_for(max_steps, rate, size)
        if saved is not None and privacy.target_epsilon is not None and saved["noise_multiplier"] != noise:
            raise GramianError(
                f"target_epsilon: {max_steps} steps now need another noise than the {saved['noise_multiplier']:.6g} of the "
                "checkpoint; expected the arguments of the first run, or noise_multiplier"
            )
        self._counts_items = self._divides_by_items()
        scaler = self.accelerator.scaler
        _, _, loader = self.engine.make_private(
            module=model,
            optimizer=self.optimizer,
            data_loader=self._plain,
            noise_multiplier=noise,
            max_grad_norm=self.args.max_grad_norm if privacy.max_grad_norm is None else privacy.max_grad_norm,
            max_physical_batch=privacy.max_physical_batch or self._train_batch_size,
            loss_reduction=self._loss_reduction(),
            loss_scale=1.0 if scaler is None else scaler,
            **privacy.engine,
        )
        if privacy.target_epsilon is not None:
            self.engine.limit_epsilon(privacy.target_epsilon, privacy.target_delta, planned=max_steps)
        self._private, self._draws = loader, iter(())
        self._watch_norm()
        if saved is not None:
            self._run_id = saved["run"]
            self.engine.load_state_dict(saved["engine"], replay=privacy.replay)
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.engine.bind_counter(folder / f"privacy_releases_{self._run_id}.json", must_exist=saved is not None)
        return model, counting

    def _saved(self, checkpoint: str | None) -> Any:
        return None if checkpoint is None else load_private(Path(checkpoint) / STATE)

    def _loss_reduction(self) -> str | float:
        """Coefficient of one record's loss in the loss of a backward, or "mean"; Trainer multiplies by the processes."""
        given = self.privacy.loss_reduction
        if not self._counts_items:
            return "mean" if given is None else given
        copies = self.args.world_size if self.args.average_tokens_across_devices else 1
        return copies * (self.privacy.tokens_per_record / self._expected_batch() if given is None else float(given))

    def _divides_by_items(self) -> bool:
        """True if the loss is a sum over tokens divided by `num_items_in_batch`, by a trial on the first record."""
        assert self._plain is not None
        if isinstance(self.privacy.loss_reduction, str):
            return False
        with preserved_generators():
            batch = self._plain.collate_fn([self._plain.dataset[0]])
        counted = super()._get_num_items_in_batch([batch], self.args.device)  # type: ignore[misc]
        if counted is None or self.label_smoother is not None or self.compute_loss_func is not None:
            return counted is not None
        training, inputs = self.model.training, super()._prepare_inputs(dict(batch))  # type: ignore[misc]
        self.model.eval()
        try:
            with torch.no_grad(), preserved_generators():
                one, two = (self.model(**inputs, num_items_in_batch=n) for n in (1, 2))
        finally:
            self.model.train(training)
        return bool(torch.allclose(one["loss"], 2 * two["loss"])) if "loss" in one else True

    def _watch_norm(self) -> None:
        """Measure, in every step, the norm of the gradient with its noise, which the loop logs as grad_norm."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        self._noised_norm = torch.zeros((), device=self.args.device)

        def measure(optimizer: Any, args: Any, kwargs: Any) -> None:
            found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._noised_norm.copy_(get_total_norm(found))

        self._norm_hook = inner.register_step_pre_hook(measure)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run the loop of Trainer; the model is not private any more when it ends, also by an exception."""
        try:
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            if self._private is not None:
                self._norm_hook.remove()
                self._private, self._draws = None, iter(())
                self.engine.detach()

    # ---- in the loop -------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The next Poisson draw in `num_batches` shares, and the constant N by which the model divides its loss."""
        pieces = next(self._draws, None)
        if pieces is None:
            self._draws = self._epoch()
            pieces = next(self._draws)
        shares = [
            DrawShare(pieces[len(pieces) * i // num_batches : len(pieces) * (i + 1) // num_batches])
            for i in range(num_batches)
        ]
        self.update_norms = []
        self._rows = max(1, sum(len(piece.indices) for piece, _ in pieces))
        if not self._counts_items:
            return shares, None
        counted = super()._get_num_items_in_batch([batch for _, batch in pieces], device)  # type: ignore[misc]
        self._items = max(1, int(counted))
        return shares, self._expected_batch()

    def _epoch(self) -> Iterator[list[tuple[Piece, Any]]]:
        assert self._private is not None
        for _, pieces in groupby(self._private.pieces(), lambda found: found[0].draw):
            yield list(pieces)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of every micro-batch of a share.

        Returns:
            The share's part of the mean loss, over tokens or records, for the log.
        """
        assert self._private is not None
        total = torch.zeros((), device=self.args.device)
        for piece, batch in inputs.pieces:
            self._private.begin(piece, batch)
            if num_items_in_batch is None and self.privacy.loss_reduction is None:
                refuse_uneven(batch)
            loss = super().training_step(model, dict(batch), num_items_in_batch)  # type: ignore[misc]
            if piece.indices:
                if self.engine.last is not None:
                    self.update_norms.append(self.engine.last.norms_B)
                divided = num_items_in_batch / self._items if self._counts_items else len(piece.indices) / self._rows
                total += loss.to(total) * divided
        return total

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Nothing: each record's gradient is clipped, and their sum must stay as it is until it has its noise."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        """A tensor that the step, which comes after this call, fills with the norm of the noised gradient."""
        return self._noised_norm

    def floating_point_ops(self, inputs: Any) -> Any:
        """Sum over the micro-batches of a share."""
        ops = super().floating_point_ops  # type: ignore[misc]
        return sum(ops(batch) for _, batch in inputs.pieces) if isinstance(inputs, DrawShare) else ops(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for _, batch in inputs.pieces:
            super()._track_num_input_tokens(batch)  # type: ignore[misc]

    # ---- results -----------------------------------------------------------------------------------------------------

    def epsilon(self) -> float:
        """ε of all releases (noised sums) so far, at `target_delta`."""
        return self.engine.get_epsilon(self.privacy.target_delta)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log with ε; the history in `trainer_state.json` also names the numbers that ε does not cover."""
        if self.engine.steps:
            logs["epsilon"] = self.epsilon()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
        written = self.state.log_history[-1]
        uncovered = [name for name in written if name in NOT_COVERED]
        if uncovered:
            written["not_covered_by_epsilon"] = uncovered

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint of Trainer, and the engine's state in it."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, PrivacyState):
                callback.record = self.privacy_record()
        state = self.engine.state_dict()
        if self.args.should_save and not self.args.save_only_model:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"  # type: ignore[attr-defined]
            folder.mkdir(parents=True, exist_ok=True)
            saved = {"engine": state, "run": self._run_id, "noise_multiplier": self.engine.noise_multiplier}
            save_private(folder / STATE, saved)
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def privacy_record(self) -> dict[str, Any]:
        """ε, δ, the parameters of the mechanism and what was proven, as they are stored in `trainer_state.json`."""
        engine = self.engine
        return {
            "proof": {part: engine.proof[part] for part in ("rows", "loss")},
            "epsilon": self.epsilon(),
            "delta": self.privacy.target_delta,
            "accountant": self.privacy.accountant,
            "adjacency": engine.adjacency,
            "releases": engine.steps,
            "noise_multiplier": engine.noise_multiplier,
            "sample_rate": engine.sample_rate,
            "expected_batch": engine.expected_batch,
        }


def private_trainer(base: type) -> type:
    """A private version of a Trainer class: the same arguments, and `privacy=` with the fields of `TrainerPrivacy`.

    ```python
    trainer = private_trainer(SFTTrainer)(
        model=model, args=config, train_dataset=data, peft_config=lora,
        privacy=dict(target_epsilon=8, target_delta=1e-5, max_grad_norm=0.1))
    trainer.train()
    trainer.epsilon()
    ```
    """
    return type(f"Private{base.__name__}", (PrivateLoop, base), {})


def refuse_uneven(batch: Any) -> None:
    """Raise a `GramianError` if records have different numbers of labels, over which their common loss takes a mean."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return
    counts = labels.ne(-100).flatten(1).sum(1)
    if len(counts) and bool((counts != counts[0]).any()):
        raise GramianError(
            "labels: records have different numbers of them, and the model's mean over all couples the records; expected a "
            "model that takes num_items_in_batch, or compute_loss_func= with the mean of each record's own loss"
        )
