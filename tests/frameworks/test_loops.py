"""Loops with the interfaces of torchtitan, torchtune, nanochat and nanoGPT, killed and resumed exactly."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from frameworks import loops_runs
from frameworks.example import example
from frameworks.loops_runs import LOOPS, B, T, titan_example
from frameworks.ranks import Ranks, run
from frameworks.steps import by_step

EOS = 256
MICRO_BATCHES = 60  # of a whole run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of each loop."""
    folder = tmp_path_factory.mktemp("data")
    texts = [f"{i} " + "and more " * (i % 5) for i in range(100)]
    pq.write_table(pa.table({"text": texts}), folder / "texts.parquet", row_group_size=20)
    # 80 rows are 20 micro-batches an epoch; of the texts it is about 26.
    pairs = {"prompt": [f"{i}?" for i in range(80)], "response": ["x" * (i % 9) for i in range(80)]}
    pq.write_table(pa.table(pairs), folder / "pairs.parquet", row_group_size=20)
    np.random.default_rng(0).integers(0, 256, 10_000).astype("uint16").tofile(folder / "train.bin")
    texts_of = {name: str(folder / "texts.parquet") for name in ("torchtitan", "nanochat")}
    return {
        **texts_of,
        "torchtune": str(folder / "pairs.parquet"),
        "nanogpt": str(folder / "train.bin"),
    }


def last_of(name: str, ranks: int) -> int:
    """Steps of a whole run, or its epochs."""
    return 3 if name == "torchtune" else MICRO_BATCHES // ranks


def saved_step(name: str, folder: Path) -> int:
    """The step after which the last checkpoint was saved, 0 if there is none."""
    if name == "torchtitan":
        whole = [path.parent.name for path in folder.glob("checkpoints/step-*/.metadata")]
        return max((int(found.removeprefix("step-")) for found in whole), default=0)
    if name == "torchtune":
        path = folder / "recipe_state.pt"
        return int(torch.load(path, weights_only=True)["global_step"]) if path.exists() else 0
    path = folder / "meta.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else 0


