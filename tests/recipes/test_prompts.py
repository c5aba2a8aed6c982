"""The recipe ``prompts``: what rows hold stays, groups are whole, long prompts are found."""

from __future__ import annotations

import copy
import datetime
import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import trainpipes as tp
from chats import small_tokenizer
from trainpipes_recipes.prompts import prompts

WHEN = datetime.datetime(2026, 1, 2)
ROWS = [
    {"question": f"{n} + {n}" * (1 + n % 3), "answer": n, "when": WHEN, "tests": [{"in": "a"}] * (n % 3)}
    for n in range(20)
]  # fmt: skip
SMALL: dict[str, Any] = {"num_shards": 1, "train": False}
ASKED = [{"role": "user", "content": "a"}]


def test_columns_stay_python_values_and_groups_are_whole() -> None:
    rows = tp.from_arrow(pa.Table.from_pylist(ROWS))
    pipe = prompts(rows, batch_size=6, num_generations=3, num_shards=4, seed=1)
    assert len(pipe) == 10
    seen = []
    for batch in pipe:
        assert [row["answer"] for row in batch[::3]] == [row["answer"] for row in batch[2::3]]
        assert batch[0] is not batch[1]
        assert batch[0]["tests"] is not batch[1]["tests"]
        for row in batch:
            wanted = dict(ROWS[row["answer"]])
            assert row == {"prompt": wanted.pop("question"), **wanted}
        seen += [row["answer"] for row in batch[::3]]
    assert sorted(seen) == [*range(20)]


def test_ids_are_padded_on_the_left() -> None:
    batch = next(iter(prompts(tp.from_dataset(ROWS), "bytes", batch_size=4, **SMALL)))
    assert batch["input_ids"].shape == (4, 15)
    for ids, mask, text in zip(
        batch["input_ids"], batch["attention_mask"], batch["prompt"], strict=True
    ):
        assert bytes(ids[mask == 1].tolist()).decode() == text
        assert mask.tolist() == sorted(mask.tolist())
    assert batch["when"] == [WHEN] * 4


@pytest.mark.parametrize("turns", [1, 3])
def test_messages_get_the_template_up_to_the_response(turns: int) -> None:
    tokenizer = small_tokenizer()
    said = [{"role": "user", "content": "hm"}, {"role": "assistant", "content": "2"}] * 2
    rows = tp.from_dataset([{"messages": said[:turns], "n": n} for n in range(3)])
    wanted = tokenizer.apply_chat_template(said[:turns], add_generation_prompt=True, tokenize=False)
    texts = list(prompts(rows, tokenizer, output="text", batch_size=None, **SMALL))
    assert [row["prompt"] for row in texts] == [wanted] * 3
    ids = list(prompts(rows, tokenizer, batch_size=None, **SMALL))
    own = tokenizer(wanted, add_special_tokens=False)["input_ids"]
    assert [list(row["input_ids"]) for row in ids] == [own] * 3
    plain = list(prompts(rows, batch_size=None, **SMALL))
    assert [row["prompt"] for row in plain] == [said[:turns]] * 3


#: Writes tools and calls as JSON, and a message's words.
CALLS = """\
{% if tools %}{{ tools | tojson }}{% endif %}
{% for m in messages %}
{{ '<' + m['role'] + '>' }}{{ m['content'] }}
{%- if 'tool_calls' in m %}
{% for call in m['tool_calls'] %}{{ call.function.arguments | tojson }}{% endfor %}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}
"""


def text_of(row: dict[str, Any], tokenizer: Any, **options: Any) -> str:
    rows = tp.from_arrow(pa.Table.from_pylist([row]))
    (said,) = prompts(rows, tokenizer, output="text", batch_size=None, **SMALL, **options)
    return str(said["prompt"])


def test_tools_and_calls_are_those_of_the_recipe_chat() -> None:
    tools = [
        {"name": "f", "parameters": {"a": {"type": "int"}}},
        {"name": "g", "parameters": {"b": {"type": "str"}}},
    ]
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "hm", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_calls": None},
    ]
    tokenizer = small_tokenizer(CALLS)
    for given in (tools, json.dumps(tools)):
        row = {"messages": talk, "tools": given}
        wanted = tp.recipe(
            "chat", tp.from_arrow(pa.Table.from_pylist([{**row, "messages": [*talk, {
                "role": "assistant", "content": "seven", "tool_calls": None}]}])),
            tokenizer, tools="tools", batch_size=1, num_shards=1, train=False,
        )  # fmt: skip
        text = tokenizer.decode(next(iter(wanted))["input_ids"][0])
        prompt = text_of(row, tokenizer, tools="tools")
        assert text.startswith(prompt)
        assert '{"a": 1}' in prompt
        assert "null" not in prompt
    as_text = text_of(row, tokenizer, tools="tools", parse_arguments=False)
    assert json.dumps('{"a": 1}') in as_text
    with pytest.raises(tp.SchemaError, match="no column 'tool'"):
        text_of(row, tokenizer, tools="tool")
    with pytest.raises(
        tp.ConfigError, match=r"prompts\(tools\) must be left out where prompts are"
    ):
        text_of({"prompt": "a", "tools": "[]"}, tokenizer, tools="tools")


