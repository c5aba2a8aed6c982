"""Arrow files, streams, Feather and folders of ``save_to_disk``: what is peculiar to them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from every_format import opened
from trainpipes.testing import digest


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


def test_splits_are_told_apart_on_another_machine_too(tmp_path):
    folder, memory = saved_dict(tmp_path / "data"), fsspec.filesystem("memory")
    for path in folder.rglob("*.*"):
        memory.pipe_file(f"/saved/{tmp_path.name}/{path.relative_to(folder)}", path.read_bytes())
    with pytest.raises(tp.ConfigError, match="several splits, such as 'test' and 'train'"):
        list(tp.read_arrow(f"memory://saved/{tmp_path.name}"))
    assert xs(tp.read_arrow(f"memory://saved/{tmp_path.name}/test")) == [100, 101, 102]


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
        ("{", "is not JSON"),
        ("[]", "does not say which files"),
        ('{"_data_files": [3]}', "does not say which files"),
        ('{"_data_files": [], "_indices_data_files": [{"filename": "i"}]}', "flatten_indices"),
    ],
)
def test_a_saved_dataset_whose_state_cannot_be_understood_is_refused(state, said, tmp_path):
    folder = saved(tmp_path / "data", [10])
    (folder / "state.json").write_text(state)
    with pytest.raises(tp.UnreadableError, match=said):
        list(tp.read_arrow(folder))


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


def test_types_that_differ_between_files_are_widened_or_refused_by_name(tmp_path):
    stream(tmp_path / "a.arrow", pa.table({"x": pa.array([1, 2], pa.int32())}))
    stream(tmp_path / "b.arrow", pa.table({"x": pa.array([2**40], pa.int64())}))
    pipe = tp.read_arrow(tmp_path)
    assert xs(pipe) == [1, 2, 2**40]
    assert opened(pipe).schema.field("x").type == pa.int64()
    stream(tmp_path / "c.arrow", pa.table({"x": ["text"]}))
    with pytest.raises(tp.SchemaError, match=r"'x' is int64.*c\.arrow") as caught:
        list(tp.read_arrow(tmp_path))
    assert caught.value.path == str(tmp_path / "c.arrow")
    stream(tmp_path / "c.arrow", pa.table({"y": [1]}))
    with pytest.raises(tp.SchemaError, match="has not"):
        list(tp.read_arrow(tmp_path))


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
        source.write_parquet(tmp_path / "written")
        assert sorted(map(repr, tp.read_parquet(tmp_path / "written"))) == wanted
        shutil.rmtree(tmp_path / "written")


def test_the_same_rows_in_arrow_and_parquet_give_the_same_batches(tmp_path):
    table = pa.table({"x": range(100), "text": [f"row {n}" for n in range(100)]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=9)
    stream(tmp_path / "rows.arrow", table, rows=31)
    pyarrow.feather.write_feather(table, tmp_path / "rows.feather", compression="lz4")

    def batches(rows: tp.Pipeline) -> list[str]:
        return [
            digest(b)
            for b in rows.sharding_filter(4).shuffle(20, seed=4).batch(8).collate(format="numpy")
        ]

    parquet = batches(tp.list_files(tmp_path / "rows.parquet").read_parquet())
    for name in ("rows.arrow", "rows.feather"):
        assert batches(tp.read_arrow(tmp_path / name, block_rows=9)) == parquet


# Random access


def test_rows_can_be_chosen_by_number_where_batches_are_mapped(tmp_path):
    stream(tmp_path / "a.arrow", numbers(0, 50), rows=7)
    stream(tmp_path / "b.arrow", numbers(50, 11), rows=100)
    pipe = tp.read_arrow(tmp_path).sharding_filter(4).shuffle(scope="global", seed=1).batch(8)
    assert sorted(row["x"] for batch in pipe for row in batch) == list(range(61))
    drawn = tp.read_arrow(tmp_path).shuffle(
        sampler=tp.samplers.WeightedRandomSampler([0] * 60 + [1], 9, seed=1)
    )
    assert xs(drawn) == [60] * 9


def test_rows_of_compressed_files_cannot_be_chosen_by_number_and_the_file_is_named(tmp_path):
    pyarrow.feather.write_feather(numbers(0, 50), tmp_path / "a.feather", compression="lz4")
    with pytest.raises(
        tp.ConfigError, match=r"in Arrow files that are .*a\.feather is not.*within a buffer"
    ):
        list(tp.read_arrow(tmp_path).shuffle(scope="global"))


# Bad files


def test_feather_of_version_1_parquet_and_empty_files_are_told_apart(tmp_path):
    cases = {b"FEA1" + b"\0" * 40: "version 1", b"PAR1" + b"\0" * 40: "read_parquet", b"": "empty"}
    for content, said in cases.items():
        (tmp_path / "x.arrow").write_bytes(content)
        with pytest.raises(tp.UnreadableError, match=said):
            list(tp.read_arrow(tmp_path))


@pytest.mark.parametrize("nested", [False, True])
def test_text_that_is_not_utf8_is_an_error_with_file_and_row(tmp_path, nested):
    ends = pa.py_buffer(np.array([0, 1, 3], np.int32))
    bad = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"a\xff\xfe")])
    if nested:
        bad = pa.ListArray.from_arrays([0, 1, 2], pa.StructArray.from_arrays([bad], ["t"]))
    stream(tmp_path / "x.arrow", pa.table({"t": bad}))
    with pytest.raises(
        tp.UnreadableError, match=r"'t' holds text that is not UTF-8.*x\.arrow, row 1"
    ) as caught:
        list(tp.read_arrow(tmp_path))
    assert caught.value.row == 1


@pytest.mark.parametrize("nested", [False, True])
def test_offsets_beyond_the_text_are_an_error(tmp_path, nested):
    ends = pa.py_buffer(np.array([0, 1, 3], np.int32))
    rows = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"abc")])
    if nested:
        rows = pa.ListArray.from_arrays([0, 1, 2], pa.StructArray.from_arrays([rows], ["t"]))
    path = stream(tmp_path / "x.arrow", pa.table({"t": rows}))
    content = path.read_bytes()
    place = content.rindex(np.array([0, 1, 3], np.int32).tobytes())
    for lie in ([0, 1, 1 << 24], [0, 4, 3], [-9, 1, 3]):
        path.unlink()  # what is still mapped must not change
        path.write_bytes(
            content[:place] + np.array(lie, np.int32).tobytes() + content[place + 12 :]
        )
        with pytest.raises(tp.UnreadableError, match=r"x\.arrow, row 0"):
            list(tp.read_arrow(tmp_path))


def test_options_are_checked_when_they_are_written_down():
    for options in ({"block_rows": 0}, {"columns": []}):
        with pytest.raises(tp.ConfigError):
            tp.read_arrow("x", **options)


def test_a_resume_reads_no_more_than_is_left_from_its_window_on(tmp_path, counted):
    """Of a file on another machine, of which every byte that is read is counted."""
    table = pa.table({"x": np.arange(40_000)})
    content = stream(tmp_path / "x.arrow", table, rows=1000).read_bytes()
    counted.pipe_file("/d/x.arrow", content)
    later = tp.read_arrow("counted://d/x.arrow").batch(100)
    later.load_state_dict(tp.read_arrow("counted://d/x.arrow").batch(100).state_at(360))
    assert len(later) == 400
    counted.fetched = 0
    assert [row["x"] for batch in later for row in batch] == list(range(36_000, 40_000))
    assert counted.fetched < 0.3 * len(content)  # from the start of its window of 10,000 rows on
