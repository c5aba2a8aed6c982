"""Tokenizers of transformers that have no fast form, and directories that only it can read."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from trainpipes._internal.checks import need
from trainpipes.columns.rectangles import Side
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, UnreadableError
from trainpipes.tokenizers.callable import ids_of
from trainpipes.tokenizers.engine import Affixes, Engine, digest, with_unknown
from trainpipes.tokenizers.hf import HuggingFace
from trainpipes.tokenizers.ragged import Ragged


class Slow(Engine):
    """A transformers tokenizer written in Python, used by calling it, one thread at a time.

    Args:
        tokenizer: a ``PreTrainedTokenizer``.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._fingerprint: str | None = None

    def __repr__(self) -> str:
        return type(self._tokenizer).__name__

    def _load(self) -> Any:
        return copy.deepcopy(self._tokenizer)

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        work = self.loaded
        with self.turn:
            found: list[list[int]] = work(
                texts,
                add_special_tokens=special,
                padding=False,
                truncation=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
        return found

    def runs_on(self) -> str:
        return "transformers, in Python, by one thread at a time"

    def encode(self, texts: pa.LargeStringArray) -> Ragged:
        return ids_of(self._ids(texts.to_pylist(), special=False), len(texts), self)

    def affixes(self) -> Affixes:
        for probe in ("a", "0", "The end", "."):
            (bare,), (full,) = self._ids([probe], special=False), self._ids([probe], special=True)
            places = [k for k in range(len(full)) if full[k : k + len(bare)] == bare]
            if bare and len(places) == 1:
                return tuple(full[: places[0]]), tuple(full[places[0] + len(bare) :])
        raise ConfigError(
            f"which special tokens {self} puts around a text cannot be told: pass "
            "add_special_tokens=False"
        )

    def ends(self) -> dict[str, int]:
        name, found = self._tokenizer.eos_token, self._tokenizer.eos_token_id
        return {} if found is None else {name: found}

    def pad_id(self) -> int | None:
        found: int | None = self._tokenizer.pad_token_id
        return found

    def padding(self) -> Side | None:
        return "left" if self._tokenizer.padding_side == "left" else "right"

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.get_vocab().get(token)
        return found

    def pieces(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def special_ids(self) -> list[int]:
        return sorted(self._tokenizer.all_special_ids)

    def decode(self, ids: Sequence[int]) -> str:
        work = self.loaded
        size = len(work)

        def decode(known: list[int]) -> str:
            with self.turn:
                return str(work.decode(known, clean_up_tokenization_spaces=False))

        return with_unknown(list(map(int, ids)), lambda i: 0 <= i < size, decode)

    def fingerprint(self) -> dict[str, Any]:
        if self._fingerprint is None:
            content = json.dumps(
                [self._tokenizer.get_vocab(), self._tokenizer.init_kwargs],
                sort_keys=True,
                default=str,
            )
            self._fingerprint = digest(content.encode("utf-8", "surrogatepass"))
        return {"class": type(self._tokenizer).__qualname__, "content": self._fingerprint}


class Directory(Engine):
    """A directory that transformers loads a tokenizer from; nothing is fetched.

    Args:
        path: local directory.
        fast: whether a faster engine may do the work of a fast tokenizer.
    """

    def __init__(self, path: str, fast: bool = True) -> None:
        super().__init__()
        need("transformers", f"the tokenizer in {path}")
        self._path = path
        self._fast = fast

    def __repr__(self) -> str:
        return self._path

    def carry(self) -> None:
        """Find the directory from another working directory, too."""
        self._path = os.path.abspath(self._path)

    def _load(self) -> Engine:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self._path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise UnreadableError(
                f"transformers makes no tokenizer of {self._path}: {error}", path=self._path
            ) from error
        if hasattr(tokenizer, "backend_tokenizer"):
            return HuggingFace(tokenizer, self._fast)
        return Slow(tokenizer)

    @property
    def _engine(self) -> Engine:
        found: Engine = self.loaded
        return found

    def encode(self, texts: pa.LargeStringArray) -> Ragged:
        return self._engine.encode(texts)

    def encode_rows(self, texts: pa.LargeStringArray, numbers: IntArray) -> Ragged:
        return self._engine.encode_rows(texts, numbers)

    def package(self) -> str | None:
        return self._engine.package()

    def runs_on(self) -> str:
        if os.getpid() not in self._loaded:
            return "transformers says at first use"  # importing it takes seconds
        return self._engine.runs_on()

    def encode_pairs(
        self,
        first: pa.LargeStringArray,
        second: pa.LargeStringArray,
        special: bool,
        max_length: int | None,
        side: Side,
        numbers: IntArray,
    ) -> tuple[Ragged, Ragged]:
        return self._engine.encode_pairs(first, second, special, max_length, side, numbers)

    def affixes(self) -> Affixes:
        return self._engine.affixes()

    def pair_affixes(self) -> tuple[int, int | None]:
        return self._engine.pair_affixes()

    def ends(self) -> dict[str, int]:
        return self._engine.ends()

    def pad_id(self) -> int | None:
        return self._engine.pad_id()

    def padding(self) -> Side | None:
        return self._engine.padding()

    def token_id(self, token: str) -> int | None:
        return self._engine.token_id(token)

    def pieces(self) -> dict[str, int] | None:
        return self._engine.pieces()

    def special_ids(self) -> list[int]:
        return self._engine.special_ids()

    def decode(self, ids: Sequence[int]) -> str | None:
        return self._engine.decode(ids)

    def fingerprint(self) -> Any:
        return self._engine.fingerprint()
