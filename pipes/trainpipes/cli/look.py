"""Commands that show something: ``recipes`` prebuilt pipelines, ``inspect`` data files, ``state`` where a
checkpoint stands in the data, ``locate`` the rows of a step, ``find`` the steps of rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainpipes.cli import shared
from trainpipes.cli.shared import option

if TYPE_CHECKING:
    from trainpipes import Pipeline
    from trainpipes.recipe_registry import RecipeSummary


@click.group("recipes", invoke_without_command=True)
@shared.AS_JSON
@click.pass_context
def recipes_command(context: click.Context, as_json: bool) -> None:
    """List prebuilt pipelines, show one with its options, copy one.

    \b
    Examples:
      trainpipes recipes
      trainpipes recipes show sft
      trainpipes recipes copy sft my_sft.py
    """
    if context.invoked_subcommand is not None:
        return
    from trainpipes import recipes

    known = recipes()
    if as_json:
        shared.print_json([_as_json(recipe) for recipe in known])
        return
    rows = [
        (recipe.name, recipe.summary, ", ".join(recipe.needs), ", ".join(recipe.columns))
        for recipe in known
    ]
    shared.print_table([("recipe", "what it makes", "needs", "columns"), *rows])
    shared.note("trainpipes recipes show NAME tells the options of one")


@recipes_command.command("show")
@click.argument("name", shell_complete=shared.recipe_names)
def show(name: str) -> None:
    """Show what a recipe is for, where its file is, and its options.

    \b
    Example:
      trainpipes recipes show sft
    """
    from trainpipes import recipes

    file, _ = _file(name)  # first, since it says which names there are
    (recipe,) = (known for known in recipes() if known.name == name)
    shared.print_table([("recipe", f"{name}: {recipe.summary}"), ("file", file)])
    options = _as_json(recipe)["options"].items()
    rows = [
        (k, "needed" if option["needed"] else option["default"], option["text"])
        for k, option in options
    ]
    shared.out()
    shared.print_table([("option", "default", "what it is"), *rows])


@recipes_command.command("copy")
@click.argument("name", shell_complete=shared.recipe_names)
@click.argument("to", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def copy(name: str, to: Path, force: bool) -> None:
    """Copy the file of a recipe to TO, a file or a folder, as the start of one of your own.

    \b
    Example:
      trainpipes recipes copy sft my_sft.py
    """
    file, function = _file(name)
    to = to / Path(file).name if to.is_dir() else to
    if to.exists() and not force:
        raise click.ClickException(f"{to} is there already: pass --force to write over it")
    shutil.copyfile(file, to)
    way = f"beside it, write: from {to.stem} import {function}"
    if not to.stem.isidentifier():
        way = f"to import {function} from it, give it a name of letters, digits and _"
    shared.note(f"{to} is yours to change; {way}")


def _file(name: str) -> tuple[str, str]:
    import inspect

    from trainpipes.recipe_registry import recipe_function

    function = inspect.unwrap(recipe_function(name))
    return inspect.getfile(function), function.__name__


def _as_json(recipe: RecipeSummary) -> dict[str, Any]:
    options = {}
    for written in recipe.options:
        text, _, default = written.partition("=")
        name = text.lstrip("*")
        said = {"default": default or None, "needed": written in recipe.needs}
        options[name] = {**said, "text": recipe.texts.get(name, "")}
    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "columns": recipe.columns,
        "options": options,
    }


@click.command("inspect")
@click.argument("files", nargs=-1, required=True)
@option("--tokenizer", help="Count tokens with it: a path, a folder, or bytes; bytes if left out.")
@option("--column", multiple=True, help="Measure its lengths; those of several are added.")
@option("--rows", type=click.IntRange(0), default=3, help="Rows to show.")
@option("--sample", type=shared.COUNT, default=10_000, help="The most rows to look at.")
@shared.STORAGE_OPTIONS
@shared.AS_JSON
@option("--strict", is_flag=True, help="Exit with 1 if there is a warning.")
def inspect_command(
    files: tuple[str, ...], column: tuple[str, ...], as_json: bool, strict: bool, **options: Any
) -> None:
    """Show what data files hold, how long their texts are, and what to fix before training.

    FILES are paths, folders, globs or URLs of Parquet, Arrow, JSON, CSV, text, NumPy, tar or image files; or
    the folder of a Delta, Lance or Iceberg table, of which the newest version is read.
    Exit code 1: a file or a row of the sample cannot be read, or there are no rows.

    \b
    Examples:
      trainpipes inspect data
      trainpipes inspect 'data/*.parquet' --tokenizer bytes --column text
    """
    from trainpipes.look import inspect_files

    report = inspect_files(list(files), column=column or None, **options)
    if as_json:
        shared.print_json(report.to_dict())
    else:
        shared.out(str(report))
    if report.unreadable:
        more = len(report.unreadable) - 1
        others = f" and {more:,} more" if more else ""
        raise click.ClickException(f"cannot be read: {next(iter(report.unreadable))}{others}")
    if report.bad_rows:
        many = "rows" if report.bad_rows > 1 else "row"
        raise click.ClickException(f"{report.bad_rows:,} {many} of the sample cannot be used")
    if not report.readable:
        raise click.ClickException("there are no rows in these files")
    if strict and report.findings:
        raise click.ClickException(f"--strict: there are warnings ({len(report.findings):,})")


@click.command("state")
@click.argument("checkpoint", type=click.Path())
@shared.AS_JSON
def state_command(checkpoint: str, as_json: bool) -> int:
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
        shared.print_json(reported)
    for report in reported:
        if report["problem"]:
            shared.error_line(f"{report['where']}: {report['problem']}")
        elif not as_json:
            shared.out(report["where"])
            shared.print_table(_lines(report))
    return int(all(report["problem"] for report in reported))


def _lines(said: dict[str, Any]) -> list[tuple[str, str]]:
    whose = f", for {said['shards']} of {said['num_shards']} shards" if said["shards"] else ""
    position = f"epoch {said['epoch']}, {said['batches']:,} batches of all ranks done{whose}"
    pipeline = " > ".join(said["stages"])
    return [("position", position), ("pipeline", pipeline), ("format", str(said["format"]))]


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
    said = "Ranks of the run; WORLD_SIZE of the environment, else 1, if left out."
    world = option("--world-size", type=shared.COUNT, help=said)
    return source(files(shared.takes_pipeline(checkpoint(world(command)))))


@click.command("locate")
@_of_a_run
@click.argument("step", type=FROM_0, required=False)
@option("--epoch", type=FROM_0, help="That STEP counts in; 0 if left out.")
@option("--after", type=int, default=0, help="With a checkpoint, so many batches later.")
@option("--rank", type=FROM_0, help="Whose batch; RANK of the environment, else 0, if left out.")
@shared.AS_JSON
def locate_command(
    source: str,
    step: int | None,
    files: tuple[str, ...],
    pipe_options: shared.PipelineOptions,
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

    pipe = pipe_options.pipeline(source, files)
    at = step if checkpoint is None else _state(checkpoint, pipe)
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
@option(
    "--rows",
    "listed",
    type=click.File(encoding="utf-8-sig"),
    help="A file of such rows, one a line; - for stdin.",
)
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
    pipe_options: shared.PipelineOptions,
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

    pipe = pipe_options.pipeline(source, files)
    state = None if checkpoint is None else _state(checkpoint, pipe)
    epoch = list(epochs) or (0 if state is None else None)
    steps = find(pipe, names, epoch=epoch, state=state, **how)
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


def _state(checkpoint: str, pipe: Pipeline) -> Mapping[str, Any]:
    """The state of a checkpoint that is of a pipeline; of those of several ranks, a state of all."""
    from trainpipes import merge_states
    from trainpipes.look.checkpoint import read_states

    states = [*read_states(checkpoint).values()]
    states = [state for state in states if _is_of(pipe, state)] or states
    return states[0] if len(states) == 1 else merge_states([dict(state) for state in states])


def _is_of(pipe: Pipeline, state: Mapping[str, Any]) -> bool:
    from trainpipes.engine.iterating.iteration_state import iteration_of
    from trainpipes.errors import StateError
    from trainpipes.state.format import read

    try:
        iteration_of(pipe).looked_at(state)
    except StateError:
        read(state)  # raises where it is damaged: it may be of this pipeline
        return False
    return True
