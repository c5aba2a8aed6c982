"""Stages and sources of one's own: in few lines, with nothing lost."""

from __future__ import annotations

import inspect
import pickle
import pydoc
import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, FrozenInstanceError
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import trainpipes as tp
from drawn import rows_of, table_of_rows
from resuming import check_resume
from trainpipes.errors import ConfigError, DataError, StateError


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


class Noise(tp.TableStage, depends_on={"row", "epoch"}):
    """A number for each row and epoch, made once in each process ready to be drawn."""

    seed: int = 0
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
    with pytest.raises(FrozenInstanceError, match=r"scale cannot set 'by'.*open\(\)"):
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
    check_resume(OWN[name](), epochs=2, processes=0)


# What is refused


class Fails(tp.TableStage):
    what: str

    def apply(self, table: pa.Table) -> Any:
        if self.what == "raises":
            raise ValueError("no")
        return {"shorter": table.slice(1), "none": None, "dict": {"x": [1]}}[self.what]


@pytest.mark.parametrize(
    ("what", "said"),
    [("shorter", r"given, 1, got 0 rows; .* filter"), ("none", "NoneType"), ("dict", "got dict")],
)
def test_a_table_of_other_rows_is_refused(what: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        list(tp.from_arrow(table()).then(Fails(what)))
    with pytest.raises(ValueError, match="no") as caught:
        list(tp.from_arrow(table()).then(Fails("raises")))
    assert "fails('raises')" in "".join(caught.value.__notes__)


class Becomes(tp.RowStage):
    """Rows that become what a function makes of them."""

    make: Any

    def apply(self, row: Any) -> Any:
        return self.make(row)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda row: [row, row, row], r"got a list of 3 rows; .* flat_map\(\) \(at .*row 0\)"),
        (lambda row: [row], r"got a list of 1 row; .* flat_map\(\) \(at .*row 0\)"),
        (lambda row: (one for one in [row]), r"got a generator; .* use flat_map\(\)"),
        (lambda row: None, r"returned None for a row; .* filter"),
    ],
)
def test_what_is_not_one_row_is_refused_with_the_way_out(make: Any, said: str) -> None:
    for pipe in (tp.from_arrow(table()), tp.from_dataset([{"x": 1}])):
        with pytest.raises(DataError, match=said):
            list(pipe.then(Becomes(make)).batch(2))


def test_a_row_may_become_anything_else() -> None:
    for made in ([1, 2], [], ({"x": 1}, {"x": 1}), {"rows": [{"x": 1}]}):
        pipe = tp.from_dataset([1, 2]).then(Becomes(lambda row, made=made: made))
        assert list(pipe) == [made] * 2
    chats = tp.from_dataset([{"chat": [{"role": "user"}]}])
    assert list(chats.map(lambda row: row["chat"])) == [[{"role": "user"}]]


def test_a_row_stage_after_batch_gets_and_gives_lists_of_rows() -> None:
    batches = tp.from_dataset([{"x": 1}, {"x": 2}]).batch(2)
    assert list(batches.then(Becomes(lambda row: row[:1]))) == [[{"x": 1}]]


class Empty(tp.RowStage):
    pass


class Nothing(tp.Source):
    pass


class Opens(tp.TableStage):
    opened: Any

    def open(self) -> Any:
        return self.opened


SCALED = tp.from_arrow(pa.table({"x": [1]}))


async def awaited(stage: Any, row: Any) -> Any:
    return row


