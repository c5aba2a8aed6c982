"""The files that are to be made, and those that are whole: what the manifest says while work goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from typing import Any

from trainpipes.errors import ConfigError, UnreachableError
from trainpipes.prepare.tokenize.cut import files_of
from trainpipes.prepare.tokenize.make import Made
from trainpipes.prepare.tokenize.tasks import Task
from trainpipes.prepare.tokenize.workers import Tell
from trainpipes.runtime.planning.plan import Plan
from trainpipes.writers.output_folder import Opened, OutputFolder
from trainpipes.writers.storage import PART

__all__ = ["Job", "Report"]

#: Seconds between two notes of what is whole, and how many times longer than a note takes they are at least:
#: what is finished after the last is made again after a kill.
EVERY = 1.0
PATIENCE = 20

#: Is called with the job, the rows that are done, and all there are.
Report = Callable[[str, int, int | None], None]
#: Makes files, and gives them as they are whole.
Makes = Callable[[list[Task], Tell], Generator[tuple[Task, Made], None, None]]


class Job:
    """The files that are to be made, and those that are whole."""

    def __init__(
        self,
        out: OutputFolder,
        tasks: list[Task],
        opened: Opened,
        plan: Plan,
        progress: Report,
    ) -> None:
        self._out = out
        self._tasks = tasks
        self._progress = progress
        self._names = files_of(plan).files.relative_names()
        self._number = {str(name): n for n, name in enumerate(files_of(plan).files.names)}
        self._made = {entry["file"]: entry for entry in opened.files}
        self._total = sum(task.rows for task in tasks)
        self._done = sum(task.rows for task in tasks if task.name in self._made)
        if opened.written is None:
            self._clear()

    @property
    def missing(self) -> list[Task]:
        return [task for task in self._tasks if task.name not in self._made]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Of the files that are whole, in the order of the rows."""
        return [self._made[task.name] for task in self._tasks if task.name in self._made]

    def make(self, makes: Makes) -> None:
        """Make what is missing."""
        saved = time.monotonic()
        wait = EVERY
        self._tell(0)
        made = makes(self.missing, self._tell)
        try:
            with closing(made):
                for task, file in made:
                    self._made[task.name] = {
                        "file": task.name, "rows": file.rows, "bytes": file.bytes, "crc32": file.crc32,
                        "tokens": file.tokens, "source": self._names[self._number[task.source]],
                    }  # fmt: skip
                    began = time.monotonic()
                    if began - saved > wait:
                        self._save()
                        saved = time.monotonic()
                        wait = max(EVERY, PATIENCE * (saved - began))
            self._clear()  # parts of processes that were killed, whose tasks others have done
        except BaseException:
            with suppress(OSError, ConfigError):
                self._clear()  # which makes room on a disk that is full
            with suppress(ConfigError, UnreachableError):
                self._save()
            raise

    def _tell(self, rows: int) -> None:
        self._done += rows
        self._progress("tokenizing", self._done, self._total)

    def _save(self) -> None:
        self._out.save(Opened(None, self.entries, None, {}, None))

    def _clear(self) -> None:
        """Remove parts of files, and files that nobody has noted."""
        for name in self._out.storage.names():
            own = name.startswith(("part-", PART))
            if own and name not in self._made:
                self._out.storage.remove(name)
