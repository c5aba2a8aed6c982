"""``trainpipes run``: a pipeline alone, without a trainer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli.app import Command
from trainpipes.cli.console import note, print_json
from trainpipes.cli.pipelines import of_config, of_recipe, recipe_of, recipe_options
from trainpipes.cli.signals import INTERRUPTED, stop_like_ctrl_c
from trainpipes.cli.storage_options import STORAGE_OPTIONS

if TYPE_CHECKING:
    from trainpipes import Loader, Pipeline
    from trainpipes.look.show import ItemView, Preview
    from trainpipes.look.trial.report import TrialReport

__all__ = ["command"]

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}


def _duration(_: click.Context, __: click.Parameter, text: str | None) -> float:
    """Seconds of ``5ms`` or ``0.2s``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s|)", text.strip()) if text else None
    if text is None:
        return 0.0
    if match is None:
        raise click.BadParameter(f"a time such as 5ms or 0.2s, got {text!r}")
    return float(match[1]) * UNITS[match[2]]


@click.command("run", cls=Command)
@click.argument("source", metavar="CONFIG|RECIPE")
@click.argument("more_files", metavar="[FILES]...", nargs=-1)
@click.option(
    "--files", multiple=True, help="Files for the recipe: path, folder, glob or URL. Repeatable."
)
@click.option("--tokenizer", help="Tokenizer for the recipe: a path, or bytes.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option of the recipe. Repeatable.",
)
@click.option(
    "--set", "changes", multiple=True, metavar="PATH=VALUE",
    help="Change a value of the config, such as options.batch_size=16. Repeatable.",
)  # fmt: skip
@click.option("--allow-imports", is_flag=True, help="Import the functions that the config names.")
@STORAGE_OPTIONS
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Batches to run. [default: 100, or an epoch if that is shorter]",
)
@click.option("--epochs", type=click.IntRange(1), help="Epochs to run, instead of --steps.")
@click.option(
    "--threads",
    type=click.IntRange(0),
    help="Threads that read and work ahead. [default: one a core]",
)
@click.option("--num-workers", type=click.IntRange(0), default=0, help="Worker processes.")
@click.option("--rank", type=click.IntRange(0), help="Run as this rank, of --world-size ranks.")
@click.option("--world-size", type=click.IntRange(1), help="Ranks in all.")
@click.option(
    "--simulate-step", callback=_duration, metavar="TIME",
    help="Sleep this long after each batch, such as 5ms, like a training step, and report the time "
        "spent waiting for data.",
)  # fmt: skip
@click.option(
    "--show", type=click.IntRange(0), default=0, metavar="N", help="Print the first batches."
)
@click.option(
    "--resume", type=click.Path(dir_okay=False), help="Start from this state, a JSON file."
)
@click.option(
    "--save-state", type=click.Path(dir_okay=False), help="Write the last state to this JSON file."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    source: str,
    more_files: tuple[str, ...],
    files: tuple[str, ...],
    tokenizer: str | None,
    options: tuple[str, ...],
    changes: tuple[str, ...],
    allow_imports: bool,
    storage_options: str | None,
    steps: int | None,
    epochs: int | None,
    threads: int | None,
    num_workers: int,
    rank: int | None,
    world_size: int | None,
    simulate_step: float,
    show: int,
    resume: str | None,
    save_state: str | None,
    as_json: bool,
) -> int:
    """Run a pipeline without training, to see its speed, padding and batches.

    CONFIG is a YAML file. RECIPE is the name of a prebuilt pipeline, with its --files; a file of such a name
    is written ./sft.

    \b
    Examples:
      trainpipes run sft --files chat.parquet --tokenizer bytes --show 1
      trainpipes run train.yaml --set options.batch_size=16 --simulate-step 5ms
    """
    if steps is not None and epochs is not None:
        raise click.UsageError("give --steps or --epochs, not both")
    if (rank is None) != (world_size is None):
        raise click.UsageError("--rank and --world-size go together, as in --rank 0 --world-size 8")
    if rank is not None and world_size is not None and rank >= world_size:
        raise click.UsageError(
            f"--rank counts from 0, 0 <= rank < world_size: got {rank} of {world_size} ranks"
        )
    if threads is not None and num_workers:
        raise click.UsageError("give --threads or --num-workers, not both")
    if save_state is not None:
        _check_writable(save_state)
    all_files = (*files, *more_files)
    if _is_recipe(source):
        if changes or allow_imports:
            raise click.UsageError(
                f"{source} is a recipe, whose options are given as --option NAME=VALUE; --set and "
                "--allow-imports are for a config"
            )
        pipe = _recipe(source, all_files, tokenizer, options, storage_options)
    else:
        if all_files or tokenizer is not None or options:
            raise click.UsageError(
                f"{source} is a config, whose values are changed by --set, as in --set options.files=...; "
                "--files, --tokenizer and --option are for a recipe"
            )
        pipe = of_config(source, changes, allow_imports, storage_options)
    recipe = source if _is_recipe(source) else recipe_of(source, changes)
    with stop_like_ctrl_c() as signals:
        report, shown, last = _run(
            _of_rank(pipe, rank, world_size), steps, epochs, show, resume, save_state is not None,
            {"threads": threads, "num_workers": num_workers, "simulate_step": simulate_step,
             "recipe": recipe},
        )  # fmt: skip
    if as_json:
        print_json({**report.to_dict(), "shown": shown.to_dict()["items"]})
    else:
        _print(report, shown, recipe)
    if save_state is not None:
        _write_state(save_state, last)
    if report.ended == "interrupted":
        return 128 + signals[0] if signals else INTERRUPTED
    return 0


