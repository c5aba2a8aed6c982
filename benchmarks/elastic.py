"""A resume in mid-epoch on other ranks and workers, by every library: which rows are lost, which come twice.

    python -m benchmarks.elastic [--install] [--only NAME ...] [--folder build/benchmarks]

Each library reads the same 1,440 row numbers, shuffled, as its documentation shows; every rank is a process,
and ranks know each other by gloo. A run stops in mid-epoch, new processes load what it saved and finish the
epoch. What they give is compared with the first run, which goes on to the end of the epoch: rows that never
came, rows that came again, and whether the batches, or the rows of each step over all ranks, are the same.
Where a library keeps the batch of all ranks, as its documentation says, each rank's is that divided by the
ranks. Prints a Markdown table, with versions.

Libraries that are not installed need the network: ``--install``, into environments of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

__all__ = ["BUFFER", "LIBRARIES", "ROWS", "RUNS", "Library", "Tally", "tally"]

ROWS, BUFFER, BATCH, GLOBAL = 1440, 100, 10, 60
#: Rows that each part of a run takes before it stops.
PART = 360
#: Ranks and workers of each part; the last one goes on to the end of the epoch.
RUNS: dict[str, tuple[tuple[int, int], ...]] = {
    "2 ranks again": ((2, 0), (2, 0)),
    "2 ranks of 2 workers again": ((2, 2), (2, 2)),
    "2 to 3 ranks": ((2, 0), (3, 0)),
    "2 to 1 workers": ((1, 2), (1, 1)),
    "2 to 3 to 1 workers": ((1, 2), (1, 3), (1, 1)),
}
ROOT = Path(__file__).parent.parent
#: Seconds that ranks may take.
LIMIT = 150


@dataclass(frozen=True)
class Library:
    """A way to read.

    Args:
        title: as in the table.
        package: whose version is printed.
        environment: a key of ``ENVIRONMENTS``; None for that of the suite.
        whole: whether the batch of all ranks stays the same, by its documentation.
    """

    title: str
    package: str
    environment: str | None = None
    whole: bool = False


LIBRARIES = {
    "trainpipes": Library("trainpipes", "trainpipes"),
    "hf": Library("HF datasets, streaming, in a StatefulDataLoader", "datasets", "hf"),
    "stateful_map": Library("StatefulDataLoader, map-style, its sampler", "torchdata"),
    "stateful_iterable": Library("StatefulDataLoader, an iterable with a state", "torchdata"),
    "mosaic": Library("MosaicML Streaming", "mosaicml-streaming", "mosaic", whole=True),
    "litdata": Library("LitData", "litdata", "litdata"),
    "grain": Library("Grain, a slice for each rank", "grain", "grain"),
    "grain_elastic": Library("Grain, ElasticIterator", "grain", "grain", whole=True),
    "lance": Library("LanceDB, StreamingDataset", "lancedb", "lance", whole=True),
    "energon": Library("Megatron-Energon", "megatron-energon", "energon"),
}


@dataclass
class Tally:
    """What a run gave: numbers of rows, and how what came after the resume compares with the first run."""

    lost: int = 0
    repeated: int = 0
    order: str = ""
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return self.error
        if self.lost or self.repeated:
            return f"{self.lost} lost, {self.repeated} repeated"
        return f"each row once, {self.order}"


def in_turn(ranks: Sequence[list[list[int]]]) -> list[list[int]]:
    """Batches of ranks, one of each in a step."""
    return [batch for step in zip_longest(*ranks) for batch in step if batch is not None]


def steps(ranks: Iterable[list[list[int]]]) -> list[set[int]]:
    """The rows of each step over all ranks."""
    return [{row for batch in step for row in batch} for step in zip_longest(*ranks, fillvalue=[])]


def rows_of(ranks: Iterable[list[list[int]]]) -> Iterator[int]:
    return (row for rank in ranks for batch in rank for row in batch)


def tally(parts: Sequence[Sequence[dict[str, Any]]]) -> Tally:
    """Parts of a run, each a list of what its ranks gave."""
    for part in parts:
        if error := next((rank["error"] for rank in part if "error" in rank), None):
            return Tally(error=error)
    first, resumed = [rank["after"] for rank in parts[0]], [rank["before"] for rank in parts[-1]]
    expected, between = steps(first), sum(map(len, steps(rank["before"] for rank in parts[1])))
    due, came = Counter(rows_of(first)), Counter()
    for part in parts[1:]:
        came += Counter(rows_of(rank["before"] for rank in part))
    if len(parts) == 2 and in_turn(first) == in_turn(resumed):
        order = "the same batches"
    elif (expected if len(parts) == 2 else expected[between // len(expected[0]) :]) == steps(
        resumed
    ):
        order = "the same steps"
    else:
        order = "in another order"
    return Tally((due - came).total(), (came - due).total(), order)


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def ranks_of(
    python: Path, name: str, folder: Path, part: int, ranks: int, workers: int, last: bool
) -> list[dict[str, Any]]:
    """Let ranks take one part of a run: what each gave."""
    batch = GLOBAL // ranks if LIBRARIES[name].whole else BATCH
    limit = PART // (batch * ranks)
    left = -2 * ROWS // (batch * ranks) if last else limit
    if last and name == "energon":  # it begins the next epoch
        left = -(ROWS - part * PART) // (batch * ranks)
    command = [str(python), "-m", "benchmarks.elastic_ranks", name, str(folder), str(part)]
    command += list(map(str, (ranks, workers, batch, left)))
    paths = [str(ROOT), *sys.path[1:]] if LIBRARIES[name].environment is None else [str(ROOT)]
    shared = {
        **os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port()), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    running = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOBAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"{part}-{rank}.log").open("w"),
            start_new_session=True,
        )
        for rank in range(ranks)
    ]
    found = []
    for rank, process in enumerate(running):
        try:
            process.wait(LIMIT)
            found.append(json.loads((folder / f"{part}-{rank}.json").read_text()))
        except (subprocess.TimeoutExpired, FileNotFoundError):
            found.append({"before": [], "after": [], "error": f"no answer after {LIMIT} s"})
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    return found


def run(python: Path, name: str, place: Path, topology: Sequence[tuple[int, int]]) -> Tally:
    """One run of a library, from its start to the end of the epoch."""
    folder = place / f"run-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    parts: list[list[dict[str, Any]]] = []
    for number, (ranks, workers) in enumerate(topology):
        last = number == len(topology) - 1
        parts.append(ranks_of(python, name, folder, number, ranks, workers, last))
        if any("error" in rank for rank in parts[-1]):
            break
    return tally(parts)


def write_rows(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    for part in range(12):
        size = ROWS // 12
        rows = pa.table({"row": range(part * size, part * size + size)})
        pq.write_table(rows, folder / f"{part:02}.parquet", row_group_size=30)


def main(arguments: Sequence[str] | None = None) -> None:
    from benchmarks.environments import install, python_of

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--install", action="store_true", help="install what is missing")
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "benchmarks")
    args = parser.parse_args(arguments)
    place = args.folder.resolve() / "elastic"
    write_rows(place / "rows")
    print("|", " | ".join(["", "version", *RUNS]), "|")
    print("|---" * (len(RUNS) + 2) + "|")
    for name in args.only:
        library = LIBRARIES[name]
        environments = args.folder.resolve() / "environments"
        if args.install and library.environment is not None:
            install(environments, library.environment)
        python = python_of(environments, library.environment)
        if python is None:
            print(f"| {library.title} | not installed; --install |", flush=True)
            continue
        code = f"import importlib.metadata as m; print(m.version({library.package!r}))"
        version = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout
        cells = [str(run(python, name, place, topology)) for topology in RUNS.values()]
        print("|", " | ".join([library.title, version.strip(), *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
