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
from every_recipe import words
from sound_fixtures import encoded, tone
from trainpipes.config import loads
from trainpipes_recipes.samples import write_purchases
from video_fixtures import video
from visions import processor_of, talks

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
OF_FOLDERS = ("images", "video_classification")
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
        "speech": [{"audio": encoded(tone(0.1)), "text": answer} for _, answer in PAIRS[:12]],
        "tokens": [{"input_ids": list(range(k % 40))} for k in range(400)],
    }.get(name, pairs)


def pictures(folder: Path) -> None:
    for n in range(40):
        path = folder / f"class {n % 2}" / f"{n}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = np.random.default_rng(n).integers(0, 256, (9, 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)


def write(name: str, folder: Path) -> dict[str, Any]:
    """Write the data of a recipe. Gives the options that are not those of its config, by variable."""
    if name == "images":
        pictures(folder)
        return {"SIZE": 8}
    if name == "video_classification":
        for n in range(12):
            path = folder / f"class {n % 2}" / f"{n}.mp4"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(video(8, codec="mpeg4", size=(16, 24), seed=n))
        return {"SIZE": 8, "NUM_FRAMES": 2}
    if name == "tabular":
        write_purchases(folder, 160)
        return {"FITTED": str(folder / "columns.json")}
    pq.write_table(pa.Table.from_pylist(rows_of(name)), folder / "rows.parquet")
    if name == "speech":
        return {"MAX_SECONDS": 1}
    if name == "vision_chat":
        processor_of("llava").save_pretrained(folder / "processor")
        return {"MAX_LENGTH": 256, "PROCESSOR": str(folder / "processor")}
    if name == "chat":
        small_tokenizer().save_pretrained(folder / "tokenizer")
        return {"MAX_LENGTH": 64, "TOKENIZER": str(folder / "tokenizer")}
    if name == "masked_lm":
        words().save(str(folder / "tokenizer.json"))
        return {"MAX_LENGTH": 64, "TOKENIZER": str(folder / "tokenizer.json")}
    return {"MAX_LENGTH": 64}


def test_there_is_one_for_each_recipe() -> None:
    assert sorted(trainpipes_recipes.__all__) == NAMES


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_recipe_and_comes_back_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = write(name, tmp_path)
    for variable, value in (variables | {"DATA": tmp_path}).items():
        monkeypatch.setenv(variable, str(value))
    path = CONFIGS / f"{name}.yaml"
    assert path.read_text().startswith("# ")
    files = str(tmp_path) if name in OF_FOLDERS else f"{tmp_path}/*.parquet"
    given: dict[str, Any] = {variable.lower(): value for variable, value in variables.items()}
    if name == "tabular":
        given |= {"label": "label", "valid": [["day", ">=", "2026-03-20"]]}
    if name not in (*OF_FOLDERS, "tabular", "tokens", "vision_chat"):
        given = {"tokenizer": "bytes"} | given
    if name in ("chat", "vision_chat"):
        given |= {"packed": True, "on_error": "skip"}
    pipe = tp.load(path, changes={"options.batch_size": 3, "options.num_shards": 4})
    assert pipe == tp.recipe(name, files, batch_size=3, num_shards=4, **given)
    assert loads(pipe.to_yaml(), allow_imports=True) == pipe
    assert len(next(iter(pipe))) > 0


def test_a_variable_packs_the_pairs_of_sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.Table.from_pylist(rows_of("sft")), tmp_path / "rows.parquet")
    monkeypatch.setenv("DATA", str(tmp_path))
    monkeypatch.setenv("PACKED", "true")
    made = tp.recipe("sft", f"{tmp_path}/*.parquet", "bytes", packed=True)
    assert tp.load(CONFIGS / "sft.yaml") == made
