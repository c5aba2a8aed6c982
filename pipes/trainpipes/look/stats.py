"""What batches are like, measured on the first ones of an epoch: ``Pipeline.stats``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch

from trainpipes._internal.checks import IntArray, column_names, is_given_name, whole_number
from trainpipes._internal.messages import Report, need_columns, table
from trainpipes._internal.progress import counted
from trainpipes.columns.block import Pieces
from trainpipes.columns.run import Run
from trainpipes.engine.iterating.consumer import Consumer
from trainpipes.engine.iterating.iteration_state import plan_of
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.record import Record
from trainpipes.errors import ConfigError
from trainpipes.filesystems.retry import made_again
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.read_columns import names_of, numbers_of
from trainpipes.interfaces.stage import Stage, aside
from trainpipes.look import order_quality as quality
from trainpipes.look.decoded import known_ids
from trainpipes.look.lengths import Numbered, look_through, made_aside, walk
from trainpipes.look.values import masks_of
from trainpipes.order.layout import Topology
from trainpipes.sources.mix import Mix
from trainpipes.sources.mixture import Gives, Mixture
from trainpipes.stages.batch import Batch
from trainpipes.stages.columns import Rename, Select, row_table
from trainpipes.stages.labels import EncodeLabels, Label, LabelColumn
from trainpipes.stages.pack import Pack
from trainpipes.stages.pad_collate import PadCollate
from trainpipes.state.format import Position

__all__ = ["Mixing", "Packing", "Padding", "Stats", "stats"]

#: Batches that are looked at where nothing is said; with a number of ranks, of each rank or shard.
BATCHES, BATCHES_EACH = 100, 64
#: Labels of a column that a text shows.
MOST_LABELS = 12
#: Rows that are counted at a time.
ROWS = 65_536
#: More different values than these are no labels, and would fill the memory.
MOST_VALUES = 1 << 22
#: Stages that say in which order rows come, how often and where: none of it changes the counts.
ORDERING = kinds.ShuffleStage | kinds.ShardStage | kinds.RepeatStage | kinds.DeviceStage
#: Above these there are no rows whose labels could be counted.
ENDING = kinds.BatchingStage | kinds.FinishingStage | Pack
#: What never changes the counts; the order does where rows are drawn, mixed by weights or left out by others.
AGAIN = kinds.RepeatStage | kinds.DeviceStage


@dataclass(frozen=True)
class Padding:
    """How much of the batches is padding.

    Attributes:
        cells: B * L of the batches, over all of them.
        padding: of these, those that hold no token.
        share: padding as part of all cells, 0 to 1.
        seconds: of sound in the batches, without padding; None where they have none, or no masks or lengths.
    """

    cells: int
    padding: int
    share: float
    seconds: float | None = None

    def __str__(self) -> str:
        sound = "" if self.seconds is None else f"; {self.seconds:,.1f} s of sound"
        return f"{self.share:.2%} of {self.cells:,} cells{sound}"


@dataclass(frozen=True)
class Packing:
    """How full the packed rows are.

    Attributes:
        rows: packed rows.
        max_length: tokens of a row.
        documents: in all of them, where a document cut in two counts as two.
        empty: places for tokens that hold none.
        share: empty places, as part of all, 0 to 1.
    """

    rows: int
    max_length: int
    documents: int
    empty: int
    share: float

    def __str__(self) -> str:
        each = self.documents / max(1, self.rows)
        rows = f"{self.rows:,} row{'s' * (self.rows != 1)} of {self.max_length:,} tokens"
        return f"{rows}: {self.share:.2%} empty, {each:.1f} documents in a row"


@dataclass(frozen=True)
class Mixing:
    """How much each source of a mix gave, by its name.

    Attributes:
        unit: the unit, "rows", "batches" or "tokens".
        rows: its rows.
        amounts: its rows or batches, or tokens where the mix counts these.
        shares: its part of all, 0 to 1.
        targets: the shares by the weights, on average over these rows, 0 to 1.
    """

    unit: str
    rows: dict[str, int]
    amounts: dict[str, int]
    shares: dict[str, float]
    targets: dict[str, float]

    def __str__(self) -> str:
        rows = [("source", "target", " drawn", f"{self.unit:>12}")]
        for name, target in self.targets.items():
            drawn, amount = self.shares[name], self.amounts[name]
            rows.append((name, f"{target:>6.1%}", f"{drawn:>6.1%}", f"{amount:>12,}"))
        return table(rows)


@dataclass(frozen=True, repr=False)
class Stats(Report):
    """What the first batches of an epoch are like, over all ranks. Prints as text.

    Attributes:
        batches: looked at for padding and packing.
        padding: None where batches have no mask.
        packing: how documents fill packed rows; None where there are none.
        mixture: which sources of a mix rows are from; None without a mix.
        shuffle: how well rows are shuffled, as they are read; None where rows have no numbers.
        labels: of each column that was asked for, rows of each label, over all rows before ``batch``.
        steps: whether the ranks of a step have as much to do; None without ``world_size``.
        counts: of each stage that counts rows, its text about these batches: rows left out, texts cut.
        retries: how many times this process has made a request to a server again, so far.
    """

    batches: int
    padding: Padding | None
    packing: Packing | None
    mixture: Mixing | None
    shuffle: quality.ShuffleQuality | None
    labels: dict[str, dict[Label, int]]
    counts: dict[str, str] = field(default_factory=dict)
    steps: quality.Steps | None = None
    retries: int = field(default_factory=made_again)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types; labels as texts."""
        labels = {
            name: {str(k): n for k, n in counts.items()} for name, counts in self.labels.items()
        }
        return {**super().to_dict(), "labels": labels}

    def _rows(self) -> Iterator[tuple[str, str]]:
        many = f"the first {self.batches:,}" if self.batches != 1 else "the first one"
        if self.batches:
            yield "batches", f"{many} of an epoch"
        for name in ("padding", "packing", "steps", "mixture", "shuffle"):
            if value := getattr(self, name):
                yield name, str(value)
        for column, counts in self.labels.items():
            shown = [f"{label!r}: {n:,}" for label, n in islice(counts.items(), MOST_LABELS)]
            shown += [f"and {len(counts) - MOST_LABELS:,} more"] * (len(counts) > MOST_LABELS)
            yield "labels", f"{column}, over all rows: {', '.join(shown)}"
        for name, said in self.counts.items():
            yield "counted", f"{name}: {said}"
        if self.retries:
            yield "retries", f"{self.retries:,} of requests, so far"


