from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import whole_number
from trainpipes._internal.messages import nearest, warn_once
from trainpipes._internal.text import amount, shown
from trainpipes.columns.arrays import to_numpy
from trainpipes.columns.content import table_digest
from trainpipes.errors import ConfigError
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
        dataset: or a ``DatasetDict``, with ``split``.
        split: of a ``DatasetDict`` or ``IterableDatasetDict``, such as "train".
        block_rows: rows of a ``Dataset`` in a block (a shuffle permutes blocks first).

    Raises:
        ConfigError: it is no dataset, lacks a ``split``, has a transform, or was cut by
            ``split_dataset_by_node``.

    ``tp.from_hf(load_dataset("my/dataset"), split="train").shuffle(40_960).batch(32)``
    """

    free = frozenset({"dataset", "split"})

    dataset: Any
    _: KW_ONLY
    split: str | None = None
    block_rows: int = 8192

    def check(self) -> None:
        chosen = self.chosen
        whole_number(self.block_rows, 1, "from_hf(block_rows)", "rows of a block")
        if not (_is_table(chosen) or _is_stream(chosen)):
            raise ConfigError(
                "from_hf(dataset) takes a datasets.Dataset, IterableDataset or DatasetDict, got "
                f"{shown(chosen)}; for a torch Dataset use from_dataset(dataset)"
            )
        if _is_table(chosen) and dict(chosen.format).get("type") == "custom":
            raise ConfigError(
                "from_hf(dataset) reads the dataset's tables, so that a transform set by "
                "set_transform() or with_transform() would not run: use "
                "from_hf(dataset.with_format(None)).map(fn), or from_dataset(dataset), "
                "which reads row by row"
            )
        if getattr(chosen, "_distributed", None) is not None:
            raise ConfigError(
                "from_hf(dataset) takes the whole dataset, got one that split_dataset_by_node() "
                "cut: leave that out, and put .sharding_filter() after from_hf()"
            )
        if not _is_table(chosen) and shuffles(chosen):
            warn_once(
                "from_hf(dataset): an IterableDataset that shuffles cannot save its position, so "
                "that a resume reads the epoch's rows again from its start: leave its shuffle() "
                "out, and put .shuffle(buffer_size) after from_hf()"
            )

    @property
    def chosen(self) -> Any:
        """The dataset itself; of several the one that is chosen."""
        if not isinstance(self.dataset, Mapping):
            if self.split is not None:
                raise ConfigError(
                    f"from_hf(split) chooses one of a DatasetDict, got {self.split!r} and "
                    f"{type(self.dataset).__name__}: leave it out"
                )
            return self.dataset
        names = list(map(str, self.dataset))
        if self.split not in names:
            wrong = (
                ""
                if self.split is None
                else f"no split {self.split!r}{nearest(self.split, names)}, but "
            )
            raise ConfigError(
                f"from_hf(dataset): it has {wrong}the splits {', '.join(map(repr, names))}: choose one by "
                f"from_hf(dataset, split={next(iter(names), 'train')!r})"
            )
        return self.dataset[self.split]

    @property
    def has_blocks(self) -> bool:  # type: ignore[override]
        return _is_table(self.chosen)

    random_access = has_blocks  # type: ignore[assignment]

    @property
    def runs_user_code(self) -> bool:
        return not self.has_blocks

    @property
    def makes_objects(self) -> bool:  # type: ignore[override]
        return not self.has_blocks and getattr(self.chosen, "features", None) is None

    @property
    def reorders(self) -> bool:  # type: ignore[override]
        return not self.has_blocks and shuffles(self.chosen)

    def open(self) -> RowSource | RowStream:
        chosen = self.chosen
        if _is_table(chosen):
            return HFTable(chosen, self.block_rows)
        return HFStream(chosen)

    def __repr__(self) -> str:
        chosen = self.chosen
        rows = f" of {len(chosen):,} rows" if _is_table(chosen) else ""
        split = "" if self.split is None else f", split={self.split!r}"
        return f"from_hf({type(chosen).__name__}{rows}{split})"


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
        found: dict[str, Any] = {"rows": self.rows, "columns": _digest(str(self.schema).encode())}
        if self.indices is not None:
            found["indices"] = _digest(np.ascontiguousarray(self.indices, "<i8").tobytes())
        if not self._dataset.cache_files:
            found["content"] = table_digest(self.table)[:16]
        elif self.rows:
            places = np.linspace(0, self.rows - 1, SAMPLED).astype(np.int64)
            found["sample"] = table_digest(self.take(places))[:16]
        return found

    def describe(self) -> list[tuple[str, str]]:
        where = (
            f"{len(self._dataset.cache_files):,} files" if self._dataset.cache_files else "memory"
        )
        lines = [*super().describe(), ("dataset in", where)]
        if self.indices is not None:
            lines.append(("indices", f"{self.rows:,} of a table of {len(self.table):,} rows"))
        if self.row_bytes is not None:
            lines.append(("in memory", f"{amount(self.row_bytes)} a row"))
        return lines


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
