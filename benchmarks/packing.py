"""What packing leaves empty, what it splits, and what it costs beside tokenizing.

    python benchmarks/packing.py [--documents 20480] [--length 4096] [--mean 831] [--sigma 1.0]

Documents have lognormal lengths and the text of Python's standard library; the tokenizer is trained on
them. Prints Markdown tables: packing methods, against next-fit, a plain first-fit, the rule of Grain
by a simulation and, where it is installed, Grain; batches by length; how far shards run apart in ten
epochs; CPU time a token, medians of repeats taken in turn with tokenizing. Rates count making the rows'
columns; those of the simulations, which are marked, only choose rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

import trainpipes as tp
from trainpipes._internal.checks import IntArray
from trainpipes.columns.block import Block
from trainpipes.columns.run import Cursors, Run
from trainpipes.stages.pack import Pack
from trainpipes.stages.tokenize import Tokenize
from trainpipes_recipes.samples import function_pairs, train_tokenizer

METHODS = ("best_fit", "first_fit", "concat")
RUN_ROWS = 512


def lengths_of(count: int, mean: float, sigma: float) -> IntArray:
    """Lognormal lengths of 1 or more tokens."""
    drawn = np.random.default_rng(1).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.maximum(1, drawn).astype(np.int64)


def table_of(lengths: IntArray) -> pa.Table:
    """Documents whose ids are their own numbers."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = pa.array(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
    return pa.table({"input_ids": pa.ListArray.from_arrays(offsets, ids)})


def runs_of(table: pa.Table) -> Iterator[Run]:
    """A table in runs, as a pipeline would give them."""
    for row in range(0, len(table), RUN_ROWS):
        rows = np.arange(row, min(row + RUN_ROWS, len(table)))
        block = Block(table.slice(row, len(rows)), rows)
        cursors = Cursors.counting({"epoch": 0, "window": 0}, np.append(rows, row + len(rows)))
        yield Run(block, cursors)


def packed(table: pa.Table, length: int, **options: Any) -> Iterator[Run]:
    """The runs that ``pack`` makes of a table."""
    return Pack(length, **options).open(lambda _: runs_of(table), {})


def rows_of(runs: Iterable[Run]) -> list[dict[int, int]]:
    """Tokens of each document in each row."""
    rows = []
    for run in runs:
        table = run.block.data
        for ids, segments in zip(
            *(_matrix(table, c) for c in ("input_ids", "segment_ids")), strict=True
        ):
            documents, counts = np.unique(ids[segments > 0], return_counts=True)
            rows.append(dict(zip(documents.tolist(), counts.tolist(), strict=True)))
    return rows


def _matrix(table: Any, name: str) -> Any:
    column = table.column(name).combine_chunks()
    return column.flatten().to_numpy().reshape(len(table), -1)


# Others, by their rules: each gives rows of {document: tokens}; documents are cut to the row's length.


def next_fit(lengths: IntArray, capacity: int) -> list[dict[int, int]]:
    rows: list[dict[int, int]] = [{}]
    room = capacity
    for number, size in enumerate(np.minimum(lengths, capacity).tolist()):
        if size > room:
            rows.append({})
            room = capacity
        rows[-1][number] = size
        room -= size
    return rows


def plain_first_fit(lengths: IntArray, capacity: int) -> list[dict[int, int]]:
    """First-fit of 1,024 documents at a time, as one writes it down: every row is looked at."""
    rows: list[dict[int, int]] = []
    for start in range(0, len(lengths), 1024):
        held: list[dict[int, int]] = []
        rooms: list[int] = []
        cut = np.minimum(lengths[start : start + 1024], capacity).tolist()
        for number, size in enumerate(cut, start):
            for k, room in enumerate(rooms):
                if size <= room:
                    held[k][number] = size
                    rooms[k] -= size
                    break
            else:
                held.append({number: size})
                rooms.append(capacity - size)
        rows += held
    return rows


def open_bins(lengths: IntArray, capacity: int, bins: int) -> list[dict[int, int]]:
    """Best-fit over so many open rows, all given away when one does not fit: Grain's rule."""
    rows: list[dict[int, int]] = []
    held: list[dict[int, int]] = [{} for _ in range(bins)]
    rooms = [capacity] * bins
    for number, size in enumerate(np.minimum(lengths, capacity).tolist()):
        fitting = [k for k in range(bins) if rooms[k] >= size]
        if not fitting:
            rows += [row for row in held if row]
            held, rooms = [{} for _ in range(bins)], [capacity] * bins
            fitting = [0]
        best = min(fitting, key=lambda k: rooms[k])
        held[best][number] = size
        rooms[best] -= size
    return rows + [row for row in held if row]


