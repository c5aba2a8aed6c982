from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import ColumnName, Count, Ge, Natural, Seed, column_names
from trainpipes.columns.block import Block
from trainpipes.columns.run import Cursors, Run, RunSource
from trainpipes.engine.layout import IntArray, permutation
from trainpipes.errors import ConfigError
from trainpipes.kinds.blame import at_row
from trainpipes.kinds.empty_epoch_guard import EmptyRounds
from trainpipes.kinds.stage import Stage, made_once
from trainpipes.kinds.stage_kinds import OpenBelow, RegroupStage
from trainpipes.stages.held import MOST_EPOCHS, Held, cursors_in, misplaced
from trainpipes.stages.pack_fit import (
    PACKED,
    Documents,
    Overflow,
    Placing,
    best_fit,
    best_window,
    concat,
    first_fit,
    placed,
    rows_of,
)  # fmt: skip
from trainpipes.stages.targets import LeftOut, OnError, Targets, have_target
from trainpipes.stages.token_columns import check_beside, ids_of, names_of, numbers_of
from trainpipes.stages.tokenizing import TakesTokenizer, Tokenizes

Method = Literal["concat", "first_fit", "best_fit"]

#: Tokens of a run: rows are made in small lots, so that only token ids wait.
LOT_TOKENS = 1 << 16
#: Rows that a window over several epochs is to fill, however many these are: only its last row has an empty
#: end.
LEAST_ROWS = 8
#: In a row's part (see ``Block``): where the place of its first token begins.
PIECE_BITS = 40


