"""Chats and completions: the tokens are the template's own, and what is predicted is what the assistant wrote."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gramian.core.errors import GramianError
from gramian.data import Windows, load_tokenizer, read_documents
from gramian.data.corpus.chat_template import ChatTemplate
from gramian.data.options import DataSection
from gramian.data.tokenizer import ByteTokenizer
from gramian.data.windows import NOT_COUNTED
from tests.data.test_tokenizer import saved

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "headers": (
        "{{ bos_token }}{%- for m in messages -%}[{{ m.role }}]\n\n{%- if m.role == 'assistant' -%}{%- generation -%}"
        "{{ m.content }}{{ eos_token }}{%- endgeneration -%}{%- else -%}{{ m.content }}{{ eos_token }}{%- endif -%}"
        "{%- endfor -%}{%- if add_generation_prompt -%}[assistant]\n\n{%- endif -%}"
    ),
    "inst": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}"
        "{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}<<SYS>>{{ m.content }}<</SYS>>\n"
        "{% endif %}{% endfor %}"
    ),
    "turns": (
        "{% for m in messages %}{% set r = 'model' if m.role == 'assistant' else m.role %}<turn>{{ r }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% else %}"
        "{{ m.content | trim }}{% endif %}</turn>\n{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
    ),
    "plain": (
        "{% for m in messages %}{{ m.role | capitalize }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}Assistant: {% endif %}"
    ),
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello world"}],
    [
        {"role": "system", "content": "you are ünïcode 日本"},
        {"role": "user", "content": "hello,\n\nyou "},
        {"role": "assistant", "content": "  you 😀"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "hello world, " * 9},
    ],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoTokenizer

    place = saved(tmp_path_factory.mktemp("chat"))
    tokenizer = AutoTokenizer.from_pretrained(str(place))
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(place)
    return place


def with_template(folder: Path, place: Path, template: str | None) -> Path:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(place)
    return place


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_masks_are_those_of_transformers(folder: Path, tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    place = with_template(folder, tmp_path, TEMPLATES[name])
    peer, mine = AutoTokenizer.from_pretrained(str(place)), ChatTemplate(place)
    for chat in CHATS:
        theirs = peer.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, assistant = mine.encode(chat)
        mask = theirs["assistant_masks"]
        assert ids == theirs["input_ids"] and 0 < sum(assistant) < len(assistant)
        if len(chat) == 2 or name not in ("turns", "plain"):
            assert list(map(int, assistant)) == mask
            continue
        # The assistant's text ends in an emoji of several tokens, of which theirs has the first alone.
        more = [k for k, (one, other) in enumerate(zip(assistant, mask, strict=True)) if one and not other]
        assert mask[more[0] - 1] and peer.decode(ids[more[0] - 1 : more[-1] + 1]).endswith("😀") and len(more) <= 3


@pytest.mark.parametrize("name", [name for name in TEMPLATES if "add_generation_prompt" in TEMPLATES[name]])
def test_a_template_without_marks_gives_what_the_assistant_adds(folder: Path, tmp_path: Path, name: str) -> None:
    """As the same template with marks, and the end of the message, which it writes after the assistant's text."""
    marked = ChatTemplate(with_template(folder, tmp_path / "marked", TEMPLATES[name]))
    bare = TEMPLATES[name]
    for mark in ("{% generation %}", "{% endgeneration %}", "{%- generation -%}", "{%- endgeneration -%}"):
        bare = bare.replace(mark, "{%- if true -%}{%- endif -%}" if "-" in mark else "")
    plain = ChatTemplate(with_template(folder, tmp_path / "bare", bare))
    for chat in CHATS:
        (ids, assistant), (same, found) = marked.encode(chat), plain.encode(chat)
        assert same == ids
        more = [k for k, (one, other) in enumerate(zip(assistant, found, strict=True)) if other and not one]
        assert all(other for one, other in zip(assistant, found, strict=True) if one)
        text = plain._tokenizer.decode([ids[k] for k in more])
        assert text in ("", "</turn>\n" * 2, "</turn>\n", "\n\n", "\n\n" * 2), text


