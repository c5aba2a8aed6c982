"""Rows of tables by name: stages that choose rows, or join tables, take them as they take rows of files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog

import trainpipes as tp
from delta_tables import delete_by_vector
from iceberg_tables import lake
from quiet_lance import lance
from trainpipes.state import format as state_format

KINDS = ["delta", "iceberg", "lance"]


def rows(first: int) -> pa.Table:
    x = list(range(first, first + 40))
    return pa.table({"x": x, "e": [n // 10 for n in x]})


def of_delta(folder: Path) -> tuple[Callable[[], tp.Pipeline], Callable[[int], Any]]:
    uri = str(folder / "table")
    return lambda: tp.read_delta(uri), lambda first: write_deltalake(
        uri, rows(first), mode="append"
    )


def of_iceberg(folder: Path) -> tuple[Callable[[], tp.Pipeline], Callable[[int], Any]]:
    def append(first: int) -> None:
        with load_catalog(**lake(folder)) as catalog:
            catalog.create_namespace_if_not_exists("logs")
            name = "logs.events"
            catalog.create_table_if_not_exists(name, rows(0).schema).append(rows(first))

    return lambda: tp.read_iceberg("logs.events", catalog=lake(folder)), append


def of_lance(folder: Path) -> tuple[Callable[[], tp.Pipeline], Callable[[int], Any]]:
    uri = str(folder / "table")

    def append(first: int) -> None:
        lance.write_dataset(rows(first), uri, mode="append" if Path(uri).exists() else "create")

    return lambda: tp.read_lance(uri), append


OF = {"delta": of_delta, "iceberg": of_iceberg, "lance": of_lance}


def xs(pipe: tp.Pipeline) -> list[int]:
    return [row["x"] for row in pipe]


def parts(pipe: tp.Pipeline) -> list[set[int]]:
    return [set(xs(part)) for part in pipe.split({"a": 0.5, "b": 0.5}).values()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_keeps_its_part_as_files_come_and_the_table_moves(kind: str, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    read, append = OF[kind](tmp_path / "old")
    append(0)
    before, sampled = parts(read()), set(xs(read().sample(0.5)))
    assert [len(part) for part in before] != [0, 0]
    assert sorted(before[0] | before[1]) == list(range(40))
    for first in (100, 200):
        append(first)
    after = parts(read())
    assert all(old == {x for x in new if x < 40} for old, new in zip(before, after, strict=True))
    assert {x for x in xs(read().sample(0.5)) if x < 40} == sampled
    assert parts(read().filter([("x", "<", 40)])) == before
    if kind != "iceberg":  # whose paths are whole
        shutil.move(tmp_path / "old", tmp_path / "new")
        assert parts(OF[kind](tmp_path / "new")[0]()) == after


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_joined_and_cut_into_windows(kind: str, tmp_path: Path) -> None:
    read, append = OF[kind](tmp_path)
    for first in (0, 100):
        append(first)
    table = xs(read())
    assert xs(tp.concat(read(), read())) == table * 2
    some = xs(tp.concat(read(), read().skip(3)).sample(0.5))
    assert 0 < len(some) < 157
    assert {*some} <= {*table}
    beside = tp.zip(read(), read().rename({"x": "y", "e": "f"}))
    assert xs(beside.sample(0.5)) == xs(read().sample(0.5))
    assert len(list(read().windows(3, within="e"))) == 2 * 4 * 3


# Deleted rows


def delete(kind: str, folder: Path, gone: list[int]) -> None:
    uri = str(folder / "table")
    if kind == "lance":
        lance.dataset(uri).delete(f"x IN ({', '.join(map(str, gone))})")
    else:
        (add,) = pa.table(DeltaTable(uri).get_add_actions()).to_pylist()
        delete_by_vector(uri, add["path"], gone)


CHOSEN: dict[str, Callable[[tp.Pipeline], tp.Pipeline]] = {
    "split": lambda table: table.split({"a": 0.5, "b": 0.5})["a"],
    "sample, after a skip": lambda table: table.skip(3).sample(0.5),
    "sample_by": lambda table: table.sample_by("e", largest=3),
    "concat": lambda table: tp.concat(table.skip(3), table.skip(3)).sample(0.5),
    "zip": lambda table: tp.zip(table, table.select("x").rename({"x": "y"})).sample(0.5),
    "mix": lambda table: tp.mix({"only": table}, weights={"only": 1}).sample(0.5),
}


@pytest.mark.parametrize("how", CHOSEN)
@pytest.mark.parametrize("kind", ["delta", "lance"])
def test_a_deleted_row_leaves_all_others_in_their_parts(
    kind: str, how: str, tmp_path: Path
) -> None:
    read, append = OF[kind](tmp_path)
    append(0)
    before = xs(CHOSEN[how](read()))
    delete(kind, tmp_path, [5, 6, 17])
    after = xs(CHOSEN[how](read()))
    assert after == [x for x in before if x not in (5, 6, 17)]
    assert after


@pytest.mark.parametrize("kind", ["delta", "lance"])
def test_states_that_left_deleted_rows_out_of_the_numbers_are_refused(
    kind: str, tmp_path: Path
) -> None:
    read, append = OF[kind](tmp_path)
    append(0)
    assert "row_numbers" not in read().batch(4).state_at(2)["pipeline"]
    delete(kind, tmp_path, [5])
    state = read().batch(4).state_at(2)
    saved = state_format.read(state)
    identity = json.loads(saved.pipeline)
    del identity["data"]["row_numbers"]
    earlier = state_format.render(saved.position, json.dumps(identity))
    with pytest.raises(
        tp.StateError, match='data/row_numbers: saved null, now "deleted rows counted"'
    ):
        read().batch(4).load_state_dict(earlier)
    read().batch(4).load_state_dict(state)
