"""The fluent chain: an immutable record of stages that can be iterated.

A ``Pipeline`` is a tuple of stages: it prints, compares and pickles as that record. Beside it, outside
``==``, hash and ``repr``, each pipeline object knows where its own iteration stands; a pipeline derived from
it starts afresh.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from trainpipes._internal.callers import (
    batched_outside,
    in_trainer,
    reading_ranks,
    warn_without_data_module,
)
from trainpipes._internal.checks import require, whole_number
from trainpipes._internal.messages import nearest
from trainpipes._internal.text import shown
from trainpipes.engine.iterating.epoch_iterator import EpochIterator
from trainpipes.engine.iterating.session import Session
from trainpipes.engine.iterating.worker_iterator import RunOptions
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.topology import data_parallel
from trainpipes.errors import ConfigError, TrainpipesError
from trainpipes.kinds.options import same
from trainpipes.kinds.stage import Stage
from trainpipes.sources.arrow.read_arrow import ReadArrow
from trainpipes.sources.combined.concat import Concat
from trainpipes.sources.combined.zip import Zip
from trainpipes.sources.numpy.read_numpy import ReadNumpy
from trainpipes.sources.own_format.read_files import ReadFiles
from trainpipes.sources.parquet.read_parquet import ReadParquet
from trainpipes.sources.tar.read_webdataset import ReadWebdataset
from trainpipes.sources.text.read_csv import ReadCsv
from trainpipes.sources.text.read_json import ReadJson
from trainpipes.sources.text.read_text import ReadText
from trainpipes.sources.whole_files.read_bytes import ReadBytes
from trainpipes.sources.whole_files.read_images import ReadImages
from trainpipes.stage_methods import Method
from trainpipes.stages.batch import Batch
from trainpipes.stages.bucket_by_length import BucketByLength
from trainpipes.stages.cache import Cache
from trainpipes.stages.chat_template import ChatTemplate
from trainpipes.stages.collate import Collate
from trainpipes.stages.columns import DropColumns, Enumerate, Rename, Select
from trainpipes.stages.device import Pin, To
from trainpipes.stages.filter import Filter
from trainpipes.stages.flat_map import FlatMap
from trainpipes.stages.images.decode_image import DecodeImage
from trainpipes.stages.images.image_stages import (
    CenterCrop,
    Flip,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
)
from trainpipes.stages.images.image_transform import ImageTransform
from trainpipes.stages.labels import AddLabels, EncodeLabels
from trainpipes.stages.map import Map
from trainpipes.stages.map_batches import MapBatches, WithColumns
from trainpipes.stages.mask_tokens import MaskTokens
from trainpipes.stages.order import Repeat, ShardingFilter, Shuffle, Skip, Take
from trainpipes.stages.pack import Pack
from trainpipes.stages.pad_collate import PadCollate
from trainpipes.stages.sample import Sample, Split, checked_parts
from trainpipes.stages.tokenize import Tokenize
from trainpipes.stages.tokenizing import TokenizedBy
from trainpipes.stages.truncate import Truncate
from trainpipes.storage.writers import formats

if TYPE_CHECKING:
    from datasets import IterableDataset as IterableRows
    from ray.data import Dataset
    from torch.distributed.device_mesh import DeviceMesh

    from trainpipes.look.explain import Explanation
    from trainpipes.look.show import Preview
    from trainpipes.look.stats import Stats
    from trainpipes.sources.memmap.dataset import MemmapDataset
    from trainpipes.storage.executor import Executor
    from trainpipes.storage.map_dataset import MapDataset


class Pipeline(IterableDataset[Any]):
    """A chain of stages. Made by ``list_files``, a ``read_...`` or a ``from_...`` function; never changed.

    Each ``iter()`` starts the next epoch, in another order if the pipeline shuffles. Iterators have
    ``state_dict`` and ``load_state_dict``, and start to read at the first ``next``. A pipeline can be
    iterated as it is, in a ``DataLoader`` or ``StatefulDataLoader`` with ``batch_size=None``, or in
    ``trainpipes.Loader``. Stages are documented at their classes.

    Args:
        stages: first one first.
        ranks: rank and world size, if they are not those of the process.
        members: global ranks that read the pipeline together with this one, if not all do.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        ranks: tuple[int, int] | None = None,
        members: tuple[int, ...] | None = None,
    ) -> None:
        self._stages = tuple(stages)
        self._ranks = ranks
        self._members = members
        self._session = Session(self._plan, self._data_parallel)
        self._session.members = members

    # The record

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Fresh stages of this chain, first one first."""
        return tuple(stage.fresh() for stage in self._stages)

    def then(self, stage: Stage) -> Pipeline:
        """This pipeline with one more stage, such as one of your own. See docs/extend.md.

        Args:
            stage: such as a ``TableStage``, ``RowStage`` or ``BatchStage`` of your own.
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
        from trainpipes.look.mermaid import mermaid

        found = {"text/plain": repr(self)}
        with suppress(TrainpipesError):  # what is wrong is said where the pipeline is used
            found["text/vnd.mermaid"] = mermaid(self, counts=False)
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
        session = self._session
        return {
            "stages": self._stages,
            "ranks": None if self._ranks is None else ranks,
            "members": self._members,
            "seen_ranks": ranks,
            "passes": session.passes,
            "pending": session.pending,
            "recipe": self._recipe,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["stages"], state["ranks"], state["members"])  # type: ignore[misc]
        self._seen_ranks = state["seen_ranks"]
        self._recipe = state["recipe"]
        self._session.passes = state["passes"]
        self._session.pending = state["pending"]

    _seen_ranks: tuple[int, int] | None = None
    #: The recipe that made the first stages, its options, and how many stages these are.
    _recipe: tuple[str, dict[str, Any], int] | None = None

    if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

        def __getattr__(self, name: str) -> Any:
            names = [known for known in dir(type(self)) if not known.startswith("_")]
            hint = "" if name.startswith("_") else nearest(name, names)
            raise AttributeError(f"a pipeline has no {name!r}{hint}", name=name)

    def _data_parallel(self) -> tuple[int, int]:
        ranks = self._ranks
        if ranks is None and get_worker_info() is not None:
            ranks = self._seen_ranks
        return reading_ranks(ranks or data_parallel(), self._batching)

    def _batching(self) -> Stage | None:
        """The stage that makes batches, if one does."""
        first = self._session.plan.chain.stages[0]
        source = first if getattr(first, "makes_batches", False) else None
        return self._session.plan.chain.batch or source

    def _need_batches(
        self, option: str, way: str = "end the pipeline with .batch(32).pad_collate()"
    ) -> None:
        """Raise ConfigError if it gives single rows."""
        if self._batching() is None:
            raise ConfigError(f"{option} must make batches, got single rows; {way}:\n{self}")

    def _plan(self) -> Plan:
        return Plan.of(self.stages)

    def __bool__(self) -> bool:
        return True  # without len(), which reads what the files hold

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"a pipeline gives its items in order, got pipe[{shown(index)}]: peek() is the next item, "
            "take(n) and skip(n) cut the rows, and to_map_dataset() has any row by its number"
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
    pad_collate = Method(PadCollate)
    collate = Method(Collate)
    repeat = Method(Repeat)
    take = Method(Take)
    skip = Method(Skip)
    pin = Method(Pin)
    to = Method(To)

    def select(self, *columns: str) -> Pipeline:
        return self.then(Select(columns))

    def drop_columns(self, *columns: str) -> Pipeline:
        return self.then(DropColumns(columns))

    def zip(self, *others: Pipeline) -> Pipeline:
        return Pipeline([Zip((self, *others))])

    def split(
        self,
        parts: Mapping[str, float],
        *,
        key: str | Sequence[str] | None = None,
        seed: int = 0,
    ) -> dict[str, Pipeline]:
        """Split the rows into parts that share no row: a pipeline for each, by name. See ``Split``.

        >>> import trainpipes as tp
        >>> parts = tp.from_tensors(range(1000)).split({"train": 0.9, "valid": 0.1})
        >>> len(list(parts["train"])) + len(list(parts["valid"]))
        1000
        """
        return {
            part: self.then(Split(parts, part, key=key, seed=seed)) for part in checked_parts(parts)
        }

    select.__doc__ = Select.__doc__
    drop_columns.__doc__ = DropColumns.__doc__
    zip.__doc__ = Zip.__doc__

    def distributed(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> Pipeline:
        """This pipeline as one of several data-parallel ranks reads it. Needed only if these are not all
        processes of ``torch.distributed``, or of ``RANK`` and ``WORLD_SIZE`` in the environment.

        Args:
            rank: from 0.
            world_size: ranks in all.
            mesh: instead of both, the data-parallel dimension of a ``DeviceMesh``, such as
                ``mesh["dp"]``: processes that differ in other dimensions (tensor, pipeline parallel)
                get the same batches.
        """
        if mesh is not None:
            if rank is not None or world_size is not None or mesh.ndim != 1:
                raise ConfigError(
                    "distributed(mesh=...) must be one dimension of a DeviceMesh, such as mesh['dp'], and "
                    f"neither rank nor world_size; got {mesh.ndim} dimensions, rank={rank}, "
                    f"world_size={world_size}"
                )
            members = tuple(int(r) for r in mesh.mesh.tolist())
            return Pipeline(self._stages, (mesh.get_local_rank(), mesh.size()), members)
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
        self._data_parallel()  # says now, on all ranks, what does not fit
        made = self._batching()
        if made is not None and batched_outside():
            raise ConfigError(
                f"this pipeline makes batches itself ({made}), and the DataLoader "
                f"would batch them again: {in_trainer() or 'pass batch_size=None to the DataLoader'}"
            )
        warn_without_data_module()
        return EpochIterator(self._session, RunOptions(threads=None, places=True))

    def __len__(self) -> int:
        from trainpipes.look.lengths import exact_length, no_length

        plan = self._session.plan
        length = exact_length(plan, *self._data_parallel())
        if length is None:
            raise TypeError(f"this pipeline has no len(): {no_length(plan)}")
        return length

    def peek(self) -> Any:
        """The first item that the next iteration will give, without starting one.

        Raises:
            DataError: it gives nothing.
        """
        return self._session.peek()

    def show(self, n: int = 3, *, rows: int = 4) -> Preview:
        """The next items for people to read, without starting an iteration: prints as text, shows itself in a
        notebook, and has ``to_dict()``.

        Shows the type, shape and range of each value. Token ids are decoded where the pipeline's tokenizer is
        known, and tokens in the loss are marked. Long values are cut, and control characters are escaped.

        Args:
            n: items, or as many as there are.
            rows: of each batch, rows whose text is shown.

        Raises:
            DataError: there is none.

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

        return show_next(self._session, n, rows)

    def explain(self, *, world_size: int | None = None, num_workers: int = 0) -> Explanation:
        """What will happen, before it does: stages, files, columns, rows, shards, memory. An object that
        prints as text, shows the stages as a diagram in a notebook, and has ``to_dict()``, to be logged with
        a run. Lists files and reads their footers; no function of the pipeline is called.

        Args:
            world_size: of the run asked about; this process's if left out.
            num_workers: DataLoader workers of each rank.

        Raises:
            TopologyError: the ranks do not divide the shards.

        >>> import trainpipes as tp
        >>> said = tp.from_tensors(range(100)).shuffle(100).batch(32).explain()
        >>> said.num_batches, said.world_sizes
        (4, (1,))
        >>> print(said.mermaid)
        flowchart TB
            stage1["from_tensors<br/>int64[100]"]
            stage2["shuffle<br/>buffer_size=100, seed=0"]
            stage3["batch<br/>batch_size=32"]
            training(["training loop"])
            stage1 -->|"100 rows"| stage2
            stage2 -->|"100 rows"| stage3
            stage3 -->|"4 batches of 32 in an epoch"| training
        >>> said.to_dict()["stages"][2]["batch_size"]
        32
        """
        from trainpipes.look.explain import explain

        world = self._data_parallel()[1] if world_size is None else world_size
        return explain(self, self._session, world, num_workers)

    def stats(
        self,
        batches: int = 100,
        *,
        labels: str | Sequence[str] | None = None,
        mask: str | None = None,
    ) -> Stats:
        """What the first batches of an epoch are like, over all ranks, without starting one: how much of them
        is padding, how documents fill packed rows, which sources of a mix their rows come from, and how well
        they are shuffled. An object that prints as text and has ``to_dict()``.

        Labels are counted over all rows of an epoch instead, in a pass that reads no other column of files.
        Each row counts once, whatever its order, its shard, or its source's weight in a mix; in a column of
        lists, each value in a list counts.

        Args:
            batches: to look at, or all if there are fewer; 0 to count labels only.
            labels: columns of texts, integers, bools, or lists of these, whose values are counted.
            mask: the tensor that is 0 on padding; "segment_ids" or "attention_mask" if left out.

        Raises:
            ConfigError: batches have no such mask; or the rows have no end, or can be read only once, and
                labels are asked for.
            DataError: a label is a null, or a number that is not whole; names the row.

        >>> import trainpipes as tp
        >>> rows = [{"input_ids": [1] * n, "lang": "en" if n > 1 else "de"} for n in (3, 1, 2)]
        >>> found = tp.from_dataset(rows).batch(2).pad_collate().stats(labels="lang")
        >>> print(found.padding, found.labels)
        25.00% of 8 cells {'lang': {'de': 1, 'en': 2}}
        """
        from trainpipes.look.stats import stats

        return stats(self, batches, labels, mask)

    def to_yaml(self, path: str | os.PathLike[str] | None = None) -> str:
        """This pipeline as YAML for ``trainpipes.load``, whose pipeline is equal to this one, takes its
        states, and gives the same batches. One of ``recipe(...)`` is written as the recipe, its options, and
        the stages after it; any other one stage by stage. See docs/recipes.md.

        Options left at their defaults are left out, and so are ``storage_options``. Functions are written as
        ``package.module:function``. Where this pipeline stands is not part of it.

        Args:
            path: a file to write it to, too.

        Raises:
            ConfigError: an option has no form in a config: rows in memory, a lambda, a function of the
                program itself, an object, a secret; names the stage, the option, and the way out.
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

    def to_map_dataset(self, path: str | None = None) -> MapDataset:
        """The rows of one epoch as a map-style dataset, kept once for all processes of a machine.

        Args:
            path: a file, written anew. If left out, one in the folder for caches, which is known by the
                data and by what the stages do, as entries of ``cache()`` are, and made if it is not there.
        """
        from trainpipes.storage.map_dataset import to_map_dataset

        return to_map_dataset(self, path)

    def to_hf(self) -> IterableRows:
        """The rows as an ``IterableDataset`` of Hugging Face's ``datasets``, for TRL and other libraries that
        take one. Its ``state_dict`` holds the position, also after ``map``, ``filter``, ``remove_columns``
        and ``with_format``, and in a ``StatefulDataLoader``.

        Its shards are those of the pipeline. ``set_epoch(e)`` gives another order, as always in
        ``datasets``. It begins at epoch 0, wherever this pipeline stands. A row is a dict of Python values.

        Raises:
            ConfigError: the pipeline makes batches, or has a ``distributed()``.
            MissingExtraError: ``datasets`` is not installed, or too old.
        """
        from trainpipes.integrations.datasets import to_hf

        return to_hf(self)

    def to_ray(self, *, epoch: int = 0) -> Dataset:
        """The rows of one epoch as a ``ray.data.Dataset``, with their columns' types. Nothing is read before
        Ray reads it.

        Where rows are counted, each read task reads a range of them, in the order of this pipeline without
        its ``sharding_filter``. Where they are not (``filter``, ``flat_map``, ``mix``), there is a task for
        each shard of the ``sharding_filter``, whose rows follow each other in the dataset; without one, a
        single task. Ray keeps the order of tasks if ``execution_options.preserve_order`` of its
        ``ray.data.DataContext.get_current()`` is True.

        The nodes need this library: ``ray.init(runtime_env={"py_modules": [trainpipes]})`` ships it.

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
        """Write the rows, or batches, of one epoch to a memory map; options are those of
        ``trainpipes.write_memmap``. After a kill the same call goes on after the last whole part."""
        from trainpipes.storage.memmap import write_memmap

        return write_memmap(
            path, self, dtype=dtype, ragged=ragged, rows_per_file=rows_per_file, num_files=num_files,
            overwrite=overwrite, executor=executor, storage_options=storage_options,
        )  # fmt: skip

    # State

    def state_dict(self) -> dict[str, Any] | None:
        """The state after the last item that an iterator of this pipeline gave, or at the start of the next
        epoch if none was given. Iterators and ``Loader`` have a ``state_dict`` of their own. None in a
        DataLoader's worker, where only the iterator has a state.

        Raises:
            StateError: the pipeline was iterated by a ``Loader``, or by workers of a DataLoader, which
                alone know where they are.
        """
        return self._session.state()

    def load_state_dict(
        self, state: dict[str, Any], *, allow_changes: Collection[str] = ()
    ) -> None:
        """Let the next ``iter()`` continue where ``state`` was taken, also in workers.

        Args:
            state: of this pipeline, in any loader.
            allow_changes: what may differ from the pipeline that saved it; see ``Loader``.

        Raises:
            StateError: it does not fit this pipeline.
        """
        self._session.load(state, allow_changes)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next ``iter()`` is, also in workers: for frameworks that call this. You need
        not: each ``iter()`` is the next epoch by itself.

        The next ``iter()`` starts that epoch. Nothing changes if it comes next anyway, or under an endless
        ``repeat``. A loaded position is kept: the number in the first call after a load becomes the name of
        the loaded epoch, and later numbers are counted from there.

        Raises:
            ConfigError: that is no integer of 0 or more.
        """
        self._data_parallel()  # refuses frameworks that would share out batches again
        self._session.set_epoch(epoch)

    def state_at(self, batches_delivered: int, *, epoch: int = 0) -> dict[str, Any]:
        """The state after each rank has had a number of batches, computed without a saved state.

        It is computed by arithmetic where row counts are known, else by running the pipeline that far.

        Args:
            batches_delivered: batches that each rank has had in the epoch.
            epoch: which epoch, from 0.
        """
        return self._session.state_at(batches_delivered, epoch)
