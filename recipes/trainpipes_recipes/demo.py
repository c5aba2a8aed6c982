"""Kill a training run twice, resume it, and compare every batch with an undisturbed run.

python -m trainpipes_recipes.demo
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainpipes_recipes.logged import Step, differences, read_log
from trainpipes_recipes.samples import (
    function_pairs,
    write_configs,
    write_functions,
    write_tokenizer,
)

__all__ = ["main"]

PYTHON = [sys.executable]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainpipes_recipes.demo",
        description="Kill a training run twice, resume it, and compare every batch with a run that was "
        "left alone.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("demo-output"), help="folder to write to")
    add("--steps", type=int, default=260, help="steps of each run")
    add("--batch-size", type=int, default=32, help="rows in a batch")
    add("--checkpoint-every", type=int, default=25, help="steps between checkpoints")
    add("--every", type=int, default=1, help="use every n-th file of the library only")
    args = parser.parse_args(arguments)

    output, every, started = args.output, args.checkpoint_every, time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    alone, killed = output / "uninterrupted", output / "interrupted"
    for folder in (alone, killed):
        shutil.rmtree(folder, ignore_errors=True)
    pairs = list(function_pairs(args.every))
    paths = write_functions(pairs, output / "data")
    write_tokenizer(output / "tokenizer", pairs)
    write_configs(output)
    print(
        f"{len(pairs):,} functions of Python's standard library (signature + docstring -> body) in "
        f"{len(paths)} Parquet files"
    )

    options = {
        "files": output / "data", "tokenizer": output / "tokenizer", "model": output / "model", "lr": 2e-3,
        "steps": args.steps, "save-every": every, "batch-size": args.batch_size, "max-length": 128,
    }  # fmt: skip
    reference = train(alone, options)
    first, second = (round(args.steps * part) + every // 2 for part in (0.35, 0.85))
    parts = [
        train(killed, options, until=first),
        train(killed, options, workers=2, until=min(second, args.steps - 1)),
        train(killed, options, workers=1),
    ]
    right = len(reference) == args.steps
    for part, steps in zip(("before kill 1", "before kill 2", "at the end"), parts, strict=True):
        differs = differences(reference if steps is parts[-1] else reference[: len(steps)], steps)
        where = f" (first at {differs[0]})" if differs else ""
        print(f"{part}: {len(steps)} batches, {len(differs)} lost, repeated or changed{where}")
        right = right and not differs
    print(f"{time.monotonic() - started:.0f} s in all")
    if not right:
        print("FAILED: the resumed run is not the run that was left alone")
        return 1
    print(
        f"All {len(reference)} batches are the same, bit for bit, and so are all losses: none lost, "
        "none repeated, none changed.\n"
        "Now with your own files, of two text columns, and any model of transformers:\n"
        "  python -m trainpipes_recipes.train_sft --model MODEL --files 'my/*.parquet'"
    )
    return 0


def train(
    folder: Path, options: Mapping[str, Any], workers: int = 0, until: int | None = None
) -> list[Step]:
    """A process of a run, on the CPU, that goes on where the last one was."""
    folder.mkdir(exist_ok=True)
    log, output = folder / "log.jsonl", folder / "output.txt"
    command = [*PYTHON, "-m", "trainpipes_recipes.logged", "train_sft", "--scratch"]
    for name, value in {**options, "output": folder, "num-workers": workers}.items():
        command += [f"--{name}", str(value)]
    with open(output, "a") as file:
        # A session of its own, so that its workers are killed with it, as a scheduler does.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        try:
            while process.poll() is None and (until is None or len(read_log(log)) < until):
                time.sleep(0.02)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != (0 if until is None else -signal.SIGKILL):
        said = output.read_text()[-2000:]
        raise SystemExit(f"{said}\n{folder}: the trainer ended with {process.returncode}")
    steps, every = read_log(log), options["save-every"]
    last = steps[-1].number
    saved = f"killed with SIGKILL; last checkpoint after step {last // every * every}"
    how = "done" if until is None else saved
    print(f"{folder.name}, {workers} worker{'s' * (workers != 1)}: step {last}, {how}")
    return steps


if __name__ == "__main__":
    sys.exit(main())
