"""Rows given and rows set aside are together the rows of the files, exactly: over resumes and topologies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from bad_data import FORMATS, GROUPED, ROWS, in_groups, listed, numbers_of, write_files
from drawn import examples
from ranks import ENDED, Leg, Reads

FILES = 3
#: How a rank reads, and its workers.
WAYS = [("pipe", 1), ("loader", 1), ("loader", 2), ("pipe", 1)]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "kind": draw(st.sampled_from([*FORMATS])),
        "bad": draw(st.sets(st.integers(0, FILES * ROWS - 1), max_size=12)),
        "buffer": draw(st.sampled_from([None, 4, 16, 100])),
        "shards": draw(st.sampled_from([1, 4, 12])),
        "size": draw(st.integers(1, 7)),
        "cached": draw(st.booleans()) and draw(st.booleans()),
        "stops": draw(st.lists(st.integers(1, 8), max_size=3)),
        "ways": draw(st.permutations(range(4))),
    }


def bad_rows(case: dict[str, Any]) -> set[int]:
    return in_groups(case["bad"]) if case["kind"] in GROUPED else case["bad"]


def pipeline(case: dict[str, Any], folder: Path, on_error: Any, **shard: Any) -> tp.Pipeline:
    read = FORMATS[case["kind"]][2]
    pipe = read(write_files(folder / "data", case["kind"], FILES, case["bad"]), on_error=on_error)
    if case["cached"]:
        pipe = pipe.cache(str(folder / f"cache-{on_error == 'skip'}"))
    if case["shards"] > 1:
        pipe = pipe.sharding_filter(case["shards"], **shard)
    if case["buffer"] is not None:
        pipe = pipe.shuffle(case["buffer"], seed=3)
    return pipe.batch(case["size"])


def ids(batch: Any) -> list[int]:
    return [int(row["id"]) for row in batch]


def taken(leg: Leg, most: int | None) -> list[list[list[int]]]:
    """What the ranks of a leg give in some steps, or up to the end."""
    found: list[list[list[int]]] = []
    while most is None or len(found) < most:
        step = leg.step()
        if all(item is ENDED for item in step):
            break
        found.append([ids(item) for item in step if item is not ENDED])
    return found


def whole_steps(pipe: tp.Pipeline, ranks: int) -> int:
    """Steps of an epoch in which all ranks get a batch."""
    leg, steps = Leg(pipe, ranks), 0
    leg.begin()
    while all(item is not ENDED for item in leg.step()):
        steps += 1
    leg.close()
    return steps


@given(cases())
@examples(100, often=8, shrink=False)
def test_an_epoch_gives_each_row_or_sets_it_aside(case: dict[str, Any]) -> None:
    everything, bad = range(FILES * ROWS), bad_rows(case)
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        quarantine = tp.Quarantine(folder / "bad", max_share=1)
        ranks = 1 + case["ways"][0] if case["shards"] == 12 else 1
        uneven = {"tail": "uneven"} if ranks > 1 else {}
        pipe = pipeline(case, folder, quarantine, **uneven)
        states, given_rows, full = None, Counter[int](), 0
        room = whole_steps(pipeline(case, folder, "skip", **uneven), ranks) - 1
        for turn, stop in enumerate([*case["stops"], None]):
            reads, workers = WAYS[case["ways"][(turn + 1) % 4]]
            leg = Leg(pipe, ranks, workers, reads if ranks == 1 else "pipe", states)  # type: ignore[arg-type]
            leg.begin()
            if (
                ranks > 1 and stop is not None
            ):  # a rank that has ended would go on with the next epoch
                stop = min(stop, max(0, room)) or None
                room -= stop or 0
            steps = taken(leg, stop)
            batches = [batch for step in steps for batch in step]
            given_rows.update(n for batch in batches for n in batch)
            full += sum(len(batch) < case["size"] for batch in batches)
            if given_rows.total() >= len(everything) - len(bad):
                leg.close()
                break
            states = json.loads(json.dumps(leg.states()))
            states = [tp.merge_states(states)] if ranks == 1 else states
            leg.close()
        assert given_rows == Counter(set(everything) - bad)
        assert full <= case["shards"]  # each shard ends with a short batch at most
        lines = listed(folder / "bad")
        assert numbers_of(lines) == {(0, n) for n in bad}
        assert all(line["error"] and line["stage"] for line in lines)


@given(cases())
@examples(100, often=5, shrink=False)
def test_any_ranks_give_the_sequence_of_skip(case: dict[str, Any]) -> None:
    # In file order, all rows of a shard might be bad, in every epoch.
    case = {**case, "shards": 12, "buffer": case["buffer"] or 16, "stops": [*case["stops"], 6]}
    bad = bad_rows(case)
    if len(bad) > FILES * ROWS // 2:
        return
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        expected = iter(pipeline(case, folder, "skip").repeat())
        quarantine = tp.Quarantine(folder / "bad", max_share=1)
        states, m = None, 0
        for turn, stop in enumerate(case["stops"]):
            on_error: Any = "skip" if turn == 1 else quarantine  # there and back
            pipe = pipeline(case, folder, on_error).repeat()
            ranks = 1 + case["ways"][turn % 4]
            leg = Leg(pipe, ranks, states=None if states is None else [states] * ranks)
            leg.begin()
            for step in taken(leg, stop):
                found = sorted(enumerate(step), key=lambda at, m=m, n=ranks: (at[0] - m) % n)
                assert [batch for _, batch in found] == [ids(next(expected)) for _ in step]
                m += ranks
            states = json.loads(json.dumps(tp.merge_states(leg.states())))
            leg.close()
        assert {n for _, n in numbers_of(listed(folder / "bad"))} <= bad


# Up to an epoch's end and behind it

BAD = {0, 1, 2, 3, 7, 21, 38, 39, 59}


def steps(leg: Leg) -> Iterator[list[int]]:
    """The rows of each step of an epoch."""
    leg.begin()
    while batches := [item for item in leg.step() if item is not ENDED]:
        yield [int(row["id"]) for batch in batches for row in batch]


@pytest.mark.parametrize(
    ("buffer", "ranks", "reads", "workers"),
    [(None, 2, "pipe", 1), (8, 2, "loader", 2), (8, 3, "pipe", 1), (None, 4, "loader", 2)],
)
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
def test_ranks_that_end_together_list_rows_to_their_last_step(workers: int, tmp_path: Path) -> None:
    shards, size = 6, 4000  # rows of a shard
    rows = shards * size
    bad, filtered = {*range(0, rows, 250)}, 3950  # the first shard ends soon
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
