"""The recipe for conversations: what its batches hold, layouts, tools, and rows that it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from chats import conversations_of, small_tokenizer
from trainpipes.testing import digest
from trainpipes_recipes import chat

SMALL: dict[str, Any] = {"batch_size": 4, "buffer_size": 8, "num_shards": 2}
ONE: dict[str, Any] = {"batch_size": 1, "num_shards": 1}
TOOLS = (
    "{% if tools %}{{ tools | tojson }}|{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}a:{% generation %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endgeneration %}"
    "{% else %}{{ m.role[0] + ':' + m.content }}{% endif %}|{% endfor %}"
)
UNMARKED = TOOLS.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def message(role: str, content: Any = "x", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def made(count: int = 30) -> list[list[dict[str, Any]]]:
    """Made conversations of one to three turns."""
    return conversations_of([(f"{k} + {k}?", f"é{2 * k}" * (1 + k % 4)) for k in range(count)])


def rows(*told: Any) -> tp.Pipeline:
    return tp.from_dataset([{"messages": each} for each in told])


def texts(batch: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Of each row of a batch the text, and the part of it that is learnt."""
    decode = small_tokenizer().decode
    return [
        (decode(ids).replace("<pad>", ""), decode(labels[labels != -100]))
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]


def only(*told: Any, **options: Any) -> list[tuple[str, str]]:
    """The texts of conversations, in their order."""
    pipe = chat(rows(*told), small_tokenizer(), **{**ONE, **options})
    return sorted(pair for batch in pipe for pair in texts(batch))


def test_a_batch_holds_what_transformers_writes_and_the_assistants_part_of_it() -> None:
    told = made()
    order = (
        tp.from_dataset([{"n": n} for n in range(len(told))]).sharding_filter(2).shuffle(8, seed=3)
    )
    found = list(chat(rows(*told), small_tokenizer(), seed=3, drop_last=False, **SMALL))
    for batch, numbers in zip(found, order.batch(4), strict=True):
        wanted = small_tokenizer().apply_chat_template(
            [told[row["n"]] for row in numbers], return_dict=True, return_tensors="pt",
            return_assistant_tokens_mask=True, padding=True,
        )  # fmt: skip
        learnt = torch.as_tensor(wanted["assistant_masks"]).bool()
        labels = wanted["input_ids"].masked_fill(~learnt, -100)
        assert sorted(batch) == ["attention_mask", "input_ids", "labels"]
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(batch[name], wanted[name])
        assert torch.equal(batch["labels"], labels)
        assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def share_gpt(told: Any) -> list[dict[str, str]]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[each["role"]], "value": each["content"]} for each in told]


