"""``to_map_dataset``: rows that fit in memory, indexed, and kept once for all processes of a machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch.utils.data import Dataset

from trainpipes.errors import ConfigError
from trainpipes.pipeline import Pipeline
from trainpipes.runtime.iterating.runner import Runner
from trainpipes.runtime.rows.columns import table_of
from trainpipes.runtime.rows.fixed_lists import python_rows
from trainpipes.runtime.run import Run
from trainpipes.runtime.shards.chains import Chains

__all__ = ["MapDataset", "to_map_dataset"]


class MapDataset(Dataset[dict[str, Any]]):
    """Rows of an Arrow file, memory-mapped: processes that read it share one copy in memory.

    Args:
        path: an Arrow IPC file.

    A row is a dict of Python values; ``__getitems__`` gives several at once, as ``DataLoader`` asks for.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._table: pa.Table | None = None

    @property
    def table(self) -> pa.Table:
        """The rows as a table that lies in the file."""
        if self._table is None:
            with pa.memory_map(self.path) as source:
                self._table = pa.ipc.open_file(source).read_all()
        return self._table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows = len(self)
        if not -rows <= index < rows:
            raise IndexError(f"row {index} of {rows}")
        return python_rows(self.table.slice(index % rows, 1))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return python_rows(self.table.take(pa.array(indices, pa.int64())))

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._table = None

    def __repr__(self) -> str:
        return f"MapDataset({self.path!r})"


def to_map_dataset(pipeline: Pipeline, path: str | None = None) -> MapDataset:
    """The rows of the first epoch of a pipeline, in its order, written once and memory-mapped.

    Args:
        pipeline: gives rows with columns; no batches.
        path: the file. If it is there, it is taken as it is only where the name is made from the
            data and the stages, which is so if ``path`` is left out; else it is written anew.

    Raises:
        ConfigError: the pipeline batches, has no end, or its rows have no columns.
    """
    runner = pipeline._runner
    plan = runner.plan
    if plan.batch is not None or plan.endless:
        raise ConfigError(
            "to_map_dataset() keeps the rows of one epoch: take it before batch() and repeat(), got "
            f"{plan.batch or plan.repeat}"
        )
    if path is None:
        name = hashlib.sha256(plan.identity.encode()).hexdigest()[:24]
        target = Path(tempfile.gettempdir()) / f"trainpipes-{os.getuid()}" / f"{name}.arrow"
        if target.exists():
            return MapDataset(target)
        target.parent.mkdir(mode=0o700, exist_ok=True)
    else:
        target = Path(path)
    _write(runner, target)
    return MapDataset(target)


def _write(runner: Runner, target: Path) -> None:
    """Write beside and rename, so that no reader sees half of it; of two writers the last one wins."""
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
    os.close(handle)
    try:
        with pa.OSFile(beside, "wb") as sink:
            writer = None
            for run in _runs(runner):
                table = table_of(run.block.data, "to_map_dataset()")
                if writer is None:
                    writer = pa.ipc.new_file(sink, table.schema)
                writer.write_table(table)
            if writer is None:
                raise ConfigError("to_map_dataset(): the pipeline has no rows")
            writer.close()
        os.replace(beside, target)
    finally:
        Path(beside).unlink(missing_ok=True)


def _runs(runner: Runner) -> Any:
    """The rows of one epoch, run by run, shard after shard."""
    plan = runner.plan
    chains = Chains(plan, plan.windows())
    for shard in range(plan.num_shards):
        slot = plan.slot(shard, 0, 0)
        chain = chains.open(shard, slot, plan.start(slot, 0, 0), 0)
        while True:
            try:
                run: Run = chain.next_run()
            except StopIteration:
                break
            yield chains.finish(run)
