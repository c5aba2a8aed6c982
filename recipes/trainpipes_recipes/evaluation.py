"""Evaluation: every row once, in file order, each with its number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trainpipes import ConfigError, Pipeline
from trainpipes_recipes.inputs import PAIRS, TEXTS, Input, with_context

__all__ = ["evaluation", "numbered"]


def evaluation(
    files: Any,
    tokenizer: Any,
    *,
    prompt: str | None = None,
    response: str | None = None,
    context: str | None = None,
    text: str | None = None,
    keep: str | Sequence[str] = (),
    max_length: int = 1024,
    truncation_side: Literal["right", "left"] = "right",
    padding_side: Literal["right", "left"] = "right",
    batch_size: int = 8,
    num_shards: int = 24,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches for evaluation: every row once in file order, the last batch as short as it comes.

    Each is a dict of tensors, B rows, at most ``batch_size``, L the longest row of the batch:

        input_ids        int64 [B, L]: the prompt's tokens, the response's, end-of-text, then padding; of
                         prompts alone, or of texts, their tokens and padding
        attention_mask   int64 [B, L]: 1 where input_ids holds a token, 0 where it holds padding
        labels           int64 [B, L], with a response: input_ids on the response and its end-of-text, -100
                         elsewhere, as ``sft`` has them
        row              int64 [B]: the number of the row in file order over all files, from 0

    and the columns of ``keep``: tensors of numbers ``[B]``, lists of B Python objects of anything else.

    On several ranks, rank r of R gets batches r, r + R, … of the one sequence: together they give every row
    once, and nothing is repeated to even them out. So a rank may get a batch more than another: gather once,
    after the loop, not in it, and put predictions back in order by "row":

        found = torch.full([rows], -1)                    # rows: the sum of all ranks' rows
        for row, prediction in of_all_ranks:              # torch.distributed.all_gather_object
            found[row] = prediction

    For a mean, add up sums and counts and ``all_reduce`` both; a mean of batches' means weighs the rows of
    short batches more. In the loop call the model itself, not its ``DistributedDataParallel``, which waits
    for all ranks in some modes. Each rank reads all files, and tokenizes only its own rows.

    Not for training: the order is always the same, and rows are not grouped by length.

    Args:
        files: files of any format that ``Input`` knows (Parquet, JSON lines, CSV, Arrow, ...): path, folder,
            glob, any fsspec URL, or a list of these; or a pipeline of rows in file order. One that has an
            ``enumerate(column="row")`` keeps its numbers: put that before a filter. The rows that a filter
            leaves come once each, too, but not in file order.
        tokenizer: whatever ``tokenize`` takes: path of a ``tokenizer.json``, "bytes", an object.
        prompt: column of what is given to the model. Left out, it and ``response`` are the first pair of
            ``trainpipes_recipes.inputs.PAIRS`` that is there; which is logged.
        response: column of what is scored. Left out beside a ``prompt`` that is given, there is none: for
            generation, with ``padding_side="left"`` and ``keep=["answer"]``.
        context: column that is added to the prompt, after an empty line, where it holds text. Left out,
            "input" beside "instruction", as Alpaca's rows have it; "" for none.
        text: column of text to score as it is, or to classify, instead of both. Left out where there is no
            pair, the first of text, content, document and body.
        keep: columns to pass on as they are: ids, references, class labels; of the prompt, what the model
            is given.
        max_length: tokens of a row at most.
        truncation_side: "left" cuts the start of what is too long.
        padding_side: "left" for generation.
        batch_size: rows in a batch.
        num_shards: a multiple of every number of ranks to evaluate on.
        storage_options: for the file system, as fsspec takes them.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"text": "one"}, {"text": "two"}, {"text": "three"}])
    >>> [batch["row"].tolist() for batch in evaluation(rows, "bytes", batch_size=2)]
    [[0, 1], [2]]
    """
    given = Input("evaluation", files, storage_options)
    if text is not None and any(name is not None for name in (prompt, response, context)):
        raise ConfigError(
            f"evaluation takes prompt, context and response, or text, got prompt={prompt!r}, "
            f"context={context!r}, response={response!r} and text={text!r}"
        )
    kept = [keep] if isinstance(keep, str) else list(keep)
    ready = given.tokenized(
        tokenizer, ["row", *kept, "input_ids"], named=[prompt, response, context, text],
        tokenize={"max_length": max_length, "truncation_side": truncation_side},
    )  # fmt: skip
    if ready is not None:
        rows = ready.sharding_filter(num_shards, split="stride", tail="ragged")
        return rows.batch(batch_size).pad_collate(padding_side=padding_side)
    if text is None and prompt is None:
        names = set(given.columns)
        if response is not None or any(names >= set(pair) for pair in PAIRS):
            prompt, response = given.find({"prompt": None, "response": response}, PAIRS)
        else:
            (text,) = given.find({"text": None}, TEXTS)
    texts = [name for name in (prompt, response, text) if name is not None]

    columns = list(dict.fromkeys([*texts, *kept]))
    context = None if prompt is None else given.context(prompt, context)
    read = columns if context is None else list(dict.fromkeys([*columns, context]))
    rows = given.rows() if isinstance(files, Pipeline) else given.rows(read)
    rows = numbered("evaluation", rows).select("row", *read)
    if prompt is not None and context is not None:
        rows = with_context(rows, prompt, context, keep=context in kept)
    rows = rows.sharding_filter(num_shards, split="stride", tail="ragged")
    rows = rows.tokenize(
        tokenizer,
        texts,
        max_length=max_length,
        truncation_side=truncation_side,
        eos=response is not None,
        labels=response,
        keep_text=True,
    )
    made = ["input_ids"] if response is None else ["input_ids", "labels"]
    rows = rows.select("row", *dict.fromkeys(kept), *made)
    return rows.batch(batch_size).pad_collate(padding_side=padding_side)


def numbered(recipe: str, rows: Pipeline) -> Pipeline:
    """Rows in file order, each with its number in the column "row".

    Args:
        recipe: who asks, for messages.
        rows: of files, or a pipeline; one that numbers its rows in "row" already is left as it is.

    Raises:
        ConfigError: they come in another order, are dealt to ranks already, or have no end.
    """
    for stage in rows.stages:
        if stage.role in ("shuffle", "shard", "repeat") or stage.name == "mix":
            raise ConfigError(
                f"{recipe} gives every row once, in file order, and deals them to ranks itself; got rows of "
                f"{stage.name}(): leave it out, or evaluate the sources of a mix one by one"
            )
    own = [stage for stage in rows.stages if stage.name == "enumerate"]
    if any(stage.options["column"] == "row" for stage in own):
        return rows
    return rows.enumerate(column="row")
