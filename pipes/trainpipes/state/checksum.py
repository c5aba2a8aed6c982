"""Checksums of the texts in a state: a JSON object's last entry says what all before it adds up to.

They find what is damaged, not what is forged.
"""

from __future__ import annotations

import re
from zlib import crc32

_END = re.compile(r',"check":"([0-9a-f]{8,16})"\}\Z')


def checksum(*parts: object) -> str:
    """CRC-32 of some texts and numbers, one after the other, as 8 hexadecimal digits.

    >>> checksum("{}", 1), checksum("{}", 2)
    ('908d03b8', '09845202')
    """
    return f"{crc32(chr(0).join(map(str, parts)).encode('utf-8', 'surrogatepass')):08x}"


def sealed(text: str, check: str) -> str:
    """The text of a JSON object that is not empty, with a checksum as its last entry.

    >>> sealed('{"row":3}', "908d03b8")
    '{"row":3,"check":"908d03b8"}'
    """
    return f'{text[:-1]},"check":"{check}"}}'


def unsealed(text: str) -> tuple[str, str | None]:
    """The text that was sealed, and its checksum; None where there is none.

    >>> unsealed('{"row":3,"check":"908d03b8"}')
    ('{"row":3}', '908d03b8')
    """
    found = _END.search(text, max(0, len(text) - 40))
    return (text, None) if found is None else (text[: found.start()] + "}", found[1])
