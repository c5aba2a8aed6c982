"""A job that takes longer than a second says how far it is; nobody says anything else."""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
import types
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from trainpipes import progress, progress_displays
from trainpipes.inspection import inspect_files
from trainpipes.prepare import repack, tokenize
from trainpipes.progress import Progress, counted
from trainpipes.shuffle_quality import shuffle_quality


class Recorded:
    """A display that keeps what it was given."""

    every = 0.0

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.ends: list[str] = []

    def show(self, shown: Any) -> None:
        self.given.append(shown)

    def close(self, shown: Any) -> None:
        self.ends.append("closed")

    def clear(self) -> None:
        self.ends.append("cleared")

    @property
    def jobs(self) -> set[str]:
        return {shown.job for shown in self.given}


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """What is shown, from the first moment on."""
    found = Recorded()
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "display_for", lambda stream: found)
    monkeypatch.setattr(progress_displays, "_holder", None)
    return found


@pytest.fixture
def files(tmp_path: Path) -> str:
    for n in range(20):
        table = pa.table({"text": [f"text {n} {k}" for k in range(50)], "label": [n % 2] * 50})
        pq.write_table(table, tmp_path / f"{n:02d}.parquet")
    return str(tmp_path)


def rows(files: str) -> tp.Pipeline:
    return tp.list_files(files).read_parquet(index=False)


# What takes long


