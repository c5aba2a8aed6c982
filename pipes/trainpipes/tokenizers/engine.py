"""What ``tokenize`` asks of a tokenizer, whichever kind it is, and the rows of ids that it gives; and who
works in parallel: the thread pool of ``tokenizers``, or our threads.

The pool does not survive a fork: a child that uses its parent's hangs. So
``TOKENIZERS_PARALLELISM`` is set in the parent, and "false" in forked children and DataLoader
workers, unless the user has set it.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch.utils.data import get_worker_info

from trainpipes import errors
from trainpipes._internal.checks import IntArray
from trainpipes._internal.locks import ForkLock, cached_property
from trainpipes._internal.messages import clean
from trainpipes.columns.arrays import list_array, stretches
from trainpipes.columns.rectangles import Side
from trainpipes.filesystems.retry import Requests

VARIABLE = "TOKENIZERS_PARALLELISM"

_registered = False
_ours: str | None = None  # the last value set here


def settle() -> None:
    """Set the variable for this process and the children that it will fork."""
    global _registered
    if not _registered and hasattr(os, "register_at_fork"):
        _registered = True
        os.register_at_fork(after_in_child=_switch_off)
    if get_worker_info() is not None:
        _switch_off()
    elif VARIABLE not in os.environ:
        _set("true")


def take_turns(threads: int) -> None:
    """Say how many of our threads encode at once; more than one turns the pool off."""
    settle()
    if os.environ.get(VARIABLE) == _ours and get_worker_info() is None:
        _set("false" if threads > 1 else "true")


def _set(value: str) -> None:
    global _ours
    os.environ[VARIABLE] = _ours = value


def _switch_off() -> None:
    global _ours
    _ours = None  # for good
    os.environ[VARIABLE] = "false"


Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths."""

    values: Ids
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        return np.diff(self.offsets)

    @staticmethod
    def of_lengths(values: Ids, lengths: IntArray) -> Ragged:
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Ragged(values, offsets)

    @staticmethod
    def of_lists(rows: Iterable[list[int]]) -> Ragged:
        values, lengths = array("i"), array("q")
        for row in rows:  # list by list: lists that were read are freed while they are in cache
            values.fromlist(row)
            lengths.append(len(row))
        return Ragged.of_lengths(np.array(values, np.int32), np.array(lengths, np.int64))

    @staticmethod
    def of_rows(rows: Sequence[npt.NDArray[Any]]) -> Ragged:
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        values = np.concatenate(rows) if rows else lengths
        return Ragged.of_lengths(values.astype(np.int32, copy=False), lengths)

    def parts(self, starts: IntArray, lengths: IntArray) -> Ragged:
        return Ragged.of_lengths(self.values[stretches(starts, lengths)], lengths)

    def to_arrow(self) -> pa.ListArray:
        if self.offsets[-1] > np.iinfo(np.int32).max:
            said = f"{self.offsets[-1]:,} tokens in {len(self):,} rows are more than an Arrow array holds"
            raise errors.DataError(
                f"{said}; tokenize after batch(), where fewer rows come at a time"
            )
        return list_array(self.values, self.lengths)

    def to_rows(self) -> list[Ids]:
        edges = self.offsets.tolist()
        return [self.values[a:b] for a, b in pairwise(edges)]


