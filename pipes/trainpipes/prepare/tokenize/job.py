"""The files that are to be made, and those that are whole: what the manifest says while work goes on."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from trainpipes.engine.planning.plan import Plan
from trainpipes.prepare.tokenize.cut import files_of
from trainpipes.prepare.tokenize.make import Made
from trainpipes.prepare.tokenize.tasks import Task
from trainpipes.prepare.tokenize.workers import Tell
from trainpipes.storage.writers.manifest import Opened
from trainpipes.storage.writers.output_folder import OutputFolder

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

    @property
    def missing(self) -> list[Task]:
        return [task for task in self._tasks if task.name not in self._made]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Of the files that are whole, in the order of the rows."""
        return [self._made[task.name] for task in self._tasks if task.name in self._made]

    def make(self, makes: Makes) -> None:
        """Make what is missing."""
        self._tell(0)
        made = makes(self.missing, self._tell)
        with self._out.sweeping(), closing(made):
            for task, file in made:
                entry = {
                    "file": task.name, "rows": file.rows, "bytes": file.bytes, "crc32": file.crc32,
                    "tokens": file.tokens, "source": self._names[self._number[task.source]],
                }  # fmt: skip
                self._made[task.name] = entry
                self._out.note(entry)

    def _tell(self, rows: int) -> None:
        self._done += rows
        self._progress("tokenizing", self._done, self._total)
