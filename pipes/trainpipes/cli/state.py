"""``trainpipes state``: where a checkpoint stands in the data, and whether a pipeline takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli.console import error_line, out, print_json, print_pairs, printable
from trainpipes.cli.options import AS_JSON
from trainpipes.cli.pipelines import PipelineOptions, one_pipeline, takes_pipeline
from trainpipes.cli.recipes import recipe_names

if TYPE_CHECKING:
    from trainpipes.look.checkpoint import Fit, FoundState, StateSummary

__all__ = ["command"]


@click.command("state")
@click.argument("checkpoint", type=click.Path())
@click.option("--config", type=click.Path(), help="A pipeline, as YAML, that is to load it.")
@click.option("--recipe", shell_complete=recipe_names, help="A recipe that is to load it.")
@click.option("--files", multiple=True, help="Files for the recipe. Repeatable.")
@takes_pipeline
@click.option(
    "--world-size", type=click.IntRange(1), default=1, show_default=True, help="Ranks of the run."
)
@click.option(
    "--allow-changes", multiple=True, metavar="NAME",
    help="A change that is wanted, such as batch_size. Repeatable.",
)  # fmt: skip
@click.option("--keys", help="Only states whose place in the checkpoint has this text.")
@AS_JSON
def command(
    checkpoint: str,
    config: str | None,
    recipe: str | None,
    files: tuple[str, ...],
    given: PipelineOptions,
    world_size: int,
    allow_changes: tuple[str, ...],
    keys: str | None,
    as_json: bool,
) -> int:
    """Say where a checkpoint stands in the data; with a pipeline, whether that can load it.

    CHECKPOINT is a file of torch.save or of JSON, a folder of torch.distributed.checkpoint, or a checkpoint
    of a trainer. No code that a file names is run, and weights are not read. With --recipe or --config, the
    exit code is 0 if the state loads, and 1 if not; of the data, only what a state records is read.

    \b
    Examples:
      trainpipes state checkpoint.pt
      trainpipes state checkpoint.pt --recipe sft --files chat.parquet --tokenizer bytes
    """
    wanted = recipe is not None or config is not None
    if not wanted and (files or given != PipelineOptions(None, (), (), False, None)):
        raise click.UsageError("name the pipeline of these options by --recipe or --config")
    from trainpipes.look.checkpoint import fits, read_states

    found = read_states(checkpoint)
    chosen = [one for one in found if keys is None or keys in one.where]
    if not chosen:
        places = "; ".join(one.where for one in found[:8])
        raise click.ClickException(
            f"--keys {keys}: no state is at such a place; there are {places}"
        )
    if not wanted:
        return _show(chosen, checkpoint, as_json)
    pipe = one_pipeline(recipe, config, given, files)
    tried = fits(chosen, pipe, world_size=world_size, allow_changes=allow_changes)
    return _say_fits(tried, world_size, as_json)


def _show(found: Sequence[FoundState], checkpoint: str, as_json: bool) -> int:
    from trainpipes.errors import StateError
    from trainpipes.look.checkpoint import summarize

    told: list[StateSummary | str] = []
    for one in found:
        try:
            told.append(summarize(one))
        except StateError as error:
            told.append(str(error))
    if as_json:
        print_json([_as_json(one, said) for one, said in zip(found, told, strict=True)])
    else:
        for one, said in zip(found, told, strict=True):
            out().print(printable(one.where), style="bold", soft_wrap=True)
            print_pairs([("problem", said)] if isinstance(said, str) else _lines(one, said))
    problems = [said for said in told if isinstance(said, str)]
    if len(problems) < len(told):
        return 0
    alone = len(told) == 1
    error_line(
        f"{found[0].where}: {problems[0]}" if alone else f"{checkpoint}: no state can be read"
    )
    return 1


def _say_fits(tried: Sequence[Fit], world_size: int, as_json: bool) -> int:
    if as_json:
        print_json(
            [
                {"where": one.where, "fits": not one.problem, "problem": one.problem or None,
                 "share": one.share}
                for one in tried
            ]
        )  # fmt: skip
    for one in tried:
        where = " and ".join(one.where if len(one.where) < 4 else (*one.where[:3], "others"))
        if one.problem:
            error_line(f"{where}: {one.problem}")
        elif not as_json:
            done = "" if one.share is None else f", {one.share:.1%} of the epoch done"
            ranks = f"{world_size} rank{'s' * (world_size > 1)}"
            out().print(printable(f"{where}: loads on {ranks}{done}"), soft_wrap=True)
    return 1 if any(one.problem for one in tried) else 0


def _lines(found: FoundState, summary: StateSummary) -> list[tuple[str, str]]:
    is_datasets = found.kept_by == "datasets"
    done = (
        f"row {summary.batches:,}"
        if is_datasets
        else f"{summary.batches:,} batches of all ranks done"
    )
    lines = [("position", f"epoch {summary.epoch}, {done}")]
    saved = f"{found.kept_by} with {summary.workers} workers" if summary.workers else found.kept_by
    if summary.rank is not None:
        own = summary.rank_batches
        had = "" if own is None else f", which has had {own:,} of them"
        saved = "; ".join(filter(None, ["rank {} of {}".format(*summary.rank) + had, saved]))
    if saved:
        lines.append(("saved by", saved))
    data = [f"{count:,} {what}{'s' * (count != 1)}" for count, what in
            ((summary.files, "file"), (summary.rows, "row")) if count is not None]  # fmt: skip
    return [
        *lines,
        ("pipeline", " > ".join(summary.stages)),
        ("data", ", ".join(data) or "not counted"),
        (
            "loads on",
            "as many ranks and workers as have saved it" if is_datasets else _ranks(summary),
        ),
        ("format", str(summary.format)),
    ]


def _ranks(summary: StateSummary) -> str:
    """Which numbers of ranks may load a state."""
    sizes = [str(size) for size in summary.world_sizes]
    if len(sizes) > 13:
        sizes = [*sizes[:11], "…", sizes[-1]]
    several = f"{', '.join(sizes[:-1])} or {sizes[-1]} ranks" if sizes[1:] else "1 rank"
    if summary.rank is None:
        return several
    return f"{summary.rank[1]} ranks, each with its own; {several} with the states of all merged"


def _as_json(found: FoundState, said: StateSummary | str) -> dict[str, Any]:
    told = {"problem": said} if isinstance(said, str) else {"problem": None, **said.to_dict()}
    return {"path": found.path, "keys": found.keys, "kept_by": found.kept_by or None, **told}
