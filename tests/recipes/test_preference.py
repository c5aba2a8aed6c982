"""The recipe for preferences: what its batches hold, of texts and of conversations, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

import trainpipes as tp
from chats import Message, small_tokenizer
from trainpipes_recipes import preference
from trainpipes_recipes.chats import SplitPrompt

ONE: dict[str, Any] = {"batch_size": 1, "num_shards": 1}
SMALL: dict[str, Any] = {"batch_size": 4, "buffer_size": 8, "num_shards": 2}
SIDES = ("chosen", "rejected")
END, PAD = 256, 257


def texts(count: int = 30) -> list[dict[str, str]]:
    """Made rows: sums, right and wrong."""
    return [
        {"prompt": f"{k} + {k} =" * (1 + k % 2), "chosen": f" {2 * k}é", "rejected": f" {k}" * (1 + k % 5)}
        for k in range(count)
    ]  # fmt: skip


def said(role: str, content: Any = "x", **more: Any) -> Any:
    return {"role": role, "content": content, **more}


def talks(count: int = 20) -> list[dict[str, list[Message]]]:
    """The same as conversations of one or two turns, with the prompt in a column of its own."""
    found = []
    for row in texts(count):
        asked = [said("user", "hi"), said("assistant", "yes?")] if len(row["prompt"]) > 8 else []
        asked += [said("user", row["prompt"])]
        found.append({"prompt": asked, **{side: [said("assistant", row[side])] for side in SIDES}})
    return found


def shared(rows: Any) -> list[dict[str, list[Message]]]:
    """Both conversations whole, each with the prompt at its start."""
    return [{side: row["prompt"] + row[side] for side in SIDES} for row in rows]


def share_gpt(rows: Any) -> list[dict[str, list[Message]]]:
    names = {"user": "human", "assistant": "gpt"}
    return [
        {key: [{"from": names[m["role"]], "value": m["content"]} for m in told] for key, told in row.items()}
        for row in rows
    ]  # fmt: skip


def rows_of(batch: dict[str, Tensor], decode: Callable[[Tensor], str]) -> list[Any]:
    """Of each row and side of a batch: the whole text, and what is learnt."""
    found = []
    for number in range(len(batch["chosen_labels"])):
        row = []
        for side in SIDES:
            ids, mask, labels = (
                batch[f"{side}_{name}"][number]
                for name in ("input_ids", "attention_mask", "labels")
            )
            learnt = labels != -100
            assert torch.equal(labels[learnt], ids[learnt])
            assert not (learnt & (mask == 0)).any()
            assert torch.equal(mask.sort(descending=True).values, mask)
            row += [decode(ids[mask == 1]), decode(labels[learnt])]
        found.append(tuple(row))
    return found


def plain(ids: Tensor) -> str:
    return "".join("$" if i == END else chr(i) for i in ids.tolist()).encode("latin1").decode()


def test_a_batch_of_texts_holds_what_plain_python_makes() -> None:
    order = tp.from_dataset(texts()).sharding_filter(2).shuffle(8, seed=3).batch(4)
    found = list(preference(tp.from_dataset(texts()), "bytes", seed=3, drop_last=False, **SMALL))
    for batch, rows in zip(found, order, strict=True):
        wanted = {}
        for side in SIDES:
            ids = [[*(row["prompt"] + row[side]).encode(), END] for row in rows]
            width = max(map(len, ids))
            wanted[f"{side}_input_ids"] = [own + [PAD] * (width - len(own)) for own in ids]
            wanted[f"{side}_attention_mask"] = [
                [1] * len(own) + [0] * (width - len(own)) for own in ids
            ]
            wanted[f"{side}_labels"] = [
                [-100] * len(row["prompt"].encode()) + own[len(row["prompt"].encode()) :]
                + [-100] * (width - len(own))
                for row, own in zip(rows, ids, strict=True)
            ]  # fmt: skip
        assert sorted(batch) == sorted(wanted)
        for name, values in wanted.items():
            assert batch[name].dtype == torch.int64
            assert batch[name].tolist() == values, name


def decoded(pipe: tp.Pipeline) -> list[Any]:
    return sorted(row for batch in pipe for row in rows_of(batch, small_tokenizer().decode))


def expected(row: Any) -> tuple[str, ...]:
    found: list[str] = []
    for side in SIDES:
        text = small_tokenizer().apply_chat_template(row["prompt"] + row[side], tokenize=False)
        found += [text, row[side][-1]["content"] + "<|im_end|>"]
    return tuple(found)


@pytest.mark.parametrize(("form", "layout", "template"), [
    (list, list, None), (list, share_gpt, "unmarked"), (shared, list, "unmarked"), (shared, share_gpt, None),
])  # fmt: skip
def test_conversations_learn_the_last_answer_alone(form: Any, layout: Any, template: Any) -> None:
    if template:
        template = small_tokenizer().chat_template.replace("{% generation %}", "{% if true %}")
        template = template.replace("{%- endgeneration %}", "{%- endif %}")
    rows = tp.from_dataset(layout(form(talks())))
    for options in (ONE, SMALL):
        pipe = preference(rows, small_tokenizer(), template=template, **options)
        assert decoded(pipe) == sorted(map(expected, talks()))
    padded = preference(rows, small_tokenizer(), template=template, **SMALL)
    assert small_tokenizer().pad_token_id in next(iter(padded))["rejected_input_ids"]


def test_a_prompt_as_text_beside_whole_conversations_is_not_needed() -> None:
    rows = [{"prompt": row["prompt"][-1]["content"], **both}
            for row, both in zip(talks(), shared(talks()), strict=True)]  # fmt: skip
    pipe = preference(tp.from_dataset(rows), small_tokenizer(), **ONE)
    assert decoded(pipe) == sorted(map(expected, talks()))


@pytest.mark.parametrize(("more", "learnt"), [
    ([said("assistant", "a")], "a<|im_end|>"),
    ([said("assistant", "a"), said("user", "r"), said("assistant", "b")], "a<|im_end|>b<|im_end|>"),
    ([said("assistant", "b")], "b<|im_end|>"),
])  # fmt: skip
def test_conversations_that_go_on_alike_have_a_response_each(more: Any, learnt: str) -> None:
    """Of answers that are equal, and of longer conversations on one side."""
    ask = said("user", "q")
    row = {"chosen": [ask, said("assistant", "a")], "rejected": [ask, *more]}
    ((_, good, _, bad),) = decoded(preference(tp.from_dataset([row]), small_tokenizer(), **ONE))
    assert (good, bad) == ("a<|im_end|>", learnt)


def test_a_row_that_is_too_long_loses_its_end() -> None:
    rows = tp.from_dataset([{"prompt": "abc", "chosen": "defg", "rejected": "h"}])
    (batch,) = preference(rows, "bytes", max_length=6, **ONE)
    assert rows_of(batch, plain) == [("abcde$", "de", "abch$", "h$")]
    (batch,) = preference(rows, "bytes", max_length=3, on_error="keep", **ONE)
    assert rows_of(batch, plain) == [("ab$", "", "ab$", "")]


@pytest.mark.parametrize("empty", ["", "  \n", None])
@pytest.mark.parametrize("side", SIDES)
def test_an_empty_response_is_named_or_dropped_or_kept(
    side: str, empty: str | None, tmp_path: Path
) -> None:
    rows = texts(5)
    rows[3][side] = empty  # type: ignore[assignment]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    with pytest.raises(tp.DataError, match=f"column '{side}': an empty response") as caught:
        list(preference(path, "bytes", **ONE))
    assert (caught.value.path, caught.value.row_group, caught.value.row) == (str(path), 1, 3)
    assert len(list(preference(path, "bytes", on_error="skip", **ONE))) == 4
    if empty is None:
        with pytest.raises(tp.DataError, match="null"):
            list(preference(path, "bytes", on_error="keep", **ONE))
    else:
        assert len(list(preference(path, "bytes", on_error="keep", **ONE))) == 5


ASK, ANSWER = said("user"), said("assistant")


def trio(prompt: Any, chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


BAD = {
    "empty": (trio([ASK], [said("assistant", "")], [ANSWER]),
              "column 'chosen': message 1 of role 'assistant' is an empty response"),
    "no prompt": (trio([], [ANSWER], [ANSWER]), "no message in the prompt"),
    "no response": (trio([ASK], [ANSWER], []),
                    "column 'rejected': a conversation has no message"),
    "no answer": (trio([ASK], [ANSWER], [ASK]),
                  "column 'rejected': the response does not start with a message of 'assistant'"),
    "whole": (trio([ASK], [ASK, ANSWER], [ASK, ANSWER]), "does not start with"),
    "twice": (trio([ASK, ANSWER], [ANSWER], [ANSWER]),
              "message 2 is of role 'assistant' and comes after one of 'assistant'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_conversation_is_named_or_dropped(name: str, tmp_path: Path) -> None:
    bad, message = BAD[name]
    good = trio([ASK], [ANSWER], [ANSWER])
    pq.write_table(pa.Table.from_pylist([good, good, bad]), tmp_path / "x.parquet")
    with pytest.raises(tp.DataError, match=message) as caught:
        list(preference(tmp_path, small_tokenizer(), **ONE))
    assert caught.value.row == 2
    assert len(list(preference(tmp_path, small_tokenizer(), on_error="skip", **ONE))) == 2


@pytest.mark.parametrize(("row", "options", "error", "told"), [
    ({"x": "a"}, {}, tp.SchemaError, r"names tried were chosen \+ rejected, .*chosen=..."),
    ({"chosen": "a", "rejected": "b"}, {}, tp.SchemaError, "the prompt; .*names tried were prompt, question"),
    (texts(1)[0], {"template": "{{ messages }}"}, tp.ConfigError, r"\(template\) is for conversations"),
    (texts(1)[0], {"on_error": "drop"}, tp.ConfigError, r"on_error\) must be"),
    (trio("p", 1, 2), {}, tp.SchemaError, "'chosen' holds texts or lists of messages, got 1"),
    *((trio("p", [ANSWER], [ANSWER]), options, tp.SchemaError, "column 'prompt' holds text, .*map")
        for options in ({}, {"prompt": "prompt"})),
    (trio("p", "a", [ASK]), ONE, tp.SchemaError, "column 'rejected' holds texts, got list"),
])  # fmt: skip
def test_what_does_not_fit_is_told(row: Any, options: Any, error: Any, told: str) -> None:
    def made() -> tp.Pipeline:
        return preference(tp.from_dataset([row]), "bytes", **options)

    with pytest.raises(error, match=told):
        list(made()) if options is ONE else made()


def test_a_null_in_the_first_row_does_not_tell_what_the_others_hold() -> None:
    told = [None, [ASK, ANSWER]]
    rows = tp.from_arrow(pa.table({"chosen": told, "rejected": told}))
    assert len(list(preference(rows, small_tokenizer(), on_error="skip", **ONE))) == 1


def test_texts_that_start_with_the_prompt_need_no_column_of_it() -> None:
    """As Anthropic's dialogues do: what both share, up to a whole word, is the prompt."""
    asked = "\n\nHuman: Name a fruit.\n\nAssistant:"
    whole = [
        {"chosen": f"{asked} An apple, {k}.", "rejected": f"{asked} No, {k}."} for k in range(3)
    ]
    apart = [{side: row[side][len(asked) :] for side in SIDES} | {"prompt": asked} for row in whole]
    options: dict[str, Any] = {"batch_size": 3, "num_shards": 1, "train": False}
    found, wanted = (
        next(iter(preference(tp.from_dataset(rows), "bytes", **options))) for rows in (whole, apart)
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    in_arrow = tp.from_arrow(pa.Table.from_pylist(whole))
    again = next(iter(preference(in_arrow, "bytes", **options)))
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize(("chosen", "rejected", "prompt"), [
    ("Q: a?\n\nA: be", "Q: a?\n\nA: bee", "Q: a?\n\nA:"),
    ("Q: a b", "Q: a b", "Q: a"),
    ("Q: a\n\n b", "Q: a\n\n c", "Q: a"),
    ("one", "other", ""),
    ("", "a b", ""),
    (None, "a b", ""),
])  # fmt: skip
def test_what_two_texts_share_are_whole_words(chosen: Any, rejected: Any, prompt: str) -> None:
    (row,) = tp.from_dataset([{"a": chosen, "b": rejected}]).then(SplitPrompt("a", "b", "p"))
    assert row["p"] == prompt
    assert (row["a"], row["b"]) == tuple(
        text and text[len(prompt) :] for text in (chosen, rejected)
    )


@pytest.mark.parametrize("row", [
    trio([ASK], [ANSWER], [ANSWER]), shared([trio([ASK], [ANSWER], [ANSWER])])[0],
    {"chosen": "Q: a A: b", "rejected": "Q: a A: c"}, trio("a ", "b", "c"),
])  # fmt: skip
def test_columns_that_are_left_out_are_told_of(
    row: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    more = {"system": "Be brief.", "tools": '[{"name": "f"}]'}
    preference(tp.from_dataset([row | more]), small_tokenizer(), **ONE).peek()
    said = (
        "preference: column {!r} is not used: to show it to the model, join it to the prompt or the"
    )
    assert [text[: len(said)] for text in caplog.messages] == [
        said.format(name)[: len(said)] for name in more
    ]


def test_texts_that_share_nothing_need_a_prompt() -> None:
    rows = tp.from_dataset([{"chosen": "one", "rejected": "other"}])
    with pytest.raises(tp.SchemaError, match="no column found for the prompt"):
        preference(rows, "bytes", **ONE)
