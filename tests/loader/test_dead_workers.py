"""Where a worker of a ``Loader`` dies, others make its batches; one that dies again and again is named."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

import trainpipes as tp
from interpreters import python
from trainpipes.engine.processes.channel import Channel
from trainpipes.engine.processes.stage_calls import StageCall

pytestmark = pytest.mark.usefixtures("no_processes_left")

SLOW = pytest.mark.slow
STARTS = ["fork", pytest.param("spawn", marks=SLOW), "forkserver"]
TABLE = pa.table({"id": range(400)})
#: Seconds within which a death is noticed, on a busy machine too; torch looks every 5.
AT_ONCE = 4.5


@pytest.fixture
def started() -> Callable[[], list[BaseProcess]]:
    """The processes that were started since, of those that multiprocessing knows."""
    before = set(active_children())
    return lambda: [child for child in active_children() if child not in before]


def crash_once(mark: str, how: str, row: dict[str, Any]) -> dict[str, Any]:
    """Ends the process at row 200, the first time."""
    if row["id"] == 200 and not os.path.exists(mark):
        Path(mark).write_text(str(time.time()))
        faulthandler.disable()  # pytest's: it would print what looks like a failed run
        if how == "exit":
            os._exit(3)
        if how == "segfault":
            ctypes.string_at(0)
        os.kill(os.getpid(), getattr(signal, how))
    return row


def pipeline(function: Callable[..., Any], rows: int = 400) -> tp.Pipeline:
    dealt = tp.from_arrow(TABLE.slice(0, rows)).sharding_filter(4, split="stride")
    return dealt.map(function, version="1").batch(2)


def numbers(batches: Iterator[Any]) -> Iterator[list[int]]:
    return ([row["id"] for row in batch] for batch in batches)


def take(found: list[list[int]], batches: Iterator[Any], count: int | None = None) -> None:
    """Take batches, whatever happens then."""
    for batch in islice(numbers(batches), count):
        found.append(batch)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return row


WHOLE = [[n, n + 1] for n in range(0, 400, 2)]


KINDS = pytest.mark.parametrize(("start", "how", "options", "said"), [
    ("fork", "SIGKILL", {}, r"signal 9 (SIGKILL, as the system does where memory runs out) "),
    ("fork", "segfault", {"persistent_workers": True}, r"signal 11 (SIGSEGV) while"),
    ("fork", "SIGBUS", {}, r"signal 7 (SIGBUS, as the system does where /dev/shm is full"),
    ("fork", "exit", {"timeout": 60}, "has ended with exit code 3 while"),
    pytest.param("spawn", "segfault", {}, r"signal 11 (SIGSEGV) while", marks=SLOW),
    ("forkserver", "SIGKILL", {"persistent_workers": True, "timeout": 60}, "signal 9"),
])  # fmt: skip


@pytest.mark.usefixtures("failed_workers_let_go")
@KINDS
def test_others_make_the_batches_of_a_worker_that_dies(
    start: str,
    how: str,
    options: dict[str, Any],
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe = pipeline(partial(crash_once, str(tmp_path / "died"), how))
    loader = tp.Loader(pipe, num_workers=2, multiprocessing_context=start, **options)
    assert [*numbers(iter(loader))] == WHOLE
    (logged,) = [record.getMessage() for record in caplog.records]
    assert f"{said}" in logged
    assert "Loader(num_workers): worker process" in logged
    assert "was at work for row 200; its rows are done again by another one" in logged
    assert [*numbers(iter(loader))] == WHOLE


def crash(how: str, row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == 200:
        os.kill(os.getpid(), getattr(signal, how))
    return row


@pytest.mark.usefixtures("failed_workers_let_go")
@pytest.mark.parametrize("start", STARTS)
def test_a_batch_at_which_workers_die_again_and_again_is_named_and_the_run_goes_on_from_the_state(
    start: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = tp.Loader(
        pipeline(partial(crash, "SIGKILL")), num_workers=2, multiprocessing_context=start
    )
    found: list[list[int]] = []
    said = r"map\(.*worker process .*signal 9 \(SIGKILL, .*the third one at this row.*row 200\)"
    with pytest.raises(tp.WorkerError, match=said) as e:
        take(found, iter(loader))
    assert e.value.__cause__ is None
    assert "DataLoader" not in str(e.value)
    e.value.with_traceback(None)  # which holds the loader, and so its workers
    del e
    assert found == WHOLE[: len(found)]
    assert len(found) == 100
    assert len(caplog.records) < 12
    other = tp.Loader(pipeline(plain))
    other.load_state_dict(loader.state_dict())
    assert [*found, *numbers(iter(other))] == WHOLE


@pytest.mark.usefixtures("failed_workers_let_go")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("running", [0, 1])
def test_where_no_worker_can_be_started_in_place_of_a_dead_one_the_run_says_so(
    running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, forks = os.fork, iter(range(running))

    def refused() -> int:
        if next(forks, None) is None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return fork()

    monkeypatch.setattr(os, "fork", refused)
    pipe = pipeline(partial(crash, "SIGKILL"))
    loader = tp.Loader(pipe, num_workers=1, multiprocessing_context="fork")
    said = (
        r"^Loader\(num_workers\): a worker cannot be started \(OSError: .*Cannot allocate memory\)"
    )
    with pytest.raises(tp.WorkerError, match=said) as e:
        list(loader)
    assert "row 200" not in str(e.value)
    e.value.with_traceback(None)
    del e


@pytest.mark.usefixtures("failed_workers_let_go")
@pytest.mark.timeout(120)
def test_an_error_in_what_is_done_at_a_death_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageCall, "where", lambda *_: 1 // 0)
    pipe = pipeline(partial(crash, "SIGKILL"))
    with pytest.raises(ZeroDivisionError) as e:
        list(tp.Loader(pipe, num_workers=1, multiprocessing_context="fork"))
    e.value.with_traceback(None)
    del e


@pytest.mark.timeout(120)
def test_a_worker_without_memory_for_what_it_is_sent_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receive, parent, mark = Channel.receive, os.getpid(), tmp_path / "mark"

    def short(channel: Channel) -> Any:
        message = receive(channel)
        if os.getpid() != parent and not mark.exists():
            mark.touch()
            raise MemoryError
        return message

    monkeypatch.setattr(Channel, "receive", short)
    loader = tp.Loader(pipeline(plain), num_workers=1, multiprocessing_context="fork")
    assert [*numbers(iter(loader))] == WHOLE
    assert "has ended with exit code 1" in caplog.text


def crash_of_columns(how: str, columns: pa.Table) -> pa.Table:
    ids = columns["id"].to_pylist()
    if how == "sleep" and 200 in ids:
        time.sleep(60)
    elif 200 in ids or (how == "together" and len(ids) > 40):
        os._exit(3)
    return columns.append_column("double", pa.array([2 * n for n in ids]))


def columns_called(how: str, on_error: Any = "raise") -> tp.Pipeline:
    rows = tp.from_arrow(TABLE).sharding_filter(4, split="stride")
    return rows.map_batches(partial(crash_of_columns, how), version="1", on_error=on_error)


@pytest.mark.usefixtures("failed_workers_let_go")
@pytest.mark.parametrize(
    ("how", "options"),
    [("exit", {}), ("together", {}), pytest.param("sleep", {"timeout": 0.5}, marks=SLOW)],
)
def test_of_a_function_of_columns_the_row_at_which_workers_die_is_found(
    how: str, options: dict[str, Any]
) -> None:
    pipe = columns_called(how)
    way = r"after 0.5 s \(timeout\)" if options else "exit code 3"
    said = rf"map_batches\(.*{way} .*the (second|third) one at this row.*\(at row 200\)"
    with pytest.raises(tp.WorkerError, match=said) as e:
        list(tp.Loader(pipe.batch(2), num_workers=2, **options))
    e.value.with_traceback(None)
    del e


@pytest.mark.parametrize("how", ["exit", "together"])
def test_of_a_function_of_columns_a_row_at_which_workers_die_is_left_out(how: str) -> None:
    pipe = columns_called(how, "skip")
    loader = tp.Loader(pipe.batch(2), num_workers=2)
    rows = [row for batch in loader for row in batch]
    assert sorted(row["id"] for row in rows) == [n for n in range(400) if n != 200]
    assert all(row["double"] == 2 * row["id"] for row in rows)


def test_a_function_of_columns_whose_worker_is_killed_gets_the_same_rows_again(
    tmp_path: Path,
) -> None:
    """Not halves of them: what it makes might depend on which rows come together."""

    def noting(columns: pa.Table) -> pa.Table:
        name = f"{columns['id'][0]}-{len(columns)}"
        try:
            (tmp_path / "first").touch(exist_ok=False)
        except FileExistsError:
            (tmp_path / f"{name}-done").touch()
            return columns
        (tmp_path / f"{name}-died").touch()
        os._exit(3)

    rows = tp.from_arrow(TABLE).map_batches(noting, version="1").batch(2)
    assert [*numbers(iter(tp.Loader(rows, num_workers=2)))] == WHOLE
    (died,) = tmp_path.glob("*-died")
    assert died.with_name(died.name.replace("died", "done")).exists()


def uneven(row: dict[str, Any]) -> bool:
    return row["id"] % 7 > 1


CHAINS: dict[str, Callable[[], tp.Pipeline]] = {
    "counted": lambda: tp.from_arrow(TABLE).sharding_filter(4).shuffle(50, seed=1).batch(3),
    "not counted": lambda: (
        tp.from_arrow(TABLE).sharding_filter(6).shuffle(50).filter(uneven, version="1").batch(3)
    ),
    "rolling": lambda: (
        tp.from_arrow(TABLE).sharding_filter(4).shuffle(50).repeat()
        .filter(uneven, version="1").batch(3)
    ),
    "large": lambda: pipeline(large, 80),
    "every row": lambda: tp.from_arrow(TABLE).sharding_filter(4).shuffle(64),
}  # fmt: skip


def seen(item: Any) -> Any:
    return [row["id"] for row in item] if isinstance(item, list) else item["id"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("name", CHAINS)
def test_workers_are_killed_at_drawn_batches(name: str, world: int, started: Any) -> None:
    """Of a rank, by one and by two, at the first batch and at the last one, and states go on meanwhile."""

    def rank(**options: Any) -> tp.Loader:
        pipe = CHAINS[name]()
        if world > 1:
            pipe = pipe.repeat() if name == "not counted" else pipe
            pipe = pipe.distributed(rank=1, world_size=world)
        return tp.Loader(pipe, **options)

    expected = [seen(item) for item in islice(rank(), 200)]
    draw = random.Random(name)
    kills = {1, len(expected) - 2, *draw.sample(range(len(expected)), 4)}
    loader = rank(num_workers=3)
    found = []
    for number, item in enumerate(islice(loader, len(expected))):
        found.append(seen(item))
        if number in kills:
            alive = started()
            for process in draw.sample(alive, min(len(alive), draw.choice([1, 2]))):
                process.kill()
        if number == len(expected) // 2:
            state = loader.state_dict()
    assert found == expected
    again = rank()
    again.load_state_dict(state)
    rest = expected[len(expected) // 2 + 1 :]
    assert [seen(item) for item in islice(again, len(rest))] == rest


def large(row: dict[str, Any]) -> dict[str, Any]:
    """Megabytes that go through the pipe, and a tensor that travels by itself."""
    tensor = torch.full((1 << 20,), row["id"] % 9, dtype=torch.uint8)
    return {"id": row["id"], "text": "x" * (1 << 22), "tensor": tensor}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("moment", [None, *(pytest.param(n / 40, marks=SLOW) for n in range(20))])
def test_a_worker_killed_while_it_sends_megabytes_hangs_nobody(
    start: str, moment: float | None, started: Any
) -> None:
    """Where its pipe is full, or at any moment."""
    rows = 48 if moment is None else 400
    loader = tp.Loader(pipeline(large, rows), num_workers=2, multiprocessing_context=start)
    batches = iter(loader)
    found: list[list[int]] = []
    take(found, batches, 1)
    killed: list[float] = []

    def kill() -> None:
        started()[-1].kill()
        killed.append(time.monotonic())

    if moment is None:
        time.sleep(0.3)  # the pipe is full
        kill()
    else:
        threading.Timer(moment, kill).start()
    take(found, batches)
    assert found == WHOLE[: rows // 2]
    assert killed


def test_the_death_of_a_worker_interrupts_nothing_else(started: Any) -> None:
    loader = tp.Loader(pipeline(plain), num_workers=2)
    batches = iter(loader)
    next(batches)
    for worker in started():
        worker.kill()
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:  # a step that a signal's handler would break off
        time.sleep(0.01)
    assert [[0, 1], *numbers(batches)] == WHOLE


def test_persistent_workers_that_died_between_two_epochs_are_replaced(started: Any) -> None:
    loader = tp.Loader(pipeline(plain), num_workers=2, persistent_workers=True)
    assert list(numbers(iter(loader))) == WHOLE
    first = set(started())
    assert len(first) == 2
    assert list(numbers(iter(loader))) == WHOLE
    assert set(started()) == first
    killed = first.pop()
    killed.kill()
    killed.join()
    assert list(numbers(iter(loader))) == WHOLE
    assert len(first & set(started())) == 1
    assert len(started()) == 2
    del loader
    gc.collect()


def test_workers_stay_when_the_thread_that_started_them_ends() -> None:
    given: list[Any] = []
    loader = tp.Loader(pipeline(plain), num_workers=2)

    def begin() -> None:
        given.append(iter(loader))
        given.append(next(given[0]))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert [[row["id"] for row in given[1]], *numbers(given[0])] == WHOLE


def test_a_row_that_takes_too_long_twice_is_named() -> None:
    def sleepy(row: dict[str, Any]) -> dict[str, Any]:
        time.sleep(30 if row["id"] == 100 else 0)
        return row

    with pytest.raises(tp.WorkerError, match=r"after 1 s \(timeout\).*the second one.*row 100\)"):
        list(tp.Loader(pipeline(sleepy), num_workers=2, timeout=1))


TO_A_GROUP = """
import os, signal, sys
import trainpipes as tp
from loader.test_dead_workers import WHOLE, numbers, pipeline, plain

