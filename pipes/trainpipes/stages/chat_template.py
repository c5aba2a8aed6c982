"""``chat_template``: conversations to token ids, with labels on what the assistant says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from trainpipes.checks import flag, whole_number
from trainpipes.errors import ConfigError
from trainpipes.runtime.run import Run
from trainpipes.runtime.stage import Stage
from trainpipes.shown import shown
from trainpipes.runtime.blame import blame
from trainpipes.stages.ignored import IGNORED
from trainpipes.naming import need_columns
from trainpipes.stages.ragged_column import refuse_taken, row_table
from trainpipes.stages.tokenize import Tokenize
from trainpipes.tokenizers.chat import Chat
from trainpipes.tokenizers.load import load
from trainpipes.tokenizers.ragged import Ragged

__all__ = ["ChatTemplate"]


class ChatTemplate(Tokenize):
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
        source: the node below, or None as a step of a pipeline.
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

    role = "rows"
    needs_columns = True
    free = frozenset()

    def __init__(
        self,
        source: BaseNode[Any] | None = None,
        tokenizer: Any = None,
        column: str = "messages",
        *,
        labels: bool = True,
        max_length: int | None = None,
        template: str | None = None,
    ) -> None:
        if not isinstance(column, str):
            raise ConfigError(f"chat_template(column) is the name of a column, got {shown(column)}")
        flag(labels, "chat_template(labels)")
        if max_length is not None:
            whole_number(max_length, 1, "chat_template(max_length)", "tokens of a row")
        if template is not None and not isinstance(template, str):
            raise ConfigError(f"chat_template(template) is Jinja as text, got {shown(template)}")
        self._chat = Chat(tokenizer, template)
        self._engine = load(tokenizer)
        self._outputs = {"input_ids": [column]}
        Stage.__init__(
            self, source, tokenizer=tokenizer, column=column, labels=labels,
            max_length=max_length, template=template,
        )  # fmt: skip

    @property
    def runs_user_code(self) -> bool:
        return False

    def runs_on(self) -> str:
        return f"{self._engine}: its chat template, by transformers"

    def identity(self) -> dict[str, Any]:
        say = self.options
        found = {
            "stage": self.name, "tokenizer": self._engine.fingerprint(),
            "template": self._chat.fingerprint(), "column": say["column"], "labels": say["labels"],
            "max_length": say["max_length"],
        }  # fmt: skip
        return {k: v for k, v in found.items() if v is not None}

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self)
        name = self.options["column"]
        need_columns(table.column_names, [name], self)
        added = ["input_ids", "labels"] if self.options["labels"] else ["input_ids"]
        table, conversations = table.drop_columns([name]), table.column(name).to_pylist()
        refuse_taken(table, added, self)
        ids: list[list[int]] = []
        said: list[bool] = []
        most = self.options["max_length"]
        try:
            for conversation in conversations:
                own, mask = self._chat.encode(conversation)
                ids.append(own[:most])
                said += mask[:most]
        except ConfigError:
            raise
        except Exception as error:
            blame(error, self, int(block.ids[len(ids)]))
            raise
        found = Ragged.of_lists(ids)
        columns: Mapping[str, Ragged] = {"input_ids": found}
        if self.options["labels"]:
            values = np.where(np.array(said, dtype=np.bool_), found.values, np.int32(IGNORED))
            columns = {**columns, "labels": Ragged(values, found.offsets)}
        for key, column in columns.items():
            table = table.append_column(key, column.to_arrow())
        return run.with_block(block.with_data(table))
