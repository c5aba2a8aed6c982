from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from torch.utils.data import get_worker_info

from trainpipes._internal.checks import ColumnName, Count, Ge, IntArray, Natural, Seed, column_names
from trainpipes._internal.locks import cached_property
from trainpipes._internal.messages import need_columns, warn_once
from trainpipes.columns import packing
from trainpipes.columns.arrays import one_chunk
from trainpipes.columns.block import Block
from trainpipes.columns.columns import table_of
from trainpipes.columns.packing import best_window, fit_a_row, joint_window
from trainpipes.columns.run import Cursors, Run
from trainpipes.errors import ConfigError
from trainpipes.interfaces.held import CursorsOf, Held, around, opened
from trainpipes.interfaces.quarantine import LeftOut, OnError
from trainpipes.interfaces.read_columns import (
    at_row,
    check_beside,
    ids_of,
    names_of,
    numbers_of,
    row_at,
)
from trainpipes.interfaces.stage import Stage, Tally, made_once
from trainpipes.interfaces.stage_kinds import (
    CombiningSource,
    OpenBelow,
    PackingStage,
    RepeatStage,
    stages_within,
)
from trainpipes.stages.columns import Rename
from trainpipes.stages.token_ids import MaskTokens, padding_of
from trainpipes.stages.tokenizing import TakesTokenizer, TargetStage, Tokenizes, have_target

#: Tokens of a run: rows are made in small lots, so that only token ids wait.
LOT_TOKENS = 1 << 16
#: In a row's part (see ``Block``): where the place of its first token begins.
PIECE_BITS = 40


class _Window(NamedTuple):
    """Documents of some rows, placed; the positions of these rows, and how many were given."""

    block: Block
    documents: packing.Documents
    placing: packing.Placing
    cursors: CursorsOf
    used: int


