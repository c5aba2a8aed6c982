"""Rows that are left out: counted, logged, and with ``Quarantine`` listed in a folder."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from threading import Lock
from typing import Annotated, Any, Literal

import numpy as np
from torch.utils.data import get_worker_info

from trainpipes._internal import checks
from trainpipes._internal.callers import data_parallel
from trainpipes._internal.checks import IntArray
from trainpipes._internal.locks import ForkLock
from trainpipes.columns.block import Block, Pieces
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError, DataError, UnreachableError, cut, hidden, shown
from trainpipes.filesystems.places import place_at, writing
from trainpipes.filesystems.retry import NORMAL, Retry, cure_of
from trainpipes.interfaces.options import ADDRESS, either
from trainpipes.interfaces.source import Place
from trainpipes.interfaces.stage import Numbers, Stage, Tally, is_aside, made_once

log = logging.getLogger("trainpipes")

#: Characters of an error and of a row in a line, places and kinds of errors that a summary names.
ERROR, VALUE, PLACES, KINDS = 500, 400, 10, 20
#: The arguments that a config may have.
IN_CONFIGS = ("folder", "max_rows", "max_share", "retry")
#: Bytes of an object at a URL; up to there it is written anew with each further line.
PART_BYTES = 64 << 10
#: The names of its files.
LISTS = re.compile(r"(^|/)quarantine-[^/]*-\d+-\d+-\d+-[0-9a-f]{8}(-\d{4,})?\.jsonl$")


@dataclass(frozen=True, repr=False)
class Quarantine:
    """Leaves out the rows that cannot be used, as ``on_error="skip"`` does, and lists them in a folder.

    Each process writes a file of its own there, ``quarantine-HOST-PID-RANK-WORKER-RANDOM.jsonl``: a line for
    each row with "epoch", "file", "block", "row", "source" (of a mix), "stage", "error" and "value", the row
    in short. In a mix "epoch" is that of the source: those of the mix's epoch n begin at n * 2**20. After a
    resume some rows are read again, and ranks that share a shard read its rows each, so that several lines
    may name the same row.

    Args:
        folder: a path or URL.
        max_rows: the most lines that a process writes. Further rows are left out and counted.
        max_share: a stage that leaves out more than this share of the rows that it was given in a process, of
            1,000 at least, stops the run.
        storage_options: more options of fsspec; never shown or saved.
        retry: how long failing requests to a URL are made again.

    >>> import json, pathlib, tempfile, trainpipes as tp
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "rows.jsonl").write_text('{"id": 1}\\n{"id": 2\\n{"id": 3}\\n')
    >>> rows = tp.read_json(folder / "rows.jsonl", on_error=tp.Quarantine(folder / "bad"))
    >>> [row["id"] for row in rows]
    [1, 3]
    >>> (file,) = (folder / "bad").iterdir()
    >>> line = json.loads(file.read_text())
    >>> line["row"], line["stage"], line["value"]
    (1, 'read_json', '{"id": 2')
    """

    folder: str | os.PathLike[str]
    _: KW_ONLY
    max_rows: int = 100_000
    max_share: float = 0.1
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    retry: Retry | Mapping[str, Any] = NORMAL

    def __post_init__(self) -> None:
        checks.require(
            checks.is_path(self.folder), "Quarantine(folder)", "a path or URL", self.folder
        )
        object.__setattr__(self, "folder", os.fsdecode(self.folder))
        meaning = "lines that a process writes"
        rows = checks.whole_number(self.max_rows, 0, "Quarantine(max_rows)", meaning)
        object.__setattr__(self, "max_rows", rows)
        checks.fraction(self.max_share, "Quarantine(max_share)")
        object.__setattr__(self, "max_share", checks.copied(self.max_share))
        good = self.storage_options is None or isinstance(self.storage_options, Mapping)
        got = type(self.storage_options).__name__
        checks.require(good, "Quarantine(storage_options)", "a dict of fsspec options", got)
        object.__setattr__(self, "retry", Retry.of(self.retry, "Quarantine(retry)"))

    def __repr__(self) -> str:
        said = (f"{name}={value!r}" for name, value in self.given().items())
        return hidden(f"Quarantine({', '.join(said).removeprefix('folder=')})")

    def given(self) -> dict[str, Any]:
        """The arguments that are not left out, but for ``storage_options``."""
        options = {name: getattr(self, name) for name in IN_CONFIGS}
        return {n: value for n, value in options.items() if value != getattr(Quarantine, n, None)}

    @staticmethod
    def of(value: Any) -> Any:
        """The value of an ``on_error`` in a config, where a mapping says ``quarantine``."""
        if not isinstance(value, Mapping):
            return value
        folder = value.get("quarantine")
        options: Any = {"folder": folder} if isinstance(folder, str) else folder
        good = isinstance(options, Mapping) and {"folder"} <= options.keys() <= {*IN_CONFIGS}
        if value.keys() != {"quarantine"} or not good:
            rule = (
                "{quarantine: folder}, or a mapping there with folder, max_rows, max_share, retry"
            )
            got = [*(options if isinstance(options, Mapping) else value)]  # no values: secrets
            raise ValueError(f"on_error must be a word, or {rule}, got one with {shown(got)}")
        return Quarantine(**options)

    def fingerprint(self) -> str:
        return "skip"  # the rows that come are the same


def _one_of(*words: str) -> Callable[[Any, str], None]:
    def check(value: Any, option: str) -> None:
        if not isinstance(value, Quarantine) and not (type(value) is str and value in words):
            raise checks.wrong(option, either(words), value, "or give a trainpipes.Quarantine")

    return check


#: What becomes of rows that cannot be used, of those without a target; None differs between reasons.
OnError = Annotated[Literal["raise", "skip", "keep"] | Quarantine, _one_of("raise", "skip", "keep")]
#: The same of rows that can't be read.
OnBadRow = Annotated[Literal["raise", "skip"] | Quarantine, _one_of("raise", "skip")]


def leaves_out(on_error: Any) -> bool:
    return on_error == "skip" or isinstance(on_error, Quarantine)


class Lines:
    """The lists of this process in a folder."""

    def __init__(self, quarantine: Quarantine) -> None:
        self.lock = Lock()
        self._quarantine = quarantine
        folder, options = str(quarantine.folder), quarantine.storage_options
        cure = cure_of("Quarantine")
        self._place = place_at(folder, "Quarantine", options, quarantine.retry, cure)
        rank, worker = data_parallel()[0], getattr(get_worker_info(), "id", 0)
        who = f"{socket.gethostname()}-{os.getpid()}-{rank}-{worker}-{secrets.token_hex(4)}"
        self._name = f"quarantine-{who}"
        self._written = self._parts = 0
        self._part = b""
        self._errors = Counter[tuple[str, str]]()
        self._first: list[str] = []

    def add(
        self,
        stage: Any,
        rows: Iterable[tuple[int, Place, int | None]],
        error_of: Callable[[int], Any],
        value_of: Callable[[int], Any],
    ) -> None:
        """List rows, each with its place and epoch, before later rows are given."""
        with self.lock:
            lines = []
            for row, place, epoch in rows:
                error = hidden(cut(str(error_of(row)), ERROR))
                if not self._has_room(str(stage), error, place):
                    continue
                path = place.path
                try:
                    value = value_of(row)
                except Exception as unseen:  # another column has a value that Python has none for
                    value = f"a row that cannot be shown: {unseen}"
                fields = {
                    "epoch": epoch, "file": None if path is None else hidden(path),
                    "block": place.row_group, "row": place.row, "source": place.source,
                    "stage": stage.name, "error": error,
                    "value": hidden(cut(value, VALUE)) if type(value) is str else shown(value, VALUE),
                }  # fmt: skip
                lines.append(json.dumps(fields).encode() + b"\n")
            if lines:
                self._write(b"".join(lines))

    def _has_room(self, stage: str, error: str, place: Place) -> bool:
        """Count a row; whether there is room for its line."""
        kind = stage, cut(re.sub(r"\d[\d,]*", "N", error.split("\n")[0]), 80)
        if kind not in self._errors and len(self._errors) >= KINDS:
            kind = stage, "other errors"
        self._errors[kind] += 1
        if len(self._first) < PLACES:
            self._first.append(f"  {place}: {stage}: {cut(error, 160)}")
        self._written += 1
        if self._written == self._quarantine.max_rows + 1:
            said = "%s: this process has listed max_rows = %s rows; further ones are only counted"
            log.warning(said, self._quarantine, f"{self._quarantine.max_rows:,}")
        return self._written <= self._quarantine.max_rows

    def _write(self, data: bytes) -> None:
        place = self._place
        path = place.at(f"{self._name}.jsonl")
        with writing(path, "Quarantine"):
            if not place.is_local:
                self._part += data
                place.put(f"{self._name}-{self._parts:04}.jsonl", self._part)
                if len(self._part) > PART_BYTES:
                    self._part, self._parts = b"", self._parts + 1
                return
            os.makedirs(place.root, exist_ok=True)
            with open(path, "ab", buffering=0) as file:
                begin = file.tell()
                if file.write(data) < len(data):  # a full disk takes a part
                    file.truncate(begin)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def summary(self) -> str:
        with self.lock:
            most = self._errors.most_common()
            errors = [f"  {count:,} x {who}: {why}" for (who, why), count in most]
            folder = hidden(str(self._quarantine.folder))
            way = f"they are listed in {folder}: fix the files, or raise max_share"
            whose = "of all stages of this process, of earlier pipelines too:"
            return "\n".join([whose, *errors, "the first ones:", *self._first, way])


_lock, _open = ForkLock(), dict[tuple[int, Quarantine], Lines]()


def lines_of(quarantine: Quarantine) -> Lines:
    with _lock:
        key = os.getpid(), quarantine
        if key not in _open:
            _open[key] = Lines(quarantine)
        return _open[key]


def list_file(quarantine: Quarantine, place: Place, reader: Any, error: str) -> None:
    """List a file that cannot be read as a whole."""
    lines_of(quarantine).add(reader, [(0, place, None)], lambda _: error, lambda _: "")


#: Characters of an error that is shown.
SHOWN = 300
#: Rows that ``max_share`` is a share of, at least.
LEAST_ROWS = 1000
#: With ``on_error="skip"``, the share that may be left out, of so many rows at the start.
SKIPPED_SHARE, FIRST_ROWS = 0.5, 10_000


class LeftOut(Tally):
    """Rows left out; logs the first, the 10th, the 100th, ..."""

    def __init__(
        self,
        stage: Any,
        why: str,
        kind: str = "document",
        unit: str = "tokens",
        on_error: Any = None,
    ) -> None:
        super().__init__(stage)
        self._why, self._kind, self._unit = why, kind, unit
        self._quarantine = on_error if isinstance(on_error, Quarantine) else None
        self._max_share = SKIPPED_SHARE if on_error == "skip" else 1.0
        if self._quarantine is not None:
            self._max_share = self._quarantine.max_share

    def drop(
        self,
        block: Block,
        dropped: IntArray,
        error_of: Callable[[int], Any] | None = None,
        value_of: Callable[[int], Any] | None = None,
    ) -> None:
        """Count rows, of which those are left out where ``dropped`` is not 0. ``error_of`` says why, and
        ``value_of`` the values of a row, by its place in the block.
        """
        lost = np.flatnonzero(dropped)
        totals = self.add((len(dropped), len(lost), int(dropped.sum())))
        if not len(lost) or is_aside():
            return
        if self._quarantine is not None:
            why = error_of or (lambda _: self._why)
            value = value_of or (lambda row: block.slice(row, row + 1).rows()[0])
            lines_of(self._quarantine).add(self.stage, self._places(block, lost), why, value)
        if self._quarantine is not None or totals[0] - len(dropped) < FIRST_ROWS:
            first = int(lost[0])
            said = error_of(first) if error_of else self._why
            self._stop_at_share(totals, f"{self._place(int(block.ids[first]))}: {said}")
        before = totals[1] - len(lost)
        if before and len(str(before)) == len(str(totals[1])):
            return
        last = int(lost[-1])
        where = "" if self.stage._inputs is None else f" at {self._place(int(block.ids[last]))}"
        size = f" has {dropped[last]:,}" if self._unit else ""
        stage = str(self.stage)  # log records, which are kept, hold no workers of it
        log.warning("%s: %s; the last one%s%s", stage, self._said(totals), size, where)

    def _place(self, row: int) -> Place:
        inputs = self.stage._inputs
        return Place(row=row) if inputs is None else inputs.place_of(row)

    def _places(self, block: Block, lost: IntArray) -> Iterator[tuple[int, Place, int]]:
        """The row, place and epoch of each row, and of all rows that a packed row is made of."""
        pieces = block.made_of or Pieces.whole(block.ids, block.epoch)
        for row in lost.tolist():
            of_row = slice(*pieces.bounds[row : row + 2].tolist())
            for number, epoch in zip(pieces.ids[of_row], pieces.epochs[of_row], strict=True):
                yield row, self._place(int(number)), int(epoch)

    def _stop_at_share(self, totals: Numbers, last: str) -> None:
        seen, lost, _ = totals
        if lost / max(seen, LEAST_ROWS) > self._max_share:
            raise self._too_many(seen, lost, last)

    def check_pass(self, numbers: Numbers) -> None:
        seen, lost, _ = numbers
        if seen and lost == seen and self._max_share < 1:
            raise self._too_many(seen, lost, "")

    def _too_many(self, seen: int, lost: int, last: str) -> DataError:
        said = f"{self.stage}: {lost:,} of {seen:,} rows of this process are left out"
        if self._quarantine is not None:
            share = f"max_share={self._max_share} of them (or of {LEAST_ROWS:,})"
            text = f"{said}, more than {share}; {lines_of(self._quarantine).summary()}"
        else:
            text = f"{said}: {self._why}"
            text += f", such as {hidden(cut(last, SHOWN))}" if last else ""
            text += (
                '; on_error="skip" leaves out half of them at most: fix the data, or list rows and leave '
                "out any number, by on_error=tp.Quarantine(folder, max_share=1)"
            )
        return DataError(text, stage=str(self.stage))

    def _said(self, numbers: Numbers) -> str:
        seen, lost, tokens = numbers
        if not lost:
            return ""
        many = "" if seen == 1 else "s"
        size = f" ({tokens:,} {self._unit})" if self._unit else ""
        listing = None if is_aside() else self._quarantine
        where = f"; listed in {hidden(str(listing.folder))}" if listing else ""
        return f"{lost:,} of {seen:,} {self._kind}{many} left out: {self._why}{size}{where}"


#: Errors of a function that are not about a row's values: each row would fail, or another row next
#: time.
NOT_OF_ROWS = (
    ConfigError,
    ImportError,
    MemoryError,
    ConnectionError,
    TimeoutError,
    UnreachableError,
)


@dataclass(frozen=True)
class Failed:
    """In place of a function's result for a row: why it raised."""

    why: str


