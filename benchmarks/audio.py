"""Sound decoded by ``decode_audio``, by a ``DataLoader`` with worker processes, and by bare threads.

    python -m benchmarks.audio [--sounds 400] [--workers 2] [--repeats 7]

Makes its own files of 5 s at 44,100 Hz: WAV, FLAC and MP3. Each sound is decoded, resampled to 16,000 Hz and
padded in batches of 16, in another order every epoch, from paths. The ``DataLoader`` has a ``Dataset`` that
opens, decodes and resamples a file with the same libraries, and a ``collate_fn`` that pads; once it starts
its workers in every epoch, as it does by default, and once it keeps them (``persistent_workers``). "threads"
is decoding and resampling alone, by as many threads. All run in this process, in turn; seconds of the clock;
medians. torch copies with one thread, as DataLoader's workers do. Needs soundfile and soxr: pip install
soundfile soxr. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import trainpipes as tp
from benchmarks.turns import Turns, against, in_turn, rate_of

__all__ = ["rates_of"]

FORMATS = ("WAV", "FLAC", "MP3")
SECONDS, RATE, WANTED, BATCH = 5, 44_100, 16_000, 16


def make_sounds(folder: Path, count: int, format: str) -> list[str]:
    import soundfile

    rng = np.random.default_rng(0)
    time_of = np.arange(SECONDS * RATE) / RATE
    paths = []
    for number in range(count):
        waves = 0.3 * np.sin(2 * np.pi * (200 + number) * time_of)
        samples = waves + 0.05 * rng.standard_normal(len(waves))
        paths.append(str(folder / f"{number}.{format.lower()}"))
        soundfile.write(paths[-1], samples, RATE, format=format)
    return paths


def decoded(path: str) -> Any:
    import soundfile
    import soxr

    samples, rate = soundfile.read(path, dtype="float32")
    return soxr.resample(samples, rate, WANTED)


class Sounds(Dataset[Any]):
    """Decodes a file when it is asked for it, as one writes it for a ``DataLoader``."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Any:
        return torch.from_numpy(decoded(self.paths[number]))


def padded(sounds: list[Any]) -> dict[str, Any]:
    return {"audio": torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True)}


def drained(batches: Iterable[Any]) -> Callable[[], int]:
    """Counts the sounds of all batches, each time anew."""
    return lambda: sum(len(batch["audio"]) for batch in batches)


def rates_of(count: int, workers: int, repeats: int, format: str) -> Turns:
    """Sounds a second of each."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(workers) as pool:
        paths = make_sounds(Path(name), count, format)
        shuffled: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "collate_fn": padded}
        files = Sounds(paths)
        rows = tp.from_dataset([{"audio": path} for path in paths]).shuffle(scope="global")
        pipe = rows.decode_audio(sampling_rate=WANTED).batch(BATCH)
        kept = {"num_workers": workers, "persistent_workers": True}
        contestants = {
            "decode_audio": drained(pipe.pad_collate()),
            "DataLoader": drained(DataLoader(files, **shuffled)),
            "DataLoader, workers": drained(DataLoader(files, **shuffled, num_workers=workers)),
            "DataLoader, workers kept": drained(DataLoader(files, **shuffled, **kept)),
            "threads, decoding alone": lambda: len([*pool.map(decoded, paths)]),
        }
        return in_turn(contestants, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sounds", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(f"{args.sounds} files of {SECONDS} s at {RATE:,} Hz, {args.workers} workers\n")
    print("| | sounds/s | decode_audio against it |\n|---|---|---|")
    for format in FORMATS:
        rates = rates_of(args.sounds, args.workers, args.repeats, format)
        for name in rates:
            ratio = against(rates, "decode_audio", name)
            print(f"| {format}, {name} | {rate_of(rates, name):,.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