class Pack(TakesTokenizer, TargetStage, PackingStage, takes="columns", depends_on={"place"}):
    """Pack documents into rows of a fixed length.

    Each row holds one or more documents, in fixed-size lists of int32, ``[max_length]``:

    - input_ids: the documents' tokens in turn, then padding
    - labels: input_ids, or the rows' own column "labels"; -100 on padding, and on the first token
      of each document unless ``mask_tokens`` made them
    - position_ids: from 0 in each document; 0 on padding
    - segment_ids: 1 on the row's first document, 2 on its second, ...; 0 on padding

    and the columns that ``along`` and ``keep`` name; others are left out, with a warning.
    ``pad_collate`` adds ``cu_seqlens`` and ``max_seqlen``. Unless ``method="concat"``, no document
    that would fit is split (Ding et al., arXiv 2404.10830), and the rows of a buffer come in an
    order drawn with ``seed``: anew every epoch if the chain shuffles. With ``.repeat().pack()``,
    and in a mix, a buffer ends where its documents' next epoch begins: documents of at most one
    row go on, in a row with some of that epoch.

    Args:
        max_length: tokens of a row.
        method: "best_fit": longest first, each into the row that it fills best; about 0.1 % of
            padding. "first_fit": in order, each into the first row with room; about 0.8 %.
            "concat": in turn, split where a row is full; no buffer.
        column: the documents' token ids: lists of integers.
        buffer_size: the most documents packed together. More leave less padding and start later.
        max_documents: the most documents in a row.
        overflow: for documents longer than a row: "split" into several, "truncate", "drop" (and
            count), or "raise".
        along: other columns of lists as long as those of ``column``, packed alike and padded with
            0.
        keep: other columns, such as an id: lists of the documents' values, a value for each number in
            segment_ids. ``pad_collate`` and ``collate`` give a list of these lists.
        on_error: for rows whose own "labels" are all -100; as in ``tokenize``.
        seed: for the order of a buffer's rows.
        pad_token_id: pads input_ids; by default the pad token of the ``tokenize`` before this
            stage, or 0. Must be given if a function tokenizes.
        tokenizer: made the ids that the rows hold already; gives the pad token. As in ``tokenize``.

    Raises:
        DataError: an id is null or beyond int32, a list is not as long as that of ``column``, a
            document is too long with ``overflow="raise"``, a row has no target with
            ``on_error="raise"``, or the rows' "attention_mask" is 0 somewhere.
        SchemaError: a column is not there, or holds no lists of numbers.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"input_ids": [[1, 2, 3], [4, 5, 6], [7]]}))
    >>> for row in rows.pack(4):
    ...     print(row["input_ids"], row["labels"], row["segment_ids"])
    [4, 5, 6, 0] [-100, 5, 6, -100] [1, 1, 1, 0]
    [1, 2, 3, 7] [-100, 2, 3, -100] [1, 1, 1, 2]
    """

    item = "packed row"

    max_length: Annotated[int, Ge(1, 2**31 - 1)]
    _: KW_ONLY
    method: Literal["concat", "first_fit", "best_fit"] = "best_fit"
    column: ColumnName = "input_ids"
    buffer_size: Count = 1024
    max_documents: Count | None = None
    overflow: Literal["split", "truncate", "drop", "raise"] = "split"
    along: Sequence[str] = ()
    keep: Sequence[str] = ()
    on_error: OnError | None = None
    seed: Seed = 0
    pad_token_id: Natural | None = None
    tokenizer: Any = None

    def check(self) -> None:
        _ = self._own  # whether it is there is said here
        taken = {*packing.PACKED, self.column}
        rule = (
            f"columns besides {self.column!r} and those that it makes ({', '.join(packing.PACKED)})"
        )
        for option in ("along", "keep"):
            names = self.options[option]
            several = isinstance(names, list | tuple)
            self._require(several, option, "a list of column names, [] for none")
            column_names(names, f"pack({option})", least=0)
            self._require(not taken & {*names}, option, rule, 'a column "labels" is packed anyway')
        self._require(not {*self.along} & {*self.keep}, "keep", "columns that along does not name")

    #: Whether it packs rows of ``repeat``, or there is none: rows go on over the joint of two epochs.
    _crosses: ClassVar[bool] = False
    #: Whether the rows of a window come in another order every epoch.
    _reorders: ClassVar[bool] = False
    _tokenize: ClassVar[Tokenizes | None] = None
    #: Whether labels are of the tokens at their own places, and not of the next ones.
    _masked: ClassVar[bool] = False

    def _resolve(self, below: Sequence[Stage]) -> Self:
        tokenize = self.tokenizes(below) if self.pad_token_id is None else None
        if tokenize is not None:
            tokenize.pads(f"{self}: the end of a row", "pack(pad_token_id=...)")
        crosses = any(isinstance(s, RepeatStage) or s.traits.endless for s in below)
        reorders = any(stage.traits.reorders for stage in below)
        masked = any(isinstance(stage, MaskTokens) for stage in stages_within(below))
        return self._resolved(
            _crosses=crosses, _reorders=reorders, _tokenize=tokenize, _masked=masked
        )

    @cached_property
    def fill_id(self) -> int:
        if self._tokenize is not None:
            return self._tokenize.pad_id
        return self.pad_token_id or 0

    def identity(self) -> dict[str, Any]:
        identity = {**super().identity(), "pad_token_id": self.fill_id}
        if not self.keep:
            del identity["keep"]
        return identity

    def open(self, below: OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
        at, used = opened(at)
        windows = self._joined if self.method == "concat" else self._fitted
        held = Held(self, below(at), alone=not self._crosses, joints=True)
        return self._packed(windows(held, used))

    def _packed(self, windows: Iterator[_Window]) -> Iterator[Run]:
        lot = max(1, LOT_TOKENS // self.max_length)
        for block, documents, placing, cursors, used in windows:
            kept = {name: one_chunk(table_of(block.data, self).column(name)) for name in self.keep}
            for first in range(used, len(placing), lot):
                stop = min(first + lot, len(placing))
                size, pad = self.max_length, self.fill_id
                table = packing.rows_of(documents, placing, first, stop, size, pad, self._masked)
                for name, values in kept.items():
                    lists = packing.lists_of(values, placing, first, stop)
                    table = table.append_column(name, lists)
                # Each row is known by its first piece's document and first token.
                piece = placing.bounds[first:stop]
                whose = block.take(placing.document[piece])
                part = whose.part + (placing.start[piece] << PIECE_BITS)
                rows = Block(table, whose.ids, epoch=whose.epoch, part=part)
                if self._inputs is not None and self._inputs.keeps_pieces:
                    rows.made_of = placing.pieces(first, stop, block)
                run = Run(rows, cursors(first, stop))
                if "labels" in documents.columns and self.on_error != "keep":
                    trains = have_target(*numbers_of(rows, "labels", self))
                    source_rows = rows.of_epoch(rows.epoch)
                    source_rows.made_of = placing.pieces(first, stop, block)
                    run = self.check_targets(run, trains, before=source_rows)
                yield run
                del run, rows, table  # their memory is free for the next run

    def _fitted(self, held: Held, used: int) -> Iterator[_Window]:
        size, least, most = self.buffer_size, 0, self.max_documents
        while held.fill(size, least):
            count = min(size, held.rows)
            block = held.waiting().block.slice(0, count)
            documents = self._documents(block)
            joints = held.joints(size)
            fits = fit_a_row(documents.lengths, joints, self.max_length, most)
            begun, end = around(joints, fits)
            if end is None and count < size and not held.ended:
                least = 2 * count  # a row holds documents of many epochs
                continue
            least = 0
            lengths = documents.lengths[:end]
            fit = packing.best_fit if self.method == "best_fit" else packing.first_fit
            if end is not None:
                count, placing = joint_window(lengths, self.max_length, most, fit, begun)
            elif self.method == "best_fit" and count == size:
                count, placing = best_window(lengths, self.max_length, most, begun)
            else:
                placing = packing.placed(lengths, self.max_length, most, fit, begun)
            self._count_dropped(documents, block, count)
            order, cursors = held.window(len(placing), count, used, "pack", self._reorders)
            yield _Window(block, documents, placing.take(order), cursors, used)
            used = 0

    def _joined(self, held: Held, used: int) -> Iterator[_Window]:
        needed = 1
        while held.fill(needed):
            run = held.waiting()
            documents = self._documents(run.block)
            lengths = documents.lengths
            held.check_used(used, lengths[0])
            limits = self.max_length, self.max_documents
            placing, edges = packing.concat(lengths, used, *limits, held.ended)
            spent = held.rows
            needed = spent + 1 + spent // 2  # a row may be of very many documents
            if len(placing):
                ends = np.cumsum(lengths)
                document = np.searchsorted(ends, edges, side="right")
                tokens = edges - np.append(ends - lengths, ends[-1])[document]
                spent, used = int(document[-1]), int(tokens[-1])
                yield _Window(run.block, documents, placing, _after(run, document, tokens), 0)
            elif not held.ended and lengths.any():
                continue
            else:  # no token waits
                used = 0
            needed = 1
            self._count_dropped(documents, run.block, spent)
            held.drop(spent, len(placing) > 0)

    def _documents(self, block: Block) -> packing.Documents:
        ids, lengths = ids_of(block, self.column, self, np.int32)
        columns = {"input_ids": ids.astype(np.int32, copy=False)}
        names = names_of(block, self)
        if {*packing.PACKED} <= {*names}:
            way = "leave one pack() out"
            raise ConfigError(f"{self} takes documents, and these rows are packed already: {way}")
        need_columns(names, self.keep, self)
        if (padding := padding_of(block, self.column, lengths, self)) is not None:
            way = 'tokenize without padding, or leave the mask out with drop_columns("attention_mask")'
            said = (
                f'"attention_mask" must be 1 on all tokens of a document, got 0 on padding; {way}'
            )
            row = row_at(int(np.argmax(padding)), lengths)
            raise at_row(f"{self}: {said}", self, block.ids[row])
        self._warn_of_others(names)
        label_columns = ["labels"] if "labels" in names else []
        for name in [*label_columns, *self.along]:
            if name == "labels":
                values, value_lengths = ids_of(block, name, self, np.int32)
                values = values.astype(np.int32, copy=False)
            else:
                values, value_lengths = numbers_of(block, name, self)
            check_beside(block.ids, name, value_lengths, self.column, lengths, self)
            columns[name] = values
        longer, cut = lengths > self.max_length, self._kept_lengths(self.column, lengths)
        if self.overflow == "raise" and longer.any():
            row = int(np.argmax(longer))
            way = 'raise max_length, or pass overflow="split", "truncate" or "drop"'
            rule = f"documents must have at most {self.max_length} tokens, got one of"
            raise at_row(f"{self}: {rule} {lengths[row]}; {way}", self, block.ids[row])
        return packing.Documents(columns, np.cumsum(lengths) - lengths, cut, lengths)

    def _kept_lengths(self, column: str, lengths: IntArray) -> IntArray:
        if self.overflow == "drop":
            return np.where(lengths > self.max_length, 0, lengths)
        return np.minimum(lengths, self.max_length) if self.overflow == "truncate" else lengths

    def others(self, names: Sequence[str] | None) -> str:
        """What is said of columns that packed rows lack; "" if there are none. None: not known."""
        columns = [*self.along, *self.keep]
        if names is None:
            ways = "keep=[...] makes lists of the values of others"
            return f"{self} gives {', '.join(map(repr, [*packing.PACKED, *columns]))}: {ways}"
        known = {*packing.PACKED, "attention_mask", self.column, *columns}
        lost = [name for name in names if name not in known]
        if not lost:
            return ""
        advice = f"keep={[*self.keep, *lost]} makes lists of their values"
        ways = f"{advice}; drop_columns() before pack() leaves them out without this warning"
        return f"{self} leaves out {', '.join(map(repr, lost))}: {ways}"

    def _warn_of_others(self, names: Sequence[str]) -> None:
        worker = get_worker_info()
        if (worker is None or worker.id == 0) and (said := self.others(names)):
            warn_once(said)

    @made_once
    def _dropped(self) -> LeftOut:
        return LeftOut(self, f"longer than {self.max_length:,} tokens")

    def _count_dropped(self, documents: packing.Documents, block: Block, count: int) -> None:
        if self.overflow == "drop" and count:
            lost = documents.full_lengths - documents.lengths
            self._dropped.drop(block, lost[:count])

    def _tallies(self) -> Sequence[Tally]:
        return self._dropped, *super()._tallies()


def _after(run: Run, document: IntArray, tokens: IntArray) -> CursorsOf:
    """Positions after tokens of documents."""
    states = [{"below": run.cursors.state(k)} for k in document.tolist()]

    def cursors(first: int, stop: int) -> Cursors:
        which = np.arange(stop + 1 - first, dtype=np.int64)
        return Cursors(tuple(states[first : stop + 1]), which, tokens[first : stop + 1])

    return cursors


def kept_columns(stages: Sequence[Stage]) -> set[str]:
    """Columns of lists that packed rows keep, by the names that they have after these stages."""
    names: set[str] = set()
    for stage in stages:
        if isinstance(stage, CombiningSource):
            names.update(*map(kept_columns, stage.chains))
        elif isinstance(stage, Pack):
            names.update(stage.keep)
        elif isinstance(stage, Rename):
            names = {stage.names.get(name, name) for name in names}
    return names


def add_sequences(batch: dict[str, Any]) -> None:
    """Add ``cu_seqlens`` and ``max_seqlen`` to a batch that has ``segment_ids``, ``[B, L]``.

    >>> batch = {"segment_ids": torch.tensor([[1, 1, 2, 0], [1, 1, 1, 1]])}
    >>> add_sequences(batch)
    >>> batch["cu_seqlens"], batch["max_seqlen"]
    (tensor([0, 2, 3, 4, 8], dtype=torch.int32), 4)
    """
    segments = batch["segment_ids"].numpy()
    first = np.ones(segments.shape, dtype=np.bool_)
    np.not_equal(segments[:, 1:], segments[:, :-1], out=first[:, 1:])
    edges = np.append(np.flatnonzero(first), segments.size).astype(np.int32)
    batch["cu_seqlens"] = torch.from_numpy(edges)
    batch["max_seqlen"] = int(np.diff(edges).max(initial=0))
