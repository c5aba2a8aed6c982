"""concat: several sources as one, in file order."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from resuming import check_resume
from trainpipes.writers.epoch_rows import EpochRows


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of files of the same names: 0 to 99 and 100 to 149."""
    for name, start, stop, group in (("a", 0, 100, 13), ("b", 100, 150, 20)):
        (tmp_path / name).mkdir()
        table = pa.table(
            {"x": range(start, stop), "text": [f"row {n}" for n in range(start, stop)]}
        )
        pq.write_table(table, tmp_path / name / "rows.parquet", row_group_size=group)
    return tmp_path / "a", tmp_path / "b"


def both(folders: tuple[Path, Path]) -> tp.Pipeline:
    return tp.concat(*(tp.list_files(folder).read_parquet() for folder in folders))


def numbers(pipe: tp.Pipeline) -> list[int]:
    return [row["x"] for row in pipe]


def test_rows_come_one_source_after_the_other(folders: tuple[Path, Path]) -> None:
    pipe = both(folders)
    assert numbers(pipe) == list(range(150))
    assert len(pipe.batch(32)) == 5
    said = str(pipe.explain())
    assert "2, one after the other" in said
    assert "1: rows" in said
    assert numbers(pipe.skip(95).take(10)) == list(range(95, 105))
    nested = tp.concat(pipe, both(folders).select("x", "text"))
    assert numbers(nested) == [*range(150)] * 2


def test_rows_in_file_order_can_be_left_out(folders: tuple[Path, Path]) -> None:
    def parts() -> tp.Pipeline:
        one, other = (tp.list_files(folder).read_parquet() for folder in folders)
        return tp.concat(one.skip(17).take(30), other.take(25), one.take(0), one.skip(99))

    expected = [*range(17, 47), *range(100, 125), 99]
    assert numbers(parts()) == expected
    shuffled = parts().sharding_filter(4).shuffle(8, seed=1).batch(3)
    assert sorted(row["x"] for batch in shuffled for row in batch) == sorted(expected)
    check_resume(shuffled, epochs=2, processes=0, every=4)
    table = tp.from_arrow(pa.table({"x": range(9)}))
    drawn = tp.concat(table.skip(4), table.take(2)).shuffle(scope="global")
    assert sorted(numbers(drawn)) == [0, 1, 4, 5, 6, 7, 8]


def test_errors_name_the_file_and_row_of_the_source(folders: tuple[Path, Path]) -> None:
    rows = both(folders)

    def fails(row: dict[str, Any]) -> dict[str, Any]:
        if row["x"] == 127:
            raise ValueError("no")
        return row

    parts = [tp.list_files(folder).read_parquet().map(fails) for folder in folders]
    for pipe in (rows.map(fails), tp.concat(*parts), tp.concat(*parts).shuffle(20)):
        with pytest.raises(ValueError, match="no") as caught:
            list(pipe)
        assert f"{folders[1]}/rows.parquet, row group 1, row 27" in caught.value.__notes__[0]


def test_parts_never_leak_over_sources_of_the_same_names(folders: tuple[Path, Path]) -> None:
    parts = both(folders).split({"a": 0.5, "b": 0.5})
    found = [numbers(part) for part in parts.values()]
    assert sorted(found[0] + found[1]) == list(range(150))
    more = tp.concat(both(folders), tp.list_files(folders[0]).read_parquet())
    alone = numbers(tp.concat(tp.list_files(folders[0]).read_parquet()).sample(0.4))
    assert [x for x in numbers(both(folders).sample(0.4)) if x < 100] == alone
    assert len(numbers(more.sample(0.4))) > len(alone)


@pytest.mark.parametrize(
    ("inner", "outer", "last"), [(5, 0, 0), (0, 0, 9), (3, 30, 0), (7, 110, 4)]
)
def test_rows_keep_their_parts_where_the_first_ones_are_left_out(
    folders: tuple[Path, Path], inner: int, outer: int, last: int
) -> None:
    def pipe(inner: int, outer: int, last: int) -> tp.Pipeline:
        one, other = (tp.list_files(folder).read_parquet() for folder in folders)
        more = pa.table({"x": range(200, 250), "y": range(50)})
        beside = tp.from_arrow(more.select(["x"])).zip(tp.from_arrow(more.select(["y"])))
        both = tp.concat(one.skip(inner), other).select("x").skip(outer)
        return tp.concat(both, beside.skip(last).select("x"))

    whole, begun = pipe(0, 0, 0), pipe(inner, outer, last)
    kept = {*numbers(begun)}
    for name, part in whole.split({"train": 0.5, "valid": 0.5}).items():
        expected = [x for x in numbers(part) if x in kept]
        assert numbers(begun.split({"train": 0.5, "valid": 0.5})[name]) == expected
    assert "skipped rows counted" in str(begun.batch(2).state_dict())
    assert "skipped rows counted" not in str(whole.batch(2).state_dict())


