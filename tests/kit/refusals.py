"""How tests say that the library refuses something: by a pattern, or by the words of a message of one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gramian.core.errors import GramianError


def refusal(match: str) -> Any:
    """A context in which a `GramianError` must be raised whose message has this regular expression in it."""
    return pytest.raises(GramianError, match=match)


@contextmanager
def refused(*words: str) -> Iterator[Any]:
    """A context in which a `GramianError` of one line must be raised: it begins with the first word and has all others."""
    with pytest.raises(GramianError) as caught:
        yield caught
    one_line(caught.value, *words)


def one_line(error: BaseException, *words: str) -> None:
    """The message is one line with these words in it, the first of them at its beginning."""
    message = str(error)
    assert "\n" not in message and message.startswith(words[0]), message
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
