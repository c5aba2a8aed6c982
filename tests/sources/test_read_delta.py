"""read_delta: the rows that deltalake gives, of the version that a run began with."""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from torch.utils.data import DataLoader

import trainpipes as tp
from delta_tables import VECTORS, by_deltalake, created, delete_by_vector, history, ordered, rows
from resuming import check_resume
from trainpipes.prepare import repack
from trainpipes.sources.tables.table import of_object_store


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return created(tmp_path)


def append(uri: str, first: int = 500, count: int = 30) -> None:
    write_deltalake(uri, rows(first, count), mode="append")


def batches(uri: str, **options: Any) -> tp.Pipeline:
    return tp.read_delta(uri, **options).sharding_filter(4).shuffle(20, seed=1).batch(4)


def seen(found: Any) -> list[int]:
    return sorted(row["x"] for batch in found for row in batch)


# The rows


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 40))]
)
def test_random_histories_give_the_rows_of_deltalake(tmp_path: Path, seed: int) -> None:
    uri = history(tmp_path, seed)
    newest = DeltaTable(uri).version()
    for version in {newest, newest // 2}:
        pipe, expected = tp.read_delta(uri, version=version), by_deltalake(uri, version)
        assert ordered(list(pipe)) == ordered(expected.to_pylist())
        assert len(pipe) == len(expected)
        some = ["text", "x"]
        filter = [("x", "<", 900), ("part", "=", "p 1/%")]
        expected = expected.filter(pq.filters_to_expression(filter)).select(some)
        found = list(tp.read_delta(uri, version=version, columns=some, filter=filter))
        assert ordered(found) == ordered(expected.to_pylist())


def mapped(folder: Path, mode: str) -> str:
    """A table whose columns were renamed, with a file from before and one from after, written by hand."""

    def field(name: str, kind: Any, number: int, physical: str) -> dict[str, Any]:
        about = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": physical}
        return {"name": name, "type": kind, "nullable": True, "metadata": about}

    inner = {"type": "struct", "fields": [field("u", "long", 6, "a"), field("w", "long", 7, "u")]}
    fields = [
        field("x", "long", 1, "col-1"), field("b", "string", 2, "a"), field("a", "double", 3, "b"),
        field("day", "date", 4, "col-p"), field("s", inner, 5, "col-s"),
    ]  # fmt: skip
    uri = folder / "mapped"
    (uri / "_delta_log").mkdir(parents=True)

    def numbered(name: str, kind: pa.DataType, number: int) -> pa.Field:
        return pa.field(name, kind, metadata={"PARQUET:field_id": str(number)})

    old = pa.struct([numbered("a", pa.int32(), 6)])
    new = pa.struct([numbered("u", pa.int64(), 7), numbered("a", pa.int64(), 6)])
    files = {
        "1": [("col-1", pa.int32(), 1, [1, 2, 3, 4]), ("a", pa.string(), 2, [*"abcd"]),
              ("col-s", old, 5, [{"a": 1}, None, {"a": 3}, {"a": None}])],
        "2": [("b", pa.float32(), 3, [0.5, None]), ("col-1", pa.int64(), 1, [5, 6]),
              ("col-s", new, 5, [{"a": 7, "u": 8}, {"a": 9, "u": 10}])],
    }  # fmt: skip
    features = ["columnMapping", "deletionVectors"]
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7}
    lines: list[dict[str, Any]] = [
        {"protocol": {**protocol, "readerFeatures": features, "writerFeatures": features}},
        {
            "metaData": {
                "id": "5d0c6a3c-0000-4000-8000-000000000000", "createdTime": 1,
                "format": {"provider": "parquet", "options": {}}, "partitionColumns": ["day"],
                "schemaString": json.dumps({"type": "struct", "fields": fields}),
                "configuration": {"delta.columnMapping.mode": mode, **VECTORS},
            }
        },
    ]  # fmt: skip
    for name, columns in files.items():
        schema = pa.schema([numbered(*about) for *about, _ in columns])
        table = pa.table([values for *_, values in columns], schema=schema)
        pq.write_table(table, uri / f"{name}.parquet")
        size = os.path.getsize(uri / f"{name}.parquet")
        add = {"path": f"{name}.parquet", "size": size, "modificationTime": 1, "dataChange": True}
        add["partitionValues"] = {"col-p": f"2026-01-0{name}"}
        lines.append({"add": {**add, "stats": json.dumps({"numRecords": len(table)})}})
    (uri / "_delta_log" / f"{0:020}.json").write_text("\n".join(map(json.dumps, lines)))
    return str(uri)


