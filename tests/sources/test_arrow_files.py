"""Arrow files, streams, Feather and folders of ``save_to_disk``: what is peculiar to them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

import trainpipes as tp


def stream(path: Path, table: pa.Table, rows: int = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def numbers(first: int, count: int) -> pa.Table:
    return pa.table({"x": pa.array(range(first, first + count), pa.int64())})


def saved(folder: Path, sizes: list[int], first: int = 0) -> Path:
    """A folder as ``Dataset.save_to_disk`` writes it."""
    names = []
    for number, size in enumerate(sizes):
        names.append(f"data-{number:05}-of-{len(sizes):05}.arrow")
        stream(folder / names[-1], numbers(first, size))
        first += size
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def saved_dict(folder: Path) -> Path:
    saved(folder / "train", [10, 7])
    saved(folder / "test", [3], 100)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    return folder


def xs(pipe: tp.Pipeline) -> list[int]:
    return [row["x"] for row in pipe]


# Folders of save_to_disk


def test_a_saved_dataset_is_read_without_the_caches_that_lie_beside_its_files(tmp_path):
    folder = saved(tmp_path / "data", [10, 0, 7])
    stream(folder / "cache-1a2b3c.arrow", numbers(900, 5))
    assert xs(tp.read_arrow(folder)) == list(range(17))
    assert xs(tp.list_files(folder / "data-00002*").read_arrow()) == list(range(10, 17))


def test_of_several_splits_one_is_chosen(tmp_path):
    folder = saved_dict(tmp_path / "data")
    with pytest.raises(
        tp.ConfigError, match=r"several splits, such as 'test' and 'train': read one .*/data/test"
    ):
        list(tp.read_arrow(folder))
    assert xs(tp.read_arrow(folder / "train")) == list(range(17))
    assert xs(tp.read_arrow(folder / "test")) == [100, 101, 102]


def test_a_file_of_a_saved_dataset_that_is_missing_is_named(tmp_path):
    folder = saved(tmp_path / "data", [10, 7])
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(
        tp.MissingFilesError, match=r"data-00001-of-00002\.arrow, which is not there"
    ):
        list(tp.read_arrow(folder))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("{", "is not JSON"), ("[]", "does not say which files"),
        ('{"_data_files": [3]}', "does not say which files"),
        ('{"_data_files": [], "_indices_data_files": [{"filename": "i"}]}', "flatten_indices"),
        ('{"_data_files": []}', r"data/state\.json"), ("[" * 100_000, r"data/state\.json"),
        ('{"_data_files": [{"filename": "../a.arrow"}]}', r"data/state\.json"),
        ('{"_data_files": ' + "[" * 2000 + "]" * 2000 + "}", r"data/state\.json"),
        (json.dumps({"_data_files": [{"filename": "[" * 20_000}]}), r"state\.json names \[\["),
    ],
    ids=range(9),
)  # fmt: skip
def test_a_saved_dataset_whose_state_cannot_be_understood_is_refused(state, said, tmp_path):
    folder = saved(tmp_path / "data", [10])
    stream(tmp_path / "a.arrow", numbers(0, 3))
    (folder / "state.json").write_text(state)
    with pytest.raises((tp.UnreadableError, tp.MissingFilesError), match=said) as caught:
        list(tp.read_arrow(folder))
    assert len(str(caught.value)) < 1000


def test_what_datasets_itself_saves_is_read_row_for_row(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(50)), "text": [f"t{n}" for n in range(50)]})
    shuffled = rows.shuffle(seed=1).select(range(33))
    shuffled.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict(train=rows, test=shuffled).save_to_disk(tmp_path / "both")
    assert list(tp.read_arrow(tmp_path / "one")) == list(shuffled)
    assert list(tp.read_arrow(tmp_path / "both" / "train")) == list(rows)


# Columns and types


def test_columns_are_chosen_and_fields_of_structs_by_path(tmp_path):
    table = pa.table({"s": [{"a": 1, "b": {"c": "x", "d": 2.5}}, None], "y": [1, 2], "z": [3, 4]})
    path = stream(tmp_path / "rows.arrows", table)
    assert list(tp.read_arrow(path, ["z", "s.b.c"])) == [
        {"z": 3, "s": {"b": {"c": "x"}}},
        {"z": 4, "s": None},
    ]
    with pytest.raises(tp.SchemaError, match="no column 'yy'"):
        list(tp.read_arrow(path, ["yy"]))
    with pytest.raises(tp.ConfigError, match="twice"):
        tp.read_arrow(path, ["y", "y"])


def test_every_type_comes_as_pyarrow_reads_it(tmp_path):
    table = pa.table(
        {
            "decimal": pa.array([None, 12], pa.decimal256(50, 3)),
            "time": pa.array([2**62, -(2**62)], pa.timestamp("us")),
            "nested": [[{"role": "user", "content": "hi"}], []],
            "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int32())),
            "fixed": pa.array([[1, 2], None], pa.list_(pa.int16(), 2)),
            "bytes": pa.array([b"\xff\x00", None], pa.large_binary()),
            "view": pa.array(["a string that is longer than twelve", "b"], pa.string_view()),
            "half": pa.array(np.array([1.5, 2.5], np.float16)),
            "kind": pa.array(["a", "b"]).dictionary_encode(),
            "none": pa.nulls(2),
        }
    )
    path = stream(tmp_path / "rows.arrows", table)
    found = pa.concat_tables(
        tp.read_arrow(path).batch(2).collate(format="arrow")  # type: ignore[arg-type]
    )
    wanted = table.set_column(8, "kind", table["kind"].cast(pa.string()))
    assert found.equals(wanted.cast(found.schema))
    assert found.schema.field("decimal").type == pa.decimal256(50, 3)


def test_rows_with_views_of_text_come_in_any_order(tmp_path):
    """As Polars writes them; Arrow itself can't gather such rows."""
    texts = [None if n % 7 == 0 else f"text {n}" * (n % 5) for n in range(90)]
    given = pa.table(
        {
            "text": pa.array(texts, pa.string_view()),
            "bytes": pa.array([t and t.encode() for t in texts], pa.binary_view()),
            "list": pa.array([[t, None] for t in texts], pa.list_(pa.string_view())),
            "struct": pa.array([{"t": t} for t in texts], pa.struct([("t", pa.string_view())])),
        }
    )
    path = tmp_path / "rows.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, given.schema) as writer:
        writer.write_table(given, max_chunksize=40)
    wanted = sorted(map(repr, given.to_pylist()))
    several = pa.concat_tables([given.slice(0, 40), given.slice(40)])
    for source in (tp.from_arrow(given), tp.from_arrow(several), tp.read_arrow(path)):
        for pipe in (source.shuffle(30), source.shuffle(scope="global"), source):
            assert sorted(map(repr, pipe)) == wanted
    for column in given.column_names:  # a part of each batch of rows is read
        assert list(tp.read_arrow(path, columns=[column])) == given.select([column]).to_pylist()
    for source in (tp.from_arrow(given), tp.from_arrow(several), tp.read_arrow(path)):
        source.write_parquet(tmp_path / "written")
        assert sorted(map(repr, tp.read_parquet(tmp_path / "written"))) == wanted
        shutil.rmtree(tmp_path / "written")


