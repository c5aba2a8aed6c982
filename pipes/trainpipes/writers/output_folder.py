"""Files that tasks make, each whole or not there, and a manifest that appears last.

part-00000.parquet      a whole file; a task may make several, whose names begin alike
_manifest.json          of each file its rows, bytes and CRC-32; appears last
_unfinished/            until then:
    about.json              description of the job
    *.done.json             of each whole file: rows, bytes, CRC-32, and where the next file begins
    *.part                  files in work
    lock                    who writes
"""

from __future__ import annotations

import copy
import errno
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from operator import index
from typing import Any, Protocol, TypeVar
from zlib import crc32

from trainpipes import errors
from trainpipes._internal.checks import flag
from trainpipes._internal.progress import Progress
from trainpipes.engine.processes.executors import Executor, Threads
from trainpipes.filesystems.places import (
    LOCK_NAME,
    MANIFEST,
    OURS,
    WORK,
    OutputFile,
    Place,
    clean_up,
    place_at,
)
from trainpipes.state.format import check_identity, first_difference, said, take_over
from trainpipes.version import __version__

ABOUT = f"{WORK}/about.json"
#: What the name of a sidecar ends with, after that of its file.
SIDECAR = ".done.json"
#: Files in the folder of unfinished files where nothing is whole.
KEPT = {"about.json", LOCK_NAME}
#: What makes digests of code: others make others.
CODE_OF = f"trainpipes {__version__} {sys.implementation.cache_tag}"
#: Bytes that are read from a file at once.
BLOCK_BYTES = 4 << 20
#: The number of the manifest's form.
FORM = 1


@dataclass(frozen=True)
class FileInfo:
    """What is known of a whole file.

    Attributes:
        cursor: where the next file's rows begin; not in the manifest.
        notes: further entries of the manifest.
        file: its name; ``run`` sets this and the following.
        beside: further files of the task, and their bytes.
    """

    rows: int
    columns: dict[str, str] | None = None
    cursor: Any = None
    notes: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    bytes: int = 0
    crc32: str = ""
    beside: dict[str, int] = field(default_factory=dict)


