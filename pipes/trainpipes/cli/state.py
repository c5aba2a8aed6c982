"""``trainpipes state``: where a checkpoint stands in the data."""

from __future__ import annotations

from typing import Any

import click

from trainpipes.cli.console import error_line, out, print_json, print_table
from trainpipes.cli.options import AS_JSON


@click.command("state")
@click.argument("checkpoint", type=click.Path())
@AS_JSON
def command(checkpoint: str, as_json: bool) -> int:
    """Say where a checkpoint stands.

    CHECKPOINT is a file of torch.save or of JSON, a folder of torch.distributed.checkpoint, or a folder with
    such files. No code that a file names is run, and weights are not read.

    \b
    Example:
      trainpipes state checkpoint.pt
    """
    from trainpipes.errors import TrainpipesError
    from trainpipes.look.checkpoint import read_states, summarize

    reported: list[dict[str, Any]] = []
    for where, state in read_states(checkpoint).items():
        try:
            reported.append({"where": where, "problem": None, **summarize(state)})
        except TrainpipesError as error:
            reported.append({"where": where, "problem": str(error)})
    if as_json:
        print_json(reported)
    for report in reported:
        if report["problem"]:
            error_line(f"{report['where']}: {report['problem']}")
        elif not as_json:
            out(report["where"])
            print_table(_lines(report))
    return int(all(report["problem"] for report in reported))


def _lines(said: dict[str, Any]) -> list[tuple[str, str]]:
    whose = f", for {said['shards']} of {said['num_shards']} shards" if said["shards"] else ""
    position = f"epoch {said['epoch']}, {said['batches']:,} batches of all ranks done{whose}"
    pipeline = " > ".join(said["stages"])
    return [("position", position), ("pipeline", pipeline), ("format", str(said["format"]))]
