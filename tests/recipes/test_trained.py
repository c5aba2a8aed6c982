"""Models learn from the batches of each recipe, and a resumed training is the same one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

import trainpipes as tp
from chats import conversations_of, preferences_of, small_tokenizer
from trained import check_training, real_text
from trainpipes.tokenizers.adapters import VOCABULARY as BYTES
from trainpipes_recipes.samples import write_functions

SMALL: dict[str, Any] = {"batch_size": 8, "buffer_size": 100}


def causal(vocabulary: int = BYTES) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_hidden_layers=1, **sizes))


def padded(model: Any, batch: Any) -> Tensor:
    from trainpipes_recipes import training

    return training.loss_sum(model, batch) / training.targets_of(batch).clamp(min=1)


def packed_loss(model: Any, batch: Any) -> Tensor:
    from trainpipes_recipes.train_pretrain import loss_of

    return loss_of(model, batch)


def own(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


Case = tuple[Callable[[], tp.Pipeline], Callable[[], nn.Module], Callable[[Any, Any], Tensor]]


def sft(folder: Path, packed: bool = False) -> Case:
    files = write_functions(real_text(), folder)
    options = {"max_length": 128, "packed": packed, **SMALL}
    made = lambda: tp.recipe("sft", files, "bytes", **options)  # noqa: E731
    return made, causal, packed_loss if packed else padded


def packed_sft(folder: Path) -> Case:
    return sft(folder, packed=True)


def seq2seq(folder: Path) -> Case:
    """The batches are the arguments of transformers' encoder-decoder models, which leave padding out."""
    from transformers import T5Config, T5ForConditionalGeneration

    files = write_functions(real_text(), folder)
    config = T5Config(
        vocab_size=BYTES, dropout_rate=0.0, pad_token_id=BYTES - 1, decoder_start_token_id=0, d_model=32,
        d_kv=8, d_ff=64, num_layers=1, num_heads=4,
    )  # fmt: skip
    made = lambda: tp.recipe("seq2seq", files, "bytes", max_length=128, **SMALL)  # noqa: E731
    return made, lambda: T5ForConditionalGeneration(config), own


def pretrain(folder: Path) -> Case:
    texts = pa.table({"text": ["".join(pair) for pair in real_text()]})
    pq.write_table(texts, folder / "texts.parquet", row_group_size=50)
    options = {"max_length": 128, "num_shards": 2, "pack_buffer_size": 64, **SMALL}
    made = lambda: tp.recipe("pretrain", folder / "texts.parquet", "bytes", **options)  # noqa: E731
    return made, causal, packed_loss


def masked_lm(folder: Path) -> Case:
    from transformers import BertConfig, BertForMaskedLM

    files = write_functions(real_text(), folder)
    learnt = Tokenizer(models.BPE(unk_token="[UNK]"))
    learnt.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[MASK]", "[UNK]"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    learnt.train_from_iterator((pair[0] for pair in real_text()), trainer)
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=300, num_hidden_layers=1, max_position_embeddings=64, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0, **sizes,
    )  # fmt: skip
    options = {"max_length": 64, "mlm_probability": 0.3, **SMALL}
    made = lambda: tp.recipe("masked_lm", files, learnt, text="prompt", **options)  # noqa: E731
    return made, lambda: BertForMaskedLM(config), own


def tokens(folder: Path) -> Case:
    text = "".join("".join(pair) for pair in real_text()).encode()
    np.frombuffer(text, np.uint8).astype(np.uint16).tofile(folder / "train.bin")
    made = lambda: tp.recipe("tokens", folder / "train.bin", dtype="uint16", max_length=128)  # noqa: E731
    return made, causal, own


def chat(folder: Path, packed: bool = False) -> Case:
    talks = pa.table({"messages": conversations_of(real_text())})
    pq.write_table(talks, folder / "x.parquet")
    options = {"max_length": 128, "num_shards": 2, "packed": packed, "on_error": "keep", **SMALL}
    made = lambda: tp.recipe("chat", folder / "x.parquet", small_tokenizer(), **options)  # noqa: E731
    return (made, lambda: causal(len(small_tokenizer())), packed_loss if packed else padded)


def packed_chat(folder: Path) -> Case:
    return chat(folder, packed=True)


