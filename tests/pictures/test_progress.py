"""``loader.progress()`` shows how far a loop is, and changes nothing of what the loop gets."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
import warnings
from io import StringIO
from itertools import islice

import pyarrow as pa
import pytest
import torch

import trainpipes as tp
from trainpipes import progress_displays, training_progress
from trainpipes.progress_displays import Shown, display_for

TABLE = pa.table({"input_ids": [[1] * (1 + n % 5) for n in range(40)]})


def pipeline():
    return tp.from_arrow(TABLE).shuffle(10).batch(4).pad_collate()


class Terminal(StringIO):
    def isatty(self):
        return True

    def fileno(self):
        raise OSError("none")


class Recorded:
    """A display that keeps what it was given."""

    every = 0.0

    def __init__(self):
        self.given, self.closed = [], 0

    def show(self, shown):
        self.given.append(shown)

    def close(self, shown):
        self.show(shown)
        self.closed += 1


@pytest.fixture
def display(monkeypatch):
    found = Recorded()
    monkeypatch.setattr(training_progress, "display_for", lambda: found)
    return found


def ids(batches):
    return [batch["input_ids"].tolist() for batch in batches]


def test_batches_and_states_are_the_loaders_own(display):
    plain, shown = tp.Loader(pipeline()), tp.Loader(pipeline())
    for _ in range(2):
        expected = iter(plain)
        for batch in shown.progress():
            assert torch.equal(batch["input_ids"], next(expected)["input_ids"])
            assert shown.state_dict() == plain.state_dict()
        with pytest.raises(StopIteration):
            next(expected)
    assert display.closed == 2


def test_the_epoch_and_its_share_are_shown(display):
    loader = tp.Loader(pipeline())
    for _ in range(2):
        for _ in loader.progress():
            pass
    firsts = [s for s in display.given if s.done == 1]
    assert [(s.job, s.total, s.share) for s in firsts] == [
        ("epoch 0", 10, 0.1),
        ("epoch 1", 10, 0.1),
    ]
    assert display.given[-1].line.startswith("epoch 1: 100%, 10 of 10 batches, ")


def test_after_a_resume_it_goes_on_where_the_run_was(display):
    loader = tp.Loader(pipeline())
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    resumed = tp.Loader(pipeline())
    resumed.load_state_dict(loader.state_dict())
    assert ids(resumed.progress()) == ids(batches)
    assert [shown.done for shown in display.given] == [5, 6, 7, 8, 9, 10, 10]


def test_a_loop_that_is_left_closes_what_is_shown(display):
    loader = tp.Loader(tp.from_arrow(TABLE).batch(4))
    for _ in loader.progress():
        break
    assert display.closed == 1
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for _ in loader.progress():
            raise ZeroDivisionError
    assert display.closed == 2


def test_epochs_without_an_end_are_counted_one_by_one(display):
    loader = tp.Loader(tp.from_arrow(TABLE).shuffle(10).repeat().batch(4).pad_collate())
    for number, _ in enumerate(loader.progress()):
        if number == 23:
            break
    said = [(s.job, s.done, s.total) for s in display.given]
    assert said[9:11] == [("epoch 0", 10, 10), ("epoch 1", 1, 10)]
    assert said[-1] == ("epoch 2", 4, 10)


def test_a_total_can_be_given(display):
    for number, _ in enumerate(tp.Loader(pipeline().repeat()).progress(total=40)):
        if number == 19:
            break
    assert display.given[-1].share == 0.5
    with pytest.raises(tp.ConfigError, match=r"progress\(total\)"):
        tp.Loader(pipeline()).progress(total=0)


def test_where_rows_must_be_read_to_say_it_there_is_no_total(display):
    for pipe, total in (
        (tp.from_arrow(TABLE).pack(16).batch(2), None),
        (tp.from_arrow(TABLE).sample(0.5).batch(2), 10),
        (tp.from_iterable(lambda: range(9)).batch(2), None),
    ):
        for _ in tp.Loader(pipe).progress():
            pass
        assert display.given[-1].total == total


@pytest.mark.parametrize(
    ("pipe", "rows"),
    [
        (pipeline(), 40),
        (tp.from_arrow(TABLE), 40),
        (tp.from_arrow(TABLE).batch(4), 40),
        (tp.from_arrow(TABLE).batch(4).collate(format="arrow"), 40),
        (tp.from_tensors(torch.zeros(40, 2), torch.zeros(40)).batch(4).collate(), 40),
        (tp.from_tensors(x=torch.zeros(40, 2)).batch(4).collate(), 40),
        (tp.from_dataset(list(range(40))).batch(4).collate(tuple), 40),
    ],
)
def test_rows_of_any_batch_are_counted(display, monkeypatch, pipe, rows):
    clock = iter(range(10_000))
    monkeypatch.setattr(training_progress, "perf_counter", lambda: next(clock))
    progress = tp.Loader(pipe).progress()
    for _ in progress:
        pass
    assert progress._meter._rows == rows


def test_rates_are_of_rows_tokens_and_time(monkeypatch, display):
    now = [0.0]
    monkeypatch.setattr(training_progress, "perf_counter", lambda: now[0])
    loader = tp.Loader(pipeline())
    progress = loader.progress()
    inner = progress._batches

    class Slow:
        def __next__(self):
            now[0] += 1.0  # a second to wait
            return next(inner)

    progress._batches = Slow()
    for _ in progress:
        now[0] += 3.0  # a step
    tokens = sum(map(len, TABLE["input_ids"].to_pylist()))
    assert display.given[-1].text == f"1.0 rows/s, {tokens / 41:.1f} tokens/s, 24% waiting for data"


def test_other_ranks_show_nothing(monkeypatch):
    monkeypatch.setattr(training_progress, "display_for", lambda: pytest.fail("shown"))
    sharded = tp.from_arrow(TABLE).sharding_filter(2).batch(4)
    second = tp.Loader(sharded.distributed(rank=1, world_size=2))
    assert len(list(second.progress())) == 5
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    same_data = tp.Loader(sharded.distributed(rank=0, world_size=1))
    assert len(list(same_data.progress())) == 10


def test_without_a_terminal_only_the_log_is_told(monkeypatch, caplog, capsys):
    monkeypatch.setattr(progress_displays._Log, "every", 0.0)
    with caplog.at_level(logging.INFO, "trainpipes"):
        for _ in tp.Loader(pipeline()).progress():
            pass
    assert capsys.readouterr() == ("", "")
    assert caplog.messages[-1].startswith("epoch 0: 100%, 10 of 10 batches, ")


@pytest.mark.parametrize(
    ("missing", "name"),
    [((), "_Rich"), (("rich",), "_Tqdm"), (("rich", "tqdm"), "_Line")],
)
def test_a_terminal_gets_the_best_bar_that_is_there(monkeypatch, missing, name):
    for package in ("rich", "tqdm"):
        if package not in missing:
            pytest.importorskip(package)
    real = progress_displays.find_spec
    monkeypatch.setattr(
        progress_displays, "find_spec", lambda one: None if one in missing else real(one)
    )
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    display = display_for(terminal)
    assert type(display).__name__ == name
    for done in range(1, 4):
        display.show(Shown("epoch 7", done, 4, "[9] rows/s"))
    display.close(Shown("epoch 7", 4, 4, "[9] rows/s"))
    written = terminal.getvalue()
    assert "epoch 7" in written
    assert "[9] rows/s" in written
    assert "100%" in written
    assert written.endswith("\n") or written.endswith("\x1b[?25h")  # rich shows the cursor again
    unknown = display_for(terminal)
    unknown.show(Shown("epoch 0", 3, None, ""))
    unknown.close(Shown("epoch 0", 4, None, ""))


def test_a_notebook_gets_html_that_is_written_over(monkeypatch):
    shown = []

    class Handle:
        def update(self, html):
            shown.append(("update", html))

    def display(html, display_id):
        shown.append(("display", html))
        return Handle()

    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    ipython.display = types.SimpleNamespace(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    for _ in tp.Loader(pipeline()).progress():
        pass
    assert [kind for kind, _ in shown[:2]] == ["display", "update"]
    assert 'value="1.0000"' in shown[-1][1]
    ipython.get_ipython = lambda: None  # imported, and not in a notebook
    assert type(display_for(StringIO())).__name__ == "_Log"


def test_what_is_shown_can_be_ended_and_asked():
    progress = tp.Loader(pipeline()).progress()
    next(progress)
    progress.close()
    progress.close()
    assert len(list(progress)) == 9
    assert progress.is_last()
    assert progress.state_dict()["epoch"] == 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_warning_of_a_loop_that_was_left_names_the_next_loop(monkeypatch, wrapped):
    monkeypatch.setattr("trainpipes.warn_once._warned", set())
    loader = tp.Loader(pipeline())
    loops = loader.progress if wrapped else loader.__iter__
    for _ in islice(loops(), 2):
        pass
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in loops():
            break
    (warning,) = told
    assert "left within epoch 0" in str(warning.message)
    assert warning.filename == __file__


def test_prints_of_a_loop_go_where_they_are_sent():
    code = (
        "import sys, pyarrow as pa, trainpipes as tp\n"
        "sys.stderr.isatty = lambda: True\n"
        "for batch in tp.Loader(tp.from_tensors(range(8)).batch(2)).progress(): print(batch)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert len(found.stdout.splitlines()) == 4
    assert "100%" in found.stderr


def test_it_says_what_it_is():
    progress = tp.Loader(tp.from_tensors(range(8)).batch(4)).progress()
    assert repr(progress).startswith("TrainingProgress(iterate it for the batches of a Loader")
    assert "\n" not in repr(progress)
