"""The chat template of a Hugging Face tokenizer: messages in, token ids and which of them the assistant writes out.

A template says by {% generation %} which characters the assistant writes. Of one that does not, an assistant's message is what
a rendering with it adds to the rendering of the messages before it with the prompt of an answer; both must be beginnings of the
whole rendering, or the record is refused. A token is the assistant's if it has one of these characters.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gramian.core.errors import GramianError

Messages = list[dict[str, Any]]
DATE = {"date_string": "26 Jul 2024"}
"""A fixed date for templates that write one, so that a chat has the same tokens on every day."""


class ChatTemplate:
    """The template of a tokenizer's folder; nothing is downloaded and no code of the folder is run.

    Raises:
        GramianError: if the tokenizer has no template, or the template writes the date of the day.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        # special tokens that the template writes are tokens here: `HuggingFaceTokenizer` spells them out
        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        found = self._tokenizer.chat_template
        template = found.get("default") if isinstance(found, dict) else found
        if not isinstance(template, str):
            raise GramianError(
                f'data.tokenizer: {folder} has no chat template; expected chat_template.jinja, for data.record = "chat"'
            )
        if "strftime_now" in template and "date_string" not in template:
            raise GramianError(
                f"data.tokenizer: the chat template of {folder} writes today's date (strftime_now), so that its tokens change "
                "from day to day; expected one that takes date_string, or none"
            )
        self._template, self._marks = template, _marks_generation(template)
        self._special = sorted(
            {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}, key=len
        )
        self.digest = hashlib.blake2b(template.encode(), digest_size=16).hexdigest()

    def encode(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Token ids of a chat, and which of them the assistant writes.

        Raises:
            GramianError: one line without the file: if a message spells a special token, if the template refuses the messages,
                or if no rendering shows where the assistant's text lies.
        """
        for number, message in enumerate(messages):
            spelled = next((token for text in _texts(message) for token in self._special if token in text), None)
            if spelled is not None:
                raise GramianError(
                    f"message {number} spells the special token {spelled!r}, by which it would end or begin a message; "
                    "expected text without it"
                )
        if not any(message["role"] == "assistant" for message in messages):
            raise GramianError('no message has the role "assistant"; expected one at least, or data.record = "text"')
        whole, spans = self._render(messages)
        if not self._marks:
            spans = self._added(whole, messages)
        elif not any(begin < stop for begin, stop in spans):
            raise GramianError(
                "the chat template marks nothing as the assistant's; expected {% generation %} around it"
            )
        try:
            encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        except NotImplementedError:
            raise GramianError("the tokenizer has no offsets; expected a fast one (tokenizer.json)") from None
        return list(encoded["input_ids"]), _inside(spans, encoded["offset_mapping"])

    def _added(self, whole: str, messages: Messages) -> list[tuple[int, int]]:
        """The characters that each of the assistant's messages adds to the rendering before it."""
        if messages[0]["role"] == "assistant":
            raise GramianError(
                "the assistant speaks first, and nothing shows where it begins; expected a template with {% generation %}"
            )
        return [
            (
                len(self._beginning(whole, messages[:number], True)),
                len(self._beginning(whole, messages[: number + 1], False)),
            )
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
        ]

    def _beginning(self, whole: str, messages: Messages, answer: bool) -> str:
        """The rendering of the first messages, with the prompt of an answer or without; a beginning of the whole one."""
        found, _ = self._render(messages, answer)
        if not whole.startswith(found):
            raise GramianError(
                "the chat template writes earlier messages differently as later ones follow, so that it does not show which "
                "tokens the assistant writes; expected a template with {% generation %}"
            )
        return found

    def _render(self, messages: Messages, answer: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The text of messages, and the characters that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, marked = render_jinja_template(
                conversations=[messages],
                chat_template=self._template,
                return_assistant_tokens_mask=self._marks,
                add_generation_prompt=answer,
                **{**self._tokenizer.special_tokens_map, **DATE},
            )
        except Exception as problem:  # templates raise what they like
            reason = (str(problem).splitlines() or [type(problem).__name__])[0]
            raise GramianError(
                f"the chat template refuses the messages ({reason}); expected roles that it knows"
            ) from None
        return str(texts[0]), [(begin, stop) for begin, stop in marked[0]] if self._marks else []


def _marks_generation(template: str) -> bool:
    """Whether a template has a generation block, between {% or {%- and %}."""
    return any(part.split("%}")[0].strip(" -+\n\t") == "generation" for part in template.split("{%")[1:])


def _inside(spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether each token, of characters [begin, stop), lies in one of the spans of characters; an empty token does not."""
    return [any(begin < last and first < stop for first, last in spans) for begin, stop in offsets]


def _texts(value: Any) -> Iterator[str]:
    """All texts in a message, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield str(key)
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
