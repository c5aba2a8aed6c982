from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from trainpipes.columns.payload import Payload
from trainpipes.columns.tensor_rows import TensorRows
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.kinds.source import Place, RandomAccessSource
from trainpipes.sources.combined.common_columns import Joined
from trainpipes.sources.combined.joined_input import Cut, JoinedInput, JoinedRows, JoiningSource


class Zip(JoiningSource):
    """The columns of several pipelines side by side: row k of each is part of row k.

    Each pipeline needs a source whose rows are counted in advance, and stages that keep all rows, such as
    ``map``, or ``take`` and ``skip``. Tensors and Python objects become columns where another source gives
    columns. ``split`` and ``sample`` without a key go by the rows of the first pipeline.

    Args:
        pipelines: whose columns come in this order; one by one or in a list.

    Raises:
        DataError: they have different numbers of rows; names both.
        ConfigError: a pipeline cannot be counted, or two have a column of one name.
        SchemaError: the rows of a pipeline make no columns.

    >>> import numpy as np, pyarrow as pa, trainpipes as tp
    >>> text = tp.from_arrow(pa.table({"text": ["a", "b", "c"]}))
    >>> label = tp.from_tensors(label=np.array([0, 1, 1]))
    >>> list(text.zip(label))[1]
    {'text': 'b', 'label': 1}
    """

    joined: ClassVar[Joined] = "side by side"

    def rows_of(self, parts: Sequence[JoinedInput]) -> JoinedRows:
        rows = [int(part.edges[-1]) for part in parts]
        odd = next((n for n, count in enumerate(rows) if count != rows[0]), None)
        if odd is not None:
            openers = [parts[n].inputs.chain.stages[0] for n in (0, odd)]
            raise DataError(
                f"zip(...) puts row k of each source beside row k of the others, and source 0, {openers[0]}, "
                f"has {rows[0]:,} rows, source {odd}, {openers[1]}, {rows[odd]:,}: give it the files that "
                f"belong together, or cut the longer one by take({min(rows[0], rows[odd])})",
                stage=str(self),
            )
        kind = Zipped
        if all(isinstance(part.source, RandomAccessSource) for part in parts):
            kind = ZippedByNumber
        return kind(self, parts)


