"""A document of a packed row doesn't see the others, in the trainers and in the training script."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import trainpipes as tp

DOCUMENTS = 24, 30  # tokens with the end of a document, in a row of 54


def packed(first: str) -> tp.Pipeline:
    """Batches of a row of two documents, of which the second one is always the same."""
    texts = [{"text": first * (DOCUMENTS[0] - 1)}, {"text": "z" * (DOCUMENTS[1] - 1)}]
    return tp.recipe(
        "pretrain", files=tp.from_dataset(texts), tokenizer="bytes", max_length=sum(DOCUMENTS),
        batch_size=1, num_shards=1, buffer_size=1,
    )  # fmt: skip


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=258, num_hidden_layers=1, **shape))


def trained(kind: str, net: Any, pipe: tp.Pipeline, folder: Path) -> None:
    if kind == "script":
        from trainpipes_recipes.train_pretrain import loss_of

        loss_of(net, pipe.peek())
    elif kind == "transformers":
        from transformers import TrainingArguments

        from trainpipes.integrations.transformers import Trainer

        options = {"max_steps": 1, "use_cpu": True, "report_to": [], "save_strategy": "no"}
        Trainer(net, TrainingArguments(str(folder), **options), train_dataset=pipe).train()
    else:
        from trl import SFTConfig

        from frameworks.trl_runs import tokenizer
        from trainpipes.integrations.trl import SFTTrainer

        options = {"max_steps": 1, "use_cpu": True, "report_to": [], "save_strategy": "no"}
        with warnings.catch_warnings(action="ignore"):  # TRL's own options are deprecated
            args = SFTConfig(str(folder), bf16=False, **options)
        SFTTrainer(net, args, train_dataset=pipe, processing_class=tokenizer()).train()


@pytest.mark.parametrize("kind", ["script", "transformers", "trl"])
def test_a_packed_document_does_not_see_the_others(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("trl" if kind == "trl" else "transformers")
    seen: list[torch.Tensor] = []
    for first in "ab":
        pipe, net = packed(first), model()
        segments = pipe.peek()["segment_ids"][0]
        assert len(segments.unique()) == 2
        net.model.register_forward_hook(lambda *given: seen.append(given[-1][0][0].detach()))
        trained(kind, net, pipe, tmp_path / first)
    second = (pipe.peek()["input_ids"][0] == ord("z")).nonzero()[:, 0]
    one, other = (hidden[second] for hidden in seen)
    assert len(second) == DOCUMENTS[1] - 1
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
