"""``map(num_workers=)``: the same rows in the same order, made by threads or processes; nothing hangs, and
nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

import map_functions as fn
import trainpipes as tp
from interpreters import pid_of, python
from resuming import check_resume
from trainpipes._internal import pool
from trainpipes.engine.processes import worker_pool
from trainpipes.engine.processes.executors import ProcessWorker
from trainpipes.testing import digest

METHODS = pytest.mark.parametrize("method", ["thread", "process"])
pytestmark = pytest.mark.usefixtures("no_processes_left")


def source(rows: int = 120) -> tp.Pipeline:
    return tp.from_arrow(pa.table({"x": range(rows)}))


def sharded(rows: int = 120) -> tp.Pipeline:
    return source(rows).sharding_filter(4).shuffle(30, seed=1)


def digests(items: Any) -> list[str]:
    return [digest(item) for item in items]


def user_batch(rows: list[Any]) -> Any:
    return rows


CHAINS: dict[str, Callable[..., tp.Pipeline]] = {
    "rows": lambda **how: sharded().map(fn.noisy, rng=True, **how),
    "batches": lambda **how: sharded().map(fn.noisy, rng=True, **how).batch(7).collate(),
    "a function of yours above": lambda **how: (
        sharded().map(fn.noisy, rng=True, **how).batch(7).collate(user_batch)
    ),
    "functions of yours around": lambda **how: (
        tp.from_dataset([{"x": x} for x in range(99)]).shuffle(20).map(fn.plain)
        .map(fn.noisy, rng=True, **how).batch(7).map(list, **how)
    ),
    "before a filter and a shuffle": lambda **how: (
        source().map(fn.noisy, rng=True, **how).filter(lambda row: row["x"] % 3 > 0).shuffle(30).batch(7)
    ),
    "below a filter": lambda **how: (
        source().shuffle(30).map(fn.plain, **how).filter(lambda row: row["x"] % 3 > 0).batch(7)
    ),
    "endless": lambda **how: sharded().map(fn.noisy, rng=True, **how).repeat(2).batch(7),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CHAINS)
def test_rows_and_order_are_those_without_workers(name: str) -> None:
    expected = digests(tp.Loader(CHAINS[name](), threads=0))
    turn = [*CHAINS].index(name) % 2
    for method, threads in (("thread", [None, 0][turn]), ("process", [0, 2][turn])):
        pipe = CHAINS[name](num_workers=2, method=method)
        assert digests(tp.Loader(pipe, threads=threads)) == expected


@METHODS
def test_what_comes_back_is_what_was_returned(method: str) -> None:
    rows = list(source(40).map(fn.every_kind))
    again = list(source(40).map(fn.every_kind, num_workers=2, method=method))
    for a, b in zip(rows, again, strict=True):
        assert digest(a) == digest(b)
        assert b["big"].flags.writeable
        assert b["tensor"].dtype == a["tensor"].dtype
        b["tensor"] += 1
        b["small"] += 1


@METHODS
def test_a_state_loads_with_any_number_of_workers(method: str) -> None:
    def pipe(workers: int) -> tp.Pipeline:
        return sharded().map(fn.noisy, rng=True, num_workers=workers, method=method).batch(7)

    whole = digests(pipe(0))
    for before, after, stop in ((0, 2, 3), (2, 0, 5), (2, 3, 0)):
        first = tp.Loader(pipe(before))
        taken = digests(islice(first, stop))
        state = json.loads(json.dumps(first.state_dict()))
        then = tp.Loader(pipe(after))
        then.load_state_dict(state)
        assert taken + digests(then) == whole


def test_it_resumes_exactly() -> None:
    def make() -> tp.Pipeline:
        mapped = sharded(40).map(fn.noisy, rng=True, num_workers=2, method="process")
        return mapped.batch(4).map(user_batch)

    report = check_resume(make, processes=0, every=5, epochs=2)
    assert report.items == (10, 10)


def test_processes_stay_for_several_epochs_and_are_shared_by_iterators() -> None:
    pipe = sharded().map(fn.where, num_workers=2, method="process")
    made = {row["process"] for _ in range(3) for row in pipe}
    one, other = iter(pipe), iter(pipe)
    pairs = [(next(one), next(other)) for _ in range(120)]
    made |= {row["process"] for pair in pairs for row in pair}
    assert os.getpid() not in made
    assert len(made) <= 2
    assert sorted(a["x"] for a, _ in pairs) == sorted(b["x"] for _, b in pairs) == list(range(120))


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_processes_can_be_started_in_any_way(start_method: Any) -> None:
    workers = 1 if start_method == "spawn" else 2  # each imports all anew
    pipe = sharded().map(
        fn.noisy, rng=True, num_workers=workers, method="process", start_method=start_method
    )
    assert digests(pipe.batch(7)) == digests(sharded().map(fn.noisy, rng=True).batch(7))


@pytest.mark.parametrize("of", ["map", "loader"])
def test_a_function_that_holds_tensors_reaches_each_process(of: str) -> None:
    """Torch's own pickles of tensors, parameters and modules for processes can be read once."""
    function = fn.Weighted(200_000)
    rows = source(40)
    expected = digests(rows.map(function, version="1").batch(4))
    if of == "map":
        how = {"num_workers": 2, "method": "process", "start_method": "forkserver"}
        found = digests(rows.map(function, version="1", **how).batch(4))  # type: ignore[arg-type]
    else:
        pipe = rows.map(function, version="1").batch(4)
        found = digests(tp.Loader(pipe, num_workers=2, multiprocessing_context="forkserver"))
        assert not function.large.is_shared()  # each such tensor would hold a descriptor to the end
    assert found == expected


