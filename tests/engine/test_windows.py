"""Windows of a shared span are read once and let go."""

import gc
import json
import math
import os
import time
from weakref import WeakSet

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.reading import windows
from trainpipes.order.layout import WindowKey


def watched(monkeypatch, least=0):
    """How many rows each window has that is read, and most windows, of ``least`` rows or more, in memory
    at once."""
    read, most = [], [0]
    seen, held = WeakSet(), WeakSet()
    reading = windows.Window.content

    def content(window):
        is_new = not window.nbytes
        found = reading(window)
        if is_new and window not in seen:
            seen.add(window)
            read.append(len(found[0]))
            if read[-1] >= least:
                held.add(window)
            most[0] = max(most[0], len(held))
        return found

    monkeypatch.setattr(windows.Window, "content", content)
    return read, most


def rows(count=6000):
    return tp.from_arrow(pa.table({"x": range(count)}))


@pytest.mark.parametrize(("threads", "held"), [(0, 2), (2, 4)])
@pytest.mark.parametrize("shards", [1, 23])
def test_shards_that_share_a_span_read_each_window_once(monkeypatch, shards, threads, held):
    read, most = watched(monkeypatch, least=6000)
    pipe = rows(60_000).sharding_filter(shards).shuffle(6000).batch(32)
    list(tp.Loader(pipe, threads=threads))
    layout = Plan.of(pipe.stages).layouts.usual
    windows = [layout.window(0, number) for number in range(layout.num_windows(0))]
    assert read == [stop - start for start, stop in windows]
    assert sum(size >= 6000 for size in read) == 8
    assert most[0] <= held


@pytest.mark.parametrize("where", ["before", "after"])
def test_the_next_epochs_windows_are_read_before_it_begins(monkeypatch, where):
    read, _ = watched(monkeypatch)
    pipe = rows(3000).sharding_filter(3).shuffle(900)
    pipe = pipe.repeat(2).batch(8) if where == "before" else pipe.batch(8).repeat(2)
    batches = iter(tp.Loader(pipe, threads=2))
    for _ in range(300):  # of 375
        next(batches)
    for _ in range(100):
        if sum(read) > 3000:
            break
        time.sleep(0.05)
    assert sum(read) > 3000
    assert len(list(batches)) == 450
    assert sum(read) == 6000  # and none of an epoch that does not come


def test_windows_are_not_read_ahead_where_memory_is_short(monkeypatch):
    read, most = watched(monkeypatch, least=1000)
    pipe = rows().shuffle(1500, max_bytes=16_000).filter(lambda row: True).batch(8)
    list(tp.Loader(pipe, threads=2))
    assert sum(read) == 6000
    assert most[0] == 1


def test_windows_go_with_the_loop_they_were_read_for(monkeypatch):
    alive = WeakSet()
    original = windows.Window.content

    def content(self):
        alive.add(self)
        return original(self)

    monkeypatch.setattr(windows.Window, "content", content)
    gc.disable()
    try:
        pipe = rows().sharding_filter(2).shuffle(1500).batch(8)
        batches = iter(pipe)
        next(batches)
        first = WeakSet(alive)
        assert len(first) >= 1
        del batches
        for _ in range(100):  # a thread may be at work still
            if not first:
                break
            time.sleep(0.05)
        assert not first
    finally:
        gc.enable()


def test_a_filter_that_sets_shards_apart_does_not_fill_the_memory(monkeypatch):
    _, most = watched(monkeypatch)
    pipe = rows(30_000).sharding_filter(23).shuffle(300).filter(lambda row: row["x"] % 32 == 0)
    assert len(list(pipe.batch(4))) > 200
    assert most[0] <= 2 * 23


def two_thirds(row):
    return row["x"] % 3 > 0


SHARING = {
    "filtered": lambda dealt: dealt.filter(two_thirds).shuffle(1000).batch(8),
    "objects": lambda dealt: dealt.map(dict, version="1").filter(two_thirds).shuffle(1000).batch(8),
    "packed": lambda dealt: (
        dealt.map_batches(tokens, version="1").shuffle(1000).pack(64, pad_token_id=0).batch(8)
    ),
    "filtered later": lambda dealt: dealt.shuffle(1000).filter(two_thirds).batch(8),
}


