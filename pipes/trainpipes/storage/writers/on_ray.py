"""Output files made by tasks on a Ray cluster, one task for each.

Which rows a file has follows from its number, so a task opens the pipeline at the file's first row and reads
its own part of the sources only. It puts the file in its place when it is whole, and the driver notes it. So
the bytes are those that one process writes, whatever the number of tasks at a time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, TypeAlias

from trainpipes._internal.checks import flag
from trainpipes._internal.progress import Progress
from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError, DataChangedError
from trainpipes.integrations.on_ray import RayCluster
from trainpipes.storage.output_file import OutputFile
from trainpipes.storage.writers.epoch_rows import EpochRows
from trainpipes.storage.writers.inputs import places_of
from trainpipes.storage.writers.manifest import Opened, Written
from trainpipes.storage.writers.one_file import (
    Format,
    Lengths,
    columns_of,
    entry_of,
    in_order,
    numbered,
    same_columns,
    write_file,
)
from trainpipes.storage.writers.output_folder import OutputFolder
from trainpipes.storage.writers.storage import Storage

#: What the manifest says of a file, and its columns.
Made: TypeAlias = tuple[dict[str, Any], dict[str, str]]


@dataclass(frozen=True)
class Cluster:
    """Where files are written.

    Args:
        engine: "ray", or ``here``.
        address: of the cluster; see ``RayCluster``.
        shared_filesystem: whether every node sees this machine's paths.
        here: what the engine is called that is this process and no cluster.
    """

    engine: str | None = None
    address: str | None = None
    shared_filesystem: bool = False
    here: str | None = None

    def checked(self, asker: str) -> Cluster:
        """This one.

        Raises:
            ConfigError: there is no such engine, or an option is of another.
        """
        flag(self.shared_filesystem, f"{asker}(shared_filesystem)")
        if self.engine not in (self.here, "ray"):
            known = (
                '"ray", or None for this process'
                if self.here is None
                else f'"{self.here}" or "ray"'
            )
            raise ConfigError(f"{asker}(engine) is {known}, got {shown(self.engine)}")
        if self.engine != "ray" and (self.address is not None or self.shared_filesystem):
            name = "address" if self.address is not None else "shared_filesystem"
            raise ConfigError(f'{asker}({name}) is of engine="ray": give that, or leave it out')
        return self

    def enter(self, stack: ExitStack, asker: str) -> RayCluster | None:
        """Connect to the cluster; None for this process."""
        if self.checked(asker).engine != "ray":
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
    storage: Storage
    token: str

    def __call__(self) -> Callable[[FileTask, Callable[[int], None]], Made]:
        return self._make

    def _make(self, task: FileTask, tell: Callable[[int], None]) -> Made:
        """Make a file and put it in its place."""
        name, length = self.form.name_of(task.number), task.stop - task.start
        # Two tries of a task may run at once, where a node is only thought to be dead.
        with self.storage.making(name, f"{self.token}{secrets.token_hex(2)}") as path:
            file = OutputFile(path, self.form.asker)
            with closing(file), closing(self.rows):
                self.rows.open_part(task.start, task.stop)
                group = self.rows.group(min(self.form.rows, length), self.form.bytes)
                count, columns = 0, {}
                if group is not None:
                    columns = columns_of(self.rows.schema)
                    count = write_file(self.rows, self.form, file, group, length, task.start, tell)
                if count != length:
                    raise DataChangedError(
                        f"{self.form.asker}(): the rows of {name} end before row {task.stop - 1:,}: the "
                        "input has changed; begin anew with overwrite=True"
                    )
                file.sync()
            self.storage.put(path, name)
        return entry_of(name, count, file), columns


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


def check_paths(cluster: RayCluster, rows: EpochRows, folder: str) -> None:
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
    rows.know_columns()
    known, columns = numbered(opened.files), opened.columns
    count = rows.count
    tasks = [task for task in _tasks(lengths, count) if task.number not in known]
    with Progress(f"writing {out.name}", count, "rows") as progress:
        progress.skip(sum(entry["rows"] for entry in known.values()))
        opener = Opener(rows, form, out.storage, secrets.token_hex(4))
        done = cluster.run(
            opener, tasks, name_of=lambda task: f"{form.name_of(task.number)}, rows {task.start:,} to "
            f"{task.stop - 1:,}", tell=progress.advance,
        )  # fmt: skip
        with out.sweeping(), closing(done):
            for task, (entry, found) in done:
                columns = same_columns(form.asker, columns, found)
                known[task.number] = entry
                out.note(entry, columns=columns)
    return out.finish(in_order(known), columns or {})


def _tasks(lengths: Lengths, count: int) -> Iterator[FileTask]:
    start = number = 0
    while start < count:
        stop = min(count, start + (lengths.of(number) or 0))
        yield FileTask(number, start, stop)
        start, number = stop, number + 1
