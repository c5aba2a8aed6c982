"""``tiktoken`` encodings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import need
from trainpipes._internal.messages import nearest
from trainpipes.errors import ConfigError, UnreadableError
from trainpipes.tokenizers.engine import Engine, text_of_bytes
from trainpipes.tokenizers.ragged import Ragged


class Tiktoken(Engine):
    """A tiktoken encoding."""

    def __init__(self, encoding: Any) -> None:
        super().__init__()
        need("tiktoken", "a tiktoken encoding")
        self._encoding = encoding
        self._fingerprint: str | None = None
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

    def encode(self, texts: pa.LargeStringArray) -> Ragged:
        to_numpy = self.loaded.encode_to_numpy
        rows = [to_numpy(text, disallowed_special=()) for text in texts.to_pylist()]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        values = np.concatenate(rows) if rows else np.empty(0, dtype=np.uint32)
        return Ragged.of_lengths(values.astype(np.int32), lengths)

    def runs_on(self) -> str:
        return "tiktoken"

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

    def fingerprint(self) -> str:
        if self._fingerprint is None:
            encoding = self.loaded
            content = hashlib.sha256(encoding._pat_str.encode())
            for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
                content.update(b"%d:%d:" % (rank, len(token)) + token)
            content.update(repr(sorted(encoding._special_tokens.items())).encode())
            self._fingerprint = f"sha256:{content.hexdigest()[:32]}"
        return self._fingerprint
