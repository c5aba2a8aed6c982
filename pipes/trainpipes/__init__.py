"""Training data for PyTorch: from files to pinned batches, as composable stages, with a position
that can be saved at any batch and restored exactly."""

import warnings

from trainpipes import cache, samplers
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
    UnreachableError,
    UnreadableError,
    WorkerError,
)
from trainpipes.loader import Loader
from trainpipes.memmap import read_memmap, write_memmap
from trainpipes.merge import merge_states
from trainpipes.padding import pad_sequences
from trainpipes.pipeline import Pipeline
from trainpipes.recipes import recipe
from trainpipes.start import (
    concat,
    from_arrow,
    from_dataset,
    from_iterable,
    from_memmap,
    from_tensors,
    list_files,
    mix,
)

# torchdata's StatefulDataLoader calls a deprecated function of torch at every construction.
warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)

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
    "UnreachableError",
    "UnreadableError",
    "WorkerError",
    "cache",
    "concat",
    "from_arrow",
    "from_dataset",
    "from_iterable",
    "from_memmap",
    "from_tensors",
    "list_files",
    "merge_states",
    "mix",
    "pad_sequences",
    "read_memmap",
    "recipe",
    "samplers",
    "write_memmap",
]
