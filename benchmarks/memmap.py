"""Memory-mapped rows against decoding JPEG files, and against nanoGPT's loop over a token file.

    python benchmarks/memmap.py [--images 350] [--repeats 7]

Makes its own data: JPEG files of 224 x 224 pixels, and a file of 50 M uint16 tokens. Images come in batches
of 32 from a plain ``DataLoader`` over the JPEG files, from ``from_dataset`` over the same files, and from
``from_memmap`` over the memory map that was written of them by another process. All run in this process, in
turn; times are the processor's, of all threads, so that others at work on the machine don't count, and the
medians' ratios are what to quote. torch has one thread: a second one goes on for some ms after each of its
tasks, which would count for whoever comes next. Needs pillow: pip install pillow. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

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


def write_images(folder: Path, count: int) -> None:
    """JPEG files, and a memory map of what they show."""
    images = Images(make_images(folder, count))
    tp.write_memmap(folder / "images.memmap", (images[n] for n in range(count)))


def nano_gpt(
    data: Any, batches: int, generator: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches as nanoGPT's loop makes them: stretches of a token file at random offsets, widened one by one
    and stacked, and the same ones a token later. The file stays mapped, which is in its favour."""
    for _ in range(batches):
        starts = torch.randint(len(data) - LENGTH, (TOKEN_BATCH,), generator=generator).tolist()
        x = [torch.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in starts]
        y = [torch.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in starts]
        yield torch.stack(x), torch.stack(y)


def seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def medians(contestants: dict[str, Callable[[], Any]], repeats: int, what: str) -> dict[str, float]:
    """Median seconds of the processor of each, over interleaved repeats after one that does not count."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(repeats + 1):
        print(f"\r{what}: {number} of {repeats}", end="", file=sys.stderr, flush=True)
        for name, run in contestants.items():
            took = seconds(run)
            if number:
                found[name].append(took)
    print(file=sys.stderr)
    return {name: statistics.median(times) for name, times in found.items()}


def drained(batches: Iterable[Any]) -> Callable[[], int]:
    """Goes through the batches, each time anew."""
    return lambda: sum(1 for _ in batches)


def image_times(folder: Path, count: int, repeats: int) -> dict[str, float]:
    """Median seconds of an epoch, by who reads and in which order."""
    writer = multiprocessing.get_context("spawn").Process(target=write_images, args=(folder, count))
    writer.start()
    writer.join()
    images = Images(sorted(folder.glob("*.jpg")))
    files, mapped = tp.from_dataset(images), tp.from_memmap(folder / "images.memmap")
    contestants = {}
    for order, shuffled in (("", False), (", shuffled", True)):
        ours = {"from_dataset": files, "from_memmap": mapped}
        plain: Any = DataLoader(images, batch_size=BATCH, shuffle=shuffled)  # type: ignore[arg-type]
        contestants[f"DataLoader over JPEG files{order}"] = drained(plain)
        for name, rows in ours.items():
            pipe = rows.shuffle(scope="global") if shuffled else rows
            contestants[f"{name}{order}"] = drained(tp.Loader(pipe.batch(BATCH).collate()))
    return medians(contestants, repeats, "images")


def token_times(folder: Path, tokens: int, batches: int, repeats: int) -> dict[str, float]:
    """Median seconds of so many batches."""
    path = folder / "tokens.bin"
    np.random.default_rng(1).integers(0, 50_257, tokens, dtype=np.uint16).tofile(path)
    data = np.memmap(path, np.uint16, "r")
    generator = torch.Generator().manual_seed(0)
    rows = tp.from_memmap(path, dtype="uint16", length=LENGTH, labels=True)

    def ours(ordered: tp.Pipeline) -> Callable[[], int]:
        return drained(tp.Loader(ordered.batch(TOKEN_BATCH).collate().take(batches)))

    contestants = {
        "nanoGPT's get_batch": lambda: sum(1 for _ in nano_gpt(data, batches, generator)),
        'shuffle(scope="global")': ours(rows.shuffle(scope="global")),
        "shuffle(8192)": ours(rows.shuffle(8192)),
        "in file order": ours(rows),
    }
    return medians(contestants, repeats, "tokens")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=int, default=350)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        times = image_times(Path(name), args.images, args.repeats)
        print(f"\n{args.images} images of 224 x 224, batches of {BATCH}\n")
        print("| | images/s | against a DataLoader over JPEG files |\n|---|---|---|")
        for kind, took in times.items():
            slow = times["DataLoader over JPEG files" + ", shuffled" * kind.endswith(", shuffled")]
            print(f"| {kind} | {args.images / took:,.0f} | {slow / took:.1f} |")
        times = token_times(Path(name), TOKENS, args.batches, args.repeats)
        print(f"\nBatches of {TOKEN_BATCH} x {LENGTH} tokens and the ones after them, int64\n")
        print("| | ms a batch | tokens/s | ratio |\n|---|---|---|---|")
        slow = times["nanoGPT's get_batch"]
        for kind, took in times.items():
            each = took / args.batches
            rate = TOKEN_BATCH * LENGTH / each / 1e6
            print(f"| {kind} | {each * 1e3:.3f} | {rate:,.0f} M | {slow / took:.1f} |")


if __name__ == "__main__":
    main()
