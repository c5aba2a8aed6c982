"""A folder with lists of the rows that cannot be used."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from threading import Lock
from typing import Annotated, Any, Literal

from torch.utils.data import get_worker_info

from trainpipes._internal.callers import data_parallel
from trainpipes._internal.checks import fraction, is_path, require, whole_number, wrong
from trainpipes._internal.locks import ForkLock
from trainpipes.errors.text import cut, hidden, shown
from trainpipes.filesystems.places import place_at, writing
from trainpipes.interfaces.options import either
from trainpipes.interfaces.source import Place

log = logging.getLogger("trainpipes")

#: Characters of an error and of a row in a line, places and kinds of errors that a summary names.
ERROR, VALUE, PLACES, KINDS = 500, 400, 10, 20
#: The arguments that a config may have.
IN_CONFIGS = ("folder", "max_rows", "max_share")
#: Bytes of an object at a URL; up to there it is written anew with each further line.
PART_BYTES = 64 << 10
#: The names of its files.
LISTS = re.compile(r"(^|/)quarantine-[^/]*-\d+-\d+-\d+-[0-9a-f]{8}(-\d{4,})?\.jsonl$")


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
        require(is_path(self.folder), "Quarantine(folder)", "a path or URL", self.folder)
        object.__setattr__(self, "folder", os.fsdecode(self.folder))
        whole_number(self.max_rows, 0, "Quarantine(max_rows)", "lines that a process writes")
        fraction(self.max_share, "Quarantine(max_share)")
        good = self.storage_options is None or isinstance(self.storage_options, Mapping)
        got = type(self.storage_options).__name__
        require(good, "Quarantine(storage_options)", "a dict of fsspec options", got)

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


def _one_of(*words: str) -> Callable[[Any, str], None]:
    def check(value: Any, option: str) -> None:
        if not isinstance(value, Quarantine) and not (type(value) is str and value in words):
            raise wrong(option, either(words), value, "or give a trainpipes.Quarantine")

    return check


#: What becomes of rows that cannot be used, of those without a target; None differs between reasons.
OnError = Annotated[Literal["raise", "skip", "keep"] | Quarantine, _one_of("raise", "skip", "keep")]
#: The same of rows that can't be read.
OnBadRow = Annotated[Literal["raise", "skip"] | Quarantine, _one_of("raise", "skip")]


def leaves_out(on_error: Any) -> bool:
    return on_error == "skip" or isinstance(on_error, Quarantine)


class Lines:
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

    def add(
        self,
        stage: Any,
        rows: Iterable[tuple[int, Place, int | None]],
        error_of: Callable[[int], Any],
        value_of: Callable[[int], Any],
    ) -> None:
        """List rows, each with its place and epoch, before what follows them is given."""
        with self.lock:
            lines = []
            for row, place, epoch in rows:
                error = hidden(cut(str(error_of(row)), ERROR))
                if not self._has_room(str(stage), error, place):
                    continue
                path, value = place.path, value_of(row)
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
