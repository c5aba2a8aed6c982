"""Rows that leave a recipe nothing to learn: what each makes of them, on the way and tokenized ahead."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trainpipes as tp
from every_recipe import small_tokenizer
from resuming import check_resume
from trainpipes.prepare import tokenize
from trainpipes.testing import digest

pytestmark = pytest.mark.usefixtures("nothing_warned_of")

SMALL: dict[str, Any] = {"num_shards": 4, "buffer_size": 16, "batch_size": 4}
#: Every fourth prompt is short: the others fill ``max_length``.
PROMPTS = [f"{k} " * (2 if k % 4 == 0 else 200) for k in range(48)]
PAIRS = [{"prompt": prompt, "response": f" {k}"} for k, prompt in enumerate(PROMPTS)]
CHATS = [
    {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": f"{k}"}]}
    for k, prompt in enumerate(PROMPTS)
]
CHOICES = [{"prompt": p, "chosen": f" {k}", "rejected": " no"} for k, p in enumerate(PROMPTS)]

Make = Callable[..., tp.Pipeline]


def recipe(name: str, tokenizer: Any = "bytes", **options: Any) -> Make:
    def make(files: Any, **more: Any) -> tp.Pipeline:
        given = {"max_length": 64, **SMALL, **options, **more}
        if not given.get("packed"):
            given["drop_last"] = False
        return tp.recipe(name, files, tokenizer() if callable(tokenizer) else tokenizer, **given)

    return make


sft = recipe("sft")
chat = recipe("chat", small_tokenizer)
RECIPES: dict[str, tuple[Make, list[dict[str, Any]]]] = {
    "sft": (sft, PAIRS),
    "chat": (chat, CHATS),
    "chat / packed": (recipe("chat", small_tokenizer, packed=True), CHATS),
    "sft / packed": (recipe("sft", packed=True), PAIRS),
    "preference": (recipe("preference"), CHOICES),
    "sft / evaluated": (recipe("sft", train=False), PAIRS),
}


def written(rows: list[dict[str, Any]], folder: Path) -> str:
    tp.from_dataset(rows).write_parquet(folder / "rows", row_group_size=8)
    return str(folder / "rows" / "*.parquet")


def targets(pipe: tp.Pipeline) -> list[bool]:
    """Whether each row has a target, in every column of labels."""
    found: list[bool] = []
    for batch in pipe:
        labels = [value for name, value in batch.items() if name.endswith("labels")]
        found += torch.stack([(one != -100).any(1) for one in labels]).all(0).tolist()
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_warns_once_keeps_in_silence_or_refuses_the_first(
    name: str, tmp_path: Path
) -> None:
    make, rows = RECIPES[name]
    files = written(rows, tmp_path)
    said = "no target for the loss, since .* raise max_length=64"
    with pytest.warns(UserWarning, match=said) as caught:
        found = targets(make(files))
    assert len(caught) == 1
    assert not all(found)
    if "packed" not in name:
        assert (len(found), sum(found)) == (48, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not all(targets(make(files, on_error="keep")))
    said = r"a row has no target.* max_length=64.*row group \d, row \d"
    with pytest.raises(tp.DataError, match=said):
        list(make(files, on_error="raise"))


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("name", "cache"),
    [*((name, False) for name in RECIPES), ("sft", True), ("chat / packed", True), ("preference", True)],
)  # fmt: skip
def test_a_recipe_leaves_them_out(
    name: str, cache: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, rows = RECIPES[name]
    options = {"cache": str(tmp_path / "kept")} if cache else {}
    pipe = make(written(rows, tmp_path), on_error="skip", **options)
    with caplog.at_level(logging.WARNING, "trainpipes"):
        found = targets(pipe)
    assert all(found)
    if "packed" not in name:
        assert len(found) == 12
    assert "left out: they have no target" in caplog.text
    with pytest.raises(TypeError):
        len(pipe)
    if name != "sft / evaluated" and not cache:
        check_resume(pipe, epochs=1, every=7, processes=0)


def test_a_malformed_conversation_and_one_without_a_target_go_by_one_option(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {"messages": [{"role": "user", "content": "hi"}]}
    files = written([*CHATS[:2], bad], tmp_path)
    with pytest.raises(tp.DataError, match="there is no message of 'assistant'"):
        list(chat(files))
    with caplog.at_level(logging.WARNING, "trainpipes"):
        assert targets(chat(files, on_error="skip")) == [True]
    assert "1 of 3 rows left out: they are bad" in caplog.text
    assert sorted(targets(chat(files, on_error="keep"))) == [False, False, True]


def test_an_encoder_decoder_always_has_the_end_to_learn(tmp_path: Path) -> None:
    rows = [{"prompt": "p " * 99, "response": ""}, {"prompt": "", "response": "r " * 99}]
    options: dict[str, Any] = {"max_length": 1, "drop_last": False, **SMALL}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (batch,) = tp.recipe("seq2seq", written(rows, tmp_path), "bytes", **options)
    assert (batch["labels"] != -100).any(1).all()


def test_packed_rows_of_documents_with_labels_of_their_own() -> None:
    rows = tp.from_dataset(
        [{"tokens": [5] * 8, "labels": [-100] * 8}, {"tokens": [6] * 8, "labels": [6] * 8}]
    )
    options: dict[str, Any] = {"max_length": 8, "epochs": 1, "num_shards": 1, "batch_size": 1}
    with pytest.warns(UserWarning, match="packed row.* no target"):
        assert len(list(tp.recipe("tokens", rows, **options))) == 2
    assert len(list(tp.recipe("tokens", rows, on_error="skip", **options))) == 1


# Tokenized ahead


def digests(pipe: tp.Pipeline) -> list[str]:
    return [digest(batch) for batch in pipe]


@pytest.mark.sample(5)
@pytest.mark.parametrize("on_error", ["keep", "skip"])
@pytest.mark.parametrize("name", ["sft", "sft / packed", "chat", "chat / packed", "preference"])
def test_files_tokenized_ahead_give_the_same_batches(
    name: str, on_error: str, tmp_path: Path
) -> None:
    make, rows = RECIPES[name]
    files = written(rows, tmp_path)
    tokenize(make(files, on_error="keep"), tmp_path / "ids")
    ahead = make(str(tmp_path / "ids"), on_error=on_error)
    assert digests(ahead) == digests(make(files, on_error=on_error))


def test_pairs_tokenized_ahead_give_the_same_batches(tmp_path: Path) -> None:
    files = written([{"prompt": "p" * n, "response": "r" * n} for n in range(20)], tmp_path)
    pipe = tp.recipe("seq2seq", files, "bytes", **SMALL)
    tokenize(pipe, tmp_path / "ids")
    ahead = tp.recipe("seq2seq", str(tmp_path / "ids"), "bytes", **SMALL)
    assert digests(ahead) == digests(pipe)


def test_files_tokenized_ahead_are_warned_of_and_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="raise max_length=64"):
        tokenize(sft(written(PAIRS, tmp_path)), tmp_path / "ids")
    with pytest.warns(UserWarning, match="tokenized_by.* no target for the loss: choose on_error"):
        assert targets(sft(str(tmp_path / "ids"))).count(True) == 12
    with pytest.raises(tp.DataError, match="a row has no target"):
        list(sft(str(tmp_path / "ids"), on_error="raise"))
