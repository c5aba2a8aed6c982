"""``chat_template``, and what it shares with ``tokenize``: stages that make token ids; and rows without a
target of the loss, which are counted, warned of, refused or left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from trainpipes._internal.checks import ColumnName, Count, IntArray, Text, column_names
from trainpipes._internal.messages import has_warned, warn_once
from trainpipes.columns.block import Block
from trainpipes.columns.packing import IGNORED
from trainpipes.columns.python_values import python_values
from trainpipes.columns.rectangles import Side
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError, DataError
from trainpipes.interfaces.quarantine import LeavesOut, LeftOut, OnError, leaves_out
from trainpipes.interfaces.read_columns import at_row, blame, cells, lists_of, names_of, read
from trainpipes.interfaces.stage import Numbers, Stage, Tally, made_once
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.stages.columns import columns_of, with_ids
from trainpipes.tokenizers.adapters import Function, load
from trainpipes.tokenizers.chat import Chat, Written, messages_of, tools_of
from trainpipes.tokenizers.engine import Affixes, Ragged, TokenizerEngine, assemble, take_turns


class WithoutTarget(Tally):
    """Rows that are kept without a target; ``size`` says how many of them were cut. Warns once where they
    pass each of these shares: of the first few rows only at the end of a pass.
    """

    SHARES = 0.01, 0.1, 0.5
    FEWEST = 10

    def __init__(self, stage: Any, kind: str) -> None:
        super().__init__(stage)
        self._kind = kind

    def adopt(self, more: Numbers) -> None:
        super().adopt(more)
        self.warn(self.FEWEST)

    def end(self) -> None:
        self.warn(1)

    def warn(self, fewest: int) -> None:
        seen, lacking, _ = self.numbers
        passed = sum(lacking >= share * seen for share in self.SHARES)
        if self.is_silent or lacking < fewest or not passed:
            return
        most = self.stage.options.get("max_length")
        keys = [("no target", self.stage.name, most, n) for n in range(passed, 4)]
        if not any(map(has_warned, keys)):
            ways = f'{raising(most)}choose on_error="raise", "skip" or "keep"'
            warn_once(f"{self.stage}: {self}: {ways}", keys[0])

    def _said(self, numbers: Numbers) -> str:
        seen, lacking, cut = numbers
        if not lacking:
            return ""
        have = "has" if lacking == 1 else "have"
        return f"{lacking:,} of {seen:,} {self._kind}s {have} no target for the loss{why_none(lacking, cut)}"


class WereCut(Tally):
    """Texts that lost tokens."""

    warns = False  # it was asked for

    def _said(self, numbers: Numbers) -> str:
        seen, cut, tokens = numbers
        most = self.stage.options["max_length"]
        return (
            f"{cut:,} of {seen:,} texts cut to max_length={most:,} ({tokens:,} tokens)"
            if cut
            else ""
        )


def why_none(rows: int, cut: int) -> str:
    who = "it was" if rows == 1 else f"{cut:,} of them were"
    return f", since {who} cut before the response" if cut else ""


def raising(max_length: int | None) -> str:
    return f"raise max_length={max_length}, or " if max_length else ""


#: One for each row, bool ``[rows]``.
Flags = npt.NDArray[np.bool_]


def have_target(labels: npt.NDArray[Any], lengths: IntArray) -> Flags:
    """Whether each row has a label that is not -100.

    >>> have_target(np.array([-100, 5, -100, -100]), np.array([2, 0, 2])).tolist()
    [True, False, False]
    """
    trains = np.zeros(len(lengths), dtype=np.bool_)
    some = lengths > 0
    if some.any():
        starts = (np.cumsum(lengths) - lengths)[some]
        trains[some] = np.logical_or.reduceat(labels != IGNORED, starts)
    return trains


class TargetStage(LeavesOut, asks_inputs=True):
    """A stage whose ``on_error`` decides about rows that have no target."""

    item: ClassVar[str] = "row"

    @made_once
    def without_target(self) -> LeftOut:
        why, on_error = "they have no target, or cannot be read", self.options["on_error"]
        return LeftOut(self, why, self.item, unit="", on_error=on_error)

    @made_once
    def kept_without(self) -> WithoutTarget:
        return WithoutTarget(self, self.item)

    def _tallies(self) -> Sequence[Tally]:
        return self.without_target, self.kept_without

    def check_targets(
        self,
        run: Run,
        trains: Flags,
        cut: Flags | None = None,
        bad: Mapping[int, str] | None = None,
        before: Block | None = None,
    ) -> Run:
        """The run without rows that are ``bad`` or in which no target was ``found``, if these are
        left out; else raises or warns of the latter, of which ``cut`` were cut. ``before``: the rows
        as they came.
        """
        asked, ids, bad = self.options["on_error"], run.block.ids, bad or {}
        if leaves_out(asked):
            trains[[*bad]] = False

            def error_of(row: int) -> str:
                was_cut = cut is not None and bool(cut[row])
                return bad.get(row) or f"no target for the loss{why_none(1, int(was_cut))}"

            block = run.block if before is None else before
            self.without_target.drop(block, (~trains).astype(np.int64), error_of)
            return run if trains.all() else run.pick(np.flatnonzero(trains).astype(np.int64))
        lacking = np.flatnonzero(~trains)
        if asked == "raise" and len(lacking):
            was_cut = cut is not None and bool(cut[lacking[0]])
            most = self.options.get("max_length") if was_cut or cut is None else None
            why, way = why_none(1, int(was_cut)), f'{raising(most)}choose on_error="skip" or "keep"'
            said = f"{self}: a {self.item} has no target for the loss{why}: {way}"
            raise at_row(said, self, ids[lacking[0]])
        if asked is None:
            were_cut = 0 if cut is None else int(np.count_nonzero(cut[lacking]))
            self.kept_without.add((len(trains), len(lacking), were_cut))
            self.kept_without.warn(WithoutTarget.FEWEST)
        return run


#: Rows whose labels are looked at in a process where nobody asks for it.
LOOKED_AT = 1 << 16


class Tokenizes(TargetStage, RunStage):
    """A stage that makes token ids, or says who made them."""

    #: What is made of the tokenizer as it is when the stage is made, which the program may change later:
    #: copies of the stage, as in workers, have the same.
    _snapshots: ClassVar[tuple[str, ...]] = ("maker",)
    _rows_of_batches = True

    @made_once
    def maker(self) -> TokenizerEngine:
        return load(self.options["tokenizer"], self.options.get("engine", "auto"))

    @property
    def id_columns(self) -> list[str]:
        return ["input_ids"]

    def _kept_lengths(self, column: str, lengths: IntArray) -> IntArray:
        most = self.options.get("max_length")
        return lengths if most is None else np.minimum(lengths, most)

    def _checked(
        self,
        run: Run,
        columns: Mapping[str, Ragged],
        before: Block,
        cut: Flags | None,
        bad: Mapping[int, str] | None = None,
    ) -> Run:
        """The run without ``bad`` rows and those without a target, if these are left out; see
        ``check_targets``.
        """
        labels = columns.get("labels")
        if labels is None:
            trains = np.ones(len(run), dtype=np.bool_)
            return self.check_targets(run, trains, bad=bad, before=before)
        if self.options["on_error"] == "keep":
            return run
        trains = have_target(labels.values, labels.lengths)
        return self.check_targets(run, trains, cut, bad, before)

    def _warn_of_second(self, texts: Sequence[Ragged], affixes: Affixes, end: int | None) -> None:
        """Warn of texts that begin or end with the special token that they get once more."""
        (prefix, suffix), first, last = affixes, texts[0], texts[-1]
        if prefix and (first.values[first.offsets[:-1][first.lengths > 0]] == prefix[0]).any():
            token = self.maker.decode(prefix[:1])
            why = f"begin with {token!r}, as a chat template writes it, and get a second one"
            warn_once(f"{self}: texts {why}: pass add_special_tokens=False, or use chat_template()")
        if suffix and (last.values[last.offsets[1:][last.lengths > 0] - 1] == suffix[0]).any():
            token = self.maker.decode(suffix[:1]) or f"token {suffix[0]}"
            off = "add_eos" if suffix[0] == end else "add_special_tokens"
            way = f"take it off them with map(), or pass {off}=False"
            warn_once(f"{self}: texts end with {token!r}, and get a second one: {way}")

    @property
    def pad_id(self) -> int:
        return self.maker.special.pad or 0

    def pads(self, problem: str, way: str) -> int:
        """The pad token, for padding; raises with the way out where there is none."""
        if isinstance(self.maker, Function):
            why = f"is padded with the tokenizer's pad token, which {self.maker}, a function, does not tell"
            raise ConfigError(f"{problem} {why}: give {way}")
        return self.pad_id

    @property
    def padding_side(self) -> Side:
        """The side that transformers' settings of the tokenizer pad on; "right" without any."""
        return self.maker.special.side or "right"

    def _describe(self) -> list[tuple[str, str]]:
        said = self.maker.runs_on()
        return [("tokenizer", f"{self.maker}: {said}")] if said else []

    def _settle(self, threads: int) -> None:
        take_turns(threads)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **self._snapshot()}

    def _fresh(self) -> Self:
        fresh = super()._fresh()
        vars(fresh).update(self._snapshot())
        return fresh

    def _snapshot(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._snapshots}


