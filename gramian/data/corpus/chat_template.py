"""The chat template of a Hugging Face tokenizer: messages in, token ids and which of them the assistant writes out.

A template that marks the assistant's text by {% generation %} is asked by `apply_chat_template(return_assistant_tokens_mask=
True)`, whose mask is completed where the text ends in a character of several tokens. For one that does not, an assistant's
message is what a rendering with it adds to the rendering of the messages before it with the prompt of an answer; both must be
beginnings of the whole rendering, or the record is refused.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gramian.core.errors import GramianError

Messages = list[dict[str, Any]]


class ChatTemplate:
    """The template of a tokenizer's folder; nothing is downloaded and no code of the folder is run.

    Raises:
        GramianError: if the tokenizer has no template.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        # special tokens that the template writes are tokens here: `HuggingFaceTokenizer` spells them out
        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise GramianError(
                f'data.tokenizer: {folder} has no chat template; expected chat_template.jinja, for data.record = "chat"'
            )
        self._marks = _marks_generation(template)
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
            spelled = next((token for token in self._special if token in message["content"]), None)
            if spelled is not None:
                raise GramianError(
                    f"message {number} spells the special token {spelled!r}, by which it would end or begin a message; "
                    "expected text without it"
                )
        if not any(message["role"] == "assistant" for message in messages):
            raise GramianError('no message has the role "assistant"; expected one at least, or data.record = "text"')
        if self._marks:
            offsets = {"return_offsets_mapping": True}
            found = self._render(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs=offsets
            )
            mask = _whole_characters(found["assistant_masks"], found["offset_mapping"])
            if not any(mask):
                raise GramianError(
                    "the chat template marks nothing as the assistant's; expected {% generation %} around it"
                )
            return list(found["input_ids"]), mask
        whole = str(self._render(messages, tokenize=False))
        spans = [
            (
                len(self._beginning(whole, messages[:number], True)),
                len(self._beginning(whole, messages[: number + 1], False)),
            )
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(encoded["input_ids"]), _inside(spans, encoded["offset_mapping"])

    def _beginning(self, whole: str, messages: Messages, answer: bool) -> str:
        """The rendering of the first messages, with the prompt of an answer or without; a beginning of the whole one."""
        found = str(self._render(messages, tokenize=False, add_generation_prompt=answer)) if messages else ""
        if not whole.startswith(found):
            raise GramianError(
                "the chat template writes earlier messages differently as later ones follow, so that it does not show which "
                "tokens the assistant writes; expected a template with {% generation %}"
            )
        return found

    def _render(self, messages: Messages, **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except Exception as problem:  # templates raise what they like
            reason = (str(problem).splitlines() or [type(problem).__name__])[0]
            raise GramianError(
                f"the chat template refuses the messages ({reason}); expected roles that it knows"
            ) from None


def _marks_generation(template: str) -> bool:
    """Whether a template has a generation block, between {% or {%- and %}."""
    return any(part.split("%}")[0].strip(" -+\n\t") == "generation" for part in template.split("{%")[1:])


def _whole_characters(mask: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """A mask of tokens, with all tokens of a character if it has the first: transformers' ends at the first of the last one."""
    found: list[bool] = []
    for number, (one, (begin, _)) in enumerate(zip(mask, offsets, strict=True)):
        found.append(bool(one) or bool(number and found[-1] and begin < offsets[number - 1][1]))
    return found


def _inside(spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether each token, of characters [begin, stop), lies in one of the spans of characters; an empty token does not."""
    return [any(begin < last and first < stop for first, last in spans) for begin, stop in offsets]
