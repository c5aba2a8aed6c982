"""Stages and sources of one's own: in few lines, with nothing lost."""

from __future__ import annotations

import pickle
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import KW_ONLY, FrozenInstanceError
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

import trainpipes as tp
from drawn import rows_of, table_of_rows
from trainpipes.errors import ConfigError, DataError
from trainpipes.testing import check_resume


class AddSuffix(tp.RowStage):
    suffix: str = "!"

    def apply(self, row: str) -> str:
        return row + self.suffix


class Scale(tp.TableStage):
    column: str
    _: KW_ONLY
    by: float = 2.0
    names: list[str] | None = None

    def check(self) -> None:
        if not self.by:
            raise ConfigError("scale(by) is a number that is not 0, got 0")

    def apply(self, table: pa.Table) -> pa.Table:
        place = table.column_names.index(self.column)
        return table.set_column(place, self.column, pc.multiply(table[self.column], self.by))


class Noise(tp.TableStage):
    """A number for each row and epoch, made once in each process ready to be drawn."""

    seed: int = 0
    by_row = True
    by_epoch = True
    thread_safe = True

    def open(self) -> Callable[[pa.Table, tp.Rows], pa.Table]:
        def noisy(table: pa.Table, rows: tp.Rows) -> pa.Table:
            drawn = (rows.ids * 31 + rows.epochs * 17 + self.seed) % 1009
            return table.append_column("noise", pa.array(drawn))

        return noisy


class Half(tp.BatchStage):
    def apply(self, batch: Any) -> Any:
        return {name: tensor / 2 for name, tensor in batch.items()}


def table() -> pa.Table:
    return pa.table({"x": [1.0, 2.0, 3.0], "y": ["a", "b", "c"]})


def test_options_are_kept_on_every_way() -> None:
    pipe = tp.from_dataset(["a", "b"]).then(AddSuffix("?"))
    assert repr(pipe).endswith(".add_suffix('?')")
    assert list(pipe) == list(pickle.loads(pickle.dumps(pipe))) == ["a?", "b?"]
    assert list(tp.from_dataset(["a"]).then(AddSuffix())) == ["a!"]
    assert pipe == tp.from_dataset(["a", "b"]).then(AddSuffix(suffix="?"))
    assert pipe != tp.from_dataset(["a", "b"]).then(AddSuffix())


def test_a_stage_is_frozen_and_keeps_its_own_lists() -> None:
    names = ["a"]
    stage = Scale("x", names=names)
    names.append("b")
    assert stage.names == ["a"]
    with pytest.raises(FrozenInstanceError):
        stage.by = 3.0  # type: ignore[misc]


def test_a_stage_works_on_tables_rows_and_batches() -> None:
    rows = tp.from_arrow(table())
    assert [row["x"] for row in rows.then(Scale("x", by=3.0))] == [3.0, 6.0, 9.0]
    dicts = rows.map(lambda row: {"x": row["x"] + 1})
    assert [row["x"] for row in dicts.then(Scale("x"))] == [4.0, 6.0, 8.0]
    batches = rows.select("x").batch(2).collate().then(Half())
    assert [batch["x"].tolist() for batch in batches] == [[0.5, 1.0], [1.5]]
    assert [row["x"] for row in rows.map(dict).batch(3).then(AddAll())] == [6.0]


class AddAll(tp.BatchStage):
    def apply(self, batch: list[dict[str, Any]]) -> Any:
        return {"x": sum(row["x"] for row in batch)}


@pytest.mark.parametrize("threads", [0, 2])
def test_what_is_drawn_for_a_row_depends_on_nothing_but_the_row_and_the_epoch(threads: int) -> None:
    def drawn(shards: int, **options: Any) -> list[dict[int, int]]:
        pipe = tp.from_arrow(table_of_rows(0, 200)).sharding_filter(shards).shuffle(30)
        loader = tp.Loader(pipe.then(Noise(5)).batch(8), threads=threads, **options)
        return [{row["row"]: row["noise"] for batch in loader for row in batch} for _ in range(2)]

    first, second = drawn(4)
    assert len(first) == 200
    assert first != second
    assert drawn(12) == [first, second]