class TokenizedBy(Tokenizes):
    """Say which tokenizer made the ids that rows hold already.

    Later stages take its pad token and padding side (``pack``, ``pad_collate``) or its mask token
    (``mask_tokens``). Rows stay as they are. Labels are checked: of the first 65,536 rows in each
    process, or of all with ``on_error`` "raise" or "skip".

    Args:
        tokenizer: as in ``tokenize``.
        columns: the columns of its ids.
        on_error: as in ``tokenize``, for "labels" beside "input_ids", "chosen_labels" beside
            "chosen_input_ids", and so on.
        engine: as in ``tokenize``.

    Raises:
        DataError: with ``on_error="raise"`` a row has no target.
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
        _ = self.maker  # raises unless it is there

    @property
    def id_columns(self) -> list[str]:
        return list(self.columns)

    @property
    def _runs_user_code(self) -> bool:
        return False

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "tokenizer": self.maker.fingerprint()}

    def process(self, run: Run) -> Run:
        self.refuse_batches(run)
        if not self._looks(run):
            return run
        block, trains = run.block, np.ones(len(run), dtype=np.bool_)
        ends = [name for name in self.columns if name.endswith("input_ids")]
        names = {name.removesuffix("input_ids") + "labels" for name in ends}
        for name in sorted(names.intersection(names_of(block, self))):
            labels = lists_of(read(cells(block, name, self), name, self, block.ids))
            if labels is not None:
                trains &= have_target(*labels)
        return self.check_targets(run, trains)

    #: Rows that were looked at in this process.
    _seen: ClassVar[int] = 0

    def _looks(self, run: Run) -> bool:
        if self.on_error is not None:
            return self.on_error != "keep"
        if self._seen >= LOOKED_AT or not run.block.has_columns:
            return False
        vars(self)["_seen"] = self._seen + len(run.block)
        return True


def makers_of_columns(stages: Sequence[Stage]) -> dict[str, Tokenizes]:
    """What made the ids in each column, by the column's last name."""
    makers: dict[str, Tokenizes] = {}
    for stage in stages:
        if isinstance(stage, Tokenizes):
            makers |= dict.fromkeys(stage.id_columns, stage)
        elif stage.name == "rename":
            names = stage.options["names"]
            makers = {names.get(name, name): maker for name, maker in makers.items()}
    return makers


