"""Datasets of Hugging Face's ``datasets``."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from fsspec import AbstractFileSystem

from trainpipes._internal.checks import whole_number
from trainpipes._internal.messages import warn_once
from trainpipes.columns.arrays import is_list, is_text, to_numpy
from trainpipes.columns.content import short_digest, table_digest
from trainpipes.columns.payload import Payload
from trainpipes.errors import StateError, amount
from trainpipes.interfaces.options import instead, is_hf_stream
from trainpipes.interfaces.source import RowSource, RowStream, StreamReader
from trainpipes.interfaces.stage_kinds import Source
from trainpipes.sources.files.formats import fitted, plain
from trainpipes.sources.from_torchdata import plain as as_json
from trainpipes.sources.from_torchdata import restored
from trainpipes.sources.read_arrow import TableSource

#: Rows that a state knows a dataset by that is not in memory.
SAMPLED = 16


class FromHf(Source):
    """Rows of a ``Dataset`` or ``IterableDataset`` of Hugging Face's ``datasets``.

    A ``Dataset`` gives rows as Arrow, as its ``select``, ``shuffle``, ``filter``, ``sort`` and ``shard``
    chose and ordered them, with its format's columns; images and audio come as stored, JSON as Python values.
    Rows can be chosen by number (``shuffle(scope="global")``).

    An ``IterableDataset`` gives rows as Arrow if its features are known, else as dicts, and resumes from its
    ``state_dict``. One that shuffles is read again from the epoch's start: put ``.shuffle(buffer_size)``
    after ``from_hf`` instead. Each rank and worker reads the whole stream.

    Args:
        dataset: of a ``DatasetDict`` a single split, such as ``dataset["train"]``.
        block_rows: rows of a ``Dataset`` in a block (a shuffle permutes blocks first).

    Raises:
        ConfigError: it is no dataset, has a transform, or was cut by ``split_dataset_by_node``.

    ``tp.from_hf(load_dataset("my/dataset", split="train")).shuffle(40_960).batch(32)``
    """

    free = frozenset({"dataset"})

    dataset: Any
    _: KW_ONLY
    block_rows: int = 8192

    def check(self) -> None:
        whole_number(self.block_rows, 1, "from_hf(block_rows)", "rows of a block")
        dataset, way = self.dataset, "for a torch Dataset use from_dataset(dataset)"
        if isinstance(dataset, Mapping):
            way = "choose " + " or ".join(f"dataset[{name!r}]" for name in map(str, dataset))
        elif isinstance(dataset, str):
            way = 'datasets.load_dataset(name, split="train") gives one'
        known = is_table(dataset) or is_hf_stream(dataset)
        way = way if known else instead(dataset) or way
        self._require(known, "dataset", "a datasets.Dataset or IterableDataset", way)
        custom = is_table(dataset) and dict(dataset.format).get("type") == "custom"
        way = "use from_hf(dataset.with_format(None)).map(fn), or from_dataset(dataset)"
        rule = "without the transform of set_transform() or with_transform(), which would not run"
        self._require(not custom, "dataset", rule, way)
        whole = getattr(dataset, "_distributed", None) is None
        way = "leave split_dataset_by_node() out, and put .sharding_filter() after from_hf()"
        self._require(whole, "dataset", "the whole dataset", way)
        if self.traits.reorders:
            warn_once(
                "from_hf(dataset): an IterableDataset that shuffles cannot save its position, so that a "
                "resume reads the epoch's rows again from its start: leave its shuffle() out, and put "
                ".shuffle(buffer_size) after from_hf()"
            )

    def _traits(self) -> dict[str, Any]:
        if is_table(self.dataset):
            return {"has_blocks": True, "random_access": True}
        known = getattr(self.dataset, "features", None) is not None
        gives: Any = "rows" if known else "objects"
        return {"gives": gives, "reorders": shuffles(self.dataset)}

    @property
    def _runs_user_code(self) -> bool:
        return not is_table(self.dataset)

    def open(self) -> RowSource | RowStream:
        if is_table(self.dataset):
            return HFTable(self.dataset, self.block_rows)
        return HFStream(self.dataset)

    def __repr__(self) -> str:
        rows = f" of {len(self.dataset):,} rows" if is_table(self.dataset) else ""
        return f"from_hf({type(self.dataset).__name__}{rows})"


def is_table(dataset: Any) -> bool:
    return all(hasattr(dataset, name) for name in ("data", "_indices", "format", "cache_files"))


class HFTable(TableSource):
    """The rows of a ``datasets.Dataset``, which are a table and perhaps indices into it."""

    def __init__(self, dataset: Any, block_rows: int) -> None:
        table, format, indices = dataset.data.table, dict(dataset.format), None
        columns = format.get("columns")
        if columns is not None and not format.get("output_all_columns"):
            table = table.select([name for name in table.column_names if name in columns])
        if dataset._indices is not None:
            indices = to_numpy(dataset._indices.column(0)).astype(np.int64, copy=False)
        super().__init__(table, block_rows, indices)
        self.schema: pa.Schema = pa.schema([plain(field) for field in table.schema])
        self._dataset, self._block_rows = dataset, block_rows

    def __reduce__(self) -> Any:
        return HFTable, (self._dataset, self._block_rows)

    def fingerprint(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "rows": self.rows,
            "columns": short_digest(str(self.schema).encode()),
        }
        if self.indices is not None:
            facts["indices"] = short_digest(np.ascontiguousarray(self.indices, "<i8").tobytes())
        if not self._dataset.cache_files:
            facts["content"] = table_digest(self.table)[:16]
        elif self.rows:
            places = np.linspace(0, self.rows - 1, SAMPLED).astype(np.int64)
            facts["sample"] = table_digest(self.take(places))[:16]
        return facts

    def describe(self) -> list[tuple[str, str]]:
        files = self._dataset.cache_files
        where = f"{len(files):,} files" if files else "memory"
        lines = [*super().describe(), ("dataset in", where)]
        if self.indices is not None:
            lines.append(("indices", f"{self.rows:,} of a table of {len(self.table):,} rows"))
        if self.row_bytes is not None:
            lines.append(("in memory", f"{amount(self.row_bytes)} a row"))
        return lines


#: Rows that are fetched at a time.
BATCH_ROWS = 256


def shuffles(dataset: Any) -> bool:
    """Whether an ``IterableDataset`` holds rows in a buffer and draws from it."""
    return any("BufferShuffled" in type(part).__name__ for part in _parts(dataset._ex_iterable))


def _parts(iterable: Any) -> Iterator[Any]:
    yield iterable
    inner = getattr(iterable, "ex_iterable", None)
    for part in [*([] if inner is None else [inner]), *getattr(iterable, "ex_iterables", [])]:
        yield from _parts(part)


def _is_exact(features: Any, kinds: Iterable[pa.DataType]) -> bool:
    """Whether Python's values are those of the features as they are stored."""
    types = pa.types

    def is_plain(kind: pa.DataType) -> bool:
        if types.is_struct(kind):
            return all(is_plain(field.type) for field in kind)
        numbers = types.is_integer(kind) or types.is_boolean(kind) or types.is_float32(kind)
        return bool(
            is_plain(kind.value_type)
            if is_list(kind)
            else numbers or types.is_float64(kind) or is_text(kind)
        )

    return all(map(is_plain, kinds)) and "'Json'" not in str(features.to_dict())


