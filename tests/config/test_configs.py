"""Each of configs/*.yaml loads, gives batches, and is the recipe of its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import trainpipes as tp
import trainpipes_recipes
from chats import conversations_of, small_tokenizer
from config.same import assert_same
from every_recipe import words
from trainpipes.config import loads
from visions import processor_of, talks

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
PAIRS = [(f"{k} + {k} =", f" {2 * k}" * (1 + k % 3)) for k in range(120)]


def rows_of(name: str) -> list[dict[str, Any]]:
    """Rows as a recipe wants them."""
    pairs = [{"prompt": ask, "response": answer} for ask, answer in PAIRS]
    texts = [{"text": ask + answer, "label": "ab"[k % 2]} for k, (ask, answer) in enumerate(PAIRS)]
    return {
        "chat": [{"messages": told} for told in conversations_of(PAIRS) * 2],
        "classification": texts,
        "masked_lm": texts,
        "pretrain": texts,
        "preference": [{"prompt": a, "chosen": b, "rejected": b[::-1]} for a, b in PAIRS],
        "vision_chat": talks(48),
        "tokens": [{"input_ids": list(range(k % 40))} for k in range(400)],
    }.get(name, pairs)


def pictures(folder: Path) -> None:
    for n in range(40):
        path = folder / f"class {n % 2}" / f"{n}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = np.random.default_rng(n).integers(0, 256, (9, 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)


@pytest.fixture
def data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files, which the environment names."""
    monkeypatch.setenv("DATA", str(tmp_path))
    monkeypatch.setenv("MAX_LENGTH", "64")
    if name == "images":
        pictures(tmp_path)
        monkeypatch.setenv("SIZE", "8")
        monkeypatch.setenv("BATCH_SIZE", "4")
    else:
        pq.write_table(pa.Table.from_pylist(rows_of(name)), tmp_path / "rows.parquet")
    if name == "chat":
        small_tokenizer().save_pretrained(tmp_path / "tokenizer")
        monkeypatch.setenv("TOKENIZER", str(tmp_path / "tokenizer"))
    if name == "vision_chat":
        monkeypatch.setenv("MAX_LENGTH", "256")
        processor_of("llava").save_pretrained(tmp_path / "processor")
        monkeypatch.setenv("PROCESSOR", str(tmp_path / "processor"))
    if name == "masked_lm":
        words().save(str(tmp_path / "tokenizer.json"))
        monkeypatch.setenv("TOKENIZER", str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_there_is_one_for_each_recipe() -> None:
    assert sorted(trainpipes_recipes.__all__) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_and_comes_back_the_same(name: str, data: Path) -> None:
    pipe = tp.load(CONFIGS / f"{name}.yaml", changes={"options.num_shards": 4})
    text = pipe.to_yaml()
    assert_same(pipe, loads(text, allow_imports=True))
    assert_same(tp.load(CONFIGS / f"{name}.yaml", changes={"options.num_shards": 4}), pipe)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_recipe(name: str, data: Path) -> None:
    path = CONFIGS / f"{name}.yaml"
    assert path.read_text().startswith("# ")
    files = str(data) if name == "images" else f"{data}/*.parquet"
    packed = {"packed": True, "on_error": "skip"}
    options = {"chat": packed, "vision_chat": packed}
    given: dict[str, Any] = {**options.get(name, {}), "batch_size": 3}
    if name == "images":
        given["size"] = 8
    else:
        given["max_length"] = 256 if name == "vision_chat" else 64
    if name not in ("images", "tokens"):
        saved = {
            "vision_chat": f"{data}/processor",
            "chat": f"{data}/tokenizer",
            "masked_lm": f"{data}/tokenizer.json",
        }
        option = "processor" if name == "vision_chat" else "tokenizer"
        given[option] = saved.get(name, "bytes")
    assert tp.load(path, changes={"options.batch_size": 3}) == tp.recipe(name, files, **given)


def test_a_variable_packs_the_pairs_of_sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.Table.from_pylist(rows_of("sft")), tmp_path / "rows.parquet")
    monkeypatch.setenv("DATA", str(tmp_path))
    monkeypatch.setenv("PACKED", "true")
    made = tp.recipe("sft", f"{tmp_path}/*.parquet", "bytes", packed=True)
    assert tp.load(CONFIGS / "sft.yaml") == made
