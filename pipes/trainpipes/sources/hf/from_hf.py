from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import whole_number
from trainpipes._internal.messages import warn_once
from trainpipes._internal.text import amount
from trainpipes.columns.arrays import to_numpy
from trainpipes.columns.content import short_digest, table_digest
from trainpipes.kinds.source import RowSource, RowStream
from trainpipes.kinds.stage_kinds import Source
from trainpipes.sources.arrow.from_arrow import TableSource
from trainpipes.sources.files.schema import plain
from trainpipes.sources.hf.stream import HFStream, shuffles

#: Rows that a state knows a dataset by that is not in memory.
SAMPLED = 16


class FromHf(Source):
    """Rows of a ``Dataset`` or ``IterableDataset`` of Hugging Face's ``datasets``.

    A ``Dataset`` gives rows as Arrow, as its ``select``, ``shuffle``, ``filter``, ``sort`` and ``shard``
    chose and ordered them, with its format's columns; images and audio come as stored. Rows can be chosen by
    number (``shuffle(scope="global")``).

    An ``IterableDataset`` gives rows as Arrow if its features are known, else as dicts, and resumes from its
    ``state_dict``. One that shuffles is read again from the epoch's start: put ``.shuffle(buffer_size)``
    after ``from_hf`` instead. Each rank and worker reads the whole stream.

    Args:
        dataset: of a ``DatasetDict`` one split, such as ``dataset["train"]``.
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
        known = _is_table(dataset) or _is_stream(dataset)
        self._require(known, "dataset", "a datasets.Dataset or IterableDataset", way)
        custom = _is_table(dataset) and dict(dataset.format).get("type") == "custom"
        way = "use from_hf(dataset.with_format(None)).map(fn), or from_dataset(dataset)"
        rule = "without the transform of set_transform() or with_transform(), which would not run"
        self._require(not custom, "dataset", rule, way)
        whole = getattr(dataset, "_distributed", None) is None
        way = "leave split_dataset_by_node() out, and put .sharding_filter() after from_hf()"
        self._require(whole, "dataset", "the whole dataset", way)
        if self.reorders:
            warn_once(
                "from_hf(dataset): an IterableDataset that shuffles cannot save its position, so that a "
                "resume reads the epoch's rows again from its start: leave its shuffle() out, and put "
                ".shuffle(buffer_size) after from_hf()"
            )

    @property
    def has_blocks(self) -> bool:  # type: ignore[override]
        return _is_table(self.dataset)

    random_access = has_blocks

    @property
    def runs_user_code(self) -> bool:
        return not self.has_blocks

    @property
    def makes_objects(self) -> bool:  # type: ignore[override]
        return not self.has_blocks and getattr(self.dataset, "features", None) is None

    @property
    def reorders(self) -> bool:  # type: ignore[override]
        return not self.has_blocks and shuffles(self.dataset)

    def open(self) -> RowSource | RowStream:
        return HFTable(self.dataset, self.block_rows) if self.has_blocks else HFStream(self.dataset)

    def __repr__(self) -> str:
        rows = f" of {len(self.dataset):,} rows" if self.has_blocks else ""
        return f"from_hf({type(self.dataset).__name__}{rows})"


def _is_table(dataset: Any) -> bool:
    return all(hasattr(dataset, name) for name in ("data", "_indices", "format", "cache_files"))


def _is_stream(dataset: Any) -> bool:
    return all(hasattr(dataset, name) for name in ("_ex_iterable", "iter", "state_dict"))


class HFTable(TableSource):
    def __init__(self, dataset: Any, block_rows: int) -> None:
        table, columns, indices = dataset.data.table, dict(dataset.format).get("columns"), None
        if columns is not None:
            table = table.select([name for name in table.column_names if name in columns])
        if dataset._indices is not None:
            indices = to_numpy(dataset._indices.column(0)).astype(np.int64, copy=False)
        super().__init__(table, block_rows, indices)
        self.schema: pa.Schema = pa.schema([plain(field) for field in table.schema])
        self._dataset, self._block_rows = dataset, block_rows

    def __reduce__(self) -> Any:
        return HFTable, (self._dataset, self._block_rows)

    def fingerprint(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "rows": self.rows,
            "columns": short_digest(str(self.schema).encode()),
        }
        if self.indices is not None:
            found["indices"] = short_digest(np.ascontiguousarray(self.indices, "<i8").tobytes())
        if not self._dataset.cache_files:
            found["content"] = table_digest(self.table)[:16]
        elif self.rows:
            places = np.linspace(0, self.rows - 1, SAMPLED).astype(np.int64)
            found["sample"] = table_digest(self.take(places))[:16]
        return found

    def describe(self) -> list[tuple[str, str]]:
        files = self._dataset.cache_files
        where = f"{len(files):,} files" if files else "memory"
        lines = [*super().describe(), ("dataset in", where)]
        if self.indices is not None:
            lines.append(("indices", f"{self.rows:,} of a table of {len(self.table):,} rows"))
        if self.row_bytes is not None:
            lines.append(("in memory", f"{amount(self.row_bytes)} a row"))
        return lines
