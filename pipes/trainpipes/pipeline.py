"""The fluent chain: an immutable record of stages that can be iterated.

A ``Pipeline`` is a tuple of stages: it prints, compares and pickles as that record. Beside it, outside
``==``, hash and ``repr``, each pipeline object knows where its own iteration stands; a pipeline derived from
it starts afresh.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainpipes._internal.callers import (
    batched_outside,
    in_trainer,
    reading_ranks,
    warn_without_data_module,
)
from trainpipes._internal.checks import whole_number
from trainpipes._internal.naming import nearest_reader
from trainpipes._internal.progress import counted
from trainpipes._internal.shown import shown
from trainpipes.engine.column_names import column_names
from trainpipes.engine.iterating.consumer_iterator import RunOptions
from trainpipes.engine.iterating.pass_iterator import PassIterator
from trainpipes.engine.iterating.session import Session
from trainpipes.engine.layout import slots_before
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.topology import data_parallel
from trainpipes.errors import ConfigError
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
from trainpipes.stages.add_labels import AddLabels
from trainpipes.stages.batch import Batch
from trainpipes.stages.bucket_by_length import BucketByLength
from trainpipes.stages.cache import Cache
from trainpipes.stages.chat_template import ChatTemplate
from trainpipes.stages.collate import Collate
from trainpipes.stages.columns import Rename, Select
from trainpipes.stages.drop_columns import DropColumns
from trainpipes.stages.encode_labels import EncodeLabels
from trainpipes.stages.enumerate import Enumerate
from trainpipes.stages.filter import Filter
from trainpipes.stages.flat_map import FlatMap
from trainpipes.stages.images.crop import CenterCrop, RandomCrop
from trainpipes.stages.images.decode_image import DecodeImage
from trainpipes.stages.images.flip import Flip
from trainpipes.stages.images.image_transform import ImageTransform
from trainpipes.stages.images.normalize import Normalize
from trainpipes.stages.images.random_resized_crop import RandomResizedCrop
from trainpipes.stages.images.resize import Resize
from trainpipes.stages.map import Map
from trainpipes.stages.map_batches import MapBatches
from trainpipes.stages.mask_tokens import MaskTokens
from trainpipes.stages.pack import Pack
from trainpipes.stages.pad_collate import PadCollate
from trainpipes.stages.pin import Pin
from trainpipes.stages.repeat import Repeat
from trainpipes.stages.sample import Sample
from trainpipes.stages.sharding_filter import ShardingFilter
from trainpipes.stages.shuffle import Shuffle
from trainpipes.stages.split import Split, checked_parts
from trainpipes.stages.take import Skip, Take
from trainpipes.stages.to import To
from trainpipes.stages.tokenize import Tokenize
from trainpipes.stages.truncate import Truncate
from trainpipes.stages.with_columns import WithColumns
from trainpipes.storage.writers import arrow as arrow_files
from trainpipes.storage.writers import json as json_files
from trainpipes.storage.writers import parquet as parquet_files

if TYPE_CHECKING:
    from datasets import IterableDataset as IterableRows
    from ray.data import Dataset
    from torch.distributed.device_mesh import DeviceMesh

    from trainpipes.look.explain import Explanation
    from trainpipes.look.forecast.mixture_shares import MixtureShares
    from trainpipes.look.forecast.packed_rows import PackedRows
    from trainpipes.look.forecast.padding_share import PaddingShare
    from trainpipes.look.pictures.graph import Graph
    from trainpipes.look.preview.preview import Preview
    from trainpipes.sources.memmap.dataset import MemmapDataset
    from trainpipes.storage.map_dataset import MapDataset

__all__ = ["Pipeline"]


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
        if not isinstance(stage, Stage):
            raise ConfigError(
                "then(stage) takes a stage, such as one of your own class of trainpipes.RowStage, got "
                f"{shown(stage)}"
            )
        pipeline = Pipeline((*self._stages, stage), self._ranks, self._members)
        pipeline._plan()  # says now what does not fit
        return pipeline

    def __repr__(self) -> str:
        lines = [repr(stage) for stage in self.stages]
        return "\n".join([lines[0], *(f"  .{line}" for line in lines[1:])])

    def _repr_html_(self) -> str:
        from trainpipes.look.preview.notebook import pipeline_html

        return pipeline_html(self)

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
            "left_out": session.left_out_there,
            "notes": session.notes,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["stages"], state["ranks"], state["members"])  # type: ignore[misc]
        self._seen_ranks = state["seen_ranks"]
        self._session.passes = state["passes"]
        self._session.pending = state["pending"]
        self._session.left_out_there = state["left_out"]
        self._session.notes_there = state["notes"]

    _seen_ranks: tuple[int, int] | None = None

    if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

        def __getattr__(self, name: str) -> Any:
            names = [known for known in dir(type(self)) if not known.startswith("_")]
            hint = "" if name.startswith("_") else nearest_reader(name, names)
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
                    "distributed(mesh=...) takes one dimension of a DeviceMesh, such as mesh['dp'], and "
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
                f"distributed(rank, world_size) needs 0 <= rank < world_size, got {rank} and {world_size}"
            )
        return Pipeline(self._stages, (rank, world_size))

    # Iteration

    def __iter__(self) -> PassIterator:
        self._data_parallel()  # says now, on all ranks, what does not fit
        made = self._batching()
        if made is not None and batched_outside():
            raise ConfigError(
                f"this pipeline makes batches itself ({made}), and the DataLoader "
                f"would batch them again: {in_trainer() or 'pass batch_size=None to the DataLoader'}"
            )
        warn_without_data_module()
        return PassIterator(self._session, RunOptions(threads=None, places=True))

    def __len__(self) -> int:
        plan, (rank, world) = self._session.plan, self._data_parallel()
        if not plan.counts.known or plan.chain.endless:
            raise TypeError(f"this pipeline has no len(): {self._no_length()}")
        return slots_before(int(plan.counts.end(world)), rank, world)

    def _no_length(self) -> str:
        plan = self._session.plan
        if plan.chain.endless:
            return "repeat() has no end; count steps, or give repeat(times=...)"
        if plan.inputs.epoch_rows is None:
            return f"the rows of {plan.chain.stages[0]} are not counted; list(pipe) counts them"
        from trainpipes.look.forecast.estimate import cuts_by_length

        cutting = next((s for s in plan.chain.after if cuts_by_length(s)), None)
        if cutting is not None:
            return f"how many items {cutting} makes is known only at the end; use estimate_len()"
        dropping = [str(s) for s in plan.chain.before + plan.chain.after if not s.keeps_rows]
        what = dropping[0] if dropping else "take() or skip() on the way"
        return f"how many rows {what} lets through is known only at the end; use estimate_len()"

    def estimate_len(self) -> int:
        """An estimate of ``len()``, for learning rate schedules; exact where the length is known. ``sample``
        and ``split`` count by their fraction. Where rows are filtered, made into several, packed or batched
        by their lengths, the first 2,048 rows are read to see what becomes of them, and functions of the
        pipeline are called for these. Short batches at the ends of shards count, too.

        Raises:
            TypeError: the pipeline has no end, or its rows cannot be counted.
        """
        from trainpipes.look.forecast.estimate import estimated_items

        plan = self._session.plan
        if plan.counts.known and not plan.chain.endless:
            return len(self)
        if plan.chain.endless or plan.inputs.epoch_rows is None:
            raise TypeError(f"the length of this pipeline cannot be estimated: {self._no_length()}")
        return estimated_items(plan) * (plan.chain.times or 1) // self._data_parallel()[1]

    @property
    def column_names(self) -> list[str]:
        """Names of the columns of the rows, before they are batched. None if rows have no names, or if there
        are no rows. Found in files' footers or headers if they have them, else in the first row in file
        order, for which the pipeline's functions are called.

        >>> import trainpipes as tp
        >>> tp.from_tensors(x=range(3), y=range(3)).rename({"y": "label"}).column_names
        ['x', 'label']
        """
        return column_names(self._session.plan)

    def peek(self) -> Any:
        """The first item that the next iteration will give, without starting one.

        Raises:
            DataError: it gives nothing.
        """
        return self._session.peek()

    def show(self, n: int = 3, *, rows: int = 4) -> Preview:
        """The next items for people to look at, without starting an iteration: an object that prints as text,
        shows itself as tables in a notebook, and has ``to_dict()``.

        It shows each column of a row with its type, and a table of what a batch holds. Token ids are decoded
        where the pipeline's tokenizer is known, and tokens with a label are marked. Long values are cut, and
        control characters are escaped.

        Args:
            n: items, or as many as there are.
            rows: of each batch, rows whose text is shown.

        Raises:
            DataError: there is none.

        >>> import trainpipes as tp
        >>> sums = tp.from_dataset([{"prompt": "1 + 1 =", "response": " 2"}] * 8)
        >>> tp.recipe("sft", sums, tokenizer="bytes", batch_size=4).show(1, rows=1)
        ⟦text⟧ learnt: a target of the loss
        <BLANKLINE>
        batch 0  dict of 3, 4 rows
          input_ids       tensor int64  [4, 10]  32 to 256
          attention_mask  tensor int64  [4, 10]  1 to 1
          labels          tensor int64  [4, 10]  -100 to 256
          input_ids: 12 of 40 tokens learnt (30.0%); labels stand at their tokens; the model shifts them
          row 0  1 + 1 =⟦ 2<eos>⟧
          … and 3 more rows
        """
        from trainpipes.look.preview.preview import show

        return show(self._session, n, rows)

    def padding(self, batches: int = 100, *, mask: str | None = None) -> PaddingShare:
        """The share of padding in the first micro-batches of an epoch, over all ranks, without starting one.
        ``padding().plot()`` draws it.

        Args:
            batches: micro-batches to count, or all if there are fewer.
            mask: the tensor that is 0 on padding; "segment_ids" or "attention_mask" if left out.

        Raises:
            ConfigError: micro-batches have no such tensor.
        """
        whole_number(batches, 1, "padding(batches)", "micro-batches to count")
        stages = [stage for stage in self._stages if stage.role != "place"]
        looked_at = islice(Pipeline(stages, (0, 1)), batches)
        from trainpipes.look.forecast.padding_share import padding_share

        return padding_share(counted(looked_at, "measuring padding", batches, "batches"), mask)

    def packing(self, rows: int = 40) -> PackedRows:
        """How documents fill the first rows that ``pack`` makes in an epoch, over all ranks, without starting
        one. ``packing().plot()`` draws them.

        Args:
            rows: packed rows to look at, or all if there are fewer.

        Raises:
            ConfigError: rows have no segment_ids.

        >>> import pyarrow as pa, trainpipes as tp
        >>> rows = tp.from_arrow(pa.table({"input_ids": [[1, 2, 3], [4, 5, 6], [7]]}))
        >>> print(rows.pack(4).packing())
        2 rows of 4 tokens: 12.50% empty, 1.5 documents in a row
        """
        whole_number(rows, 1, "packing(rows)", "packed rows to look at")
        stages = [stage for stage in self._stages if stage.role != "place"]
        from trainpipes.look.forecast.packed_rows import packed_rows

        return packed_rows(Pipeline(stages, (0, 1)), rows)

    def mixture(self, rows: int = 10_000) -> MixtureShares:
        """Which sources the first rows of a mix come from, over all ranks, beside the shares that the weights
        ask for, without starting an epoch. ``mixture().plot()`` draws them. Stages after the mix do not
        run, so rows that these drop are counted.

        Args:
            rows: to look at, or all of an epoch if there are fewer.

        Raises:
            ConfigError: the pipeline does not begin with a mix.

        >>> import trainpipes as tp
        >>> web, code = tp.from_tensors(range(100)), tp.from_tensors(range(50))
        >>> print(tp.mix({"web": web, "code": code}, weights={"web": 3, "code": 1}).mixture(rows=100))
        source  target   drawn          rows
        web      75.0%   75.0%            75
        code     25.0%   25.0%            25
        """
        whole_number(rows, 1, "mixture(rows)", "rows to look at")
        from trainpipes.look.forecast.mixture_shares import mixture_shares

        return mixture_shares(self.stages, rows)

    def value_counts(self, column: str) -> dict[str | int, int]:
        """How many rows have each value of a column of labels, in sorted order. In a column of lists, each
        value in a list counts.

        It takes one pass, which reads no other column of files. Every row counts once, whatever its order,
        its shard, or its source's weight in a mix.

        Args:
            column: texts, integers, bools, or lists of these.

        Raises:
            ConfigError: the rows have no end, or can be read only once.
            DataError: a null, or a number that is not whole; names the row.

        >>> import trainpipes as tp
        >>> tp.from_dataset([{"lang": "en"}, {"lang": "de"}, {"lang": "en"}]).value_counts("lang")
        {'de': 1, 'en': 2}
        """
        from trainpipes.look.label_counts import value_counts

        return value_counts(self, column)

    def class_weights(self) -> torch.Tensor:
        """A weight for each class that ``encode_labels`` makes, float32 ``[C]``, for
        ``torch.nn.CrossEntropyLoss(weight=...)``: n / (C * rows of the class) with n rows in all, as
        scikit-learn's "balanced". A class without rows weighs 0.

        Rows are counted as by ``value_counts``, once for this pipeline and all that are made from it; where
        a row has several labels, n is the number of all labels. The weights are the same on all ranks.

        Raises:
            ConfigError: there is no ``encode_labels``, or the rows have no end.
            DataError: a label has no class; names the row.
        """
        from trainpipes.look.label_counts import class_counts, class_weights

        return class_weights(class_counts(self))

    def explain(self, *, world_size: int | None = None, num_workers: int = 0) -> Explanation:
        """What will happen, before it does: files, rows, spans, shards, memory, world sizes.

        Args:
            world_size: of the run asked about; this process's if left out.
            num_workers: DataLoader workers of each rank.
        """
        from trainpipes.look.explain import explain

        world = self._data_parallel()[1] if world_size is None else world_size
        return explain(self._session.plan, world, num_workers)

    def graph(self, *, counts: bool = False) -> Graph:
        """The stages as a drawing. A notebook shows it, ``save("pipeline.svg")`` writes it, and ``print``
        gives it as Mermaid text, which GitHub and mkdocs draw.

        Boxes are stages, with the options that were given; lines say what flows, and how much of it in an
        epoch where that is known. Pipelines that ``mix``, ``concat`` and ``zip`` join are branches. A frame
        surrounds the stages that each rank runs on its own part. ``storage_options``, users and passwords
        are left out.

        Args:
            counts: list files to count their rows, as ``explain()`` does. If False, rows are counted only if
                they are in memory, or if their files were listed before.

        >>> import trainpipes as tp
        >>> print(tp.from_tensors(range(100)).shuffle(100).batch(32).graph())
        flowchart TB
            stage1["from_tensors<br/>int64[100]"]
            stage2["shuffle<br/>buffer_size=100, seed=0"]
            stage3["batch<br/>batch_size=32"]
            training(["training loop"])
            stage1 -->|"100 rows"| stage2
            stage2 -->|"100 rows"| stage3
            stage3 -->|"4 batches of 32 in an epoch"| training
        """
        from trainpipes.look.pictures.graph import graph

        return graph(self, counts)

    def describe(self) -> dict[str, Any]:
        """What this pipeline reads and does and where it stands, to be logged with a run: plain JSON types.
        It moves nothing, and reads only what ``explain()`` reads.

        - ``fingerprint``: equal for pipelines that take each other's states, as far as their data and
          stages go, and for no others.
        - ``stages``: each with all of its options, also those left at their defaults. Functions by module
          and name, tokenizers by name and content, arrays by their content.
        - ``seeds``: of each stage that draws.
        - ``data``: files, rows, a fingerprint, and what it is made of.
        - ``epoch_rows``, ``epoch_batches``: read in an epoch, and given to each rank; None where that is
          not known in advance. ``num_shards``, ``batch_size``, ``world_size``.
        - ``position``: rank, epoch, m, and the ``state`` to load; None where the pipeline does not know: a
          ``Loader`` does, and in a DataLoader's worker its iterator.
        - ``versions``: of the library, its format of states, Python, and the packages in use.

        There are no ``storage_options``, no user, password or query of a URL, and no values under names
        such as ``api_key`` or ``token``. A state that itself holds such a value (as the argument of a
        ``functools.partial``) is left out: ``position["state"]`` is None.

        The same files give the same on two machines, but for paths, position and versions.

        >>> import trainpipes as tp
        >>> pipe = tp.from_tensors(range(10)).shuffle(10, seed=3).batch(4)
        >>> record = pipe.describe()
        >>> record["seeds"], record["data"]["rows"], record["epoch_batches"], record["batch_size"]
        ({'shuffle': 3}, 10, 3, 4)
        >>> record["stages"][2]["stage"], record["stages"][2]["batch_size"]
        ('batch', 4)
        """
        from trainpipes.look.describe import describe

        return describe(self._session)

    def to_yaml(self, path: str | os.PathLike[str] | None = None) -> str:
        """This pipeline as YAML, stage by stage, for ``trainpipes.load``: what that gives is equal to this
        one, takes its states, and gives the same batches. See docs/config.md.

        Options left at their defaults are left out, and so are ``storage_options``. Functions are written as
        ``package.module:function``. Where this pipeline stands is not part of it.

        Args:
            path: a file to write it to, too.

        Raises:
            ConfigError: an option has no form in a config: rows in memory, a lambda, a function of the
                program itself, most objects, a secret; names the stage, the option, and the way out.
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

    write_parquet = parquet_files.write_parquet
    write_arrow = arrow_files.write_arrow
    write_json = json_files.write_json

    def write_memmap(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: Any = None,
        ragged: Collection[str] = (),
        overwrite: bool = False,
        engine: Literal["ray"] | None = None,
        address: str | None = None,
        shared_filesystem: bool = False,
    ) -> MemmapDataset:
        """Write the rows, or batches, of one epoch to a memory map; options are those of
        ``trainpipes.write_memmap``. It appears when it is whole; after a kill, writing begins anew."""
        from trainpipes.storage.memmap import write_memmap

        return write_memmap(
            path, self, dtype=dtype, ragged=ragged, overwrite=overwrite,
            engine=engine, address=address, shared_filesystem=shared_filesystem,
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