def stats(
    pipeline: Record,
    batches: int | None,
    labels: str | Sequence[str] | None,
    world_size: int | None,
) -> Stats:
    """See ``Pipeline.stats``."""
    stages = kinds.without(pipeline._stages, kinds.DeviceStage)
    measured = Record([stage._fresh() for stage in stages], (0, 1))
    plan = plan_of(measured)
    if world_size is not None:
        whole_number(world_size, 1, "stats(world_size)", "ranks")
    if batches is None and world_size is not None:
        batches = BATCHES_EACH * max(world_size, plan.chain.num_shards)
    batches = BATCHES if batches is None else batches
    whole_number(batches, 0, "stats(batches)", "batches to look at")
    columns = column_names([] if labels is None else labels, "stats(labels)", 0, is_given_name)
    label_counts_of = {column: label_counts(pipeline, column) for column in columns}
    if not batches:
        return Stats(0, None, None, None, None, label_counts_of)
    looked_at = islice(_numbered(plan), batches)
    cells = tokens = count = 0
    sound, seconds = _Sound.of(plan), 0.0
    packed: list[tuple[int, int, int]] = []  # length, tokens and documents of each row
    works: list[tuple[int, int, int, int]] = []  # number, cells, tokens and attention of each batch
    for number, batch in counted(looked_at, "measuring batches", batches, "batches"):
        named = batch if isinstance(batch, Mapping) else {}
        masks = masks_of(named)
        heard = sound.heard(named)
        segments = named.get("segment_ids")
        if world_size is not None:
            masked = masks or quality.mask_of_rows(batch, plan.chain)
            works.append((number, *quality.work_of(masked)))
        elif not masks and segments is None and not heard:
            ready = plan.chain.opener.traits.makes_batches  # of several sources
            if not ready and not any(any(tally.numbers) for tally in plan.tallies):
                break
            continue
        count += 1
        cells += sum(mask.numel() for mask in masks)
        tokens += sum(int(torch.count_nonzero(mask)) for mask in masks)
        for places, samples, rate, mask in heard:
            seconds += samples / rate
            if not any(mask is other for other in masks):  # else its cells are counted above
                cells, tokens = cells + places, tokens + samples
        for row in () if segments is None else np.atleast_2d(np.asarray(segments)):
            there = row[row > 0]
            packed.append((len(row), len(there), len(np.unique(there))))
    padding = None
    if cells:
        share = (cells - tokens) / cells
        padding = Padding(cells, cells - tokens, share, seconds or None)
    packing = None
    if packed:
        widths, held, documents = zip(*packed, strict=True)
        room = len(packed) * max(widths)
        empty = room - sum(held)
        packing = Packing(len(packed), max(widths), sum(documents), empty, empty / max(1, room))
    mixing, shuffle = _mixing(pipeline, batches), quality.order_quality(pipeline, batches)
    said = defaultdict[str, list[str]](list)
    with aside(counts=True):  # nothing was listed
        for tally in plan.tallies:
            said[tally.stage.name] += filter(None, [str(tally)])
    counts = {name: "; ".join(each) for name, each in said.items() if each}
    steps = None if world_size is None else quality.steps_of(works, world_size, plan.chain)
    return Stats(count, padding, packing, mixing, shuffle, label_counts_of, counts, steps)


