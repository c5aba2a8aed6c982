"""The HF Trainer over pipelines that make batches: killed and resumed, on one rank and on two."""

from __future__ import annotations

import json
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
from transformers import TrainerCallback, TrainingArguments

import trainpipes as tp
from frameworks import transformers_runs as runs
from frameworks.ranks import run
from frameworks.runs import (
    Start,
    between,
    check_global_batches,
    check_resumes,
    finish,
    growing,
    pipeline,
    plain,
)
from trainpipes.integrations.transformers import Trainer
from trainpipes.integrations.transformers.loaders import FILE

#: For each kind of pipeline: what to train with, of 12 batches an epoch on 2 ranks where they are counted;
#: checkpoints at the end of the first epoch and at the start of the second; those of two ranks and of one,
#: from which one and two go on.
KINDS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "counted": ({"num_train_epochs": 3, "gradient_accumulation_steps": 5}, (3, 4), (2, 3), (2, 4)),
    "filtered": ({"max_steps": 8, "gradient_accumulation_steps": 3}, (4, 5), (), ()),
    "packed": (
        {"max_steps": 8, "gradient_accumulation_steps": 2, "dataloader_num_workers": 2}, (4, 5), (), (),
    ),
    "filtered repeated": (
        {"max_steps": 8, "gradient_accumulation_steps": 3}, (3, 4), (2, 4), (2, 4),
    ),
}  # fmt: skip
#: Steps of three counted epochs: two ranks make 3 of one, one rank makes 5.
STEPS = {"whole": 9, "part-2": 9, "at-3": 9, "at-4": 9, "alone": 15}
STEPS |= {"moved-2": 2 + 1 + 10, "moved-3": 3 + 10, "back-2": 2 + 2 + 6, "back-4": 4 + 1 + 6}


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_goes_on_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    given, at, moved, back = KINDS[kind]
    # Killed in its first epoch, and in the second: after a checkpoint, and a step more.
    found = check_resumes(
        runs.train, tmp_path, kind, every=2, holds=(3, 5), at=at, moved=moved, back=back,
        expected=[list(chain.from_iterable(plain(pipeline(kind))))] if moved else None,
        ends=kind == "counted", **given,
    )  # fmt: skip
    told = {name: start.outcome() for name, start in found.items() if start.hold is None}
    steps = {name: outcome["steps"] for name, outcome in told.items()}
    assert steps == (STEPS if kind == "counted" else dict.fromkeys(told, 8))
    assert kind != "counted" or {outcome["epoch"] for outcome in told.values()} == {3}


def test_global_batches_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    check_global_batches(runs.train, tmp_path, ["counted", "filtered"])


def test_rows_in_a_plain_trainer_come_once_an_epoch(tmp_path: Path) -> None:
    for ranks, at in ((1, 16), (2, 8)):
        first = Start(tmp_path / f"{ranks}", tmp_path / f"saved-{ranks}", every=4)
        again = Start(tmp_path / f"{ranks} again", first.saved, resume=at)
        finish(runs.train_plain, ranks, first, again)
        found, steps = first.notes(), 12 // ranks
        assert first.outcome()["steps"] == 2 * steps
        epochs = [
            [one for rank in between(found, *of) for step in rank.values() for one in step]
            for of in ((0, steps), (steps, 2 * steps))
        ]
        assert [len(one) for one in epochs] == [12, 12]
        assert len(set(epochs[0])) == len(set(epochs[1])) == 12, "each batch once"
        assert set(epochs[0]) != set(epochs[1]), "in another order"
        assert again.notes() == between(found, at)
        assert again.outcome() == first.outcome()


@pytest.mark.ranks(2)
def test_batches_in_a_plain_trainer_are_refused_on_two_ranks(tmp_path: Path) -> None:
    counted, args = pipeline("counted"), runs.arguments(tmp_path)
    plain = transformers.Trainer(runs.model(), args, train_dataset=counted)
    with pytest.raises(
        tp.ConfigError, match=r"from trainpipes\.integrations\.transformers import Tr"
    ):
        plain.train()


