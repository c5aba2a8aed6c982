from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trainpipes import Pipeline, SchemaError
from trainpipes_recipes.chats import checked
from trainpipes_recipes.inputs import CONVERSATIONS, PROMPTS, Input, OnError, documented
from trainpipes_recipes.prompt_rows import (
    Groups,
    PromptRows,
    ShortPrompts,
    check_prompts,
    check_tools,
)

__all__ = ["prompts"]


@documented
def prompts(
    files: Any,
    tokenizer: Any = None,
    *,
    prompt: str | None = None,
    context: str | None = None,
    tools: str | None = None,
    template: str | None = None,
    roles: Mapping[str, str] | None = None,
    parse_arguments: bool = True,
    train: bool = True,
    on_error: OnError | None = None,
    max_length: int | None = None,
    num_generations: int = 1,
    batch_size: int | None = 8,
    output: Literal["ids", "text"] = "ids",
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    drop_last: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Prompts for reinforcement learning and for inference, each with all that its row holds.

    The prompt is the column "prompt": text, or messages. The other columns (answers, tests, settings)
    stay as they are, as Python values. What an item is:

        no tokenizer               a row; of ``batch_size`` rows a list. Messages stay messages.
        output="text"              the same, with the text that the chat template makes of messages,
                                   up to where the response begins: the assistant's message that ends
                                   a conversation is left out
        output="ids"               the same as text, with the token ids in a list "input_ids". A batch
                                   is a dict: int64 ``input_ids`` and ``attention_mask`` [B, L], padded
                                   on the left with 0, and a list of B values for each other column

    With ``num_generations`` each prompt comes that often, side by side, and never in two batches. The
    order is that of TRL's ``RepeatSampler`` for the same prompts: ``mini_repeat_count`` is
    ``num_generations``, and its ``batch_size`` the prompts of one batch of all ranks.

    Args:
        tokenizer: for texts as in ``tokenize``; for messages as in ``chat``. None leaves prompts as
            they are.
        prompt: column of the prompt; by default the first of prompt, question, instruction, input and
            query, or else of messages and conversations.
        context: column added to a prompt that is text, as in ``sft``; it stays in the row, too.
        tools: column of the tools that the chat template writes: lists of JSON schemas, or these as
            JSON text.
        template: for messages, a Jinja template in place of the tokenizer's own.
        parse_arguments: as in ``chat``.
        on_error: for prompts that are null, empty or longer than ``max_length``, and columns of prompts
            that end with an assistant's message: None or "raise" names the first; "skip" leaves them out
            and logs how many; a ``Quarantine`` also lists them; "keep" takes them but for nulls, and
            cuts the ids of long ones on the left.
        max_length: the most tokens of a prompt.
        num_generations: how often each prompt comes in its batch.
        batch_size: rows in a batch, a multiple of ``num_generations``; None for single rows, as a
            ``WorkQueue`` hands out.
        output: "ids", or "text".

    >>> import trainpipes as tp
    >>> sums = tp.from_dataset([{"question": "1 + 1?", "answer": 2}, {"question": "2 + 2?", "answer": 4}])
    >>> (batch,) = prompts(sums, batch_size=4, num_generations=2, num_shards=1, train=False)
    >>> [(row["prompt"], row["answer"]) for row in batch]
    [('1 + 1?', 2), ('1 + 1?', 2), ('2 + 2?', 4), ('2 + 2?', 4)]
    """
    check_prompts(tokenizer, max_length, num_generations, batch_size, output, on_error)
    data = Input("prompts", files, storage_options)
    (prompt,) = data.find({"prompt": prompt}, (*PROMPTS, *CONVERSATIONS))
    is_text = isinstance(data.first(prompt), str | None)
    check_tools(tools, data.columns, is_text, template)
    if prompt != "prompt" and "prompt" in data.columns:
        way = 'rename() it before, or leave it out with drop_columns("prompt")'
        raise SchemaError(f"prompts({prompt=}): the rows have a column 'prompt' already; {way}")
    context = data.context(prompt, context) if is_text or context else None
    rows = data.arrange(data.rows(), train, buffer_size, seed, num_shards)
    if prompt != "prompt":
        rows = rows.rename({prompt: "prompt"})
    stage = PromptRows(
        "prompt", roles=None if is_text else (roles or {}), on_error=on_error, tools=tools,
        tokenizer=None if is_text else tokenizer, template=template, answers=(prompt,) in CONVERSATIONS,
        parse_arguments=None if parse_arguments else False, context=context,
    )  # fmt: skip
    rows = checked(rows, stage)
    if tokenizer is not None and (output == "ids" or max_length is not None):
        cut = max_length if on_error == "keep" else None
        rows = rows.tokenize(
            tokenizer, "prompt", max_length=cut, truncation_side="left", add_special_tokens=is_text,
            keep_text=True,
        )  # fmt: skip
        if max_length is not None and cut is None:
            rows = checked(
                rows, ShortPrompts("input_ids", on_error=on_error, max_length=max_length)
            )
        if output == "text":
            rows = rows.drop_columns("input_ids")
    if batch_size is None:
        return rows
    rows = rows.batch(batch_size // num_generations, drop_last=train and drop_last)
    ids = tokenizer is not None and output == "ids"
    return rows.then(Groups(num_generations, ids))