@dataclass(frozen=True)
class _Sound:
    """Columns of sound: their samples a second, and how batches say where samples end."""

    rates: Mapping[str, int]
    masks: Mapping[str, str]
    lengths: Mapping[str, str]

    @staticmethod
    def of(plan: Plan) -> _Sound:
        pads = kinds.first_of(plan.chain.after, PadCollate)
        if pads is None:
            return _Sound({}, {}, {})
        return _Sound(known_ids(plan).rates, pads._masks, pads.lengths or {})

    def heard(self, batch: Mapping[str, Any]) -> list[tuple[int, int, int, Any]]:
        """Of each column: places for samples, samples, how many are a second, and its mask, if any."""
        found = []
        for column, rate in self.rates.items():
            samples: Any = batch.get(column)
            mask: Any = batch.get(self.masks.get(column, ""))
            lengths: Any = batch.get(self.lengths.get(column, ""))
            if isinstance(samples, torch.Tensor) and (mask is not None or lengths is not None):
                held = torch.count_nonzero(mask) if lengths is None else lengths.sum()
                found.append((samples.shape[0] * samples.shape[-1], int(held), rate, mask))
        return found


def _numbered(plan: Plan) -> Iterator[tuple[int, Any]]:
    """The items of the first epoch, over all ranks, each with its number in the sequence."""
    items = Consumer(plan, Topology(), Position(0, 0, plan.chain.num_shards))
    with closing(items):
        for item in made_aside(items):
            assert items.m is not None
            yield items.m, item


