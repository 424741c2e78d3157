"""The draws, pieces and backwards since the last step: every piece has one backward, and every draw has one step."""

from gramian.core.errors import GramianError
from gramian.privacy.sampling.poisson import Piece


class DrawProgress:
    """Counts what the private loader has yielded and what was summed of it."""

    def __init__(self) -> None:
        """Begin before the first piece."""
        self.passes_since_step = 0
        """Backwards since the last step."""
        self.clear()

    def clear(self) -> None:
        """Forget the pieces: their draw was released, or is given up."""
        self.draws: set[int] = set()
        self.piece: Piece | None = None
        self.passes_of_piece = 0

    def begin(self, piece: Piece) -> bool:
        """Begin a piece; True if a loop was left and its draw begins again, so that nothing summed of it counts.

        Raises:
            GramianError: if an earlier draw was summed and not released.
        """
        if piece.draw not in self.draws and self.draws and self.passes_since_step:
            raise GramianError(
                f"step: draw {min(self.draws)} was summed, and no step of the private optimizer released it; "
                "expected one optimizer.step() of make_private's optimizer for each draw"
            )
        again = piece.draw in self.draws and piece.piece == 0
        if again:
            self.passes_since_step = 0
        self.piece, self.passes_of_piece = piece, 0
        self.draws.add(piece.draw)
        return again

    def check_backward(self, rows: int) -> None:
        """Raise a `GramianError` if a backward with so many rows would count samples of the piece more than once."""
        if self.piece is None:
            return
        if self.passes_of_piece:
            raise GramianError(
                "backward: ran twice on one batch of the loader, so its samples would count twice; "
                "expected one backward for each batch"
            )
        records = len(self.piece.indices)
        if rows != records:
            raise GramianError(
                f"batch: has {rows} rows for {records} records of the data set; expected one row for each record, on the "
                "first axis of the model's first tensor (several views of a record next to each other inside the model)"
            )

    def end_backward(self) -> None:
        """Count a backward."""
        self.passes_of_piece += 1
        self.passes_since_step += 1

    def ends_draw(self, next_release: int) -> bool:
        """True if the step that begins now is on the last piece of its draw.

        Raises:
            GramianError: if there is not one draw to release, or its last piece had no backward, or it was released before.
        """
        if len(self.draws) != 1 or self.piece is None:
            raise GramianError(
                f"step: {len(self.draws)} draws since the last one; expected one step for each draw of the private loader"
            )
        records = len(self.piece.indices)
        if records and not self.passes_of_piece:
            raise GramianError(
                f"step: no backward of the last batch reached its {records} records; expected loss.backward() of a "
                "forward of the model, without inputs="
            )
        if self.piece.last and self.piece.draw != next_release:
            raise GramianError(
                f"step: draw {self.piece.draw} of the loader was released before; expected one loop over it at a time"
            )
        return self.piece.last