def preference(folder: Path) -> Case:
    table = pa.Table.from_pylist(preferences_of(real_text()))
    pq.write_table(table, folder / "x.parquet", row_group_size=50)

    def log_probability(model: Any, batch: Any, side: str) -> Tensor:
        """Of each response, given its prompt: ``[B]``."""
        scores = model(batch[f"{side}_input_ids"]).logits[:, :-1].log_softmax(-1)
        labels = batch[f"{side}_labels"][:, 1:]
        each = scores.gather(2, labels.clamp(min=0)[:, :, None])[:, :, 0]
        return (each * (labels != -100)).sum(1)

    def loss(model: Any, batch: Any) -> Tensor:
        chosen, rejected = (log_probability(model, batch, s) for s in ("chosen", "rejected"))
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    options = {"max_length": 128, "on_error": "keep", **SMALL}
    return lambda: tp.recipe("preference", folder / "x.parquet", "bytes", **options), causal, loss


class Classifier(nn.Module):
    """Scores of two classes: of the mean of the tokens' vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.scores = nn.Embedding(BYTES, 32), nn.Linear(32, 2)

    def forward(self, batch: Any) -> Tensor:
        there = batch["attention_mask"][:, :, None]
        mean = (self.tokens(batch["input_ids"]) * there).sum(1) / there.sum(1).clamp(min=1)
        scores: Tensor = self.scores(mean)
        return scores


def classification(folder: Path) -> Case:
    """Whether a text is the start or the body of a function of Python's standard library."""
    rows = [{"text": pair[k], "label": ["head", "body"][k]} for pair in real_text() for k in (0, 1)]
    data = tp.from_dataset(rows)
    made = lambda: tp.recipe("classification", data, "bytes", max_length=96, batch_size=8)  # noqa: E731
    return made, Classifier, lambda model, batch: F.cross_entropy(model(batch), batch["labels"])


def images(folder: Path) -> Case:
    """The class of a picture is its brightest channel."""
    from transformers import ResNetConfig, ResNetForImageClassification

    labels = np.arange(60) % 3
    pixels = np.random.default_rng(0).integers(0, 90, (60, 3, 16, 16)).astype(np.uint8)
    pixels[np.arange(60), labels] += 150
    rows = [{"image": p, "label": int(c)} for p, c in zip(pixels, labels, strict=True)]
    data = tp.from_dataset(rows)
    sizes = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}
    config = ResNetConfig(num_labels=3, **sizes)
    made = lambda: tp.recipe("images", data, size=12, batch_size=8, num_shards=2)  # noqa: E731
    model = lambda: ResNetForImageClassification(config)  # noqa: E731
    return made, model, lambda model, b: F.cross_entropy(model(b["images"]).logits, b["labels"])


RECIPES = (
    sft, packed_sft, seq2seq, pretrain, masked_lm, tokens, chat, packed_chat, preference, classification,
    images,
)  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("steps", "below"), [(24, 1.0), pytest.param(200, 0.8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("case", RECIPES, ids=lambda case: case.__name__)
def test_a_model_learns_from_it_and_resumes(
    case: Callable[[Path], Case], steps: int, below: float, tmp_path: Path
) -> None:
    workers = int(case in (sft, pretrain, images))
    if case is masked_lm and below < 1:  # to guess a masked token takes more than 200 steps
        below = 0.88
    losses = check_training(
        *case(tmp_path), tmp_path / "saved.pt", steps=steps, below=below, num_workers=workers
    )
    if case is classification:
        assert losses[0] == pytest.approx(np.log(2), abs=0.2)


class Forgetful(nn.Linear):
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return None


CALLS = iter(range(10_000))


@pytest.mark.parametrize(("model", "noise", "lr", "said"), [
    (nn.Linear, None, 3e-3, None),
    (nn.Linear, lambda batch: {"x": batch["x"] + next(CALLS)}, 3e-3, "^"),
    (Forgetful, None, 3e-3, "after a resume at step"),
    (nn.Linear, None, 0.0, "the loss went from"),
], ids=["sound", "other batches", "other weights", "learns nothing"])  # fmt: skip
def test_the_check_sees_what_it_is_there_for(
    model: Any, noise: Any, lr: float, said: str | None, tmp_path: Path
) -> None:
    def rows() -> tp.Pipeline:
        values = [{"x": float(i % 7)} for i in range(64)]
        pipe = tp.from_dataset(values).shuffle(64, seed=0).batch(4).collate()
        return pipe if noise is None else pipe.map(noise)

    def loss(model: Any, batch: Any) -> Tensor:
        x = batch["x"].float()[:, None]
        return ((model(x) - 2 * x) ** 2).mean()

    with nullcontext() if said is None else pytest.raises(AssertionError, match=said):
        check_training(rows, lambda: model(1, 1), loss, tmp_path / "x.pt", steps=30, lr=lr)
