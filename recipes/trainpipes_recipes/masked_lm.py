from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainpipes import Pipeline
from trainpipes_recipes.inputs import TEXTS, Input, OnError, documented

__all__ = ["masked_lm"]


@documented
def masked_lm(
    files: Any,
    tokenizer: Any,
    *,
    text: str | None = None,
    train: bool = True,
    on_error: OnError | None = None,
    max_length: int = 512,
    mlm_probability: float = 0.15,
    whole_words: bool = False,
    batch_size: int = 32,
    buffer_size: int = 40_960,
    seed: int = 0,
    num_shards: int = 24,
    drop_last: bool = True,
    cache: bool | str = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Batches for masked language modeling, as BERT is trained.

    Each is a dict of int64 tensors ``[B, L]``, B = ``batch_size``, L its longest row:

        input_ids        the text's tokens and special tokens, then padding; of the chosen tokens, 80 %
                         become the mask token, 10 % a random token, and 10 % stay
        attention_mask   1 on tokens, 0 on padding
        labels           the original ids of the chosen tokens; -100 elsewhere

    The choice differs from epoch to epoch. Labels are not shifted: compare the logits at position t
    with the label at t. Tokens beyond ``max_length`` are cut off: cut long documents first.

    Args:
        tokenizer: as in ``tokenize``, with a mask token.
        text: column of the texts; by default the first of text, content, document and body.
        train: False to evaluate: every row once. A ``Loader`` with ``epoch=0`` hides
            the same tokens each time.
        max_length: the most tokens of a row, special tokens included.
        mlm_probability: of choosing a token, or a word, 0 to 1.
        whole_words: choose all tokens of a word.
        seed: for the order of rows and the choice of tokens.

    >>> import trainpipes as tp
    >>> from tokenizers import Tokenizer, models
    >>> words = Tokenizer(models.WordLevel({"[MASK]": 0, "a": 1, "b": 2, "c": 3, "d": 4}, "[MASK]"))
    >>> _ = words.add_special_tokens(["[MASK]"])
    >>> rows = tp.from_dataset([{"text": word} for word in "abcd"])
    >>> batch = masked_lm(rows, words, mlm_probability=0.5, batch_size=4, num_shards=1, seed=3).peek()
    >>> batch["input_ids"].T, batch["labels"].T
    (tensor([[1, 0, 4, 2]]), tensor([[-100,    3, -100, -100]]))
    """
    data = Input("masked_lm", files, storage_options)
    rows = data.tokenized(
        tokenizer, ["input_ids"], named=[text], on_error=on_error,
        tokenize={"max_length": max_length, "add_eos": False},
    )  # fmt: skip
    if rows is None:
        (text,) = data.find({"text": text}, TEXTS)
        rows = data.rows([text])
        rows = rows.tokenize(tokenizer, text, max_length=max_length, on_error=on_error)
    rows = data.arrange(rows, train, buffer_size, seed, num_shards, cache)
    rows = rows.mask_tokens(mlm_probability, whole_words=whole_words, seed=seed)
    return rows.batch(batch_size, drop_last=train and drop_last).pad_collate(padding_side="right")
