"""The chain of stages that users build and iterate.

A ``Pipeline`` is an immutable tuple of stages: it prints, compares and pickles as that. Each object
also knows where its own iteration stands.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, overload

from torch.utils.data import IterableDataset, get_worker_info

from trainpipes._internal.callers import (
    batched_outside,
    in_trainer,
    reading_ranks,
    refuse_in_an_iterable,
    warn_without_data_module,
)
from trainpipes._internal.checks import one_by_one, require, whole_number
from trainpipes._internal.data_parallel import data_parallel, in_mesh
from trainpipes._internal.messages import renamed
from trainpipes.engine.iterating.consumer import RunOptions
from trainpipes.engine.iterating.epoch_iterator import EpochIterator
from trainpipes.engine.iterating.iteration_state import IterationState
from trainpipes.engine.planning.growing import of_files
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError, TrainpipesError
from trainpipes.errors.text import shown
from trainpipes.interfaces.options import same
from trainpipes.interfaces.stage import Stage
from trainpipes.sources.arrow.read_arrow import ReadArrow
from trainpipes.sources.combined.concat import Concat, Zip
from trainpipes.sources.combined.windows import Windows
from trainpipes.sources.numpy.read_numpy import ReadNumpy
from trainpipes.sources.own_files import ReadFiles
from trainpipes.sources.parquet.read_parquet import ReadParquet
from trainpipes.sources.tar.read_webdataset import ReadWebdataset
from trainpipes.sources.text.read_csv import ReadCsv
from trainpipes.sources.text.read_json import ReadJson
from trainpipes.sources.text.read_text import ReadText
from trainpipes.sources.whole_files.read_bytes import ReadBytes
from trainpipes.sources.whole_files.read_images import ReadImages
from trainpipes.stages.balance import Balance
from trainpipes.stages.batch import Batch
from trainpipes.stages.bucket_by_length import BucketByLength
from trainpipes.stages.cache import Cache
from trainpipes.stages.chat_template import ChatTemplate
from trainpipes.stages.collate import Collate
from trainpipes.stages.columns import DropColumns, Enumerate, Rename, Select
from trainpipes.stages.decode_image import DecodeImage
from trainpipes.stages.deduplicate import Deduplicate
from trainpipes.stages.device import Pin, To
from trainpipes.stages.filter import Filter, Sample, Split, checked_parts
from trainpipes.stages.flat_map import FlatMap
from trainpipes.stages.image_stages import (
    CenterCrop,
    Flip,
    ImageTransform,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
)
from trainpipes.stages.labels import EncodeLabels
from trainpipes.stages.map import Map, MapBatches, WithColumns
from trainpipes.stages.order import Repeat, ShardingFilter, Shuffle, Skip, Take
from trainpipes.stages.pack import Pack
from trainpipes.stages.pad_collate import PadCollate
from trainpipes.stages.token_ids import AddLabels, MaskTokens, Truncate
from trainpipes.stages.tokenize import Tokenize
from trainpipes.stages.tokenizing import TokenizedBy
from trainpipes.writers import formats

if TYPE_CHECKING:
    from datasets import IterableDataset as IterableRows
    from ray.data import Dataset
    from torch.distributed.device_mesh import DeviceMesh

    from trainpipes.look.explain import Explanation
    from trainpipes.look.show import Preview
    from trainpipes.look.stats import Stats
    from trainpipes.sources.memmap.dataset import MemmapDataset
    from trainpipes.writers.executor import Executor
    from trainpipes.writers.map_dataset import MapDataset

P = ParamSpec("P")


def written_as(
    function: Callable[..., Any], stage: Any, name: str, *own: inspect.Parameter
) -> Callable[..., Any]:
    """A function that makes a stage, with the parameters and the text of the stage's class."""
    given: Any = function
    given.__name__, given.__qualname__ = name.rsplit(".", 1)[-1], name
    given.__doc__, given.__module__ = stage.__doc__, stage.__module__
    taken = inspect.signature(stage).parameters.values()
    given.__signature__ = inspect.Signature([*own, *taken], return_annotation="Pipeline")
    return function