def assemble(
    segments: Sequence[Ragged], prefix: Sequence[int] = (), suffix: Sequence[int] = (),
    room: int | IntArray | None = None, side: str = "right",
) -> tuple[Ragged, IntArray]:  # fmt: skip
    """Each row's segments joined, cut to ``room`` tokens, between prefix and suffix; and the tokens
    of each piece, these included, int64 ``[rows, pieces]``.
    """
    shortened, counts = _cut(segments, room, side)
    rows, around = len(counts), (*prefix, *suffix)
    pieces = np.empty((rows, len(shortened) + 2), dtype=np.int64)
    pieces[:, 0], pieces[:, 1:-1], pieces[:, -1] = len(prefix), counts, len(suffix)
    if len(shortened) == 1:
        if not around:
            return shortened[0], pieces
        edges = np.stack([shortened[0].offsets[:-1], shortened[0].offsets[1:]], axis=1).reshape(-1)
        places = np.repeat(edges, np.tile([len(prefix), len(suffix)], rows))
        values = np.insert(shortened[0].values, places, np.tile(around, rows))
    else:  # of each token, the piece that it is of: those of a piece stand in the order of rows
        kind = np.min_scalar_type(pieces.shape[1])
        numbers = np.tile(np.arange(pieces.shape[1], dtype=kind), rows)
        piece = np.repeat(numbers, pieces.reshape(-1))
        values = np.empty(len(piece), dtype=np.int32)
        parts = [np.tile(prefix, rows), *(k.values for k in shortened), np.tile(suffix, rows)]
        for number, part in enumerate(parts):
            values[piece == number] = part
    return Ragged.of_lengths(values, pieces.sum(axis=1)), pieces


def _cut(
    segments: Sequence[Ragged], room: int | IntArray | None, side: str
) -> tuple[Sequence[Ragged], IntArray]:
    lengths = np.stack([segment.lengths for segment in segments], axis=1)
    total = lengths.sum(axis=1)
    if room is None or (total <= room).all():
        return segments, lengths
    ends, most = np.cumsum(lengths, axis=1), np.minimum(total, room)
    low = total - most if side == "left" else np.zeros_like(total)  # of the joined segments
    first = np.clip(low[:, None], ends - lengths, ends)
    counts = np.clip((low + most)[:, None], ends - lengths, ends) - first
    starts = first - (ends - lengths) + np.stack([s.offsets[:-1] for s in segments], axis=1)
    whole = (counts == lengths).all(axis=0)
    each = enumerate(segments)
    return [s if whole[k] else s.parts(starts[:, k], counts[:, k]) for k, s in each], counts


#: Special tokens before and after a text.
Affixes = tuple[tuple[int, ...], tuple[int, ...]]
Pair = tuple[pa.LargeStringArray, pa.LargeStringArray]


class Loaded(ABC):
    """An object that each process, also a forked one, loads for itself when it first needs it."""

    def __init__(self) -> None:
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_loaded", "turn")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._loaded: tuple[int, Any] | None = None
        #: Lock of this process for calls that are not thread-safe.
        self.turn = ForkLock()

    @abstractmethod
    def _load(self) -> Any:
        """What does the work; nobody else holds it."""

    @property
    def loaded(self) -> Any:
        entry, process = self._loaded, os.getpid()
        if entry is None or entry[0] != process:
            with self.turn:
                if self._loaded is None or self._loaded[0] != process:
                    self._loaded = process, self._load()
                entry = self._loaded
        return entry[1]


@dataclass(frozen=True)
class Special:
    """The special tokens that a tokenizer tells of, and the side that it pads on."""

    #: Tokens that may end a text, by name; a single token if the tokenizer says which.
    ends: dict[str, int] = field(default_factory=dict)
    pad: int | None = None
    side: Side | None = None
    #: Tokens that stand for no text; the end and the pad token if left out.
    ids: Collection[int] | None = None
    mask: int | None = None

    def all_ids(self) -> list[int]:
        known = {*self.ends.values(), self.pad} if self.ids is None else self.ids
        return sorted(i for i in known if i is not None)


