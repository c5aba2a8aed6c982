"""The blocks of a dataset of Ray Data: made once, in a fixed order, and reached from each process.

The dataset is carried out when its rows are first asked for, and its blocks stay in Ray's object store. Their
rows are counted, brought to one schema and digested by tasks, so that none of them comes here for it. Made by
the thread that plans; read by several threads.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes.columns.content import table_digest
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, DataError, TrainpipesError
from trainpipes.sources.ray.plain import fitted, one_schema, plain_table

__all__ = ["MadeBlocks", "RayBlocks"]

#: Rows that are digested together: small, since they are in the memory of one node at once. Another number
#: makes all states differ.
DIGEST_ROWS = 8192


@dataclass(frozen=True)
class MadeBlocks:
    """What is known of all blocks.

    Attributes:
        refs: of the blocks that have rows.
        firsts: number of each one's first row, and the number of rows, int64 ``[blocks + 1]``.
        schema: of all rows.
        bytes: of all rows in memory.
    """

    refs: list[Any]
    firsts: IntArray
    schema: pa.Schema
    bytes: int

    @property
    def rows(self) -> int:
        return int(self.firsts[-1])


class RayBlocks:
    """The blocks of a dataset. Pickles: other processes read the same blocks.

    Args:
        dataset: a ``ray.data.Dataset``.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._made: MadeBlocks | None = None
        self._digest: str | None = None
        #: Of blocks that another process made: where its cluster is, and what leads to them.
        self._address: str | None = None
        self._packed: bytes | None = None

    def equals(self, other: RayBlocks) -> bool:
        """Whether both are the blocks of one dataset."""
        if self._dataset is not None and self._dataset is other._dataset:
            return True
        return self._digest is not None and self._digest == other._digest

    def __getstate__(self) -> dict[str, Any]:
        from ray import cloudpickle

        packed, digest = self._packed, self.digest
        if packed is None:
            packed = cloudpickle.dumps(self.made)
        return {"packed": packed, "address": self._address or _address(), "digest": digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None)  # type: ignore[misc]
        self._packed, self._address = state["packed"], state["address"]
        self._digest = state["digest"]

    @property
    def made(self) -> MadeBlocks:
        """All blocks; the dataset is carried out if it was not yet."""
        self._check_process()
        with self._lock:
            if self._made is None:
                self._made = self._reached() if self._packed is not None else self._make()
        return self._made

    @property
    def digest(self) -> str:
        """A digest of the columns' names and types and of all rows, however blocks are cut: 16 hexadecimal
        digits."""
        made = self.made
        with self._lock:
            if self._digest is None:
                self._digest = _digest_of(made)
        return self._digest

    def table(self, number: int) -> pa.Table:
        """The rows of a block."""
        import ray

        made = self.made
        with _reaching(number):
            found: pa.Table = ray.get(made.refs[number])
        if not isinstance(found, pa.Table):
            raise DataError(
                f"block {number} of the dataset is no table, got {type(found).__name__}"
            )
        return found.select(made.schema.names).cast(made.schema)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ConfigError(
                "from_ray(dataset): a process that was forked cannot talk to Ray, which its parent has a "
                'connection to: Loader(multiprocessing_context="spawn"), or num_workers=0'
            )

    def _reached(self) -> MadeBlocks:
        """The blocks that another process made."""
        import ray
        from ray import cloudpickle

        assert self._packed is not None
        if not ray.is_initialized():
            try:
                ray.init(address=self._address, log_to_driver=False, configure_logging=False)
            except ConnectionError as error:
                raise ConfigError(
                    f"from_ray(dataset): the blocks are in Ray's cluster at {self._address}, which cannot be "
                    f"reached from here ({str(error)[:200]}): read where that cluster has a node, while the "
                    "program that made them still runs"
                ) from error
        found: MadeBlocks = cloudpickle.loads(self._packed)
        return found

    def _make(self) -> MadeBlocks:
        refs = _carried_out(self._dataset)
        told = _results(_told, [(ref,) for ref in refs])
        some = [n for n, (rows, *_) in enumerate(told) if rows] or [*range(len(refs))][:1]
        kinds: dict[Any, int] = {}
        for number in some:
            kinds.setdefault(told[number][2], number)
        if not kinds:
            return MadeBlocks([], np.zeros(1, np.int64), pa.schema([]), 0)
        schema = one_schema([(number, kind) for kind, number in kinds.items()])
        whole = [n for n in some if told[n][0]]
        # Those that are as they should be stay where they are.
        odd = [n for n in whole if not (told[n][3] and told[n][2].equals(schema))]
        calls = [(refs[n], schema, n) for n in odd]
        made = dict(zip(odd, _done(_fitted, calls, num_returns=2), strict=True))
        kept = [made[n][1] if n in made else refs[n] for n in whole]
        firsts = np.cumsum([0, *(told[n][0] for n in whole)], dtype=np.int64)
        return MadeBlocks(kept, firsts, schema, sum(told[n][1] for n in whole))


