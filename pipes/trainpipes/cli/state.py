"""``trainpipes state``: where a checkpoint stands in the data, and whether a pipeline takes it."""

from __future__ import annotations

from typing import Any

import click

from trainpipes.cli.console import error_line, out, print_json, print_table
from trainpipes.cli.options import AS_JSON, COUNT, option
from trainpipes.cli.pipelines import PipelineOptions, recipe_or_config, takes_pipeline


@click.command("state")
@click.argument("checkpoint", type=click.Path())
@recipe_or_config
@option("--files", multiple=True, help="Files for the recipe: path, folder, glob or URL.")
@takes_pipeline
@option("--world-size", type=COUNT, default=1, help="Ranks of the run that is to load it.")
@option("--allow-changes", multiple=True, help="What may differ, such as batch_size.")
@AS_JSON
def command(
    checkpoint: str,
    recipe: str | None,
    config: str | None,
    files: tuple[str, ...],
    given: PipelineOptions,
    world_size: int,
    allow_changes: tuple[str, ...],
    as_json: bool,
) -> int:
    """Say where a checkpoint stands, and whether a pipeline loads it.

    CHECKPOINT is a file of torch.save or of JSON, a folder of torch.distributed.checkpoint, or a folder with
    such files. No code that a file names is run, and weights are not read. With --recipe or --config the
    exit code is 0 if that pipeline loads a state of it, and 1 if not.

    \b
    Examples:
      trainpipes state checkpoint.pt
      trainpipes state checkpoint.pt --recipe sft --files chat.parquet --tokenizer bytes
    """
    from trainpipes.errors import TrainpipesError
    from trainpipes.look.checkpoint import fits, read_states, summarize

    found = read_states(checkpoint)
    pipe = None
    if recipe is not None or config is not None or files or given != PipelineOptions():
        pipe = given.named(recipe, config, files)
    elif world_size > 1 or allow_changes:
        raise click.UsageError("--world-size and --allow-changes need --recipe or --config")
    of_ranks = [one for one in found if any(str(key).startswith("shard-") for key in one.state)]
    groups = [[one] for one in found if one not in of_ranks]
    groups += [of_ranks] * bool(of_ranks) if pipe else [[one] for one in of_ranks]
    reported: list[dict[str, Any]] = []
    for group in groups:
        where = " and ".join(one.where for one in group[:3]) + " and others" * (len(group) > 3)
        try:
            if pipe is None:
                said = vars(summarize(group[0]))
            else:
                said = {
                    "share": fits(group, pipe, world_size=world_size, allow_changes=allow_changes)
                }
            reported.append({"where": where, "problem": None, **said})
        except TrainpipesError as error:
            reported.append({"where": where, "problem": str(error)})
    if as_json:
        print_json(reported)
    for one in reported:
        if one["problem"]:
            error_line(f"{one['where']}: {one['problem']}")
        elif not as_json:
            out(one["where"])
            print_table(_lines(one, world_size))
    return int(all(one["problem"] for one in reported))


def _lines(said: dict[str, Any], world_size: int) -> list[tuple[str, str]]:
    if "share" in said:
        done = "" if said["share"] is None else f", {said['share']:.1%} of the epoch done"
        return [("loads on", f"{world_size} rank{'s' * (world_size > 1)}{done}")]
    whose = f", for {said['shards']} of {said['num_shards']} shards" if said["shards"] else ""
    position = f"epoch {said['epoch']}, {said['batches']:,} batches of all ranks done{whose}"
    pipeline = " > ".join(said["stages"])
    return [("position", position), ("pipeline", pipeline), ("format", str(said["format"]))]
