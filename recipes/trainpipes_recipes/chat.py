from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trainpipes import Pipeline
from trainpipes_recipes.chats import conversations
from trainpipes_recipes.inputs import CONVERSATIONS, PAIRS, Input, OnError, documented

__all__ = ["chat"]

log = logging.getLogger("trainpipes")


@documented
def chat(
    files: Any,
    tokenizer: Any,
    *,
    messages: str | None = None,
    prompt: str | None = None,
    tools: str | None = None,
    template: str | None = None,
    roles: Mapping[str, str] | None = None,
    train: bool = True,
    on_error: OnError | None = None,
    parse_arguments: bool = True,
    max_length: int = 2048,
    packed: bool = False,
    batch_size: int = 8,
    balance: int | None = None,
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    drop_last: bool = True,
    cache: bool | str = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches for fine-tuning a causal language model on conversations of any number of turns.

    The tokenizer's chat template writes them, and only the assistant's tokens are in the loss. Each
    batch is a dict of int64 tensors ``[B, L]``, B = ``batch_size``, L its longest row:

        input_ids        the conversation's tokens, then padding
        attention_mask   1 on tokens, 0 on padding
        labels           input_ids on the assistant's turns, with tool calls and the token that ends each
                         turn, -100 elsewhere

    Labels are not shifted: compare the logits at position t with the label at t + 1.

    A row is a list of messages, in OpenAI's layout ({"role", "content"}, and "tool_calls") or
    ShareGPT's ({"from", "value"}), without pictures; ``conversations`` says which are bad. A
    message with "weight" 0 or "train" False is not in the loss. For pairs of prompt and response
    use ``sft``.

    Args:
        tokenizer: a fast tokenizer of transformers, or its name or folder.
        messages: column of the conversations; by default the first of messages, conversations,
            conversation, dialog and chat.
        prompt: column of messages before these, which are not in the loss; by default, as in TRL, the
            first of a pair of columns such as "prompt" and "completion" that hold messages.
        tools: column of the tools that the assistant may call: lists of JSON schemas, or these as
            JSON text.
        template: a Jinja template, in place of the tokenizer's own: needed if that writes earlier
            turns differently from the last turn. Mark the assistant's turns by ``{% generation %}``.
        on_error: for bad rows, and rows cut before the assistant speaks: "raise", "skip" (logs how
            many), or "keep". None raises for the former, and warns of the latter once.
        parse_arguments: give tool calls' arguments to the template as dicts where they are JSON
            text.
        max_length: the most tokens of a row; longer ones lose their end.
        drop_last: to train, leave out the short batch at the end of an epoch, unless ``packed``.

    >>> import pathlib, tempfile, transformers, trainpipes as tp
    >>> from trainpipes_recipes.samples import write_tokenizer
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> write_tokenizer(folder, [("1 + 1?", "2")])
    >>> tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    >>> talk = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    >>> (batch,) = chat(tp.from_dataset([{"messages": talk}]), tokenizer, batch_size=1, num_shards=1)
    >>> print(tokenizer.decode(batch["input_ids"][0]))
    <|im_start|>user
    1 + 1?<|im_end|>
    <|im_start|>assistant
    2<|im_end|>
    <BLANKLINE>
    >>> print(tokenizer.decode(batch["labels"][0][batch["labels"][0] != -100]))
    2<|im_end|>
    <BLANKLINE>
    """
    data = Input("chat", files, storage_options)
    rows = data.tokenized(
        tokenizer, ["input_ids", "labels"], named=[messages, prompt, tools],
        shaping={"roles": roles}, on_error=on_error,
        chat_template={
            "max_length": max_length, "template": template, "parse_arguments": parse_arguments,
        },
    )  # fmt: skip
    if rows is None:
        if tools is None and messages is None and "tools" in data.columns:
            log.warning('chat: column "tools" is not used: tools="tools" shows it to the model')
        if prompt is not None or (messages is None and _in_two_columns(data)):
            known = [(prompt or "", name) for (name,) in CONVERSATIONS if name != prompt]
            options = {"prompt": prompt, "messages": messages}
            prompt, messages = data.find(options, (*known, *PAIRS))
        else:
            (messages,) = data.find({"messages": messages}, CONVERSATIONS)
        data.warn_of_unused(messages, prompt, "tools")
        rows = data.rows([name for name in (messages, prompt, tools) if name is not None])
        rows = conversations(rows, messages, prompt=prompt, roles=roles, on_error=on_error)
        rows = rows.chat_template(
            tokenizer, messages, template=template, prompt=prompt, tools=tools,
            parse_arguments=parse_arguments, max_length=max_length, on_error=on_error,
        ).select("input_ids", "labels")  # fmt: skip
    rows = data.arrange(rows, train, buffer_size, seed, num_shards, cache)
    length = max_length if packed else None
    return data.batches(
        rows, batch_size, drop_last=train and drop_last, packed=length, seed=seed,
        balance=balance, train=train,
    )  # fmt: skip


def _in_two_columns(data: Input) -> bool:
    """Whether there are columns of messages and of those before them, and none of conversations."""
    there = {*data.columns}
    pair = next((names for names in PAIRS if {*names} <= there), None)
    if pair is None or any({*names} <= there for names in CONVERSATIONS):
        return False
    return isinstance(data.first(pair[1]), list)
