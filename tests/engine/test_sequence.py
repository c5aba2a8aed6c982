"""The one global sequence of batches is the one that the laws say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.compute as pc
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import trainpipes as tp
from drawn import (
    GROUPS,
    SMALL_GROUPS,
    Keep,
    build,
    examples,
    rows_of,
    specs,
    table_of_rows,
    uncounted,
    write_parquet,
)
from oracle import Spec, Starved, num_spans, numbered, sequence
from trainpipes.sources import read_arrow as arrow

ENOUGH = 150  # items of a pipeline that has no end


def expected(spec: Spec, number: int = 0) -> list[list[int]]:
    """A pass by the oracle, cut where it has no end; examples without a sequence are passed over."""
    try:
        return sequence(spec, number, ENOUGH)
    except Starved:
        assume(False)
        raise


def given_by(pipe: Any, spec: Spec) -> list[list[int]]:
    """The same of a pipeline or loader."""
    found = []
    for item in pipe:
        rows = rows_of(item)
        found.append([rows] if isinstance(rows, int) else rows)
        if len(found) == ENOUGH:
            break
    return found


@examples(330, often=20)
@given(st.sampled_from([False, False, True]).flatmap(lambda stream: specs(stream=stream)))
def test_a_pipeline_gives_the_sequence_that_the_laws_say(spec: Spec) -> None:
    pipe = build(spec)
    first = expected(spec)
    assert given_by(pipe, spec) == first
    if spec.times is not None or spec.repeat is None:
        assert given_by(pipe, spec) == expected(spec, 1)  # the next epoch


@examples(60)
@given(specs(), st.integers(1, 3), st.data())
def test_parquet_files_give_the_sequence_that_the_laws_say(
    spec: Spec, num_files: int, data: st.DataObject
) -> None:
    cuts = sorted(
        data.draw(st.integers(0, len(spec.groups)), label="file ends") for _ in range(num_files - 1)
    )
    edges = [0, *cuts, len(spec.groups)]
    files = [spec.groups[a:b] for a, b in pairwise(edges)]
    every = expected(spec)
    with TemporaryDirectory() as folder:
        write_parquet(Path(folder), files)
        pipe = build(spec, tp.list_files(folder).read_parquet())
        assert given_by(pipe, spec) == every


@examples(40)
@given(specs(st.integers(0, 200).map(lambda rows: [rows])), st.integers(1, 40))
def test_a_table_gives_the_sequence_of_row_groups_of_the_block_size(spec: Spec, block: int) -> None:
    rows = sum(spec.groups)
    blocks = tuple(min(block, rows - start) for start in range(0, max(1, rows), block))
    every = expected(replace(spec, groups=blocks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow, "BLOCK_ROWS", block)
        pipe = build(spec, tp.from_arrow(table_of_rows(0, rows)))
        assert given_by(pipe, spec) == every


@examples(60, often=8)
@given(specs())
def test_collated_micro_batches_have_the_rows_of_lists(spec: Spec) -> None:
    assume(spec.batch_size is not None)
    every = expected(spec)
    assert given_by(build(spec, tensors=True), spec) == every


@examples(100)
@given(specs(), st.integers(1, 24))
def test_each_rank_takes_every_rth_micro_batch(spec: Spec, ranks: int) -> None:
    assume(spec.shards % ranks == 0)
    assume(spec.known or (spec.repeat is not None and spec.times is None))
    whole = expected(spec)
    steps = len(whole) // ranks
    for rank in range(ranks):
        own = given_by(build(spec).distributed(rank=rank, world_size=ranks), spec)
        assert own[:steps] == whole[rank : steps * ranks : ranks]
        assert len(own) == steps or len(whole) == ENOUGH


@examples(200, often=20)
@given(specs(GROUPS))
def test_the_length_is_that_of_a_plain_data_loader(spec: Spec) -> None:
    spec = replace(uncounted(spec), keep=None, keep_batch=None, repeat=None, times=None)
    rows: Any = range(sum(spec.groups))
    plain = DataLoader(rows, batch_size=spec.batch_size, drop_last=spec.drop_last)
    pipe = build(spec)
    sizes = [len(batch) for batch in given_by(pipe, spec)]
    length = len(pipe)
    assert length == len(plain)
    if length < ENOUGH:
        assert sizes == [1 if isinstance(batch, int) else len(batch) for batch in plain]


@examples(200, often=20)
@given(specs())
def test_a_length_is_what_iterating_gives_or_is_refused(spec: Spec) -> None:
    pipe = build(spec)
    if not spec.known or (spec.repeat is not None and spec.times is None):
        with pytest.raises(TypeError, match=r"no len\(\)"):
            len(pipe)
        return
    assert min(len(pipe), ENOUGH) == len(given_by(pipe, spec))


@examples(100)
@given(specs(SMALL_GROUPS))
def test_no_row_is_lost_or_repeated_in_an_epoch(spec: Spec) -> None:
    spec = replace(uncounted(spec), drop_last=False, keep_batch=None, repeat=None)
    rows = [row for item in build(spec) for row in _rows(item)]
    every = [r for r in range(sum(spec.groups)) if spec.keep is None or spec.keep(r)]
    assert sorted(rows) == every


def _rows(item: Any) -> list[int]:
    rows = rows_of(item)
    return rows if isinstance(rows, list) else [rows]


@pytest.mark.parametrize("spec", [
    Spec((6000,), num_shards=24, buffer_size=40_960, batch_size=8),
    Spec((100,) * 30, num_shards=24, buffer_size=1_000, batch_size=4),
    Spec((5,), num_shards=24, buffer_size=40_960, batch_size=8),
    Spec((7, 0, 0, 9), num_shards=24, buffer_size=2, batch_size=1),
    Spec((0, 0), num_shards=24, buffer_size=2, batch_size=1),
    Spec((), num_shards=24, buffer_size=2, batch_size=1),
    Spec((4000, 3000), num_shards=4, buffer_size=500, batch_size=32, keep=Keep(1, 0)),
    Spec((900, 300), num_shards=6, batch_size=7, stride=True),
    Spec((9000, 9000), num_shards=2, batch_size=64, keep=Keep(3, 1)),
    Spec((300, 300), num_shards=4, buffer_size=60, batch_size=8, repeat="before"),
    Spec((300, 300), num_shards=4, buffer_size=900, batch_size=8, repeat="before"),
    Spec((299,), num_shards=4, buffer_size=60, batch_size=8, repeat="after"),
], ids=[
    "one row group and 24 shards", "fewer rows than shards times buffer", "fewer rows than shards",
    "empty row groups among others", "empty row groups only", "no row group",
    "filter before the dealing is undone", "stride",
    "more than one read at a time, unshuffled and filtered", "spans roll on",
    "one span rolls on, dealt over the joint", "epochs that are no multiple of the shards",
])  # fmt: skip
def test_shapes_of_data_that_are_easily_got_wrong(spec: Spec) -> None:
    assert given_by(build(spec), spec) == sequence(spec, 0, ENOUGH)


def test_small_data_is_mixed_over_all_of_it() -> None:
    rows = 6000
    pipe = build(Spec((rows,), num_shards=24, buffer_size=40_960, batch_size=32))
    batches = given_by(pipe, Spec(()))
    spread = [max(batch) - min(batch) for batch in batches if len(batch) == 32]
    assert median(spread) > 0.9 * rows


def test_every_micro_batch_is_drawn_from_at_least_the_buffers_rows() -> None:
    # 24 spans of 1,000 rows: none may be cut into windows of less than the buffer.
    spec = Spec((500,) * 48, num_shards=24, buffer_size=900, batch_size=4)
    assert num_spans(spec) == 24
    batches = given_by(build(spec), spec)
    of_one_span = [set(batches[m]) for m in range(0, len(batches), 24)]
    reached = set().union(*of_one_span)
    assert len(reached) == len(of_one_span) * 4
    assert median(max(b) - min(b) for b in of_one_span) > 450


def test_holes_are_passed_over_by_one_rank_and_counted_in_m() -> None:
    # Of 40 rows in two spans, those from 30 on are dropped: shard 1 ends after two batches.
    spec = Spec((40,), num_shards=2, batch_size=5, keep=lambda row: row < 30)
    pipe = tp.from_arrow(table_of_rows(0, 40)).sharding_filter(2)
    run = iter(pipe.filter(pc.field("row") < 30).batch(5))
    found = [(run.state_dict()["batches"] - 1, rows_of(batch)) for batch in run]
    assert found == list(numbered(spec))
    assert [m for m, _ in found] == [0, 1, 2, 3, 4, 6]
