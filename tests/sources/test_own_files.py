"""Files in a format of the user's own: functions that agree are believed, others are found out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from sources.native_formats import count_numbers, numbers_in_blocks
from trainpipes.testing import digest


def numbers(file: BinaryIO) -> pa.Table:
    return pa.table({"x": np.frombuffer(file.read(), "<i8")})


def count(file: BinaryIO) -> int:
    return file.seek(0, 2) // 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for n in range(3):
        path = tmp_path / f"{n}.i8"
        path.write_bytes(np.arange(10 * n, 10 * n + 10, dtype="<i8").tobytes())
    return tmp_path


def xs(pipe: tp.Pipeline) -> list[int]:
    return [row["x"] for row in pipe]


def test_a_resume_reads_the_blocks_that_are_left_only(folder):
    read: list[tuple[str, int]] = []

    def noted(file: BinaryIO, block: int) -> pa.Table:
        read.append((Path(file.name).name, block))
        return numbers_in_blocks(file, block)

    def made() -> tp.Pipeline:
        return tp.read_files(folder, noted, count_numbers, version="1").sharding_filter(10).batch(1)

    pipe = made()
    iterator = iter(pipe)
    for _ in range(28):
        next(iterator)
    state = iterator.state_dict()
    later = made()
    assert len(later) == 30
    read.clear()
    later.load_state_dict(state)
    assert len(list(later)) == 2
    assert len(read) <= 10  # a block for each shard


def test_tables_may_come_one_by_one_in_batches_and_in_other_types_that_fit(folder):
    def tables(file: BinaryIO) -> Iterator[Any]:
        x = np.frombuffer(file.read(), "<i8")
        yield pa.table({"x": x[:0]})
        yield pa.record_batch({"x": x[:4]})
        yield pa.table({"x": x[4:].astype(np.int32)})

    assert xs(tp.read_files(folder, tables, count)) == list(range(30))
    pipe = tp.read_files(folder, tables, schema=pa.schema([("x", pa.float64())]))
    assert [type(value) for value in xs(pipe)] == [float] * 30


def test_the_numbers_of_rows_are_kept_where_that_is_asked_for(folder):
    calls: list[str] = []

    def counting(file: BinaryIO) -> int:
        calls.append(file.name)
        return count(file)

    def made(version: str) -> tp.Pipeline:
        kept = str(folder.parent / f"{folder.name}.arrow")
        return tp.read_files(folder, numbers, counting, version=version, index=kept)

    assert len(made("1")) == 30
    assert len(calls) == 3
    assert len(made("1")) == 30
    assert len(calls) == 3
    (folder / "1.i8").write_bytes(np.arange(4, dtype="<i8").tobytes())
    assert len(made("1")) == 24
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("fn", "error", "said"),
    [
        (lambda file: pa.table({"x": [1]}), tp.DataError, r"gives 1 rows, and 10 were counted"),
        (
            lambda file: pa.table({"x": range(11)}),
            tp.DataError,
            "gives more rows, and 10 were counted",
        ),
        (lambda file: iter(()), tp.DataError, "gives no rows, and 10 were counted"),
        (
            lambda file: 3,
            tp.UnreadableError,
            r"returns a pyarrow\.Table or an iterator of them, got 3",
        ),
        (lambda file: [1, 2], tp.UnreadableError, r"yields pyarrow\.Tables, got 1"),
        (lambda file: 1 / 0, tp.UnreadableError, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_function_that_does_not_give_what_was_counted_is_named_with_the_file(
    fn, error, said, folder
):
    with pytest.raises(error, match=said) as caught:
        list(tp.read_files(folder, fn, count))
    assert caught.value.path == str(folder / "0.i8")


def test_tables_of_other_columns_or_types_are_named_with_the_file(folder):
    def other(file: BinaryIO) -> pa.Table:
        name = "y" if file.name.endswith("2.i8") else "x"
        return pa.table({name: np.frombuffer(file.read(), "<i8")})

    with pytest.raises(
        tp.SchemaError, match=r"2\.i8, row 0.*\['y'\] here, and the first table has \['x'\]"
    ):
        list(tp.read_files(folder, other, count))

    def text(file: BinaryIO) -> pa.Table:
        if file.name.endswith("2.i8"):
            return pa.table({"x": ["text"] * 10})
        return numbers(file)

    with pytest.raises(tp.SchemaError, match=r"2\.i8, row 0.*types do not fit"):
        list(tp.read_files(folder, text, count))


@pytest.mark.parametrize("found", [-1, "10", None, [3, -1], [2.5], True])
def test_a_count_that_is_none_is_refused(found, folder):
    with pytest.raises(tp.UnreadableError, match="returns a number of rows, or a list of them"):
        list(tp.read_files(folder, numbers, lambda file: found))


def test_a_file_that_cannot_be_counted_is_one_of_those_that_are_named(folder):
    for name in ("0.i8", "2.i8"):
        (folder / name).write_bytes(b"1234567")
    with pytest.raises(tp.UnreadableError, match=r"2 of 3 files cannot be read.*") as caught:
        list(tp.read_files(folder, numbers))
    assert "0.i8: ValueError" in str(caught.value)
    kept = tp.list_files(folder).filter(lambda path: path.endswith("1.i8")).read_files(numbers)
    assert xs(kept) == list(range(10, 20))


def test_another_version_refuses_the_state_and_the_cache(folder, tmp_path_factory):
    kept = str(tmp_path_factory.mktemp("kept"))
    state = tp.read_files(folder, numbers, count, version="1").batch(4).state_at(1)
    tp.read_files(folder, lambda file: numbers(file), count, version="1").batch(4).load_state_dict(
        state
    )
    with pytest.raises(tp.StateError, match="version 2"):
        tp.read_files(folder, numbers, count, version="2").batch(4).load_state_dict(state)
    cached = [
        xs(tp.read_files(folder, fn, count, version=version).cache(kept))
        for fn, version in (
            (numbers, "1"),
            (lambda file: pa.table({"x": [5] * 10}), "1"),
            (lambda file: pa.table({"x": [5] * 10}), "2"),
        )
    ]
    assert cached[0] == cached[1] == list(range(30))
    assert cached[2] == [5] * 30


def test_files_of_ones_own_mix_with_those_of_other_formats(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("arrow") / "rows.arrow"
    with pa.ipc.new_file(path, pa.schema([("x", pa.int64())])) as file:
        file.write_table(pa.table({"x": range(100, 120)}))
    both = tp.concat(tp.read_files(folder, numbers), tp.read_arrow(path))
    assert xs(both) == [*range(30), *range(100, 120)]
    mixed = tp.mix({"a": tp.read_files(folder, numbers), "b": tp.read_arrow(path)}).batch(5)
    assert sorted(row["x"] for batch in mixed for row in batch) == xs(both)
    assert digest(next(iter(mixed)))


def test_options_are_checked_when_they_are_written_down():
    for options in (
        {"fn": 3},
        {"fn": len, "count": 3},
        {"fn": len, "schema": 3},
        {"fn": len, "index": 3},
    ):
        with pytest.raises(tp.ConfigError, match="read_files"):
            tp.read_files("x", **options)
