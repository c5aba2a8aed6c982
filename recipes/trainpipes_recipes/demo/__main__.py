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

from trainpipes_recipes.demo.corpus import function_pairs, write_parquet
from trainpipes_recipes.demo.logged import Comparison, Step, compare, read_log
from trainpipes_recipes.samples import write_configs, write_tokenizer

__all__ = ["draw", "main"]

PYTHON = [sys.executable]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    output: Path = args.output
    output.mkdir(parents=True, exist_ok=True)
    for name in ("uninterrupted", "interrupted"):
        shutil.rmtree(output / name, ignore_errors=True)
    started = time.monotonic()

    pairs = list(function_pairs(args.every))
    paths = write_parquet(pairs, output / "data")
    write_tokenizer(output / "tokenizer", pairs)
    write_configs(output)
    print(
        f"{len(pairs):,} functions of Python's standard library (signature + docstring -> body) in "
        f"{len(paths)} Parquet files"
    )

    every = args.checkpoint_every
    options = {
        "files": output / "data", "tokenizer": output / "tokenizer", "model": output / "model", "lr": 2e-3,
        "steps": args.steps, "save-every": every, "batch-size": args.batch_size, "max-length": 128,
    }  # fmt: skip
    train(output / "uninterrupted", options)
    killed = []
    for part, workers in ((0.35, 0), (0.85, 2)):
        until = min(round(args.steps * part) + every // 2, args.steps - 1)
        killed.append(train(output / "interrupted", options, workers=workers, until=until))
    train(output / "interrupted", options, workers=1)

    reference = read_log(output / "uninterrupted" / "log.jsonl")
    resumed = read_log(output / "interrupted" / "log.jsonl")
    whole = compare(reference, resumed)
    print(f"uninterrupted against killed and resumed: {whole}")
    identical = whole.identical and len(reference) == args.steps
    for number, steps in enumerate(killed, start=1):
        until_killed = compare(reference[: len(steps)], steps)
        identical = identical and until_killed.identical
        print(f"what process {number} did before it was killed: {until_killed}")

    picture = output / "loss.png"
    epoch = len(pairs) // args.batch_size
    draw(reference, resumed, [len(steps) for steps in killed], epoch, whole).savefig(
        picture, dpi=150
    )
    print(f"loss curves: {picture}; {time.monotonic() - started:.0f} s in all")
    if not identical:
        print("FAILED: the resumed run is not the run that was left alone")
        return 1
    print(
        f"All {whole.compared} batches are the same, bit for bit, and so are all losses: none lost, "
        "none repeated, none changed."
    )
    print("Now with your own files, of two text columns, and any model of transformers:")
    print("  python -m trainpipes_recipes.train_sft --model MODEL --files 'my/*.parquet'")
    return 0


def train(
    folder: Path, options: Mapping[str, Any], workers: int = 0, until: int | None = None
) -> list[Step]:
    """A process of a run, on the CPU, that goes on where the last one was."""
    folder.mkdir(exist_ok=True)
    log, output = folder / "log.jsonl", folder / "output.txt"
    command = [*PYTHON, "-m", "trainpipes_recipes.demo.logged", "train_sft", "--scratch"]
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


def draw(
    reference: Sequence[Step],
    resumed: Sequence[Step],
    killed_after: Sequence[int],
    epoch: int,
    comparison: Comparison,
) -> Any:
    """Both loss curves as a figure, with the steps at which the second was killed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.9), layout="constrained")
    axes = figure.add_subplot()
    numbers, losses = zip(*((s.number, s.loss) for s in reference), strict=True)
    axes.plot(numbers, losses, label="left alone", color="#f0b429", linewidth=5)
    numbers, losses = zip(*((s.number, s.loss) for s in resumed), strict=True)
    axes.plot(numbers, losses, label="killed and resumed", color="#1d3557", linewidth=1.2)
    for number, step in enumerate(killed_after):
        label = "_" if number else "SIGKILL"  # one line in the legend
        axes.axvline(step, label=label, color="#d62828", linestyle="--", linewidth=1.2)
    for end in range(epoch, len(reference), epoch):
        label = "_" if end > epoch else "an epoch ends"
        axes.axvline(end + 0.5, label=label, color="#999999", linestyle=":", linewidth=1.2)
    same = "identical, bit for bit" if comparison.identical else "NOT identical"
    axes.set_title(f"{comparison.compared} batches and losses: {same}", loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
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
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
