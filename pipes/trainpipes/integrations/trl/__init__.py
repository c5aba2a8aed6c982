"""Pipelines in the trainers of TRL.

position    the position of a dataset of ``pipe.to_hf()`` in a trainer's checkpoints
"""

from trainpipes.integrations.trl.position import PositionCallback

__all__ = ["PositionCallback"]