@dataclass(frozen=True)
class Guarded:
    """A function of the user's, which gives ``Failed`` where it raises for a row's values."""

    fn: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        try:
            return self.fn(*args)
        except NOT_OF_ROWS:
            raise
        except Exception as error:
            return Failed(ADDRESS.sub("", f"{type(error).__name__}: {error}"))


class LeavesOut(Stage):
    """A stage that may leave out rows by its ``on_error``."""

    def _traits(self) -> dict[str, Any]:
        keeps = not self.leaves_out and self._fixed.keeps_rows
        return {**super()._traits(), "keeps_rows": keeps}

    @property
    def leaves_out(self) -> bool:
        return leaves_out(self.options["on_error"])

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if not self.leaves_out:  # nothing else shapes the rows
            identity.pop("on_error", None)
        return identity

    def refuse_batches(self, run: Run) -> None:
        if self.leaves_out and (run.bounds is not None or run.items is not None):
            raise ConfigError(f"{self} leaves out rows by its on_error: put it before batch()")


class CallsFunction(LeavesOut, asks_inputs=True):
    """A stage on rows whose ``on_error`` decides about those for which the user's function raises."""

    @made_once
    def _left_out(self) -> LeftOut:
        why, on_error = "the function raised", self.options["on_error"]
        return LeftOut(self, why, "row", unit="", on_error=on_error)

    def _tallies(self) -> Sequence[Tally]:
        return (self._left_out,)

    def guarded(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which gives ``Failed`` for rows that are left out."""
        return Guarded(fn) if self.leaves_out else fn

    def without_failed(self, run: Run, results: Sequence[Any]) -> IntArray:
        """Places of the rows of which a guarded function made something; others are counted and listed."""
        failed = np.array([isinstance(result, Failed) for result in results], dtype=np.int64)
        self._left_out.drop(run.block, failed, lambda row: results[row].why)
        return np.flatnonzero(failed == 0).astype(np.int64)
