"""The functions that a pipeline starts with: where its rows come from, or a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Concatenate, ParamSpec, cast

import pyarrow as pa

from trainpipes._internal.checks import copied, flag, one_by_one, wrong
from trainpipes._internal.messages import nearest
from trainpipes.engine.record import of_recipe, written_as
from trainpipes.errors import ConfigError
from trainpipes.interfaces.options import in_our_words
from trainpipes.interfaces.stage import Stage, enter, snake_case
from trainpipes.interfaces.stage_kinds import Source
from trainpipes.pipeline.chain import Pipeline
from trainpipes.recipe_registry import recipe_function
from trainpipes.samplers import BatchSampler, RowSampler
from trainpipes.samplers.torch_samplers import OF_ROWS
from trainpipes.sources.concat import Concat, Zip
from trainpipes.sources.files.file_reader import one_reader
from trainpipes.sources.files.list_files import ListFiles
from trainpipes.sources.from_dataset import FromDataset, FromTensors
from trainpipes.sources.from_hf import FromHf
from trainpipes.sources.from_iterable import FromIterable
from trainpipes.sources.from_memmap import FromMemmap, MemmapDataset
from trainpipes.sources.from_torchdata import FromTorchdata
from trainpipes.sources.mix import Mix
from trainpipes.sources.read_arrow import FromArrow, ReadArrow
from trainpipes.sources.read_csv import ReadCsv
from trainpipes.sources.read_files import ReadBytes, ReadFiles, ReadImages
from trainpipes.sources.read_json import ReadJson
from trainpipes.sources.read_numpy import ReadNumpy
from trainpipes.sources.read_parquet import ReadParquet
from trainpipes.sources.read_text import ReadText
from trainpipes.sources.read_webdataset import ReadWebdataset
from trainpipes.sources.tables.read_delta import ReadDelta
from trainpipes.sources.tables.read_iceberg import ReadIceberg
from trainpipes.sources.tables.read_lance import ReadLance

P = ParamSpec("P")


def starting(stage: Callable[P, Source]) -> Callable[P, Pipeline]:
    """The function that starts a pipeline with a source: its parameters and text are the source's."""
    kind: Any = stage

    def start(*args: Any, **options: Any) -> Pipeline:
        return Pipeline([kind(*args, **options)])

    return written_as(start, kind, snake_case(kind.__name__))