def test_a_fork_needs_no_pickle() -> None:
    add = 5
    pipe = source().map(
        lambda row: {"x": row["x"] + add}, num_workers=2, method="process", start_method="fork"
    )
    assert [row["x"] for row in pipe] == list(range(5, 125))


def test_rows_are_made_ahead_and_not_without_end(tmp_path: Path) -> None:
    pipe = source(4000).map(fn.Counts(tmp_path), num_workers=2)
    batches = iter(pipe.batch(8).collate(user_batch))
    next(batches)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) <= 8 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # for more than may be
    assert 8 < len(list(tmp_path.iterdir())) <= 8 * 5
    del batches
    time.sleep(0.2)  # for those that have begun
    begun = len(list(tmp_path.iterdir()))
    time.sleep(0.2)
    assert len(list(tmp_path.iterdir())) == begun


# What a function raises


def files(folder: Path) -> tp.Pipeline:
    for number in range(2):
        table = pa.table({"x": range(40 * number, 40 * number + 40)})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=10)
    return tp.list_files(folder).read_parquet()


SAFE = {"thread_safe": True}
WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "method": "process"},
    {"num_workers": 2, "method": "process", "start_method": "fork"},
]


@pytest.mark.parametrize(
    ("how", "threads"), [*((how, None) for how in WORKERS), ({}, 0), (WORKERS[2], 0), (SAFE, 2)]
)
def test_an_error_is_the_functions_own_and_names_the_row(
    how: dict[str, Any], threads: int | None, tmp_path: Path
) -> None:
    pipe = files(tmp_path).map(fn.refuse_57, **how).batch(4)
    batches = iter(tp.Loader(pipe, threads=threads))
    assert len(list(islice(batches, 14))) == 14
    for _ in range(2):  # asked again, it fails again
        with pytest.raises(ValueError, match=r"^57 is not wanted") as caught:
            next(batches)
        notes = " ".join(caught.value.__notes__)
        assert "part-1.parquet, row group 1, row 17" in notes
        if how.get("method") == "process":
            assert 'raise ValueError("57 is not wanted")' in notes


@pytest.mark.parametrize("how", [WORKERS[0], WORKERS[1], WORKERS[3]])
def test_none_is_refused_and_stop_iteration_and_an_exit_end_no_epoch(how: dict[str, Any]) -> None:
    with pytest.raises(tp.DataError, match=r"returned None; .*\(at row 57\)"):
        list(source().map(fn.forget_57, **how))
    with pytest.raises(RuntimeError, match="raised StopIteration") as stopped:
        list(source().map(fn.stop, **how))
    assert "raised in map(stop" in " ".join(stopped.value.__notes__)
    with pytest.raises(SystemExit) as caught:
        list(source().map(fn.leave_57, **how))
    assert caught.value.code == 7


