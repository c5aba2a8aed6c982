"""``trainpipes completion``: what lets a shell complete commands, options, and names of recipes and files."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from trainpipes.cli.app import COMPLETE, NAME, Command, command_line

__all__ = ["command"]


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the script that completes commands, options, recipes and files in a shell.

    \b
    Once, for good:
      bash  echo 'eval "$(trainpipes completion bash)"' >> ~/.bashrc
      zsh   echo 'eval "$(trainpipes completion zsh)"' >> ~/.zshrc
      fish  trainpipes completion fish > ~/.config/fish/completions/trainpipes.fish

    \b
    Example, for this shell alone:
      eval "$(trainpipes completion bash)"
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(command_line, {}, NAME, COMPLETE).source())
