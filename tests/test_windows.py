"""Windows of a shared span are read once and let go."""

import pyarrow as pa
import pytest

import trainpipes as tp
from trainpipes.runtime import windows


def counted(monkeypatch):
    read, most = [], [0]
    original = windows.ListedWindows._read

    def reading(self, held, epoch, span, window):
        read.append((epoch, span, window))
        most[0] = max(most[0], len(held.windows) + 1)
        return original(self, held, epoch, span, window)

    monkeypatch.setattr(windows.ListedWindows, "_read", reading)
    return read, most


def rows(count=6000):
    return tp.from_arrow(pa.table({"x": range(count)}))


@pytest.mark.parametrize("shards", [1, 7, 24])
def test_shards_that_share_a_span_read_each_window_once(monkeypatch, shards):
    read, most = counted(monkeypatch)
    list(rows().sharding_filter(shards).shuffle(1500).batch(8))
    assert len(read) == len(set(read))
    assert most[0] <= 2


def test_a_filter_that_sets_shards_apart_does_not_fill_the_memory(monkeypatch):
    _, most = counted(monkeypatch)
    pipe = rows(60_000).sharding_filter(23).shuffle(300).filter(lambda row: row["x"] % 64 == 0)
    assert len(list(pipe.batch(4))) > 200
    assert most[0] <= windows.MOST_HELD + 1


def test_epochs_that_move_shards_to_other_spans_hold_no_more(monkeypatch):
    _, most = counted(monkeypatch)
    iterator = iter(rows(500).sharding_filter(8).shuffle(60).batch(7).repeat())
    for _ in range(800):
        next(iterator)
    assert most[0] <= 3
