"""What ranks that end together leave out at an epoch's end is counted and said."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from ranks import ENDED, Leg, Reads


def rows(number: int = 1779) -> tp.Pipeline:
    lengths = np.random.default_rng(0).integers(5, 200, number)
    ids = [[1] * int(length) for length in lengths]
    return tp.from_arrow(pa.table({"input_ids": ids, "n": range(number)}))


def packed() -> tp.Pipeline:
    return rows().sharding_filter(12).shuffle(2000).pack(256).batch(4)


def filtered() -> tp.Pipeline:
    return rows().filter(some).sharding_filter(12).batch(4)


def some(row: dict[str, Any]) -> bool:
    return bool(row["n"] * 7919 % 101 % 3)


def first_half(row: dict[str, Any]) -> bool:
    return bool(row["n"] < 800)


def delivered(pipe: tp.Pipeline, ranks: int, reads: Reads = "pipe", **options: Any) -> int:
    """Batches of one epoch, over all ranks."""
    leg = Leg(pipe, ranks, reads=reads, **options)
    leg.begin()
    try:
        for steps in count():
            if ENDED in leg.step():
                return steps * ranks
    finally:
        leg.close()
    raise AssertionError


@pytest.mark.parametrize(
    ("made", "ranks", "reads"),
    [(packed, 2, "loader"), (packed, 3, "pipe"), (filtered, 2, "pipe"), (filtered, 3, "loader")],
)
def test_ranks_say_how_many_batches_they_leave_out(
    made: Callable[[], tp.Pipeline], ranks: int, reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    whole = len(list(made()))
    assert caplog.messages == []  # one rank leaves out none
    options = {"workers": 2} if reads == "loader" else {}
    left = whole - delivered(made(), ranks, reads, **options)
    assert left > 0
    (said,) = caplog.messages
    assert said.startswith(
        f"epoch 0: {left} of {whole} batches ({left / whole:.1%}) are left out: "
    )
    assert said.endswith("add .repeat() and count steps, to leave out none")


def test_ranks_of_a_counted_pipeline_say_it_too(caplog: pytest.LogCaptureFixture) -> None:
    pipe = rows().sharding_filter(12).shuffle(100).batch(4)
    with caplog.at_level(logging.INFO, "trainpipes"):
        assert delivered(pipe, 2) == 444
    assert caplog.messages == [
        "epoch 0: 1 of 445 batches (0.2%) is left out: 2 ranks get as many each"
    ]


def test_a_filter_that_leaves_a_shard_no_row_is_named(caplog: pytest.LogCaptureFixture) -> None:
    kept = rows().filter(first_half)
    assert delivered(kept.sharding_filter(12).batch(4), 2) < 20
    (said,) = caplog.messages
    assert "filter(first_half (test_left_out.py" in said
    assert "left shard" in said
    assert 'sharding_filter(split="stride")' in said
    caplog.clear()
    assert delivered(kept.sharding_filter(12, split="stride").batch(4), 2) > 180
    assert "left shard" not in caplog.text
    with pytest.raises(tp.DataError, match=r"filter\(first_half .* kept no row of a shard in 16"):
        list(kept.sharding_filter(12).repeat().batch(4))


def test_where_nothing_comes_at_all_that_is_said(
    caplog: pytest.LogCaptureFixture, nothing_warned_of: None
) -> None:
    pipe = rows().filter(lambda row: False).sharding_filter(12).batch(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert delivered(pipe, 2) == 0
    assert [str(one.message).partition(": ")[0] for one in caught] == [
        "an epoch of this pipeline gives nothing"
    ]
    assert caplog.messages == []
