"""A function that decodes and augments images: called by ``map`` in this process, in threads and in worker
processes, against torch's DataLoader.

    python benchmarks/map_workers.py [--images 1000] [--workers 2] [--repeats 5]

Makes its own JPEG files of 224 x 224 pixels. Each image is decoded, cropped, flipped, and scaled to float32
``[3, 192, 192]``; batches of 32 are stacked. All contestants run in this process, in turn, with their
workers kept from one repeat to the next; medians. torch copies with one thread, as DataLoader's workers do:
its own threads get in the way of ours. Needs pillow: pip install pillow. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import trainpipes as tp

BATCH, SIZE, CROP = 32, 224, 192


def make_images(folder: Path, count: int) -> list[str]:
    """Photo-like JPEG files: smooth shapes, some noise, quality 90."""
    from PIL import Image

    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    paths = []
    for number in range(count):
        waves = rng.normal(size=(3, 4, 2)) * 9
        shapes = np.sin(waves[:, :, 0, None, None] * x + waves[:, :, 1, None, None] * y).sum(axis=1)
        pixels = 128 + 30 * shapes + rng.normal(size=(3, SIZE, SIZE)) * 9
        path = folder / f"{number:05d}.jpg"
        image = np.clip(pixels, 0, 255).astype(np.uint8).transpose(1, 2, 0)
        Image.fromarray(image).save(path, quality=90)
        paths.append(str(path))
    return paths


def augmented(path: str, rng: np.random.Generator) -> torch.Tensor:
    """A random crop of an image, flipped or not, float32 ``[3, CROP, CROP]``."""
    from PIL import Image

    pixels = np.asarray(Image.open(path).convert("RGB"))
    top, left = rng.integers(SIZE - CROP, size=2).tolist()
    pixels = pixels[top : top + CROP, left : left + CROP]
    if rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    scaled = pixels.transpose(2, 0, 1).astype(np.float32) / np.float32(255)
    return torch.from_numpy(np.ascontiguousarray(scaled))


def busy(number: int) -> int:
    """A number, after a millisecond of Python."""
    end = time.perf_counter() + 1e-3
    while time.perf_counter() < end:
        pass
    return number


class Busy(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return busy(index)


class Augmented(Dataset[torch.Tensor]):
    """The same as a Dataset: with generators that a resume does not find again."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return augmented(self.paths[index], np.random.default_rng())


def drained(batches: Iterable[Any]) -> int:
    return sum(len(batch) for batch in batches)


def rates_of(images: int, workers: int, repeats: int) -> dict[str, float]:
    """Images a second of each, medians."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = make_images(Path(folder), images)

        def ours(**how: Any) -> Callable[[], int]:
            rows = tp.from_dataset(paths).sharding_filter().shuffle(scope="global")
            pipe = rows.map(augmented, rng=True, **how).batch(BATCH).collate(default_collate)
            return partial(drained, pipe)

        options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True}
        kept: dict[str, Any] = {"num_workers": workers, "persistent_workers": True}
        numbers = tp.from_dataset(range(2 * images)).sharding_filter().shuffle(scope="global")
        contestants = {
            "map": ours(),
            "map, threads": ours(num_workers=workers),
            "map, processes": ours(num_workers=workers, method="process"),
            "Loader, workers": partial(drained, tp.Loader(ours().args[0], **kept)),
            "Loader, workers, Python": partial(
                drained, tp.Loader(numbers.map(busy).batch(BATCH).collate(), **kept)
            ),
            "DataLoader, workers, Python": partial(
                drained, DataLoader(Busy(2 * images), **options, **kept)
            ),
            "DataLoader": partial(drained, DataLoader(Augmented(paths), **options)),
            "DataLoader, workers": partial(
                drained, DataLoader(Augmented(paths), **options, **kept)
            ),
        }
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for repeat in range(repeats + 1):
            for name, run in contestants.items():
                start = time.perf_counter()
                rows = run()
                if repeat:  # the first one starts processes
                    rates[name].append(rows / (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rates = rates_of(args.images, args.workers, args.repeats)
    print(f"| {args.workers} workers | images/s | ratio |\n|---|---|---|")
    for name, rate in rates.items():
        print(f"| {name} | {rate:,.0f} | {rate / rates['DataLoader']:.2f} |")


if __name__ == "__main__":
    main()
