"""The HF Trainer's own features, and what it is told where something does not go together."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import pytest
import torch
import transformers
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration
from typing_extensions import Unpack

import trainpipes as tp
from frameworks.runs import pipeline
from frameworks.transformers_runs import Seeing, arguments, collated, model, rows, trainer
from trainpipes._internal import messages as warn_once
from trainpipes.integrations.transformers import PipelineTrainerMixin, Trainer
from trainpipes.integrations.transformers.loaders import FILE
from trainpipes.sources.from_dataset import FromTensors

pytestmark = pytest.mark.filterwarnings("default")  # those of the Trainer are not ours


def texts() -> tp.Pipeline:
    return tp.from_dataset([{"text": f"row {n}"} for n in range(8)])


#: The pipeline, the Trainer and its arguments, and what is said when it is made or begins to train.
REFUSED: list[tuple[Callable[[], tp.Pipeline], Any, dict[str, Any], str]] = [
    (lambda: pipeline("filtered"), Trainer, {}, r"pass max_steps=...; 3 epochs are about \d+ \(.*filter"),
    (lambda: pipeline("filtered repeated"), Trainer, {}, r"pass max_steps=... \(.*has no end"),
    (lambda: rows(8), Trainer, {}, r"train_dataset must .* single rows; end it with \.batch\(8\)\.pad_c"),
    (lambda: pipeline("counted"), transformers.Trainer, {}, r"from trainpipes\.integrations\.transf"),
    (lambda: pipeline("counted"), Trainer, {"auto_find_batch_size": True}, "auto_find_batch_size must be"),
    (
        lambda: pipeline("counted"), Trainer, {"accelerator_config": {"split_batches": True}},
        "split_batches must be off",
    ),
    (lambda: rows(8).batch(2), Trainer, {}, r"must be a dict of tensors, got \[.*; end the pipe"),
    (
        lambda: rows(3).batch(4, drop_last=True).pad_collate(), Trainer, {},
        r"must have a batch for each rank.* add rows",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("pipe", "kind", "given", "told"), REFUSED)
def test_what_cannot_train_is_told_before_the_first_step(
    pipe: Callable[[], tp.Pipeline], kind: Any, given: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(tp.ConfigError, match=told):
        trainer(tmp_path, pipe(), kind, **given).train()


@pytest.mark.parametrize(
    ("data", "steps", "told"),
    [
        (pipeline("counted"), 5, "gradient_accumulation_steps must be 4 for global_bat"),
        ([{"input_ids": [1]}], 1, "train_dataset must be a pipeline of batches"),
        (pipeline("counted").distributed(rank=0, world_size=3), 1,
         "global_batches must be divisible by 3 ranks, got 4"),
    ],
)  # fmt: skip
def test_global_batches_and_the_arguments_must_fit(
    data: Any, steps: int, told: str, tmp_path: Path
) -> None:
    def made(data: Any, steps: int) -> Any:
        args = arguments(tmp_path, gradient_accumulation_steps=steps)
        return Trainer(model(), args, train_dataset=data, global_batches=4)

    with pytest.raises(tp.ConfigError, match=told):
        made(data, steps)
    assert made(pipeline("counted"), 1).args.gradient_accumulation_steps == 4


class UnderDeepSpeed(Trainer):
    """As ``accelerate launch`` configures it: the arguments know nothing of it."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.is_deepspeed_enabled = True  # and it has read gradient_accumulation_steps


def test_steps_that_deepspeed_reads_first_are_given(tmp_path: Path) -> None:
    def made(steps: int) -> Any:
        args = arguments(tmp_path, gradient_accumulation_steps=steps)
        return UnderDeepSpeed(model(), args, train_dataset=pipeline("counted"), global_batches=4)

    with pytest.raises(tp.ConfigError, match=r"must be 4 .*got 1; write that number, which DeepSp"):
        made(1)
    assert made(4).args.gradient_accumulation_steps == 4


def test_evaluations_make_batches_and_have_an_end(tmp_path: Path) -> None:
    with pytest.raises(tp.ConfigError, match=r"eval_dataset must make batches, got single rows"):
        Trainer(
            model(), arguments(tmp_path), train_dataset=pipeline("counted"), eval_dataset=rows(8)
        )
    with pytest.raises(tp.ConfigError, match=r"leave .repeat\(\) out"):
        trainer(tmp_path, pipeline("counted")).evaluate(pipeline("filtered repeated"))


