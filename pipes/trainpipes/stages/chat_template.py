from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

import numpy as np

from trainpipes._internal.checks import ColumnName, Count, Text
from trainpipes.columns.block import Block
from trainpipes.columns.packing import IGNORED
from trainpipes.columns.python_values import python_values
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError, DataError
from trainpipes.interfaces.quarantine import OnError
from trainpipes.interfaces.read_columns import blame
from trainpipes.interfaces.stage import made_once
from trainpipes.stages.columns import row_table
from trainpipes.stages.tokenizing import Tokenizes
from trainpipes.tokenizers.chat import Chat, Written, messages_of, tools_of
from trainpipes.tokenizers.engine import Ragged, assemble


class ChatTemplate(Tokenizes, takes="columns"):
    """Turn conversations into token ids with the tokenizer's chat template.

    A conversation is a list of messages, dicts with "role" and "content". Its column is replaced by
    "input_ids" and "labels", lists of int32: labels are the ids of the assistant's turns with the
    token that ends each, and -100 elsewhere. A turn is what the template marks
    (``{% generation %}``); else what it adds to the messages before it and the generation prompt.
    A template that changes earlier turns once others follow is refused.

    Args:
        tokenizer: a fast tokenizer of transformers, or the name or folder of one.
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
        ConfigError: there is no template, or the tokenizer is not a fast one.
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
            own = getattr(self, name)
            good = own is None or (isinstance(own, str) and own != self.column)
            self._require(good, name, "the name of another column")
        _ = self._chat, self.maker  # raises unless both are there

    _snapshots = ("maker", "_chat")

    @made_once
    def _chat(self) -> Chat:
        return Chat(self.tokenizer, self.template)

    def runs_on(self) -> str:
        return f"{self.maker}: its chat template, by transformers"

    def identity(self) -> dict[str, Any]:
        identity = {
            "stage": self.name, "tokenizer": self.maker.fingerprint(),
            "template": self._chat.fingerprint(), "column": self.column, "labels": self.labels,
            "max_length": self.max_length, "prompt": self.prompt, "tools": self.tools,
            "parse_arguments": None if self.parse_arguments else False,
            "on_error": None if self.traits.keeps_rows else "skip",
        }  # fmt: skip
        return {k: v for k, v in identity.items() if v is not None}

    def process(self, run: Run) -> Run:
        self.refuse_batches(run)
        taken = [name for name in (self.column, self.prompt, self.tools) if name is not None]
        block, table = row_table(run, self, taken, ["input_ids", "labels"][: 1 + self.labels])
        given = [
            table.column(name).to_pylist()
            if name == self.tools
            else python_values(table.column(name))
            for name in taken
        ]  # tools stay as JSON text
        table = table.drop_columns([self.column])
        written, bad = self._written(block, given)
        ids, said = self._chat.encode(written)
        columns = {"input_ids": ids}
        if self.labels:
            labels = np.where(said, ids.values, np.int32(IGNORED))
            columns["labels"] = Ragged(labels, ids.offsets)
        for key, column in columns.items():
            columns[key] = assemble([column], room=self.max_length)[0]
            table = table.append_column(key, columns[key].to_arrow())
        return self._checked(run.with_block(block.with_data(table)), columns, block, bad)

    def _written(
        self, block: Block, given: list[list[Any]]
    ) -> tuple[list[Written], dict[int, str]]:
        """What the template writes; and of rows that are left out, why."""
        written: list[Written] = []
        bad: dict[int, str] = {}
        for place, (messages, *others) in enumerate(zip(*given, strict=True)):
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
