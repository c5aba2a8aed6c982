"""Stages on token ids that rows hold already."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from trainpipes._internal import checks
from trainpipes._internal.checks import IntArray
from trainpipes._internal.locks import cached_property
from trainpipes._internal.messages import warn_once
from trainpipes.columns.arrays import is_list, list_array
from trainpipes.columns.block import Block
from trainpipes.columns.packing import IGNORED
from trainpipes.columns.rectangles import Side, cut_rows
from trainpipes.columns.run import Run
from trainpipes.columns.types import fixed_shape
from trainpipes.engine.planning.row_names import HashArray, mix, unit
from trainpipes.errors import ConfigError
from trainpipes.interfaces.quarantine import OnError
from trainpipes.interfaces.read_columns import (
    check_beside,
    ids_of,
    label_dtype,
    names_of,
    numbers_of,
)
from trainpipes.interfaces.stage import Stage
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.order.permutation import random_key
from trainpipes.stages.columns import row_table, with_column
from trainpipes.stages.tokenizing import (
    Flags,
    TakesTokenizer,
    TargetStage,
    Tokenizes,
    have_target,
)
from trainpipes.tokenizers.engine import MASKS, begins_word

#: What is cut where nothing is said, if it is there.
USUAL = ("input_ids", "labels", "attention_mask", "token_type_ids")


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xD1B54A32D192ED03)
_THIRD = np.uint64(0xABC98388FB8FAC03)


class Truncate(TargetStage, RunStage, takes="columns"):
    """Cut lists of numbers to a length.

    For text use ``tokenize(max_length=...)``, which keeps special tokens.

    Args:
        max_length: the most numbers that a list keeps.
        columns: the columns to cut; by default "input_ids", and "labels", "attention_mask" and
            "token_type_ids" if they are there.
        truncation_side: "right" cuts the end off, "left" the start.
        on_error: for rows whose "labels" are then all -100; as in ``tokenize``.

    Raises:
        DataError: a null, or with ``on_error="raise"`` a row without a target.
        SchemaError: a column is not there, or holds no lists of numbers.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"input_ids": [[1, 2, 3], [4]]}))
    >>> list(rows.truncate(2, truncation_side="left"))
    [{'input_ids': [2, 3]}, {'input_ids': [4]}]
    """

    thread_safe = True

    max_length: checks.Natural
    _: KW_ONLY
    columns: checks.ColumnNames | None = None
    truncation_side: Side = "right"
    on_error: OnError | None = None

    def _kept_lengths(self, column: str, lengths: IntArray) -> IntArray:
        cuts = self.columns is None or column in checks.column_names(
            self.columns, "truncate(columns)"
        )
        return np.minimum(lengths, self.max_length) if cuts else lengths

    def process(self, run: Run) -> Run:
        self.refuse_batches(run)
        block, table = row_table(run, self)
        usual = [name for name in USUAL if name in table.column_names] or ["input_ids"]
        if self.columns is not None:
            usual = checks.column_names(self.columns, "truncate(columns)")
        trains, cut = np.ones(len(block), dtype=np.bool_), np.zeros(len(block), dtype=np.bool_)
        for name in usual:
            values, lengths = numbers_of(block, name, self)
            longer = lengths > self.max_length
            if longer.any():
                offsets = np.concatenate([[0], np.cumsum(lengths)])
                values, lengths = cut_rows(values, offsets, self.max_length, self.truncation_side)
            kind = table.schema.field(name).type
            if longer.any() or not (is_list(kind) or fixed_shape(kind)):
                lists = list_array(values, lengths)  # of one type, also where no row is longer
                lists = lists.cast(kind) if is_list(kind) else lists
                field = table.schema.field(name).with_type(lists.type)
                table = with_column(table, field, lists)
            if name == "labels" and (longer.any() or self.on_error):
                trains, cut = have_target(values, lengths), longer
                if self.on_error is None:  # the warning is about rows that are cut here
                    trains |= ~longer
        run = run.with_block(block if table is block.data else block.with_data(table))
        return self.check_targets(run, trains, cut, before=block)


def padding_of(block: Block, column: str, lengths: IntArray, stage: Stage) -> Flags | None:
    """Which ids are padding by the rows' own "attention_mask", bool ``[ids]``; None if none is."""
    names = names_of(block, stage)
    if "attention_mask" not in names or (column != "input_ids" and "input_ids" in names):
        return None  # it is of other ids
    mask, mask_lengths = numbers_of(block, "attention_mask", stage)
    check_beside(block.ids, "attention_mask", mask_lengths, column, lengths, stage)
    return None if mask.all() else mask == 0