def _mixing(pipeline: Record, batches: int) -> Mixing | None:
    chain = plan_of(pipeline).chain
    if not chain.mixes:
        return None
    weighed: dict[tuple[int, int], int] = {}
    opener, *stages = [s._fresh() for s in kinds.without(pipeline._stages, kinds.DeviceStage)]
    if chain.opener.traits.makes_batches:
        stages = [stage for stage in stages if isinstance(stage, kinds.ShardStage)]
    elif kinds.first_of(stages, kinds.BatchingStage | kinds.PackingStage) is None:
        stages.append(Batch(quality.BATCH_SIZE))
    # Items know their rows until they are finished.
    unfinished = [*takewhile(lambda stage: not isinstance(stage, kinds.FinishingStage), stages)]
    later = stages[len(unfinished) :]
    moving = [stage for stage in later if isinstance(stage, kinds.RegroupStage)]
    packs = kinds.first_of(stages, Pack) is not None
    stages = [_Weighed(weighed), *unfinished, *moving, _Known(packs)]
    plan = Plan.of([opener, *stages], quiet=True)
    plan.inputs.keeps_pieces, plan.inputs.above = True, tuple(later)
    mixture = plan.inputs.source
    assert isinstance(mixture, Mixture)
    names = list(chain.opener.options["sources"])
    rows, amounts = np.zeros(len(names), np.int64), np.zeros(len(names))
    seen: set[tuple[int, int]] = set()  # documents of packed rows, which may be in several
    for known in counted(islice(walk(plan), batches), "looking at the mix", batches, "batches"):
        for path, places, _ in mixture.ids.split(known.ids):
            number, tokens = names.index(path[0]), known.tokens
            here = known.ids[places].tolist(), known.epochs[places].tolist()
            rows_here = [*zip(*here, strict=True)]
            if tokens is None:
                amount = sum(map(weighed.__getitem__, rows_here))
            else:
                amount = int(tokens[places].sum())
                rows_here = [row for row in dict.fromkeys(rows_here) if row not in seen]
                seen.update(rows_here)
            rows[number] += len(rows_here)
            amounts[number] += {"tokens": amount, "rows": len(rows_here)}.get(mixture.unit, 1)
    total = max(1.0, float(amounts.sum()))
    parts = np.diff(np.minimum([*mixture.starts, np.inf], total))
    order = [mixture.names.index(name) for name in names]
    weights = np.array(mixture.steps)[:, order]
    targets = parts @ (weights / weights.sum(axis=1, keepdims=True)) / parts.sum()
    each = rows, amounts.round().astype(int), amounts / total, targets
    return Mixing(mixture.unit, *(dict(zip(names, of.tolist(), strict=True)) for of in each))


class _Weighed(kinds.RunStage, holds_data=True, asks_inputs=True):
    """Notes the weight of each of the mix's rows, by number and epoch."""

    weighed: dict[tuple[int, int], int]

    def process(self, run: Run) -> Run:
        block, mixture = run.block, self._inputs.source
        tokens = [1] * len(block)
        if mixture.mix.gives is Gives.FINISHED and mixture.by_tokens:
            tokens = block.rows()
        elif mixture.by_tokens:
            above = self._inputs.chain.after + self._inputs.above
            tokens = mixture.tokens(block, above).tolist()
        pieces = Pieces.whole(block.ids, block.epoch)
        each = zip(pieces.ids.tolist(), pieces.epochs.tolist(), strict=True)
        self.weighed.update(zip(each, tokens, strict=True))
        return run


class _KnownRows(NamedTuple):
    """The numbers and epochs of an item's rows, int64 ``[rows]``; of packed ones those of their documents,
    and how many tokens each has there.
    """

    ids: IntArray
    epochs: IntArray
    tokens: IntArray | None


class _Known(kinds.RunStage):
    """Makes of each item the names of its rows; ``packs``: they are packed after the mix."""

    packs: bool

    def process(self, run: Run) -> Run:
        block, tokens = run.block, None
        pieces = Pieces.whole(block.ids, block.epoch)
        made_of = block.made_of if self.packs else None
        if made_of is not None and "segment_ids" in names_of(block, self):
            pieces = made_of
            values, _ = numbers_of(block, "segment_ids", self)
            segments = values.reshape(len(block), -1)
            first = pieces.bounds[:-1, None] - 1  # segments count from 1, and 0 is padding
            tokens = np.bincount((first + segments)[segments > 0], minlength=len(pieces.ids))
        rows = np.arange(len(block) + 1) if run.bounds is None else run.bounds
        parts = [slice(a, b) for a, b in pairwise(pieces.bounds[rows].tolist())]
        items: list[Any] = [
            _KnownRows(pieces.ids[p], pieces.epochs[p], None if tokens is None else tokens[p])
            for p in parts
        ]
        return run.with_items(items)


# Labels, by a pass over a column


class CountLabels(kinds.RunStage, takes="columns"):
    """Counts labels, texts or int64, of the rows that pass."""

    column: str
    found: Counter[Label]

    def __repr__(self) -> str:
        return f"stats(labels={self.column!r})"

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self)
        need_columns(table.column_names, [self.column], self)
        labels = LabelColumn(table[self.column], self.column, self, block.ids)
        for entry in labels.values.value_counts().to_pylist():
            self.found[entry["values"]] += entry["counts"]
        if len(self.found) > MOST_VALUES:
            raise ConfigError(
                f"stats(labels) must be a column of labels, got {self.column!r} with more than "
                f"{MOST_VALUES:,} different values; name another one"
            )
        return run


