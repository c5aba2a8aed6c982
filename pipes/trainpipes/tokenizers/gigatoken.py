"""gigatoken: the ids of ``tokenizers``, a hundred times as fast on one core.

It writes out the regular expressions of published tokenizers by hand, so ``Checked`` compares it
with ``tokenizers``. Its own threads would not survive a fork: it runs on the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.checks import pip_install
from trainpipes._internal.types import IntArray
from trainpipes.columns.arrays import apart, to_arrow, to_numpy
from trainpipes.errors import ConfigError
from trainpipes.errors.text import cut, hidden
from trainpipes.tokenizers.engine import Ragged

#: Bytes of text after which the engine is made anew. It keeps every word that it has ever seen: some
#: 10 MiB of them in so much prose or code, where words are random letters up to 60 bytes for each.
RENEWED = 1 << 29
#: Texts of the first call that are compared, in each process.
FIRST = 64
#: Rows are compared whose number is a multiple of this.
EVERY = 1000
#: Characters that are shown of a text, at most.
SHOWN = 500

#: Code points that Unicode came to know in this century, and what has none yet: the packages'
#: tables are of different versions, so that they disagree on the class, or on the canonical order,
#: of some. Texts with one of these go to ``tokenizers``. A class of RE2, wider than need be.
YOUNG = (
    r"[\x{5C8}-\x{5CF}\x{7FD}\x{870}-\x{8FF}\x{9FE}\x{C3C}\x{C5C}\x{CDC}\x{D3B}-\x{D3C}\x{EBA}\x{1715}"
    r"\x{1AB0}-\x{1AFF}\x{1DF0}-\x{1DFF}\x{20C1}\x{2B96}\x{A7C0}-\x{A7F6}\x{A82C}\x{FBC3}-\x{FBD2}"
    r"\x{FD90}-\x{FD91}\x{FDC8}-\x{FDCE}\x{10000}-\x{1D3FF}\x{1D800}-\x{1EFFF}\x{1F6D8}"
    r"\x{1F777}-\x{1F77A}\x{1F8D0}-\x{1F8D8}\x{1FA54}-\x{1FA57}\x{1FA8A}-\x{1FA8F}\x{1FAC8}\x{1FACD}\x{1FAEA}\x{1FAEF}\x{1FBFA}"
    r"\x{2A6DE}-\x{10FFFF}]"
)


def why_not(content: Mapping[str, Any], splits_special: bool = False) -> str | None:
    """Why gigatoken cannot do the work of a ``tokenizer.json``, if so."""
    try:
        version("gigatoken")
    except PackageNotFoundError:
        return f"gigatoken is not installed: {pip_install('gigatoken')}"
    model = content["model"]
    if splits_special:
        return "it reads special tokens in a text as plain text"
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, and gigatoken does BPE"
    if model.get("dropout"):
        return f"its model has dropout = {model['dropout']!r}"
    # Bytes are tokens by number, or by letter: those that print by themselves, others by 256 and more.
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = map(chr, [*printed, *range(0x100, 0x200 - len(printed))])
    numbers = (f"<0x{byte:02X}>" for byte in range(256))
    if not any(all(name in model["vocab"] for name in names) for names in (letters, numbers)):
        return "its vocabulary lacks tokens for some bytes, which gigatoken needs"
    for token in content.get("added_tokens") or ():
        name = token.get("content")
        for flag in ("rstrip", "single_word"):
            if token.get(flag):
                return f"its added token {name!r} has {flag}, which gigatoken does not follow"
        if token.get("normalized") and not token.get("special") and content.get("normalizer"):
            return f"its added token {name!r} is looked for in normalized text"
    return None


class Gigatoken:
    """gigatoken's tokenizer, made anew from time to time as its cache only grows."""

    def __init__(self, text: str) -> None:
        from gigatoken import Tokenizer

        self._make: Callable[[], Any] = lambda: Tokenizer.from_json(text).backend
        self._backend: Any = self._make()
        self._read = 0

    def encode(self, texts: pa.LargeStringArray) -> Ragged:
        if not len(texts):
            return Ragged.of_lists([])
        self._read += texts.nbytes
        if self._read > RENEWED:
            self._read, self._backend = 0, self._make()
        rows = self._backend.encode_batch(texts.to_pylist(), parallel=False).layout
        offsets = np.asarray(rows.offsets.data, dtype=np.int64)
        values = np.asarray(rows.content.data)[offsets[0] : offsets[-1]]
        return Ragged(values.astype(np.uint32, copy=False).view(np.int32), offsets - offsets[0])


class Checked:
    """Ids by gigatoken, compared with the reference's on a process's first texts, then every
    1,000th row.
    """

    def __init__(
        self, make: Callable[[], Any], reference: Callable[[Any], Ragged], name: str
    ) -> None:
        self._make, self._reference, self._name = make, reference, name
        self._fast: Any = None
        self._starting = threading.Lock()

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        sampled = np.zeros(len(texts), dtype=np.bool_) if numbers is None else numbers % EVERY == 0
        try:
            with self._starting:
                if self._fast is None:
                    self._fast = self._make()
                    sampled[:FIRST] = True
            rows_of_ids: Ragged = self._fast.encode(texts)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic of Rust is no ``Exception``
            self._reference(texts)  # which says what is wrong with a text
            raise self._refused(f"failed: {error!r}") from error
        if len(rows_of_ids) != len(texts):
            raise self._refused(f"gave {len(rows_of_ids)} rows for {len(texts)} texts")
        young = young_texts(texts)
        looked_at = np.flatnonzero(sampled | young)
        if not len(looked_at):
            return rows_of_ids
        rows = rows_of_ids.to_rows()
        right = self._reference(texts.take(to_arrow(looked_at))).to_rows()
        for row, ids in zip(looked_at.tolist(), right, strict=True):
            if not young[row] and not np.array_equal(rows[row], ids):
                text = cut(repr(texts[row].as_py()), SHOWN)
                raise self._refused(f"gives other ids than tokenizers for the text {text}")
            rows[row] = ids
        return Ragged.of_rows(rows) if young.any() else rows_of_ids

    def _refused(self, why: str) -> ConfigError:
        said = f"tokenize({hidden(self._name)}): gigatoken, which is installed, {why}"
        return ConfigError(f'{said}; write tokenize(..., engine="tokenizers")')


def young_texts(texts: pa.LargeStringArray) -> npt.NDArray[np.bool_]:
    """Of each text, whether it has a code point that packages know differently: bool ``[texts]``."""
    flags = np.zeros(len(texts), dtype=np.bool_)
    if apart(texts)[0].max(initial=0) >= 0x80:
        wide = pc.indices_nonzero(pc.invert(pc.string_is_ascii(texts)))
        young = pc.match_substring_regex(texts.take(wide), YOUNG)
        flags[to_numpy(wide.filter(young))] = True
    return flags
