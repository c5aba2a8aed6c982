"""What users compose: a chain of stages, and the functions that it starts with."""

from trainpipes.pipeline import starts as starts
from trainpipes.pipeline.chain import Pipeline

__all__ = ["Pipeline"]
