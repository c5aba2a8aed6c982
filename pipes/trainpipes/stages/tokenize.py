"""``tokenize``, and the text columns that it reads: Arrow strings without nulls."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from trainpipes._internal import checks
from trainpipes._internal.checks import Count, IntArray, Text, column_names, require, several
from trainpipes._internal.locks import cached_property
from trainpipes._internal.messages import nearest
from trainpipes.columns import arrays
from trainpipes.columns.block import BadCell, Block, first_bad
from trainpipes.columns.packing import IGNORED
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError
from trainpipes.interfaces import read_columns
from trainpipes.interfaces.options import identify
from trainpipes.interfaces.quarantine import OnError
from trainpipes.interfaces.stage import Stage, Tally, made_once
from trainpipes.stages.columns import with_ids
from trainpipes.stages.tokenizing import Tokenizes, WereCut
from trainpipes.tokenizers.adapters import Function
from trainpipes.tokenizers.engine import Affixes, Pair, Ragged, TokenizerEngine, assemble

Texts: TypeAlias = "pa.LargeStringArray"


class Template:
    """A text with ``{column}`` in it, which is filled in for each row."""

    def __init__(self, text: str) -> None:
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError:
            parts = [("", "", "", None)]
        columns = [name for _, name, _, _ in parts if name is not None]
        plain = not any(rest or how for _, _, rest, how in parts)
        good = columns and all(name and not set(name) & set(".[") for name in columns) and plain
        rule = "text with {column} for one or more columns, without index, format or conversion"
        way = "make another text with map_batches()"
        require(good, "tokenize(template)", rule, text, way)
        self.columns = list(dict.fromkeys(columns))
        self._parts = [(literal, name) for literal, name, _, _ in parts]

    def fill(self, columns: Mapping[str, Texts]) -> Texts:
        end = _scalar("")
        pairs = ((_scalar(text), columns.get(name or "", end)) for text, name in self._parts)
        pieces = [piece for pair in pairs for piece in pair]
        return arrays.one_chunk(pc.binary_join_element_wise(*pieces, end))


def _scalar(text: str) -> Any:
    return arrays.python_to_arrow([text], pa.large_string())[0]


def read_texts(
    block: Block, names: Sequence[str], caller: Stage, numbers: bool = False
) -> dict[str, Texts]:
    """Columns of text, some of it perhaps null, or with ``numbers`` of integers, too, as text."""
    columns = {}
    for name in names:
        column = read_columns.cells(block, name, caller)
        if isinstance(column, torch.Tensor):
            raise read_columns.refused(caller, " works on columns of text, got tensors")
        with read_columns.naming(name, caller, block.ids):
            read = _of_python if isinstance(column, list) else _of_arrow
            columns[name] = read(column, numbers)
    return columns


def _no_text(kind: str, items: type) -> str:
    way = "make it a string with map_batches()"
    if items is str:
        way = "flat_map() makes a row of each of several texts, map() a column of each"
    elif items is dict:
        way = "messages are for chat_template() or the recipe chat"
    return f"holds {kind}, and only text can be tokenized; {way}"


def _of_arrow(column: Any, numbers: bool) -> Texts:
    kind = column.type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    number = numbers and pa.types.is_integer(kind)
    if not (number or arrays.is_text(kind) or pa.types.is_null(kind)):
        inner = kind.value_type if arrays.is_list(kind) else pa.null()
        items = str if arrays.is_text(inner) else dict if pa.types.is_struct(inner) else object
        raise BadCell(None, _no_text(column.type, items))
    if pa.types.is_dictionary(column.type):
        column = arrays.decoded(column)
    return arrays.one_chunk(column.cast(pa.large_string()))


def _of_python(values: list[Any], numbers: bool) -> Texts:
    for row, value in enumerate(values):
        is_int = numbers and isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not (is_int or isinstance(value, str | None)):
            first = [*value, ""][0] if isinstance(value, list | tuple) else None
            raise BadCell(row, _no_text(type(value).__name__, type(first)))
    texts = [None if value is None else str(value) for value in values]
    try:
        return arrays.python_to_arrow(texts, pa.large_string())
    except UnicodeEncodeError as error:
        said = "holds a surrogate (half of a character), which UTF-8 cannot write"
        way = "clean it in the map() that makes it"
        raise BadCell(texts.index(error.object), f"{said}; {way}") from error


def without_nulls(
    texts: dict[str, Texts], caller: Stage, ids: IntArray, skip: bool
) -> npt.NDArray[np.bool_] | None:
    """Which rows have no null, bool ``[rows]``; None for all. Raises at the first unless ``skip``."""
    with_nulls = [name for name, column in texts.items() if column.null_count]
    if with_nulls and not skip:
        way = f"drop such rows with .filter(pc.field({with_nulls[0]!r}).is_valid()) before"
        way += ", or by on_error='skip'" * bool(caller.options.get("labels"))
        problem = f"is null, and there is no text to tokenize; {way}"
        raise read_columns.in_column(
            BadCell(arrays.first_null(texts[with_nulls[0]]), problem), with_nulls[0], caller, ids
        )
    there = [arrays.to_numpy(texts[name].is_valid()) for name in with_nulls]
    return np.logical_and.reduce(there) if there else None


def outputs_of(columns: Any, concat: Any, templated: bool, pair: bool) -> dict[str, list[str]]:
    """Columns of ids, and the columns of text that each is made of."""
    named = [columns != "text", concat is not None, templated]
    if sum(named) > 1 or (pair and any(named[1:])):
        rule = "one of columns, concat and template, and pair with a list of two columns"
        raise ConfigError(f"tokenize takes {rule}")
    if templated:
        return {"input_ids": []}
    if concat is not None:
        return {"input_ids": column_names(concat, "tokenize(concat)")}
    option = "tokenize(columns)"
    require(not pair or several(columns), "tokenize(pair=True)", "a list of two columns", columns)
    if isinstance(columns, Mapping):
        good = columns and all(isinstance(n, str) for item in columns.items() for n in item)
        require(good, option, "a dict of text columns and names for their ids", columns)
        outputs = {ids: [text] for text, ids in columns.items()}
        way = f"to join them, concat={list(columns)}"
        rule = "a dict with another column of ids for each text column"
        require(len(outputs) == len(columns), option, rule, columns, way)
        return outputs
    names = column_names(columns, option)
    require(not pair or len(names) == 2, "tokenize(pair=True)", "a list of two columns", columns)
    if pair or isinstance(columns, str):
        return {"input_ids": names}
    return {f"{name}_ids": [name] for name in names}


def labelled_of(labels: Any, outputs: Mapping[str, list[str]]) -> list[str] | bool | None:
    if labels is None or labels is False:
        return None
    option, joined = "tokenize(labels)", outputs.get("input_ids")
    if joined is None:
        way = 'join columns by concat=[...], or name a column of ids "labels" instead'
        there = f'ids in a column "input_ids", and here they are in {list(outputs)}'
        raise ConfigError(f"{option} needs {there}; {way}")
    if labels is True:
        return True
    names = column_names(labels, option)
    for name in names:
        rule = f"some of the columns that are joined, {joined}, or True"
        require(name in joined, option, rule, name, nearest(name, joined)[2:-1])
    return names


def end_token(value: Any, option: str) -> None:
    if not isinstance(value, bool | str):
        checks.whole_number(value, 0, option, "True, False, a token or its id", most=2**31 - 1)


class Tokenize(Tokenizes):
    """Turn text columns into token ids.

    Text columns are replaced by columns ``list<int32>`` (in rows that are dicts, by int32 arrays).
    Put it after ``shuffle`` and ``sharding_filter``: each consumer then tokenizes only its rows.
    ``max_length`` cuts tokens of the text; special tokens and the end token stay:

        prefix + text tokens, cut to the rest of max_length + suffix + eos

    Prefix and suffix are the tokens that the tokenizer's post-processor puts around a text (``<s>``,
    ``[CLS]``, ``[SEP]``), also around several joined columns. Nothing is padded; the tokenizer's
    own settings for truncation and padding have no effect.

    Args:
        tokenizer: one of

            - a path or URL of a ``tokenizer.json`` or a SentencePiece ``*.model``, or a folder that
              holds one or what ``transformers.AutoTokenizer`` loads
            - a name on the Hugging Face hub, such as "gpt2"; needs transformers
            - an object of ``tokenizers``, transformers, ``tiktoken`` or ``sentencepiece``; it is
              copied
            - "tiktoken:NAME"
            - "bytes": UTF-8 bytes, 0 to 255; 256 is the end token, 257 the pad token
            - a function from a list of texts to as many lists of ids

            Special tokens written out in a text become special tokens, except with tiktoken and
            SentencePiece.
        columns: a column, whose ids become "input_ids"; a list, of which "prompt" becomes
            "prompt_ids"; or a dict from text columns to columns of ids, of which "labels" are
            encoded as targets, as by ``text_target`` of transformers.
        concat: instead of ``columns``: several, each tokenized by itself, joined into "input_ids".
        pair: encode a list of two columns as a pair, into "input_ids" and "token_type_ids".
            ``max_length`` cuts the longer text first.
        template: instead of ``columns``: a text made of columns, ``"Q: {question}\\nA: {answer}"``;
            its ids become "input_ids".
        max_length: the most tokens in a sequence, with special tokens and end token.
        truncation_side: "right" cuts the end of the text, "left" its start; joined columns count as
            one text.
        add_special_tokens: put prefix and suffix around the text.
        add_eos: True ends each sequence with the tokenizer's end token, unless the suffix has it;
            or a token or id to end it with.
        labels: adds a column "labels": the ids of these columns (some of those of ``concat``) and
            of the end token, and -100 elsewhere; with True all of "input_ids". If the text's end is
            cut off, the label of the end token is -100.
        keep_text: keep the text columns.
        on_error: for rows whose labels are all -100, as when the prompt alone fills ``max_length``.
            None warns once in each process and keeps them; "raise" refuses the first; "skip" leaves
            them out, and rows whose text is null, and logs how many; "keep" keeps them.
        engine: "auto" takes gigatoken, which is faster, if it is installed (extra "fast") and the
            tokenizer is BPE, and compares it with ``tokenizers`` on some rows: a difference is an
            error. "tokenizers" never uses it. A state is resumed with the engine that saved it.

    Raises:
        ConfigError: there is no such tokenizer, or options do not go together.
        MissingExtraError: the tokenizer's package is not installed.
        DataError: a text is null, or with ``on_error="raise"`` a row has no target.
        SchemaError: a column is not there, or holds no text.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"text": ["hi", "é"]}))
    >>> list(rows.tokenize("bytes", add_eos=True))
    [{'input_ids': [104, 105, 256]}, {'input_ids': [195, 169, 256]}]
    >>> sums = tp.from_arrow(pa.table({"prompt": ["1+1"], "response": ["2"]}))
    >>> list(sums.tokenize("bytes", concat=["prompt", "response"], labels="response"))
    [{'input_ids': [49, 43, 49, 50], 'labels': [-100, -100, -100, 50]}]
    """

    free = frozenset({"engine"})

    tokenizer: Any
    columns: str | Sequence[str] | Mapping[str, str] = "text"
    _: KW_ONLY
    concat: Sequence[str] | None = None
    pair: bool = False
    template: Text | None = None
    max_length: Count | None = None
    truncation_side: Literal["right", "left"] = "right"
    add_special_tokens: bool = True
    add_eos: Annotated[bool | str | int, end_token] = False
    labels: bool | str | Sequence[str] | None = None
    keep_text: bool = False
    on_error: OnError | None = None
    engine: Literal["auto", "tokenizers"] = "auto"

    def check(self) -> None:
        _ = self._template, self._labelled, self._makers  # raises for options that do not fit
        both = sorted(set(self._texts) & set(self._outputs))
        if self.keep_text and both:
            why = f"keeps the text column {both[0]!r}, and the ids would have that name too"
            way = "give them another by columns={text: ids}"
            raise ConfigError(f"tokenize(keep_text=True) {why}; {way}")
        if isinstance(self.maker, Function):
            self._end()

    @cached_property
    def _template(self) -> Template | None:
        return None if self.template is None else Template(self.template)

    @cached_property
    def _outputs(self) -> dict[str, list[str]]:
        filled = self.template is not None
        return outputs_of(self.columns, self.concat, filled, self.pair)

    @cached_property
    def _labelled(self) -> list[str] | bool | None:
        return labelled_of(self.labels, self._outputs)

    @cached_property
    def _texts(self) -> list[str]:
        if self._template is not None:
            return self._template.columns
        return [name for names in self._outputs.values() for name in names]

    @property
    def id_columns(self) -> list[str]:
        return list(self._outputs)

    @property
    def _runs_user_code(self) -> bool:
        return isinstance(self.maker, Function)

    def identity(self) -> dict[str, Any]:
        gone = {"tokenizer", *self.free}
        shaping = {k: identify(v) for k, v in self.options.items() if k not in gone}
        if self.concat is not None:
            shaping["columns"] = shaping.pop("concat")
        elif "input_ids" not in self._outputs:  # of a list, as of a dict that names the same
            shaping["columns"] = identify({name: ids for ids, (name,) in self._outputs.items()})
        shaping["on_error"] = None if self.traits.keeps_rows else "skip"
        shaping["engine"] = self.maker.package()
        if shaping["add_eos"] is True:
            shaping["add_eos"] = self._end()
        if (targets := self._makers.get("labels", self.maker)) is not self.maker:
            shaping["targets"] = targets.fingerprint()
        shaping = {k: v for k, v in shaping.items() if v is not None}
        return {"stage": self.name, "tokenizer": self.maker.fingerprint(), **shaping}

    # Special tokens

    def _end(self) -> int | None:
        asked, engine = self.add_eos, self.maker
        if asked is False:
            return None
        if not isinstance(asked, bool | str):
            return int(asked)
        if isinstance(asked, str):
            token_id = engine.token_id(asked)
            rule = f"a token that the tokenizer {engine} has"
            require(
                token_id is not None, "tokenize(add_eos)", rule, asked, "give another, or its id"
            )
            return token_id
        ends = engine.special.ends
        if len(ends) == 1:
            return next(iter(ends.values()))
        said = f"has several ({', '.join(ends)})" if ends else "does not tell which token that is"
        why = f"tokenize(add_eos=True) needs the end token, and the tokenizer {engine} {said}"
        raise ConfigError(f'{why}; give it: add_eos="<token>" or add_eos=<id>')

    @cached_property
    def _makers(self) -> dict[str, TokenizerEngine]:
        """What makes each column of ids."""
        own = self.maker
        return {name: own.targets if name == "labels" else own for name in self._outputs}

    @cached_property
    def _affixes(self) -> dict[str, Affixes]:
        """The special tokens around the texts of each column of ids."""
        affixes, end = {}, self._end()
        for output, maker in self._makers.items():
            prefix, suffix = maker.affixes() if self.add_special_tokens else ((), ())
            if end is not None and end not in suffix:
                suffix = (*suffix, end)
            self._check_room(len(prefix) + len(suffix))
            affixes[output] = prefix, suffix
        return affixes

    def _check_room(self, special: int) -> None:
        room = self.max_length
        if room is not None and room < special:
            rule = f"max_length counts {special} special tokens (or the end token) too, got {room}"
            raise ConfigError(f"{self}: {rule}; raise it, or pass add_special_tokens=False")

    # The work

    @made_once
    def _cut(self) -> WereCut:
        return WereCut(self)

    def _count_cut(self, gone: IntArray) -> None:
        if self.max_length is not None:
            self._cut.add((len(gone), int(np.count_nonzero(gone)), int(gone.sum())))

    def _tallies(self) -> Sequence[Tally]:
        return (*super()._tallies(), self._cut)

    def process(self, run: Run) -> Run:
        self._check_rows(run)
        self.refuse_batches(run)
        if isinstance(run.block.data, list) and not run.block.data:
            return run
        texts = read_texts(run.block, self._texts, self, self._template is not None)
        there = without_nulls(texts, self, run.block.ids, not self.traits.keeps_rows)
        gone = None if there is None else run.block.take(np.flatnonzero(~there))
        if there is not None:
            run = run.pick(np.flatnonzero(there))
            texts = {name: column.filter(arrays.to_arrow(there)) for name, column in texts.items()}
        block = run.block
        _ = self.maker.loaded  # errors here are about no row
        try:
            columns, cut = self._encode(texts, block.ids)
        except ConfigError:
            raise
        except Exception as error:
            read_columns.blame(error, self, self._culprit(texts, block))
            raise
        gone_texts: Sequence[str] = () if self.keep_text else self._texts
        run = run.with_block(with_ids(block, columns, gone_texts, self))
        run = self._checked(run, columns, block, cut)
        if gone is not None:  # counted last: the share that is left out is of all rows
            self.without_target.drop(gone, np.ones(len(gone), int), lambda _: "a text is null")
        return run

    def _encode(self, texts: Mapping[str, Any], numbers: IntArray) -> tuple[dict[str, Ragged], Any]:
        """The columns of ids, and which rows with labels were cut, bool ``[rows]``."""
        if self.pair:
            first, second = (texts[name] for name in self._texts)
            return self._encode_pairs((first, second), numbers)
        outputs: Mapping[str, Sequence[str]] = self._outputs
        if self._template is not None:
            texts, outputs = {"": self._template.fill(texts)}, {"input_ids": [""]}
        limit, side = self.max_length, self.truncation_side
        columns: dict[str, Ragged] = {}
        cut = None
        for output, names in outputs.items():
            prefix, suffix = affixes = self._affixes[output]
            room = None if limit is None else limit - len(prefix) - len(suffix)
            segments = [self._makers[output].encode(texts[name], numbers) for name in names]
            self._warn_of_second(segments, affixes, self._end())
            ids, pieces = assemble(segments, prefix, suffix, room, side)
            columns[output] = ids
            used = pieces[:, 1:-1].sum(axis=1)
            gone = sum(segment.lengths for segment in segments) - used
            self._count_cut(gone)
            if output == "input_ids" and self._labelled is not None:
                cut = gone > 0
                columns["labels"] = self._labels(ids, pieces, names, ~cut | (side == "left"))
        return columns, cut

    def _labels(self, ids: Ragged, pieces: Any, names: Sequence[str], whole: Any) -> Ragged:
        """Ids of labeled columns, and of the end token where ``whole``; -100 elsewhere."""
        suffix = self._affixes["input_ids"][1]
        ended = bool(suffix) and suffix[-1] in (self._end(), *self.maker.special.ends.values())
        if self._labelled is True:
            values = ids.values.copy()
            if ended:
                values[ids.offsets[1:][~whole] - 1] = IGNORED
            return Ragged(values, ids.offsets)
        assert isinstance(self._labelled, list)
        flags = [False, *(name in self._labelled for name in names), False, ended]
        last = np.full(len(ids), int(ended))  # the end token, a piece of its own
        cut = np.column_stack([pieces[:, :-1], pieces[:, -1] - last, last])
        in_loss = np.tile(flags, (len(ids), 1))
        in_loss[:, -1] &= whole
        counted = np.repeat(in_loss.reshape(-1), cut.reshape(-1))
        return Ragged(np.where(counted, ids.values, np.int32(IGNORED)), ids.offsets)

    def _encode_pairs(self, texts: Pair, numbers: IntArray) -> tuple[dict[str, Ragged], Any]:
        special, side = self.add_special_tokens, self.truncation_side
        count, last = self.maker.pair_affixes() if special else (0, None)
        end = self._end()
        added = () if end is None or last == end else (end,)
        self._check_room(count + len(added))
        room = None if self.max_length is None else self.max_length - len(added)
        ids, types, of_text, gone = self.maker.encode_pairs(texts, special, room, side, numbers)
        self._count_cut(gone)
        ids = assemble([ids], (), added)[0]
        columns = {"input_ids": ids, "token_type_ids": assemble([types], (), [1] * len(added))[0]}
        labelled = self._labelled
        if labelled is None:
            return columns, None
        names = (
            [self._texts.index(name) for name in labelled]
            if isinstance(labelled, list)
            else [-1, 0, 1]
        )
        in_loss = np.isin(assemble([of_text], (), [-1] * len(added))[0].values, names)
        if added or last in self.maker.special.ends.values():
            in_loss[ids.offsets[1:] - 1] = (gone == 0) | (side == "left")
        columns["labels"] = Ragged(np.where(in_loss, ids.values, np.int32(IGNORED)), ids.offsets)
        return columns, gone > 0

    def _culprit(self, texts: Mapping[str, Any], block: Block) -> int:
        def fails(start: int, stop: int) -> bool:
            part = {name: column.slice(start, stop - start) for name, column in texts.items()}
            try:
                self._encode(part, block.ids[start:stop])
            except Exception:
                return True
            return False

        return int(block.ids[first_bad(len(block), fails)])
