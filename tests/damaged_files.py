"""Files of the cache, damaged at random: what a bad disk, a stranger or a killed process may leave."""

from __future__ import annotations

import random
import zlib

from trainpipes.caching.checked_file import BLANK, MARK


def damaged(content: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """Bytes of a file after something has happened to them.

    Args:
        content: the file's.
        others: those of other files, which may come in its place.
        draw: what is drawn with.
    """
    how = draw.choice(
        ("flip", "flip", "bits", "cut", "cut", "head", "longer", "zeros", "other", "mixed")
    )
    place = draw.randrange(len(content) + 1)
    changed = bytearray(content)
    if how == "flip":
        for _ in range(draw.choice((1, 1, 2, 8))):
            changed[draw.randrange(len(content))] ^= draw.randrange(1, 256)
    elif how == "bits":
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif how == "cut":
        changed = changed[:place]
    elif how == "head":
        changed = changed[place:]
    elif how == "longer":
        changed[place:place] = draw.randbytes(draw.randrange(1, 100))
    elif how == "zeros":
        length = draw.randrange(1, 600)
        changed[place : place + length] = bytes(length)
    elif how == "other":
        return draw.choice([b"", b"\0" * 40, b"ARROW1\0\0", b"PAR1" * 20, *others])
    else:
        other = draw.choice([content, *others])
        changed = changed[:place] + other[draw.randrange(len(other) + 1) :]
    return bytes(changed)


def forged(content: bytes, draw: random.Random) -> bytes:
    """The same with a checksum that is right, so that nothing but a look inside tells. What follows it in the
    file's ends is left alone."""
    changed = bytearray(content)
    places = []
    place = content.find(MARK)
    while place >= 0:
        places.append(place + len(MARK))
        place = content.find(MARK, place + 1)
    for _ in range(draw.choice((1, 1, 2, 8, 30))):
        place = draw.randrange(len(content))
        if not any(start - len(MARK) <= place < start + len(BLANK) for start in places):
            if draw.random() < 0.5:
                changed[place] ^= 1 << draw.randrange(8)
            else:
                changed[place] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
    for start in places:
        changed[start : start + len(BLANK)] = BLANK
    digits = b"%08x" % zlib.crc32(changed)
    for start in places:
        changed[start : start + len(BLANK)] = digits
    return bytes(changed)
