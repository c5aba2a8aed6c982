"""The functions that a pipeline starts with: where its rows come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from trainpipes.errors import ConfigError
from trainpipes.pipeline import Pipeline
from trainpipes.runtime.mixing.mix_rules import Stop
from trainpipes.runtime.stage import Stage
from trainpipes.samplers import BatchSampler, RowSampler
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
    "from_tensors",
    "list_files",
    "mix",
]


def list_files(
    urls: Any,
    *,
    suffix: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    retry_seconds: float = 120.0,
) -> Pipeline:
    """Files by path, folder, glob (also ``**``), any fsspec URL, or a list of these. See ``ListFiles``.

    >>> import trainpipes as tp
    >>> tp.list_files("data/*.parquet").read_parquet(columns=["text"]).batch(32)
    list_files('data/*.parquet')
      .read_parquet(columns=['text'])
      .batch(32)
    """
    stage = ListFiles(
        urls=urls, suffix=suffix, storage_options=storage_options, retry_seconds=retry_seconds
    )
    return _start(stage)


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
        return _start(FromMemmap(**dataset.options))
    stage = FromDataset(
        dataset=dataset, sampler=sampler, batch_sampler=batch_sampler, schema=schema
    )
    return _start(stage)


def from_memmap(
    path: Any,
    *,
    columns: Sequence[str] | None = None,
    transform: Callable[[Any], Any] | None = None,
    version: str | None = None,
    dtype: Any = None,
    length: int | None = None,
    labels: bool = False,
) -> Pipeline:
    """Rows of files of ``write_memmap``, or of bare numbers. See ``FromMemmap``."""
    stage = FromMemmap(
        path=path, columns=columns, transform=transform, version=version, dtype=dtype, length=length,
        labels=labels,
    )  # fmt: skip
    return _start(stage)


def from_arrow(table: Any) -> Pipeline:
    """Rows of a ``pyarrow.Table`` in memory. See ``FromArrow``."""
    return _start(FromArrow(table=table))


def from_tensors(*tensors: Any, **named: Any) -> Pipeline:
    """Rows of tensors of one first dimension: tuples, or dicts if given by name. See ``FromTensors``."""
    if tensors and named:
        raise ConfigError("from_tensors(...) takes tensors by position or by name, got both")
    if named:
        return _start(FromTensors(tensors=tuple(named.values()), names=tuple(named)))
    return _start(FromTensors(tensors=tensors))


def concat(*pipelines: Pipeline) -> Pipeline:
    """The rows of several pipelines, one after the other. See ``Concat``."""
    return _start(Concat(pipelines=pipelines))


def from_iterable(
    factory: Callable[[], Iterable[Any]] | Iterable[Any],
    *,
    version: str | None = None,
    schema: pa.Schema | None = None,
) -> Pipeline:
    """Rows of what a function returns, made anew each epoch; no seeking. See ``FromIterable``."""
    return _start(FromIterable(factory=factory, version=version, schema=schema))


def mix(
    sources: Mapping[str, Pipeline],
    *,
    weights: Mapping[str, float] | None = None,
    by: Literal["rows", "tokens"] = "rows",
    tokens: str = "input_ids",
    temperature: float | None = None,
    repetitions: Mapping[str, int | None] | int | None = None,
    stop: Stop = "all_exhausted",
    schedule: Sequence[tuple[int, Mapping[str, float]]] | None = None,
    interpolation: Literal["constant", "linear"] = "constant",
    column: str | None = None,
) -> Pipeline:
    """Rows of several pipelines, each with its share. See ``Mix``.

    >>> import trainpipes as tp
    >>> web, code = tp.from_iterable(lambda: "abcdef"), tp.from_iterable(lambda: "12")
    >>> mixed = tp.mix({"web": web, "code": code}, weights={"web": 3, "code": 1})
    >>> list(mixed.batch(4))
    [['a', 'b', 'c', '1'], ['d', 'e', 'f', '2']]
    """
    stage = Mix(
        sources=sources, weights=weights, by=by, tokens=tokens, temperature=temperature,
        repetitions=repetitions, stop=stop, schedule=schedule, interpolation=interpolation, column=column,
    )  # fmt: skip
    return _start(stage)


def _start(stage: Stage) -> Pipeline:
    return Pipeline([(type(stage), stage.options)])
