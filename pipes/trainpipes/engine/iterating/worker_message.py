"""What a ``Loader``'s worker sends: several batches in one message, of at most 8 MiB.

Tensors below 1 MiB leave their values in memory that forked workers share with their parent, or,
without such memory or room, in the message (pickle protocol 5). Larger ones travel as torch sends
them.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import pickle
from dataclasses import dataclass, field
from multiprocessing import sharedctypes
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch._utils import ExceptionWrapper

from trainpipes._internal.activity_sampler import Counts
from trainpipes._internal.locks import InterruptibleLock
from trainpipes.engine.shards.lane import ENDED
from trainpipes.errors import DataError
from trainpipes.interfaces.stage import Numbers

#: Most bytes of several batches in one message: of values, and of pickles beside them.
MOST_BYTES, BESIDE = 8 << 20, 64 << 10
#: Bytes from which on torch sends a tensor.
ALONE_BYTES = 1 << 20
#: Where a tensor may start.
ALIGNED = 64
#: In the shared numbers: the epoch at whose start the pass starts, -1 where that is the position that workers
#: were given; the batch that the parent waits for; whether a profile is taken; from here on how many messages
#: of each worker it has unpacked, then which batch each worker makes.
_EPOCH, _DUE, _PROFILED, _UNPACKED = range(4)


class Packed(NamedTuple):
    """A batch on its way. ``values``: of each small tensor, or their place in shared memory."""

    pickled: bytes
    values: list[Any]
    size: int


@dataclass
class WorkerMessage:
    """What a worker sends at a time, perhaps nothing.

    Args:
        items: in order: number; batch, None where the shard has ended, PASSED where it is another rank's,
            or an exception; JSON cursor of its shard after it, if it needs one.
    """

    worker: int
    #: Of the worker's messages, from the first that its memory was used for.
    number: int = 0
    items: list[tuple[int, Packed | ExceptionWrapper | str | None, str]] = field(
        default_factory=list
    )
    schemas: dict[str, pa.Schema | None] = field(default_factory=dict)
    #: What its stages counted since the last message.
    counted: list[Numbers] = field(default_factory=list)
    #: What its threads did since then, if a profile wants to know.
    profile: Counts | None = None

    @property
    def batches(self) -> list[Packed]:
        return [made for _, made, _ in self.items if isinstance(made, Packed)]

    @property
    def has_failed(self) -> bool:
        return bool(self.items) and isinstance(self.items[-1][1], ExceptionWrapper)

    def has_room(self, batch: Packed) -> bool:
        held = sum(other.size for other in self.batches)
        return not held or held + batch.size <= MOST_BYTES + BESIDE


class WorkerMemory:
    """Numbers that a ``Loader`` shares with its workers, and room for batches. A worker fills its places in
    turn; one is free again once the parent has unpacked its message.
    """

    def __init__(self, workers: int, ahead: int) -> None:
        self.workers = workers
        self.ahead = ahead
        self._numbers: Any = sharedctypes.RawArray("q", _UNPACKED + 2 * workers)
        self._numbers[_EPOCH] = -1
        self._numbers[_UNPACKED + workers :] = [-1] * workers
        #: Messages of a worker for which there is room: those ahead, one in the making, one being unpacked.
        self._each = ahead + 2
        # Unused pages take no memory.
        self._map: Any = mmap.mmap(-1, workers * self._each * MOST_BYTES)
        self._room: Any = memoryview(self._map)
        #: Of each worker the messages that were unpacked before an earlier one.
        self._early: list[set[int]] = [set() for _ in range(workers)]
        self._lock: Any = InterruptibleLock()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_room": None, "_map": None, "_lock": None}

    def begin(self, epoch: int) -> None:
        self.shrink()
        for early in self._early:
            early.clear()
        self._numbers[_EPOCH], self._numbers[_DUE] = epoch, 0

    def leave(self) -> None:
        """No further message is unpacked: workers need not wait for it."""
        self._numbers[_UNPACKED : _UNPACKED + self.workers] = [1 << 62] * self.workers

    def shrink(self) -> None:
        """Give back the pages of messages: no worker is at work."""
        if hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE)

    @property
    def start(self) -> int | None:
        """The epoch at whose start the pass starts; None for the position that workers got."""
        epoch = int(self._numbers[_EPOCH])
        return None if epoch < 0 else epoch

    @property
    def due(self) -> int:
        return int(self._numbers[_DUE])

    @due.setter
    def due(self, m: int) -> None:
        self._numbers[_DUE] = m

    @property
    def is_profiled(self) -> bool:
        return bool(self._numbers[_PROFILED])

    @is_profiled.setter
    def is_profiled(self, on: bool) -> None:
        self._numbers[_PROFILED] = on

    def unpacked(self, worker: int) -> int:
        """How many messages of a worker were unpacked, up to the first that was not."""
        return int(self._numbers[_UNPACKED + worker])

    def makes(self, worker: int, m: int) -> None:
        self._numbers[_UNPACKED + self.workers + worker] = m

    def made_by(self, worker: int) -> int | None:
        m = int(self._numbers[_UNPACKED + self.workers + worker])
        return None if m < 0 else m

    def place(self, message: WorkerMessage) -> None:
        """Put the tensors of a message in shared memory, as far as there is room."""
        worker, number, each = message.worker, message.number, self._each
        room = self._room if number - self.unpacked(worker) < each else None
        at = (worker * each + number % each) * MOST_BYTES
        end = at + MOST_BYTES
        for batch in message.batches:
            for n, value in enumerate(batch.values):
                stop = at + value.nbytes
                if room is None or stop > end:
                    batch.values[n] = bytearray(value)
                else:
                    room[at:stop] = value
                    batch.values[n] = (at, stop)
                    at = stop + -stop % ALIGNED

    def unpacked_batch(self, made: Packed | ExceptionWrapper | str | None) -> Any:
        if not isinstance(made, Packed):
            return ENDED if made is None else made
        values = [self._room[slice(*v)] if type(v) is tuple else v for v in made.values]
        return pickle.loads(made.pickled, buffers=values)

    def has_unpacked(self, worker: int, number: int) -> None:
        """A message was unpacked, perhaps by another thread than one before it that still is."""
        early, at = self._early[worker], _UNPACKED + worker
        with self._lock:
            early.add(number)
            while self._numbers[at] in early:
                early.remove(self._numbers[at])
                self._numbers[at] += 1


class _Pickler(ForkingPickler):
    """Pickles a message, and keeps the values of its tensors out of the pickle's bytes."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, 5, True, self._beside)
        self.values: list[memoryview] = []
        self.size = 0  # of large tensors
        self._ours: pickle.PickleBuffer | None = None

    def _beside(self, buffer: pickle.PickleBuffer) -> bool:
        """Keep a tensor's values out of band; True has any other buffer pickled."""
        if buffer is not self._ours:
            return True
        self.values.append(buffer.raw())
        return False

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if not _is_small(value):
            self.size += value.nbytes if value.layout == torch.strided else 0
            return NotImplemented
        flat = value.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        values: Any = flat.numpy()
        self._ours = pickle.PickleBuffer(values)
        return _tensor, (self._ours, value.dtype, tuple(value.shape))


