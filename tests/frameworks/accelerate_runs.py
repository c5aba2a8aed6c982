"""What ranks do with Accelerate and its loader of ours."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, gather_object
from torch.utils.data import DataLoader

import trainpipes as tp
from frameworks.example import example as load_example
from frameworks.steps import Steps
from trainpipes.integrations.accelerate import loader
from trainpipes.testing import digest

ROWS = 150


def pipeline(kind: str, batch_size: int = 4) -> tp.Pipeline:
    """Counted, or "filtered", "packed" or "repeated"."""
    table = pa.table({"text": [f"row {i} " + "x" * (i % 9) for i in range(ROWS)]})
    rows = tp.from_arrow(table).sharding_filter(num_shards=4).shuffle(40, seed=3)
    if kind == "filtered":
        rows = rows.filter(lambda row: int(row["text"].split()[1]) % 5 > 0)
    tokens = rows.tokenize("bytes")
    if kind == "packed":
        return tokens.pack(32).batch(2).pad_collate()
    if kind == "repeated":
        tokens = tokens.repeat()
    return tokens.batch(batch_size).pad_collate()


def numbered(
    rows: int, tail: Literal["even", "uneven"] = "even", batch_size: int = 4
) -> tp.Pipeline:
    table = pa.table({"row": list(range(rows)), "name": [f"row {i}" for i in range(rows)]})
    dealt = tp.from_arrow(table).sharding_filter(4, tail=tail)
    return dealt.batch(batch_size).collate(format="torch")


class Model(torch.nn.Module):
    """Scores bytes by themselves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Embedding(258, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.scores(input_ids).square().mean()


def train(
    folder: str,
    log: str,
    kind: str,
    *,
    steps: int = 10_000,
    epochs: int = 2,
    accumulate: int = 2,
    resume: str | None = None,
    pause: float = 0.0,
    batch_size: int = 4,
    allow_changes: tuple[str, ...] = (),
) -> list[bool]:
    """Train, and save after each optimizer step. Returns whether each batch was the last of a step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model: Any = Model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe, given = pipeline(kind, batch_size), {"allow_changes": allow_changes}
    batches = loader(pipe, accelerator, **given)
    model, optimizer = accelerator.prepare(model, optimizer)
    notes, step = Steps(Path(log), accelerator.process_index), 0
    synced: list[bool] = []
    if resume is not None:
        accelerator.load_state(resume)
        step = int(resume.rpartition("-")[2])
    for epoch in range(batches.state_dict()["epoch"], epochs):
        for batch in batches:
            notes.trained_on(epoch, step, batch)
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["input_ids"]))
                optimizer.step()
                optimizer.zero_grad()
            synced.append(accelerator.sync_gradients)
            if accelerator.sync_gradients:
                step += 1
                _save(accelerator, Path(folder), step)
                time.sleep(pause)
            if step == steps:
                return synced
    return synced


def _save(accelerator: Accelerator, folder: Path, step: int) -> None:
    unfinished = folder / "unfinished"
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unfinished.rename(folder / f"step-{step}")


def evaluated(cases: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Evaluate half way through an epoch of training, and at its end.

    Args:
        cases: rows, batch size and workers of each.
    """
    found = []
    for rows, batch_size, workers in cases:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model: Any = torch.nn.Linear(1, 1)
        train = loader(numbered(20, batch_size=2), accelerator)
        valid = loader(numbered(rows, "uneven", batch_size), accelerator, num_workers=workers)
        valid, model, train = accelerator.prepare(valid, model, train)
        synced, passes = [], []
        for number, _ in enumerate(train, start=1):
            with accelerator.accumulate(model):
                synced.append(accelerator.sync_gradients)
            if number in (2, 5):
                passes.append(_metrics(accelerator, valid))
        state = accelerator.gradient_state
        found.append(
            {"synced": synced, "passes": passes, "len": len(valid), "in": state.in_dataloader}
        )
        accelerator.free_memory()
    return found


def _metrics(accelerator: Accelerator, batches: Any) -> dict[str, Any]:
    """Rows and names of an epoch, as metrics get them, and how many rows of this rank's own batches."""
    found, names, sizes, states = [], [], [], []
    for batch in batches:
        sizes.append(len(batch["row"]))
        found += accelerator.gather_for_metrics(batch["row"]).tolist()
        names += accelerator.gather_for_metrics(batch["name"], use_gather_object=True)
        state = batches.state_dict()
        states.append((state["epoch"], state["batches"]))
    return {"rows": found, "names": names, "sizes": sizes, "last": states[-1:]}


def apart() -> dict[str, Any]:
    """Ranks end apart where they are let."""
    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    batches = loader(numbered(18, "uneven"), accelerator)
    found: dict[str, Any] = {"sizes": [len(batch["row"]) for batch in batches], "len": len(batches)}
    accelerator.even_batches = True
    found["even sizes"] = [len(batch["row"]) for batch in batches]
    return found


def bad_uses(folder: str) -> dict[str, str]:
    """What each is told."""
    accelerator = Accelerator(cpu=True)
    batched = pipeline("counted")
    told = {}

    def ask(name: str, use: Any) -> None:
        try:
            told[name] = f"gave {use()}"
        except (tp.ConfigError, tp.StateError) as error:
            told[name] = str(error)

    def configured(pipe: Any, **settings: Any) -> Any:
        config = DataLoaderConfiguration(**settings)
        return Accelerator(cpu=True, dataloader_config=config).prepare(pipe)

    for dispatch in (None, True, False):
        plain = configured(DataLoader(batched, batch_size=None), dispatch_batches=dispatch)
        ask(f"batches, dispatch {dispatch}", lambda plain=plain: list(plain))
    by_function = prepare_data_loader(DataLoader(batched, batch_size=None), put_on_device=True)
    ask("prepare_data_loader of a pipeline", lambda: list(by_function))
    ours = loader(batched, accelerator)
    ask("skip_first_batches", lambda: list(accelerator.skip_first_batches(ours, 2)))
    ask("prepare_data_loader", lambda: list(prepare_data_loader(ours)))
    ask("no accelerator", lambda: loader(batched, 2))  # type: ignore[arg-type]
    split = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    ask("split_batches", lambda: loader(batched, split))
    uneven = numbered(40, "uneven").filter(lambda batch: True)
    ask("uncounted", lambda: list(loader(uneven, accelerator)))
    rows = numbered(40, "uneven").map(lambda batch: {"name": "x"})
    ask("no rows", lambda: list(loader(rows, accelerator)))
    ask("single rows", lambda: loader(tp.from_dataset([{"x": 1}]), accelerator))
    return told


def half_way(folder: str) -> str:
    """An evaluation goes on on two ranks where one has stopped at an odd batch."""
    accelerator = Accelerator(cpu=True)
    valid = loader(numbered(38, "uneven"), accelerator)
    valid.load_state_dict(numbered(38, "uneven").distributed(rank=0, world_size=1).state_at(5))
    try:
        return str(_metrics(accelerator, valid))
    except tp.ConfigError as error:
        return str(error)


def same_bytes(folder: str) -> list[bytes]:
    """Of each kind of pipeline, what each rank would write of the state of all."""
    accelerator = Accelerator(cpu=True)
    found = []
    for kind in ("counted", "filtered", "packed"):
        batches = loader(pipeline(kind), accelerator)
        for _, _ in zip(batches, range(3), strict=False):
            pass
        path = Path(folder, f"{kind}-{accelerator.process_index}")
        path.mkdir(parents=True)
        torch.save(batches.state_dict(), path / "state.bin")
        found.append((path / "state.bin").read_bytes().hex())
    return gather_object([found])


def other_ranks() -> list[str]:
    """Pipelines that two ranks read: where both hold parts of one replica, and where there is one process."""
    from accelerate.parallelism_config import ParallelismConfig  # not in all versions that work

    told = []
    for tensor_parallel in (True, False):
        accelerator: Any = Accelerator(cpu=tensor_parallel)
        if tensor_parallel:  # Accelerate has it on GPUs alone
            accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
        try:
            loader(pipeline("counted"), accelerator)
        except tp.ConfigError as error:
            told.append(str(error))
        pipe = pipeline("counted").distributed(rank=0, world_size=1)
        told.append(str(len(list(loader(pipe, accelerator)))))
        AcceleratorState._reset_state(True)
    return told


class Batch(list):
    """Notes where it is sent."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch([*self, torch.device(device).type, non_blocking])


def sent() -> list[Any]:
    """Where batches come, by the accelerator's settings."""
    pipe = tp.from_dataset(range(2)).batch(2).map(Batch)
    found = []
    for placed, non_blocking in ((True, False), (True, True), (False, False)):
        config = DataLoaderConfiguration(non_blocking=non_blocking)
        accelerator = Accelerator(cpu=True, dataloader_config=config, device_placement=placed)
        found += list(loader(pipe, accelerator))
    return found


def kept(folder: str) -> dict[str, Any]:
    """What Accelerate does with the loader."""
    accelerator = Accelerator(cpu=True)
    ours = loader(pipeline("counted"), accelerator)
    model: Any = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler: Any = torch.optim.lr_scheduler.ConstantLR(optimizer)
    found: dict[str, Any] = {}
    scheduler, again, model, optimizer = accelerator.prepare(scheduler, ours, model, optimizer)
    found["same"] = again is accelerator.prepare(ours) is ours
    taken = loader(pipeline("counted").take(7), accelerator)
    found["len"] = [len(ours), len(taken), ours.loader.estimate_len()]
    first, second = [[digest(batch["input_ids"]) for batch in ours] for _ in range(2)]
    ours.set_epoch(0)
    found["epochs"] = [[digest(batch["input_ids"]) for batch in ours] == first, first == second]
    for _ in ours:
        break
    found["left"] = [accelerator.gradient_state.in_dataloader, ours.epoch]
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()  # the first rank writes the states of objects
    other = Accelerator(cpu=True)
    loader(pipeline("counted"), other)
    try:
        other.load_state(folder)
        found["fewer"] = "loaded"
    except RuntimeError as error:
        found["fewer"] = str(error)
    return found


def example(log: str, *arguments: str) -> None:
    """Run the script of the docs, noting what it trains on."""
    os.environ["ACCELERATE_USE_CPU"] = "true"  # as accelerate launch --cpu says
    module = load_example("accelerate_loop")
    notes = Steps(Path(log), int(os.environ["RANK"]))

    class Noting(module.NextByte):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                notes.trained_on(0, 0, {"input_ids": input_ids})
                time.sleep(0.01)
            return super().forward(input_ids, attention_mask)

    module.NextByte = Noting
    module.main(list(arguments))