def test_an_error_that_does_not_pickle_still_says_what_it_was() -> None:
    pipe = source().map(fn.refuse_in_own_words, num_workers=2, method="process")
    said = "raised OwnError, which does not pickle: 57: not wanted"
    with pytest.raises(tp.WorkerError, match=said) as caught:
        list(pipe)
    assert "refuse_in_own_words" in " ".join(caught.value.__notes__)


# Workers that die


@pytest.mark.parametrize(
    ("function", "start_method", "how"),
    [
        (fn.exit_57, "forkserver", "has ended with exit code 3"),
        (fn.killed_57, "fork", r"was ended by signal 9 \(SIGKILL, as"),
    ],
)
def test_a_worker_that_dies_is_noticed_at_once_and_the_row_is_named(
    function: Any, start_method: Any, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = files(tmp_path).map(function, num_workers=2, method="process", start_method=start_method)
    batches = iter(pipe.batch(4))
    next(batches)
    assert len(list(islice(batches, 13))) == 13
    with pytest.raises(tp.WorkerError, match=rf"worker process \d+ {how}") as caught:
        next(batches)
    assert caplog.text.count("done again by another one") == 2  # of three: the last is the error
    assert (caught.value.path or "").endswith("part-1.parquet")
    assert (caught.value.row_group, caught.value.row) == (1, 17)
    with pytest.raises(tp.WorkerError, match="row group 1, row 17"):
        next(batches)


def test_rows_of_a_worker_that_dies_once_are_done_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    function = fn.ExitsOnce(tmp_path / "mark")
    pipe = source().map(function, num_workers=1, method="process").batch(4)
    assert [row["x"] for batch in pipe for row in batch] == list(range(120))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "has ended with exit code 3; its rows are done again by another one" in said


def test_a_worker_killed_from_outside_is_noticed_while_it_works(tmp_path: Path) -> None:
    pipe = source().map(fn.SleepsOnce(tmp_path / "pid"), num_workers=2, method="process")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: [row["x"] for row in pipe])
        os.kill(pid_in(tmp_path / "pid"), signal.SIGKILL)
        assert waiting.result(60) == list(range(120))


def test_workers_may_be_killed_at_any_time(workers: Any, caplog: pytest.LogCaptureFixture) -> None:
    expected = digests(sharded(400).map(fn.slow_noisy, rng=True).batch(7).collate())
    how: dict[str, Any] = {"num_workers": 2, "method": "process", "start_method": "fork"}
    pipe = sharded(400).map(fn.slow_noisy, rng=True, **how).batch(7)
    found: list[str] = []
    for number, batch in enumerate(tp.Loader(pipe.collate())):
        found.append(digest(batch))
        if number % 10 == 3:  # other rows are at work than when the last ones died
            for process in workers(1)[: 1 + number % 20 // 10]:  # one, or both
                process.kill()
    assert found == expected
    assert "such so far" in caplog.text


@pytest.mark.timeout(60)
def test_to_start_another_worker_waits_for_no_thread_that_hands_rows_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = ProcessWorker.begin

    def late(worker: ProcessWorker) -> None:
        time.sleep(0.5)  # other threads come to hand rows over
        begin(worker)

    monkeypatch.setattr(ProcessWorker, "begin", late)
    monkeypatch.setattr(pool, "PATIENCE", 3600.0)  # of a fork, for threads that work
    how: dict[str, Any] = {"num_workers": 2, "method": "process", "start_method": "fork"}
    pipe = sharded(400).map(fn.ExitsOnce(tmp_path / "mark"), **how).batch(4)
    rows = [row["x"] for batch in tp.Loader(pipe, threads=4) for row in batch]
    assert sorted(rows) == list(range(400))


def test_a_row_at_which_three_workers_die_is_left_out_if_asked(tmp_path: Path) -> None:
    how: dict[str, Any] = {"num_workers": 2, "method": "process", "start_method": "fork"}
    (tmp_path / "rows").mkdir()
    pipe = files(tmp_path / "rows").map(
        fn.killed_57, on_error=tp.Quarantine(tmp_path / "bad"), **how
    )
    assert [row["x"] for row in pipe] == [x for x in range(80) if x != 57]
    (line,) = [
        json.loads(line)
        for line in next((tmp_path / "bad").glob("*.jsonl")).read_text().splitlines()
    ]
    assert "3 workers died one after the other" in str(line)


def test_a_call_that_hangs_is_tried_once_more_and_then_named(tmp_path: Path) -> None:
    once = fn.SleepsOnce(tmp_path / "pid")
    how: dict[str, Any] = {"num_workers": 2, "method": "process", "timeout": 0.5}
    assert [row["x"] for row in source().map(once, **how)] == list(range(120))
    rows = list(range(80))
    with pytest.raises(
        tp.WorkerError, match=r"after 0.5 s \(timeout\).*second one at this row"
    ) as e:
        list(files(tmp_path).map(fn.hangs_57, **how))
    assert (e.value.row_group, e.value.row) == (1, 17)
    pipe = files(tmp_path).map(fn.hangs_57, on_error="skip", **how)
    rows.remove(57)
    assert [row["x"] for row in pipe] == rows


def test_a_slow_function_is_no_hang() -> None:
    pipe = source(30).map(fn.slow, num_workers=1, method="process", timeout=0.2)
    assert [row["x"] for row in pipe] == list(range(30))


@pytest.mark.parametrize("timeout", [float("inf"), 1e9])
def test_a_call_may_take_any_time(timeout: float) -> None:
    pipe = source(3).map(fn.plain, num_workers=1, method="process", timeout=timeout)
    assert [row["x"] for row in pipe] == list(range(3))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"timeout": 0, "method": "process"}, r"map\(timeout\) must be more than 0 seconds, got 0"),
        ({"timeout": "1", "method": "process"}, r"must be more than 0 seconds, got '1'"),
        ({"timeout": 1}, r"map\(method\) must be .*\"process\".*got 'thread'"),
        (
            {"timeout": 1, "method": "process", "num_workers": 0},
            r"map\(num_workers\) must be 1 or more where timeout is given, got 0",
        ),
    ],
)
def test_a_timeout_that_cannot_be_is_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(tp.ConfigError, match=said):
        source().map(fn.plain, **{"num_workers": 1, **how})


