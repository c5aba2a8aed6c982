from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from trainpipes._internal.checks import require
from trainpipes._internal.locks import cached_property
from trainpipes.errors import ConfigError
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.hints import instead, is_pipeline
from trainpipes.interfaces.source import RandomAccessSource, RowSource
from trainpipes.interfaces.stage import Stage
from trainpipes.sources.combined.common_columns import CommonColumns
from trainpipes.sources.combined.joined_rows import JoinedByNumber, JoinedRows, Lane, Part


class JoiningSource(kinds.CombiningSource):
    """A stage that reads the rows of several pipelines as those of one source."""

    beside: ClassVar[bool] = False

    pipelines: Sequence[Any]

    def check(self) -> None:
        several = isinstance(self.pipelines, list | tuple)
        require(several, f"{self.name}(...)", "one pipeline or more", self.pipelines)
        self._set(pipelines=tuple(self.pipelines))
        others = [part for part in self.pipelines if not is_pipeline(part)]
        way, good = instead(others[0]) if others else "", self.pipelines and not others
        require(good, f"{self.name}(...)", "one pipeline or more", self.pipelines, way)
        for number, pipeline in enumerate(self.pipelines):
            if getattr(pipeline, "_ranks", None) is not None:
                raise ConfigError(
                    f"{self.name}(...): source {number} is distributed(): put that after {self.name}()"
                )
            _check_chain(pipeline.stages, number, self.name)

    @cached_property
    def chains(self) -> Sequence[Sequence[Stage]]:
        return [pipeline.stages for pipeline in self.pipelines]

    def of_chains(self, chains: Sequence[Sequence[Stage]]) -> JoiningSource:
        pairs = zip(self.pipelines, chains, strict=True)
        return self._replaced(pipelines=[type(p)(c) for p, c in pairs])

    def _traits(self) -> dict[str, Any]:
        openers = [opener_of(chain).traits for chain in self.chains]
        names = "has_blocks", "random_access"
        return super()._traits() | {n: all(getattr(o, n) for o in openers) for n in names}

    def open(self) -> RowSource:
        return self.opened([None] * len(self.chains))

    def opened(self, sources: Sequence[RowSource | None]) -> RowSource:
        columns = CommonColumns(self, self.beside)
        chains = enumerate(zip(self.chains, sources, strict=True))
        parts = [Part(number, chain, source, columns) for number, (chain, source) in chains]
        lanes = [Lane([part]) for part in parts] if self.beside else [Lane(parts)]
        by_number = all(isinstance(part.source, RandomAccessSource) for part in parts)
        return (JoinedByNumber if by_number else JoinedRows)(self, lanes)

    def identity(self) -> dict[str, Any]:
        read = [kinds.without(chain, kinds.ListingSource) for chain in self.chains]
        chains = [[stage.identity() for stage in chain] for chain in read]
        return {"stage": self.name, "sources": chains}

    def __repr__(self) -> str:
        return f"{self.name}({', '.join('.'.join(map(repr, chain)) for chain in self.chains)})"


class Concat(JoiningSource):
    """The rows of several pipelines, one after the other, as one source.

    Each pipeline needs a source whose blocks are known in advance, and stages that keep all rows, such as
    ``select``, or ``take`` and ``skip``. A column's types are widened; Python objects and tensors become
    columns where another source gives columns.

    Args:
        pipelines: in this order, one by one or in a list.

    Raises:
        SchemaError: two pipelines have different columns or types; names both.

    >>> import pyarrow as pa, trainpipes as tp
    >>> old, new = tp.from_arrow(pa.table({"x": [1, 2]})), tp.from_arrow(pa.table({"y": [3]}))
    >>> list(tp.concat(old, new.rename({"y": "x"})))
    [{'x': 1}, {'x': 2}, {'x': 3}]
    """


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

    beside = True


def opener_of(chain: Sequence[Stage]) -> kinds.Source:
    opener = next((stage for stage in chain if isinstance(stage, kinds.ReadingSource)), chain[0])
    assert isinstance(opener, kinds.Source)
    return opener


def _check_chain(stages: Sequence[Stage], number: int, caller: str) -> None:
    reader = stages.index(opener_of(stages))
    for stage in stages[:reader][1:]:
        if isinstance(stage, kinds.ShuffleStage):
            raise ConfigError(f"{caller}(...): put {stage} after it, where it shuffles all sources")
    for stage in [*opener_of(stages)._above(), *stages[reader + 1 :]]:
        # Those that count do so in file order, since all others keep each row.
        if not isinstance(stage, kinds.CountingStage) and not kinds.keeps_each_row(stage):
            own = stage.name == opener_of(stages).name
            way = f"put {stage.name}() after {caller}(), for all sources"
            if isinstance(stage, kinds.ShuffleStage) and caller == "concat":
                way += (
                    '; or go through one after the other, each shuffled in itself, by mix({"a": a, "b": b}, '
                    'schedule=[(0, {"a": 1, "b": 0}), (ROWS_OF_A, {"a": 0, "b": 1})])'
                )
            raise ConfigError(
                f"{caller}(...): {stage} in source {number} does not keep each row as it is read, in every "
                f"epoch: {'leave that option out, or write the rows to files first' if own else way}"
            )
