"""``from_iterable``: rows of anything that can be iterated, from its start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY
from itertools import islice
from typing import Any

import pyarrow as pa
from torch.utils.data import IterableDataset

from trainpipes._internal.checks import checked_schema
from trainpipes._internal.text import shown
from trainpipes.columns.payload import Payload
from trainpipes.errors import ConfigError
from trainpipes.kinds.options import identify, show
from trainpipes.kinds.source import RowStream, StreamReader
from trainpipes.kinds.stage_kinds import Source


class FromIterable(Source):
    """Rows of an iterable that is made anew for each epoch.

    Out: the items, unchanged. Cursor: a count. An iterable cannot seek: a resume makes it again and drops
    the items already used, and with ``sharding_filter`` every rank and worker reads all of it. The factory
    must give the same items in the same order each time.

    Args:
        factory: function without arguments that returns a fresh iterable; or a re-iterable object
            such as a list or an ``IterableDataset``.
        version: names the factory in checkpoints instead of its module and name.
        schema: Arrow types of the items' columns, where these are dicts; see ``map``.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: (i * i for i in range(4))))
    [0, 1, 4, 9]
    """

    makes_objects = True
    holds_data = True
    free = frozenset({"factory", "version", "schema"})

    factory: Callable[[], Iterable[Any]] | Iterable[Any]
    _: KW_ONLY
    version: str | None = None
    schema: pa.Schema | None = None

    def check(self) -> None:
        factory = self.factory
        if isinstance(factory, Iterator):
            raise ConfigError(
                "from_iterable(factory) takes a function that returns a fresh iterable, got an iterator "
                f"({type(factory).__name__}), which is empty after one epoch: pass lambda: ... instead"
            )
        if isinstance(factory, set | frozenset):
            raise ConfigError(
                "from_iterable(factory) needs data in a fixed order, got a set, whose order differs "
                "between processes: pass sorted(...)"
            )
        if not callable(factory) and not isinstance(factory, Iterable):
            raise ConfigError(
                f"from_iterable(factory) takes a function that returns an iterable, got {shown(factory)}"
            )
        checked_schema(self.schema, "from_iterable(schema)")

    def open(self) -> IterableStream:
        return IterableStream(self.factory, self.version)

    runs_user_code = True

    def __repr__(self) -> str:
        text = super().__repr__()
        return text if len(text) < 120 else f"from_iterable({type(self.factory).__name__})"


class IterableStream(RowStream):
    """An iterable made anew for each pass."""

    def __init__(
        self, factory: Callable[[], Iterable[Any]] | Iterable[Any], version: str | None
    ) -> None:
        self._factory = factory
        self._version = version

    def open(self, epoch: int, state: dict[str, Any] | None) -> IterableReader:
        factory = self._factory
        if callable(factory) and not isinstance(factory, IterableDataset):
            found = factory()
            if not isinstance(found, Iterable):
                raise ConfigError(
                    f"from_iterable(factory) takes a function that returns an iterable, and {show(factory)} "
                    f"returned {shown(found)}"
                )
            return IterableReader(iter(found))
        assert isinstance(factory, Iterable)
        return IterableReader(iter(factory))

    def fingerprint(self) -> dict[str, Any]:
        if self._version is not None:
            return {"iterable": f"version {self._version}"}
        factory = self._factory
        return {"iterable": identify(factory) if callable(factory) else type(factory).__qualname__}

    def describe(self) -> list[tuple[str, str]]:
        return [
            (
                "rows",
                "an iterable: number of rows unknown; a resume reads and drops the rows already used",
            )
        ]


class IterableReader(StreamReader):
    """One pass over an iterable."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def read(self, rows: int) -> Payload | None:
        return list(islice(self._items, rows)) or None
