"""Stages of the recipe ``prompts``: messages as text, long prompts found, groups of a prompt."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any

import torch

import trainpipes as tp
from trainpipes._internal.checks import require, whole_number
from trainpipes._internal.messages import need_columns
from trainpipes.interfaces.stage import made_once
from trainpipes.stages.columns import taken
from trainpipes.tokenizers.chat import Chat, messages_of, tools_of
from trainpipes_recipes.chats import ROLES, CheckedRows, to_messages

__all__ = ["Groups", "PromptRows", "ShortPrompts", "check_prompts", "check_tools"]


def check_prompts(
    tokenizer: Any,
    max_length: int | None,
    generations: int,
    size: int | None,
    output: str,
    on_error: Any,
) -> None:
    """Raise ConfigError unless these options of ``prompts`` are right, also together."""
    way = 'give it one, and output="text" for prompts as text'
    good = tokenizer is not None or max_length is None
    require(good, "prompts(max_length)", "None without a tokenizer", max_length, way)
    require(output in ("ids", "text"), "prompts(output)", '"ids" or "text"', output)
    good = output == "ids" or max_length is None or on_error != "keep"
    way = 'leave long prompts out by on_error="skip"'
    require(good, "prompts(output)", '"ids" where on_error="keep" cuts long prompts', output, way)
    whole_number(generations, 1, "prompts(num_generations)")
    if size is None:
        way = "give a batch_size, or generate several times for each prompt"
        require(generations == 1, "prompts(num_generations)", "1 for single rows", generations, way)
    else:
        good = whole_number(size, 1, "prompts(batch_size)") % generations == 0
        rule = f"a multiple of num_generations={generations}, so that no prompt is in two batches"
        require(good, "prompts(batch_size)", rule, size)


def check_tools(
    tools: str | None, columns: Sequence[str], is_text: bool, template: str | None = None
) -> None:
    """Raise unless there is a column of tools, and messages to write with it and the template."""
    good, rule = not is_text or template is None, "left out where prompts are text"
    require(good, "prompts(template)", rule, template)
    if tools is not None:
        require(not is_text, "prompts(tools)", rule, tools)
        need_columns(columns, [tools], "prompts(tools)")


class PromptRows(CheckedRows):
    """Prompts that are not empty; messages in OpenAI's layout, or as the chat template writes them. An
    assistant's message at the end is left out where rows hold ``answers``.
    """

    free = frozenset({"answers"})

    _: KW_ONLY
    tools: str | None = None
    tokenizer: Any = None
    template: str | None = None
    parse_arguments: bool | None = None
    answers: bool = False
    context: str | None = None

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if self.tokenizer is not None:
            identity |= {
                "tokenizer": None,
                "template": self._chat.fingerprint(self.tools is not None),
            }
        return identity

    @made_once
    def _chat(self) -> Chat:
        return Chat(self.tokenizer, self.template)

    def _looked_at(self, row: Any) -> tuple[Any, str | None]:
        tools_column = None if self.tokenizer is None else self.tools
        self._check_keys(row, self.column, self.context, tools_column)
        prompt, more = row[self.column], row[self.context] if self.context else None
        if prompt is None and self.on_error == "keep":
            way = 'leave such rows out by on_error="skip", or with filter()'
            raise tp.DataError(f"column {self.column!r} is null, which is no prompt to keep: {way}")
        if not isinstance(more, str | None) or (more and not isinstance(prompt, str | None)):
            said = f"column {self.context!r} goes on with prompts, and both are text"
            raise tp.SchemaError(f"{said}, got {more!r:.80} after {prompt!r:.80}")
        if isinstance(prompt, str | None):
            if more and prompt is not None:
                row = {**row, self.column: f"{prompt}\n\n{more}"}
            is_empty = not (row[self.column] or "").strip()
            return row, f"column {self.column!r}: an empty prompt" if is_empty else None
        messages = to_messages(prompt, {**ROLES, **(self.roles or {})}, self.column)
        ends_with_answer = bool(messages) and messages[-1]["role"] == "assistant"
        if ends_with_answer and self.answers:
            messages = messages[:-1]
        wrong = None
        if not messages or messages[-1]["content"] in (None, "", []):
            wrong = "the prompt has no message, or an empty one at its end"
        elif ends_with_answer and not self.answers:
            wrong = (
                "the prompt ends with a message of 'assistant', and the response begins after it"
            )
        if self.tokenizer is not None and messages:
            parsed = messages_of(messages, self.parse_arguments is not False)
            tools = tools_of(row[self.tools]) if self.tools is not None else None
            messages = self._chat.prompt(parsed, tools)  # type: ignore[assignment]
        return {**row, self.column: messages}, wrong and f"column {self.column!r}: {wrong}"


class ShortPrompts(CheckedRows):
    """Rows whose ids are not too many."""

    _: KW_ONLY
    max_length: int = 1

    def _looked_at(self, row: Any) -> tuple[Any, str | None]:
        count = len(row[self.column])
        wrong = f"a prompt of {count} tokens, and max_length is {self.max_length}"
        return row, wrong if count > self.max_length else None


class Groups(tp.BatchStage):
    """Batches with each row several times: lists of rows, or ids padded on the left and lists."""

    thread_safe = True

    num_generations: int
    ids: bool

    def apply(self, batch: Any) -> Any:
        rows = [copy.deepcopy(row) for row in batch for _ in range(self.num_generations)]
        if not self.ids:
            return rows
        odd = next((row for row in rows if row.keys() != rows[0].keys()), None)
        if odd is not None:
            got = f"a row with the keys {[*odd]} where the first of its batch has {[*rows[0]]}"
            raise tp.SchemaError(f"prompts: rows have the same keys, got {got}: give them by map()")
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        if "attention_mask" in columns:
            raise taken("attention_mask", self)
        ids = columns.pop("input_ids")
        ragged = {"input_ids": ids, "attention_mask": [[1] * len(row_ids) for row_ids in ids]}
        padded = {
            k: torch.from_numpy(tp.pad_sequences(v, dtype="int64")) for k, v in ragged.items()
        }
        return {**padded, **columns}
