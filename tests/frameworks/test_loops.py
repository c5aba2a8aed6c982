"""Loops with the interfaces of torchtitan, torchtune, nanochat and nanoGPT, killed and resumed exactly.

Each asks of its data loader what those of torchtitan 0.3.0, torchtune 0.6.1 and nanochat's base_train ask of
theirs, in the same order.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.functional import cross_entropy

from frameworks.example import example
from frameworks.runs import Start, check_resumes, finish

B, T = 4, 32


class Training:
    """A model that scores bytes, and the start that is told what it is trained on."""

    def __init__(self, start: Start) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.start, self.rank, self.ranks = start, dist.get_rank(), dist.get_world_size()
        self.model = torch.nn.Embedding(258, 258)

    def step(self, step: int, ids: torch.Tensor, targets: torch.Tensor, ignored: int) -> None:
        assert ids.shape == targets.shape
        loss = cross_entropy(self.model(ids).flatten(0, 1), targets.flatten(), ignore_index=ignored)
        dist.all_reduce(loss.detach())  # ranks take each step together
        self.start.trained_on(0, step, {"input_ids": ids})

    def saves(self, step: int) -> Path | None:
        """Where to save after a step, if at all."""
        every = self.start.every
        self.start.saved.mkdir(parents=True, exist_ok=True)
        return self.start.saved / f"step-{step}" if every and step % every == 0 else None


# torchtitan


class BaseDataLoader(ABC):
    """What torchtitan's class of this name asks of a data loader: a Config that builds it, and a state."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        dataset: str = ""
        dataset_path: str | None = None

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class NewBaseDataLoader(BaseDataLoader):
    """The class of main, since it reads by Grain: its Config names no data."""

    @dataclass(kw_only=True, slots=True)
    class Config: ...


def titan_example(main: bool = False) -> Any:
    """docs/examples/loops/for_torchtitan.py, over torchtitan itself where it is installed; or as on main."""
    loader = "torchtitan.components.data.loader" if main else "torchtitan.components.dataloader"
    try:
        import_module(loader)
    except ImportError:
        parts = loader.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(parts[end - 1]))
        base = NewBaseDataLoader if main else BaseDataLoader
        sys.modules[loader].BaseDataLoader = base  # type: ignore[attr-defined]
    return example("loops/for_torchtitan")


def torchtitan(start: Start) -> None:
    """As torchtitan's Trainer: the loader in DCP beside the model, one state for each data-parallel rank."""
    training, infinite = Training(start), start.options.get("infinite", True)
    made = titan_example().PipelineDataLoader
    config = made.Config(files=start.kind, num_shards=4, infinite=infinite)
    assert {"dataset", "dataset_path", "infinite"} <= {field.name for field in fields(config)}
    loader = made(
        config=config, dp_world_size=training.ranks, dp_rank=training.rank,
        tokenizer=SimpleNamespace(tokenizer="bytes", eos_id=256), seq_len=T, local_batch_size=B,
        snapshot_every_n_steps=start.every or 1,
    )  # fmt: skip
    parts = {"dataloader": loader, "model": training.model}
    step, found = start.step(), start.checkpoint()
    if found is not None:
        dcp.load(parts, checkpoint_id=found)
    batches = iter(loader)
    while step < start.options["steps"]:
        step += 1
        try:
            inputs, labels = next(batches)
        except StopIteration:
            break
        assert set(inputs) == {"input", "positions"}
        assert labels.numel() == inputs["positions"].numel() == B * T or not infinite
        training.step(step - 1, inputs["input"], labels, -100)
        if to := training.saves(step):
            dcp.save(parts, checkpoint_id=to)


# torchtune


