"""A shuffle decodes each block once in an epoch, and once more for each cut between spans that divides it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from trainpipes.engine.planning.plan import Plan
from trainpipes.order.layout import Layout
from trainpipes.sources.files.block_reader import BlockReader

FILES, ROWS, SHARDS = 4, 6000, 8
READERS = {"parquet": tp.read_parquet, "arrow": tp.read_arrow, "jsonl": tp.read_json}


def written(folder: Path, suffix: str, block_rows: int) -> None:
    for file in range(FILES):
        rows = range(ROWS * file, ROWS * (file + 1))
        table, path = pa.table({"x": list(rows)}), folder / f"{file}.{suffix}"
        if suffix == "parquet":
            pq.write_table(table, path, row_group_size=block_rows)
        elif suffix == "arrow":
            feather.write_feather(table, path, compression="lz4", chunksize=block_rows)
        else:
            path.write_text("".join(f'{{"x":{row}}}\n' for row in rows))


@pytest.mark.parametrize(
    ("suffix", "block_rows", "remote", "threads"),
    [
        ("parquet", 100, False, 2), ("parquet", 6000, True, 0), ("arrow", 100, True, 2),
        ("arrow", 6000, False, 0), ("jsonl", 100, False, 0), ("jsonl", 6000, True, 2),
    ],
)  # fmt: skip
def test_blocks_are_decoded_once_and_once_for_each_cut(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    block_rows: int,
    remote: bool,
    threads: int,
) -> None:
    written(tmp_path, suffix, block_rows)
    folder = str(tmp_path)
    if remote:
        folder = f"memory://{tmp_path.name}-{suffix}-{block_rows}-{threads}"
        store = fsspec.filesystem("memory")
        store.put(f"{tmp_path}/", f"{folder}/", recursive=True)
    decoded: Counter[tuple[int, int]] = Counter()
    begin = BlockReader._begin

    def counting(self: BlockReader, number: int) -> Any:
        decoded[self._file, number] += 1
        return begin(self, number)

    first = BlockReader.first

    def not_counting(self: BlockReader, file: int) -> Any:  # to find types
        decoded[file, 0] -= 1
        return first(self, file)

    more = {"block_rows": block_rows} if suffix == "jsonl" else {}
    rows = READERS[suffix](f"{folder}/*.{suffix}", **more)
    pipe = rows.sharding_filter(SHARDS).shuffle(500, seed=0).batch(8)
    plan = Plan.of(pipe.stages)
    layout = plan.layouts.usual
    assert isinstance(layout, Layout)
    assert layout.num_spans == SHARDS
    assert min(layout.num_windows(span) for span in range(SHARDS)) > 6
    starts, _ = plan.inputs.blocks.order(0, plan.layouts.block_order)
    cuts = {layout.span(span)[0] for span in range(1, SHARDS)} - set(starts.tolist())
    monkeypatch.setattr(BlockReader, "_begin", counting)
    monkeypatch.setattr(BlockReader, "first", not_counting)
    got = [row["x"] for batch in tp.Loader(pipe, threads=threads) for row in batch]
    assert sorted(got) == list(range(FILES * ROWS))
    blocks = len(starts) - 1
    assert len(decoded) == blocks
    # A reader that another thread holds at that moment is not waited for.
    held = 2 * SHARDS if threads else 0
    assert decoded.total() <= len(decoded) + len(cuts) + held