def tokens(table):
    return pa.table({"input_ids": [[1, 2, 3]] * len(table)})


@pytest.mark.parametrize("threads", [0, None])
@pytest.mark.parametrize("dealt", ["stride", "spans"])
@pytest.mark.parametrize("name", SHARING)
def test_shards_that_stand_in_different_windows_of_a_span_read_each_once(
    monkeypatch, name, dealt, threads
):
    count, shards = (20_000, 24) if dealt == "stride" else (16_000, 23)
    read, _ = watched(monkeypatch)
    pipe = SHARING[name](rows(count).sharding_filter(shards, split=dealt))
    assert len(list(tp.Loader(pipe, threads=threads))) > 100
    assert len(read) <= 1.1 * Plan.of(pipe.stages).layouts.usual.num_windows(0)


def test_they_are_read_again_where_memory_is_short(monkeypatch):
    _, most = watched(monkeypatch)
    pipe = rows(20_000).sharding_filter(24, split="stride").shuffle(1000, max_bytes=30_000)
    whole = list(pipe.filter(two_thirds).batch(8))
    assert most[0] <= windows.LEAST_HELD
    again = rows(20_000).sharding_filter(24, split="stride").shuffle(1000)
    assert list(again.filter(two_thirds).batch(8)) == whole


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("filtered", [False, True])
def test_epochs_that_move_shards_to_other_spans_hold_no_more(monkeypatch, filtered, ranks):
    _, most = watched(monkeypatch)
    pipe = rows(497).sharding_filter(8).shuffle(60)  # 8 spans of one window
    pipe = pipe.filter(lambda row: True) if filtered else pipe
    pipe = pipe.batch(7).repeat().distributed(rank=0, world_size=ranks)
    iterator = iter(tp.Loader(pipe, threads=0))
    for _ in range(800):
        next(iterator)
    assert most[0] <= 8 // ranks


@pytest.mark.parametrize("filtered", [False, True])
def test_after_a_resume_only_windows_under_way_are_read_for_the_batches_to_come(
    monkeypatch, filtered
):
    pipe = rows(24_000).sharding_filter(4).shuffle(500)  # 4 spans of 14 windows
    pipe = (pipe.filter(lambda row: True, version="1") if filtered else pipe).batch(20)
    whole = tp.Loader(pipe, threads=0)
    batches = iter(whole)
    for number in range(1, 1100):
        expected = next(batches)
        if number % 77:
            continue
        state = whole.state_dict()
        expected = [next(batches) for _ in range(4)]
        with monkeypatch.context() as patched:
            read, _ = watched(patched)
            loader = tp.Loader(pipe, threads=0)
            loader.load_state_dict(state)
            again = iter(loader)
            for done, batch in enumerate(expected, 1):
                assert next(again) == batch
                # of each span its own; two where a batch has rows of both
                assert len(read) <= 2 * done
                assert sum(read) <= 2000 * done


@pytest.mark.parametrize("buffer", [1, 2, 7, 100])
def test_the_first_batch_of_a_stream_waits_for_one_buffer(buffer):
    came = []

    def numbers():
        for number in range(1000):
            came.append(number)
            yield number

    next(iter(tp.Loader(tp.from_iterable(numbers).shuffle(buffer, seed=0), threads=0)))
    assert len(came) <= buffer + 2  # which tell that the stream does not end there


class OneGroup(tp.Source):
    """1,000 rows in one block, which is read from its start to where it is asked for."""

    def open(self):
        return OneGroupRows()


class OneGroupRows(tp.RowSource):
    lengths = np.array([1000])
    decoded = 0

    def fingerprint(self):
        return {"rows": 1000}

    def reader(self):
        return OneGroupReader()