def _digest(text: str) -> str:
    return short_digest(json.dumps(text).encode())


def _copied(dataset: Any) -> Any:
    """A copy that shares file systems, whose copies would fill fsspec's cache."""
    shared = [value for value in vars(dataset).values() if isinstance(value, dict)]
    caches = [
        cache
        for cache in shared
        if any(isinstance(v, AbstractFileSystem) for v in [*cache.values()])
    ]
    return copy.deepcopy(dataset, {id(cache): cache for cache in caches})


class HFStream(RowStream):
    """The rows of a ``datasets.IterableDataset``."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        features = getattr(dataset, "features", None)
        fields = None if features is None else map(plain, features.arrow_schema)
        self._schema = None if fields is None else pa.schema(fields)

    @property
    def seekable(self) -> bool:
        return not shuffles(self._dataset)

    def open(self, epoch: int, state: dict[str, Any] | None) -> HFReader:
        # It knows its own position, and there may be several readers.
        dataset = _copied(self._dataset)
        steps = dataset._ex_iterable
        # Rows that filter() saw are Python's, of the features' types: by Arrow they take three times as long.
        schema, filtered = self._schema, steps.is_typed and not steps.iter_arrow
        exact = filtered and schema is not None and _is_exact(dataset.features, schema.types)
        # States of before stand among the steps that datasets takes to Arrow.
        as_rows = schema is None or (exact and (state is None or "format" in state))
        dataset = dataset.with_format(None if as_rows else "arrow")
        dataset.set_epoch(epoch)
        return HFReader(dataset, schema, state, as_rows)

    def fingerprint(self) -> dict[str, Any]:
        parts = list(_parts(self._dataset._ex_iterable))
        drawn = [part.generator for part in parts if getattr(part, "generator", None) is not None]
        facts: dict[str, Any] = {
            "dataset": type(self._dataset).__name__,
            "shards": int(self._dataset.num_shards),
            "columns": None if self._schema is None else _digest(str(self._schema)),
            "steps": [type(part).__name__ for part in parts],
        }
        if drawn:  # without a seed each process draws another order
            facts["shuffle"] = [_digest(repr(g.bit_generator.state)) for g in drawn]
        return facts

    def describe(self) -> list[tuple[str, str]]:
        by_state = "goes on from its own state"
        how = by_state if self.seekable else "reads and drops the rows already used"
        return [("rows", f"an IterableDataset: number of rows unknown; a resume {how}")]


class HFReader(StreamReader):
    """One pass over a ``datasets.IterableDataset``."""

    def __init__(
        self,
        dataset: Any,
        schema: pa.Schema | None,
        state: dict[str, Any] | None,
        as_rows: bool,
    ) -> None:
        self._dataset, self._schema = dataset, schema
        self._batch: Any = None
        self._used = 0  # rows of it
        self._start, rows = as_json(dataset.state_dict()), 0  # where the batch began
        if state is not None:
            try:
                self._start, rows = state["dataset"], int(state["rows"])
                dataset.load_state_dict(restored(self._start))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise StateError(
                    f"the position in the IterableDataset is damaged ({str(error)[:80]}); load the state as "
                    "it was saved"
                ) from error
        # Rows that a function of its own saw are Python's: datasets finds types for each anew, and joins none
        # that differ, as where a value is null.
        self._joins = schema is not None and not (as_rows or dataset._ex_iterable.iter_arrow)
        self._as_lists = schema is not None and as_rows
        self._batches = iter(dataset.iter(batch_size=1 if self._joins else BATCH_ROWS))
        if rows:
            self._next()
            self._used = rows

    def _next(self) -> bool:
        if self._batch is not None:
            self._start = as_json(self._dataset.state_dict())
        self._batch, self._used = self._batch_after(), 0
        if self._batch is None:
            return False
        if self._schema is None:
            rows = zip(*self._batch.values(), strict=True)
            self._batch = [dict(zip(self._batch, row, strict=True)) for row in rows]
        return True

    def _batch_after(self) -> Any:
        if self._joins:
            rows = [fitted(row, self._schema) for row in islice(self._batches, BATCH_ROWS)]
            return pa.concat_tables(rows).combine_chunks() if rows else None
        batch = next(self._batches, None)
        if self._as_lists and batch is not None:
            return pa.Table.from_pydict(batch, self._schema)
        return batch

    def read(self, rows: int) -> Payload | None:
        if (self._batch is None or self._used >= len(self._batch)) and not self._next():
            return None
        start, self._used = self._used, min(len(self._batch), self._used + rows)
        if self._schema is not None:
            return fitted(self._batch.slice(start, self._used - start), self._schema)
        part: list[Any] = self._batch[start : self._used]
        return part

    def state(self) -> dict[str, Any]:
        form = {"format": "python"} if self._as_lists else {}
        return {"dataset": self._start, "rows": self._used, **form}
