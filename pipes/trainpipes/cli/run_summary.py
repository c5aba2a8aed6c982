"""What ``trainpipes run`` prints at the end, and while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from trainpipes.cli.console import err

if TYPE_CHECKING:
    from trainpipes.look.trial.report import TrialReport
    from trainpipes.look.trial.trial import Progress

__all__ = ["run_line", "summary"]

#: Seconds between two changes of the line.
EVERY = 0.1
#: Seconds of loading that are worth a line.
LOADING = 0.05


@contextmanager
def run_line(
    most: int | None, epoch_steps: int | None = None, console: Any = None
) -> Iterator[Callable[[Any, Progress], None] | None]:
    """A line at the bottom of the terminal that says where the run is, while the block runs. Gives None where
    stderr is no terminal.

    Args:
        most: steps in all, if they are known.
        epoch_steps: of an epoch, if they are known.
        console: where to show it; stderr if left out.
    """
    console = console or err()
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        BarColumn(bar_width=16),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
    )
    task = bar.add_task("waiting for the first batch", total=most)
    later = 0.0

    def see(_: Any, progress: Progress) -> None:
        nonlocal later
        now = perf_counter()
        if now >= later:
            later = now + EVERY
            told = _line(progress, most, epoch_steps, now)
            bar.update(task, completed=progress.counts.items, description=told)

    with bar:
        yield see


def _line(progress: Progress, most: int | None, epoch_steps: int | None, now: float) -> str:
    counts = progress.counts
    seconds = now - progress.started - (progress.first_seconds or 0.0)
    of = "" if most is None else f" of {most:,}"
    parts = [f"step {counts.items:,}{of}"]
    if epoch_steps:
        done = (counts.items - 1) % epoch_steps + 1
        parts.append(f"epoch {done / epoch_steps:.0%}")
    if seconds > 0.2:
        parts.append(f"{counts.rows / seconds:,.0f} rows/s")
        if counts.tokens:
            parts.append(f"{counts.tokens / seconds:,.0f} tokens/s")
    if counts.padding_share is not None:
        parts.append(f"padding {counts.padding_share:.0%}")
    parts.append(_bytes(progress.memory.now))
    if progress.first_seconds is not None:
        parts.append(f"first batch {_seconds(progress.first_seconds)}")
    return "  ".join(parts)


def summary(report: TrialReport) -> str:
    """A report as text."""
    lines = [*_amounts(report), "", *_speed(report), *_stages(report)]
    if report.advice:
        lines += ["", *(f"! {advice}" for advice in report.advice)]
    return "\n".join(lines)


def _amounts(report: TrialReport) -> list[str]:
    ended = ", stopped" if report.ended == "interrupted" else ""
    epochs = f" in {report.epochs:,} epochs" if report.epochs > 1 else ""
    of = ""
    if report.epoch_steps and report.epochs == 1:
        of = f" of {report.epoch_steps:,} in an epoch ({report.steps / report.epoch_steps:.1%})"
    rows = [("steps", f"{report.steps:,}{of or epochs}{ended}"), ("rows", f"{report.rows:,}")]
    if report.world_size > 1:
        rows.append(("rank", f"{report.rank} of {report.world_size}"))
    if report.cells:
        share = report.learnt_share
        targets = "" if share is None else f", {share:.1%} of them targets"
        rows.append(("tokens", f"{report.tokens:,}{targets}"))
        padding = report.cells - report.tokens
        rows.append(("padding", f"{padding / report.cells:.1%} of {report.cells:,} cells"))
    rows.append(
        ("memory", f"{_bytes(report.memory_peak)} at most, {_bytes(report.memory_start)} before")
    )
    return _lines(rows)


def _speed(report: TrialReport) -> list[str]:
    rows = [("first batch", f"after {_seconds(report.first_seconds)}")]
    rate = report.rows_per_second
    if rate is not None:
        tokens = report.tokens_per_second
        rows.append(
            (
                "then",
                f"{report.steps_per_second:,.1f} steps/s, {rate:,.0f} rows/s"
                + ("" if tokens is None else f", {tokens:,.0f} tokens/s"),
            )
        )
    if report.wait_share is not None:
        rows.append(
            (
                "waits",
                f"{report.wait_share:.1%} of the time after the first batch, "
                f"{_seconds(report.wait_seconds)} beside steps of {_seconds(report.step_seconds)}, "
                f"{_seconds(report.longest_wait_seconds)} at most",
            )
        )
    return _lines(rows)


def _stages(report: TrialReport) -> list[str]:
    """Where the time goes, of stages that take any."""
    total = sum(report.stages.values())
    if not total:
        return []
    told = {name: s for name, s in report.stages.items() if s >= 0.001 * total}
    width = max(len("loading"), *map(len, told))
    lines = [
        f"  {name:{width}}  {_seconds(seconds):>8}  {seconds / total:6.1%}  "
        f"{'█' * round(20 * seconds / total)}".rstrip()
        for name, seconds in told.items()
    ]
    who = "workers" if report.num_workers else "threads"
    if report.loading_seconds >= LOADING:
        said = f"{_seconds(report.loading_seconds):>8}"
        lines.append(f"  {'loading':{width}}  {said}  in first calls: imports, tokenizers")
    return ["", f"seconds of {who} in each stage, together {_seconds(total)}", *lines]


def _lines(rows: list[tuple[str, str]]) -> list[str]:
    return [f"{name:12} {text}" for name, text in rows]


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:,.1f} ms"
    return f"{seconds:,.1f} s"


def _bytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB" if count < 2**30 else f"{count / 2**30:,.2f} GiB"
