"""Memory-mapped data sets: numbers written once, then read by row number."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes.engine.iterating.iteration_state import plan_of
from trainpipes.errors import ConfigError
from trainpipes.errors.text import shown
from trainpipes.filesystems.places import place_at
from trainpipes.filesystems.retry import NORMAL, Retry
from trainpipes.interfaces import stage_kinds
from trainpipes.pipeline.chain import Pipeline
from trainpipes.sources.memmap.dataset import MemmapDataset
from trainpipes.sources.memmap.manifest import DTYPES, HEADER, Layout
from trainpipes.writers.array_tables import (
    OnceTables,
    layout_of,
    table_of_batch,
    tables_of_batches,
    tables_of_rows,
)
from trainpipes.writers.epoch_rows import EpochRows
from trainpipes.writers.executor import Executor, Threads, checked_executor
from trainpipes.writers.npy_files import PartFile
from trainpipes.writers.write import Format, Output, write, write_once

__all__ = ["read_memmap", "write_memmap"]

read_memmap = MemmapDataset
#: Bytes of rows after which a part ends, where neither rows nor parts are counted.
PART_BYTES = 1 << 30
#: Rows that are written together, and their bytes, at most.
GROUP_ROWS, GROUP_BYTES = 16_384, 1 << 20
CALLER = "write_memmap"


def write_memmap(
    path: str | os.PathLike[str],
    source: Any,
    *,
    dtype: Any = None,
    ragged: Collection[str] = (),
    batched: bool = False,
    rows_per_file: int | None = None,
    num_files: int | None = None,
    overwrite: bool = False,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
    retry: Retry | Mapping[str, Any] = NORMAL,
) -> MemmapDataset | None:
    """Write rows of numbers to a folder of ``.npy`` files that ``read_memmap`` maps into memory.

    After a kill the same call goes on, for a pipeline of rows; other sources are written anew.

    Args:
        path: a folder, new or empty: a path or fsspec URL.
        source: arrays or tensors ``[N, ...]`` (a dict, a tuple or one); a ``pyarrow.Table``, whose list
            columns are ragged; rows one by one (an iterable, a function that returns one, a map-style
            dataset): dicts, tuples or single values; or a ``Pipeline`` of rows with columns, or of batches,
            of which one epoch is written.
        dtype: of the columns; a dict of names for some of them ("0", "1" and so on for tuples); if left out,
            as the values come. A value that does not fit is refused; floats may be narrowed.
        ragged: columns whose rows are arrays of different lengths, if the first rows (1,024, or 4 MiB) do not
            show it. Lists are always ragged.
        batched: whether each item of the iterable is several rows: columns ``[rows, ...]``.
        rows_per_file: rows in each part; or
        num_files: number of parts, where rows are counted. If both are left out, a part ends after 1 GiB.
        overwrite: whether to remove what was written there before.
        executor: ``trainpipes.writers.Threads(n)``, ``Processes(n)`` or ``Ray(address)``, for a pipeline
            whose rows are counted, with ``num_files`` or ``rows_per_file``; None for this thread.
        storage_options: of the folder's file system.
        retry: how long failing requests to a URL are made again.

    Returns:
        The memory map, opened; None where it was written to a URL.

    Raises:
        ConfigError: something else is there; another process writes to it; a dtype is of no column; or it
            cannot be written.
        DataChangedError: the pipeline's input has changed.
        DataError: a row does not fit those before it, or holds no numbers.
        SchemaError: a part has other columns than those before it.
        WorkerError: a worker process has died.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> def documents():
    ...     for n in range(3):
    ...         yield {"input_ids": list(range(n)), "source": n}
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "documents.memmap"
    >>> data = tp.write_memmap(path, documents, dtype={"input_ids": "uint16"})
    >>> data[2]
    {'input_ids': tensor([0, 1], dtype=torch.uint16), 'source': tensor(2)}
    """
    ragged = [ragged] if isinstance(ragged, str) else list(ragged)
    dtypes = _dtypes(dtype)
    out = Output(path, num_files, rows_per_file, overwrite, storage_options, retry)
    if isinstance(source, Pipeline) and not _makes_batches(source):
        rows = EpochRows(source, CALLER, ragged=ragged)
        write(rows, _form("dict", dtypes, ragged), out, executor)
    else:
        _check_alone(executor)
        layout, count, tables = _tables(source, ragged, batched)
        read = plan_of(source).inputs.source if isinstance(source, Pipeline) else None
        form = _form(layout, dtypes, ragged)
        write_once(OnceTables(tables, CALLER), read, count, form, out)
    place = place_at(path, CALLER, storage_options)
    if not place.is_local:
        return None
    return MemmapDataset(place.root if "://" in str(path) else path)


def _form(layout: Layout, dtypes: Any, ragged: list[str]) -> Format:
    options = {"dtype": dtypes, "ragged": sorted(ragged)}
    opened = partial(PartFile, layout, dtypes, ragged)
    sizes = GROUP_ROWS, min(GROUP_BYTES, PART_BYTES), PART_BYTES
    return Format(CALLER, HEADER, opened, options, *sizes, ".x.npy")


def _makes_batches(pipe: Pipeline) -> bool:
    chain = plan_of(pipe).chain
    if chain.endless:
        raise ConfigError(f"write_memmap() writes one epoch: leave out {chain.repeat}")
    return (
        stage_kinds.first_of(chain.after, stage_kinds.BatchingStage | stage_kinds.FinishingStage)
        is not None
    )


def _check_alone(executor: Executor | None) -> None:
    if checked_executor(executor, "write_memmap", Threads(1)) != Threads(1):
        raise ConfigError(
            f"write_memmap(executor={executor}) gives each worker rows of one part, which only a pipeline of "
            "rows can tell: give from_dataset(...), from_tensors(...) or files, before batch()"
        )


def _dtypes(dtype: Any) -> Any:
    try:
        if isinstance(dtype, Mapping):
            return {str(name): _dtype(one) for name, one in sorted(dtype.items())}
        return None if dtype is None else _dtype(dtype)
    except TypeError as error:
        raise ConfigError(
            "write_memmap(dtype) is a dtype of NumPy or torch (bool, integers, floats of up to 64 bits), or "
            f"a dict of them by column, got {shown(dtype)}"
        ) from error


def _dtype(dtype: Any) -> str:
    found = np.dtype(str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype)
    if found.name not in DTYPES:
        raise TypeError
    return found.name


def _tables(
    source: Any, ragged: Collection[str], batched: bool
) -> tuple[Layout, int | None, Iterator[pa.Table]]:
    if isinstance(source, Pipeline):
        whole = Pipeline(stage_kinds.without(source.stages, stage_kinds.ShardStage), (0, 1))
        batched = (
            stage_kinds.first_of(plan_of(whole).chain.after, stage_kinds.FinishingStage) is not None
        )
        source = (tuple(one) if isinstance(one, list) else one for one in whole)
        if not batched:
            source = (row for batch in source for row in batch)
    several = source.values() if isinstance(source, Mapping) else source
    arrays = list(several) if isinstance(source, Mapping | tuple) else [source]
    if isinstance(source, pa.Table | pa.RecordBatch) or (
        arrays and all(isinstance(a, np.ndarray | torch.Tensor) for a in arrays)
    ):
        table = table_of_batch(source, ragged, 0)
        is_table = isinstance(source, pa.Table | pa.RecordBatch)
        return "dict" if is_table else layout_of(source), len(table), iter([table])
    if callable(source) and not isinstance(source, Iterable):
        source = source()
    count = None
    listed = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if listed and not isinstance(source, Iterable):
        dataset, count = source, len(source)
        source = (dataset[n] for n in range(count))
    if not isinstance(source, Iterable) or isinstance(source, str | bytes | Mapping):
        kinds = sorted({type(array).__name__ for array in arrays})
        of = f" of {', '.join(kinds)}" * isinstance(source, Mapping)
        raise ConfigError(
            "write_memmap(source) takes arrays or tensors [N, ...] (one, a tuple, a dict), a table, "
            "an iterable of rows, a function that returns one, a map-style dataset or a Pipeline, got "
            f"{type(source).__name__}{of}"
        )
    layout, tables = (tables_of_batches if batched else tables_of_rows)(source, ragged)
    return layout, count, tables
