"""Files of many columns, which are decoded and put in order in parts, give the rows that others give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from resuming import check_resume
from trainpipes.sources import read_parquet
from trainpipes.testing import digest

ROWS = 450


def numbers() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    floats = {f"float{n}": draw.standard_normal(ROWS).astype(np.float32) for n in range(20)}
    return floats | {f"int{n}": draw.integers(-9, 9, ROWS) for n in range(10)}


def with_nulls() -> dict[str, Any]:
    columns = numbers()
    empty = np.random.default_rng(1).integers(0, 4, ROWS) == 0
    for n in range(0, 20, 2):
        columns[f"float{n}"] = pa.array(columns[f"float{n}"], mask=empty)
    return columns


def with_others() -> dict[str, Any]:
    texts = pa.array([f"text {n % 7}" * (n % 3) for n in range(ROWS)])
    lists = pa.array([list(range(n % 5)) for n in range(ROWS)])
    structs = pa.array([{"a": n, "b": [n, None]} for n in range(ROWS)])
    columns = {"text": texts, "dictionary": texts.dictionary_encode(), **numbers()}
    return (
        columns | {"list": lists, "yes": pa.array(np.arange(ROWS) % 3 == 0)} | {"struct": structs}
    )


TABLES: dict[str, Callable[[], dict[str, Any]]] = {
    "numbers": numbers, "nulls": with_nulls, "others": with_others,
}  # fmt: skip


def write(folder: Path, kind: str, group_rows: int) -> tuple[str, pa.Table]:
    table = pa.table(TABLES[kind]())
    for number in range(3):
        part = table.slice(150 * number, 150)
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=group_rows)
    return str(folder / "*.parquet"), table


def taken(paths: str, threads: int, **options: Any) -> list[Any]:
    pipe = tp.read_parquet(paths, **options).sharding_filter(2).shuffle(100, seed=1).batch(32)
    return [*tp.Loader(pipe.repeat(2), threads=threads)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("group_rows", [7, 50, 150])
def test_threads_and_pieces_change_no_row(
    tmp_path: Path, kind: str, group_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, table = write(tmp_path, kind, group_rows)
    alone = taken(paths, 0)
    expected = digest(alone)
    names = table.column_names
    seen = sorted(repr(row) for batch in alone for row in batch)
    assert seen == sorted([repr(row) for row in table.to_pylist()] * 2)
    assert digest(taken(paths, 2)) == expected
    assert digest(taken(paths, 2, columns=names[::-1])) == digest(
        [[{name: row[name] for name in names[::-1]} for row in batch] for batch in alone]
    )
    for most in ("WIDE_BYTES", "WHOLE_WIDE_BYTES", "BATCH_BYTES"):
        monkeypatch.setattr(read_parquet, most, 4096)  # several pieces of a row group
    monkeypatch.setattr(read_parquet, "BUFFER_BYTES", 64)  # columns are read bit by bit
    for threads in (0, 2):
        assert digest(taken(paths, threads)) == expected


@pytest.mark.parametrize("threads", [0, 2])
def test_it_goes_on_from_within_each_window(tmp_path: Path, threads: int) -> None:
    paths, _ = write(tmp_path, "others", 55)

    def loader() -> tp.Loader:
        pipe = tp.read_parquet(paths, columns=[*numbers(), "text"]).shuffle(125, seed=1)
        return tp.Loader(pipe.batch(16).collate(), threads=threads)

    check_resume(loader, points=3, processes=0)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_damaged_column_is_named_whoever_reads_it(tmp_path: Path, threads: int) -> None:
    table = pa.table(numbers())
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=150, compression="none", write_page_checksum=True)
    chunk = pq.read_metadata(path).row_group(1).column(25)
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size - 9] ^= 0xFF
    path.write_bytes(content)
    pipe = tp.read_parquet(str(path)).shuffle(200, seed=1).batch(32).collate()
    with pytest.raises(tp.UnreadableError, match=r"a\.parquet") as raised:
        [*tp.Loader(pipe, threads=threads)]
    assert raised.value.row == 150
    left = tp.read_parquet(str(path), on_error="skip").shuffle(200, seed=1).batch(32)
    rows = [row["float0"] for batch in tp.Loader(left, threads=threads) for row in batch]
    assert len(rows) == ROWS - 150
