"""How long rows are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from inspection.tables import parquet
from trainpipes.look.inspection import inspect_files
from trainpipes.look.inspection.as_text import bar


def test_tokens_are_those_that_tokenize_makes(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    texts = ["é" * int(n) for n in draw.integers(0, 3000, 500)]
    path = parquet(tmp_path / "a.parquet", {"text": texts})
    (found,) = inspect_files(path, tokenizer="bytes").lengths
    made = [len(row["input_ids"]) for row in tp.read_parquet(path).tokenize("bytes")]
    assert (found.unit, found.rows, found.most, found.total) == (
        "tokens",
        500,
        max(made),
        sum(made),
    )
    assert found.percentiles["50"] == np.percentile(made, 50, method="higher")
    assert found.longer["1024"] == pytest.approx(np.mean(np.array(made) > 1024))
    assert sum(found.counts) == 500
    assert found.edges[0] <= min(made)
    assert found.edges[-1] >= max(made)
    counts, _ = np.histogram(made, bins=[*found.edges[:-1], found.edges[-1] + 1])
    assert counts.tolist() == list(found.counts)


def test_padding_is_that_of_batches_in_random_order(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    rows = {"input_ids": [list(range(int(n))) for n in draw.integers(1, 400, 4000)]}
    path = parquet(tmp_path / "a.parquet", rows)
    (found,) = inspect_files(path).lengths
    batches = tp.read_parquet(path).shuffle(4000, seed=0).batch(8).pad_collate()
    cells = tokens = 0
    for batch in batches:
        cells += batch["attention_mask"].numel()
        tokens += int(batch["attention_mask"].sum())
    assert found.unit == "items"
    assert found.padding == pytest.approx(1 - tokens / cells, abs=0.02)
    assert found.packed_length == 512
    assert found.packed_padding is not None
    assert found.packed_padding < 0.05


def test_several_columns_count_as_one_row(tmp_path: Path) -> None:
    rows = {"prompt": ["ab", None, "c"], "response": ["d", "ef", ""]}
    path = parquet(tmp_path / "a.parquet", rows)
    (found,) = inspect_files(path, tokenizer="bytes", column=["prompt", "response"]).lengths
    assert (found.columns, found.most, found.total) == (("prompt", "response"), 3, 6)


def test_texts_within_conversations_are_counted(tmp_path: Path) -> None:
    rows = {"messages": [[{"role": "u", "text": "abc"}, {"role": "a", "text": None}], None, []] * 5}
    path = parquet(tmp_path / "a.parquet", rows)
    (found,) = inspect_files(path, tokenizer="bytes").lengths
    assert (found.columns, found.most, found.total) == (("messages",), 5, 25)


def test_maps_and_slices_of_lists_are_counted_right(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.list_(pa.string()))
    maps = [[("key", ["a", "bc"])], None, [], [("k", None), ("kk", ["d"])]]
    column = pa.array(maps * 3, kind).slice(1, 7)
    path = parquet(tmp_path / "a.parquet", pa.table({"map": column}))
    (found,) = inspect_files(path).lengths
    assert (found.unit, found.total) == ("bytes", 4 + 6 + 4)


def test_long_and_many_texts_are_tokenized_a_part_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes.look.inspection.lengths.TOKENIZED_BYTES", 100)
    texts = ["x" * n for n in (10, 90, 95, 5, 1000, 0, 100)]
    path = parquet(tmp_path / "a.parquet", {"text": texts})
    (found,) = inspect_files(path, tokenizer="bytes").lengths
    assert (found.most, found.total) == (1000, 1300)


def test_without_a_tokenizer_lengths_are_in_bytes_and_nothing_is_said_of_padding(
    tmp_path: Path,
) -> None:
    path = parquet(tmp_path / "a.parquet", {"text": ["é", "abc"], "n": [1, 2]})
    (found,) = inspect_files(path).lengths
    assert (found.unit, found.most, found.padding, found.longer) == ("bytes", 3, None, {})


def test_columns_of_one_length_are_left_out(tmp_path: Path) -> None:
    rows = {"id": ["0001", "0002"], "vector": [[0.0] * 8] * 2, "text": ["a", "bc"]}
    path = parquet(tmp_path / "a.parquet", rows)
    assert [one.columns for one in inspect_files(path).lengths] == [("text",)]


def test_total_is_of_all_rows_not_of_the_sample(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"text": ["x" * 10, "x" * 30] * 5000})
    (found,) = inspect_files(path, sample=100, tokenizer="bytes").lengths
    assert (found.rows, found.total) == (96, 200_000)
    assert "a sample of 96 rows" in str(inspect_files(path, sample=100))


def test_bars_are_drawn_in_eighths() -> None:
    assert bar(1, 3) == "███"
    assert bar(0, 3) == ""
    assert bar(0.0001, 3) == "▏"
