"""``trainpipes run``: a pipeline alone, without a trainer."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli.console import note, print_json, print_pairs
from trainpipes.cli.options import AS_JSON
from trainpipes.cli.pipelines import PipelineOptions, takes_pipeline

if TYPE_CHECKING:
    from trainpipes import Pipeline
    from trainpipes.cli.measure import Report

__all__ = ["advice", "command"]

#: Shares from which something is worth a line: of padding, and of waiting.
MUCH_PADDING, MUCH_WAITING = 0.2, 0.1


@click.command("run")
@click.argument("source", metavar="RECIPE|CONFIG|FILE")
@click.argument("more_files", metavar="[FILES]...", nargs=-1)
@click.option(
    "--files", multiple=True, help="Files for the recipe: path, folder, glob or URL. Repeatable."
)
@takes_pipeline
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Batches to run. [default: 100, or an epoch if that is shorter]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    help="Run this long after the first batch.",
)
@click.option("--epochs", type=click.IntRange(1), help="Whole epochs to run.")
@click.option(
    "--threads",
    type=click.IntRange(0),
    help="Threads that read and work ahead. [default: one a core]",
)
@click.option("--num-workers", type=click.IntRange(0), default=0, help="Worker processes.")
@click.option("--rank", type=click.IntRange(0), help="Run as this rank, of --world-size ranks.")
@click.option("--world-size", type=click.IntRange(1), help="Ranks in all.")
@click.option(
    "--simulate-step", type=click.FloatRange(0), default=0.0, metavar="SECONDS",
    help="Sleep this long after each batch, such as 0.005, like a training step, and report the time "
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
@AS_JSON
def command(
    source: str,
    more_files: tuple[str, ...],
    files: tuple[str, ...],
    given: PipelineOptions,
    steps: int | None,
    seconds: float | None,
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

    RECIPE is the name of a prebuilt pipeline, which takes --files. CONFIG is a file that ends in .yaml or
    .yml. Any other FILES are data, read in batches of 64 rows.

    \b
    Examples:
      trainpipes run sft --files chat.parquet --tokenizer bytes --show 1
      trainpipes run train.yaml --set options.batch_size=16 --simulate-step 0.005
      trainpipes run data/part-*.parquet --seconds 2
    """
    if sum(one is not None for one in (steps, seconds, epochs)) > 1:
        raise click.UsageError("give one of --steps, --seconds and --epochs")
    if (rank is None) != (world_size is None):
        raise click.UsageError("--rank and --world-size go together, as in --rank 0 --world-size 8")
    if save_state is not None and not Path(save_state).absolute().parent.is_dir():
        raise click.UsageError(f"--save-state {save_state}: there is no such folder; make it first")
    all_files = (*files, *more_files)
    is_config = source.endswith((".yaml", ".yml"))
    is_recipe = re.fullmatch(r"[^\W\d][\w-]*", source) is not None
    if is_recipe:
        pipe = given.recipe(source, all_files)
    elif is_config:
        if all_files:
            raise click.UsageError(f"{source} names its files itself: change them by --set")
        pipe = given.config(source)
    else:
        pipe = given.files([source, *all_files])
    from trainpipes import ConfigError, Loader
    from trainpipes.cli.measure import measure

    if rank is not None:
        pipe = pipe.distributed(rank=rank, world_size=world_size)
    if epochs is not None and pipe._session.plan.chain.endless:
        raise ConfigError(
            f"this pipeline has no end, and so no epochs to count, got --epochs {epochs}"
        )
    if resume is not None:
        pipe.load_state_dict(_state(resume))
    loader = Loader(pipe, threads=threads, num_workers=num_workers)
    if show and not as_json:
        print(pipe.show(show), end="\n\n")  # noqa: T201
    report = measure(
        loader, steps=steps, seconds=seconds, epochs=epochs, step_seconds=simulate_step
    )
    recipe = source if is_recipe else _recipe_of(source) if is_config else None
    flag = "--option " if is_recipe else "--set options."
    said = advice(report, pipe, recipe, flag, num_workers)
    if as_json:
        print_json({**report.to_dict(), "advice": said or None})
    else:
        print_pairs(_lines(report, pipe))
        if said:
            note(f"! {said}")
    if save_state is not None:
        with click.open_file(save_state, "w", "utf-8", atomic=True) as file:
            json.dump(loader.state_dict(), file, indent=1)
    return 130 if report.interrupted else 0


