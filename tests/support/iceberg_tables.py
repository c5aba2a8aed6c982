"""Iceberg tables with random histories, and position deletes, which pyiceberg reads and does not write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.types import DoubleType, LongType, StringType

SCHEMA = pa.schema(
    [
        ("x", pa.int32()),
        ("day", pa.timestamp("us")),
        ("text", pa.string()),
        ("f", pa.float32()),
        ("s", pa.struct([("u", pa.int32()), ("v", pa.string())])),
    ]
)


def lake(folder: Path) -> dict[str, str]:
    uri, warehouse = f"sqlite:///{folder}/lake.db", f"file://{folder}/warehouse"
    return {"name": "lake", "type": "sql", "uri": uri, "warehouse": warehouse}


def rows(first: int, count: int, schema: pa.Schema = SCHEMA) -> pa.Table:
    """Rows for a table whose columns may have been renamed, widened or dropped since."""
    found = []
    for n in range(first, first + count):
        day = np.datetime64("2026-01-01", "us") + np.timedelta64(n % 3, "D")
        nested = {"u": n, "v": f"v{n}"} if n % 5 else None
        row = {"x": n, "day": day.astype(object), "text": f"row {n}", "f": n / 2, "s": nested}
        found.append({**dict.fromkeys(schema.names), **row})
    if any(
        row["s"] and not {*row["s"]} >= {f.name for f in schema.field("s").type} for row in found
    ):
        names = [field.name for field in schema.field("s").type]
        for row in found:
            if row["s"]:
                row["s"] = dict(zip(names, row["s"].values(), strict=False))
    return pa.Table.from_pylist(found, schema=schema)


def created(catalog: Catalog, count: int = 40) -> Any:
    catalog.create_namespace("logs")
    table = catalog.create_table("logs.events", schema=SCHEMA)
    with table.update_spec() as spec:
        spec.add_field("day", "day", "d")
        spec.add_field("x", "bucket[2]", "b")
    table.append(rows(0, count))
    return table


def history(catalog: Catalog, seed: int, steps: int = 7) -> Any:
    rng, table, first = np.random.default_rng(seed), created(catalog), 1000
    for step in range(steps):
        first, schema = first + 100, table.schema().as_arrow()
        kind = rng.choice(
            [
                "append",
                "delete",
                "positions",
                "overwrite",
                "add",
                "rename",
                "widen",
                "drop",
                "upsert",
            ],
            p=[0.2, 0.15, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05],
        )
        if kind == "append":
            table.append(rows(first, int(rng.integers(1, 25)), schema))
        elif kind == "delete":
            table.delete(f"x < {int(rng.integers(0, 1200))} and x >= {int(rng.integers(0, 20))}")
        elif kind == "positions":
            delete_positions(table, rng)
        elif kind == "overwrite":
            table.overwrite(rows(first, 20, schema), "x < 12")
        elif kind == "add":
            with table.update_schema() as update:
                update.add_column(f"c{step}", StringType())
                update.add_column(f"d{step}", LongType())
        elif kind == "rename":
            with table.update_schema() as update:
                old = schema.field("s").type.field(0).name
                update.rename_column(f"s.{old}", "w" if old == "u" else "u")
        elif kind == "widen":
            with table.update_schema() as update:
                update.update_column("x", LongType())
                update.update_column("f", DoubleType())
        elif kind == "drop" and schema.names[-1] not in SCHEMA.names:
            with table.update_schema() as update:
                update.delete_column(schema.names[-1])
        elif kind == "upsert":
            table.overwrite(rows(5, 9, schema), "x >= 5 and x < 14")
    return table


def by_pyiceberg(table: Any, snapshot: int | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table.scan(snapshot_id=snapshot).to_arrow().to_pylist()
    return found


def delete_positions(table: Any, rng: np.random.Generator, share: float = 0.3) -> None:
    """A snapshot in which some rows of a file are deleted by a file of positions."""
    tasks = list(table.scan().plan_files())
    if tasks:
        file = tasks[int(rng.integers(len(tasks)))].file
        gone = np.flatnonzero(rng.random(file.record_count) < share)
        if len(gone):
            add_deletes(table, file, gone.tolist())


def add_deletes(table: Any, file: Any, gone: list[int], kind: str = "POSITION_DELETES") -> None:
    path = f"{file.file_path}-{table.current_snapshot().snapshot_id}-deletes.parquet"
    schema = pa.schema(
        [
            pa.field("file_path", pa.string(), False, {"PARQUET:field_id": "2147483546"}),
            pa.field("pos", pa.int64(), False, {"PARQUET:field_id": "2147483545"}),
        ]
    )
    deletes = pa.table([[file.file_path] * len(gone), gone], schema=schema)
    pq.write_table(deletes, path.removeprefix("file://"))
    about = DataFile.from_args(
        content=DataFileContent[kind], file_path=path, file_format=FileFormat.PARQUET,
        partition=file.partition, record_count=len(gone), equality_ids=[1] if "EQ" in kind else None,
        file_size_in_bytes=Path(path.removeprefix("file://")).stat().st_size,
        column_sizes={}, value_counts={}, null_value_counts={}, nan_value_counts={}, lower_bounds={},
        upper_bounds={}, key_metadata=None, split_offsets=[4], sort_order_id=None,
    )  # fmt: skip
    about.spec_id = file.spec_id
    with table.transaction() as change, change.update_snapshot().fast_append() as update:
        update.append_data_file(about)
