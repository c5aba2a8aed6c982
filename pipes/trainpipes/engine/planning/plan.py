"""The plan of a pipeline, in four parts, each of which knows only those before it: ``Chain``, into which its
stages are sorted here, ``Inputs``, ``Layouts``, ``Counts``. Immutable; any thread may ask it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from trainpipes._internal.locks import cached_property
from trainpipes.engine.planning.chain import Chain
from trainpipes.engine.planning.column_types import ColumnTypes, with_columns
from trainpipes.engine.planning.inputs import (
    Inputs,
    Schemas,
    grows,
    kept_in_states,
    listed_files,
    refuse_repeat,
    versions,
)
from trainpipes.engine.planning.layouts import Counts, Layouts
from trainpipes.errors import ConfigError
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.source import RowSource, RowStream
from trainpipes.interfaces.stage import Stage, Tally, is_ours
from trainpipes.state.cursor import checksum
from trainpipes.state.format import NEW_WEIGHTS, BatchSizes, Reweighed

S = TypeVar("S", bound=Stage)


def arrange(written: Sequence[Stage]) -> Chain:
    """The chain of some stages, which then belong to it. Raises ConfigError where they make no pipeline."""
    stages: list[Any] = []
    there = set(map(type, written))  # a source's own stages, too, where these were arranged before
    for stage in written:
        stages.append(stage._resolve(stages))
        if isinstance(stage, kinds.Source):
            above = (own for own in stages[-1]._above() if type(own) not in there)
            stages += [own._resolve(stages) for own in above]
    starts = stages and isinstance(stages[0], kinds.Source)
    if not starts or isinstance(stages[0], kinds.ReadingSource):
        raise ConfigError(
            "a pipeline starts with rows: list_files(...), from_dataset(...), from_arrow(...), "
            f"from_tensors(...) or from_iterable(...), got {stages[0] if stages else 'no stage'}"
        )
    reader = next((n for n, s in enumerate(stages) if isinstance(s, kinds.ReadingSource)), 0)
    chain = Chain(tuple(stages), stages[reader], tuple(stages[:reader]))
    for stage in chain.file_stages[1:]:
        chain = _on_files(chain, stage)
    rows = with_columns(stages[reader:])[1:]
    for number, stage in enumerate(rows):
        chain = _above(chain, stage, rows[number + 1 :])
    _check(chain)
    if chain.shuffle is not None and chain.drawn is not None:
        chain = _draw(chain, chain.shuffle)
    chain = _move_up(chain)
    late = chain.opener._late()
    if late is not None and chain.before:
        chain = replace(chain, before=(late, *chain.before))
    elif late is not None:
        chain = replace(chain, after=(late, *chain.after))
    counting = kinds.first_of(chain.after, kinds.CountingStage)
    if counting is not None and chain.num_shards > 1:
        option = _dropping_option(chain, chain.steps)
        way = option or "put it directly after the source, to count rows in file order"
        raise ConfigError(
            f"{counting} would count for each shard alone here: {way}, or put it after batch(), where no "
            "stage drops batches and none behind it groups or shuffles them"
        )
    return chain


def _on_files(chain: Chain, stage: Stage) -> Chain:
    if isinstance(stage, kinds.ShardStage):
        return replace(chain, shard=_once(chain.shard, stage))
    shuffles = isinstance(stage, kinds.ShuffleStage) and stage.order is None
    if not shuffles and stage.name != "filter":
        raise ConfigError(
            f"{stage} works on rows, and here there are only file paths; put it after {chain.opener.name}()"
        )
    return chain


def _check(chain: Chain) -> None:
    opener = chain.opener
    if chain.shuffle is not None and opener.traits.orders_rows:
        raise ConfigError(
            f"{opener} orders the rows itself, and so does {chain.shuffle}: leave one out"
        )
    if chain.shard is not None and opener.traits.one_consumer:
        raise ConfigError(f"{chain.shard} cannot follow {opener}: {opener.traits.one_consumer}")
    above_mix = next((s for s in (chain.shuffle, chain.cache) if s is not None), None)
    if chain.mixes and above_mix is not None:
        raise ConfigError(
            f"{above_mix} comes after mix(), which has set the order of the rows already: put it "
            f"into each source, mix({{'name': source.{above_mix.name}(...), ...}})"
        )
    counts_epochs = chain.repeat is not None and chain.repeat.times is not None
    if chain.mixes and opener.traits.endless and counts_epochs:
        raise ConfigError(
            f'{chain.repeat} counts epochs, and mix(stop="repeat") has no end: leave one out'
        )
    if chain.cache is not None and not opener.traits.has_blocks:
        raise ConfigError(
            f"{chain.cache} needs Arrow rows, as read_parquet() and from_arrow() give them, and "
            f"{opener} gives others: leave the cache out, or write the rows to Parquet files first"
        )
    if chain.batch is not None and opener.traits.makes_batches:
        raise ConfigError(f"{opener} makes the batches: leave out {chain.batch}")


def _above(chain: Chain, stage: Stage, later: Sequence[Stage]) -> Chain:
    """The chain with a stage above it; ``later``: those that come after that."""
    after = (*chain.after, stage)
    over_batches = chain.batch is not None or (chain.mixes and chain.opener.traits.makes_batches)
    if isinstance(stage, kinds.ShuffleStage):
        return _shuffled(chain, stage)
    if isinstance(stage, kinds.ShardStage):
        return replace(chain, shard=_once(chain.shard, stage))
    if isinstance(stage, kinds.BatchingStage):
        if over_batches and stage.traits.keeps_rows:
            return replace(chain, after=(*chain.after, stage._resolved(nested=True)))
        rolling, batch = chain.repeat is not None, _once(chain.batch, stage)
        return replace(chain, batch=batch, rolling=rolling, after=after)
    if isinstance(stage, kinds.RepeatStage):
        return replace(chain, repeat=_once(chain.repeat, stage))
    if isinstance(stage, kinds.DeviceStage):
        if stage.name == "pin" and chain.device_stages:
            raise ConfigError(f"{stage} pins memory of this machine: put it once, and before to()")
        return replace(chain, device_stages=(*chain.device_stages, stage))
    if isinstance(stage, kinds.PackingStage):
        if over_batches:
            where = "into each source, before batch()" if chain.batch is None else "before batch()"
            raise ConfigError(f"{stage} works on rows: put it {where}")
        return replace(chain, rolling=chain.repeat is not None, after=after)
    if isinstance(stage, kinds.BalanceStage):
        if not over_batches or kinds.first_of(chain.after, kinds.FinishingStage):
            raise ConfigError(
                f"{stage} must stand where batches are cut and not yet collated, got "
                f"{'rows' if not over_batches else 'collated batches'}: put it after batch(), and before "
                "pad_collate() or collate()"
            )
        return replace(chain, after=after)
    if isinstance(stage, kinds.CacheStage):
        return _cached(chain, stage)
    if isinstance(stage, kinds.CountingStage):
        return _counted(chain, stage, later)
    if isinstance(stage, kinds.RunStage):
        placing = next((s for s in chain.device_stages if s.name != "pin"), None)
        if placing is not None and (stage._calls_function or not is_ours(type(stage))):
            raise ConfigError(
                f"{stage} after {placing} would get batches that are not there yet, since they are copied "
                f"when all stages are through: put it before {placing.name}(), or call it in the loop"
            )
        return replace(chain, after=after)
    raise ConfigError(
        f"{stage} starts a pipeline, and cannot come after {chain.stages[0].name}(): make two pipelines, and "
        "join them by concat(), zip() or mix()"
    )


def _shuffled(chain: Chain, stage: kinds.ShuffleStage) -> Chain:
    grouping = kinds.first_of(chain.after, kinds.PackingStage | kinds.BatchingStage)
    if chain.shuffle is not None or chain.mixes or grouping is not None:
        if stage.order is not None:
            below = chain.shuffle or grouping or chain.opener
            raise ConfigError(
                f"{stage} reads rows by number, and {below} has ordered or made them already: use "
                "shuffle(buffer_size=...) here, or leave one out"
            )
        earlier = sum(isinstance(s, kinds.ShuffleStage) for s in (chain.shuffle, *chain.after))
        return replace(chain, after=(*chain.after, stage._resolved(_again=earlier)))
    shuffle, before = stage, chain.before + chain.after
    if kinds.first_of(before, kinds.CountingStage):
        option = _dropping_option(chain, before)
        way = option and f"{option}, or put take() and skip() after the shuffle"
        raise ConfigError(
            "take() and skip() before a shuffle count rows in file order, and a stage before them drops "
            f"rows: {way or 'put take() and skip() directly after the source'}"
        )
    return replace(chain, shuffle=shuffle, before=before, after=())


def _cached(chain: Chain, stage: kinds.CacheStage) -> Chain:
    if chain.shuffle is not None:
        raise ConfigError(
            f"{stage} stands after {chain.shuffle}, where rows come in another order every epoch: put it "
            "before shuffle(), with the stages before it whose work is to be kept: "
            ".tokenize(...).cache().shuffle(...)"
        )
    above: Stage | None = chain.batch or chain.repeat
    if above is None:
        # What makes rows of several rows has a place of its own.
        regroups = [s for s in chain.after if not kinds.is_on_rows(s)]
        above = regroups[0] if regroups else None
    if above is not None:
        raise ConfigError(
            f"{stage} keeps rows as they are read, block by block: put it before {above.name}()"
        )
    below = next((s for s in chain.after if "epoch" in s.traits.depends_on), None)
    if below is not None:
        raise ConfigError(
            f"{below} gives other rows in every epoch, and {stage} would keep only the first "
            f"epoch's: put cache() before {below.name}()"
        )
    cached = len(chain.after) if stage.on else None
    return replace(chain, cache=_once(chain.cache, stage), cached=cached)


def _counted(chain: Chain, stage: kinds.CountingStage, later: Sequence[Stage]) -> Chain:
    """The chain with a take or skip: of rows in file order, of batches, or on the way."""
    count = int(stage.count)
    if chain.repeat is not None:
        raise ConfigError(f"{stage} after repeat() would count over epochs: put it before repeat()")
    in_file_order = chain.batch is None and chain.shuffle is None and not chain.mixes
    if in_file_order and all(s.traits.keeps_rows and kinds.is_on_rows(s) for s in chain.after):
        if stage.skips:
            return replace(chain, skip_rows=chain.skip_rows + count)
        return replace(chain, stop_rows=_least(chain.stop_rows, chain.skip_rows + count))
    items = chain.after
    if chain.batch is not None:
        items = items[items.index(chain.batch) :]
    # What comes out at the end is counted: the same items, if none is dropped, made or moved after it.
    moving = kinds.BatchingStage | kinds.PackingStage | kinds.ShuffleStage | kinds.BalanceStage
    moved = any(isinstance(s, moving) or not s.traits.keeps_rows for s in later)
    batches = chain.batch is not None or chain.opener.traits.makes_batches
    if (
        (batches or chain.shuffle is not None)
        and not moved
        and all(s.traits.keeps_rows for s in items)
    ):
        if stage.skips:
            return replace(chain, skip_batches=chain.skip_batches + count)
        return replace(chain, stop_batches=_least(chain.stop_batches, chain.skip_batches + count))
    return replace(chain, after=(*chain.after, stage))


def _dropping_option(chain: Chain, stages: Sequence[Stage]) -> str:
    """The way out where an option of the reader drops rows; "" where none of these stages is one."""
    readers = (
        kinds.reader_of(stage, chain.stages) for stage in stages if not stage.traits.keeps_rows
    )
    reader = next(filter(None, readers), "")
    return reader and f"leave out the option of {reader}() that drops rows"


def _least(found: int | None, stop: int) -> int:
    return stop if found is None else min(found, stop)


def _draw(chain: Chain, stage: kinds.ShuffleStage) -> Chain:
    """The chain where rows are read by number: stages below the sampler follow it."""
    opener = chain.opener
    if not opener.traits.random_access:
        raise ConfigError(
            f"{stage} reads rows by number, and {opener} cannot: use shuffle(buffer_size=...), or write the "
            "rows to where that is possible: write_memmap() for numbers, to_map_dataset(path) for others"
        )
    if chain.cache is not None:
        raise ConfigError(
            f"{chain.cache} keeps rows block by block, and {stage} reads them one by one: use "
            "shuffle(buffer_size=...), or leave the cache out"
        )
    dropping = next((s for s in chain.before if not s.traits.keeps_rows), None)
    if dropping is not None and chain.may_repeat:
        raise ConfigError(
            f"{stage} chooses among all rows of {opener}, and {dropping} drops some: "
            f"{_dropping_option(chain, [dropping]) or f'put {dropping} after it'}"
        )
    return replace(chain, before=(), after=chain.before + chain.after)


def _move_up(chain: Chain) -> Chain:
    """Move stages that treat and keep each row by itself above the dealing, but not above a cache."""
    stay = chain.cached or 0
    if chain.shuffle is None:
        before, after = chain.after[:stay], chain.after[stay:]
        if chain.cache is not None and not all(stage.traits.keeps_rows for stage in before):
            after = (chain.cache.drop_holes(), *after)
        return replace(chain, before=before, after=after)
    last = max((n for n, s in enumerate(chain.before) if not s.traits.keeps_rows), default=-1)
    stay = max(stay, last + 1)
    return replace(chain, before=chain.before[:stay], after=chain.before[stay:] + chain.after)


def _once(found: S | None, stage: S) -> S:
    if found is not None:
        raise ConfigError(
            f"a pipeline has one {stage.name}(), got {found} and {stage}: leave one out"
        )
    return stage


@dataclass(frozen=True, eq=False)
class Plan:
    """What a chain of stages amounts to.

    Attributes:
        quiet: it is made to look at rows, not to train on.
        chain: the stages; where the batch size was changed in a pass, with that of the batches at hand.
        layouts: with the batch size of the stages, and the changed one.
        new_weights: of a mix, from some batches of the pass on.
        workers: processes that call functions for a pass, if there are some.
    """

    inputs: Inputs
    quiet: bool = False
    new_weights: Reweighed = ()
    workers: Any = None

    @cached_property
    def chain(self) -> Chain:
        return self.inputs.chain

    @cached_property
    def layouts(self) -> Layouts:
        return Layouts(self.inputs, self.inputs.chain)

    @cached_property
    def types(self) -> ColumnTypes:
        return ColumnTypes(self.inputs)

    @cached_property
    def counts(self) -> Counts:
        return Counts(self.layouts)

    @staticmethod
    def of(
        stages: Sequence[Stage],
        source: RowSource | RowStream | None = None,
        schemas: Schemas | None = None,
        quiet: bool = False,
        name: str | None = None,
    ) -> Plan:
        """The plan of stages, which then belong to it. Raises ConfigError where they make no pipeline."""
        refuse_repeat(stages)
        return Plan(Inputs(arrange(stages), source, schemas, name), quiet)

    def resized(self, sizes: BatchSizes | None, m: int | None = None) -> Plan:
        """This plan for a pass in which the batch size was changed, from batch ``m`` on."""
        chain = self.inputs.chain
        if sizes is not None and m is not None and m >= sizes.start:
            number = m - sizes.start + (0 if chain.rolling else chain.skip_batches)
            size = next(size for first, size in reversed(sizes.sizes) if first <= number)
            if size != chain.batch_size:
                chain = chain.of_batch_size(size)
        if sizes == self.layouts.sizes and chain.batch_size == self.chain.batch_size:
            return self
        return self._cut(sizes, self.layouts.lanes, chain=chain)

    def reweighed(self, new_weights: Reweighed) -> Plan:
        """This plan for a pass in which the weights of its mix change."""
        if new_weights == self.new_weights:
            return self
        plan = self._with(new_weights=new_weights)
        for name in ("identity", "tag"):
            vars(plan).pop(name, None)
        return plan

    def worked_by(self, workers: Any) -> Plan:
        """This plan for a pass in which processes call functions."""
        plan = self._with(workers=workers)
        for name in ("reads_user_code", "runs_user_code"):
            vars(plan).pop(name, None)
        return plan

    def in_lanes(self, lanes: int) -> Plan:
        """This plan with so many lanes in place of each shard, which take turns at its batches. The
        order stays the same; no state knows of lanes.
        """
        return self if lanes == self.layouts.lanes else self._cut(self.layouts.sizes, lanes)

    def _cut(self, sizes: BatchSizes | None, lanes: int, **others: Any) -> Plan:
        layouts = Layouts(self.inputs, self.inputs.chain, sizes, lanes)
        return self._with(layouts=layouts, counts=Counts(layouts), **others)

    def _with(self, **others: Any) -> Plan:
        """A copy that shares results of this plan, but for a few fields."""
        plan = copy(self)
        vars(plan).update(others)
        return plan

    @property
    def counted(self) -> bool:
        return self.counts.counted

    @cached_property
    def mixed(self) -> dict[str, Plan]:
        return {name: Plan(part) for name, part in self.inputs.mixed.items()}

    @cached_property
    def tallies(self) -> list[Tally]:
        """What stages count, also those of the sources of a mix."""
        of_chain = [tally for stage in self.chain.stages for tally in stage._tallies()]
        return of_chain + [tally for part in self.mixed.values() for tally in part.tallies]

    @cached_property
    def grows(self) -> bool:
        return grows(self.chain.stages)

    @cached_property
    def files(self) -> str | None:
        """What a state names: the files of folders that grow, versions of tables; None without such."""
        return listed_files(self.inputs) if self.growing else None

    @cached_property
    def growing(self) -> int:
        """How many folders and tables there are of which a state names files or version."""
        return len(kept_in_states(self.chain.stages))

    def require_fixed(self, option: str) -> None:
        """Raise ConfigError for folders that grow, where files are listed once."""
        if self.grows:
            raise ConfigError(
                f"list_files(refresh) must be left out with {option}, where files are listed once for all "
                "epochs, got refresh='epoch'; use trainpipes.Loader"
            )

    def has_same_files(self, other: Plan) -> bool:
        """Whether another plan of these stages has files of the same names, sizes and times."""
        if not self.inputs.is_open or self.files != other.files:
            return False
        return versions(self.inputs) == versions(other.inputs)

    def settle(self, threads: int) -> None:
        """Prepare for calls by this many threads at once; 0 for only the thread that iterates."""
        for stage in self.chain.stages:
            if isinstance(stage, kinds.RunStage):
                stage._settle(threads)
        for part in self.mixed.values():
            part.settle(threads)

    # Who may call what

    @cached_property
    def reads_user_code(self) -> bool:
        chain = self.chain
        before = chain.before if self.workers is None else ()
        reading = [chain.stages[0], *before, *filter(None, [chain.shuffle])]
        return any(stage._runs_user_code for stage in reading)

    @cached_property
    def runs_user_code(self) -> bool:
        return self.reads_user_code or any(stage._runs_user_code for stage in self.chain.after)

    @cached_property
    def in_caller(self) -> bool:
        """Whether a stage must be called by the thread that iterates."""
        return any(stage.traits.in_caller for stage in self.chain.stages)

    # Identity

    @cached_property
    def identity(self) -> str:
        """What a state must agree on with the pipeline that loads it, as JSON. Stages that may stand on
        either side of the shuffle come after it.
        """
        # Where a stage that deals rows stands in a chain changes nothing.
        shaping = kinds.without(self.chain.stages, kinds.UNKNOWN)
        shaping.sort(key=lambda s: [not isinstance(s, k) for k in (kinds.Source, kinds.ShardStage)])
        if self.chain.shuffle in shaping:
            before = shaping[: shaping.index(self.chain.shuffle)]
            last = max((n for n, s in enumerate(before) if not s.traits.keeps_rows), default=-1)
            later = [s for s in before[last + 1 :] if kinds.is_on_rows(s)]
            shaping = [s for s in shaping if s not in later]
            after = shaping.index(self.chain.shuffle) + 1
            shaping[after:after] = later
        data, stages = self.inputs.source.fingerprint(), [stage.identity() for stage in shaping]
        if self.new_weights:
            stages[0][NEW_WEIGHTS] = self.new_weights
        return json.dumps({"data": data, "stages": stages}, separators=(",", ":"))

    @cached_property
    def tag(self) -> str:
        return checksum(self.identity)