class Zipped(JoinedRows):
    def __init__(self, stage: JoiningSource, parts: Sequence[JoinedInput]) -> None:
        super().__init__(stage, parts)
        self.named_by = parts[0].inputs, parts[0].skipped
        anywhere = [isinstance(part.source, RandomAccessSource) for part in parts]
        self.edges = parts[_best([part.edges for part in parts], anywhere)].edges
        self.lengths = np.diff(self.edges)
        sizes = [part.source.row_bytes for part in parts]
        if None not in sizes:
            self.row_bytes = sum(size for size in sizes if size is not None)
        self.block_bytes = self._block_bytes()
        known = parts[0].columns.known()
        self._check_names([[] if schema is None else schema.names for schema in known])
        if None not in known:
            self.schema = pa.schema([field for schema in known for field in schema])  # type: ignore[union-attr]

    def _block_bytes(self) -> Any:
        if all(part.block_bytes is None for part in self.parts):
            return None
        found = np.zeros(len(self.lengths))
        for part in self.parts:
            if part.block_bytes is None:
                found += self.lengths * (part.source.row_bytes or 0.0)
                continue
            before = np.concatenate([[0.0], np.cumsum(part.block_bytes)])
            ends, first = np.unique(part.edges, return_index=True)
            last = np.append(first[1:], len(part.edges)) - 1
            found += np.diff(np.interp(self.edges, ends, before[last]))
        return found

    def cut(self, block: int, start: int, stop: int) -> list[Cut]:
        first = int(self.edges[block])
        return [Cut(part, 0, stretches(part, first + start, first + stop)) for part in self.parts]

    def place(self, block: int, row: int) -> Place:
        return self.parts[0].place(int(self.edges[block]) + row)

    def places(self, block: int, row: int) -> list[Place]:
        return [
            replace(place, source=f"{part.number}" + (f"/{place.source}" if place.source else ""))
            for part in self.parts
            for place in part.places(int(self.edges[block]) + row)
        ]

    def block_key(self, block: int) -> Any:
        found = []
        for part, _, pieces in self.cut(block, 0, int(self.lengths[block])):
            keys = [[part.block_key(own), low, high] for own, low, high in pieces]
            if any(key is None for key, _, _ in keys):
                return None
            found.append(keys)
        return found

    def describe(self) -> list[tuple[str, str]]:
        count = len(self.lengths)
        lines = [("sources", f"{len(self.parts)}, side by side"), ("rows", f"{self.edges[-1]:,}")]
        if count:
            lines.append(("blocks", f"{count:,} of up to {self.lengths.max():,} rows"))
        return [*lines, *(line for part in self.parts for line in part.describe())]

    def joined(self, parts: Sequence[Any]) -> Payload:
        if len(parts) == 1:
            return parts[0]
        if all(isinstance(part, pa.Table) for part in parts):
            self._check_names([part.column_names for part in parts])
            fields = [field for part in parts for field in part.schema]
            columns = [column for part in parts for column in part.columns]
            return pa.table(columns, schema=pa.schema(fields))
        if all(isinstance(part, TensorRows) for part in parts):
            tensors = tuple(tensor for part in parts for tensor in part.tensors)
            names = [part.names for part in parts if part.names is not None]
            if 0 < len(names) < len(parts):
                raise self._unlike("tensors with names beside tensors without")
            self._check_names(names)
            return TensorRows(tensors, tuple(n for own in names for n in own) if names else None)
        if all(isinstance(part, list) for part in parts):
            return [self._row(row) for row in zip(*parts, strict=True)]
        raise self._unlike("rows of different kinds")

    def _row(self, rows: Sequence[Any]) -> Any:
        if all(isinstance(row, tuple) for row in rows):
            return tuple(value for row in rows for value in row)
        odd = next((row for row in rows if not isinstance(row, Mapping)), None)
        if odd is not None:
            raise self._unlike(f"a row that is no dict, but a {type(odd).__name__}")
        found = {name: value for row in rows for name, value in row.items()}
        if len(found) < sum(map(len, rows)):
            self._check_names([list(row) for row in rows])
        return found

    def _unlike(self, found: str) -> SchemaError:
        return SchemaError(
            "zip(...) puts columns side by side, so that rows are dicts in all sources, or tuples in "
            f"all, got {found}: make dicts with map() first",
            stage=str(self.stage),
        )

    def _check_names(self, names: Sequence[Sequence[str]]) -> None:
        owner: dict[str, int] = {}
        for number, own in enumerate(names):
            for name in own:
                if owner.setdefault(name, number) != number:
                    raise ConfigError(
                        f"zip(...): sources {owner[name]} and {number} both have a column {name!r}: give it "
                        f"another name in one of them, .rename({{{name!r}: ...}}), or leave it out there, by "
                        "select() or drop_columns()",
                        stage=str(self.stage),
                    )


class ZippedByNumber(Zipped, RandomAccessSource):
    def __init__(self, stage: JoiningSource, parts: Sequence[JoinedInput]) -> None:
        super().__init__(stage, parts)
        sources: list[Any] = [part.source for part in parts]
        self.by_number = all(source.by_number for source in sources)
        self.holds_numbers = all(source.holds_numbers for source in sources)

    def take(self, index: IntArray) -> Payload:
        return self.joined([part.take(index, 0) for part in self.parts])

    def will_need(self, start: int, stop: int) -> None:
        for part in self.parts:
            assert isinstance(part.source, RandomAccessSource)
            part.source.will_need(start + part.skipped, stop + part.skipped)


def stretches(part: JoinedInput, start: int, stop: int) -> list[tuple[int, int, int]]:
    """The blocks that rows ``start`` to ``stop`` lie in, and where in each."""
    first = max(0, int(np.searchsorted(part.edges, start, side="right")) - 1)
    last = int(np.searchsorted(part.edges, stop, side="left"))
    found = []
    for block in range(min(first, len(part.lengths) - 1), max(first + 1, last)):
        begin, end = part.edges[block : block + 2].tolist()
        low, high = max(start, begin) - begin, min(stop, end) - begin
        if low < high or start == stop:
            found.append((block, low, max(low, high)))
    return found


def _best(edges: Sequence[IntArray], anywhere: Sequence[bool]) -> int:
    """The source at whose blocks' ends the fewest rows are decoded twice."""

    def again(cuts: IntArray) -> int:
        total = 0
        for own, free in zip(edges, anywhere, strict=True):
            if not free:
                block = np.searchsorted(own, cuts, side="right") - 1
                inner = block[~np.isin(cuts, own)]
                total += int(np.diff(own)[inner].sum())
        return total

    candidates = [n for n, free in enumerate(anywhere) if not free] or list(range(len(edges)))
    return min(candidates, key=lambda n: again(edges[n]))