class Task(Protocol):
    """What makes a file: all that an ``OutputFolder`` needs to know of it."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Task)


@dataclass(frozen=True)
class Manifest:
    """The files that were written.

    Attributes:
        folder: a path or URL.
        files: paths or URLs of the files, in the order of the rows.
        rows: in all files.
        bytes: of all files.
        columns: names and types.
        kept: number of files that were there already.
        entries: facts about each file.
        notes: of the writer.
    """

    folder: str
    files: tuple[str, ...]
    rows: int
    bytes: int
    columns: dict[str, str] = field(repr=False)
    kept: int = field(compare=False)
    entries: tuple[FileInfo, ...] = field(repr=False)
    notes: dict[str, Any] = field(default_factory=dict, repr=False)
    _place: Place | None = field(default=None, kw_only=True, repr=False, compare=False)

    def __repr__(self) -> str:
        said = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
        return errors.hidden(f"{type(self).__name__}({', '.join(said)})")

    def verify(self) -> None:
        """Compare all files with the manifest's checksums: 1 to 3 GB/s.

        Raises:
            DataChangedError: a file has changed since it was written.
        """
        place = self._place or place_at(self.folder, "verify")
        _check_there(place, self.entries)
        for info in self.entries:
            check = 0
            for start in range(0, info.bytes, BLOCK_BYTES):
                check = crc32(place.read(info.file, start, start + BLOCK_BYTES), check)
            if f"{check:08x}" != info.crc32:
                raise _changed(place.at(info.file), "its bytes are not those that were written")


class OutputFolder:
    """A folder that a single job writes to. Entered, it is locked and knows its files. No later run goes
    on where the "pipeline" of ``about`` is None.

    Args:
        code: what calls the user's code, and digests of it.
    """

    def __init__(
        self,
        place: Place,
        about: Mapping[str, Any],
        *,
        overwrite: bool = False,
        code: Callable[[], Sequence[tuple[str, str]]] = tuple,
    ) -> None:
        self.place, self.caller = place, place.caller
        self.files: dict[str, FileInfo] = {}
        self.finished: Manifest | None = None
        self.about = json.loads(json.dumps(about, default=index))  # NumPy's integers, too
        self._code, digests = code, code()
        self._callers = [caller for caller, _ in digests]
        if digests:
            self.about["code"] = {CODE_OF: [digest for _, digest in digests]}
        self._lock = place.lock()
        self._overwrite = flag(overwrite, f"{self.caller}(overwrite)")
        #: Rows of a pipeline can be distinguished from others, and their unfinished files are continued.
        self._goes_on = self.about.get("pipeline", "") is not None
        #: Whether the manifest may be there: set before it is written, and then nothing that it names goes.
        self._ends = False

    @property
    def columns(self) -> dict[str, str] | None:
        return next((info.columns for info in self.files.values()), None)

    def __enter__(self) -> OutputFolder:
        try:
            names = self.place.sizes()
            if not self._is_finished(names) or WORK in names:
                self._lock.take()
                self._open()
        except BaseException:
            self._lock.free()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            server_is_gone = (
                isinstance(error, errors.UnreachableError) and (error.attempts or 0) > 1
            )
            if self.finished is None and not server_is_gone and not self._may_be_whole():
                with suppress(OSError, errors.TrainpipesError):
                    if not self._goes_on:
                        self._clear()
                    self._sweep()  # which makes room on a disk that is full
                    if self.place.sizes(WORK).keys() <= KEPT:
                        self.place.remove(ABOUT)
                    elif self._leave_out_changed():
                        write_json(self.place, ABOUT, self.about)
        finally:
            self._lock.free()

    def _may_be_whole(self) -> bool:
        # A store may still be carrying out the request.
        return self._ends and not (self.place.is_local and MANIFEST not in self.place.sizes())

    def note(self, info: FileInfo) -> None:
        if self.columns is not None and info.columns != self.columns:
            raise errors.SchemaError(
                f"{self.caller}(): the files written so far have columns {self.columns}, and the next rows "
                f"have {info.columns}; write all anew with overwrite=True",
                stage=self.caller,
            )
        self.files[info.file] = info

    def _leave_out_changed(self) -> bool:
        """Compare digests no more of what calls themselves have changed, such as counters: in another
        process it is as it was.
        """
        mine, now = _digests(self.about), [digest for _, digest in self._code()]
        kept = [old if old == new else None for old, new in zip(mine, now, strict=True)]
        changed, mine[:] = kept != mine, kept
        return changed

    def finish(self, notes: Mapping[str, Any], kept: int) -> Manifest:
        self._leave_out_changed()
        files = [asdict(info) for info in sorted(self.files.values(), key=_in_order)]
        for entry in files:
            del entry["columns"], entry["cursor"]
        content: dict[str, Any] = {
            "trainpipes_files": FORM, "columns": self.columns or {},
            "rows": sum(info.rows for info in self.files.values()), "files": files,
            "notes": dict(notes), **self.about,
        }  # fmt: skip
        self._ends = True
        write_json(self.place, MANIFEST, content)
        self._clean_up()
        return self._end(content, kept)

    def _end(self, content: Mapping[str, Any], kept: int) -> Manifest:
        place, columns = self.place, content["columns"]
        entries = tuple(FileInfo(columns=columns, **entry) for entry in content["files"])
        self.finished = Manifest(
            place.root, tuple(place.at(part.file) for part in entries), content["rows"],
            sum(part.bytes for part in entries), columns, kept, entries, content["notes"], _place=place,
        )  # fmt: skip
        return self.finished

    def _is_finished(self, names: Collection[str]) -> bool:
        if MANIFEST not in names or self._overwrite:
            return False
        if not self._goes_on:
            raise errors.ConfigError(
                f"{self.caller}(): {self.place.root} exists already: pass overwrite=True, or give another "
                "folder",
                path=self.place.root,
            )
        manifest = self._read(MANIFEST)
        if manifest.get("trainpipes_files") != FORM:
            self._refuse_foreign(manifest)
            raise _damaged(self.place.at(MANIFEST))
        self._check_same(manifest)
        try:
            finished = self._end(manifest, len(manifest["files"]))
        except (KeyError, TypeError) as error:
            raise _damaged(self.place.at(MANIFEST)) from error
        _check_there(self.place, finished.entries)
        return True

    def _open(self) -> None:
        names, work = self.place.sizes(), self.place.sizes(WORK)
        if self._is_finished(names):
            self._clean_up()  # another run has finished it, or was killed thereafter
            return
        begun = "about.json" in work
        if MANIFEST in names:  # the files are a writer's, also without the manifest
            with suppress(errors.UnreadableError):  # it is damaged
                self._refuse_foreign(self._read(MANIFEST))
            write_json(self.place, ABOUT, {})
            self.place.remove(MANIFEST)
        elif not begun and any(name != WORK and not name.startswith(".") for name in names):
            self._refuse_foreign({})
        before = self._read(ABOUT) if begun and not self._overwrite else {}
        if not (self._goes_on or before.get("pipeline")):
            before = {}
        mine = _digests(self.about)
        for number, digest in enumerate(_digests(before)[: len(mine)]):
            mine[number] = digest and mine[number]
        done = [f"{WORK}/{name}" for name in work if name.endswith(SIDECAR)]
        if before and done:
            self._check_same(before)
            self._note_all(done)
        elif before != self.about:
            self._clear()
        write_json(self.place, ABOUT, self.about)
        self._sweep()

    def _refuse_foreign(self, manifest: Mapping[str, Any]) -> None:
        """Raise ConfigError where another program has written a manifest."""
        if "trainpipes_files" not in manifest:
            raise errors.ConfigError(
                f"{self.caller}(): {self.place.root} holds files that no writer has written: give a folder "
                "that is empty, or not there yet",
                path=self.place.root,
            )

    def _note_all(self, sidecars: list[str]) -> None:
        infos = []
        texts = self.place.read_all([(name, None, None) for name in sidecars])
        for name, text in zip(sidecars, texts, strict=True):
            try:
                infos.append(FileInfo(**json.loads(text)))
            except (ValueError, TypeError) as error:
                raise _damaged(self.place.at(name)) from error
        there = self.place.sizes()
        # One may be noted when its file was removed already: Ctrl-C came while it was sent.
        infos = [info for info in infos if {info.file, *info.beside} <= there.keys()]
        self.files = {info.file: info for info in sorted(infos, key=_in_order)}
        _check_there(self.place, infos)

    def _read(self, name: str) -> dict[str, Any]:
        content = self.place.read(name)
        with suppress(ValueError):
            if isinstance(about := json.loads(content), dict):
                return about
        raise _damaged(self.place.at(name))

    def _clean_up(self) -> None:
        with clean_up(self.place.at(WORK)):
            self._clear()
            self.place.remove(ABOUT)

    def _clear(self) -> None:
        """Remove unfinished files, but those that mark files here as a writer's: later, or never."""
        work = self.place.sizes(WORK)
        self.place.remove(
            *(f"{WORK}/{name}" for name, size in work.items() if size >= 0 and name not in KEPT)
        )
        for folder in [name for name, size in work.items() if size < 0]:
            self.place.remove_folder(f"{WORK}/{folder}")

    def _sweep(self) -> None:
        work, ours = self.place.sizes(WORK), filter(OURS.fullmatch, self.place.sizes())
        done = {_stem(name) for name in work if name.endswith(SIDECAR)}
        self.place.remove(
            *(f"{WORK}/{name}" for name in work if name.endswith(".part")),
            *(name for name in ours if _stem(name) not in done),
        )

    def _check_same(self, before: Mapping[str, Any]) -> None:
        root, mine = self.place.root, self.about
        difference, detail = first_difference(before.get("options"), mine.get("options")), ""
        if difference is not None:
            detail = f"files that were written with {difference[0]}: {said(difference[1])}, now "
            detail += said(difference[2])
        old, new = (about.get("pipeline") or {"stages": []} for about in (before, mine))
        same_files = copy.deepcopy(old)
        take_over(same_files, new)  # their content is checked below
        try:
            check_identity(json.dumps(same_files), json.dumps(new))
        except errors.StateError as error:
            detail = detail or f"the rows of another pipeline, {str(error).split('; ')[0]}"
        if detail:
            raise errors.ConfigError(
                f"{root} holds {detail}; write the same pipeline with the same options, give another folder, "
                "or overwrite=True",
                path=root,
            )
        if before.get("inputs") != mine.get("inputs") or same_files != old:
            raise errors.DataChangedError(
                f"{self.caller}(): the input was changed, as its files' content, times or etags say, since "
                f"{root} was begun (a copy counts as changed, too): begin anew with overwrite=True",
                path=root,
            )
        if before.get("in_memory", mine.get("in_memory")) != mine.get("in_memory"):
            raise errors.DataChangedError(
                f"{self.caller}(): the rows in memory are not those that {root} was begun with: begin "
                "anew with overwrite=True",
                path=root,
            )
        for caller, old, new in zip(self._callers, _digests(before), _digests(mine), strict=False):
            if None not in (old, new) and old != new:
                name = MANIFEST if "files" in before else ABOUT
                raise errors.DataChangedError(
                    f"{self.caller}(): the code of {caller}, or what it uses, has changed since {root} was "
                    "begun: begin anew with overwrite=True. To keep the rows that are there and go on, "
                    f'remove "code" from {self.place.at(name)}; code with a version= is known by that alone',
                    path=root,
                )


