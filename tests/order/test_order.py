"""The order of rows as arithmetic: spans, windows, chunks, permutations."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from drawn import examples
from trainpipes.order.layout import Layout, StreamLayout, count_batches, segments, slots_before
from trainpipes.order.permutation import LEAST_PACKED, permutation, random_key, sorted_order

SHARDS = st.sampled_from([1, 2, 3, 4, 6, 7, 8, 12, 24, 48])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts as a plan makes them; ``span_rows`` is 1 or the buffer."""
    buffer = draw(st.one_of(st.integers(1, 40), st.integers(1, 700)))
    whole = draw(st.booleans())
    return Layout(
        rows=draw(st.one_of(st.integers(0, 60), st.integers(0, 3000))),
        batch_size=draw(st.one_of(st.integers(1, 5), st.integers(1, 64))),
        num_shards=draw(SHARDS),
        window_rows=buffer,
        span_rows=draw(st.sampled_from([1, buffer])),
        window_limit=draw(st.one_of(st.none(), st.integers(1, 500))),
        whole=whole,
        rolling=draw(st.booleans()),
        stride=draw(st.booleans()),
        grows=draw(st.booleans()),
    )


@st.composite
def changed_layouts(draw: st.DrawFn) -> Layout:
    """Layouts whose batch size changed."""
    layout = draw(layouts())
    change = (draw(st.integers(1, 40)), draw(st.integers(1, 64)))
    return replace(layout, whole=True, rolling=False, changes=(change,))


def spans_of(layout: Layout) -> list[tuple[int, int]]:
    return [layout.span(span) for span in range(layout.num_spans)]


def windows_of(layout: Layout, span: int) -> list[tuple[int, int]]:
    return [layout.window(span, window) for window in range(layout.num_windows(span))]


def dealt(layout: Layout, span: int, sharer: int, epoch: int = 0) -> list[int]:
    """Rows of one shard, counted from the span's first, as the identity order gives them."""
    rows: list[int] = []
    for window, (start, stop) in enumerate(windows_of(layout, span)):
        owned = layout.owned(span, sharer, window, stop - start, epoch)
        rows.extend((owned + start).tolist())
    return rows


