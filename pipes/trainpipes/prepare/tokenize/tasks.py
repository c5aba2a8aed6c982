"""The plan: one task for each output file, in the order of the rows.

A file of the input becomes one file; a large one several, cut between its row groups (of text: its blocks).
That depends on the input and ``bytes_per_file`` alone, never on how many processes there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainpipes.engine.layout import IntArray
from trainpipes.engine.planning.plan import Plan
from trainpipes.prepare.tokenize.cut import files_of


@dataclass(frozen=True)
class Task:
    """One output file: which rows it is made of. With the pipeline it says all.

    Attributes:
        number: of the file, from 0, in the order of the rows.
        name: of the file.
        source: the input file, for messages.
        first: the first block of it.
        stop: the block after the last.
        rows: that are read.
    """

    number: int
    name: str
    source: str
    first: int
    stop: int
    rows: int


def tasks_of(plan: Plan, suffix: str, bytes_per_file: int) -> list[Task]:
    """The tasks of a plan.

    Args:
        plan: what is done ahead.
        suffix: of the files' names.
        bytes_per_file: of rows as they are read, after which another file begins.
    """
    source, blocks = files_of(plan), plan.inputs.blocks
    count = len(source.files)
    edges = np.searchsorted(source.file_of_block, np.arange(count + 1)).tolist()
    sizes = _sizes(plan)
    stretches = [
        (file, first, stop)
        for file in range(count)
        for first, stop in _parts(sizes, edges[file], edges[file + 1], bytes_per_file)
    ]
    width = max(5, len(str(len(stretches) - 1)))
    return [
        Task(
            number,
            f"part-{number:0{width}d}{suffix}",
            str(source.files.names[file]),
            first,
            stop,
            int(blocks.lengths[first:stop].sum()),
        )
        for number, (file, first, stop) in enumerate(stretches)
    ]


def _sizes(plan: Plan) -> IntArray:
    """Bytes of each block, about."""
    source, blocks = files_of(plan), plan.inputs.blocks
    if source.block_bytes is None:
        return (blocks.lengths * (source.row_bytes or 1.0)).astype(np.int64)
    share = blocks.lengths / np.maximum(1, source.lengths)
    return (source.block_bytes * share).astype(np.int64)


def _parts(sizes: IntArray, first: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """A file's blocks in parts of about even size, at most ``most`` bytes unless one block has more."""
    whole = int(sizes[first:stop].sum())
    count = -(-whole // most)
    if count <= 1:
        yield first, stop
        return
    ends = np.cumsum(sizes[first:stop])
    begin = first
    for part in range(1, count + 1):
        end = (
            stop if part == count else first + int(np.searchsorted(ends, part * whole / count)) + 1
        )
        end = min(end, stop)
        if end > begin:
            yield begin, end
            begin = end
