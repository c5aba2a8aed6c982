"""Token ids back to text, for people to read: what every kind of tokenizer shares of it.

Nothing here is meant to be encoded again: special tokens stand there by their names, ids that no token has by
their numbers, bytes that are no UTF-8 as ``\\xf0``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby


def text_of_bytes(parts: Iterable[bytes | str]) -> str:
    """The text of tokens, one after the other: bytes of any length, or a text where a token has a name only.

    >>> text_of_bytes([b"h", b"\\xc3", b"\\xa9", "<eos>", b"\\xc3"])
    'hé<eos>\\\\xc3'
    """
    found = []
    for is_bytes, run in groupby(parts, lambda part: isinstance(part, bytes)):
        if is_bytes:
            found.append(b"".join(run).decode("utf-8", "backslashreplace"))  # type: ignore[arg-type]
        else:
            found.extend(run)  # type: ignore[arg-type]
    return "".join(found)


def with_unknown(
    ids: Sequence[int], is_known: Callable[[int], bool], decode: Callable[[list[int]], str]
) -> str:
    """The text of token ids, those that are none as ``<5>``.

    >>> with_unknown([1, 2, 99, 1], lambda i: i < 9, lambda ids: "".join(map(str, ids)))
    '12<99>1'
    """
    found = []
    for known, run in groupby(ids, is_known):
        some = list(run)
        found.append(decode(some) if known else "".join(f"<{i}>" for i in some))
    return "".join(found)
