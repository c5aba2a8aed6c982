"""What forks, and processes without shared memory, find."""

from __future__ import annotations

import dis
import multiprocessing
import os
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import trainpipes as tp
from trainpipes._internal.pool import Pool, waits

WITHOUT_SHARED_MEMORY = """
import os, tempfile
import _multiprocessing, multiprocessing.synchronize, multiprocessing.heap

def refused(*arguments, **options):
    raise OSError("no space left in /dev/shm")

multiprocessing.synchronize._multiprocessing.SemLock = refused
multiprocessing.heap.Arena.__init__ = refused
tempfile.mkstemp = refused

import pyarrow as pa
import trainpipes as tp

pipe = tp.from_arrow(pa.table({"x": range(100)})).sharding_filter(4).shuffle(20, seed=1).batch(5)
loader = tp.Loader(pipe.collate(), threads=2)
batches = iter(loader)
first = next(batches)["x"].tolist()
state = loader.state_dict()
loader.load_state_dict(state)
child = os.fork()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(first, sum(len(batch["x"]) for batch in loader))
"""


def test_a_chain_without_workers_needs_no_shared_memory() -> None:
    command = [sys.executable, "-c", WITHOUT_SHARED_MEMORY]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.rstrip().endswith("95")


def _in_child(work: Any, seconds: float = 60.0) -> int:
    """The exit code of a forked child that does something."""
    child = os.fork()
    if not child:
        timer = threading.Timer(seconds, os._exit, (9,))
        timer.daemon = True
        timer.start()
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_looks_for_types_while_a_thread_of_its_parent_does() -> None:
    at_work, go_on, calls = threading.Event(), threading.Event(), []

    def slow(x: int) -> dict[str, int]:
        calls.append(x)
        if calls.count(0) == 2:  # for the row, and for the types of columns
            at_work.set()
            assert go_on.wait(60)
        return {"x": x}

    searching = tp.from_dataset(range(10)).map(slow, version="1").batch(2).pad_collate()
    thread = threading.Thread(target=lambda: next(iter(searching)))
    thread.start()
    assert at_work.wait(60)
    rows = tp.from_dataset(range(10)).map(lambda x: {"x": x}, version="1")
    other = rows.batch(2).pad_collate()
    try:
        assert _in_child(lambda: next(iter(other)), 20) == 0
    finally:
        go_on.set()
        thread.join()


def test_a_forked_child_calls_a_function_that_a_thread_of_its_parent_is_calling() -> None:
    at_work, go_on, parent = threading.Event(), threading.Event(), os.getpid()

    def slow(x: int) -> int:
        if os.getpid() == parent:
            at_work.set()
            assert go_on.wait(60)
        return x

    rows = tp.from_dataset(range(10)).map(slow, version="1")
    thread = threading.Thread(target=lambda: next(iter(rows)))
    thread.start()
    assert at_work.wait(60)
    try:
        assert _in_child(lambda: next(iter(rows)), 20) == 0
    finally:
        go_on.set()
        thread.join()


def test_a_forked_child_does_not_do_what_its_parent_has_queued(tmp_path: Any) -> None:
    pool, go_on = Pool(1), threading.Event()
    busy = threading.Event()

    def wait() -> None:
        busy.set()
        with waits():  # a fork does not wait for it
            go_on.wait(60)

    pool.submit(wait)
    assert busy.wait(60)
    done = tmp_path / "done"

    def write() -> None:
        with done.open("a") as file:
            file.write(f"{os.getpid()}\n")

    pool.submit(write)

    def child() -> None:
        own = pool.submit(lambda: 1)
        assert pool.result(own) == 1
        pool.join()

    try:
        assert _in_child(child) == 0
    finally:
        go_on.set()
        pool.join()
    written = done.read_text().split() if done.exists() else []
    assert str(os.getpid()) in written or not written
    assert all(int(pid) == os.getpid() for pid in written)


