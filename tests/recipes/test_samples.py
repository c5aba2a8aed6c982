"""The small data to try recipes on is what it is said to be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import trainpipes as tp
from trainpipes_recipes import samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    samples.main([str(folder), "--every", "25"])
    return folder


def test_all_that_the_text_names_is_there(folder: Path) -> None:
    doc = samples.__doc__ or ""
    told = {line.split()[0] for line in doc.splitlines() if line.startswith("    ")} - {"python"}
    assert {name.split("/")[0] for name in told} == {path.name for path in folder.iterdir()}
    assert len(list(tp.read_parquet(f"{folder}/functions/*.parquet"))) > 30


def test_conversations_have_turns_that_the_tokenizers_template_writes(folder: Path) -> None:
    from transformers import AutoTokenizer

    chats = [
        json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()
    ]
    assert all(chat[-1]["role"] == "assistant" for chat in chats)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    for chat in chats[:5]:
        found = tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = np.array(found["assistant_masks"], dtype=bool)
        said = tokenizer.decode(np.array(found["input_ids"])[mask])
        assert said == "".join(
            f"{turn['content']}<|im_end|>\n" for turn in chat if turn["role"] == "assistant"
        )


def test_ids_are_those_of_the_texts(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    ids = np.fromfile(folder / "ids" / "train.bin", np.uint16).tolist()
    texts = [row["text"] for row in tp.read_parquet(folder / "texts")]
    assert tokenizer.decode(ids) == "".join(text + tokenizer.eos_token for text in texts)
