"""The base of samplers, and their indices one by one, as torch asks for them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import Sampler

from trainpipes._internal.checks import flag, require, whole_number
from trainpipes._internal.types import IntArray
from trainpipes.columns.content import short_digest
from trainpipes.errors import ConfigError, StateError

#: Indices made at a time where they are asked for one by one.
AHEAD = 4096


class RowSampler(Sampler[int]):
    """The base of all samplers of rows. A sampler of your own defines ``length`` and ``index``.

    Each ``iter()`` is the next epoch; ``set_epoch`` chooses another. The iterator has ``state_dict`` and
    ``load_state_dict``: epoch, position, and what identifies the sampler.

    Args:
        rows: number of rows to choose from; a pipeline needs none.

    >>> import numpy as np
    >>> class Odd(RowSampler):
    ...     def length(self, rows):
    ...         return rows // 2
    ...
    ...     def index(self, epoch, start, stop, rows):
    ...         return np.arange(start, stop) * 2 + 1
    >>> list(Odd(7))
    [1, 3, 5]
    """

    _options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, rows: Sized | int | None = None) -> None:
        option = f"{type(self).__name__}(data_source)"
        if rows is not None and not isinstance(rows, int):
            rule = "a dataset with a length, or a number of rows"
            require(isinstance(rows, Sized), option, rule, rows)
            rows = len(rows)
        if rows is not None:
            whole_number(rows, 0, option, "rows")
        self.rows = rows
        self._epoch = 0

    @abstractmethod
    def length(self, rows: int) -> int:
        """Indices in an epoch over ``rows`` rows."""

    @abstractmethod
    def index(self, epoch: int, start: int, stop: int, rows: int) -> IntArray:
        """The rows at positions ``start`` to ``stop`` (excluded) of an epoch, int64: a pure function."""

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the sampler in a state, of JSON types."""
        options = {name: getattr(self, name) for name in self._options}
        return {"sampler": type(self).__name__, **options}

    def _named(self, what: str, values: np.ndarray[Any, Any]) -> dict[str, Any]:
        """The same with how many numbers it was given, and their digest."""
        named = {"sampler": "", what: len(values), "digest": short_digest(values.tobytes())}
        return named | RowSampler.fingerprint(self)

    def check(self, rows: int) -> None:
        """Raise unless it can sample from ``rows`` rows.

        Raises:
            ConfigError: it was made for another number of them.
        """
        if self.rows is not None and self.rows != rows:
            raise ConfigError(
                f"{self} was made for {self.rows:,} rows, and there are {rows:,}: make it for this dataset"
            )

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` be epoch ``epoch``."""
        self._epoch = epoch

    def _known_rows(self) -> int:
        if self.rows is None:
            raise ConfigError(
                f"{self} does not know how many rows there are: outside a pipeline, pass the dataset or "
                "their number first"
            )
        return self.rows

    def __len__(self) -> int:
        return self.length(self._known_rows())

    def __iter__(self) -> Draws:
        return Draws(self)

    def __repr__(self) -> str:
        options = list(self.fingerprint().items())[1:]
        said = [f"{k}={v!r}" for k, v in options if v is not None and v is not False]
        return f"{type(self).__name__}({', '.join(said)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowSampler):
            return NotImplemented
        return (self.fingerprint(), self.rows) == (other.fingerprint(), other.rows)

    def __hash__(self) -> int:
        return hash(type(self).__name__)


class Draws(Iterator[int]):
    """The indices of one epoch, one by one."""

    def __init__(
        self, sampler: RowSampler, stride: tuple[int, int] = (1, 0), length: int | None = None,
        of: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._sampler, self._rows = sampler, sampler._known_rows()
        self._step, self._shift = stride
        self._length = sampler.length(self._rows) if length is None else length
        self._of = of or sampler.fingerprint()
        self._epoch: int | None = None
        self._at = 0  # position over all parts
        self._held: list[int] = []
        self._next = 0

    def __next__(self) -> int:
        if self._epoch is None:
            self._epoch, self._sampler._epoch = self._sampler._epoch, self._sampler._epoch + 1
        if self._next == len(self._held):
            first = self._at + self._shift
            stop = min(self._length, first + AHEAD * self._step)
            if first >= stop:
                raise StopIteration
            drawn = self._sampler.index(self._epoch, first, stop, self._rows)[:: self._step]
            self._held, self._next = drawn.tolist(), 0
        self._next += 1
        self._at += self._step
        return self._held[self._next - 1]

    def state_dict(self) -> dict[str, Any]:
        """Where the next index stands, of JSON types."""
        epoch = self._sampler._epoch if self._epoch is None else self._epoch
        return {"epoch": epoch, "position": self._at, "of": self._of}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken, also of another number of replicas."""
        if state.get("of") != self._of:
            raise StateError(
                f"this state is of the sampler {state.get('of')}, and this is {self._of}"
            )
        self._epoch, self._at = int(state["epoch"]), int(state["position"])
        self._sampler._epoch = self._epoch + 1
        self._held, self._next = [], 0


class BatchSampler(Sampler[list[int]]):
    """Batches of another sampler's indices, as lists.

    In a pipeline (``from_dataset(dataset, batch_sampler=...)``) it is
    ``.shuffle(sampler=sampler).batch(...)``.

    Args:
        sampler: gives the indices.
        batch_size: of each batch.
        drop_last: leave out a short last one.

    >>> from trainpipes.samplers import SequentialSampler
    >>> list(BatchSampler(SequentialSampler(5), batch_size=2))
    [[0, 1], [2, 3], [4]]
    """

    def __init__(self, sampler: RowSampler, batch_size: int, drop_last: bool = False) -> None:
        good, rule = isinstance(sampler, RowSampler), "one of trainpipes.samplers"
        require(good, "BatchSampler(sampler)", rule, sampler, "torch's BatchSampler takes torch's")
        self.sampler = sampler
        self.batch_size = whole_number(batch_size, 1, "BatchSampler(batch_size)", "rows in a batch")
        self.drop_last = flag(drop_last, "BatchSampler(drop_last)")

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` be epoch ``epoch``."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        rows = len(self.sampler)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return _Batches(self)

    def __repr__(self) -> str:
        last = ", drop_last=True" if self.drop_last else ""
        return f"BatchSampler({self.sampler!r}, {self.batch_size}{last})"


class _Batches(Iterator[list[int]]):
    """The indices of one epoch in batches, with the state of the sampler's ``Draws``."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._draws = iter(sampler.sampler)
        self._size, self._drop_last = sampler.batch_size, sampler.drop_last
        self.state_dict, self.load_state_dict = self._draws.state_dict, self._draws.load_state_dict

    def __next__(self) -> list[int]:
        batch = list(islice(self._draws, self._size))
        if not batch or (self._drop_last and len(batch) < self._size):
            raise StopIteration
        return batch