def pid_in(file: Path) -> int:
    """The number of the process that sleeps, once it does."""
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(file.read_text())


@pytest.mark.parametrize("killed", [1, 2])
def test_a_worker_that_dies_without_rows_is_replaced(killed: int, workers: Any) -> None:
    pipe = source().map(fn.where, num_workers=2, method="process")
    list(pipe)
    for worker in workers(2)[:killed]:
        worker.kill()
        worker.wait(10)
    assert [row["x"] for row in pipe] == list(range(120))


@pytest.fixture
def workers() -> Callable[[int], list[psutil.Process]]:
    """Gives worker processes that were started since, once there are so many that are ready."""
    before = set(processes_below(os.getpid()))

    def wait(count: int) -> list[psutil.Process]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = [p for p in processes_below(os.getpid()) if p not in before and is_ready(p)]
            if len(found) >= count:
                return found
            time.sleep(0.1)
        raise AssertionError("no workers came")

    return wait


def is_ready(process: psutil.Process) -> bool:
    """Whether it is a worker that waits for rows, or for one that forks."""
    try:
        above = process.parent()
        forked = above is not None and above.pid != os.getpid()
        return (
            process.num_threads() > 1
            and "resource_tracker" not in str(process.cmdline())
            and (forked or "forkserver" not in str(process.cmdline()))
        )
    except psutil.Error:  # it is ending
        return False


# What cannot be sent


def test_a_function_that_does_not_pickle_is_refused_with_a_way_out() -> None:
    pipe = source().map(lambda row: row, num_workers=2, method="process")
    with pytest.raises(tp.ConfigError, match=r'the function must pickle .*or use method="thread"'):
        next(iter(pipe))
    assert len(list(source().map(lambda row: row, num_workers=2))) == 120


def test_rows_and_results_that_do_not_pickle_are_refused_with_the_row() -> None:
    rows = tp.from_iterable(lambda: ((lambda: 1) for _ in range(9)))
    said = r'rows must pickle .*and a function does not.*method="thread"'
    with pytest.raises(tp.ConfigError, match=said):
        list(rows.map(fn.where, num_workers=2, method="process"))
    with pytest.raises(tp.DataError, match=r"the function returns must pickle.*\(at row 57\)"):
        list(source().map(fn.a_lambda, num_workers=2, method="process"))


# In workers of a loader


