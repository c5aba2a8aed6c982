"""How even the steps of many ranks are, with batches as they come and with those that take turns.

    python -m benchmarks.even [--rows 60000] [--seeds 1] [--lengths GSM8K ...]

Prints Markdown tables for lengths that are lognormal (median 148, 16 to 1,024), uniform, and as those of
GSM8K's questions with answers and of WikiText-2's paragraphs, on 64 and on 8 ranks, by
``stats(world_size=)``: the part of ranks x largest batch that is tokens, and the largest batch of a step /
the mean one, in cells and in the sum of the squares of documents' lengths. Before and after ``balance()``;
buckets take turns by themselves, and before is each shard in an order of its own. All is counted, nothing is
timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa

import trainpipes as tp
from trainpipes._internal.checks import IntArray

RANKS = (64, 8)
SHARDS = 64
#: Of a step: tokens / (ranks x cells of the largest batch), and largest / mean of cells and of attention.
Figures = tuple[float, float, float]


def lognormal(rows: int, seed: int) -> IntArray:
    drawn = np.random.default_rng(seed).lognormal(np.log(148), 0.9, rows)
    return drawn.round().clip(16, 1024).astype(np.int64)


def uniform(rows: int, seed: int) -> IntArray:
    return np.random.default_rng(seed).integers(16, 1025, rows)


#: Tokens of texts: the shortest, 31 quantiles in equal steps, the longest. Tokens are of a byte-level BPE of
#: 16,384 that was trained on both. GSM8K (openai/grade-school-math): the 7,473 questions of the training
#: file, each with its answer. WikiText-2 (validation file): 1,841 paragraphs, without headings.
QUANTILES = {
    "GSM8K": (
        48, 73, 81, 86, 91, 96, 99, 104, 107, 111, 114, 118, 121, 126, 130, 134, 138, 142, 147, 151, 157,
        162, 167, 173, 179, 185, 192, 202, 212, 226, 242, 269, 438,
    ),
    "WikiText-2": (
        2, 7, 12, 20, 30, 41, 50, 59, 68, 77, 86, 94, 101, 108, 115, 122, 130, 137, 144, 151, 157, 166, 175,
        185, 192, 202, 214, 226, 243, 258, 279, 318, 492,
    ),
}  # fmt: skip


def as_of(text: str, rows: int, seed: int) -> IntArray:
    """Lengths drawn as those of a text, linearly between its quantiles."""
    quantiles = QUANTILES[text]
    drawn = np.random.default_rng(seed).random(rows)
    found = np.interp(drawn, np.linspace(0, 1, len(quantiles)), quantiles)
    return found.round().astype(np.int64)


LENGTHS: dict[str, Callable[[int, int], IntArray]] = {
    "lognormal": lognormal,
    "uniform": uniform,
    **{text: partial(as_of, text) for text in QUANTILES},
}


def rows_of(lengths: IntArray, seed: int = 0) -> tp.Pipeline:
    """Documents of these lengths, shuffled and dealt."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(int(lengths.sum()), np.int16)))
    rows = tp.from_arrow(pa.table({"input_ids": ids}))
    return rows.sharding_filter(SHARDS).shuffle(2000, seed=seed)


#: Each way to make batches: as it comes, and as the ranks of a step get it evenly.
WAYS: dict[str, tuple[Callable[[Any], tp.Pipeline], Callable[[Any], tp.Pipeline]]] = {
    "batch(8)": (lambda rows: rows.batch(8), lambda rows: rows.batch(8).balance()),
    "bucket_by_length(8)": (
        lambda rows: rows.bucket_by_length(8).shuffle(128),
        lambda rows: rows.bucket_by_length(8),
    ),
    "bucket_by_length(max_tokens=4096)": (
        lambda rows: rows.bucket_by_length(max_tokens=4096).shuffle(128),
        lambda rows: rows.bucket_by_length(max_tokens=4096),
    ),
    'batch(max_tokens=4096), cost="attention"': (
        lambda rows: rows.batch(max_tokens=4096),
        lambda rows: rows.batch(max_tokens=4096).balance(cost="attention"),
    ),
    "pack(2048).batch(2)": (
        lambda rows: rows.pack(2048).batch(2),
        lambda rows: rows.pack(2048).batch(2).balance(),
    ),
    "pack(8192).batch(1)": (
        lambda rows: rows.pack(8192).batch(1),
        lambda rows: rows.pack(8192).batch(1).balance(),
    ),
}
#: How many times as long documents are that go into long rows.
TIMES = {"pack(8192).batch(1)": 4}


def figures_of(pipe: tp.Pipeline, ranks: int) -> Figures:
    """Over all steps of an epoch."""
    steps = pipe.pad_collate().stats(10**9, world_size=ranks).steps
    assert steps is not None
    return steps.tokens, steps.cells, steps.attention


def mean_of(name: str, kind: str, count: int, seeds: int, ranks: int) -> tuple[Figures, Figures]:
    """A way's figures before and after, means over seeds."""
    found: tuple[list[Figures], list[Figures]] = ([], [])
    for seed in range(seeds):
        rows = rows_of(TIMES.get(name, 1) * LENGTHS[kind](count, seed), seed)
        for figures, make in zip(found, WAYS[name], strict=True):
            figures.append(figures_of(make(rows), ranks))
    before, after = (tuple(map(fmean, zip(*figures, strict=True))) for figures in found)
    return before, after  # type: ignore[return-value]


def table(kind: str, count: int, seeds: int, ranks: int) -> Iterator[str]:
    yield (
        f"| {kind} lengths, {ranks} ranks | tokens of ranks x largest | largest / mean, cells "
        "| largest / mean, attention |"
    )
    yield "|---|---|---|---|"
    for name in WAYS:
        pairs = zip(*mean_of(name, kind, count, seeds, ranks), strict=True)
        cells = [f"{before:.2f} -> {after:.2f}" for before, after in pairs]
        longer = f", lengths x {TIMES[name]}" if name in TIMES else ""
        yield f"| `{name}`{longer} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lengths", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    asked = parser.parse_args()
    for kind in asked.lengths:
        for ranks in RANKS:
            for line in table(kind, asked.rows, asked.seeds, ranks):
                print(line, flush=True)
            print()


if __name__ == "__main__":
    main()
