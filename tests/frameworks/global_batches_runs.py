"""What ranks do in tests of ``global_batches``: each trains some optimizer steps, and saves after each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from frameworks import accelerate_runs, lightning_runs, transformers_runs
from frameworks.steps import Steps
from frameworks.transformers_runs import rank

#: Batches of an optimizer step.
BATCHES = 4

Weights = dict[str, float]


def weights_of(model: Any) -> Weights:
    return {
        name.removeprefix("module."): float(w.detach().double().sum())
        for name, w in model.named_parameters()
    }


def accelerate(folder: Path, notes: Path, kind: str, start: int, stop: int) -> Weights:
    """Train from step ``start`` to step ``stop``."""
    from accelerate import Accelerator

    from trainpipes.integrations.accelerate import loader

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model: Any = accelerate_runs.Model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = loader(accelerate_runs.pipeline(kind), accelerator, global_batches=BATCHES)
    model, optimizer = accelerator.prepare(model, optimizer)
    steps, step = Steps(notes, accelerator.process_index), start
    if start:
        accelerator.load_state(str(folder / f"step-{start}"))
    while step < stop:
        epoch = batches.epoch
        for batch in batches:
            steps.trained_on(epoch, step, batch)
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["input_ids"]))
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if step == stop:
                break
    accelerator.save_state(str(folder / f"step-{stop}"))
    return weights_of(model)


def trainer(folder: Path, notes: Path, kind: str, start: int, stop: int) -> Weights:
    """The same by a ``Trainer``."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = control.should_save = state.global_step == stop

    given: dict[str, Any] = {"gradient_accumulation_steps": 1, "lr_scheduler_type": "constant"}
    given |= {"num_train_epochs": 4} if kind == "counted" else {"max_steps": 100}
    arguments = transformers_runs.arguments(folder, **given)
    made = transformers_runs.NotingTrainer(
        transformers_runs.model(), arguments,
        train_dataset=transformers_runs.pipeline(kind), global_batches=BATCHES, callbacks=[Stop()],
    )  # fmt: skip
    made.notes = Steps(notes, rank())
    made.train(resume_from_checkpoint=str(folder / f"checkpoint-{start}") if start else None)
    assert made.state.global_step == stop
    return {}  # it has dropout


def lightning(folder: Path, notes: Path, kind: str, start: int, stop: int) -> Weights:
    """The same by Lightning."""

    class Model(lightning_runs.Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.steps.trained_on(self.trainer.current_epoch, self.trainer.global_step, batch)
            return self.weights(batch["input_ids"]).square().mean()

    torch.manual_seed(0)
    model = Model(notes)
    data = lightning_runs.PipelineDataModule(
        train=lightning_runs.pipeline(kind), global_batches=BATCHES
    )
    made = lightning_runs.make_trainer(
        folder, [lightning_runs.after_steps(folder)], max_steps=stop, max_epochs=-1
    )
    at = folder / "checkpoints" / f"step-{start}.ckpt"
    made.fit(model, datamodule=data, ckpt_path=at if start else None)
    assert made.global_step == stop
    return weights_of(model)
