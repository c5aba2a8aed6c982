"""Pictures show what was measured, at every size, and need no display."""

from __future__ import annotations

import os
import subprocess
import sys
from io import BytesIO

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from trainpipes.testing import shuffle_quality

figures = pytest.importorskip("matplotlib.figure")

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def documents(times=1):
    ids = [[7] * length for length in LENGTHS * times]
    return tp.from_arrow(pa.table({"input_ids": ids}))


def drawn(figure):
    """The axes of a figure that can be drawn."""
    figure.savefig(BytesIO(), dpi=30)
    (ax,) = figure.axes
    return ax


def words(ax):
    return " | ".join([ax.get_title("left"), *(text.get_text() for text in ax.texts)])


def test_a_shuffle_shows_each_row_at_its_place():
    order = [3, 1, 0, 2, 4]
    ax = drawn(shuffle_quality(order, files=[2, 3]).plot())
    (points,) = ax.collections
    assert points.get_offsets().tolist() == [[n, row] for n, row in enumerate(order)]
    assert [line.get_ydata()[0] for line in ax.lines] == [1.5]  # between the files
    assert "5 rows of 2 files" in words(ax)


@pytest.mark.parametrize(
    ("order", "verdict"),
    [
        (np.arange(1000), "File order"),
        (np.arange(1000)[::-1], "File order, backwards"),
        (np.random.default_rng(0).permutation(1000), "Shuffled as a random order is"),
        (np.arange(1000).reshape(-1, 10)[:, ::-1].ravel(), "stay near their place"),
        (np.roll(np.random.default_rng(0).permutation(500), 3).repeat(1), "random"),
        ([], "Too few rows"),
        ([0], "Too few rows"),
    ],
)
def test_a_shuffle_is_named(order, verdict):
    assert verdict in words(drawn(shuffle_quality(order).plot()))


def test_of_many_rows_some_are_drawn_evenly():
    ax = drawn(shuffle_quality(np.arange(300_000), files=[100] * 3000).plot())
    offsets = ax.collections[0].get_offsets()
    assert len(offsets) == 10_000
    assert np.diff(offsets[:, 0]).max() <= 31
    assert not ax.lines
    assert "10,000 of them drawn" in words(ax)


def test_padding_is_what_stands_above_the_tokens():
    share = documents().batch(4).pad_collate().padding()
    ax = drawn(share.plot())
    tokens = sum(np.sum(p.get_data().values) for p in ax.patches[1::2])
    cells = sum(np.sum(p.get_data().values) for p in ax.patches[0::2])
    assert (tokens, cells) == (sum(LENGTHS), share.cells)
    assert f"{share.share:.1%}" in words(ax)


def test_of_many_batches_24_are_drawn():
    ax = drawn(documents(40).batch(4).pad_collate().padding(90).plot())
    assert len(ax.patches) == 48
    assert "90 micro-batches; 24 of them drawn" in words(ax)


def test_padding_of_nothing_can_be_drawn():
    nothing = documents().skip(10).batch(4).pad_collate().padding()
    assert nothing.batches == 0
    assert "No batches" in words(drawn(nothing.plot()))


def test_shares_of_padding_are_equal_whatever_was_looked_at():
    one = documents().batch(4).pad_collate().padding()
    assert one == documents().batch(4).pad_collate().padding()
    assert [own.tolist() for own in one.lengths] == [[3, 1, 4, 1], [5, 9, 2, 6], [5, 3]]
    assert one.widths == (4, 9, 5)


@pytest.mark.parametrize("batched", [False, True])
def test_packed_rows_are_their_documents_and_what_is_empty(batched):
    pipe = documents().pack(10, method="first_fit")
    packed = (pipe.batch(2).pad_collate() if batched else pipe).packing()
    assert sum(int(own.sum()) for own in packed.lengths) == sum(LENGTHS)
    assert packed.documents == len(LENGTHS)
    assert packed.empty == packed.rows * 10 - sum(LENGTHS)
    ax = drawn(packed.plot())
    wide = sum(bar.get_width() for bar in ax.patches if bar.get_height() < 1) - packed.rows * 10
    assert wide == sum(LENGTHS)


def test_packing_stops_at_so_many_rows():
    packed = documents(100).pack(10).batch(4).pad_collate().packing(rows=6)
    assert packed.rows == len(packed.lengths) == 6
    assert "100 drawn" in words(drawn(documents(500).pack(10).packing(rows=150).plot()))


def test_packing_refuses_rows_that_are_not_packed():
    with pytest.raises(tp.ConfigError, match=r"pack\(\) made.* a dict of \['input_ids'\]"):
        documents().packing()
    with pytest.raises(tp.ConfigError, match=r"packing\(rows\)"):
        documents().pack(10).packing(0)