def test_workers_do_not_read_all_data_in_memory_to_name_the_pipeline(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainpipes.sources import read_arrow

    digest, file = read_arrow.table_digest, tmp_path / "processes"

    def noted(table: pa.Table) -> str:
        with file.open("a") as out:
            out.write(f"{os.getpid()}\n")
        return digest(table)

    monkeypatch.setattr(read_arrow, "table_digest", noted)
    rows = tp.from_arrow(pa.table({"x": range(200)})).sharding_filter(4)
    loader = tp.Loader(rows.filter([("x", ">", 20)]).map(dict).batch(4), num_workers=2)
    assert sum(map(len, loader)) == 179
    loader.state_dict()
    assert set(file.read_text().split()) == {str(os.getpid())}


class _Interrupted(BaseException):
    """Stands for the exception of a signal's handler."""


@pytest.mark.own_process
def test_a_signal_between_two_lines_leaves_no_iterator_locked() -> None:
    """Wherever in the library its handler may run while an item is asked for, the next one comes."""
    for place in range(1, 400):
        batches = iter(tp.from_dataset(range(12)).batch(3))
        assert next(batches) == [0, 1, 2]
        steps, before = 0, {}

        def interrupt(frame: Any, event: str, _: Any) -> Any:
            nonlocal steps
            if not frame.f_code.co_filename.endswith("epoch_iterator.py"):
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                code = frame.f_code.co_code
                last = dis.opname[code[before.get(frame, 0)]]  # noqa: B023
                before[frame] = frame.f_lasti  # noqa: B023
                # Python runs handlers after these only.
                steps += last.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
                if steps == place:  # noqa: B023
                    steps += 1
                    raise _Interrupted
            return interrupt

        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks in settrace only
        sys.settrace(interrupt)
        try:
            next(batches)
        except _Interrupted:
            pass
        finally:
            sys.settrace(None)
        if steps < place:
            break
        assert next(batches) in ([3, 4, 5], [6, 7, 8]), place
    assert place > 5


@pytest.mark.parametrize("executor", ["ray", tp.Ray(), tp.Ray(num_workers=2)], ids=str)
def test_without_ray_it_says_what_to_install(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes._internal.checks.find_spec", lambda name: None)
    loader = tp.Loader(tp.from_dataset([-1, 2]).map(abs), executor=executor)
    with pytest.raises(tp.MissingExtraError, match=r"executor=Ray\(\) needs .* pip install 'ray"):
        next(iter(loader))


def doubled(batch: list[int]) -> list[int]:
    return [2 * x for x in batch]


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_fork_between_two_passes_has_workers_of_its_own(method: str) -> None:
    loader = tp.Loader(
        tp.from_dataset(range(12)).batch(3).map(doubled), num_workers=1,
        persistent_workers=True, multiprocessing_context=method,
    )  # fmt: skip
    whole = list(loader)

    def child() -> None:
        if method == "fork":
            assert list(loader) == whole
        else:  # whose server serves no forks
            with pytest.raises(tp.WorkerError, match="a worker cannot be started"):
                list(loader)

    assert _in_child(child) == 0
    assert list(loader) == whole


@pytest.mark.parametrize("how", ["Loader", "map"])
def test_an_iterator_with_workers_goes_on_in_a_fork_or_says_that_it_cannot(how: str) -> None:
    of: dict[str, dict[str, Any]] = {"Loader": {}, "map": {}}
    of[how] = {"num_workers": 1}
    if how == "map":
        of["map"] |= {"method": "process", "start_method": "fork"}
    pipe = tp.from_dataset(range(60)).batch(3).map(doubled, **of["map"])
    loader = tp.Loader(pipe, **of["Loader"])
    batches, whole = iter(loader), [doubled([n, n + 1, n + 2]) for n in range(0, 60, 3)]
    assert next(batches) == whole[0]

    def child() -> None:
        found, said = [whole[0]], "begin another"
        try:
            for batch in batches:
                found.append(batch)
        except RuntimeError as error:  # a worker was at work
            said = str(error)
            loader.load_state_dict(loader.state_dict())
            found += loader
        assert "begin another" in said
        assert found == whole

    assert _in_child(child) == 0
    assert list(batches) == whole[1:]


@pytest.mark.parametrize("of", ["Loader", "writer"])
def test_a_daemonic_process_is_told_that_it_may_start_no_workers(
    of: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    pipe = tp.from_arrow(pa.table({"x": range(8)})).map(dict)
    how = {"executor": tp.Processes(2)}
    writes = partial(pipe.write_parquet, str(tmp_path / "out"), num_files=2, **how)
    begins = writes if of == "writer" else partial(list, tp.Loader(pipe, **how))
    with pytest.raises(
        tp.ConfigError, match=r"a daemonic process may start no others.*daemon=False"
    ):
        begins()
