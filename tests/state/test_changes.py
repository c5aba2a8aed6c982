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
    pipe = tp.from_arrow(pa.table({"x": range(rows)})).sharding_filter(shards)
    pipe = pipe.shuffle(buffer, seed=1) if buffer else pipe
    pipe = pipe.repeat().batch(size) if repeat == "rows" else pipe.batch(size)
    pipe = pipe.repeat() if repeat == "batches" else pipe
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


@examples(100)
@given(
    changes=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=4),
    last=st.sampled_from([1, 8, 64]),
    rows=st.sampled_from([1, 40, 300, 1200]),
    shards=st.sampled_from([1, 3, 12]),
    buffer=st.sampled_from([1, 7, 50, 400]),
)
def test_no_row_comes_twice_and_few_are_left_out(changes, last, rows, shards, buffer):
    options = {"rows": rows, "shards": shards, "buffer": buffer}
    found, most, size, state = [], 0, changes[0][0], None
    for now, count in [*changes, (last, None)]:
        pipe = loaded(state, now, **options) if state else pipeline(now, **options)
        most += shards * max(size, now) * (size != now)
        batches, state = state_after(pipe, count)
        if (state["epoch"], state["batches"]) > (1, 0):  # nothing was left of the first epoch
            break
        assert all(len(batch) == now for batch in batches[:-1])
        found += [x for batch in batches for x in batch]
        size = now
        if state["epoch"]:
            break
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


def odd_ones(stream):
    return stream.filter(is_odd)


def shuffled(stream):
    return stream.shuffle(20)


@pytest.mark.parametrize(("stages", "rows"), [(odd_ones, range(1, 200, 2)), (shuffled, range(200))])
def test_rows_of_a_stream_that_are_dealt_by_window_refuse_in_mid_epoch(stages, rows):
    def dealt(size):
        stream = tp.from_iterable(lambda: range(200), version="1").sharding_filter(4)
        return stages(stream).batch(size)

    for taken in (0, 3):
        run = iter(dealt(4))
        list(islice(run, taken))
        state, pipe = run.state_dict(), dealt(6)
        if taken:
            with pytest.raises(tp.StateError, match="it cannot change within an epoch"):
                pipe.load_state_dict(state, allow_changes=["batch_size"])
        else:
            pipe.load_state_dict(state, allow_changes=["batch_size"])
            assert sorted(n for batch in pipe for n in batch) == list(rows)


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_the_size_may_change_where_the_only_shard_has_ended_an_epoch(rows):
    options = {"rows": rows, "shards": 1, "buffer": None, "repeat": "batches"}
    _, state = state_after(pipeline(8, **options), 1)
    assert given_by(loaded(state, 3, **options), 1) == [list(range(rows))[:3]]


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
    options = {"rows": rows, "shards": 4, "buffer": None, "repeat": "batches"}
    before, state = state_after(pipeline(3, **options), 1)
    after = given_by(loaded(state, 1, **options), 3 * rows)
    found = [x for batch in before + after for x in batch]
    ends = found.index(0, 1)  # of what is left of the first epoch
    assert len(set(found[:ends])) == ends >= rows - 12
    for epoch in (0, 1):
        stretch = found[ends + epoch * rows : ends + (epoch + 1) * rows]
        assert sorted(stretch) == list(range(rows))


def test_a_shard_that_has_given_nothing_since_a_change_stands_where_that_put_it():
    options = {"rows": 2, "shards": 2, "buffer": None, "repeat": "batches"}
    _, state = state_after(pipeline(1, **options), 1)
    run = iter(loaded(state, 2, **options))
    for _ in range(6):
        again = pipeline(2, **options)
        again.load_state_dict(run.state_dict())
        assert given_by(again, 1) == given_by(run, 1)
