"""``trainpipes run``: a pipeline alone, without a trainer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainpipes._internal.text import cut
from trainpipes.cli.console import note, print_json, print_table
from trainpipes.cli.options import AS_JSON, COUNT, option
from trainpipes.cli.pipelines import PipelineOptions, recipe_names, takes_pipeline

if TYPE_CHECKING:
    from trainpipes import Pipeline
    from trainpipes.cli.measure import Report

#: Shares from which something is worth a line: of padding, and of waiting.
MUCH_PADDING, MUCH_WAITING = 0.2, 0.1
FROM_0 = click.IntRange(0)
FILE = click.Path(dir_okay=False)


@click.command("run")
@click.argument("source", metavar="RECIPE|CONFIG|FILE", shell_complete=recipe_names)
@click.argument("more_files", metavar="[FILES]...", nargs=-1)
@option("--files", multiple=True, help="Files for the recipe: path, folder, glob or URL.")
@takes_pipeline
@option("--steps", type=COUNT, help="Batches to run; 100, or an epoch if shorter, if left out.")
@option("--seconds", type=click.FloatRange(0), help="Or how long to run after the first batch.")
@option("--epochs", type=COUNT, help="Or whole epochs to run.")
@option("--threads", type=FROM_0, help="Threads that work ahead; one a core if left out.")
@option("--num-workers", type=FROM_0, default=0, help="Worker processes.")
@option("--simulate-step", type=click.FloatRange(0), default=0, help="Seconds of a training step.")
@option("--show", type=FROM_0, default=0, help="Print the first batches.")
@option("--resume", type=FILE, help="Start from this state, a JSON file.")
@option("--save-state", type=FILE, help="Write the last state to this JSON file.")
@AS_JSON
def command(
    source: str,
    more_files: tuple[str, ...],
    files: tuple[str, ...],
    given: PipelineOptions,
    threads: int | None,
    num_workers: int,
    simulate_step: float,
    show: int,
    resume: str | None,
    save_state: str | None,
    as_json: bool,
    **length: Any,
) -> int:
    """Run a pipeline without training: speed, padding, batches.

    RECIPE is the name of a prebuilt pipeline, which takes --files. CONFIG is a file that ends in .yaml or
    .yml. Any other FILES are data, read in batches of 64 rows; a folder is written data/. With
    --simulate-step it sleeps that long after each batch, and tells how much of the time it waited for data.

    \b
    Examples:
      trainpipes run sft --files chat.parquet --tokenizer bytes --show 1
      trainpipes run train.yaml --set options.batch_size=16 --simulate-step 0.005
      trainpipes run data/ --seconds 1
    """
    if sum(one is not None for one in length.values()) > 1:
        raise click.UsageError("give one of --steps, --seconds and --epochs")
    if show and as_json:
        raise click.UsageError("give --show or --json, not both")
    if save_state is not None and not Path(save_state).absolute().parent.is_dir():
        raise click.UsageError(f"--save-state {save_state}: there is no such folder; make it first")
    all_files = (*files, *more_files)
    if re.fullmatch(r"[^\W\d][\w-]*", source):  # whatever files there are
        pipe = given.recipe(source, all_files)
    elif source.endswith((".yaml", ".yml")):
        pipe = given.config(source, all_files)
    else:
        pipe = given.files([source, *all_files])
    if resume is not None:
        pipe.load_state_dict(_state(resume))
    if length["epochs"] and pipe._iteration.plan.chain.endless:
        raise click.ClickException(
            "--epochs must be left out where a pipeline has no end; give --steps"
        )
    from trainpipes import Loader
    from trainpipes.cli.measure import measure

    loader = Loader(pipe, threads=threads, num_workers=num_workers)
    if show:
        print(pipe.show(show), end="\n\n")  # noqa: T201
    report = measure(loader, step_seconds=simulate_step, **length)
    told = advice(report, pipe, num_workers)
    if as_json:
        print_json({**report.to_dict(), "advice": told or None})
    else:
        print_table(_lines(report, pipe))
        if told:
            note(f"! {told}")
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


def _lines(report: Report, pipe: Pipeline) -> list[tuple[str, str]]:
    counts, first, warm = report.counts, report.first, report.warm
    try:
        of = f"; an epoch has {len(pipe):,}"
    except TypeError:
        of = ""
    stopped = ", stopped" if report.interrupted else ""
    lines = [("batches", f"{counts.steps:,}{of}{stopped}"), ("rows", f"{counts.rows:,}")]
    tokens, batches, share = report.rate("tokens"), report.rate("steps"), report.target_share
    if counts.tokens:
        targets = "" if share is None else f", {share:.1%} of them targets of the loss"
        lines.append(("tokens", f"{counts.tokens:,}{targets}"))
    if report.padding_share is not None:
        lines.append(("padding", f"{report.padding_share:.1%} of {counts.cells:,} cells"))
    warm_up = f", {warm.steps:,} for warm-up after {warm.seconds:,.2f} s" if warm.steps > 1 else ""
    lines.append(("start", f"first batch after {first.seconds:,.2f} s{warm_up}"))
    if batches is not None:
        ids = "" if tokens is None else f", {tokens:,.0f} tokens/s"
        lines.append(("then", f"{batches:,.1f} batches/s, {report.rate('rows'):,.0f} rows/s{ids}"))
    if report.wait_share is not None:
        lines.append(("waits", f"{report.wait_share:.1%} of the time after that"))
    return lines


def advice(report: Report, pipe: Pipeline, num_workers: int = 0) -> str:
    """What to change first; "" where nothing stands out."""
    stages = {stage.name for stage in pipe.stages}
    padding, waits = report.padding_share or 0, report.wait_share or 0
    if report.target_share == 0:
        return (
            "no token is a target, and the loss is NaN: raise max_length, or leave out such rows by "
            "on_error=skip of the recipe"
        )
    if padding >= MUCH_PADDING and "batch" in stages and "pack" not in stages:
        return (
            f"{padding:.0%} of the cells are padding: write .bucket_by_length() in place of .batch(), or "
            ".pack() before it; of recipes that have it, num_buckets=auto or packed=true"
        )
    if waits >= MUCH_WAITING:
        cure = "trainpipes inspect says what of the files costs time"
        own = [str(stage) for stage in pipe.stages if stage.runs_user_code]
        if num_workers or own:
            cure = f"try --num-workers {max(2, 2 * num_workers)}, which is Loader(num_workers=)"
            if own:
                what = cut(" and ".join(own), 200)
                cure = f"{what} calls Python; {cure}, or map(..., num_workers=4) there"
        elif "tokenize" in stages and "cache" not in stages:
            cure = (
                "keep token ids on disk, by .cache() after .tokenize(), or cache=true of the recipe"
            )
        return f"the loop waits for data in {waits:.0%} of its time: {cure}"
    return ""
