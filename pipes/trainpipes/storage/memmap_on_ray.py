"""``write_memmap(engine="ray")``: the rows are made by tasks on a Ray cluster, and joined here.

The files of a memory map are columns, which no two tasks can write to. So tasks write the rows to Arrow files
beside it, as ``write_arrow`` does, and this process copies the columns out of them. After a kill the tasks'
files that are whole stay as they are.
"""

from __future__ import annotations

import glob
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from trainpipes.engine.column_names import row_schema
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError, DataChangedError
from trainpipes.sources.memmap.given_rows import Part, of_batches
from trainpipes.sources.memmap.manifest import MANIFEST
from trainpipes.storage.writers.inputs import refuse_own_input
from trainpipes.storage.writers.manifest import Written
from trainpipes.storage.writers.on_ray import Cluster
from trainpipes.storage.writers.storage import LocalStorage

if TYPE_CHECKING:
    from trainpipes.pipeline import Pipeline

#: Bytes of rows in each task's file, about.
FILE_BYTES = 64 << 20
#: Bytes of a row that are assumed where they are not known.
ROW_BYTES = 1024


def rows_by_tasks(pipe: Pipeline, target: Path, cluster: Cluster) -> tuple[int, Iterator[Part]]:
    """How many rows a pipeline has, and its columns, block by block; once all are taken, the files that the
    tasks wrote are gone.

    Args:
        pipe: of rows that are columns.
        target: where the memory map will be.
        cluster: runs the tasks.

    Raises:
        ConfigError: rows are batched, are Python objects, or are not counted.
    """
    plan = pipe._session.plan
    refuse_read(plan, target)
    if (
        plan.chain.batch is None
        and row_schema(plan, "write_memmap()") is None
        and plan.counts.known
    ):
        raise ConfigError(
            'write_memmap(engine="ray") takes rows that are columns, and those of this pipeline are Python '
            "objects: make them by map_batches() or with_columns(), or leave engine out"
        )
    each = getattr(plan.inputs.source, "row_bytes", None) or ROW_BYTES
    beside = f".{target.name}."
    folder = target.with_name(f"{beside}{plan.tag}.rows")
    for other in target.parent.glob(f"{glob.escape(beside)}*.rows"):
        of_this = "." not in other.name[len(beside) :].removesuffix(".rows")
        if of_this and other != folder:  # of a pipeline that was given up
            shutil.rmtree(other, ignore_errors=True)

    def write() -> Written:
        return pipe.write_arrow(
            folder,
            rows_per_file=max(1, int(FILE_BYTES // each)),
            engine="ray",
            address=cluster.address,
            shared_filesystem=cluster.shared_filesystem,
        )

    try:
        written = write()
    except DataChangedError:  # since a call that was killed
        shutil.rmtree(folder)
        written = write()
    return written.rows, _taken(written.files, folder)


def refuse_read(plan: Plan, target: Path) -> None:
    """Raise ConfigError if a memory map would be read as part of a pipeline's own input."""
    out = LocalStorage(str(target), "write_memmap")
    refuse_own_input(plan.inputs.source, out, ["column.npy", MANIFEST], "write_memmap")


def _taken(files: tuple[str, ...], folder: Path) -> Iterator[Part]:
    def batches() -> Iterator[pa.RecordBatch]:
        for path in files:
            with pa.memory_map(path) as file:
                reader = pa.ipc.open_file(file)
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)

    yield from of_batches(batches())
    shutil.rmtree(folder)
