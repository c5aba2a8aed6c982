"""Columns that the names of folders make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from trainpipes.errors import SchemaError, StateError


def write(folder: Path, *names: str, **more: Any) -> str:
    """A file of four rows in two row groups in each of these folders."""
    for number, name in enumerate(names):
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        rows = range(number * 4, number * 4 + 4)
        table = pa.table({"x": rows, "text": [f"row {n}" for n in rows], **more})
        pq.write_table(table, path / "part-0.parquet", row_group_size=2)
    return str(folder)


LAYOUT = ("year=2023/lang=de", "year=2023/lang=en", "year=2024/lang=de", "year=2024/lang=en")


@pytest.mark.parametrize(
    "folders",
    [
        LAYOUT,
        ("lang=de%20at/n=007", "lang=a%2Fb/n=-3", "lang=ä/n=0"),
        ("lang=de/n=1", "lang=__HIVE_DEFAULT_PARTITION__/n=__HIVE_DEFAULT_PARTITION__"),
        ("n=1/deeper", "n=two/deeper"),
        ("a=b=c", "a="),
    ],
    ids=str,
)
def test_columns_are_those_that_pyarrow_makes(tmp_path, folders):
    folder = write(tmp_path / "data", *folders)
    found = list(tp.read_parquet(folder, partitioning="hive"))
    theirs = ds.dataset(folder, partitioning="hive").to_table().to_pylist()
    assert sorted(found, key=lambda row: row["x"]) == sorted(theirs, key=lambda row: row["x"])


def test_folders_above_those_that_are_listed_make_no_columns(tmp_path):
    """As in Arrow, which takes all folders of a file that is named."""
    names = [write(tmp_path / name / "data", *LAYOUT) for name in ("job=1", "job=2")]
    for place in ("", "/*", "/**/*.parquet", "/year=*/lang=*/part-0.parquet"):
        rows = tp.read_parquet(f"{names[0]}{place}", partitioning="hive")
        assert sorted(rows.peek()) == ["lang", "text", "x", "year"]
        state = rows.batch(2).state_at(2)
        rows = tp.read_parquet(f"{names[1]}{place}", partitioning="hive")
        rows.batch(2).load_state_dict(state)
    named = f"{names[0]}/{LAYOUT[0]}/part-0.parquet"
    columns = ds.dataset(named, partitioning="hive").schema.names
    assert {*tp.read_parquet(named, partitioning="hive").peek()} == {*columns} > {"job"}
    with pytest.raises(SchemaError, match="is in no such folder"):
        tp.read_parquet(f"{names[0]}/{LAYOUT[0]}", partitioning="hive").explain()


@pytest.mark.sample(8)
@pytest.mark.parametrize("columns", [None, ["x"]])
@pytest.mark.parametrize("index", [False, "footers.arrow"])
@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ([["lang", "=", "en"]], [*range(4, 8), *range(12, 16)]),
        (pc.field("year") > 2023, [*range(8, 16)]),
        ((pc.field("lang") == "de") | (pc.field("year") == 2023), [*range(12)]),
        (pc.utf8_upper(pc.field("lang")) == "EN", [*range(4, 8), *range(12, 16)]),
        (pc.field("lang") == "fr", []),
    ],
    ids=str,
)
def test_rows_that_folders_choose_are_counted(tmp_path, condition, expected, columns, index):
    folder = write(tmp_path / "data", *LAYOUT)
    index = index and str(tmp_path / index)

    def make():
        rows = tp.read_parquet(folder, columns, filter=condition, index=index)
        return rows.sharding_filter(24, split="stride", tail="uneven").batch(3)

    for _ in range(2):  # also from the index
        assert [row["x"] for batch in make() for row in batch] == expected
    assert len(make()) == -(-len(expected) // 3)
    if expected:
        ranks = [make().distributed(rank=rank, world_size=2) for rank in range(2)]
        assert sum(map(len, ranks)) == len(make())
        loader = tp.Loader(make(), num_workers=2)
        first = next(iter(loader))
        again = tp.Loader(make())
        again.load_state_dict(loader.state_dict())
        assert [row["x"] for batch in [first, *again] for row in batch] == expected
    shuffled = tp.read_parquet(folder, filter=condition).sharding_filter(2).shuffle(4).batch(2)
    assert sorted(row["x"] for batch in shuffled for row in batch) == expected


def test_a_filter_by_folders_and_columns_is_not_counted(tmp_path):
    folder = write(tmp_path / "data", *LAYOUT)
    both = [["lang", "=", "en"], ["x", ">", 5]]
    pipe = tp.read_parquet(folder, filter=both).batch(3)
    assert [row["x"] for batch in pipe for row in batch] == [6, 7, *range(12, 16)]
    with pytest.raises(TypeError, match="is known only at the end"):
        len(pipe)
    within = write(tmp_path / "own", "lang=de", "lang=en", lang=["fr"] * 4)  # its own column counts
    assert len(list(tp.read_parquet(within, filter=[["lang", "=", "fr"]]))) == 8
    assert list(tp.read_parquet(within, filter=[["lang", "=", "en"]])) == []


def test_integers_are_int64_and_all_else_is_text(tmp_path):
    folder = write(tmp_path, *LAYOUT)
    pipe = tp.read_parquet(folder, partitioning="hive").map_batches(dict_of_types, format="arrow")
    types = {"x": "int64", "text": "string", "year": "int64", "lang": "string"}
    assert next(iter(pipe)) == {"types": str(types)}


@pytest.mark.parametrize(("number", "fits"), [(2**63 - 1, True), (-(2**63), True), (2**63, False)])
def test_integers_of_19_digits_are_int64_if_they_fit(number, fits, tmp_path):
    (tmp_path / f"n={number}").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / f"n={number}" / "a.parquet")
    (row,) = tp.read_parquet(tmp_path, partitioning="hive")
    assert row["n"] == (number if fits else str(number))


def dict_of_types(table: pa.Table) -> pa.Table:
    said = str({field.name: str(field.type) for field in table.schema})
    return pa.table({"types": [said] * len(table)})


def test_no_columns_are_made_of_folders_unless_they_are_asked_for(tmp_path):
    folder = write(tmp_path, *LAYOUT)
    first = {"x": 0, "text": "row 0"}
    assert next(iter(tp.read_parquet(folder))) == first
    assert next(iter(tp.read_parquet(folder, partitioning="hive"))) == {
        **first,
        "year": 2023,
        "lang": "de",
    }
    assert next(iter(tp.read_parquet(folder, ["lang", "x"]))) == {"lang": "de", "x": 0}
    assert list(tp.read_parquet(folder, ["year"]))[::4] == [
        {"year": n} for n in (2023, 2023, 2024, 2024)
    ]
    assert next(iter(tp.read_parquet(folder, filter=pc.field("lang") == "de"))) == {
        **first,
        "lang": "de",
    }
    assert next(iter(tp.read_parquet(folder, ["x"], filter=pc.field("lang") == "de"))) == {"x": 0}


def test_files_of_other_folders_are_not_opened(tmp_path):
    folder = write(tmp_path, *LAYOUT)
    for path in Path(folder).glob("year=*/lang=en/*"):
        path.write_bytes(b"not Parquet")
    pipe = tp.read_parquet(
        folder, ["text"], filter=(pc.field("lang") == "de") & (pc.field("x") > 9)
    )
    assert list(pipe) == [{"text": "row 10"}, {"text": "row 11"}]
    said = dict(pipe.explain().lines)["filter"]
    assert (
        said
        == "1 of 4 row groups may have rows that match; 2 more files are left out by their folders"
    )
    assert list(tp.read_parquet(folder, filter=pc.field("lang") == "fr")) == []


@pytest.mark.parametrize(
    ("filter", "files", "rows"),
    [
        (pc.field("lang") == "en", ["2023/en", "2024/en"], 8),
        ((pc.field("lang") == "en") & (pc.field("x") > 5), ["2023/en", "2024/en"], 6),
        ((pc.field("year") > 2023) & pc.field("x").is_valid(), ["2024/de", "2024/en"], 8),
        ((pc.field("year") > 2023) & pc.starts_with(pc.field("lang"), "e"), ["2024/en"], 4),
        ((pc.field("lang") == "de") & (pc.utf8_length(pc.field("text")) > 5),
         ["2023/de", "2024/de"], 2),
        ((pc.field("lang") == "en") | (pc.field("x") == 0),
         ["2023/de", "2023/en", "2024/de", "2024/en"], 9),
    ],
)  # fmt: skip
@pytest.mark.parametrize("partitioning", [None, "hive"])
def test_of_files_whose_folders_cannot_match_nothing_is_read(
    tmp_path, monkeypatch, filter, files, rows, partitioning
):
    """On another machine, whose every request is seen: also the first file's is not made."""
    folder = write(tmp_path, *LAYOUT)
    memory = fsspec.filesystem("memory")
    memory.put(folder, "/folders/", recursive=True)
    asked: set[str] = set()
    for name in ("cat_file", "_open"):
        own = getattr(type(memory), name)

        def seen(self: Any, path: str, *args: Any, own: Any = own, **options: Any) -> Any:
            asked.add(path.rpartition("/year=")[2].rpartition("/")[0].replace("lang=", ""))
            return own(self, path, *args, **options)

        monkeypatch.setattr(type(memory), name, seen)
    for _ in range(2):
        pipe = tp.read_parquet(
            "memory://folders", filter=filter, partitioning=partitioning,
            index=str(tmp_path / "i.arrow"),
        )  # fmt: skip
        assert len(list(pipe)) == rows
        assert sorted(asked) == files
    memory.rm("/folders", recursive=True)


