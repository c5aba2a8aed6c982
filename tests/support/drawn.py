"""Pipelines drawn by Hypothesis: as the oracle describes them, and as the library builds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from hypothesis import Phase, settings
from hypothesis import strategies as st

import trainpipes as tp
from oracle import Spec
from trainpipes.interfaces.source import RowSource
from trainpipes.interfaces.stage_kinds import Source


def examples(count: int, *, often: int | None = None, shrink: bool = True) -> settings:
    """As many examples as fit the run: a twelfth of ``count``, and 20 times ``count`` in the nightly one.

    Args:
        count: examples, where a property that says nothing has 100.
        often: in an ordinary run, where one costs much more or less than others.
        shrink: look for a simpler one that fails; that takes minutes where each starts processes.
    """
    phases = [phase for phase in Phase if shrink or phase not in (Phase.shrink, Phase.explain)]
    most = max(1, count * settings.default.max_examples // 100)
    if often is not None and settings.default.derandomize:
        most = often
    return settings(max_examples=most, phases=phases)


@dataclass(frozen=True)
class Keep:
    """A predicate on a row number, and on a row that has it."""

    mask: int
    value: int

    def __call__(self, row: Any) -> bool:
        number = row["row"] if isinstance(row, dict) else row
        return int(number) & self.mask != self.value

    @property
    def expression(self) -> pc.Expression:
        return pc.bit_wise_and(pc.field("row"), pa.scalar(self.mask, pa.int64())) != self.value


@dataclass(frozen=True)
class KeepBatch:
    """A predicate on a batch by its first row."""

    mask: int

    def __call__(self, batch: Any) -> bool:
        return rows_of(batch)[0] & self.mask != 0


class RowGroups(Source):
    """Rows 0, 1, 2, … in memory, in row groups of the given sizes, with one even and one ragged
    column beside their numbers."""

    groups: Sequence[int]

    def open(self) -> RowSource:
        return GroupSource(self.groups)


class GroupSource(RowSource):
    """Where ``RowGroups`` reads."""

    def __init__(self, groups: Sequence[int]) -> None:
        self.lengths = np.array(groups, dtype=np.int64)
        self._starts = np.cumsum([0, *groups])

    def read(self, block: int, start: int, stop: int) -> pa.Table:
        first = int(self._starts[block])
        return table_of_rows(first + start, first + stop)

    def fingerprint(self) -> dict[str, Any]:
        return {"groups": self.lengths.tolist()}


def table_of_rows(start: int, stop: int) -> pa.Table:
    """Rows ``start`` to ``stop``: their number, a float made of it, and 0 to 4 tokens."""
    rows = np.arange(start, stop, dtype=np.int64)
    lengths = rows % 5
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = (np.repeat(rows, lengths) * 7 % 1000).astype(np.int32)
    ragged = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
    return pa.table({"row": rows, "half": rows.astype(np.float32) / 2, "tokens": ragged})


def write_parquet(folder: Path, files: Sequence[Sequence[int]]) -> None:
    """Files of row groups of the given sizes; rows are numbered over all of them."""
    row = 0
    schema = table_of_rows(0, 0).schema
    for number, groups in enumerate(files):
        with pq.ParquetWriter(folder / f"part-{number:03d}.parquet", schema) as writer:
            for size in groups:
                writer.write_table(table_of_rows(row, row + size), row_group_size=max(1, size))
                row += size


def build(spec: Spec, source: tp.Pipeline | None = None, *, tensors: bool = False) -> tp.Pipeline:
    """The pipeline that a spec describes.

    Args:
        source: its rows; by default ``RowGroups``, or an iterable where the spec has a stream.
        tensors: collate batches into tensors.
    """
    pipe = source
    if pipe is None and spec.stream:
        pipe = tp.from_iterable(Numbers(sum(spec.groups)))
    elif pipe is None:
        pipe = tp.Pipeline([RowGroups(list(spec.groups))])
    if spec.skip_rows:
        pipe = pipe.skip(spec.skip_rows)
    if spec.take_rows is not None:
        pipe = pipe.take(spec.take_rows)
    if spec.num_shards is not None:
        pipe = pipe.sharding_filter(spec.num_shards, split="stride" if spec.stride else "spans")
    if spec.keep is not None and spec.keep_before:
        pipe = pipe.filter(_predicate(spec))
    if spec.buffer_size is not None:
        pipe = pipe.shuffle(spec.buffer_size, seed=spec.seed)
    if spec.keep is not None and not spec.keep_before:
        pipe = pipe.filter(_predicate(spec))
    if spec.skip_passed:
        pipe = pipe.skip(spec.skip_passed)
    if spec.take_passed is not None:
        pipe = pipe.take(spec.take_passed)
    if spec.repeat == "before":
        pipe = pipe.repeat(spec.times)
    if spec.batch_size is not None:
        pipe = pipe.batch(spec.batch_size, drop_last=spec.drop_last)
    if spec.keep_batch is not None:
        pipe = pipe.filter(spec.keep_batch)
    if spec.skip_batches:
        pipe = pipe.skip(spec.skip_batches)
    if spec.take_batches is not None:
        pipe = pipe.take(spec.take_batches)
    if tensors and spec.batch_size is not None:
        pipe = pipe.collate(format="torch")
    if spec.repeat == "after":
        pipe = pipe.repeat(spec.times)
    return pipe


def _predicate(spec: Spec) -> Any:
    """An expression for every other predicate, so that both kinds are drawn."""
    assert isinstance(spec.keep, Keep)
    return spec.keep if spec.stream or spec.seed % 2 else spec.keep.expression


@dataclass(frozen=True)
class Numbers:
    """Makes the rows of a stream."""

    rows: int

    def __call__(self) -> Any:
        return ({"row": row, "half": row / 2} for row in range(self.rows))


def rows_of(item: Any) -> list[int]:
    """Row numbers of what a pipeline gave: a row, a list of rows, or tensors."""
    if isinstance(item, list):
        return [row if isinstance(row, int) else int(row["row"]) for row in item]
    value = item["row"]
    return [value] if isinstance(value, int) else value.tolist()


GROUPS = st.one_of(
    st.lists(st.integers(0, 30), max_size=12),
    st.lists(st.integers(0, 30), max_size=12),
    st.lists(st.integers(0, 60), min_size=1, max_size=30),
    st.lists(st.integers(0, 400), min_size=1, max_size=4),
    st.integers(0, 300).map(lambda rows: [rows]),
    st.integers(0, 300).map(lambda rows: [rows]),
    st.integers(0, 5000).map(lambda rows: [rows]),
)
SMALL_GROUPS = st.one_of(
    st.lists(st.integers(0, 30), max_size=8),
    st.lists(st.integers(0, 60), min_size=1, max_size=4),
    st.integers(0, 150).map(lambda rows: [rows]),
)


@st.composite
def specs(
    draw: st.DrawFn, groups: st.SearchStrategy[list[int]] = GROUPS, stream: bool = False
) -> Spec:
    """Every kind of pipeline that the laws speak of, without an end or with one."""
    sizes = tuple(draw(groups))
    rows = sum(sizes)
    spec = Spec(
        groups=sizes,
        num_shards=draw(st.sampled_from([None, 1, 2, 3, 4, 6, 24])),
        stride=draw(st.sampled_from([False, False, False, True])),
        buffer_size=draw(st.one_of(st.none(), st.integers(1, 40), st.integers(1, 2 * rows + 2))),
        seed=draw(st.integers(0, 99)),
        batch_size=draw(st.one_of(st.none(), st.integers(1, 9), st.integers(1, 40))),
        drop_last=draw(st.booleans()),
        stream=stream,
    )
    if spec.num_shards is None or stream:
        spec = replace(spec, stride=False)
    if spec.batch_size is None:
        spec = replace(spec, drop_last=False)
    where = draw(st.sampled_from([None, None, "before", "after"]))
    if where is not None:
        mask = draw(st.sampled_from([1, 3, 7]))
        keep = Keep(mask, draw(st.integers(0, mask)))
        before = where == "before" and spec.buffer_size is not None
        spec = replace(spec, keep=keep, keep_before=before)
    elif spec.batch_size is not None and draw(st.integers(0, 7)) == 0:
        spec = replace(spec, keep_batch=KeepBatch(draw(st.sampled_from([1, 2, 3]))))
    if draw(st.integers(0, 3)) == 0:
        spec = replace(
            spec,
            skip_rows=draw(st.integers(0, rows + 2)),
            take_rows=draw(st.one_of(st.none(), st.integers(0, rows + 2))),
        )
    repeat = draw(st.sampled_from([None, None, None, "before", "after"]))
    if repeat == "before" and spec.keep_batch is not None:
        repeat = "after"  # a shard's epoch may hold no whole batch at all
    if repeat is not None:
        times = draw(st.sampled_from([None, 1, 2, 3]))
        spec = replace(spec, repeat=repeat, times=times)
    if _may_count_passed(spec) and draw(st.integers(0, 3)) == 0:
        spec = replace(
            spec,
            skip_passed=draw(st.integers(0, rows + 2)),
            take_passed=draw(st.one_of(st.none(), st.integers(0, rows + 2))),
        )
    if _may_count_batches(spec) and draw(st.integers(0, 3)) == 0:
        spec = replace(
            spec,
            skip_batches=draw(st.integers(0, 30)),
            take_batches=draw(st.one_of(st.none(), st.integers(0, 30))),
        )
    return spec


def uncounted(spec: Spec) -> Spec:
    """The same without ``skip`` and ``take``."""
    none: dict[str, Any] = {"skip_rows": 0, "skip_batches": 0, "skip_passed": 0}
    return replace(spec, **none, take_rows=None, take_batches=None, take_passed=None)


def _may_count_passed(spec: Spec) -> bool:
    """Whether ``skip`` and ``take`` may count rows on their way to the batch: elsewhere they count in
    file order, or batches."""
    dropped = spec.keep is not None and not spec.keep_before
    return (
        spec.shards == 1
        and spec.batch_size is not None
        and (dropped or spec.buffer_size is not None)
    )


def _may_count_batches(spec: Spec) -> bool:
    """Whether ``skip`` and ``take`` may count what the pipeline delivers."""
    if spec.repeat == "before" or spec.keep_batch is not None:
        return False
    if spec.batch_size is not None:
        return True
    return spec.buffer_size is not None and (spec.keep is None or spec.keep_before)
