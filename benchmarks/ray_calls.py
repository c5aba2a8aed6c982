"""Functions that a Ray cluster calls: the share of its workers' time that they spend in the function.

    python -m benchmarks.ray_calls [--workers 2 4] [--rows 4000] [--repeats 3]

Starts Ray on this machine, as a node of its own, with as many CPUs as workers. Four jobs, each in batches of
32 through a ``Loader``: a row for which nothing is done; a row that waits for a millisecond, as if each
worker had a core of its own; a row that takes a millisecond of Python; a JPEG of 60 KB, decoded, cropped and
flipped to uint8 ``[3, 192, 192]``. The function tells the seconds that it took; the share is their sum, over
the seconds of the epoch and the number of workers. Beside it: the same with worker processes of this machine.
After one epoch of each; medians. Two workers that compute fill two cores, on which the training process works
as well. Needs ray and pillow. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import trainpipes as tp

SIZE, CROP = 470, 192


def picture() -> bytes:
    """A JPEG of about 60 KB: smooth shapes, some noise."""
    from PIL import Image

    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    shapes = [128 + 60 * np.sin(9 * (a * x + b * y)) for a, b in rng.normal(size=(3, 2))]
    pixels = np.stack(shapes, axis=-1) + rng.normal(size=(SIZE, SIZE, 3)) * 9
    file = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=88)
    return file.getvalue()


def passes(row: dict[str, Any]) -> dict[str, Any]:
    return {"took": 0.0, "id": row["id"]}


def waits(row: dict[str, Any]) -> dict[str, Any]:
    begun = time.perf_counter()
    time.sleep(1e-3)
    return {"took": time.perf_counter() - begun, "id": row["id"]}


def computes(row: dict[str, Any]) -> dict[str, Any]:
    begun = time.perf_counter()
    while time.perf_counter() < begun + 1e-3:
        pass
    return {"took": time.perf_counter() - begun, "id": row["id"]}


def decodes(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    from PIL import Image

    begun = time.perf_counter()
    pixels = np.asarray(Image.open(io.BytesIO(row["image"])).convert("RGB"))
    top, left = rng.integers(SIZE - CROP, size=2).tolist()
    pixels = pixels[top : top + CROP, left : left + CROP]
    if rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    image = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    return {"image": image, "took": time.perf_counter() - begun}


def jobs(rows: int) -> dict[str, tp.Pipeline]:
    numbers = tp.from_dataset([{"id": n} for n in range(rows)]).sharding_filter()
    image = picture()
    images = tp.from_dataset([{"image": image} for _ in range(rows // 2)]).sharding_filter()
    return {
        "nothing": numbers.map(passes).batch(32).collate(),
        "1 ms of waiting": numbers.map(waits).batch(32).collate(),
        "1 ms of Python": numbers.map(computes).batch(32).collate(),
        f"JPEG of {len(image) / 1000:.0f} kB": images.map(decodes, rng=True).batch(32).collate(),
    }


def epoch(loader: tp.Loader, workers: int) -> tuple[float, float]:
    """Rows a second, and the share of the workers' time that was spent in the function."""
    begun, rows, took = time.perf_counter(), 0, 0.0
    for batch in loader:
        rows += len(batch["took"])
        took += float(batch["took"].sum())
    seconds = time.perf_counter() - begun
    return rows / seconds, took / seconds / workers


def measured(workers: int, rows: int, repeats: int) -> list[tuple[str, str, float, float]]:
    """Of each job and kind of workers: rows a second, and the share."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    ray.init(
        num_cpus=workers, include_dashboard=False, log_to_driver=False, configure_logging=False
    )
    kinds: dict[str, Callable[[], Any]] = {
        "Ray": lambda: tp.Ray(num_workers=workers),
        "processes": lambda: tp.Processes(workers),
    }
    found = []
    try:
        for job, pipe in jobs(rows).items():
            for kind, executor in kinds.items():
                loader = tp.Loader(pipe, executor=executor(), persistent_workers=True)
                epochs = [epoch(loader, workers) for _ in range(repeats + 1)][1:]
                rate, share = (statistics.median(values) for values in zip(*epochs, strict=True))
                found.append((job, kind, rate, share))
                del loader
    finally:
        ray.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print("| job | workers | rows/s | share of their time in the function |\n|---|---|---|---|")
    for workers in args.workers:
        for job, kind, rate, share in measured(workers, args.rows, args.repeats):
            print(f"| {job} | {workers} of {kind} | {rate:,.0f} | {share:.2f} |", flush=True)


if __name__ == "__main__":
    main()
