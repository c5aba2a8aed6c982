"""Which values are images, their sizes, and small pictures of them for a notebook."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trainpipes.look.preview.grids import Array, head

__all__ = ["image_facts", "pictures"]

#: Pixels of the longer side of a small picture, and the most bytes of a file that are decoded for one.
SIDE, MOST_BYTES = 96, 32 << 20
#: Names of columns of images, where a tensor alone does not say so.
NAMES = {"image", "images", "img", "pixel_values", "pixels", "jpg", "png"}
KINDS = {
    b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n": "PNG", b"GIF8": "GIF", b"BM": "BMP", b"II*\x00": "TIFF",
}  # fmt: skip


def image_facts(value: Any) -> str | None:
    """What an image is, in words; None for what is no image by itself: a tensor may be one."""
    if _is_pillow(value):
        return f"image {value.width} x {value.height} {value.mode}"
    encoded = _encoded(value)
    if encoded is None:
        return None
    kind, data = encoded
    opened = _opened(data)
    size = "" if opened is None else f" {opened.width} x {opened.height} {opened.mode}"
    return f"{kind} image{size}, {len(data):,} bytes"


def pictures(name: str, value: Any, most: int = 4) -> list[str]:
    """Small pictures of an image, or of the first ones of a batch, as PNG in base64; none where it is no
    image, or Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        return []
    found: list[Any] = []
    if _is_pillow(value):
        found = [value]
    elif (encoded := _encoded(value)) is not None:
        opened = _opened(encoded[1]) if len(encoded[1]) <= MOST_BYTES else None
        found = [] if opened is None else [opened]
    elif name.rpartition(".")[2].lower() in NAMES and isinstance(value, torch.Tensor | np.ndarray):
        arrays = value[:most] if value.ndim == 4 else [value]
        pixels = [_pixels(one) for one in arrays]
        found = [Image.fromarray(one) for one in pixels if one is not None]
    return [text for text in map(_png, found) if text is not None]


def _is_pillow(value: Any) -> bool:
    classes = {f"{c.__module__}.{c.__name__}" for c in type(value).__mro__}
    return "PIL.Image.Image" in classes


def _encoded(value: Any) -> tuple[str, bytes] | None:
    """An image file in memory: bytes, or the dict that Hugging Face's datasets have."""
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        value = value["bytes"]
    if not isinstance(value, bytes):
        return None
    if value[:4] == b"RIFF" and value[8:12] == b"WEBP":
        return "WebP", value
    kind = next((kind for start, kind in KINDS.items() if value.startswith(start)), None)
    return None if kind is None else (kind, value)


def _opened(data: bytes) -> Any:
    """An image of which the header is read; None where Pillow is not there, or does not know it."""
    try:
        from PIL import Image
    except ImportError:
        return None
    try:
        return Image.open(io.BytesIO(data))
    except Exception:  # of damaged files: many kinds, and a preview is to show what else there is
        return None


def _pixels(value: Any) -> Array | None:
    """Pixels ``[H, W]`` or ``[H, W, 3]``, uint8, about as large as a small picture; None where it has another
    shape. Numbers that are not uint8 are spread from 0 to 255."""
    if value.ndim == 2:
        value = value[None]
    if value.ndim != 3 or 0 in value.shape:
        return None
    first = value.shape[0] in (1, 3, 4)
    if not first and value.shape[2] not in (1, 3, 4):
        return None
    step = max(1, max(value.shape[1:] if first else value.shape[:2]) // SIDE)
    small = value[:, ::step, ::step] if first else value[::step, ::step]
    numbers = head(small)
    if numbers is None:
        return None
    numbers = numbers.transpose(1, 2, 0) if first else numbers
    if numbers.dtype != np.uint8:
        wide = np.nan_to_num(numbers.astype(np.float64))
        low, high = wide.min(), wide.max()
        numbers = ((wide - low) * (255 / ((high - low) or 1))).astype(np.uint8)
    numbers = numbers[:, :, :3]
    return np.ascontiguousarray(numbers[:, :, 0] if numbers.shape[2] < 3 else numbers)


def _png(image: Any) -> str | None:
    try:
        image.draft("RGB", (SIDE, SIDE))  # of a JPEG, decodes no more than that
        small = image.copy() if max(image.size) <= SIDE else image.convert("RGB")
        small.thumbnail((SIDE, SIDE))
        if small.mode not in ("L", "RGB", "RGBA"):
            small = small.convert("RGB")
        written = io.BytesIO()
        small.save(written, "PNG")
    except Exception:  # as above
        return None
    return base64.b64encode(written.getvalue()).decode()
