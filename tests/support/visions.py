"""Small processors and models of vision-language families, and conversations for them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

__all__ = ["FAMILIES", "jpeg", "model_of", "processor_of", "talks"]

#: Those with a chat template.
FAMILIES = ("llava", "llava_next", "idefics3", "qwen2_vl", "qwen2_5_vl")


def processor_of(family: str, marked: bool = True) -> Any:
    """A processor of the family, with Pillow's image processor."""
    import vision_models  # which imports much of transformers

    return vision_models.processor_of(family, marked)


def model_of(family: str, attention: str = "eager") -> Any:
    """A random model of the family, in float64 so that sums may be compared."""
    import vision_models

    return vision_models.model_of(family, attention)


def jpeg(number: int, width: int = 40, height: int = 30) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG" if number % 2 else "PNG")
    return out.getvalue()


def talks(
    count: int, pictures: Callable[[int], Sequence[Any]] | None = None
) -> list[dict[str, Any]]:
    """Rows with none, one or two pictures of several sizes."""
    rows = []
    for n in range(count):
        sizes = [(40 + 9 * (n % 7), 30 + 11 * (n % 5)), (64, 20)][: (1, 2, 0, 1)[n % 4]]
        images = [{"bytes": jpeg(n + k, *size), "path": None} for k, size in enumerate(sizes)]
        asked = [{"type": "image", "text": None} for _ in images]
        asked.append({"type": "text", "text": f"What is number {n}?" + " Hm." * (n % 6)})
        said = [{"type": "text", "text": f"It is {n}." + " So it is." * (n % 3)}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        if n % 5 == 0:
            more = [{"type": "text", "text": "Sure?"}]
            messages += [{"role": "user", "content": more}, {"role": "assistant", "content": said}]
        rows.append({"messages": messages, "images": images})
    return rows
