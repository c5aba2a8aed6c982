"""The exceptions that trainpipes raises.

    TrainpipesError
    ├── ConfigError            (ValueError)         a stage, loader or recipe got something it cannot use
    │   └── TopologyError      (ValueError)         ranks, workers and shards do not fit together
    ├── DataError              (ValueError)         the data is not what it should be
    │   ├── MissingFilesError  (FileNotFoundError)  nothing to read
    │   ├── UnreadableError    (OSError)            files that cannot be opened or decoded
    │   ├── SchemaError        (TypeError)          columns are missing, or have another type
    │   └── DataChangedError   (OSError)            a file has changed since it was listed
    ├── UnreachableError       (OSError)            a server does not answer, or denies access
    ├── StateError             (ValueError)         a checkpoint does not fit this pipeline
    ├── WorkerError            (RuntimeError)       worker processes have died
    └── MissingExtraError      (ImportError)        an optional package is not installed

Each message states the rule, the value received and a way out, without secrets: of a URL's user and
query only the names of the query remain.
"""

from __future__ import annotations

from typing import Any

from trainpipes.errors.text import cut, hidden

__all__ = [
    "ConfigError",
    "DataChangedError",
    "DataError",
    "MissingExtraError",
    "MissingFilesError",
    "SchemaError",
    "StateError",
    "TopologyError",
    "TrainpipesError",
    "UnreachableError",
    "UnreadableError",
    "WorkerError",
]

#: Characters of a message, at most: of a longer one, the start and the end are left.
MOST = 20_000


class TrainpipesError(Exception):
    """Base of all errors raised by trainpipes.

    Attributes:
        path: the file concerned.
        row_group: row group within ``path``, from 0.
        row: row within ``path``, from 0.
        stage: the stage that raised, as it prints in the pipeline.
        source: in a mix, the name of the source that ``path`` belongs to.
    """

    def __init__(
        self,
        message: str = "",
        *,
        path: str | None = None,
        row_group: int | None = None,
        row: int | None = None,
        stage: str | None = None,
        source: str | None = None,
    ) -> None:
        self.message = message
        super().__init__(self.message)
        self.path = path
        self.row_group = row_group
        self.row = row
        self.stage = stage
        self.source = source

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, cut(hidden(value), MOST) if isinstance(value, str) else value)

    def add_note(self, note: str, /) -> None:
        super().add_note(hidden(note))

    def __str__(self) -> str:
        return self.message


class ConfigError(TrainpipesError, ValueError):
    """A stage, loader or recipe was given something it cannot use."""


class TopologyError(ConfigError):
    """The numbers of ranks, workers and shards do not fit together."""


class DataError(TrainpipesError, ValueError):
    """The data is not what it should be."""


class MissingFilesError(DataError, FileNotFoundError):
    """No file matches, or a file that was listed is gone."""


class UnreadableError(DataError, OSError):
    """Files that cannot be opened or decoded."""


class SchemaError(DataError, TypeError):
    """A column is missing, or has another type than it must have."""


class DataChangedError(DataError, OSError):
    """A file has changed since it was listed."""


class UnreachableError(TrainpipesError, OSError):
    """A server does not answer, or denies access. This says nothing about the data.

    Attributes:
        attempts: how many times it was asked.
        seconds: how long that took.
    """

    def __init__(
        self, message: str = "", *, attempts: int = 1, seconds: float = 0.0, **context: Any
    ) -> None:
        super().__init__(message, **context)
        self.attempts = attempts
        self.seconds = seconds


class StateError(TrainpipesError, ValueError):
    """A checkpoint does not fit this pipeline, is incomplete, or was damaged."""


class WorkerError(TrainpipesError, RuntimeError):
    """Worker processes of ``map`` or of a ``Loader`` have died again and again, or what one made cannot be
    sent.
    """


class MissingExtraError(TrainpipesError, ImportError):
    """An optional package is needed and not installed."""