def _digests(about: Mapping[str, Any]) -> list[str | None]:
    """Of the user's code, as far as they can be compared with those of this version."""
    digests: list[str | None] = about.get("code", {}).get(CODE_OF, [])
    return digests


def run(
    tasks: Iterable[T],
    make: Callable[[T, OutputFile, Any], FileInfo],
    folder: OutputFolder,
    executor: Executor,
    *,
    open_state: Callable[[], Any] = object,
    total: int | None = None,
    job: str = "writing",
    notes: Mapping[str, Any] | None = None,
    needs_rows: bool = False,
) -> Manifest:
    """Make the files of tasks that are not whole yet, each with its sidecar, and at the end the manifest.

    Args:
        make: writes the file of a task, and calls ``file.advance(rows)``.
        open_state: called once in each worker.
        notes: further entries of the manifest.
        needs_rows: refuse files that hold none.
    """
    if folder.finished is not None:
        return folder.finished
    already, place = len(folder.files), folder.place
    with Progress(f"{job} {place.root.rpartition('/')[2]}", total, "rows") as progress:
        progress.skip(sum(info.rows for info in folder.files.values()))
        here = isinstance(executor, Threads)  # others tell of rows when their file is whole
        work = partial(make_file, make, place, progress.advance if here else None)
        missing = (task for task in tasks if task.name not in folder.files)
        with closing(executor.map_unordered(work, missing, open_state)) as done:  # type: ignore[type-var]
            for _, info in done:
                folder.note(info)
                if not here:
                    progress.advance(info.rows)
    if not any(info.rows or not needs_rows for info in folder.files.values()):
        folder._clear()
        raise no_rows(folder.caller)
    return folder.finish(notes or {}, already)


