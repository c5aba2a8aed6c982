"""The recipe for masked language modelling: what its batches hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trainpipes as tp
from every_recipe import words
from trainpipes_recipes import masked_lm

TEXTS = [" ".join(str((k * 7 + n) % 200) for n in range(1 + k % 23)) for k in range(500)]


def rows() -> tp.Pipeline:
    return tp.from_dataset([{"text": text} for text in TEXTS])


def made(**options: Any) -> tp.Pipeline:
    return masked_lm(rows(), words(), **{"batch_size": 50, "num_shards": 1, **options})


def restored(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """The rows' ids as they were before any was hidden."""
    ids = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    return [row[mask == 1].tolist() for row, mask in zip(ids, batch["attention_mask"], strict=True)]


def test_every_text_is_there_once_in_an_epoch_and_can_be_restored() -> None:
    found = [tuple(row) for batch in made() for row in restored(batch)]
    wanted = [tuple(encoding.ids) for encoding in words().encode_batch(TEXTS)]
    assert sorted(found) == sorted(wanted)


def test_chosen_tokens_are_as_many_and_become_what_they_should() -> None:
    chosen = hidden = kept = tokens = 0
    for batch in made(mlm_probability=0.3):
        is_chosen = batch["labels"] != -100
        assert not (is_chosen & (batch["attention_mask"] == 0)).any()
        tokens += int(batch["attention_mask"].sum())
        chosen += int(is_chosen.sum())
        hidden += int((batch["input_ids"][is_chosen] == 0).sum())
        kept += int((batch["input_ids"] == batch["labels"]).sum())
    assert 0.28 < chosen / tokens < 0.32
    assert 0.77 < hidden / chosen < 0.83
    assert 0.08 < kept / chosen < 0.18  # a random one may be the same


def test_each_epoch_hides_others() -> None:
    pipe = made(buffer_size=1)
    first, second = list(pipe), list(pipe)
    rows_of = [
        {tuple(row): None for batch in epoch for row in restored(batch)}
        for epoch in (first, second)
    ]
    assert rows_of[0].keys() == rows_of[1].keys()
    hidden = [
        {
            (tuple(row), tuple(labels[mask == 1].tolist()))
            for batch in epoch
            for row, labels, mask in zip(
                restored(batch), batch["labels"], batch["attention_mask"], strict=True
            )
        }
        for epoch in (first, second)
    ]
    assert len(hidden[0] & hidden[1]) < len(TEXTS) / 2


def test_words_are_hidden_whole() -> None:
    continues = [words().token_to_id(f"##{digit}") for digit in range(10)]
    for batch in made(whole_words=True, mlm_probability=0.4):
        is_chosen = batch["labels"] != -100
        ids = torch.where(is_chosen, batch["labels"], batch["input_ids"])
        for row, chosen in zip(ids.tolist(), is_chosen.tolist(), strict=True):
            for place in range(1, len(row)):
                if row[place] in continues:
                    assert chosen[place] == chosen[place - 1]


def test_long_texts_are_cut() -> None:
    assert max(batch["input_ids"].shape[1] for batch in made(max_length=9)) == 9


def test_a_tokenizer_without_a_mask_is_refused() -> None:
    with pytest.raises(tp.ConfigError, match="mask"):
        next(iter(masked_lm(rows(), "bytes", num_shards=1)))
