"""A process that tokenises pieces of a token store: `python -m gramian.data.token_store.tokenize_worker STORE`.

It reads numbers of pieces from its input, a line each, and answers each with a line of JSON: null, or the error that the user
is to see. It ends with its input.
"""

import contextlib
import ctypes
import json
import signal
import sys
from pathlib import Path

from gramian.core.errors import GramianError
from gramian.data.corpus.read_records import read_piece
from gramian.data.corpus.record_encoder import ENCODERS, RecordEncoder
from gramian.data.token_store.piece_files import write_piece
from gramian.data.token_store.store_plan import StorePlan
from gramian.data.token_store.token_buffer import TokenBuffer
from gramian.data.tokenizer import load_tokenizer

PLAN = "plan.json"


def tokenize_piece(folder: Path, plan: StorePlan, piece: int, encoder: RecordEncoder) -> None:
    """Read, tokenise and write one piece; raises `GramianError` with one line for what cannot be read or written."""
    buffer, spans = TokenBuffer(encoder), plan.pieces[piece]
    for record in read_piece(spans, plan.source, plan.shape):
        buffer.add(*record)
    for path in {str(span.path.resolve()) for span in spans}:
        plan.require_unchanged(path)
    try:
        write_piece(folder, piece, buffer)
    except OSError as problem:
        raise GramianError(
            f"data.cache: {folder} cannot be written ({problem.strerror}); expected a folder with room for the tokens"
        ) from None


def main() -> None:
    """Serve one process that builds a store, and end with it."""
    with contextlib.suppress(
        OSError, AttributeError
    ):  # Linux: not after it, when a later start may write the same piece
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    folder = Path(sys.argv[1])
    plan = StorePlan.from_json(json.loads((folder / PLAN).read_bytes()))
    encoder = ENCODERS[plan.shape.record](load_tokenizer(plan.tokenizer))
    for line in sys.stdin:
        try:
            tokenize_piece(folder, plan, int(line), encoder)
            print("null", flush=True)
        except GramianError as problem:
            print(json.dumps(str(problem)), flush=True)


if __name__ == "__main__":
    main()
