"""What ``tokenize`` asks of a tokenizer, whichever kind it is."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from trainpipes.columns.rectangles import Side
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError
from trainpipes.tokenizers.content import File
from trainpipes.tokenizers.ragged import Ragged

#: Special tokens before and after a text.
Affixes = tuple[tuple[int, ...], tuple[int, ...]]


class Engine(ABC):
    """Text to token ids, in one tokenizer's way.

    What does the work is loaded at first use, once in each process: it is neither pickled nor
    taken over by a forked child, whose copy may hold locks of threads that are no more. Several
    threads may call at once; what is written in Python is called by one of them at a time.
    """

    def __init__(self) -> None:
        self._loaded: dict[int, Any] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._turns: dict[int, threading.Lock] = {}

    #: Packages that do the work, as they are imported.
    packages: Sequence[str] = ()

    @abstractmethod
    def _load(self) -> Any:
        """What does the work; nobody else holds it."""

    @property
    def loaded(self) -> Any:
        """What does the work, in this process."""
        process = os.getpid()
        if process not in self._loaded:
            with self._locks.setdefault(process, threading.Lock()):
                if process not in self._loaded:
                    self._loaded = {process: self._load()}
        return self._loaded[process]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": {}, "_locks": {}, "_turns": {}}

    def carry(self) -> None:
        """Take the content of its file along when this is pickled. Directories, and what packages keep in
        folders of their own, stay where they are."""
        for value in vars(self).values():
            if isinstance(value, File):
                value.carry("tokenizer_config.json")

    @property
    def turn(self) -> threading.Lock:
        """Held, in this process, by the one thread that calls what only one may call."""
        return self._turns.setdefault(os.getpid(), threading.Lock())

    def runs_on(self) -> str:
        """What makes the ids, in words; nothing if that goes without saying."""
        return type(self).__name__.lower()

    @abstractmethod
    def encode(self, texts: pa.LargeStringArray) -> Ragged:
        """Ids of each text, without special tokens; ``texts`` holds no null."""

    def encode_rows(self, texts: pa.LargeStringArray, numbers: IntArray) -> Ragged:
        """As ``encode``, for texts of rows of these numbers, int64 ``[texts]``."""
        return self.encode(texts)

    def encode_pairs(
        self,
        first: pa.LargeStringArray,
        second: pa.LargeStringArray,
        special: bool,
        max_length: int | None,
        side: Side,
        numbers: IntArray,
    ) -> tuple[Ragged, Ragged]:
        """Ids and type ids of pairs of texts, the longer one cut first, as the tokenizer does it."""
        raise ConfigError(
            f"pair=True needs a tokenizer that knows how a pair is written, and {self} does not: "
            "give a tokenizer.json or a transformers fast tokenizer, or leave pair out to join "
            "the columns"
        )

    def affixes(self) -> Affixes:
        """The special tokens that the tokenizer puts before and after one text."""
        return (), ()

    def pair_affixes(self) -> tuple[int, int | None]:
        """How many special tokens a pair gets, and the last one, if a pair ends with one."""
        return 0, None

    def ends(self) -> dict[str, int]:
        """Tokens that may mark the end of a text, by name; one if the tokenizer says which."""
        return {}

    def pad_id(self) -> int | None:
        """The tokenizer's padding token."""
        return None

    def padding(self) -> Side | None:
        """The side that the tokenizer is to be padded on, if it says."""
        return None

    def token_id(self, token: str) -> int | None:
        """The id of one token."""
        return None

    def pieces(self) -> dict[str, int] | None:
        """The id of every token, by name, if the tokenizer shows them."""
        return None

    def special_ids(self) -> list[int]:
        """Tokens that stand for no text."""
        pad = self.pad_id()
        return sorted({*self.ends().values(), *([] if pad is None else [pad])})

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text that token ids stand for, for people to read: special tokens by their names, ids that no
        token has as ``<5>``. None where the tokenizer does not tell."""
        return None

    def package(self) -> str | None:
        """The package that makes the ids, where there are several for this kind of tokenizer: a state says
        which one was used."""
        return None

    @abstractmethod
    def fingerprint(self) -> Any:
        """What stands for the tokenizer in a checkpoint: its content, wherever it lies."""

    @abstractmethod
    def __repr__(self) -> str: ...
