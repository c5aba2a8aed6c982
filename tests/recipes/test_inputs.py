"""What recipes take: files of any format or a pipeline of rows, and the columns that they find."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from every_stage import SavedRows, chat_tokenizer
from resuming import check_resume
from trainpipes.prepare import tokenize
from trainpipes.testing import digest
from trainpipes_recipes import preference, pretrain, prompts, seq2seq, sft
from trainpipes_recipes.inputs import PAIRS, Input, with_context

ROWS = pa.table(
    {
        "question": [f"{k} + {k}?" for k in range(40)],
        "answer": [f"= {2 * k}" for k in range(40)],
        "id": list(range(40)),
    }
)


def write_json(table: pa.Table, path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


WRITERS: dict[str, Callable[[pa.Table, Path], Any]] = {
    ".parquet": pq.write_table,
    ".jsonl": write_json,
    ".csv": pa.csv.write_csv,
    ".arrow": lambda table, path: pa.feather.write_feather(table, path, compression="lz4"),
}
PIPELINES: dict[str, Callable[[], tp.Pipeline]] = {
    "from_arrow": lambda: tp.from_arrow(ROWS),
    "from_dataset": lambda: tp.from_dataset(ROWS.to_pylist()),
    "from_hf": lambda: tp.from_hf(SavedRows(ROWS)),
    "from_iterable": lambda: tp.from_iterable(ROWS.to_pylist()),
    "filter": lambda: tp.from_arrow(ROWS).filter(lambda row: row["id"] % 4 != 0),
    "mix": lambda: tp.mix(
        {"a": tp.from_arrow(ROWS.slice(0, 20)), "b": tp.from_arrow(ROWS.slice(20))},
        weights={"a": 1, "b": 2},
    ),
}  # fmt: skip
OPTIONS: dict[str, Any] = {"batch_size": 4, "buffer_size": 16, "num_shards": 2}


@pytest.mark.parametrize("ending", WRITERS)
@pytest.mark.parametrize("form", ["file", "folder", "glob", "list"])
def test_files_are_read_as_their_names_say(ending: str, form: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{ending}"
    WRITERS[ending](ROWS, path)
    given = {"file": path, "folder": tmp_path, "glob": f"{tmp_path}/row*", "list": [path]}[form]
    found = Input("mine", given).rows(["question", "answer"])
    assert list(found) == ROWS.select(["question", "answer"]).to_pylist()
    batches = [digest(batch) for batch in sft(given, "bytes", **OPTIONS)]
    same = sft(tp.from_arrow(ROWS).select("question", "answer"), "bytes", **OPTIONS)
    assert len(batches) == len(list(same)) == 10


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst"])
def test_compressed_files_count_by_the_name_before_that(ending: str, tmp_path: Path) -> None:
    tp.from_arrow(ROWS).write_json(tmp_path, compression="gzip" if "gz" in ending else "zstd")
    assert Input("mine", tmp_path).columns == ["question", "answer", "id"]


@pytest.mark.parametrize("name", PIPELINES)
def test_any_pipeline_of_rows_stands_in_the_place_of_files(name: str) -> None:
    check_resume(lambda: sft(PIPELINES[name](), "bytes", **OPTIONS), every=7, epochs=1, processes=0)


def test_memory_mapped_rows_and_text_files_are_known(tmp_path: Path) -> None:
    tp.write_memmap(tmp_path / "mm", ({"x": torch.tensor([k])} for k in range(5)))
    assert Input("mine", tmp_path / "mm").columns == ["x"]
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert list(Input("mine", tmp_path / "a.txt").rows(["text"])) == [
        {"text": "one"},
        {"text": "two"},
    ]


@pytest.mark.parametrize(("columns", "found"), [
    (["prompt", "response", "question", "answer"], ("prompt", "response")),
    (["answer", "question"], ("question", "answer")),
    (["instruction", "input", "output"], ("instruction", "output")),
    (["prompt", "completion"], ("prompt", "completion")),
])  # fmt: skip
def test_common_names_are_found_and_told(
    columns: list[str], found: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    rows = tp.from_arrow(pa.table({name: ["x"] for name in columns}))
    with caplog.at_level(logging.INFO, "trainpipes"):
        assert Input("sft", rows).find({"prompt": None, "response": None}, PAIRS) == found
    assert caplog.messages == [
        f"sft takes prompt from column '{found[0]}', response from column '{found[1]}'"
    ]


def test_a_column_that_is_given_is_taken_and_the_other_one_found() -> None:
    given = Input("sft", tp.from_arrow(ROWS))
    assert given.find({"prompt": "id", "response": None}, PAIRS) == ("id", "answer")
    assert given.find({"prompt": None, "response": "id"}, PAIRS) == ("question", "id")
    both = tp.from_dataset([dict.fromkeys(("prompt", "response", "instruction", "output"), "x")])
    found = Input("sft", both).find({"prompt": None, "response": "output"}, PAIRS)
    assert found == ("instruction", "output")


def test_the_context_of_alpacas_rows_is_joined_where_there_is_one() -> None:
    rows = {
        "instruction": ["Add:", "Sing!", "Hum!"],
        "input": ["1 + 1", "", None],
        "output": ["2", "la", "mm"],
    }
    data = tp.from_arrow(pa.table(rows))
    joined = with_context(data, "instruction", "input")
    assert [row["instruction"] for row in joined] == ["Add:\n\n1 + 1", "Sing!", "Hum!"]
    views = {name: pa.array(texts, pa.string_view()) for name, texts in rows.items()}
    coded = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), views.pop("instruction"))
    polars = tp.from_arrow(pa.table({"instruction": coded, **views}))
    assert list(with_context(polars, "instruction", "input")) == list(joined)
    pipe = sft(data, "bytes", batch_size=1, drop_last=False, num_shards=1)
    texts = sorted(text for batch in pipe for text in texts_of(batch["input_ids"]))
    assert texts == ["Add:\n\n1 + 12", "Hum!mm", "Sing!la"]
    assert pipe == sft(data, "bytes", batch_size=1, drop_last=False, num_shards=1)


@pytest.mark.parametrize("names", [("input", "output"), ("context", "response")])
def test_every_recipe_gives_the_same_prompt_of_alpacas_and_dollys_rows(
    names: tuple[str, str],
) -> None:
    rows = [{"instruction": "Add:", names[0]: "1 + 1", names[1]: "2"}] * 4
    pairs = [{"chosen": "2", "rejected": "3", **row} for row in rows]
    options: dict[str, Any] = {"batch_size": 1, "num_shards": 1}
    for context, prompt in [(None, "Add:\n\n1 + 1"), ("", "Add:")]:
        given: dict[str, Any] = {"context": context, **options}
        data = tp.from_dataset(rows)
        for pipe in (sft(data, "bytes", **given), sft(data, "bytes", train=False, **given)):
            assert texts_of(pipe.peek()["input_ids"]) == [prompt + "2"]
        assert texts_of(seq2seq(data, "bytes", **given).peek()["input_ids"]) == [prompt]
        (row,) = prompts(data, **given).peek()
        assert row == {"prompt": prompt, names[0]: "1 + 1", names[1]: "2"}
    pipe = preference(tp.from_dataset(pairs), "bytes", **options)
    assert texts_of(pipe.peek()["chosen_input_ids"]) == ["Add:\n\n1 + 12"]


def test_a_prompts_context_is_text() -> None:
    rows = tp.from_dataset([{"instruction": "Add:", "input": n} for n in (1, 2)])
    with pytest.raises(
        tp.SchemaError, match="'input' goes on with prompts, and both are text, got 1 after"
    ):
        prompts(rows, num_shards=1, batch_size=1).peek()
    assert prompts(rows, context="", num_shards=1, batch_size=1).peek()[0]["input"] in (1, 2)
    rows = tp.from_dataset(
        [{"instruction": None, "input": "a"}, {"instruction": "b", "input": None}]
    )
    found = prompts(rows, on_error="skip", num_shards=1, batch_size=1)
    assert [row["prompt"] for (row,) in found] == ["b"]


def texts_of(ids: torch.Tensor) -> list[str]:
    return [bytes(i for i in row.tolist() if i < 256).decode() for row in ids]


def test_context_that_is_null_everywhere_or_no_text() -> None:
    rows = {"instruction": ["a", "b"], "output": ["c", "d"]}
    none = tp.from_arrow(pa.table({**rows, "input": pa.nulls(2)}))
    assert len(list(sft(none, "bytes", batch_size=2, num_shards=1))) == 1
    numbers = tp.from_arrow(pa.table({**rows, "input": [1, 2]}))
    with pytest.raises(tp.SchemaError, match="column 'input' holds int64, and prompt and context"):
        list(sft(numbers, "bytes", batch_size=2, num_shards=1))


def test_pretrain_ends_documents_as_it_is_told() -> None:
    for eos, end, count in [(True, 256, 40), (7, 7, 40), (False, 256, 0)]:
        pipe = pretrain(
            tp.from_arrow(ROWS), "bytes", text="question", add_eos=eos, max_length=16, batch_size=2,
            epochs=1, num_shards=1,
        )  # fmt: skip
        ids = torch.cat([batch["input_ids"].flatten() for batch in pipe])
        assert int((ids == end).sum()) == count


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (ROWS, tp.ConfigError, "takes files .* or a pipeline of rows, got Table: .*from_arrow"),
        (tp.list_files("x").shuffle(2), tp.ConfigError, r"one of paths: .*\.read_parquet\(\)"),
        (tp.from_arrow(ROWS).batch(2), tp.ConfigError, "got one that batches: leave out its batch"),
        (tp.from_arrow(ROWS).select("id"), tp.SchemaError,
         r"no column found for the prompt; the columns are \['id'\], and names tried were prompt \+ "
         r"response, .*: name one by prompt=..., response=..."),
        ("nowhere", tp.MissingFilesError, "no file or folder 'nowhere'"),
    ],
)  # fmt: skip
def test_what_is_no_input_is_refused(data: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        sft(data, "bytes")


@pytest.mark.parametrize("name", ["sft", "pretrain", "chat"])
def test_an_empty_list_of_files_is_said_to_be_empty(name: str) -> None:
    said = rf"{name} takes files.*got an empty list: name a file"
    with pytest.raises(tp.MissingFilesError, match=said):
        tp.recipe(name, [], tokenizer="bytes")


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.csv"])
def test_an_empty_file_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    said = rf"sft: '.*{name}' has no rows and no columns; name files"
    with pytest.raises(tp.DataError, match=said):
        sft(str(tmp_path / name), "bytes")


def test_a_null_response_is_placed_and_both_ways_out_work(tmp_path: Path) -> None:
    path = tmp_path / "null.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "response": ["x", None]}), path)
    said = r"'response' is null.*\.is_valid\(\)\) before, or by on_error='skip'.*row 1"
    with pytest.raises(tp.DataError, match=said):
        list(sft(path, "bytes", batch_size=2, drop_last=False))
    kept = sft(path, "bytes", batch_size=2, drop_last=False, on_error="skip")
    assert [len(batch["input_ids"]) for batch in kept] == [1]


@pytest.mark.parametrize("given", ["", 3, ["a"]])
def test_the_name_of_a_column_is_a_text(given: Any) -> None:
    rows = tp.from_dataset([{"prompt": "a", "response": "b"}])
    with pytest.raises(tp.ConfigError, match=r"sft\(prompt\) must be the name of a column, got"):
        sft(rows, "bytes", prompt=given)


def test_the_reader_of_most_files_is_named(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.txt"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(tp.ConfigError, match=r"or a pipeline, such as trainpipes.read_json\("):
        sft(tmp_path, "bytes")


def test_a_file_of_a_format_that_no_reader_knows_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.h5").touch()
    with pytest.raises(tp.ConfigError, match=r"a\.h5 for none of these: .*read_files\(fn\)"):
        sft(tmp_path / "a.h5", "bytes")
    (tmp_path / "a.csv").write_text("text\n1")
    files = [tmp_path / "a.h5", tmp_path / "a.csv"]
    with pytest.raises(
        tp.ConfigError, match=r"a\.h5 for none of these, .*a\.csv for read_csv: name"
    ):
        sft(files, "bytes")


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("3,title,and text\n", "first line is a row, and no header, give .* column_names="),
        ("LJ001|in being\n", r"'\|' parts the cells, give .*delimiter='\|'"),
        ("1\t2\n", r"'\\t' parts the cells, give .*delimiter='\\t'"),
        ("stars,words\n", "name one by label=...$"),
    ],
)
def test_names_of_columns_that_are_a_row_are_told_of(text: str, way: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text * 3)
    with pytest.raises(tp.SchemaError, match=way):
        tp.recipe("classification", tmp_path / "a.csv", "bytes")


@pytest.mark.parametrize("column", ["system", "system_prompt", "history"])
def test_what_comes_before_a_prompt_and_is_not_used_is_told_of(
    column: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = {"question": "2 + 2?", "response": " 4", column: "Be brief."}
    said = f"column {column!r} is not used: to show it to the model, join it to the prompt"
    sft(tp.from_dataset([{**pair, column: None}, pair]), "bytes")
    assert [text.partition(": ")[2][: len(said)] for text in caplog.messages] == [said]
    rows = tp.from_dataset([{**pair, "chosen": " 4", "rejected": " 5"}])
    tp.recipe("preference", rows, "bytes", batch_size=1)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tp.recipe("chat", tp.from_dataset([{"messages": turns, column: "x"}]), chat_tokenizer())
    assert [text.partition(":")[0] for text in caplog.messages] == ["sft", "preference", "chat"]
    for value in (None, ""):
        sft(tp.from_dataset([{**pair, column: value}]), "bytes")
    sft(tp.from_dataset([pair]), "bytes", prompt=column)
    sft(tp.from_dataset([pair]), "bytes", context=column)
    assert len(caplog.messages) == 3


def test_a_context_beside_a_question_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    squad = tp.from_dataset([{"question": "Where?", "context": "In Oslo.", "answer": " Oslo"}])
    for recipe in ("sft", "seq2seq"):
        tp.recipe(recipe, squad, "bytes")
    way = "is not used: to add it to the prompt, give context='context'; or context=\"\""
    assert caplog.messages == [f"{recipe}: column 'context' {way}" for recipe in ("sft", "seq2seq")]
    (batch,) = sft(squad, "bytes", context="context", batch_size=1, drop_last=False)
    assert "In Oslo." in bytes(batch["input_ids"][0].tolist()[:-1]).decode()
    sft(squad, "bytes", context="")
    sft(squad.rename({"question": "instruction", "answer": "output"}), "bytes")
    assert len(caplog.messages) == 2


def test_options_of_an_order_that_the_pipeline_has_already_are_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = tp.from_dataset([{"prompt": "a", "response": " b"}] * 20)
    sft(rows, "bytes", num_shards=8, seed=7, buffer_size=500)
    sft(rows.sharding_filter(4).shuffle(10, seed=1), "bytes")
    sft(rows.shuffle(10, seed=1), "bytes", num_shards=8)
    assert not caplog.messages
    sft(rows.sharding_filter(4).shuffle(10, seed=1), "bytes", num_shards=8, seed=7, buffer_size=500)
    tp.recipe("sft", tp.mix({"a": rows}), "bytes", seed=7)
    options = ["num_shards=8", "buffer_size=500", "seed=7", "seed=7"]
    assert [text.partition(")")[0] for text in caplog.messages] == [f"sft({o}" for o in options]
    assert caplog.messages[-1].endswith("has mix() already; set it there, or leave the stage out")


def test_a_pipeline_whose_columns_are_named_is_not_read_to_build_a_recipe(tmp_path: Path) -> None:
    later = tp.read_json(str(tmp_path / "later.jsonl"))
    sft(later, "bytes", prompt="p", response="r")
    tp.recipe("chat", later, chat_tokenizer(), messages="m")


def test_a_response_that_runs_into_its_prompt_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = {"instruction": "Add 1.", "output": "2", "rejected": "3"}
    sft(tp.from_dataset([pair]), "bytes")
    way = r'a space between: put one, or "\n", before each response by map()'
    assert caplog.messages == [f"sft: 'Add 1.' and '2' become one text, without {way}"]
    rows = tp.from_dataset([{**pair, "chosen": "2"}])
    tp.recipe("preference", rows, "bytes", batch_size=1)
    assert len(caplog.messages) == 2
    for name, text in [("output", "\n2"), ("instruction", "Add 1.\n"), ("instruction", "<|a|>")]:
        sft(tp.from_dataset([{**pair, name: text}]), "bytes")
    sft(tp.from_dataset([pair]), "bytes", prompt="instruction", response="output", context="")
    assert len(caplog.messages) == 2


def test_a_label_that_calls_responses_bad_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": "2 + 2?", "completion": " 5", "label": False}
    sft(tp.from_dataset([row]), "bytes")
    way = "to leave out rows of False, put filter() before"
    assert caplog.messages == [f"sft: column 'label' is not used: {way}"]
    sft(tp.from_dataset([{**row, "label": 3}]), "bytes")
    assert len(caplog.messages) == 1


def test_each_ending_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "x.foo").touch()
    with pytest.raises(tp.MissingFilesError) as error:
        pretrain(tmp_path, "bytes").peek()
    assert str(error.value).count(".text") == 1


def test_files_of_several_formats_are_joined_as_the_message_says(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b.csv").write_text("text\ntwo\n")
    with pytest.raises(tp.ConfigError, match="of one format") as caught:
        tp.recipe("pretrain", str(tmp_path), "bytes")
    call = re.search(r"trainpipes\.concat\((.*)\)$", str(caught.value))
    assert call is not None
    assert call[1] == "trainpipes.read_csv(...), trainpipes.read_json(...)"
    joined = eval(call[0].replace("...", "path"), {"trainpipes": tp, "path": str(tmp_path)})
    assert [row["text"] for row in joined] == ["two", "one"]
    tp.recipe("pretrain", joined, "bytes", max_length=8, batch_size=1).peek()


def test_an_option_that_names_a_column_of_files_made_ahead_is_left_out(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rows = tp.from_arrow(pa.table({"messages": [talk] * 4, "tools": ['[{"name": "f"}]'] * 4}))
    rows.write_parquet(tmp_path / "texts")
    options: dict[str, Any] = {"tokenizer": chat_tokenizer(), "batch_size": 1}
    texts = tp.recipe("chat", str(tmp_path / "texts"), tools="tools", **options)
    tokenize(texts, str(tmp_path / "ids"))
    for named in ({"tools": "tools"}, {"messages": "messages"}):
        with pytest.raises(
            tp.SchemaError, match=r"made ahead, and no column '\w+': leave out the option"
        ):
            tp.recipe("chat", str(tmp_path / "ids"), **named, **options)
    tp.recipe("chat", str(tmp_path / "ids"), **options).peek()


@pytest.mark.parametrize("made", [False, True])
def test_rows_held_out_by_a_count_do_not_come_to_train(made: bool) -> None:
    texts = tp.from_arrow(pa.table({"text": [chr(97 + n) * 3 for n in range(12)]}))
    ids = texts.skip(4).tokenize("bytes", on_error="skip")
    if made:
        rows = tp.from_arrow(pa.table({"input_ids": [[97 + n] * 3 for n in range(12)]}))
        ids = rows.skip(4).tokenized_by("bytes", on_error="skip")
    options: dict[str, Any] = {"max_length": 3, "batch_size": 1, "epochs": 1, "num_shards": 1}
    pipe = tp.recipe("tokens", ids, **options)
    seen = sorted(batch["input_ids"][0, 0].item() for batch in pipe)
    assert seen == [*range(101, 109)]
    late = tp.Pipeline([stage for stage in ids.stages if stage.name != "skip"]).skip(4)
    with pytest.raises(tp.ConfigError, match=r"put take.. and skip.. directly after the source"):
        tp.recipe("tokens", late, **options).peek()
