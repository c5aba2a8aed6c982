"""read_iceberg: the rows that pyiceberg gives, of the snapshot that a run began with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import StaticTable
from pyiceberg.types import LongType

import trainpipes as tp
from iceberg_tables import SCHEMA, add_deletes, by_pyiceberg, created, history, lake, rows
from resuming import check_resume
from trainpipes.interfaces.source import Place
from trainpipes.sources.files.formats import plain
from trainpipes.sources.tables.table_files import TableFields

pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match")


def ordered(found: Any) -> list[str]:
    return sorted(map(repr, found))


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with load_catalog(**lake(tmp_path)) as catalog:
        yield catalog


@pytest.fixture
def table(catalog: Catalog) -> Any:
    return created(catalog)


def batches(table: Any, **options: Any) -> tp.Pipeline:
    return tp.read_iceberg(table, **options).sharding_filter(4).shuffle(20, seed=1).batch(4)


def seen(found: Any) -> list[int]:
    return sorted(row["x"] for batch in found for row in batch)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 40))]
)
def test_random_histories_give_the_rows_of_pyiceberg(catalog: Catalog, seed: int) -> None:
    table = history(catalog, seed)
    snapshots = [None, table.snapshots()[len(table.snapshots()) // 2].snapshot_id]
    for snapshot in snapshots:
        pipe, expected = tp.read_iceberg(table, snapshot), by_pyiceberg(table, snapshot)
        assert ordered(pipe) == ordered(expected)
        assert len(pipe) == len(expected)
        matching = [{"x": row["x"]} for row in expected if row["x"] < 900 and row["f"] > 4]
        some = tp.read_iceberg(table, snapshot, ["x"], [("x", "<", 900), ("f", ">", 4)])
        assert ordered(some) == ordered(matching)


def test_columns_of_files_are_known_by_their_ids(table: Any) -> None:
    with table.update_schema() as update:
        update.rename_column("text", "old")
    with table.update_schema() as update:
        update.add_column("text", LongType())
        update.update_column("x", LongType())
    schema = table.schema().as_arrow()
    more = rows(100, 9).drop_columns("text").append_column("text", pa.array(range(9)))
    table.append(more.append_column("old", pa.array(["new"] * 9)).select(schema.names).cast(schema))
    assert ordered(tp.read_iceberg(table)) == ordered(by_pyiceberg(table))
    assert len(list(tp.read_iceberg(table, filter=[("text", "<", 4)]))) == 4
    assert len(list(tp.read_iceberg(table, filter=[("old", "=", "row 3")]))) == 1


def test_files_without_ids_have_the_names_of_the_mapping(catalog: Catalog, tmp_path: Path) -> None:
    catalog.create_namespace("logs")
    path = tmp_path / "more.parquet"
    pq.write_table(rows(200, 5), path)
    plain = catalog.create_table("logs.plain", schema=SCHEMA)
    plain.add_files([f"file://{path}"])
    with plain.update_schema() as update:
        update.rename_column("x", "y")
    assert ordered(tp.read_iceberg(plain)) == ordered(by_pyiceberg(plain))
    assert [row["y"] for row in tp.read_iceberg(plain)] == list(range(200, 205))


def test_a_file_without_ids_is_refused_where_a_name_was_given_away(
    catalog: Catalog, tmp_path: Path
) -> None:
    catalog.create_namespace("logs")
    pq.write_table(pa.table({"a": [1], "b": [2], "c": [3]}), tmp_path / "more.parquet")
    schema = pa.schema([(name, pa.int64()) for name in "abc"])
    plain = catalog.create_table("logs.plain", schema=schema)
    plain.add_files([f"file://{tmp_path}/more.parquet"])
    for old, new in (("a", "t"), ("b", "a")):
        with plain.update_schema() as update:
            update.rename_column(old, new)
    with pytest.raises(tp.SchemaError, match=r"more\.parquet.* column 'a' may be 'a' and 'b'"):
        list(tp.read_iceberg(plain))
    assert list(tp.read_iceberg(plain, columns=["c"])) == [{"c": 3}]


def test_places_count_deleted_rows_and_a_time_names_a_snapshot(table: Any) -> None:
    file = max((task.file for task in table.scan().plan_files()), key=lambda f: f.record_count)
    add_deletes(table, file, [0, 2, 3])
    pipe = batches(table)
    assert "3 in 1 files" in str(pipe.explain())
    for step, batch in enumerate(pipe):
        for row, place in zip(batch, tp.locate(pipe, step, epoch=0).places, strict=True):
            assert pq.ParquetFile(place.path).read(["x"])["x"][place.row].as_py() == row["x"]
    then = np.datetime64(table.snapshots()[0].timestamp_ms, "ms").astype(object)
    assert len(tp.read_iceberg(table, then)) == 40
    with pytest.raises(tp.ConfigError, match="a time of a snapshot"):
        len(tp.read_iceberg(table, "2001-01-01"))


def test_a_resume_reads_the_snapshot_of_its_run(table: Any) -> None:
    run: Any = tp.Loader(batches(table))
    items = iter(run)
    state = [next(items), next(items), run.state_dict()][-1]
    table.append(rows(200, 30))
    with table.update_schema() as update:
        update.add_column("more", LongType())
    rest, after = list(items), list(run)
    resumed: Any = tp.Loader(batches(table))
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert [list(resumed), list(resumed)] == [rest, after]
    newer = tp.Loader(batches(table))
    assert len(seen(newer)) == 70
    start = newer.state_dict()
    assert "more" in next(iter(newer))[0]
    again: Any = tp.Loader(batches(table))
    again.load_state_dict(start)
    assert "more" in next(iter(again))[0]
    newest = table.current_snapshot().snapshot_id
    with pytest.raises(tp.StateError, match=f"data/version: saved .*, now {newest}"):
        tp.Loader(batches(table, snapshot_id=newest)).load_state_dict(state)
    given: list[int] = []
    for rank in range(2):
        part = tp.Loader(batches(table).distributed(rank=rank, world_size=2))
        part.load_state_dict(state)
        given += seen(part)
    assert sorted(given) == seen(rest)


def test_a_snapshot_whose_files_are_gone_is_named(table: Any) -> None:
    run = tp.Loader(batches(table))
    next(iter(run))
    state = run.state_dict()
    Path(next(iter(table.scan().plan_files())).file.file_path.removeprefix("file://")).unlink()
    with pytest.raises(tp.MissingFilesError, match=r"cannot be read any more: its file .* is gone"):
        tp.Loader(batches(table)).load_state_dict(state)
    with pytest.raises(tp.MissingFilesError, match=r"version 77 .* no such snapshot"):
        len(tp.read_iceberg(table, 77))
    with pytest.raises(tp.MissingFilesError, match=r"version 0 .* no such snapshot"):
        len(tp.read_iceberg(table, 0))


def test_each_epoch_may_have_the_newest_snapshot(table: Any) -> None:
    loader = tp.Loader(batches(table, refresh="epoch"))
    for epoch in range(2):
        assert len(seen(loader)) == 40 + 30 * epoch
        table.append(rows(100 * (epoch + 1), 30))


def test_check_resume_passes_and_yaml_goes_both_ways(table: Any, tmp_path: Path) -> None:
    add_deletes(table, next(iter(table.scan().plan_files())).file, [1])
    pipe = batches(table, columns=["x", "s.v"])
    check_resume(pipe, epochs=2, processes=0, every=5)
    path = tmp_path / "pipe.yaml"
    path.write_text(pipe.to_yaml())
    assert tp.load(path) == pipe
    assert list(tp.load(path)) == list(pipe)
    static = StaticTable.from_metadata(table.metadata_location)
    assert list(tp.read_iceberg(static)) == list(tp.read_iceberg(table))
    metadata = tp.read_iceberg(table.metadata_location.removeprefix("file://"))
    assert ordered(metadata) == ordered(tp.read_iceberg("logs.events", catalog=lake(tmp_path)))


def test_wrong_options_and_tables_are_one_line_each(table: Any, tmp_path: Path) -> None:
    known, nowhere = lake(tmp_path), {"type": "rest", "uri": "http://127.0.0.1:9"}
    for options, kind, said in [
        ({"table": "logs.none", "catalog": known}, tp.MissingFilesError, "logs.none"),
        ({"table": "logs.events", "catalog": nowhere}, tp.UnreadableError, "cannot be opened"),
        ({"table": "logs.events", "catalog": "none"}, tp.UnreadableError, "catalog none"),
        ({"table": str(tmp_path / "no.metadata.json")}, tp.MissingFilesError, "no.metadata.json"),
        ({"table": table, "columns": ["y"]}, tp.SchemaError, "'y'"),
        ({"table": table, "snapshot_id": "soon"}, tp.ConfigError, "a time such as"),
        ({"table": 5}, tp.ConfigError, r"read_iceberg\(table\) must be"),
    ]:
        with pytest.raises(kind, match=said) as caught:
            next(iter(tp.read_iceberg(**options)))
        assert "\n" not in str(caught.value)
    add_deletes(table, next(iter(table.scan().plan_files())).file, [1], "EQUALITY_DELETES")
    with pytest.raises(tp.UnreadableError, match="equality deletes"):
        len(tp.read_iceberg(table))


def test_locations_may_have_a_single_slash(tmp_path: Path) -> None:
    """As Spark writes those of this machine."""
    known = {**lake(tmp_path), "warehouse": f"file:{tmp_path}/warehouse"}
    with load_catalog(**known) as catalog:
        table = created(catalog)
        assert next(iter(table.scan().plan_files())).file.file_path.startswith("file:/tmp/")
        assert ordered(tp.read_iceberg(table)) == ordered(by_pyiceberg(table))


def test_a_metadata_file_of_a_store_is_opened_by_the_options(
    s3: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    properties = {"s3.endpoint": s3["endpoint_url"], "s3.access-key-id": s3["key"]}
    properties |= {"s3.secret-access-key": s3["secret"], "s3.region": "us-east-1"}
    known = {**lake(tmp_path), "warehouse": "s3://test-read-iceberg", **properties}
    with load_catalog(**known) as catalog:
        catalog.create_namespace("logs")
        table = catalog.create_table("logs.there", schema=SCHEMA)
        table.append(rows(0, 9))
        options = {**s3, "client_kwargs": {"region_name": "us-east-1"}}
        by_options = tp.read_iceberg(table.metadata_location, storage_options=options)
        by_properties = tp.read_iceberg(table.metadata_location, catalog=properties)
        assert ordered(by_options) == ordered(by_properties) == ordered(by_pyiceberg(table))


NESTED = pa.schema(
    [
        ("x", pa.int64()),
        ("l", pa.list_(pa.struct([("a", pa.string()), ("b", pa.int64())]))),
        ("m", pa.map_(pa.string(), pa.struct([("a", pa.int64())]))),
    ]
)


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_fields_within_lists_and_maps_are_renamed_and_given_away(
    catalog: Catalog, tmp_path: Path, kind: Any
) -> None:
    found = [
        {"x": 0, "l": [{"a": "p", "b": 1}, {"a": "q", "b": 2}], "m": [("k", {"a": 1})]},
        {"x": 1, "l": None, "m": None},
        {"x": 2, "l": [{"a": "r", "b": None}, None], "m": []},
    ]
    nested = pa.Table.from_pylist(found, schema=NESTED)
    inner = kind(NESTED.field("l").type.value_field)
    path = tmp_path / "more.parquet"
    pq.write_table(nested.set_column(1, "l", nested["l"].cast(inner)), path)
    catalog.create_namespace("logs")
    table = catalog.create_table("logs.nested", schema=NESTED)
    table.append(nested.take([0, 2]))  # pyiceberg writes empty lists for null
    table.add_files([f"file://{path}"])
    with table.update_schema() as update:
        update.rename_column("l.element.a", "old")
        update.rename_column("m.value.a", "n")
    with table.update_schema() as update:
        update.add_column(("l", "new"), LongType())
    of_lists = [{"old": "p", "b": 1, "new": None}, {"old": "q", "b": 2, "new": None}]
    wanted = [
        {"x": 0, "l": of_lists, "m": [("k", {"n": 1})]},
        {"x": 2, "l": [{"old": "r", "b": None, "new": None}, None], "m": []},
    ]
    more = [*wanted, {"x": 1, "l": None, "m": None}]
    assert ordered(tp.read_iceberg(table)) == ordered(wanted + more)


def test_a_name_within_lists_may_be_given_to_a_field_of_another_type() -> None:
    def numbered(name: str, kind: pa.DataType, number: int) -> pa.Field:
        return pa.field(name, kind, metadata={"PARQUET:field_id": str(number)})

    inner = pa.struct([numbered("old", pa.string(), 3), numbered("a", pa.int64(), 4)])
    field = numbered("l", pa.large_list(numbered("element", inner, 2)), 1)
    stored = pa.struct([numbered("a", pa.string(), 3)])
    column = pa.array([[{"a": "p"}], None, []], pa.list_(numbered("element", stored, 2)))
    fields = TableFields(pa.schema([field]), by_number=True)
    rows = fields.conformed(column, plain(field), field, lambda: Place("a.parquet"))
    assert rows.to_pylist() == [[{"old": "p", "a": None}], None, []]


def test_the_folder_is_no_folder_of_plain_files(table: Any) -> None:
    folder = table.location().removeprefix("file://")
    for files in (folder, str(Path(folder).parent)):
        with pytest.raises(tp.ConfigError, match=r"an Iceberg table.*take read_iceberg\(\)"):
            list(tp.read_parquet(files))
    assert len(list(tp.read_parquet(f"{folder}/data/**/*.parquet"))) == 40
