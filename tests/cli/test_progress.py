"""The progress line of the command."""

from __future__ import annotations

import io

from rich.console import Console

from trainpipes_cli.progress import progress


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)


def test_on_a_terminal_it_says_the_job_the_share_and_the_count() -> None:
    console = terminal()
    with progress("rows", console) as report:
        assert report is not None
        report("reading", 0, 2000)
        report("reading", 500, 2000)
        report("writing", 1000, None)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "writing" in shown
    assert "1,000 rows" in shown


def test_a_job_takes_the_place_of_the_one_before() -> None:
    console = terminal()
    with progress("files", console) as report:
        assert report is not None
        report("reading", 1, 4)
        console.print("a note")
        report("writing [x]", 3, 4)
    last = console.file.getvalue().split("a note")[1]  # type: ignore[attr-defined]
    assert "writing [x]" in last
    assert "75%  3 of 4 files" in last


def test_nothing_is_shown_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO())
    with progress(console=console) as report:
        assert report is None
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
