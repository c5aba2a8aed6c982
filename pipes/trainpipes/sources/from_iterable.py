"""Rows of an iterable, one after the other: ``from_iterable``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, IterDataPipe

from trainpipes._internal import callers, checks
from trainpipes._internal.checks import Schema
from trainpipes.columns.payload import Payload
from trainpipes.errors import ConfigError, shown
from trainpipes.interfaces import source
from trainpipes.interfaces.options import DRAWS, as_table, identify, instead, instead_of_path, show
from trainpipes.interfaces.stage import made_once
from trainpipes.interfaces.stage_kinds import Source
from trainpipes.interfaces.watched_calls import CALLS, DrawWatch
from trainpipes.order.permutation import random_key
from trainpipes.samplers.torch_samplers import OwnDraws


class FromIterable(Source, gives="objects", holds_data=True):
    """Rows of an iterable that is made anew for each epoch.

    It must give the same items in the same order each time. A resume makes it again and drops used items;
    every rank and worker reads all of it: what keeps a rank's part by itself loses rows, but with
    ``.distributed(rank=0, world_size=1)``. Global generators are seeded for it by the epoch, and put back
    after it, unless ``Loader(threads=)`` is given. What has epochs or a state of its own, such as a pipeline
    or a ``DataLoader``, is refused.

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
        # Of columns the iterator gives the names.
        has_columns = hasattr(factory, "__dataframe__") or isinstance(factory, Mapping)
        table = as_table(factory) if has_columns else ""
        way = f"from_arrow({table}) gives its rows" if table else ""
        way = instead(factory) or instead_of_path(factory) or way
        self._require(not way, "factory", takes, way)
        passes = isinstance(factory, Iterator)
        good = not passes and (callable(factory) or isinstance(factory, Iterable))
        way = "an iterator is empty after one epoch" if passes else ""
        self._require(good, "factory", takes, way and f"{way}: pass lambda: ... instead")
        is_set = isinstance(factory, set | frozenset)
        way = "not a set, whose order differs between processes: pass sorted(...)"
        self._require(not is_set, "factory", "data in a fixed order", way)

    def open(self) -> IterableStream:
        return IterableStream(self.factory, self.version, self._draw_watch)

    _runs_user_code = True

    @made_once
    def _draw_watch(self) -> DrawWatch:
        return DrawWatch(self.factory, str(self), DRAWS["FromIterable"], at_once=True)

    def __repr__(self) -> str:
        text = super().__repr__()
        return text if len(text) < 120 else f"from_iterable({type(self.factory).__name__})"


def _none() -> None:
    return None


@dataclass(eq=False)
class IterableStream(source.RowStream):
    """The items of an iterable as a stream; a later epoch needs a function that makes it anew."""

    factory: Callable[[], Iterable[Any]] | Iterable[Any]
    version: str | None
    watch: DrawWatch
    _last: Callable[[], Any] = _none  # gives the last items that were opened

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": _none}

    def open(self, epoch: int, state: dict[str, Any] | None) -> IterableReader:
        seed = int(random_key(0, "iterable", epoch)[0] >> np.uint64(1))
        call = partial(_called, OwnDraws(seed), self.watch)
        with callers.making_rows():
            items = call(self._opened)
        if items is self._last():
            raise ConfigError(
                f"from_iterable(factory) must give a fresh iterator each time, and {show(self.factory)} "
                "gave the same one again, whose items are used up: make it within the function"
            )
        try:  # a generator that nobody reads any more is closed
            self._last = weakref.ref(items)
        except TypeError:
            self._last = lambda: items
        # islice() calls iter() again, at which some begin anew
        return IterableReader(chain(items), call)

    def _opened(self) -> Iterator[Any]:
        iterable: Any = self.factory
        if callable(iterable) and not isinstance(iterable, IterableDataset):
            iterable = iterable()
            if not isinstance(iterable, Iterable):
                raise ConfigError(
                    "from_iterable(factory) must be a function that returns an iterable, and "
                    f"{show(self.factory)} returned {shown(iterable)}"
                )
            way, rule = instead(iterable), "a function that returns a fresh iterable"
            checks.require(not way, "from_iterable(factory)", rule, iterable, way)
        if isinstance(iterable, IterDataPipe):  # whose second pass ends the first one
            iterable = deepcopy(iterable)
        return iter(iterable)

    def fingerprint(self) -> dict[str, Any]:
        if self.version is not None:
            return {"iterable": f"version {identify(self.version)}"}
        factory = self.factory
        return {"iterable": identify(factory) if callable(factory) else type(factory).__qualname__}

    def describe(self) -> list[tuple[str, str]]:
        rows = "an iterable: number of rows unknown; a resume reads and drops the rows already used"
        return [("rows", rows)]


def _called(draws: OwnDraws, watch: DrawWatch, fn: Callable[[], Any]) -> Any:
    """What a function returns that draws for itself. Other threads would draw from the same generators: in a
    pool it is watched.
    """
    if threading.current_thread() is not threading.main_thread():
        return watch.around(fn)()
    with draws.within(most_idle=CALLS):
        return fn()


@dataclass(eq=False)
class IterableReader(source.StreamReader):
    """One pass over an iterable."""

    items: Iterator[Any]
    call: Callable[[Callable[[], Any]], Any] = lambda fn: fn()

    def read(self, rows: int) -> Payload | None:
        with callers.making_rows():
            items: list[Any] = self.call(lambda: list(islice(self.items, rows)))
        return items or None
