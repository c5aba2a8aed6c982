"""What a state knows each stage by: the same for ever, or states that were saved no longer load."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

import every_stage
import trainpipes as tp
from every_stage import ENDLESS, FINITE, Make, bare, jitter, mapped, odd, part, rows, table


def tokenizer(folder: Path) -> str:
    path = folder / "tokenizer.json"
    ids = ["<unk>", "</s>", "[MASK]", "row", "and", "more", "##s", "0", "1", ":"]
    vocabulary = {piece: number for number, piece in enumerate(ids)}
    special = [
        {
            "id": number, "content": ids[number], "special": True, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False,
        }
        for number in (0, 1, 2)
    ]  # fmt: skip
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special}
    whole |= {"normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None}
    path.write_text(json.dumps(whole | {"decoder": None, "model": model}))
    return str(path)


def ids(folder: Path) -> tp.Pipeline:
    return rows(folder).tokenize(tokenizer(folder), "text")


def recipe(name: str, folder: Path, **options: Any) -> tp.Pipeline:
    rows(folder)
    return tp.recipe(name, files=str(folder / "*.parquet"), tokenizer=tokenizer(folder), **options)


#: Each option of each stage with another value than its default.
OPTIONS: dict[str, Make] = {
    "add_labels": lambda f: rows(f).add_labels("tokens", where="tokens", ignore=2),
    "batch": lambda f: rows(f).batch(3, drop_last=True),
    "batch / tokens": lambda f: rows(f).batch(max_tokens=30, max_rows=4, column="tokens",
        overflow="alone", drop_last=True),
    "bucket_by_length": lambda f: rows(f).bucket_by_length(3, boundaries=[2, 5], column="tokens",
        buffer_size=40, drop_last=True, seed=3),
    "bucket_by_length / tokens": lambda f: rows(f).bucket_by_length(max_tokens=30, num_buckets=4,
        column="tokens", max_rows=9, overflow="alone"),
    "chat_template": lambda f: (rows(f).map(every_stage.conversation, version="1")
        .chat_template(every_stage.chat_tokenizer(), "messages", labels=False, max_length=50,
        template="{{ messages[0]['content'] }}")),
    "collate": lambda f: rows(f).batch(2).collate(every_stage.first_of, format="numpy"),
    "collate / version": lambda f: rows(f).batch(2).collate(lambda rows: rows, version="3"),
    "collate / dtype": lambda f: rows(f).batch(2).collate(dtype=torch.float32),
    "collate / offsets": lambda f: rows(f).batch(2).collate(ragged="offsets_and_end",
        weights={"tokens": "tokens_2"}),
    "draw": lambda f: tp.from_arrow(table(f)).shuffle(sampler=tp.samplers.WeightedRandomSampler(range(97),
        50, replacement=False, seed=2)),
    "enumerate": lambda f: rows(f).enumerate(5, output_column="number"),
    "filter": lambda f: rows(f).filter(odd),
    "filter / expression": lambda f: rows(f).filter(pc.field("x") > 3),
    "filter / version": lambda f: rows(f).filter(lambda row: True, version="2"),
    "flat_map": lambda f: rows(f).flat_map(every_stage.words),
    "flat_map / schema": lambda f: rows(f).flat_map(every_stage.words, version="4",
        schema=pa.schema([("x", pa.int64()), ("word", pa.string())])),
    "map": lambda f: rows(f).map(every_stage.double, num_workers=1, method="thread"),
    "map / rng": lambda f: rows(f).map(jitter, rng=True, seed=4),
    "map / version": lambda f: rows(f).map(lambda row: row, version="5"),
    "map_batches": lambda f: rows(f).map_batches(every_stage.negative, format="numpy"),
    "map_batches / version": lambda f: rows(f).map_batches(lambda t: t, version="6"),
    "with_columns": lambda f: rows(f).with_columns(every_stage.lengths, format="numpy"),
    "with_columns / version": lambda f: rows(f).with_columns(lambda t: t, version="6"),
    "drop_columns": lambda f: rows(f).drop_columns("text", "x"),
    "encode_labels": lambda f: rows(f).encode_labels("x", classes={"a": 1, "b": 0}, output_column="y"),
    "encode_labels / many": lambda f: rows(f).encode_labels("answer",
        classes=[f"a{i}" for i in range(500)], counts=[1] * 500),
    "encode_categories": lambda f: rows(f).encode_categories({"x": [4, 2], "answer": ["a1"]},
        columns=["x"]),
    "encode_categories / many": lambda f: rows(f).encode_categories(
        {"answer": [f"a{i}" for i in range(500)]}),
    "normalize_columns": lambda f: rows(f).normalize_columns({"x": {"mean": 1, "std": 2.5},
        "y": {"mean": 1, "std": 2}}, columns="x", nulls="nan"),
    "mask_tokens": lambda f: rows(f).mask_tokens(0.2, column="tokens", mask_token_id=7, special_ids=[1],
        vocab_size=9, mask_replace_prob=0.5, random_replace_prob=0.2, seed=5),
    "mask_tokens / tokenizer": lambda f: ids(f).mask_tokens(whole_words=True, tokenizer=tokenizer(f),
        mask_token_id=3),
    "audio_info": lambda f: tp.read_bytes(every_stage.sounds(f)).audio_info("bytes", sampling_rate=9,
        on_error="skip", folder="x", storage_options={"key": "x"}),
    "decode_audio": lambda f: tp.read_bytes(every_stage.sounds(f)).decode_audio("bytes", 9, mono=False,
        normalize=True, start="path", duration=tp.random_crop(2), output_column="sound", on_error="skip",
        seed=3),
    "log_mel": lambda f: every_stage.heard(f).log_mel(9, column="x", output_column="y", sampling_rate=90,
        n_fft=40, hop_length=30, pad_seconds=2, time_first=True),
    "mask_spans": lambda f: every_stage.heard(f).mask_spans(1, 3, 5, 6, time_share=0.5, value=1, column="x",
        time_first=True, seed=3),
    "pad_collate / lengths": lambda f: rows(f).batch(3).pad_collate(lengths={"tokens": "length"}),
    "decode_video": lambda f: tp.read_bytes(every_stage.videos(f)).decode_video("bytes", num_frames=3,
        size=[4, 5], start="path", duration=tp.random_crop(2), output_column="clip", times_column="times",
        on_error="skip", seed=3, folder="x", storage_options={"key": "x"}),
    "decode_video / numbers": lambda f: tp.read_bytes(every_stage.videos(f)).decode_video("bytes",
        frames=[2]),
    "decode_image": lambda f: tp.read_images(every_stage.pictures(f)).decode_image("bytes",
        output_column="picture", mode="L", on_error="skip", min_size=8),
    "resize": lambda f: every_stage.decoded(f).resize([6, 5], interpolation="lanczos"),
    "center_crop": lambda f: every_stage.decoded(f).center_crop(9, column="image"),
    "random_crop": lambda f: every_stage.decoded(f).random_crop((9, 8), padding=2, fill=7, seed=3),
    "random_resized_crop": lambda f: every_stage.decoded(f).random_resized_crop(9, scale=[0.5, 1],
        ratio=(1.0, 2.0), interpolation="nearest", seed=4),
    "flip": lambda f: every_stage.decoded(f).flip(0.25, direction="vertical", seed=5),
    "normalize": lambda f: every_stage.decoded(f).normalize([0.5, 0.4, 0.3], 0.2),
    "image_transform": lambda f: every_stage.decoded(f).image_transform(every_stage.Jitter(), seed=6,
        num_workers=1),
    "image_transform / version": lambda f: every_stage.decoded(f).image_transform(lambda image: image,
        version="9"),
    "pack": lambda f: rows(f).pack(11, method="first_fit", column="tokens", buffer_size=30,
        max_documents=3, overflow="truncate", seed=6, pad_token_id=8),
    "pack / along": lambda f: (ids(f).map_batches(every_stage.beside, version="1")
        .pack(12, method="concat", along=["weight"], overflow="drop")),
    "pad_collate": lambda f: (ids(f).batch(4).pad_collate(max_length=9, pad_to_multiple_of=8,
        padding_side="left", truncation_side="left", value=3, mask={"input_ids": "seen"},
        columns={"tokens": {"max_length": 4, "padding_side": "right", "value": 1, "mask": "there"}})),
    "pad_collate / dtype": lambda f: (rows(f).select("tokens").batch(4)
        .pad_collate(mask=False, dtype=torch.int32)),
    "pad_collate / default": lambda f: ids(f).batch(4).pad_collate(),
    "rename": lambda f: rows(f).rename({"x": "y", "text": "words"}),
    "repeat": lambda f: rows(f).repeat(3),
    "repeat / endless": lambda f: rows(f).repeat(),
    "sample": lambda f: rows(f).sample(0.3, key=["x", "answer"], seed=9),
    "sample_by": lambda f: rows(f).sample_by("x", largest=97, expected=0.5, seed=3),
    "sample_by / classes": lambda f: rows(f).sample_by("x", {1: 2, 2: 1.5}, expected={1: 5}),
    "select": lambda f: rows(f).select("text", "x"),
    "sharding_filter": lambda f: rows(f).sharding_filter(6, split="stride", tail="uneven"),
    "shuffle": lambda f: rows(f).shuffle(50, seed=8, max_bytes=1 << 20),
    "shuffle / global": lambda f: tp.from_arrow(table(f)).shuffle(scope="global", seed=3),
    "split": lambda f: rows(f).split({"a": 0.25, "b": 0.75}, key="x", seed=7)["b"],
    "take": lambda f: rows(f).take(9),
    "skip": lambda f: rows(f).skip(9),
    "take / batches": lambda f: rows(f).batch(2).skip(1).take(3),
    "tokenize": lambda f: rows(f).tokenize(tokenizer(f), concat=["text", "answer"], max_length=20,
        truncation_side="left", add_special_tokens=False, add_eos="</s>", labels="answer", keep_text=True,
        engine="tokenizers"),
    "tokenize / pair": lambda f: rows(f).tokenize(tokenizer(f), ["text", "answer"], pair=True),
    "tokenize / template": lambda f: rows(f).tokenize("bytes", template="{text}: {x}", labels=True),
    "tokenize / columns": lambda f: rows(f).tokenize("bytes", every_stage.PAIRS, add_eos=257),
    "tokenize / function": lambda f: rows(f).tokenize(every_stage.codes, "text"),
    "truncate": lambda f: rows(f).truncate(3, columns=["tokens"], truncation_side="left"),
    "read_parquet": lambda f: tp.list_files(every_stage.files(f), suffix=[".parquet"])
        .read_parquet(["x", "tokens"], index=False, errors="replace"),
    "read_json": lambda f: tp.list_files(every_stage.text_files(f)["json"], suffix="").read_json(["x"],
        schema=pa.schema([("x", pa.int32())]), infer="all", block_rows=5, errors="replace", index=False),
    "read_csv": lambda f: tp.list_files(every_stage.text_files(f)["csv"]).read_csv(["x"], delimiter=",",
        quote="'", column_names=["x", "y"], null_values=["", "x"], block_rows=5,
        schema=pa.schema([("x", pa.string())]), infer="all", errors="replace", index=False),
    "read_text": lambda f: tp.list_files(every_stage.text_files(f)["csv"]).read_text("paragraph",
        output_column="t", block_rows=5, errors="replace", index=False),
    "from_arrow": lambda f: tp.from_arrow(table(f)),
    "from_dataset": lambda f: tp.from_dataset(every_stage.SQUARES),
    "from_dataset / sampler": lambda f: tp.from_dataset(every_stage.SQUARES, every_stage.SAMPLER),
    "from_dataset / batch_sampler": lambda f: tp.from_dataset(every_stage.SQUARES,
        batch_sampler=every_stage.BATCHES),
    "from_iterable": lambda f: tp.from_iterable(every_stage.count_61),
    "from_memmap": lambda f: tp.from_memmap(mapped(f), columns=["tokens"]),
    "from_memmap / dtype": lambda f: tp.from_memmap(bare(f), dtype="uint16", length=7, labels=True),
    "from_tensors": lambda f: tp.from_tensors(np.arange(5), np.arange(5)),
    "concat": lambda f: tp.concat(rows(f).select("x"), tp.from_arrow(table(f).select(["x"]))),
    "zip": lambda f: tp.zip(rows(f).select("x").skip(2),
        tp.from_arrow(table(f).slice(2).select(["text"]))),
    "mix": lambda f: tp.mix({"a": part(f, 24), "b": part(f, 15, 50)}, weights={"a": 1, "b": 2},
        weight_by="tokens", column="tokens", max_epochs={"a": 2}, stop="first_exhausted",
        schedule=[(10, {"a": 1, "b": 1}), (20, {"a": 2, "b": 1})], interpolation="linear",
        output_column="source"),
    "mix / temperature": lambda f: tp.mix({"a": part(f, 24), "b": part(f, 15, 50)}, temperature=3.0,
        max_epochs=4),
    "mix / repeat": lambda f: tp.mix({"a": part(f, 24)}, stop="repeat"),
    "recipe pretrain": lambda f: recipe("pretrain", f, text="text", max_length=32),
    "recipe sft": lambda f: recipe("sft", f, prompt="text", response="answer"),
    "recipe seq2seq": lambda f: recipe("seq2seq", f, prompt="text", response="answer", drop_last=False),
}  # fmt: skip

EVERY: dict[str, Make] = (
    {f"every stage, {name}": make for name, make in {**FINITE, **ENDLESS}.items()}
    | {f"options, {name}": make for name, make in OPTIONS.items()}
)  # fmt: skip


def identity(pipe: tp.Pipeline) -> Any:
    """The stages as a state of the pipeline has them."""
    state = pipe.state_dict()
    assert state is not None
    found = json.loads(state["pipeline"])["stages"]
    for stage in found:
        if (
            stage["stage"] == "chat_template"
        ):  # whose tokenizer is made of what the standard library says
            stage["tokenizer"] = len(stage["tokenizer"])
    return found


@pytest.mark.parametrize("name", EVERY)
def test_a_state_knows_a_stage_by_its_options(name: str, folder: Path, golden: Any) -> None:
    golden("identities.json", {name: identity(EVERY[name](folder))}, whole=False)


def scaled(row: Any, *, by: torch.Tensor) -> Any:
    return {"x": row["x"] * by}


@pytest.mark.parametrize("size", [1, 3, 5000])
def test_tensors_as_options_are_known_by_all_their_digits(size: int) -> None:
    rows = tp.from_arrow(pa.table({"x": [1.0, 2.0]}))
    by = torch.full((size,), 0.1)
    state = rows.map(partial(scaled, by=by)).state_dict()
    rows.map(partial(scaled, by=by.clone())).load_state_dict(state)
    with pytest.raises(tp.StateError, match="by"):
        rows.map(partial(scaled, by=by + 1e-6)).load_state_dict(state)


@dataclass
class Parts:
    """Prints what it holds, which prints where it lies in memory."""

    crop: Any = field(default_factory=object)
    scale: Any = scaled


@pytest.mark.parametrize(
    ("made", "other"),
    [
        (Parts, lambda: Parts(scale=None)),
        (lambda: np.datetime64("2024-01-02"), lambda: np.datetime64("2024-01-03")),
        (lambda: np.longdouble(0.5), lambda: np.longdouble(0.25)),
        (lambda: np.complex64(1j), lambda: np.complex64(2j)),
    ],
)
def test_an_option_that_json_lacks_is_known_by_its_value_in_any_process(
    made: Any, other: Any
) -> None:
    rows = tp.from_arrow(pa.table({"x": [1.0, 2.0]}))
    first, held = made(), [object() for _ in range(99)]  # which move the others
    state = rows.map(partial(scaled, by=first)).state_dict()
    rows.map(partial(scaled, by=made())).load_state_dict(state)
    assert json.loads(json.dumps(state)) == state
    with pytest.raises(tp.StateError, match="by"):
        rows.map(partial(scaled, by=other())).load_state_dict(state)
    del held


def test_how_tensors_print_changes_no_identity() -> None:
    pipe = tp.from_arrow(pa.table({"x": [1.0]})).map(partial(scaled, by=torch.arange(100)))
    state = pipe.state_dict()
    torch.set_printoptions(threshold=5, linewidth=20)
    try:
        again = tp.from_arrow(pa.table({"x": [1.0]})).map(partial(scaled, by=torch.arange(100)))
        again.load_state_dict(state)
    finally:
        torch.set_printoptions(profile="default")


@pytest.mark.parametrize("other", [3, torch.arange(2.0), torch.arange(3), np.arange(2), "x", None])
def test_a_chain_with_a_tensor_is_compared_with_any_other(other: Any) -> None:
    rows = tp.from_arrow(pa.table({"x": [1.0]}))
    one = rows.map(partial(scaled, by=torch.arange(2)))
    assert one == rows.map(partial(scaled, by=torch.arange(2)))
    assert one != rows.map(partial(scaled, by=other))
    assert rows.map(partial(scaled, by=other)) != one