@METHODS
@pytest.mark.filterwarnings("ignore:map.* a worker process may not start others:UserWarning")
def test_in_workers_of_a_loader_the_rows_are_the_same(method: str) -> None:
    pipe = sharded().map(fn.noisy, rng=True, num_workers=2, method=method).batch(7)
    expected = digests(sharded().map(fn.noisy, rng=True).batch(7))
    assert digests(tp.Loader(pipe, num_workers=2)) == expected
    again = sharded().map(fn.noisy, rng=True, num_workers=2, method=method).batch(7)
    assert digests(DataLoader(again, batch_size=None, num_workers=2)) == expected


def test_a_fork_beside_a_run_waits_for_nothing() -> None:
    batches = iter(tp.Loader(sharded(4000).map(fn.slow, num_workers=2).batch(8), threads=2))
    next(batches)
    assert len(list(DataLoader(sharded().batch(7), batch_size=None, num_workers=2))) == 18
    next(batches)


# The end


def processes_below(parent: int) -> list[psutil.Process]:
    return psutil.Process(parent).children(recursive=True)


def test_a_run_that_is_broken_off_leaves_nothing_once_its_pipeline_is_gone() -> None:
    for _ in range(2):
        pipe = source().map(fn.slow, num_workers=2, method="process").batch(4)
        for _ in islice(pipe, 3):
            pass
    del pipe  # and no_processes_left looks


def test_workers_end_where_nothing_is_to_do_and_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "IDLE", 0.3)
    pipe = source().map(fn.where, num_workers=2, method="process")
    first = {row["process"] for row in pipe}
    gone = [psutil.Process(pid) for pid in first if psutil.pid_exists(pid)]
    psutil.wait_procs(gone, timeout=10)
    assert not any(process.is_running() for process in gone)
    assert not first & {row["process"] for row in pipe}


def test_workers_that_ended_while_a_loop_paused_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "IDLE", 0.3)
    rows = tp.from_arrow(pa.table({"x": range(20_000)}))
    running = iter(rows.map(fn.where, num_workers=1, method="process"))
    first = next(running)["process"]
    with suppress(psutil.NoSuchProcess):
        psutil.Process(first).wait(timeout=20)
    left = [row["process"] for row in running]
    assert len(left) == 19_999
    assert left[-1] != first


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a program that runs a pipeline with worker processes; a ``whole`` one starts and ends as all
    do."""
    started = []

    def start(
        body: str, *, guard: bool = True, function: str = "slow", whole: bool = False
    ) -> subprocess.Popen[str]:
        lines = [
            # A shell in the background ignores interrupts, and so would what it starts.
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)",
            "import os, sys, time, trainpipes as tp, pyarrow as pa, map_functions as fn",
            "def main():" if guard else "if True:",
            "    rows = tp.from_arrow(pa.table({'x': range(2000)}))",
            f"    pipe = rows.map(fn.{function}, num_workers=2, method='process').batch(4)",
            *(f"    {line}" for line in body.splitlines()),
            *(["if __name__ == '__main__':", "    main()"] if guard else []),
        ]
        path = tmp_path / "script.py"
        path.write_text("\n".join(lines))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [*([sys.executable] if whole else python()), str(path)]
        run = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
        started.append(run)
        return run

    yield start
    for run in started:
        run.kill()
        run.communicate()


def test_a_script_that_ends_in_mid_epoch_ends_well(script: Any) -> None:
    run = script("next(iter(pipe)); kept = iter(pipe); next(kept); print('done')", whole=True)
    assert run.communicate(timeout=200) == ("done\n", "")
    assert run.returncode == 0


@pytest.mark.slow
def test_no_worker_outlives_a_parent_that_is_killed(script: Any) -> None:
    run = script("for batch in pipe: print('on', flush=True)")
    assert run.stdout.readline() == "on\n"
    below = processes_below(pid_of(run))
    assert len(below) >= 3
    os.kill(pid_of(run), signal.SIGKILL)
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not alive


def test_an_interrupt_ends_it_at_once_with_one_traceback(script: Any) -> None:
    body = "print('on', flush=True)\nfor batch in pipe: pass"
    run = script(body, function="very_slow", whole=True)
    assert run.stdout.readline() == "on\n"
    for _ in range(300):
        below = processes_below(run.pid)
        if len([p for p in below if p.num_threads() > 1]) >= 2:
            break
        time.sleep(0.1)
    time.sleep(0.3)
    os.killpg(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=120)  # the function takes 1,000 s
    assert said.count("Traceback") == 1
    assert said.rstrip().endswith("KeyboardInterrupt")
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not alive


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_of_it(script: Any) -> None:
    run = script("list(pipe)", guard=False, whole=True)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 1
    told = next(line for line in said.splitlines() if "trainpipes.errors.WorkerError" in line)
    assert "ended with exit code 1 before it was ready" in told
    assert told.endswith('below `if __name__ == "__main__":`, since workers import the script')


@pytest.mark.slow
def test_a_function_that_is_nowhere_to_be_imported_from_is_refused() -> None:
    code = (
        "import trainpipes as tp\n"
        "def double(x): return 2 * x\n"
        "list(tp.from_iterable(lambda: range(9)).map(double, num_workers=2, method='process'))\n"
    )
    run = subprocess.run([*python(), "-c", code], capture_output=True, text=True, timeout=60)
    last = run.stderr.rstrip().splitlines()[-1]
    assert "the function does not load in a worker process (AttributeError" in last
    assert 'or use method="thread"' in last


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_few_rows_are_spread_over_all_workers(rows: int) -> None:
    two_at_a_time = threading.Barrier(2)

    def meet(row: Any) -> Any:
        if row["x"] in (0, rows - 1):
            two_at_a_time.wait(timeout=30)
        return row

    (batch,) = source(rows).map(meet, num_workers=2).batch(rows)
    assert len(batch) == rows


class Noting:
    """Makes functions that note which threads call them."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __call__(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(given: Any) -> Any:
            self.threads.add(threading.current_thread().name)
            return function(given)

        return noted


