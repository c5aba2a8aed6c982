"""The executor ``Ray``: a connection to a Ray cluster, and the tasks of a job on it.

A cluster of the process's ``ray.init()`` is used as it is; to any other one ``trainpipes`` is shipped. Ship
your own modules by ``ray.init(runtime_env={"working_dir": "."})``; functions of ``__main__`` travel with the
pipeline. A user's error is a task's result: as an exception, Ray would log it, and might run the task again.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, TypeVar

from trainpipes._internal.checks import flag, need, require
from trainpipes.errors import ConfigError, UnreachableError, WorkerError
from trainpipes.filesystems.places import TaskStopped, set_stop_check
from trainpipes.version import __version__
from trainpipes.writers.executor import feed, portable, refuse_memory, use_threads

T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")

#: Packages that the driver ships to the nodes.
SHIPPED = ("trainpipes", "trainpipes_recipes")
INSTALL = (
    "install there what the driver has; modules of your own travel by "
    'ray.init(runtime_env={"working_dir": "."})'
)
#: How often Ray runs a task again whose process or node has died.
RETRIES = 3
#: Tasks in flight for each core: more than one, so that a worker need not wait for the driver, and an
#: autoscaler sees that more nodes are wanted; and at least, for a cluster without nodes before there is work.
IN_FLIGHT, LEAST_IN_FLIGHT = 2, 8
#: Seconds between two looks at how many cores there are, and of a task at whether it is to end.
LOOK, LOOK_FOR_END = 5.0, 2.0
#: Seconds that the machine of an address has to take a connection.
KNOCK = 10.0
#: Seconds that tasks which are asked to end are waited for before they are cancelled, and then before their
#: processes are killed.
PATIENCE = 5.0


@dataclass
class Ray:
    """Tasks on a Ray cluster. What they read and write is at URLs, unless all nodes see the same files.

    Args:
        address: as ``ray.init()`` takes it. If left out, the cluster that this process is connected to, that
            of ``RAY_ADDRESS``, or one that is started on this machine.
        shared_filesystem: whether all nodes see the same files at the same paths, as with NFS.
    """

    address: str | None = None
    shared_filesystem: bool = False
    _own: bool = field(default=False, init=False, repr=False, compare=False)  # it has connected
    #: Tasks must run on this machine.
    _pinned: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        flag(self.shared_filesystem, "Ray(shared_filesystem)")
        if self.address is not None:
            rule = 'that of a cluster, such as "10.0.0.1:6379" or "ray://10.0.0.1:10001"'
            good = isinstance(self.address, str) and self.address
            require(good, "Ray(address)", rule, self.address)

    def __enter__(self) -> Ray:
        need("ray", "executor=Ray()")
        import ray

        self._pinned = False
        if not ray.is_initialized():
            self._connect()
            self._own = True
            return self
        gcs = ray.get_runtime_context().gcs_address
        known = list(filter(None, ["auto", gcs, os.environ.get("RAY_ADDRESS")]))
        if self.address is not None and self.address not in known:
            raise ConfigError(
                f"Ray(address={self.address!r}): this process is connected to a Ray cluster already "
                f"({', '.join(known)}): leave the address out, or call ray.shutdown() first"
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._own:
            import ray

            self._own = False
            with _own_sigterm():
                ray.shutdown()

    def _connect(self) -> None:
        import ray

        given = self.address or os.environ.get("RAY_ADDRESS") or ""
        options: dict[str, Any] = {"log_to_driver": False}
        # A job that was submitted with modules of its own may give no others.
        if '"py_modules"' not in os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", ""):
            paths = [spec.origin for spec in map(find_spec, SHIPPED) if spec and spec.origin]
            options["runtime_env"] = {"py_modules": [os.path.dirname(path) for path in paths]}
        if "://" not in given:
            options |= {"include_dashboard": False, "configure_logging": False}
        logging.getLogger("ray").setLevel(logging.ERROR)  # what matters to a user comes as an error
        try:
            host, _, port = given.rpartition("://")[2].rpartition(":")
            if host and port.isdigit():  # where nobody listens, Ray tries for minutes
                socket.create_connection((host.strip("[]"), int(port)), KNOCK).close()
            with _own_sigterm(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray's, of its own future
                ray.init(self.address, **options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            said = " ".join(str(error).split())
            raise UnreachableError(
                f"no Ray cluster can be used at {given or 'this machine'} ({said}); give the "
                "address of one that runs, which `ray start --head` prints, or leave address and "
                "RAY_ADDRESS out to use this machine alone"
            ) from error

    @property
    def workers(self) -> int:
        """Cores of all nodes, as Ray counts them."""
        import ray

        return max(1, int(ray.cluster_resources().get("CPU", 0)))

    def check_path(self, path: str, option: str) -> None:
        """Raise ConfigError where nodes cannot get at a path. A cluster of one node keeps its tasks there."""
        refuse_memory(path, option)
        scheme = path.partition("://")[0] if "://" in path else "file"
        if scheme not in ("file", "local") or self.shared_filesystem:
            return
        import ray

        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        client = sys.modules.get("ray.util.client")
        if nodes > 1 or (client is not None and client.ray.is_connected()):
            raise ConfigError(
                f"{option}: {path} is on this machine, and the Ray cluster has {nodes} nodes, which "
                "cannot see it: give a URL of shared storage, such as s3://bucket/folder; or say "
                "shared_filesystem=True if every node sees the same files at this path",
                path=path,
            )
        self._pinned = True

    def map_unordered(
        self, fn: Callable[[T, S], R], tasks: Iterable[T], open_state: Callable[[], S]
    ) -> Iterator[tuple[T, R]]:
        import ray

        given: dict[str, Any] = {"num_cpus": 1, "max_retries": RETRIES, "retry_exceptions": False}
        if self._pinned:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            here = ray.get_runtime_context().get_node_id()
            given["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
        remote = ray.remote(**given)(do_task)
        job = Job(secrets.token_hex(8), [_put((fn, open_state))])
        running: dict[Any, T] = {}
        waiting = iter(tasks)

        def most() -> int:  # a cluster may grow
            return max(LEAST_IN_FLIGHT, IN_FLIGHT * self.workers)

        def begin(task: T) -> None:
            running[remote.remote(task, job)] = task

        try:
            while feed(waiting, running, most(), begin):
                for reference in ray.wait([*running], num_returns=1, timeout=LOOK)[0]:
                    task = running.pop(reference)
                    done = _result(reference, str(task))
                    if isinstance(done, Failed):
                        raise done.error
                    yield task, done
        finally:
            end_tasks(job, [*running])


def _put(work: Any) -> Any:
    import ray
    from ray.exceptions import RayError

    try:
        return ray.put(work)
    except RayError as error:
        raise WorkerError(
            "the object store of the Ray cluster does not take the pipeline "
            f"({_first_line(error)}): let other programs on the cluster end, or start it with a larger "
            "--object-store-memory; rows in memory are better read from files by the tasks"
        ) from error
    except Exception as error:  # of anything that the pipeline holds
        raise ConfigError(
            "executor=Ray(): the pipeline must pickle to reach the nodes of the cluster, and does "
            f"not ({_first_line(error.__cause__ or error)}): define functions at the top of a module or "
            "of the program, and open files and connections in them"
        ) from error


def _result(reference: Any, name: str) -> Any:
    import ray
    from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError, TaskCancelledError

    try:
        return ray.get(reference)
    except (RayTaskError, RuntimeEnvSetupError) as error:
        cause = getattr(error, "cause", None) or error
        raise ConfigError(
            f"{name} cannot be begun on a node of the Ray cluster "
            f"({type(cause).__name__}: {_first_line(cause)}): {INSTALL}"
        ) from error
    except TaskCancelledError as error:
        raise WorkerError(f"{name} was cancelled from outside") from error
    except RayError as error:
        raise WorkerError(
            f"{name} was given up after {1 + RETRIES} tries: {_first_line(error)} Call it again to go on "
            "after the files that are whole; where memory runs out, with fewer tasks on a node"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _own_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# In a worker process


@dataclass(frozen=True)
class Job:
    """What all tasks of one job share: its function and state, sent once."""

    token: str
    shared: list[Any]
    version: str = __version__

    @property
    def flag(self) -> str:
        return f"trainpipes-stop-{self.token}"


@dataclass(frozen=True)
class Failed:
    """A task failed by an error that another try would not cure."""

    error: BaseException


class StopFlag:
    """An actor: while there is one of a job's name, the tasks of this job end."""


