"""``trainpipes state``: where a checkpoint stands in the data, and whether a pipeline takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli.console import error_line, out, print_json, print_table
from trainpipes.cli.options import AS_JSON, COUNT, option
from trainpipes.cli.pipelines import PipelineOptions, recipe_or_config, takes_pipeline

if TYPE_CHECKING:
    from trainpipes.look.checkpoint import FoundState, StateSummary


@click.command("state")
@click.argument("checkpoint", type=click.Path())
@recipe_or_config
@option("--files", multiple=True, help="Files for the recipe: path, folder, glob or URL.")
@takes_pipeline
@option("--world-size", type=COUNT, default=1, help="Ranks of the run that is to load it.")
@option("--allow-changes", multiple=True, help="What may differ, such as batch_size.")
@option("--keys", default="", help="Only states whose place in the checkpoint has this text.")
@AS_JSON
def command(
    checkpoint: str,
    recipe: str | None,
    config: str | None,
    files: tuple[str, ...],
    given: PipelineOptions,
    world_size: int,
    allow_changes: tuple[str, ...],
    keys: str,
    as_json: bool,
) -> int:
    """Say where a checkpoint stands, and whether a pipeline loads it.

    CHECKPOINT is a file of torch.save or of JSON, a folder of torch.distributed.checkpoint, or a checkpoint
    of a trainer. No code that a file names is run, and weights are not read. With --recipe or --config the
    exit code is 0 if that pipeline loads it, and 1 if not.

    \b
    Examples:
      trainpipes state checkpoint.pt
      trainpipes state checkpoint.pt --recipe sft --files chat.parquet --tokenizer bytes
    """
    from trainpipes.look.checkpoint import fits, read_states

    found = read_states(checkpoint)
    chosen = [one for one in found if keys in one.where]
    if not chosen:
        there = "; ".join(one.where for one in found[:8])
        raise click.ClickException(f"--keys {keys}: no state is at such a place; there are {there}")
    if recipe is None and config is None and not files and given == PipelineOptions():
        if world_size > 1 or allow_changes:
            raise click.UsageError("--world-size and --allow-changes need --recipe or --config")
        return _show(chosen, as_json)
    pipe = given.named(recipe, config, files)
    tried = fits(chosen, pipe, world_size=world_size, allow_changes=allow_changes)
    if as_json:
        print_json([{"fits": not one.problem, **vars(one)} for one in tried])
    for one in tried:
        where = " and ".join(one.where if len(one.where) < 4 else (*one.where[:3], "others"))
        if one.problem:
            error_line(f"{where}: {one.problem}")
        elif not as_json:
            done = "" if one.share is None else f", {one.share:.1%} of the epoch done"
            out(f"{where}: loads on {world_size} rank{'s' * (world_size > 1)}{done}")
    return int(any(one.problem for one in tried))


def _show(found: Sequence[FoundState], as_json: bool) -> int:
    from trainpipes.errors import StateError
    from trainpipes.look.checkpoint import summarize

    reported: list[dict[str, Any]] = []
    for one in found:
        try:
            summary = summarize(one)
            said, pairs = {"problem": None, **vars(summary)}, _lines(summary)
        except StateError as error:
            said, pairs = {"problem": str(error)}, [("problem", str(error))]
        reported.append({"path": one.path, "keys": one.keys, **said})
        if not as_json:
            out(one.where)
            print_table(pairs)
    if as_json:
        print_json(reported)
    if any(one["problem"] is None for one in reported):
        return 0
    error_line(f"{found[0].where}: {reported[0]['problem']}")
    return 1


def _lines(summary: StateSummary) -> list[tuple[str, str]]:
    done = f"epoch {summary.epoch}, {summary.batches:,} batches of all ranks done"
    sizes = f"{', '.join(map(str, summary.world_sizes))} ranks"
    if summary.rank is not None:
        done += ", as rank {} of {} saved it".format(*summary.rank)
        sizes += ", with the states of all ranks"
    stages = " > ".join(summary.stages)
    return [
        ("position", done), ("pipeline", stages), ("loads on", sizes), ("format", str(summary.format))
    ]  # fmt: skip