class AddLabels(RunStage, takes="columns"):
    """Add a column "labels": the token ids, or -100 where nothing is to be predicted, as where the
    rows' "attention_mask" is 0.

    Labels are not shifted: the label at position t is the token at t, which the logits at t - 1
    predict.

    Args:
        column: the token ids.
        where: a column of lists of numbers or bools, as long as those of ``column``: an id is a
            label where it is not 0. None: every id.
        ignore: ids that get -100, such as special tokens.

    Raises:
        DataError: a null, or lists of different lengths.
        SchemaError: a column is not there, or holds no lists of integers; or "labels" already is
            there.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"input_ids": [[5, 6, 7, 0]], "answer": [[0, 1, 1, 0]]}))
    >>> next(iter(rows.add_labels(where="answer").select("labels")))
    {'labels': [-100, 6, 7, -100]}
    """

    column: checks.ColumnName = "input_ids"
    _: KW_ONLY
    where: checks.ColumnName | None = None
    ignore: int | Sequence[int] = ()

    def check(self) -> None:
        ids: Any = [self.ignore] if isinstance(self.ignore, int) else self.ignore
        self._require(checks.several(ids), "ignore", "a token id, or several")
        for token in ids:
            checks.whole_number(token, 0, "add_labels(ignore)")
        self._set(ignore=list(ids) or ())

    def process(self, run: Run) -> Run:
        needs = [name for name in (self.column, self.where) if name is not None]
        block, table = row_table(run, self, needs, ["labels"])
        values, lengths = ids_of(block, self.column, self)
        labels = values.astype(label_dtype(values))
        if self.where is not None:
            flags, flag_lengths = numbers_of(block, self.where, self)
            check_beside(block.ids, self.where, flag_lengths, self.column, lengths, self)
            labels[flags == 0] = IGNORED
        if self.ignore:
            labels[np.isin(values, self.ignore)] = IGNORED
        if (padding := padding_of(block, self.column, lengths, self)) is not None:
            labels[padding] = IGNORED
        labelled = table.append_column("labels", list_array(labels, lengths))
        return run.with_block(block.with_data(labelled))


def warn_of_padded_labels(stage: Stage, name: str, values: npt.NDArray[Any], pad: float) -> None:
    """Warn where a column has -100, as labels do, and is padded with another value."""
    below = values[values < 0] if values.dtype.kind == "i" else values[:0]
    if len(below) and (below == IGNORED).all():  # of sound, other values are negative, too
        said = f"{stage}: column {name!r} holds {IGNORED}, as labels do, and is padded with {pad}"
        way = f"pass columns={{{name!r}: {{'value': {IGNORED}}}}}, or the value that is meant"
        warn_once(f"{said}, which is in the loss: {way}")


class Known(NamedTuple):
    """What masking knows of a tokenizer; ``begins``: where words begin, bool ``[tokens]``."""

    mask: int
    size: int
    special: IntArray
    begins: npt.NDArray[np.bool_] | None


