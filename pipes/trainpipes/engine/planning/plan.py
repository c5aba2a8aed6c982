"""The plan of a pipeline, in four parts, each of which knows only those before it: ``Chain``,
``Inputs``, ``Layouts``, ``Counts``. Immutable; any thread may ask it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from trainpipes._internal.locks import cached_property
from trainpipes.engine.planning.arrange import arrange
from trainpipes.engine.planning.chain import Chain
from trainpipes.engine.planning.column_types import ColumnTypes
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
from trainpipes.interfaces.stage import Stage, Tally
from trainpipes.state.cursor import checksum
from trainpipes.state.format import NEW_WEIGHTS, BatchSizes, Reweighed


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
        """This plan for a pass in which processes call functions, but those below a cache."""
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
        before = chain.before if self.workers is None else chain.before[: chain.cached or 0]
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
