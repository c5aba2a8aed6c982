from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from trainpipes._internal.callers import making_rows
from trainpipes._internal.checks import Schema, require
from trainpipes.columns.payload import Payload
from trainpipes.errors import ConfigError
from trainpipes.errors.text import shown
from trainpipes.interfaces.hints import instead
from trainpipes.interfaces.options import identify, show
from trainpipes.interfaces.source import RowStream, StreamReader
from trainpipes.interfaces.stage_kinds import Source


class FromIterable(Source, gives="objects", holds_data=True):
    """Rows of an iterable that is made anew for each epoch.

    It must give the same items in the same order each time. A resume makes it again and drops used items;
    every rank and worker reads all of it. What has epochs or a state of its own, such as a pipeline or a
    ``DataLoader``, is refused.

    Args:
        factory: a function that returns a fresh iterable; or a list, an ``IterableDataset`` and the like.
        version: names the factory in checkpoints instead of its module and name.
        schema: Arrow types of the items' columns, where these are dicts; see ``map``.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: (i * i for i in range(4))))
    [0, 1, 4, 9]
    """

    free = frozenset({"factory", "version", "schema"})

    factory: Callable[[], Iterable[Any]] | Iterable[Any]
    _: KW_ONLY
    version: str | None = None
    schema: Schema | None = None

    def check(self) -> None:
        factory, takes = self.factory, "a function that returns a fresh iterable, or an iterable"
        way = instead(factory)
        self._require(not way, "factory", takes, way)
        good = (callable(factory) or isinstance(factory, Iterable)) and not isinstance(
            factory, Iterator
        )
        way = "an iterator is empty after one epoch" if isinstance(factory, Iterator) else ""
        self._require(good, "factory", takes, way and f"{way}: pass lambda: ... instead")
        is_set = isinstance(factory, set | frozenset)
        way = "not a set, whose order differs between processes: pass sorted(...)"
        self._require(not is_set, "factory", "data in a fixed order", way)

    def open(self) -> IterableStream:
        return IterableStream(self.factory, self.version)

    _runs_user_code = True

    def __repr__(self) -> str:
        text = super().__repr__()
        return text if len(text) < 120 else f"from_iterable({type(self.factory).__name__})"


@dataclass(eq=False)
class IterableStream(RowStream):
    """The items of an iterable as a stream; a later epoch needs a function that makes it anew."""

    factory: Callable[[], Iterable[Any]] | Iterable[Any]
    version: str | None
    _items: Iterator[Any] | None = None  # the last ones that were opened

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_items": None}

    def open(self, epoch: int, state: dict[str, Any] | None) -> IterableReader:
        iterable: Any = self.factory
        if callable(iterable) and not isinstance(iterable, IterableDataset):
            with making_rows():
                iterable = iterable()
            if not isinstance(iterable, Iterable):
                raise ConfigError(
                    "from_iterable(factory) must be a function that returns an iterable, and "
                    f"{show(self.factory)} returned {shown(iterable)}"
                )
            way = instead(iterable)
            require(
                not way,
                "from_iterable(factory)",
                "a function that returns a fresh iterable",
                iterable,
                way,
            )
        with making_rows():
            items = iter(iterable)
        if items is self._items:
            raise ConfigError(
                f"from_iterable(factory) must give a fresh iterator each time, and {show(self.factory)} "
                "gave the same one again, whose items are used up: make it within the function"
            )
        self._items = items
        return IterableReader(items)

    def fingerprint(self) -> dict[str, Any]:
        if self.version is not None:
            return {"iterable": f"version {identify(self.version)}"}
        factory = self.factory
        return {"iterable": identify(factory) if callable(factory) else type(factory).__qualname__}

    def describe(self) -> list[tuple[str, str]]:
        rows = "an iterable: number of rows unknown; a resume reads and drops the rows already used"
        return [("rows", rows)]


@dataclass(eq=False)
class IterableReader(StreamReader):
    """One pass over an iterable."""

    items: Iterator[Any]

    def read(self, rows: int) -> Payload | None:
        with making_rows():
            return list(islice(self.items, rows)) or None