def do_task(task: Any, job: Job) -> Any:
    import ray

    next_look = 0.0

    def look() -> None:
        nonlocal next_look
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + LOOK_FOR_END
            with suppress(Exception):  # there is no such actor
                ray.get_actor(job.flag)
                raise TaskStopped

    set_stop_check(look)
    try:
        look()
        fn, state = _opened(job)
        return fn(task, state)
    except TaskStopped:
        return Failed(RuntimeError("the task was asked to end"))
    except (Exception, SystemExit) as error:  # by sys.exit() Ray would run it again
        return Failed(portable(error, task))


#: The job that this process works for, its function, and the state.
_kept: tuple[str, Callable[[Any, Any], Any], Any] | None = None


def _opened(job: Job) -> tuple[Callable[[Any, Any], Any], Any]:
    global _kept
    if _kept is None or _kept[0] != job.token:
        import ray

        if job.version != __version__:
            raise ConfigError(
                f"a node of the Ray cluster has trainpipes {__version__}, and the driver {job.version}: "
                'install the same there, or let ray.init() ship the driver\'s by runtime_env={"py_modules": '
                "[trainpipes]}"
            )
        _kept = None  # before the next one takes memory, too
        use_threads(1)
        try:
            fn, open_state = ray.get(job.shared[0])
        except ray.exceptions.RaySystemError as error:  # it does not unpickle here
            said = _first_line(error).removeprefix("System error: ")
            raise ConfigError(
                f"a node of the Ray cluster cannot open the pipeline ({said}): {INSTALL}"
            ) from None
        _kept = (job.token, fn, open_state())
    return _kept[1:]


def end_tasks(job: Job, references: list[Any]) -> None:
    """Ask the tasks of a job to end, and cancel those that go on: Ray (2.60) may abort this process where a
    task is cancelled as it ends.
    """
    import ray

    if not references or not ray.is_initialized():
        return
    flag = None
    with suppress(Exception):
        flag = ray.remote(num_cpus=0)(StopFlag).options(name=job.flag).remote()
    timeout = LOOK_FOR_END + PATIENCE if flag else 0
    _, references = ray.wait(references, num_returns=len(references), timeout=timeout)
    for force in (False, True):
        for reference in references:
            with suppress(Exception):
                ray.cancel(reference, force=force)
        if references:
            _, references = ray.wait(references, num_returns=len(references), timeout=PATIENCE)
    with suppress(Exception):
        ray.kill(flag)
