"""The executor ``Ray``: a connection to a Ray cluster, and the tasks of a job on it. How functions are called
there for rows is in ``ray_tasks``, and what they do there in ``ray_worker``.

A cluster of the process's ``ray.init()`` is used as it is; to any other one ``trainpipes`` is shipped. Ship
your own modules by ``ray.init(runtime_env={"working_dir": "."})``; functions of ``__main__`` travel with the
pipeline."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields
from importlib.util import find_spec
from itertools import chain
from typing import Any, TypeVar

from trainpipes._internal.checks import byte_count, flag, need, require, whole_number
from trainpipes.engine.processes import ray_tasks, ray_worker
from trainpipes.engine.processes.executors import feed, refuse_memory
from trainpipes.engine.processes.process_worker import Call
from trainpipes.engine.processes.worker_pool import WorkerPool, end_all
from trainpipes.errors import ConfigError, UnreachableError, WorkerError

T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")

#: Packages that the driver ships to the nodes.
SHIPPED = ("trainpipes", "trainpipes_recipes")
#: Tasks in flight for each core: more than one, so that a worker need not wait for the driver, and an
#: autoscaler sees that more nodes are wanted; and at least, for a cluster without nodes before there is work.
IN_FLIGHT, LEAST_IN_FLIGHT = 2, 8
#: Seconds between two looks at how many cores there are.
LOOK = 5.0
#: Seconds that the machine of an address has to take a connection.
KNOCK = 10.0
#: What this process has connected by, and the address that Ray has for the cluster that it came to: others
#: than "10.0.0.1:6379" are "head:6379", "ray://10.0.0.1:10001" and "local".
_reached: dict[str, str] = {}


@dataclass
class Ray:
    """Tasks on a Ray cluster. What they read and write is at URLs, unless all nodes see the same files.

    Args:
        address: as ``ray.init()`` takes it. If left out, the cluster that this process is connected to, that
            of ``RAY_ADDRESS``, or a cluster that is started on this machine.
        shared_filesystem: whether all nodes see the same files at the same paths, as with NFS.
        num_workers: how many tasks call functions at once, for ``map`` and ``Loader``; by default one for
            each core that the cluster has when they begin.
        num_cpus: cores that a task takes.
        resources: of Ray that a task takes, such as ``{"decoder": 1}``.
        max_in_flight: bytes of rows that are on their way to functions at once, at most.

    >>> import trainpipes as tp
    >>> tp.Ray("10.0.0.1:6379", num_workers=32)
    Ray(address='10.0.0.1:6379', num_workers=32)
    """

    address: str | None = None
    shared_filesystem: bool = False
    _: KW_ONLY
    num_workers: int | None = None
    num_cpus: float = 1
    resources: Mapping[str, float] | None = None
    max_in_flight: int | str = "1GB"
    _own: bool = field(default=False, init=False, repr=False, compare=False)  # it has connected
    #: Tasks must run on this machine.
    _pinned: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        flag(self.shared_filesystem, "Ray(shared_filesystem)")
        if self.address is not None:
            rule = 'that of a cluster, such as "10.0.0.1:6379" or "ray://10.0.0.1:10001"'
            good = isinstance(self.address, str) and self.address
            require(good, "Ray(address)", rule, self.address)
        if self.num_workers is not None:
            whole_number(self.num_workers, 1, "Ray(num_workers)", "how many tasks work at once")
        cpus, rule = self.num_cpus, 'a dict of amounts by names, such as {"decoder": 1}'
        is_number = isinstance(cpus, int | float) and not isinstance(cpus, bool) and cpus >= 0
        require(is_number, "Ray(num_cpus)", "a number of cores", cpus)
        require(isinstance(self.resources, Mapping | None), "Ray(resources)", rule, self.resources)
        self.max_in_flight = byte_count(self.max_in_flight, "Ray(max_in_flight)")

    def __repr__(self) -> str:
        options = {f.name: (getattr(self, f.name), f.default) for f in fields(self) if f.repr}
        options["max_in_flight"] = self.max_in_flight, byte_count("1GB", "")
        given = [f"{name}={value!r}" for name, (value, usual) in options.items() if value != usual]
        return f"Ray({', '.join(given)})"

    def _join(self) -> None:
        """Connect to the cluster, until this process ends, or a context of the user's does."""
        own = self._own
        self.__enter__()
        self._own = own
        # Ray's own end comes last, so that no worker asks it for more.
        atexit.unregister(end_all)
        atexit.register(end_all)

    def _answering(
        self,
        call: Call,
        *,
        timeout: float | None = None,
        idle: float | None = None,
        shares: bool = False,
    ) -> WorkerPool:
        self._join()
        most = byte_count(self.max_in_flight, "Ray(max_in_flight)")
        return ray_tasks.ray_pool(
            self._remote(ray_worker.do_call), call, self.workers, most, timeout, idle
        )

    def _remote(self, fn: Callable[..., Any]) -> Any:
        """A function as tasks of this executor."""
        import ray

        given: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "resources": dict(self.resources or {}),
        }
        if self._pinned:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            here = ray.get_runtime_context().get_node_id()
            given["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
        return ray.remote(max_retries=0, retry_exceptions=False, **given)(fn)

    def __enter__(self) -> Ray:
        need("ray", "executor=Ray()")
        import ray

        self._pinned = False
        if not ray.is_initialized():
            self._connect()
            self._own = True
            if self.address is not None:
                _reached[self.address] = ray.get_runtime_context().gcs_address
            return self
        if self.address is None:
            return self
        gcs = ray.get_runtime_context().gcs_address
        known = list(filter(None, ["auto", gcs, os.environ.get("RAY_ADDRESS")]))
        if self.address not in known and _reached.get(self.address) != gcs:
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

        address = self.address or os.environ.get("RAY_ADDRESS") or ""
        options: dict[str, Any] = {"log_to_driver": False}
        # A job that was submitted with modules of its own may give no others.
        if '"py_modules"' not in os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", ""):
            paths = [spec.origin for spec in map(find_spec, SHIPPED) if spec and spec.origin]
            options["runtime_env"] = {"py_modules": [os.path.dirname(path) for path in paths]}
        if "://" not in address:
            options |= {"include_dashboard": False, "configure_logging": False}
        logging.getLogger("ray").setLevel(logging.ERROR)  # what matters to a user comes as an error
        try:
            host, _, port = address.rpartition("://")[2].rpartition(":")
            if host and port.isdigit():  # where nobody listens, Ray tries for minutes
                socket.create_connection((host.strip("[]"), int(port)), KNOCK).close()
            with _own_sigterm(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray's, of its own future
                ray.init(self.address, **options)
        except Exception as error:  # Ray raises some as such
            said = " ".join(str(error).split())
            raise UnreachableError(
                f"no Ray cluster can be used at {address or 'this machine'} ({said}); give the "
                "address of one that runs, which `ray start --head` prints, or leave address and "
                "RAY_ADDRESS out to use this machine alone"
            ) from error

    @property
    def workers(self) -> int:
        """``num_workers``, or the cores of all nodes, as Ray counts them."""
        if self.num_workers is not None:
            return self.num_workers
        need("ray", "executor=Ray()")
        import ray

        if not ray.is_initialized():
            self._join()
        return max(1, int(ray.cluster_resources().get("CPU", 0)))

    def check_path(self, path: str, option: str) -> None:
        """Raise ConfigError where nodes cannot get at a path. A cluster of a single node keeps its tasks
        there.
        """
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

        remote = self._remote(ray_worker.do_task)
        job = ray_worker.Job(secrets.token_hex(8), [ray_tasks.put((fn, open_state))])
        running: dict[Any, tuple[T, int]] = {}
        waiting = ((task, 1) for task in tasks)
        died: deque[tuple[T, int]] = deque()  # they come last, when less runs beside them

        def most() -> int:  # a cluster may grow
            return max(LEAST_IN_FLIGHT, IN_FLIGHT * self.workers)

        def begin(task: tuple[T, int]) -> None:
            running[remote.remote(task[0], job)] = task

        def again() -> Iterator[tuple[T, int]]:
            while died:
                yield died.popleft()

        try:
            while feed(chain(waiting, again()), running, most(), begin):
                for reference in ray.wait([*running], num_returns=1, timeout=LOOK)[0]:
                    task, tries = running.pop(reference)
                    try:
                        done = ray_tasks.result_of(reference, str(task), tries)
                    except WorkerError as error:
                        ray_tasks.check_again(error, str(task), tries)
                        died.append((task, tries + 1))
                        continue
                    if isinstance(done, ray_worker.Failed):
                        raise done.error
                    yield task, done
        finally:
            job.end()
            ray_tasks.end_tasks([*running], job)


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