def test_of_named_templates_that_for_tools_is_taken_where_there_are_some() -> None:
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": CALLS}
    row = {"messages": [{"role": "user", "content": "hm"}], "tools": '[{"name": "f"}]'}
    assert text_of(row, tokenizer, tools="tools").strip().startswith('[{"name": "f"}]')
    assert text_of({**row, "tools": "[]"}, tokenizer, tools="tools").startswith("<|im_start|>")
    assert text_of(row, tokenizer).startswith("<|im_start|>")


@pytest.mark.parametrize("lacking", [0, 1])
def test_rows_with_other_keys_are_named(lacking: int) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "q", "answer": 1}, {"prompt": "r", "answer": 2}]
    del rows[lacking]["answer"]
    with pytest.raises(tp.SchemaError, match=r"a row with the keys \[.*\] where the first of its"):
        list(prompts(tp.from_dataset(rows), "bytes", batch_size=2, **SMALL))


def test_the_answer_of_a_conversation_is_no_part_of_its_prompt() -> None:
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    tokenizer = small_tokenizer()
    wanted = tokenizer.apply_chat_template(talk[:1], add_generation_prompt=True, tokenize=False)
    assert text_of({"messages": talk}, tokenizer) == wanted
    plain = prompts(tp.from_dataset([{"conversations": talk}]), batch_size=None, **SMALL)
    assert [row["prompt"] for row in plain] == [talk[:1]]
    with pytest.raises(tp.DataError, match="prompt ends with a message of 'assistant'"):
        text_of({"prompt": talk}, tokenizer)  # the start of an answer?
    assert "4" in text_of({"prompt": talk}, tokenizer, on_error="keep")
    with pytest.raises(tp.DataError, match="the prompt has no message"):
        text_of({"messages": talk[1:]}, tokenizer)


def test_columns_of_names_that_the_recipe_gives_are_refused() -> None:
    rows = tp.from_dataset([{"prompt": "abc"[:n], "attention_mask": "mine"} for n in (3, 1)])
    with pytest.raises(tp.SchemaError, match=r"column 'attention_mask' already; rename\(\) it"):
        list(prompts(rows, "bytes", batch_size=2, **SMALL))
    asked = tp.from_dataset([{"prompt": "Be brief.", "question": "1 + 1?", "answer": 2}])
    with pytest.raises(tp.SchemaError, match=r"have a column 'prompt' already; rename\(\) it"):
        prompts(asked, prompt="question", **SMALL)
    (batch,) = prompts(asked.drop_columns("prompt"), batch_size=1, **SMALL)
    assert batch == [{"prompt": "1 + 1?", "answer": 2}]


def test_long_and_empty_prompts(tmp_path: Path) -> None:
    rows = tp.from_dataset([{"prompt": "a" * n, "n": n} for n in (3, 0, 9, 4)])
    make: Any = lambda **o: list(prompts(rows, "bytes", batch_size=None, **SMALL | o))  # noqa: E731
    with pytest.raises(tp.DataError, match="an empty prompt"):
        make(max_length=5)
    assert [row["n"] for row in make(max_length=5, on_error="skip")] == [3, 4]
    quarantine = tp.Quarantine(tmp_path / "bad")
    assert [row["n"] for row in make(max_length=5, on_error=quarantine)] == [3, 4]
    told = "".join(path.read_text() for path in (tmp_path / "bad").iterdir())
    assert "an empty prompt" in told
    assert "a prompt of 9 tokens, and max_length is 5" in told
    kept = make(max_length=5, on_error="keep")
    assert [len(row["input_ids"]) for row in kept] == [3, 0, 5, 4]
    full = tp.from_dataset([{"prompt": "abcdefg"}])
    cut = list(prompts(full, "bytes", batch_size=None, max_length=3, on_error="keep", **SMALL))
    assert bytes(cut[0]["input_ids"].tolist()) == b"efg"
    with pytest.raises(tp.DataError, match="a prompt of 7 tokens, and max_length is 3"):
        list(prompts(full, "bytes", batch_size=None, max_length=3, **SMALL))


