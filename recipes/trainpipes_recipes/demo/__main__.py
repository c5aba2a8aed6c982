"""Kill a training run twice, resume it, and compare every batch with a run that was left alone.

    python -m trainpipes_recipes.demo

Makes a corpus of Python's own standard library, trains a tokenizer on it, and trains a small model with
``train_sft``: once without interruption; once killed with SIGKILL in mid-epoch, resumed from its last
checkpoint with two worker processes, killed again in the next epoch, and resumed with one. Then it
compares the hash of every batch and every loss of both runs, draws the two loss curves, and ends with
exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainpipes_recipes.demo.comparison import Comparison, compare
from trainpipes_recipes.demo.corpus import function_pairs, write_parquet
from trainpipes_recipes.demo.logged import Step, read_log
from trainpipes_recipes.samples import write_configs, write_tokenizer

__all__ = ["draw", "main"]


@dataclass(frozen=True)
class Leg:
    """One process of a run.

    Args:
        workers: worker processes that make its batches.
        until: the step after which it is killed; None to let it end.
    """

    workers: int
    until: int | None = None

    def __str__(self) -> str:
        return f"{self.workers} worker{'' if self.workers == 1 else 's'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it.

    Returns:
        0 if nothing was lost, repeated or changed, else 1.
    """
    args = parse(arguments)
    output: Path = args.output
    output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()

    pairs = list(function_pairs(args.every))
    paths = write_parquet(pairs, output / "data")
    write_tokenizer(output / "tokenizer", pairs)
    write_configs(output)
    print(
        f"{len(pairs):,} functions of Python's standard library (signature + docstring -> body) in "
        f"{len(paths)} Parquet files"
    )

    trainer = Trainer(output, args.steps, args.checkpoint_every, args.batch_size)
    trainer.run("uninterrupted", [Leg(workers=0)])
    first, second = (
        min(round(args.steps * part) + args.checkpoint_every // 2, args.steps - 1)
        for part in (0.35, 0.85)
    )
    killed = trainer.run("interrupted", [Leg(0, first), Leg(2, second), Leg(1)])

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


class Trainer:
    """Runs ``train_sft`` in processes of its own, on the CPU.

    Args:
        output: where the corpus is, and where the runs go.
        steps: of each run.
        checkpoint_every: steps between checkpoints.
        batch_size: rows in a batch.
    """

    def __init__(self, output: Path, steps: int, checkpoint_every: int, batch_size: int) -> None:
        self._output = output
        self._every = checkpoint_every
        self._command = [
            *(sys.executable, "-m", "trainpipes_recipes.demo.logged", "train_sft"),
            *(
                "--files",
                str(output / "data" / "*.parquet"),
                "--tokenizer",
                str(output / "tokenizer"),
            ),
            *("--model", str(output / "model"), "--scratch", "--lr", "2e-3"),
            *("--steps", str(steps), "--save-every", str(checkpoint_every)),
            *("--batch-size", str(batch_size), "--max-length", "128"),
        ]

    def run(self, name: str, legs: Sequence[Leg]) -> list[list[Step]]:
        """One run from its start to its end, in one process after the other.

        Returns:
            What each process that was killed had logged by then, from the run's start.
        """
        directory = self._output / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        killed = []
        for leg in legs:
            self._leg(name, leg)
            steps = read_log(directory / "log.jsonl")
            who = f"{name}, {leg}"
            if leg.until is None:
                print(f"{who}: done after step {steps[-1].number}")
            else:
                killed.append(steps)
                last = steps[-1].number
                print(
                    f"{who}: killed with SIGKILL after step {last}; last checkpoint after step "
                    f"{last // self._every * self._every}"
                )
        return killed

    def _leg(self, name: str, leg: Leg) -> None:
        directory = self._output / name
        log = directory / "log.jsonl"
        command = [*self._command, "--output", str(directory), "--num-workers", str(leg.workers)]
        with open(directory / "output.txt", "a") as output:
            # A session of its own, so that its workers are killed with it, as a scheduler does.
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
            try:
                while process.poll() is None:
                    if leg.until is not None and len(read_log(log)) >= leg.until:
                        break
                    time.sleep(0.02)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        wanted = 0 if leg.until is None else -signal.SIGKILL
        if process.returncode != wanted:
            said = (directory / "output.txt").read_text()[-2000:]
            raise SystemExit(f"{said}\n{name}: the trainer ended with {process.returncode}")


def draw(
    reference: Sequence[Step],
    resumed: Sequence[Step],
    killed_after: Sequence[int],
    epoch: int,
    comparison: Comparison,
) -> Any:
    """Both loss curves as a Matplotlib figure, with the steps at which the second run was killed."""
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
    """The command line."""
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