class TokenizerEngine(Loaded):
    """Text to token ids, in a tokenizer's way."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __repr__(self) -> str:
        return self._name

    @abstractmethod
    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        """Ids of each text, none null, without special tokens; ``numbers``, int64 ``[texts]``, are
        those of their rows.
        """

    @abstractmethod
    def fingerprint(self) -> Any:
        """The tokenizer's identity in a checkpoint: its content, wherever it lies."""

    def encode_pairs(
        self, texts: Pair, special: bool, max_length: int | None, side: Side, numbers: IntArray
    ) -> tuple[Ragged, Ragged, Ragged, IntArray]:
        """Ids and type ids of pairs of texts, the longer text cut first; which text each token is of, 0 or 1,
        or -1 of special ones; and how many tokens each row was cut by.
        """
        way = "give a tokenizer.json or a transformers fast tokenizer, or leave pair out to join the columns"
        rule = "needs a tokenizer that knows how a pair is written"
        raise errors.ConfigError(f"pair=True {rule}, and {self} does not: {way}")

    @cached_property
    def targets(self) -> TokenizerEngine:
        """What makes labels: itself, but for translation, where these are of another language."""
        return self

    def runs_on(self) -> str:
        return type(self).__name__.lower()

    def affixes(self) -> Affixes:
        """The special tokens that the tokenizer puts before and after a text."""
        return (), ()

    def pair_affixes(self) -> tuple[int, int | None]:
        return 0, None

    @cached_property
    def special(self) -> Special:
        return Special()

    def token_id(self, token: str) -> int | None:
        return None

    def has_special(self, token: str) -> bool:
        """Whether it finds a special token of this name in a text."""
        return self.token_id(token) is not None

    def pieces(self) -> dict[str, int] | None:
        """The id of every token, by name, if the tokenizer shows them."""
        return None

    def package(self) -> str | None:
        """The package that makes the ids, if several may; states record it."""
        return None

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text of token ids, for people: special tokens by name, unknown ids as ``<5>``."""
        runs = ((name, list(run)) for name, run in groupby(map(int, ids), self._named))
        return "".join(name * len(run) if name else self._text(run) for name, run in runs)

    def _named(self, token: int) -> str:
        """What stands for a token that is not decoded with others; "" if it is."""
        return ""

    def _text(self, ids: list[int]) -> str:
        return ""


def has_targets(tokenizer: Any) -> bool:
    """Whether a tokenizer of transformers has a mode of its own for labels."""
    return hasattr(tokenizer, "_switch_to_target_mode")


def no_language(tokenizer: object) -> errors.ConfigError:
    way = "AutoTokenizer.from_pretrained(name, src_lang=..., tgt_lang=...)"
    said = f"the tokenizer {tokenizer} writes the language of labels beside them"
    return errors.ConfigError(f"{said}, and does not know which: give {way}")


def read(path: str) -> bytes:
    """The content of a tokenizer file, which the pipeline takes along to its processes."""
    try:
        if "://" in path:
            system, place = fsspec.url_to_fs(path)
            return bytes(Requests().call(system, "cat_file", place))
        return Path(path).read_bytes()
    except errors.UnreachableError:
        raise
    except Exception as error:
        raise errors.UnreadableError(f"{path} cannot be read: {error}", path=path) from clean(error)


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()[:32]}"


#: Names of mask tokens in published tokenizers.
MASKS = ("[MASK]", "<mask>", "<|mask|>")
#: What goes on with a word, in WordPiece; or begins a word: a space, a line's end, a tab, as others write
#: them.
WORD_MARKS = {"##": ("##",), "Ġ": ("Ġ", "Ċ", "ĉ"), "▁": ("▁",)}


def begins_word(pieces: Mapping[str, int]) -> npt.NDArray[np.bool_] | None:
    """Whether a word begins with each token: bool ``[tokens]``.

    >>> begins_word({"play": 0, "##ing": 1, ",": 2})
    array([ True, False,  True])
    >>> begins_word({"Ġplay": 0, "ing": 1, "x": 2})
    array([ True, False, False])
    """
    counts = {mark: sum(n.startswith(mark) and n != "##" for n in pieces) for mark in WORD_MARKS}
    most = max(counts, key=lambda mark: counts[mark])
    if not counts[most]:
        return None
    begins = np.full(max(pieces.values()) + 1, most == "##")
    begins[[i for name, i in pieces.items() if name.startswith(WORD_MARKS[most])]] = most != "##"
    return begins


def utf8(content: bytes) -> str:
    return content.decode("utf-8", "backslashreplace")
