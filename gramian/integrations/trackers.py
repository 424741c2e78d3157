"""TensorBoard and Weights & Biases behind one small interface: log numbers at a step, close."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gramian.core.errors import GramianError


class Tracker(Protocol):
    """Where the numbers of a run are sent, beside its own files."""

    def log(self, numbers: Mapping[str, float], *, step: int, attempt: int) -> None:
        """Send {name: number} of an optimizer step; `attempt` also counts steps that were rolled back."""

    def close(self) -> None:
        """Send what is left, and end."""


class TensorBoard:
    """Event files of TensorBoard in a folder; x is the step."""

    def __init__(self, folder: Path, *, private: bool = False) -> None:
        """Open the files; `private`: other users must not read them. A GramianError if tensorboard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise GramianError("run.tensorboard: needs the package tensorboard; expected it installed") from None
        folder.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, numbers: Mapping[str, float], *, step: int, attempt: int) -> None:
        """Write each number as a scalar of the step."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left, and close the files."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; x is the attempt, because wandb refuses a step that comes a second time."""

    def __init__(self, folder: Path) -> None:
        """Begin a run with the folder's name, or go on with it. A GramianError if wandb is not installed."""
        try:
            import wandb
        except ImportError:
            raise GramianError("run.wandb: needs the package wandb; expected it installed") from None
        self._run: Any = wandb.init(dir=str(folder), name=folder.name, resume="allow")

    def log(self, numbers: Mapping[str, float], *, step: int, attempt: int) -> None:
        """Send the numbers of an attempt."""
        self._run.log(dict(numbers), step=attempt)

    def close(self) -> None:
        """Wait until all is sent, and end the run."""
        self._run.finish()


def open_trackers(folder: Path, *, tensorboard: bool, wandb: bool, private: bool) -> list[Tracker]:
    """The trackers that a run asks for; raises a GramianError that names a package that is missing."""
    found: list[Tracker] = []
    if tensorboard:
        found.append(TensorBoard(folder / "tensorboard", private=private))
    if wandb:
        found.append(WeightsAndBiases(folder))
    return found
