"""The lines of code that messages advise do what they say, in the case that made them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from trainpipes.sources.files.file_bytes import without


def said_by(call: Callable[[], Any]) -> str:
    with pytest.raises((tp.TrainpipesError, TypeError)) as caught:
        call()
    return str(caught.value)


def code_in(text: str, pattern: str) -> str:
    """The code in a message."""
    found = re.search(pattern, text)
    assert found, text
    return found[0]


def filtered(files: Any, text: str) -> tp.Pipeline:
    """Files without those that a message advises to leave out."""
    line = code_in(text, r"tp\.list_files\(\.\.\.\)\.filter\(lambda p: .*\)(?= before)")
    found: tp.Pipeline = eval(line.replace("...", "files", 1), {"tp": tp, "files": files})
    return found


def lines(folder: Path, count: int, bad: set[int], text: str = "no JSON {") -> Path:
    for n in range(count):
        (folder / f"{n}.jsonl").write_text(text if n in bad else f'{{"x": {n}}}\n')
    return folder


# Files


@pytest.mark.parametrize("bad", [{1}, {1, 10}, {0, 1, 2, 3}])
def test_only_files_that_cannot_be_read_are_left_out(bad, tmp_path):
    for n in range(12):
        pq.write_table(pa.table({"x": [n]}), tmp_path / f"{n}.parquet")
    for n in bad:
        (tmp_path / f"{n}.parquet").write_text("no Parquet")
    (tmp_path / "more").mkdir()
    pq.write_table(pa.table({"x": [12]}), tmp_path / "more" / "1.parquet")
    text = said_by(lambda: list(tp.read_parquet(tmp_path)))
    assert {row["x"] for row in filtered(tmp_path, text).read_parquet()} == {*range(13)} - bad


@pytest.mark.parametrize("url", [False, True])
def test_only_the_file_with_a_bad_row_is_left_out(url, tmp_path):
    files: Any = lines(tmp_path, 12, {1})
    files = f"file://{files}" if url else files
    text = said_by(lambda: list(tp.read_json(files)))
    assert [row["x"] for row in filtered(files, text).read_json()] == [0, *range(2, 12)]


def test_a_file_that_is_not_utf_8_is_left_out(tmp_path):
    (tmp_path / "1.txt").write_bytes(b"a\xff\n")
    (tmp_path / "11.txt").write_text("good\n")
    text = said_by(lambda: list(tp.read_text(tmp_path)))
    assert [row["text"] for row in filtered(tmp_path, text).read_text()] == ["good"]


def test_urls_with_secrets_are_told_apart_without_them():
    names = [
        "https://me:pw@host/a/1.jsonl?sig=s",
        "https://host/a/11.jsonl?sig=s",
        "https://host/1.jsonl",
    ]
    for bad in ([0], [0, 2]):
        text = without(*(names[n] for n in bad))
        assert "pw" not in text
        assert "=s" not in text
        keeps = eval(code_in(text, r"lambda p: .*(?=\) before)"))
        assert [keeps(name) for name in names] == [n not in bad for n in range(3)]


def test_a_file_whose_name_is_no_text_is_left_out(tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.parquet")
    try:
        Path(odd).touch()
    except OSError:
        pytest.skip("this file system has no such names")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "b.parquet")
    text = said_by(lambda: list(tp.read_parquet(tmp_path)))
    assert len(list(filtered(tmp_path, text).read_parquet())) == 1


def test_an_image_without_a_row_is_left_out(tmp_path):
    for name in ("1.png", "11.png"):
        (tmp_path / name).write_bytes(b"...")
    (tmp_path / "labels.csv").write_text("file_name,y\n11.png,1\n")
    text = said_by(lambda: list(tp.read_images(tmp_path, tmp_path / "labels.csv")))
    left = filtered(tmp_path, text.replace("'11.png'", "")).read_images(tmp_path / "labels.csv")
    assert [row["y"] for row in left] == [1]


@pytest.mark.filterwarnings("ignore:Feather V1")
def test_a_feather_file_of_old_is_written_anew(tmp_path):
    path = str(tmp_path / "a.feather")
    feather.write_feather(pa.table({"x": [1, 2]}), path, version=1)
    text = said_by(lambda: list(tp.read_arrow(path)))
    exec(
        code_in(text, r"pyarrow\.feather\.write_feather\(.*?\), path\)"),
        {"pyarrow": pa, "path": path},
    )
    assert [row["x"] for row in tp.read_arrow(path)] == [1, 2]


# Rows


@pytest.mark.parametrize("kind", ["numbers", "text"])
def test_rows_with_nulls_are_dropped(kind):
    columns: dict[str, Any] = {
        "numbers": pa.array([1, None, 3]),
        "text": pa.array(["a", None, "c"]),
    }
    rows = tp.from_arrow(pa.table({"c": columns[kind]}))

    def end(pipe: tp.Pipeline) -> tp.Pipeline:
        if kind == "text":
            return pipe.tokenize("bytes", "c")
        return pipe.batch(1).pad_collate()

    line = code_in(said_by(lambda: list(end(rows))), r"\.filter\(pc\.field\('c'\)\.is_valid\(\)\)")
    assert len(list(end(eval(f"rows{line}", {"rows": rows, "pc": pc})))) == 2


def test_a_function_filters_after_the_reader(tmp_path):
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")

    def function(row: Any) -> bool:
        return bool(row["x"] > 1)

    text = said_by(lambda: tp.read_parquet(tmp_path, filter=function))
    line = code_in(text, r"\.filter\(function\)")
    rows = eval(f"rows{line}", {"rows": tp.read_parquet(tmp_path), "function": function})
    assert list(rows) == [{"x": 2}]


def test_masked_numbers_are_filled(tmp_path):
    array = np.ma.masked_array([1, 2], mask=[True, False])
    text = said_by(lambda: tp.write_memmap(tmp_path / "a", array))
    filled = eval(code_in(text, r"array\.filled\(0\)"), {"array": array})
    data = tp.write_memmap(tmp_path / "a", filled)
    assert data is not None
    assert [int(row[0]) for row in data] == [0, 2]


def test_an_iterator_is_made_anew_each_epoch():
    items = [1, 2]
    text = said_by(lambda: tp.from_iterable(iter(items)))  # type: ignore[arg-type]
    factory = eval(code_in(text, r"lambda: \.\.\.").replace("...", "iter(items)"), {"items": items})
    rows = tp.from_iterable(factory)
    assert [list(rows), list(rows)] == [[1, 2], [1, 2]]


def test_a_tokenizer_with_parts_in_python_is_given_as_a_function():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a"))

    class Spaces:
        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda _, part: [part])

    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(Spaces())
    rows = tp.from_dataset([{"text": "b"}])
    text = said_by(lambda: list(rows.tokenize(tokenizer)))
    function = eval(code_in(text, r"lambda texts: .*\]"), {"tokenizer": tokenizer})
    assert [list(row["input_ids"]) for row in rows.tokenize(function)] == [[1]]


def test_labels_are_counted_as_a_message_says():
    pipe = tp.from_dataset([{"y": "cat"}, {"y": "dog"}])
    text = said_by(lambda: pipe.encode_labels("y", classes="cat"))  # type: ignore[arg-type]
    found = eval(code_in(text, r"pipe\.stats\(0, labels='y'\)"), {"pipe": pipe})
    assert dict(found.labels["y"]) == {"cat": 1, "dog": 1}


# Names of others


@pytest.mark.parametrize("name", ["from_dict", "from_pandas"])
def test_what_is_written_in_place_of_other_names(name):
    pandas = pytest.importorskip("pandas")
    given = {"from_dict": {"x": [1]}, "from_pandas": pandas.DataFrame({"x": [1]})}[name]
    with pytest.raises(AttributeError) as caught:
        getattr(tp, name)
    line = code_in(str(caught.value), r"tp\.from_arrow\(.*\.\.\.\)\)").replace("...", "given")
    assert list(eval(line, {"tp": tp, "pa": pa, "given": given})) == [{"x": 1}]


def test_a_column_becomes_a_table_of_one():
    data = pa.chunked_array([[1, 2]])
    for make in (tp.from_arrow, tp.from_dataset):
        line = code_in(said_by(lambda make=make: make(data)), r"from_arrow\(pa\.table\(.*?\)\)")
        assert list(eval(f"tp.{line}", {"tp": tp, "pa": pa, "data": data})) == [{"x": 1}, {"x": 2}]


def test_a_queue_takes_a_loader():
    pipe = tp.from_dataset([1])
    text = said_by(lambda: tp.WorkQueue(pipe))  # type: ignore[arg-type]
    queue = eval(f"tp.{code_in(text, 'WorkQueue.tp.Loader.pipe..')}", {"tp": tp, "pipe": pipe})
    assert [work.item for work in (queue.get(),)] == [1]


def test_a_config_that_imports_is_loaded_by_those_who_trust_it(tmp_path):
    path = tmp_path / "pipe.yaml"
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    rows = tp.read_json(str(tmp_path / "a.jsonl")).map(json.dumps)
    rows.to_yaml(path)
    text = said_by(lambda: tp.load(path))
    line = code_in(text, r"tp\.load\(path, allow_imports=True\)")
    assert list(eval(line, {"tp": tp, "path": path})) == ['{"x": 1}']
