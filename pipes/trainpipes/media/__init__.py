"""Files of sound and video as arrays, by libsndfile and FFmpeg: no stages, no rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, BinaryIO


class Undecodable(ValueError):
    """A value that cannot be decoded; says why."""


def bytes_of(value: Any) -> Any:
    """The bytes of a file, also in a struct as Hugging Face's datasets have them."""
    if isinstance(value, Mapping) and "bytes" in value:
        value = value["bytes"]
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


def check(file: BinaryIO) -> None:
    """Raise the error of reading a file on a server, which decoders take for its end."""
    raises: Callable[[], None] | None = getattr(file, "check", None)
    if raises is not None:
        raises()
