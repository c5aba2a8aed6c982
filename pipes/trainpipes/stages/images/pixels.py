"""One image: its bytes to pixels, and pixels to those of another size.

Functions of what they are given: any thread may call them. Pillow lets go of the interpreter's lock while it
decodes and resizes, and does both in whole numbers, so that the pixels are the same on every machine with the
same Pillow and libjpeg.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

#: An image, ``[C, H, W]``.
Pixels = npt.NDArray[Any]
Mode = Literal["RGB", "L", "RGBA"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]

#: What is decoded. Others of Pillow's formats run programs (EPS), or are no pictures.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
#: The EXIF tag of how a camera was held, and how Pillow undoes what it says.
ORIENTATION = 0x0112
UPRIGHT = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270",
    7: "TRANSVERSE", 8: "ROTATE_90",
}  # fmt: skip
#: Pixels of a resized image, at most: a sliver that is scaled by its short side would fill the memory.
MOST_PIXELS = 1 << 28


class NoPicture(ValueError):
    """Bytes of which no picture can be made."""


def by_pillow(content: bytes, mode: Mode, least: int | None = None) -> Pixels:
    """The pixels of an image file, upright, uint8 ``[C, H, W]``; of several frames the first.

    Args:
        content: the bytes of the file.
        mode: "RGB", "L" or "RGBA".
        least: a JPEG may be decoded at a half, a quarter or an eighth of its size, if both sides keep that
            many pixels.

    Raises:
        NoPicture: nothing can be made of them; says why.
    """
    from PIL import Image

    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            if least is not None:
                image.draft(None, (least, least))
            image.load()
            orientation = orientation_of(image)
            found: Any = eight_bits(image)
            if found.mode == "P" and "transparency" in found.info:
                found = found.convert("RGBA")
            if found.mode != mode:
                found = found.convert(mode)
            if orientation in UPRIGHT:
                found = found.transpose(Image.Transpose[UPRIGHT[orientation]])
    except NoPicture:
        raise
    except Exception as error:  # of damaged files, plugins raise what they come across
        said = " ".join(str(error).split()).replace(" <_io.BytesIO object", "").split(" at 0x")[0]
        raise NoPicture(f"{said or type(error).__name__} ({len(content):,} bytes)") from error
    return planes(np.asarray(found))


def orientation_of(image: Any) -> int:
    """How the camera was held, by EXIF; 1 where that cannot be read, as other readers take it."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # of damaged EXIF, anything
        return 1


def eight_bits(image: Any) -> Any:
    """An image of 8 bits a channel. Pillow itself makes white of all that is above 255."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise NoPicture(
            f"it holds numbers of 32 bits (Pillow's mode {image.mode}), which have no fixed range "
            "to scale to 8 bits: decode these in a map()"
        )
    return image


def by_torchvision(content: bytes, mode: Mode) -> Pixels:
    """The same by torchvision, which decodes JPEG, PNG, GIF and WebP."""
    from torchvision.io import ImageReadMode, decode_image

    kind = {"RGB": ImageReadMode.RGB, "L": ImageReadMode.GRAY, "RGBA": ImageReadMode.RGB_ALPHA}
    data = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
    try:
        found = decode_image(data, kind[mode], apply_exif_orientation=True)
    except RuntimeError as error:
        said = str(error).splitlines()[0] if str(error) else "RuntimeError"
        raise NoPicture(f"{said} ({len(content):,} bytes)") from error
    first = found if found.dim() == 3 else found[0]
    return np.ascontiguousarray(first.numpy())


def planes(array: Any) -> Pixels:
    """Pixels ``[H, W]`` or ``[H, W, C]`` as ``[C, H, W]``, in memory of their own."""
    array = array[:, :, None] if array.ndim == 2 else array
    found: Pixels = np.array(array.transpose(2, 0, 1), order="C")
    return found


def resized(
    image: Pixels,
    size: tuple[int, int],
    interpolation: Interpolation,
    box: tuple[int, int, int, int] | None = None,
) -> Pixels:
    """An image, or a part of it, in another size.

    Args:
        image: uint8 ``[C, H, W]``, of 1, 3 or 4 channels.
        size: height and width to give it.
        interpolation: of Pillow's filters; all but "nearest" take every pixel into account that a new one
            stands for.
        box: the part: its left, top, right and bottom edge.

    Raises:
        NoPicture: it would be far too large.
    """
    from PIL import Image

    height, width = size
    if height * width > MOST_PIXELS:
        raise NoPicture(
            f"of {image.shape[1]} x {image.shape[2]} pixels it would become {height:,} x {width:,}: leave it "
            "out with filter(), or give the size as (height, width)"
        )
    if box is None and (height, width) == image.shape[1:]:
        return image
    if box is not None:
        left, top, right, bottom = box
        if (bottom - top, right - left) == size:
            return np.array(image[:, top:bottom, left:right], order="C")
    rows = image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0))
    by = Image.Resampling[interpolation.upper()]
    return planes(np.asarray(Image.fromarray(rows).resize((width, height), by, box)))
