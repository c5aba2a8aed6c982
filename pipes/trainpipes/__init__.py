"""Training data for PyTorch: from files to pinned batches, as composable stages, with a position
that can be saved at any batch and restored exactly."""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

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
from trainpipes.kinds.source import Place, RowSource, RowStream, StreamReader
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import BatchStage, Rows, RowStage, Source, TableStage
from trainpipes.loader import Loader
from trainpipes.locate import locate
from trainpipes.memmap import read_memmap, write_memmap
from trainpipes.merge import merge_states
from trainpipes.naming import other_name
from trainpipes.padding import pad_sequences
from trainpipes.pipeline import Pipeline
from trainpipes.recipe_registry import recipe, recipes
from trainpipes.start import (
    concat,
    from_arrow,
    from_dataset,
    from_hf,
    from_iterable,
    from_memmap,
    from_ray,
    from_source,
    from_tensors,
    from_torchdata,
    list_files,
    mix,
    read_arrow,
    read_bytes,
    read_csv,
    read_files,
    read_images,
    read_json,
    read_numpy,
    read_parquet,
    read_text,
    read_webdataset,
)
from trainpipes.start import (
    zip as zip,
)
from trainpipes.version import __version__ as __version__

if TYPE_CHECKING:
    from trainpipes.config import load
    from trainpipes.preview.preview import show_item as show

# torchdata's StatefulDataLoader calls a deprecated function of torch at every construction.
warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)

__all__ = [
    "BatchStage", "ConfigError", "DataChangedError", "DataError", "Loader", "MissingExtraError",
    "MissingFilesError", "Pipeline", "Place", "RowSource", "RowStage", "RowStream", "Rows",
    "SchemaError", "Source", "Stage", "StateError", "StreamReader", "TableStage",
    "TopologyError", "TrainpipesError", "UnreachableError", "UnreadableError", "WorkerError",
    "cache", "concat", "from_arrow", "from_dataset", "from_hf", "from_iterable", "from_memmap",
    "from_ray", "from_source", "from_tensors", "from_torchdata", "list_files", "load", "locate",
    "merge_states", "mix", "nodes", "pad_sequences", "read_arrow", "read_bytes", "read_csv", "read_files",
    "read_images", "read_json", "read_memmap", "read_numpy", "read_parquet", "read_text",
    "read_webdataset", "recipe", "recipes", "samplers", "show", "write_memmap",
]  # fmt: skip  # not "zip", which is a builtin of Python's where names are imported by *


def __getattr__(name: str) -> Any:
    if name == "nodes":  # which torchdata is imported for
        return importlib.import_module("trainpipes.nodes")
    if name == "load":  # few programs read a config, and all import this
        return importlib.import_module("trainpipes.config").load
    if name == "show":
        return importlib.import_module("trainpipes.preview.preview").show_item
    raise AttributeError(
        f"module 'trainpipes' has no attribute {name!r}{other_name(name, [*__all__, 'zip'])}",
        name=name,
    )
