"""Rows that cannot be used: left out, counted, and with ``Quarantine`` listed in a folder."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from threading import Lock
from typing import Annotated, Any, Literal

import numpy as np
from torch.utils.data import get_worker_info

from trainpipes._internal.checks import fraction, require, whole_number, wrong
from trainpipes._internal.data_parallel import data_parallel
from trainpipes._internal.fork_lock import ForkLock
from trainpipes._internal.types import IntArray
from trainpipes.columns.block import Block
from trainpipes.errors import DataError
from trainpipes.errors.secrets import hidden
from trainpipes.errors.text import cut, shown
from trainpipes.filesystems.output_file import writing
from trainpipes.filesystems.places import place_at
from trainpipes.interfaces.options import either
from trainpipes.interfaces.source import Place
from trainpipes.interfaces.tally import Tally

log = logging.getLogger("trainpipes")

#: Rows that ``max_share`` is a share of, at least.
LEAST_ROWS = 1000
#: Characters of an error and of a row in a line, places and kinds of errors that a summary names.
ERROR, VALUE, PLACES, KINDS = 500, 400, 10, 20
#: The arguments that a config may have.
IN_CONFIGS = ("folder", "max_rows", "max_share")
#: Bytes of an object at a URL; up to there it is written anew with each further line.
PART_BYTES = 64 << 10


@dataclass(frozen=True, repr=False)
class Quarantine:
    """Leaves out the rows that cannot be used, as ``on_error="skip"`` does, and lists them in a folder.

    Each process writes a file of its own there, ``quarantine-HOST-PID-RANK-WORKER-RANDOM.jsonl``: a line for
    each row with "epoch", "file", "block", "row", "source" (of a mix), "stage", "error" and "value", the row
    in short. After a resume some rows are read again, so that several lines may name one row.

    Args:
        folder: a path or URL.
        max_rows: the most lines that a process writes. Further rows are left out and counted.
        max_share: a stage that leaves out more than this share of the rows that it was given in a process, of
            1,000 at least, stops the run.
        storage_options: more options of fsspec; never shown or saved.

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

    def __post_init__(self) -> None:
        good = isinstance(self.folder, str | os.PathLike) and os.fspath(self.folder)
        require(good, "Quarantine(folder)", "a path or URL", self.folder)
        object.__setattr__(self, "folder", os.fspath(self.folder))
        whole_number(self.max_rows, 0, "Quarantine(max_rows)", "lines that a process writes")
        fraction(self.max_share, "Quarantine(max_share)")

    def __repr__(self) -> str:
        said = (f"{name}={value!r}" for name, value in self.given().items())
        return f"Quarantine({', '.join(said).removeprefix('folder=')})"

    def given(self) -> dict[str, Any]:
        """The arguments that are not left out, but for ``storage_options``."""
        found = {name: getattr(self, name) for name in IN_CONFIGS}
        return {n: one for n, one in found.items() if one != getattr(Quarantine, n, None)}

    @staticmethod
    def of(value: Any) -> Any:
        """The value of an ``on_error`` in a config, where a mapping says ``quarantine``."""
        if not isinstance(value, Mapping):
            return value
        given = value.get("quarantine")
        options: Any = {"folder": given} if isinstance(given, str) else given
        good = isinstance(options, Mapping) and {"folder"} <= options.keys() <= {*IN_CONFIGS}
        if value.keys() != {"quarantine"} or not good:
            rule = "{quarantine: folder}, or a mapping there with folder, max_rows, max_share"
            got = [*(options if isinstance(options, Mapping) else value)]  # no values: secrets
            raise ValueError(f"on_error must be a word, or {rule}, got one with {shown(got)}")
        return Quarantine(**options)

    def fingerprint(self) -> str:
        return "skip"  # the rows that come are the same


