"""Memory maps hold just what was written, whole or not at all, and give it by number or as rows."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import trainpipes as tp
from forked import as_stranger, strangers_folder
from trainpipes.prepare import tokenize
from trainpipes.testing import digest
from trainpipes.writers import Processes, Threads
from trainpipes.writers.memmap import PartFile

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
          "float16", "float32", "float64"]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    return digest(a) == digest(b)


def ragged_rows(count: int = 50) -> list[dict[str, Any]]:
    return [
        {"tokens": list(range(n % 7)), "image": np.full((2, 3), n, np.uint8), "n": n}
        for n in range(count)
    ]


# What is written is what is read


BIG = 2**53 + 1


def test_integers_beside_floats_that_hold_them_come_back(tmp_path):
    rows = [{"a": [0.5]}, {"a": [2**53]}, {"a": []}, {"a": [-(2**53), 1]}]
    data = tp.write_memmap(tmp_path / "x", rows)
    assert [row["a"].tolist() for row in data] == [row["a"] for row in rows]
    empty_first = [{"a": []}, {"a": [BIG]}]
    data = tp.write_memmap(tmp_path / "y", empty_first)
    assert data[1]["a"].tolist() == [BIG]
    data = tp.write_memmap(
        tmp_path / "z", {"a": np.array([BIG])}, dtype="float32"
    )  # narrowed, as asked
    assert data[0]["a"].item() == 2.0**53


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype_come_back_bit_for_bit(dtype, tmp_path):
    raw = np.random.default_rng(0).integers(0, 256, 8 * 60, dtype=np.uint8)
    array = (raw % 2).astype(bool)[:60] if dtype == "bool" else raw.view(dtype)[:60]
    array = np.nan_to_num(array).reshape(10, 2, 3)
    data = tp.write_memmap(tmp_path / "x", {"a": array})
    assert data[:]["a"].numpy().tobytes() == array.tobytes()
    assert str(data[3]["a"].dtype) == f"torch.{dtype}"
    data.verify()


def test_several_arrays_keep_their_shapes_and_belong_together(tmp_path):
    inputs, labels = np.random.default_rng(0).normal(size=(40, 3, 4)), torch.arange(40)
    data = tp.write_memmap(tmp_path / "x", (inputs, labels))
    row = data[7]
    assert isinstance(row, tuple)
    assert torch.equal(row[0], torch.from_numpy(inputs[7]))
    assert row[1] == 7
    assert data[-1][1] == 39
    assert data[[5, 5, 2]][1].tolist() == [5, 5, 2]
    assert data[10:20:3][1].tolist() == [10, 13, 16, 19]
    assert data[torch.tensor([1, 2])][0].shape == (2, 3, 4)
    for index in (40, -41, [0, 99]):
        with pytest.raises(IndexError, match="of 40"):
            data[index]
    for index in ("a", 1.0, [[1]], [0.5]):
        with pytest.raises(TypeError, match="rows are chosen by"):
            data[index]


def test_rows_of_a_generator_may_be_ragged(tmp_path):
    data = tp.write_memmap(tmp_path / "x", (row for row in ragged_rows()))
    assert len(data) == 50
    for n, row in enumerate(ragged_rows()):
        found = data[n]
        assert found["tokens"].tolist() == row["tokens"]
        assert found["image"].tolist() == row["image"].tolist()
        assert found["n"] == row["n"]
    assert [t.tolist() for t in data[[6, 0, 3]]["tokens"]] == [[0, 1, 2, 3, 4, 5], [], [0, 1, 2]]


@settings(max_examples=30)
@given(
    rows=st.lists(st.lists(st.integers(0, 65_535), max_size=9), min_size=1, max_size=40),
    picks=st.lists(st.integers(0, 1000), max_size=20),
)
def test_ragged_rows_of_any_lengths_come_back(rows, picks, tmp_path_factory):
    path = tmp_path_factory.mktemp("memmap") / "x"
    data = tp.write_memmap(path, ({"ids": row} for row in rows), dtype="uint16")
    index = [pick % len(rows) for pick in picks]
    assert [t.tolist() for t in data[index]["ids"]] == [rows[i] for i in index]
    assert [row["ids"] for row in tp.from_memmap(path)] == rows


def test_ragged_rows_may_be_long_bytes_or_rows_of_vectors(tmp_path):
    long = [np.arange(n * 300) for n in range(9)]
    data = tp.write_memmap(tmp_path / "long", [{"ids": row} for row in long], ragged=["ids"])
    assert same(data[[8, 0, 3]]["ids"], [torch.from_numpy(long[i]) for i in (8, 0, 3)])
    data = tp.write_memmap(tmp_path / "bytes", [{"jpeg": b"\xff\xd8"}, {"jpeg": b""}])
    assert [bytes(row["jpeg"].tolist()) for row in data] == [b"\xff\xd8", b""]
    views = pa.table({"jpeg": pa.array([b"\xff\xd8", b""], pa.binary_view())})
    data = tp.write_memmap(tmp_path / "views", views)
    assert [bytes(row["jpeg"].tolist()) for row in data] == [b"\xff\xd8", b""]
    rows = [{"v": np.full((n % 3, 4), n, np.float32)} for n in range(9)]
    data = tp.write_memmap(tmp_path / "x", rows)
    assert data[2]["v"].tolist() == rows[2]["v"].tolist()
    assert next(iter(tp.from_memmap(tmp_path / "x").skip(2)))["v"].tolist() == rows[2]["v"].tolist()


def test_boxes_are_padded_after_a_stage_on_their_pictures(tmp_path):
    rows = [
        {"image": np.full((1, 2, 2), n, np.uint8), "boxes": np.full((n % 3, 4), n)}
        for n in range(9)
    ]
    tp.write_memmap(tmp_path / "x", rows)
    read = tp.from_memmap(tmp_path / "x")
    for pipe in (read, read.flip()):
        *_, batch = pipe.batch(3).pad_collate(mask={"boxes": "mask"})
        assert batch["image"][:, 0, 0, 0].tolist() == [6, 7, 8]
        assert batch["boxes"][..., 0].tolist() == [[0, 0], [7, 0], [8, 8]]
        assert batch["mask"].tolist() == [[0, 0], [1, 0], [1, 1]]


def test_a_table_and_a_map_style_dataset_are_written_too(tmp_path):
    table = pa.table({"x": [1, 2, 3], "ids": pa.array([[1], [], [2, 3]], pa.list_(pa.uint16()))})
    data = tp.write_memmap(tmp_path / "table", table)
    assert [data[n]["ids"].tolist() for n in range(3)] == [[1], [], [2, 3]]
    assert data[0]["ids"].dtype == torch.uint16

    class Squares:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> tuple[int, int]:
            return index, index**2

    assert tp.write_memmap(tmp_path / "set", Squares())[:][1].tolist() == [0, 1, 4, 9, 16]


def test_a_pipeline_is_written_as_its_epoch_gives_it(tmp_path):
    pipe = tp.from_tensors(x=np.arange(60), y=np.arange(120.0).reshape(60, 2)).shuffle(9, seed=1)
    data = tp.write_memmap(tmp_path / "rows", pipe.sharding_filter(4))
    assert same(list(data), list(tp.Pipeline(pipe.stages)))
    text = tp.from_arrow(pa.table({"text": ["ab", "", "c"]})).tokenize("bytes", "text")
    assert tp.write_memmap(tmp_path / "text", text)[0]["input_ids"].tolist() == [97, 98]


def test_a_buffer_that_is_filled_again_is_copied_in_time(tmp_path):
    buffer = np.zeros(3)

    def rows() -> Iterator[np.ndarray[Any, Any]]:
        for n in range(20):
            buffer[:] = n
            yield buffer

    assert tp.write_memmap(tmp_path / "x", rows)[:][0][:, 0].tolist() == list(range(20))


def test_no_rows_are_a_file_too_where_columns_are_known(tmp_path):
    data = tp.write_memmap(
        tmp_path / "x", {"a": np.empty((0, 3), np.float32), "b": np.empty(0, np.int8)}
    )
    assert len(data) == 0
    assert list(tp.from_memmap(tmp_path / "x").batch(2)) == []
    assert data[:]["a"].shape == (0, 3)


def test_rows_are_copies_that_may_be_changed(tmp_path):
    data = tp.write_memmap(tmp_path / "x", {"a": np.arange(8.0).reshape(4, 2)})
    for pipe in (tp.from_memmap(tmp_path / "x"), tp.from_memmap(tmp_path / "x").shuffle(4)):
        for row in pipe:
            row["a"].zero_()
    data[1]["a"].zero_()
    data[0:2]["a"].zero_()
    assert data[:]["a"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_numpy_opens_each_file(tmp_path):
    tp.write_memmap(tmp_path / "x", ragged_rows())
    assert {path.name for path in (tmp_path / "x").iterdir()} == {
        "_manifest.json", "part-00000.json", "part-00000.image.npy", "part-00000.n.npy",
        "part-00000.tokens.npy", "part-00000.tokens.offsets.npy",
    }  # fmt: skip
    found = {
        path.stem.partition(".")[2]: np.load(path, mmap_mode="r")
        for path in (tmp_path / "x").glob("*.npy")
    }
    assert found["image"][7].tolist() == [[7] * 3] * 2
    offsets = found["tokens.offsets"]
    assert found["tokens"][offsets[13] : offsets[14]].tolist() == list(range(13 % 7))


def test_columns_of_any_name_have_a_file_each(tmp_path):
    names = ["../a", "/etc/passwd", "a", "A", "a-1", "..", "", "ü" * 300, "x.offsets", "x", "\\\0"]
    rows = [{name: [n] * n for n, name in enumerate(names)}] * 2
    data = tp.write_memmap(tmp_path / "x", rows)
    assert list(data[1]) == names
    assert [len(value) for value in data[1].values()] == list(range(len(names)))
    assert len(list((tmp_path / "x").iterdir())) == 2 * len(names) + 2
    assert len(list(tmp_path.iterdir())) == 1


# Larger than memory


def test_memory_stays_small_whatever_the_size(tmp_path):
    def rows() -> Iterator[dict[str, Any]]:
        for n in range(256):
            yield {"image": np.full(1 << 18, n % 256, np.uint8), "ids": list(range(n % 5))}

    tracemalloc.start()
    data = tp.write_memmap(tmp_path / "x", rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "x" / "part-00000.image.npy").stat().st_size > 64 << 20
    assert peak < 24 << 20
    assert data[200]["image"][77] == 200


# Whole or not at all


@pytest.mark.parametrize("error", [RuntimeError("no"), FileNotFoundError(2, "no", "input.txt")])
def test_a_source_that_fails_leaves_nothing(error, tmp_path):
    def rows() -> Iterator[int]:
        yield from range(3000)
        raise error

    with pytest.raises(type(error), match="no"):
        tp.write_memmap(tmp_path / "x", rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", ["bool", "int64", "float16"])
def test_rows_that_are_all_empty_come_as_empty_rows(dtype, ragged, tmp_path):
    rows = ({"id": n, "input_ids": np.array([], dtype)} for n in range(5))
    tp.write_memmap(tmp_path / "x", rows, ragged=["input_ids"] if ragged else ())
    pipe = tp.from_memmap(tmp_path / "x")
    assert [len(row["input_ids"]) for row in pipe] == [0] * 5
    cut = list(pipe.truncate(2, columns="input_ids"))
    assert [(int(row["id"]), list(row["input_ids"])) for row in cut] == [(n, []) for n in range(5)]
    batches = list(pipe.batch(2).pad_collate())
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(2, 0), (2, 0), (1, 0)]
    later = list(pipe.shuffle(3).rename({"id": "n"}).batch(2).pad_collate())
    assert [tuple(batch["input_ids"].shape) for batch in later] == [(2, 0), (2, 0), (1, 0)]
    if not dtype.startswith("float"):
        assert list(pipe.select("input_ids").pack(4)) == []
    pipe.write_parquet(tmp_path / "files")
    back = list(tp.list_files(tmp_path / "files").read_parquet())
    assert [(row["id"], list(row["input_ids"])) for row in back] == [(n, []) for n in range(5)]


@pytest.mark.parametrize("shape", [(4, 0), (4, 0, 3), (4, 3, 0), (4, 2, 0, 3)])
def test_arrays_without_values_in_their_rows_are_columns_too(shape):
    pipe = tp.from_tensors(id=torch.arange(4), x=torch.zeros(shape)).rename({"id": "n"})
    assert [np.shape(row["x"])[:1] for row in pipe] == [shape[1:2]] * 4
    made = tp.from_arrow(pa.table({"n": range(4)})).map_batches(
        lambda c: {"x": np.zeros((len(c["n"]), *shape[1:]))}, format="numpy"
    )
    assert len(list(made)) == 4


def test_a_reader_keeps_what_it_opened_and_a_copy_of_it_that_comes_late_is_refused(tmp_path):
    old = tp.write_memmap(
        tmp_path / "x", {"a": np.arange(3), "ids": np.arange(6).reshape(3, 2)}, ragged="ids"
    )
    sent = pickle.dumps(old)
    tp.write_memmap(tmp_path / "x", np.arange(4), overwrite=True)
    assert [row["a"].item() for row in old] == [0, 1, 2]
    assert old[2]["ids"].tolist() == [4, 5]
    with pytest.raises(tp.DataChangedError, match="written anew"):
        pickle.loads(sent)[0]


def test_files_and_folder_have_the_rights_that_any_have(tmp_path):
    tp.write_memmap(tmp_path / "x", np.arange(3))
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "z").touch()
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "y").stat().st_mode
    for path in (tmp_path / "x").iterdir():
        assert path.stat().st_mode == (tmp_path / "y" / "z").stat().st_mode


def test_a_link_to_a_folder_goes_on_leading_there(tmp_path):
    tp.write_memmap(tmp_path / "x", np.arange(3))
    (tmp_path / "link").symlink_to("x")
    assert len(tp.write_memmap(tmp_path / "link", np.arange(4), overwrite=True)) == 4
    assert (tmp_path / "link").is_symlink()
    assert len(tp.read_memmap(tmp_path / "x")) == 4


# Several parts


def pipes() -> dict[str, tp.Pipeline]:
    """Rows of each kind that are counted, and some that are not."""
    images = tp.from_tensors(image=np.arange(1200, dtype=np.uint8).reshape(100, 3, 4), n=range(100))
    ids = pa.array([list(range(n % 7)) for n in range(100)], pa.list_(pa.uint16()))
    rows = [{"ids": list(range(n % 5)), "x": float(n)} for n in range(100)]
    return {
        "tensors": images.shuffle(30, seed=2),
        "table": tp.from_arrow(pa.table({"ids": ids, "n": range(100)})).shuffle(17),
        "objects": tp.from_dataset(rows),
        "filtered": images.filter(odd),
    }


def odd(row: Any) -> bool:
    return bool(row["n"] % 2)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("kind", ["tensors", "table", "objects", "filtered"])
def test_parts_are_read_as_one_and_are_the_same_whoever_makes_them(kind, tmp_path):
    pipe = pipes()[kind]
    whole = tp.write_memmap(tmp_path / "whole", pipe)
    parts = tp.write_memmap(tmp_path / "parts", pipe, rows_per_file=23)
    assert len(list((tmp_path / "parts").glob("part-*.json"))) == -(-len(whole) // 23)
    assert same(list(parts), list(whole))
    index = np.random.default_rng(0).integers(0, len(whole), 70)
    assert same(parts[index], whole[index])
    assert same(list(tp.from_memmap(tmp_path / "parts")), list(tp.from_memmap(tmp_path / "whole")))
    assert same(pickle.loads(pickle.dumps(parts))[5], whole[5])
    assert len(pickle.dumps(parts)) < 3000
    parts.verify()
    if kind == "filtered":
        with pytest.raises(
            tp.ConfigError, match=r"executor\) must be left out .* rows .*Threads\(n=2\)"
        ):
            tp.write_memmap(tmp_path / "x", pipe, rows_per_file=23, executor=Threads(2))
        return
    executor = Threads(3) if kind == "tensors" else Processes(2)
    tp.write_memmap(tmp_path / "several", pipe, rows_per_file=23, executor=executor)
    assert files_of(tmp_path / "several") == files_of(tmp_path / "parts")


def test_a_part_ends_at_the_same_row_wherever_a_run_began(tmp_path, monkeypatch):
    monkeypatch.setattr("trainpipes.writers.memmap.PART_BYTES", 500)
    for name, pipe in pipes().items():
        tp.write_memmap(tmp_path / name, pipe)
        whole = files_of(tmp_path / name)
        assert "part-00001.json" in whole
        tp.write_memmap(tmp_path / name, pipe)  # all is there: nothing is done
        # As a kill after the first part leaves it.
        begin, left = PartFile.__init__, [1]

        def counted(part: Any, *args: Any, begin: Any = begin, left: Any = left) -> None:
            if not left:
                raise RuntimeError("stopped")
            left.pop()
            begin(part, *args)

        with monkeypatch.context() as patch:
            patch.setattr(PartFile, "__init__", counted)
            with pytest.raises(RuntimeError, match="stopped"):
                tp.write_memmap(tmp_path / f"{name} again", pipe)
        with pytest.raises(tp.UnreadableError, match=r"no _manifest\.json"):
            tp.read_memmap(tmp_path / f"{name} again")
        tp.write_memmap(tmp_path / f"{name} again", pipe)
        assert files_of(tmp_path / f"{name} again") == whole


def test_rows_that_can_be_read_once_are_written_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("trainpipes.writers.memmap.PART_BYTES", 1000)
    rows = [{"a": np.full(10, n)} for n in range(100)]

    def some() -> Iterator[dict[str, Any]]:
        yield from rows[:50]
        raise RuntimeError("the disk is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        tp.write_memmap(tmp_path / "x", some)
    assert list(tmp_path.iterdir()) == []
    data = tp.write_memmap(tmp_path / "x", iter(rows))
    assert len(list((tmp_path / "x").glob("part-*.json"))) > 3
    assert [int(row["a"][9]) for row in data] == list(range(100))
    with pytest.raises(tp.ConfigError, match="left out for rows that are read once"):
        tp.write_memmap(tmp_path / "y", rows, num_files=2, executor=Threads(2))


def test_a_memory_map_is_written_to_a_url_and_read_where_it_is_copied(tmp_path):
    memory = fsspec.filesystem("memory")
    for source in (pipes()["table"], ragged_rows()):
        assert tp.write_memmap("memory://maps/x", source, overwrite=True, num_files=None) is None
        memory.get("/maps/x", str(tmp_path / "x"), recursive=True)
        data = tp.write_memmap(tmp_path / "here", source, overwrite=True)
        copied = tp.read_memmap(tmp_path / "x")
        copied.verify()
        assert same(list(copied), list(data))
        assert same(copied[3:5], data[[3, 4]])
        shutil.rmtree(tmp_path / "x")


# Bad input


def rows_then(bad: Any, count: int = 3000) -> Iterator[Any]:
    yield from range(count)
    yield bad


NUMBER = r"row \d+ has 'a' = .*(9007199254740993|18446744073709551615|-9223372036)"
MASKED = np.ma.array([1, 2], mask=[False, True])
#: What is written, with which options, and what is said.
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    # Integers that a float would round
    "beside a float": ([{"a": 0.5}, {"a": BIG}], {}, NUMBER),
    "before a float": ([{"a": BIG}, {"a": 0.5}], {}, NUMBER),
    "in a list with a float": ([{"a": [1]}, {"a": [0.5, BIG]}], {}, NUMBER),
    "in a list beside one of floats": ([{"a": [0.5]}, {"a": [7, BIG, 2**60]}], {}, NUMBER),
    "unsigned beside signed": ([{"a": 1}, {"a": 2**64 - 1}], {}, NUMBER),
    "in a list of both": ([{"a": [1, 2**64 - 1]}], {}, NUMBER),
    "long after floats": ([{"a": 0.5}] * 3000 + [{"a": 7}] * 2000 + [{"a": BIG}], {}, NUMBER),
    "least of all, after floats": ([{"a": 0.5}] * 3000 + [{"a": -(2**63) + 1}] * 2000, {}, NUMBER),
    # Rows
    "text": (["a"], {}, "row 0.*holds string.*tokenize"),
    "nothing": ([None], {}, "row 0.*holds null"),
    "no row at all": ([], {}, "there are no rows"),
    "lists of lists of different lengths": ([[[1], [1, 2]]], {}, "flatten"),
    "a float late among integers": (rows_then(2.5), {}, "row 3000 has '0' = 2.5, and the column holds int64"),
    "another column": ([{"a": 1}, {"b": 1}], {}, "row 1 is a dict of b, and those before it are a dict of a"),
    "another kind of row": ([(1, 2), (1,)], {}, "row 1 is a single value.*a tuple of 2"),
    "another shape": (
        [np.zeros(3)] * 2000 + [np.zeros(4)], {}, r"row 2000 has .*double>\[3\].*pass ragged=\["
    ),
    "another shape of elements": (
        [{"v": np.zeros((1, 3))}, {"v": np.zeros((2, 4))}], {}, "row 1 has in 'v' arrays of several shapes"
    ),
    "a null in a table": (pa.table({"x": [1, None]}), {}, "row 1: column 'x' is null"),
    "a number among lists": ([{"x": [1]}, {"x": 2}], {}, "row 1 has in 'x' both list.*and int64"),
    "a masked column": ({"a": MASKED}, {}, "'a' is masked in part; fill it"),
    "a masked row": ([{"a": np.arange(2)}, {"a": MASKED}], {}, "'a' is masked in part; fill it"),
    "a number that is too large": (
        {"x": np.array([1, 2, 70_000])}, {"dtype": {"x": "uint16"}},
        "row 2: column 'x' is uint16, which cannot hold int64 70000",
    ),
    "a number that is too small": (
        [{"x": [3]}, {"x": [4, -1]}], {"dtype": "uint8"}, r"row 1: column 'x' is uint8.* -1"
    ),
    "a float that is too large": (
        [{"x": [1.0]}, {"x": [2.0, -1e300]}], {"dtype": "float32"}, r"row 1: column 'x' is float32.* -1e\+300"
    ),
    "an integer that is too large": (
        {"x": np.array([1, 70_000])}, {"dtype": "float16"}, "row 1: column 'x' is float16.*int64 70000"
    ),
    # Sources and options
    "lengths that differ": ({"a": np.zeros(2), "b": np.zeros(3)}, {}, "one and the same first dimension"),
    "a dict of lists": ({"a": [1, 2]}, {}, "arrays or tensors"),
    "a dtype of no column": ({"a": np.zeros(2)}, {"dtype": {"b": "int8"}}, "no column 'b'"),
    "no dtype": (np.zeros(2), {"dtype": "strange"}, "dtype of NumPy"),
    "complex numbers": (np.zeros(2, complex), {}, "complex128"),
    "a string": ("abc", {}, "got 'abc'"),
    "a dict of nothing": ({}, {}, "got {}"),
    "ragged numbers": ([{"a": 1}], {"ragged": ["a"]}, "single number"),
    "ragged rows without names": ([[1], [1, 2]], {}, "rows that are dicts"),
    "an endless pipeline": (tp.from_tensors([1]).repeat(), {}, "one epoch"),
}  # fmt: skip


def test_narrowed_and_unmasked_values_are_written(tmp_path):
    narrowed = tp.write_memmap(tmp_path / "x", np.array([0.1]), dtype=torch.float32)
    assert narrowed[0][0] == torch.tensor(0.1)
    unmasked = np.ma.array([1, 2], mask=[False, False])
    assert tp.write_memmap(tmp_path / "rows", {"a": unmasked})[:]["a"].tolist() == [1, 2]


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_written_is_refused_and_nothing_is_left(kind, tmp_path):
    source, options, said = REFUSED[kind]
    with pytest.raises((tp.ConfigError, tp.DataError), match=said):
        tp.write_memmap(tmp_path / "x", source, **options)
    assert list(tmp_path.iterdir()) == []


def saved(array: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, **options)
    return buffer.getvalue()


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Rewrites the header of the part, and its checksum in the manifest."""

    def damage(folder: Path) -> None:
        header = json.loads((folder / "part-00000.json").read_text())
        change(header)
        text = json.dumps(header)
        (folder / "part-00000.json").write_text(text)
        manifest = json.loads((folder / "_manifest.json").read_text())
        manifest["files"][0]["crc32"] = f"{zlib.crc32(text.encode()):08x}"
        (folder / "_manifest.json").write_text(json.dumps(manifest))

    return damage