# What to run


def _is_recipe(source: str) -> bool:
    """Whether a word is the name of a recipe: by how it is spelt, so that no file changes what it means."""
    return re.fullmatch(r"[^\W\d][\w-]*", source) is not None


def _recipe(
    name: str,
    files: tuple[str, ...],
    tokenizer: str | None,
    options: tuple[str, ...],
    storage: str | None,
) -> Pipeline:
    from trainpipes import ConfigError

    given = recipe_options(options, tokenizer)
    try:
        return of_recipe(name, files, given, storage)
    except ConfigError as error:
        if Path(name).is_file() and str(error).startswith("no recipe"):
            raise click.UsageError(
                f"{error}; a word alone is the name of a recipe: for the file write ./{name}"
            ) from None
        raise


def _of_rank(pipe: Pipeline, rank: int | None, world_size: int | None) -> Pipeline:
    """The pipeline of one rank of several, played alone."""
    if rank is not None and world_size is not None:
        pipe = pipe.distributed(rank=rank, world_size=world_size)
    plan = pipe._session.plan
    if pipe._data_parallel()[1] > 1 and plan.counts.ends_unevenly and not plan.chain.ragged:
        note(
            "the ranks of this pipeline must agree where an epoch ends, which one rank alone "
            "cannot: the run has no end, as with .repeat()"
        )
        return _endless(pipe)
    return pipe


def _endless(pipe: Pipeline) -> Pipeline:
    """The pipeline with the next epoch following for ever."""
    from trainpipes import Pipeline

    stages = [
        stage.replaced(times=None) if stage.role == "repeat" else stage for stage in pipe.stages
    ]
    if any(stage.role == "repeat" for stage in stages):
        return Pipeline(stages, pipe._ranks)
    return pipe.repeat()


# The run


def _run(
    pipe: Pipeline,
    steps: int | None,
    epochs: int | None,
    show: int,
    resume: str | None,
    keeps_state: bool,
    how: dict[str, Any],
) -> tuple[TrialReport, Preview, dict[str, Any]]:
    """What was measured, the batches to show, and the last state."""
    from trainpipes.cli.run_summary import run_line
    from trainpipes.look.show import Preview, preview
    from trainpipes.look.trial.trial import DEFAULT_STEPS, Progress, trial

    plan = pipe._session.plan
    if steps is None and epochs is None and plan.chain.endless:
        note(f"this pipeline has no end: {DEFAULT_STEPS} steps; --steps says how many")
    views: list[ItemView] = []
    last: dict[str, Any] = {}
    with run_line(*_steps(pipe, steps, epochs)) as line:

        def see(item: Any, progress: Progress) -> None:
            if len(views) < show:  # a view is small, and a batch may not be
                views.extend(preview([item], plan, first=len(views)).items)
            if line is not None:
                line(item, progress)

        def ended(loader: Loader) -> None:
            if keeps_state:
                last.update(loader.state_dict())

        report = trial(
            pipe, steps=steps, epochs=epochs, state=None if resume is None else _state(resume),
            see=see, ended=ended, **how,
        )  # fmt: skip
    return report, Preview(views), last


def _print(report: TrialReport, shown: Preview, recipe: str | None) -> None:
    from trainpipes.cli.run_summary import summary

    if len(shown):
        _print_text(f"{shown}\n")
    _print_text(summary(report))
    if report.advice and recipe:
        _print_text(
            f"  (to change a recipe, copy it: trainpipes recipes copy {recipe} my_{recipe}.py)"
        )


def _print_text(text: str) -> None:
    """Text with escapes of its own, as it is."""
    print(text)  # noqa: T201


def _steps(pipe: Pipeline, steps: int | None, epochs: int | None) -> tuple[int | None, int | None]:
    """Steps in all, and in an epoch, where they are known."""
    from trainpipes.look.trial.trial import DEFAULT_STEPS

    try:
        epoch = len(pipe)
    except TypeError:
        return steps or (None if epochs else DEFAULT_STEPS), None
    return steps or (epoch * epochs if epochs else min(DEFAULT_STEPS, epoch)), epoch


def _state(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise click.ClickException(
            f"--resume takes a state as JSON, and {path} is not JSON: {why}"
        ) from None
    if not isinstance(found, dict):
        raise click.ClickException(
            f"--resume takes a state, a JSON object, and {path} holds something else"
        )
    return found


def _check_writable(path: str) -> None:
    """Find out before a run whether its state can be written."""
    target = Path(path)
    if not target.absolute().parent.is_dir():
        raise click.UsageError(f"--save-state {path}: there is no such folder; make it first")
    _write(target, "")


def _write_state(path: str, state: dict[str, Any]) -> None:
    """Write the state, all of it or nothing."""
    _write(Path(path), json.dumps(state, indent=1), keep=True)


def _write(target: Path, text: str, keep: bool = False) -> None:
    """Write a file beside the target, and put it in its place if it is to be kept."""
    hidden = target.with_name(f".{target.name}.unfinished")
    try:
        try:
            hidden.write_text(text, "utf-8")
            if keep:
                hidden.replace(target)
        finally:
            hidden.unlink(missing_ok=True)
    except OSError as error:
        raise click.ClickException(
            f"--save-state {target} cannot be written: {error.strerror}; choose another place"
        ) from None