def one_more(columns: dict[str, Any]) -> dict[str, Any]:
    return {"y": columns["x"] + 1}


NUMPY: dict[str, Any] = {"format": "numpy", "version": "1"}
SAFE_CHAINS: dict[str, Callable[[Noting, dict[str, bool]], tp.Pipeline]] = {
    "map": lambda f, o: sharded().map(f(lambda row: {"x": row["x"] * 2}), version="1", **o).batch(8),
    "map of batches": lambda f, o: sharded().batch(8).map(f(list), version="1", **o),
    "filter": lambda f, o: sharded().filter(f(lambda row: row["x"] % 3 > 0), version="1", **o).batch(8),
    "flat_map": lambda f, o: sharded().flat_map(f(lambda r: [r] * (r["x"] % 3)), version="1", **o).batch(8),
    "map_batches": lambda f, o: sharded().map_batches(f(one_more), **NUMPY, **o).batch(8).pad_collate(),
    "with_columns": lambda f, o: sharded().with_columns(f(one_more), **NUMPY, **o).batch(8).collate(),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SAFE_CHAINS))
def test_other_threads_call_a_function_only_if_it_is_said_to_be_safe(name: str) -> None:
    mine, theirs = Noting(), Noting()
    alone = SAFE_CHAINS[name](mine, {})
    shared = SAFE_CHAINS[name](theirs, SAFE)
    expected = list(tp.Loader(alone))
    assert mine.threads == {threading.current_thread().name}
    found = list(tp.Loader(shared, threads=2))
    for _ in range(200):  # the thread that iterates works, too, and may be first
        if theirs.threads - mine.threads:
            break
        list(tp.Loader(shared, threads=2))
    assert all(thread.startswith("trainpipes-") for thread in theirs.threads - mine.threads)
    assert theirs.threads - mine.threads
    assert repr(found) == repr(expected)
    assert alone.state_at(0) == shared.state_at(0)  # a state says nothing of threads


@pytest.mark.parametrize("name", ["map", "filter", "with_columns"])
def test_they_go_on_exactly(name: str) -> None:
    check_resume(lambda: SAFE_CHAINS[name](Noting(), SAFE), points=4, epochs=2)


@pytest.mark.parametrize("options", [{}, {"thread_safe": True}, {"num_workers": 2}])
def test_what_is_up_to_a_function_is_not_done_ahead_of_training(
    options: dict[str, Any], tmp_path: Any
) -> None:
    from trainpipes.prepare import tokenize

    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a b"}\n' * 20)
    pipe = tp.read_json(str(texts)).tokenize("bytes").map(dict, version="1", **options).batch(4)
    done = tokenize(pipe, tmp_path / "out")
    assert any("map(" in str(stage) for stage in done.pipeline.stages)
