"""A filter of a reader gives the rows that match, all of them, and reads no more row groups than it must."""

from __future__ import annotations

import operator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import examples
from resuming import check_resume
from trainpipes import Pipeline
from trainpipes.errors import ConfigError, SchemaError, StateError, UnreadableError

NAN = float("nan")

#: Types of columns, and values that are at their ends, equal, close to each other, or not in an order.
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "i8": (pa.int8(), [-128, -1, 0, 1, 5, 127]),
    "i64": (pa.int64(), [-(2**63), -1, 0, 1, 5, 2**63 - 1]),
    "u32": (pa.uint32(), [0, 1, 5, 2**31, 2**32 - 1]),
    "u64": (pa.uint64(), [0, 1, 5, 2**63, 2**64 - 1]),
    "f32": (pa.float32(), [NAN, -0.0, 0.0, 1.0, 1.5, float("inf"), -float("inf")]),
    "f64": (pa.float64(), [NAN, -0.0, 0.0, 1.0, 1.5, float("inf"), -float("inf")]),
    "flag": (pa.bool_(), [True, False]),
    "text": (pa.string(), ["", "a", "b", "ä", "aaa" * 40, "aaa" * 40 + "b", "\U0010ffff" * 30]),
    "large": (pa.large_string(), ["", "a", "b", "zz"]),
    "named": (pa.dictionary(pa.int32(), pa.string()), ["a", "b", "c"]),
    "bytes": (pa.binary(), [b"", b"\x00", b"a", b"\xff", b"\xff" * 70, b"\xff" * 71]),
    "day": (pa.date32(), [date(1970, 1, 1), date(1969, 12, 31), date(2024, 2, 29)]),
    "at": (pa.timestamp("us"), [datetime(1970, 1, 1), datetime(1969, 1, 1, 1), datetime(2024, 2, 2)]),
    "at_s": (pa.timestamp("s", "UTC"), [datetime(n, 1, 1, tzinfo=UTC) for n in (1969, 2024)]),
    "price": (pa.decimal128(9, 2), [Decimal("-1.50"), Decimal("0.00"), Decimal("1.50"), Decimal("9.99")]),
    "small": (pa.decimal128(4, 1), [Decimal("-1.5"), Decimal("0.0"), Decimal("99.9")]),
    "huge": (pa.decimal256(60, 2), [Decimal("-1.50"), Decimal("0.00"), Decimal("1e40")]),
    "none": (pa.null(), [None]),
}  # fmt: skip
#: NaN is what footers are silent about.
NAMES = [*VALUES, *["f32", "f64"] * 4]
COMPARE = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


@st.composite
def tables(draw: st.DrawFn, names: list[str]) -> pa.Table:
    """Rows whose values are often all alike or all null in a row group."""
    groups = draw(st.integers(1, 4))
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for _ in range(groups):
        for name in names:
            values = [*VALUES[name][1], None]
            chosen = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2))
            columns[name] += draw(st.lists(st.sampled_from(chosen), min_size=3, max_size=3))
    arrays = {name: pa.array(column, VALUES[name][0]) for name, column in columns.items()}
    struct = pa.StructArray.from_arrays(
        [arrays[names[0]].dictionary_decode() if names[0] == "named" else arrays[names[0]]],
        ["x"],
        mask=pa.array([draw(st.booleans()) for _ in range(3 * groups)]),
    )
    rows = pa.array(range(3 * groups))
    return pa.table({**arrays, "inner": struct, "row": rows})


