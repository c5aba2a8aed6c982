"""Windows of a shared span are read once and let go."""

import gc
import time
from weakref import WeakSet

import pyarrow as pa
import pytest

import trainpipes as tp
from trainpipes.runtime.reading import windows


def counted(monkeypatch):
    read, most = [], [0]
    original = windows.ListedWindows._read

    def reading(self, held, epoch, span, window):
        read.append((epoch, span, window))
        most[0] = max(most[0], sum(window.nbytes > 0 for window in held.windows.values()) + 1)
        return original(self, held, epoch, span, window)

    monkeypatch.setattr(windows.ListedWindows, "_read", reading)
    return read, most


def rows(count=6000):
    return tp.from_arrow(pa.table({"x": range(count)}))


@pytest.mark.parametrize(("threads", "held"), [(0, 2), (2, 3)])
@pytest.mark.parametrize("shards", [1, 7, 24])
def test_shards_that_share_a_span_read_each_window_once(monkeypatch, shards, threads, held):
    read, most = counted(monkeypatch)
    pipe = rows().sharding_filter(shards).shuffle(1500).batch(8)
    list(tp.Loader(pipe, threads=threads))
    assert len(read) == len(set(read))
    assert most[0] <= held


@pytest.mark.parametrize("where", ["before", "after"])
def test_the_next_epochs_windows_are_read_before_it_begins(monkeypatch, where):
    read, _ = counted(monkeypatch)
    pipe = rows(3000).sharding_filter(3).shuffle(900)
    pipe = pipe.repeat(2).batch(8) if where == "before" else pipe.batch(8).repeat(2)
    batches = iter(tp.Loader(pipe, threads=2))
    for _ in range(300):  # of 375
        next(batches)
    for _ in range(100):
        if {epoch for epoch, _, _ in read} == {0, 1}:
            break
        time.sleep(0.05)
    assert {epoch for epoch, _, _ in read} == {0, 1}
    assert len(list(batches)) == 450
    assert len(read) == len(set(read)) == 6  # and none of an epoch that does not come


def test_windows_are_not_read_ahead_where_memory_is_short(monkeypatch):
    read, most = counted(monkeypatch)
    pipe = rows().sharding_filter(2).shuffle(1500, max_bytes=16_000).batch(8)
    list(tp.Loader(pipe, threads=2))
    assert len(read) == len(set(read)) > 4
    assert most[0] <= 2


def test_windows_go_with_the_pass_they_were_read_for(monkeypatch):
    alive = WeakSet()
    original = windows.Window.content

    def content(self):
        alive.add(self)
        return original(self)

    monkeypatch.setattr(windows.Window, "content", content)
    gc.disable()
    try:
        pipe = rows().sharding_filter(2).shuffle(1500).batch(8)
        next(iter(pipe))
        first = WeakSet(alive)
        assert len(first) >= 1
        next(iter(pipe))
        for _ in range(100):  # a thread may be at work still
            if not first:
                break
            time.sleep(0.05)
        assert not first
    finally:
        gc.enable()


def test_a_filter_that_sets_shards_apart_does_not_fill_the_memory(monkeypatch):
    _, most = counted(monkeypatch)
    pipe = rows(60_000).sharding_filter(23).shuffle(300).filter(lambda row: row["x"] % 64 == 0)
    assert len(list(pipe.batch(4))) > 200
    assert most[0] <= 6


def test_epochs_that_move_shards_to_other_spans_hold_no_more(monkeypatch):
    _, most = counted(monkeypatch)
    iterator = iter(rows(500).sharding_filter(8).shuffle(60).batch(7).repeat())
    for _ in range(800):
        next(iterator)
    assert most[0] <= 4