class FullFinetuneRecipe:
    """What a recipe of torchtune does with its data."""

    def setup(self, cfg: dict[str, Any], training: Training) -> None:
        self.cfg, self.training = cfg, training
        self.dp_rank, self.dp_size = training.rank, training.ranks
        self.epochs_run = self.global_step = 0
        found = training.start.checkpoint()
        if found is not None:
            self._update_recipe_state(torch.load(found, weights_only=True))
        self._dataloader = self._setup_data(
            cfg_dataset=cfg["dataset"], shuffle=cfg["shuffle"], batch_size=cfg["batch_size"],
            collate_fn="torchtune.data.padded_collate_sft",
        )  # fmt: skip
        self._steps_per_epoch = len(self._dataloader)

    def _update_recipe_state(self, ckpt_dict: dict[str, Any]) -> None:
        self.epochs_run, self.global_step = ckpt_dict["epochs_run"], ckpt_dict["global_step"]

    def _setup_data(self, **_: Any) -> Any:
        raise NotImplementedError

    def save_checkpoint(self) -> None:
        path = self.training.saves(self.global_step)
        if path is not None:
            progress = {
                "epochs_run": self.epochs_run,
                "total_epochs": self.cfg["epochs"],
                "global_step": self.global_step,
                "dataloader": self._dataloader.state_dict(),
            }
            if self.training.rank == 0:
                torch.save(progress, path)

    def train(self) -> None:
        for epoch in range(self.epochs_run, self.cfg["epochs"]):
            self._dataloader.sampler.set_epoch(epoch)
            for batch in self._dataloader:
                labels = batch.pop("labels")
                assert set(batch) == {"tokens"}
                shifted = torch.hstack((labels[..., 1:], torch.full((len(labels), 1), -100)))
                self.training.step(self.global_step, batch["tokens"], shifted, -100)
                self.global_step += 1
                self.save_checkpoint()
            self.epochs_run += 1
            self.save_checkpoint()


def torchtune(start: Start) -> None:
    """As a recipe of torchtune, and saved in the middle of epochs, too."""
    mixin = example("loops/for_torchtune").FromPipeline
    recipe = type("Recipe", (mixin, FullFinetuneRecipe), {})()
    dataset = {"files": start.kind, "tokenizer": "bytes"}
    cfg = {"dataset": dataset, "shuffle": True, "batch_size": B, "epochs": 3}
    recipe.setup(cfg, Training(start))
    recipe.train()


# nanochat and nanoGPT


def _generator(start: Start, make: Any) -> None:
    """As nanochat's base_train: the next batch is fetched before the step is over and before it is saved."""
    adapter = example("loops/for_nanochat")
    adapter.NUM_SHARDS = 4  # each packs windows of a thousand documents
    training, found, step = Training(start), start.checkpoint(), start.step()
    loader = make(adapter, None if found is None else json.loads(found.read_text()))
    x, y, state = next(loader)
    while step < start.options["steps"]:
        to = training.saves(step) if step > start.step() else None
        if to is not None:
            content = adapter.of_all_ranks(state)
            if training.rank == 0:
                to.write_text(json.dumps(content))
        assert x.shape == y.shape == (B, T)
        training.step(step, x, y, -1)
        x, y, state = next(loader)
        step += 1


def nanochat(start: Start) -> None:
    _generator(
        start, lambda adapter, state: adapter.documents(start.kind, "bytes", B, T, "cpu", state)
    )


def nanogpt(start: Start) -> None:
    _generator(start, lambda adapter, state: adapter.tokens(start.kind, B, T, "cpu", state))


LOOPS = {loop.__name__: loop for loop in (torchtitan, torchtune, nanochat, nanogpt)}


EOS = 256


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_is_killed_goes_on_exactly_on_two_ranks_and_on_one(
    name: str, data: dict[str, str], tmp_path: Path
) -> None:
    found = check_resumes(
        LOOPS[name], tmp_path, data[name], every=3, holds=(17,), moved=(15,), steps=30
    )
    (moved,) = found["moved-15"].notes()
    assert len(moved) >= 15


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
    options = {"steps": 10_000, "infinite": False}
    start = Start(tmp_path / "finite", tmp_path, data["torchtitan"], options=options)
    finish(torchtitan, 2, start)
    first, second = start.notes()
    assert first.keys() == second.keys()
    assert len(first) > 5
    given = [*chain.from_iterable(first.values()), *chain.from_iterable(second.values())]
    assert len(set(given)) == len(given)