def write_json(table: pa.Table, path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


FILES: dict[str, Callable[[pa.Table, Path], Any]] = {
    "x.parquet": lambda table, path: pq.write_table(table, path, row_group_size=3),
    "x.jsonl": write_json,
}


@pytest.mark.parametrize("name", FILES)
def test_both_layouts_in_files_of_any_format(name: str, tmp_path: Path) -> None:
    told = made()
    one, other = tmp_path / "openai", tmp_path / "sharegpt"
    for folder, rows_of in ((one, told), (other, [share_gpt(each) for each in told])):
        folder.mkdir()
        FILES[name](pa.table({"conversations": rows_of, "id": range(len(told))}), folder / name)
    found = [digest(batch) for batch in chat(one, small_tokenizer(), **SMALL)]
    assert found == [digest(batch) for batch in chat(other, small_tokenizer(), **SMALL)]
    assert len(found) == len(told) // 4


def test_packed_rows_hold_each_conversation_once() -> None:
    told = made(60)
    pipe = chat(rows(*told), small_tokenizer(), packed=True, max_length=300, **SMALL)
    found, learnt = [], 0
    for batch in pipe:
        assert batch["input_ids"].shape[1] == 300
        assert sorted(batch) == [
            "cu_seqlens", "input_ids", "labels", "max_seqlen", "position_ids", "segment_ids",
        ]  # fmt: skip
        learnt += int((batch["labels"] != -100).sum())
        for ids, segments in zip(batch["input_ids"], batch["segment_ids"], strict=True):
            found += [
                small_tokenizer().decode(ids[segments == n])
                for n in range(1, int(segments.max()) + 1)
            ]
    wanted = only(*told)
    assert sorted(found) == [text for text, _ in wanted]
    alone = chat(rows(*told), small_tokenizer(), **{**SMALL, "drop_last": False})
    assert learnt == sum(int((batch["labels"] != -100).sum()) for batch in alone)


def test_what_is_too_long_is_cut_and_does_not_teach_its_end() -> None:
    told = [message("user", "ab"), message("assistant", "cdef")]
    ((text, learnt),) = only(told)
    assert learnt == "cdef<|im_end|>"
    length = len(small_tokenizer().encode(text))
    shorter = (length - less for less in (2, 3, 6, 7, 20))
    cut = [only(told, max_length=most, on_error="keep")[0][1] for most in shorter]
    assert cut == ["cdef"[:n] for n in (4, 3, 0, 0, 0)]


# Tools

ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
NEG = {"type": "function", "function": {"name": "neg", "arguments": {"x": 3}}}


@pytest.mark.parametrize("text", [False, True])
def test_tool_calls_are_learnt_and_their_results_are_not(text: bool, tmp_path: Path) -> None:
    """Two functions of other arguments, whose columns have a null for each that a call does not take."""

    def call(tool: Any) -> dict[str, Any]:
        own = tool["function"]
        arguments = json.dumps(own["arguments"]) if text else own["arguments"]
        return message("assistant", None, tool_calls=[
            {"type": "function", "function": {"name": own["name"], "arguments": arguments}}
        ])  # fmt: skip

    told = [
        [message("user", "q"), call(ADD), message("tool", "3"), message("assistant", "three")],
        [message("user", "q"), call(NEG), message("tool", "-3"), message("tool", "ok"),
         message("assistant", "less")],
    ]  # fmt: skip
    schema = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    table = pa.table({"messages": told, "tools": [json.dumps(schema), None]})
    pq.write_table(table, tmp_path / "x.parquet")
    write_json(table, tmp_path / "x.jsonl")
    for path in tmp_path.iterdir():
        pipe = chat(path, small_tokenizer(), tools="tools", template=TOOLS, **ONE)
        assert sorted(pair for batch in pipe for pair in texts(batch)) == sorted([
            (
                json.dumps(schema) + '|u:q|a:{"name": "add", "arguments": {"a": 1, "b": 2}}|t:3|a:three|',
                '{"name": "add", "arguments": {"a": 1, "b": 2}}three',
            ),
            (
                'u:q|a:{"name": "neg", "arguments": {"x": 3}}|t:-3|t:ok|a:less|',
                '{"name": "neg", "arguments": {"x": 3}}less',
            ),
        ])  # fmt: skip


def test_function_calls_of_sharegpt_become_tool_calls() -> None:
    told = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "two"},
    ]
    call = '{"name": "add", "arguments": {"a": 1}}'
    assert only(told, template=TOOLS) == [(f"u:q|a:{call}|t:2|a:two|", f"{call}two")]
    told[1]["value"] = "add it"  # not JSON: what the assistant says
    assert only(told, template=TOOLS) == [("u:q|a:add it|t:2|a:two|", "add ittwo")]


# Rows of other kinds


