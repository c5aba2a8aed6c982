"""Pipelines in the frameworks that people train with: one file a framework, imported by those who use it.

    trainpipes.integrations.transformers    Trainer, and a mixin for a Trainer of your own
    trainpipes.integrations.accelerate      a loader that ``prepare`` keeps
    trainpipes.integrations.lightning       a LightningDataModule
    trainpipes.integrations.datasets        ``pipe.to_hf()``, for TRL and others
    trainpipes.integrations.ray_data        ``pipe.to_ray()``, for Ray Data
    trainpipes.integrations.trl             SFTTrainer, DPOTrainer, and a callback for TRL's own
    trainpipes.integrations.keras           a loader for ``model.fit``, and a callback that keeps its position
    trainpipes.integrations.ray             a loader for workers of Ray Train, its position in checkpoints
    trainpipes.integrations.torchft         batches for replica groups that go and come back

What they have in common is here, and needs no framework.
"""

from trainpipes.integrations.gathered import gathered

__all__ = ["gathered"]
