"""The fluent chain: an immutable record of stages that can be iterated.

A ``Pipeline`` is a tuple of steps, each a stage's class and its options. It prints, compares and
pickles as that record. Beside it, outside ``==``, hash and ``repr``, each pipeline object knows where
its own iteration stands; a pipeline derived from it starts afresh.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainpipes.checks import whole_number
from trainpipes.errors import ConfigError
from trainpipes.order import slots_before
from trainpipes.resharding import reading_ranks
from trainpipes.runtime.forecast.estimate import cuts_by_length, estimated_items
from trainpipes.runtime.forecast.padding_share import PaddingShare, padding_share
from trainpipes.runtime.iterating.iterator import PipelineIterator
from trainpipes.runtime.iterating.runner import Runner
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.stage import Stage
from trainpipes.shown import shown
from trainpipes.sources.parquet import ReadParquet
from trainpipes.stages.add_labels import AddLabels
from trainpipes.stages.batch import Batch
from trainpipes.stages.bucket_by_length import BucketByLength
from trainpipes.stages.cache import Cache
from trainpipes.stages.chat_template import ChatTemplate
from trainpipes.stages.collate import Collate
from trainpipes.stages.columns import Rename, Select
from trainpipes.stages.draw import Draw
from trainpipes.stages.enumerate import Enumerate
from trainpipes.stages.filter import Filter
from trainpipes.stages.flat_map import FlatMap, Unbatch
from trainpipes.stages.map import Kind, Map, StartMethod
from trainpipes.stages.map_batches import Format, MapBatches
from trainpipes.stages.mask_tokens import MaskTokens
from trainpipes.stages.pack import Method, Pack
from trainpipes.stages.pack_rows import Overlong
from trainpipes.stages.pad_collate import PadCollate
from trainpipes.stages.pin import Pin
from trainpipes.stages.repeat import Repeat
from trainpipes.stages.sample import Sample
from trainpipes.stages.sharding_filter import ShardingFilter
from trainpipes.stages.shuffle import Shuffle
from trainpipes.stages.split import Split, checked_parts
from trainpipes.stages.take import Skip, Take
from trainpipes.stages.to import To
from trainpipes.stages.token_budget import Oversize
from trainpipes.stages.tokenize import Tokenize
from trainpipes.stages.truncate import Truncate
from trainpipes.topology import data_parallel

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
    from torch.distributed.device_mesh import DeviceMesh

    from trainpipes.explain import Explanation
    from trainpipes.map_dataset import MapDataset

__all__ = ["Pipeline"]

#: A stage's class and its options, ordered.
Step = tuple[type[Stage], dict[str, Any]]


class Pipeline(IterableDataset[Any]):
    """A chain of stages. Made by ``list_files`` or a ``from_...`` function, never changed.

    Each ``iter()`` starts the next epoch, in another order if the pipeline shuffles. Iterators have
    ``state_dict`` and ``load_state_dict``, and start to read at the first ``next``. A pipeline can be
    iterated as it is, in a ``DataLoader`` or ``StatefulDataLoader`` with ``batch_size=None``, or in
    ``trainpipes.Loader``. Stages are documented at their classes.

    Args:
        steps: the stages' classes and options.
        ranks: rank and world size, if they are not the process's.
        members: global ranks that read the pipeline with this one, if they are not all.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        ranks: tuple[int, int] | None = None,
        members: tuple[int, ...] | None = None,
    ) -> None:
        self._steps = tuple(steps)
        self._ranks = ranks
        self._members = members
        self._runner = Runner(self._plan, self._data_parallel)
        self._runner.members = members

    # The record

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Fresh stages of this chain, first one first."""
        return tuple(cls(None, **options) for cls, options in self._steps)

    def then(self, stage: Stage) -> Pipeline:
        """This pipeline with one more stage: one of ours, or your own subclass of ``Stage``.

        Args:
            stage: the stage, made without a source.
        """
        if not isinstance(stage, Stage) or stage.source is not None:
            raise ConfigError(
                f"then(stage) takes a stage made without a source, got {shown(stage)}"
            )
        steps = (*self._steps, (type(stage), stage.options))
        Plan([cls(None, **options) for cls, options in steps])  # says now what does not fit
        return Pipeline(steps, self._ranks, self._members)

    def __repr__(self) -> str:
        lines = [repr(stage) for stage in self.stages]
        return "\n".join([lines[0], *(f"  .{line}" for line in lines[1:])])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pipeline):
            return NotImplemented
        return self._ranks == other._ranks and _same(self._steps, other._steps)

    def __hash__(self) -> int:
        return hash((tuple(cls for cls, _ in self._steps), self._ranks))

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker must not take itself for rank 0 of 1.
        ranks = self._data_parallel()
        runner = self._runner
        return {
            "steps": self._steps,
            "ranks": None if self._ranks is None else ranks,
            "members": self._members,
            "seen_ranks": ranks,
            "passes": runner.passes,
            "pending": runner.pending,
            "notes": runner.notes,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["steps"], state["ranks"], state["members"])  # type: ignore[misc]
        self._seen_ranks = state["seen_ranks"]
        self._runner.passes = state["passes"]
        self._runner.pending = state["pending"]
        self._runner.notes = state["notes"]

    _seen_ranks: tuple[int, int] | None = None

    def _data_parallel(self) -> tuple[int, int]:
        ranks = self._ranks
        if ranks is None and get_worker_info() is not None:
            ranks = self._seen_ranks
        return reading_ranks(ranks or data_parallel(), self._batching)

    def _batching(self) -> Stage | None:
        """The stage that makes batches, if one does."""
        first = self._runner.plan.stages[0]
        source = first if getattr(first, "makes_batches", False) else None
        return self._runner.plan.batch or source

    def _plan(self) -> Plan:
        return Plan(self.stages)

    # Stages

    def read_parquet(
        self,
        columns: Sequence[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        index: str | os.PathLike[str] | bool | None = None,
        errors: Literal["strict", "replace"] = "strict",
    ) -> Pipeline:
        """Read the rows of the listed files. See ``ReadParquet``."""
        options: dict[str, Any] = {"storage_options": storage_options, "index": index}
        return self.then(ReadParquet(columns=columns, errors=errors, **options))

    def sharding_filter(
        self,
        num_shards: int = 24,
        *,
        split: Literal["spans", "stride"] = "spans",
        balance: Literal["rows", "bytes"] = "rows",
        tail: Literal["even", "ragged"] = "even",
    ) -> Pipeline:
        """Deal the epoch to ranks and workers. See ``ShardingFilter``."""
        stage = ShardingFilter(num_shards=num_shards, split=split, balance=balance, tail=tail)
        return self.then(stage)

    def shuffle(
        self,
        buffer_size: int = 40_960,
        *,
        seed: int = 0,
        max_bytes: int = 1 << 30,
        scope: Literal["buffer", "global"] = "buffer",
    ) -> Pipeline:
        """Shuffle row groups, and rows within a buffer; or all rows. See ``Shuffle``."""
        stage = Shuffle(buffer_size=buffer_size, seed=seed, max_bytes=max_bytes, scope=scope)
        return self.then(stage)

    def draw(self, sampler: Any) -> Pipeline:
        """Take rows by number, as a sampler says. See ``Draw``."""
        return self.then(Draw(sampler=sampler))

    def map(
        self,
        fn: Callable[..., Any],
        *,
        rng: bool = False,
        seed: int = 0,
        version: str | None = None,
        num_workers: int = 0,
        method: Kind = "thread",
        start_method: StartMethod | None = None,
        schema: pa.Schema | None = None,
    ) -> Pipeline:
        """Apply a function to each row, or to each batch above ``batch``. See ``Map``."""
        return self.then(
            Map(
                fn=fn,
                rng=rng,
                seed=seed,
                version=version,
                num_workers=num_workers,
                method=method,
                start_method=start_method,
                schema=schema,
            )
        )

    def map_batches(
        self, fn: Callable[[Any], Any], *, format: Format = "arrow", version: str | None = None
    ) -> Pipeline:
        """Apply a function to the columns of many rows at once. See ``MapBatches``."""
        return self.then(MapBatches(fn=fn, format=format, version=version))

    def filter(
        self, predicate: Callable[[Any], bool] | pc.Expression, *, version: str | None = None
    ) -> Pipeline:
        """Keep the rows for which a predicate holds. See ``Filter``."""
        return self.then(Filter(predicate=predicate, version=version))

    def sample(
        self, fraction: float, *, key: str | Sequence[str] | None = None, seed: int = 0
    ) -> Pipeline:
        """Keep a fraction of the rows, the same ones every time. See ``Sample``."""
        return self.then(Sample(fraction=fraction, key=key, seed=seed))

    def split(
        self,
        parts: Mapping[str, float],
        *,
        key: str | Sequence[str] | None = None,
        seed: int = 0,
    ) -> dict[str, Pipeline]:
        """Cut the rows in parts that never share one: a pipeline for each, by name. See ``Split``.

        >>> import trainpipes as tp
        >>> parts = tp.from_tensors(range(1000)).split({"train": 0.9, "valid": 0.1})
        >>> len(list(parts["train"])) + len(list(parts["valid"]))
        1000
        """
        return {
            part: self.then(Split(parts=parts, part=part, key=key, seed=seed))
            for part in checked_parts(parts)
        }

    def flat_map(
        self,
        fn: Callable[[Any], Iterable[Any]],
        *,
        version: str | None = None,
        schema: pa.Schema | None = None,
    ) -> Pipeline:
        """Make any number of rows of each. See ``FlatMap``."""
        return self.then(FlatMap(fn=fn, version=version, schema=schema))

    def unbatch(self, level: int = 1) -> Pipeline:
        """Take rows that are batches apart. See ``Unbatch``."""
        return self.then(Unbatch(level=level))

    def enumerate(self, start: int = 0, *, column: str = "index") -> Pipeline:
        """Give each row its number in file order. See ``Enumerate``."""
        return self.then(Enumerate(start=start, column=column))

    def select(self, *columns: str) -> Pipeline:
        """Keep these columns. See ``Select``."""
        return self.then(Select(columns=columns))

    def rename(self, names: Mapping[str, str]) -> Pipeline:
        """Give columns other names. See ``Rename``."""
        return self.then(Rename(names=names))

    def tokenize(
        self,
        tokenizer: Any,
        columns: str | Sequence[str] | Mapping[str, str] = "text",
        *,
        pair: bool = False,
        template: str | None = None,
        max_length: int | None = None,
        truncation_side: Literal["right", "left"] = "right",
        add_special_tokens: bool = True,
        eos: bool | str | int = False,
        labels: bool | str | Sequence[str] | None = None,
        keep_text: bool = False,
        engine: Literal["auto", "tokenizers"] = "auto",
    ) -> Pipeline:
        """Turn text columns into token ids. See ``Tokenize``."""
        return self.then(
            Tokenize(
                tokenizer=tokenizer,
                columns=columns,
                pair=pair,
                template=template,
                max_length=max_length,
                truncation_side=truncation_side,
                add_special_tokens=add_special_tokens,
                eos=eos,
                labels=labels,
                keep_text=keep_text,
                engine=engine,
            )
        )

    def chat_template(
        self,
        tokenizer: Any,
        column: str = "messages",
        *,
        labels: bool = True,
        max_length: int | None = None,
        template: str | None = None,
    ) -> Pipeline:
        """Turn conversations into token ids, with labels on the assistant's turns. See ``ChatTemplate``."""
        return self.then(
            ChatTemplate(
                tokenizer=tokenizer,
                column=column,
                labels=labels,
                max_length=max_length,
                template=template,
            )
        )

    def truncate(
        self,
        length: int,
        *,
        columns: str | Sequence[str] | None = None,
        side: Literal["right", "left"] = "right",
    ) -> Pipeline:
        """Cut lists of numbers to a length. See ``Truncate``."""
        return self.then(Truncate(length=length, columns=columns, side=side))

    def add_labels(
        self,
        column: str = "input_ids",
        *,
        where: str | None = None,
        ignore: int | Sequence[int] = (),
    ) -> Pipeline:
        """Make the column "labels" of the token ids. See ``AddLabels``."""
        return self.then(AddLabels(column=column, where=where, ignore=ignore))

    def mask_tokens(
        self,
        probability: float = 0.15,
        *,
        column: str = "input_ids",
        whole_words: bool = False,
        tokenizer: Any = None,
        mask_id: int | None = None,
        special_ids: Sequence[int] | None = None,
        vocab_size: int | None = None,
        random: float = 0.1,
        keep: float = 0.1,
        seed: int = 0,
    ) -> Pipeline:
        """Hide some tokens, and make labels of them. See ``MaskTokens``."""
        return self.then(
            MaskTokens(
                probability=probability,
                column=column,
                whole_words=whole_words,
                tokenizer=tokenizer,
                mask_id=mask_id,
                special_ids=special_ids,
                vocab_size=vocab_size,
                random=random,
                keep=keep,
                seed=seed,
            )
        )

    def cache(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | None = None,
        version: str | None = None,
        enabled: bool = True,
    ) -> Pipeline:
        """Keep on disk what the stages so far make of each row group. See ``Cache``."""
        stage = Cache(path=path, max_bytes=max_bytes, version=version, enabled=enabled)
        return self.then(stage)

    def pack(
        self,
        length: int,
        *,
        method: Method = "best_fit",
        column: str = "input_ids",
        window: int = 1024,
        max_documents: int | None = None,
        overlong: Overlong = "split",
        along: Sequence[str] = (),
        seed: int = 0,
        pad_id: int | None = None,
    ) -> Pipeline:
        """Pack documents into rows of one length. See ``Pack``."""
        return self.then(
            Pack(
                length=length,
                method=method,
                column=column,
                window=window,
                max_documents=max_documents,
                overlong=overlong,
                along=along,
                seed=seed,
                pad_id=pad_id,
            )
        )

    def batch(
        self,
        batch_size: int | None = None,
        *,
        drop_last: bool = False,
        max_tokens: int | None = None,
        max_rows: int | None = None,
        column: str | None = None,
        oversize: Oversize | None = None,
    ) -> Pipeline:
        """Cut rows into micro-batches, of a fixed size or of so many tokens. See ``Batch``."""
        return self.then(
            Batch(
                batch_size=batch_size,
                drop_last=drop_last,
                max_tokens=max_tokens,
                max_rows=max_rows,
                column=column,
                oversize=oversize,
            )
        )

    def bucket_by_length(
        self,
        batch_size: int | None = None,
        *,
        max_tokens: int | None = None,
        boundaries: Sequence[int] | None = None,
        num_buckets: int | None = None,
        column: str = "input_ids",
        window: int = 1024,
        max_rows: int | None = None,
        oversize: Oversize | None = None,
        drop_last: bool = False,
        seed: int = 0,
    ) -> Pipeline:
        """Cut micro-batches of rows of about the same length. See ``BucketByLength``."""
        return self.then(
            BucketByLength(
                batch_size=batch_size,
                max_tokens=max_tokens,
                boundaries=boundaries,
                num_buckets=num_buckets,
                column=column,
                window=window,
                max_rows=max_rows,
                oversize=oversize,
                drop_last=drop_last,
                seed=seed,
            )
        )

    def pad_collate(
        self,
        *,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding: Literal["post", "pre"] | None = None,
        truncating: Literal["post", "pre"] | None = None,
        value: float | None = None,
        mask: Mapping[str, str] | bool | None = None,
        columns: Mapping[str, Mapping[str, Any]] | None = None,
        dtype: torch.dtype = torch.int64,
    ) -> Pipeline:
        """Pad ragged columns into tensors ``[B, L]``. See ``PadCollate``."""
        return self.then(
            PadCollate(
                max_length=max_length,
                pad_to_multiple_of=pad_to_multiple_of,
                padding=padding,
                truncating=truncating,
                value=value,
                mask=mask,
                columns=columns,
                dtype=dtype,
            )
        )

    def collate(
        self,
        fn: Callable[[Any], Any] | None = None,
        *,
        format: Literal["rows", "arrow", "numpy", "torch"] = "rows",
        version: str | None = None,
    ) -> Pipeline:
        """Make a batch of each micro-batch by a function. See ``Collate``."""
        return self.then(Collate(fn=fn, format=format, version=version))

    def repeat(self, times: int | None = None) -> Pipeline:
        """Go on with the next epoch in the same pass. See ``Repeat``."""
        return self.then(Repeat(times=times))

    def take(self, count: int) -> Pipeline:
        """Give the first items of each epoch only. See ``Take``."""
        return self.then(Take(count=count))

    def skip(self, count: int) -> Pipeline:
        """Leave out the first items of each epoch. See ``Skip``."""
        return self.then(Skip(count=count))

    def pin(self) -> Pipeline:
        """Put batches in page-locked memory. See ``Pin``."""
        return self.then(Pin())

    def to(
        self, device: str | int | torch.device, *, non_blocking: bool = True, depth: int = 2
    ) -> Pipeline:
        """Copy batches to a device, ahead of their use. See ``To``."""
        return self.then(To(device=device, non_blocking=non_blocking, depth=depth))

    def distributed(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> Pipeline:
        """This pipeline as read by one of several data-parallel ranks, where these are not simply all
        processes of ``torch.distributed`` or of the environment's ``RANK`` and ``WORLD_SIZE``.

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
            return Pipeline(self._steps, (mesh.get_local_rank(), mesh.size()), members)
        known = rank is not None and world_size is not None
        for name, value in (("rank", rank), ("world_size", world_size)):
            if known:
                whole_number(value, 0, f"distributed({name})", "0 <= rank < world_size")
        if rank is None or world_size is None or not 0 <= rank < world_size:
            raise ConfigError(
                f"distributed(rank, world_size) needs 0 <= rank < world_size, got {rank} and {world_size}"
            )
        return Pipeline(self._steps, (rank, world_size))

    # Iteration

    def __iter__(self) -> PipelineIterator:
        self._data_parallel()  # says now, on all ranks, what does not fit
        made = self._batching()
        if made is not None and _batched_outside():
            raise ConfigError(
                f"this pipeline makes batches itself ({made}), and the DataLoader "
                "would batch them again: pass batch_size=None to the DataLoader"
            )
        return PipelineIterator(self._runner)

    def __len__(self) -> int:
        plan, (rank, world) = self._runner.plan, self._data_parallel()
        if not plan.known or plan.endless:
            raise TypeError(f"this pipeline has no len(): {self._no_length()}")
        return slots_before(int(plan.last_slot(world)), rank, world)

    def _no_length(self) -> str:
        plan = self._runner.plan
        if plan.endless:
            return "repeat() has no end; count steps, or give repeat(times=...)"
        if not plan.rows_known:
            return f"the rows of {plan.stages[0]} are not counted; list(pipe) counts them"
        cutting = next((s for s in plan.after if cuts_by_length(s)), None)
        if cutting is not None:
            return f"how many items {cutting} makes is known only at the end; use estimate_len()"
        dropping = [str(s) for s in plan.before + plan.after if not s.keeps_rows]
        what = dropping[0] if dropping else "take() or skip() on the way"
        return f"how many rows {what} lets through is known only at the end; use estimate_len()"

    def estimate_len(self) -> int:
        """About ``len()``: exact where that is known. ``sample`` and ``split`` count by their fraction. Where
        rows are packed or batched by their lengths, the first 2,048 are read to say what comes of them,
        and what a ``filter`` drops; otherwise a filter counts as if it dropped none. For learning rate
        schedules.

        Raises:
            TypeError: the pipeline has no end, or its rows cannot be counted.
        """
        plan = self._runner.plan
        if plan.known and not plan.endless:
            return len(self)
        if plan.endless or plan.epoch_rows is None:
            raise TypeError(f"the length of this pipeline cannot be estimated: {self._no_length()}")
        return estimated_items(plan) * (plan.times or 1) // self._data_parallel()[1]

    def peek(self) -> Any:
        """The first item that the next iteration will give, without starting one."""
        return self._runner.peek()

    def padding(self, batches: int = 100, *, mask: str | None = None) -> PaddingShare:
        """How much of the first micro-batches of an epoch, over all ranks, is padding, without starting one.

        Args:
            batches: micro-batches to count, or all if there are fewer.
            mask: the tensor that is 0 on padding; "segment_ids" or "attention_mask" if left out.

        Raises:
            ConfigError: micro-batches have no such tensor.
        """
        whole_number(batches, 1, "padding(batches)", "micro-batches to count")
        steps = [step for step in self._steps if step[0].role != "place"]
        return padding_share(islice(Pipeline(steps, (0, 1)), batches), mask)

    def explain(self, *, world_size: int | None = None, num_workers: int = 0) -> Explanation:
        """What will happen, before it does: files, rows, spans, shards, memory, world sizes.

        Args:
            world_size: of the run asked about; this process's if left out.
            num_workers: DataLoader workers of each rank.
        """
        from trainpipes.explain import explain

        world = self._data_parallel()[1] if world_size is None else world_size
        return explain(self._runner.plan, world, num_workers)

    def to_map_dataset(self, path: str | None = None) -> MapDataset:
        """The rows of one epoch as a map-style dataset, kept once for all processes of a machine.

        Args:
            path: a file, written anew. If left out, one in the folder for caches, which is known by the
                data and by what the stages do, as entries of ``cache()`` are, and made if it is not there.
        """
        from trainpipes.map_dataset import to_map_dataset

        return to_map_dataset(self, path)

    # State

    def state_dict(self) -> dict[str, Any] | None:
        """The state after the last item that an iterator of this pipeline gave; of the start of the next
        pass if none has. Iterators have a ``state_dict`` of their own, and so has a ``Loader``. None in a
        DataLoader's worker, whose iterator has it.

        Raises:
            StateError: the pipeline was iterated by a ``Loader``, or by workers of a DataLoader, which
                alone know where they are.
        """
        return self._runner.state()

    def load_state_dict(
        self, state: dict[str, Any], *, allow_changes: Collection[str] = ()
    ) -> None:
        """Let the next ``iter()`` go on where ``state`` was taken, also in workers.

        Args:
            state: of this pipeline, in any loader.
            allow_changes: what may differ from the pipeline that saved it; see ``Loader``.

        Raises:
            StateError: it does not fit this pipeline.
        """
        self._runner.load(state, allow_changes)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next ``iter()`` is, also in workers: for frameworks that do. There is no need
        to, each is the next one by itself.

        It starts that epoch, or changes nothing where it comes next anyway and under an endless ``repeat``. A
        position that was loaded is never given up for it: the first call after a load is what the caller
        calls the loaded epoch, and its later numbers are counted from there.

        Raises:
            ConfigError: that is no integer of 0 or more.
        """
        self._data_parallel()  # refuses frameworks that would share out batches again
        self._runner.set_epoch(epoch)

    def state_at(self, batches_delivered: int, *, epoch: int = 0) -> dict[str, Any]:
        """The state after so many batches of each rank, without having kept one.

        By arithmetic where row counts are known, else by running the pipeline that far.

        Args:
            batches_delivered: batches that each rank has had in that epoch.
            epoch: which pass, from 0.
        """
        return self._runner.state_at(batches_delivered, epoch)


def _batched_outside() -> bool:
    """Whether a DataLoader that batches by itself asks for an iterator, here on the stack."""
    frame = sys._getframe(2)
    return frame.f_code.co_name == "__init__" and bool(frame.f_locals.get("auto_collation", False))


def _same(a: Any, b: Any) -> bool:
    """Equality of options, also of arrays and tensors."""
    if a is b:
        return True
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    equals = getattr(a, "equals", None)
    return bool(equals(b) if callable(equals) and type(a) is type(b) else a == b)
