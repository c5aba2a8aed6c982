"""Commands on the rows of a run: ``locate`` those of a step, ``find`` the steps of some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import click

from trainpipes.cli import shared
from trainpipes.cli.shared import option

FROM_0 = click.IntRange(0)


def _of_a_run(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command a pipeline, and where its run stands."""
    source = click.argument(
        "source", metavar="RECIPE|CONFIG|FILE", shell_complete=shared.recipe_names
    )
    files = option(
        "--files", multiple=True, help="Files for the recipe: path, folder, glob or URL."
    )
    checkpoint = option("--checkpoint", type=click.Path(), help="Where the run stands.")
    world = option("--world-size", type=shared.COUNT, help="Ranks of the run; 1 if left out.")
    return source(files(shared.takes_pipeline(checkpoint(world(command)))))


@click.command("locate")
@_of_a_run
@click.argument("step", type=FROM_0, required=False)
@option("--epoch", type=FROM_0, help="That STEP counts in; 0 if left out.")
@option("--after", type=int, default=0, help="With a checkpoint, so many batches later.")
@option("--rank", type=FROM_0, help="Whose batch; rank 0 if left out.")
@shared.AS_JSON
def locate_command(
    source: str,
    step: int | None,
    files: tuple[str, ...],
    given: shared.PipelineOptions,
    checkpoint: str | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Show which rows were in a batch, or are to come in it, as tp.locate does.

    RECIPE, CONFIG and FILE are as in trainpipes run. STEP is the batch's number in the epoch, from 0; in
    place of it, --checkpoint gives the batch after that.

    \b
    Examples:
      trainpipes locate train.yaml 7 --epoch 1
      trainpipes locate sft --files chat.parquet --tokenizer bytes --checkpoint checkpoint.pt
    """
    if (step is None) == (checkpoint is None):
        raise click.UsageError("give one of STEP and --checkpoint")
    from trainpipes import locate

    pipe = given.pipeline(source, files)
    at = step if checkpoint is None else _state(checkpoint)
    if checkpoint is None and how["epoch"] is None:
        how["epoch"] = 0
    located = locate(pipe, at, **how)  # type: ignore[arg-type]
    if as_json:
        fields = {k: v for k, v in vars(located).items() if k not in {"batch", "places"}}
        shared.print_json({**fields, "places": [asdict(place) for place in located.places]})
    else:
        shared.out(str(located))


@click.command("find")
@_of_a_run
@option(
    "--row", "rows", multiple=True, metavar="FILE:ROW", help="A row; or FILE, for all its rows."
)
@option("--rows", "listed", type=click.File(), help="A file of such rows, one a line; - for stdin.")
@option(
    "--epoch", "epochs", multiple=True, type=FROM_0, help="The checkpoint's, or 0, if left out."
)
@option("--steps", type=shared.COUNT, help="Only the first ones of an epoch.")
@shared.AS_JSON
def find_command(
    source: str,
    rows: tuple[str, ...],
    listed: Any,
    files: tuple[str, ...],
    given: shared.PipelineOptions,
    checkpoint: str | None,
    epochs: tuple[int, ...],
    as_json: bool,
    **how: Any,
) -> int:
    """Show in which steps rows are, as tp.find does: the inverse of trainpipes locate.

    RECIPE, CONFIG and FILE are as in trainpipes run. With --checkpoint it says which steps the run has seen,
    and which are to come. Exit code 1: none of the rows is in a step.

    \b
    Examples:
      trainpipes find train.yaml --row chat.parquet:17 --row chat.parquet:3 --epoch 0 --epoch 1
      trainpipes find train.yaml --row chat.parquet --steps 5 --checkpoint checkpoint.pt
    """
    names = [*map(_row, (*rows, *(line.strip() for line in listed or () if line.strip())))]
    if not names:
        raise click.UsageError("give rows by --row or --rows")
    from trainpipes import find

    state = None if checkpoint is None else _state(checkpoint)
    epoch = list(epochs) or (0 if state is None else None)
    steps = find(given.pipeline(source, files), names, epoch=epoch, state=state, **how)
    if as_json:
        shared.print_json(steps.to_dict())
    else:
        shared.out(str(steps))
    return int(not len(steps))


def _row(text: str) -> tuple[str, int] | str | int:
    """
    >>> _row("a.parquet:17"), _row("s3://bucket/a.parquet"), _row("17")
    (('a.parquet', 17), 's3://bucket/a.parquet', 17)
    """
    path, _, number = text.rpartition(":")
    if not number.isdecimal():
        return text
    return (path, int(number)) if path else int(number)


def _state(checkpoint: str) -> Mapping[str, Any]:
    """The state of a checkpoint; of those of several ranks, one of all."""
    from trainpipes import merge_states
    from trainpipes.look.checkpoint import read_states

    states = read_states(checkpoint)
    if len(states) == 1:
        return next(iter(states.values()))
    return merge_states([dict(state) for state in states.values()])
