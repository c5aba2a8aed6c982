"""SentencePiece models, and ``tiktoken`` encodings."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import pyarrow as pa

from trainpipes._internal.checks import need
from trainpipes._internal.messages import nearest
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, UnreadableError
from trainpipes.tokenizers.engine import Affixes, Engine, Special, digest, read, utf8
from trainpipes.tokenizers.ragged import Ragged


class SentencePiece(Engine):
    """The path of a model, or a ``SentencePieceProcessor``."""

    def __init__(self, model: Any) -> None:
        super().__init__(model if isinstance(model, str) else type(model).__name__)
        need("sentencepiece", "a SentencePiece model")
        given = isinstance(model, str)
        self._content = read(model) if given else bytes(model.serialized_model_proto())
        self._adds = [name for name in ("bos", "eos") if getattr(model, f"_add_{name}", False)]

    def _load(self) -> Any:
        from sentencepiece import SentencePieceProcessor

        try:
            return SentencePieceProcessor(model_proto=self._content)
        except RuntimeError as error:
            way = "if it holds tiktoken's ranks, as some do, give the tokenizer.json"
            said = f"{self} is not a SentencePiece model: {error}; {way}"
            raise UnreadableError(said, path=str(self)) from error

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        plain = {"add_bos": False, "add_eos": False, "reverse": False, "enable_sampling": False}
        ids = self.loaded.encode(texts.to_pylist(), out_type=int, num_threads=1, **plain)
        return Ragged.of_lists(ids)

    def affixes(self) -> Affixes:
        bos, eos = (self._id(name) if name in self._adds else None for name in ("bos", "eos"))
        return () if bos is None else (bos,), () if eos is None else (eos,)

    def _id(self, name: str) -> int | None:
        found = int(getattr(self.loaded, f"{name}_id")())
        return None if found < 0 else found

    @cached_property
    def special(self) -> Special:
        end = self._id("eos")
        ends = {} if end is None else {self.loaded.id_to_piece(end): end}
        return Special(ends, self._id("pad"))

    def token_id(self, token: str) -> int | None:
        found = int(self.loaded.piece_to_id(token))
        return found if self.loaded.id_to_piece(found) == token else None

    def _named(self, token: int) -> str:  # of a control token, which decoding leaves out
        model = self.loaded
        if not 0 <= token < model.get_piece_size():
            return f"<{token}>"
        return str(model.id_to_piece(token)) if model.is_control(token) else ""

    def _text(self, ids: list[int]) -> str:
        return str(self.loaded.decode(ids))

    def fingerprint(self) -> str:
        return digest(self._content) + "".join(f" +{name}" for name in self._adds)


class Tiktoken(Engine):
    """The name of an encoding, or an ``Encoding``."""

    def __init__(self, encoding: Any) -> None:
        super().__init__(f"tiktoken:{getattr(encoding, 'name', encoding)}")
        need("tiktoken", "a tiktoken encoding")
        import tiktoken

        self._encoding = encoding
        names = tiktoken.list_encoding_names()
        if isinstance(encoding, str) and encoding not in names:
            said = f"tiktoken has no encoding {encoding!r}{nearest(encoding, names)}"
            raise ConfigError(f"{said}; it has {', '.join(names)}")

    def _load(self) -> Any:
        if not isinstance(self._encoding, str):
            return self._encoding  # never changes, and keeps its regular expressions by thread
        import tiktoken

        try:
            return tiktoken.get_encoding(self._encoding)
        except Exception as error:
            said = "tiktoken gets its ranks from the network, or the folder that TIKTOKEN_CACHE_DIR names"
            raise UnreadableError(f"{self}: {said}, and neither worked: {error}") from error

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        to_numpy = self.loaded.encode_to_numpy
        return Ragged.of_rows([to_numpy(t, disallowed_special=()) for t in texts.to_pylist()])

    @cached_property
    def special(self) -> Special:
        end = self.token_id("<|endoftext|>")
        return Special({} if end is None else {"<|endoftext|>": end})

    def token_id(self, token: str) -> int | None:
        try:
            return int(self.loaded.encode_single_token(token))
        except KeyError:
            return None

    def _named(self, token: int) -> str:
        try:
            self.loaded.decode_single_token_bytes(token)
        except (KeyError, OverflowError):
            return f"<{token}>"
        return ""

    def _text(self, ids: list[int]) -> str:
        return utf8(self.loaded.decode_bytes(ids))

    @cached_property
    def _digest(self) -> str:
        encoding = self.loaded
        content = hashlib.sha256(encoding._pat_str.encode())
        for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
            content.update(b"%d:%d:" % (rank, len(token)) + token)
        content.update(repr(sorted(encoding._special_tokens.items())).encode())
        return f"sha256:{content.hexdigest()[:32]}"

    def fingerprint(self) -> str:
        return self._digest