@st.composite
def filters(draw: st.DrawFn, names: list[str], table: pa.Table, depth: int = 2) -> pc.Expression:
    if depth and draw(st.integers(0, 2)):
        one, other = (draw(filters(names, table, depth - 1)) for _ in range(2))
        return draw(st.sampled_from([one & other, one | other, ~one, one & ~other]))
    name = draw(st.sampled_from(names))
    kind, values = VALUES[name]
    field = pc.field("inner", "x") if name == names[0] and draw(st.booleans()) else pc.field(name)
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    own = [one for one in table[name].to_pylist() if one is not None]
    value = draw(st.sampled_from([*values, *own]))
    choice = draw(st.integers(0, 9))
    if choice == 0:
        return draw(st.sampled_from([field.is_null(), field.is_valid()]))
    if choice == 1 and pa.types.is_floating(kind):
        return draw(st.sampled_from([field.is_nan(), field.is_null(nan_is_null=True)]))
    if pa.types.is_null(kind):
        return field.is_null()
    if choice == 2 and not pa.types.is_decimal256(kind):
        return field.isin(pa.array(draw(st.lists(st.sampled_from(values), max_size=3)), kind))
    if choice == 3 and pa.types.is_string(kind):
        return pc.starts_with(field, "a")
    compared = draw(st.sampled_from(COMPARE))(field, pa.scalar(value, kind))
    return (compared == False) if choice == 4 else compared  # noqa: E712


@examples(100)
@given(data=st.data())
def test_no_row_that_matches_is_left_out_and_none_is_given_that_does_not(data):
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    table = data.draw(tables(names))
    filter = data.draw(filters(names, table))
    options: dict[str, Any] = {
        "row_group_size": 3,
        "use_dictionary": data.draw(st.booleans()),
        "write_statistics": data.draw(st.sampled_from([True, True, True, False])),
        "store_schema": data.draw(st.booleans()),
    }
    cut = data.draw(st.integers(0, len(table)))
    try:
        wanted = table.filter(filter)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return  # Arrow has no such function of this type
    with TemporaryDirectory() as folder:
        pq.write_table(table.slice(0, cut), f"{folder}/0.parquet", **options)
        pq.write_table(table.slice(cut), f"{folder}/1.parquet", **options)
        found = list(tp.read_parquet(folder, filter=filter))
        chosen = list(tp.read_parquet(folder, ["row"], filter=filter))
    assert [row["row"] for row in found] == wanted["row"].to_pylist(), str(filter)
    assert chosen == wanted.select(["row"]).to_pylist()
    assert list(found[0] if found else table.column_names) == table.column_names


#: Rows of four row groups: small ones, large ones, some null, all null.
GROUPS = [[1, 2], [8, 9], [1, None], [None, None]]


INTEGER = pa.int64()


def written(folder: Path, kind: pa.DataType = INTEGER, **options: Any) -> str:
    path = str(folder / "rows.parquet")
    values = pa.array([n for group in GROUPS for n in group], kind)
    table = pa.table(
        {"x": values, "row": range(len(values)), "text": [f"row {n}" for n in range(8)]}
    )
    pq.write_table(table, path, row_group_size=2, write_page_checksum=True, **options)
    return path


def damage(path: str, groups: set[int]) -> None:
    """Change the bytes of row groups, so that to read one is an error."""
    metadata = pq.read_metadata(path)
    content = bytearray(Path(path).read_bytes())
    for group in groups:
        chunks = [metadata.row_group(group).column(n) for n in range(metadata.num_columns)]
        for chunk in chunks:
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            stop = start + chunk.total_compressed_size
            content[stop - 4 : stop] = bytes(255 - byte for byte in content[stop - 4 : stop])
    Path(path).write_bytes(content)


def said(pipe: Pipeline) -> str:
    return dict(pipe.explain().lines)["filter"]


@pytest.mark.parametrize(
    ("filter", "read"),
    [
        (pc.field("x") > 5, {1}),
        (pc.field("x") == 1, {0, 2}),
        (pc.field("x") == 5, set()),
        (pc.field("x") != 1, {0, 1}),
        (~(pc.field("x") > 5), {0, 2}),
        (pc.field("x").is_null(), {2, 3}),
        (pc.field("x").is_valid(), {0, 1, 2}),
        (pc.field("x").isin([9, 10]), {1}),
        ((pc.field("x") == 1) & (pc.field("row") > 3), {2}),
        ((pc.field("x") == 9) | (pc.field("row") == 7), {1, 3}),
        (pc.field("text") > "row 6", {3}),
        (pc.field("x") + 1 > 9, {0, 1}),  # of a sum it is told where all values are alike
    ],
    ids=str,
)
def test_row_groups_that_cannot_match_are_not_read(tmp_path, filter, read):
    path = written(tmp_path)
    wanted = pq.read_table(path).filter(filter)
    damage(path, {0, 1, 2, 3} - read)
    pipe = tp.read_parquet(path, ["row"], filter=filter)
    assert list(pipe) == wanted.select(["row"]).to_pylist()
    assert said(pipe) == f"{len(read)} of 4 row groups may have rows that match"