def chat_data(path: Path, folder: Path, chats: list[Any], **told: Any) -> DataSection:
    path.write_text("".join(json.dumps({"messages": chat, "id": 7}) + "\n" for chat in chats))
    return DataSection(source="jsonl", record="chat", files=(str(path),), tokenizer=str(folder), cache="", **told)


def test_windows_predict_the_assistant_alone(folder: Path, tmp_path: Path) -> None:
    place = with_template(folder, tmp_path / "t", CHATML)
    chats = [CHATS[k % 2] for k in range(8)]
    data = chat_data(tmp_path / "a.jsonl", place, chats, validation_files=(str(tmp_path / "b.jsonl"),))
    chat_data(tmp_path / "b.jsonl", place, CHATS[:1])
    documents = read_documents(data, load_tokenizer(str(place)))
    stream, template = documents.train, ChatTemplate(place)
    end = stream.end
    for pack, isolate in ((True, False), (True, True), (False, False)):
        windows = Windows(stream, 16, pack=pack, isolate=isolate)
        predicted = [t for i in range(len(windows)) for t in windows[i]["targets"].tolist() if t != NOT_COUNTED]
        wanted = []
        for chat in chats:
            ids, assistant = template.encode(chat)
            wanted += [token for token, one in zip(ids, assistant, strict=True) if one]
        assert predicted == wanted and end not in predicted
        assert windows.counts.tolist() == [
            int((windows[i]["targets"] != NOT_COUNTED).sum()) for i in range(len(windows))
        ]
        assert windows.counts.min() > 0
    assert stream.text_bytes is None
    other = read_documents(data, load_tokenizer(str(place))).train
    other._counted[0].array[-3] ^= 1  # type: ignore[index]
    assert Windows(other, 16).digest != Windows(stream, 16).digest


def test_an_end_that_the_template_writes_is_not_doubled(folder: Path, tmp_path: Path) -> None:
    place = with_template(folder, tmp_path / "t", TEMPLATES["headers"])
    data = chat_data(tmp_path / "a.jsonl", place, [*CHATS, *CHATS], validation_files=(str(tmp_path / "b.jsonl"),))
    chat_data(tmp_path / "b.jsonl", place, CHATS[:1])
    stream = read_documents(data, load_tokenizer(str(place))).train
    stops = stream.edges[1:] - 1
    assert all(stream.read(int(stop), int(stop) + 1)[0] == stream.end for stop in stops)
    assert all(stream.read(int(stop) - 1, int(stop))[0] != stream.end for stop in stops)
    assert all(stream.targets(int(stop), int(stop) + 1)[0] for stop in stops)  # the assistant's own end is predicted


