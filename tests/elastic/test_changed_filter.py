"""Rows that are left out from a batch on: ``allow_changes=["filter"]``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import trainpipes as tp

ROWS = 240
BAD = [3, 4, 50, 77, 130, 131, 200, 239]
Make = Callable[[Sequence[int]], Any]


@pytest.fixture
def files(tmp_path: Path) -> str:
    for part in range(2):
        rows = pa.table({"x": range(part * ROWS // 2, (part + 1) * ROWS // 2)})
        pq.write_table(rows, tmp_path / f"{part}.parquet", row_group_size=20)
    return str(tmp_path)


def kept(out: Sequence[int]) -> pc.Expression:
    return ~pc.field("x").isin(list(out))


def dealt(files: str) -> Any:
    return tp.read_parquet(files).sharding_filter(12).shuffle(60, seed=0)


def loaders(pipe: Any, ranks: int, state: Any = None) -> list[tp.Loader]:
    made = [
        tp.Loader(pipe.repeat().distributed(rank=rank, world_size=ranks)) for rank in range(ranks)
    ]
    if state is not None:
        for loader in made:
            loader.load_state_dict(state, allow_changes=["filter"])
    return made


def take(made: list[tp.Loader], steps: int, m: int = 0) -> tuple[list[list[int]], Any]:
    """Batches from number m on, in their order."""
    batches = [iter(made[(m + turn) % len(made)]) for turn in range(len(made))]
    came = [next(each)["x"].tolist() for _ in range(steps) for each in batches]
    return came, tp.merge_states([loader.state_dict() for loader in made])


@pytest.mark.parametrize(
    ("ranks", "steps"), [(1, 2), (3, 7), pytest.param(4, 7, marks=pytest.mark.slow)]
)
def test_from_a_batch_on_rows_are_left_out_and_no_other_is_lost_or_comes_again(
    files: str, ranks: int, steps: int
) -> None:
    def make(out: Sequence[int]) -> Any:
        return dealt(files).filter(kept(out)).batch(4).collate()

    before, state = take(loaders(make([]), 2), steps)
    rest, _ = take(loaders(make(BAD), ranks, state), 12 * (ROWS // 8) // ranks, len(before))
    first = np.concatenate(before).tolist()
    # Shards go on into the next epoch by themselves: of each row, the first time that it comes.
    later = dict.fromkeys(np.concatenate(rest).tolist())
    assert not {*BAD} & later.keys()
    assert {*first} | later.keys() >= {*range(ROWS)} - {*BAD}
    alone, _ = take(loaders(make(BAD), 1, state), 12 * (ROWS // 8))
    assert rest == alone[: len(rest)], "the same batches on any number of ranks"
    uninterrupted, _ = take(loaders(make([]), 2), 8 * ROWS)
    shards = [np.concatenate(uninterrupted[shard::12]).tolist() for shard in range(12)]
    passed = [np.concatenate([[], *before[shard::12]]).astype(int).tolist() for shard in range(12)]
    for shard, (whole, had) in enumerate(zip(shards, passed, strict=True)):
        resumed = np.concatenate(alone[(shard - len(before)) % 12 :: 12]).tolist()
        expected = [x for x in whole[len(had) :] if x not in BAD]
        assert resumed == expected[: len(resumed)], shard


def test_a_state_says_which_rows_were_left_out(files: str) -> None:
    def make(out: Sequence[int]) -> Any:
        return dealt(files).filter(kept(out)).batch(4).collate()

    _, state = take(loaders(make([]), 1), 3)
    with pytest.raises(tp.StateError, match=r"stages/filter/predicate.*allow_changes=\['filter'\]"):
        tp.Loader(make([5]).repeat()).load_state_dict(state)
    changed = loaders(make([5]), 1, state)
    _, later = take(changed, 2)
    tp.Loader(make([5]).repeat()).load_state_dict(later)
    with pytest.raises(tp.StateError, match="predicate"):
        tp.Loader(make([]).repeat()).load_state_dict(later)


@pytest.mark.parametrize(
    "make",
    [
        lambda rows, out: rows.filter(kept(out)).sharding_filter(12).shuffle(60, seed=0).batch(4),
        lambda rows, out: rows.sharding_filter(12).filter(kept(out)).batch(4).shuffle(8, seed=0),
    ],
    ids=["before the shuffle", "batches are shuffled"],
)
def test_where_positions_count_what_the_filter_passed_it_changes_between_epochs_only(
    files: str, make: Any
) -> None:
    def loader(out: Sequence[int]) -> tp.Loader:
        return tp.Loader(make(tp.read_parquet(files), out))

    first = loader([])
    batches = iter(first)
    next(batches)
    with pytest.raises(tp.StateError, match=r"after sharding_filter\(\) and shuffle\(\)"):
        loader(BAD).load_state_dict(first.state_dict(), allow_changes=["filter"])
    for _ in batches:
        pass
    second = loader(BAD)
    second.load_state_dict(first.state_dict(), allow_changes=["filter"])
    expected = loader(BAD)
    expected.load_state_dict({**expected.state_dict()})
    list(expected)
    assert [str(batch) for batch in second] == [str(batch) for batch in expected]
