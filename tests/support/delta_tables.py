"""Delta tables with random histories, and deletion vectors, which deltalake reads and does not write."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder, write_deltalake

VECTORS = {"delta.enableDeletionVectors": "true"}
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def rows(first: int, count: int, **more: Any) -> pa.Table:
    x = np.arange(first, first + count)
    columns = {"x": x, "part": [f"p {n % 3}/%" if n % 7 else None for n in x.tolist()]}
    nested = [{"u": n, "v": [n, n + 1]} if n % 5 else None for n in x.tolist()]
    return pa.table({**columns, "text": [f"row {n}" for n in x.tolist()], "s": nested, **more})


def created(folder: Path, count: int = 40) -> str:
    uri = str(folder / "a table")
    write_deltalake(uri, rows(0, count), partition_by=["part"], configuration=VECTORS)
    return uri


def history(folder: Path, seed: int, steps: int = 7) -> str:
    """A table after random changes."""
    rng, uri, first = np.random.default_rng(seed), created(folder), 1000
    for step in range(steps):
        table, low = DeltaTable(uri), int(rng.integers(0, 40))
        kind = rng.choice(
            [
                "append",
                "column",
                "delete",
                "vector",
                "update",
                "merge",
                "compact",
                "checkpoint",
                "wipe",
            ],
            p=[0.2, 0.1, 0.1, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05],
        )
        first += 100
        if kind == "append":
            write_deltalake(
                uri, rows(first, int(rng.integers(1, 30))), mode="append", schema_mode="merge"
            )
        elif kind == "column":
            more = {f"c{step}": np.arange(10.0), f"d{step}": [f"{n}" for n in range(10)]}
            write_deltalake(uri, rows(first, 10, **more), mode="append", schema_mode="merge")
        elif kind == "delete":
            table.delete(f"x % 5 = {low % 5} AND x > {low}")
        elif kind == "vector":
            with_vector(uri, rng)
        elif kind == "update":
            table.update(updates={"text": "concat(text, '!')"}, predicate=f"x < {low}")
        elif kind == "merge":
            source = rows(low, 20).select(["x", "part", "text"])
            merge = table.merge(source, "t.x = s.x", source_alias="s", target_alias="t")
            merge.when_matched_update({"text": "'merged'"}).when_not_matched_insert(
                {"x": "s.x", "part": "s.part", "text": "s.text"}
            ).execute()
        elif kind == "compact":
            table.optimize.compact()
        elif kind == "checkpoint":
            table.create_checkpoint()
        else:
            write_deltalake(uri, rows(first, 30), mode="overwrite", schema_mode="overwrite")
    return uri


def by_deltalake(uri: str, version: int | None = None) -> pa.Table:
    table = DeltaTable(uri, version=version)
    found = pa.table(QueryBuilder().register("t", table).execute("select * from t").read_all())
    return found.cast(pa.schema(table.schema().to_arrow()))


def ordered(rows: list[Any]) -> list[str]:
    return sorted(map(repr, rows))


def with_vector(uri: str, rng: np.random.Generator, share: float = 0.3) -> dict[str, list[int]]:
    """A version in which some rows of a file are deleted by a deletion vector."""
    table = DeltaTable(uri)
    adds = pa.table(table.get_add_actions()).to_pylist()
    gone = {}
    if adds:
        add = adds[int(rng.integers(len(adds)))]
        rows = int(add["num_records"] or 0)
        deleted = np.flatnonzero(rng.random(rows) < share).tolist()
        if deleted:
            delete_by_vector(uri, add["path"], deleted)
            gone[add["path"]] = deleted
    return gone


def delete_by_vector(uri: str, path: str, deleted: list[int]) -> None:
    version = DeltaTable(uri).version()
    logged: list[dict[str, Any]] = []
    for log in sorted(Path(uri, "_delta_log").glob("*.json")):
        logged += [json.loads(line) for line in log.read_text().splitlines() if line]
    add = [line["add"] for line in logged if line.get("add", {}).get("path") == path][-1]
    data = roaring(deleted)
    vector = {"storageType": "i", "pathOrInlineDv": z85(data), "sizeInBytes": len(data)}
    removed = {key: add[key] for key in ("path", "partitionValues", "size")}
    removed |= {"dataChange": True, "deletionTimestamp": 1, "extendedFileMetadata": True}
    if "deletionVector" in add:
        removed["deletionVector"] = add["deletionVector"]
    stats = {**json.loads(add["stats"]), "tightBounds": False}
    added = {**add, "stats": json.dumps(stats)}
    added["deletionVector"] = {**vector, "cardinality": len(deleted)}
    lines = [{"remove": removed}, {"add": added}]
    text = "\n".join(map(json.dumps, lines))
    Path(uri, "_delta_log", f"{version + 1:020}.json").write_text(text)


def roaring(rows: list[int]) -> bytes:
    """Numbers below 65,536 as Delta's bitmaps have them, of a length that can be divided by four."""
    head = struct.pack("<IIHHI", 12346, 1, 0, len(rows) - 1, 16)
    data = struct.pack("<IQI", 1681511377, 1, 0) + head + struct.pack(f"<{len(rows)}H", *rows)
    return data + bytes(-len(data) % 4)


def z85(data: bytes) -> str:
    text = ""
    for at in range(0, len(data), 4):
        number, part = int.from_bytes(data[at : at + 4], "big"), ""
        for _ in range(5):
            number, digit = divmod(number, 85)
            part = _DIGITS[digit] + part
        text += part
    return text
