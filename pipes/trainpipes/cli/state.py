"""``trainpipes state``: where a checkpoint stands in the data, and whether a pipeline takes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from trainpipes.cli.app import FAILED, Command, Group
from trainpipes.cli.console import error_line, out, print_json, printable
from trainpipes.cli.pipelines import of_config, of_recipe, recipe_options
from trainpipes.cli.recipes import recipe_names
from trainpipes.cli.storage_options import STORAGE_OPTIONS

if TYPE_CHECKING:
    from trainpipes.look.checkpoint import FoundState, StateSummary

__all__ = ["command"]

#: Columns before the text of a line.
INDENT = 11


class _State(Group):
    """A group that takes a path for ``show PATH``."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        words = [word for word in arguments if not word.startswith("-")]
        asks_help = {"-h", "--help"} & {*arguments}
        if arguments and not asks_help and words[:1] not in (["show"], ["check"]):
            arguments = ["show", *arguments]
        return super().parse_args(context, arguments)

    def format_usage(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(context.command_path, "[OPTIONS] CHECKPOINT")
        formatter.write_usage(context.command_path, "check [OPTIONS] CHECKPOINT", "       ")

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("-") or (incomplete and not any(Path().glob(f"{incomplete}*"))):
            return [
                *super().shell_complete(context, incomplete),
                CompletionItem(incomplete, type="file"),
            ]
        return [CompletionItem(incomplete, type="file")]


@click.group("state", cls=_State)
def command() -> None:
    """Read a checkpoint: where it stands in the data, and which runs can load it.

    CHECKPOINT is a file of torch.save or of JSON, a folder of torch.distributed.checkpoint, or a checkpoint
    of a trainer. No code that a file names is run, and weights are not read.

    \b
    Examples:
      trainpipes state checkpoint.pt
      trainpipes state checkpoint.pt --json
      trainpipes state check checkpoint.pt --recipe sft --files chat.parquet --tokenizer bytes
    """


@command.command(
    "show", cls=Command, short_help="Say where a checkpoint stands; `show` may be left out."
)
@click.argument("checkpoint", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(checkpoint: str, as_json: bool) -> int:
    """Say where each state in CHECKPOINT stands: `show` may be left out.

    \b
    Example:
      trainpipes state show checkpoint.pt
    """
    from trainpipes.errors import StateError
    from trainpipes.look.checkpoint import read_states, summarize

    found = read_states(checkpoint)
    summaries: list[StateSummary | str] = []
    for one in found:
        try:
            summaries.append(summarize(one))
        except StateError as error:
            summaries.append(str(error))
    if as_json:
        print_json([_as_json(one, said) for one, said in zip(found, summaries, strict=True)])
    else:
        for number, (one, said) in enumerate(zip(found, summaries, strict=True)):
            if number:
                out().print()
            _print(one, said)
    problems = [said for said in summaries if isinstance(said, str)]
    if len(problems) < len(summaries):
        return 0
    alone = len(summaries) == 1
    error_line(
        f"{found[0].where}: {problems[0]}" if alone else f"{checkpoint}: no state can be read"
    )
    return FAILED


@command.command(
    "check", cls=Command, short_help="Say whether a checkpoint would load into a pipeline."
)
@click.argument("checkpoint", type=click.Path())
@click.option("--config", type=click.Path(), help="The pipeline, as YAML.")
@click.option(
    "--set", "changes", multiple=True, metavar="PATH=VALUE",
    help="Change a value of the config, such as options.batch_size=16. Repeatable.",
)  # fmt: skip
@click.option("--allow-imports", is_flag=True, help="Import the functions that the config names.")
@click.option(
    "--recipe", shell_complete=recipe_names, help="The pipeline, as a recipe, instead of --config."
)
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
@STORAGE_OPTIONS
@click.option(
    "--world-size", type=click.IntRange(1), default=1, help="Ranks of the run that would load it."
)
@click.option(
    "--allow-changes", multiple=True, metavar="NAME",
    help="What may differ from the run that saved: batch_size, pack_length, mix or schema. Repeatable.",
)  # fmt: skip
@click.option(
    "--keys",
    metavar="TEXT",
    help="Check only states whose file or keys contain this text, such as train.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(
    checkpoint: str,
    config: str | None,
    changes: tuple[str, ...],
    allow_imports: bool,
    recipe: str | None,
    files: tuple[str, ...],
    tokenizer: str | None,
    options: tuple[str, ...],
    storage_options: str | None,
    world_size: int,
    allow_changes: tuple[str, ...],
    keys: str | None,
    as_json: bool,
) -> int:
    """Say whether CHECKPOINT would load into a pipeline: exit code 0 if it would, 1 if not.

    The pipeline is that of --config, or of --recipe with its --files. Of its data, only what a state records
    is read: sizes, footers and row counts.

    \b
    Example:
      trainpipes state check checkpoint.pt --recipe sft --files chat.parquet --tokenizer bytes
    """
    if (config is None) == (recipe is None):
        raise click.UsageError("give the pipeline as either --config FILE or --recipe NAME")
    if config is None and (changes or allow_imports):
        raise click.UsageError("--set and --allow-imports are for a --config")
    if config is not None and (files or options or tokenizer is not None):
        raise click.UsageError("--files, --tokenizer and --option are for a --recipe; use --set")
    from trainpipes.look.checkpoint import fits, read_states

    found = read_states(checkpoint)
    chosen = [one for one in found if keys is None or keys in one.where]
    if not chosen:
        places = "; ".join(one.where for one in found[:8])
        raise click.ClickException(
            f"--keys {keys}: no state is at such a place; there are {places}"
        )
    given = recipe_options(options, tokenizer)
    pipeline = (
        of_recipe(str(recipe), files, given, storage_options)
        if config is None
        else of_config(config, changes, allow_imports, storage_options)
    )
    tried = fits(chosen, pipeline, world_size=world_size, allow_changes=allow_changes)
    if as_json:
        print_json(
            [
                {
                    "where": one.where,
                    "fits": not one.problem,
                    "problem": one.problem or None,
                    "share": one.share,
                }
                for one in tried
            ]
        )
    for one in tried:
        where = " and ".join(one.where if len(one.where) < 4 else (*one.where[:3], "others"))
        if one.problem:
            error_line(f"{where}: {one.problem}")
        elif not as_json:
            done = "" if one.share is None else f", {one.share:.1%} of the epoch done"
            out().print(
                printable(f"{where}: loads on {world_size} rank{'s' * (world_size > 1)}{done}"),
                soft_wrap=True,
            )
    return FAILED if any(one.problem for one in tried) else 0


def _print(found: FoundState, summary: StateSummary | str) -> None:
    from rich.text import Text

    out().print(Text(printable(found.where), "bold"), soft_wrap=True)
    for label, text in _lines(found, summary):
        style = "bold red" if label == "problem" else "dim"
        line = Text.assemble((f"  {label}".ljust(INDENT), style), printable(text))
        out().print(line, soft_wrap=True)


def _lines(found: FoundState, summary: StateSummary | str) -> Sequence[tuple[str, str]]:
    """A summary, line by line."""
    if isinstance(summary, str):
        return [("problem", summary)]
    done = f"epoch {summary.epoch}, {summary.batches:,} batches of all ranks done"
    if found.kept_by == "datasets":
        done = f"epoch {summary.epoch}, row {summary.batches:,}"
    saved = f"{found.kept_by} with {summary.workers} workers" if summary.workers else found.kept_by
    if summary.rank is not None:
        rank, world = summary.rank
        own = (
            ""
            if summary.rank_batches is None
            else f", which has had {summary.rank_batches:,} of them"
        )
        saved = f"rank {rank} of {world}{own}{f'; {saved}' if saved else ''}"
    lines = [("position", done)]
    if saved:
        lines.append(("saved by", saved))
    data = [f"{count:,} {what}{'s' * (count != 1)}" for count, what in
            ((summary.files, "file"), (summary.rows, "row")) if count is not None]  # fmt: skip
    lines += [
        ("pipeline", " > ".join(summary.stages)),
        ("data", ", ".join(data) or "not counted"),
        ("loads on", _ranks(found, summary)),
        ("format", str(summary.format)),
    ]
    return lines


def _ranks(found: FoundState, summary: StateSummary) -> str:
    """Which numbers of ranks may load a state."""
    if found.kept_by == "datasets":
        return "as many ranks and workers as have saved it"
    sizes = [str(size) for size in summary.world_sizes]
    if len(sizes) > 13:
        sizes = [*sizes[:11], "…", sizes[-1]]
    several = f"{', '.join(sizes[:-1])} or {sizes[-1]} ranks" if sizes[1:] else "1 rank"
    if summary.rank is None:
        return several
    return f"{summary.rank[1]} ranks, each with its own; {several} with the states of all merged"


def _as_json(found: FoundState, summary: StateSummary | str) -> dict[str, Any]:
    said = (
        {"problem": summary} if isinstance(summary, str) else {"problem": None, **summary.to_dict()}
    )
    return {"path": found.path, "keys": found.keys, "kept_by": found.kept_by or None, **said}
