"""``trainpipes run``: a pipeline alone, without a trainer."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli import shared

if TYPE_CHECKING:
    from trainpipes import Pipeline

#: The share of padding from which on it is worth a line.
MUCH_PADDING = 0.2
FROM_0 = click.IntRange(0)


def _page(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """A file that can be written when the run is over."""
    folder = os.path.dirname(os.path.abspath(path or ""))
    if path is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise click.BadParameter(f"must be a file in a folder that can be written to, got {path}")
    return path


def _seconds(_: click.Context, __: click.Parameter, seconds: float) -> float:
    if not math.isfinite(seconds):
        raise click.BadParameter(f"must be a number of seconds, got {seconds}")
    return seconds


@click.command("run")
@click.argument("source", metavar="RECIPE|CONFIG|FILE", shell_complete=shared.recipe_names)
@click.argument("more_files", metavar="[FILES]...", nargs=-1)
@shared.option("--files", multiple=True, help="Files for the recipe: path, folder, glob or URL.")
@shared.takes_pipeline
@shared.option(
    "--steps", type=shared.COUNT, help="Batches to run; 100, or an epoch if shorter, if left out."
)
@shared.option("--epochs", type=shared.COUNT, help="Or whole epochs to run.")
@shared.option("--threads", type=FROM_0, help="Threads that work ahead; one a core if left out.")
@shared.option("--num-workers", type=FROM_0, default=0, help="Worker processes.")
@shared.option(
    "--simulate-step",
    type=click.FloatRange(0),
    default=0,
    callback=_seconds,
    help="Seconds of a training step.",
)
@shared.option(
    "--html",
    type=click.Path(dir_okay=False),
    callback=_page,
    help="Write what bounds the run as a page.",
)
@shared.option("--show", type=FROM_0, default=0, help="Print the first batches.")
@shared.AS_JSON
def command(
    source: str,
    more_files: tuple[str, ...],
    files: tuple[str, ...],
    pipe_options: shared.PipelineOptions,
    simulate_step: float,
    show: int,
    html: str | None,
    as_json: bool,
    **how: Any,
) -> int:
    """Run a pipeline without training: speed, padding, batches.

    RECIPE is the name of a prebuilt pipeline, which takes --files. CONFIG is a file that ends in .yaml or
    .yml. Any other FILES are data, read in batches of 64 rows; a folder is written data/. With
    --simulate-step it sleeps that long after each batch, and tells what bounds the run, as
    tp.profile does; --html also draws it.

    \b
    Examples:
      trainpipes run sft --files chat.parquet --tokenizer bytes --show 1
      trainpipes run train.yaml --set options.batch_size=16 --simulate-step 0.005
      trainpipes run data/ --steps 50
    """
    steps, epochs = how.pop("steps"), how.pop("epochs")
    if steps and epochs:
        raise click.UsageError("give one of --steps and --epochs")
    if show and as_json:
        raise click.UsageError("give --show or --json, not both")
    pipe = pipe_options.pipeline(source, (*files, *more_files))
    from trainpipes.engine.iterating.iteration_state import plan_of

    if epochs and plan_of(pipe).chain.has_no_end:
        raise click.ClickException("--epochs: the pipeline has no end; give --steps")
    from trainpipes import Loader, profile
    from trainpipes.cli.measure import measure

    loader = Loader(pipe, **how)
    if show:
        print(pipe.show(show), end="\n\n", flush=True)  # noqa: T201
    with profile(loader) if simulate_step or html else nullcontext() as watched:
        report = measure(loader, steps=steps, epochs=epochs, step_seconds=simulate_step)
    advised = advice(report, pipe)
    if as_json:
        profiled = None if watched is None else watched.to_dict()
        shared.print_json({**report, "advice": advised or None, "profile": profiled})
    else:
        more = watched.lines() if watched is not None else []
        shared.print_table(
            [*_lines(report, pipe), *(line for line in more if line[0] != "padding")]
        )
        if advised:
            shared.note(f"! {advised}")
    if html and watched is not None:
        watched.save(html)
    return 130 if report["interrupted"] else 0


def _lines(report: Mapping[str, Any], pipe: Pipeline) -> Iterator[tuple[str, str]]:
    of, stopped = "", ", stopped" if report["interrupted"] else ""
    with suppress(TypeError):
        of = f"; an epoch has {len(pipe):,}"
    yield "batches", f"{report['steps']:,}{of}{stopped}"
    if report["rows"] is not None:
        yield "rows", f"{report['rows']:,}"
    share = report["target_share"]
    if report["tokens"]:
        targets = "" if share is None else f", {share:.1%} of them targets of the loss"
        yield "tokens", f"{report['tokens']:,}{targets}"
    if report["cells"]:
        yield "padding", f"{report['padding_share']:.1%} of {report['cells']:,} cells"
    warm_up = f", {report['warm_up_steps']:,} for warm-up after {report['warm_up_seconds']:,.2f} s"
    start = f"first batch after {report['first_batch_seconds']:,.2f} s"
    yield "start", start + warm_up * (report["warm_up_steps"] > 1)
    if report["steps_per_second"] is not None:
        rates = [f"{report['steps_per_second']:,.1f} batches/s"]
        for name in ("rows", "tokens"):
            if (rate := report[f"{name}_per_second"]) is not None:
                rates.append(f"{rate:,.0f} {name}/s")
        yield "then", ", ".join(rates)
    from trainpipes.engine.iterating.iteration_state import plan_of

    for tally in plan_of(pipe).tallies:
        if counted := str(tally):
            yield "counted", f"{tally.stage.name}: {counted}"


def advice(report: Mapping[str, Any], pipe: Pipeline) -> str:
    """The first change to make to batches; "" where nothing stands out."""
    stages = {stage.name for stage in pipe.stages}
    padding = report["padding_share"] or 0
    if report["target_share"] == 0:
        return (
            "no token is a target, and the loss is NaN: raise max_length, or leave out such rows by "
            "on_error=skip of the recipe"
        )
    if padding >= MUCH_PADDING and "batch" in stages and "pack" not in stages:
        from trainpipes.stages.tokenizing import lengths_by

        column, pairs = lengths_by(pipe.stages)
        write = f".bucket_by_length({column}) in place of .batch()"
        options = "num_buckets=auto"
        if not pairs:
            write, options = f"{write}, or .pack() before it", f"{options} or packed=true"
        said = f"{padding:.0%} of the cells are padding: write {write}"
        return f"{said}; of recipes that have it, {options}"
    return ""
