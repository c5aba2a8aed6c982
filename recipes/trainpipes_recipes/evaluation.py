"""Evaluation: every row once, in file order, each with its number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trainpipes import ConfigError, Pipeline
from trainpipes.stages.targets import OnError
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
    on_error: OnError | None = None,
    max_length: int = 1024,
    truncation_side: Literal["right", "left"] = "right",
    padding_side: Literal["right", "left"] = "right",
    batch_size: int = 8,
    num_shards: int = 24,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches for evaluation: every row once in file order, the last batch as short as it comes.

    Each is a dict of tensors, B rows, at most ``batch_size``, L the longest row of the batch:

        input_ids        int64 [B, L]: the tokens of the prompt, of the response, end-of-text, then
                         padding; without a response, the tokens of the prompt or text, then padding
        attention_mask   int64 [B, L]: 1 where input_ids holds a token, 0 where it holds padding
        labels           int64 [B, L], with a response: input_ids on the response and its end-of-text, -100
                         elsewhere, as in ``sft``
        row              int64 [B]: the number of the row in file order over all files, from 0

    and the columns of ``keep``: numbers as tensors ``[B]``, all else as lists of B Python objects.

    On several ranks, rank r of R gets batches r, r + R, … of the one sequence: together they give every row
    once, and repeat none. So one rank may get a batch more than another: gather once, after the loop, not in
    it, and put predictions back in order by "row":

        found = torch.full([rows], -1)                    # rows: the sum of all ranks' rows
        for row, prediction in of_all_ranks:              # torch.distributed.all_gather_object
            found[row] = prediction

    For a mean, add up sums and counts and ``all_reduce`` both; the mean of the batches' means would give rows
    of short batches more weight. In the loop call the model itself, not its ``DistributedDataParallel``,
    which waits for all ranks in some modes. Each rank reads all files, and tokenizes only its own rows.

    Not for training: the order is always the same, and rows are not grouped by length.

    Args:
        files: files of any format that ``Input`` knows (Parquet, JSON lines, CSV, Arrow, ...): path, folder,
            glob, any fsspec URL, or a list of these; or a pipeline of rows in file order. A pipeline
            with ``enumerate(output_column="row")`` keeps its numbers: put that before a filter. The rows that
            a filter keeps also come once each, but not in file order.
        tokenizer: whatever ``tokenize`` takes: path of a ``tokenizer.json``, "bytes", an object.
        prompt: column of the model's input. Left out, it and ``response`` are the first pair of
            ``trainpipes_recipes.inputs.PAIRS`` that is there; the choice is logged.
        response: column of the text to score. If only ``prompt`` is given, there is no response: for
            generation, with ``padding_side="left"`` and ``keep=["answer"]``.
        context: column that is added to the prompt, after an empty line, where it holds text. Left out,
            "input" beside "instruction", as in Alpaca's rows; "" for none.
        text: column of text to score, or to classify, instead of prompt and response. Left out, and if no
            pair is there, the first of text, content, document and body.
        keep: columns to pass on unchanged: ids, references, class labels. A prompt that is kept is the one
            that the model is given, with its context.
        on_error: with a response, for rows without a target, whose prompt alone fills ``max_length``: None
            warns of the first in each process; "raise" names the first; "skip" leaves them out, and rows
            whose text is null, and the log counts them; "keep" takes them as they are.
        max_length: the most tokens of a row.
        truncation_side: "right" cuts the end of a long row, "left" its start.
        padding_side: "right" or "left"; "left" for generation.
        batch_size: rows in a batch.
        num_shards: a multiple of every number of ranks that the run may have.
        storage_options: options of the file system, as fsspec takes them.

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
        tokenizer, ["row", *kept, "input_ids"], named=[prompt, response, context, text], on_error=on_error,
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
        add_eos=response is not None,
        labels=response,
        keep_text=True,
        on_error=on_error,
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
    if any(stage.options["output_column"] == "row" for stage in own):
        return rows
    return rows.enumerate(output_column="row")