@pytest.mark.ranks(2)
def test_ranks_that_would_each_train_a_model_of_their_own_are_refused(tmp_path: Path) -> None:
    """On CPUs without ``use_cpu``, where a trainer takes each process for the only one."""
    from trl import SFTConfig

    from frameworks.trl_runs import tokenizer
    from trainpipes.integrations.trl import SFTTrainer

    usual: dict[str, Any] = {
        "output_dir": str(tmp_path), "max_steps": 1, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no",
    }  # fmt: skip
    counted, model, args = pipeline("counted"), runs.model(), TrainingArguments(**usual)
    sft = SFTConfig(gradient_checkpointing=False, bf16=False, **usual)
    for trainer in (
        Trainer(model, args, train_dataset=counted),
        SFTTrainer(model, sft, train_dataset=counted, processing_class=tokenizer()),
    ):
        for reads in (
            trainer.train,
            partial(trainer.evaluate, counted),
            partial(trainer.predict, counted),
        ):
            with pytest.raises(tp.ConfigError, match=r"2 ranks read this pipeline.*use_cpu=True"):
                reads()
    alone = counted.distributed(rank=0, world_size=1)
    trainer = Trainer(model, args, train_dataset=alone)
    trainer.train()
    assert len(trainer.predict(alone).predictions) == 96


def test_the_example_is_resumed(tmp_path: Path) -> None:
    for name, rows in (("rows", 120), ("valid", 10)):
        table = pa.table({"text": [f"{name} {i} " + "x" * (i % 7) for i in range(rows)]})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=20)
    given = ["--files", str(tmp_path / "rows.parquet"), "--valid", str(tmp_path / "valid.parquet")]

    def command(output: str, *more: str) -> list[str]:
        return [*given, "--output", str(tmp_path / output), *more]

    whole = run(runs.script, 2, tmp_path / "a", command("whole"))
    assert whole[0]["steps"] == 16
    assert whole[0]["weights"] == whole[1]["weights"], "one model"
    run(runs.script, 2, tmp_path / "b", command("some", "--epochs", "1", "--save-steps", "4"))
    ended = run(runs.script, 2, tmp_path / "c", command("some"))
    assert ended[0]["steps"] == 16
    assert ended[0]["epoch"] == 2
    assert ended[0]["weights"] == ended[1]["weights"]


class Growing(TrainerCallback):
    """Adds a file to a folder after the third step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            growing(self.folder, 1)


def test_a_folder_that_grows_is_trained_on_by_steps(tmp_path: Path) -> None:
    pipe = growing(tmp_path / "days", 0)
    with pytest.raises(tp.ConfigError, match=r"pass max_steps=.*refresh"):
        runs.trainer(tmp_path, pipe, num_train_epochs=2)
    given = {"max_steps": 18, "gradient_accumulation_steps": 1}
    args = runs.arguments(tmp_path, save_strategy="steps", save_steps=4, **given)
    first = runs.Seeing(
        runs.model(), args, train_dataset=pipe, callbacks=[Growing(tmp_path / "days")]
    )
    first.train()
    assert len(first.seen) == 18 * 4
    assert len({*first.seen[20:60]}) == 40
    for step in (4, 12):
        again = runs.trainer(tmp_path / "new", growing(tmp_path / "days", 1), runs.Seeing, **given)
        again.train(tmp_path / f"checkpoint-{step}")
        assert again.seen == first.seen[4 * step :]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(("before", "after", "step"), [(2, 8, 24), (4, 8, 5), (8, 2, 6), (8, 4, 3)])
def test_all_that_is_left_comes_in_batches_of_another_size(
    before: int, after: int, step: int, epochs: int, tmp_path: Path
) -> None:
    given = {"num_train_epochs": epochs, "gradient_accumulation_steps": 1}
    first = runs.trainer(
        tmp_path, pipeline("counted", before), save_strategy="steps", save_steps=step, **given
    )
    first.train()
    saved = tmp_path / f"checkpoint-{step}"
    position = json.loads((saved / FILE).read_text())["loader"]
    pipe = pipeline("counted", after)
    loader = tp.Loader(pipe)
    loader.load_state_dict(position, allow_changes=["batch_size"])
    left = len(list(loader)) + (epochs - 1) * len(loader)
    args = runs.arguments(tmp_path / "new", **given)
    again = runs.Seeing(runs.model(), args, train_dataset=pipe, allow_changes=["batch_size"])
    again.train(saved)
    assert len(again.seen) == left * after
    assert again.state.global_step == again.state.max_steps == step + left
    assert again.state.epoch == again.state.num_train_epochs == epochs