def test_names_and_layouts_that_are_not_common() -> None:
    names = [("narrator", "s"), ("Human", "u"), ("bot", "a")]
    told = [{"from": name, "value": text} for name, text in names]
    roles = {"narrator": "system", "Human": "user"}
    assert only(told, roles=roles, template=TOOLS) == [("s:s|u:u|a:a|", "a")]
    mixed = [[message("user"), message("assistant")],
             [{"from": "human", "value": "y"}, {"from": "gpt", "value": "z"}]]  # fmt: skip
    assert only(*mixed, template=TOOLS) == [("u:x|a:x|", "x"), ("u:y|a:z|", "z")]


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    told = [message("user", parts), message("assistant", parts[:1])]
    assert only(told, template=TOOLS) == [("u:ab|a:a|", "a")]
    picture = [{"type": "image"}, parts[0]]
    bad = [message("user", picture), message("assistant", parts)]
    with pytest.raises(tp.DataError, match="a part without text") as caught:
        only(told, bad, template=TOOLS)
    assert caught.value.row == 1
    assert only(told, bad, template=TOOLS, on_error="skip") == [("u:ab|a:a|", "a")]
    more = {"annotations": [], "cache_control": {"type": "ephemeral"}}
    exported = [{"type": kind, "text": kind[0], **more} for kind in ("input_text", "output_text")]
    told = [message("user", exported), message("assistant", [*exported[1:], "x"])]
    assert only(told, template=TOOLS) == [("u:io|a:ox|", "ox")]
    other = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(tp.DataError, match=r"cannot write this conversation: TypeError") as caught:
        only([message("user", other), message("assistant", other)])
    assert caught.value.row == 0