OWN: dict[str, Callable[[], tp.Pipeline]] = {
    "table": lambda: tp.from_arrow(table_of_rows(0, 60)).then(Scale("half")).shuffle(9).batch(4),
    "random": lambda: (
        tp.from_arrow(table_of_rows(0, 60)).sharding_filter(4).shuffle(9).then(Noise()).batch(4)
    ),
    "row": lambda: tp.from_dataset(list(map(str, range(40)))).shuffle(9).then(AddSuffix()).batch(4),
    "batch": lambda: (
        tp.from_tensors(x=torch.arange(40.0)).sharding_filter(4).shuffle(9).batch(4).collate()
        .then(Half())
    ),
    "filtered": lambda: (
        tp.from_arrow(table_of_rows(0, 60)).filter(pc.field("row") > 9)
        .then(Noise(1)).batch(4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_a_stage_of_ones_own_resumes_exactly(name: str) -> None:
    check_resume(OWN[name](), processes=1)


# What is refused


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Scale("x", by=0.0), "not 0, got 0"),
        (lambda: tp.from_dataset([1]).then(Scale), "must be a stage"),
    ],
)
def test_what_does_not_fit_is_refused_where_it_is_written(
    make: Callable[[], Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_an_option_that_is_not_there_is_named_with_the_nearest() -> None:
    with pytest.raises(
        TypeError, match=r"scale\(\) has no option 'bye' \(did you mean 'by'\?\); it takes"
    ):
        Scale("x", bye=2.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"shuffle\(\) has no option 'buffersize'"):
        tp.from_dataset([1]).shuffle(buffersize=3)  # type: ignore[call-arg]


class Fails(tp.TableStage):
    what: str

    def apply(self, table: pa.Table) -> Any:
        if self.what == "raises":
            raise ValueError("no")
        return {"shorter": table.slice(1), "none": None, "dict": {"x": [1]}}[self.what]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shorter", r"given, 1, got 0 rows; .* filter"),
        ("none", "NoneType"),
        ("dict", "got dict"),
    ],
)
def test_a_table_of_other_rows_is_refused(what: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        list(tp.from_arrow(table()).then(Fails(what)))


def test_an_error_of_a_stages_own_names_stage_and_row() -> None:
    with pytest.raises(ValueError, match="no") as caught:
        list(tp.from_arrow(table()).then(Fails("raises")))
    assert "fails('raises')" in "".join(caught.value.__notes__)


class Forgets(tp.RowStage):
    def apply(self, row: Any) -> Any:
        return None if row == 2 else row


def test_a_row_that_becomes_none_is_refused() -> None:
    with pytest.raises(DataError, match=r"returned None for a row; .* filter"):
        list(tp.from_dataset([1, 2]).then(Forgets()))


class Several(tp.RowStage):
    how: str

    def apply(self, row: Any) -> Any:
        return {
            "list": [row, row, row],
            "one": [row],
            "values": [1, 2],
            "empty": [],
            "tuple": (row, row),
            "column": {"rows": [row, row]},
            "generator": (one for one in [row, row]),
        }[self.how]


@pytest.mark.parametrize(("how", "got"), [("list", "3 rows"), ("one", "1 row")])
def test_a_row_that_becomes_a_list_of_rows_is_refused_with_flat_map(how: str, got: str) -> None:
    for pipe in (tp.from_arrow(table()), tp.from_dataset([{"x": 1}])):
        with pytest.raises(
            DataError, match=rf"got a list of {got}; .* flat_map\(\) \(at .*row 0\)"
        ):
            list(pipe.then(Several(how)).batch(2))


def test_a_row_that_becomes_a_generator_is_refused_with_flat_map() -> None:
    with pytest.raises(DataError, match=r"got a generator; .* use flat_map\(\)"):
        list(tp.from_dataset(["a"]).then(Several("generator")))


@pytest.mark.parametrize("how", ["values", "empty", "tuple", "column"])
def test_a_row_may_become_anything_else(how: str) -> None:
    assert len(list(tp.from_dataset([{"x": 1}, {"x": 2}]).then(Several(how)))) == 2


def test_a_row_stage_after_batch_gets_and_gives_lists_of_rows() -> None:
    class Shorter(tp.RowStage):
        def apply(self, row: Any) -> Any:
            return row[:1]

    assert list(tp.from_dataset([{"x": 1}, {"x": 2}]).batch(2).then(Shorter())) == [[{"x": 1}]]


def test_what_map_returns_is_one_row_and_may_be_a_list_of_rows() -> None:
    rows = tp.from_dataset([{"chat": [{"role": "user"}, {"role": "assistant"}]}])
    assert list(rows.map(lambda row: row["chat"])) == [[{"role": "user"}, {"role": "assistant"}]]


def test_a_stage_without_apply_says_so() -> None:
    class Empty(tp.RowStage):
        pass

    with pytest.raises(ConfigError, match=r"Empty needs apply\(row\)"):
        list(tp.from_dataset([1]).then(Empty()))


def test_a_stage_of_no_kind_or_with_an_init_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"OfNoKind must be a kind of stage: subclass Source"):

        class OfNoKind(tp.Stage):
            suffix: str = "!"

    with pytest.raises(ConfigError, match=r"WithInit must not define __init__\(\): .* as fields"):

        class WithInit(tp.RowStage):
            def __init__(self, suffix: str = "!") -> None:
                self.suffix = suffix


