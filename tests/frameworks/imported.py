"""Imports what ranks of the frameworks need, once for all of them."""

from contextlib import suppress
from importlib import import_module

for name in (
    "torch._dynamo",  # by the first optimizer
    "pandas",  # by the first pa.array
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torchdata.stateful_dataloader",
    "accelerate",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "datasets",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "lightning",
    "trainpipes.loader",
    "trainpipes.testing",
):
    with suppress(ImportError):
        import_module(name)
