"""What a position costs: bytes of a state, and the time to take, merge and load one.

    python benchmarks/state.py [--repeats 9]

Rows in memory, shuffled and batched, over 8, 64 and 960 shards: counted, and with a filter, so that a state
has a position for each shard. Times are medians over repeats, in which the numbers of shards take turns.
Prints a Markdown table, and says which of the targets are missed: a delivered batch that is ready costs
5 us, a state 10 us a shard.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import trainpipes as tp

SHARDS = (8, 64, 960)
RANKS = 8
BATCH, BUFFER, ROWS_A_SHARD = 8, 256, 512
#: Microseconds.
DELIVERED, A_SHARD = 5.0, 10.0


def pipeline(shards: int, counted: bool) -> tp.Pipeline:
    table = pa.table({"x": range(shards * ROWS_A_SHARD)})
    dealt = tp.from_arrow(table).sharding_filter(shards).shuffle(BUFFER)
    if not counted:
        dealt = dealt.filter(pc.field("x") >= 0)
    return dealt.batch(BATCH).collate(format="torch")


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds, and what came out."""
    start = time.perf_counter()
    found = work()
    return (time.perf_counter() - start) * 1e6, found


def measure(shards: int) -> dict[str, float]:
    """One round of all measurements."""
    counted = iter(pipeline(shards, counted=True))
    for _ in range(shards):  # each shard opens its window
        next(counted)
    counted.state_dict()
    batches = [timed(lambda: next(counted))[0] for _ in range(4 * shards)]
    of_counted, short = timed(counted.state_dict)
    pipe = pipeline(shards, counted=False)
    iterator = iter(pipe)
    for _ in range(5 * shards):
        next(iterator)
    iterator.state_dict()
    for _ in range(shards):
        next(iterator)
    full, state = timed(iterator.state_dict)
    again = []
    for _ in range(20):  # a state after every batch: one shard has moved
        next(iterator)
        again.append(timed(iterator.state_dict)[0])
    state = iterator.state_dict()
    loading, _ = timed(lambda: pipe.load_state_dict(state))
    parts = [
        {key: value for key, value in state.items() if mine(key, rank)} for rank in range(RANKS)
    ]
    merging, merged = timed(lambda: tp.merge_states(parts))
    assert merged == state
    return {
        "bytes, counted": float(len(json.dumps(short))),
        "state_dict(), us, counted": of_counted,
        "bytes": float(len(json.dumps(state))),
        "bytes a shard": statistics.mean(
            len(key) + len(value) for key, value in state.items() if key.startswith("shard-")
        ),
        "delivered batch, us": statistics.median(batches),
        "state after every batch, us": statistics.median(again),
        "state_dict(), us": full,
        "state_dict(), us a shard": full / shards,
        f"merge_states() of {RANKS} ranks, us a shard": merging / shards,
        "load_state_dict(), us a shard": loading / shards,
    }


def mine(key: str, rank: int) -> bool:
    """Whether a rank's state has this key."""
    return not key.startswith("shard-") or int(key.removeprefix("shard-")) % RANKS == rank


def measured(shards: Sequence[int], repeats: int) -> dict[int, dict[str, float]]:
    """Medians over repeats for each number of shards."""
    found: dict[int, list[dict[str, float]]] = {number: [] for number in shards}
    for repeat in range(repeats):
        for number in shards:
            print(f"\r{repeat + 1} of {repeats}", end="", file=sys.stderr, flush=True)
            found[number].append(measure(number))
    print(file=sys.stderr)
    return {
        number: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for number, runs in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    medians = measured(SHARDS, args.repeats)
    print(f"| shards | {' | '.join(map(str, SHARDS))} | {SHARDS[-1]} to {SHARDS[0]} |")
    print("|---|" + "---|" * (len(SHARDS) + 1))
    for name in medians[SHARDS[0]]:
        row = [medians[shards][name] for shards in SHARDS]
        cells = " | ".join(f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in row)
        print(f"| {name} | {cells} | {row[-1] / row[0]:.2f} |")
    targets = {"delivered batch, us": DELIVERED, "state_dict(), us a shard": A_SHARD}
    for name, target in targets.items():
        worst = max(medians[shards][name] for shards in SHARDS)
        print(
            f"\n{name}: {worst:.1f}, target {target:.0f}: {'met' if worst <= target else 'MISSED'}"
        )


if __name__ == "__main__":
    main()