def named_file(name: Any) -> Callable[[Path], Any]:
    """Names another header in the manifest."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "_manifest.json").read_text())
        manifest["files"][0]["file"] = name
        (folder / "_manifest.json").write_text(json.dumps(manifest))

    return damage


def column(number: int, **values: Any) -> Callable[[Path], Any]:
    return changed(lambda header: header["columns"][number].update(values))


def path_of(folder: Path, name: str) -> Path:
    """A file of the first part, or the manifest."""
    return folder / (name if name == "_manifest.json" else f"part-00000.{name}")


def written(name: str, data: Any) -> Callable[[Path], Any]:
    return lambda folder: path_of(folder, name).write_bytes(
        data if isinstance(data, bytes) else saved(data)
    )


def moved(name: str) -> Callable[[Path], Any]:
    return lambda folder: os.rename(path_of(folder, name), folder.parent / "elsewhere.npy")


def cut_short(name: str, size: int) -> Callable[[Path], Any]:
    return lambda folder: os.truncate(path_of(folder, name), size)


OFFSETS = np.cumsum([0, *(n % 7 for n in range(50))])
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a missing file": (moved("image.npy"), "image.npy .*it is missing"),
    "a missing header": (moved("json"), "part-00000.json .*it is missing"),
    "no manifest": (lambda f: (f / "_manifest.json").unlink(), "no _manifest.json"),
    "a short file": (cut_short("image.npy", 300), "was cut short: it has 300 bytes of 428"),
    "a short header": (cut_short("image.npy", 100), "image.npy .*must begin"),
    "more bytes": (cut_short("n.npy", 999), "has grown"),
    "another shape": (written("image.npy", np.zeros((50, 3, 2), np.uint8)), "must begin.*50, 2, 3.*50, 3, 2"),
    "fewer rows": (written("n.npy", np.zeros(49, int)), r"must begin.*\(50,\).*\(49,\)"),
    "another dtype": (written("n.npy", np.zeros(50)), "must begin.*<i8.*<f8"),
    "Fortran's order": (
        written("image.npy", np.asfortranarray(np.zeros((50, 2, 3), np.uint8))), "fortran_order': True"
    ),
    "an archive": (written("n.npy", b"PK\3\4" + bytes(600)), "must begin"),
    "offsets that go down": (
        written("tokens.offsets.npy", np.r_[OFFSETS[:20], OFFSETS[20] - 99, OFFSETS[21:]]), "offset 20 is"
    ),
    "offsets that begin late": (written("tokens.offsets.npy", np.r_[1, OFFSETS[1:]]), "offset 0 is 1"),
    "offsets outside": (written("tokens.offsets.npy", np.r_[OFFSETS[:-1], 10**9]), "offset 50 is 1000000000"),
    "no JSON": (written("_manifest.json", b"{"), "_manifest.json .*not be understood"),
    "deep JSON": (written("_manifest.json", b"[" * 100_000), "_manifest.json .*not be understood"),
    "another's manifest": (written("_manifest.json", b'{"name": "x"}'), "_manifest.json .*not be understood"),
    "another checksum": (written("json", b"{}"), "part-00000.json .*checksum differs"),
    "a column too many": (column(0, color="red"), "color"),
    "a huge shape": (column(1, shape=[2**62, 2**62]), "must begin"),
    "a file above": (named_file("../elsewhere.json"), "it names other files"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_folder_is_refused_when_it_is_opened(kind, tmp_path):
    damage, said = DAMAGES[kind]
    tp.write_memmap(tmp_path / "x", ragged_rows())
    damage(tmp_path / "x")
    for opened in (tp.read_memmap, lambda path: next(iter(tp.from_memmap(path)))):
        with pytest.raises(tp.UnreadableError, match=said) as refused:
            opened(tmp_path / "x")
        assert "Write it again, or copy" in str(refused.value)
        assert refused.value.path is not None
        assert refused.value.path.startswith(str(tmp_path / "x"))


def test_files_of_a_memory_map_may_be_links(tmp_path):
    rows = list(tp.write_memmap(tmp_path / "x", ragged_rows()))
    moved("image.npy")(tmp_path / "x")
    (tmp_path / "x" / "part-00000.image.npy").symlink_to("../elsewhere.npy")
    assert same(list(tp.read_memmap(tmp_path / "x")), rows)


def test_no_part_of_a_folder_of_memory_maps_is_passed_over(tmp_path):
    for n in range(3):
        tp.write_memmap(tmp_path / f"part-{n}", ragged_rows(3))
    assert len(tp.read_memmap(tmp_path)) == 9
    (tmp_path / "part-1" / "_manifest.json").unlink()
    for path in (tmp_path, tmp_path / "part-*"):
        with pytest.raises(tp.UnreadableError, match=r"part-1 .* no _manifest.json"):
            tp.read_memmap(path)


def test_files_that_may_not_be_read_are_named():
    with strangers_folder() as top:

        def work() -> list[str]:
            tp.write_memmap(top / "closed", {"x": np.arange(3)})
            np.arange(8, dtype=np.uint16).tofile(top / "bare.bin")
            told = []
            for name in ("closed/part-00000.x.npy", "closed/part-00000.json", "bare.bin"):
                (top / name).chmod(0)
                how: Any = {"dtype": "uint16", "length": 2} if name == "bare.bin" else {}
                with pytest.raises(tp.UnreadableError, match="Permission denied; allow") as caught:
                    tp.read_memmap(top / name.split("/")[0], **how)
                told.append(str(caught.value.path))
            return told

        ends = ("part-00000.x.npy", "part-00000.json", "bare.bin")
        told = as_stranger(work)
        assert all(path.endswith(end) for path, end in zip(told, ends, strict=True))


def test_any_byte_that_changed_is_found(tmp_path):
    path = tmp_path / "x"
    rows, places = list(tp.write_memmap(path, ragged_rows())), 0
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for place in range(0, len(whole), 11):
            damaged = bytearray(whole)
            damaged[place] ^= 0x10
            if damaged.split() == whole.split():
                continue  # other white space says the same
            file.write_bytes(damaged)
            try:
                data = tp.read_memmap(path)
                data.verify()
            except tp.UnreadableError:
                places += 1
            else:  # what the manifest says of the writer
                assert file.name == "_manifest.json"
                assert same(list(data), rows)
        file.write_bytes(whole)
    assert places > 100


def test_what_is_no_memory_map_is_refused(tmp_path):
    (tmp_path / "text").write_text("hello, world, how are you")
    with pytest.raises(
        tp.UnreadableError, match=r"not a memory map.*starts with b'hello, w'.*dtype"
    ):
        tp.read_memmap(tmp_path / "text")
    with pytest.raises(tp.MissingFilesError):
        tp.read_memmap(tmp_path / "nothing")
    fsspec.filesystem("memory").pipe("/far/x.memmap/part-00000.json", b"12345678")
    with pytest.raises(tp.ConfigError, match="only files of this machine"):
        tp.read_memmap("memory://far/x.memmap")
    tp.write_memmap(tmp_path / "1", {"a": np.arange(3)})
    tp.write_memmap(tmp_path / "2", {"a": np.arange(3.0)})
    with pytest.raises(tp.SchemaError, match=r"a: float64\[\].*a: int64\[\]"):
        tp.read_memmap([tmp_path / "1", tmp_path / "2"])


# Reading


def test_columns_are_chosen_and_ordered_by_name(tmp_path):
    tp.write_memmap(
        tmp_path / "x", {"a": np.arange(3), "b": np.arange(3) * 2, "c": np.arange(3) * 3}
    )
    data = tp.read_memmap(tmp_path / "x", columns=["c", "a"])
    assert list(data[1]) == ["c", "a"]
    assert list(next(iter(tp.from_memmap(tmp_path / "x", columns=["b"])))) == ["b"]
    assert list(tp.read_memmap(tmp_path / "x", columns="b")[1]) == ["b"]
    with pytest.raises(tp.SchemaError, match="no column 'd'"):
        tp.read_memmap(tmp_path / "x", columns=["d"])


def test_several_files_are_one_after_the_other(tmp_path):
    for n, count in enumerate((5, 0, 7, 3)):
        rows = [{"ids": list(range(k)), "k": 100 * n + k} for k in range(count)]
        if rows:
            tp.write_memmap(tmp_path / f"part-{n}.memmap", rows)
    data = tp.read_memmap(tmp_path / "part-*.memmap")
    expected = [*range(5), *range(200, 207), *range(300, 303)]
    assert data[:]["k"].tolist() == expected
    index = [14, 0, 6, 6, 1]
    found = data[index]
    assert found["k"].tolist() == [expected[i] for i in index]
    assert [len(ids) for ids in found["ids"]] == [expected[i] % 100 for i in index]
    loaded = DataLoader(data, batch_size=None, num_workers=1)
    assert [row["k"].item() for row in loaded] == expected
    pipe = tp.from_memmap(tmp_path / "part-*.memmap")
    assert [row["k"] for row in pipe] == expected
    assert sorted(row["k"] for row in pipe.shuffle(scope="global")) == expected


@pytest.mark.parametrize("ragged", [False, True])
def test_a_buffer_gives_the_order_that_tables_in_memory_get(ragged, tmp_path):
    # Blocks of the memory map are read by number, those of other sources whole: the same order.
    rows = 300
    columns: dict[str, Any] = {"x": np.arange(rows)}
    if ragged:
        columns["ids"] = [list(range(n % 5)) for n in range(rows)]
    tp.write_memmap(tmp_path / "x", pa.table(columns))
    mapped = tp.from_memmap(tmp_path / "x")
    table = tp.from_arrow(pa.table(columns))
    for cut in (lambda p: p, lambda p: p.sharding_filter(4), lambda p: p.skip(7).take(200)):
        a = cut(mapped).shuffle(20, seed=5).batch(8)
        b = cut(table).shuffle(20, seed=5).batch(8)
        for _ in range(2):
            assert [[int(r["x"]) for r in batch] for batch in a] == [
                [r["x"] for r in batch] for batch in b
            ]


def test_what_a_file_is_called_and_where_it_lies_is_free_on_resume_and_its_content_is_not(tmp_path):
    tp.write_memmap(tmp_path / "x", np.arange(50))
    first = tp.from_memmap(tmp_path / "x").shuffle(10).batch(4)
    batches = list(first)
    state = first.state_at(3)
    os.rename(tmp_path / "x", tmp_path / "y")
    moved = tp.from_memmap(tmp_path / "y").shuffle(10).batch(4)
    moved.load_state_dict(state)
    assert same(list(moved), batches[3:])
    tp.write_memmap(tmp_path / "y", np.arange(50) + 1, overwrite=True)
    with pytest.raises(tp.StateError, match="data/digest"):
        tp.from_memmap(tmp_path / "y").shuffle(10).batch(4).load_state_dict(state)


# Bare files of token ids


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bare_tokens_are_cut_in_rows_with_the_tokens_after_them(dtype, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 60_000, 1003).astype(dtype)
    tokens.tofile(tmp_path / "train.bin")
    plain = tp.read_memmap(tmp_path / "train.bin", dtype=dtype, length=100)
    assert len(plain) == 10
    assert plain[9]["input_ids"].tolist() == tokens[900:1000].tolist()
    assert plain[0]["input_ids"].dtype == torch.int64
    shifted = tp.read_memmap(tmp_path / "train.bin", dtype=dtype, length=100, labels=True)
    assert len(shifted) == 10
    assert shifted[9]["labels"].tolist() == tokens[901:1001].tolist()
    pipe = tp.from_memmap(tmp_path / "train.bin", dtype=dtype, length=100, labels=True)
    for batches in (pipe.batch(4).collate(), pipe.shuffle(scope="global").batch(4).collate()):
        found = {row[0].item(): row for batch in batches for row in batch["labels"]}
        assert sorted(found) == sorted(tokens[1::100][:10].tolist())
    only = tp.from_memmap(
        tmp_path / "train.bin", dtype=dtype, length=100, labels=True, columns="labels"
    )
    assert [row["labels"].tolist() for row in only] == [row["labels"].tolist() for row in pipe]
    exact = tokens[:1000]
    exact.tofile(tmp_path / "exact.bin")
    assert len(tp.read_memmap(tmp_path / "exact.bin", dtype=dtype, length=100, labels=True)) == 9


def test_bare_files_of_another_dtype_than_their_manifest_says_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hello\n" * 9)
    texts = tp.read_text(tmp_path / "a.txt").tokenize("bytes")
    out = tokenize(texts, tmp_path / "out", format="bin", dtype="uint32")
    said = r"\(dtype\) must be 'uint32'.*as _manifest.json there says, got 'uint16'"
    for path in (out.files[0], f"{tmp_path}/out/*.bin"):
        with pytest.raises(tp.ConfigError, match=said):
            list(tp.from_memmap(path, dtype="uint16", length=5))
        assert len(list(tp.from_memmap(path, dtype="uint32", length=5))) == 9


def test_bare_files_one_after_the_other_share_no_row(tmp_path):
    for n in range(3):
        np.full(250, n, np.uint16).tofile(tmp_path / f"{n}.bin")
    data = tp.read_memmap(tmp_path / "*.bin", dtype=np.uint16, length=100)
    assert data[:]["input_ids"].float().mean(dim=1).tolist() == [0, 0, 1, 1, 2, 2]


def test_bad_bare_files_and_options_are_refused(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(tp.UnreadableError, match="3 bytes, which is no whole number of uint16"):
        tp.read_memmap(tmp_path / "odd.bin", dtype="uint16", length=4)
    tp.write_memmap(tmp_path / "x", np.arange(3))
    with pytest.raises(tp.UnreadableError, match="not a file of bare numbers"):
        tp.read_memmap(tmp_path / "x", dtype="uint16", length=4)
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "few.bin")
    said = r"few\.bin holds 10 numbers, fewer than the 64 of one row"
    with pytest.raises(tp.DataError, match=said):
        list(tp.from_memmap(tmp_path / "few.bin", dtype="uint16", length=64))
    for options in (
        {"dtype": "uint16"}, {"length": 4}, {"labels": True}, {"dtype": "float32", "length": 4},
        {"dtype": "uint16", "length": 0}, {"dtype": "uint16", "length": 2.5}, {"columns": [3]},
    ):  # fmt: skip
        with pytest.raises(tp.ConfigError):
            tp.from_memmap(tmp_path / "x", **options)
    with pytest.raises(tp.ConfigError):
        tp.read_memmap(7)  # type: ignore[arg-type]


def test_a_bare_file_that_grows_is_noticed(tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "x")
    data = tp.read_memmap(tmp_path / "x", dtype="uint16", length=10)
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "x")
    with pytest.raises(tp.DataChangedError, match="has grown"):
        data[0]


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("order", ["file order", "shuffled", "from tensors"])
def test_large_batches_that_somebody_holds_keep_what_they_show(tmp_path, order, threads):
    rows = np.arange(64, dtype=np.uint8)[:, None] + np.zeros((1, 1 << 18), np.uint8)
    if order == "from tensors":
        pipe = tp.from_tensors(x=torch.from_numpy(rows)).shuffle(scope="global")
    else:
        tp.write_memmap(tmp_path / "x", {"x": rows})
        pipe = tp.from_memmap(tmp_path / "x")
        pipe = pipe.shuffle(scope="global") if order == "shuffled" else pipe
    parts, numbers = [], []
    for _ in range(3):
        for number, batch in enumerate(tp.Loader(pipe.batch(8).collate(), threads=threads)):
            numbers += batch["x"][:, 0].tolist()
            if number % 3 == 0:  # a look at some of it holds it
                parts.append((batch["x"][2:4, 5:], numbers[-6:-4]))
            elif number % 3 == 1:
                parts.append((torch.from_numpy(batch["x"].numpy()[7:]), numbers[-1:]))
    assert sorted(numbers) == sorted([*range(64)] * 3)
    for part, expected in parts:
        assert all(
            set(row.tolist()) == {n} for row, n in zip(part[:, ::4096], expected, strict=True)
        )


def test_batches_and_rows_without_names_are_refused(tmp_path):
    tensors = tp.from_tensors(torch.zeros(4, 2), torch.arange(4))
    for pipe in (tensors.batch(2), tensors.batch(2).collate()):
        with pytest.raises(tp.ConfigError, match=r"call it before batch\(\)"):
            tp.write_memmap(tmp_path / "x", pipe)
    with pytest.raises(tp.SchemaError, match="each row must be a dict"):
        tp.write_memmap(tmp_path / "z", tensors)


@pytest.mark.parametrize("made", [list, tp.from_dataset], ids=["rows", "pipeline"])
def test_arrays_of_one_length_are_even_until_one_differs(tmp_path, made):
    rows = [{"v": np.arange(3) + n} for n in range(5)]
    assert tp.write_memmap(tmp_path / "x", made(rows))[:]["v"].shape == (5, 3)
    odd = [*rows, {"v": np.arange(4)}]
    assert [len(row["v"]) for row in tp.write_memmap(tmp_path / "y", made(odd))] == [3] * 5 + [4]
    data = tp.write_memmap(tmp_path / "z", made(rows), ragged=["v"])
    assert data[4]["v"].tolist() == [4, 5, 6]
    assert (tmp_path / "z" / "part-00000.v.offsets.npy").exists()
    late = [*rows * 300, {"v": np.arange(4)}]
    with pytest.raises(tp.DataError, match=r"pass ragged=\["):
        tp.write_memmap(tmp_path / "late", made(late))
    whole = tp.write_memmap(tmp_path / "whole", made(late), ragged="v")
    assert len(whole[1500]["v"]) == 4
