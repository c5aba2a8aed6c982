"""Clips of videos by ``decode_video``, by a ``DataLoader`` with worker processes, and by threads alone.

    python -m benchmarks.videos [--files 96] [--workers 2] [--repeats 7]

Makes its own MP4 files: 10 s of 320 x 240 pixels, 30 frames a second, H.264 with a key frame every 2 s. Of
each file 8 frames of 2 s at a random place are decoded at 170 x 128 pixels, in another order every epoch;
batches of 8 are stacked. The ``DataLoader`` calls the same decoder, once in workers that start in every
epoch, as they do by default, and once in workers that are kept (``persistent_workers``); and once a
``Dataset`` as one writes it with ``av``, which seeks to the clip and decodes all of it. "threads alone"
decodes such clips in as many threads, without order or batches. All run in this process, in turn; seconds of
the clock; medians. Needs av: pip install av. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import trainpipes as tp
from benchmarks.turns import Turns, against, in_turn, rate_of
from trainpipes.media.sound import Clip
from trainpipes.media.video import Choice, frames_of

__all__ = ["rates_of"]

FRAMES, SECONDS, LENGTH, BATCH = 8, 2.0, 10, 8
SIZE = (128, 170)


def make_videos(folder: Path, count: int, made: int) -> list[Path]:
    import av

    rng = np.random.default_rng(0)
    y, x = np.mgrid[:240, :320]
    paths = []
    for number in range(count):
        paths.append(folder / f"{number:03}.mp4")
        if number >= made:
            paths[-1].write_bytes(paths[number % made].read_bytes())
            continue
        noise = rng.integers(0, 64, (240, 320, 3))
        with av.open(str(paths[-1]), "w") as out:
            stream: Any = out.add_stream("libx264", rate=30, options={"g": "60", "preset": "fast"})
            stream.height, stream.width, stream.pix_fmt = 240, 320, "yuv420p"
            for n in range(30 * LENGTH):
                moved = np.stack([x + 3 * n, y + 2 * n, x + y + number * n], 2) % 192
                picture = (moved + np.roll(noise, n, 1)).astype(np.uint8)
                out.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
            out.mux(stream.encode(None))
    return paths


def clip_of(path: Path) -> Any:
    clip = Clip(0.0, SECONDS, random.random())
    with path.open("rb") as file:
        return frames_of(file, Choice(FRAMES), clip, lambda *_: SIZE).pixels


class Files(Dataset[Any]):
    """Clips of files by a function."""

    def __init__(self, paths: list[Path], decode: Callable[[Path], Any]) -> None:
        self.paths, self.decode = paths, decode

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Any:
        return {"video": torch.from_numpy(self.decode(self.paths[number]))}


def by_hand(path: Path) -> Any:
    import av

    start = random.random() * (LENGTH - SECONDS)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        tick = float(stream.time_base or 0)
        container.seek(int(start / tick), stream=stream)
        frames = []
        for frame in container.decode(stream):
            second = (frame.pts or 0) * tick
            if second >= start + SECONDS:
                break
            if second >= start:
                frames.append(frame)
    chosen = np.linspace(0, len(frames) - 1, FRAMES).round().astype(int)
    height, width = SIZE
    made = [frames[n].reformat(width, height, "rgb24", interpolation="BICUBIC") for n in chosen]
    return np.stack([frame.to_ndarray() for frame in made])


def rates_of(
    count: int, workers: int, repeats: int, names: Collection[str] = (), made: int = 12
) -> Turns:
    """Clips a second of each, or of those of some names; of the files so many are ``made``, and copied."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        paths = make_videos(Path(name), count, made)
        rows = tp.from_dataset([{"video": str(path)} for path in paths]).shuffle(scope="global")
        clips = rows.decode_video(num_frames=FRAMES, duration=tp.random_crop(SECONDS), size=SIZE)
        pipe = clips.batch(BATCH).collate()
        shuffled: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": workers}

        def drained(batches: Any) -> Callable[[], int]:
            return lambda: sum(len(batch["video"]) for batch in batches)

        def threads() -> int:
            with ThreadPoolExecutor(workers) as pool:
                return len(list(pool.map(clip_of, paths)))

        contestants = {
            "decode_video": drained(pipe),
            "DataLoader, workers": drained(DataLoader(Files(paths, clip_of), **shuffled)),
            "DataLoader, workers kept": drained(
                DataLoader(Files(paths, clip_of), **shuffled, persistent_workers=True)
            ),
            "DataLoader, workers kept, by hand": drained(
                DataLoader(Files(paths, by_hand), **shuffled, persistent_workers=True)
            ),
            "threads alone": threads,
        }
        return in_turn({name: contestants[name] for name in names or contestants}, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--files", type=int, default=96)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    rates = rates_of(args.files, args.workers, args.repeats)
    print(f"{args.files} MP4 files of {LENGTH} s, {args.workers} workers\n")
    print("| | clips/s | decode_video against it |\n|---|---|---|")
    for name in rates:
        ratio = against(rates, "decode_video", name)
        print(f"| {name} | {rate_of(rates, name):,.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