def grain_rows(lengths: IntArray, capacity: int, bins: int) -> Any:
    """Grain's own packing, or None where it is not installed."""
    try:
        import grain
        from grain.experimental import BestFitPackIterDataset
    except ImportError:
        return None

    class Documents(grain.sources.RandomAccessDataSource):
        def __len__(self) -> int:
            return len(lengths)

        def __getitem__(self, index: int) -> dict[str, Any]:
            size = min(int(lengths[index]), capacity)
            return {"input_ids": np.full(size, index, dtype=np.int32)}

    found = BestFitPackIterDataset(
        grain.MapDataset.source(Documents()).to_iter_dataset(),
        length_struct={"input_ids": capacity},
        num_packing_bins=bins,
    )
    rows = []
    for row in found:
        ids, segments = row["input_ids"], row["input_ids_segment_ids"]
        documents, counts = np.unique(ids[segments > 0], return_counts=True)
        rows.append(dict(zip(documents.tolist(), counts.tolist(), strict=True)))
    return rows


class Packed(NamedTuple):
    """What a method did.

    Args:
        empty: part of all cells.
        split: part of the documents that would have fitted.
        rate: documents a second.
    """

    empty: float
    split: float
    rate: float


def padding_of(
    lengths: IntArray, capacity: int, ours: bool = False
) -> Iterator[tuple[str, Packed | None]]:
    """Each method by name, or ours only; None where it is not installed."""
    table = table_of(lengths)
    cut = table_of(np.minimum(lengths, capacity))
    made: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "next-fit (simulated)": (lambda: next_fit(lengths, capacity), lambda rows: rows),
        "first-fit, plain (simulated)": (
            lambda: plain_first_fit(lengths, capacity),
            lambda rows: rows,
        ),
    }
    for bins in (8, 64):
        name = f"best-fit, {bins} open rows (simulated)"
        made[name] = (lambda bins=bins: open_bins(lengths, capacity, bins), lambda rows: rows)
        made[f"Grain, {bins} bins"] = (
            lambda bins=bins: grain_rows(lengths, capacity, bins), lambda rows: rows
        )  # fmt: skip
    for method in METHODS:
        for window in (256, 1024) if method != "concat" else (1024,):
            options = {"method": method, "buffer_size": window}
            said = method if method == "concat" else f"{method}, {window} documents"
            made[f"**pack**, {said}"] = (
                lambda options=options: list(packed(cut, capacity, **options)), rows_of
            )  # fmt: skip
    fitting = int((lengths <= capacity).sum())
    for name, (make, read) in made.items():
        if ours and not name.startswith("**pack**"):
            continue
        begun = time.perf_counter()
        found = make()
        seconds = time.perf_counter() - begun
        if found is None:
            yield name, None
            continue
        rows = read(found)
        tokens = sum(sum(row.values()) for row in rows)
        assert tokens == np.minimum(lengths, capacity).sum()
        parts = np.bincount([document for row in rows for document in row])
        split = int((parts > 1)[lengths <= capacity].sum()) / fitting
        empty = 1 - tokens / (len(rows) * capacity)
        yield name, Packed(empty, split, len(lengths) / seconds)
    whole = rows_of(packed(table, capacity))
    parts = np.bincount([document for row in whole for document in row])
    expected = -(-lengths // capacity)
    assert (parts == expected).all(), "a document is split that would fit"


def padding_table(lengths: IntArray, capacity: int) -> None:
    print(f"| {len(lengths):,} documents, rows of {capacity:,} | padding | split | documents/s |")
    print("|---|---|---|---|")
    for name, found in padding_of(lengths, capacity):
        if found is None:
            print(f"| {name} | not installed | | |")
        else:
            print(
                f"| {name} | {found.empty:.2%} | {found.split:.1%} | {found.rate:,.0f} |",
                flush=True,
            )


def batches_of(lengths: IntArray) -> Iterator[tuple[str, float, int]]:
    """Ways to make batches: the padding, and how many batches there are."""
    rows = tp.from_arrow(table_of(np.minimum(lengths, 16_384))).shuffle(4096)
    tokens = 32 * int(lengths.mean())
    made = {
        "batch(32)": rows.batch(32),
        "bucket_by_length(32)": rows.bucket_by_length(32),
        "bucket_by_length(32, buffer_size=4096)": rows.bucket_by_length(32, buffer_size=4096),
        f"batch(max_tokens={tokens})": rows.batch(max_tokens=tokens),
        f"bucket_by_length(max_tokens={tokens})": rows.bucket_by_length(max_tokens=tokens),
    }
    for name, pipe in made.items():
        found = pipe.pad_collate().stats(10**9)
        assert found.padding is not None
        yield name, found.padding.share, found.batches


def batches_table(lengths: IntArray) -> None:
    print("\n| batches | padding | micro-batches |\n|---|---|---|")
    for name, share, batches in batches_of(lengths):
        print(f"| {name} | {share:.1%} | {batches:,} |", flush=True)


def costs_of(
    lengths: IntArray, capacity: int, repeats: int, vocabulary: int = 8192
) -> tuple[dict[str, float], int]:
    """Processor time of each stage in ns a token, medians, and how many tokens there are."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        pairs = list(function_pairs(1 if repeats > 1 else 16))
        train_tokenizer(pairs[::8], path, vocabulary)
        text = "\n".join(part for pair in pairs for part in pair)
        chars = lengths * 7 // 2
        edges = np.concatenate([[0], np.cumsum(chars)])
        edges = edges[: np.searchsorted(edges, len(text))].tolist()  # no text comes twice
        texts = pa.array([text[a:b] for a, b in pairwise(edges)], pa.large_string())
        runs = list(runs_of(pa.table({"text": texts})))
        engines = {
            "tokenize": Tokenize(tokenizer=str(path), add_eos="<eos>", engine="tokenizers"),
            "tokenize, the fastest engine there is": Tokenize(tokenizer=str(path), add_eos="<eos>"),
        }
        table = pa.concat_tables([engines["tokenize"].process(run).block.data for run in runs])
        tokens = len(table.column("input_ids").combine_chunks().values)
        work: dict[str, Callable[[], Any]] = {
            name: lambda stage=stage: [stage.process(run) for run in runs]
            for name, stage in engines.items()
        }
        for method in METHODS:
            work[f"pack, {method}"] = lambda method=method: sum(
                len(run) for run in packed(table, capacity, method=method)
            )
        taken: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(repeats + 1):
            for name, do in work.items():
                begun = time.process_time()
                do()
                taken[name].append((time.process_time() - begun) / tokens * 1e9)
    # The first one loads the tokenizer.
    return {name: statistics.median(found[1:]) for name, found in taken.items()}, tokens


def cost_table(lengths: IntArray, capacity: int, repeats: int) -> None:
    costs, tokens = costs_of(lengths, capacity, repeats)
    print(f"\n| {tokens:,} tokens | CPU ns a token | of tokenizing |\n|---|---|---|")
    for name, cost in costs.items():
        print(f"| {name} | {cost:.1f} | {cost / costs['tokenize']:.1%} |", flush=True)


def epochs_apart(lengths: IntArray, epochs: int = 10, shards: int = 24) -> float:
    """The share of documents that have come more or less often than ``epochs`` times when so many tokens have
    come: shards of shorter documents run ahead.
    """
    ids = pa.array([[number] * int(length) for number, length in enumerate(lengths)])
    rows = (
        tp.from_arrow(pa.table({"input_ids": ids})).sharding_filter(shards).shuffle(1000).repeat()
    )
    came, left = np.zeros(len(lengths)), epochs * int(lengths.sum())
    for row in rows.pack(256):
        tokens = np.asarray(row["input_ids"])[np.asarray(row["segment_ids"]) > 0]
        came += np.bincount(tokens, minlength=len(lengths))
        left -= len(tokens)
        if left <= 0:
            break
    return float((np.rint(came / lengths) != epochs).mean())


def epochs_table() -> None:
    draw = np.random.default_rng(0)
    kinds = {
        "uniform, 1 to 119": draw.integers(1, 120, 5000),
        "lognormal, median 67, at most 256": np.clip(draw.lognormal(4.2, 0.8, 5000), 1, 256).astype(np.int64),
    }  # fmt: skip
    print(
        "\n| 5,000 documents, packed to 256 in 24 shards | came not ten times in ten epochs |\n|---|---|"
    )
    for name, lengths in kinds.items():
        print(f"| {name} | {epochs_apart(lengths):.0%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--documents", type=int, default=20_480)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--mean", type=float, default=831)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    lengths = lengths_of(args.documents, args.mean, args.sigma)
    print(f"Python {sys.version.split()[0]}, NumPy {np.__version__}, Arrow {pa.__version__}\n")
    padding_table(lengths, args.length)
    batches_table(lengths)
    epochs_table()
    cost_table(lengths[: args.documents // 4], args.length, args.repeats)


if __name__ == "__main__":
    main()
