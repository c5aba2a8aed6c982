"""Memory-mapped rows against decoding JPEG files, and against nanoGPT's loop over a token file.

    python benchmarks/memmap.py [--images 350] [--repeats 7]

Makes its own data: JPEG files of 224 x 224 pixels, and a file of 50 M uint16 tokens. Both sides of each
comparison run in this process, in turn; the medians' ratios are what to quote. Needs pillow:
pip install pillow. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import trainpipes as tp

BATCH = 32
LENGTH, TOKENS, TOKEN_BATCH = 1024, 50_000_000, 12


def make_images(folder: Path, count: int) -> list[Path]:
    """Photo-like JPEG files: smooth shapes, some noise, quality 90."""
    from PIL import Image

    rng = np.random.default_rng(0)
    paths = []
    y, x = np.mgrid[0:224, 0:224] / 224
    for number in range(count):
        waves = rng.normal(size=(3, 8, 3)) * 4
        image = sum(
            np.sin(waves[:, k, 0, None, None] * x + waves[:, k, 1, None, None] * y)
            for k in range(8)
        )
        pixels = 128 + 25 * image + rng.normal(size=(3, 224, 224)) * 9
        path = folder / f"{number:05d}.jpg"
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8).transpose(1, 2, 0)).save(
            path, quality=90
        )
        paths.append(path)
    return paths


def decoded(path: Path) -> torch.Tensor:
    """An image as uint8 ``[3, 224, 224]``."""
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(path).convert("RGB")).transpose(2, 0, 1).copy())


class Images:
    """What a data set of image files is: one is opened and decoded for each row."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": decoded(self.paths[index]), "label": index % 10}


def nano_gpt(
    data: Any, batches: int, generator: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random stretches of a memory-mapped token file, as nanoGPT's ``get_batch`` takes them."""
    for _ in range(batches):
        starts = torch.randint(len(data) - LENGTH, (TOKEN_BATCH,), generator=generator).tolist()
        x = [torch.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in starts]
        y = [torch.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in starts]
        yield torch.stack(x), torch.stack(y)


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def medians(contestants: dict[str, Callable[[], Any]], repeats: int, what: str) -> dict[str, float]:
    """Median seconds of each, over interleaved repeats after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(repeats + 1):
        print(f"\r{what}: {number} of {repeats}", end="", file=sys.stderr, flush=True)
        for name, run in contestants.items():
            took = seconds(run)
            if number:
                found[name].append(took)
    print(file=sys.stderr)
    return {name: statistics.median(times) for name, times in found.items()}


def epochs(pipe: tp.Pipeline) -> Callable[[], int]:
    """Goes through the next epoch, each time."""
    loader = tp.Loader(pipe)
    return lambda: sum(1 for _ in loader)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=int, default=350)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = Images(make_images(folder, args.images))
        tp.write_memmap(folder / "images.memmap", (images[n] for n in range(len(images))))
        files = tp.from_dataset(images)
        mapped = tp.from_memmap(folder / "images.memmap")
        contestants = {
            "JPEG files": epochs(files.batch(BATCH).collate()),
            "memory map": epochs(mapped.batch(BATCH).collate()),
            "JPEG files, shuffled": epochs(files.shuffle(scope="global").batch(BATCH).collate()),
            "memory map, shuffled": epochs(mapped.shuffle(scope="global").batch(BATCH).collate()),
        }
        times = medians(contestants, args.repeats, "images")
        print(f"\n{args.images} images of 224 x 224, batches of {BATCH}, through tp.Loader\n")
        print("| | images/s | ratio |\n|---|---|---|")
        for which in ("", ", shuffled"):
            slow = times["JPEG files" + which]
            for kind in ("JPEG files", "memory map"):
                took = times[kind + which]
                print(f"| {kind}{which} | {args.images / took:,.0f} | {slow / took:.1f} |")

        np.random.default_rng(1).integers(0, 50_257, TOKENS, dtype=np.uint16).tofile(
            folder / "tokens.bin"
        )
        data = np.memmap(folder / "tokens.bin", np.uint16, "r")
        generator = torch.Generator().manual_seed(0)
        tokens = tp.from_memmap(folder / "tokens.bin", dtype="uint16", length=LENGTH, labels=True)
        rows = tokens.shuffle(scope="global").batch(TOKEN_BATCH).collate().take(args.batches)
        window = tokens.shuffle(8192).batch(TOKEN_BATCH).collate().take(args.batches)
        times = medians(
            {
                "nanoGPT's get_batch": lambda: sum(
                    1 for _ in nano_gpt(data, args.batches, generator)
                ),
                'shuffle(scope="global")': epochs(rows),
                "shuffle(8192)": epochs(window),
            },
            args.repeats,
            "tokens",
        )
        print(
            f"\n{args.batches} batches of {TOKEN_BATCH} x {LENGTH} tokens and the ones after them, int64\n"
        )
        print("| | tokens/s | ratio |\n|---|---|---|")
        slow = times["nanoGPT's get_batch"]
        for kind, took in times.items():
            rate = args.batches * TOKEN_BATCH * LENGTH / took
            print(f"| {kind} | {rate / 1e6:,.0f} M | {slow / took:.1f} |")


if __name__ == "__main__":
    main()