def _is_small(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    fits = 0 < tensor.nbytes < ALONE_BYTES
    return fits and tensor.device.type == "cpu" and not tensor.requires_grad


def _tensor(values: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # clone() has a thread for each core copy, and waits for all of them while workers have the cores.
    own, given = torch.empty(shape, dtype=dtype), np.frombuffer(values, np.uint8)
    ctypes.memmove(own.data_ptr(), given.ctypes.data, given.nbytes)
    return own


def pack(batch: Any) -> Packed:
    pickler = _Pickler()
    try:
        pickler.dump(batch)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise DataError(
            f"a batch must pickle to reach the process that trains, and does not ({error}); make tensors "
            "of it before it leaves the pipeline, or use threads instead of num_workers"
        ) from error
    size = pickler.size + sum(value.nbytes for value in pickler.values)
    pickled = pickler.file.getvalue()
    return Packed(pickled, pickler.values, size + len(pickled))


def failure(worker: int) -> ExceptionWrapper:
    """The current exception, to be sent; a ``RuntimeError`` if its class can't be."""
    failed = ExceptionWrapper(where=f"in DataLoader worker process {worker}")  # type: ignore[no-untyped-call]
    try:
        pickle.dumps(failed)
    except Exception:  # such as a class within a function
        failed.exc_type = RuntimeError
    return failed
