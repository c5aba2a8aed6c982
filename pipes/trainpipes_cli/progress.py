"""How far a long job is, in a line at the bottom of the terminal: rows a second, the share, what is left.

Only where stderr is a terminal; the line is gone when the job ends. The library knows nothing of it: it calls
a function with the job, what is done and what there is to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from trainpipes_cli.console import err

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Task
    from rich.text import Text

__all__ = ["Report", "progress"]

#: What the library calls: the job, as in "reading"; how much of it is done; and how much there is in all,
#: None where nobody knows. Another job takes the place of the one before.
Report: TypeAlias = Callable[[str, int, int | None], None]


@contextmanager
def progress(unit: str = "rows", console: Console | None = None) -> Iterator[Report | None]:
    """Show how far jobs are while the block runs. Gives None where stderr is no terminal, so that the library
    can do without the calls.

    Args:
        unit: what is counted, in the plural.
        console: where to show it; stderr if left out.
    """
    # Not at the top: help answers without the library, which imports torch.
    from trainpipes.progress_displays import may_show, take_screen

    console = console or err()
    if not console.is_terminal or not may_show():
        yield None
        return
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return _rate(task, unit)

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        Rate(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
    )
    current: str | None = None

    def report(job: str, done: int, total: int | None) -> None:
        nonlocal current
        take_screen(bar)
        if job != current:
            for task in bar.task_ids:
                bar.remove_task(task)
            # What is done already was done by a run before: it does not count for the rate.
            bar.add_task(job, completed=done, total=total, first=done)
            current = job
        bar.update(bar.task_ids[0], completed=done, total=total)

    try:
        with bar:
            yield report
    finally:
        take_screen(bar, give_back=True)


def _rate(task: Task, unit: str) -> Text:
    """The share, the count and the rows a second."""
    from rich.text import Text

    share = "" if not task.total else f"{min(task.completed / task.total, 1):.0%}  "
    of = "" if task.total is None else f" of {task.total:,.0f}"
    seconds = task.elapsed or 0
    rate = (task.completed - task.fields.get("first", 0)) / seconds if seconds > 0.5 else 0
    per_second = f"  {rate:,.0f}/s" if rate else ""
    return Text(f"{share}{task.completed:,.0f}{of} {unit}{per_second}")
