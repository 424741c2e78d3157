"""Open a token store as a stream of tokens, without reading them."""

import json
from pathlib import Path

import numpy as np

from gramian.core.errors import GramianError
from gramian.data.corpus.record_encoder import RecordEncoder
from gramian.data.token_store.piece_files import PieceRecord, open_piece
from gramian.data.token_store.store_plan import StorePlan
from gramian.data.token_store.token_buffer import stream_of
from gramian.data.token_stream import Stream

MANIFEST = "manifest.json"


def open_store(folder: Path, plan: StorePlan, encoder: RecordEncoder) -> tuple[Stream, int] | None:
    """The stream of a complete store, and its number of empty records; None if the store is not complete.

    Cost: a pass over the tables of documents, 40 bytes each. Tokens are memory maps, compared with their checksums when they
    are first read.

    Raises:
        GramianError: if the manifest or a table of documents is damaged, or files are missing.
    """
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_bytes())
        records = [PieceRecord.from_json(record) for record in body["records"]]
        if len(records) != len(plan.pieces) or StorePlan.from_json(body["plan"]).key != plan.key:
            raise ValueError("is of other files")
        all_targets = all("counted" not in record.blocks for record in records)
        parts = [open_piece(folder, piece, record, all_targets=all_targets) for piece, record in enumerate(records)]
    except FileNotFoundError as problem:
        if problem.filename is not None and Path(problem.filename) == path:
            return None
        raise GramianError(
            f"{problem.filename}: does not exist; expected the folder removed, so that it is written again"
        ) from None
    except OSError as problem:
        raise GramianError(f"{path}: cannot be read ({problem.strerror}); expected a file that can") from None
    except (ValueError, KeyError, TypeError) as problem:
        raise GramianError(
            f"{path}: is damaged ({problem}); expected the folder removed, so that it is written again"
        ) from None
    numbers: dict[str, int] = {}
    for record, part in zip(records, parts, strict=True):
        mine = [numbers.setdefault(user, len(numbers)) for user in record.users]
        if mine != [*range(len(mine))]:
            part["documents"] = part["documents"].copy()
            part["documents"][:, 4] = np.array(mine, dtype=np.uint64)[part["documents"][:, 4].astype(np.int64)]
    loses_text = any(record.loses_text for record in records)
    stream = stream_of(parts, encoder, named=[*numbers] not in ([""], []), loses_text=loses_text)
    return stream, sum(record.empty for record in records)