JOBS = {
    "listing": lambda f, out: tp.list_files(f).explain(),
    "reading Parquet footers": lambda f, out: rows(f).explain(),
    "measuring the shuffle": lambda f, out: shuffle_quality(rows(f).shuffle(100)),
    "measuring padding": lambda f, out: (
        rows(f).tokenize("bytes", "text").batch(8).pad_collate().padding()
    ),
    "looking at packed rows": lambda f, out: rows(f).tokenize("bytes", "text").pack(64).packing(),
    "looking at the mix": lambda f, out: tp.mix({"a": rows(f), "b": rows(f)}).mixture(rows=100),
    "counting 'label'": lambda f, out: rows(f).value_counts("label"),
    "making the batches before it": lambda f, out: (
        rows(f).filter(lambda row: True).batch(8).state_at(20)
    ),
    "writing p": lambda f, out: rows(f).write_parquet(out / "p"),
    "writing a memory map": lambda f, out: rows(f).select("label").write_memmap(out / "m"),
    "tokenizing t": lambda f, out: tokenize(
        rows(f).tokenize("bytes", "text"), out / "t", processes=1
    ),
    "writing r": lambda f, out: repack(rows(f).shuffle(100), out / "r"),
    "reading some rows of files": lambda f, out: inspect_files(f),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_long_job_is_shown_and_then_taken_away(
    display: Recorded, files: str, tmp_path_factory: pytest.TempPathFactory, job: str
) -> None:
    JOBS[job](files, tmp_path_factory.mktemp("out"))
    assert job in display.jobs
    assert set(display.ends) == {"cleared"}
    for shown in display.given:
        assert 0 <= shown.done <= (shown.total or sys.maxsize)


def test_text_is_indexed_by_its_bytes_however_few_files_it_is_in(
    display: Recorded, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for n in range(60_000):
            file.write(json.dumps({"text": f"some text, which is number {n}", "n": n}) + "\n")
    tp.list_files(str(path)).read_json(index=False).explain()
    indexing = [s for s in display.given if s.job == "indexing JSON"]
    assert len(indexing) > 2, "more often than once a file"
    assert indexing[-1].done == indexing[-1].total == path.stat().st_size
    assert "MB of " in indexing[-1].line
    assert "MB/s, " in indexing[-1].line


def test_what_is_read_again_after_a_resume_is_shown(display: Recorded) -> None:
    pipe = tp.from_iterable(lambda: iter(range(1000)), version="1").shuffle(50).batch(10)
    batches = iter(pipe)
    for _ in range(60):
        next(batches)
    resumed = tp.Loader(pipe)
    resumed.load_state_dict(pipe.state_dict())
    assert next(iter(resumed)) == next(batches)
    assert "reading again up to the saved place" in display.jobs


# Who says so, and when


def test_before_a_second_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    found = Recorded()
    monkeypatch.setattr(progress, "display_for", lambda stream: found)
    monkeypatch.setattr(progress_displays, "_holder", None)
    with Progress("reading", 10, "files") as shown:
        for _ in range(9):
            now[0] += 0.11
            shown.advance()
        assert not found.given
        now[0] += 0.11
        shown.advance()
    assert [(s.done, s.text) for s in found.given] == [(10, "9/s, 0 s left")]


@pytest.mark.parametrize("value", ["0", "false", "OFF"])
def test_the_environment_turns_it_off(
    display: Recorded, files: str, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TRAINPIPES_PROGRESS", value)
    rows(files).explain()
    loader = tp.Loader(rows(files).batch(100))
    assert len(list(loader.progress())) == 10
    assert not display.given


def test_other_ranks_are_silent(
    display: Recorded, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    rows(files).sharding_filter(2).explain()
    assert not display.given


def may_show(answer: Any) -> None:
    answer.put(progress_displays.may_show())


@pytest.mark.parametrize(
    ("method", "daemon", "rank", "shows"),
    [
        ("fork", False, None, False),
        ("fork", True, "0", False),  # of a rank that torchrun started
        ("fork", False, "0", True),  # a rank that mp.spawn started
        ("fork", False, "1", False),
        ("spawn", True, None, False),
    ],
)
def test_worker_processes_are_silent(
    monkeypatch: pytest.MonkeyPatch, method: str, daemon: bool, rank: str | None, shows: bool
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    context: Any = multiprocessing.get_context(method)
    answer = context.Queue()
    worker = context.Process(target=may_show, args=(answer,), daemon=daemon)
    worker.start()
    assert answer.get(timeout=60) is shows
    worker.join()


def test_of_two_jobs_at_a_time_the_first_is_shown(display: Recorded) -> None:
    with Progress("first", 10, "rows") as first:
        first.advance()
        with Progress("second", 10, "rows") as second:
            second.advance()
            first.advance()
        first.advance()
    with Progress("third", 10, "rows") as third:
        third.advance()
    assert [shown.job for shown in display.given] == ["first", "first", "first", "third"]
    assert display.ends == ["cleared", "cleared"]


def test_within_a_training_loop_only_the_loop_is_shown(
    display: Recorded, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Recorded()
    monkeypatch.setattr("trainpipes.training_progress.display_for", lambda: loop)
    loader = tp.Loader(tp.from_tensors(range(40)).batch(4))
    for _ in loader.progress():
        rows(files).explain()  # an evaluation, say
    assert len(loop.given) == 10
    assert loop.ends == ["closed"]
    assert not display.given
    rows(files).explain()
    assert display.given


def test_a_job_that_fails_is_taken_away(display: Recorded) -> None:
    with pytest.raises(ZeroDivisionError), Progress("reading", 10, "rows") as shown:  # noqa: PT012
        shown.advance()
        raise ZeroDivisionError
    assert display.ends == ["cleared"]
    for _ in counted(range(5), "reading", 5, "rows"):
        break
    assert progress_displays.take_screen(display)


def test_threads_that_advance_do_not_wait_for_what_is_drawn(display: Recorded) -> None:
    drawing, go_on = threading.Event(), threading.Event()

    def show(shown: Any) -> None:
        drawing.set()
        assert go_on.wait(30)

    display.show = show  # type: ignore[method-assign]
    with Progress("reading", 100, "rows") as shown:
        slow = threading.Thread(target=shown.advance)
        slow.start()
        assert drawing.wait(30)
        for _ in range(99):
            shown.advance()
        go_on.set()
        slow.join()
        assert shown._done == 100


# Where it is shown


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("none")


@pytest.mark.parametrize("missing", [(), ("rich",), ("rich", "tqdm")])
@pytest.mark.parametrize("total", [None, 2000])
def test_a_terminal_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], total: int | None
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress_displays, "_holder", None)
    monkeypatch.setenv("TERM", "xterm")
    real = progress_displays.find_spec
    monkeypatch.setattr(
        progress_displays, "find_spec", lambda name: None if name in missing else real(name)
    )
    screen = Terminal()
    with Progress("reading [a]", total, "files", screen) as shown:
        shown.advance(1000)
    written = screen.getvalue()
    assert "reading [a]" in written
    assert written.count("\n") <= 1, "it stays in its line"
    assert written.endswith(("\r", "\x1b[2K", "\x1b[?25h"))


def test_a_notebook_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    handle = types.SimpleNamespace(update=shown.append)
    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    ipython.display = types.SimpleNamespace(
        HTML=str, display=lambda html, display_id: (shown.append(html), handle)[1]
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress_displays, "_holder", None)
    with Progress("reading <b>", 10, "files") as job:
        job.advance(5)
    assert 'value="0.5000"' in shown[0]
    assert "reading &lt;b&gt;: 50%, 5 of 10 files" in shown[0]
    assert shown[-1] == ""
