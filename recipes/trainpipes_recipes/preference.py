"""Preferences: a prompt, a response that is chosen and one that is rejected, for DPO and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainpipes import Pipeline, SchemaError
from trainpipes.stages.targets import OnError
from trainpipes_recipes.chats.bad_rows import EmptyTexts, checked
from trainpipes_recipes.chats.conversations import conversations
from trainpipes_recipes.chats.shared_prompt import SplitPrompt
from trainpipes_recipes.inputs import PREFERENCES, PROMPTS, Input, shuffled

__all__ = ["preference"]


def preference(
    files: Any,
    tokenizer: Any,
    *,
    prompt: str | None = None,
    chosen: str | None = None,
    rejected: str | None = None,
    template: str | None = None,
    roles: Mapping[str, str] | None = None,
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
    """Batches for preference optimisation (DPO and its kin) and for reward models.

    Each is a dict of int64 tensors, B = ``batch_size``, L the longest chosen row of the batch, M the longest
    rejected one:

        chosen_input_ids          [B, L]  the prompt's tokens, then the response's, its end, then padding
        chosen_attention_mask     [B, L]  1 where there is a token, 0 where there is padding
        chosen_labels             [B, L]  the ids of the response and its end, -100 elsewhere
        rejected_input_ids        [B, M]  and the same two for the response that is rejected
        rejected_attention_mask   [B, M]
        rejected_labels           [B, M]

    Labels are not shifted: compare the logits at position t with the label at t + 1. A reward model takes no
    labels, and scores the last token where the mask is 1.

    Rows hold texts, or conversations, as the first row tells: lists of messages in OpenAI's or ShareGPT's
    layout, which the tokenizer's chat template turns into text. The prompt of conversations is a column of
    messages, or the messages that both share at their start. Not for pairs without a prompt, and not for
    more than two responses. A row that is too long loses its end, and if its prompt alone is too long,
    nothing of it is learnt: choose ``max_length`` so that few rows are.

    Args:
        files: files of any format that ``Input`` knows (Parquet, JSON lines, Arrow, ...): path, folder, glob,
            any fsspec URL, or a list of these; or a pipeline of rows.
        tokenizer: for texts whatever ``tokenize`` takes: path of a ``tokenizer.json``, "bytes", an object.
            For conversations a fast tokenizer of transformers, or a local directory of one.
        prompt: column of the model's input. Left out, the first of prompt, question, instruction, input and
            query that is there; the choice is logged. Conversations that start with the prompt need none.
        chosen: column of the better response. Left out, it and ``rejected`` are chosen + rejected or other
            common names (``trainpipes_recipes.inputs.PREFERENCES``).
        rejected: column of the worse response.
        template: for conversations, a Jinja template in place of the tokenizer's own.
        roles: for conversations, other names of roles: ``{"narrator": "system"}``.
        on_error: for rows with an empty response, or whose roles are in the wrong order; and for rows one of
            whose sides has no target, since its prompt alone fills ``max_length``. "raise" names the first of
            either; "skip" leaves both out, and the log counts them; "keep" takes them as they are. None
            raises for the former, and warns of the latter once.
        max_length: the most tokens of prompt and response together, the end token included.
        batch_size: rows in a batch.
        buffer_size: the fewest rows that the shuffle mixes with each other.
        seed: for the order of rows.
        num_shards: a multiple of every number of ranks that the run may have.
        drop_last: leave out the short batch at the end of an epoch.
        cache: keep token ids on disk, so that later epochs and runs read them instead of tokenizing: True for
            the folder of ``tp.cache``, or a folder. Batches and states are the same.
        storage_options: options of the file system, as fsspec takes them.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " three"}])
    >>> (batch,) = preference(rows, "bytes", batch_size=1, num_shards=1)
    >>> {name: tuple(tensor.shape) for name, tensor in batch.items() if "labels" in name}
    {'chosen_labels': (1, 10), 'rejected_labels': (1, 14)}
    >>> batch["chosen_labels"][0].tolist()  # bytes, and 256 for the end
    [-100, -100, -100, -100, -100, -100, -100, 32, 50, 256]
    """
    given = Input("preference", files, storage_options)
    names = [*_names("chosen").values(), *_names("rejected").values()]
    rows = given.tokenized(
        tokenizer, names, named=[prompt, chosen, rejected], on_error=on_error,
        tokenize={"max_length": max_length, "add_eos": True},
        chat_template={"max_length": max_length, "template": template},
    )  # fmt: skip
    if rows is None:
        rows = _tokenized(
            given, tokenizer, prompt, chosen, rejected, max_length, template, roles, on_error
        ).select(*names)
    if cache:  # else tokenizing waits until rows are dealt, wherever it is written
        rows = rows.cache(None if cache is True else cache)
    return (
        shuffled(rows, buffer_size, seed=seed, num_shards=num_shards)
        .batch(batch_size, drop_last=drop_last)
        .pad_collate(
            mask={f"{side}_input_ids": f"{side}_attention_mask" for side in ("chosen", "rejected")},
            columns={f"{side}_labels": {"value": -100} for side in ("chosen", "rejected")},
        )
    )


def _tokenized(
    given: Input,
    tokenizer: Any,
    prompt: str | None,
    chosen: str | None,
    rejected: str | None,
    max_length: int,
    template: str | None,
    roles: Mapping[str, str] | None,
    on_error: OnError | None,
) -> Pipeline:
    """Rows of ids, of texts or of conversations."""
    chosen, rejected = given.find({"chosen": chosen, "rejected": rejected}, PREFERENCES)
    first = given.first(chosen)
    if not isinstance(first, str | list | tuple | None):
        raise SchemaError(
            f"preference: column {chosen!r} holds texts or lists of messages, got {first!r:.80}"
        )
    if isinstance(first, list | tuple):
        rows, prompt = _conversations(given, prompt, chosen, rejected, roles, on_error)
        for side, column in (("chosen", chosen), ("rejected", rejected)):
            rows = rows.chat_template(
                tokenizer,
                column,
                prompt=prompt,
                template=template,
                max_length=max_length,
                on_error=on_error,
            ).rename(_names(side))
    else:
        (prompt,) = given.find({"prompt": prompt}, PROMPTS)
        rows = given.prompted(prompt, None, [prompt, chosen, rejected])
        rows = checked(rows, EmptyTexts((chosen, rejected)), on_error)
        for side, column in (("chosen", chosen), ("rejected", rejected)):
            rows = rows.tokenize(
                tokenizer, [prompt, column], max_length=max_length, add_eos=True, labels=column,
                keep_text=True, on_error=on_error,
            ).rename(_names(side))  # fmt: skip
    return rows


def _conversations(
    given: Input,
    prompt: str | None,
    chosen: str,
    rejected: str,
    roles: Mapping[str, str] | None,
    on_error: OnError | None,
) -> tuple[Pipeline, str]:
    """Rows with columns of messages, and the name of the one that holds the prompt."""
    if prompt is None:
        common = [name for (name,) in PROMPTS if name in given.columns]
        prompt = next((name for name in common if not isinstance(given.first(name), str)), None)
    if prompt is None:
        prompt = "shared prompt"
        rows = given.rows([chosen, rejected]).with_columns(SplitPrompt(chosen, rejected, prompt))
    else:
        rows = given.rows([prompt, chosen, rejected])
    for column in (chosen, rejected):
        rows = conversations(rows, column, prompt=prompt, roles=roles, on_error=on_error)
    return rows, prompt


def _names(side: str) -> dict[str, str]:
    return {"input_ids": f"{side}_input_ids", "labels": f"{side}_labels"}