class Method(Generic[P]):
    """A method that adds a stage, with the parameters and the text of its class."""

    def __init__(self, stage: Callable[P, Stage]) -> None:
        self._stage = stage

    def __set_name__(self, owner: type, name: str) -> None:
        stage: Any = self._stage

        def add(pipeline: Pipeline, *args: Any, **options: Any) -> Pipeline:
            return pipeline.then(stage(*args, **options))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        self._add = written_as(add, stage, f"{owner.__name__}.{name}", own)

    @overload
    def __get__(self, one: None, owner: Any) -> Callable[Concatenate[Pipeline, P], Pipeline]: ...
    @overload
    def __get__(self, one: Pipeline, owner: Any) -> Callable[P, Pipeline]: ...
    def __get__(self, one: Pipeline | None, owner: Any) -> Any:
        return self._add if one is None else MethodType(self._add, one)


class Pipeline(IterableDataset[Any]):
    """A chain of stages. ``list_files`` and the ``read_...`` and ``from_...`` functions make one; each
    stage method returns a new one, which starts at the beginning.

    Each ``iter()`` starts the next epoch, in another order if the pipeline shuffles. Iterators read
    from the first ``next`` on, and have ``state_dict`` and ``load_state_dict``. You can iterate a
    pipeline as it is, in a ``DataLoader`` or ``StatefulDataLoader`` with ``batch_size=None``, or in
    ``trainpipes.Loader``.

    Args:
        stages: first one first.
        ranks: rank and world size, if they are not those of the process.
        members: global ranks that read the pipeline together with this one, if not all do.

    >>> import trainpipes as tp
    >>> pipe = tp.from_dataset(range(5)).batch(2)
    >>> list(pipe)
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        ranks: tuple[int, int] | None = None,
        members: tuple[int, ...] | None = None,
    ) -> None:
        require(
            isinstance(stages, Sequence) and stages and all(isinstance(s, Stage) for s in stages),
            "Pipeline(stages)", "a list of stages, the first a source", stages,
        )  # fmt: skip
        self._stages = tuple(stages)
        self._ranks = ranks
        self._members = members
        self._iteration = IterationState(self._plan, self._data_parallel)
        self._iteration.members = members

    # The record

    @property
    def stages(self) -> tuple[Stage, ...]:
        """New copies of this chain's stages, first one first."""
        return tuple(stage._fresh() for stage in self._stages)

    def then(self, stage: Stage) -> Pipeline:
        """Add a stage, such as one of your own.

        Args:
            stage: such as an instance of your ``TableStage``, ``RowStage`` or ``BatchStage``.

        Raises:
            ConfigError: ``stage`` is no stage, or cannot stand here.

        >>> import trainpipes as tp
        >>> class Double(tp.RowStage):
        ...     def apply(self, row):
        ...         return 2 * row
        >>> list(tp.from_dataset([1, 2]).then(Double()))
        [2, 4]
        """
        rule = "a stage, such as one of your own class of trainpipes.RowStage"
        require(isinstance(stage, Stage), "then(stage)", rule, stage)
        pipeline = Pipeline((*self._stages, stage), self._ranks, self._members)
        pipeline._recipe = self._recipe
        pipeline._plan()  # says now what does not fit
        return pipeline

    def __repr__(self) -> str:
        lines = [repr(stage) for stage in self.stages]
        return "\n".join([lines[0], *(f"  .{line}" for line in lines[1:])])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from trainpipes.look.record import mermaid

        found = {"text/plain": repr(self)}
        with suppress(TrainpipesError):  # what is wrong is said where the pipeline is used
            found["text/vnd.mermaid"] = mermaid(self)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pipeline):
            return NotImplemented
        return self._ranks == other._ranks and same(self._stages, other._stages)

    def __hash__(self) -> int:
        return hash((tuple(map(type, self._stages)), self._ranks))

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker must not take itself for rank 0 of 1.
        ranks = self._data_parallel()
        iteration = self._iteration
        return {
            "stages": self._stages,
            "ranks": None if self._ranks is None else ranks,
            "members": self._members,
            "seen_ranks": ranks,
            "passes": iteration.passes,
            "pending": iteration.pending,
            "recipe": self._recipe,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["stages"], state["ranks"], state["members"])  # type: ignore[misc]
        self._seen_ranks = state["seen_ranks"]
        self._recipe = state["recipe"]
        self._iteration.passes = state["passes"]
        self._iteration.pending = state["pending"]

    _seen_ranks: tuple[int, int] | None = None
    #: The recipe that made the first stages, its options, and how many stages these are.
    _recipe: tuple[str, dict[str, Any], int] | None = None

    if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

        def __getattr__(self, name: str) -> Any:
            names = [known for known in dir(type(self)) if not known.startswith("_")]
            hint = "" if name.startswith("_") else renamed(name, names)
            raise AttributeError(f"a pipeline has no {name!r}{hint}", name=name)

    def _data_parallel(self) -> tuple[int, int]:
        ranks = self._ranks
        if ranks is None and get_worker_info() is not None:
            ranks = self._seen_ranks
        return reading_ranks(ranks or data_parallel(), self._batching)

    def _batching(self) -> Stage | None:
        first = self._iteration.plan.chain.stages[0]
        source = first if first.traits.makes_batches else None
        return self._iteration.plan.chain.batch or source

    def _need_batches(self, option: str, way: str = "end it with .batch(32).pad_collate()") -> None:
        if self._batching() is None:
            raise ConfigError(f"{option} must make batches, got single rows; {way}:\n{self}")

    def _plan(self, files: Sequence[Sequence[str]] | None = None) -> Plan:
        return Plan.of(self.stages if files is None else of_files(self.stages, files))

    def __bool__(self) -> bool:
        return True  # without len(), which reads what the files hold

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"a pipeline gives its items in order, got pipe[{shown(index)}]: peek() is the next item, "
            "take(n) and skip(n) cut the rows, and to_map_dataset(path) has any row by its number"
        )

    def __add__(self, other: Any) -> Pipeline:  # type: ignore[override]
        return Pipeline([Concat((self, other))])

    # Stages

    read_parquet = Method(ReadParquet)
    read_json = Method(ReadJson)
    read_csv = Method(ReadCsv)
    read_text = Method(ReadText)
    read_arrow = Method(ReadArrow)
    read_numpy = Method(ReadNumpy)
    read_webdataset = Method(ReadWebdataset)
    read_bytes = Method(ReadBytes)
    read_images = Method(ReadImages)
    read_files = Method(ReadFiles)
    sharding_filter = Method(ShardingFilter)
    shuffle = Method(Shuffle)
    map = Method(Map)
    map_batches = Method(MapBatches)
    with_columns = Method(WithColumns)
    filter = Method(Filter)
    sample = Method(Sample)
    flat_map = Method(FlatMap)
    deduplicate = Method(Deduplicate)
    enumerate = Method(Enumerate)
    rename = Method(Rename)
    tokenize = Method(Tokenize)
    tokenized_by = Method(TokenizedBy)
    chat_template = Method(ChatTemplate)
    truncate = Method(Truncate)
    add_labels = Method(AddLabels)
    mask_tokens = Method(MaskTokens)
    encode_labels = Method(EncodeLabels)
    decode_image = Method(DecodeImage)
    resize = Method(Resize)
    center_crop = Method(CenterCrop)
    random_crop = Method(RandomCrop)
    random_resized_crop = Method(RandomResizedCrop)
    flip = Method(Flip)
    normalize = Method(Normalize)
    image_transform = Method(ImageTransform)
    cache = Method(Cache)
    pack = Method(Pack)
    batch = Method(Batch)
    bucket_by_length = Method(BucketByLength)
    balance = Method(Balance)
    pad_collate = Method(PadCollate)
    collate = Method(Collate)
    repeat = Method(Repeat)
    take = Method(Take)
    skip = Method(Skip)
    pin = Method(Pin)
    to = Method(To)

    def select(self, *columns: str | Sequence[str]) -> Pipeline:
        return self.then(Select(one_by_one(columns)))

    def drop_columns(self, *columns: str | Sequence[str]) -> Pipeline:
        return self.then(DropColumns(one_by_one(columns)))

    def zip(self, *others: Pipeline) -> Pipeline:
        return Pipeline([Zip((self, *others))])

    def windows(
        self,
        length: int,
        *,
        stride: int | None = None,
        within: str | Sequence[str] | None = None,
    ) -> Pipeline:
        return Pipeline([Windows((self,), length, stride=stride, within=within)])

    def split(
        self,
        parts: Mapping[str, float],
        *,
        key: str | Sequence[str] | None = None,
        seed: int = 0,
    ) -> dict[str, Pipeline]:
        """Split the rows into parts that share no row.

        A row's part follows from its file's name and its number, or from its values in ``key``: it is
        the same in each epoch, before and after a shuffle, and on any number of ranks.

        Args:
            parts: fraction of the rows by name; the fractions sum to 1.
            key: a column, or several: rows of equal values stay in one part.
            seed: of the choice.

        Returns:
            A pipeline for each part, by name.

        >>> import trainpipes as tp
        >>> parts = tp.from_tensors(range(1000)).split({"train": 0.9, "valid": 0.1})
        >>> len(list(parts["train"])) + len(list(parts["valid"]))
        1000
        """
        names = checked_parts(parts)
        return {name: self.then(Split(parts, name, key=key, seed=seed)) for name in names}

    select.__doc__ = Select.__doc__
    drop_columns.__doc__ = DropColumns.__doc__
    zip.__doc__ = Zip.__doc__
    windows.__doc__ = Windows.__doc__

    def distributed(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> Pipeline:
        """Read as one of several data-parallel ranks. You need this only if these are not all
        processes of ``torch.distributed``, or of ``RANK`` and ``WORLD_SIZE`` in the environment.

        Args:
            rank: from 0.
            world_size: number of ranks.
            mesh: instead of both, the data-parallel part of a ``DeviceMesh``: one dimension, such
                as ``mesh["dp"]``, or several that are data parallel together, such as
                ``mesh["replicate", "shard"]`` of HSDP. Processes that differ in other dimensions
                (tensor, pipeline parallel) get the same batches.

        Raises:
            ConfigError: ``rank`` is not below ``world_size``, or ``mesh`` has a dimension that is
                not data parallel by its name, such as "tp", or does not hold this process.

        >>> import trainpipes as tp
        >>> pipe = tp.from_dataset(range(8)).sharding_filter(num_shards=2).batch(2)
        >>> list(pipe.distributed(rank=1, world_size=2))
        [[4, 5], [6, 7]]
        """
        if mesh is not None:
            if rank is not None or world_size is not None:
                raise ConfigError(
                    "distributed(mesh) must be given without rank and world_size, got "
                    f"rank={rank} and world_size={world_size}; leave these out"
                )
            return Pipeline(self._stages, *in_mesh(mesh))
        known = rank is not None and world_size is not None
        for name, value in (("rank", rank), ("world_size", world_size)):
            if known:
                whole_number(value, 0, f"distributed({name})", "0 <= rank < world_size")
        if rank is None or world_size is None or not 0 <= rank < world_size:
            raise ConfigError(
                f"distributed(rank, world_size) must have 0 <= rank < world_size, got {rank} and {world_size}"
            )
        return Pipeline(self._stages, (rank, world_size))

    # Iteration

    def __iter__(self) -> EpochIterator:
        refuse_in_an_iterable()
        self._data_parallel()  # says now, on all ranks, what does not fit
        made = self._batching()
        if made is not None and batched_outside():
            raise ConfigError(
                f"this pipeline makes batches itself ({made}), and the DataLoader "
                f"would batch them again: {in_trainer() or 'pass batch_size=None to the DataLoader'}"
            )
        warn_without_data_module()
        return EpochIterator(self._iteration, RunOptions(threads=None, places=True))

    def __len__(self) -> int:
        from trainpipes.look.lengths import length_of

        return length_of(self._iteration)

    def peek(self) -> Any:
        """Return the first item of the next iteration, without starting one.

        Raises:
            DataError: the pipeline gives nothing.

        >>> import trainpipes as tp
        >>> tp.from_dataset(range(5)).batch(2).peek()
        [0, 1]
        """
        from trainpipes.look.previews import peek

        return peek(self._iteration)

    def show(self, n: int = 3, *, rows: int = 4) -> Preview:
        """Show the next items, without starting an iteration: types, shapes, ranges and decoded text, with
        tokens in the loss marked. Long values are cut.

        Args:
            n: number of items.
            rows: of each batch, rows whose text is shown.

        Returns:
            An object that prints as text, shows itself in a notebook, and has ``to_dict()``.

        Raises:
            DataError: there is no item.

        >>> import trainpipes as tp
        >>> sums = tp.from_dataset([{"prompt": "1 + 1 =", "response": " 2"}] * 8)
        >>> tp.recipe("sft", sums, tokenizer="bytes", batch_size=4).show(1, rows=1)
        ⟦text⟧ in the loss
        <BLANKLINE>
        batch 0  dict of 3, 4 rows
          input_ids       tensor int64  [4, 10]  32 to 256
          attention_mask  tensor int64  [4, 10]  1 to 1
          labels          tensor int64  [4, 10]  -100 to 256
          input_ids: 12 of 40 tokens in the loss (30.0%); the model shifts the labels
          row 0  1 + 1 =⟦ 2<eos>⟧
          … and 3 more rows
        """
        from trainpipes.look.show import show_next

        return show_next(self._iteration, n, rows)

    def explain(self, *, world_size: int | None = None, num_workers: int = 0) -> Explanation:
        """Say what will happen: stages, files, columns, rows, shards, memory. Lists files and reads
        their footers, without calling a function of the pipeline.

        Args:
            world_size: number of ranks; this process's by default.
            num_workers: DataLoader workers of each rank.

        Returns:
            An object that prints as text, shows a diagram in a notebook, and has ``to_dict()`` for
                logs.

        Raises:
            TopologyError: there is no ``sharding_filter``, and several ranks.

        >>> import trainpipes as tp
        >>> said = tp.from_tensors(range(100)).shuffle(100).batch(32).explain()
        >>> said.num_batches, said.world_sizes
        (4, (1,))
        >>> said.to_dict()["stages"][2]["batch_size"]
        32
        """
        from trainpipes.look.explain import explain

        world = self._data_parallel()[1] if world_size is None else world_size
        return explain(self, self._iteration, world, num_workers)

    def stats(
        self,
        batches: int | None = None,
        *,
        labels: str | Sequence[str] | None = None,
        world_size: int | None = None,
    ) -> Stats:
        """Measure the first batches of an epoch, over all ranks, without starting one: padding, how full
        packed rows are, the sources of a mix, and how well rows are shuffled. Padding is where
        "segment_ids" or "attention_mask" is 0.

        Args:
            batches: most batches to look at; 0 to count labels only. 100 if left out; with ``world_size``
                64 for each rank, or for each shard where there are more of these.
            labels: columns of texts, integers, bools, or lists of these, whose values are counted, over all
                rows of an epoch; in a list, each value counts.
            world_size: a number of ranks, to say how even their steps are: a step takes as long as its
                slowest rank. Computed here, without other processes.

        Returns:
            An object that prints as text and has ``to_dict()``.

        Raises:
            ConfigError: labels are asked for, and the rows have no end or can be read only once;
                ``world_size`` is given, and there are fewer batches, or they tell no lengths.
            DataError: a label is null or no whole number; names the row.

        >>> import trainpipes as tp
        >>> rows = [{"input_ids": [1] * n, "lang": "en" if n > 1 else "de"} for n in (3, 1, 2)]
        >>> found = tp.from_dataset(rows).batch(2).pad_collate().stats(labels="lang")
        >>> print(found.padding, found.labels)
        25.00% of 8 cells {'lang': {'de': 1, 'en': 2}}
        >>> rows = tp.from_dataset([{"input_ids": [1] * n} for n in (9, 1, 2, 8)]).sharding_filter(2)
        >>> print(rows.batch(1).stats(world_size=2).steps)
        2 steps of 2 ranks: 58.8% of ranks x largest is tokens; largest / mean 1.71 (cells), 1.94 (attention)
        with .balance(): 90.9%; largest / mean 1.20 (cells), 1.36 (attention)
        """
        from trainpipes.look.stats import stats

        return stats(self, batches, labels, world_size)

    def to_yaml(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write this pipeline as YAML for ``trainpipes.load``. The loaded pipeline is equal to this
        one, takes its states, and gives the same batches. See docs/yaml.md.

        A recipe is written with its options and the stages after it, any other pipeline stage by
        stage. Default options, ``storage_options`` and the position are left out. Functions are
        written as ``package.module:function``.

        Args:
            path: a file to write the text to.

        Returns:
            The text.

        Raises:
            ConfigError: an option has no form in a config: rows in memory, a lambda, a function of
                the program itself, an object, a secret.
            MissingExtraError: PyYAML is not installed.

        >>> import trainpipes as tp
        >>> print(tp.list_files("data/*.parquet").shuffle(100, seed=3).to_yaml().split("\\n", 1)[1])
        stages:
        - list_files: data/*.parquet
        - shuffle: {buffer_size: 100, seed: 3}
        <BLANKLINE>
        """
        from trainpipes.config.write import to_yaml

        return to_yaml(self, path)

    def to_map_dataset(self, path: str | os.PathLike[str]) -> MapDataset:
        """Keep the rows of one epoch in a file, as a map-style dataset that all processes of a
        machine share.

        Args:
            path: the file, which is replaced.

        Returns:
            A dataset with ``len()`` and ``dataset[i]``.

        >>> import tempfile, pyarrow as pa, trainpipes as tp
        >>> rows = tp.from_arrow(pa.table({"x": [1, 2, 3]})).filter(lambda row: row["x"] > 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rows.to_map_dataset(f"{folder}/rows.arrow")[1]
        {'x': 3}
        """
        from trainpipes.writers.map_dataset import to_map_dataset

        return to_map_dataset(self, path)

    def to_hf(self) -> IterableRows:
        """Make an ``IterableDataset`` of Hugging Face's ``datasets``, for TRL and other libraries that take
        one. Its ``state_dict`` holds the position, also in a ``StatefulDataLoader``.

        It has this pipeline's shards and begins at epoch 0, wherever this pipeline stands.
        ``set_epoch(e)`` changes the order. A row is a dict of Python values.

        Raises:
            ConfigError: the pipeline makes batches, or has a ``distributed()``.
            MissingExtraError: ``datasets`` is not installed, or too old.
        """
        from trainpipes.integrations.datasets import to_hf

        return to_hf(self)

    def to_ray(self, *, epoch: int = 0) -> Dataset:
        """Make a ``ray.data.Dataset`` of the rows of one epoch. Nothing is read before Ray reads it.

        Where rows are counted, each read task reads a range of them, in the order without
        ``sharding_filter``; otherwise (``filter``, ``flat_map``, ``mix``) there is a task for each shard. Ray
        keeps the order of tasks if ``execution_options.preserve_order`` of its
        ``ray.data.DataContext.get_current()`` is True.

        The nodes need this library: ``ray.init(runtime_env={"py_modules": [trainpipes]})`` ships
        it.

        Args:
            epoch: which one; a pipeline that shuffles has another order in each.

        Raises:
            ConfigError: the pipeline makes batches, repeats, or has a ``distributed()``.
            SchemaError: rows have no columns.
            MissingExtraError: ``ray`` is not installed.
        """
        from trainpipes.integrations.ray_data import to_ray

        return to_ray(self, epoch)

    # Files

    write_parquet = formats.write_parquet
    write_arrow = formats.write_arrow
    write_json = formats.write_json

    def write_memmap(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: Any = None,
        ragged: Collection[str] = (),
        rows_per_file: int | None = None,
        num_files: int | None = None,
        overwrite: bool = False,
        executor: Executor | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> MemmapDataset | None:
        """Write the rows of one epoch to a memory map. Options are those of
        ``trainpipes.write_memmap``. After a kill the same call continues after the last whole
        part.

        >>> import tempfile, trainpipes as tp
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = tp.from_tensors(x=[1, 2, 3]).write_memmap(f"{folder}/numbers")
        ...     len(written), int(written[2]["x"])
        (3, 3)
        """
        from trainpipes.writers.memmap import write_memmap

        return write_memmap(
            path, self, dtype=dtype, ragged=ragged, rows_per_file=rows_per_file, num_files=num_files,
            overwrite=overwrite, executor=executor, storage_options=storage_options,
        )  # fmt: skip

    # State

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state after the last item that an iterator of this pipeline gave, or at the
        start of the next epoch. None in a DataLoader's worker, where only the iterator has a state.

        Raises:
            StateError: a ``Loader`` or DataLoader workers iterated the pipeline, and only they know
                where they are.

        >>> import trainpipes as tp
        >>> pipe = tp.from_dataset(range(5)).batch(2)
        >>> first = next(iter(pipe))
        >>> again = tp.from_dataset(range(5)).batch(2)
        >>> again.load_state_dict(pipe.state_dict())
        >>> list(again)
        [[2, 3], [4]]
        """
        return self._iteration.state()

    def load_state_dict(
        self, state: dict[str, Any], *, allow_changes: Collection[str] = ()
    ) -> None:
        """Let the next ``iter()`` continue where ``state`` was taken, also in workers.

        Args:
            state: of this pipeline, from any loader.
            allow_changes: what may differ from the pipeline that saved it; see
                ``Loader.load_state_dict``.

        Raises:
            StateError: the state does not fit this pipeline.

        >>> import trainpipes as tp
        >>> pipe = tp.from_dataset(range(5)).batch(2)
        >>> pipe.load_state_dict(pipe.state_at(1))
        >>> next(iter(pipe))
        [2, 3]
        """
        self._iteration.load(state, allow_changes)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter()``, also in workers, for frameworks that call this. Without it,
        each ``iter()`` is the next epoch.

        Nothing changes under an endless ``repeat``. A loaded position stays: the first number after
        a load names the loaded epoch, and later numbers count from there.

        Args:
            epoch: from 0.

        Raises:
            ConfigError: ``epoch`` is no integer of 0 or more.

        >>> import trainpipes as tp
        >>> pipe = tp.from_dataset(range(4)).shuffle(4, seed=0)
        >>> first, second = list(pipe), list(pipe)
        >>> pipe.set_epoch(1)
        >>> list(pipe) == second
        True
        """
        self._data_parallel()  # refuses frameworks that would share out batches again
        self._iteration.set_epoch(epoch)

    def state_at(self, batches_delivered: int, *, epoch: int = 0) -> dict[str, Any]:
        """Compute the state after each rank has had a number of batches: by arithmetic where row
        counts are known, else by running the pipeline that far.

        Args:
            batches_delivered: batches that each rank has had in the epoch.
            epoch: from 0.

        >>> import trainpipes as tp
        >>> pipe = tp.from_dataset(range(5)).batch(2)
        >>> pipe.load_state_dict(pipe.state_at(2))
        >>> list(pipe)
        [[4]]
        """
        from trainpipes.look.previews import state_at

        return state_at(self._iteration, batches_delivered, epoch)