def no_rows(caller: str) -> errors.ConfigError:
    return errors.ConfigError(
        f"{caller}(): the pipeline has no rows, and nothing was written: check what filters it"
    )


def make_file(
    make: Callable[[Any, OutputFile, Any], FileInfo], place: Place, show: Callable[[int], None] | None,
    task: Task, state: Any,
) -> FileInfo:  # fmt: skip
    """Write the files of a task, and then its sidecar."""
    name, beside = task.name, dict[str, OutputFile]()

    def open_beside(ending: str) -> OutputFile:
        other = f"{_stem(name)}{ending}"
        beside[other] = files.enter_context(place.file(other))
        return beside[other]

    try:
        with ExitStack() as files:
            file = files.enter_context(place.file(name, show))
            file.beside = open_beside
            info = make(task, file, state)
        info = replace(
            info, file=name, bytes=file.size, crc32=f"{file.check:08x}",
            beside={other: beside[other].size for other in sorted(beside)},
        )  # fmt: skip
        write_json(place, f"{WORK}/{name}{SIDECAR}", asdict(info))
    except errors.TrainpipesError as error:
        if error.path is None:
            error.message = f"{error.message} (while making {task})"
        raise
    except Exception as error:
        error.add_note(errors.hidden(f"while making {task}"))
        raise
    return info


def write_json(place: Place, name: str, content: Any) -> None:
    with place.file(name) as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode())


def _check_there(place: Place, files: Collection[FileInfo]) -> None:
    sizes = place.sizes() if files else {}
    for info in files:
        for name, size in {info.file: info.bytes, **info.beside}.items():
            if name not in sizes:
                raise _changed(place.at(name), os.strerror(errno.ENOENT))
            if sizes[name] != size:
                how = f"it has {sizes[name]:,} bytes, and {size:,} were written"
                raise _changed(place.at(name), how)


def _stem(name: str) -> str:
    return name.partition(".")[0]


def _in_order(info: FileInfo) -> tuple[int, str]:
    return len(info.file), info.file


def _damaged(path: str) -> errors.UnreadableError:
    return errors.UnreadableError(
        f"{path} is damaged, or of another version: remove the folder and write it anew", path=path
    )


def _changed(path: str, how: str) -> errors.DataChangedError:
    return errors.DataChangedError(
        f"{path} is not as it was written: {how}; write it anew with overwrite=True", path=path
    )
