"""Memory-mapped data sets: numbers written once, then read by row number at the speed of memory."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from trainpipes._internal.checks import whole_number
from trainpipes._internal.progress import counted
from trainpipes._internal.text import shown
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError
from trainpipes.pipeline import Pipeline
from trainpipes.sources.memmap.dataset import MemmapDataset
from trainpipes.sources.memmap.given_rows import Part, of_arrays, of_batch, of_batches, of_rows
from trainpipes.sources.memmap.manifest import DTYPES, MANIFEST
from trainpipes.sources.memmap.writer import check_target, write_parts
from trainpipes.storage.map_dataset import runs_of
from trainpipes.storage.places import LocalPlace
from trainpipes.storage.writers.inputs import refuse_own_input

__all__ = ["read_memmap", "write_memmap"]

read_memmap = MemmapDataset


def write_memmap(
    path: str | os.PathLike[str],
    source: Any,
    *,
    length: int | None = None,
    names: Sequence[str] | None = None,
    dtype: Any = None,
    ragged: Collection[str] = (),
    batched: bool = False,
    overwrite: bool = False,
) -> MemmapDataset:
    """Write rows of numbers to a folder of ``.npy`` files that ``read_memmap`` maps into memory.

    It is written beside its place and renamed: there is a whole one or none. One that was there stays
    until then, and whoever has it open goes on with it. Memory stays at a few megabytes whatever the source's
    size.

    Args:
        path: the folder.
        source: one of
            - arrays or tensors ``[N, ...]``: a dict, a tuple or one;
            - a ``pyarrow.Table``; its list columns are ragged;
            - rows one by one: an iterable, a function that returns one (a generator function), or a
              map-style dataset. A row is a dict, a tuple, or one value; a value is an array, a tensor,
              a number, or a list or bytes, which may differ in length from row to row;
            - a ``Pipeline``, of rows or of batches: what one epoch gives. Its sharding has no part in it.
        length: N, where it is known: more rows or fewer are refused, and progress can be shown.
        names: of the columns, where rows are no dicts. Ragged columns need a name.
        dtype: of the columns; a dict of names for some of them; as the values come if left out. A value
            that does not fit is refused; floats may be narrowed.
        ragged: names of columns whose rows are arrays of different lengths, if the first few thousand
            rows do not show it.
        batched: whether each item of the iterable is several rows: columns ``[rows, ...]``.
        overwrite: whether a memory map that is there may be replaced.

    Returns:
        The memory map, opened.

    Raises:
        ConfigError: something is there; a name or dtype is for a column that is not; or it cannot be written,
            as where the disk is full.
        DataError: a row does not fit those before it, holds no numbers, or there are more rows or
            fewer than ``length``.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> def documents():
    ...     for n in range(3):
    ...         yield {"input_ids": list(range(n)), "source": n}
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "documents.memmap"
    >>> data = tp.write_memmap(path, documents, dtype={"input_ids": "uint16"})
    >>> data[2]
    {'input_ids': tensor([0, 1], dtype=torch.uint16), 'source': tensor(2)}
    """
    if length is not None:
        whole_number(length, 0, "write_memmap(length)", "rows")
    if isinstance(ragged, str):
        ragged = [ragged]
    if isinstance(source, Pipeline):
        rows, parts = _of_pipeline(source, check_target(path, overwrite))
    else:
        rows, parts = _parts(source, ragged, batched)
    if rows is not None and length is not None and rows != length:
        raise ConfigError(f"write_memmap(length={length:,}) got a source of {rows:,} rows")
    rows = length if rows is None else rows
    shown_parts = _shown(_named(parts, names), rows)
    write_parts(path, shown_parts, rows, _dtypes(dtype), ragged, overwrite)
    return MemmapDataset(path)


def _dtypes(dtype: Any) -> Any:
    try:
        if isinstance(dtype, Mapping):
            return {str(name): _dtype(one) for name, one in dtype.items()}
        return None if dtype is None else _dtype(dtype)
    except TypeError as error:
        raise ConfigError(
            "write_memmap(dtype) is a dtype of NumPy or torch (bool, integers, floats of up to 64 bits), or "
            f"a dict of them by column, got {shown(dtype)}"
        ) from error


def _dtype(dtype: Any) -> np.dtype[Any]:
    found = np.dtype(str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype)
    if (found := found.newbyteorder("=")).name not in DTYPES:
        raise TypeError
    return found


def _parts(
    source: Any, ragged: Collection[str], batched: bool
) -> tuple[int | None, Iterator[Part]]:
    """Blocks of columns, and how many rows there will be where that is known."""
    if isinstance(source, pa.Table | pa.RecordBatch):
        table = pa.table(source)
        return table.num_rows, of_batches(table.to_batches(max_chunksize=8192) or [table])
    several = source.values() if isinstance(source, Mapping) else source
    arrays = list(several) if isinstance(source, Mapping | tuple) else [source]
    if arrays and all(isinstance(a, np.ndarray | torch.Tensor) for a in arrays):
        return of_arrays(source)
    if callable(source) and not isinstance(source, Iterable):
        source = source()
    listed = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    if listed and not isinstance(source, Iterable):
        dataset, rows = source, len(source)
        return rows, of_rows((dataset[n] for n in range(rows)), ragged)
    if not isinstance(source, Iterable) or isinstance(source, str | bytes | Mapping):
        kinds = sorted({type(array).__name__ for array in arrays})
        of = f" of {', '.join(kinds)}" * isinstance(source, Mapping)
        raise ConfigError(
            "write_memmap(source) takes arrays or tensors [N, ...] (one, a tuple, a dict), a table, "
            "an iterable of rows, a function that returns one, a map-style dataset or a Pipeline, got "
            f"{type(source).__name__}{of}"
        )
    return None, of_batches(source) if batched else of_rows(source, ragged)


def _of_pipeline(pipe: Pipeline, target: Path) -> tuple[int | None, Iterator[Part]]:
    """What one epoch of a pipeline gives, as columns where they are there."""
    whole = Pipeline([stage for stage in pipe.stages if stage.role != "shard"], (0, 1))
    plan = whole._session.plan
    if plan.chain.endless:
        raise ConfigError(f"write_memmap() writes one epoch: leave out {plan.chain.repeat}")
    place = LocalPlace(str(target), "write_memmap")
    refuse_own_input(plan.inputs.source, place, ["column.npy", MANIFEST], "write_memmap")
    if any(stage.role == "finish" for stage in plan.chain.after):
        batches = (tuple(item) if isinstance(item, list) else item for item in whole)
        return None, of_batches(batches)
    if plan.chain.batch is not None:
        return None, of_rows(row for batch in whole for row in batch)
    rows = plan.inputs.epoch_rows if plan.counts.known else None
    return rows, _of_runs(plan)


def _of_runs(plan: Plan) -> Iterator[Part]:
    row = 0
    for run in runs_of(plan):
        data = run.block.data
        yield from of_rows(data, first=row) if isinstance(data, list) else [of_batch(data, row)]
        row += len(run)


def _named(parts: Iterable[Part], names: Sequence[str] | None) -> Iterator[Part]:
    for part in parts:
        if names is not None and (len(names) != len(part.names) or part.layout == "dict"):
            raise ConfigError(
                f"write_memmap(names) is for rows without names, one for each column: got {names} for "
                f"columns {', '.join(part.names)}"
            )
        yield part if names is None else Part("dict", tuple(names), part.columns)


def _shown(parts: Iterator[Part], rows: int | None) -> Iterator[Part]:
    """The parts, with progress."""
    return counted(parts, "writing a memory map", rows, "rows", size=None)