def _state(path: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))
        return found
    except ValueError:
        raise click.ClickException(f"--resume must be a state as JSON, got {path}") from None


def _recipe_of(config: str) -> str | None:
    found = re.search(
        r"^recipe:\s*['\"]?([\w-]+)", Path(config).read_text("utf-8-sig"), re.MULTILINE
    )
    return found and found[1]


def _lines(report: Report, pipe: Pipeline) -> list[tuple[str, str]]:
    counts, first, warm = report.counts, report.first, report.warm
    try:
        length = f" of {len(pipe):,} in an epoch"
    except TypeError:
        length = ""
    lines = [
        ("batches", f"{counts.steps:,}{length}{', stopped' * report.interrupted}"),
        ("rows", f"{counts.rows:,}"),
    ]
    if counts.tokens:
        targets = report.target_share
        told = "" if targets is None else f", {targets:.1%} of them targets of the loss"
        lines.append(("tokens", f"{counts.tokens:,}{told}"))
    if report.padding_share is not None:
        lines.append(("padding", f"{report.padding_share:.1%} of {counts.cells:,} cells"))
    warm_up = f", warm-up of {warm.steps:,} batches {warm.seconds:,.2f} s" if warm.steps > 1 else ""
    lines.append(("start", f"first batch after {first.seconds:,.2f} s{warm_up}"))
    batches, rows, tokens = map(report.rate, ("steps", "rows", "tokens"))
    if batches is not None:
        speed = f"{batches:,.1f} batches/s, {rows:,.0f} rows/s"
        lines.append(("then", speed + (f", {tokens:,.0f} tokens/s" if counts.tokens else "")))
    if report.wait_share is not None:
        lines.append(("waits", f"{report.wait_share:.1%} of the time after that"))
    return lines


def advice(
    report: Report, pipe: Pipeline, recipe: str | None, flag: str, num_workers: int = 0
) -> str:
    """What to change first, by the options of the recipe in use; "" where nothing stands out.

    Args:
        report: of a run.
        pipe: that was run.
        recipe: that it is of.
        flag: what stands before an option of it on the command line.
        num_workers: of the run.
    """
    options: Any = ()
    if recipe is not None:
        from trainpipes.recipe_registry import recipe_function

        options = inspect.signature(recipe_function(recipe)).parameters
    stages = {stage.name: stage for stage in pipe.stages}
    wait = report.wait_share or 0.0
    if report.target_share == 0:
        leave_out = (
            f", or leave such rows out by {flag}on_error=skip" if "on_error" in options else ""
        )
        longer = f"{flag}max_length=..." if "max_length" in options else "max_length"
        return f"no token is a target, and the loss is NaN: raise {longer}{leave_out}"
    if (report.padding_share or 0) >= MUCH_PADDING and "batch" in stages and "pack" not in stages:
        size = stages["batch"].options["batch_size"]
        buckets = f".bucket_by_length({size}) in place of .batch({size})"
        if "packed" in options:
            cure = f"{flag}packed=true puts several rows into one"
        elif "num_buckets" in options:
            cure = f"{flag}num_buckets=auto makes batches of rows of about the same length"
        elif recipe is not None:
            cure = (
                f"{recipe} has no option against it; trainpipes recipes copy {recipe} my_{recipe}.py, and "
                f"write {buckets}"
            )
        else:
            cure = f"write {buckets}, or .pack(max_length) before it"
        return f"{report.padding_share:.0%} of the cells are padding: {cure}"
    if wait >= MUCH_WAITING:
        tokenizes = bool({"tokenize", "chat_template"} & stages.keys()) and "cache" not in stages
        if tokenizes and "cache" in options:
            cure = (
                f"{flag}cache=true keeps token ids on disk; trainpipes tokenize makes them before"
            )
        elif num_workers or any(stage.runs_user_code for stage in pipe.stages):
            cure = f"try --num-workers {max(2, 2 * num_workers)}, which is Loader(num_workers=)"
        elif tokenizes:
            cure = ".cache() after tokenize keeps token ids on disk"
        else:
            cure = "trainpipes inspect says what of the files costs time"
        return f"the loop waits for data in {wait:.0%} of its time: {cure}"
    return ""