@pytest.mark.parametrize("tokenizer", [None, "bytes"])
def test_rows_beside_those_that_are_left_out_stay_as_they_are(tokenizer: Any) -> None:
    data = [
        {"prompt": "a", "answer": 4, "set": {"x": 1}},
        {"prompt": "", "answer": "none", "set": None},
        {"prompt": "b", "answer": 2.5, "set": {"y": (1, 2)}},
    ]
    rows = tp.from_dataset(data)
    options = SMALL | ({} if tokenizer is None else {"max_length": 5})
    skipped = list(prompts(rows, tokenizer, batch_size=None, on_error="skip", **options))
    assert [{name: row[name] for name in data[0]} for row in skipped] == [data[0], data[2]]
    assert [type(row["answer"]) for row in skipped] == [int, float]
    loader = tp.Loader(prompts(rows, tokenizer, batch_size=None, on_error="skip", **options))
    next(iter(loader))
    loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert [row["answer"] for row in loader] == [2.5]


def test_states_know_what_is_left_out_as_a_filter() -> None:
    rows = tp.from_dataset([{"prompt": "a"}])
    *_, last = prompts(rows, batch_size=None, on_error="skip", **SMALL).stages
    assert last.identity() == rows.filter(pc.field("prompt").is_valid()).stages[-1].identity()


@pytest.mark.parametrize(("options", "said"), [
    ({"num_generations": 3}, "multiple of num_generations=3, so that no prompt"),
    ({"num_generations": 0}, "num_generations"),
    ({"num_generations": 2, "batch_size": None}, "must be 1 for single rows"),
    ({"max_length": 5}, "must be None without a tokenizer"),
    ({"output": "text", "on_error": "keep", "max_length": 5, "tokenizer": "bytes"}, "cuts long prompts"),
    ({"template": "{{ messages }}", "tokenizer": "bytes"}, "left out where prompts are text"),
    ({"output": "tensor"}, 'must be "ids" or "text"'),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(tp.ConfigError, match=said):
        prompts(tp.from_dataset(ROWS), **options)


@pytest.mark.parametrize("on_error", [None, "skip"])
@pytest.mark.parametrize(
    ("data", "options", "lacking"),
    [
        ([{"prompt": "a", "context": "b"}, {"prompt": "c"}], {"context": "context"}, "context"),
        ([{"prompt": "c"}, {"other": "a"}], {}, "prompt"),
        ([{"prompt": ASKED, "tools": "[]"}, {"prompt": ASKED}], {"tools": "tools"}, "tools"),
    ],
)  # fmt: skip
def test_a_key_that_a_row_lacks_is_named(
    data: list[Any], options: dict[str, Any], lacking: str, on_error: Any
) -> None:
    tokenizer = small_tokenizer() if "tools" in options else None
    pipe = prompts(
        tp.from_dataset(data), tokenizer, batch_size=1, on_error=on_error, **options, **SMALL
    )
    with pytest.raises(tp.SchemaError, match=f"there is no column '{lacking}'; there are"):
        list(pipe)


@pytest.mark.parametrize(
    ("bad", "options"),
    [
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, {}),
        ({"prompt": ASKED, "tools": "{no JSON"}, {"tools": "tools"}),
    ],
)
def test_rows_that_cannot_be_read_are_left_out(bad: dict[str, Any], options: Any) -> None:
    rows = tp.from_dataset([{"prompt": ASKED, "tools": "[]"}, {"tools": "[]", **bad}])
    make = partial(prompts, rows, small_tokenizer(), batch_size=None, **options, **SMALL)
    with pytest.raises(tp.DataError) as caught:
        list(make())
    assert caught.value.row == 1
    assert len(list(make(on_error="skip"))) == 1


@pytest.mark.parametrize("tokenizer", [None, "bytes"])
@pytest.mark.parametrize("prompt", ["a", ASKED])
def test_a_null_is_no_prompt_to_keep(prompt: Any, tokenizer: Any) -> None:
    rows = tp.from_dataset([{"prompt": prompt}, {"prompt": None}])
    tokenizer = small_tokenizer() if tokenizer and prompt is ASKED else tokenizer
    with pytest.raises(tp.DataError, match="'prompt' is null, which is no prompt") as caught:
        list(prompts(rows, tokenizer, batch_size=None, on_error="keep", **SMALL))
    assert caught.value.row == 1
