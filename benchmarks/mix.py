"""What mixing costs a row, and how close it keeps to the shares.

    python benchmarks/mix.py [--rows 400000] [--repeats 3]

Prints three Markdown tables: processor time a row of epochs that are padded to batches of 32, of two and of
ten sources mixed, against the same sources one after the other, in turns in one process; how far the most
wrong source is off its share after 100, 10,000 and 1,000,000 draws, by rows and by tokens with rows that
differ 100 times in length; and the same over 24 shards, with shards in and out of phase.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

import trainpipes as tp
from trainpipes._internal.checks import IntArray
from trainpipes.sources.fair_queue import RowOrder, by_tokens, phases_of

SHARES = {"2 sources, 0.7 and 0.3": [0.7, 0.3], "10 sources": [31, 28, 23, 19, 17, 13, 11, 7, 5, 3]}
#: Weights of the accuracy.
THREE = [70, 20, 10]
DRAWS = (10**2, 10**4, 10**6)
SHARDS = 24


def table_of(rows: int, mean: int, seed: int) -> pa.Table:
    """Token ids of lognormal lengths."""
    lengths = np.random.default_rng(seed).lognormal(np.log(mean), 0.4, rows).astype(np.int32) + 1
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = pa.array(np.arange(int(lengths.sum()), dtype=np.int32) % 50_000)
    return pa.table({"input_ids": pa.ListArray.from_arrays(offsets, ids)})


def finished(pipe: tp.Pipeline) -> tp.Pipeline:
    return pipe.sharding_filter(SHARDS).batch(32).pad_collate()


def spent(pipe: tp.Pipeline, batches: int) -> float:
    """Processor time of so many batches, in us a row."""
    iterator = iter(finished(pipe))
    next(iterator)
    start = time.process_time()
    rows = sum(len(batch["input_ids"]) for batch in islice(iterator, batches))
    return (time.process_time() - start) * 1e6 / rows


#: Ways to read several sources.
WAYS = ("one by one", "mixed by rows", "by tokens", "weights of many digits")


def costs(rows: int, repeats: int) -> dict[str, dict[str, float]]:
    """Processor time of each way, in us a row, for each set of sources: medians over repeats in turns."""
    costs = {}
    for name, shares in SHARES.items():
        total = sum(shares)
        tables = [table_of(int(rows * s / total), 150, n) for n, s in enumerate(shares)]
        sources = {f"s{n}": tp.from_arrow(t).shuffle(4096, seed=n) for n, t in enumerate(tables)}
        weights = dict(zip(sources, shares, strict=True))
        long = {name: w + 0.001234567 * n for n, (name, w) in enumerate(weights.items())}
        ways = [
            tp.from_arrow(pa.concat_tables(tables)).shuffle(4096),
            tp.mix(sources, weights=weights, stop="repeat"),
            tp.mix(sources, weights=weights, weight_by="tokens", stop="repeat"),
            tp.mix(sources, weights=long, stop="repeat"),
        ]
        batches = rows // 32 - SHARDS
        found = [[spent(way, batches) for way in ways] for _ in range(repeats)]
        middle = [statistics.median(column) for column in zip(*found, strict=True)]
        costs[name] = dict(zip(WAYS, middle, strict=True))
    return costs


def cost(rows: int, repeats: int) -> Iterable[str]:
    yield f"| us a row | {' | '.join(WAYS)} |"
    yield "|---|" + "---|" * len(WAYS)
    for name, found in costs(rows, repeats).items():
        yield f"| {name} | {' | '.join(f'{us:.2f}' for us in found.values())} |"


def order_of(weights: list[int], rows: int, shard: int = 0) -> IntArray:
    """The sources of the first rows."""
    k = len(weights)
    order = RowOrder(weights, [0] * k, phases_of(shard, k))
    counts = [min(10_000, rows - start) for start in range(0, rows, 10_000)]
    return np.concatenate([order.take([count + 1] * k, count) for count in counts])


def choosing(rows: int, repeats: int) -> dict[str, float]:
    """Processor time of choosing alone, in us a row, medians over repeats in turns."""
    digits = [round(1e9 * w) + 1_234_567 * n for n, w in enumerate(SHARES["10 sources"])]
    lengths = np.random.default_rng(1).integers(1, 200, (2, rows)).tolist()
    ways: dict[str, Callable[[], Any]] = {
        "short weights": lambda: order_of([7, 3], rows),
        "10 sources, many digits": lambda: order_of(digits, rows),
        "by tokens": lambda: by_tokens([7, 3], (0, 0), None, lengths, rows),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.process_time()
            way()
            found[name].append((time.process_time() - start) * 1e6 / rows)
    return {name: statistics.median(times) for name, times in found.items()}


def most_off(order: IntArray, draws: int) -> float:
    """Rows by which the most wrong of three sources is off its share after so many draws."""
    found = np.bincount(order[:draws], minlength=3)
    return float(np.abs(found - draws * np.array(THREE) / sum(THREE)).max())


def accuracy() -> Iterable[str]:
    yield "| counted | after | most off | share of it |"
    yield "|---|---|---|---|"
    weights = THREE
    order = order_of(weights, DRAWS[-1])
    for draws in DRAWS:
        off = most_off(order, draws)
        yield f"| rows | {draws:,} | {off:.2f} rows | {off / draws:.1e} |"
    rng = np.random.default_rng(1)
    lengths = [rng.integers(1, most, DRAWS[-1]).tolist() for most in (2000, 200, 20)]
    order = by_tokens(weights, (0, 0, 0), None, lengths, DRAWS[-1])
    taken = np.empty(len(order), dtype=np.int64)
    for n, own in enumerate(lengths):
        places = np.flatnonzero(order == n)
        taken[places] = own[: len(places)]
    for draws in DRAWS:
        draws = min(draws, len(order))
        found = np.bincount(order[:draws], taken[:draws], minlength=3)
        off = np.abs(found - found.sum() * np.array(weights) / 100).max()
        yield f"| tokens | {draws:,} | {off:,.0f} tokens of rows up to 2,000 | {off / found.sum():.1e} |"


def together() -> Iterable[str]:
    yield f"| weights | off over {SHARDS} shards, in phase | out of phase |"
    yield "|---|---|---|"
    for weights in ([7, 3], [5, 3, 2], [50, 30, 15, 5], [137, 61, 29, 11, 3], [1000, 1, 1]):
        k, rows = len(weights), 2000
        share = np.array(weights) / sum(weights)
        said = []
        for shards in ([0] * SHARDS, range(SHARDS)):
            off = np.zeros((rows, k))
            for shard in shards:
                given = np.eye(k)[order_of(weights, rows, shard)].cumsum(axis=0)
                off += given - share * np.arange(1, rows + 1)[:, None]
            said.append(f"{np.sqrt((off**2).mean()):.1f} (at most {np.abs(off).max():.1f})")
        yield f"| {', '.join(map(str, weights))} | {' | '.join(said)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    for table in (cost(asked.rows, asked.repeats), accuracy(), together()):
        print(*table, "", sep="\n")


if __name__ == "__main__":
    main()
