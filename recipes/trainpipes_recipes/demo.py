"""Kill a training run twice, resume it, and compare every batch with an undisturbed run.

python -m trainpipes_recipes.demo

To log hashes of the batches and the losses of a training script, and to compare them yourself:

python -m trainpipes_recipes.demo train_sft --output runs/one ...
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from trainpipes_recipes.samples import (
    function_pairs,
    write_configs,
    write_functions,
    write_tokenizer,
)

__all__ = ["Step", "differences", "log_steps", "main", "read_log"]

PYTHON = [sys.executable]
#: Workers of each process of the run that is killed, and after which part of all steps; none of the last.
KILLS = ((0, 0.37), (2, 0.85), (1, None))


class Step(NamedTuple):
    number: int
    batch: str
    loss: float


def read_log(path: Path) -> list[Step]:
    """The steps of a log; of a step that came again after a kill, the last."""
    steps = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # a kill may have cut it
            step = Step(*json.loads(line))
            steps[step.number] = step
    return list(steps.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m trainpipes_recipes.demo", description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default="demo-output", help="folder to write to")
    parser.add_argument("--steps", type=int, default=260, help="steps of each run")
    parser.add_argument("--every", type=int, default=1, help="use every n-th file of the library")
    args = parser.parse_args(arguments)
    if args.steps < 4 or args.every < 1:  # with fewer steps no run is killed before its last one
        parser.error(
            f"--steps must be 4 or more, --every 1 or more, got {args.steps} and {args.every}"
        )

    output, steps = args.output, args.steps
    shutil.rmtree(output / "uninterrupted", ignore_errors=True)
    shutil.rmtree(output / "interrupted", ignore_errors=True)
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
        "steps": steps, "save-every": max(1, steps // 10), "batch-size": 32, "max-length": 128,
    }  # fmt: skip
    reference = train(output / "uninterrupted", options)
    right = len(reference) == steps
    for workers, part in KILLS:
        until = None if part is None else round(part * steps)
        interrupted = train(output / "interrupted", options, workers, until)
        wrong = differences(
            reference if until is None else reference[: len(interrupted)], interrupted
        )
        where = f" (first at {wrong[0]})" if wrong else ""
        print(f"  {len(interrupted)} batches, {len(wrong)} lost, repeated or changed{where}")
        right = right and not wrong
    if not right:
        print("FAILED: the resumed run is not the run that was left alone")
        return 1
    print(
        f"All {steps} batches are the same, bit for bit, and so are all losses: none lost, "
        "none repeated, none changed.\n"
        "Now with your own files, of two text columns, and any model of transformers:\n"
        "  python -m trainpipes_recipes.train_sft --model MODEL --files 'my/*.parquet'"
    )
    return 0


def differences(reference: Sequence[Step], other: Sequence[Step]) -> list[int]:
    """The places, from 1, where two runs differ in any bit.

    >>> a, b = Step(1, "a", 3.0), Step(2, "b", 2.0)
    >>> differences([a, b], [a, b]), differences([a, b], [a, a]), differences([a, b], [a])
    ([], [2], [2])
    """
    pairs = enumerate(zip_longest(reference, other), start=1)
    return [place for place, (first, second) in pairs if first != second]


def train(
    folder: Path, options: Mapping[str, Any], workers: int = 0, until: int | None = None
) -> list[Step]:
    """A process of a run, on the CPU, that goes on where the last process was; killed after a step."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.jsonl"
    command = [*PYTHON, "-m", "trainpipes_recipes.demo", "train_sft", "--scratch"]
    for name, value in {**options, "output": folder, "num-workers": workers}.items():
        command += [f"--{name}", str(value)]
    with open(folder / "output.txt", "a+") as said:
        # A session of its own, so that its workers are killed with it, as a scheduler does.
        process = subprocess.Popen(
            command, stdout=said, stderr=said, start_new_session=True,
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
            said.seek(0)
            raise SystemExit(f"{said.read()[-2000:]}\n{folder}: ended with {process.returncode}")
    steps = read_log(log)
    how = "done" if until is None else "killed with SIGKILL"
    print(f"{folder.name}, num_workers={workers}: step {steps[-1].number}, {how}")
    return steps


def log_steps(script: str, options: Sequence[str]) -> None:
    """Run a training script; ``read_log`` reads what it logs."""
    import torch

    from trainpipes.testing import digest

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    folder = Path(options[options.index("--output") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("RANK", "0")
    with open(folder / ("log.jsonl" if rank == "0" else f"log-{rank}.jsonl"), "a", 1) as log:
        log.write("\n")

        def write(step: int, batches: Any, loss: Any) -> None:
            log.write(json.dumps([step, digest(list(batches)), loss.item()]) + "\n")

        importlib.import_module(f"trainpipes_recipes.{script}").main(options, write)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("train_"):
        log_steps(sys.argv[1], sys.argv[2:])
    else:
        sys.exit(main())