@pytest.mark.parametrize("mode", ["name", "id"])
def test_renamed_widened_and_missing_columns_stand_in_files_by_their_mapping(
    tmp_path: Path, mode: str
) -> None:
    uri = mapped(tmp_path, mode)
    delete_by_vector(uri, "1.parquet", [1, 3])
    assert ordered(list(tp.read_delta(uri))) == ordered(by_deltalake(uri).to_pylist())
    some = tp.read_delta(uri, columns=["s.w", "b", "day"])
    assert list(some)[::2] == [
        {"s": {"w": None}, "b": "a", "day": date(2026, 1, 1)},
        {"s": {"w": 8}, "b": None, "day": date(2026, 1, 2)},
    ]
    assert [row["x"] for row in tp.read_delta(uri, filter=[("b", ">", "a")])] == [3]
    assert [row["x"] for row in tp.read_delta(uri, filter=[("a", "<", 1.0)])] == [5]


def test_row_groups_and_files_without_a_matching_row_are_not_read(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    for day in range(3):
        table = pa.table({"day": [day] * 100, "x": range(100 * day, 100 * day + 100)})
        write_deltalake(uri, table, mode="append", partition_by=["day"])
    said = tp.read_delta(uri, filter=[("day", ">", 0), ("x", "<", 150)]).explain()
    assert (
        "1 of 1 row groups may have rows that match; 2 more files are left out by the log"
        in str(said)
    )
    assert len(tp.read_delta(uri, filter=[("day", "=", 1)])) == 100


def test_a_time_names_the_version_that_was_the_newest_then(uri: str) -> None:
    append(uri)
    times = [entry["timestamp"] for entry in DeltaTable(uri).history()]
    assert times[0] > times[1]
    then = np.datetime64(times[1], "ms").astype(object)
    assert len(tp.read_delta(uri, version=then)) == 40
    assert len(tp.read_delta(uri, version=f"{then.isoformat()}Z")) == 40
    with pytest.raises(
        tp.ConfigError, match=r"\(version\) must be a time at which there was the table"
    ):
        len(tp.read_delta(uri, version="2001-01-01"))


def test_bytes_that_part_a_table_are_those_that_were_written(tmp_path: Path) -> None:
    parts = [b"ab", b"\xff\n", None, b"ab", b"\\u0061b"]
    table = pa.table({"x": range(5), "part": pa.array(parts, pa.binary())})
    write_deltalake(str(tmp_path / "t"), table, partition_by=["part"])
    assert ordered(list(tp.read_delta(tmp_path / "t"))) == ordered(table.to_pylist())


def test_times_of_96_bits_may_be_after_the_year_2262(tmp_path: Path) -> None:
    times = [datetime(9999, 12, 31, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)]
    table = pa.table({"until": pa.array(times, pa.timestamp("us", "UTC"))})
    write_deltalake(tmp_path, table)
    (path,) = tmp_path.glob("*.parquet")
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)  # as Spark does
    assert list(tp.read_delta(tmp_path)) == table.to_pylist()


def test_locate_and_errors_count_deleted_rows_of_a_file(uri: str) -> None:
    add = max(
        pa.table(DeltaTable(uri).get_add_actions()).to_pylist(), key=lambda a: a["num_records"]
    )
    delete_by_vector(uri, add["path"], [0, 1, 4])
    pipe = tp.read_delta(uri, columns=["x"]).shuffle(20).batch(4)
    for step, batch in enumerate(pipe):
        for row, place in zip(batch, tp.locate(pipe, step, epoch=0).places, strict=True):
            assert pq.read_table(place.path, partitioning=None)["x"][place.row].as_py() == row["x"]
    assert "3 in 1 files" in str(pipe.explain())


# The version


