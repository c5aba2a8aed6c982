"""SentencePiece models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa

from trainpipes._internal.checks import need
from trainpipes.errors import UnreadableError
from trainpipes.tokenizers.engine import Affixes, Engine, File, digest
from trainpipes.tokenizers.ragged import Ragged


class SentencePiece(Engine):
    """A SentencePiece model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        need("sentencepiece", "a SentencePiece model")
        self._model = model
        self._fingerprint: str | None = None
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

    def encode(self, texts: pa.LargeStringArray) -> Ragged:
        plain = {"add_bos": False, "add_eos": False, "reverse": False, "enable_sampling": False}
        return Ragged.of_lists(
            self.loaded.encode(texts.to_pylist(), out_type=int, num_threads=1, **plain)
        )

    def runs_on(self) -> str:
        return "sentencepiece"

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

    def fingerprint(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = digest(self._proto())
        return self._fingerprint + "".join(
            f" +{name}" for name, adds in zip(("bos", "eos"), self._adds, strict=True) if adds
        )