def test_a_row_group_that_may_match_is_read(tmp_path):
    path = written(tmp_path)
    damage(path, {2})
    with pytest.raises(UnreadableError, match="row group 2"):
        list(tp.read_parquet(path, filter=pc.field("x") == 1))


def test_without_statistics_all_row_groups_are_read(tmp_path):
    path = written(tmp_path, write_statistics=False)
    pipe = tp.read_parquet(path, filter=pc.field("x") > 8)
    assert [row["row"] for row in pipe] == [3]
    assert said(pipe) == "4 of 4 row groups may have rows that match"


@pytest.mark.parametrize(
    "filter",
    [
        pc.field("x") != 5,
        ~(pc.field("x") <= 5),
        pc.equal(pc.field("x") < 9, pc.scalar(False)),
        pc.field("x").is_nan(),
    ],
    ids=str,
)
def test_nan_of_which_footers_say_nothing_is_found(tmp_path, filter):
    pq.write_table(pa.table({"x": [5.0, 5.0, NAN]}), tmp_path / "rows.parquet")
    assert len(list(tp.read_parquet(tmp_path, filter=filter))) == 1


def test_floats_are_told_by_footers_where_nan_would_not_match(tmp_path):
    path = written(tmp_path, pa.float64())
    assert said(tp.read_parquet(path, filter=pc.field("x") > 5)).startswith("1 of 4 row groups")


def test_text_that_is_not_utf8_is_replaced_before_it_is_asked(tmp_path):
    texts = pa.array([b"\x80", b"\x90"]).cast(pa.binary())
    table = pa.table({"x": pa.Array.from_buffers(pa.string(), 2, texts.buffers())})
    pq.write_table(table, tmp_path / "rows.parquet")
    pipe = tp.read_parquet(tmp_path, errors="replace", filter=pc.field("x") == "\ufffd")
    assert len(list(pipe)) == 2


def test_types_that_differ_from_file_to_file_are_told_in_the_type_of_all(tmp_path):
    kinds = [pa.int8(), pa.int64(), pa.float64(), pa.null()]
    for number, kind in enumerate(kinds):
        column = pa.array([None if pa.types.is_null(kind) else number * 40], kind)
        pq.write_table(pa.table({"x": column}), tmp_path / f"{number}.parquet")
    pipe = tp.read_parquet(tmp_path, filter=pc.field("x") >= 39.5)
    assert list(pipe) == [{"x": 40.0}, {"x": 80.0}]
    assert said(pipe) == "2 of 4 row groups may have rows that match"


# The rows of a filter, and those of .filter() above


def many(folder: Path) -> str:
    """Three files of four row groups of 20 rows; in order by "x", not by "y"."""
    rng = np.random.default_rng(0)
    for number in range(3):
        rows = range(number * 80, number * 80 + 80)
        table = pa.table(
            {"x": rows, "y": rng.integers(0, 9, 80), "text": [f"row {n}" for n in rows]}
        )
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=20)
    return str(folder)


RANGE = (pc.field("x") >= 35) & (pc.field("x") < 190) & (pc.field("y") != 3)
ABOVE = {
    "as they are": lambda pipe: pipe,
    "sharded": lambda pipe: pipe.sharding_filter(4).batch(3),
    "cached": lambda pipe: pipe.cache().batch(3),
    "taken": lambda pipe: pipe.skip(3).take(50),
    "sampled": lambda pipe: pipe.sample(0.5),
    "split": lambda pipe: pipe.split({"a": 0.5, "b": 0.5})["a"],
    "mixed": lambda pipe: tp.mix({"a": pipe, "b": pipe}, weights={"a": 1, "b": 1}).batch(4),
}


