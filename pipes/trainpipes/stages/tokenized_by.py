"""``tokenized_by``: which tokenizer has made the token ids that rows hold already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any, Literal

from trainpipes.checks import column_names
from trainpipes.rows.run import Run
from trainpipes.stages.tokenizing import Tokenizes

__all__ = ["TokenizedBy"]


class TokenizedBy(Tokenizes):
    """Says which tokenizer made the ids that rows hold already, for later stages that need it: ``pack`` and
    ``pad_collate`` for the pad token and the padding side, ``mask_tokens`` for the mask token.

    In and out: rows. Cursor: none of its own. Costs nothing; the tokenizer is loaded when a stage needs it.
    See docs/prepare.md for files that are tokenized ahead.

    Args:
        tokenizer: whatever ``tokenize`` takes.
        columns: the columns of its ids.
        engine: as in ``tokenize``.

    Raises:
        ConfigError: the tokenizer is not there.
        MissingExtraError: the tokenizer's package is not installed.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"input_ids": [[104, 105], [33]]}))
    >>> rows.tokenized_by("bytes").batch(2).pad_collate().peek()["input_ids"]
    tensor([[104, 105],
            [ 33, 257]])
    """

    free = frozenset({"engine"})
    keeps_rows = True

    tokenizer: Any
    columns: str | Sequence[str] = "input_ids"
    _: KW_ONLY
    engine: Literal["auto", "tokenizers"] = "auto"

    def check(self) -> None:
        self._set(columns=column_names(self.columns, "tokenized_by(columns)"))
        _ = self._engine  # raises unless it is there

    @property
    def id_columns(self) -> list[str]:
        return list(self.columns)

    @property
    def runs_user_code(self) -> bool:
        return False

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "tokenizer": self._engine.fingerprint()}

    def process(self, run: Run) -> Run:
        return run