GOOD = [message("user"), message("assistant")]
BAD: dict[str, tuple[Any, str]] = {
    "none": ([], "a conversation has no message"),
    "null": (None, "a conversation has no message"),
    "null message": ([None], "message 0 has no role"),
    "null role": ([message(None)], "message 0 has no role"),  # type: ignore[arg-type]
    "system only": ([message("system")], "there is no message of 'assistant'"),
    "no response": ([message("user")], "there is no message of 'assistant'"),
    "assistant first": (
        GOOD[1:], "message 0 is of role 'assistant' and is the first, where 'system' or 'user' comes"
    ),
    "user twice": (
        [message("system"), message("user"), message("user"), message("assistant")],
        "message 2 is of role 'user' and comes after one of 'user', where 'assistant' comes",
    ),
    "late system": (
        [*GOOD, message("system"), *GOOD],
        "message 2 is of role 'system' and comes after one of 'assistant', where 'user' or 'tool' comes",
    ),
    "tool first": ([message("tool"), message("assistant")], "message 0 is of role 'tool' and is the first"),
    "unknown": (
        [message("user"), message("narrator"), message("assistant")],
        r"message 1 is of role 'narrator', which is none of system, .*roles=\{'narrator': \"user\"\}",
    ),
    "empty": ([message("user"), message("assistant", "")], "message 1 of role 'assistant' is an empty"),
    "spaces": ([message("user"), message("assistant", " \n")], "message 1 of role 'assistant' is an"),
    "no calls": (
        [message("user"), message("assistant", None, tool_calls=[])], "message 1 of role 'assistant' is an"
    ),
    "null content": ([message("user", None), GOOD[1]], "message 0 of role 'user' is without content"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_or_dropped_or_kept(name: str, tmp_path: Path) -> None:
    bad, said = BAD[name]
    call = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    called = [message("user"), message("assistant", None, tool_calls=call)]
    table = pa.table({"messages": [GOOD, GOOD, called, bad, GOOD]})
    path = tmp_path / "x.parquet"
    pq.write_table(table, path, row_group_size=2)
    options: dict[str, Any] = {"template": TOOLS, **ONE}
    with pytest.raises(tp.DataError, match=said) as caught:
        list(chat(path, small_tokenizer(), **options))
    error = caught.value
    assert (error.path, error.row_group, error.row) == (str(path), 1, 3)
    assert 'on_error="skip" leaves such rows out' in str(error)
    assert len(list(chat(path, small_tokenizer(), on_error="skip", **options))) == 4
    kept = chat(path, small_tokenizer(), on_error="keep", **options)
    if name in ("none", "null", "null message", "null role", "null content"):
        with pytest.raises(tp.DataError):
            list(kept)
    else:
        assert len(list(kept)) == 5


@pytest.mark.parametrize(("told", "options", "error", "said"), [
    ("text", {}, tp.SchemaError, r"holds lists of messages, got str: .* by json.loads"),
    (["text"], {}, tp.SchemaError, r'dicts with "role" and "content" or with "from" and "value"'),
    ([{"text": "x"}], {}, tp.SchemaError, r'dicts with "role" and "content"'),
    ([{"role": {"name": "user"}, "content": "x"}], {}, tp.SchemaError, "a role is text, got .*user"),
    (7, {}, tp.SchemaError, "holds lists of messages, got int "),
    ([message("user", weight=None), message("assistant", weight=0.5)], {}, tp.DataError,
        r'the "weight" of a message is 0 or 1, got 0\.5'),
    ([message("user"), message("assistant", train="False")], {}, tp.DataError,
        r'the "train" of a message is True or False, got \'False\''),
    ([message("user"), message("assistant", weight=0)], {"on_error": "raise"}, tp.DataError,
        "no target for the loss"),
    (GOOD, {"messages": "mesages"}, tp.SchemaError, "mesages"),
    (GOOD, {"on_error": "drop"}, tp.ConfigError,
        "on_error\\) must be \"raise\", \"skip\" or \"keep\", got 'drop'"),
    (GOOD, {"roles": ["human"]}, tp.ConfigError, "roles must be a dict of names and"),
    (GOOD, {"roles": {"human": 5}}, tp.ConfigError, "roles must be a dict of names and"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(told: Any, options: Any, error: Any, said: str) -> None:
    def made() -> tp.Pipeline:
        return chat(rows(told), small_tokenizer(), **{**ONE, **options})

    with pytest.raises(error, match=said):
        made() if error is tp.ConfigError else list(made())


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("prompt", "completion"), {}),
        (("question", "answer"), {"on_error": "skip"}),
        (("before", "after"), {"prompt": "before", "messages": "after"}),
        (("before", "messages"), {"prompt": "before"}),
        (
            ("before", "response"),
            {"prompt": "before", "messages": "response", "template": UNMARKED},
        ),
    ],
)
@pytest.mark.parametrize("in_arrow", [False, True])
def test_a_prompt_may_have_a_column_of_its_own(
    names: tuple[str, str], options: dict[str, Any], in_arrow: bool
) -> None:
    """As TRL's conversational prompts and completions have it: only the latter are in the loss."""
    told = [message(("user", "assistant")[n % 2], "abcdef"[n]) for n in range(6)]
    row = dict(zip(names, (told[:3], told[3:]), strict=True)) | {"id": 7, "output": "x"}
    source = tp.from_arrow(pa.Table.from_pylist([row])) if in_arrow else tp.from_dataset([row])
    (batch,) = chat(source, small_tokenizer(), **ONE, **options)
    ((text, learnt),) = texts(batch)
    template = options.get("template")
    ((whole, _),) = only(told, template=template)
    assert text == whole
    assert learnt == ("a:d|a:f|" if template else "d<|im_end|>f<|im_end|>")


def test_tools_that_are_left_out_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    row = {"messages": GOOD, "tools": "[]"}
    chat(tp.from_dataset([row]), small_tokenizer(), tools="tools", **ONE)
    chat(tp.from_dataset([{"messages": GOOD}]), small_tokenizer(), **ONE)
    assert not caplog.messages
    chat(tp.from_dataset([row]), small_tokenizer(), **ONE)
    assert caplog.messages == [
        'chat: column "tools" is not used: tools="tools" shows it to the model'
    ]


def test_a_prompt_that_is_text_is_refused_with_what_to_use() -> None:
    rows = tp.from_dataset([{"prompt": "a", "completion": "b"}])
    with pytest.raises(
        tp.SchemaError, match=r"use the recipe sft, which takes prompts and responses"
    ):
        chat(rows, small_tokenizer(), **ONE)
    rows = tp.from_dataset([{"prompt": "a", "completion": [message("assistant")]}])
    with pytest.raises(tp.SchemaError, match=r"column 'prompt' holds lists of messages, got str"):
        list(chat(rows, small_tokenizer(), **ONE))


@pytest.mark.parametrize(
    ("template", "turn"), [(None, "{}<|im_end|>"), (TOOLS, "{}"), (UNMARKED, "a:{}|")],
    ids=["own", "marked", "unmarked"],
)  # fmt: skip
@pytest.mark.parametrize(
    "off", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"train": 0}], ids=str
)
def test_a_message_may_stay_out_of_the_loss(
    template: str | None, turn: str, off: dict[str, Any]
) -> None:
    """As OpenAI's files of several turns say it, by "weight", and others by "train"."""
    on = {key: type(value)(1) for key, value in off.items()}
    talk = [
        message("user", "a"), message("assistant", "bad", **off), message("user", "b", **off),
        message("assistant", "good", **on), message("user", "c"), message("assistant", "best"),
    ]  # fmt: skip
    plain = [message(each["role"], each["content"]) for each in talk]
    ((text, learnt),) = only(talk, template=template)
    ((whole, everything),) = only(plain, template=template)
    assert text == whole, "the model sees the same conversation"
    assert everything == "".join(map(turn.format, ["bad", "good", "best"]))
    assert learnt == "".join(map(turn.format, ["good", "best"]))
    table = tp.from_arrow(pa.Table.from_pylist([{"messages": talk}]))
    (batch,) = chat(table, small_tokenizer(), template=template, **ONE)
    assert texts(batch) == [(text, learnt)], "columns have nulls for keys that other messages have"


