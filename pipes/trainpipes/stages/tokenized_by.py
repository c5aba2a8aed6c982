"""Which tokenizer has made the token ids that rows hold already, for files that were tokenized ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal

import numpy as np

from trainpipes._internal.checks import column_names
from trainpipes.columns.block import Block
from trainpipes.columns.run import Run
from trainpipes.stages.targets import OnError, have_target
from trainpipes.stages.token_columns import is_list, names_of, numbers_of
from trainpipes.stages.tokenizing import Tokenizes

#: Rows of a process in which one without a target is looked for, where it is only warned of.
LOOKED_AT = 65_536


class TokenizedBy(Tokenizes):
    """Says which tokenizer made the ids that rows hold already, for later stages that need it: ``pack`` and
    ``pad_collate`` for the pad token and the padding side, ``mask_tokens`` for the mask token. Says too what
    becomes of rows without a target, whose labels are all -100.

    In and out: rows. Cursor: none of its own. The tokenizer is loaded when a stage needs it. Costs a look at
    labels, about 1 ns a token: of the first 65,536 rows in each process, and of all with ``on_error`` "raise"
    or "skip".
    See docs/speed.md for files that are tokenized ahead.

    Args:
        tokenizer: whatever ``tokenize`` takes.
        columns: the columns of its ids.
        on_error: as in ``tokenize``, for "labels" beside "input_ids", and so on ("chosen_labels" beside
            "chosen_input_ids").
        engine: as in ``tokenize``.

    Raises:
        DataError: with ``on_error="raise"`` a row has no target; names the row.
        ConfigError: the tokenizer is not there.
        MissingExtraError: the tokenizer's package is not installed.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"input_ids": [[104, 105], [33]]}))
    >>> rows.tokenized_by("bytes").batch(2).pad_collate().peek()["input_ids"]
    tensor([[104, 105],
            [ 33, 257]])
    """

    free = frozenset({"engine"})
    tokenizer: Any
    columns: str | Sequence[str] = "input_ids"
    _: KW_ONLY
    on_error: OnError | None = None
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
        found = {**super().identity(), "tokenizer": self._engine.fingerprint()}
        found["on_error"] = self._shaping_error()
        return {name: value for name, value in found.items() if value is not None}

    def process(self, run: Run) -> Run:
        self._targets.refuse_batches(run)
        names = self._labels(run.block) if self._looks(run) else []
        if not names:
            return run
        found = [have_target(*numbers_of(run.block, name, self)) for name in names]
        return self._targets.check(run, np.logical_and.reduce(found))

    def _labels(self, block: Block) -> list[str]:
        """The columns of labels that go with those of ids: lists, as classes are not."""
        ends = [name for name in self.columns if name.endswith("input_ids")]
        names = {name.removesuffix("input_ids") + "labels" for name in ends}
        return [name for name in names_of(block, self) if name in names and is_list(block, name)]

    #: Rows that were looked at in this process.
    _seen: ClassVar[int] = 0

    def _looks(self, run: Run) -> bool:
        """Whether to look at the labels of a run."""
        if self.on_error is not None:
            return self.on_error != "keep"
        if self._seen >= LOOKED_AT or not run.block.has_columns:
            return False
        vars(self)["_seen"] = self._seen + len(run.block)
        return True
