"""The batch size may change on resume, where that is allowed by name."""

import json
from dataclasses import replace
from itertools import islice

import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import trainpipes as tp
from drawn import build, examples, specs


def pipeline(size, *, rows=200, shards=12, buffer=20, repeat="", rank=0, world=1):
    pipe = (
        tp.from_arrow(pa.table({"x": range(rows)})).sharding_filter(shards).shuffle(buffer, seed=1)
    )
    if repeat == "rows":
        pipe = pipe.repeat()
    pipe = pipe.batch(size)
    if repeat == "batches":
        pipe = pipe.repeat()
    return pipe.distributed(rank=rank, world_size=world)


def given_by(source, count=None):
    return [[row["x"] for row in batch] for batch in islice(iter(source), count)]


def loaded(state, size, **options):
    pipe = pipeline(size, **options)
    pipe.load_state_dict(json.loads(json.dumps(state)), allow_changes=["batch_size"])
    return pipe


def state_after(pipe, count):
    iterator = iter(pipe)
    taken = given_by(iterator, count)
    return taken, iterator.state_dict()


def test_another_batch_size_is_refused_unless_it_is_allowed():
    _, state = state_after(pipeline(8), 5)
    with pytest.raises(
        tp.StateError,
        match=r"batch_size: saved 8, now 16; .*allow_changes=\['batch_size'\]\) goes on with 16",
    ):
        pipeline(16).load_state_dict(state)


@given(
    changes=st.lists(
        st.tuples(st.sampled_from([1, 3, 8, 32]), st.integers(1, 6)), min_size=1, max_size=4
    ),
    last=st.sampled_from([1, 8, 64]),
    shards=st.sampled_from([1, 3, 12]),
)
@examples(60)
def test_no_row_comes_twice_and_few_are_left_out(changes, last, shards):
    rows, found, state, most, size = 1200, [], None, 0, changes[0][0]
    for now, count in [*changes, (last, None)]:
        pipe = pipeline(now, rows=rows, shards=shards)
        if state is not None:
            pipe = loaded(state, now, rows=rows, shards=shards)
            most += shards * max(size, now) * (size != now)
        iterator, size = iter(pipe), now
        batches = given_by(iterator, count)
        found += [x for batch in batches for x in batch]
        state = iterator.state_dict()
    assert len(set(found)) == len(found)
    assert rows - len(found) <= most


def test_only_what_may_change_can_be_allowed():
    _, state = state_after(pipeline(8), 5)
    with pytest.raises(
        tp.ConfigError,
        match=r"allow_changes must be a list of some of \['batch_size', .*\], got \['seed'\]",
    ):
        pipeline(16).load_state_dict(state, allow_changes=["seed"])
    for odd in (5, "batch_size", [5]):
        with pytest.raises(tp.ConfigError, match="allow_changes must be a list of some of"):
            pipeline(16).load_state_dict(state, allow_changes=odd)


def test_other_differences_are_refused_all_the_same():
    _, state = state_after(pipeline(8), 5)
    with pytest.raises(tp.StateError, match=r"stages/shuffle/buffer_size: saved 20, now 30"):
        pipeline(16, buffer=30).load_state_dict(state, allow_changes=["batch_size"])


@examples(150)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    stops=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    rows=st.integers(1, 300),
    shards=st.sampled_from([1, 4, 12]),
    buffer=st.sampled_from([1, 7, 50, 400]),
)
def test_each_row_comes_at_most_once_and_few_are_left_over(sizes, stops, rows, shards, buffer):
    options = {"rows": rows, "shards": shards, "buffer": buffer}
    taken, state = state_after(pipeline(sizes[0], **options), stops[0])
    for size, stop in zip(sizes[1:], stops[1:], strict=False):
        if state["epoch"]:
            return
        more, after = state_after(loaded(state, size, **options), stop)
        assert all(len(batch) == size for batch in more[:-1])
        if after["epoch"] == state["epoch"] == 0:
            taken += more
            state = after
        else:
            return
    last = pipeline(json.loads(state["pipeline"])["stages"][-1]["batch_size"], **options)
    last.load_state_dict(state)
    rest = given_by(last) if state["batches"] else given_by(pipeline(sizes[-1], **options))
    seen = sorted(x for batch in taken + rest for x in batch)
    assert len(seen) == len(set(seen))
    spans = last._iteration.plan.layouts.usual.num_spans
    if seen and len(seen) < rows:
        assert rows - len(seen) <= spans * (sizes[0] + max(sizes)), (rows, len(seen))


