"""Read the data of a config once: check its files, documents and windows, and return the training windows."""

import numpy as np

from gramian.core.errors import GramianError
from gramian.data import Documents, Windows, load_tokenizer, read_documents
from gramian.data.load_windows import cut_windows
from gramian.data.options import DataSection
from gramian.data.truncated_files import truncated_files
from gramian.train.doctor.check import Check, named

EMPTY = 0.05
"""Maximum fraction of empty documents."""
REPEATED = 0.05
"""Maximum fraction of documents that repeat another one."""


def examine_data(data: DataSection) -> tuple[list[Check], Windows | None]:
    """Return checks of the data, and the training windows; None if a truncated file cannot be read.

    Raises `GramianError` if data is missing, or cannot be read although no file is truncated.
    """
    checks = check_files(data)
    try:
        documents = read_documents(data, load_tokenizer(data.tokenizer))
    except GramianError:
        if all(check.ok for check in checks):
            raise
        return checks, None
    training, _ = cut_windows(documents, data)
    hint = "more data, or a smaller data.batch or data.length"
    windows = _check("windows", len(training), data.batch, len(training) >= data.batch, hint)
    return [*checks, *check_documents(documents), windows], training


def check_files(data: DataSection) -> list[Check]:
    """Check that no data file is cut off; no check for the embedded corpus."""
    if data.source == "embedded":
        return []
    truncated = truncated_files(data)
    return [_check("files cut off", len(truncated), 0, not truncated, f"write again, or leave out: {named(truncated)}")]


def check_documents(documents: Documents) -> list[Check]:
    """Measure the fractions of empty documents, of repeated ones, and of validation documents that are also trained on.

    Cost: a pass over all tokens.
    """
    train, validation = documents.train.document_hashes(), documents.validation.document_hashes()
    both = np.concatenate([train, validation])
    repeated, seen = 1 - len(np.unique(both)) / len(both), float(np.isin(validation, train).mean())
    empty = documents.empty / documents.read
    return [
        _check("empty documents", empty, EMPTY, empty <= EMPTY, "check what wrote them; they teach nothing"),
        _check("repeated documents", repeated, REPEATED, repeated <= REPEATED, "remove all but one of equal documents"),
        _check("validation documents trained on", seen, REPEATED, seen <= REPEATED, "remove them from data.files"),
    ]


def _check(name: str, measured: float, threshold: float, ok: bool, hint: str) -> Check:
    number = "{:.1%}" if "documents" in name else "{:,.0f}"
    texts = number.format(measured), number.format(threshold)
    return Check(f"data: {name}", texts[0], texts[1], ok, "" if ok else hint, measured)