def test_a_resume_reads_the_version_of_its_run_after_appends_and_compaction(uri: str) -> None:
    append(uri, 100)
    for resumes in (tp.Loader, lambda pipe: pipe):
        run: Any = tp.Loader(batches(uri))
        items = iter(run)
        state = [next(items), next(items), run.state_dict()][-1]
        count = len(by_deltalake(uri))
        append(uri, 200)
        DeltaTable(uri).optimize.compact()
        rest, after = list(items), list(run)
        assert len(seen(after)) == count
        resumed: Any = resumes(batches(uri))
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert [list(resumed), list(resumed)] == [rest, after]
        assert len(seen(batches(uri))) == count + 30


def test_windows_are_of_the_version_of_the_run(tmp_path: Path) -> None:
    def write(length: int) -> None:
        table = pa.table({"x": range(24), "series": [n // length for n in range(24)]})
        write_deltalake(tmp_path, table, mode="overwrite")

    def read() -> tp.Loader[Any]:
        windows = tp.read_delta(tmp_path).windows(2, within="series")
        return tp.Loader(windows.sharding_filter(2).shuffle(9, seed=1).batch(2).collate())

    write(4)
    loader = read()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    write(3)
    resumed = read()
    resumed.load_state_dict(state)
    wanted = [batch["x"].tolist() for batch in batches]
    assert len(wanted) == 5
    assert [batch["x"].tolist() for batch in resumed] == wanted


def test_the_end_of_an_epoch_keeps_the_version(uri: str) -> None:
    run = tp.Loader(batches(uri))
    assert len(seen(run)) == 40
    state = run.state_dict()
    append(uri)
    resumed = tp.Loader(batches(uri))
    resumed.load_state_dict(state)
    assert seen(resumed) == list(range(40))
    fresh = tp.Loader(batches(uri))
    fresh.load_state_dict(state, allow_changes=["version"])
    assert len(seen(fresh)) == 70
    assert fresh.state_dict()["epoch"] == 2


def test_ranks_may_change_while_the_table_grows(uri: str) -> None:
    def of_ranks(state: Any, count: int, steps: int) -> tuple[list[Any], Any]:
        given, states = [], []
        for rank in range(count):
            loader = tp.Loader(batches(uri).distributed(rank=rank, world_size=count))
            if state is not None:
                loader.load_state_dict(state)
            given += [batch for _, batch in zip(range(steps), loader, strict=False)]
            states.append(loader.state_dict())
        return given, tp.merge_states(states)

    whole, state, given = list(batches(uri)), None, list[Any]()
    for ranks, steps in ((1, 1), (2, 1), (1, 2), (4, 1)):
        some, state = of_ranks(state, ranks, steps)
        given += some
        append(uri, 1000 * steps)
        assert ordered(given) == ordered(whole[: len(given)])
    assert len(given) == len(whole) - 1 == 9  # four ranks give no other step
    assert seen(of_ranks(state, 1, 99)[0]) == list(range(40))


def test_another_version_is_refused_by_name_and_may_change_between_epochs(uri: str) -> None:
    run = tp.Loader(batches(uri))
    next(iter(run))
    within, start = run.state_dict(), tp.Loader(batches(uri)).state_dict()
    append(uri)
    for state in (within, start):
        with pytest.raises(tp.StateError, match="data/version: saved 0, now 1"):
            tp.Loader(batches(uri, version=1)).load_state_dict(state)
        tp.Loader(batches(uri, version=0)).load_state_dict(state)
    with pytest.raises(tp.StateError, match="may change only between epochs"):
        tp.Loader(batches(uri, version=1)).load_state_dict(within, allow_changes=["version"])
    for version in (1, None):
        loader = tp.Loader(batches(uri, version=version))
        loader.load_state_dict(start, allow_changes=["version"])
        assert len(seen(loader)) == 70


def test_a_version_that_was_vacuumed_is_named(uri: str) -> None:
    run = tp.Loader(batches(uri))
    next(iter(run))
    state = run.state_dict()
    table = DeltaTable(uri)
    table.delete("x < 20")
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(
        tp.MissingFilesError, match=r"version 0 .* cannot be read any more.* vacuum"
    ):
        tp.Loader(batches(uri)).load_state_dict(state)
    with pytest.raises(tp.MissingFilesError, match="read another one with version"):
        len(tp.read_delta(uri, version=0))
    table.create_checkpoint()
    (Path(uri) / "_delta_log" / f"{0:020}.json").unlink()
    with pytest.raises(tp.MissingFilesError, match=r"version 0 .* its log was cleaned up"):
        tp.Loader(batches(uri)).load_state_dict(state)
    assert len(tp.read_delta(uri)) == 20


def test_each_epoch_may_have_the_newest_version(uri: str) -> None:
    loader = tp.Loader(batches(uri, refresh="epoch"))
    for epoch in range(3):
        items = iter(loader)
        first, state = next(items), loader.state_dict()
        append(uri, 100 * (epoch + 1))
        rest = list(items)
        assert len(seen([first, *rest])) == 40 + 30 * epoch
        resumed = tp.Loader(batches(uri, refresh="epoch"))
        resumed.load_state_dict(state)
        assert list(resumed) == rest
        assert len(seen(resumed)) == 40 + 30 * (epoch + 1)


def test_a_mix_keeps_each_tables_version(uri: str, tmp_path: Path) -> None:
    other = created(tmp_path / "other", 20)

    def mixed() -> tp.Pipeline:
        parts = {"b": tp.read_delta(uri).shuffle(9), "a": tp.read_delta(other, refresh="epoch")}
        return tp.mix(parts).sharding_filter(2).batch(4)

    run = tp.Loader(mixed())
    items = iter(run)
    state = [next(items), run.state_dict()][-1]
    append(uri)
    append(other, 300)
    rest, after = list(items), list(run)
    resumed = tp.Loader(mixed())
    resumed.load_state_dict(state)
    assert [list(resumed), list(resumed)] == [rest, after]
    assert {300, 301} < {*seen(after)} - {500}
    assert 500 not in seen(after)


@pytest.mark.parametrize("filtered", [False, True])
def test_check_resume_passes(uri: str, filtered: bool) -> None:
    delete_by_vector(uri, pa.table(DeltaTable(uri).get_add_actions())["path"][0].as_py(), [0, 2])
    filter = [("x", ">", 7)] if filtered else None
    check_resume(batches(uri, filter=filter), epochs=2, processes=0, every=5)


@pytest.mark.usefixtures("failed_workers_let_go")
def test_a_plain_dataloader_needs_the_version(uri: str) -> None:
    loader = DataLoader(batches(uri), batch_size=None, num_workers=2)  # type: ignore[arg-type]
    with pytest.raises(tp.TopologyError, match="version of a table must be named"):
        list(loader)
    named = batches(uri, version=0)
    context = {"batch_size": None, "num_workers": 2, "multiprocessing_context": "forkserver"}
    loader = DataLoader(named, **context)  # type: ignore[arg-type]
    assert seen(loader) == list(range(40))


def test_a_table_on_s3_is_read_by_the_options_of_fsspec(s3: dict[str, Any], tmp_path: Path) -> None:
    options = {**s3, "client_kwargs": {"region_name": "us-east-1"}}
    own = {**of_object_store(options), "aws_conditional_put": "etag"}
    uri = "s3://test-read-delta/events"
    table = pa.table({"x": range(30), "part": [n % 3 for n in range(30)]})
    write_deltalake(uri, table, partition_by=["part"], storage_options=own)
    pipe = tp.read_delta(uri, storage_options=options, cache_dir=tmp_path / "kept")
    assert sorted(row["x"] for row in pipe) == list(range(30))
    assert s3["secret"] not in str(pipe) + str(pipe.explain())
    some = tp.read_delta(uri, storage_options=options, filter=[("part", "=", 1)])
    assert len(some) == 10
    with pytest.raises(tp.MissingFilesError, match="there is no Delta table at s3://"):
        len(tp.read_delta(f"{uri}-none", storage_options=options))


# Configs, and what is wrong


def test_yaml_both_ways(uri: str, tmp_path: Path) -> None:
    pipe = batches(uri, version=0, columns=["x"], filter=[["x", ">", 3]], on_error="skip")
    path = tmp_path / "pipe.yaml"
    path.write_text(pipe.to_yaml())
    assert tp.load(path) == pipe
    assert list(tp.load(path)) == list(pipe)


def test_wrong_options_and_tables_are_one_line_each(uri: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for options, kind, said in [
        ({"uri": str(empty)}, tp.MissingFilesError, "there is no Delta table at"),
        ({"uri": str(tmp_path / "nowhere")}, tp.MissingFilesError, "there is no Delta table at"),
        (
            {"uri": uri, "version": 9},
            tp.ConfigError,
            "at most the newest of the table .*, 0, got 9",
        ),
        ({"uri": uri, "version": -1}, tp.ConfigError, r"read_delta\(version\) must be"),
        ({"uri": uri, "version": "soon"}, tp.ConfigError, "a time such as"),
        ({"uri": uri, "columns": ["y"]}, tp.SchemaError, "'y'"),
        ({"uri": uri, "filter": [("y", ">", 1)]}, tp.SchemaError, "'y'"),
        ({"uri": uri, "version": 0, "refresh": "epoch"}, tp.ConfigError, "refresh"),
        ({"uri": 5}, tp.ConfigError, r"read_delta\(uri\) must be"),
    ]:
        with pytest.raises(kind, match=said) as caught:
            next(iter(tp.read_delta(**options)))
        assert "\n" not in str(caught.value)


def test_a_table_for_newer_readers_is_refused(uri: str) -> None:
    log = Path(uri) / "_delta_log" / f"{0:020}.json"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        for key in ("readerFeatures", "writerFeatures"):
            line.get("protocol", {}).get(key, []).append("colorOfFiles")
    log.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(tp.UnreadableError, match="colorOfFiles"):
        next(iter(tp.read_delta(uri)))


def test_a_column_may_be_called_variant_and_none_may_be_one(tmp_path: Path) -> None:
    uri, table = tmp_path / "t", pa.table({"variant": ["a", "b"], "x": [1, 2]})
    write_deltalake(str(uri), table)
    assert list(tp.read_delta(uri)) == table.to_pylist()
    log = uri / "_delta_log" / f"{0:020}.json"
    features = {"readerFeatures": ["variantType"], "writerFeatures": ["variantType"]}
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, **features}
    lines = [line for line in log.read_text().splitlines() if "protocol" not in json.loads(line)]
    text = "\n".join([json.dumps({"protocol": protocol}), *lines])
    assert r"\"type\":\"long\"" in text
    inner = r"{\"type\":\"array\",\"elementType\":\"variant\",\"containsNull\":true}"
    for kind in (r"\"variant\"", inner):
        log.write_text(text.replace(r"\"type\":\"long\"", rf"\"type\":{kind}"))
        with pytest.raises(tp.UnreadableError, match="type variant"):
            next(iter(tp.read_delta(uri)))


def test_public_buckets_need_no_credentials_for_the_log_either() -> None:
    assert of_object_store({"anon": True}) == {"skip_signature": "true"}
    assert of_object_store({"anon": False}) == {}


def test_rows_of_damaged_files_are_left_out_if_that_is_asked(uri: str) -> None:
    path = max(Path(uri).rglob("*.parquet"))
    count = pq.read_metadata(path).num_rows
    path.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(tp.UnreadableError):
        list(tp.read_delta(uri))
    assert len(list(tp.read_delta(uri, on_error="skip"))) == 40 - count


def test_a_table_without_rows_and_one_that_has_moved(uri: str, tmp_path: Path) -> None:
    run = tp.Loader(batches(uri))
    items = iter(run)
    next(items)
    state, moved = run.state_dict(), shutil.copytree(uri, tmp_path / "moved")
    resumed = tp.Loader(batches(str(moved)))
    resumed.load_state_dict(state)
    assert list(resumed) == list(items)
    DeltaTable(uri).delete()
    assert len(tp.read_delta(uri)) == 0
    assert list(tp.read_delta(uri)) == []


def test_the_folder_is_no_folder_of_plain_files(uri):
    held = len(list(tp.read_parquet(f"{uri}/**/*.parquet")))
    DeltaTable(uri).delete("x < 20")
    fsspec.filesystem("memory").put(uri, "/lake/table", recursive=True)
    for files in (uri, os.path.dirname(uri), [f"{uri}/"], "memory://lake", "memory://lake/*"):
        with pytest.raises(tp.ConfigError, match=r"a Delta table.*take read_delta\(\)") as caught:
            list(tp.read_parquet(files))
    assert str(caught.value.path).startswith("memory://")
    with pytest.raises(tp.ConfigError, match="a Delta table"):
        repack(uri, f"{uri}-packed")
    # Files that are named are taken as they are.
    assert len(list(tp.read_parquet(f"{uri}/**/*.parquet"))) > held