@pytest.mark.parametrize("repeat", ["", "rows", "batches"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_new_sequence_is_the_same_on_any_topology(repeat, world):
    _, state = state_after(pipeline(8, repeat=repeat), 7)
    whole = given_by(loaded(state, 5, repeat=repeat), 24)
    parts = [
        given_by(loaded(state, 5, repeat=repeat, rank=rank, world=world), 24 // world)
        for rank in range(world)
    ]
    order = [(rank - 7) % world for rank in range(world)]
    merged = [
        parts[order.index(step % world)][step // world] for step in range(24 // world * world)
    ]
    assert merged == whole[: len(merged)]


@pytest.mark.parametrize("repeat", ["", "rows", "batches"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_size_may_change_by_the_state_of_any_one_rank(repeat, world):
    _, state = state_after(pipeline(8, repeat=repeat), 2 * world)
    whole = given_by(loaded(state, 5, repeat=repeat), 6 * world)
    for rank in range(world):
        ranked = {"repeat": repeat, "rank": rank, "world": world}
        _, own = state_after(pipeline(8, **ranked), 2)
        found, later = state_after(loaded(own, 5, **ranked), 3)
        assert found == whole[rank : 3 * world : world]
        again = pipeline(5, repeat=repeat)
        again.load_state_dict(later)
        assert given_by(again, 3 * world) == whole[3 * world :]


@pytest.mark.parametrize("repeat", ["", "rows", "batches"])
def test_a_changed_run_resumes_without_allowing_anything_more(repeat):
    _, state = state_after(pipeline(8, repeat=repeat), 7)
    whole = given_by(loaded(state, 5, repeat=repeat), 20)
    for stop in range(0, 12, 3):
        _, later = state_after(loaded(state, 5, repeat=repeat), stop)
        pipe = pipeline(5, repeat=repeat)
        pipe.load_state_dict(later)
        assert given_by(pipe, 20 - stop) == whole[stop:]
        loader = tp.Loader(pipeline(5, repeat=repeat), num_workers=1)
        loader.load_state_dict(later)
        assert given_by(loader, 3) == whole[stop : stop + 3]


def test_the_next_epoch_is_that_of_the_new_size():
    _, state = state_after(pipeline(8), 7)
    changed = loaded(state, 5)
    given_by(changed)
    plain = pipeline(5)
    given_by(plain)
    assert given_by(changed) == given_by(plain)


def test_a_filtered_pipeline_takes_another_size_too():
    def make(size):
        return (
            tp.from_arrow(pa.table({"x": range(200)})).sharding_filter(4).shuffle(20)
            .filter(lambda row: row["x"] % 3 > 0).batch(size)
        )  # fmt: skip

    taken, state = state_after(make(8), 6)
    pipe = make(3)
    pipe.load_state_dict(state, allow_changes=["batch_size"])
    seen = sorted(x for batch in taken + given_by(pipe) for x in batch)
    assert seen == [x for x in range(200) if x % 3]


def test_a_dealt_stream_refuses_in_mid_epoch():
    def make(size):
        return (
            tp.from_iterable(lambda: range(200), version="1")
            .sharding_filter(4)
            .shuffle(20)
            .batch(size)
        )

    iterator = iter(make(8))
    list(islice(iterator, 3))
    with pytest.raises(tp.StateError, match="it cannot change within an epoch"):
        make(4).load_state_dict(iterator.state_dict(), allow_changes=["batch_size"])


def count_to_40():
    return iter(range(40))


STREAMS = {
    "iterable": lambda size: tp.from_iterable(count_to_40).batch(size),
    "sampler": lambda size: tp.from_dataset(range(50), range(40)).batch(size),
    "filtered": lambda size: tp.from_iterable(count_to_40).filter(is_odd).batch(size),
    "across": lambda size: tp.from_iterable(count_to_40).repeat().batch(size),
    "each epoch": lambda size: tp.from_iterable(count_to_40).batch(size).repeat(),
    "taken": lambda size: tp.from_iterable(count_to_40).filter(is_odd).take(15).batch(size),
}


def is_odd(number):
    return number % 2 == 1


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(("old", "new"), [(7, 3), (3, 7), (1, 4), (8, 2), (3, 5)])
def test_a_stream_goes_on_at_the_next_row(name, old, new):
    whole = [row for batch in islice(STREAMS[name](1), 200) for row in batch]
    for taken in range(8):
        run = iter(STREAMS[name](old))
        before = [row for batch in islice(run, taken) for row in batch]
        pipe = STREAMS[name](new)
        pipe.load_state_dict(run.state_dict(), allow_changes=["batch_size"])
        after = [row for batch in islice(pipe, 12) for row in batch]
        if before != whole or name in ("across", "each epoch"):  # else the next epoch begins
            assert before + after == whole[: len(before + after)], taken


def test_rows_of_a_stream_that_are_dealt_by_window_refuse_in_mid_epoch():
    def dealt(size):
        return tp.from_iterable(count_to_40).sharding_filter(2).filter(is_odd).batch(size)

    for taken in (0, 3):
        run = iter(dealt(4))
        list(islice(run, taken))
        pipe = dealt(6)
        if taken:
            with pytest.raises(tp.StateError, match="it cannot change within an epoch"):
                pipe.load_state_dict(run.state_dict(), allow_changes=["batch_size"])
        else:
            pipe.load_state_dict(run.state_dict(), allow_changes=["batch_size"])
            assert sorted(n for batch in pipe for n in batch) == list(range(1, 40, 2))


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_the_size_may_change_where_the_only_shard_has_ended_an_epoch(rows):
    def repeated(size):
        return tp.from_arrow(pa.table({"x": range(rows)})).batch(size).repeat()

    run = iter(repeated(8))
    next(run)
    pipe = repeated(3)
    pipe.load_state_dict(run.state_dict(), allow_changes=["batch_size"])
    assert given_by(pipe, 1) == [list(range(rows))[:3]]


@pytest.mark.parametrize("shards", [1, 4])
def test_the_size_may_change_at_the_start_where_micro_batches_are_left_out(shards):
    def skipped(size):
        table = pa.table({"x": range(40)})
        return tp.from_arrow(table).sharding_filter(shards, split="stride").batch(size).skip(2)

    pipe = skipped(3)
    pipe.load_state_dict(skipped(8).state_dict(), allow_changes=["batch_size"])
    assert given_by(pipe) == given_by(skipped(3))


SMALL = st.lists(st.integers(0, 12), min_size=1, max_size=6)


def states_of(pipe, count):
    run = iter(pipe)
    found = []
    try:
        found.append(run.state_dict())
        for _ in islice(run, count):
            found.append(run.state_dict())
        return [*found, run.state_dict()]
    except tp.DataError:  # a shard gets nothing, ever
        assume(False)


@pytest.mark.filterwarnings("ignore:an epoch of this pipeline gives nothing")
@examples(150)
@given(st.data(), st.integers(1, 9), st.integers(0, 2))
def test_every_state_of_a_run_loads_before_and_after_a_change(data, size, epoch):
    spec = data.draw(specs(SMALL, stream=data.draw(st.booleans())))
    pipe = build(spec)
    for _ in range(epoch):
        states_of(pipe, 30)
    states = states_of(pipe, 20)
    for state in states:
        build(spec).load_state_dict(state)
    if spec.batch_size is None:
        return
    changed = build(replace(spec, batch_size=size))
    try:
        changed.load_state_dict(data.draw(st.sampled_from(states)), allow_changes=["batch_size"])
    except tp.StateError as error:
        if "it cannot change within an epoch" not in str(error):
            raise
        return
    for state in states_of(changed, 20):
        build(replace(spec, batch_size=size)).load_state_dict(state)


@pytest.mark.parametrize("rows", [5, 50])
def test_the_next_epoch_begins_where_the_changed_one_ends_in_all_shards(rows):
    def repeated(size):
        table = pa.table({"x": range(rows)})
        return tp.from_arrow(table).sharding_filter(4).batch(size).repeat()

    before, state = state_after(repeated(3), 1)
    pipe = repeated(1)
    pipe.load_state_dict(state, allow_changes=["batch_size"])
    found = [x for batch in before + given_by(pipe, 3 * rows) for x in batch]
    ends = found.index(0, 1)  # of what is left of the first epoch
    assert len(set(found[:ends])) == ends >= rows - 12
    for epoch in (0, 1):
        stretch = found[ends + epoch * rows : ends + (epoch + 1) * rows]
        assert sorted(stretch) == list(range(rows))


def test_a_shard_that_has_given_nothing_since_a_change_stands_where_that_put_it():
    def repeated(size):
        table = pa.table({"x": range(2)})
        return tp.from_arrow(table).sharding_filter(2).batch(size).repeat()

    _, state = state_after(repeated(1), 1)
    pipe = repeated(2)
    pipe.load_state_dict(state, allow_changes=["batch_size"])
    run = iter(pipe)
    for _ in range(6):
        again = repeated(2)
        again.load_state_dict(run.state_dict())
        assert given_by(again, 1) == given_by(run, 1)