def test_a_mix_that_take_ends_is_evaluated_on_from_its_start(tmp_path: Path) -> None:
    parts = {"a": texts().shuffle(8, seed=0), "b": texts()}
    mixed = tp.mix(parts, weights={"a": 1, "b": 2}, stop="repeat")
    pipe = mixed.tokenize("bytes", max_length=8, labels="text").batch(2).take(3).pad_collate()
    made = trainer(tmp_path, pipeline("counted"))
    first, again = (made.predict(pipe).label_ids.tolist() for _ in range(2))
    assert len(first) == 6
    assert first == again


def test_workers_of_an_evaluation_stay_where_they_are_to(tmp_path: Path) -> None:
    def who(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": [row["n"]], "pid": os.getpid()}

    rows = tp.from_dataset([{"n": n} for n in range(8)]).sharding_filter(2)
    pipe = rows.map(who, version="1").batch(2).pad_collate()
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    made = trainer(tmp_path, pipe, remove_unused_columns=False, **options)
    found = [list(made.get_eval_dataloader(pipe)) for _ in range(2)]
    assert (
        len({pid for batches in found for batch in batches for pid in batch["pid"].tolist()}) == 1
    )
    first, again = ([batch["input_ids"].tolist() for batch in batches] for batches in found)
    assert len(first) == 4
    assert first == again


def test_a_loader_of_an_evaluation_begins_at_the_start_each_time(tmp_path: Path) -> None:
    numbers = tp.from_dataset([{"input_ids": [n]} for n in range(8)])
    pipe = tp.mix({"a": numbers}, weights={"a": 1}, stop="repeat").batch(2).take(3).pad_collate()
    batches = trainer(tmp_path, pipeline("counted")).get_eval_dataloader(pipe)
    first, again = ([batch["input_ids"].tolist() for batch in batches] for _ in range(2))
    assert len(first) == 3
    assert first == again


def test_what_is_evaluated_on_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainpipes.sources.from_dataset.tensor_digest", None)  # reads all of it
    opened: list[Any] = []
    usual = FromTensors.open
    monkeypatch.setattr(FromTensors, "open", lambda stage: opened.append(stage) or usual(stage))

    def tensors() -> tp.Pipeline:
        ids = torch.arange(12).reshape(6, 2)
        return tp.from_tensors(input_ids=ids, labels=ids).batch(2).collate()

    made, pipe = trainer(tmp_path, pipeline("counted")), tensors()
    losses = {made.evaluate(pipe)["eval_loss"] for _ in range(3)}
    assert len(opened) == 1
    losses.add(made.evaluate(tensors())["eval_loss"])  # which may be of other data
    assert len(opened) == 2
    assert len(losses) == 1


class OfTwoParts(Trainer):
    """On ranks that hold parts of one model."""

    def get_tp_size(self) -> int:
        return 2


def test_ranks_that_hold_parts_of_a_model_must_read_the_same(tmp_path: Path) -> None:
    pipe = pipeline("counted")
    made = trainer(tmp_path, pipe, OfTwoParts)
    for reads in made.train, partial(made.evaluate, pipe), partial(made.predict, pipe):
        with pytest.raises(tp.ConfigError, match=r"must read the same batches.*mesh=mesh"):
            reads()


class OfPartsOfSequences(Trainer):
    def get_sp_size(self) -> int:
        return 2


def test_parts_of_sequences_are_refused_with_deepspeed(tmp_path: Path) -> None:
    for pipe in pipeline("counted"), pipeline("counted").distributed(rank=0, world_size=1):
        made = trainer(tmp_path, pipe, OfPartsOfSequences)
        for reads in made.train, partial(made.evaluate, pipe), partial(made.predict, pipe):
            with pytest.raises(tp.ConfigError, match=r"sp_size must be 1 for a .*got 2; use cp_s"):
                reads()


class Wrapping(Trainer):
    """As DeepSpeed's adapter does."""

    def _prepare_for_training(self, *given: Any, **more: Any) -> Any:
        prepared, batches = super()._prepare_for_training(*given, **more)
        self.callback_handler.train_dataloader = [*batches]
        return prepared, self.callback_handler.train_dataloader


def test_a_loader_that_is_wrapped_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tp.ConfigError, match="train_dataloader must be the Trainer's own, whose"):
        trainer(tmp_path, pipeline("counted"), Wrapping).train()