def test_folders_whose_value_is_null_are_found_and_left_out(tmp_path):
    folder = write(tmp_path, "lang=de", "lang=__HIVE_DEFAULT_PARTITION__")
    field = pc.field("lang")
    for filter, rows in (
        (field.is_null(), 4),
        (field != "de", 0),
        (~(field == "de"), 0),
        (field == "de", 4),
    ):
        found = list(tp.read_parquet(folder, filter=filter))
        assert len(found) == rows
        assert len(found) == ds.dataset(folder, partitioning="hive").count_rows(filter=filter)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (("lang=de", "lang=en/year=2024"), r"lang=en.* has a folder year=\.\.\., and .*lang=de.* has none"),
        (("lang=de", "en"), r"lang=de.* has a folder lang=\.\.\., and .*en/part-0\.parquet has none"),
        (("de", "en"),
         r'partitioning="hive" makes columns of folders such as lang=en/, and .* is in no such folder'),
    ],
    ids=str,
)  # fmt: skip
def test_folders_that_do_not_go_together_are_refused(tmp_path, folders, message):
    folder = write(tmp_path, *folders)
    with pytest.raises(SchemaError, match=message):
        tp.read_parquet(folder, partitioning="hive").explain()
    assert len(list(tp.read_parquet(folder))) == 8


