"""What the names of tokens tell: which one masks, and where words begin."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

#: Names of mask tokens in published tokenizers.
MASKS = ("[MASK]", "<mask>", "<|mask|>")
#: Of byte-level BPE: a space, a line's end, a tab, as it writes them.
SPACES = ("Ġ", "Ċ", "ĉ")


def begins_word(pieces: Mapping[str, int]) -> npt.NDArray[np.bool_] | None:
    """Of each token, whether a word begins with it: bool ``[tokens]``. None where names do not tell.

    Args:
        pieces: id of each token.

    >>> begins_word({"play": 0, "##ing": 1, ",": 2})
    array([ True, False,  True])
    >>> begins_word({"Ġplay": 0, "ing": 1, "x": 2})
    array([ True, False, False])
    """
    going_on = sum(name.startswith("##") and len(name) > 2 for name in pieces)
    spaced = sum(name.startswith("Ġ") for name in pieces)
    barred = sum(name.startswith("▁") for name in pieces)
    most = max(going_on, spaced, barred)
    if not most:
        return None
    marks = ("##",) if most == going_on else SPACES if most == spaced else ("▁",)
    found = np.zeros(max(pieces.values()) + 1, dtype=np.bool_)
    marked = [i for name, i in pieces.items() if name.startswith(marks)]
    if marks == ("##",):
        found[:] = True
        found[marked] = False
    else:
        found[marked] = True
    return found