def test_single_rows_may_be_collated_by_the_trainer(tmp_path: Path) -> None:
    given = arguments(tmp_path, max_steps=1, remove_unused_columns=False)
    Trainer(model(), given, train_dataset=texts(), data_collator=collated).train()


def test_a_batch_size_of_the_arguments_that_has_no_effect_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warn_once, "_warned", set())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer(tmp_path, pipeline("counted"), per_device_train_batch_size=3)
    (told,) = [one for one in said if "has no effect" in str(one.message)]
    assert str(told.message).startswith("per_device_train_batch_size=3 has no effect: the pipeline")
    assert told.filename == trainer.__code__.co_filename
    for size in (8, 4):  # the default, and the pipeline's own
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            trainer(tmp_path, pipeline("counted"), per_device_train_batch_size=size)


def test_a_checkpoint_without_a_position(tmp_path: Path) -> None:
    """It is refused, or begins an epoch anew if that is asked for."""
    given = {"num_train_epochs": 2, "gradient_accumulation_steps": 8}
    trainer(tmp_path, pipeline("counted"), save_strategy="steps", save_steps=3, **given).train()
    saved = tmp_path / "checkpoint-3"
    (saved / FILE).unlink()
    for at in (str(saved), saved):
        with pytest.raises(tp.StateError, match=f"checkpoint-3 has no {FILE}.* ignore_data_skip="):
            trainer(tmp_path / "new", pipeline("counted"), **given).train(at)
    forced = trainer(tmp_path / "new", pipeline("counted"), ignore_data_skip=True, **given)
    forced.train(str(saved))
    assert forced.state.global_step == 6


def test_a_checkpoint_whose_position_does_not_fit(tmp_path: Path) -> None:
    """It is refused, or goes on with changes that are allowed, or begins an epoch anew."""
    given = {"num_train_epochs": 2, "gradient_accumulation_steps": 1}
    first = trainer(tmp_path, pipeline("counted"), save_strategy="steps", save_steps=30, **given)
    first.train()
    saved = str(tmp_path / "checkpoint-30")  # 24 batches and 6 of 24

    def resumed(pipe: tp.Pipeline, allow_changes: Any = (), **more: Any) -> Any:
        args = arguments(tmp_path / "new", **given, **more)
        again = Seeing(model(), args, train_dataset=pipe, allow_changes=allow_changes)
        again.train(saved)
        return again

    half = pipeline("counted", batch_size=2)
    with pytest.raises(tp.StateError, match="batch_size: saved 4, now 2") as refused:
        resumed(half)
    assert "allow_changes is an option of the Trainer" in refused.value.__notes__[0]
    again = resumed(half, allow_changes=["batch_size"])
    assert len(again.seen) == len(set(again.seen)) == 2 * 36
    assert again.state.global_step == 30 + 36
    assert again.state.epoch == 2
    for pipe, count in (half, 96), (rows(48).batch(2).pad_collate(), 48):
        again = resumed(pipe, ignore_data_skip=True)
        assert len(again.seen) == len(set(again.seen)) == count
        assert again.state.global_step == 30 + count // 2
        assert again.state.epoch == 2
    (tmp_path / "checkpoint-30" / FILE).write_text("{")
    assert resumed(half, ignore_data_skip=True).state.epoch == 2


def test_without_a_position_of_its_own_a_run_goes_on_where_the_pipeline_is_told_to(
    tmp_path: Path,
) -> None:
    given = {"num_train_epochs": 2, "gradient_accumulation_steps": 1}
    first = trainer(tmp_path, pipeline("counted"), save_strategy="steps", save_steps=30, **given)
    first.train()
    saved = tmp_path / "checkpoint-30"
    (saved / FILE).unlink()
    pipe = pipeline("counted")
    pipe.load_state_dict(pipe.state_at(6, epoch=1))
    again = trainer(tmp_path / "new", pipe, ignore_data_skip=True, **given)
    again.train(str(saved))
    assert again.state.global_step == first.state.global_step == 48
    assert again.state.epoch == 2


