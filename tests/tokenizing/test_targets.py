"""Labels of models of translation are those of ``text_target``: in the language that is written."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import trainpipes as tp

PAIRS = [
    {"prompt": "the house is big", "response": "das haus ist gross"},
    {"prompt": "a small dog", "response": "ein kleiner hund"},
]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
LETTERS = [*SPECIAL, "▁", *"abcdefghijklmnopqrstuvwxyz"]
#: Of a language beside the text.
NAMES = {"NllbTokenizer": ("eng_Latn", "deu_Latn"), "MBartTokenizer": ("en_XX", "de_DE")}


def of_language(name: str, **languages: str) -> Any:
    transformers = pytest.importorskip("transformers")
    scored = [(piece, -1.0) for piece in LETTERS]
    vocabulary = scored if name == "MBartTokenizer" else {p: k for k, p in enumerate(LETTERS)}
    return getattr(transformers, name)(vocab=vocabulary, **languages)


def marian(folder: Path) -> Any:
    """A model of SentencePiece for each language."""
    from transformers import MarianTokenizer

    spm = pytest.importorskip("sentencepiece")
    vocabulary = {name: number for number, name in enumerate(SPECIAL)}
    for side in ("prompt", "response"):
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter([row[side] for row in PAIRS] * 20), model_prefix=f"{folder}/{side}",
            vocab_size=30, hard_vocab_limit=False, minloglevel=2, num_threads=1,
        )  # fmt: skip
        model = spm.SentencePieceProcessor(model_file=f"{folder}/{side}.model")
        for number in range(len(model)):
            vocabulary.setdefault(model.id_to_piece(number), len(vocabulary))
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    paths = [str(folder / name) for name in ("prompt.model", "response.model", "vocab.json")]
    return MarianTokenizer(*paths, source_lang="en", target_lang="de")


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.parametrize("name", ["MarianTokenizer", *NAMES])
def test_labels_are_in_the_language_that_is_written(name: str, tmp_path: Path) -> None:
    if name == "MarianTokenizer":
        tokenizer = marian(tmp_path)
    else:
        tokenizer = of_language(name, src_lang=NAMES[name][0], tgt_lang=NAMES[name][1])
    texts, targets = ([row[side] for row in PAIRS] for side in ("prompt", "response"))
    wanted = tokenizer(texts, text_target=targets)
    rows = tp.from_dataset(PAIRS).tokenize(
        tokenizer, {"prompt": "input_ids", "response": "labels"}, add_eos=True
    )
    for pipe in (rows, pickle.loads(pickle.dumps(rows))):
        found = list(pipe)
        assert [row["input_ids"].tolist() for row in found] == wanted["input_ids"]
        assert [row["labels"].tolist() for row in found] == wanted["labels"]
    assert wanted["labels"] != tokenizer(targets)["input_ids"]
    batch = tp.recipe(
        "seq2seq", tp.from_dataset(PAIRS), tokenizer, batch_size=2, num_shards=1
    ).peek()
    assert sorted(row[row >= 0].tolist() for row in batch["labels"]) == sorted(wanted["labels"])


@pytest.mark.parametrize("name", NAMES)
def test_another_language_is_another_state(name: str) -> None:
    source, target = NAMES[name]
    columns = {"prompt": "input_ids", "response": "labels"}
    one, other = (
        tp.from_dataset(PAIRS).tokenize(of_language(name, src_lang=source, tgt_lang=each), columns)
        for each in (source, target)
    )
    next(iter(one))
    with pytest.raises(tp.StateError, match="targets"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", [False, True])
def test_a_language_that_is_not_known_is_refused(name: str, folder: bool, tmp_path: Path) -> None:
    tokenizer = of_language(name, src_lang=NAMES[name][0])
    if folder:
        tokenizer.save_pretrained(tmp_path)
        tokenizer = str(tmp_path)
    said = r"and does not know which: give AutoTokenizer.from_pretrained\(name, src_lang="
    with pytest.raises(tp.ConfigError, match=said):
        tp.recipe("seq2seq", tp.from_dataset(PAIRS), tokenizer)
    assert list(tp.from_dataset(PAIRS).tokenize(tokenizer, "response"))