def reading(stage: Callable[P, Stage]) -> Callable[Concatenate[Any, P], Pipeline]:
    """The function that lists files and reads them."""
    kind: Any = stage

    def start(files: Any, *args: Any, **options: Any) -> Pipeline:
        return list_files(files).then(kind(*args, **options))

    files_parameter = inspect.Parameter("files", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return written_as(start, kind, snake_case(kind.__name__), files_parameter)


list_files = starting(ListFiles)
read_parquet = reading(ReadParquet)
read_json = reading(ReadJson)
read_csv = reading(ReadCsv)
read_text = reading(ReadText)
read_arrow = reading(ReadArrow)
read_numpy = reading(ReadNumpy)
read_bytes = reading(ReadBytes)
read_files = reading(ReadFiles)
read_images = reading(ReadImages)
read_webdataset = reading(ReadWebdataset)
from_arrow = starting(FromArrow)
from_hf = starting(FromHf)
from_iterable = starting(FromIterable)
from_memmap = starting(FromMemmap)
from_torchdata = starting(FromTorchdata)
read_delta = starting(ReadDelta)
read_iceberg = starting(ReadIceberg)
read_lance = starting(ReadLance)
mix = starting(Mix)


def from_dataset(
    dataset: Any,
    sampler: Iterable[Any] | None = None,
    *,
    batch_sampler: Iterable[Any] | None = None,
    schema: pa.Schema | None = None,
) -> Pipeline:
    """Rows of any torch ``Dataset`` with ``__getitem__`` or ``__getitems__``, such as a list.

    Each rank and worker fetches only its own rows. A state knows the dataset by its class and length,
    lists of keys and torch's samplers by what they hold, other samplers by their class and length.

    Args:
        dataset: has a ``len()``, unless a sampler gives the keys.
        sampler: gives the keys of each epoch; 0, 1, 2, … if left out. One of ``trainpipes.samplers``
            does the same as ``shuffle(sampler=...)``; torch's samplers get another seed each epoch,
            others a call of ``set_epoch`` if they have it. What they draw from global generators is
            seeded; of what else they keep between epochs no state knows.
        batch_sampler: gives lists of keys, instead of ``batch``. Items are then lists of rows, for
            ``collate``.
        schema: Arrow types of the rows' columns, where rows are dicts.

    Raises:
        ConfigError: ``dataset`` can only be iterated (use ``from_iterable``), or both samplers are given.

    >>> import trainpipes as tp
    >>> list(tp.from_dataset(["a", "b", "c"]).batch(2))
    [['a', 'b'], ['c']]
    """
    ours = sampler if batch_sampler is None else batch_sampler
    if sampler is not None and batch_sampler is not None:
        raise ConfigError("from_dataset(...) must have a sampler or a batch_sampler, got both")
    gives_rows = isinstance(batch_sampler, RowSampler) or type(batch_sampler) in OF_ROWS
    if gives_rows or isinstance(sampler, BatchSampler):
        rule = "a BatchSampler for batch_sampler=, one of rows for sampler="
        raise wrong("from_dataset(sampler)", rule, ours)
    if isinstance(ours, BatchSampler):
        drawn = from_dataset(dataset, schema=schema).shuffle(sampler=ours.sampler)
        return drawn.batch(ours.batch_size, drop_last=ours.drop_last)
    if isinstance(ours, RowSampler):
        return from_dataset(dataset, schema=schema).shuffle(sampler=ours)
    if isinstance(dataset, MemmapDataset) and ours is None and schema is None:
        return Pipeline([FromMemmap(**dataset.options)])
    stage = FromDataset(
        dataset=dataset, sampler=sampler, batch_sampler=batch_sampler, schema=schema
    )
    return Pipeline([stage])


def from_tensors(*tensors: Any, **named: Any) -> Pipeline:
    """Rows of tensors that share their first dimension: tuples, or dicts if tensors are given by name.

    Rows keep dtypes. The first state hashes all numbers. Rows can be read by number
    (``shuffle(scope="global")``).

    Args:
        tensors: each ``[N, ...]``, as tensors, arrays or lists of numbers.
        named: the same by name.

    Raises:
        ConfigError: first dimensions differ, or tensors come both ways.

    >>> import torch, trainpipes as tp
    >>> pipe = tp.from_tensors(x=torch.arange(6.0).reshape(3, 2), y=[0, 1, 0])
    >>> list(pipe.batch(2).collate())[1]
    {'x': tensor([[4., 5.]]), 'y': tensor([0])}
    """
    if tensors and named:
        raise ConfigError("from_tensors(...) must have tensors by position or by name, got both")
    if named:
        return Pipeline([FromTensors(tuple(named.values()), tuple(named))])
    return Pipeline([FromTensors(tensors)])


def read_by_name(
    paths: Sequence[str],
    storage_options: Mapping[str, Any] | None,
    caller: str,
    columns: Sequence[str] | None = None,
    **options: Any,
) -> Pipeline:
    """The rows of files, folders and globs of any format, which the ends of their names say. Where a
    reader takes ``columns``, what else is in the files need not fit.
    """
    reader = one_reader(paths, storage_options, caller)
    if reader == "from_memmap":
        rows = from_memmap(paths[0])
    else:
        read = getattr(list_files(list(paths), storage_options=storage_options, **options), reader)
        if columns is not None and "columns" in inspect.signature(read).parameters:
            return cast(Pipeline, read(columns=columns))
        rows = read()
    return rows if columns is None else rows.select(*columns)


def concat(*pipelines: Pipeline | Sequence[Pipeline]) -> Pipeline:
    return Pipeline([Concat(one_by_one(pipelines))])


def zip(*pipelines: Pipeline | Sequence[Pipeline]) -> Pipeline:
    return Pipeline([Zip(one_by_one(pipelines))])


concat.__doc__, zip.__doc__ = Concat.__doc__, Zip.__doc__
enter(Concat, Zip, FromDataset, FromTensors)


def recipe(name: str, /, *arguments: Any, **options: Any) -> Pipeline:
    """The pipeline of a recipe that is installed; ``recipes()`` lists them.

    Args:
        name: of the recipe: "sft", "seq2seq", or a recipe that another package offers.
        arguments: the recipe's first options, in its order: the files, as a rule.
        options: the recipe's own, by name.

    Raises:
        ConfigError: no recipe has that name, it cannot be imported, or it does not take these
            options.

    >>> import trainpipes as tp
    >>> sums = tp.from_dataset([{"question": "1 + 1?", "answer": "2"}] * 8)
    >>> batch, *_ = tp.recipe("sft", sums, tokenizer="bytes", batch_size=4)
    >>> batch["input_ids"].shape
    torch.Size([4, 8])
    """
    build, options = recipe_function(name), copied(options)
    bound = _bound(name, inspect.signature(build), arguments, options)
    ours = build.__module__.startswith("trainpipes_recipes.")
    with in_our_words(f"recipe {name}", bound) if ours else nullcontext():
        pipeline = build(*arguments, **options)
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(
            f"recipe {name!r} must return a trainpipes Pipeline, got {type(pipeline).__name__} from "
            f"{build.__module__}.{build.__qualname__}"
        )
    return of_recipe(pipeline, name, copied(bound))


def _bound(
    name: str, signature: inspect.Signature, arguments: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """The options that a recipe is given, by name; raises unless it takes them."""
    known = signature.parameters
    plain = [parameter.replace(annotation=parameter.empty) for parameter in known.values()]
    takes = f"it is {name}{inspect.Signature(plain)}"
    rest = next(
        (parameter.name for parameter in plain if parameter.kind is parameter.VAR_KEYWORD), None
    )
    for option in options:
        if option not in known and rest is None:
            hint = nearest(option, list(known))
            raise ConfigError(f"recipe {name!r} has no option {option!r}{hint}; {takes}")
    try:
        bound = signature.bind(*arguments, **options).arguments
    except TypeError as error:
        raise ConfigError(f"recipe {name!r}: {error}; {takes}") from None
    for option, value in bound.items():
        if known[option].annotation in (bool, "bool"):
            flag(value, f"{name}({option})")
    more: dict[str, Any] = bound.pop(rest or "", {})
    return bound | more
