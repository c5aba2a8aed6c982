"""The chain of stages that users build and iterate: a ``Record`` with a method for each stage, and those
that look at it, write its rows, or hand it to another library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trainpipes._internal.checks import one_by_one
from trainpipes._internal.messages import renamed
from trainpipes.engine.record import Method, Record
from trainpipes.errors import TrainpipesError, shown
from trainpipes.interfaces.stage import enter
from trainpipes.sources.concat import Concat, Windows, Zip
from trainpipes.sources.read_arrow import ReadArrow
from trainpipes.sources.read_csv import ReadCsv
from trainpipes.sources.read_files import ReadBytes, ReadFiles, ReadImages
from trainpipes.sources.read_json import ReadJson
from trainpipes.sources.read_numpy import ReadNumpy
from trainpipes.sources.read_parquet import ReadParquet
from trainpipes.sources.read_text import ReadText
from trainpipes.sources.read_webdataset import ReadWebdataset
from trainpipes.stages import image_stages
from trainpipes.stages.batch import Batch, BucketByLength
from trainpipes.stages.cache import Cache
from trainpipes.stages.collate import Collate
from trainpipes.stages.columns import DropColumns, Enumerate, Rename, Select
from trainpipes.stages.decode_clips import AudioInfo, DecodeAudio, DecodeVideo
from trainpipes.stages.decoding import DecodeImage
from trainpipes.stages.device import Pin, To
from trainpipes.stages.features import EncodeCategories, NormalizeColumns
from trainpipes.stages.filter import Filter, Sample, SampleBy, Split, checked_parts
from trainpipes.stages.flat_map import Deduplicate, FlatMap
from trainpipes.stages.labels import EncodeLabels
from trainpipes.stages.map import Map, MapBatches, WithColumns
from trainpipes.stages.order import Balance, Repeat, ShardingFilter, Shuffle, Skip, Take
from trainpipes.stages.pack import Pack
from trainpipes.stages.pad_collate import PadCollate
from trainpipes.stages.sound_features import LogMel, MaskSpans
from trainpipes.stages.token_ids import AddLabels, MaskTokens, Truncate
from trainpipes.stages.tokenize import Tokenize
from trainpipes.stages.tokenizing import ChatTemplate, TokenizedBy
from trainpipes.writers import formats

if TYPE_CHECKING:
    from datasets import IterableDataset as IterableRows
    from ray.data import Dataset

    from trainpipes.look.explain import Explanation
    from trainpipes.look.show import Preview
    from trainpipes.look.stats import Stats
    from trainpipes.stages.features import FittedColumns
    from trainpipes.writers.epoch_rows import MapDataset


class Pipeline(Record):
    """A chain of stages. ``list_files`` and the ``read_...`` and ``from_...`` functions make it; each
    stage method returns a new chain, which starts at the beginning.

    Each ``iter()`` starts the next epoch, in another order if the pipeline shuffles. Iterators read
    from the first ``next`` on, and have ``state_dict`` and ``load_state_dict``. You can iterate a
    pipeline as it is, in a ``DataLoader`` or ``StatefulDataLoader`` with ``batch_size=None``, or in
    ``trainpipes.Loader``.

    Args:
        stages: the first stage first.
        ranks: rank and world size, if they are not those of the process.
        members: global ranks that read the pipeline together with this rank, if not all do.

    >>> import trainpipes as tp
    >>> pipe = tp.from_dataset(range(5)).batch(2)
    >>> list(pipe)
    [[0, 1], [2, 3], [4]]
    """

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from trainpipes.look.record import mermaid

        bundle = {"text/plain": repr(self)}
        with suppress(TrainpipesError):  # errors are raised where the pipeline is used
            bundle["text/vnd.mermaid"] = mermaid(self)
        return bundle

    if not TYPE_CHECKING:  # a type checker is to refuse names that are not there

        def __getattr__(self, name: str) -> Any:
            names = [known for known in dir(type(self)) if not known.startswith("_")]
            hint = "" if name.startswith("_") else renamed(name, names)
            raise AttributeError(f"a pipeline has no {name!r}{hint}", name=name)

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
    sample_by = Method(SampleBy)
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
    encode_categories = Method(EncodeCategories)
    normalize_columns = Method(NormalizeColumns)
    decode_image = Method(DecodeImage)
    audio_info = Method(AudioInfo)
    decode_audio = Method(DecodeAudio)
    log_mel = Method(LogMel)
    mask_spans = Method(MaskSpans)
    decode_video = Method(DecodeVideo)
    resize = Method(image_stages.Resize)
    center_crop = Method(image_stages.CenterCrop)
    random_crop = Method(image_stages.RandomCrop)
    random_resized_crop = Method(image_stages.RandomResizedCrop)
    flip = Method(image_stages.Flip)
    normalize = Method(image_stages.Normalize)
    image_transform = Method(image_stages.ImageTransform)
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
        the same in each epoch, before and after a shuffle, and on any number of ranks. Parts cannot be
        joined again: of 5 folds, those but fold k are
        ``rows.enumerate().filter(lambda row: row["index"] % 5 != k)``.

        Args:
            parts: fraction of the rows by name; the fractions sum to 1.
            key: a column, or several: rows of equal values stay in the same part.
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
    enter(Select, DropColumns, Windows, Split)

    # Iteration

    def __len__(self) -> int:
        from trainpipes.look.lengths import length_of

        return length_of(self._iteration)

    def peek(self) -> Any:
        """Return the first item of the next iteration, without starting it.

        Raises:
            DataError: the pipeline gives nothing.

        >>> import trainpipes as tp
        >>> tp.from_dataset(range(5)).batch(2).peek()
        [0, 1]
        """
        from trainpipes.look.show import peek

        return peek(self._iteration)

    def show(self, n: int = 3, *, rows: int = 4) -> Preview:
        """Show the next items, without starting an iteration: types, shapes, ranges and decoded text, with
        tokens in the loss marked. Long values are cut.

        Args:
            n: number of items.
            rows: of each batch, rows whose text is shown.

        Returns:
            An object that prints as text, and shows itself in a notebook.

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
        """Describe the plan: stages, files, columns, rows, shards, memory. Lists files and reads
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
        """Measure the first batches of an epoch, over all ranks, without starting it: padding, how full
        packed rows are, the sources of a mix, and how well rows are shuffled. Padding is where
        "segment_ids" or "attention_mask" is 0.

        Args:
            batches: most batches to look at; 0 to count labels only. 100 if left out; with ``world_size``
                64 for each rank, or for each shard where there are more of these.
            labels: columns of texts, integers, bools, or lists of these, whose values are counted; in a list,
                each value counts. Rows before ``batch`` count, of one pass over the data: drop_last, ``take``
                of batches and ``repeat`` change nothing. Of a mix without an end each source counts once.
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

    def fit_columns(
        self,
        numbers: str | Sequence[str] | None = None,
        categories: str | Sequence[str] | None = None,
        *,
        rows: int | None = None,
        min_count: int = 1,
        max_size: int | None = None,
    ) -> FittedColumns:
        """Find means and deviations of columns of numbers, for ``normalize_columns``, and the values of
        categories, for ``encode_categories``, by a pass over the rows before they are batched. Fit on
        the training part only, and ``save`` the result: a resume needs the same.

        Nulls and NaN are counted, and left out. Means are rounded to a millionth of the deviation, so that
        all machines find the same.

        Args:
            numbers: columns of numbers, dates or times.
            categories: columns of texts, integers, bools, or lists of these.
            rows: look at so many, the first ones in this pipeline's order, shuffled if it shuffles; all
                if left out.
            min_count: leave out categories that come less often.
            max_size: keep so many categories of each column, the most frequent ones.

        Raises:
            ConfigError: the rows have no end or can be read only once.
            DataError: an infinite number, or a column of nulls; names the row.
            SchemaError: a column is not there, or holds other values.

        >>> import trainpipes as tp
        >>> rows = tp.from_dataset([{"age": n, "city": "ab"[n > 1]} for n in range(5)])
        >>> print(rows.fit_columns("age", "city", min_count=2))
        rows  5
        age   mean 2, deviation 1.41421
        city  0: null, 1: others, 2: 'b' (3), 3: 'a' (2)
        """
        from trainpipes.look.fit import fit_columns

        return fit_columns(self, numbers, categories, rows, min_count, max_size)

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
        from trainpipes.writers.config import to_yaml

        return to_yaml(self, path)

    def to_map_dataset(self, path: str | os.PathLike[str]) -> MapDataset:
        """Keep the rows of an epoch in a file, as a map-style dataset that all processes of a
        machine share.

        Args:
            path: the file, which is replaced.

        Returns:
            A dataset with ``len()`` and ``dataset[i]``; of a slice or a list of numbers, a list of rows.

        >>> import tempfile, pyarrow as pa, trainpipes as tp
        >>> rows = tp.from_arrow(pa.table({"x": [1, 2, 3]})).filter(lambda row: row["x"] > 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rows.to_map_dataset(f"{folder}/rows.arrow")[1]
        {'x': 3}
        """
        from trainpipes.writers.formats import to_map_dataset

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
        from trainpipes.writers.hf_dataset import to_hf

        return to_hf(self)

    def to_ray(self, *, epoch: int = 0) -> Dataset:
        """Make a ``ray.data.Dataset`` of the rows of an epoch. Nothing is read before Ray reads it.

        Where rows are counted, each read task reads a range of them, in the order without
        ``sharding_filter``; otherwise (``filter``, ``flat_map``, ``mix``) there is a task for each shard. Ray
        keeps the order of tasks if ``execution_options.preserve_order`` of its
        ``ray.data.DataContext.get_current()`` is True.

        The nodes need this library: ``ray.init(runtime_env={"py_modules": [trainpipes]})`` ships
        it.

        Args:
            epoch: which epoch; a pipeline that shuffles has another order in each.

        Raises:
            ConfigError: the pipeline makes batches, repeats, or has a ``distributed()``.
            SchemaError: rows have no columns.
            MissingExtraError: ``ray`` is not installed.
        """
        from trainpipes.writers.ray_dataset import to_ray

        return to_ray(self, epoch)

    # Files

    write_parquet = formats.write_parquet
    write_arrow = formats.write_arrow
    write_json = formats.write_json
    write_memmap = formats.write_memmap

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
        from trainpipes.look.show import state_at

        return state_at(self._iteration, batches_delivered, epoch)