class MaskTokens(TakesTokenizer, RunStage, takes="columns", depends_on={"row", "epoch"}):
    """Mask tokens for masked language modeling (Devlin et al., "BERT", 2019, section 3.1).

    Of the chosen tokens, 80 % become the mask token, 10 % a random token, and 10 % stay. A new
    column "labels" holds the chosen tokens' ids, and -100 elsewhere. Each token (or whole word) is
    chosen by seed, epoch, row and place alone; none where the rows' "attention_mask" is 0.

    Args:
        mlm_probability: of choosing a token, or a word, 0 to 1.
        column: the token ids.
        whole_words: choose all tokens of a word. In the vocabulary "##" continues a word, "Ġ" and
            "▁" begin a word.
        tokenizer: gives the mask token and the special tokens; as in ``tokenize``. By default that
            of the ``tokenize`` before this stage.
        mask_token_id: the mask token; by default the tokenizer's.
        special_ids: tokens never chosen; by default the tokenizer's special ones.
        vocab_size: random tokens are drawn below this; by default the tokenizer's.
        mask_replace_prob: share of the chosen tokens that become the mask token, 0 to 1.
        random_replace_prob: share of them that become random ones, 0 to 1. The others stay.
        seed: for the choice.

    Raises:
        ConfigError: the tokenizer has no mask token, or no vocabulary to tell words by.
        DataError: a null.
        SchemaError: the column is not there, or holds no lists of numbers; or "labels" already is
            there.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"input_ids": [[5, 6, 7, 8, 9, 10, 11, 12, 13, 0]]}))
    >>> pipe = rows.mask_tokens(0.3, mask_token_id=99, special_ids=[0], vocab_size=90)
    >>> row = next(iter(pipe))
    >>> row["input_ids"]
    [5, 99, 7, 8, 9, 99, 11, 99, 99, 0]
    >>> row["labels"]
    [-100, 6, -100, -100, -100, 10, -100, 12, 13, -100]
    """

    thread_safe = True

    mlm_probability: checks.Share = 0.15
    _: KW_ONLY
    column: checks.ColumnName = "input_ids"
    whole_words: bool = False
    tokenizer: Any = None
    mask_token_id: checks.Natural | None = None
    special_ids: Annotated[Sequence[int], checks.Each(checks.Ge(0))] | None = None
    vocab_size: checks.Count | None = None
    mask_replace_prob: checks.Share = 0.8
    random_replace_prob: checks.Share = 0.1
    seed: checks.Seed = 0

    def check(self) -> None:
        both = self.mask_replace_prob, self.random_replace_prob
        option = "mask_tokens(mask_replace_prob, random_replace_prob)"
        checks.require(sum(both) <= 1, option, "at most 1 together", both)
        _ = self._own  # whether it is there is said here

    _below: ClassVar[Tokenizes | None] = None

    def _resolve(self, below: Sequence[Stage]) -> Self:
        tokenizer, names = self.tokenizes(below), ("mask_token_id", "special_ids", "vocab_size")
        lacking = [name for name in names if self.options[name] is None]
        lacking += ["whole_words"] if self.whole_words else []
        if tokenizer is None and lacking:
            why = f"a tokenizer to tell {', '.join(lacking)}, and there is no tokenize() before it"
            raise ConfigError(f"{self} needs {why}: pass tokenizer=..., or give these options")
        return self._resolved(_below=tokenizer)

    @property
    def _engine(self) -> Any:
        tokenizer = self._own or self._below
        return None if tokenizer is None else tokenizer.maker

    @cached_property
    def _salt(self) -> HashArray:
        return random_key(self.seed, "mask_tokens")[:1]

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        identity.pop("special_ids", None)
        mask, size, special, begins = self._known
        shaping = special.tobytes() + (b"" if begins is None else np.packbits(begins).tobytes())
        tokens = hashlib.sha256(shaping).hexdigest()[:16]
        return {**identity, "mask_token_id": mask, "vocab_size": size, "tokens": tokens}

    @cached_property
    def _known(self) -> Known:
        engine, mask, special = self._engine, self.mask_token_id, self.special_ids
        if mask is None:
            mask = engine.special.mask
        if mask is None:
            mask = next((i for i in map(engine.token_id, MASKS) if i is not None), None)
        if mask is None:
            why = f"the mask token, and {engine} has none of {', '.join(MASKS)}"
            raise ConfigError(
                f"{self} needs {why}: pass mask_token_id=..., or take a tokenizer that has one"
            )
        special = engine.special.all_ids() if special is None else special
        size, begins = self.vocab_size, None
        pieces: dict[str, int] = {}
        if size is None or self.whole_words:
            pieces = (engine and engine.pieces()) or {}
            if not pieces:
                why = f"the tokenizer's vocabulary, which {engine} does not show"
                way = "pass vocab_size and special_ids, and leave whole_words out"
                raise ConfigError(f"{self} needs {why}: {way}")
            size = max(pieces.values()) + 1 if size is None else size
        if self.whole_words:
            begins = begins_word(pieces)
            if begins is None:
                why = f"the vocabulary of {engine} does not mark where words begin"
                raise ConfigError(f"{self}: {why}, so that none are found: leave whole_words out")
        return Known(mask, size, np.unique(np.array([*special, mask], dtype=np.int64)), begins)

    # The work

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self, [self.column], ["labels"])
        values, lengths = ids_of(block, self.column, self)
        ids, labels = self._hidden(block, values, lengths)
        table = with_column(table, self.column, list_array(ids, lengths))
        table = table.append_column("labels", list_array(labels, lengths))
        return run.with_block(block.with_data(table))

    def _hidden(self, block: Block, values: Any, lengths: IntArray) -> tuple[Any, Any]:
        (mask, size, hidden, begins), first = self._known, np.arange(len(values), dtype=np.int64)
        starts, special = np.cumsum(lengths) - lengths, np.isin(values, hidden)
        place = first - np.repeat(starts, lengths)
        if (padding := padding_of(block, self.column, lengths, self)) is not None:
            special |= padding
        if begins is not None:
            first = word_of(
                begins[np.minimum(values, len(begins) - 1)], special, starts[lengths > 0]
            )
        key = np.repeat(self._keys(block), lengths)
        counter = (place + 1).astype(np.uint64) * _GOLDEN
        draws = unit(mix(key ^ mix(counter[first])))
        chosen = np.flatnonzero((draws < self.mlm_probability) & ~special)
        labels = np.full(len(values), IGNORED, dtype=label_dtype(values))
        labels[chosen] = values[chosen]
        hashes = mix(key[chosen] ^ mix(counter[chosen] ^ _SECOND))
        kind = unit(hashes)
        # As wide as the mask and every token of the vocabulary need, not as the column was.
        largest = np.min_scalar_type(max(mask, size - 1))
        masked = values.astype(np.promote_types(values.dtype, largest))
        masked[chosen[kind >= 1 - self.mask_replace_prob]] = mask
        other = kind < self.random_replace_prob
        drawn = unit(mix(hashes[other] ^ _THIRD)) * size
        masked[chosen[other]] = drawn.astype(masked.dtype)
        return masked, labels

    def _keys(self, block: Block) -> HashArray:
        rows = block.ids.astype(np.uint64) * _GOLDEN
        for number in (block.epoch, block.part):
            rows = mix(rows + self._salt) ^ np.asarray(number, dtype=np.int64).astype(np.uint64)
        return mix(rows ^ self._salt)


def word_of(new: Any, special: Any, starts: IntArray) -> IntArray:
    """Of each token, the place of the first of its word: ``new`` is where words begin, bool
    ``[tokens]``, beside special tokens and rows' starts.
    """
    new = new | special
    new[1:] |= special[:-1]
    new[starts] = True
    firsts: IntArray = np.flatnonzero(new)[np.cumsum(new) - 1]
    return firsts
