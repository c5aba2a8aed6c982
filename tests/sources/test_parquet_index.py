"""What the footers say: counts, one schema, sizes in memory, and every file that has no footer."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainpipes.errors import MissingFilesError, SchemaError, UnreadableError
from trainpipes.sources import parquet_footers as index_module
from trainpipes.sources.files.file_source import FileSource
from trainpipes.sources.files.list_files import ListFiles
from trainpipes.sources.parquet_footers import read_footers
from trainpipes.sources.read_parquet import ReadParquet


def source(folder: Path, columns: list[str] | None = None) -> FileSource:
    return ReadParquet(columns=columns)._open_on([ListFiles(urls=folder)])


def write(path: Path, table: pa.Table | dict[str, object], **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path, **options)
    return path


# Counts


def test_blocks_are_the_row_groups_of_all_files_in_order(tmp_path):
    write(tmp_path / "1.parquet", {"x": range(25)}, row_group_size=10)
    write(tmp_path / "2.parquet", {"x": pa.array([], pa.int64())})
    with pq.ParquetWriter(tmp_path / "3.parquet", pa.schema([("x", pa.int64())])) as writer:
        for rows in (0, 3, 0, 1):
            writer.write_table(pa.table({"x": pa.array(range(rows), pa.int64())}))
    with pq.ParquetWriter(tmp_path / "4.parquet", pa.schema([("x", pa.int64())])):
        pass  # no row groups at all
    write(tmp_path / "5.parquet", {"x": [7]})
    found = source(tmp_path)
    per_file = [
        pq.ParquetFile(path).metadata.num_row_groups for path in sorted(tmp_path.glob("*.parquet"))
    ]
    assert found.file_of_block.tolist() == np.repeat(range(5), per_file).tolist()
    assert found.lengths.dtype == found.file_of_block.dtype == np.int64
    assert [n for n in found.lengths.tolist() if n] == [10, 10, 5, 3, 1, 1]
    assert found.file_of_block[-1] == 4


def test_a_place_counts_rows_from_the_start_of_the_file(tmp_path):
    write(tmp_path / "1.parquet", {"x": range(5)})
    write(tmp_path / "2.parquet", {"x": range(25)}, row_group_size=10)
    place = source(tmp_path).place(2, 3)
    assert str(place) == f"{tmp_path}/2.parquet, row group 1, row 13"


def test_no_rows_at_all_is_allowed(tmp_path):
    write(tmp_path / "1.parquet", {"x": pa.array([], pa.int64())})
    found = source(tmp_path)
    assert found.lengths.sum() == 0
    assert found.row_bytes is None
    assert found.fingerprint()["rows"] == 0
    assert found.describe()


def test_a_footer_larger_than_the_first_read_is_read_whole(tmp_path, monkeypatch):
    write(tmp_path / "1.parquet", {f"c{n}": range(20) for n in range(30)}, row_group_size=1)
    monkeypatch.setattr(index_module, "TAIL_BYTES", 1000)
    found = source(tmp_path)
    assert found.lengths.tolist() == [1] * 20
    assert found.reader().read(19, 0, 1).column("c29").to_pylist() == [19]


def test_a_source_can_be_pickled_and_stays_small(tmp_path):
    write(tmp_path / "1.parquet", {"x": range(1000)}, row_group_size=1)
    found = source(tmp_path)
    found.reader().read(0, 0, 1)  # parses a footer, which does not travel
    sent = pickle.dumps(found)
    assert len(sent) < 60_000
    assert pickle.loads(sent).reader().read(999, 0, 1).to_pylist() == [{"x": 999}]


def test_explain_lines_name_files_row_groups_rows_and_memory(tmp_path):
    write(tmp_path / "1.parquet", {"x": range(25)}, row_group_size=10)
    lines = dict(source(tmp_path).describe())
    assert lines["files"].startswith("1, ")
    assert lines["row groups"] == "3, rows in each: 5 to 10 (median 10)"
    assert lines["rows"] == "25"
    assert "a row" in lines["in memory"]


# One schema


def test_columns_come_in_the_order_asked_for_in_all_files(tmp_path):
    write(tmp_path / "1.parquet", {"a": [1], "b": ["x"], "c": [0.5]})
    write(tmp_path / "2.parquet", {"c": [0.5], "b": ["x"], "a": [1]})
    assert source(tmp_path, ["c", "a"]).schema.names == ["c", "a"]
    assert source(tmp_path).schema.names == ["a", "b", "c"]


def test_a_field_of_a_struct_can_be_chosen(tmp_path):
    rows = [{"m": {"role": "user", "n": {"x": 1, "y": 2}, "text": "hi"}, "m2": 5}]
    write(tmp_path / "1.parquet", pa.Table.from_pylist(rows))
    found = source(tmp_path, ["m2", "m.text", "m.n.y"])
    row = {"m2": 5, "m": {"text": "hi", "n": {"y": 2}}}
    assert found.reader().read(0, 0, 1).to_pylist() == [row]
    with pytest.raises(SchemaError, match=r"no column 'm\.txt' \(did you mean 'm\.text'\?\)"):
        source(tmp_path, ["m.txt"])
    for name in ("m.", "m.n.", "m..x", ".m"):
        with pytest.raises(SchemaError, match=f"no column '{name}'"):
            source(tmp_path, [name])


WIDENED = {
    "null and text": (pa.nulls(1), pa.array(["a"]), pa.string()),
    "int32 and int64": (pa.array([1], pa.int32()), pa.array([1], pa.int64()), pa.int64()),
    "text and large text": (pa.array(["a"]), pa.array(["a"], pa.large_string()), pa.large_string()),
    "dictionary and text": (pa.array(["a"]).dictionary_encode(), pa.array(["b"]), pa.string()),
    "float and double": (pa.array([1.0], pa.float32()), pa.array([1.0]), pa.float64()),
    "lists": (pa.array([[1]], pa.list_(pa.int32())), pa.array([[1]]), pa.list_(pa.int64())),
    "text and view": (pa.array(["a"]), pa.array(["a"], pa.string_view()), pa.string()),
    "structs": (pa.array([{"a": None}]), pa.array([{"a": "x", "b": 1}]),
        pa.struct([("a", pa.string()), ("b", pa.int64())])),
    "decimal and int": (pa.array([Decimal("1.50")], pa.decimal128(18, 2)), pa.array([2**62]),
        pa.decimal128(21, 2)),
    "decimal and uint8": (pa.array([Decimal("1.50")], pa.decimal128(9, 2)),
        pa.array([255], pa.uint8()), pa.decimal128(9, 2)),
    "decimal of many digits and int": (pa.array([Decimal("1.5")], pa.decimal128(38, 30)),
        pa.array([-5]), pa.decimal256(49, 30)),
    "lists of decimals and ints": (pa.array([[Decimal("1.50")]], pa.list_(pa.decimal128(5, 2))),
        pa.array([[7]]), pa.list_(pa.decimal128(21, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", WIDENED)
def test_types_that_differ_are_widened_and_every_table_has_the_one_schema(tmp_path, name):
    first, second, wide = WIDENED[name]
    for folder, order in (("ab", (first, second)), ("ba", (second, first))):
        for n, column in enumerate(order):
            write(tmp_path / folder / f"{n}.parquet", {"x": column})
        found = source(tmp_path / folder)
        assert found.schema.field("x").type == wide
        reader = found.reader()
        tables = [reader.read(n, 0, 1) for n in range(2)]
        assert all(table.schema.equals(found.schema, check_metadata=True) for table in tables)
        for table, column in zip(tables, order, strict=True):
            value, wanted = table.column(0).to_pylist()[0], column.to_pylist()[0]
            assert value == ({"b": None, **wanted} if isinstance(wanted, dict) else wanted)


@pytest.mark.parametrize("held", ["as it is", "in a list", "in a struct", "in a map"])
def test_decimals_beside_floats_are_refused_as_none_holds_both(tmp_path, held):
    kinds = [pa.decimal128(18, 2), pa.float32()]
    values = [Decimal("90071992547409.93"), 1.5]
    if held == "in a list":
        kinds, values = [pa.list_(kind) for kind in kinds], [[value] for value in values]
    if held == "in a struct":
        kinds, values = [pa.struct({"p": k}) for k in kinds], [{"p": value} for value in values]
    if held == "in a map":
        kinds, values = [pa.map_(pa.string(), k) for k in kinds], [[("p", v)] for v in values]
    for n, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        write(tmp_path / f"{n}.parquet", {"price": pa.array([value], kind)})
    said = r"'price' is .*decimal128\(18, 2\).* in .*0\.parquet and .*float.* no type can hold both"
    with pytest.raises(SchemaError, match=said):
        source(tmp_path)


def test_nullable_and_not_is_nullable_and_metadata_is_dropped(tmp_path):
    strict = pa.schema([pa.field("x", pa.int64(), False, {"k": "v"})], {"more": "m"})
    write(tmp_path / "1.parquet", pa.table({"x": [1]}, schema=strict))
    write(tmp_path / "2.parquet", {"x": [None, 2]})
    found = source(tmp_path)
    assert found.schema.equals(pa.schema([("x", pa.int64())]), check_metadata=True)
    assert found.reader().read(1, 0, 2).to_pylist() == [{"x": None}, {"x": 2}]


def test_a_missing_column_names_the_first_file_and_the_nearest_name(tmp_path):
    write(tmp_path / "1.parquet", {"prompt": ["a"], "answer": ["b"]})
    with pytest.raises(SchemaError) as caught:
        source(tmp_path, ["promt"])
    assert str(caught.value) == (
        f"read_parquet(['promt']): no column 'promt' (did you mean 'prompt'?) in {tmp_path}/1.parquet; there "
        "are ['prompt', 'answer']"
    )
    assert caught.value.path == f"{tmp_path}/1.parquet"


def test_a_column_that_one_file_lacks_names_that_file_and_the_first(tmp_path):
    write(tmp_path / "1.parquet", {"prompt": ["a"], "id": [1]})
    write(tmp_path / "2.parquet", {"prompt": ["a"], "id": [1]})
    write(tmp_path / "3.parquet", {"Prompt": ["a"], "id": [1]})
    with pytest.raises(SchemaError, match=r"no column 'prompt' .*3\.parquet; .*1\.parquet has it$"):
        source(tmp_path, ["prompt"])
    assert source(tmp_path, ["id"]).schema.names == ["id"]
    with pytest.raises(
        SchemaError, match=r"1\.parquet has a column 'prompt' .*, and .*3\.parquet has not"
    ):
        source(tmp_path)


def test_two_columns_of_one_name_are_refused_where_they_are_chosen(tmp_path):
    twice = pa.Table.from_arrays([pa.array([1])] * 3, names=["x", "x", "y"])
    write(tmp_path / "1.parquet", twice)
    with pytest.raises(SchemaError, match="more than one column 'x'"):
        source(tmp_path)
    assert source(tmp_path, ["y"]).schema.names == ["y"]


# Files that are none


def test_every_unreadable_file_is_named_with_its_reason(tmp_path):
    good = write(tmp_path / "0.parquet", {"x": range(100)}).read_bytes()
    (tmp_path / "1.parquet").write_bytes(b"")
    (tmp_path / "2.parquet").write_bytes(b"hello, I am text\n" * 9)
    (tmp_path / "3.parquet").write_bytes(good[:-20])
    (tmp_path / "4.parquet").write_bytes(b"PAR1")
    (tmp_path / "5.parquet").write_bytes(good[:-8] + (9999).to_bytes(4, "little") + b"PAR1")
    length = int.from_bytes(good[-8:-4], "little")
    (tmp_path / "6.parquet").write_bytes(good[: -8 - length] + b"\xff" * length + good[-8:])
    (tmp_path / "7.parquet").write_bytes(good[:-4] + b"PARE")
    (tmp_path / "8.parquet").write_bytes(b"tiny")
    with pytest.raises(UnreadableError) as caught:
        source(tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == "read_parquet(): 8 of 9 files cannot be read as Parquet:"
    reasons = [line.split(".parquet: ", 1)[1] for line in lines[1:-1]]
    assert reasons[0] == "empty: 0 bytes"
    assert reasons[1] == "not a Parquet file (starts with b'hello, I am text')"
    assert reasons[2] == f"cut short: {len(good) - 20:,} bytes, its footer is missing"
    assert reasons[3] == "cut short: 4 bytes, its footer is missing"
    assert reasons[4] == f"damaged: {len(good):,} bytes long, and its footer would have 10,007"
    assert reasons[5].startswith("damaged footer: ")
    assert reasons[6] == "encrypted, which is not supported"
    assert reasons[7] == "not a Parquet file (starts with b'tiny')"
    assert lines[-1].startswith(
        "Replace or remove them, or leave them out with tp.list_files(...).filter("
    )
    assert caught.value.path == f"{tmp_path}/1.parquet"


def test_a_long_list_of_unreadable_files_is_cut(tmp_path):
    for n in range(130):
        (tmp_path / f"{n}.parquet").write_bytes(b"no")
    with pytest.raises(UnreadableError, match=r"(?s)130 of 130 .*99\.parquet: .*  … and 30 more\n"):
        source(tmp_path)


def test_files_that_vanish_between_listing_and_footer_are_missing(tmp_path):
    write(tmp_path / "1.parquet", {"x": [1]})
    files = ListFiles(urls=tmp_path).files()
    (tmp_path / "1.parquet").unlink()
    with pytest.raises(
        MissingFilesError, match=r"1\.parquet: it was listed, but is no longer there"
    ):
        read_footers(files, None, "read_parquet()")


def test_permission_denied_is_a_reason(tmp_path, monkeypatch):
    write(tmp_path / "1.parquet", {"x": [1]})

    def refuse(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(index_module, "read_footer", refuse)
    with pytest.raises(UnreadableError, match=r"1\.parquet: permission denied"):
        source(tmp_path)


# Sizes in memory


def texts(count: int, words: int, rng: random.Random) -> list[str]:
    stock = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(2000)]
    return [" ".join(rng.choices(stock, k=words)) for _ in range(count)]


@pytest.mark.sample(8)
@pytest.mark.parametrize("options", [{}, {"compression": "zstd", "row_group_size": 500}])
@pytest.mark.parametrize(
    "kind", ["ints", "tokens", "text", "few prompts", "many prompts", "labels", "sorted", "chat"]
)
def test_the_size_of_a_row_is_told_within_a_factor_of_two_and_a_half(tmp_path, kind, options):
    rng, rows = random.Random(0), 4000
    columns: dict[str, Callable[[], object]] = {
        "ints": lambda: [rng.randrange(50) for _ in range(rows)],
        "tokens": lambda: [
            [rng.randrange(100) for _ in range(rng.randint(5, 99))] for _ in range(rows)
        ],
        "text": lambda: texts(rows, 40, rng),
        "few prompts": lambda: rng.choices(texts(3, 300, rng), k=rows),
        "many prompts": lambda: rng.choices(["", *texts(200, 80, rng)], k=rows),
        "labels": lambda: rng.choices(["positive", "negative", "neutral"], k=rows),
        "sorted": lambda: sorted(rng.choices(["books", "code", "wikipedia"], k=rows)),
        "chat": lambda: [[{"role": "user", "content": text}] for text in texts(rows, 30, rng)],
    }
    table = pa.table({"x": columns[kind]()})
    write(tmp_path / "1.parquet", table, **options)
    row_bytes = source(tmp_path).row_bytes
    assert row_bytes is not None
    assert 0.85 < row_bytes / (table.nbytes / rows) < 2.5


def test_the_size_of_a_row_is_of_the_chosen_columns(tmp_path):
    write(tmp_path / "1.parquet", {"id": range(100), "idx": ["x" * 1000] * 100})
    assert (source(tmp_path, ["id"]).row_bytes or 0) < 10
