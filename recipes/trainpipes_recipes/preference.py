from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainpipes import ConfigError, Pipeline, SchemaError
from trainpipes_recipes.chats import (
    ROLES,
    CheckedRows,
    SplitPrompt,
    checked,
    conversations,
    shared_start,
    to_messages,
)
from trainpipes_recipes.inputs import PREFERENCES, PROMPTS, Input, OnError, documented

__all__ = ["preference"]

SIDES = ("chosen", "rejected")


@documented
def preference(
    files: Any,
    tokenizer: Any,
    *,
    prompt: str | None = None,
    chosen: str | None = None,
    rejected: str | None = None,
    template: str | None = None,
    roles: Mapping[str, str] | None = None,
    train: bool = True,
    on_error: OnError | None = None,
    max_length: int = 1024,
    batch_size: int = 8,
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    drop_last: bool = True,
    cache: bool | str = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches for preference optimization (DPO and its kin) and for reward models.

    Each is a dict of int64 tensors, B = ``batch_size``, L its longest chosen row, M the longest
    rejected response:

        chosen_input_ids          [B, L]  the prompt's tokens, then the response's, its end, then padding
        chosen_attention_mask     [B, L]  1 on tokens, 0 on padding
        chosen_labels             [B, L]  the ids of the response and its end, -100 elsewhere
        rejected_input_ids        [B, M]  and the same two for the response that is rejected
        rejected_attention_mask   [B, M]
        rejected_labels           [B, M]

    Labels are not shifted: compare the logits at position t with the label at t + 1. A reward model
    takes no labels, and scores the last token where the mask is 1.

    Rows hold texts or conversations, as the first row shows; conversations are as in ``chat``, and
    their prompt is a column of messages, or those that both share at their start. A row that is too
    long loses its end.

    Args:
        tokenizer: for texts as in ``tokenize``; for conversations as in ``chat``.
        prompt: column of the model's input; by default the first of prompt, question, instruction,
            input and query. Where both responses start with the prompt, whole conversations or texts of
            dialogues, none is needed: what they share is the prompt.
        chosen: column of the better response; by default it and ``rejected`` are the first pair of
            ``trainpipes_recipes.inputs.PREFERENCES``.
        rejected: column of the worse response.
        template: for conversations, a Jinja template in place of the tokenizer's own.
        roles: for conversations, other names of roles: ``{"narrator": "system"}``.
        on_error: for rows with an empty response or roles in the wrong order, and rows whose prompt
            alone fills ``max_length``: "raise", "skip" (logs how many), or "keep". None raises for
            the former, and warns of the latter once.
        max_length: the most tokens of prompt and response together, with the end token.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " three"}])
    >>> (batch,) = preference(rows, "bytes", batch_size=1, num_shards=1)
    >>> {name: tuple(tensor.shape) for name, tensor in batch.items() if "labels" in name}
    {'chosen_labels': (1, 10), 'rejected_labels': (1, 14)}
    >>> batch["chosen_labels"][0].tolist()  # bytes, and 256 for the end
    [-100, -100, -100, -100, -100, -100, -100, 32, 50, 256]
    """
    data = Input("preference", files, storage_options)
    columns = [f"{side}_{name}" for side in SIDES for name in ("input_ids", "labels")]
    rows = data.tokenized(
        tokenizer, columns, named=[prompt, chosen, rejected], shaping={"roles": roles},
        on_error=on_error,
        tokenize={"max_length": max_length, "add_eos": True},
        chat_template={"max_length": max_length, "template": template},
    )  # fmt: skip
    if rows is None:
        names = data.find({"chosen": chosen, "rejected": rejected}, PREFERENCES)
        first = data.first(names[0])
        if not isinstance(first, str | list | None):
            said = f"preference: column {names[0]!r} holds texts or lists of messages"
            raise SchemaError(f"{said}, got {first!r:.80}")
        are_texts = not isinstance(first, list)
        if are_texts and template is not None:
            way = "write the texts with it by map(), or leave it out"
            raise ConfigError(
                f"preference(template) is for conversations, and rows hold texts: {way}"
            )
        common = [name for (name,) in PROMPTS if prompt is None and name in data.columns]
        if are_texts and not common and prompt is None and _share_a_start(data, names):
            prompt = "shared prompt"
            data.warn_of_unused(*names)
            rows = data.rows(names).then(SplitPrompt(names[0], names[1], prompt))
        elif are_texts:
            (prompt,) = data.find({"prompt": prompt}, PROMPTS)
            data.warn_of_joint(prompt, names[0])
            rows = data.prompted(prompt, None, [prompt, *names])
        else:
            prompt = next((n for n in common if not isinstance(data.first(n), str)), prompt)
            text = prompt or next(iter(common), None)
            assert isinstance(first, list)
            begin = to_messages(first[:1], {**ROLES, **(roles or {})}, names[0])
            alone = prompt or [turn["role"] for turn in begin] == ["assistant"]
            if alone and text and isinstance(data.first(text), str):
                said = f"column {text!r} holds text, and {names[0]!r} and {names[1]!r} messages"
                way = f'make messages of it with map(): [{{"role": "user", "content": row[{text!r}]}}]'
                raise SchemaError(f"preference: {said}: {way}")
            data.warn_of_unused(prompt, *names)
            rows = data.rows([*names] if prompt is None else [prompt, *names])
            if prompt is None:
                prompt = "shared prompt"
                rows = rows.then(SplitPrompt(names[0], names[1], prompt))
        for name in names:
            if are_texts:
                rows = checked(rows, CheckedRows(name, on_error=on_error))
            else:
                rows = conversations(rows, name, prompt=prompt, roles=roles, on_error=on_error)
        for side, name in zip(SIDES, names, strict=True):
            if are_texts:
                rows = rows.tokenize(
                    tokenizer, concat=[prompt, name], max_length=max_length, add_eos=True, labels=name,
                    keep_text=True, on_error=on_error,
                )  # fmt: skip
            else:
                rows = rows.chat_template(
                    tokenizer, name, prompt=prompt, template=template, max_length=max_length,
                    on_error=on_error,
                )  # fmt: skip
            rows = rows.rename({made: f"{side}_{made}" for made in ("input_ids", "labels")})
        rows = rows.select(*columns)
    rows = data.arrange(rows, train, buffer_size, seed, num_shards, cache)
    return rows.batch(batch_size, drop_last=train and drop_last).pad_collate(
        padding_side="right",
        mask={f"{side}_input_ids": f"{side}_attention_mask" for side in SIDES},
        columns={f"{side}_labels": {"value": -100} for side in SIDES},
    )


def _share_a_start(data: Input, names: Sequence[str]) -> bool:
    """Whether the first two texts begin with the same words, as Anthropic's dialogues do."""
    chosen, rejected = map(data.first, names)
    return isinstance(rejected, str) and shared_start(chosen or "", rejected) > 0