def steps_of(folder: Path) -> list[dict[int, str]]:
    """For each rank: by step, the digest of what was trained on."""
    return [{step: content for step, (content,) in found.items()} for found in by_step(folder)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_is_killed_goes_on_exactly_on_two_ranks_and_on_one(
    name: str, data: dict[str, str], tmp_path: Path
) -> None:
    arguments = str(tmp_path), data[name], "whole", last_of(name, 1)
    run(LOOPS[name], 1, tmp_path / "ranks", *arguments, seconds=250)
    (steps,) = steps_of(tmp_path / "whole")
    whole = [steps[step] for step in range(len(steps))]
    folder, killed_at = tmp_path / "run", 17  # in epoch 1
    folder.mkdir()

    def start(folder: Path, ranks: int, called: str, before: int = 0) -> Ranks:
        """Steps that two ranks have done before count twice."""
        last = last_of(name, ranks) - (0 if name == "torchtune" else before)
        arguments = str(folder), data[name], called, last
        return Ranks(LOOPS[name], ranks, folder / f"ranks-{called}", *arguments)

    (folder / "1.hold").write_text(str(killed_at))

    def ready() -> bool:
        return [max(found, default=0) for found in steps_of(folder / "1")] == [killed_at] * 2

    start(folder, 2, "1").kill_when(ready, 250)
    step = saved_step(name, folder)
    assert step == killed_at // 3 * 3
    alone = tmp_path / "alone"
    shutil.copytree(folder, alone)
    start(folder, 2, "2").wait(250)
    for called, first in (("1", 0), ("2", step)):
        for rank, found in enumerate(steps_of(folder / called)):
            assert list(found) == list(range(first, first + len(found)))
            assert found == {at: whole[2 * at + rank] for at in found}, f"{called}, rank {rank}"
    assert max(steps_of(folder / "2")[0]) == len(whole) // 2 - 1

    start(alone, 1, "2", before=step).wait(250)
    (found,) = steps_of(alone / "2")
    assert min(found) == step
    assert found == {at: whole[step + at] for at in found}  # two in each step before, then one
    assert len(found) >= 15


def documents() -> set[bytes]:
    return {(f"{i} " + "and more " * (i % 5)).encode() for i in range(100)}


def check_next_tokens(x: torch.Tensor, y: torch.Tensor, ignored: int) -> tuple[int, int]:
    """Check that targets are the next tokens within a document; how many are and are not."""
    next_ids = x[:, 1:]
    kept = y[:, :-1] != ignored
    assert torch.equal(y[:, :-1][kept], next_ids[kept])
    ends = x == EOS  # and what follows an end is another document, or padding
    assert (y[ends] == ignored).all()
    return int(kept.sum()), int((~kept).sum())


def titan_batches(
    path: str, main: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    made = titan_example(main).PipelineDataLoader
    size = {"seq_len": T, "local_batch_size": B}
    loader = made(
        config=made.Config(files=path, num_shards=1),
        dp_world_size=1,
        dp_rank=0,
        tokenizer=SimpleNamespace(tokenizer="bytes", eos_id=EOS),
        **({"max_context_length": T, "num_tokens_per_batch": B * T} if main else size),
    )
    return [(x["input"], y, x["positions"]) for x, y in islice(loader, 30)]


def test_torchtitans_inputs_labels_and_positions(data: dict[str, str]) -> None:
    batches = titan_batches(data["torchtitan"])
    counts = [check_next_tokens(x, y, -100) for x, y, _ in batches]
    kept, left_out = map(sum, zip(*counts, strict=True))
    assert kept > left_out > 30
    for x, y, positions in batches:
        assert x.shape == y.shape == positions.shape == (B, T)
        first = positions == 0
        assert first[:, 0].all()
        after_an_end = x[:, :-1] == EOS
        assert first[:, 1:][after_an_end].all()


def test_torchtitans_main_gets_the_batches_of_its_release(
    data: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = titan_batches(data["torchtitan"])
    with monkeypatch.context() as modules:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchtitan"]:
            modules.delitem(sys.modules, name)
        main = titan_batches(data["torchtitan"], main=True)
        for name in [name for name in sys.modules if name.split(".")[0] == "torchtitan"]:
            del sys.modules[name]
    for before, now in zip(release, main, strict=True):
        assert all(map(torch.equal, before, now))


def test_nanochats_inputs_and_targets(data: dict[str, str]) -> None:
    adapter = example("loops/for_nanochat")
    adapter.NUM_SHARDS = 4
    batches = adapter.documents(data["nanochat"], "bytes", B, T, "cpu")
    seen, counts = 0, []
    for x, y, _ in islice(batches, 30):
        assert x.is_contiguous()
        assert y.is_contiguous()
        assert not (y == -100).any()
        counts.append(check_next_tokens(x, y, -1))
        for row in x.tolist():
            pieces = bytes(i if i < 256 else 0 for i in row).split(b"\0")[:-1]
            seen += sum(piece in documents() for piece in pieces)
    assert seen > 100
    kept, left_out = map(sum, zip(*counts, strict=True))
    assert kept > left_out > 30


def test_nanogpts_inputs_and_targets_are_each_token_once(data: dict[str, str]) -> None:
    batches = example("loops/for_nanochat").tokens(data["nanogpt"], B, T, "cpu")
    written = np.fromfile(data["nanogpt"], dtype="uint16").astype("int64")
    rows = {bytes(written[i : i + T + 1]): i for i in range(0, len(written) - T, T + 1)}
    given = []
    for x, y, _ in islice(batches, len(rows) // B):
        both = torch.cat([x, y[:, -1:]], dim=1)
        assert torch.equal(both[:, 1:], y)
        given += [rows[row.numpy().tobytes()] for row in both]
    assert len(set(given)) == len(given) == len(rows) // B * B
    assert given != sorted(given)


def test_torchtunes_tokens_and_labels(data: dict[str, str]) -> None:
    mixin = example("loops/for_torchtune").FromPipeline
    dataset = {"files": data["torchtune"], "tokenizer": "bytes"}
    loader = mixin()._setup_data(dataset, shuffle=True, batch_size=B, collate_fn="")
    rows = set()
    assert len(loader) == 20
    for batch in loader:
        for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True):
            text = bytes(i for i in tokens.tolist() if i < 256)
            response = bytes(i for i in labels.tolist() if 0 <= i < 256)
            prompt = text.removesuffix(response)
            assert prompt.endswith(b"?")
            assert (labels != -100).sum() == len(response) + 1  # and its end
            rows.add(prompt)
    assert rows == {f"{i}?".encode() for i in range(80)}


def test_torchtitans_validation_ends_on_both_ranks_at_one_step(
    data: dict[str, str], tmp_path: Path
) -> None:
    arguments: tuple[Any, ...] = str(tmp_path), data["torchtitan"], "finite", 10_000, False
    run(loops_runs.torchtitan, 2, tmp_path / "ranks", *arguments)
    first, second = steps_of(tmp_path / "finite")
    assert first.keys() == second.keys()
    assert len(first) > 5
    given = [*first.values(), *second.values()]
    assert len(set(given)) == len(given)
