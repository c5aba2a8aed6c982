"""A job that takes longer than a second shows a progress bar; nothing else does."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from interpreters import python
from trainpipes._internal import progress
from trainpipes._internal.progress import Progress, counted
from trainpipes.look import inspect_files
from trainpipes.prepare import repack, tokenize
from trainpipes.testing import shuffle_quality


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job counts as long, and shows each step."""
    for name in ("PATIENCE", "EVERY_DRAWN", "EVERY_LOGGED"):
        monkeypatch.setattr(progress, name, 0.0)


@pytest.fixture
def lines(at_once: None, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the log has got."""
    caplog.set_level(logging.INFO, "trainpipes")
    return lambda: caplog.messages


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("none")


@pytest.fixture
def terminal(at_once: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Makes stderr a terminal: in the test, since pytest sets it before."""

    def make() -> Terminal:
        found = Terminal()
        monkeypatch.setattr(sys, "stderr", found)
        return found

    return make


@pytest.fixture
def files(tmp_path: Path) -> str:
    for n in range(20):
        table = pa.table({"text": [f"text {n} {k}" for k in range(50)], "label": [n % 2] * 50})
        pq.write_table(table, tmp_path / f"{n:02d}.parquet")
    return str(tmp_path)


def rows(files: str) -> tp.Pipeline:
    return tp.list_files(files).read_parquet(index=False)


JOBS = {
    "listing": lambda f, out: tp.list_files(f).explain(),
    "reading Parquet footers": lambda f, out: rows(f).explain(),
    "measuring the shuffle": lambda f, out: shuffle_quality(rows(f).shuffle(100)),
    "measuring batches": lambda f, out: (
        rows(f).tokenize("bytes", "text").batch(8).pad_collate().stats()
    ),
    "looking at the mix": lambda f, out: tp.mix({"a": rows(f), "b": rows(f)}).stats(),
    "counting 'label'": lambda f, out: rows(f).stats(0, labels="label"),
    "making the batches before it": lambda f, out: (
        rows(f).filter(lambda row: True).batch(8).state_at(20)
    ),
    "writing p": lambda f, out: rows(f).write_parquet(out / "p"),
    "writing m": lambda f, out: rows(f).select("label").write_memmap(out / "m"),
    "tokenizing t": lambda f, out: tokenize(rows(f).tokenize("bytes", "text"), out / "t"),
    "writing r": lambda f, out: repack(rows(f).shuffle(100), out / "r"),
    "reading some rows of files": lambda f, out: inspect_files(f),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_long_job_says_how_far_it_is(
    lines: Callable[[], list[str]], files: str, tmp_path_factory: pytest.TempPathFactory, job: str
) -> None:
    JOBS[job](files, tmp_path_factory.mktemp("out"))
    assert any(line.startswith(f"{job}: ") for line in lines())


def test_text_is_indexed_by_its_bytes_however_few_files_it_is_in(
    lines: Callable[[], list[str]], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for n in range(60_000):
            file.write(json.dumps({"text": f"some text, which is number {n}", "n": n}) + "\n")
    tp.list_files(str(path)).read_json(index=False).explain()
    indexing = [line for line in lines() if line.startswith("indexing JSON: ")]
    assert len(indexing) > 2, "more often than once a file"
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    assert indexing[-1] == f"indexing JSON: 100%, {size} of {size}"


def test_what_is_read_again_after_a_resume_is_shown(lines: Callable[[], list[str]]) -> None:
    pipe = tp.from_iterable(lambda: iter(range(1000)), version="1").shuffle(50).batch(10)
    batches = iter(pipe)
    for _ in range(60):
        next(batches)
    resumed = tp.Loader(pipe)
    resumed.load_state_dict(pipe.state_dict())
    assert next(iter(resumed)) == next(batches)
    assert any(line.startswith("reading again up to the saved place: ") for line in lines())


def test_before_a_second_nothing_is_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainpipes")
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress("reading", 20, "files") as shown:
        for _ in range(9):
            now[0] += 0.11
            shown.advance()
        assert not caplog.messages
        now[0] += 0.11
        shown.advance()
    assert caplog.messages == ["reading: 50%, 10 of 20 files"]


@pytest.mark.parametrize("total", [None, 2000])
def test_a_terminal_shows_a_bar_and_is_left_as_it_was(
    terminal: Callable[[], Terminal], total: int | None
) -> None:
    screen = terminal()
    with Progress("reading [a]", total, "files") as shown:
        shown.advance(1000)
    assert "reading [a]" in screen.getvalue()
    assert "1000" in screen.getvalue()
    assert "\n" not in screen.getvalue(), "it stays in its line"
    assert screen.getvalue().endswith("\r")


def test_the_bar_of_a_job_that_fails_is_removed(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    with pytest.raises(ZeroDivisionError), Progress("reading", 10, "rows") as shown:  # noqa: PT012
        shown.advance()
        raise ZeroDivisionError
    for _ in counted(range(5), "counting", 5, "rows"):
        break
    assert screen.getvalue().endswith("\r")


def test_an_environment_variable_turns_the_bars_off() -> None:
    script = (
        "import sys; sys.stderr.isatty = lambda: True\n"
        "for name in [one for one in sys.modules if one.startswith('tqdm')]: del sys.modules[name]\n"
        "from trainpipes._internal import progress; progress.PATIENCE = 0.0\n"
        "with progress.Progress('reading', 10, 'rows') as shown: shown.advance(5)\n"
    )
    for value, shows in (("1", False), ("", True)):
        command, own = [*python(), "-c", script], {**os.environ, "TQDM_DISABLE": value}
        done = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
        assert ("reading" in done.stderr) is shows


def test_without_tqdm_the_log_gets_a_line(
    terminal: Callable[[], Terminal],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "trainpipes")
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    screen = terminal()
    with Progress("reading", None, "bytes") as shown:
        shown.advance(5000)
    assert caplog.messages == ["reading: 5.0 kB"]
    assert screen.getvalue() == ""


def may_show(answer: Any) -> None:
    answer.put(progress._may_show())


@pytest.mark.parametrize(("daemon", "rank", "shows"), [
    (False, None, False),
    (True, "0", False),  # of a rank that torchrun started
    (False, "0", True),  # a rank that mp.spawn started
    (False, "1", False),
])  # fmt: skip
def test_worker_processes_are_silent(
    monkeypatch: pytest.MonkeyPatch, daemon: bool, rank: str | None, shows: bool
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    worker = context.Process(target=may_show, args=(answer,), daemon=daemon)
    worker.start()
    assert answer.get(timeout=60) is shows
    worker.join()


def test_threads_that_advance_do_not_wait_for_what_is_drawn(
    at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing, go_on = threading.Event(), threading.Event()

    def show(text: str) -> None:
        drawing.set()
        assert go_on.wait(30)

    monkeypatch.setattr(progress.log, "info", show)
    with Progress("reading", 100, "rows") as shown:
        slow = threading.Thread(target=shown.advance)
        slow.start()
        assert drawing.wait(30)
        for _ in range(99):
            shown.advance()
        go_on.set()
        slow.join()


def test_a_loader_says_how_long_its_loops_have_waited() -> None:
    loader = tp.Loader(tp.from_tensors(range(40)).batch(4))
    assert loader.wait_seconds == 0
    assert len(list(loader)) == 10
    first = loader.wait_seconds
    assert first > 0
    list(loader)
    assert loader.wait_seconds > first
