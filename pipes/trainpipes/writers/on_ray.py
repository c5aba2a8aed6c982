"""Output files made by tasks on a Ray cluster, one task for each.

Which rows a file has follows from its number, so a task opens the pipeline at the file's first row and reads
its own part of the sources only. It writes under a hidden name; the driver gives the file its own when it is
whole, and notes it. So the bytes are those that one process writes, whatever the number of tasks at a time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainpipes.checks import flag
from trainpipes.errors import ConfigError, DataChangedError
from trainpipes.on_ray import RayCluster
from trainpipes.progress import Progress
from trainpipes.shown import shown
from trainpipes.writers.epoch_rows import EpochRows
from trainpipes.writers.inputs import places_of
from trainpipes.writers.one_file import (
    Format,
    Lengths,
    columns_of,
    entry_of,
    first_missing,
    in_order,
    numbered,
    same_columns,
    write_file,
)
from trainpipes.writers.output_file import OutputFile
from trainpipes.writers.output_folder import PART, Opened, OutputFolder, Written

__all__ = ["HERE", "Cluster", "check_cut", "check_paths", "write_on_ray"]


@dataclass(frozen=True)
class Cluster:
    """Where files are written.

    Args:
        engine: None for this process, or "ray".
        address: of the cluster; see ``RayCluster``.
        shared_filesystem: whether every node sees this machine's paths.
    """

    engine: str | None = None
    address: str | None = None
    shared_filesystem: bool = False

    def checked(self, asker: str) -> Cluster:
        """This one.

        Raises:
            ConfigError: there is no such engine, or an option is of another.
        """
        flag(self.shared_filesystem, f"{asker}(shared_filesystem)")
        if self.engine not in (None, "ray"):
            raise ConfigError(
                f'{asker}(engine) is "ray", or None for this process, got {shown(self.engine)}'
            )
        if self.engine is None and (self.address is not None or self.shared_filesystem):
            name = "address" if self.address is not None else "shared_filesystem"
            raise ConfigError(f'{asker}({name}) is of engine="ray": give that, or leave it out')
        return self

    def enter(self, stack: ExitStack, asker: str) -> RayCluster | None:
        """Connect to the cluster; None for this process."""
        if self.checked(asker).engine is None:
            return None
        cluster = RayCluster(
            self.address, asker=f"{asker}()", shared_filesystem=self.shared_filesystem
        )
        return stack.enter_context(cluster)


#: This process.
HERE = Cluster()


@dataclass(frozen=True)
class FileTask:
    """A file that is to be made.

    Attributes:
        number: of the file.
        start: its first row.
        stop: the row after its last one.
    """

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class Opener:
    """Opens the work in a worker process."""

    rows: EpochRows
    form: Format
    folder: Path

    def __call__(self) -> Callable[[FileTask, Callable[[int], None]], dict[str, Any]]:
        return self._make

    def _make(self, task: FileTask, tell: Callable[[int], None]) -> dict[str, Any]:
        """Write a file; gives what the manifest says of it, its columns, and where it lies."""
        # A process that was taken for dead may still be writing.
        part = self.folder / f"{PART}{secrets.token_hex(6)}-{self.form.name_of(task.number)}"
        rows, file = self.rows, OutputFile(part, self.form.asker)
        try:
            with closing(rows):
                rows.open_part(task.start, task.stop)
                length = task.stop - task.start
                group = rows.group(min(self.form.rows, length), self.form.bytes)
                if group is not None:
                    columns = columns_of(rows.schema)
                    count = write_file(rows, self.form, file, group, length, task.start, tell)
                if group is None or count != length:
                    raise DataChangedError(
                        f"{self.form.asker}(): the rows of {self.form.name_of(task.number)} end before row "
                        f"{task.stop - 1:,}: the input has changed; begin anew with overwrite=True"
                    )
                file.sync()
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
        finally:
            file.close()
        return {
            "entry": entry_of(self.form.name_of(task.number), count, file),
            "part": part.name,
            "columns": columns,
        }


def check_cut(rows: EpochRows, lengths: Lengths) -> None:
    """Raise unless it is known which rows each file has, before any is read."""
    plan, asker = rows.plan, rows.asker
    if not plan.counted:
        odd = next(
            (stage for stage in plan.chain.stages if not stage.keeps_rows), plan.chain.stages[0]
        )
        raise ConfigError(
            f'{asker}(engine="ray") gives each task the rows of one file, and how many rows {odd} gives is '
            "known only when all are read: leave engine out, or write the rows before that stage; "
            'trainpipes.prepare.tokenize(engine="ray") and repack(engine="ray") need no counts'
        )
    if not lengths.given:
        raise ConfigError(
            f'{asker}(engine="ray") gives each task the rows of one file: say how many by files=... or '
            "rows_per_file=..."
        )


def check_paths(cluster: RayCluster, rows: EpochRows, folder: Path) -> None:
    """Raise where the nodes of the cluster cannot see the files that are read or written."""
    cluster.check_path(folder, f"{rows.asker}(folder)")
    for path in places_of(rows.plan.inputs.source):
        cluster.check_path(path, f"{rows.asker}(pipeline)")


def write_on_ray(
    cluster: RayCluster,
    rows: EpochRows,
    out: OutputFolder,
    opened: Opened,
    form: Format,
    lengths: Lengths,
) -> Written:
    """Make the files that are missing.

    Args:
        cluster: runs the tasks.
        rows: of the pipeline.
        out: where the files go.
        opened: what of it is whole.
        form: how rows are written.
        lengths: of the files.
    """
    if not rows.count:
        raise ConfigError(f"{form.asker}(): the pipeline has no rows, and nothing was written")
    rows.plan.adopt(opened.notes)
    rows.know_columns()
    known, columns = numbered(opened.files), opened.columns
    count = rows.count
    tasks = [task for task in _tasks(lengths, count) if task.number not in known]
    with Progress(f"writing {out.path.name}", count, "rows") as progress:
        progress.advance(sum(entry["rows"] for entry in known.values()))
        opener = Opener(rows, form, out.path)
        done = cluster.run(
            opener, tasks, name_of=lambda task: f"{form.name_of(task.number)}, rows {task.start:,} to "
            f"{task.stop - 1:,}", tell=progress.advance,
        )  # fmt: skip
        try:
            with closing(done):
                for task, made in done:
                    columns = same_columns(form.asker, columns, made["columns"])
                    out.publish(out.path / made["part"], made["entry"]["file"])
                    known[task.number] = made["entry"]
                    out.save(_state(rows, known, columns))
        finally:
            _sweep(out.path)
    return out.finish(in_order(known), columns or {})


def _tasks(lengths: Lengths, count: int) -> Iterator[FileTask]:
    start = number = 0
    while start < count:
        stop = min(count, start + (lengths.of(number) or 0))
        yield FileTask(number, start, stop)
        start, number = stop, number + 1


def _state(rows: EpochRows, known: dict[int, Any], columns: dict[str, str] | None) -> Opened:
    """What is whole, so that one process may go on with it, too."""
    before = sum(known[number]["rows"] for number in range(first_missing(known)))
    return Opened(None, in_order(known), rows.cursor_at(before), rows.plan.notes, columns)


def _sweep(folder: Path) -> None:
    """Remove parts of files: no task runs any more."""
    for name in os.listdir(folder):
        if name.startswith(PART):
            with suppress(OSError):
                (folder / name).unlink()