def test_a_folder_may_be_a_path(tmp_path: Path) -> None:
    given = {"max_steps": 36, "gradient_accumulation_steps": 1}
    first = trainer(tmp_path, pipeline("counted"), save_strategy="steps", save_steps=24, **given)
    first.train()
    for saved in (tmp_path / "checkpoint-24", str(tmp_path / "checkpoint-24")):
        again = trainer(tmp_path / "new", pipeline("counted"), **given)
        again.train(saved)
        for ours, theirs in zip(again.model.parameters(), first.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_position_that_is_not_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, pipeline("counted"), save_strategy="steps", save_steps=2, max_steps=4).train()
    path = tmp_path / "checkpoint-4" / FILE
    whole = json.loads(path.read_text())

    def refused() -> None:
        with pytest.raises(
            tp.StateError, match=r"is damaged, or of another checkpoint: resume from"
        ):
            trainer(tmp_path / "new", pipeline("counted")).train(str(path.parent))

    damages = {"step": 3}, {"step": None}, {"first_epoch": 7}, {"first_epoch": "x"}, {"loader": []}
    for text in (*(json.dumps({**whole, **damage}) for damage in damages), "{", '{"loader": {}}'):
        path.write_text(text)
        refused()
    path.unlink()
    path.mkdir()
    refused()


def test_a_loader_in_place_of_a_pipeline_is_refused(tmp_path: Path) -> None:
    pipe = pipeline("counted")
    for wrong in (tp.Loader(pipe), DataLoader(pipe, batch_size=None)):
        with pytest.raises(
            tp.ConfigError, match="write train_dataset=pipe, and dataloader_num_workers="
        ):
            trainer(tmp_path, wrong)
        with pytest.raises(tp.ConfigError, match="write eval_dataset=pipe"):
            Trainer(model(), arguments(tmp_path), train_dataset=pipe, eval_dataset={"a": wrong})


@pytest.mark.parametrize("kind", ["counted", "filtered repeated", "rows repeated"])
def test_training_again_begins_with_the_first_epoch(kind: str, tmp_path: Path) -> None:
    pipe = pipeline(kind)
    again = trainer(tmp_path, pipe, Seeing, max_steps=8)
    again.train()
    first, again.seen = again.seen, []
    again.train()
    assert again.seen == first
    assert len(first) > 96
    assert again.state.global_step == 8
    for look in (tp.Loader(pipe), pipe):
        next(iter(look))
        again.seen = []
        again.train()
        assert again.seen == first


def test_a_place_that_the_pipeline_is_told_holds_once(tmp_path: Path) -> None:
    pipe = pipeline("filtered repeated")
    pipe.load_state_dict(pipe.state_at(3))
    told = trainer(tmp_path, pipe, Seeing, max_steps=1)
    told.train()
    later, told.seen = told.seen, []
    told.train()
    fresh = trainer(tmp_path, pipeline("filtered repeated"), Seeing, max_steps=2)
    fresh.train()
    assert told.seen == fresh.seen[:20]
    assert later[:8] == fresh.seen[12:20]


def test_a_place_that_the_pipeline_is_told_holds_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipeline("counted")
    pipe.load_state_dict(pipe.state_at(3, epoch=1))
    made = trainer(tmp_path, pipe)
    monkeypatch.setattr(type(made.args), "device", torch.device("meta"))
    batches = made._loader(pipe)
    state = batches.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 3)
    assert next(iter(batches))["input_ids"].device.type == "meta"
    assert tp.Loader(pipe).state_dict()["epoch"] == 2


def test_labels_of_another_name_are_told_of(tmp_path: Path) -> None:
    ids = torch.arange(12).reshape(6, 2)
    pipe = tp.from_tensors(input_ids=ids, label=ids).batch(2).collate()
    with pytest.raises(tp.ConfigError, match=r"or \.rename\(\{'label': 'labels'\}\)"):
        trainer(tmp_path, pipe).train()


class Own(PipelineTrainerMixin, transformers.Trainer):
    pass


