"""Counts Poisson draws, their pieces (micro-batches) and backwards: a piece has one backward, a draw has one optimizer step."""

from gramian.core.errors import GramianError
from gramian.privacy.sampling.poisson import Piece


class DrawProgress:
    """Counts the pieces (micro-batches) that the private loader yielded since the last step, and their backwards."""

    def __init__(self) -> None:
        """Begin with no draw, no piece (micro-batch) and no backward counted."""
        self.passes_since_step = 0
        """Number of backwards since the last optimizer step that released a draw."""
        self.clear()

    def clear(self) -> None:
        """Reset draws and pieces: the draw was released by a step, or is given up."""
        self.draws: set[int] = set()
        self.piece: Piece | None = None
        self.passes_of_piece = 0

    def begin(self, piece: Piece) -> bool:
        """Begin a piece (micro-batch) of a draw; True if it restarts a draw under way, whose sums must then be dropped.

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

    def check_backward(self, rows: int, units: int | None) -> None:
        """Check a backward of `rows` rows on the current piece (micro-batch); without a piece nothing is checked.

        `units`: number of units that the rows belong to; None: each row is one.

        Raises:
            GramianError: if it is the piece's second backward, or the rows, or units, are not as many as the piece has.
        """
        if self.piece is None:
            return
        if self.passes_of_piece:
            raise GramianError(
                "backward: ran twice on one batch of the loader, so its samples would count twice; "
                "expected one backward for each batch"
            )
        records = len(self.piece.indices)
        if units is not None:
            self._check_units(units, self.piece)
        elif rows != records:
            raise GramianError(
                f"batch: has {rows} rows for {records} records of the data set; expected one row for each record, on the "
                "first axis of the model's first tensor (several views of a record next to each other inside the model)"
            )

    @staticmethod
    def _check_units(units: int, piece: Piece) -> None:
        if units != piece.count:
            drawn = "records" if piece.units is None else "units"
            raise GramianError(
                f"ids: are of {units} units, and {piece.count} {drawn} were drawn, so that one of them would move the sum by "
                "more than the clip norm; expected one id for each of them (unit_of=… of make_private draws users or documents)"
            )

    def end_backward(self) -> None:
        """Count a backward of the current piece (micro-batch)."""
        self.passes_of_piece += 1
        self.passes_since_step += 1

    def ends_draw(self, next_release: int) -> bool:
        """True if the current piece (micro-batch) is the last of its Poisson draw, so that this step releases the draw.

        False: the step only sets the piece's sum aside. `next_release` is the number of the next release, which is also that of
        the draw to be released.

        Raises:
            GramianError: unless exactly one draw is under way, and its piece, if it has records, had a backward; or if a last
                piece belongs to a draw that was released before.
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