class _WordOrQuarantine:
    """Checks an ``on_error`` option: one of these words, or a ``Quarantine``."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def __call__(self, value: Any, option: str) -> None:
        if not isinstance(value, Quarantine) and not (type(value) is str and value in self._words):
            raise wrong(option, either(self._words), value, "or give a trainpipes.Quarantine")


#: What becomes of rows that cannot be used, of those without a target; None differs between reasons.
OnError = Annotated[
    Literal["raise", "skip", "keep"] | Quarantine, _WordOrQuarantine("raise", "skip", "keep")
]
#: The same of rows that can't be read.
OnBadRow = Annotated[Literal["raise", "skip"] | Quarantine, _WordOrQuarantine("raise", "skip")]


def leaves_out(on_error: Any) -> bool:
    return on_error == "skip" or isinstance(on_error, Quarantine)


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

    def drop(
        self,
        given: Block,
        dropped: IntArray,
        error_of: Callable[[int], Any] | None = None,
        value_of: Callable[[int], Any] | None = None,
    ) -> None:
        """Count rows, of which those are left out where ``dropped`` is not 0. ``error_of`` says why, and
        ``value_of`` what a row holds, by its place in the block.
        """
        lost = np.flatnonzero(dropped)
        found = self.add((len(dropped), len(lost), int(dropped.sum())))
        if not len(lost):
            return
        last = int(lost[-1])
        if self._quarantine is not None:
            why = error_of or (lambda _: self._why)
            value = value_of or (lambda row: given.slice(row, row + 1).rows()[0])
            self._record(self._quarantine, given, lost.tolist(), why, value, found)
        before = found[1] - len(lost)
        if before and len(str(before)) == len(str(found[1])):
            return
        place = self._place(int(given.ids[last]))
        where = "" if place is None else f" at {place}"
        size = f" has {dropped[last]:,}" if self._unit else ""
        log.warning("%s: %s; the last one%s%s", self.stage, self.said(found), size, where)

    def _place(self, row: int) -> Place | None:
        inputs = self.stage._inputs
        return None if inputs is None else inputs.place_of(row)

    def _record(
        self,
        quarantine: Quarantine,
        given: Block,
        lost: Sequence[int],
        error_of: Callable[[int], Any],
        value_of: Callable[[int], Any],
        found: tuple[int, int, int],
    ) -> None:
        listed = _lines_of(quarantine)
        epochs = np.broadcast_to(np.asarray(given.epoch, dtype=np.int64), len(given))
        with listed.lock:
            lines = []
            for n in lost:
                place = self._place(int(given.ids[n])) or Place(row=int(given.ids[n]))
                error = hidden(cut(str(error_of(n)), ERROR))
                if listed.count(str(self.stage), error, place):
                    line = line_of(place, self.stage.name, error, int(epochs[n]), value_of(n))
                    lines.append(line)
            listed.write(lines)
            seen, gone, _ = found
            if gone / max(seen, LEAST_ROWS) > quarantine.max_share:
                raise DataError(listed.summary(str(self.stage), seen, gone), stage=str(self.stage))

    def said(self, numbers: tuple[int, int, int]) -> str:
        seen, lost, tokens = numbers
        if not lost:
            return ""
        many = "" if seen == 1 else "s"
        size = f" ({tokens:,} {self._unit})" if self._unit else ""
        where = f"; listed in {hidden(str(self._quarantine.folder))}" if self._quarantine else ""
        return f"{lost:,} of {seen:,} {self._kind}{many} left out: {self._why}{size}{where}"


def line_of(place: Place, stage: str, error: str, epoch: int | None, value: Any) -> bytes:
    found = {
        "epoch": epoch, "file": None if place.path is None else hidden(place.path),
        "block": place.row_group, "row": place.row, "source": place.source, "stage": stage,
        "error": error,
        "value": hidden(cut(value, VALUE)) if isinstance(value, str) else shown(value, VALUE),
    }  # fmt: skip
    return json.dumps(found).encode() + b"\n"


class _Lines:
    """What this process lists in a folder."""

    def __init__(self, quarantine: Quarantine) -> None:
        self.lock = Lock()
        self._quarantine = quarantine
        self._place = place_at(str(quarantine.folder), "Quarantine", quarantine.storage_options)
        rank, worker = data_parallel()[0], getattr(get_worker_info(), "id", 0)
        who = f"{socket.gethostname()}-{os.getpid()}-{rank}-{worker}-{secrets.token_hex(4)}"
        self._name = f"quarantine-{who}"
        self._written = self._parts = 0
        self._part = b""
        self._errors = Counter[tuple[str, str]]()
        self._first: list[str] = []

    def count(self, stage: str, error: str, place: Place) -> bool:
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

    def write(self, lines: Sequence[bytes]) -> None:
        """Write whole lines, before what follows their rows is given."""
        data, place = b"".join(lines), self._place
        if not data:
            return
        path = place.at(f"{self._name}.jsonl")
        with writing(path, "Quarantine"):
            if place.is_local:
                os.makedirs(place.root, exist_ok=True)
                with open(path, "ab", buffering=0) as file:
                    begin = file.tell()
                    if file.write(data) < len(data):  # a full disk takes a part
                        file.truncate(begin)
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return
            self._part += data
            place.put(f"{self._name}-{self._parts:04}.jsonl", self._part)
            if len(self._part) > PART_BYTES:
                self._part, self._parts = b"", self._parts + 1

    def summary(self, stage: str, seen: int, lost: int) -> str:
        quarantine = self._quarantine
        errors = [f"  {count:,} x {who}: {why}" for (who, why), count in self._errors.most_common()]
        return "\n".join([
            f"{stage}: {lost:,} of {seen:,} rows of this process are left out, more than max_share="
            f"{quarantine.max_share} of them (or of {LEAST_ROWS:,}); of all stages:", *errors,
            "the first ones:", *self._first,
            f"they are listed in {hidden(str(quarantine.folder))}: fix the files, or raise max_share",
        ])  # fmt: skip


_lock, _open = ForkLock(), dict[tuple[int, Quarantine], _Lines]()


def _lines_of(quarantine: Quarantine) -> _Lines:
    with _lock:
        key = os.getpid(), quarantine
        if key not in _open:
            _open[key] = _Lines(quarantine)
        return _open[key]


def list_file(quarantine: Quarantine, path: str, stage: str, error: str) -> None:
    """List a file that cannot be read as a whole."""
    listed, place = _lines_of(quarantine), Place(path)
    with listed.lock:
        if listed.count(stage, error, place):
            listed.write([line_of(place, stage, hidden(cut(error, ERROR)), None, "")])
