from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import KW_ONLY
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from trainpipes._internal.checks import ColumnName, Count, Each, Ge, Natural, Seed, Share, require
from trainpipes._internal.messages import need_columns
from trainpipes.columns.arrays import list_array
from trainpipes.columns.block import Block
from trainpipes.columns.run import Run
from trainpipes.engine.layout import IntArray, random_key
from trainpipes.errors import ConfigError
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.stages.columns import refuse_taken, row_table
from trainpipes.stages.row_hash import HashArray, mix, unit
from trainpipes.stages.targets import IGNORED
from trainpipes.stages.token_columns import ids_of, label_dtype
from trainpipes.stages.tokenizing import TakesTokenizer, Tokenizes
from trainpipes.tokenizers.engine import MASKS, Engine, begins_word

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xD1B54A32D192ED03)
_THIRD = np.uint64(0xABC98388FB8FAC03)


class MaskTokens(TakesTokenizer, RunStage):
    """Mask tokens for masked language modeling (Devlin et al., "BERT", 2019, section 3.1).

    Of the chosen tokens, 80 % become the mask token, 10 % a random token, and 10 % stay. A new
    column "labels" holds the chosen tokens' ids, and -100 elsewhere. Each token (or whole word) is
    chosen by seed, epoch, row and place alone.

    Args:
        mlm_probability: of choosing a token, or a word, 0 to 1.
        column: the token ids.
        whole_words: choose all tokens of a word. In the vocabulary "##" continues a word, "Ġ" and
            "▁" begin one.
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
    needs_columns = True
    by_row = True
    by_epoch = True

    mlm_probability: Share = 0.15
    _: KW_ONLY
    column: ColumnName = "input_ids"
    whole_words: bool = False
    tokenizer: Any = None
    mask_token_id: Natural | None = None
    special_ids: Annotated[Sequence[int], Each(Ge(0))] | None = None
    vocab_size: Count | None = None
    mask_replace_prob: Share = 0.8
    random_replace_prob: Share = 0.1
    seed: Seed = 0

    def check(self) -> None:
        both = self.mask_replace_prob, self.random_replace_prob
        option = "mask_tokens(mask_replace_prob, random_replace_prob)"
        require(sum(both) <= 1, option, "at most 1 together", both)
        _ = self._own  # whether it is there is said here

    _below: ClassVar[Tokenizes | None] = None

    def resolve(self, below: Sequence[Stage]) -> Self:
        found, names = self.tokenizes(below), ("mask_token_id", "special_ids", "vocab_size")
        lacking = [name for name in names if self.options[name] is None]
        lacking += ["whole_words"] if self.whole_words else []
        if found is None and lacking:
            raise ConfigError(
                f"{self} needs a tokenizer to tell {', '.join(lacking)}, and there is no tokenize() "
                "before it: pass tokenizer=..., or give these options"
            )
        return self.resolved(_below=found)

    @property
    def _engine(self) -> Engine | None:
        found = self._own or self._below
        return None if found is None else found.maker

    @cached_property
    def _salt(self) -> HashArray:
        return random_key(self.seed, "mask_tokens")[:1]

    def identity(self) -> dict[str, Any]:
        found = super().identity()
        found.pop("special_ids", None)
        known = self._special.tobytes()
        known += b"" if self._begins is None else np.packbits(self._begins).tobytes()
        tokens = hashlib.sha256(known).hexdigest()[:16]
        return {**found, "mask_token_id": self._mask, "vocab_size": self._size, "tokens": tokens}

    # What the tokenizer says

    @cached_property
    def _mask(self) -> int:
        if self.mask_token_id is not None:
            return int(self.mask_token_id)
        assert self._engine is not None
        found = [i for i in map(self._engine.token_id, MASKS) if i is not None]
        if not found:
            raise ConfigError(
                f"{self} needs the mask token, and {self._engine} has none of {', '.join(MASKS)}: pass "
                "mask_token_id=..."
            )
        return found[0]

    @cached_property
    def _pieces(self) -> dict[str, int]:
        found = None if self._engine is None else self._engine.pieces()
        if not found:
            raise ConfigError(
                f"{self} needs the tokenizer's vocabulary, which {self._engine} does not show: pass "
                "vocab_size and special_ids, and leave whole_words out"
            )
        return found

    @cached_property
    def _size(self) -> int:
        given = self.vocab_size
        return int(given) if given is not None else max(self._pieces.values()) + 1

    @cached_property
    def _special(self) -> IntArray:
        given = self.special_ids
        if given is None:
            assert self._engine is not None
            given = self._engine.special_ids()
        return np.unique(np.array([*given, self._mask], dtype=np.int64))

    @cached_property
    def _begins(self) -> npt.NDArray[np.bool_] | None:
        """Whether a word begins with each token; None where that is not asked."""
        if not self.whole_words:
            return None
        found = begins_word(self._pieces)
        if found is None:
            why = f"the vocabulary of {self._engine} does not mark where words begin"
            raise ConfigError(f"{self}: {why}, so that none are found: leave whole_words out")
        return found

    # The work

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self)
        name = self.column
        need_columns(table.column_names, [name], self)
        refuse_taken(table, ["labels"], self)
        values, lengths = ids_of(block, name, self)
        ids, labels = self._hidden(block, values, lengths)
        place = table.column_names.index(name)
        table = table.set_column(place, name, list_array(ids, lengths))
        table = table.append_column("labels", list_array(labels, lengths))
        return run.with_block(block.with_data(table))

    def _hidden(self, block: Block, values: Any, lengths: IntArray) -> tuple[Any, Any]:
        starts = np.cumsum(lengths) - lengths
        place = np.arange(len(values), dtype=np.int64)
        special = np.isin(values, self._special)
        first = place
        if self._begins is not None:
            first = self._word_of(values, special, starts[lengths > 0])
        key = np.repeat(self._keys(block), lengths)
        own = (place - np.repeat(starts, lengths) + 1).astype(np.uint64) * _GOLDEN
        draws = unit(mix(key ^ mix(own[first])))
        chosen = np.flatnonzero((draws < self.mlm_probability) & ~special)
        labels = np.full(len(values), IGNORED, dtype=label_dtype(values))
        labels[chosen] = values[chosen]
        hashes = mix(key[chosen] ^ mix(own[chosen] ^ _SECOND))
        kind = unit(hashes)
        # As wide as the mask and every token of the vocabulary need, not as the column was.
        largest = np.min_scalar_type(max(self._mask, self._size - 1))
        found = values.astype(np.promote_types(values.dtype, largest))
        found[chosen[kind >= 1 - self.mask_replace_prob]] = self._mask
        other = kind < self.random_replace_prob
        drawn = unit(mix(hashes[other] ^ _THIRD)) * self._size
        found[chosen[other]] = drawn.astype(found.dtype)
        return found, labels

    def _word_of(self, values: Any, special: Any, starts: IntArray) -> IntArray:
        begins = self._begins
        assert begins is not None
        known = np.minimum(values, len(begins) - 1)
        new = begins[known] | special
        new[1:] |= special[:-1]
        new[starts] = True
        places = np.flatnonzero(new)
        found: IntArray = places[np.cumsum(new) - 1]
        return found

    def _keys(self, block: Block) -> HashArray:
        rows = block.ids.astype(np.uint64) * _GOLDEN
        for number in (block.epoch, block.part):
            rows = mix(rows + self._salt) ^ np.asarray(number, dtype=np.int64).astype(np.uint64)
        return mix(rows ^ self._salt)
