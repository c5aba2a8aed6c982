"""Classification of texts, or of pairs of texts: a class for each row, or several."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from trainpipes import BatchStage, ConfigError, DataError, Pipeline
from trainpipes_recipes.inputs import LABELS, TEXT_PAIRS, TEXTS, Input, OnError, with_context

__all__ = ["MultiHot", "classification"]

log = logging.getLogger("trainpipes")


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
    """Batches for training a classifier of texts: topics, sentiment, entailment, duplicates.

    Each is a dict of tensors, B = ``batch_size``, L the longest row of the batch, C the number of classes:

        input_ids        int64 [B, L]: the tokens, with the tokenizer's special tokens, then padding
        attention_mask   int64 [B, L]: 1 where input_ids holds a token, 0 where it holds padding
        token_type_ids   int64 [B, L], for pairs: which of the two texts a token belongs to; not with "bytes"
                         or tiktoken, which write a pair as one text, with an empty line in between
        labels           int64 [B]: the class, 0 to C - 1; or, where the column holds lists, float32
                         [B, C]: 1 for each class of a row, else 0

    ``pipe.stats(0, labels="labels").labels["labels"]`` has the rows of each class, for weights in the loss.

    If ``classes`` is left out, one pass over the column of labels finds them: texts in sorted order;
    integers, bools and Hugging Face's ``ClassLabel`` stay as they are. Classes are part of a state: a resume
    with others is refused.

    Batches hold rows of about the same length, unless there are few rows. How many batches an epoch has is
    then not known before its end: count steps, or ask ``Loader(pipe).estimate_len()``.
    ``num_buckets=None`` takes rows as they come, and has a ``len()``.

    Not for numbers to predict (scores, ratings), and not for a class of each token. A text without tokens
    becomes a row of padding.

    Args:
        files: a path, folder, glob, URL, or a list of them, in any format that ``Input`` knows; or a pipeline
            of rows.
        tokenizer: anything that ``tokenize`` takes: path of a ``tokenizer.json``, "bytes", an object.
        text: column of the text. Left out, with ``text_pair`` the first of premise + hypothesis, sentence1 +
            sentence2, question1 + question2 and a few more (``trainpipes_recipes.inputs.TEXT_PAIRS``) that
            are there; or the first of text, content, document, body, sentence and review. The choice is
            logged.
        text_pair: column of a second text.
        label: column of the class, or of lists of classes. Left out, the first of label, labels, class,
            category, target, sentiment, intent and topic.
        train: False to evaluate: every row once, in file order. Pass the classes of the training.
        on_error: for rows whose text is null: "skip" leaves them out, and the log counts them; else the
            first is an error.
        classes: the labels in the order of their class numbers; a dict from labels to class numbers; or the
            number of classes, where labels are integers.
        max_length: the most tokens of a row, special tokens included; the longer text of a pair is cut first.
        batch_size: rows in a batch.
        num_buckets: to train, number of buckets into which 1,024 rows are sorted by length; None takes rows
            as they come; "auto" is 32, or None where a shard has fewer than 16 batches (6,144 rows in all by
            default): each shard fills its own buckets, and rows that do not fill a batch are left out.
        buffer_size: the fewest rows that the shuffle mixes with each other.
        seed: for the order of rows.
        num_shards: a multiple of every number of ranks that the run may have.
        drop_last: to train, leave out short batches.
        cache: keep token ids on disk for later epochs and runs: True for the folder of ``tp.cache``, or a
            folder. Batches and states are the same; the first batch of the first run waits longer.
        storage_options: options of the file system, as fsspec takes them.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"text": t, "label": t.isdigit()} for t in ("12", "ab", "34")])
    >>> pipe = classification(rows, "bytes", batch_size=3, num_shards=1)
    >>> pipe.peek()["labels"], pipe.stats(0, labels="labels").labels["labels"]
    (tensor([1, 1, 0]), {0: 1, 1: 2})
    """
    given = Input("classification", files, storage_options)
    (label,) = given.find({"label": label}, LABELS)
    ready = given.tokenized(
        tokenizer, ["input_ids", label], named=[text, text_pair], on_error=on_error,
        tokenize={"max_length": max_length},
    )  # fmt: skip
    texts = [] if ready is not None else _texts(given, text, text_pair, label)

    labels = given.rows([label])
    first, counts = _first_labels(labels, label), None
    if classes is None:
        classes, counts = _found_classes(labels, label)
        if first is not None and classes == 2 and len(set(first)) < len(first):
            raise DataError(
                f"classification: column {label!r} holds lists such as {first}, a 1 or 0 for each class, and "
                "must hold the numbers or names of a row's classes: make these by map(), or say classes="
            )
    rows = given.rows([*texts, label]) if ready is None else ready
    rows = rows.encode_labels(label, classes=classes, counts=counts)

    no_pairs = isinstance(tokenizer, str) and tokenizer.split(":")[0] in ("bytes", "tiktoken")
    if len(texts) == 2 and no_pairs:
        rows = with_context(rows, *texts).tokenize(
            tokenizer, texts[0], max_length=max_length, on_error=on_error
        )
    elif texts:
        rows = rows.tokenize(
            tokenizer, texts if len(texts) == 2 else texts[0], pair=len(texts) == 2,
            max_length=max_length, on_error=on_error,
        )  # fmt: skip
    rows = given.arrange(
        rows, train=train, buffer_size=buffer_size, seed=seed, num_shards=num_shards, cache=cache
    )
    if not train:
        num_buckets = None
    elif num_buckets == "auto":
        num_buckets = 32 if _enough(labels, 16 * num_shards * batch_size) else None
    if num_buckets is None:
        rows = rows.batch(batch_size, drop_last=train and drop_last)
    else:
        rows = rows.bucket_by_length(
            batch_size, num_buckets=num_buckets, drop_last=drop_last, seed=seed
        )
    pipe = rows.pad_collate()
    if first is not None:
        pipe = pipe.then(MultiHot(_number_of(classes)))
    return pipe


def _texts(given: Input, text: str | None, text_pair: str | None, label: str) -> list[str]:
    """The column of the text, or the two of a pair."""
    pairs = text is None and any(set(names) <= set(given.columns) for names in TEXT_PAIRS)
    if pairs or (text is None and text_pair is not None):
        asked = {"text": text, "text_pair": text_pair}
        text, text_pair = given.find(asked, TEXT_PAIRS)
    else:
        (text,) = given.find({"text": text}, (*TEXTS, ("sentence",), ("review",)))
    texts = [text] if text_pair is None else [text, text_pair]
    if label in texts:
        raise ConfigError(
            f"classification takes texts and labels from columns of their own, got {label!r} for both"
        )
    return texts


class MultiHot(BatchStage):
    """Turns labels of several classes a row, int64 ``[B, K]`` and -100 where there are fewer, into float32
    ``[B, C]``: 1 for each class of the row."""

    thread_safe = True

    num_classes: int

    def apply(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        labels = batch["labels"]
        there = labels >= 0
        hot = torch.zeros(len(labels), self.num_classes)
        hot[there.nonzero()[:, 0], labels[there]] = 1
        return {**batch, "labels": hot}


def _enough(rows: Pipeline, count: int) -> bool:
    """Whether there are so many rows; also where nobody knows."""
    try:
        return len(rows.distributed(rank=0, world_size=1)) >= count
    except TypeError:
        return True


def _first_labels(rows: Pipeline, label: str) -> list[Any] | None:
    """The labels of the first row; None where rows are of one class each."""
    for row in rows.distributed(rank=0, world_size=1):
        value = row[label]
        if isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0:
            return list(value)
        break
    return None


def _found_classes(rows: Pipeline, label: str) -> tuple[int | list[str | int], list[int]]:
    """The classes of the data, and the rows of each: texts in sorted order; integers as they are, and as many
    classes as the largest says, or as Hugging Face's ``ClassLabel`` has names.

    Args:
        rows: of the data.
        label: the column, of labels or of lists of them.

    Raises:
        DataError: there are no rows, texts and integers, negative integers, or few and large ones.

    >>> import trainpipes as tp
    >>> _found_classes(tp.from_dataset([{"y": "b"}, {"y": "a"}, {"y": "b"}]), "y")
    (['a', 'b'], [1, 2])
    """
    counts = rows.stats(0, labels=label).labels[label]
    numbers = [value for value in counts if isinstance(value, int)]
    names = list(counts)
    if not counts:
        raise DataError(f"classification: column {label!r} holds no label: there are no rows")
    if numbers and len(numbers) < len(counts):
        raise DataError(
            f"classification: column {label!r} holds texts and integers, {names[0]!r} and {names[-1]!r} "
            "among them: give the class of each by classes={label: class}"
        )
    if numbers:
        found = f"list(rows.stats(0, labels={label!r}).labels[{label!r}])"
        classes: Any = _class_names(rows, label) or max(numbers) + 1
        if min(numbers) < 0 or max(numbers) >= _number_of(classes):
            try:
                coded = rows.encode_labels(label, classes=classes)
                coded.stats(0, labels="labels")  # says in which row
            except DataError as error:
                few = sorted(numbers) if len(numbers) < 10 else found
                raise DataError(
                    f"classification: {error}; integers are classes as they are, from 0 on: to number "
                    f"others, pass classes={few}"
                ) from None
        if _number_of(classes) > max(1000, 10 * len(numbers)):
            raise DataError(
                f"classification: column {label!r} holds integers up to {max(numbers):,}, and only "
                f"{len(numbers):,} different ones; integers are classes as they are: pass "
                f"classes={found} to number them, or name another column"
            )
        return classes, [counts.get(number, 0) for number in range(_number_of(classes))]
    alike: dict[str, str | int] = {}
    for name in counts:
        other = alike.setdefault(str(name).strip().casefold(), name)
        if other != name:
            log.warning(
                "classification: labels %r and %r of column %r are two classes: pass classes={label: class} "
                "to make one of them", other, name, label,
            )  # fmt: skip
    if len(counts) == 1:
        log.warning("classification: column %r holds one class only, %r", label, names[0])
    return names, list(counts.values())


def _number_of(classes: int | Sequence[Any] | Mapping[Any, int]) -> int:
    """C, of classes as ``encode_labels`` takes them."""
    if isinstance(classes, Mapping):
        return max(classes.values()) + 1
    return classes if isinstance(classes, int) else len(classes)


def _class_names(rows: Pipeline, label: str) -> list[str | int] | None:
    """The names that a dataset of Hugging Face gives to classes; None where it gives none."""
    dataset: Any = getattr(rows.stages[0], "chosen", None)
    feature = (getattr(dataset, "features", None) or {}).get(label)
    names = getattr(getattr(feature, "feature", feature), "names", None)  # of lists, those inside
    return list(names) if names else None
