"""A faster engine that is watched, so that the ids are those of ``tokenizers``.

Before it is used, a thousand varied texts and the first rows of the user's own are encoded by both,
and one row in a thousand from then on. At the first difference ``tokenizers`` encodes the rows at
hand again, of which none has been delivered, and goes on alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.secret_text import hidden
from trainpipes.columns.arrays import apart, python_to_arrow, to_arrow, to_numpy
from trainpipes.engine.layout import IntArray
from trainpipes.tokenizers.admission import YOUNG
from trainpipes.tokenizers.ragged import Ragged
from trainpipes.tokenizers.varied import varied

__all__ = ["EVERY", "FIRST", "Checked", "Fast"]

#: Rows that are compared at the start, in each process.
FIRST = 256
#: One row in so many is compared after that.
EVERY = 1000
#: So many rows at once are worth waiting for the faster engine's start, half a second.
MANY = 2048
#: Texts that both encode before anything else.
PROBES = 1000

#: Characters that are logged of a text, at most.
SHOWN = 2000
#: What is no failure of an engine. A panic of Rust is no ``Exception`` either.
ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)

log = logging.getLogger("trainpipes")

Encode = Callable[[pa.LargeStringArray], Ragged]


class Fast(Protocol):
    """An engine that is faster, and may be wrong."""

    def encode(self, texts: pa.LargeStringArray) -> Ragged: ...


class Checked:
    """Ids by a faster engine, compared with the reference's on a sample. Several threads may call.

    The first rows go to the reference; the faster engine starts with the next call, so that it
    delays no first batch and costs nothing where there are few rows.

    Args:
        make: starts the faster engine.
        reference: what is right.
        name: of the tokenizer, for the log.
        tokens: its added tokens.

    Attributes:
        stopped: why the faster engine does not run any more; None while it may.
    """

    def __init__(
        self, make: Callable[[], Fast], reference: Encode, name: str, tokens: Sequence[str] = ()
    ) -> None:
        self._make = make
        self._fast: Fast | None = None
        self._reference = reference
        self._name = name
        self._tokens = [token for token in tokens if token]
        self._first: list[pa.LargeStringArray] = []
        self._seen = 0
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self.stopped: str | None = None

    def encode(self, texts: pa.LargeStringArray) -> Ragged:
        """Ids of each text."""
        if self.stopped is not None:
            return self._reference(texts)
        with self._lock:
            first, self._seen = self._seen, self._seen + len(texts)
            head = min(len(texts), max(0, FIRST - first))
            if head:  # a copy: the rest may be let go
                self._first.append(texts.take(to_arrow(np.arange(head))))
        if not head:
            return self._route(texts, first)
        if len(texts) <= MANY:
            return self._reference(texts)
        halves = self._reference(texts.slice(0, head)), self._route(texts.slice(head), first + head)
        return Ragged.joined(*halves)

    def _route(self, texts: pa.LargeStringArray, first: int) -> Ragged:
        """Ids by the faster engine, if it runs."""
        if not self._started(wait=len(texts) > MANY):
            return self._reference(texts)
        return self._encode(texts, np.arange(-first % EVERY, len(texts), EVERY, dtype=np.int64))

    def _started(self, wait: bool = True) -> bool:
        """Whether the faster engine may be used; the first to ask starts it."""
        if self._fast is None and self.stopped is None and self._starting.acquire(blocking=wait):
            try:
                if self._fast is None and self.stopped is None:
                    self._start()
            finally:
                self._starting.release()
        return self._fast is not None and self.stopped is None

    def _start(self) -> None:
        probes = python_to_arrow(varied(PROBES, 0, self._tokens), pa.large_string())
        texts = pa.concat_arrays([probes, *self._first])
        try:
            fast = self._make()
            self._encode(texts, np.arange(len(texts)), fast)
            self._fast = fast
        except ENDS:
            raise
        except BaseException as error:
            self._stop(f"it does not take this tokenizer: {error}")
        self._first = []

    def _encode(
        self, texts: pa.LargeStringArray, sampled: IntArray, fast: Fast | None = None
    ) -> Ragged:
        fast = fast or self._fast
        assert fast is not None
        try:
            found = fast.encode(texts)
        except ENDS:
            raise
        except BaseException as error:
            self._stop(f"it failed: {error!r}")
            return self._reference(texts)
        if len(found) != len(texts):
            self._stop(f"it gave {len(found)} rows for {len(texts)} texts")
            return self._reference(texts)
        young = has_young(texts)
        rows = np.union1d(sampled, young)
        if len(rows):
            right = self._reference(texts.take(to_arrow(rows)))
            wrong = differing(found, rows, right)
            unexpected = rows[wrong][~np.isin(rows[wrong], young)]
            if len(unexpected):
                text = repr(texts[int(unexpected[0])].as_py())
                self._stop(f"it differs on the text {text[:SHOWN]}{'…' * (len(text) > SHOWN)}")
            elif len(wrong):
                found = with_rows(found, rows[wrong], right, wrong)
        # Here too if another thread has found a difference meanwhile.
        return found if self.stopped is None else self._reference(texts)

    def _stop(self, why: str) -> None:
        with self._lock:
            if self.stopped is not None:
                return
            self.stopped = why
        log.warning(
            "tokenize(%s): gigatoken is left out: %s. From these rows on tokenizers does the work; "
            'engine="tokenizers" leaves it out from the start',
            hidden(self._name),
            why,
        )


def has_young(texts: pa.LargeStringArray) -> IntArray:
    """Rows with a code point that packages know differently, int64."""
    if apart(texts)[0].max(initial=0) < 0x80:
        return np.empty(0, dtype=np.int64)
    wide = pc.indices_nonzero(pc.invert(pc.string_is_ascii(texts)))
    young = pc.match_substring_regex(texts.take(wide), YOUNG)
    found: IntArray = to_numpy(wide.filter(young)).astype(np.int64)
    return found


def differing(found: Ragged, rows: IntArray, right: Ragged) -> IntArray:
    """Which of ``rows`` of ``found`` are not the rows of ``right``, as indices into ``rows``."""
    same = found.lengths[rows] == right.lengths
    # Rows of one length are compared in one go.
    picked, other = _values(found, rows[same]), _values(right, np.flatnonzero(same))
    unequal = np.zeros(len(rows), dtype=bool)
    unequal[~same] = True
    owner = np.repeat(np.flatnonzero(same), right.lengths[same])
    unequal[owner[picked != other]] = True
    return np.flatnonzero(unequal)


def _values(ragged: Ragged, rows: IntArray) -> npt.NDArray[np.int32]:
    """The tokens of some rows, one row after the other."""
    lengths = ragged.lengths[rows]
    ends = np.cumsum(lengths)
    index = np.repeat(ragged.offsets[rows] - (ends - lengths), lengths)
    return ragged.values[index + np.arange(len(index))]


def with_rows(found: Ragged, rows: IntArray, right: Ragged, numbers: IntArray) -> Ragged:
    """``found`` with ``rows`` replaced by the rows ``numbers`` of ``right``."""
    both = Ragged.joined(found, right)
    order = np.arange(len(found))
    order[rows] = len(found) + numbers
    return Ragged.of_lengths(_values(both, order), both.lengths[order])
