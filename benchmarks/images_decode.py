"""JPEG files decoded by ``decode_image`` and by a ``DataLoader`` with worker processes.

    python -m benchmarks.images_decode [--images 350] [--workers 2] [--repeats 7]

Makes its own JPEG files of 224 x 224 pixels. Each image is decoded to uint8 ``[3, 224, 224]``, in another
order every epoch; batches of 32 are stacked. The ``DataLoader`` has a ``Dataset`` that opens and decodes a
file, as one writes it; once it starts its workers in every epoch, as it does by default, and once it keeps
them (``persistent_workers``). All run in this process, in turn; seconds of the clock, since processes are
compared with threads; medians. torch copies with one thread, as DataLoader's workers do. Needs pillow: pip
install pillow. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import trainpipes as tp
from benchmarks.memmap import BATCH, Images, make_images

__all__ = ["rates_of"]

SHUFFLED: dict[str, Any] = {"batch_size": BATCH, "shuffle": True}


def drained(batches: Iterable[Any]) -> Callable[[], int]:
    """Counts the images of all batches, each time anew."""
    return lambda: sum(len(batch["image"]) for batch in batches)


def rates_of(count: int, workers: int, repeats: int) -> dict[str, float]:
    """Images a second of each, medians."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        paths = make_images(Path(name), count)
        files: Any = Images(paths)
        rows = tp.list_files(name).read_images(labels=None).shuffle(scope="global")
        pipe = rows.drop_columns("path").decode_image().batch(BATCH).collate()
        kept = {"num_workers": workers, "persistent_workers": True}
        contestants = {
            "decode_image": drained(pipe),
            "DataLoader": drained(DataLoader(files, **SHUFFLED)),
            "DataLoader, workers": drained(DataLoader(files, **SHUFFLED, num_workers=workers)),
            "DataLoader, workers kept": drained(DataLoader(files, **SHUFFLED, **kept)),
        }
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for repeat in range(repeats + 1):
            for name, run in contestants.items():
                start = time.perf_counter()
                images = run()
                if repeat:  # the first one imports, and starts workers that are kept
                    rates[name].append(images / (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=int, default=350)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    rates = rates_of(args.images, args.workers, args.repeats)
    print(f"{args.images} JPEG files of 224 x 224, {args.workers} workers\n")
    print("| | images/s | decode_image against it |\n|---|---|---|")
    for name, rate in rates.items():
        print(f"| {name} | {rate:,.0f} | {rates['decode_image'] / rate:.2f} |")


if __name__ == "__main__":
    main()
