"""SentencePiece models, and ``tiktoken`` encodings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import need
from trainpipes._internal.messages import nearest
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, UnreadableError
from trainpipes.tokenizers.engine import Affixes, Engine, File, digest, text_of_bytes
from trainpipes.tokenizers.ragged import Ragged


class SentencePiece(Engine):
    def __init__(self, model: Any) -> None:
        super().__init__()
        need("sentencepiece", "a SentencePiece model")
        self._model = model
        self._adds = tuple(bool(getattr(model, name, False)) for name in ("_add_bos", "_add_eos"))

    def __repr__(self) -> str:
        return self._model.path if isinstance(self._model, File) else type(self._model).__name__

    def _proto(self) -> bytes:
        if isinstance(self._model, File):
            return self._model.read()
        return bytes(self._model.serialized_model_proto())

    def _load(self) -> Any:
        from sentencepiece import SentencePieceProcessor

        try:
            return SentencePieceProcessor(model_proto=self._proto())
        except RuntimeError as error:
            raise UnreadableError(
                f"{self} is not a SentencePiece model: {error}; some models keep tiktoken ranks "
                "under the name tokenizer.model: give their tokenizer.json instead",
                path=str(self),
            ) from error

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        plain = {"add_bos": False, "add_eos": False, "reverse": False, "enable_sampling": False}
        return Ragged.of_lists(
            self.loaded.encode(texts.to_pylist(), out_type=int, num_threads=1, **plain)
        )

    def affixes(self) -> Affixes:
        bos, eos = (self._known(name) for name in ("bos_id", "eos_id"))
        prefix = (bos,) if self._adds[0] and bos is not None else ()
        return prefix, ((eos,) if self._adds[1] and eos is not None else ())

    def _known(self, name: str) -> int | None:
        found = int(getattr(self.loaded, name)())
        return None if found < 0 else found

    def ends(self) -> dict[str, int]:
        found = self._known("eos_id")
        return {} if found is None else {self.loaded.id_to_piece(found): found}

    def pad_id(self) -> int | None:
        return self._known("pad_id")

    def token_id(self, token: str) -> int | None:
        found = int(self.loaded.piece_to_id(token))
        return found if self.loaded.id_to_piece(found) == token else None

    def decode(self, ids: Sequence[int]) -> str:
        model = self.loaded
        size = int(model.get_piece_size())

        def piece(token: int) -> str:  # of a control token, which decoding leaves out; else none
            if not 0 <= token < size:
                return f"<{token}>"
            return str(model.id_to_piece(token)) if model.is_control(token) else ""

        found = []
        for name, run in groupby(map(int, ids), piece):
            some = list(run)
            found.append(name * len(some) if name else str(model.decode(some)))
        return "".join(found)

    @cached_property
    def _content(self) -> str:
        return digest(self._proto())

    def fingerprint(self) -> str:
        return self._content + "".join(
            f" +{name}" for name, adds in zip(("bos", "eos"), self._adds, strict=True) if adds
        )


class Tiktoken(Engine):
    def __init__(self, encoding: Any) -> None:
        super().__init__()
        need("tiktoken", "a tiktoken encoding")
        self._encoding = encoding
        if isinstance(encoding, str):
            import tiktoken

            names = tiktoken.list_encoding_names()
            if encoding not in names:
                raise ConfigError(
                    f"tiktoken has no encoding {encoding!r}{nearest(encoding, names)}; it has "
                    f"{', '.join(names)}"
                )

    def __repr__(self) -> str:
        name = self._encoding if isinstance(self._encoding, str) else self._encoding.name
        return f"tiktoken:{name}"

    def _load(self) -> Any:
        if not isinstance(self._encoding, str):
            return self._encoding  # never changes, and keeps its regular expressions by thread
        import tiktoken

        try:
            return tiktoken.get_encoding(self._encoding)
        except Exception as error:
            raise UnreadableError(
                f"{self}: tiktoken fetches its ranks from the network, or takes them from the "
                f"directory that TIKTOKEN_CACHE_DIR names, and neither worked: {error}"
            ) from error

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        to_numpy = self.loaded.encode_to_numpy
        rows = [to_numpy(text, disallowed_special=()) for text in texts.to_pylist()]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        values = np.concatenate(rows) if rows else np.empty(0, dtype=np.uint32)
        return Ragged.of_lengths(values.astype(np.int32), lengths)

    def ends(self) -> dict[str, int]:
        found = self.token_id("<|endoftext|>")
        return {} if found is None else {"<|endoftext|>": found}

    def token_id(self, token: str) -> int | None:
        try:
            return int(self.loaded.encode_single_token(token))
        except KeyError:
            return None

    def decode(self, ids: Sequence[int]) -> str:
        return text_of_bytes(map(self._piece, map(int, ids)))

    def _piece(self, token: int) -> bytes | str:
        try:
            return bytes(self.loaded.decode_single_token_bytes(token))
        except (KeyError, OverflowError):
            return f"<{token}>"

    @cached_property
    def _content(self) -> str:
        encoding = self.loaded
        content = hashlib.sha256(encoding._pat_str.encode())
        for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
            content.update(b"%d:%d:" % (rank, len(token)) + token)
        content.update(repr(sorted(encoding._special_tokens.items())).encode())
        return f"sha256:{content.hexdigest()[:32]}"

    def fingerprint(self) -> str:
        return self._content