def of_class(*bases: type, **members: Any) -> Callable[[], Any]:
    return lambda: type("Odd", bases, members)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Scale("x", by=0.0), ConfigError, "not 0, got 0"),
        (lambda: Scale("x", bye=2.0), TypeError, r"no option 'bye' \(did you mean 'by'\?\); it takes"),
        (lambda: tp.from_dataset([1]).then(Scale), ConfigError, "must be a stage"),
        (lambda: tp.from_dataset([1]).shuffle(buffersize=3), TypeError, r"shuffle\(\) has no option"),
        (lambda: tp.from_dataset([1]).batch(2, True), TypeError, r"batch\(\): too many positional.*it is"),
        (lambda: tp.from_dataset([1]).map(), TypeError, r"map\(\): missing a required argument: 'fn'; it is"),
        (lambda: list(tp.from_dataset([1]).then(Empty())), ConfigError, r"Empty needs apply\(row\)"),
        (lambda: list(tp.Pipeline([Nothing()])), ConfigError, r"Nothing needs open\(\)"),
        (of_class(tp.Stage, __annotations__={"x": str}, x="!"), ConfigError, "kind of stage: subclass"),
        (of_class(tp.Stage), ConfigError, "TableStage, BatchStage or StatefulStage"),
        (of_class(tp.RowStage, __init__=len), ConfigError, r"must not define __init__\(\): .* as fields"),
        (of_class(tp.RowStage, __post_init__=len), ConfigError, "__post_init__"),
        (lambda: list(SCALED.then(Opens(lambda table: table))), ConfigError,
         r"what Opens.open\(\) returns must be a function of a table and its Rows, got .*write def"),
        (lambda: list(SCALED.then(Opens(None))), ConfigError, r"Opens.open\(\) returns must be .*got None"),
        (of_class(tp.RowStage, apply=awaited), ConfigError, r"apply\(\) must be a function without async"),
        (of_class(tp.RowStage, free=frozenset({"other"})), ConfigError, "options, and there is no 'other'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_where_it_is_written(
    make: Callable[[], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make()


# A source of one's own


class Own(tp.Source):
    """Rows 0, 1, 2, … in blocks, read by a function."""

    lengths: Any
    reads: Any = None
    prints: Any = None

    def open(self) -> Any:
        return OwnRows(self)


class OwnRows(tp.RowSource):
    def __init__(self, own: Own) -> None:
        self.lengths, self.own = own.lengths, own

    def read(self, block: int, start: int, stop: int) -> Any:
        if self.own.reads is not None:
            return self.own.reads(block, start, stop)
        first = int(np.sum(self.lengths[:block]))
        return [{"row": first + n} for n in range(start, stop)]

    def fingerprint(self) -> Any:
        return {"rows": 1} if self.own.prints is None else self.own.prints


def own(lengths: Any = (10, 10), **options: Any) -> tp.Pipeline:
    return tp.Pipeline([Own(np.array(lengths), **options)])


def dealt(**options: Any) -> tp.Pipeline:
    return own([7] * 8 + [5], **options).sharding_filter(4).shuffle(9, seed=1)


def test_a_source_of_ones_own_gives_each_row_once_and_resumes_exactly() -> None:
    check_resume(dealt().batch(4).collate(), epochs=2, processes=1)
    rows = [row["row"] for row in dealt()]
    assert sorted(rows) == list(range(61))
    assert rows != sorted(rows)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_share_a_source_of_ones_own(workers: int) -> None:
    found: list[int] = []
    for rank in range(2):
        pipe = dealt().batch(3).distributed(rank=rank, world_size=2)
        found += [row for batch in tp.Loader(pipe, num_workers=workers) for row in rows_of(batch)]
    assert len(found) == len(set(found)) >= 57  # whole steps of all ranks


def test_rows_of_a_source_of_ones_own_are_known_by_the_numbers_of_its_files() -> None:
    class Filed(Own):
        def open(self) -> Any:
            rows = OwnRows(self)
            rows.file_of_block = np.array([0, 0, 1, 2])
            return rows

    pipe = tp.Pipeline([Filed(np.array([10, 10, 10, 10]))])
    parts = [[row["row"] for row in part] for part in pipe.split({"a": 0.5, "b": 0.5}).values()]
    assert sorted(parts[0] + parts[1]) == list(range(40))
    assert 0 < len(parts[0]) < 40
    assert [row["row"] for row in tp.concat(pipe, pipe)] == [*range(40), *range(40)]


def test_a_state_of_a_source_that_has_changed_is_refused() -> None:
    run = iter(dealt(prints={"rows": 61}).batch(4))
    next(run)
    with pytest.raises(tp.StateError, match="rows: saved 61, now 62"):
        dealt(prints={"rows": 62}).batch(4).load_state_dict(run.state_dict())


# Methods


@pytest.mark.parametrize("name", ["shuffle", "pad_collate", "tokenize", "map", "select", "to"])
def test_help_of_a_method_shows_the_whole_text_and_all_options(name: str) -> None:
    method = getattr(tp.from_dataset([1]), name)
    text = pydoc.render_doc(method, renderer=pydoc.plaintext)
    assert "Args:" in text
    assert all(line.strip() in text for line in inspect.getdoc(method).splitlines())
    call, _, _ = text.partition("-> 'Pipeline'")  # one line, or one for each option
    assert all(option in call for option in inspect.signature(method).parameters)


class Positive(tp.TableStage):
    """Refuses tables with a number below 0."""

    def apply(self, table: pa.Table) -> pa.Table:
        if pc.any(pc.less(table["x"], 0)).as_py():
            raise tp.DataError("a number below 0")
        return table


@pytest.mark.parametrize(("bad", "others"), [(0, ()), (1, (99,)), (49, (99,)), (99, ())])
def test_the_first_bad_row_is_named(bad: int, others: tuple[int, ...], tmp_path: Path) -> None:
    values = [-1 if k in (bad, *others) else k for k in range(100)]
    pq.write_table(pa.table({"x": values}), tmp_path / "x.parquet")
    with pytest.raises(tp.DataError, match=rf"below 0 \(at .*x\.parquet, row group 0, row {bad}\)"):
        list(tp.read_parquet(tmp_path / "x.parquet").then(Positive()).batch(100))


READS: dict[str, tuple[Callable[[int, int, int], Any], str]] = {
    "too few": (lambda b, low, high: pa.table({"n": range(low, high - 1)}), "got [0-9]+ rows"),
    "too many": (lambda b, low, high: pa.table({"n": range(10)}), "got 10 rows"),
    "too few dicts": (lambda b, low, high: [{"n": 1}] * (high - low - 1), "got [0-9]+ rows"),
    "nothing": (lambda b, low, high: None, "got NoneType"),
    "a dict": (lambda b, low, high: {"n": [1]}, "got dict"),
    "an array": (lambda b, low, high: np.arange(high - low), "got ndarray"),
    "a tuple": (lambda b, low, high: tuple(range(high - low)), "got tuple"),
}


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("name", READS)
def test_a_source_that_gives_other_rows_than_asked_for_is_refused(
    name: str, shuffled: bool
) -> None:
    read, said = READS[name]
    pipe = own([10, 10], reads=read).sharding_filter(2)
    pipe = pipe.shuffle(4) if shuffled else pipe
    with pytest.raises(DataError, match=rf"OwnRows.read\([0-9, ]+\) returns the .* {said}"):
        list(pipe.batch(3))


@pytest.mark.parametrize(
    "lengths", [[3, -1, 5], [2.5, 2.5], [[1, 2]], [True, False], None, "ab", [2**62, 2**62]]
)
def test_lengths_that_are_no_counts_are_refused(lengths: Any) -> None:
    with pytest.raises(ConfigError, match="lengths must be the rows of each block"):
        len(tp.Pipeline([Own(lengths)]))


class Counted(tp.Source):
    counts: Any

    def open(self) -> Any:
        return CountedRows(self)


class CountedRows(OwnRows):
    lengths = property(lambda self: self.own.counts)  # type: ignore[assignment]

    def __init__(self, own: Any) -> None:
        self.own = own

    def read(self, block: int, start: int, stop: int) -> Any:
        return [{"row": (block, n)} for n in range(start, stop)]

    def fingerprint(self) -> Any:
        return {}


def test_lengths_may_be_a_property_of_int64() -> None:
    rows = list(tp.Pipeline([Counted(np.array([1, 2]))]))
    assert [row["row"] for row in rows] == [(0, 0), (1, 0), (1, 1)]
    with pytest.raises(ConfigError, match=r"lengths must be an array of int64 .* got \[1, 2\]"):
        list(tp.Pipeline([Counted([1, 2])]))


def test_a_source_of_which_a_state_says_nothing_may_stand_beside_tables() -> None:
    pipe = tp.Pipeline([Counted(np.array([1, 2]))])
    pipe.load_state_dict(pipe.state_dict(), allow_changes=["version"])
    assert len(list(pipe)) == 3


@pytest.mark.parametrize("prints", [{"rows": 1j}, {"rows": {1}}, {"rows": b"x"}])
def test_a_fingerprint_that_no_state_can_keep_is_refused_at_once(prints: Any) -> None:
    with pytest.raises(ConfigError, match=r"fingerprint\(\) must be a dict .* as JSON: "):
        next(iter(own(prints=prints)))


@pytest.mark.parametrize("opened", [None, [1], OwnRows, "rows"])
def test_what_opens_no_rows_is_refused(opened: Any) -> None:
    class Opens(tp.Source):
        what: Any

        def open(self) -> Any:
            return self.what

    with pytest.raises(ConfigError, match=r"open\(\) returns a RowSource or a RowStream, got"):
        list(tp.Pipeline([Opens(opened)]))


def test_a_source_without_rows_by_number_is_not_shuffled_as_if_it_had() -> None:
    class ByNumber(Own, random_access=True):
        pass

    pipe = tp.Pipeline([ByNumber(np.array([10, 10]))]).shuffle(scope="global")
    with pytest.raises(ConfigError, match=r"reads rows by number, and .* cannot"):
        list(pipe)


# Streams


class Slowly(tp.Source):
    """Rows of a stream that gives a few at a time, as a socket does."""

    rows: int
    states: bool = False

    def open(self) -> tp.RowStream:
        return SlowRows(self)


class SlowRows(tp.RowStream):
    def __init__(self, source: Slowly) -> None:
        self.source = source

    def open(self, epoch: int, state: dict[str, Any] | None) -> tp.StreamReader:
        return SlowReader(self.source)

    def fingerprint(self) -> dict[str, Any]:
        return {"rows": self.source.rows}


class SlowReader(tp.StreamReader):
    def __init__(self, source: Slowly) -> None:
        self.left, self.states = list(range(source.rows)), source.states

    def read(self, rows: int) -> list[int] | None:
        most = min(rows, 7)
        found, self.left = self.left[:most], self.left[most:]
        return found or None

    def state(self) -> dict[str, Any]:
        return {"left": len(self.left)} if self.states else {}


@pytest.mark.parametrize("states", [False, True])
def test_a_stream_that_gives_a_few_rows_at_a_time_gives_all_of_them(states: bool) -> None:
    rows = tp.Pipeline([Slowly(50, states=states)])
    assert list(rows) == list(range(50))
    assert sorted(rows.shuffle(20)) == list(range(50))
    pipe = rows.sharding_filter(4).shuffle(20).batch(2)
    run = iter(pipe)
    first = [next(run) for _ in range(5)]
    state = run.state_dict()
    rest = list(run)
    assert sorted(row for batch in first + rest for row in batch) == list(range(50))
    again = iter(pipe)
    again.load_state_dict(state)
    assert list(again) == rest


def test_a_state_of_the_start_reads_none_of_the_rows_that_skip_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SlowRows, "seekable", True)
    pipe = tp.Pipeline([Slowly(50, states=True)]).skip(20)
    with monkeypatch.context() as patch:
        patch.setattr(SlowReader, "read", lambda *_: pytest.fail("it is read"))
        state = pipe.state_dict()
    pipe.load_state_dict(state)
    assert list(pipe) == [*range(20, 50)]


@pytest.mark.parametrize("shuffled", [False, True])
def test_no_rows_of_a_stream_are_not_taken_for_its_end(
    shuffled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[list[int]] = [[0, 1], [], [2]]
    monkeypatch.setattr(SlowReader, "read", lambda _, __: parts.pop(0) if parts else None)
    rows = tp.Pipeline([Slowly(3)])
    with pytest.raises(DataError, match="a row or more, and None at the end, got no row"):
        list(rows.shuffle(2) if shuffled else rows.batch(2))


# Stages


def test_attributes_that_are_no_options_are_refused_and_cached_ones_are_not() -> None:
    class Sets(tp.RowStage):
        hits = 0

        def check(self) -> None:
            object.__setattr__(self, "hits", 100)

    class Caches(tp.RowStage):
        @cached_property
        def hits(self) -> int:
            return 100

        def check(self) -> None:
            assert self.hits

        def apply(self, row: int) -> int:
            return row + self.hits

    with pytest.raises(ConfigError, match=r"check\(\) sets 'hits', and a stage keeps its options"):
        Sets()
    assert list(tp.from_dataset([1]).then(Caches())) == [101]


@pytest.mark.parametrize("name", ["traits", "check", "name", "options", "process", "apply"])
def test_an_option_with_a_name_that_every_stage_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"every stage has '{name}'.* another name"):
        type("Odd", (tp.RowStage,), {"__annotations__": {name: str}, name: "x"})


def test_a_type_that_cannot_be_looked_up_is_not_looked_at() -> None:
    odd = type("Odd", (tp.RowStage,), {"__annotations__": {"x": "dict['a', 1 / 0]"}})
    assert odd(x=3).options == {"x": 3}


def test_free_options_are_those_of_the_class_and_of_those_above_it() -> None:
    class Above(tp.RowStage):
        free = frozenset({"shown"})
        shown: int = 0

        def apply(self, row: Any) -> Any:
            return row

    class Below(Above):
        free = frozenset({"told"})
        told: int = 0

    rows = tp.from_dataset(range(9))
    run = iter(rows.then(Below(shown=1, told=1)))
    next(run)
    again = iter(rows.then(Below(shown=2, told=2)))
    again.load_state_dict(run.state_dict())
    assert list(again) == list(range(1, 9))


def weights() -> Sequence[tuple[Any, Any]]:
    tensor = torch.zeros(5000)
    other = tensor.clone()
    other[9:2000] = 7
    tables = [pa.table({"x": [*range(1500), x, *range(1501, 3000)]}) for x in (1500, 0)]
    objects = [np.array(["a", x], dtype=object) for x in "bc"]
    return [(tensor, other), tuple(tables), tuple(objects)]


class Weighs(tp.RowStage):
    by: Any

    def apply(self, row: Any) -> Any:
        return row


@pytest.mark.parametrize("number", range(3))
def test_a_resume_with_another_value_of_an_option_is_refused_however_long(number: int) -> None:
    one, other = weights()[number]
    same, _ = weights()[number]
    rows = tp.from_dataset(range(9))
    run = iter(rows.then(Weighs(one)))
    next(run)
    state = run.state_dict()
    iter(rows.then(Weighs(same))).load_state_dict(state)
    with pytest.raises(StateError, match="weighs/by"):
        iter(rows.then(Weighs(other))).load_state_dict(state)


# Other pipelines within


class Known(tp.TableStage):
    """Looks at the rows of another pipeline, which a thread reads."""

    thread_safe = True

    def open(self) -> Callable[[pa.Table, tp.Rows], pa.Table]:
        pipe = tp.from_arrow(pa.table({"x": range(2000)})).filter(pc.field("x") < 1500)
        known: list[Any] = []
        thread = threading.Thread(target=lambda: known.extend(pipe), daemon=True)
        thread.start()
        thread.join(20)
        return lambda table, _: table.append_column("known", pa.array([len(known)] * len(table)))


class Joined(tp.Source):
    def open(self) -> tp.RowStream:
        return JoinedRows()


class JoinedRows(tp.RowStream):
    def open(self, epoch: int, state: dict[str, Any] | None) -> tp.StreamReader:
        return JoinedReader()

    def fingerprint(self) -> dict[str, Any]:
        return {}


class JoinedReader(tp.StreamReader):
    def __init__(self) -> None:
        rows = tp.from_dataset([{"x": n} for n in range(2000)]).filter(pc.field("x") >= 0)
        self.rows = iter(in_threads(rows))

    def read(self, rows: int) -> list[Any] | None:
        return [row for _, row in zip(range(rows), self.rows, strict=False)] or None


def in_threads(pipe: tp.Pipeline) -> tp.Loader:
    """Whose threads begin with what is waited for."""
    return tp.Loader(pipe.sharding_filter(8).shuffle(64, seed=0), threads=4)


@pytest.mark.parametrize("pipe", [
    tp.from_arrow(pa.table({"x": range(3000)})).then(Known()).select("known"),
    tp.Pipeline([Joined()]).filter(pc.field("x") < 1500),
])  # fmt: skip
def test_what_a_pipeline_calls_may_iterate_another_one(pipe: tp.Pipeline) -> None:
    found: list[Any] = []

    def iterate() -> None:
        found.extend(tp.Loader(pipe, threads=2))

    thread = threading.Thread(target=iterate, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits for a thread that waits for it"
    assert len(found) in (1500, 3000)
    assert all(row.get("known", 1500) == 1500 for row in found)