@pytest.mark.parametrize("name", ABOVE)
def test_a_filter_gives_the_rows_that_filter_above_gives(tmp_path, name, monkeypatch):
    monkeypatch.setenv("TRAINPIPES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "rows"
    folder.mkdir()
    files = tp.list_files(many(folder))
    apart = ABOVE[name](files.read_parquet().filter(RANGE))
    inside = ABOVE[name](files.read_parquet(filter=RANGE))
    expected = list(apart)
    assert len(str(expected)) > 500
    if name == "mixed":  # how its sources are mixed follows from their counts
        found = [{row["x"] for batch in batches for row in batch} for batches in (inside, apart)]
        assert found[0] <= set(pq.read_table(folder).filter(RANGE)["x"].to_pylist())
        assert len(found[0]) > len(found[1]) // 2
    elif name == "sharded":
        rows = [sorted(row["x"] for batch in found for row in batch) for found in (inside, apart)]
        assert rows[0] == rows[1]
    else:
        assert list(inside) == expected


def test_a_filtered_pipeline_has_no_len_and_says_which_stage_drops_rows(tmp_path):
    with pytest.raises(
        TypeError, match=r"how many rows filter\(.*lets through is known only at the end"
    ):
        len(tp.read_parquet(many(tmp_path), filter=RANGE))


def test_a_state_belongs_to_the_filter_that_it_was_saved_with(tmp_path):
    folder = many(tmp_path)
    saved = iter(tp.read_parquet(folder, filter=RANGE))
    next(saved)
    with pytest.raises(StateError, match=r"data/filter: saved .*>= 35.*, now .*> 5"):
        iter(tp.read_parquet(folder, filter=pc.field("x") > 5)).load_state_dict(saved.state_dict())


def test_errors_name_the_row_in_its_file(tmp_path):
    def odd(row: dict[str, Any]) -> dict[str, Any]:
        if row["x"] == 65:
            raise ValueError("odd")
        return row

    pipe = tp.read_parquet(many(tmp_path), filter=pc.field("x") > 60).map(odd)
    with pytest.raises(ValueError, match=r"0\.parquet, row group 3, row 65"):
        list(pipe)


def test_a_filter_stands_after_concat_and_says_so(tmp_path):
    one = tp.read_parquet(many(tmp_path), filter=RANGE)
    with pytest.raises(ConfigError, match=r"leave .* out and put filter\(\) after concat\(\)"):
        tp.concat(one, one)


# What is refused


def test_a_column_that_only_the_filter_names_is_not_given(tmp_path):
    rows = [{"a.b": 1, "a": {"b": 2, "c": 3}, "z": n} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = list(tp.read_parquet(tmp_path, ["a.c"], filter=pc.field("z") > 1))
    assert found == [{"a": {"c": 3}}]
    found = list(tp.read_parquet(tmp_path, ["a.b"], filter=pc.field("a", "c") == 3))
    assert found == [{"a.b": 1}] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filter": pc.field("lng") == "de"},
         r"filter names a column 'lng', and the columns are \['x', 'y'"),
        ({"filter": pc.field("txt") == "de"}, r"names a column 'txt' \(did you mean 'text'\?\)"),
        ({"filter": pc.field("text") == 1}, r"does not fit the columns \{.*'text': 'string'\}"),
        ({"filter": pc.field("text", "a") == 1}, r"does not fit the columns \{.*'text': 'string'\}"),
    ],
)  # fmt: skip
def test_a_filter_that_does_not_fit_is_refused_before_a_row_is_read(tmp_path, options, message):
    with pytest.raises(SchemaError, match=message):
        tp.read_parquet(many(tmp_path), **options).explain()