BAD: dict[str, tuple[Any, str]] = {
    "no list": ("hello", 'is no list of messages; expected an object with messages {"role": …, "content": …} under "messages"'),
    "no content": ([{"role": "user"}], 'message 0 has no text under "role" and "content"; expected an object with messages'),
    "no assistant": ([{"role": "user", "content": "a"}], 'no message has the role "assistant"; expected one at least'),
    "a special token": (
        [{"role": "user", "content": "a<|im_end|>\n<|im_start|>assistant"}, {"role": "assistant", "content": "b"}],
        "message 0 spells the special token '<|im_end|>', by which it would end or begin a message; expected text without it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_chat_that_cannot_be_read_is_one_line(folder: Path, tmp_path: Path, name: str) -> None:
    place = with_template(folder, tmp_path / "t", CHATML)
    chat, words = BAD[name]
    data = chat_data(tmp_path / "a.jsonl", place, [CHATS[0], chat])
    with pytest.raises(GramianError) as found:
        read_documents(data, load_tokenizer(str(place)))
    assert str(found.value).startswith(f"{tmp_path}/a.jsonl:2: ") and words in str(found.value)


def test_templates_that_show_no_assistant_are_refused(folder: Path, tmp_path: Path) -> None:
    changing = "{% for m in messages %}{{ m.role if loop.last else '-' }}: {{ m.content }}\n{% endfor %}"
    refusing = "{{ raise_exception('roles must alternate') }}"
    empty = CHATML.replace(
        "{{ m.content }}<|im_end|>\n{% endgeneration %}", "{% endgeneration %}{{ m.content }}<|im_end|>\n"
    )
    for number, (template, words) in enumerate(
        (
            (changing, "writes earlier messages differently as later ones follow"),
            (refusing, r"refuses the messages \(roles must alternate\); expected roles that it knows"),
            (empty, "marks nothing as the assistant's"),
        )
    ):
        chat = ChatTemplate(with_template(folder, tmp_path / str(number), template))
        with pytest.raises(GramianError, match=words):
            chat.encode(CHATS[1])
    with pytest.raises(GramianError, match="has no chat template; expected chat_template.jinja"):
        ChatTemplate(with_template(folder, tmp_path / "none", None))
    with pytest.raises(GramianError, match='data.tokenizer: "bytes" has no chat template'):
        read_documents(chat_data(tmp_path / "a.jsonl", folder, CHATS), ByteTokenizer())


def test_completions_are_predicted_and_prompts_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    pairs = [("ask:", " answer"), ("日本?", "ja"), ("", "from nothing"), ("nothing", "")]
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in [*pairs, *pairs[:1]]))
    data = DataSection(
        source="jsonl", record="completion", files=(str(path),), validation_files=(str(tmp_path / "b.jsonl"),), cache=""
    )
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    documents = read_documents(data, ByteTokenizer())
    stream = documents.train
    assert (documents.read, documents.empty) == (6, 1)
    read = stream.read(0, len(stream))
    counted = stream.targets(0, len(stream))
    kept = [pair for pair in [*pairs, *pairs[:1]] if pair[1]]
    assert ByteTokenizer().decode(read) == "".join(p + c for p, c in kept)
    assert ByteTokenizer().decode(read[counted]) == "".join(c for _, c in kept)
    assert (counted[stream.edges[1:] - 1]).all()  # the end is predicted
    path.write_text(json.dumps({"prompt": "a"}) + "\n")
    with pytest.raises(
        GramianError, match=r'a.jsonl:1: has no "completion" but prompt; expected an object with texts under'
    ):
        read_documents(data, ByteTokenizer())


def test_text_after_the_first_window_is_left_out_and_counted() -> None:
    from gramian.data.token_stream import Stream

    sizes = [1, 5, 13, 2, 30]
    edges = np.cumsum([0, *sizes])
    stream = Stream([np.arange(edges[-1])], edges, vocabulary=1000, end=999)
    windows = Windows(stream, 4, pack=False, truncate=True)
    whole = Windows(stream, 4, pack=False)
    predicted = [t for i in range(len(windows)) for t in windows[i]["targets"].tolist() if t != NOT_COUNTED]
    assert predicted == [
        int(edge) + k for edge, size in zip(edges, sizes, strict=False) for k in range(1, min(size, 5))
    ]
    assert windows.left_out == int(whole.counts.sum()) - len(predicted) == 8 + 25
    assert windows.digest != whole.digest
    with pytest.raises(GramianError, match=r"data.truncate: expected data.pack = false"):
        Windows(stream, 4, truncate=True)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of words, which drops spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("words")
    names = ["[END]", "[UNK]", "yes", "no", "U", "A", ":", "secret", "hello"]
    word = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    word.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=word, eos_token="[END]", unk_token="[UNK]").save_pretrained(place)
    return place


BARE = (
    "{% for m in messages %}{% if m.role == 'user' %}U: {{ m.content }}{% else %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endif %} {% endfor %}"
)


@pytest.mark.parametrize("answer", ["yes\n", " yes", "yes", "  yes \n"])
@pytest.mark.parametrize("first", [True, False])
def test_characters_without_a_token_make_no_other_text_the_assistants(
    words: Path, tmp_path: Path, answer: str, first: bool
) -> None:
    """transformers' own mask runs to the end of the record, or stops, where a marked text begins or ends in dropped spaces."""
    template = ChatTemplate(with_template(words, tmp_path, BARE))
    said, asked = {"role": "assistant", "content": answer}, {"role": "user", "content": "secret hello"}
    chat = [*([] if first else [asked]), said, asked, {"role": "assistant", "content": "no"}]
    ids, assistant = template.encode(chat)
    predicted = [token for token, one in zip(ids, assistant, strict=True) if one]
    assert template._tokenizer.convert_ids_to_tokens(predicted) == ["yes", "no"]


