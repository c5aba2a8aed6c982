"""``trainpipes recipes``: the prebuilt pipelines that are installed."""

from __future__ import annotations

import click

from trainpipes_cli.app import Group
from trainpipes_cli.console import out, print_json

__all__ = ["command"]


@click.group("recipes", cls=Group, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List the prebuilt pipelines that are installed.

    \b
    Examples:
      trainpipes recipes
      trainpipes recipes show sft
    """
    if context.invoked_subcommand is not None:
        return
    from trainpipes import recipes

    found = recipes()
    if as_json:
        print_json([{"name": r.name, "summary": r.summary, "options": r.options} for r in found])
    else:
        out().print(repr(found), soft_wrap=True)
