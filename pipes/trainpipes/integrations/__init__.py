"""Pipelines in the frameworks that people train with: one file a framework, imported by those who use it.

    trainpipes.integrations.transformers    Trainer, and a mixin for a Trainer of your own
    trainpipes.integrations.accelerate      a loader that ``prepare`` keeps
    trainpipes.integrations.lightning       a LightningDataModule
    trainpipes.integrations.datasets        ``pipe.to_hf()``, for TRL and others
    trainpipes.integrations.trl             SFTTrainer, DPOTrainer, and a callback for TRL's own

What they have in common is here, and needs no framework.
"""

from trainpipes.integrations.gathered import gathered

__all__ = ["gathered"]