# Order


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        (pa.string(), None), (pa.string(), ["text"]), (pa.string_view(), None),
        (pa.string_view(), ["n", "text"]), (pa.dictionary(pa.int32(), pa.string()), None),
        (pa.list_(pa.large_binary()), None),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("count", [900, 6000])  # a batch of 2 MB, and one that is read in pieces
def test_rows_of_a_bucket_come_in_the_order_of_the_same_files_here(kind, columns, count, tmp_path):
    """Rows that grow along a batch: how many are mixed together depends on their size."""
    texts = [None if n % 7 == 0 else f"{n}" + "x" * (n * 4000 // count) for n in range(count)]
    listed = [None if text is None else [text.encode()] for text in texts]
    values = pa.array(listed, kind) if pa.types.is_list(kind) else pa.array(texts).cast(kind)
    table = pa.table({"n": range(count), "text": values, "more": range(count)})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=count)
    there = f"memory://arrow-order/{tmp_path.name}"
    fsspec.filesystem("memory").pipe(f"{there}/a.arrow", (tmp_path / "a.arrow").read_bytes())

    def pipe(folder: object) -> tp.Pipeline:
        rows = tp.read_arrow(folder, columns).sharding_filter(4)
        return rows.shuffle(1000, seed=0, max_bytes="1MB").batch(8)

    here = pipe(tmp_path)
    wanted = list(here)
    assert list(pipe(there)) == wanted
    moved = pipe(there)
    moved.load_state_dict(here.state_at(20))
    assert list(moved) == wanted[20:]


# Random access


def test_rows_of_compressed_files_cannot_be_chosen_by_number_and_the_file_is_named(tmp_path):
    pyarrow.feather.write_feather(numbers(0, 50), tmp_path / "a.feather", compression="lz4")
    with pytest.raises(
        tp.ConfigError, match=r"in Arrow files that are .*a\.feather is not.*within a buffer"
    ):
        list(tp.read_arrow(tmp_path).shuffle(scope="global"))


@pytest.mark.parametrize("wide", [False, True])
def test_text_beside_a_field_of_nulls_below_a_list_is_valid(wide, tmp_path):
    texts = pa.large_string() if wide else pa.string()
    kind = pa.list_(pa.struct([("role", texts), ("name", pa.null()), ("tags", pa.list_(texts, 2))]))
    message = {"role": "user", "name": None, "tags": ["a", None]}
    chats = [[message] * (n % 4) for n in range(30)]
    table = pa.table({"messages": pa.array(chats, kind)})
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as out,
    ):
        out.write_table(table.slice(3), max_chunksize=10)
    pa.feather.write_feather(table, str(tmp_path / "b.feather"), compression="uncompressed")
    for name, first in (("a.arrow", 3), ("b.feather", 0)):
        found = list(tp.read_arrow(tmp_path / name))
        assert [row["messages"] for row in found] == chats[first:]