def _carried_out(dataset: Any) -> list[Any]:
    """The blocks of a dataset, in its order."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        bundles = dataset.materialize().iter_internal_ref_bundles()
        return [ref for bundle in bundles for ref in bundle.block_refs]
    finally:
        options.preserve_order = before


def _told(block: Any) -> tuple[int, int, pa.Schema, bool]:
    """Of a block: rows, bytes, the schema of its plain table, and whether it is that already."""
    table = plain_table(block)
    same = isinstance(block, pa.Table) and block.schema.equals(table.schema)
    return len(table), table.nbytes, table.schema, same


def _fitted(block: Any, schema: pa.Schema, number: int) -> tuple[None, pa.Table]:
    """Nothing, and the block in the schema of all: to wait for the first moves no rows."""
    return None, fitted(plain_table(block), schema, number)


def _digest_of(made: MadeBlocks) -> str:
    """Pieces of so many rows are digested each; a task has those that begin in its block, and reads the next
    blocks as far as the last of them goes."""
    parts, firsts = [], made.firsts
    for number in range(len(made.refs)):
        start = -(-int(firsts[number]) // DIGEST_ROWS) * DIGEST_ROWS
        stop = -(-int(firsts[number + 1]) // DIGEST_ROWS) * DIGEST_ROWS
        if start < stop:
            last = int(np.searchsorted(firsts, min(stop, made.rows), side="left"))
            offset = start - int(firsts[number])
            parts.append((offset, stop - start, made.schema, *made.refs[number:last]))
    digest = hashlib.sha256(str(made.schema).encode())
    for found in _results(_digests, parts):
        digest.update("".join(found).encode())
    return digest.hexdigest()[:16]


def _digests(offset: int, rows: int, schema: pa.Schema, *blocks: pa.Table) -> list[str]:
    """Digests of rows of some blocks, from ``offset`` on."""
    whole = pa.concat_tables([block.cast(schema) for block in blocks])
    found = []
    for start in range(offset, min(offset + rows, len(whole)), DIGEST_ROWS):
        found.append(table_digest(whole.slice(start, DIGEST_ROWS)))
    return found


def _results(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    """What a function returns for each call, in tasks of Ray's."""
    import ray

    return list(ray.get([refs[0] for refs in _done(function, calls, num_returns=1)]))


def _done(
    function: Callable[..., Any], calls: list[tuple[Any, ...]], num_returns: int
) -> list[list[Any]]:
    """References to what a function returns for each call; an error of ours is raised as it was.

    The tasks need no core of their own, since those that train may have taken all. So no more of them run at
    a time than there are cores.
    """
    import ray
    from ray.exceptions import RayTaskError

    task = ray.remote(num_cpus=0, num_returns=num_returns)(function)
    most = max(1, int(ray.cluster_resources().get("CPU", 1)))
    found: list[list[Any]] = []
    running: list[Any] = []
    for call in [*calls, None]:
        while running and (call is None or len(running) >= most):
            ended, running = ray.wait(running, num_returns=1)
            try:
                ray.get(ended)
            except RayTaskError as error:
                if isinstance(error.cause, TrainpipesError):
                    raise error.cause from None
                raise
        if call is not None:
            refs = task.remote(*call)
            found.append([refs] if num_returns == 1 else list(refs))
            running.append(found[-1][0])
    return found


def _address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


@contextmanager
def _reaching(number: int) -> Iterator[None]:
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        said = (str(error).strip().splitlines() or [""])[0].partition(". ")[0]
        raise DataError(
            f"from_ray(dataset): block {number} of the dataset is lost ({type(error).__name__}: {said}): "
            "make the dataset again, and load the last state"
        ) from error
