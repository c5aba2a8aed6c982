"""What a memory map holds, and the folder that it stands in.

documents.memmap/
    _manifest.json                  the parts, and the CRC-32 of each one's header; appears last
    part-00000.json                 the header of a part: rows, columns, the CRC-32 of each column's bytes
    part-00000.image.npy            uint8 [rows, 3, 224, 224]
    part-00000.tokens.npy           uint16 [values]: the rows of a ragged column, one after the other
    part-00000.tokens.offsets.npy   int64 [rows + 1]: where each starts, and the end of the last
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from glob import escape, glob
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainpipes._internal.checks import refuse_special
from trainpipes.errors import UnreadableError
from trainpipes.filesystems.places import MANIFEST

#: What the names of headers end with.
HEADER = ".json"
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
    """The dtype and shape of one column of a memory map."""

    name: str
    dtype: str  # "" as long as it is not known
    shape: tuple[int, ...]  # of a row; of each element of a ragged one
    ragged: bool
    values: int = 0  # of that shape, in all rows
    crc32: int = 0
    offsets_crc32: int = 0

    @property
    def type(self) -> str:
        shape = ["L"] * self.ragged + [str(n) for n in self.shape]
        return f"{self.dtype}[{', '.join(shape)}]"

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True)
class Header:
    """What a part's file of JSON says of the ``.npy`` files beside it."""

    rows: int
    layout: Layout
    columns: tuple[Column, ...]

    def pack(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"


def file_endings(names: Sequence[str]) -> list[str]:
    """Endings of columns' file names, distinct also where case does not matter."""
    found: list[str] = []
    for name in names:
        stem = re.sub(r"\W", "_", name, flags=re.ASCII)[:80] or "_"
        while stem.lower() in map(str.lower, found):
            stem += "_"
        found.append(stem)
    return [f".{stem}.npy" for stem in found]


def offsets_ending(ending: str) -> str:
    return f"{ending.removesuffix('.npy')}.offsets.npy"


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """A ``.npy`` header, of the same length for any number of rows."""
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}"
    room = len(text) + 21 - len(str(shape[0]))
    size = (10 + room) // 64 * 64 + 64 - 10
    return b"\x93NUMPY\1\0" + size.to_bytes(2, "little") + f"{text:<{size - 1}}\n".encode()


def is_memmap(folder: str) -> bool:
    """Whether a folder holds a memory map, also an unfinished or damaged one."""
    inside = f"{escape(folder)}/part-[0-9]*"
    return bool(glob(f"{inside}{HEADER}") and glob(f"{inside}.*.npy"))


def read_headers(folder: str) -> dict[str, Header]:
    """The headers of all parts by path."""
    found: dict[str, Header] = {}
    manifest = path = os.path.join(folder, MANIFEST)
    try:
        about = json.loads(_content(path))
        if about["options"]["format"] != "memmap":
            raise ValueError(f"it is of files of {about['options']['format']!r:.40}")
        for part in about["files"]:
            if not re.fullmatch(r"part-\d+\.json", part["file"]):
                raise ValueError(f"it names other files, such as {part['file']!r:.80}")
            path = os.path.join(folder, part["file"])
            text = _content(path)
            if f"{zlib.crc32(text):08x}" != part["crc32"]:
                raise ValueError("its checksum differs")
            header = json.loads(text)
            columns = tuple(Column(**{**c, "shape": tuple(c["shape"])}) for c in header["columns"])
            found[path] = Header(header["rows"], header["layout"], columns)
            path = manifest
    except FileNotFoundError as error:
        if path != manifest:
            raise damaged(path, "it is missing") from error
        what = f"it has no {MANIFEST}, which write_memmap() writes last"
        raise damaged(folder, f"{what}") from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise damaged(path, f"it cannot be understood: {error!r:.200}") from error
    return found


def _content(path: str) -> bytes:
    refuse_special(path)
    with open(path, "rb") as file:
        return file.read()


def damaged(path: str, what: str) -> UnreadableError:
    return UnreadableError(
        f"{path} cannot be read as a memory map: {what}. Write it again, or copy its whole folder again",
        path=path,
    )


def no_memmap(path: str) -> UnreadableError:
    with open(path, "rb") as file:
        magic = file.read(8)
    return UnreadableError(
        f"{path} is not a memory map, a folder that write_memmap() writes: it is a file that starts with "
        f"{magic!r}. A file of bare numbers is read with read_memmap(path, dtype=..., length=...)",
        path=path,
    )
