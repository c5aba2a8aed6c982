"""Pipelines in the trainers of TRL.

trainers            SFTTrainer, DPOTrainer, and a mixin for others
preference_batch    batches of the recipe ``preference`` as DPOTrainer has them
position            the position of rows that a trainer prepares, in its checkpoints
"""

from trainpipes.extra import need

need("trl", "trainpipes.integrations.trl")
need("datasets", "trainpipes.integrations.trl")

from trainpipes.integrations.trl.position import PositionCallback  # noqa: E402
from trainpipes.integrations.trl.trainers import (  # noqa: E402
    DPOTrainer,
    PipelineDatasetsMixin,
    SFTTrainer,
)

__all__ = ["DPOTrainer", "PipelineDatasetsMixin", "PositionCallback", "SFTTrainer"]
