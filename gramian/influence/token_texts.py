"""The text of each token of a passage, such that the texts together are the text of the passage.

Tokens decoded one by one are not: a character may have several tokens, and some tokenizers drop the space before a first word.
"""

from collections.abc import Callable, Sequence
from os.path import commonprefix

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers decode a part of a character to."""


def token_texts(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """One text for each token; their concatenation is `decode(ids)`.

    A character of several tokens is part of the text of the token that completes it; one that only begins or goes on a
    character has "". Cost: two decodes of a few tokens for each token, as long as characters end now and then.

    Example:
        >>> token_texts(lambda ids: bytes(ids).decode(errors="replace"), list("aπ".encode()))
        ['a', '', 'π']
    """
    whole, texts, shown = decode(ids), [], 0
    start = before = first = 0  # whole[:start] is the text of ids[:first], whose last character ends there
    for end in range(1, len(ids) + 1):
        known, longer = decode(ids[before:first]) if first else "", decode(ids[before:end])
        new = longer.removeprefix(known)
        same = start + len(commonprefix([new, whole[start : start + len(new)]])) if longer.startswith(known) else start
        texts.append(whole[shown:same])
        shown = max(shown, same)
        if same == start + len(new) and not new.endswith(INCOMPLETE):
            start, before, first = same, first, end
    if texts:
        texts[-1] += whole[shown:]
    return texts
