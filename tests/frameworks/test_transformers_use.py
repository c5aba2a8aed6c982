"""The Trainer's own features, with a pipeline in it."""

from __future__ import annotations

import json
from pathlib import Path

import transformers
from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

import trainpipes as tp
from frameworks.transformers_runs import arguments, model, pipeline, rows
from trainpipes.integrations.transformers import PipelineTrainerMixin, Trainer


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
