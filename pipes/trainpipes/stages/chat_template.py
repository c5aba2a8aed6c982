"""``chat_template``: conversations to token ids, with labels on what the assistant says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any

import numpy as np

from trainpipes.checks import whole_number
from trainpipes.errors import ConfigError
from trainpipes.naming import need_columns
from trainpipes.runtime.blame import blame
from trainpipes.runtime.made_once import made_once
from trainpipes.runtime.run import Run
from trainpipes.shown import shown
from trainpipes.stages.ignored import IGNORED
from trainpipes.stages.ragged_column import refuse_taken, row_table
from trainpipes.stages.tokenizing import Tokenizes
from trainpipes.tokenizers.chat import Chat
from trainpipes.tokenizers.ragged import Ragged

__all__ = ["ChatTemplate"]


class ChatTemplate(Tokenizes):
    """Turns conversations into token ids, as the tokenizer's own chat template writes them.

    In: rows with a column of conversations, each a list of messages (dicts with "role" and "content").
    Out: the same rows; that column replaced by "input_ids", and "labels": the ids of the assistant's turns
    with the mark that ends each, -100 elsewhere. A message's keys that are null are left out. Nothing is
    padded, and no special tokens are put around what the template writes. Cursor: none of its own. Costs
    Python for each row, some 100 us: best after a shuffle and a sharding filter.

    Where the template marks the assistant's parts (``{% generation %}``), these are taken. Else a turn is
    what follows the text up to it with the prompt for the assistant; a template that writes earlier turns
    otherwise once others follow (such as without their reasoning) is refused.

    Args:
        tokenizer: a fast tokenizer of transformers, or a local directory of one. Nothing is downloaded.
        column: the conversations.
        labels: whether to add "labels".
        max_length: the most tokens of a row; the end of a longer one is cut off.
        template: Jinja as transformers takes it, in place of the tokenizer's own.

    Raises:
        ConfigError: there is no template, or the tokenizer is no fast one.
        DataError: a row is no conversation, or whose a token is cannot be told; names the row.
        MissingExtraError: transformers is not installed.
        SchemaError: the column is not there, or one of the new ones is.
    """

    needs_columns = True
    thread_safe = True

    tokenizer: Any
    column: str = "messages"
    _: KW_ONLY
    labels: bool = True
    max_length: int | None = None
    template: str | None = None

    def check(self) -> None:
        if not isinstance(self.column, str):
            raise ConfigError(
                f"chat_template(column) is the name of a column, got {shown(self.column)}"
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

    def identity(self) -> dict[str, Any]:
        found = {
            "stage": self.name, "tokenizer": self._engine.fingerprint(),
            "template": self._chat.fingerprint(), "column": self.column, "labels": self.labels,
            "max_length": self.max_length,
        }  # fmt: skip
        return {k: v for k, v in found.items() if v is not None}

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self)
        need_columns(table.column_names, [self.column], self)
        added = ["input_ids", "labels"] if self.labels else ["input_ids"]
        conversations = table.column(self.column).to_pylist()
        table = table.drop_columns([self.column])
        refuse_taken(table, added, self)
        ids: list[list[int]] = []
        said: list[bool] = []
        try:
            for conversation in conversations:
                own, mask = self._chat.encode(conversation)
                ids.append(own[: self.max_length])
                said += mask[: self.max_length]
        except ConfigError:
            raise
        except Exception as error:
            blame(error, self, int(block.ids[len(ids)]))
            raise
        found = Ragged.of_lists(ids)
        columns: Mapping[str, Ragged] = {"input_ids": found}
        if self.labels:
            values = np.where(np.array(said, dtype=np.bool_), found.values, np.int32(IGNORED))
            columns = {**columns, "labels": Ragged(values, found.offsets)}
        for key, column in columns.items():
            table = table.append_column(key, column.to_arrow())
        return run.with_block(block.with_data(table))
