"""Pictures in rows: as bytes, structs of bytes and path, paths, or arrays.

>>> import numpy as np
>>> (picture,) = pictures_of(np.zeros((3, 20, 30), np.uint8))
>>> size_of(picture), decoded(picture).size
((20, 30), (30, 20))
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch

from trainpipes.errors import hidden
from trainpipes.filesystems.systems import open_system
from trainpipes.stages.decode_image import FORMATS, NoPicture, picture_of

__all__ = ["NoPicture", "decoded", "pictures_of", "size_of"]

#: EXIF's tag of how a camera was held, and its values for pictures on their side.
ORIENTATION, ON_SIDE = 0x0112, (5, 6, 7, 8)


class Remote(NamedTuple):
    """A picture at a URL, and the options of its file system."""

    url: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        return self.url


def pictures_of(
    value: Any, folder: str = "", options: Mapping[str, Any] | None = None
) -> list[Any]:
    """The pictures in a column of a row: a list of bytes, paths, or uint8 arrays ``[C, H, W]``.

    Args:
        value: a picture, a list of them, or None. A picture is an image file's bytes, its path, a
            dict with "bytes" or "path", or an array.
        folder: where relative paths start.
        options: of the file system of URLs; where the folder is a URL, too, only of URLs with the same
            scheme, as other ones may not take them.

    Raises:
        NoPicture: something else is there.
    """
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [_picture(picture, folder, options) for picture in value]
    return [_picture(value, folder, options)]


def _picture(value: Any, folder: str, options: Mapping[str, Any] | None) -> Any:
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        path = value if "://" in value else os.path.join(folder, value)
        if "://" not in path:
            return path
        same = _scheme(folder) in ("", _scheme(path))
        return Remote(path, (options or {}) if same else {})
    if isinstance(value, torch.Tensor):
        value = value.numpy(force=True)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3:
        return value
    got = "null" if value is None else f"{value!r:.60} ({type(value).__name__})"
    rule = "bytes, a path, a dict with one of these, or an array uint8 [C, H, W]"
    raise NoPicture(f"a picture is {rule}, got {got}")


def _scheme(path: str) -> str:
    return path.partition("://")[0] if "://" in path else ""


def size_of(picture: Any) -> tuple[int, int]:
    """Height and width in pixels, read from the first bytes and turned as EXIF says.

    Raises:
        NoPicture: these are no picture's, or there is no such file.
    """
    from PIL import Image

    if isinstance(picture, np.ndarray):
        return picture.shape[1], picture.shape[2]
    with _file(picture) as file:
        try:
            with Image.open(file, formats=FORMATS) as image:
                # Of a PNG without it Pillow would look behind the pixels.
                known = image.format != "PNG" or "exif" in image.info
                turned = known and image.getexif().get(ORIENTATION) in ON_SIDE
                width, height = image.size
        except Exception as error:  # of damaged files, plugins raise what they come across
            raise NoPicture(f"{type(error).__name__}: no picture that can be read") from error
    return (width, height) if turned else (height, width)


def decoded(picture: Any) -> Any:
    """An upright RGB image of Pillow's.

    Raises:
        NoPicture: it cannot be decoded, or there is no such file.
    """
    from PIL import Image

    if isinstance(picture, np.ndarray):
        rows = picture.transpose(1, 2, 0)
        return Image.fromarray(np.ascontiguousarray(rows if len(picture) > 1 else rows[:, :, 0]))
    with _file(picture) as file:
        return picture_of(file.read(), "RGB")


@contextmanager
def _file(picture: Any) -> Iterator[Any]:
    if isinstance(picture, bytes):
        yield BytesIO(picture)
        return
    url, options = picture if isinstance(picture, Remote) else (picture, {})
    system, path = open_system(url, options)
    try:
        file = system.open(path, "rb")
    except Exception as error:  # each file system has errors of its own
        raise NoPicture(f"{hidden(url)} cannot be read ({type(error).__name__})") from error
    with file:
        yield file
