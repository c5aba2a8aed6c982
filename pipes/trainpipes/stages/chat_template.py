"""``chat_template``: conversations to token ids, with labels on what the assistant says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any

import numpy as np

from trainpipes.checks import whole_number
from trainpipes.errors import ConfigError
from trainpipes.kinds.blame import blame
from trainpipes.kinds.made_once import made_once
from trainpipes.naming import need_columns
from trainpipes.rows.run import Run
from trainpipes.shown import shown
from trainpipes.stages.ignored import IGNORED
from trainpipes.stages.ragged_column import refuse_taken, row_table
from trainpipes.stages.tokenizing import Tokenizes
from trainpipes.tokenizers.chat import Chat, Written
from trainpipes.tokenizers.messages import messages_of, tools_of
from trainpipes.tokenizers.ragged import Ragged, assemble

__all__ = ["ChatTemplate"]


class ChatTemplate(Tokenizes):
    """Turns conversations into token ids, as the tokenizer's own chat template writes them.

    In: rows with a column of conversations, each a list of messages (dicts with "role" and "content").
    Out: the same rows; that column replaced by "input_ids" and "labels", lists of int32. Labels are the ids
    of the assistant's turns with the token that ends each, and -100 elsewhere. Keys that are null are left
    out, also within tool calls and tools. Nothing is padded, and no special tokens are added to those that
    the template writes. Cursor: none of its own. Costs about 100 us of Python a row: best after a shuffle and
    a sharding filter.

    Where the template marks the assistant's turns (``{% generation %}``), the marked text is taken. Else a
    turn is the text that the template adds to the messages before it and the generation prompt. A template
    that writes earlier turns differently once others follow (such as without their reasoning) is refused.

    Args:
        tokenizer: a fast tokenizer of transformers, or a local directory of one. Nothing is downloaded.
        column: the conversations.
        labels: whether to add "labels".
        max_length: the most tokens of a row; the end of a longer one is cut off.
        template: a Jinja template as transformers takes it, in place of the tokenizer's own.
        prompt: a column of messages to put before the conversation; their labels are -100. The column stays.
        tools: a column of the tools that the assistant may call: lists of JSON schemas, or such lists as JSON
            text. The column stays.
        parse_arguments: give a tool call's arguments to the template as a dict, as most templates expect,
            where they are JSON text, as OpenAI writes them; False for a template that wants text.

    Raises:
        ConfigError: there is no template, or the tokenizer is no fast one.
        DataError: a row is no conversation, or the assistant's tokens cannot be told; names the row.
        MissingExtraError: transformers is not installed.
        SchemaError: the column is not there, or "input_ids" or "labels" is there already.
    """

    needs_columns = True
    thread_safe = True

    tokenizer: Any
    column: str = "messages"
    _: KW_ONLY
    labels: bool = True
    max_length: int | None = None
    template: str | None = None
    prompt: str | None = None
    tools: str | None = None
    parse_arguments: bool = True

    def check(self) -> None:
        if not isinstance(self.column, str):
            raise ConfigError(
                f"chat_template(column) is the name of a column, got {shown(self.column)}"
            )
        for name in ("prompt", "tools"):
            own = getattr(self, name)
            if own is not None and (not isinstance(own, str) or own == self.column):
                raise ConfigError(
                    f"chat_template({name}) is the name of another column, got {shown(own)}"
                )
        if self.max_length is not None:
            whole_number(self.max_length, 1, "chat_template(max_length)", "tokens of a row")
        if self.template is not None and not isinstance(self.template, str):
            raise ConfigError(
                f"chat_template(template) is Jinja as text, got {shown(self.template)}"
            )
        _ = self._chat, self._engine  # raises unless both are there

    @made_once
    def _chat(self) -> Chat:
        return Chat(self.tokenizer, self.template)

    def runs_on(self) -> str:
        return f"{self._engine}: its chat template, by transformers"

    @property
    def resolved_options(self) -> dict[str, Any]:
        return {**super().resolved_options, "template": self._chat.fingerprint()}

    @property
    def uses_packages(self) -> Sequence[str]:
        return (*super().uses_packages, "transformers")

    def identity(self) -> dict[str, Any]:
        found = {
            "stage": self.name, "tokenizer": self._engine.fingerprint(),
            "template": self._chat.fingerprint(), "column": self.column, "labels": self.labels,
            "max_length": self.max_length, "prompt": self.prompt, "tools": self.tools,
            "parse_arguments": None if self.parse_arguments else False,
        }  # fmt: skip
        return {k: v for k, v in found.items() if v is not None}

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self)
        taken = [name for name in (self.column, self.prompt, self.tools) if name is not None]
        need_columns(table.column_names, taken, self)
        added = ["input_ids", "labels"] if self.labels else ["input_ids"]
        given = [table.column(name).to_pylist() for name in taken]
        table = table.drop_columns([self.column])
        refuse_taken(table, added, self)
        chat = self._chat
        written: list[Written] = []
        try:
            for row in zip(*given, strict=True):
                values = dict(zip(taken, row, strict=True))
                written.append(
                    chat.write(
                        messages_of(values[self.column], self.parse_arguments),
                        messages_of(values[self.prompt], self.parse_arguments)
                        if self.prompt
                        else (),
                        tools_of(values[self.tools]) if self.tools else None,
                    )
                )
        except ConfigError:
            raise
        except Exception as error:
            blame(error, self, int(block.ids[len(written)]))
            raise
        ids, said = chat.encode(written)
        columns = {"input_ids": ids}
        if self.labels:
            labels = np.where(said, ids.values, np.int32(IGNORED))
            columns["labels"] = Ragged(labels, ids.offsets)
        for key, column in columns.items():
            cut = assemble([column], room=self.max_length)[0]
            table = table.append_column(key, cut.to_arrow())
        return run.with_block(block.with_data(table))
