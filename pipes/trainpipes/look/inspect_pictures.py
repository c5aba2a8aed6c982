"""Images of a sample that cannot be decoded."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.pool import default_threads
from trainpipes.stages.decode_image import NoPicture, by_pillow

#: How files of images begin: JPEG, PNG, GIF, and WebP or AVIF behind other bytes.
BEGINS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"\0\0\0")
#: Rows whose first bytes say whether a column holds images.
LOOKED_AT = 64


def bad_pictures(table: pa.Table, of_images: bool) -> Iterator[tuple[int, str]]:
    """The rows with an image that cannot be decoded, and why; of files that are images or columns of such.
    Nothing where Pillow is not installed.
    """
    if find_spec("PIL") is None:
        return
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
            column = pc.struct_field(column, "bytes")
        if column.type not in (pa.binary(), pa.large_binary()) or not len(column):
            continue
        if of_images or _are_images(column):
            with ThreadPoolExecutor(default_threads() or 1, "trainpipes-images") as pool:
                for row, why in enumerate(pool.map(_problem, column)):
                    if why:
                        yield row, why if of_images else f"column {name!r}: {why}"


def _are_images(column: pa.ChunkedArray) -> bool:
    some: list[bytes] = pc.binary_slice(column.slice(0, LOOKED_AT).drop_null(), 0, 4).to_pylist()
    return 2 * sum(one.startswith(BEGINS) for one in some) > len(some)


def _problem(content: Any) -> str:
    if not content.is_valid:
        return ""
    try:
        by_pillow(content.as_py(), "RGB", 1)
    except NoPicture as error:
        return str(error)
    return ""
