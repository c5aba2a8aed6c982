"""The steps that have some rows are found: ``find`` is the inverse of ``locate``."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from attacks.chains import REFUSED
from chains import Chain, build
from drawn import GroupSource, RowGroups, examples, specs
from drawn import build as build_spec
from drawn_chains import draw_chain
from trainpipes.engine.iterating.consumer import Consumer, RunOptions
from trainpipes.look import row_steps
from trainpipes.look.locate import Provenance, RowPlace, _keep_pieces, known_items
from trainpipes.order.layout import Topology
from trainpipes.order.permutation import permutation
from trainpipes.state.format import Position

#: Batches of an endless pipeline that are looked at.
ENOUGH = 24


def batches_of(pipe: tp.Pipeline, epoch: int, most: int) -> list[tuple[int, Provenance]]:
    """Numbers of the batches that one rank gives, and where their rows come from."""
    plan = pipe._iteration.plan
    _keep_pieces(plan)
    start = Position(epoch, 0, plan.chain.num_shards)
    items = Consumer(plan, Topology(), start, options=RunOptions(unroll=known_items))
    given = []
    with closing(items):
        for known in islice(items, most):
            assert items.m is not None
            given.append((items.m, Provenance(known, plan.inputs)))
    return given


def on_ranks(
    pipe: tp.Pipeline, batches: list[tuple[int, Provenance]], world: int
) -> list[tuple[int, int, int, Provenance]]:
    """Number, step and rank of each batch that so many ranks give of one sequence."""
    plan = pipe._iteration.plan
    numbers, first = {m for m, _ in batches}, 0
    if plan.counts.limits_items:
        first = plan.chain.skip_batches
    if world > 1 and not plan.chain.uneven:
        hole = next(m for m in range(first, first + len(batches) + 1) if m not in numbers)
        numbers = set(range(first, first + (hole - first) // world * world))
    done: Counter[int] = Counter()
    given = []
    for m, places in batches:
        if m in numbers:
            given.append((m, done[m % world], m % world, places))
            done[m % world] += 1
    return given


def key(place: RowPlace) -> tuple[Any, ...]:
    return place.path, place.row_group, place.row, place.source


def check_inverse(pipe: tp.Pipeline, epoch: int, world: int, draw: random.Random) -> int:
    """What is found of some rows of a pipeline is where they were given; returns how many were."""
    endless = pipe._iteration.plan.chain.endless
    most = ENOUGH if endless else 10_000
    given = on_ranks(pipe, batches_of(pipe, epoch, most), world)
    rows = list(dict.fromkeys(key(place) for *_, places in given for place in places))
    rows = draw.sample(rows, draw.randint(0, len(rows)))
    number = {row: n for n, row in enumerate(rows)}
    steps = ENOUGH // world if endless else None
    expected = Counter(
        (number[key(place)], epoch, step, rank, place.index, m)
        for m, step, rank, places in given
        for place in places
        if key(place) in number and (steps is None or step < steps)
    )
    named = [tp.Place(*row) for row in rows]
    found = tp.find(pipe, named, epoch=epoch, world_size=world, steps=steps)
    came = Counter((f.row, f.epoch, f.step, f.rank, f.index, f.m) for f in found)
    assert came == expected
    assert found.missing.tolist() == sorted({*range(len(rows))} - {row for row, *_ in expected})
    return len(came)


@given(spec=specs(), world=st.integers(1, 4), epoch=st.integers(0, 2), seed=st.integers(0, 999))
@examples(150, often=8)
def test_find_is_the_inverse_of_locate(spec: Any, world: int, epoch: int, seed: int) -> None:
    pipe = build_spec(spec)
    if pipe._iteration.plan.chain.num_shards % world:
        world = 1
    if pipe._iteration.plan.chain.endless:
        epoch = 0
    try:
        check_inverse(pipe, epoch, world, random.Random(seed))
    except tp.DataError as error:
        if not REFUSED.search(str(error)):  # there are no rows to wait for
            raise


@pytest.mark.filterwarnings(
    "ignore:.*do not divide num_shards",
    "ignore:.*columns that",
    "ignore:mix.*never ends",
    "ignore:.*hardly moves",
)
@given(st.integers(0, 2**32))
@examples(300, often=6, shrink=False)
def test_find_is_the_inverse_of_locate_for_any_chain(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    chain: Chain = draw_chain(draw)
    try:
        pipe = build(chain, folder)
        world = draw.choice([1, 1, 2, 3]) if chain.shards > 1 else 1
        check_inverse(pipe, 0 if chain.endless else draw.randint(0, 1), world, draw)
    except BaseException as error:
        if not (isinstance(error, tp.TrainpipesError) and REFUSED.search(str(error))):
            error.add_note(str(chain))
            raise


def parquet(folder: Path, name: str, rows: int = 60, first: int = 0) -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    pq.write_table(pa.table({"x": range(first, first + rows)}), folder / name, row_group_size=17)
    return str(folder / name)


def tp_files(folder: Path) -> tp.Pipeline:
    for name in ("a/one.parquet", "a/two.parquet", "b/one.parquet"):
        parquet(folder, name)
    return tp.read_parquet(f"{folder}/*/*.parquet").sharding_filter(4).shuffle(20).batch(4)


def test_rows_are_named_by_the_end_of_a_path_by_places_and_by_whole_files(tmp_path: Path) -> None:
    pipe = tp_files(tmp_path)
    (found,) = tp.find(pipe, [("two.parquet", 17)])
    place = tp.locate(pipe, found.step).places[found.index]
    assert (Path(place.path or "").name, place.row) == ("two.parquet", 17)
    for name in (
        place,
        (place.path, 17),
        ("a/two.parquet", 17),
        (Path("a/two.parquet"), np.int64(17)),
    ):
        again = tp.find(pipe, [name])
        assert [f.m for f in again] == [found.m]
        assert json.loads(json.dumps(again.to_dict()))["found"][0]["row_in_file"] == 17
    whole = tp.find(pipe, ["b/one.parquet"])
    assert len(whole) == 60
    assert whole[-3:] == [*whole][57:]
    assert not whole[60:]
    assert len(tp.find(pipe, [place, "b/one.parquet", place])) == 62
    assert tp.find(pipe, [("two.parquet", 60), ("two.parquet", 5)]).missing.tolist() == [0]
    nothing = tp.find(pipe, [("two.parquet", 60)])
    assert str(nothing) == "0 of 1 rows in 0 batches of epoch 0"


def test_what_is_no_row_of_the_pipeline_is_refused_with_the_way_out(tmp_path: Path) -> None:
    pipe = tp_files(tmp_path)
    with pytest.raises(
        tp.ConfigError, match=r"one\.parquet'; give more of the path of one, such as .*/a/one"
    ):
        tp.find(pipe, [("one.parquet", 1)])
    with pytest.raises(
        tp.ConfigError, match=r"find\(rows\) must be rows of files that the pipeline reads"
    ):
        tp.find(pipe, [("wo.parquet", 1)])
    with pytest.raises(tp.ConfigError, match=r"numbers where .*, 17"):
        tp.find(pipe, [3])
    for rows in (
        [("two.parquet", -1)],
        [True],
        [None],
        "two.parquet",
        3,
        [("two.parquet", 1.0)],
        [(1, 2)],
        {"two.parquet"},
        ("two.parquet", 1),
        (("two.parquet", row) for row in range(2)),
    ):
        with pytest.raises(tp.ConfigError, match="a list of rows"):
            tp.find(pipe, rows)  # type: ignore[arg-type]
    memory = tp.from_dataset(range(9)).batch(2)
    for options in ({"epoch": -1}, {"epoch": []}, {"steps": 0}, {"world_size": 0}):
        with pytest.raises(tp.ConfigError, match="find"):
            tp.find(memory, [3], **options)
    with pytest.raises(tp.TopologyError):
        tp.find(memory, [3], world_size=2)
    with pytest.raises(tp.ConfigError, match=r"find\(steps\) must be given"):
        tp.find(memory.repeat(), [3])
    with pytest.raises(tp.ConfigError, match="a pipeline or a Loader"):
        tp.find([1, 2], [3])  # type: ignore[arg-type]


def test_a_state_says_what_is_seen_also_after_ranks_and_batch_size_have_changed() -> None:
    rows = tp.from_dataset(range(200)).sharding_filter(4).shuffle(30)
    small = tp.Loader(rows.batch(4))
    seen = [x for batch in islice(small, 8) for x in batch]
    large = tp.Loader(rows.batch(10))
    large.load_state_dict(small.state_dict(), allow_changes=["batch_size"])
    rest = [x for batch in islice(iter(large), 3) for x in batch]
    state = json.loads(json.dumps(large.state_dict()))
    found = tp.find(rows.batch(10), range(200), state=state, epoch=[0, 1])  # type: ignore[arg-type]
    assert found.seen is not None
    assert sorted(found.row[found.seen].tolist()) == sorted(seen + rest)
    assert [f.row for f in found if f.m == 8 and f.epoch == 0] == rest[:10]
    assert not found.seen[found.epoch == 1].any()
    many = tp.find(rows.batch(10), [rest[0]], state=state, world_size=4)
    assert [(f.m, f.step, f.rank, f.seen) for f in many] == [(8, 2, 0, True)]


def test_rows_of_a_mix_are_named_by_source_and_those_of_zip_by_either(tmp_path: Path) -> None:
    texts, memory = tp.read_parquet(parquet(tmp_path, "t.parquet")), tp.from_dataset(range(30))
    mixed = tp.mix(
        {
            "files": texts.shuffle(9),
            "rows": memory.map(lambda x: {"x": x}),
            "more": memory.map(lambda x: {"x": -x}),
        },
        weights={"files": 1, "rows": 1, "more": 1},
    ).batch(5)
    with pytest.raises(tp.ConfigError, match=r"tp\.Place\(row=0, source='more'\)"):
        tp.find(mixed, [3])
    found = tp.find(mixed, [tp.Place(row=3, source="rows"), ("t.parquet", 3)])
    for one in found:
        place = tp.locate(mixed, one.step).places[one.index]
        assert (place.source, place.row) == (["rows", "files"][one.row], 3)
    assert {one.row for one in found} == {0, 1}
    left = texts.rename({"x": "y"})
    zipped = left.zip(tp.read_parquet(parquet(tmp_path, "u.parquet"))).shuffle(20).batch(4)
    one, other = tp.find(zipped, [("t.parquet", 5), ("u.parquet", 5)])
    assert (one.m, one.index) == (other.m, other.index)


def test_rows_without_files_that_follow_each_other_are_counted_over_all() -> None:
    rows = [{"text": letter} for letter in "abcdef"]
    pipe = tp.concat(tp.from_dataset(rows[:3]), tp.from_dataset(rows[3:])).shuffle(6, seed=3)
    for step, row in enumerate(pipe):
        (place,) = tp.locate(pipe, step, epoch=0).places
        assert place.row == rows.index(row)
        (found,) = tp.find(pipe, [place.row], epoch=0)
        assert found.step == step
    rows[4]["text"] = None
    with pytest.raises(tp.DataError, match="row 4"):
        list(pipe.tokenize("bytes"))


@pytest.mark.parametrize("options", [
    {"length": 3, "stride": 1}, {"length": 3, "stride": 1, "within": "e"}, {"length": 3},
    {"length": 2, "stride": 5},
])  # fmt: skip
@pytest.mark.parametrize("in_memory", [False, True])
def test_rows_are_found_in_all_windows_that_hold_them(
    options: dict[str, Any], in_memory: bool, tmp_path: Path
) -> None:
    table = pa.table({"x": range(40), "e": [n // 9 for n in range(40)]})
    pq.write_table(table, tmp_path / "w.parquet", row_group_size=7)
    rows = tp.from_arrow(table) if in_memory else tp.read_parquet(tmp_path / "w.parquet")
    names: Any = range(40) if in_memory else [("w.parquet", n) for n in range(40)]
    windows = rows.windows(**options)
    for pipe in (
        windows.shuffle(9).batch(2),
        windows.filter(lambda row: row["x"][0] > 3).batch(2),
        windows.skip(2).sharding_filter(2).batch(2),
    ):
        rows_of_batches = [[row["x"].tolist() for row in batch] for batch in pipe]
        held = [
            (x, step, index)
            for step, batch in enumerate(rows_of_batches)
            for index, window in enumerate(batch)
            for x in window
        ]
        found = tp.find(pipe, names, epoch=0)
        assert sorted((one.row, one.step, one.index) for one in found) == sorted(held)
        assert found.missing.tolist() == sorted({*range(40)} - {x for x, *_ in held})
        places = tp.locate(pipe, 1, epoch=0).places
        assert [place.row for place in places] == [x for row in rows_of_batches[1] for x in row]
        check_inverse(pipe, 1, 1, random.Random(0))
        if not in_memory:
            whole = tp.find(pipe, ["w.parquet"], epoch=0)
            assert sorted((one.step, one.index) for one in whole) == sorted({w[1:] for w in held})


def test_where_batches_are_counted_each_window_is_permuted_once_and_nothing_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def counting(n: int, *path: Any) -> Any:
        asked.append(n)
        return permutation(n, *path)

    class NotRead(GroupSource):
        def read(self, block: int, start: int, stop: int) -> pa.Table:
            raise AssertionError("it was read")

    class Groups(RowGroups):
        def open(self) -> GroupSource:
            return NotRead(self.groups)

    monkeypatch.setattr(row_steps, "permutation", counting)
    source = tp.Pipeline([Groups([1000] * 500)])
    pipe = source.sharding_filter(4).shuffle(1000).batch(8)
    some = random.Random(0).sample(range(500_000), 50_000)
    assert len(tp.find(pipe, some, epoch=3, world_size=4)) == 50_000
    assert sum(asked) == 500_000  # the rows of all windows
    asked.clear()
    tp.find(pipe, [17], epoch=3)
    assert len(asked) == 1
    light = source.sample(0.5).sharding_filter(4).shuffle(1000).map(print).batch(8).shuffle(9)
    assert 0 < len(tp.find(light, range(100))) < 100  # type: ignore[arg-type]


def test_a_filter_sees_its_rows_and_no_stage_after_it_is_called(tmp_path: Path) -> None:
    called = []
    log = tp.Quarantine(tmp_path / "bad")

    def odd(row: dict[str, Any]) -> bool:
        if row["x"] == 7:
            raise ValueError("seven")
        return bool(row["x"] % 2)

    rows = tp.read_parquet(parquet(tmp_path, "x.parquet")).shuffle(20)
    pipe = rows.filter(odd, on_error=log).map(called.append).batch(4)
    found = tp.find(pipe, [("x.parquet", n) for n in range(60)])
    assert sorted(found.row.tolist()) == [n for n in range(1, 60, 2) if n != 7]
    assert not called
    assert not list((tmp_path / "bad").glob("**/*.jsonl"))
    assert tp.find(rows.filter(pc.field("x") > 4).batch(4), ["x.parquet"]).row.size == 55


def test_rows_that_weights_choose_are_found() -> None:
    rows = tp.from_arrow(pa.table({"x": range(60), "rare": [n % 7 == 0 for n in range(60)]}))
    pipe = rows.shuffle(20).sample_by("rare", {True: 1, False: 0.4}).batch(4)
    given = [[row["x"] for row in batch] for batch in pipe]
    found = tp.find(pipe, range(60), epoch=0)  # type: ignore[arg-type]
    assert [given[one.step][one.index] for one in found] == [one.row for one in found]
    assert len(found) == sum(map(len, given)) < 60


def test_to_look_moves_nothing() -> None:
    rows = tp.from_dataset(range(40))
    for pipe in (rows.shuffle(9).batch(4), rows.filter(bool).batch(4)):
        loader = tp.Loader(pipe)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        found = tp.find(loader, [3, 5], state=state)
        assert {one.epoch for one in found} == {0}
        assert loader.state_dict() == state
