"""Tasks on a Ray cluster: results, errors, crashes, paths; and connecting to one, in a process of its own."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

from trainpipes.errors import (
    ConfigError,
    DataError,
    MissingExtraError,
    UnreachableError,
    WorkerError,
)
from trainpipes.filesystems.places import check_stop
from trainpipes.writers import Ray


def call(task, work):
    return work(task, lambda rows: check_stop())


def run(open_work, tasks):
    with Ray() as executor:
        return list(executor.map_unordered(call, tasks, open_work))


def note(folder: Path, name: str) -> None:
    (folder / f"{name}-{os.getpid()}-{time.monotonic_ns()}").touch()


def noted(folder: Path, name: str) -> int:
    return len(list(folder.glob(f"{name}-*")))


@dataclass
class Doubles:
    """Opens work that doubles numbers, and notes how often it was opened."""

    folder: Path

    def __call__(self):
        note(self.folder, f"open-{os.getpid()}-")
        return lambda task, tell: (2 * task, os.getpid())


def test_each_task_has_its_result_and_a_process_opens_the_work_once(cluster, tmp_path):
    done = run(Doubles(tmp_path), range(40))
    assert sorted((task, result[0]) for task, result in done) == [(n, 2 * n) for n in range(40)]
    processes = {result[1] for _, result in done}
    assert noted(tmp_path, "open") == len(processes) <= 4


def test_of_another_job_nothing_is_left_in_a_process(cluster, tmp_path):
    assert {result for _, result in run(lambda: lambda task, tell: "first", range(8))} == {"first"}
    assert {result for _, result in run(lambda: lambda task, tell: "other", range(8))} == {"other"}


@dataclass
class Fails:
    folder: Path

    def __call__(self):
        def work(task, tell):
            note(self.folder, f"ran-{task}")
            if task == 3:
                raise DataError("row 7 is bad", path="a.parquet", row=7)
            return task

        return work


def test_an_error_fails_its_task_once_and_comes_as_it_was_raised(cluster, tmp_path):
    with pytest.raises(DataError) as caught:
        run(Fails(tmp_path), range(6))
    assert type(caught.value) is DataError
    assert (str(caught.value), caught.value.path, caught.value.row) == (
        "row 7 is bad",
        "a.parquet",
        7,
    )
    assert noted(tmp_path, "ran-3") == 1


def test_an_error_while_the_work_is_opened_comes_as_it_was_raised(cluster):
    def open_work():
        raise DataError("no such tokenizer")

    with pytest.raises(DataError) as caught:
        run(open_work, [1])
    assert str(caught.value) == "no such tokenizer"


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    def __reduce__(self):
        raise RuntimeError("no pickle")


class Needy(Exception):
    """It pickles, and cannot be made again."""

    def __init__(self, *, row):
        super().__init__(f"row {row}")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Mute(), r"Mute, which does not pickle: \(its text cannot be had: RuntimeError\)"),
        (Needy(row=7), "Needy, which does not pickle: row 7"),
        (SystemExit("enough"), "SystemExit: enough"),
    ],
    ids=["mute", "needy", "exit"],
)
def test_whatever_a_function_raises_is_told_once(cluster, tmp_path, error, said):
    kind, arguments = type(error), error.args

    def work(task, tell):
        note(tmp_path, "ran")
        raise kind(row=7) if kind is Needy else kind(*arguments)

    with pytest.raises(WorkerError, match=rf"{said}"):
        run(lambda: work, [1])
    assert noted(tmp_path, "ran") == 1


@dataclass
class Dies:
    """Work whose process is killed so many times."""

    folder: Path
    times: int

    def __call__(self):
        def work(task, tell):
            if task == 2 and noted(self.folder, "died") < self.times:
                note(self.folder, "died")
                os.kill(os.getpid(), signal.SIGKILL)
            return task

        return work


def test_a_task_whose_process_is_killed_is_run_again(cluster, tmp_path, caplog):
    assert sorted(run(Dies(tmp_path, 1), range(6))) == [(n, n) for n in range(6)]
    assert noted(tmp_path, "died") == 1
    assert caplog.text.count("2 is run again: ") == 1


def test_a_task_that_runs_out_of_memory_waits_is_told_and_given_up(cluster, monkeypatch, caplog):
    waited, lost = [], ray.exceptions.OutOfMemoryError("Task was killed")
    monkeypatch.setattr("trainpipes.engine.processes.ray_tasks.time.sleep", waited.append)

    def get(reference, *, get=ray.get, **options):
        value = get(reference, **options)
        if value == 2:
            raise lost
        return value

    monkeypatch.setattr("ray.get", get)
    with pytest.raises(WorkerError, match=r"^2 was given up after 4 tries: Task was killed"):
        run(lambda: lambda task, tell: task, range(4))
    assert waited == [1, 2, 4]
    assert caplog.text.count("2 is run again: Task was killed") == 3


def test_a_task_whose_process_dies_each_time_is_given_up_and_named(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("trainpipes.engine.processes.ray_tasks.RETRIES", 1)
    with pytest.raises(WorkerError, match=r"^2 was given up after 2 tries: "):
        run(Dies(tmp_path, 99), range(4))
    assert noted(tmp_path, "died") == 2


@dataclass
class Ticks:
    folder: Path
    tells: bool

    def __call__(self):
        def work(task, tell):
            for _ in range(300):
                note(self.folder, "tick")
                time.sleep(0.1)
                if self.tells:
                    tell(1)

        return work


@pytest.mark.parametrize("tells", [True, False])
def test_ctrl_c_ends_the_tasks_that_run(cluster, tmp_path, monkeypatch, tells):
    cancelled, cancel = [], ray.cancel
    monkeypatch.setattr("trainpipes.engine.processes.ray_tasks.PATIENCE", 100 if tells else 1)
    monkeypatch.setattr("ray.cancel", lambda *a, **k: (cancelled.append(a), cancel(*a, **k)))
    run(lambda: lambda task, tell: task, range(4))  # worker processes are there
    with Ray() as executor:
        done = executor.map_unordered(call, range(12), Ticks(tmp_path, tells))
        threading.Timer(2, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            next(done)
    ticks = noted(tmp_path, "tick")
    assert ticks
    time.sleep(0.5)
    assert noted(tmp_path, "tick") == ticks
    # Ray aborts the driver, at times, that cancels a task which is just ending.
    assert bool(cancelled) is not tells


def test_what_does_not_pickle_is_refused(cluster):
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"the pipeline must pickle .*_thread.lock"):
        run(lambda: lock, [1])


def test_an_object_store_that_is_full_is_told(cluster, monkeypatch):
    def put(_):
        raise ray.exceptions.ObjectStoreFullError("it has 1 GB, and\nall are taken")

    monkeypatch.setattr("ray.put", put)
    with pytest.raises(
        WorkerError, match=r"the object store .* does not take the pipeline \(.*1 GB"
    ):
        run(lambda: None, [1])


def test_a_module_that_nodes_lack_is_named(cluster, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def open_work(): return None\n")
    monkeypatch.syspath_prepend(tmp_path)
    only_here = __import__("only_here")
    with pytest.raises(
        ConfigError, match=r"cannot open the pipeline \(No module named 'only_here'\)"
    ):
        run(only_here.open_work, [1])


def test_another_address_than_that_of_this_process_is_refused(cluster):
    with (
        pytest.raises(ConfigError, match="connected to a Ray cluster already"),
        Ray("10.1.2.3:6379"),
    ):
        pass
    import ray

    with Ray(ray.get_runtime_context().gcs_address):
        pass
    assert ray.is_initialized()


@pytest.mark.parametrize("address", ["", 7])
def test_an_address_is_text(address):
    with pytest.raises(ConfigError, match=r"Ray\(address\) must be that of a cluster"):
        Ray(address)


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("trainpipes._internal.checks.find_spec", lambda name: None)
    with (
        pytest.raises(MissingExtraError, match=r"executor=Ray\(\) needs .* pip install 'ray"),
        Ray(),
    ):
        pass


def test_paths_that_every_node_sees_are_let_through(cluster, tmp_path):
    with Ray() as executor:
        assert executor.workers == 4
        executor.check_path("s3://bucket/x", "test(folder)")
        with pytest.raises(
            ConfigError, match=r"test\(folder\) must be .* URL of storage.*memory://x"
        ):
            executor.check_path("memory://x", "test(folder)")
        executor.check_path(str(tmp_path), "test(folder)")
        done = executor.map_unordered(call, "a", lambda: lambda task, tell: 1)
        assert list(done) == [("a", 1)]


# In a process of its own

SPOT = """
import signal, sys
import trainpipes as tp
before = signal.getsignal(signal.SIGTERM)
from trainpipes.writers import Ray

def where(task, state):
    import trainpipes
    print("noise")
    return trainpipes.__file__

with Ray("local") as executor:
    [(task, where)] = executor.map_unordered(where, [1], int)
    for own in (executor, Ray("local")):
        loader = tp.Loader(tp.from_dataset(range(8)).map(abs).batch(4), executor=own)
        assert [len(list(loader)) for _ in range(2)] == [2, 2]
import ray
assert not ray.is_initialized()
assert signal.getsignal(signal.SIGTERM) is before
print(where)
"""


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", program],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


def test_it_starts_ray_on_the_spot_ships_the_library_and_is_silent():
    done = python(SPOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    [where] = done.stdout.splitlines()
    assert "runtime_resources" in where  # the driver's, as Ray has shipped it


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "ray://127.0.0.1:1", "no.such.machine.invalid:6379"]
)
def test_an_address_where_nobody_answers_is_told_at_once(address, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with (
        pytest.raises(UnreachableError, match=f"no Ray cluster can be used at {address}"),
        Ray(address),
    ):
        pass