if __name__ == "__main__":
    seen = []
    signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    rows = tp.from_dataset(list(range(400)))
    start = sys.argv[1]
    for found in (
        iter(rows.map(abs, num_workers=2, method="process", start_method=start).batch(2)),
        numbers(tp.Loader(pipeline(plain), num_workers=2, multiprocessing_context=start)),
    ):
        first = [next(found) for _ in range(8)]  # all workers have started
        os.killpg(0, signal.SIGTERM)
        assert [*first, *found] == WHOLE and seen
        seen.clear()
"""


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=SLOW)])
def test_a_signal_to_the_group_of_a_trainer_is_not_for_its_workers(
    start: str, tmp_path: Path
) -> None:
    path = tmp_path / "trains.py"
    path.write_text(TO_A_GROUP)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [*python(), str(path), start], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr


def late(row: dict[str, Any]) -> dict[str, Any]:
    """A tensor that travels by itself, late where ``id`` is even."""
    time.sleep(0.0 if row["id"] % 2 else 0.25)
    return {"id": row["id"], "tensor": torch.full((1 << 21,), row["id"], dtype=torch.uint8)}


@pytest.mark.parametrize("start", STARTS)
def test_a_worker_that_is_through_stays_until_its_large_tensors_have_come(start: str) -> None:
    rows = tp.from_dataset([{"id": n} for n in range(6)]).sharding_filter(2, split="stride")
    pipe = rows.map(late, version="1").batch(1)
    batches = tp.Loader(pipe, num_workers=2, multiprocessing_context=start)
    found = [row for batch in batches for row in batch]
    assert [row["id"] for row in found] == list(range(6))
    assert all((row["tensor"] == row["id"]).all() for row in found)


ENDS_OPEN = """
import json, sys
import trainpipes as tp

