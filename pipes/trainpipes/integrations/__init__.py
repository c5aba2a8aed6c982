"""Pipelines in the frameworks that people train with: imported by those who use them.

trainpipes.integrations.transformers    Trainer, and a mixin for a Trainer of your own
trainpipes.integrations.accelerate      a loader that Accelerate's checkpoints hold
trainpipes.integrations.trl             SFTTrainer, DPOTrainer, and a mixin for others
trainpipes.integrations.lightning       a LightningDataModule
trainpipes.integrations.datasets        ``pipe.to_hf()``
trainpipes.integrations.ray_data        ``pipe.to_ray()``, for Ray Data
trainpipes.integrations.ray             a loader for workers of Ray Train, its position in checkpoints
"""
