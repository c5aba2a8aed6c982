"""The recipes: what their batches hold, and how they are found by name."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import trainpipes as tp
import trainpipes_recipes
from interpreters import python
from trainpipes_recipes import seq2seq, sft

Batch = dict[str, torch.Tensor]

PLAIN = ["the", "a", "two", "cats", "sit", "sat", "on", "mat", "4", "+", "=", "of", "and"]
WORDS = [*PLAIN, "résumé", "naïve", "猫が", "🙂", "-", "\n", "\t", ""]


def texts(count: int, seed: int, longest: int = 60) -> list[str]:
    """Texts of 0 to ``longest`` words."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest + 1, count)
    return [" ".join(WORDS[i] for i in random.integers(0, len(WORDS), n)) for n in lengths]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(texts(500, seed=1), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained, pad_token="<pad>", eos_token="<eos>", padding_side="right"
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,010 rows in three files of uneven row groups."""
    folder = tmp_path_factory.mktemp("rows")
    table = pa.table({"prompt": texts(4010, seed=2), "response": texts(4010, 3, longest=30)})
    for number, (start, stop, group) in enumerate(
        [(0, 2400, 900), (2400, 2500, 7), (2500, 4010, 1510)]
    ):
        pq.write_table(
            table.slice(start, stop - start), folder / f"{number}.parquet", row_group_size=group
        )
    return folder


def in_order(files: Path, size: int) -> list[dict[str, str]]:
    """The rows as a pipeline of the same order gives them, whose batches have so many."""
    rows = tp.list_files(files).read_parquet().sharding_filter(24).shuffle(1000, seed=5)
    return [row for micro_batch in rows.batch(size) for row in micro_batch]


def cut(rows: list[dict[str, str]], size: int) -> Iterator[list[dict[str, str]]]:
    return (rows[first : first + size] for first in range(0, len(rows), size))


def plain_seq2seq(rows: list[dict[str, str]], tokenizer: Any) -> Batch:
    """What the recipe does, as one would write it without a library: for texts that all fit."""
    end = tokenizer.eos_token
    prompts, responses = (
        tokenizer([row[name] + end for row in rows], padding=True, return_tensors="pt")
        for name in ("prompt", "response")
    )
    labels = responses["input_ids"].masked_fill(responses["attention_mask"] == 0, -100)
    return {**{name: prompts[name] for name in ("input_ids", "attention_mask")}, "labels": labels}


def plain_sft(rows: list[dict[str, str]], tokenizer: Any) -> Batch:
    found: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        response = [*tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id]
        found["input_ids"].append(prompt + response)
        found["attention_mask"].append([1] * len(prompt + response))
        found["labels"].append([-100] * len(prompt) + response)
    width = max(map(len, found["input_ids"]))
    pads = {"input_ids": tokenizer.pad_token_id, "attention_mask": 0, "labels": -100}
    return {
        name: torch.tensor([row + [pads[name]] * (width - len(row)) for row in values])
        for name, values in found.items()
    }


def assert_same(found: list[Batch], wanted: list[Batch]) -> None:
    assert len(found) == len(wanted)
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert sorted(a) == sorted(b)
        for name in b:
            assert a[name].dtype == torch.int64
            assert torch.equal(a[name], b[name]), f"batch {number}, {name}"


def test_seq2seq_gives_what_plain_python_gives(files: Path, tokenizer: Any) -> None:
    rows = in_order(files, 32)
    assert Counter(row["prompt"] for row in rows) == Counter(texts(4010, seed=2))
    found = list(seq2seq(files, tokenizer, buffer_size=1000, seed=5, drop_last=False))
    assert_same(found, [plain_seq2seq(some, tokenizer) for some in cut(rows, 32)])
    assert len(found) == 126


def test_sft_gives_what_plain_python_gives(files: Path, tokenizer: Any) -> None:
    found = list(sft(files, tokenizer, buffer_size=1000, seed=5))
    every = [plain_sft(some, tokenizer) for some in cut(in_order(files, 8), 8)]
    assert_same(found, every[:-1])  # of 2 rows


@pytest.mark.parametrize("name", ["sft", "seq2seq", "preference", "masked_lm"])
def test_padding_comes_after_the_text_also_where_a_tokenizer_pads_on_the_left(
    name: str, tokenizer: Any
) -> None:
    right, left = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    right.mask_token = left.mask_token = "<eos>"
    left.padding_side = "left"
    columns = {"sft": "prompt response", "seq2seq": "prompt response", "masked_lm": "text"}
    names = columns.get(name, "prompt chosen rejected").split()
    columns_of_texts = [texts(40, seed=n) for n in range(len(names))]
    rows = tp.from_arrow(pa.table(columns_of_texts, names))
    options = {"batch_size": 8, "num_shards": 1, "on_error": "keep"}
    pipes = [tp.recipe(name, rows, each, **options) for each in (left, right)]
    assert_same(*map(list, pipes))
    pipes[0].load_state_dict(pipes[1].state_dict())


def test_packed_rows_of_sft_hold_each_pair_once(files: Path, tokenizer: Any) -> None:
    """With the labels that it has by itself; also over ranks and epochs."""

    def learnt(batches: Any, length: int | None = None) -> Counter[tuple[Any, ...]]:
        found: Counter[tuple[Any, ...]] = Counter()
        for batch in batches:
            own = batch.get("segment_ids", batch.get("attention_mask"))
            assert length is None or batch["input_ids"].shape[1] == length
            for ids, labels, parts in zip(batch["input_ids"], batch["labels"], own, strict=True):
                assert (labels[parts == 0] == -100).all()
                for part in range(1, int(parts.max()) + 1):
                    its = parts == part
                    found[(*ids[its].tolist(), -1, *labels[its][1:].tolist())] += 1
        return found

    options: dict[str, Any] = {"max_length": 256, "buffer_size": 1000}
    given = files / "1.parquet", files / "0.parquet"
    alone = learnt(sft(list(given), tokenizer, drop_last=False, **options))
    assert alone.total() == 2500
    packed = sft(list(given), tokenizer, packed=True, num_shards=4, **options)
    assert list(packed.peek()) == [
        "input_ids", "labels", "position_ids", "segment_ids", "cu_seqlens", "max_seqlen"
    ]  # fmt: skip
    assert [learnt(packed, 256) for _ in range(2)] == [alone, alone]
    ranks = [packed.repeat().distributed(rank=rank, world_size=2) for rank in (0, 1)]
    assert not learnt(batch for rank in ranks for batch in islice(rank, 20)) - alone


def test_no_sequence_is_longer_than_max_length(files: Path, tokenizer: Any) -> None:
    for batch in seq2seq(files, tokenizer, max_length=20, batch_size=500):
        assert batch["input_ids"].shape[1] == batch["labels"].shape[1] == 20


REFUSED: dict[str, tuple[Any, list[Any], dict[str, Any], str]] = {
    "no name": (["a.parquet"], [], {}, r"no recipe \['a.parquet'\]; installed are"),
    "no recipe": ("stf", [], {}, r"no recipe 'stf' \(did you mean 'sft'\?\).*seq2seq, sft"),
    "twice": ("sft", ["x"], {"files": "x"}, "multiple values for argument 'files'; it is sft"),
    "too many": ("sft", [*range(30)], {}, r"too many pos.*; it is sft\(files, tokenizer, \*"),
    "misspelt": ("sft", ["x"], {"tokeniser": 1}, r"no option 'tokeniser' \(did you .*; it is sft"),
    "missing": ("sft", ["x"], {}, r"missing a required .*'tokenizer'; it is sft\(files, tokenizer"),
    "no flag": ("sft", ["x", "bytes"], {"drop_last": "no"}, r"\(drop_last\) must be True or False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_recipe_does_not_take_is_refused_with_what_it_takes(case: str) -> None:
    name, arguments, options, said = REFUSED[case]
    with pytest.raises(tp.ConfigError, match=said):
        tp.recipe(name, *arguments, **options)


def test_every_recipe_of_the_package_is_offered() -> None:
    offered = {
        point.name
        for point in entry_points(group="trainpipes.recipes")
        if point.value.startswith("trainpipes_recipes.")
    }
    assert offered == set(trainpipes_recipes.__all__)


def offer(folder: Path, package: str, recipes: dict[str, str], monkeypatch: Any) -> None:
    """Install a package that offers recipes, as far as Python can tell."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in recipes.items()]
    (info / "entry_points.txt").write_text("\n".join(["[trainpipes.recipes]", *lines]) + "\n")
    monkeypatch.syspath_prepend(str(folder))


def test_another_package_can_offer_recipes(tmp_path: Path, monkeypatch: Any) -> None:
    code = "import trainpipes as tp\n\ndef count(n, **rest):\n    return tp.from_dataset(range(n)).batch(2)\n"
    (tmp_path / "counting_recipes.py").write_text(code)
    offer(tmp_path, "counting", {"count": "counting_recipes:count"}, monkeypatch)
    pipe = tp.recipe("count", n=3, name="free")
    assert list(pipe) == [[0, 1], [2]]
    assert pipe.to_yaml().endswith("recipe: count\noptions:\n  'n': 3\n  name: free\n")
    sys.modules.pop("counting_recipes", None)


@pytest.mark.parametrize(("name", "value", "said"), [
    ("broken", "no_such_module:broken", "cannot be imported: No module named 'no_such_module'"),
    ("broken", "broken_recipes:broken", "cannot be imported: division by zero"),
    ("sft", "elsewhere:sft", "offered more than once"),
    ("odd", "fractions:Fraction", None),
])  # fmt: skip
def test_a_recipe_that_cannot_be_used_is_listed_with_the_reason(
    name: str, value: str, said: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "broken_recipes.py").write_text("1 / 0")
    offer(tmp_path, "other", {name: value}, monkeypatch)
    with pytest.raises(tp.ConfigError, match=said or "must return a trainpipes Pipeline, got Frac"):
        tp.recipe(name)
    (listed,) = (recipe for recipe in tp.recipes() if recipe.name == name)
    assert said is None or said in listed.summary


def test_installed_recipes_are_listed_with_what_they_are_for_and_their_options() -> None:
    listed = {recipe.name: recipe for recipe in tp.recipes()}
    assert list(listed) == sorted(listed)
    assert listed["sft"].summary == "Batches for supervised fine-tuning of a causal language model."
    assert {"files", "tokenizer", "batch_size=8"} <= set(listed["sft"].options)
    text = repr(tp.recipes())
    assert "\nsft " in text
    assert "batch_size=8" in text
    assert max(map(len, text.splitlines())) <= 100


def test_no_module_has_the_name_of_the_function_and_none_of_the_recipes_is_imported() -> None:
    code = """
import sys, trainpipes
assert not [name for name in sys.modules if name.startswith("trainpipes_recipes")]
try:
    import trainpipes.recipes
except ModuleNotFoundError:
    assert callable(trainpipes.recipes)
else:
    raise SystemExit("the module is in the function's place")
assert "sft" in [recipe.name for recipe in trainpipes.recipes()]
"""
    subprocess.run([*python(), "-c", code], check=True)