def test_the_field_of_a_struct_in_a_list_of_filters_is_refused_with_how_it_is_written(tmp_path):
    pq.write_table(pa.table({"pair": [{"x": 1}, {"x": 2}]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match=r"; a field of 'pair' is pc\.field\('pair', 'x'\)$"):
        list(tp.read_parquet(tmp_path, filter=[["pair.x", "==", 1]]))
    assert len(list(tp.read_parquet(tmp_path, filter=pc.field("pair", "x") == 1))) == 1


DAY = datetime(2024, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("by_reader", [True, False])
@pytest.mark.parametrize(
    ("filter", "message", "instead"),
    [
        (pc.field("views") > 1e6, "write an int", pc.field("views") > 1_000_000),
        (pc.field("views") > 1.5, "write an int", pc.field("views").cast("float64") > 1e6),
        (pc.field("price") > 3, "write a float or decimal", pc.field("price") > 3.0),
        (pc.field("day") > "2024-01-01", "such as a datetime", pc.field("day") > DAY),
        (pc.field("price") == 4, r"or decimal.Decimal\(...\)", pc.field("price") == Decimal("4")),
    ],
)
def test_what_arrow_cannot_compare_is_refused_with_what_it_can(
    tmp_path, by_reader, filter, message, instead
):
    prices = pa.array([Decimal("1.50"), Decimal("4.00")], pa.decimal128(10, 2))
    days = [DAY, DAY + timedelta(days=1)]
    table = pa.table({"views": [7, 20_000_001], "price": prices, "day": days})
    pq.write_table(table, tmp_path / "a.parquet")

    def views(filter):
        if by_reader:
            return [row["views"] for row in tp.read_parquet(tmp_path, filter=filter)]
        return [row["views"] for row in tp.read_parquet(tmp_path).filter(filter)]

    with pytest.raises(SchemaError, match=message):
        views(filter)
    assert views(instead) == [20_000_001]


@pytest.mark.parametrize("how", [">", "in"])
@pytest.mark.parametrize("zone", [None, "UTC"])
def test_times_with_a_zone_do_not_fit_those_without(tmp_path, how, zone):
    pq.write_table(
        pa.table({"at": pa.array([5], pa.timestamp("us", zone))}), tmp_path / "a.parquet"
    )
    time = datetime(2026, 1, 1, tzinfo=UTC if zone is None else None)
    rows = tp.read_parquet(tmp_path, filter=[["at", how, [time] if how == "in" else time]])
    with pytest.raises(SchemaError, match=r"does not fit the columns .*with timezone"):
        list(rows)


@pytest.mark.parametrize("filter", [lambda row: True, [("x", "~", 1)], "x == 1", pc.field(0) == 1])
def test_a_filter_is_an_expression_over_columns_by_name(filter):
    with pytest.raises(ConfigError, match=r"read_parquet\(filter\)"):
        tp.read_parquet("x", filter=filter)


def test_a_field_that_columns_leave_out_is_named_for_the_filter_too(tmp_path):
    pq.write_table(pa.table({"m": [{"a": 1, "b": 2}]}), tmp_path / "rows.parquet")
    with pytest.raises(SchemaError, match="name those of the filter, too"):
        list(tp.read_parquet(tmp_path, ["m.a"], filter=pc.field("m", "b") == 2))
    found = list(tp.read_parquet(tmp_path, ["m.a", "m.b"], filter=pc.field("m", "b") == 2))
    assert found == [{"m": {"a": 1, "b": 2}}]


def test_a_filter_holds_for_files_of_another_machine_and_for_kept_footers(tmp_path):
    memory = fsspec.filesystem("memory")
    memory.pipe("/filtered/rows.parquet", Path(written(tmp_path)).read_bytes())
    for _ in range(2):
        pipe = tp.read_parquet(
            "memory://filtered/*.parquet",
            ["text"],
            filter=pc.field("x") > 5,
            index=str(tmp_path / "i.arrow"),
        )
        assert list(pipe) == [{"text": "row 2"}, {"text": "row 3"}]
        assert said(pipe) == "1 of 4 row groups may have rows that match"


LONG = list(range(0, 60, 2))


@pytest.mark.parametrize("stage", [False, True])
def test_filters_that_differ_where_their_text_is_cut_are_two(stage, tmp_path):
    pq.write_table(pa.table({"i": range(100)}), tmp_path / "a.parquet")

    def chosen(values: list[int]) -> Pipeline:
        condition = [("i", "in", values)]
        if stage:
            return tp.read_parquet(tmp_path / "a.parquet").filter(condition).batch(4)
        return tp.read_parquet(tmp_path / "a.parquet", filter=condition).batch(4)

    state = chosen(LONG).state_dict()
    chosen([*LONG]).load_state_dict(state)
    with pytest.raises(StateError, match=r"filter|predicate"):
        chosen([*LONG[:15], 31, *LONG[16:]]).load_state_dict(state)


@pytest.mark.parametrize("stage", [False, True])
def test_values_that_arrow_cuts_within_a_character_are_filtered_by(stage, tmp_path):
    texts = ["日本語の文章" * 10, "日本語の文章" * 9 + "日本語の文", "a"]
    pq.write_table(pa.table({"s": texts, "n": range(3)}), tmp_path / "a.parquet")
    condition = [("s", "in", texts[:1])]
    read = tp.read_parquet(tmp_path / "a.parquet", filter=None if stage else condition)
    pipe = read.filter(condition) if stage else read
    assert [row["n"] for row in pipe] == [0]
    assert "filter" in str(pipe.explain())
    check_resume(pipe, processes=0)
    with pytest.raises(SchemaError, match=r"no column|names a column"):
        list(tp.read_parquet(tmp_path / "a.parquet").filter([("other", "in", texts)]))


@pytest.mark.sample(4)
@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize("kind", ["all", "any", "expression"])
def test_conditions_without_number_are_refused(kind: str, stage: bool, tmp_path: Path) -> None:
    pq.write_table(pa.table({"i": range(50)}), tmp_path / "a.parquet")

    def filtered(count: int) -> list[int]:
        many: Any = [("i", "!=", n) for n in range(10, 10 + count)]
        if kind == "any":
            many = [[("i", "==", n), ("i", "<", 30)] for n in range(20, 20 + count // 2)]
        elif kind == "expression":
            many = reduce(operator.and_, [pc.field("i") != n for n in range(10, 10 + count)])
        if stage:
            return [row["i"] for row in tp.read_parquet(tmp_path / "a.parquet").filter(many)]
        return [row["i"] for row in tp.read_parquet(tmp_path / "a.parquet", filter=many)]

    assert filtered(2000) == ([*range(20, 30)] if kind == "any" else [*range(10)])
    for count in (2002, 12_000):
        with pytest.raises(
            tp.ConfigError, match=rf"at most 2,000 conditions.*, got {count}; give the values"
        ):
            filtered(count)


@pytest.mark.parametrize("columns", [None, ["n"]])
@pytest.mark.parametrize("partitioning", [None, "hive"])
@pytest.mark.parametrize(
    ("filter", "rows"), [(pc.scalar(False), 0), (~pc.scalar(True), 0), (pc.scalar(True), 20)]
)
def test_a_filter_may_name_no_column(filter, rows, partitioning, columns, tmp_path):
    for lang in ("de", "en"):
        (tmp_path / f"lang={lang}").mkdir()
        pq.write_table(
            pa.table({"n": range(10)}), tmp_path / f"lang={lang}/a.parquet", row_group_size=4
        )
    pipe = tp.read_parquet(tmp_path, columns, filter=filter, partitioning=partitioning)
    assert len(list(pipe)) == rows


@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        (("n", ">", 2), [3, 4]), (("s", "==", "a"), [0, 3]), (("s", "in", ["b" * 20]), [1, 4]),
        (("b", "!=", b"a"), [1, 4]), (("s", ">", "z"), []),
    ],
)  # fmt: skip
def test_views_of_text_and_bytes_as_polars_writes_them_are_filtered(
    condition: Any, rows: list[int], stage: bool, tmp_path: Path
) -> None:
    texts = ["a", "b" * 20, None, "a", "b" * 20]
    views: dict[str, Any] = {
        "s": pa.array(texts, pa.string_view()),
        "b": pa.array([text and text.encode() for text in texts], pa.binary_view()),
        "l": pa.array([[text] for text in texts], pa.list_(pa.string_view())),
    }
    pq.write_table(pa.table({**views, "n": range(5)}), tmp_path / "a.parquet", row_group_size=3)
    read = tp.read_parquet(tmp_path / "a.parquet", filter=None if stage else [condition])
    pipe = read.filter([condition]) if stage else read
    assert [row["n"] for row in pipe] == rows