class Pack(TakesTokenizer, RegroupStage):
    """Pack documents into rows of one length.

    Each row holds one or more documents, in fixed-size lists of int32, ``[max_length]``:

    - input_ids: the documents' tokens one after the other, then padding
    - labels: input_ids, or the rows' own column "labels"; -100 on the first token of each document
      and on padding
    - position_ids: from 0 in each document; 0 on padding
    - segment_ids: 1 on the row's first document, 2 on its second, ...; 0 on padding

    and the columns that ``along`` names. ``pad_collate`` adds ``cu_seqlens`` and ``max_seqlen``.
    Unless ``method="concat"``, no document that would fit is split (Ding et al., arXiv 2404.10830),
    and the rows of a buffer come in an order drawn with ``seed``: anew every epoch if the chain
    shuffles. With ``.repeat().pack()`` a buffer may hold documents of 8 epochs, or of as many as
    fill 8 rows.

    Args:
        max_length: tokens of a row.
        method: "best_fit": longest first, each into the row that it fills best; about 0.1 % of
            padding. "first_fit": in order, each into the first row with room; about 0.8 %.
            "concat": one after the other, split where a row is full; no buffer.
        column: the documents' token ids: lists of integers.
        buffer_size: the most documents packed together. More leave less padding and start later.
        max_documents: the most documents in a row.
        overflow: for documents longer than a row: "split" into several, "truncate", "drop" (and
            count), or "raise".
        along: other columns of lists as long as those of ``column``, packed alike and padded with
            0.
        on_error: for rows whose own "labels" are all -100; as in ``tokenize``.
        seed: for the order of a buffer's rows.
        pad_token_id: pads input_ids; by default the pad token of the ``tokenize`` before this
            stage, or 0. Must be given if a function tokenizes.
        tokenizer: made the ids that the rows hold already; gives the pad token. As in ``tokenize``.

    Raises:
        DataError: an id is null or beyond int32, a list is not as long as that of ``column``, a
            document is too long with ``overflow="raise"``, or a row has no target with
            ``on_error="raise"``.
        SchemaError: a column is not there, or holds no lists of numbers.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"input_ids": [[1, 2, 3], [4, 5, 6], [7]]}))
    >>> for row in rows.pack(4):
    ...     print(row["input_ids"], row["labels"], row["segment_ids"])
    [4, 5, 6, 0] [-100, 5, 6, -100] [1, 1, 1, 0]
    [1, 2, 3, 7] [-100, 2, 3, -100] [1, 1, 1, 2]
    """

    role = "pack"
    needs_columns = True
    keeps_rows = False
    by_place = True
    asks_inputs = True

    max_length: Annotated[int, Ge(1, 2**31 - 1)]
    _: KW_ONLY
    method: Method = "best_fit"
    column: ColumnName = "input_ids"
    buffer_size: Count = 1024
    max_documents: Count | None = None
    overflow: Overflow = "split"
    along: Sequence[str] = ()
    on_error: OnError | None = None
    seed: Seed = 0
    pad_token_id: Natural | None = None
    tokenizer: Any = None

    def check(self) -> None:
        _ = self._own  # whether it is there is said here
        self._require(not isinstance(self.along, str), "along", "a list of column names")
        column_names(self.along, "pack(along)", least=0)
        taken = {*self.along} & {*PACKED, self.column}
        rule = f"columns besides {self.column!r} and those that it makes ({', '.join(PACKED)})"
        self._require(not taken, "along", rule, 'a column "labels" is packed anyway')

    #: Whether a window continues over the joint of two epochs, or there is none.
    _crosses: ClassVar[bool] = False
    #: Whether the rows of a window come in another order every epoch.
    _reorders: ClassVar[bool] = False
    _tokenize: ClassVar[Tokenizes | None] = None

    def resolve(self, below: Sequence[Stage]) -> Self:
        tokenize = self.tokenizes(below) if self.pad_token_id is None else None
        if tokenize is not None and not tokenize.says_pad_id:
            raise ConfigError(
                f"{self} fills rows up with the tokenizer's pad token, and {tokenize.maker} is a "
                "function, which does not tell its pad token: give pack(pad_token_id=...)"
            )
        crosses = any(s.role == "repeat" or getattr(s, "endless", False) for s in below)
        reorders = any(stage.reorders for stage in below)
        return self.resolved(_crosses=crosses, _reorders=reorders, _tokenize=tokenize)

    @cached_property
    def fill_id(self) -> int:
        if self._tokenize is not None:
            return self._tokenize.pad_id
        return self.pad_token_id or 0

    def identity(self) -> dict[str, Any]:
        found = {**super().identity(), "pad_token_id": self.fill_id}
        if self.on_error != "skip":  # nothing else shapes the rows
            found.pop("on_error", None)
        return found

    def open(self, below: OpenBelow, at: dict[str, Any]) -> RunSource:
        rows, used = (at["below"], at["row"]) if "below" in at else (at, 0)
        if self.method == "concat":  # whose rows are full, of however many epochs
            held = Held(below(rows), epochs=math.inf if self._crosses else 1)
            return _Concatenated(self, held, used)
        epochs = MOST_EPOCHS if self._crosses else 1
        return _Fitted(self, Held(below(rows), epochs, rounds=MOST_EPOCHS), used)

    #: Whether it says of rows what they are made of.
    keeps_pieces: ClassVar[bool] = False

    def keep_pieces(self) -> None:
        object.__setattr__(self, "keeps_pieces", True)

    def documents(self, block: Block) -> Documents:
        ids, lengths = ids_of(block, self.column, self, np.int32)
        columns = {"input_ids": ids.astype(np.int32, copy=False)}
        given = ["labels"] if "labels" in names_of(block, self) else []
        for name in [*given, *self.along]:
            if name == "labels":
                values, own = ids_of(block, name, self, np.int32)
                values = values.astype(np.int32, copy=False)
            else:
                values, own = numbers_of(block, name, self)
            check_beside(block, name, own, self.column, lengths, self)
            columns[name] = values
        starts = np.cumsum(lengths) - lengths
        longer = lengths > self.max_length
        if self.overflow == "split" or not longer.any():
            return Documents(columns, starts, lengths)
        if self.overflow == "drop":
            dropped = np.where(longer, lengths, 0)
            return Documents(columns, starts, lengths - dropped, dropped)
        if self.overflow == "raise":
            row = int(np.argmax(longer))
            way = 'raise max_length, or pass overflow="split", "truncate" or "drop"'
            rule = (
                f"documents must have at most {self.max_length} tokens, got one of {lengths[row]}"
            )
            raise at_row(f"{self}: {rule}; {way}", self, block.ids[row])
        return Documents(columns, starts, np.minimum(lengths, self.max_length))

    @made_once
    def _dropped(self) -> LeftOut:
        return LeftOut(self, f"longer than {self.max_length:,} tokens")

    def used_up(self, documents: Documents, ids: IntArray, count: int) -> None:
        if self.overflow == "drop" and count:
            lost = np.zeros(count, np.int64) if documents.dropped is None else documents.dropped
            self._dropped.add(ids[:count], lost[:count])

    @made_once
    def _targets(self) -> Targets:
        return Targets(self, f"raise max_length={self.max_length}", "packed row")

    def with_targets(self, run: Run) -> Run:
        table = run.block.data
        if not self._targets.asked_for or not isinstance(table, pa.Table):
            return run
        labels, lengths = numbers_of(run.block, "labels", self)
        return self._targets.check(run, have_target(labels, lengths))

    def report(self) -> str:
        dropped = str(self._dropped) if self._dropped.documents else ""
        return "; ".join(filter(None, (dropped, str(self._targets))))


