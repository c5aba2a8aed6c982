from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch

from trainpipes import BatchStage, DataError, Pipeline
from trainpipes_recipes.class_lists import ClassLists
from trainpipes_recipes.folders import texts_in_folders
from trainpipes_recipes.inputs import LABELS, Input, OnError, documented, joined_pair

__all__ = ["MultiHot", "classification"]

log = logging.getLogger("trainpipes")


@documented
def classification(
    files: Any,
    tokenizer: Any,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    label: str | None = None,
    train: bool = True,
    on_error: OnError | None = None,
    classes: int | Sequence[Any] | Mapping[Any, int] | None = None,
    max_length: int = 512,
    batch_size: int = 16,
    num_buckets: int | Literal["auto"] | None = "auto",
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    drop_last: bool = True,
    cache: bool | str = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches for training a classifier of texts or pairs of texts.

    Each is a dict of tensors, B = ``batch_size``, L its longest row, C the number of classes:

        input_ids        int64 [B, L]: the tokens, with the tokenizer's special tokens, then padding; or
                         before them, where the tokenizer pads on the left, as models such as XLNet need
        attention_mask   int64 [B, L]: 1 on tokens, 0 on padding
        token_type_ids   int64 [B, L], for pairs: which of the two texts a token belongs to; not with "bytes"
                         or tiktoken, which write a pair as a single text, with an empty line in between
        labels           int64 [B]: the class, 0 to C - 1; or, where the column holds lists, float32
                         [B, C]: 1 for each class of a row, else 0

    A state loads only with the same classes. In buckets, the number of batches is not known: count
    steps, or ask ``Loader(pipe).estimate_len()``.

    Args:
        files: a folder with a folder of .txt files for each class, a text in each; files of any format with
            a column of classes; or a pipeline of rows.
        text: column of the text; by default the first of text, content, document, body, sentence
            and review, or with ``text_pair`` left out too, the first pair of
            ``trainpipes_recipes.inputs.TEXT_PAIRS``.
        text_pair: column of a second text.
        label: column of the class, of lists of classes, or of lists of a 1 or 0 for each of them; by
            default the first of ``trainpipes_recipes.inputs.LABELS``.
        train: False to evaluate: every row once. Pass the classes of the training.
        classes: the labels in the order of their class numbers; a dict from labels to class
            numbers; or the number of classes, where labels are integers. Left out, a pass over
            the labels finds them: texts in sorted order; integers, bools and ``ClassLabel`` as they
            are.
        max_length: the most tokens of a row, special tokens included; a pair's longer text is cut
            first.
        num_buckets: to train, buckets into which 1,024 rows are sorted by length; None takes rows
            as they come; "auto" is 32, or None where a shard has fewer than 16 batches.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"text": t, "label": t.isdigit()} for t in ("12", "ab", "34")])
    >>> pipe = classification(rows, "bytes", batch_size=3, num_shards=1)
    >>> pipe.peek()["labels"], pipe.stats(0, labels="labels").labels["labels"]
    (tensor([1, 1, 0]), {0: 1, 1: 2})
    """
    data = Input("classification", files, storage_options)
    if data.is_text:
        data = Input("classification", texts_in_folders("classification", files, storage_options))
        label = label or "class"
    (label,) = data.find({"label": label}, LABELS)
    ready = data.tokenized(
        tokenizer, ["input_ids", label], named=[text, text_pair], on_error=on_error,
        tokenize={"max_length": max_length, "add_eos": False, "labels": None},
    )  # fmt: skip
    texts = [] if ready is not None else data.texts(text, text_pair, label)
    labels = data.rows([label])
    several = data.first(label)
    width = vector_width(labels, label, classes) if isinstance(several, list) else None
    known: Any = classes
    counts: Any = None
    if width is not None:
        named = isinstance(classes, Sequence | Mapping) and all(isinstance(c, str) for c in classes)
        known = classes if named else width
    elif classes is None:
        known, counts = classes_of(labels, label)
        if not train and not isinstance(known, int):
            data.warn_of_own_classes()

    rows = data.rows([*texts, label]) if ready is None else ready
    if isinstance(several, list):
        rows = rows.then(ClassLists(label, width))
    rows = rows.encode_labels(label, classes=known, counts=counts)
    encoder: Any = rows.stages[-1]
    pair = len(texts) == 2
    if pair and isinstance(tokenizer, str) and tokenizer.split(":")[0] in ("bytes", "tiktoken"):
        rows, pair = joined_pair(rows, texts[0], texts[1], on_error), False
    if texts:
        columns, most = texts if pair else texts[0], max_length
        rows = rows.tokenize(tokenizer, columns, pair=pair, max_length=most, on_error=on_error)
    rows = data.arrange(rows, train, buffer_size, seed, num_shards, cache)
    if num_buckets == "auto":
        try:
            few = len(data.rows().distributed(rank=0, world_size=1)) < 16 * num_shards * batch_size
        except TypeError:  # nobody knows how many there are
            few = False
        num_buckets = None if few else 32
    if num_buckets is None or not train:
        rows = rows.batch(batch_size, drop_last=train and drop_last)
    else:
        rows = rows.bucket_by_length(
            batch_size, num_buckets=num_buckets, drop_last=drop_last, seed=seed
        )
    pipe = rows.pad_collate()
    return pipe.then(MultiHot(encoder.num_classes)) if isinstance(several, list) else pipe


def vector_width(rows: Pipeline, label: str, classes: Any) -> int | None:
    """How many values each list has, if lists hold a 1 or 0 for each class, not the classes."""
    given: Any = None if classes is None else rows.encode_labels(label, classes=classes).stages[-1]
    first = islice(rows.distributed(rank=0, world_size=1), 1000)
    held = (row[label] for row in first if row[label] is not None)
    lists = [np.atleast_1d(np.asarray(value, dtype=object)).tolist() for value in held]
    width: int = len(next(iter(lists), [])) if given is None else given.num_classes
    # Floats and bools are no class numbers: rows behind the first that are no vectors are named later.
    values = [v for one in lists for v in one]
    floats = all(isinstance(v, bool | float | np.bool_ | np.floating) for v in values)
    looked_at = lists[:1] if floats else lists
    if width < 2 or any(
        len(one) != width or any(v not in (0, 1) for v in one) for one in looked_at
    ):
        return None
    whole = all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in values)
    if width == 2 and whole and all(one[0] != one[1] for one in lists):
        said = f"lists such as {lists[0]}, which are two classes, or a 1 or 0 for each"
        way = "give the 1 or 0 as floats or bools, or the names of classes, by map()"
        raise DataError(f"classification: column {label!r} holds {said}: {way}")
    return width


def classes_of(rows: Pipeline, label: str) -> tuple[int | list[str], list[int]]:
    """The classes of the data, and the rows of each: sorted texts; or integers as they are, up to
    the largest or as many as ``ClassLabel`` has names.

    >>> import trainpipes as tp
    >>> classes_of(tp.from_dataset([{"y": "b"}, {"y": "a"}, {"y": "b"}]), "y")
    (['a', 'b'], [1, 2])
    """
    try:
        counts = rows.stats(0, labels=label).labels[label]
    except DataError as error:
        counting = f"stats(labels={label!r})"  # which nobody wrote
        error.message = error.message.replace(counting, "classification", 1)
        raise
    names: list[Any] = list(counts)
    numbers = [name for name in names if isinstance(name, int)]
    of = f"classification: column {label!r} holds"
    if not names:
        raise DataError(f"{of} no label: there are no rows, or only empty lists")
    if numbers and len(numbers) < len(names):
        both = f"{of} texts and integers, {names[0]!r} and {names[-1]!r} among them"
        raise DataError(f"{both}: give the class of each by classes={{label: class}}")
    if not numbers:
        if all(map(str.isdecimal, names)) and names != [*map(str, range(len(names)))]:
            said = (
                "%s numbers as texts, which are numbered in the order of texts: class %d is %r; %s"
            )
            order = sorted(names, key=int) if len(names) < 10 else "sorted(..., key=int)"
            way = f"make integers of them, or pass classes={order}"
            other = next(n for n, name in enumerate(names) if name != str(n))
            log.warning(said, of, other, names[other], way)
        return names, list(counts.values())

    if numbers == [-1]:
        way = "give rows with labels; to predict, a chain of tokenize(), batch() and pad_collate()"
        raise DataError(f"{of} -1 in every row, as test splits without labels do: {way}")
    named = _class_count(rows, label)
    number = max(1, *(n + 1 for n in numbers), named or 0)
    listed = f"list(rows.stats(0, labels={label!r}).labels[{label!r}])"
    if min(numbers) < 0:
        listed = str(sorted(numbers)) if len(numbers) < 10 else listed
        try:
            rows.encode_labels(label, classes=number).stats(0, labels="labels")  # says which row
        except DataError as error:
            rule = "integers are classes as they are, from 0 on"
            way = f"to number others, pass classes={listed}"
            raise DataError(f"classification: {error}; {rule}: {way}") from None
    if min(numbers) == 1 and named is None:
        said = "classification: column %r holds integers from 1 on, so that class 0 has no rows; %s"
        order = sorted(numbers) if number < 10 else listed
        log.warning(said, label, f"to number them from 0, pass classes={order}")
    if named is None and number > max(1000, 10 * len(numbers)):
        got = f"integers up to {max(numbers):,}, and only {len(numbers):,} different ones"
        way = f"pass classes={listed} to number them, or name another column"
        raise DataError(f"{of} {got}; integers are classes as they are: {way}")
    return number, [counts.get(number, 0) for number in range(number)]


def _class_count(rows: Pipeline, label: str) -> int | None:
    """How many classes a dataset of Hugging Face names, or None."""
    features = getattr(getattr(rows.stages[0], "dataset", None), "features", None)
    feature: Any = features.get(label) if isinstance(features, Mapping) else None
    names = getattr(getattr(feature, "feature", feature), "names", None)  # of lists, those inside
    return len(names) if names else None


class MultiHot(BatchStage):
    """Turns labels of several classes, int64 ``[B, K]`` filled up with -100, into float32
    ``[B, C]``: 1 for each class.
    """

    thread_safe = True

    num_classes: int

    def apply(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        labels = batch["labels"]
        there = labels >= 0
        hot = torch.zeros(len(labels), self.num_classes)
        hot[there.nonzero()[:, 0], labels[there]] = 1
        return {**batch, "labels": hot}
