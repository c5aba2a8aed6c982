"""chat_template: conversations as the tokenizer writes them, and labels on just what the assistant says."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import trainpipes as tp
from every_stage import chat_tokenizer
from forked import Child
from trainpipes.testing import digest
from trainpipes.tokenizers.chat import Chat

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORGETS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] if loop.last or m['role'] == 'user' else '…' }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def messages(*contents: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant") * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


CONVERSATIONS = [
    messages("hi there", "return 4"),
    messages(
        "a", "first answer", "more?", "second\nanswer  \n", "and", "  third, with </s> and é🙂"
    ),
    [{"role": "system", "content": "be brief"}, *messages("x", "")],
    messages("only a question"),
]


def rows(*conversations: Any) -> tp.Pipeline:
    columns = {"n": range(len(conversations)), "messages": list(conversations)}
    return tp.from_arrow(pa.table(columns))


def spoken(row: dict[str, Any]) -> list[str]:
    """What the labels of a row say, stretch by stretch."""
    tokenizer, found, stretch = chat_tokenizer(), [], []
    for label in [*row["labels"], -100]:
        if label != -100:
            stretch.append(label)
        elif stretch:
            found.append(tokenizer.decode(stretch, clean_up_tokenization_spaces=False))
            stretch = []
    return found


@pytest.mark.parametrize("template", [None, MARKED])
def test_labels_are_what_the_assistant_says_and_the_mark_after_it(template: Any) -> None:
    tokenizer = chat_tokenizer()
    found = list(rows(*CONVERSATIONS).chat_template(tokenizer, template=template))
    assert found == list(rows(*CONVERSATIONS).chat_template(tokenizer))
    for row, told in zip(found, CONVERSATIONS, strict=True):
        text = tokenizer.apply_chat_template(told, tokenize=False)
        assert row["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
        said = [m["content"] + "<|im_end|>" for m in told if m["role"] == "assistant"]
        assert spoken(row) == said
        pairs = zip(row["labels"], row["input_ids"], strict=True)
        assert all(label in (-100, i) for label, i in pairs)
        assert list(row) == ["n", "input_ids", "labels"]


def test_a_directory_is_loaded_and_known_by_its_content(tmp_path: Path) -> None:
    chat_tokenizer().save_pretrained(tmp_path)
    plain = rows(*CONVERSATIONS).chat_template(chat_tokenizer())
    loaded = rows(*CONVERSATIONS).chat_template(str(tmp_path))
    assert list(loaded) == list(plain)
    one, other = (json.loads(p.state_dict()["pipeline"])["stages"][-1] for p in (plain, loaded))  # type: ignore[index]
    assert one["template"] == other["template"]
    marked = rows(*CONVERSATIONS).chat_template(chat_tokenizer(), template=MARKED)
    with pytest.raises(tp.StateError, match="stages/chat_template/template"):
        marked.load_state_dict(plain.state_dict() or {})


def test_it_is_cut_padded_and_packed_as_tokenized_text_is() -> None:
    cut = list(rows(*CONVERSATIONS).chat_template(chat_tokenizer(), max_length=7))
    assert all(len(row["input_ids"]) == len(row["labels"]) == 7 for row in cut)
    pad = chat_tokenizer().pad_token_id
    batch = next(iter(rows(*CONVERSATIONS).chat_template(chat_tokenizer()).batch(4).pad_collate()))
    assert batch["input_ids"][3, -1] == pad
    assert batch["labels"][3].tolist() == [-100] * batch["labels"].shape[1]
    packed = rows(*CONVERSATIONS).chat_template(chat_tokenizer()).pack(64)
    assert sum(label != -100 for row in packed for label in row["labels"]) > 20
    bare = next(iter(rows(*CONVERSATIONS).chat_template(chat_tokenizer(), labels=False)))
    assert list(bare) == ["n", "input_ids"]


def test_keys_that_are_null_are_left_out() -> None:
    told = [{"role": "user", "content": "x", "name": "me"}, {"role": "assistant", "content": "y"}]
    named = (
        "{% for m in messages %}{{ m.name if m.name is defined else m.role }}: {{ m.content }}\n"
        "{% endfor %}"
    )
    row = next(iter(rows(told).chat_template(chat_tokenizer(), template=named, labels=False)))
    assert chat_tokenizer().decode(row["input_ids"]) == "me: x\nassistant: y\n"


TALK, LONGER = CONVERSATIONS[:2]
REFUSES = "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}x"
#: A second conversation that cannot be written, its tools, the options, and what is said.
BAD: list[tuple[Any, str | None, dict[str, Any], str]] = [
    ([], None, {}, "a list of messages, one or more, got list of none"),
    (None, None, {}, "got NoneType"),
    (
        [{"role": None, "content": "x"}],
        None,
        {},
        'message 0 of a conversation is a dict with "role"',
    ),
    (LONGER, None, {"template": FORGETS}, r"mark the assistant.s tokens by \{% generation %\}"),
    (
        LONGER,
        None,
        {"template": REFUSES, "labels": False},
        "cannot write this .*TemplateError: too long",
    ),
    *((LONGER, tools, {"tools": "tools"}, "tools are") for tools in ("{", "5", '["x"]', "[5]")),
]


@pytest.mark.parametrize(("told", "tools", "options", "said"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_written_names_its_row(
    told: Any, tools: str | None, options: dict[str, Any], said: str
) -> None:
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    table = pa.table({"messages": pa.array([TALK, told], kind), "tools": [None, tools]})
    with pytest.raises(tp.DataError, match=said) as caught:
        list(tp.from_arrow(table).chat_template(chat_tokenizer(), **options))
    assert caught.value.row == 1


OPEN = (  # no mark after a turn, and turns are trimmed
    "{% for m in messages %}{{ m['role'] + ':\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] | trim }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)
UNMARKED = OPEN.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("template", [OPEN, UNMARKED])
def test_a_turn_ends_with_the_last_byte_of_its_last_character(template: str) -> None:
    told = messages("a", "   smile 🙂   \n", "b", "", "c", "猫")
    (row,) = rows(told).chat_template(chat_tokenizer(), template=template)
    assert spoken(row) == ["smile 🙂", "猫"]


@pytest.mark.parametrize("template", [OPEN, UNMARKED])
def test_a_token_across_an_empty_turn_is_not_learnt(template: str) -> None:
    joining = copy.deepcopy(chat_tokenizer())
    joining.add_tokens([":\n\n"])
    pipe = rows(messages("a", "")).chat_template(joining, template=template, on_error="keep")
    (row,) = pipe
    assert joining.convert_tokens_to_ids(":\n\n") in row["input_ids"]
    assert spoken(row) == []


def test_spaces_count_where_the_tokenizer_leaves_them_out_of_its_offsets() -> None:
    from tokenizers import processors

    trimming = copy.deepcopy(chat_tokenizer())
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    kept = OPEN.replace(" | trim", "").replace("{{ '\n' }}", "|")
    (row,) = rows(messages("a", "b \n\t", "c", "  d")).chat_template(trimming, template=kept)
    assert spoken(row) == ["b \n\t", "  d"]


def test_what_the_assistant_is_prompted_with_is_not_its_own_either_where_it_begins() -> None:
    begins = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "hi"}]
    (row,) = rows(begins).chat_template(chat_tokenizer())
    assert spoken(row) == ["hello<|im_end|>"]


@pytest.mark.parametrize("template", [None, MARKED])
def test_nothing_of_a_prompt_has_a_label(template: Any) -> None:
    told = messages("a", "first", "b", "second")
    table = pa.table({"start": [told[:3], told[:1]], "end": [told[3:], told[1:]]})
    options: Any = {"column": "end", "prompt": "start", "template": template}
    pipe = tp.from_arrow(table).chat_template(chat_tokenizer(), **options)
    one, other = pipe
    assert spoken(one) == ["second<|im_end|>"]
    assert spoken(other) == ["first<|im_end|>", "second<|im_end|>"]
    assert one["input_ids"] == other["input_ids"]
    assert list(one) == ["start", "input_ids", "labels"]
    wrong = pa.table({"start": [told[:2]], "end": [told[2:]]})
    if template is MARKED:
        with pytest.raises(tp.DataError, match="does not start with an assistant message"):
            list(tp.from_arrow(wrong).chat_template(chat_tokenizer(), **options))


def test_a_marked_part_that_begins_within_the_generation_prompt_is_learnt_after_it() -> None:
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    head = (
        f"{{% for m in messages %}}{{% if m.role == 'user' %}}{turn}\n{{% else %}}"
        f"{{% generation %}}{turn}{{% endgeneration %}}{{{{ '\n' }}}}{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    told = messages("a", "first", "b", "second", "c", "third")
    table = pa.table({"start": [told[:3]], "end": [told[3:]]})
    options: Any = {"column": "end", "prompt": "start", "template": head}
    (row,) = tp.from_arrow(table).chat_template(chat_tokenizer(), **options)
    third = "<|im_start|>assistant\nthird<|im_end|>"
    assert spoken(row) == ["second<|im_end|>", third]
    (whole,) = rows(told).chat_template(chat_tokenizer(), template=head)
    assert whole["input_ids"] == row["input_ids"]
    assert spoken(whole)[2] == third


TOOLS = (
    "{% if tools %}{{ tools | tojson }}{{ '\n' }}{% endif %}{% for m in messages %}{{ m.role + '\n' }}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "it is 2"},
    ]


@pytest.mark.parametrize("arguments", [{"a": 1, "b": 1}, '{"a": 1, "b": 1}'])
def test_tool_calls_are_written_without_the_nulls_of_their_columns(arguments: Any) -> None:
    tool = {"name": "add", "parameters": {"type": "object"}}
    other = {"name": "no", "parameters": {"type": "object", "required": ["x"]}}
    for tools in ([tool, other], [json.dumps(tool), json.dumps(other)], json.dumps([tool, other])):
        table = pa.table({"messages": [called(arguments)], "tools": [tools]})
        pipe = tp.from_arrow(table).chat_template(chat_tokenizer(), template=TOOLS, tools="tools")
        row = next(iter(pipe))
        text = chat_tokenizer().decode(row["input_ids"], clean_up_tokenization_spaces=False)
        assert text.startswith(json.dumps([tool, other]) + "\nuser\n1 + 1?\n")
        call = '{"name": "add", "arguments": {"a": 1, "b": 1}}'
        assert spoken(row) == [call, "it is 2"]


@pytest.mark.parametrize("tools", ["null", "[]", "", None])
def test_tools_may_be_none(tools: str | None) -> None:
    column = pa.array([tools], pa.string())
    table = pa.table({"messages": [called({"a": 1})], "tools": column})
    pipe = tp.from_arrow(table).chat_template(chat_tokenizer(), template=TOOLS, tools="tools")
    assert chat_tokenizer().decode(next(iter(pipe))["input_ids"]).startswith("user\n1 + 1?")


def test_nulls_of_tools_that_are_json_text_stay() -> None:
    level = {"type": "string", "default": None, "enum": ["high", None]}
    tools = [{"name": "add", "parameters": {"type": "object", "properties": {"level": level}}}]
    for text in (json.dumps(tools), [json.dumps(tool) for tool in tools]):
        table = pa.table({"messages": [called({"a": 1})], "tools": [text]})
        pipe = tp.from_arrow(table).chat_template(chat_tokenizer(), template=TOOLS, tools="tools")
        written = chat_tokenizer().decode(next(iter(pipe))["input_ids"])
        assert written.startswith(json.dumps(tools) + "\nuser\n")


def test_a_template_that_wants_arguments_the_other_way_names_the_option() -> None:
    joins = TOOLS.replace("c.function | tojson", "c.function.name + c.function.arguments")
    items = TOOLS.replace("c.function | tojson", "c.function.arguments.items() | list")
    for template, parse in ((joins, True), (items, False)):
        pipe = rows(called('{"a": 1}')).chat_template
        with pytest.raises(tp.DataError, match=f"pass parse_arguments={not parse}"):
            list(pipe(chat_tokenizer(), template=template, parse_arguments=parse))
        list(pipe(chat_tokenizer(), template=template, parse_arguments=not parse))
    with pytest.raises(tp.DataError) as caught:
        list(rows(LONGER).chat_template(chat_tokenizer(), template=REFUSES))
    assert "parse_arguments" not in str(caught.value)


def test_arguments_stay_text_for_a_template_that_wants_it() -> None:
    joins = TOOLS.replace("c.function | tojson", "c.function.name + c.function.arguments")
    made = rows(called('{"a": 1}')).chat_template
    assert spoken(next(iter(made(chat_tokenizer(), template=joins, parse_arguments=False)))) == [
        'add{"a": 1}', "it is 2",
    ]  # fmt: skip
    with pytest.raises(tp.DataError, match=r"cannot write this conversation: TypeError: .*str"):
        list(made(chat_tokenizer(), template=joins))
    (row,) = rows(called("not JSON")).chat_template(chat_tokenizer(), template=joins)
    assert spoken(row)[0] == "addnot JSON"


ARGUMENTS = TOOLS.replace("c.function | tojson", "c.function.arguments")
PARTS = [[{"type": "text", "text": text}] for text in ("a", "{'b': 1}")]


@pytest.mark.parametrize(
    ("told", "template", "said"),
    [
        (
            messages(*PARTS),
            TOOLS,
            r"a part of message 0 as Python does, \[\{'type': 'text', 'text'",
        ),
        (messages(["a"], ["b"]), TOOLS, r"as Python does, \['a'\]: make text of it with map"),
        (messages({"a": 1}, {"a": 2}), TOOLS, r"as Python does, \{'a': 1\}"),
        (called({"a": 1}), ARGUMENTS, r"as Python does, \{'a': 1\}"),
        (called('{"a": 1}'), ARGUMENTS, "JSON text: pass parse_arguments=False"),
    ],
)
def test_no_list_or_dict_is_written_as_python_does(told: Any, template: str, said: str) -> None:
    with pytest.raises(tp.DataError, match=said) as caught:
        list(rows(told).chat_template(chat_tokenizer(), template=template))
    assert caught.value.row == 0


@pytest.mark.parametrize(
    ("content", "wanted"),
    [("{% for p in m.content %}{{ p.text }}{% endfor %}", "{'b': 1}"),
     ("{{ m.content | tojson }}", json.dumps(PARTS[1])),
     ("{{ m.content[0].text | replace('b', 'c') }}", "{'c': 1}")],
)  # fmt: skip
def test_a_template_may_go_through_parts_or_write_json(content: str, wanted: str) -> None:
    template = TOOLS.replace("{{ m.content or '' }}", content)
    (row,) = rows(messages(*PARTS)).chat_template(chat_tokenizer(), template=template)
    assert spoken(row) == [wanted]


def test_a_message_may_quote_what_python_shows() -> None:
    quotes = called({"a": 1})
    quotes[0]["content"] = "add {'a': 1}"
    (row,) = rows(quotes).chat_template(chat_tokenizer(), template=TOOLS)
    assert spoken(row)[-1] == "it is 2"


def test_a_name_is_one_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    known = chat_tokenizer()
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name, **_: known)
    named = rows(CONVERSATIONS[0]).chat_template("team/talks")
    given = rows(CONVERSATIONS[0]).chat_template(known)
    assert [digest(row) for row in named] == [digest(row) for row in given]


def test_what_has_no_template_is_refused(tmp_path: Path) -> None:
    bare = copy.deepcopy(chat_tokenizer())
    bare.chat_template = None
    with pytest.raises(tp.ConfigError, match=r"no chat template of its own .*pass chat_template"):
        list(rows(CONVERSATIONS[0]).chat_template(bare))
    said = "must be a tokenizer of transformers, or the name or folder"
    for bad in ("bytes", str(tmp_path / "no.json"), len):
        with pytest.raises(tp.ConfigError, match=said):
            rows(CONVERSATIONS[0]).chat_template(bad)
    wrong = {"prompt": "messages", "labels": 1, "max_length": 0}
    wrong |= dict.fromkeys(("tools", "column", "template"), 5)
    for option, value in wrong.items():
        with pytest.raises(tp.ConfigError, match=option):
            rows(CONVERSATIONS[0]).chat_template(chat_tokenizer(), **{option: value})  # type: ignore[arg-type]
    for bad in ("chatml.jinja", "", "x\n"):
        with pytest.raises(
            tp.ConfigError, match=r"template\) must be a Jinja .*Path\(...\).read_text"
        ):
            rows(CONVERSATIONS[0]).chat_template(chat_tokenizer(), template=bad)
    with pytest.raises(tp.SchemaError, match="messages"):
        list(tp.from_arrow(pa.table({"x": [1]})).chat_template(chat_tokenizer()))


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' }}", "{{ 'x' }}\n", "{{ 'x' }}\n\n", "{{ 'x' }} \t", "{{ 'x' }}\r\n",
        "  {% if true %}\n a\n  {% endif %}\n",
        "\n\n{% if true %}a{% endif %}", "{%- if true -%} a {%- endif -%} \n\n", "a {{ 'b' }}  \n ",
        "{% if true %}a{% endif %}\n  ", "{{ '' }}{# c #}\n", "{{ messages[0].content }}",
    ],
)  # fmt: skip
def test_text_is_what_transformers_writes_by_the_template(template: str) -> None:
    tokenizer = chat_tokenizer()
    expected = tokenizer.apply_chat_template(TALK, chat_template=template, tokenize=False)
    assert Chat(tokenizer, template).write(TALK).text == expected


def test_a_template_that_writes_the_date_is_warned_of_once(nothing_warned_of: None) -> None:
    dated = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}" + MARKED
    pipe = rows(TALK).chat_template(chat_tokenizer(), template=dated)
    with pytest.warns(
        UserWarning, match=r"today's date .*: pass template=\.\.\. with a date"
    ) as seen:
        assert pipe.state_dict() == pipe.state_dict()
    assert len(seen) == 1


class Clock:
    """In place of ``datetime``, which a template asks: what another thread does as a template is written."""

    def __init__(self, meanwhile: Callable[[], Any]) -> None:
        self.meanwhile = [meanwhile]
        self.answers: list[Any] = []

    def now(self) -> datetime:
        with ThreadPoolExecutor(1) as pool:
            while self.meanwhile:
                self.answers.append(pool.submit(self.meanwhile.pop()).result())
        return datetime(2026, 1, 1)


@pytest.mark.filterwarnings("ignore:the chat template writes today's date")
@pytest.mark.parametrize("with_mask", [False, True])
def test_threads_that_write_by_the_same_template_meanwhile_see_nothing_of_each_other(
    with_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import chat_template_utils

    timed = MARKED.replace("{% endgeneration %}", "{{ strftime_now('') }}{% endgeneration %}")
    tokenizer = chat_tokenizer()

    def theirs() -> Any:
        options: Any = {"return_dict": True, "return_assistant_tokens_mask": with_mask}
        return dict(tokenizer.apply_chat_template(LONGER, chat_template=timed, **options))

    def ours() -> list[Any]:
        return list(rows(TALK, LONGER).chat_template(tokenizer, template=timed))

    for inner, outer in ((theirs, ours), (ours, theirs)):
        expected = inner(), outer()
        clock = Clock(inner)
        monkeypatch.setattr(chat_template_utils, "datetime", clock)
        written = outer()
        monkeypatch.undo()
        assert (*clock.answers, written) == expected


def test_a_fork_in_the_middle_of_a_conversation_leaves_the_child_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.utils import chat_template_utils

    timed = MARKED.replace("{% endgeneration %}", "{{ strftime_now('') }}{% endgeneration %}")
    chat = Chat(chat_tokenizer(), timed)
    expected = chat.write(TALK)

    def in_child() -> Any:
        with Child(lambda say: say(chat.write(TALK) == expected)) as child:
            return child.hear()

    clock = Clock(in_child)
    monkeypatch.setattr(chat_template_utils, "datetime", clock)
    assert chat.write(TALK) == expected
    assert clock.answers == [True]


def test_messages_of_python_rows_need_no_common_type() -> None:
    """Keys that come late or never: as columns they would have no type in the first rows."""
    never = {"messages": [{**message, "name": None} for message in TALK]}
    late = {"messages": called({"late": 1})}
    mapped = tp.from_dataset([never] * 10_001).map(dict)
    plain = next(iter(rows(TALK).chat_template(chat_tokenizer())))
    found = next(iter(mapped.chat_template(chat_tokenizer())))
    assert {name: list(found[name]) for name in found} == {n: plain[n] for n in plain if n != "n"}
    pipe = tp.from_dataset([*[never] * 300, late]).chat_template(chat_tokenizer(), template=TOOLS)
    for packed in (pipe.pack(64), pipe.batch(7).pad_collate()):
        assert len(list(packed)) > 9
    *_, last = pipe
    assert spoken(last)[0] == '{"name": "add", "arguments": {"late": 1}}'
    batch = (
        tp.from_dataset([never] * 4).batch(4).chat_template(chat_tokenizer()).pad_collate().peek()
    )
    assert batch["labels"][3].tolist() == plain["labels"]
    with pytest.raises(tp.SchemaError, match="no column 'messages'"):
        list(tp.from_dataset([never, {"text": "x"}]).chat_template(chat_tokenizer()))
    with pytest.raises(tp.SchemaError, match="a column 'labels' already"):
        list(tp.from_dataset([{**never, "labels": 1}]).chat_template(chat_tokenizer()))