class OneGroupReader:
    def __init__(self):
        self.at = 0

    def read(self, block, start, stop):
        OneGroupRows.decoded += stop - (self.at if self.at <= start else 0)
        self.at = stop
        return pa.table({"x": range(start, stop)})

    def close(self):
        pass


@pytest.mark.parametrize("filtered", [False, True])
def test_a_block_that_spans_share_is_decoded_once(monkeypatch, filtered):
    monkeypatch.setattr(OneGroupRows, "decoded", 0)
    pipe = tp.Pipeline([OneGroup()]).sharding_filter(8).shuffle(100)
    pipe = pipe.filter(lambda row: True) if filtered else pipe
    assert len(list(pipe.batch(5))) == 200
    assert OneGroupRows.decoded == 1000


def test_a_window_is_read_from_the_first_row_that_any_shard_needs(monkeypatch):
    """Shards of a resume stand at different rows of one window, and ask in any order."""
    read = []
    original = windows.Windows.get

    def last_first(found, user, key, state, first=0):
        for other in sorted(found._firsts, reverse=True):  # the farthest asks first
            if found._needs[other] == key:
                read.append(original(found, other, key, state, found._firsts[other]))
        return original(found, user, key, state, first)

    def make():
        return rows(4000).sharding_filter(4, split="stride").batch(25)

    wanted = list(make())
    iterator = iter(make())
    for _ in range(30):
        next(iterator)
    state = iterator.state_dict()
    monkeypatch.setattr(windows.Windows, "get", last_first)
    again = make()
    again.load_state_dict(state)
    assert list(again) == wanted[30:]
    assert len(read) > 1
    assert len({id(window) for window in read if window is not None}) == 1


class Far(tp.Source):
    """960 rows in blocks of 8 on another machine. What is asked of its readers is noted in a file."""

    notes: str

    def open(self):
        return FarRows(self.notes)


class FarRows(tp.RowSource):
    lengths = np.full(120, 8)
    is_local = False

    def __init__(self, notes):
        self.notes = notes

    def fingerprint(self):
        return {"rows": 960}

    def reader(self):
        return FarReader(self.notes)


class FarReader:
    def __init__(self, notes):
        self.notes = notes

    def note(self, *what):
        with open(self.notes, "a") as file:
            file.write(json.dumps([os.getpid(), *what]) + "\n")

    def expect(self, blocks, turns=(), most=math.inf):
        self.note("expect", *blocks)

    def read(self, block, start, stop):
        self.note("read", block, start)
        return pa.table({"x": range(8 * block + start, 8 * block + stop)})

    def close(self):
        pass


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_blocks_are_fetched_as_far_ahead_as_was_read_in_the_order_of_need_over_all_spans(
    tmp_path, workers
):
    pipe = tp.Pipeline([Far(str(tmp_path / "notes"))]).sharding_filter(6).shuffle(20).batch(4)
    assert len(list(tp.Loader(pipe, num_workers=workers, threads=0))) == 240
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    layouts = Plan.of(pipe.stages).layouts
    keys = [WindowKey(0, n, w) for n in range(6) for w in range(layouts.usual.num_windows(n))]
    turns, reads = {}, {}  # of each block, and of each read: when it is due
    for key in sorted(keys, key=layouts.turn):
        for block, start, _ in layouts.stretches(key):
            turns.setdefault(block, (layouts.turn(key), key.span))
            reads[block, start] = layouts.turn(key)
    for process in {note[0] for note in notes}:
        own = [note[1:] for note in notes if note[0] == process]
        spans = {turns[block][1] for what, block, *_ in own if what == "read"}
        mine = {block: turn for block, (turn, span) in turns.items() if span in spans}
        begun, done, told = min(mine.values()), 0, set()
        for what, *rest in own:
            if what == "expect":
                told.update(rest)
                continue
            done = max(done, reads[tuple(rest)] - begun)
            assert {block for block in mine if mine[block] - begun <= 2 * done} <= told
            assert max(mine[block] - begun for block in told) <= 4 * done
        assert told == set(mine)
