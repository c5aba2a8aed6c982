"""UTF-8 bytes as tokens: no vocabulary, no package, every text possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from trainpipes.columns.arrays import apart
from trainpipes.tokenizers.engine import Engine, text_of_bytes
from trainpipes.tokenizers.ragged import Ragged

#: Ids after the 256 bytes.
EOS, PAD = 256, 257
#: Size of an embedding for these ids.
VOCABULARY = 258


class Bytes(Engine):
    """The UTF-8 bytes of a text, 0 to 255; 256 ends a text, 257 pads."""

    def __repr__(self) -> str:
        return "bytes"

    def _load(self) -> None:
        return None

    def encode(self, texts: pa.LargeStringArray) -> Ragged:
        texts.validate(full=True)  # nothing else would notice what is not UTF-8
        values, offsets = apart(texts)
        return Ragged(values.astype(np.int32), offsets)

    def runs_on(self) -> str:
        return ""

    def ends(self) -> dict[str, int]:
        return {"<eos>": EOS}

    def pad_id(self) -> int:
        return PAD

    def token_id(self, token: str) -> int | None:
        return {"<eos>": EOS, "<pad>": PAD}.get(token)

    def decode(self, ids: Sequence[int]) -> str:
        names = {EOS: "<eos>", PAD: "<pad>"}
        return text_of_bytes(
            bytes([i]) if 0 <= i < 256 else names.get(i, f"<{i}>") for i in map(int, ids)
        )

    def fingerprint(self) -> str:
        return "bytes"
