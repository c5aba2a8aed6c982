"""Pipelines in Lightning.

    data_module    what Lightning asks for data, and for its state
    loaders        a ``Loader`` as Lightning's loops take one
    progress       what those loops say of how far training is

Why not a ``Loader`` alone: Lightning keeps the state of one rank, loads it only where it resumes within one
of its epochs, and where a loader has no ``len`` it has fetched a batch more than it has trained on. The
module's state is that of all ranks after the last batch that was trained on, and is always loaded.
"""

from trainpipes.extra import need

need("lightning", "trainpipes.integrations.lightning")

from trainpipes.integrations.lightning.data_module import PipelineDataModule  # noqa: E402

__all__ = ["PipelineDataModule"]