# A source of one's own


class FromSqlite(tp.Source):
    path: str
    table: str

    def open(self) -> tp.RowSource:
        return SqliteRows(self.path, self.table)


class SqliteRows(tp.RowSource):
    def __init__(self, path: str, table: str) -> None:
        self.path, self.table = path, table
        (rows,) = self.ask(f"select count(*) from {table}")[0]
        self.firsts = np.arange(0, rows, 7)
        self.lengths = np.diff(np.append(self.firsts, rows))

    def ask(self, query: str, *values: int) -> list[Any]:
        with closing(sqlite3.connect(self.path)) as database:
            database.row_factory = sqlite3.Row
            return database.execute(query, values).fetchall()

    def read(self, block: int, start: int, stop: int) -> list[dict[str, Any]]:
        query = f"select * from {self.table} order by rowid limit ? offset ?"
        return [dict(row) for row in self.ask(query, stop - start, int(self.firsts[block]) + start)]

    def fingerprint(self) -> dict[str, Any]:
        return {"table": self.table, "rows": int(self.lengths.sum())}


@pytest.fixture
def database(tmp_path: Path) -> str:
    path = str(tmp_path / "rows.sqlite")
    with closing(sqlite3.connect(path)) as made:
        made.execute("create table texts (row integer, text text)")
        made.executemany("insert into texts values (?, ?)", [(n, f"text {n}") for n in range(61)])
        made.commit()
    return path


def sqlite(path: str, shards: int = 4) -> tp.Pipeline:
    return tp.Pipeline([FromSqlite(path, "texts")]).sharding_filter(shards).shuffle(9, seed=1)


def test_a_source_of_ones_own_gives_each_row_once_and_resumes_exactly(database: str) -> None:
    pipe = sqlite(database).tokenize("bytes").batch(4).pad_collate()
    check_resume(pipe, processes=1)
    rows = [row["row"] for row in sqlite(database)]
    assert sorted(rows) == list(range(61))
    assert rows != sorted(rows)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_share_a_source_of_ones_own(database: str, workers: int) -> None:
    found: list[int] = []
    for rank in range(2):
        pipe = sqlite(database).batch(3).distributed(rank=rank, world_size=2)
        found += [row for batch in tp.Loader(pipe, num_workers=workers) for row in rows_of(batch)]
    assert len(found) == len(set(found)) >= 57  # whole steps of all ranks


def test_a_state_of_a_source_that_has_changed_is_refused(database: str) -> None:
    run = iter(sqlite(database).batch(4))
    next(run)
    state = run.state_dict()
    with closing(sqlite3.connect(database)) as made:
        made.execute("insert into texts values (61, 'one more')")
        made.commit()
    with pytest.raises(tp.StateError, match="rows: saved 61, now 62"):
        sqlite(database).batch(4).load_state_dict(state)


def test_a_source_without_open_says_so() -> None:
    class Nothing(tp.Source):
        pass

    with pytest.raises(ConfigError, match=r"Nothing needs open\(\)"):
        list(tp.Pipeline([Nothing()]))


# Methods


@pytest.mark.parametrize("name", ["shuffle", "pad_collate", "tokenize", "map", "select", "to"])
def test_help_of_a_method_shows_the_whole_text_and_all_options(name: str) -> None:
    import inspect
    import pydoc

    method = getattr(tp.from_dataset([1]), name)
    text = pydoc.render_doc(method, renderer=pydoc.plaintext)
    assert "Args:" in text
    assert "Cursor" in text or name == "select"
    for option in inspect.signature(method).parameters:
        assert option in text.splitlines()[2], option


def test_methods_of_the_class_can_be_mapped_over_pipelines() -> None:
    batched = partial(tp.Pipeline.batch, batch_size=2)
    assert list(batched(tp.from_dataset([1, 2, 3]))) == [[1, 2], [3]]


def test_a_pipeline_is_true_and_nothing_is_read_for_that(tmp_path: Path) -> None:
    assert tp.list_files(tmp_path / "nothing.parquet").read_parquet()