def label_counts(pipeline: Record, column: str) -> dict[Label, int]:
    """Rows of each label of a column, in sorted order; of encoded ones, of each class."""
    stages = list(takewhile(lambda s: not isinstance(s, ENDING), pipeline._stages))
    counts: Counter[Label] = Counter()
    for place, stage in reversed([*enumerate(stages)]):
        if isinstance(stage, EncodeLabels) and stage.output_column == column:
            above = [s for s in stages[place + 1 :] if isinstance(s, ORDERING) or chooses(s)]
            if stage.counts is not None and not any(map(chooses, above)):
                return dict(enumerate(stage.counts))
            counts.update(dict.fromkeys(range(stage.num_classes), 0))
            stages[place + 1 :] = above
            break
        changes = stage._calls_function or column in getattr(stage, "names", ())
        if changes or not stage.traits.keeps_rows:
            break  # it may change the labels, or leave rows out
    for part in _parts(stages):
        counts.update(_counted(_needed(part, column), column))
    return {value: counts[value] for value in sorted(counts, key=lambda v: (isinstance(v, str), v))}


def _parts(stages: Sequence[Stage]) -> list[Sequence[Stage]]:
    """The chains whose rows are mixed, each with the stages above the mix."""
    first, *above = stages
    if not isinstance(first, Mix):
        return [stages]
    together = kinds.first_of(above, kinds.PackingStage | kinds.CountingStage) is not None
    takes = any(isinstance(s, kinds.CountingStage) and not s.skips for s in above)
    if (first.stop != "repeat" or takes) and (together or not first._takes_each_once):
        return [stages]
    mixed = first.sources.values()
    return [part for pipeline in mixed for part in _parts([*pipeline._stages, *above])]


def chooses(stage: Stage) -> bool:
    """Whether it says which rows come: ``take`` and ``skip``, or a sampler."""
    drawn = isinstance(stage, kinds.ShuffleStage) and stage.sampler is not None
    return drawn or isinstance(stage, kinds.CountingStage)


def order_counts(stages: Sequence[Stage]) -> bool:
    """Whether which rows come depends on their order."""
    return any(isinstance(s, Mix | kinds.PackingStage) or chooses(s) for s in stages)


def _needed(stages: Sequence[Stage], column: str) -> list[Stage]:
    left = kinds.without(stages, AGAIN if order_counts(stages) else ORDERING)
    above: list[Stage] = []
    while True:
        stage: Any = left.pop()
        if isinstance(stage, Rename) and column in stage.names.values():
            old = next(name for name, new in stage.names.items() if new == column)
            above[:0] = [Select([old]), Rename({old: column})]
            column = old
        elif isinstance(stage, EncodeLabels) and column == stage.output_column:
            above.insert(0, stage)
            column = stage.column
        elif isinstance(stage, Select) and column in stage.columns:
            above.insert(0, Select([column]))
        else:
            break
    takes_columns = isinstance(stage, kinds.ReadingSource) and "columns" in stage.options
    if takes_columns and column in (stage.columns or [column]):
        stage = stage._replaced(columns=[column])
    return [*left, stage, *above]


def _counted(stages: Sequence[Stage], column: str) -> Counter[Label]:
    counts: Counter[Label] = Counter()
    stages = [stage._fresh() for stage in stages]
    plan = Plan.of([*stages, CountLabels(column, counts), Batch(ROWS), Numbered()], quiet=True)
    chain = plan.chain
    if chain.has_no_end or chain.opener.traits.read_once:
        why = "have no end" if chain.has_no_end else "can be read only once"
        raise ConfigError(
            f"stats(labels) must be a column of rows that can all be read before training, got {column!r} of "
            f"{chain.stages[0]}, whose rows {why}; count the labels of its source"
        )
    look_through(plan, f"counting {column!r}")
    return counts