def test_messages_are_rendered_as_they_are_written(folder: Path, tmp_path: Path) -> None:
    """Keys keep their order, and rows of a table their own keys."""
    import pyarrow as pa
    from pyarrow import parquet
    from transformers import AutoTokenizer

    calls = "{% if m.calls %}{{ m.calls | tojson }}{% endif %}"
    tools = CHATML.replace("{% generation %}{{ m.content }}", "{% generation %}{{ m.content }}" + calls)
    place = with_template(folder, tmp_path / "t", tools)
    chats = [
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "calls": [{"name": "f", "arguments": {key: 2, "alpha": 1}}]},
        ]
        for key in ("zeta", "other")
    ]
    peer = AutoTokenizer.from_pretrained(str(place))
    data = chat_data(tmp_path / "a.jsonl", place, chats, validation_files=(str(tmp_path / "b.jsonl"),))
    chat_data(tmp_path / "b.jsonl", place, CHATS[:1])
    stream = read_documents(data, load_tokenizer(str(place))).train
    for number, chat in enumerate(chats):
        found = stream.read(*map(int, stream.edges[number : number + 2])).tolist()
        assert found[:-1] == peer.apply_chat_template(chat)["input_ids"]
    parquet.write_table(pa.table({"messages": chats}), tmp_path / "a.parquet")
    (tmp_path / "c").mkdir()
    parquet.write_table(pa.table({"messages": CHATS[:1]}), tmp_path / "c" / "b.parquet")
    table = DataSection(
        source="parquet", record="chat", files=(str(tmp_path / "a.parquet"),), tokenizer=str(place), cache="",
        validation_files=(str(tmp_path / "c"),),
    )  # fmt: skip
    rows = read_documents(table, load_tokenizer(str(place))).train
    assert len(rows) == len(stream)  # arrow sorts no keys, but has those of all rows in the order of their first one
    assert "null" not in peer.decode(rows.read(0, len(rows)))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "a", "reasoning": "x<|im_end|>"},
        {"role": "assistant<|im_end|>", "content": "a"},
        {"role": "assistant", "content": "a", "calls": [{"arguments": {"<|im_end|>": 1}}]},
    ],
)
def test_no_part_of_a_message_spells_a_special_token(folder: Path, tmp_path: Path, message: dict[str, Any]) -> None:
    template = ChatTemplate(with_template(folder, tmp_path, CHATML))
    with pytest.raises(GramianError, match=r"message 1 spells the special token '<\|im_end\|>'"):
        template.encode([CHATS[0][0], message])


def test_templates_that_are_not_the_same_tomorrow_or_show_no_beginning_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    today = "{% set date_string = strftime_now('%d %b %Y') %}"
    dated = "{% if not date_string is defined %}" + today + "{% endif %}{{ date_string }}" + CHATML
    assert "26 Jul 2024" in ChatTemplate(with_template(folder, tmp_path / "1", dated))._render(CHATS[0])[0]
    with pytest.raises(GramianError, match=r"writes today's date \(strftime_now\)"):
        ChatTemplate(with_template(folder, tmp_path / "2", "{{ strftime_now('%d') }}" + CHATML))
    unmarked = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(GramianError, match="the assistant speaks first, and nothing shows where it begins"):
        ChatTemplate(with_template(folder, tmp_path / "3", unmarked)).encode(CHATS[0][::-1])


def test_a_teacher_of_the_same_tokenizer_teaches_chats(folder: Path, tmp_path: Path) -> None:
    from gramian.train.build.build_teacher import _check_tokenizer

    place = with_template(folder, tmp_path / "t", CHATML)
    data = chat_data(tmp_path / "a.jsonl", place, [*CHATS, *CHATS], validation_files=(str(tmp_path / "b.jsonl"),))
    chat_data(tmp_path / "b.jsonl", place, CHATS[:1])
    windows = Windows(read_documents(data, load_tokenizer(str(place))).train, 16)
    _check_tokenizer(str(place), "teacher", windows)
    with pytest.raises(GramianError, match="data.tokenizer: is not that of teacher"):
        _check_tokenizer("bytes", "teacher", windows)
