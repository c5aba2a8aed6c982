"""What ``tokenize`` asks of a tokenizer, whichever kind it is."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes._internal.clean_errors import clean
from trainpipes._internal.fork_lock import ForkLock
from trainpipes.columns.rectangles import Side
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, DataChangedError, UnreachableError, UnreadableError
from trainpipes.sources.remote.retry import Requests
from trainpipes.tokenizers.ragged import Ragged


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()[:32]}"


class File:
    """A file that must stay what it is while a pipeline uses it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._digest: str | None = None
        self._carried: bytes | None = None
        self._beside: dict[str, bytes | None] = {}

    def carry(self, *beside: str) -> None:
        self._carried = self.read()
        for name in beside:
            self.beside(name)

    def read(self) -> bytes:
        try:
            content = self._content()
        except UnreachableError:
            raise
        except Exception as error:
            raise UnreadableError(
                f"{self.path} cannot be read: {error}; tokenizers are read by every process that "
                "tokenizes, so it must be there for all of them",
                path=self.path,
            ) from clean(error)
        found = digest(content)
        if self._digest is not None and self._digest != found:
            raise DataChangedError(
                f"{self.path} is no longer what this pipeline first read, so that its processes "
                "would not tokenize alike; put it back, or build the pipeline anew",
                path=self.path,
            )
        self._digest = found
        return content

    def _content(self) -> bytes:
        if self._carried is not None:
            return self._carried
        if "://" in self.path:
            system, path = fsspec.url_to_fs(self.path)
            return bytes(Requests().call(system, "cat_file", path))
        with open(self.path, "rb") as file:
            return file.read()

    def beside(self, name: str) -> bytes | None:
        """The content of a file in the same directory, as first read; None if there is none."""
        if name not in self._beside:
            path = os.path.join(os.path.dirname(self.path), name)
            found = None
            if "://" not in path and os.path.isfile(path):
                with open(path, "rb") as file:
                    found = file.read()
            self._beside[name] = found
        return self._beside[name]


#: Special tokens before and after a text.
Affixes = tuple[tuple[int, ...], tuple[int, ...]]


class Engine(ABC):
    """Text to token ids, in one tokenizer's way."""

    def __init__(self) -> None:
        self._loaded: tuple[int, Any] | None = None
        self._make_locks()

    def _make_locks(self) -> None:
        self._loading = ForkLock()
        #: Held, in this process, by the one thread that calls what only one may call.
        self.turn = ForkLock()

    @abstractmethod
    def _load(self) -> Any:
        """What does the work; nobody else holds it."""

    @property
    def loaded(self) -> Any:
        found, process = self._loaded, os.getpid()
        if found is None or found[0] != process:
            with self._loading:
                if self._loaded is None or self._loaded[0] != process:
                    self._loaded = process, self._load()
                found = self._loaded
        return found[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": None, "_loading": None, "turn": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_locks()

    def carry(self) -> None:
        for value in vars(self).values():
            if isinstance(value, File):
                value.carry("tokenizer_config.json")

    def runs_on(self) -> str:
        return type(self).__name__.lower()

    @abstractmethod
    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        """Ids of each text, none null, without special tokens; ``numbers``, int64 ``[texts]``, are
        those of their rows.
        """

    def encode_pairs(
        self, first: pa.LargeStringArray, second: pa.LargeStringArray, special: bool,
        max_length: int | None, side: Side, numbers: IntArray,
    ) -> tuple[Ragged, Ragged]:  # fmt: skip
        """Ids and type ids of pairs of texts, the longer one cut first."""
        raise ConfigError(
            f"pair=True needs a tokenizer that knows how a pair is written, and {self} does not: give a "
            "tokenizer.json or a transformers fast tokenizer, or leave pair out to join the columns"
        )

    def affixes(self) -> Affixes:
        """The special tokens that the tokenizer puts before and after one text."""
        return (), ()

    def pair_affixes(self) -> tuple[int, int | None]:
        return 0, None

    def ends(self) -> dict[str, int]:
        """Tokens that may end a text, by name; one if the tokenizer says which."""
        return {}

    def pad_id(self) -> int | None:
        return None

    def padding(self) -> Side | None:
        return None

    def token_id(self, token: str) -> int | None:
        return None

    def pieces(self) -> dict[str, int] | None:
        """The id of every token, by name, if the tokenizer shows them."""
        return None

    def special_ids(self) -> list[int]:
        """Tokens that stand for no text."""
        pad = self.pad_id()
        return sorted({*self.ends().values(), *([] if pad is None else [pad])})

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text of token ids, for people: special tokens by name, unknown ids as ``<5>``."""
        return None

    def package(self) -> str | None:
        """The package that makes the ids, if several may; states record it."""
        return None

    @abstractmethod
    def fingerprint(self) -> Any:
        """What stands for the tokenizer in a checkpoint: its content, wherever it lies."""

    @abstractmethod
    def __repr__(self) -> str: ...


#: Names of mask tokens in published tokenizers.
MASKS = ("[MASK]", "<mask>", "<|mask|>")
#: Of byte-level BPE: a space, a line's end, a tab, as it writes them.
SPACES = ("Ġ", "Ċ", "ĉ")


def begins_word(pieces: Mapping[str, int]) -> npt.NDArray[np.bool_] | None:
    """Of each token, whether a word begins with it: bool ``[tokens]``.

    >>> begins_word({"play": 0, "##ing": 1, ",": 2})
    array([ True, False,  True])
    >>> begins_word({"Ġplay": 0, "ing": 1, "x": 2})
    array([ True, False, False])
    """
    marks = {"##": ("##",), "Ġ": SPACES, "▁": ("▁",)}
    counts = {mark: sum(n.startswith(mark) and n != "##" for n in pieces) for mark in marks}
    most = max(counts, key=lambda mark: counts[mark])
    if not counts[most]:
        return None
    found = np.full(max(pieces.values()) + 1, most == "##")
    found[[i for name, i in pieces.items() if name.startswith(marks[most])]] = most != "##"
    return found


def text_of_bytes(parts: Iterable[bytes | str]) -> str:
    """The joined text of tokens: bytes, or the names of those without.

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
    """The text of token ids, unknown ones as ``<5>``.

    >>> with_unknown([1, 2, 99, 1], lambda i: i < 9, lambda ids: "".join(map(str, ids)))
    '12<99>1'
    """
    found = []
    for known, run in groupby(ids, is_known):
        some = list(run)
        found.append(decode(some) if known else "".join(f"<{i}>" for i in some))
    return "".join(found)
