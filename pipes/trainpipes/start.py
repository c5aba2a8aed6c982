"""The functions that a pipeline starts with: where its rows come from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec

import pyarrow as pa

from trainpipes.errors import ConfigError
from trainpipes.pipeline import Pipeline
from trainpipes.runtime.kinds import Source
from trainpipes.runtime.stage import snake_case
from trainpipes.samplers import BatchSampler, RowSampler
from trainpipes.shown import shown
from trainpipes.sources.arrow import FromArrow
from trainpipes.sources.concat import Concat
from trainpipes.sources.dataset import FromDataset
from trainpipes.sources.files import ListFiles
from trainpipes.sources.iterable import FromIterable
from trainpipes.sources.memmap import FromMemmap
from trainpipes.sources.memmap_dataset import MemmapDataset
from trainpipes.sources.mix import Mix
from trainpipes.sources.tensors import FromTensors

__all__ = [
    "concat",
    "from_arrow",
    "from_dataset",
    "from_iterable",
    "from_memmap",
    "from_source",
    "from_tensors",
    "list_files",
    "mix",
]


P = ParamSpec("P")


def from_source(source: Source) -> Pipeline:
    """The rows of a source of your own: see docs/extend.md for one in 20 lines.

    Args:
        source: its stage.
    """
    if not isinstance(source, Source):
        raise ConfigError(
            f"from_source(source) takes one of your own class of trainpipes.Source, got {shown(source)}"
        )
    return Pipeline([source])


def starting(stage: Callable[P, Source]) -> Callable[P, Pipeline]:
    """The function that starts a pipeline with a source: its parameters and its text are those of the
    source's class."""
    kind: Any = stage

    def start(*args: Any, **options: Any) -> Pipeline:
        return Pipeline([kind(*args, **options)])

    start.__name__ = start.__qualname__ = snake_case(kind.__name__)
    start.__doc__, start.__module__ = kind.__doc__, kind.__module__
    signature = inspect.signature(kind).replace(return_annotation="Pipeline")
    start.__signature__ = signature  # type: ignore[attr-defined]
    return start


list_files = starting(ListFiles)
from_arrow = starting(FromArrow)
from_iterable = starting(FromIterable)
from_memmap = starting(FromMemmap)
mix = starting(Mix)


def from_dataset(
    dataset: Any,
    sampler: Iterable[Any] | None = None,
    *,
    batch_sampler: Iterable[Any] | None = None,
    schema: pa.Schema | None = None,
) -> Pipeline:
    """Rows of a map-style torch ``Dataset``. See ``FromDataset``; with a sampler of
    ``trainpipes.samplers``, also ``Draw``."""
    ours = sampler if batch_sampler is None else batch_sampler
    if sampler is not None and batch_sampler is not None:
        raise ConfigError("from_dataset(...) takes a sampler or a batch_sampler, got both")
    if isinstance(batch_sampler, RowSampler) or isinstance(sampler, BatchSampler):
        raise ConfigError(
            "from_dataset(...): a BatchSampler is passed as batch_sampler=, one of rows as sampler=, got "
            f"{ours!r}"
        )
    if isinstance(ours, BatchSampler):
        drawn = from_dataset(dataset, schema=schema).draw(ours.sampler)
        return drawn.batch(ours.batch_size, drop_last=ours.drop_last)
    if isinstance(ours, RowSampler):
        return from_dataset(dataset, schema=schema).draw(ours)
    if isinstance(dataset, MemmapDataset) and ours is None and schema is None:
        return Pipeline([FromMemmap(**dataset.options)])
    stage = FromDataset(
        dataset=dataset, sampler=sampler, batch_sampler=batch_sampler, schema=schema
    )
    return Pipeline([stage])


def from_tensors(*tensors: Any, **named: Any) -> Pipeline:
    """Rows of tensors of one first dimension: tuples, or dicts if given by name. See ``FromTensors``."""
    if tensors and named:
        raise ConfigError("from_tensors(...) takes tensors by position or by name, got both")
    if named:
        return Pipeline([FromTensors(tuple(named.values()), tuple(named))])
    return Pipeline([FromTensors(tensors)])


def concat(*pipelines: Pipeline) -> Pipeline:
    """The rows of several pipelines, one after the other. See ``Concat``."""
    return Pipeline([Concat(pipelines)])
