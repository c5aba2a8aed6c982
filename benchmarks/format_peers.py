"""Rows of a ``datasets.Dataset`` and samples of tar archives, by us and by the libraries made for them.

    python benchmarks/format_peers.py [--rows 40000] [--samples 4000] [--repeats 5]

Needs ``datasets`` and ``webdataset``; of one that is missing there are no figures. All go through all rows in
one thread, in turn, each in a process in which nothing was read before; ratios of medians of processor time.
What is opened counts.

- ``Dataset``, memory-mapped: rows of an id and a text as dicts; the same with a list of about 100 token ids,
  for which Python makes as many numbers; batches of 32 rows of token ids as tensors, padded by us, and by
  ``with_format("torch").iter(32)`` a tensor for each row.
- 4 tar archives: samples of a picture of 20 kB and a class. Our index of the members is made on the way, or
  is there from an earlier run.
"""

from __future__ import annotations

import argparse
import io
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import trainpipes as tp
from benchmarks.fresh import Opener, medians

__all__ = ["of_dataset", "of_tar"]

BATCH = 32
TARS, PICTURE_BYTES = 4, 20_000


def counted(items: Iterable[Any], size: Callable[[Any], int]) -> Opener:
    """Goes through all items, and counts their rows."""
    return lambda: lambda: sum(map(size, items))


def one(item: Any) -> int:  # noqa: ARG001
    """It is a row."""
    return 1


def serial(pipe: tp.Pipeline) -> tp.Loader:
    return tp.Loader(pipe, threads=0)


def of_dataset(rows: int, repeats: int) -> dict[str, float]:
    """How many times as fast as the ``Dataset`` itself."""
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(folder, rows)
        there: Any = datasets.load_from_disk(folder)
        found = {}
        for what, ours, theirs, size in (
            ("rows", tp.from_hf(there.select_columns(["id", "text"])),
             there.select_columns(["id", "text"]), one),
            ("rows with a list", tp.from_hf(there), there, one),
            ("batches", tp.from_hf(there.select_columns("input_ids")).batch(BATCH).pad_collate(),
             there.select_columns("input_ids").with_format("torch").iter(BATCH),
             lambda batch: len(batch["input_ids"])),
        ):  # fmt: skip
            ways = {"ours": counted(serial(ours), size), "theirs": counted(theirs, size)}
            took = medians(ways, rows, repeats, opening=True)
            found[what] = took["theirs"] / took["ours"]
    return found


def write_dataset(folder: str, rows: int) -> None:
    import datasets

    draw, numbers = random.Random(0), np.random.default_rng(0)
    texts = [" ".join(draw.choices(("one", "two", "three"), k=60)) for _ in range(rows)]
    ids = [numbers.integers(0, 32_000, draw.randint(20, 180)).tolist() for _ in range(rows)]
    made = datasets.Dataset.from_dict({"id": range(rows), "text": texts, "input_ids": ids})
    made.save_to_disk(folder)


def write_tars(folder: Path, samples: int) -> None:
    draw = np.random.default_rng(0)
    for number in range(TARS):
        with tarfile.open(folder / f"{number}.tar", "w") as archive:
            for sample in range(number, samples, TARS):
                for kind, content in (("jpg", draw.bytes(PICTURE_BYTES)), ("cls", b"7")):
                    member = tarfile.TarInfo(f"{sample:06}.{kind}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def of_tar(samples: int, repeats: int) -> dict[str, float]:
    """How many times as fast as ``webdataset``."""
    import webdataset

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tars(folder, samples)
        paths = sorted(map(str, folder.glob("*.tar")))
        index = str(folder / "index.arrow")
        len(tp.read_webdataset(paths, index=index))
        theirs = webdataset.WebDataset(paths, shardshuffle=False)
        ways = {
            "made": counted(serial(tp.read_webdataset(paths, index=False)), one),
            "found": counted(serial(tp.read_webdataset(paths, index=index)), one),
            "theirs": counted(theirs, one),
        }
        took = medians(ways, samples, repeats, opening=True)
    return {
        "with its index": took["theirs"] / took["found"],
        "without one": took["theirs"] / took["made"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--samples", type=int, default=4_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for name, measure, size in (
        ("datasets", of_dataset, args.rows),
        ("webdataset", of_tar, args.samples),
    ):
        try:
            found = measure(size, args.repeats)
        except ModuleNotFoundError as error:
            print(f"{name}: {error}")
            continue
        for what, value in found.items():
            print(f"{name}, {what:<24} {value:.2f}")


if __name__ == "__main__":
    main()
