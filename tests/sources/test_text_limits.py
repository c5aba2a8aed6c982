"""Files of text that are large in one way: many columns, long cells, long rows, a new field in each row. Time
and memory grow with their size, and not with its square; or they are refused."""

from __future__ import annotations

import gzip
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

import trainpipes as tp


def seconds(read: Callable[[], object]) -> float:
    """What a reading takes of the processor, the better of two."""
    found = []
    for _ in range(2):
        start = time.process_time()
        read()
        found.append(time.process_time() - start)
    return min(found)


def wide(folder: Path, kind: str, columns: int) -> tp.Pipeline:
    """Three rows of so many columns."""
    names = [f"c{n}" for n in range(columns)]
    path = folder / f"{columns}.{kind}"
    if kind == "csv":
        path.write_text(",".join(names) + "\n" + (",".join(["1"] * columns) + "\n") * 3)
        return tp.read_csv(path)
    if kind == "jsonl":
        path.write_text((json.dumps(dict.fromkeys(names, 1)) + "\n") * 3)
        return tp.read_json(path)
    pq.write_table(pa.table({name: [1, 2, 3] for name in names}), path)
    return tp.read_parquet(path)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_the_time_of_wide_rows_grows_with_their_columns(tmp_path, kind):
    few, many = wide(tmp_path, kind, 500), wide(tmp_path, kind, 2000)
    rows = list(many)
    assert len(rows[0]) == 2000
    assert seconds(lambda: list(many)) < 9 * seconds(lambda: list(few))


def test_the_time_of_a_long_cell_grows_with_its_length(tmp_path):
    def read(size: int) -> list[Any]:
        path = tmp_path / f"{size}.csv"
        path.write_text(f"id,text,n\n1,,0.5\n2,{'x' * size},\n")
        return list(tp.read_csv(path))

    assert read(4 << 20) == [
        {"id": 1, "text": None, "n": 0.5},
        {"id": 2, "text": "x" * (4 << 20), "n": None},
    ]
    assert seconds(lambda: read(16 << 20)) < 9 * seconds(lambda: read(4 << 20))


@pytest.mark.parametrize("form", ["lines", "array", "nested"])
def test_a_new_field_in_each_row_is_refused_before_it_fills_the_memory(tmp_path, form):
    rows: list[Any] = [{"id": n, f"key{n}": n} for n in range(20_000)]
    if form == "nested":
        rows = [{"id": row.pop("id"), "all": [row]} for row in rows]
    path = tmp_path / "x.json"
    path.write_text(
        json.dumps(rows) if form == "array" else "".join(json.dumps(row) + "\n" for row in rows)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        tp.UnreadableError, match=r"x\.json: 20,000 rows have 20,00\d different fields .*schema="
    ):
        list(tp.read_json(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    known = tp.read_json(path, schema=pa.schema([("id", pa.int64())]))
    assert [row["id"] for row in known] == list(range(20_000))


def test_many_fields_that_some_rows_lack_are_read(tmp_path):
    rows = [{f"key{n % 400}": n, f"key{(n * 7) % 400}": n} for n in range(3_000)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(tp.read_json(tmp_path / "x.jsonl"))
    assert [{k: v for k, v in row.items() if v is not None} for row in found] == rows


LONG = {
    "x.jsonl": (tp.read_json, b'{"a": "b"}\n' * 3 + b'{"a": "%s"}\n', 4),
    "x.json": (tp.read_json, b'[{"a": "b"},\n{"a": "%s"}]', 2),
    "x.csv": (tp.read_csv, b'a,b\n1,"2\n"\n\n1,%s\n', 5),
    "x.txt": (tp.read_text, b"a\n\n%s", 3),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", LONG)
def test_a_row_that_is_too_long_is_refused_by_its_line(tmp_path, name, compressed):
    read, content, line = LONG[name]
    path = tmp_path / (name + ".gz" * compressed)
    for size in (5_000, 3_000_000):  # within what is read at once, and beyond it
        whole = content % (b"0" * size)
        path.write_bytes(gzip.compress(whole) if compressed else whole)
        rows = list(read(path))
        assert size <= max(len(str(row)) for row in rows) <= size + 100
        for most in (size // 2, size - 1):
            with pytest.raises(
                tp.UnreadableError, match=rf"line {line}: a row here has more than {most:,} bytes"
            ) as caught:
                list(read(path, max_row_bytes=most, index=True))
            assert str(path) in str(caught.value)
        assert list(read(path, max_row_bytes=f"{size + 100}B", index=True)) == rows
        path.unlink()


def test_a_bomb_is_refused_in_bounded_memory(tmp_path):
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(bytes(300_000_000), 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for unit in ("line", "paragraph", "document"):
        with pytest.raises(
            tp.UnreadableError, match="line 1: a row here has more than 256,000,000"
        ):
            list(tp.read_text(path, unit))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


@pytest.mark.parametrize("given", [0, "many", 3_000_000_000, None])
def test_a_limit_that_is_none_is_refused(given):
    with pytest.raises(
        tp.ConfigError, match=r"read_csv\(max_row_bytes\) must be a number of bytes"
    ):
        tp.list_files("x.csv").read_csv(max_row_bytes=given)


def test_a_limit_is_no_part_of_a_state(tmp_path):
    (tmp_path / "x.txt").write_text("a\nb\nc\n")
    pipe = tp.read_text(tmp_path / "x.txt", max_row_bytes=100)
    rows = iter(pipe)
    next(rows)
    other = tp.read_text(tmp_path / "x.txt")
    other.load_state_dict(pipe.state_dict())
    assert [row["text"] for row in other] == ["b", "c"]


@pytest.mark.parametrize(("read", "name"), [(tp.read_json, "x.jsonl"), (tp.read_csv, "x.csv")])
def test_one_large_float_has_little_parsed_again(tmp_path, read, name, monkeypatch):
    ids, count = 10**15, 40_000
    parsed: list[int] = []

    def counted(parse: Callable[..., Any]) -> Callable[..., Any]:
        def instead(data: Any, *args: Any, **options: Any) -> Any:
            parsed.append(len(data) if isinstance(data, bytes | str) else data.size())
            return parse(data, *args, **options)

        return instead

    monkeypatch.setattr(json, "loads", counted(json.loads))
    monkeypatch.setattr(csv, "read_csv", counted(csv.read_csv))

    def parsed_with(value: str) -> int:
        values = [value] + ["0.5"] * (count - 1)
        lines = [
            f'{{"id": {ids + n}, "v": {v}, "text": "{"words " * 20}"}}'
            if name == "x.jsonl"
            else f"{ids + n},{v},{'words ' * 20}"
            for n, v in enumerate(values)
        ]
        head = [] if name == "x.jsonl" else ["id,v,text"]
        (tmp_path / name).write_text("\n".join([*head, *lines, ""]))
        parsed.clear()
        assert len(list(read(tmp_path / name).batch(1000))) == 40
        return sum(parsed)

    more = parsed_with("1e17") - parsed_with("1.5")
    # Of CSV, the columns of large floats are read as text, too.
    assert more < (1000 if name == "x.jsonl" else 2 * (tmp_path / name).stat().st_size)
