"""Several ranks: which rows are given and which are set aside, up to an epoch's end and behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
import pytest

import trainpipes as tp
from bad_data import ROWS, listed, numbers_of, write_files
from ranks import ENDED, Leg, Reads

BAD = {0, 1, 2, 3, 7, 21, 38, 39, 59}


def steps(leg: Leg) -> Iterator[list[int]]:
    """The rows of each step of an epoch."""
    leg.begin()
    while batches := [item for item in leg.step() if item is not ENDED]:
        yield [int(row["id"]) for batch in batches for row in batch]


@pytest.mark.parametrize(("reads", "workers"), [("pipe", 1), ("loader", 2)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("buffer", [None, 8])
def test_ragged_ranks_give_or_list_each_row_of_each_epoch(
    buffer: int | None, ranks: int, reads: Reads, workers: int, tmp_path: Path
) -> None:
    files = write_files(tmp_path / "data", "json", 3, BAD)
    quarantine = tp.Quarantine(tmp_path / "bad", max_share=1)
    pipe = tp.read_json(files, max_row_bytes=300, on_error=quarantine)
    pipe = pipe.sharding_filter(12, tail="uneven")
    leg = Leg((pipe if buffer is None else pipe.shuffle(buffer)).batch(2), ranks, workers, reads)
    for epoch in range(2):
        given = Counter(row for step in steps(leg) for row in step)
        assert given == Counter({*range(3 * ROWS)} - BAD)
        assert {n for e, n in numbers_of(listed(tmp_path / "bad")) if e == epoch} == BAD
    leg.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_ranks_that_end_together_list_the_rows_up_to_their_last_step(
    workers: int, tmp_path: Path
) -> None:
    shards, size = 6, 8000  # rows of a shard
    rows = shards * size
    bad, filtered = {*range(0, rows, 500)}, 7900  # the first shard ends soon
    lines = [f'{{"id": {n}{"" if n in bad else "}"}\n' for n in range(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    quarantine = tp.Quarantine(tmp_path / "bad", max_share=1)
    pipe = tp.read_json(tmp_path / "rows.jsonl", block_rows=50, on_error=quarantine)
    pipe = pipe.filter(pc.field("id") >= filtered).sharding_filter(shards).batch(2)
    leg = Leg(pipe, 3, workers, "loader")
    given = Counter(row for step in steps(leg) for row in step)
    leg.close()
    found = {line["row"] for line in listed(tmp_path / "bad")}
    assert max(given.values()) == 1
    assert not found & given.keys()
    assert found <= bad
    for start in range(0, rows, size):
        own = {*range(start, start + size)} & given.keys()
        before = {*range(start, max(own) + 1)}
        assert before - {*range(filtered)} - own == before - {*range(filtered)} & bad
        assert before & bad <= found
    left = {*range(filtered, rows)} - given.keys() - found
    assert left - bad, "all rows are given"
    assert left & bad, "bad rows are listed that no rank has come to"
