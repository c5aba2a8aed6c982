from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainpipes._internal.checks import checked_schema, column_names, require, whole_number
from trainpipes.errors import ConfigError, MissingFilesError
from trainpipes.kinds.source import RowSource
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import Source
from trainpipes.sources.files.file_list import FileList
from trainpipes.sources.files.file_rows import suffixes_of
from trainpipes.sources.files.list_files import ListFiles, checked_options
from trainpipes.storage.cache import SUFFIX


class FileReader(Source):
    """Reads the files of ``list_files`` below it. A subclass has ``storage_options`` and ``open_files``."""

    role = "reader"
    free = frozenset({"storage_options", "index"})

    def check(self) -> None:
        given = self.options
        for name, checked in CHECKS.items():
            if name in given and given[name] is not getattr(type(self), name):  # its default
                self._set(**{name: checked(given[name], f"{self.name}({name})")})

    def open(self) -> RowSource:
        return self.open_files([])

    @abstractmethod
    def open_files(self, files: Sequence[Stage]) -> RowSource:
        """The rows of the files that the stages below list and let through."""

    def listed(self, stages: Sequence[Stage], suffixes: Sequence[str] | None = None) -> FileList:
        if not stages or not isinstance(stages[0], ListFiles):
            raise ConfigError(f"{self} needs the files to read: put it after list_files(...)")
        found = stages[0].files(self.options["storage_options"], suffixes or suffixes_of(self.name))
        for stage in stages[1:]:
            if hasattr(stage, "predicate"):
                found = self._kept(found, stage)
        self._check_names(found)
        return found

    def _check_names(self, files: FileList) -> None:
        """Raise for names that are no text, which neither Arrow nor the index can hold."""
        odd = next(filter(re.compile("[\ud800-\udfff]").search, files.names), None)
        if odd is not None:
            raise ConfigError(
                f"{self}: the name of the file {odd!r} is not UTF-8; rename it, or leave it out with "
                ".filter(lambda path: ...) after list_files",
                path=odd,
            )

    def _kept(self, files: FileList, stage: Any) -> FileList:
        if not callable(stage.predicate):
            raise ConfigError(
                f"{stage} comes before {self.name}(), where there are only file paths, and an "
                "expression needs columns; give a function of a path, or put the filter after "
                f"{self.name}()"
            )
        kept = np.flatnonzero([bool(stage.predicate(name)) for name in files.names])
        if not len(kept):
            raise MissingFilesError(
                f"{stage} keeps none of the {len(files):,} files, for example {files.names[0]}; its "
                "function gets the path or URL as text: check its condition",
                stage=str(stage),
            )
        return files.pick(kept.astype(np.int64))


def _index(value: Any, option: str) -> str | bool:
    good = isinstance(value, bool) or (isinstance(value, str | os.PathLike) and os.fspath(value))
    rule = f"a file that ends in {SUFFIX}, a folder, True, False or None"
    require(good, option, rule, value)
    return value if isinstance(value, bool) else str(os.fspath(value))


#: What refuses a bad value of an option, and returns a good one in the form that it is kept in.
CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "columns": column_names,
    "schema": checked_schema,
    "block_rows": lambda value, option: whole_number(value, 1, option, "rows in a block"),
    "index": _index,
    "storage_options": checked_options,
}