def test_numbers_are_those_over_all(folders: tuple[Path, Path]) -> None:
    numbered = both(folders).enumerate()
    assert [(row["x"], row["index"]) for row in numbered] == [(n, n) for n in range(150)]
    own = tp.concat(*(tp.list_files(folder).read_parquet().enumerate() for folder in folders))
    assert [row["index"] for row in own] == [*range(100), *range(50)]


def test_a_state_names_the_source_that_differs(folders: tuple[Path, Path]) -> None:
    state = both(folders).batch(4).state_dict()
    other = tp.concat(*(tp.list_files(f).read_parquet() for f in reversed(folders))).batch(4)
    with pytest.raises(tp.StateError, match="data/sources/0"):
        other.load_state_dict(state or {})
    fewer = tp.concat(tp.list_files(folders[0]).read_parquet()).batch(4)
    with pytest.raises(tp.StateError, match="data/sources/1"):
        fewer.load_state_dict(state or {})
    renamed = tp.concat(
        tp.list_files(folders[0]).read_parquet(), tp.list_files(folders[1]).read_parquet().rename({"x": "x"})
    ).batch(4)  # fmt: skip
    with pytest.raises(tp.StateError, match="stages/concat/sources/1"):
        renamed.load_state_dict(state or {})


def test_pipelines_and_columns_come_one_by_one_or_in_a_list() -> None:
    one, two = (tp.from_arrow(pa.table({name: [1], name * 2: [2]})) for name in "xy")
    assert list(tp.zip([one, two])) == list(tp.zip(one, two))
    assert list(tp.concat([one, one])) == list(tp.concat(one, one))
    both = tp.zip(one, two)
    assert list(both.select(["x", "y"])) == list(both.select("x", "y")) == [{"x": 1, "y": 1}]
    assert list(both.drop_columns(["xx"])) == list(both.drop_columns("xx"))
    rows = tp.read_parquet("rows")
    assert rows.select(["x"]).to_yaml() == rows.select("x").to_yaml()


def test_one_source_after_the_other_is_a_schedule_and_the_error_says_it():
    shuffled = [tp.from_arrow(pa.table({"x": range(n, n + 50)})).shuffle(8) for n in (0, 50)]
    with pytest.raises(
        tp.ConfigError, match=r"each shuffled in itself, by mix\(.*ROWS_OF_A"
    ) as error:
        tp.concat(*shuffled)
    call = re.search(r"mix\(.*\)\]\)", str(error.value))[0].replace("ROWS_OF_A", "50")
    pipe = eval(call, {"mix": tp.mix, "a": shuffled[0], "b": shuffled[1]}).sharding_filter(4)
    found = [row["x"] for row in pipe]
    assert sorted(found[:50]) == [*range(50)] != found[:50]
    assert sorted(found[50:]) == [*range(50, 100)] != found[50:]


def test_processes_of_writers_have_the_files_that_were_there(folders: tuple[Path, Path]) -> None:
    def read() -> tp.Pipeline:
        return tp.list_files(folders[0]).read_parquet()

    other = tp.from_dataset([{"y": n} for n in range(100)])
    pipes = tp.concat(read(), read()), read().windows(10), tp.zip(read(), other)
    written = [EpochRows(pipe, "write_parquet") for pipe in pipes]
    sent = [(rows.count, pickle.dumps(rows)) for rows in written]
    mixed = EpochRows(tp.mix({"a": read(), "b": read()}, max_epochs=1), "to_ray", dealt=True)
    sent_mix = pickle.dumps(mixed)
    pq.write_table(pa.table({"x": [-1], "text": ["new"]}), folders[0] / "a new one.parquet")
    for rows, (count, copy) in zip(written, sent, strict=True):
        assert count is not None
        there, elsewhere = (
            pa.concat_tables(each.tables(0, count)) for each in (rows, pickle.loads(copy))
        )
        assert elsewhere.equals(there)
    for rows in (mixed, pickle.loads(sent_mix)):
        rows.open()
        assert sum(map(len, iter(rows.some, None))) == 200
