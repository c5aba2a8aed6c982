"""What the readers of tables share: their options, versions in states, and errors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, ClassVar

from trainpipes import errors
from trainpipes._internal.checks import column_names, require
from trainpipes.columns.columns import text_of
from trainpipes.errors import cut
from trainpipes.filesystems.retry import NORMAL
from trainpipes.interfaces.source import RowSource
from trainpipes.interfaces.stage import Stage, made_once
from trainpipes.interfaces.stage_kinds import Source
from trainpipes.sources.files.decoded_files import above_reader, without_bad_files
from trainpipes.sources.files.formats import one_line
from trainpipes.sources.files.list_files import FileList, ListFiles, checked_options
from trainpipes.sources.parquet_filter import ChosenColumns, checked_filter
from trainpipes.sources.read_parquet import ReaderFilter
from trainpipes.sources.tables import table_files

#: What libraries call a table that is not there.
NOT_THERE = ("TableNotFoundError", "NoSuchTableError", "NoSuchNamespaceError")
#: What fsspec calls options of S3, and libraries in Rust.
OF_S3 = {
    "key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token",
    "endpoint_url": "aws_endpoint_url", "region_name": "aws_region",
}  # fmt: skip
#: The options of ``list_files`` that readers of files take.
OF_FILES = ("storage_options", "retry", "cache_dir", "cache_bytes", "prefetch_bytes")


class ReadTable(Source, has_blocks=True, asks_inputs=True):
    """Reads a version of a table. A subclass has the options, and ``_version``."""

    free = frozenset({"refresh", *OF_FILES})

    #: What a state names of the version: "version/12".
    only: ClassVar[tuple[str, ...] | None] = None
    #: The options that say where the table is, and which version.
    _uri: ClassVar[str] = "uri"
    _number: ClassVar[str] = "version"

    def check(self) -> None:
        options = self.options
        if options["columns"] is not None:
            self._set(columns=column_names(options["columns"], f"{self.name}(columns)"))
        checked_filter(options["filter"], self.name)
        if options.get("storage_options") is not None:
            option = f"{self.name}(storage_options)"
            self._set(storage_options=checked_options(options["storage_options"], option))
        if options["refresh"] is not None and options[self._number] is not None:
            raise errors.ConfigError(
                f"{self.name}(refresh) must be left out where {self._number} names the version of all "
                f"epochs, got {options[self._number]!r}"
            )
        self._listing(["."])

    def _check_path(self, kind: str) -> None:
        """Check the options of a table that is known by its path or URL."""
        uri, version = self.options["uri"], self.options["version"]
        good = isinstance(uri, str | os.PathLike) and str(uri).strip()
        self._require(good, "uri", f"a path or URL of a {kind} table")
        version = version.isoformat() if isinstance(version, datetime) else version
        self._set(uri=os.fspath(uri), version=version)
        instant(version, f"{self.name}(version)")

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        identity.pop("on_error", None)  # ``BadRows`` above has it
        if (filter := checked_filter(self.options["filter"], self.name)) is not None:
            identity["filter"] = text_of(filter)
        return identity

    def _traits(self) -> dict[str, Any]:
        grows = self.options["refresh"] is not None
        return {"grows": grows, "pins": not grows and self.options[self._number] is None}

    def _fresh(self) -> Any:
        stage = super()._fresh()
        return stage if self.only is None else stage._resolved(only=self.only)

    def _above(self) -> Sequence[Stage]:
        filter, columns = self.options["filter"], self.options["columns"]
        bad = above_reader(self) if "on_error" in self.options else ()
        if filter is None:
            return bad
        return (*bad, ReaderFilter(filter), *([] if columns is None else [ChosenColumns(columns)]))

    # The version

    def _version(self, number: Any) -> table_files.TableVersion:
        """A version by its number, or by an instant; None for the newest."""
        raise NotImplementedError

    @property
    def _wanted(self) -> Any:
        """The version that a state names, or else the option."""
        if self.only is None:
            return self.options[self._number]
        number = self.only[0].rpartition("/")[2]
        return int(number) if number.isdecimal() else number

    @property
    def _said_uri(self) -> str:
        return str(self.options[self._uri])

    def open(self) -> RowSource:
        return self._rows_of(self._version(self._wanted))

    @contextmanager
    def _explained(self, problem: str) -> Iterator[None]:
        """Raise errors of a format's library as one of ours that names the table."""
        try:
            yield
        except (errors.TrainpipesError, MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # panics of Rust are no Exceptions
            if "forked" in str(error).lower():
                raise errors.ConfigError(
                    f"{self.name} cannot open a table in a forked process, as its library has threads; use "
                    'trainpipes.Loader, or DataLoader(multiprocessing_context="forkserver")'
                ) from None
            if not isinstance(error, Exception):
                raise
            # Rust's libraries mark some of it for terminals.
            said = cut(one_line(error).replace("\x1b[31m", "").replace("\x1b[0m", ""), 300)
            missing = type(error).__name__ in NOT_THERE or "was not found" in str(error)
            missing |= isinstance(error, FileNotFoundError)
            kind = errors.MissingFilesError if missing else errors.UnreadableError
            raise kind(
                f"{self.name}: {problem} ({type(error).__name__}: {said}); is the address right, and are "
                "credentials given?",
                path=self._said_uri,
            ) from error

    def _gone(self, number: Any, why: str) -> errors.MissingFilesError:
        way = f"read another one with {self._number}=..."
        if self.only is not None:
            way = (
                "restore it, or load the state of an epoch's start with load_state_dict(state, "
                "allow_changes=['version']), which goes on with the newest"
            )
        return errors.MissingFilesError(
            f"{self.name}: version {number} of the table {self._said_uri} cannot be read any more: {why}; "
            f"{way}",
            path=self._said_uri,
        )

    # Its files

    @made_once
    def bad_files(self) -> dict[str, str]:
        """Files that are left out, and why: they cannot be read (``without_bad_files``)."""
        return {}

    def _listing(self, urls: Sequence[str], known: Mapping[str, Any] | None = None) -> ListFiles:
        """A list of these files, by options of ours, and those of fsspec that the table has."""
        options = self.options
        listing = {name: options[name] for name in OF_FILES if name in options}
        listing["storage_options"] = {**(known or {}), **(listing.get("storage_options") or {})}
        return ListFiles(list(urls), **listing)._resolved(exact=True)

    def _files(
        self, number: int | str, urls: Sequence[str], known: Mapping[str, Any] | None = None
    ) -> FileList:
        """The files of a version, all of which must be there."""
        if not urls:
            return FileList(
                [],
                [],
                table_files.NO_ROWS,
                table_files.NO_ROWS,
                (),
                [],
                table_files.NO_ROWS,
                NORMAL,
            )
        try:
            return self._listing(urls, known).files()
        except (FileNotFoundError, errors.MissingFilesError) as error:
            name = getattr(error, "filename", None) or getattr(error, "path", None) or error
            why = f"its file {name} is gone, which a vacuum, or who else cleans up, has removed"
            raise self._gone(number, why) from error

    @without_bad_files
    def _rows_of(self, version: Any) -> table_files.TableSource:
        columns, filter = self.options["columns"], checked_filter(self.options["filter"], self.name)
        files = self._files(version.number, version.urls, version.storage_options)
        usable = [n for n, name in enumerate(files.names) if name not in self.bad_files]
        source = table_files.rows_of(
            version, files, usable, columns, filter, str(self), self._said_uri
        )
        source.leave_out(self.options["on_error"])
        return source


def of_object_store(options: Mapping[str, Any] | None) -> dict[str, str]:
    """Options of fsspec as Rust's libraries call them; others as they are."""
    flat = {**(options or {}), **((options or {}).get("client_kwargs") or {})}
    named = {OF_S3.get(key, key): value for key, value in flat.items() if isinstance(value, str)}
    if flat.get("anon") is True:
        named["skip_signature"] = "true"
    if named.get("aws_endpoint_url", "").startswith("http://"):
        named["aws_allow_http"] = "true"
    return named


def instant(value: Any, option: str) -> datetime | None:
    """The time that names a version; None for a number, or no version. Raises ConfigError for others."""
    good = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
    time = None
    if isinstance(value, str):
        with suppress(ValueError):
            time = datetime.fromisoformat(value)
    rule = "a version's number, a time such as '2026-05-01T12:00:00Z', or None for the newest"
    require(good or time is not None, option, rule, value)
    return time if time is None or time.tzinfo else time.replace(tzinfo=UTC)