def test_a_column_that_files_have_too_is_the_files_or_refused(tmp_path):
    folder = write(tmp_path, "lang=de", lang=["it"] * 4)
    assert next(iter(tp.read_parquet(folder, ["lang"]))) == {"lang": "it"}
    assert len(list(tp.read_parquet(folder, filter=pc.field("lang") == "it"))) == 4
    with pytest.raises(SchemaError, match=r"makes a column 'lang' .* has one of that name: leave"):
        tp.read_parquet(folder, partitioning="hive").explain()


def test_an_error_about_columns_names_those_of_folders(tmp_path):
    folder = write(tmp_path, *LAYOUT)
    with pytest.raises(
        SchemaError, match=r"no column 'lnag' \(did you mean 'lang'\?\).*'year', 'lang'\]"
    ):
        tp.read_parquet(folder, ["lnag"]).explain()


def test_values_of_folders_are_part_of_what_a_state_knows(tmp_path):
    """A file that is named has the values of all its folders, and the name below them is the same."""
    one, other = (
        f"{write(tmp_path / name, 'year=2024')}/year=2024/part-0.parquet"
        for name in ("lang=de", "lang=en")
    )
    for pipe in (tp.read_parquet(one), tp.read_parquet(one, partitioning="hive")):
        iterator = iter(pipe)
        next(iterator)
        state = iterator.state_dict()
        moved = tp.list_files(other).then(pipe.stages[1])
        if pipe.stages[1].partitioning is None:
            iter(moved).load_state_dict(state)
        else:
            with pytest.raises(StateError, match="data/digests"):
                iter(moved).load_state_dict(state)


def test_nothing_is_listed_before_rows_are_asked_for(tmp_path):
    pipe = tp.read_parquet(str(tmp_path / "later"), filter=[["lang", "=", "en"]])
    pipe = pipe.sharding_filter(2).batch(3).take(2)
    write(tmp_path / "later", *LAYOUT)
    assert len(pipe) == 2
