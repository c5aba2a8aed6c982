from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any

from trainpipes._internal.checks import whole_number
from trainpipes._internal.messages import nearest, warn_once
from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError
from trainpipes.kinds.source import RowSource, RowStream
from trainpipes.kinds.stage_kinds import Source
from trainpipes.sources.hf.stream import HFStream, shuffles
from trainpipes.sources.hf.table import HFTable


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
    def reorders(self) -> bool:  # type: ignore[override]
        return not _is_table(self.chosen) and shuffles(self.chosen)

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
        if self.split is None:
            raise ConfigError(
                f"from_hf(dataset): it has the splits {', '.join(map(repr, names))}: choose one by "
                f"from_hf(dataset, split={next(iter(names), 'train')!r})"
            )
        if self.split not in self.dataset:
            raise ConfigError(
                f"from_hf(split): there is no split {self.split!r}{nearest(self.split, names)}; there are "
                f"{', '.join(map(repr, names))}"
            )
        return self.dataset[self.split]

    @property
    def has_blocks(self) -> bool:  # type: ignore[override]
        return _is_table(self.chosen)

    @property
    def random_access(self) -> bool:  # type: ignore[override]
        return _is_table(self.chosen)

    @property
    def makes_objects(self) -> bool:  # type: ignore[override]
        chosen = self.chosen
        return not _is_table(chosen) and getattr(chosen, "features", None) is None

    @property
    def runs_user_code(self) -> bool:
        return not _is_table(self.chosen)

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