class _Packer(ABC):
    def __init__(self, stage: Pack, held: Held, used: int) -> None:
        self._stage, self._held, self._used = stage, held, used
        self._row = 0
        self._placing: Placing | None = None
        self._lot = max(1, LOT_TOKENS // stage.max_length)

    def next_run(self) -> Run:
        rounds = EmptyRounds()
        while True:
            run = self._next_rows()
            if "labels" in self._documents.columns:
                run = self._stage.with_targets(run)
            if len(run):
                return run
            rounds.saw(run)
            rounds.check(self._stage)

    def _next_rows(self) -> Run:
        stage = self._stage
        if self._placing is None or self._row == len(self._placing):
            self._held.drop(self._spent)
            if self._spent:
                stage.used_up(self._documents, self._from.ids, self._spent)
            self._spent, self._placing = 0, None
            self._place()
        placing = self._placing
        assert placing is not None
        first, stop = self._row, min(self._row + self._lot, len(placing))
        table = rows_of(self._documents, placing, first, stop, stage.max_length, stage.fill_id)
        rows = self._rows_of(placing, first, stop, table)
        self._row = stop
        return Run(rows, self._cursors(first, stop))

    def _rows_of(self, placing: Placing, first: int, stop: int, table: pa.Table) -> Block:
        """Rows, each known by its first piece's document and first token."""
        piece = placing.bounds[first:stop]
        whose = self._from.take(placing.document[piece])
        part = whose.part + (placing.start[piece] << PIECE_BITS)
        found = Block(table, whose.ids, epoch=whose.epoch, part=part)
        if self._stage.keeps_pieces:
            found.made_of = placing.pieces(first, stop, self._from)
        return found

    _spent = 0  # documents that the rows at hand use up
    _documents: Documents
    _from: Block  # the rows that the documents are of

    @abstractmethod
    def _place(self) -> None:
        """Place the next documents: one row or more; StopIteration at the end."""

    @abstractmethod
    def _cursors(self, first: int, stop: int) -> Cursors:
        """Positions before row ``first``, and after each row up to ``stop``."""


class _Fitted(_Packer):
    def _place(self) -> None:
        stage, held, least = self._stage, self._held, 0
        while held.fill(stage.buffer_size, least):
            run = held.waiting()
            count = min(stage.buffer_size, held.rows)
            self._from = run.block.slice(0, count)
            self._documents = stage.documents(self._from)
            lengths, most = self._documents.lengths, stage.max_documents
            tokens = int(lengths.sum())
            is_open = stage._crosses and held.more_follow and count < stage.buffer_size
            if is_open and 0 < tokens < LEAST_ROWS * stage.max_length:
                least = 2 * count
                continue
            least = 0
            if stage.method == "first_fit":
                found = placed(lengths, stage.max_length, most, first_fit)
            elif count < stage.buffer_size:  # an epoch's end: all that is left
                found = placed(lengths, stage.max_length, most, best_fit)
            else:
                count, found = best_window(lengths, stage.max_length, most)
            held.gave(len(found) > 0, stage)
            if self._used and self._used >= len(found):
                raise misplaced(stage, self._used)
            if len(found):
                epoch = held.epoch if stage._reorders else 0
                order = permutation(len(found), stage.seed, "pack", epoch, int(self._from.ids[0]))
                self._placing, self._spent = found.take(order), count
                self._ends = held.ends(count)
                self._row, self._used = self._used, 0
                return
            held.drop(count)
            stage.used_up(self._documents, self._from.ids, count)
        raise StopIteration

    def _cursors(self, first: int, stop: int) -> Cursors:
        assert self._placing is not None
        return cursors_in(self._ends, first, stop, len(self._placing))


class _Concatenated(_Packer):
    def _place(self) -> None:
        stage, held = self._stage, self._held
        needed = 1
        while held.fill(needed):
            run = held.waiting()
            self._from = run.block
            self._documents = stage.documents(run.block)
            lengths = self._documents.lengths
            if self._used and self._used >= lengths[0]:
                raise misplaced(stage, self._used)
            found, edges = concat(
                lengths, self._used, stage.max_length, stage.max_documents, held.closed
            )
            if len(found):
                held.gave(True, stage)
                ends = np.cumsum(lengths)
                document = np.searchsorted(ends, edges, side="right")
                begins = np.append(ends - lengths, ends[-1])
                self._states = [{"below": run.cursors.state(k)} for k in document.tolist()]
                self._tokens = edges - begins[document]
                self._placing, self._spent = found, int(document[-1])
                self._row, self._used = 0, int(self._tokens[-1])
                return
            needed = held.rows + 1 + held.rows // 2  # a row may be of very many documents
            if held.closed or not lengths.any():  # no token waits
                held.gave(False, stage)
                stage.used_up(self._documents, self._from.ids, held.rows)
                held.drop(held.rows)
                self._used, needed = 0, 1
        raise StopIteration

    def _cursors(self, first: int, stop: int) -> Cursors:
        which = np.arange(stop + 1 - first, dtype=np.int64)
        return Cursors(tuple(self._states[first : stop + 1]), which, self._tokens[first : stop + 1])
