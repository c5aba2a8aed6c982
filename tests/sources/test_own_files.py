"""Files in a format of the user's own: functions that agree are believed, others are found out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from trainpipes.sources.files.file_bytes import FileBytes


def numbers(file: BinaryIO) -> pa.Table:
    return pa.table({"x": np.frombuffer(file.read(), "<i8")})


def count(file: BinaryIO) -> int:
    return file.seek(0, 2) // 8


def numbers_in_blocks(file: BinaryIO, block: int) -> pa.Table:
    """Block by block, eight bytes a row and three rows a block."""
    file.seek(24 * block)
    return pa.table({"x": np.frombuffer(file.read(24), "<i8")})


def count_numbers(file: BinaryIO) -> list[int]:
    size = file.seek(0, 2)
    return [min(3, size // 8 - n) for n in range(0, size // 8, 3)]


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


def test_columns_are_chosen_of_a_schema(folder):
    def both(file: BinaryIO) -> pa.Table:
        x = np.frombuffer(file.read(), "<i8")
        return pa.table({"x": x, "y": 2 * x})

    schema = pa.schema([("x", pa.int64()), ("y", pa.float64())])
    pipe = tp.read_files(folder, both, count, columns=["y"], schema=schema)
    assert list(pipe.take(2)) == [{"y": 0.0}, {"y": 2.0}]
    with pytest.raises(tp.SchemaError, match="no column 'z'"):
        len(tp.read_files(folder, both, count, columns=["z"], schema=schema))


@pytest.mark.parametrize("counts", [[0, 3], [0, 0, 2, 0, 1], [2, 0, 1, 0]])
def test_blocks_without_rows_may_stand_anywhere(counts: list[int], tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    path.write_bytes(b"abc")

    def block_of(file: BinaryIO, block: int) -> pa.Table:
        first = sum(counts[:block])
        return pa.table({"x": range(first, first + counts[block])})

    assert xs(tp.read_files(path, block_of, lambda file: counts)) == [0, 1, 2]
    with pytest.raises(tp.UnreadableError, match=r"a\.rec, row 0: .*ZeroDivisionError"):
        list(tp.read_files(path, lambda file, block: 1 / 0, lambda file: counts))


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
        (lambda file: pa.table({"x": range(11)}), tp.DataError, "gives more rows, and 10 were counted"),
        (lambda file: iter(()), tp.DataError, "gives no rows, and 10 were counted"),
        (lambda file: 3, tp.UnreadableError, r"returns a pyarrow\.Table or an iterator of them, got 3"),
        (lambda file: [1, 2], tp.UnreadableError, r"yields pyarrow\.Tables, got 1"),
        (lambda file: 1 / 0, tp.UnreadableError, "ZeroDivisionError: division by zero"),
    ],
)  # fmt: skip
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
        tp.SchemaError, match=r"2\.i8, row 0.*\['y'\] here, and the first rows have \['x'\]"
    ):
        list(tp.read_files(folder, other, count))

    def text(file: BinaryIO) -> pa.Table:
        if file.name.endswith("2.i8"):
            return pa.table({"x": ["text"] * 10})
        return numbers(file)

    with pytest.raises(tp.SchemaError, match=r"2\.i8, row 0.*a value does not fit"):
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


class Numbers(tp.Format):
    """Numbers of 8 bytes, 4 a block."""

    name, suffixes, schema = "numbers", (".i8",), pa.schema([("x", pa.int64())])

    def scan(self, file: FileBytes) -> tp.Layout:
        if file.size % 8:
            raise ValueError(f"{file.size} bytes are no numbers of 8 bytes")
        start = np.arange(0, file.size, 32)
        stop = np.append(start[1:], file.size)
        return tp.Layout((stop - start) // 8, start, stop, self.schema)

    def decode(self, data: FileBytes, layout: tp.Layout, block: int, columns: Any) -> Iterator[Any]:
        [content] = data.read(self.ranges(layout, block, columns))
        yield pa.record_batch({"x": np.frombuffer(content, "<i8")})


def test_a_format_is_scanned_once_and_named_in_states_by_its_name_and_key(folder, tmp_path_factory):
    kept = str(tmp_path_factory.mktemp("kept"))
    scans: list[str] = []

    class Noted(Numbers):
        def scan(self, file):
            scans.append(file.name)
            return super().scan(file)

    other = Noted()
    other.key = "of another kind"
    for format, count in ((Noted(), 3), (Noted(), 3), (other, 6)):
        assert xs(tp.read_files(folder, format, index=kept)) == list(range(30))
        assert len(scans) == count
    state = tp.read_files(folder, Noted()).batch(3).state_at(2)
    with pytest.raises(tp.StateError, match="of another kind"):
        tp.read_files(folder, other).batch(3).load_state_dict(state)


def test_columns_of_a_format_are_chosen_and_widened_over_all_files(folder):
    class Pairs(Numbers):
        def scan(self, file):
            found = super().scan(file)
            kind = pa.int32() if file.name.endswith("0.i8") else pa.int64()
            schema = pa.schema([("x", kind), ("half", pa.float64())])
            return tp.Layout(found.rows, found.start, found.stop, schema)

        def decode(self, data, layout, block, columns):
            for batch in super().decode(data, layout, block, columns):
                x = batch.column(0)
                both = [x.cast(layout.schema.field("x").type), x.cast(pa.float64())]
                yield pa.record_batch(both, schema=layout.schema)

    rows = list(tp.read_files(folder, Pairs(), columns=["half", "x"]))
    assert rows == [{"half": float(n), "x": n} for n in range(30)]
    assert list(rows[0]) == ["half", "x"]
    with pytest.raises(tp.SchemaError, match=r"no column 'halb' \(did you mean 'half'\?\)"):
        list(tp.read_files(folder, Pairs(), columns=["halb"]))


#: Methods in place of the format's own, and what is said.
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"decode": lambda *_: iter([pa.record_batch({"x": [1]})])},
     tp.DataError, r"0\.i8, row 1: Wrong\.decode gives 1 rows, and 4 were counted"),
    ({"decode": lambda *_: iter([pa.record_batch({"x": range(n)}) for n in (4, 1)])},
     tp.DataError, r"Wrong\.decode gives more rows, and 4 were counted"),
    ({"decode": lambda *_: iter([pa.table({"x": range(4)})])},
     tp.UnreadableError, r"row 0: Wrong\.decode failed here: .*yields pyarrow\.RecordBatches, got Table"),
    ({"decode": lambda *_: iter([pa.record_batch({"x": ["a"] * 4})])},
     tp.SchemaError, r"column 'x' is string here and int64 over all files"),
    ({"decode": lambda *_: 1 / 0}, tp.UnreadableError, r"0\.i8, row 0: .*ZeroDivisionError: division by"),
    ({"scan": lambda *_: tp.Layout([1, 2], [0], [8], Numbers.schema)},  # type: ignore[arg-type]
     tp.UnreadableError, r"3 of 3 files cannot be read as numbers:(?s:.*)are numbers of the same blocks"),
    ({"scan": lambda *_: tp.Layout([0.5], [0], [8], Numbers.schema)},  # type: ignore[arg-type]
     tp.UnreadableError, r"Layout\(rows\) is a list of integers of 0 or more, got \[0\.5\]"),
]  # fmt: skip


@pytest.mark.parametrize(("methods", "error", "said"), WRONG)
def test_what_is_wrong_with_a_format_is_said_with_the_file_and_row(methods, error, said, folder):
    with pytest.raises(error, match=said):
        list(tp.read_files(folder, type("Wrong", (Numbers,), methods)()))


class Chosen(Numbers):
    """The same, by number, too."""

    random_access = True

    def take(self, data: Any, layout: tp.Layout, rows: Any, columns: Any) -> Any:
        return pa.record_batch({"x": np.frombuffer(data.mapped(), "<i8")[rows]})


def test_rows_of_a_format_that_takes_them_by_number_can_be_chosen(folder):
    pipe = tp.read_files(folder, Chosen())
    seen = xs(pipe.sharding_filter(2).shuffle(scope="global", seed=3))
    assert seen != sorted(seen) == list(range(30))
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"/numbers/{folder.name}/0.i8", (folder / "0.i8").read_bytes())
    there = tp.read_files(f"memory://numbers/{folder.name}", Chosen())
    assert xs(there) == list(range(10))
    with pytest.raises(tp.ConfigError, match=r"files that are on this machine, and .*0\.i8 is not"):
        list(there.shuffle(scope="global"))