loader = tp.Loader(tp.from_dataset(range(1000)).map(str).batch(2), num_workers=2, {options})
batches = iter(loader)
next(batches)
{kept}
"""


@pytest.mark.parametrize("options", ["", "persistent_workers=True"])
@pytest.mark.parametrize(
    "kept", ["", "cycle = [batches]; cycle.append(cycle)", "sys.modules['json'].kept = batches"]
)
def test_a_script_that_ends_with_an_open_iterator_says_nothing(kept: str, options: str) -> None:
    code = ENDS_OPEN.format(kept=kept, options=options)
    done = subprocess.run(
        [*python(), "-c", code], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# Workers that die while others wait for them


def die_at_the_claim(_: int = 0) -> None:
    """End this process while it holds the lock of those that share a pipeline's count of passes."""
    from trainpipes.engine.iterating.epoch_counter import EpochCounter

    def die(_: EpochCounter) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    EpochCounter._claim = die  # type: ignore[assignment,method-assign]


@pytest.mark.usefixtures("failed_workers_let_go")
@pytest.mark.parametrize(
    "start", ["fork", *(pytest.param(s, marks=SLOW) for s in ("spawn", "forkserver"))]
)
def test_a_worker_killed_as_it_claims_a_pass_keeps_no_other_process_from_theirs(start: str) -> None:
    """It was a semaphore, which a killed process leaves taken: all others waited for ever."""
    pipe = tp.from_arrow(TABLE).sharding_filter(4)
    killed: Any = torch.utils.data.DataLoader(
        pipe, batch_size=None, num_workers=1,
        multiprocessing_context=start, worker_init_fn=die_at_the_claim,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        next(iter(killed))
    for workers in (0, 1):
        options: dict[str, Any] = {"multiprocessing_context": start} if workers else {}
        others: Any = torch.utils.data.DataLoader(
            pipe, batch_size=None, num_workers=workers, **options
        )
        assert sorted(row["id"] for row in others) == list(range(400))


def dies_within(n: int) -> int:
    """Ends its process for 11, at row 3 of a pipeline that it reads."""

    def inner(row: int) -> int:
        return os._exit(3) if (n, row) == (11, 3) else row

    assert list(tp.from_dataset(range(6)).map(inner)) == [*range(6)]
    return n


@pytest.mark.parametrize("by", ["loader", "map"])
def test_rows_of_a_pipeline_that_a_function_reads_are_not_taken_for_its_own(by: str) -> None:
    how = {"num_workers": 2, "method": "process"} if by == "map" else {}
    pipe = tp.from_dataset(range(20)).map(dies_within, version="1", on_error="skip", **how)
    loader = tp.Loader(pipe.batch(2), num_workers=0 if how else 2)
    assert [row for batch in loader for row in batch] == [n for n in range(20) if n != 11]
