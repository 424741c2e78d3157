"""The units of privacy of a private model: what one is, and which rows or tokens of the next forward belong to which."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from gramian.core.errors import GramianError
from gramian.privacy.accounting.adjacency import ADJACENCY, ADJACENCY_OF_UNITS, adjacencies
from gramian.privacy.accounting.ledger import Ledger
from gramian.privacy.clipping.clipping_rule import Clipping
from gramian.privacy.clipping.single_sample_clipping import SingleSampleClipping
from gramian.privacy.sampling.crossing_labels import CrossingLabels
from gramian.privacy.sampling.poisson import Piece
from gramian.privacy.sampling.record_units import RecordUnits
from gramian.privacy.sampling.unit_ids import unit_ids


class PrivateUnits:
    """Says to the clipping rule which rows or tokens are of one unit: by `engine.units`, or by what the loader drew."""

    clipping: Clipping | SingleSampleClipping

    def __init__(self, of_records: RecordUnits | None, max_physical_batch: int | None) -> None:
        """Begin with each row as a unit; `of_records` are those of `unit_of`, None: each record is one.

        Raises:
            GramianError: if a unit has more records than one backward may have.
        """
        self.of_records = of_records
        self._drawn: Tensor | None = None
        """Units of the rows that the loader drew, until their backward."""
        self._given: Tensor | None = None
        """Units of the block of `engine.units` around the next forward, which come before those that were drawn."""
        self._labels = CrossingLabels()
        if of_records is not None and max_physical_batch is not None and of_records.largest > max_physical_batch:
            raise GramianError(
                f"max_physical_batch: is {max_physical_batch}, and a unit has {of_records.largest} records, which have to be "
                "in one backward; expected at least as many, or a smaller max_records_per_unit"
            )

    @property
    def adjacency(self) -> str:
        """What two data sets differ in whose outcomes ε compares."""
        return ADJACENCY if self.of_records is None else ADJACENCY_OF_UNITS

    @property
    def marks(self) -> dict[str, Any]:
        """What a replay, and all processes, must have in common; empty where each record is a unit."""
        return {} if self.of_records is None else {"unit_of": self.of_records.digest, "adjacency": self.adjacency}

    def refuse_other_adjacency(self, ledger: Ledger) -> None:
        """Raise a `GramianError` if earlier releases in the ledger are for another unit, whose ε does not add to this one's."""
        for other in adjacencies(ledger) - {self.adjacency}:
            raise GramianError(
                f'unit_of: epsilon of earlier releases is for "{other}", and would now be for "{self.adjacency}"; expected the '
                "same unit of privacy, or a new engine"
            )

    def begin_piece(self, piece: Piece) -> None:
        """Set the units of a piece (micro-batch) that the loader yields, if it draws units."""
        self._set(None if piece.units is None else unit_ids(piece.units), self._given)

    def end_backward(self) -> None:
        """Forget the units that were drawn: the backward of their rows is over."""
        self._set(None, self._given)

    @contextmanager
    def given(self, ids: Any) -> Iterator[None]:
        """Context manager in which forwards have these ids of units (see `PrivacyEngine.units`)."""
        before, found = self._given, unit_ids(ids)
        if found.dim() == 2 and isinstance(self.clipping, SingleSampleClipping):
            raise GramianError(
                "ids: are given by token, and max_physical_batch=1 clips the gradient of a whole row; expected ids of rows, or "
                "a larger max_physical_batch"
            )
        self._set(self._drawn, found)
        try:
            yield
        finally:
            self._set(self._drawn, before)

    @property
    def by_draw(self) -> bool:
        """True if the units of the next forward's rows are those that the loader drew, in the order of its records."""
        return self._drawn is not None and self._given is None

    @property
    def _ids(self) -> Tensor | None:
        return self._drawn if self._given is None else self._given

    def _set(self, drawn: Tensor | None, given: Tensor | None) -> None:
        self._drawn, self._given = drawn, given
        if isinstance(self.clipping, Clipping):
            self.clipping.sample_ids = self._ids

    def refuse_crossing_labels(self, arguments: Any) -> None:
        """Raise a `GramianError` if labels among the arguments let the loss of one unit depend on a token of another."""
        if self._ids is not None:
            self._labels.refuse(self._ids, arguments)
