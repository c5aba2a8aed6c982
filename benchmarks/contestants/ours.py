"""trainpipes, as its README shows it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import trainpipes as tp
import trainpipes.loader  # what loads when it is first used, loads before a clock starts
from benchmarks.contestants.contestant import Cannot, Contestant
from benchmarks.contestants.padding import Batch
from benchmarks.corpus import Data


def pipeline(
    data: Data, *, shards: int | None = 24, engine: str | None = None, cache: Any = None
) -> tp.Pipeline:
    """Files to padded batches.

    Args:
        data: what to read.
        shards: of ``sharding_filter``; None leaves it out.
        engine: of ``tokenize``, if it is to be a certain one.
        cache: a folder: tokenize before the shuffle, and keep that.
    """
    pipe: Any = tp.list_files(data.url).read_parquet(columns=[data.column])
    if shards is not None:
        pipe = pipe.sharding_filter(shards)
    options = {} if engine is None else {"engine": engine}
    if data.text and cache is not None:
        pipe = pipe.tokenize(data.tokenizer, **options).cache(path=str(cache))
    pipe = pipe.shuffle(data.buffer)
    if data.text and cache is None:
        pipe = pipe.tokenize(data.tokenizer, **options)
    made: tp.Pipeline = pipe.batch(data.batch).pad_collate()
    return made


class Trainpipes(Contestant):
    """``for batch in pipe``"""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.loader: Any = self.make()

    def make(self) -> Any:
        return pipeline(self.data)

    def epoch(self) -> Iterator[Batch]:
        return iter(self.loader)

    def told(self) -> int | None:
        found: int | None = self.loader.explain().memory_bytes
        return found

    def ranks(self, world_size: int) -> list[Iterator[Batch]]:
        pipe = pipeline(self.data)
        return [
            iter(pipe.distributed(rank=rank, world_size=world_size)) for rank in range(world_size)
        ]

    def state(self) -> Any:
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)


class Serial(Trainpipes):
    """``Loader(pipe, threads=0)``"""

    def make(self) -> Any:
        if "threads" not in inspect.signature(tp.Loader).parameters:
            raise Cannot("this version has no threads=")
        return tp.Loader(pipeline(self.data), threads=0)  # type: ignore[call-arg]

    def ranks(self, world_size: int) -> list[Iterator[Batch]]:
        raise Cannot("")


class Workers(Trainpipes):
    """``Loader(pipe, num_workers=2)``"""

    def make(self) -> Any:
        return tp.Loader(pipeline(self.data), num_workers=2)


class OneShard(Trainpipes):
    """``sharding_filter`` left out"""

    def make(self) -> Any:
        return pipeline(self.data, shards=None)


class Endless(Trainpipes):
    """``.repeat()``, as documented for a run that counts steps"""

    def make(self) -> Any:
        return pipeline(self.data).repeat()


class SameEngine(Trainpipes):
    """``tokenize(..., engine="tokenizers")``"""

    def make(self) -> Any:
        if "engine" not in inspect.signature(tp.Pipeline.tokenize).parameters:
            return pipeline(self.data)
        return pipeline(self.data, engine="tokenizers")


class Cached(Trainpipes):
    """tokenized before the shuffle, with ``.cache()``"""

    def make(self) -> Any:
        if not hasattr(tp.Pipeline, "cache"):
            raise Cannot("this version has no .cache()")
        folder = self.data.converted("cache")
        return pipeline(self.data, cache=folder)