def test_a_message_out_of_the_loss_whose_part_is_not_known_is_refused() -> None:
    twice = TOOLS.replace(
        "{% endgeneration %}", "{% endgeneration %}{% generation %}!{% endgeneration %}"
    )
    talk = [message("user"), message("assistant", weight=0), message("user"), message("assistant")]
    with pytest.raises(tp.DataError, match=r"marks 4 parts in 2 messages .*leave \"weight\" and"):
        list(chat(rows(talk), small_tokenizer(), template=twice, **ONE))
    plain = [message(each["role"]) for each in talk]
    assert len(list(chat(rows(plain), small_tokenizer(), template=twice, **ONE))) == 1


def test_parts_of_text_are_joined_that_have_nulls_for_the_keys_of_others() -> None:
    def part(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text, "image_url": None}

    talk = [{"role": "user", "content": [part("a"), part("b")]},
            {"role": "assistant", "content": [part("c")]}]  # fmt: skip
    table = tp.from_arrow(pa.Table.from_pylist([{"messages": talk}]))
    tokenizer = small_tokenizer()
    batch = next(iter(chat(table, tokenizer, **ONE)))
    joined = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    wanted = tokenizer.apply_chat_template(joined, tokenize=False)
    assert tokenizer.decode(batch["input_ids"][0]) == wanted


def test_content_of_two_types_names_its_file_and_row_and_python_rows_may_have_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.jsonl"
    parts = [message("user", [{"type": "text", "text": "a"}]), message("assistant", "b")]
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in (GOOD, parts)))
    with pytest.raises(tp.DataError, match=r"x.jsonl, line 2: .*content.* from string to array"):
        list(chat(path, small_tokenizer(), **ONE))
    plain = [message("user", "a"), message("assistant", "b")]
    one, other = chat(rows(plain, parts), small_tokenizer(), **ONE)
    assert torch.equal(one["input_ids"], other["input_ids"]), "the same text"


def test_what_is_missing_is_told() -> None:
    said = "names tried were messages, conversations, .*messages="
    with pytest.raises(tp.SchemaError, match=said):
        chat(tp.from_arrow(pa.table({"x": [1]})), small_tokenizer())
    said = "must be a tokenizer of transformers, or the name or folder"
    with pytest.raises(tp.ConfigError, match=said):
        chat(rows(GOOD), "bytes")


def test_a_key_may_be_null_in_ten_thousand_rows() -> None:
    kind = pa.list_(pa.struct([(name, pa.string()) for name in ("role", "content", "name")]))
    table = pa.table({"messages": pa.array([GOOD] * 10_001, kind)})
    (batch,) = (
        tp.from_arrow(table[:4]).take(4).batch(4).chat_template(small_tokenizer()).pad_collate()
    )
    found = chat(tp.from_arrow(table), small_tokenizer(), batch_size=4, num_shards=1).peek()
    assert torch.equal(found["labels"], batch["labels"])