class Small(torch.nn.Module):
    """A model that takes no more than it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Embedding(258, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.scores(input_ids).mean() ** 2}


def test_tensors_that_a_model_does_not_take_are_left_out(tmp_path: Path) -> None:
    def small(**more: Any) -> Any:
        given = {"num_train_epochs": 1, "logging_strategy": "epoch", **more}
        return Own(Small(), arguments(tmp_path, **given), train_dataset=pipeline("counted"))

    trainer = small()
    metrics = trainer.train().metrics
    assert trainer.state.global_step == 5
    rows_trained = metrics["train_samples_per_second"] * metrics["train_runtime"]
    assert rows_trained == pytest.approx(96, rel=0.05)
    with pytest.raises(TypeError, match="unexpected keyword argument 'row'"):
        small(remove_unused_columns=False).train()


def test_rows_of_batches_of_a_sampler_are_counted_by_its_size(tmp_path: Path) -> None:
    data = [{"input_ids": torch.arange(3), "labels": torch.arange(3)}] * 12
    batches = BatchSampler(SequentialSampler(data), 4, drop_last=False)
    made = trainer(tmp_path, tp.from_dataset(data, batch_sampler=batches).collate(), max_steps=6)
    metrics = made.train().metrics
    assert metrics["train_samples_per_second"] / metrics["train_steps_per_second"] == pytest.approx(
        20, rel=0.05
    )
    assert made.num_examples(made.get_train_dataloader()) == 12


class Typed(TypedDict, total=False):
    attention_mask: torch.Tensor


class WithMore(Small):
    """As the models of transformers, whose ``**kwargs`` have types."""

    seen: frozenset[str] = frozenset()

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        self.seen = frozenset({"input_ids", "labels", *kwargs} - {"num_items_in_batch"})
        return super().forward(input_ids, labels)


# No text, as it is without annotations of the future.
WithMore.forward.__annotations__["kwargs"] = Unpack[Typed]


class OfAnything(WithMore):
    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        return super().forward(**batch)


class Wrapped(OfAnything):
    """As a model of PEFT, which hands all on to its base."""

    def __init__(self) -> None:
        super().__init__()
        self.base = WithMore()

    def get_base_model(self) -> torch.nn.Module:
        return self.base


@pytest.mark.parametrize(
    ("make", "whether"), [(WithMore, False), (Wrapped, False), (OfAnything, True)]
)
def test_a_model_that_takes_more_gets_what_it_names(
    make: Any, whether: bool, tmp_path: Path
) -> None:
    for keep in (True, False):
        given = arguments(tmp_path, max_steps=1, remove_unused_columns=keep)
        trained = make()
        Own(trained, given, train_dataset=pipeline("counted")).train()
        assert ("row" in trained.seen) == (whether or not keep)
        assert {"input_ids", "labels", "attention_mask"} <= trained.seen


def held_out() -> tp.Pipeline:
    return rows(10).batch(4).pad_collate()


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    given = arguments(
        tmp_path, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, max_steps=8,
        load_best_model_at_end=True, save_total_limit=2, metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip  # so that it is not the last one
    trainer = Trainer(model(), given, train_dataset=pipeline("counted"), eval_dataset=held_out())
    trainer.train()
    losses = {
        entry["step"]: entry["eval_loss"]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    }
    best = max(losses, key=lambda step: losses[step])
    assert sorted(losses) == [2, 4, 6, 8]
    assert best < 8
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert trainer.evaluate()["eval_loss"] == losses[best]
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert kept == sorted({f"checkpoint-{best}", "checkpoint-8"})
    for name in kept:
        saved = json.loads((tmp_path / name / "trainpipes.json").read_text())
        assert saved["step"] == int(name.split("-")[1])


class Seq2Seq(PipelineTrainerMixin, transformers.Seq2SeqTrainer):
    pass


def test_the_mixin_stands_before_another_trainer(tmp_path: Path) -> None:
    questions = [{"ask": f"{n} + 1?"} for n in range(20)]

    rows = tp.from_dataset(questions).tokenize("bytes", columns="ask", max_length=16)
    batches = rows.batch(4).pad_collate()
    pipe = batches.map(lambda batch: {**batch, "labels": batch["input_ids"]})
    config = T5Config(
        vocab_size=258, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=257,
    )  # fmt: skip

    args = Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, generation_max_length=4, use_cpu=True, report_to=[],
        disable_tqdm=True, max_steps=3,
    )  # fmt: skip
    trainer = Seq2Seq(T5ForConditionalGeneration(config), args, train_dataset=pipe)
    trainer.train()
    predicted = trainer.predict(pipe)
    assert predicted.predictions.shape[0] == predicted.label_ids.shape[0] == len(questions)
