"""The manifest of a memory map, and the folder that it stands in.

    documents.memmap/
        manifest.json        rows, columns, and the CRC-32 of each column's bytes
        image.npy            uint8 [rows, 3, 224, 224]
        tokens.npy           uint16 [values]: the rows of a ragged column, one after the other
        tokens.offsets.npy   int64 [rows + 1]: where each of them starts in the values, and their end

``np.load(file, mmap_mode="r")`` opens each array. Only what the manifest names counts: a memory map that
is written anew gets files of new names, and its manifest is replaced last.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy.typing as npt

from trainpipes._internal.checks import refuse_special
from trainpipes.errors import UnreadableError

MANIFEST = "manifest.json"
FORMAT, VERSION = "trainpipes.storage.memmap", 1
#: What columns can hold, in this machine's byte order.
DTYPES = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
    "float32", "float64",
)  # fmt: skip

Array = npt.NDArray[Any]
#: What a row is: columns by name, or by place.
Layout = Literal["dict", "tuple"]


@dataclass(frozen=True)
class Column:
    """One column.

    Args:
        name: its name; its place as text where rows are no dicts.
        dtype: NumPy's name of the values' dtype.
        shape: of a row; of each element of a row where the column is ragged.
        ragged: whether each row has a length of its own.
        values: numbers of ``shape`` in all: rows, or the rows' lengths added up.
        crc32, offsets_crc32: of the bytes of its values, and of its offsets if it is ragged.
        file: name of the file of its values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ragged: bool
    values: int = 0
    crc32: int = 0
    offsets_crc32: int = 0
    file: str = ""

    @property
    def offsets_file(self) -> str:
        """Name of the file of its offsets, if it is ragged."""
        return f"{self.file.removesuffix('.npy')}.offsets.npy"

    def __str__(self) -> str:
        shape = ["L"] * self.ragged + [str(n) for n in self.shape]
        return f"{self.name}: {self.dtype}[{', '.join(shape)}]"


@dataclass(frozen=True)
class Manifest:
    """What a memory map holds: N rows, what a row is, and the columns in order."""

    rows: int
    layout: Layout
    columns: tuple[Column, ...]

    @property
    def files(self) -> list[str]:
        """Names of the files beside the manifest."""
        return [name for c in self.columns for name in (c.file, c.offsets_file)[: 1 + c.ragged]]


def pack(manifest: Manifest) -> bytes:
    """The text of ``manifest.json``."""
    content = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    return json.dumps({**content, "crc32": _crc32(content)}, indent=1).encode() + b"\n"


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def read_manifest(folder: str) -> Manifest:
    """The manifest of a memory map.

    Raises:
        UnreadableError: the folder has none, or one that is damaged, of another version, or that names
            what is not in the folder.
    """
    path = os.path.join(folder, MANIFEST)
    refuse_special(path)
    try:
        with open(path, "rb") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        refuse_file(folder)
        raise damaged(folder, f"it has no {MANIFEST}, which write_memmap() writes last") from error
    try:
        found = json.loads(text)
        if (made := (found["format"], found["version"])) != (FORMAT, VERSION):
            raise ValueError(
                f"of {made[0]!r:.40} {made[1]!r:.40}; this release reads version {VERSION}"
            )
        if found.pop("crc32") != _crc32(found):
            raise ValueError("its checksum differs")
        columns = tuple(Column(**{**c, "shape": tuple(c["shape"])}) for c in found["columns"])
        return _checked(Manifest(found["rows"], found["layout"], columns))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise damaged(path, f"no manifest: {error!r:.200}") from error


def _checked(manifest: Manifest) -> Manifest:
    counts, rows = [manifest.rows], manifest.rows
    for column in manifest.columns:
        counts += [*column.shape, column.values, column.crc32, column.offsets_crc32]
        if (type(column.name), type(column.ragged), column.dtype in DTYPES) != (str, bool, True):
            raise ValueError(f"there is no column {column!r:.100}")
        if column.values != rows and not column.ragged:
            raise ValueError(f"column {column.name!r} has {column.values} values for {rows} rows")
    if any(type(count) is not int or count < 0 for count in counts):
        raise ValueError("a count is no integer of 0 or more")
    for name in manifest.files:
        if name in ("", ".", "..") or {*"/\\\0"} & {*name}:
            raise ValueError(f"it names {name!r:.100}, which is no file of its folder")
    names = [column.name for column in manifest.columns]
    if not names or any(len({*found}) < len(found) for found in (names, manifest.files)):
        raise ValueError("there are no columns, or two of one name or file")
    if manifest.layout not in ("dict", "tuple"):
        raise ValueError(f"rows are {manifest.layout!r:.40}")
    return manifest


def damaged(path: str, what: str) -> UnreadableError:
    """An error that says what of a memory map is not as it was written."""
    return UnreadableError(
        f"{path} cannot be read as a memory map: {what}. Write it again, or copy its whole folder again",
        path=path,
    )


def refuse_file(path: str) -> None:
    """Raise if a path is a file: a memory map is a folder."""
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        magic = file.read(8)
    raise UnreadableError(
        f"{path} is not a memory map, a folder that write_memmap() writes: it is a file that starts with "
        f"{magic!r}. A file of bare numbers is read with read_memmap(path, dtype=..., length=...)",
        path=path,
    )
