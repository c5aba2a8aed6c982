"""Training data for PyTorch: from files to pinned batches, as composable stages, with a position
that can be saved at any batch and restored exactly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainpipes.version import __version__ as __version__

if TYPE_CHECKING:
    from trainpipes import cache as cache
    from trainpipes import nodes as nodes
    from trainpipes import samplers as samplers
    from trainpipes.columns.rectangles import pad_sequences as pad_sequences
    from trainpipes.config import load as load
    from trainpipes.engine.processes.executors import Processes as Processes
    from trainpipes.engine.processes.executors import Threads as Threads
    from trainpipes.engine.processes.ray_cluster import Ray as Ray
    from trainpipes.errors import ConfigError as ConfigError
    from trainpipes.errors import DataChangedError as DataChangedError
    from trainpipes.errors import DataError as DataError
    from trainpipes.errors import MissingExtraError as MissingExtraError
    from trainpipes.errors import MissingFilesError as MissingFilesError
    from trainpipes.errors import SchemaError as SchemaError
    from trainpipes.errors import StateError as StateError
    from trainpipes.errors import TopologyError as TopologyError
    from trainpipes.errors import TrainpipesError as TrainpipesError
    from trainpipes.errors import UnreachableError as UnreachableError
    from trainpipes.errors import UnreadableError as UnreadableError
    from trainpipes.errors import WorkerError as WorkerError
    from trainpipes.filesystems.retry import Retry as Retry
    from trainpipes.interfaces.quarantine import Quarantine as Quarantine
    from trainpipes.interfaces.source import Place as Place
    from trainpipes.interfaces.source import RowSource as RowSource
    from trainpipes.interfaces.source import RowStream as RowStream
    from trainpipes.interfaces.source import StreamReader as StreamReader
    from trainpipes.interfaces.stage import Stage as Stage
    from trainpipes.interfaces.stage_kinds import BatchStage as BatchStage
    from trainpipes.interfaces.stage_kinds import Rows as Rows
    from trainpipes.interfaces.stage_kinds import RowStage as RowStage
    from trainpipes.interfaces.stage_kinds import Source as Source
    from trainpipes.interfaces.stage_kinds import TableStage as TableStage
    from trainpipes.interfaces.stateful_stage import StatefulStage as StatefulStage
    from trainpipes.loader import Loader as Loader
    from trainpipes.loader.steps import steps as steps
    from trainpipes.loader.work_items import Work as Work
    from trainpipes.loader.work_queue import WorkQueue as WorkQueue
    from trainpipes.look.find import find as find
    from trainpipes.look.locate import locate as locate
    from trainpipes.look.profiling.profile import profile as profile
    from trainpipes.look.show import show as show
    from trainpipes.pipeline import Pipeline as Pipeline
    from trainpipes.pipeline.starts import concat as concat
    from trainpipes.pipeline.starts import from_arrow as from_arrow
    from trainpipes.pipeline.starts import from_dataset as from_dataset
    from trainpipes.pipeline.starts import from_hf as from_hf
    from trainpipes.pipeline.starts import from_iterable as from_iterable
    from trainpipes.pipeline.starts import from_memmap as from_memmap
    from trainpipes.pipeline.starts import from_tensors as from_tensors
    from trainpipes.pipeline.starts import from_torchdata as from_torchdata
    from trainpipes.pipeline.starts import list_files as list_files
    from trainpipes.pipeline.starts import mix as mix
    from trainpipes.pipeline.starts import read_arrow as read_arrow
    from trainpipes.pipeline.starts import read_bytes as read_bytes
    from trainpipes.pipeline.starts import read_csv as read_csv
    from trainpipes.pipeline.starts import read_delta as read_delta
    from trainpipes.pipeline.starts import read_files as read_files
    from trainpipes.pipeline.starts import read_iceberg as read_iceberg
    from trainpipes.pipeline.starts import read_images as read_images
    from trainpipes.pipeline.starts import read_json as read_json
    from trainpipes.pipeline.starts import read_lance as read_lance
    from trainpipes.pipeline.starts import read_numpy as read_numpy
    from trainpipes.pipeline.starts import read_parquet as read_parquet
    from trainpipes.pipeline.starts import read_text as read_text
    from trainpipes.pipeline.starts import read_webdataset as read_webdataset
    from trainpipes.pipeline.starts import recipe as recipe
    from trainpipes.pipeline.starts import zip as zip
    from trainpipes.recipe_registry import recipes as recipes
    from trainpipes.sources.files.formats import Format as Format
    from trainpipes.sources.files.formats import Layout as Layout
    from trainpipes.stages.decode_clips import random_crop as random_crop
    from trainpipes.stages.features import FittedColumns as FittedColumns
    from trainpipes.state.merge import merge_states as merge_states
    from trainpipes.state.work import WorkKey as WorkKey
    from trainpipes.writers.memmap import read_memmap as read_memmap
    from trainpipes.writers.memmap import write_memmap as write_memmap

#: Where each public name is from: a module is imported when any of its names is first used.
_NAMES = {
    "columns.rectangles": "pad_sequences",
    "engine.processes.executors": "Processes Threads",
    "engine.processes.ray_cluster": "Ray",
    "errors": (
        "ConfigError DataChangedError DataError MissingExtraError MissingFilesError "
        "SchemaError StateError TopologyError TrainpipesError UnreachableError "
        "UnreadableError WorkerError"
    ),
    "interfaces.quarantine": "Quarantine",
    "interfaces.source": "Place RowSource RowStream StreamReader",
    "interfaces.stage": "Stage",
    "interfaces.stage_kinds": "BatchStage RowStage Rows Source TableStage",
    "interfaces.stateful_stage": "StatefulStage",
    "loader": "Loader",
    "loader.steps": "steps",
    "loader.work_queue": "Work WorkQueue",
    "look.find": "find",
    "look.locate": "locate",
    "look.profiling.profile": "profile",
    "look.show": "show",
    "pipeline": "Pipeline",
    "recipe_registry": "recipes",
    "sources.files.formats": "Format Layout",
    "filesystems.retry": "Retry",
    "pipeline.starts": (
        "concat from_arrow from_dataset from_hf from_iterable from_memmap "
        "from_tensors from_torchdata list_files mix read_arrow read_bytes "
        "read_csv read_delta read_files read_iceberg read_images read_json "
        "read_lance read_numpy read_parquet read_text read_webdataset recipe zip"
    ),
    "stages.decode_clips": "random_crop",
    "stages.features": "FittedColumns",
    "state.merge": "merge_states",
    "state.work": "WorkKey",
    "writers.memmap": "read_memmap write_memmap",
    "config": "load",
}
_FROM = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = {"cache", "nodes", "samplers"}

# Not "zip", which is a builtin of Python's where names are imported by *.
__all__ = sorted((_FROM.keys() | _MODULES) - {"zip"})  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _MODULES or name == "errors":  # lower modules import it from here
        found: Any = import_module(f"trainpipes.{name}")
    elif name in _FROM:
        found = getattr(import_module(f"trainpipes.{_FROM[name]}"), name)
    else:
        from trainpipes._internal.messages import renamed

        hint = "" if name.startswith("_") else renamed(name, [*__all__, "zip"])
        raise AttributeError(f"module 'trainpipes' has no attribute {name!r}{hint}", name=name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