def lengths_by(stages: Sequence[Stage]) -> tuple[str, bool]:
    """What ``bucket_by_length`` must be given to find a row's length; and whether rows hold pairs of texts,
    which ``pack`` does not take.
    """
    ids = makers_of_columns(stages)
    column = f"column={min(ids)!r}" if ids and "input_ids" not in ids else ""
    return column, len(ids) > 1 or any(stage.options.get("pair") is True for stage in stages)


class TakesTokenizer(Stage):
    """A stage that asks a tokenizer for its special tokens: its option, or that of a stage before it."""

    free = frozenset({"tokenizer"})  # values taken from it are in the identity

    @made_once
    def _own(self) -> TokenizedBy | None:
        tokenizer = self.options["tokenizer"]
        return None if tokenizer is None else TokenizedBy(tokenizer)

    def tokenizes(self, below: Sequence[Stage]) -> Tokenizes | None:
        """What made the ids: the option, or the last stage below."""
        return self._own or next((s for s in reversed(below) if isinstance(s, Tokenizes)), None)


class ChatTemplate(Tokenizes):
    """Turn conversations into token ids with the tokenizer's chat template.

    A conversation is a list of messages, dicts with "role" and "content". Its column is replaced by
    "input_ids" and "labels", lists of int32 (in rows that are dicts, int32 arrays): labels are the ids
    of the assistant's turns with the token that ends each, and -100 elsewhere. A turn is the text that
    the template marks (``{% generation %}``); else the text that it adds to the messages before it and
    the generation prompt. A template that changes earlier turns once others follow is refused. The
    labels of a turn with "weight" 0, as OpenAI's files have it, or "train" False are -100.

    Args:
        tokenizer: a fast tokenizer of transformers, or its name or folder.
        column: the conversations.
        labels: whether to add "labels".
        max_length: the most tokens of a row; longer ones lose their end.
        template: a Jinja template in place of the tokenizer's own.
        prompt: a column of messages before the conversation, with labels of -100.
        tools: a column of the tools the assistant may call: lists of JSON schemas, or these as JSON
            text, whose nulls stay.
        parse_arguments: give tool calls' arguments to the template as dicts where they are JSON
            text.
        on_error: for rows whose labels are all -100, as in ``tokenize``; "skip" also leaves out
            rows that are no conversation.

    Raises:
        ConfigError: there is no template, or the tokenizer is not fast.
        DataError: a row is no conversation, the assistant's tokens cannot be found, or with
            ``on_error="raise"`` a row has no target.
        MissingExtraError: transformers is not installed.
        SchemaError: the column is not there, or "input_ids" or "labels" already is.
    """

    thread_safe = True

    tokenizer: Any
    column: ColumnName = "messages"
    _: KW_ONLY
    labels: bool = True
    max_length: Count | None = None
    template: Text | None = None
    prompt: str | None = None
    tools: str | None = None
    parse_arguments: bool = True
    on_error: OnError | None = None

    def check(self) -> None:
        for name in ("prompt", "tools"):
            name_given = getattr(self, name)
            good = name_given is None or (isinstance(name_given, str) and name_given != self.column)
            self._require(good, name, "the name of another column")
        _ = self._chat, self.maker  # raises unless both are there

    _snapshots = ("maker", "_chat")

    @made_once
    def _chat(self) -> Chat:
        return Chat(self.tokenizer, self.template)

    def _describe(self) -> list[tuple[str, str]]:
        return [("tokenizer", f"{self.maker}: its chat template, by transformers")]

    def identity(self) -> dict[str, Any]:
        identity = {
            "stage": self.name, "tokenizer": self.maker.fingerprint(),
            "template": self._chat.fingerprint(self.tools is not None),
            "column": self.column, "labels": self.labels,
            "max_length": self.max_length, "prompt": self.prompt, "tools": self.tools,
            "parse_arguments": None if self.parse_arguments else False,
            "on_error": None if self.traits.keeps_rows else "skip",
        }  # fmt: skip
        return {k: v for k, v in identity.items() if v is not None}

    def process(self, run: Run) -> Run:
        self._check_rows(run)
        self.refuse_batches(run)
        block = run.block
        if not isinstance(block.data, list):
            block = columns_of(block, self)
        taken = [name for name in (self.column, self.prompt, self.tools) if name is not None]
        conversations = [self._values(block, name) for name in taken]
        written, bad = self._written(block, conversations)
        ids, said = self._chat.encode(written)
        columns = {"input_ids": ids}
        if self.labels:
            labels = np.where(said, ids.values, np.int32(IGNORED))
            columns["labels"] = Ragged(labels, ids.offsets)
        columns = {k: assemble([c], room=self.max_length)[0] for k, c in columns.items()}
        run, most = run.with_block(with_ids(block, columns, {self.column}, self)), self.max_length
        cut = None if most is None else ids.lengths > most
        return self._checked(run, columns, block, cut, bad)

    def _values(self, block: Block, name: str) -> list[Any]:
        """A column as Python values: of JSON all but tools, which stay text."""
        column = cells(block, name, self)
        if isinstance(column, list):
            return column
        return list(column.to_pylist()) if name == self.tools else python_values(column)

    def _written(
        self, block: Block, conversations: list[list[Any]]
    ) -> tuple[list[Written], dict[int, str]]:
        """What the template writes; and of rows that are left out, why."""
        written: list[Written] = []
        bad: dict[int, str] = {}
        for place, (messages, *others) in enumerate(zip(*conversations, strict=True)):
            try:
                written.append(self._write(messages, others))
            except ConfigError:
                raise
            except Exception as error:
                if self.traits.keeps_rows or not isinstance(error, DataError):
                    blame(error, self, int(block.ids[place]))
                    raise
                bad[place] = error.message
                written.append(Written("", []))
        return written, bad

    def _write(self, messages: Any, others: list[Any]) -> Written:
        parse = self.parse_arguments
        try:
            return self._write_parsed(messages, others, parse)
        except DataError as error:
            try:
                self._write_parsed(messages, others, not parse)
            except DataError:
                raise error from error.__cause__
            wanted = f"arguments of tool calls as {'JSON text' if parse else 'dicts'}"
            way = f"the template wants {wanted}: pass parse_arguments={not parse}"
            raise DataError(f"{error.message}; {way}") from error

    def _write_parsed(self, messages: Any, others: list[Any], parse: bool) -> Written:
        prompt = messages_of(others[0], parse) if self.prompt else ()
        tools = tools_of(others[-1]) if self.tools else None
        return self._chat.write(messages_of(messages, parse), prompt, tools)