def shortest_span(layout: Layout, spans: int) -> int:
    """Rows of the shortest of ``spans`` spans, by the law and not by the layout."""
    sizes = [0] * spans
    if layout.whole and not layout.rolling:
        for number in range(0, layout.rows, layout.batch_size):
            batch = min(layout.batch_size, layout.rows - number)
            sizes[number // layout.batch_size % spans] += batch
    else:
        for row in range(layout.rows):
            sizes[row % spans] += 1
    return min(sizes)


@examples(300)
@given(layouts())
def test_spans_partition_the_rows_of_an_epoch(layout):
    edges = spans_of(layout)
    assert edges[0][0] == 0
    assert edges[-1][1] == layout.rows
    assert all(a[1] == b[0] for a, b in pairwise(edges))
    assert all(start <= stop for start, stop in edges)


@examples(300)
@given(layouts() | changed_layouts(), st.data())
def test_windows_partition_their_span_and_none_is_empty(layout, data):
    for span, (start, stop) in enumerate(spans_of(layout)):
        edges = windows_of(layout, span)
        assert [a for a, _ in edges] == [0, *[b for _, b in edges]][: len(edges)]
        assert all(a < b for a, b in edges)
        assert sum(b - a for a, b in edges) == stop - start
        row = data.draw(st.integers(0, stop - start + 2))
        window = layout.window_of(span, row)
        assert window == sum(b <= row for _, b in edges)


@examples(300)
@given(layouts())
def test_a_window_has_the_buffer_to_twice_the_buffer_once_windows_have_grown(layout):
    layout = replace(layout, window_limit=None)
    for span, (start, stop) in enumerate(spans_of(layout)):
        sizes = [b - a for a, b in windows_of(layout, span)]
        if stop - start < layout.window_rows:
            assert len(sizes) <= 1
            continue
        grown = next(n for n, size in enumerate(sizes) if size >= layout.window_rows)
        assert all(layout.window_rows <= size <= 2 * layout.window_rows for size in sizes[grown:])
        grows = layout.grows and not layout.stride and stop - start >= 3 * layout.window_rows
        assert grown <= (6 if grows else 0)
        assert sizes[:grown] == sorted(sizes[:grown]) or sizes[0] == sizes[1] + 1


@examples(200)
@given(layouts(), st.integers(1, 500))
def test_windows_that_memory_limits_are_no_larger_and_no_smaller_than_it_asks_for(layout, limit):
    layout = replace(layout, window_limit=limit)
    least = min(layout.window_rows, limit * 6 // 7)
    for span in range(layout.num_spans):
        sizes = [b - a for a, b in windows_of(layout, span)]
        assert all(size <= limit for size in sizes)
        assert all(size >= least for size in sizes[6:-2])
        if len(sizes) > 7:
            assert sizes[-1] >= limit // 2 or sizes[-1] >= layout.window_rows


@examples(300)
@given(layouts())
def test_no_window_of_a_shuffle_is_short_where_a_span_has_fewer_than_three_buffers(layout):
    layout = replace(layout, span_rows=layout.window_rows, window_limit=None, stride=False)
    assume(layout.rows >= layout.window_rows)
    for span, (start, stop) in enumerate(spans_of(layout)):
        sizes = [b - a for a, b in windows_of(layout, span)]
        if stop - start < 3 * layout.window_rows or not layout.grows:
            assert min(sizes) >= layout.window_rows


@examples(200)
@given(
    buffer=st.integers(1000, 50_000),
    buffers=st.one_of(st.floats(3, 3.1), st.floats(3.1, 5), st.floats(3.1, 40)),
    num_shards=st.sampled_from([12, 24, 48, 96]),
    batches=st.integers(200, 1000),
)
def test_windows_that_begin_within_a_24th_of_an_epoch_have_twice_its_rows_at_most(
    buffer, buffers, num_shards, batches
):
    """Spans end with a batch, so some are a batch longer: of ``batches`` in a buffer, that is little.

    24 spans of hardly more than three buffers go above: within 1/24, windows begin 6.4 spans apart on
    average, so 7 may begin, each of at most 0.89 buffers on average. 7 * 0.89 / 24 is 2.06 of 3 / 24.
    """
    rows = int(buffer * buffers) * num_shards
    layout = Layout(rows, buffer // batches, num_shards, buffer, buffer, grows=True)
    begins = []
    for span, (start, stop) in enumerate(spans_of(layout)):
        begins += [(a / (stop - start), b - a) for a, b in windows_of(layout, span)]
    assume(min(stop - start for start, stop in spans_of(layout)) >= 3 * buffer)
    begins.sort()
    places = np.array([place for place, _ in begins])
    before = np.concatenate([[0], np.cumsum([size for _, size in begins])])
    part = 1 / min(24, num_shards)
    ends = np.searchsorted(places, places + part)
    most = (before[ends] - before[:-1]).max()
    assert most <= (2.06 if buffers < 3.1 else 2.0) * part * rows


def test_a_first_window_is_a_sixteenth_of_the_buffer():
    layout = Layout(24 * 133_333, 32, 24, 40_960, 40_960, grows=True)
    assert [b - a for a, b in windows_of(layout, 0)] == [
        1629, 1630, 3259, 6518, 13_036, 26_483, 80_789,
    ]  # fmt: skip
    assert [a for a, _ in windows_of(layout, 23)][:3] == [0, 3167, 6335]


@examples(300)
@given(layouts())
def test_there_are_as_many_spans_as_the_largest_divisor_of_the_shards_that_fills_them(layout):
    least = max(1, layout.span_rows)
    fitting = [
        spans
        for spans in range(1, layout.num_shards + 1)
        if layout.num_shards % spans == 0 and shortest_span(layout, spans) >= least
    ]
    expected = 1 if layout.stride else max([1, *fitting])
    assert layout.num_spans == expected
    assert layout.sharers == layout.num_shards // expected


@examples(300)
@given(layouts(), st.integers(0, 3))
def test_every_row_of_a_span_is_dealt_to_exactly_one_of_its_shards(layout, epoch):
    for span, (start, stop) in enumerate(spans_of(layout)):
        rows = [r for j in range(layout.sharers) for r in dealt(layout, span, j, epoch)]
        assert sorted(rows) == list(range(stop - start))


def test_a_batch_that_is_to_hold_all_rows_takes_no_more_memory_than_they():
    layout = Layout(rows=10, batch_size=2**62, num_shards=4, window_rows=3)
    dealt_to = [dealt(layout, 0, j, 0) for j in range(4)]
    assert [sorted(rows) for rows in dealt_to] == [list(range(10)), [], [], []]


@examples(200)
@given(layouts(), st.data())
def test_rows_that_a_filter_left_are_dealt_to_exactly_one_shard_too(layout, data):
    layout = replace(layout, whole=False)
    assume(layout.rows > 0)
    span = data.draw(st.integers(0, layout.num_spans - 1))
    assume(layout.num_windows(span) > 0)
    window = data.draw(st.integers(0, layout.num_windows(span) - 1))
    start, stop = layout.window(span, window)
    left = data.draw(st.integers(0, stop - start))
    owned = [layout.owned(span, j, window, left, 0).tolist() for j in range(layout.sharers)]
    assert sorted(row for rows in owned for row in rows) == list(range(left))
    assert all(rows == sorted(rows) for rows in owned)


@examples(300)
@given(layouts())
def test_known_counts_make_the_micro_batches_of_a_plain_data_loader(layout):
    layout = replace(layout, whole=True, rolling=False)
    total = count_batches(layout.rows, layout.batch_size, drop_last=False)
    sizes: dict[int, int] = {}
    for shard in range(layout.num_shards):
        span, sharer = shard % layout.num_spans, shard // layout.num_spans
        rows = dealt(layout, span, sharer)
        for at, first in enumerate(range(0, len(rows), layout.batch_size)):
            number = shard + at * layout.num_shards
            sizes[number] = len(rows[first : first + layout.batch_size])
            # Micro-batch i of the epoch is number i // G of span i mod G.
            assert rows[first] // layout.batch_size * layout.num_spans + span == number
    assert sorted(sizes) == list(range(total))  # no holes
    full = [number for number in sizes if sizes[number] == layout.batch_size]
    assert len(full) == layout.rows // layout.batch_size
    assert sorted(full) == list(range(len(full)))  # only the last may be short


@examples(200)
@given(layouts(), st.integers(1, 4))
def test_rolling_micro_batches_are_dealt_in_turn_over_the_joints_of_epochs(layout, epochs):
    layout = replace(layout, whole=True, rolling=True)
    for span, (start, stop) in enumerate(spans_of(layout)):
        size = stop - start
        for sharer in range(layout.sharers):
            rows = [
                row + epoch * size
                for epoch in range(epochs)
                for row in dealt(layout, span, sharer, epoch)
            ]
            expected = [
                row
                for row in range(size * epochs)
                if row // layout.batch_size % layout.sharers == sharer
            ]
            assert rows == expected


@examples(200)
@given(
    rows=st.integers(0, 500),
    batch_size=st.integers(1, 20),
    num_shards=SHARDS,
    buffer=st.integers(1, 60),
    whole=st.booleans(),
    shuffled=st.booleans(),
)
def test_a_stream_is_dealt_row_by_row_to_exactly_one_shard(
    rows, batch_size, num_shards, buffer, whole, shuffled
):
    layout = StreamLayout(batch_size, num_shards, buffer, whole, shuffled)
    edges = [*(start for n in range(rows) if (start := layout.start(n)) < rows), rows]
    owner: dict[int, int] = {}
    for window, (start, stop) in enumerate(pairwise(edges)):
        for shard in range(num_shards):
            for position in layout.owned(0, shard, window, stop - start, 0).tolist():
                assert owner.setdefault(start + position, shard) == shard
    assert sorted(owner) == list(range(rows))
    if whole:
        assert all(owner[row] == row // batch_size % num_shards for row in owner)


@given(st.integers(0, 400), st.integers(0, 60), st.integers(1, 60))
def test_slots_before_counts_the_numbers_of_a_residue_class(m, shard, num_shards):
    assume(shard < num_shards)
    assert slots_before(m, shard, num_shards) == sum(
        number % num_shards == shard for number in range(m)
    )


@given(st.integers(0, 300), st.integers(1, 40), st.booleans())
def test_batches_are_counted_as_a_plain_data_loader_counts_them(rows, batch_size, drop_last):
    plain = DataLoader(range(rows), batch_size, drop_last=drop_last)  # type: ignore[arg-type]
    assert count_batches(rows, batch_size, drop_last) == len(plain)


@given(st.lists(st.integers(0, 9), max_size=12), st.booleans(), st.data())
def test_segments_are_the_rows_of_the_blocks_in_their_order(sizes, shuffled, data):
    order = permutation(len(sizes), 1, "blocks") if shuffled else None
    places = list(range(len(sizes))) if order is None else order.tolist()
    rows = [(block, row) for block in places for row in range(sizes[block])]
    first = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(first, len(rows)))
    starts = np.concatenate([[0], np.cumsum([sizes[block] for block in places])]).astype(np.int64)
    found = segments(starts, order, first, stop)
    assert [(b, r) for b, low, high in found for r in range(low, high)] == rows[first:stop]
    assert all(low < high for _, low, high in found)


@given(st.integers(0, 2000), st.integers(-(2**40), 2**70), st.integers(0, 99))
def test_a_permutation_holds_each_number_once_and_is_a_function_of_its_arguments(n, seed, epoch):
    first = permutation(n, seed, "window", epoch)
    np.random.seed(1)
    assert sorted(first.tolist()) == list(range(n))
    assert first.tolist() == permutation(n, seed, "window", epoch).tolist()
    assert first.dtype == np.int64


def test_keys_of_neighboring_seeds_and_paths_differ():
    paths: list[tuple[int, tuple[int | str, ...]]] = [
        (seed, ("window", epoch, span, window))
        for seed in range(6)
        for epoch in range(6)
        for span in range(6)
        for window in range(6)
    ]
    keys = {tuple(random_key(seed, *path).tolist()) for seed, path in paths}
    assert len(keys) == len(paths)
    assert random_key(1, 2).tolist() != random_key(1, "2").tolist()


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("rows", [1, 24, 100_000_000_000])
def test_a_layout_costs_the_same_for_any_number_of_rows(rows, grows):
    layout = Layout(rows, 32, 960, window_rows=40_960, span_rows=40_960, grows=grows)
    assert layout.span(layout.num_spans - 1)[1] == rows
    last = layout.num_windows(layout.num_spans - 1)
    assert layout.window_of(layout.num_spans - 1, rows) == last


@pytest.mark.parametrize("rows", [0, 1, 2, 1000, LEAST_PACKED, 40_000, 1 << 16, 70_000])
@pytest.mark.parametrize("bits", [0, 12, 40, 64])
def test_random_numbers_are_sorted_stably_also_where_some_are_equal(rows: int, bits: int) -> None:
    raw = np.random.Philox(key=random_key(0, rows)).random_raw(rows)
    for some in (raw >> np.uint64(64 - bits) if bits else raw * 0, raw & np.uint64(0xFFF << 52)):
        order = sorted_order(some)
        assert order.dtype == np.int64
        assert order.tolist() == np.argsort(some, kind="stable").tolist()
