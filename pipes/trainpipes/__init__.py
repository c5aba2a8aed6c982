"""Training data for PyTorch: from files to pinned batches, as composable stages, with a position
that can be saved at any batch and restored exactly."""

from trainpipes.errors import (
    ConfigError,
    DataChangedError,
    DataError,
    MissingExtraError,
    MissingFilesError,
    SchemaError,
    StateError,
    TopologyError,
    TrainpipesError,
    UnreadableError,
)
from trainpipes.loader import Loader
from trainpipes.padding import pad_sequences
from trainpipes.pipeline import (
    Pipeline,
    from_arrow,
    from_dataset,
    from_iterable,
    from_tensors,
    list_files,
)

__all__ = [
    "ConfigError",
    "DataChangedError",
    "DataError",
    "Loader",
    "MissingExtraError",
    "MissingFilesError",
    "Pipeline",
    "SchemaError",
    "StateError",
    "TopologyError",
    "TrainpipesError",
    "UnreadableError",
    "from_arrow",
    "from_dataset",
    "from_iterable",
    "from_tensors",
    "list_files",
    "pad_sequences",
]
