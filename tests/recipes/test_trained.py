"""Models learn from the batches of the first recipes, and a resumed training is the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

import trainpipes as tp
from recipes.trained import BYTES, check_training, real_text, short_and_long
from trainpipes_recipes import masked_lm, pretrain, seq2seq, sft, tokens, training
from trainpipes_recipes.demo.corpus import write_parquet


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_parquet(real_text(), tmp_path_factory.mktemp("functions"))


def small() -> training.Transformer:
    return training.Transformer(BYTES, 128, 48, 2, 4)


@short_and_long
def test_sft(functions: Any, steps: int, below: float, tmp_path: Path) -> None:
    check_training(
        lambda: sft(functions, "bytes", max_length=128, batch_size=8, buffer_size=100),
        small,
        lambda model, batch: training.next_token_loss(model(batch["input_ids"]), batch["labels"]),
        tmp_path,
        steps=steps,
        below=below,
        num_workers=1,
    )


@short_and_long
def test_seq2seq(functions: Any, steps: int, below: float, tmp_path: Path) -> None:
    """The batches are the arguments of transformers' encoder-decoder models, which leave padding out."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    config = T5Config(
        vocab_size=BYTES,
        dropout_rate=0.0,
        pad_token_id=BYTES - 1,
        decoder_start_token_id=0,
        **sizes,
    )
    check_training(
        lambda: seq2seq(functions, "bytes", max_length=128, batch_size=8, buffer_size=100),
        lambda: T5ForConditionalGeneration(config),
        lambda model, batch: model(**batch).loss,
        tmp_path,
        steps=steps,
        below=below,
    )


@short_and_long
def test_pretrain(steps: int, below: float, tmp_path: Path) -> None:
    texts = pa.table({"text": ["".join(pair) for pair in real_text()]})
    pq.write_table(texts, tmp_path / "texts.parquet", row_group_size=50)

    def loss(model: Any, batch: Any) -> Tensor:
        scores = model(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
        return training.next_token_loss(scores, batch["labels"])

    check_training(
        lambda: pretrain(
            tmp_path / "texts.parquet", "bytes", max_length=128, batch_size=8, num_shards=2,
            buffer_size=100, pack_buffer_size=64,
        ),
        small,
        loss,
        tmp_path,
        steps=steps,
        below=below,
        num_workers=1,
    )  # fmt: skip


@short_and_long
def test_masked_lm(functions: Any, steps: int, below: float, tmp_path: Path) -> None:
    learnt = Tokenizer(models.BPE(unk_token="[UNK]"))
    learnt.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[MASK]", "[UNK]"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    learnt.train_from_iterator((pair[0] for pair in real_text()), trainer)

    def loss(model: Any, batch: Any) -> Tensor:
        scores = model(batch["input_ids"], batch["attention_mask"])
        return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())

    check_training(
        lambda: masked_lm(
            functions, learnt, text="prompt", max_length=64, mlm_probability=0.3, batch_size=16,
            buffer_size=100,
        ),
        lambda: training.Transformer(300, 64, 48, 2, 4, causal=False),
        loss,
        tmp_path,
        steps=steps,
        below=below,
    )  # fmt: skip


@short_and_long
def test_tokens(steps: int, below: float, tmp_path: Path) -> None:
    text = "".join("".join(pair) for pair in real_text()).encode()
    np.frombuffer(text, np.uint8).astype(np.uint16).tofile(tmp_path / "train.bin")
    check_training(
        lambda: tokens(tmp_path / "train.bin", dtype="uint16", max_length=128),
        small,
        lambda model, batch: training.next_token_loss(model(batch["input_ids"]), batch["labels"]),
        tmp_path,
        steps=steps,
        below=below,
        num_workers=1,
    )


class TestTheCheckItself:
    """It sees what it is there for."""

    @staticmethod
    def rows(noise: Any = None) -> tp.Pipeline:
        rows = [{"x": float(i % 7)} for i in range(64)]
        pipe = tp.from_dataset(rows).shuffle(64, seed=0).batch(4).collate()
        return pipe if noise is None else pipe.map(noise)

    @staticmethod
    def loss(model: Any, batch: Any) -> Tensor:
        x = batch["x"].float()[:, None]
        return ((model(x) - 2 * x) ** 2).mean()

    def test_a_sound_run_passes_and_its_losses_are_given(self, tmp_path: Path) -> None:
        found = check_training(self.rows, lambda: nn.Linear(1, 1), self.loss, tmp_path, steps=30)
        assert len(found) == 30

    def test_batches_that_depend_on_the_run_are_seen(self, tmp_path: Path) -> None:
        calls = iter(range(10_000))

        def noisy(batch: Any) -> Any:
            return {"x": batch["x"] + next(calls)}

        with pytest.raises(AssertionError):
            check_training(
                lambda: self.rows(noisy), lambda: nn.Linear(1, 1), self.loss, tmp_path, steps=30
            )

    def test_a_model_that_does_not_start_again_where_it_stood_is_seen(self, tmp_path: Path) -> None:
        class Forgetful(nn.Linear):
            def load_state_dict(self, *args: Any, **options: Any) -> Any:
                return None

        with pytest.raises(AssertionError, match="after a resume at step"):
            check_training(self.rows, lambda: Forgetful(1, 1), self.loss, tmp_path, steps=30)

    def test_a_loss_that_does_not_fall_is_seen(self, tmp_path: Path) -> None:
        with pytest.raises(AssertionError, match="the loss went from"):
            check_training(
                self.rows, lambda: nn.Linear(1, 1), self.loss, tmp_path, steps=30, lr=0.0
            )