def source(count, length=1):
    return tp.from_arrow(pa.table({"input_ids": [[1] * length] * count}))


@pytest.mark.parametrize("shards", [1, 6])
def test_a_mixture_counts_what_training_is_given(shards):
    weights = {"web": 5, "code": 2, "books": 1}
    sources = {name: source(50) for name in weights}
    mixed = tp.mix(sources, weights=weights, stop="repeat", output_column="source")
    pipe = mixed.sharding_filter(shards).batch(4)
    shares = pipe.mixture(rows=96)
    batches = iter(pipe)
    given = [row["source"] for _ in range(24) for row in next(batches)]
    assert [shares.names[i] for i in shares.sources] == given
    assert shares.rows == tuple(given.count(name) for name in shares.names)
    assert dict(zip(shares.names, shares.targets, strict=True)) == {
        "web": 0.625, "code": 0.25, "books": 0.125,
    }  # fmt: skip


def test_a_mixture_counts_tokens_where_the_mix_does():
    sources = {"short": source(100, 2), "long": source(100, 8)}
    mixed = tp.mix(sources, weights={"short": 1, "long": 1}, weight_by="tokens", stop="repeat")
    shares = mixed.mixture(rows=100)
    assert shares.unit == "tokens"
    assert shares.amounts == (160, 160)
    assert shares.rows == (80, 20)


def test_targets_follow_a_schedule():
    steps = [(0, {"a": 1, "b": 0}), (100, {"a": 0, "b": 1})]
    mixed = tp.mix({"a": source(10), "b": source(10)}, schedule=steps, stop="repeat")
    shares = mixed.mixture(rows=400)
    assert shares.targets == (0.25, 0.75)
    assert shares.rows == (100, 300)
    lines = drawn(shares.plot()).lines
    assert len(lines) == 1
    assert sorted(set(lines[0].get_ydata().tolist())) in ([0.0, 1.0], [0, 1])


def test_a_mixture_ends_with_its_epoch_and_by_sizes():
    shares = tp.mix({"a": source(30), "b": source(10)}).mixture()
    assert shares.rows == (30, 10)
    assert shares.targets == (0.75, 0.25)


def test_a_mix_in_a_mix_is_one_source():
    inner = tp.mix({"x": source(5), "y": source(5)})
    shares = tp.mix({"in": inner, "out": source(10)}, weights={"in": 1, "out": 1}).mixture()
    assert shares.names == ("in", "out")
    assert shares.rows == (10, 10)


def test_of_many_sources_the_small_ones_are_drawn_as_one():
    sources = {f"_${n}$": source(10) for n in range(20)}
    weights = {name: n + 1 for n, name in enumerate(sources)}
    shares = tp.mix(sources, weights=weights, stop="repeat").mixture(rows=500)
    said = [text.get_text() for text in drawn(shares.plot()).get_legend().get_texts()]
    assert len(said) == 7
    assert said[0].strip().startswith("14 others")
    assert any("19" in text for text in said)
    assert len(str(shares).splitlines()) == 21


def test_a_mixture_needs_a_mix():
    with pytest.raises(tp.ConfigError, match=r"sources of mix\(\.\.\.\), and this pipeline begins"):
        source(3).mixture()


def test_a_picture_is_drawn_on_axes_that_are_given():
    figure = figures.Figure()
    left, right = figure.subplots(1, 2)
    assert shuffle_quality(range(9)).plot(left) is figure
    assert documents().batch(4).pad_collate().padding().plot(ax=right) is figure
    assert right.get_xlabel() != left.get_xlabel() != ""


def test_a_notebook_gets_a_png():
    figure = shuffle_quality(range(9)).plot()
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_no_window_is_opened_and_nothing_is_kept_open():
    code = (
        "import trainpipes as tp, sys\n"
        "from trainpipes.testing import shuffle_quality\n"
        "assert 'matplotlib' not in sys.modules\n"
        "for _ in range(3): shuffle_quality(range(9)).plot().savefig('/dev/null', format='png', dpi=10)\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "DISPLAY": "", "MPLBACKEND": "tkagg"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr


def test_without_matplotlib_it_says_what_to_type(monkeypatch):
    monkeypatch.setattr("trainpipes._internal.extra.find_spec", lambda name: None)
    share = documents().batch(4).pad_collate().padding()
    with pytest.raises(
        tp.MissingExtraError, match=r"padding\(\)\.plot\(\).*pip install matplotlib"
    ):
        share.plot()
