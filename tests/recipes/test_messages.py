"""What recipes say of files that have nothing for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp

BYTES: dict[str, Any] = {"tokenizer": "bytes", "batch_size": 2}


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.csv"])
def test_an_empty_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.touch()
    with pytest.raises(
        tp.DataError, match=rf"sft: '.*{name}' has no rows and no columns; name files"
    ):
        tp.recipe("sft", str(path), **BYTES)


@pytest.mark.parametrize("recipe", ["sft", "pretrain", "chat"])
def test_an_empty_list_of_files_is_said_to_be_empty(recipe: str) -> None:
    with pytest.raises(
        tp.MissingFilesError, match=rf"{recipe} takes files.*got an empty list: name a file"
    ):
        tp.recipe(recipe, [], tokenizer="bytes")


def test_a_null_response_is_placed_and_both_ways_out_work(tmp_path: Path) -> None:
    path = tmp_path / "null.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "response": ["x", None]}), path)
    with pytest.raises(
        tp.DataError,
        match=r"'response' is null.*\.is_valid\(\)\) before, or by on_error='skip'.*row 1",
    ):
        list(tp.recipe("sft", str(path), drop_last=False, **BYTES))
    kept = tp.recipe("sft", str(path), drop_last=False, on_error="skip", **BYTES)
    assert [len(batch["input_ids"]) for batch in kept] == [1]


def test_each_ending_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "x.foo").touch()
    with pytest.raises(tp.MissingFilesError) as error:
        tp.recipe("pretrain", str(tmp_path), tokenizer="bytes").peek()
    assert str(error.value).count(".text") == 1
