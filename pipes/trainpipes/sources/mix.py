"""``mix``: rows of several pipelines by weights, which may change during the run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, fields
from fractions import Fraction
from itertools import pairwise
from numbers import Integral, Rational, Real
from typing import Any, Literal

from trainpipes import errors
from trainpipes._internal.checks import ColumnName, require, several, whole_number
from trainpipes._internal.locks import cached_property
from trainpipes.columns.run import innermost
from trainpipes.engine.planning.chain import MixedInputs, MixingSource, without_shares
from trainpipes.engine.planning.inputs import Inputs
from trainpipes.engine.planning.plan import Plan, arrange
from trainpipes.errors import cut
from trainpipes.interfaces import stage_kinds as kinds
from trainpipes.interfaces.options import instead, is_pipeline, show
from trainpipes.interfaces.stage import Stage
from trainpipes.sources.common_columns import Alike, CommonColumns
from trainpipes.sources.fair_queue import common_total, whole_weights
from trainpipes.sources.mixture import Gives, Mixture, rows_of
from trainpipes.state.format import NEW_WEIGHTS, Position, first_difference, said

#: Steps that a linear stretch of a schedule is made of.
LINEAR_STEPS = 64
#: Weights from sizes and a temperature are whole numbers up to this.
SIZE_WEIGHTS = 1_000_000
#: Where a stretch begins, in rows or tokens of the whole mix, and the weights there.
Schedule = list[tuple[int, dict[str, Fraction]]]


def checked_weights(weights: Any, names: Sequence[str], option: str) -> dict[str, Fraction]:
    """The weights; a float is the decimal number that it prints as."""
    rule = f"a dict with a number for each source ({', '.join(names)})"
    good = isinstance(weights, Mapping) and set(weights) == set(names)
    require(good, option, rule, weights, "0 leaves a source out")
    exact = {}
    for name in names:
        value = weights[name]
        good = is_number(value) and value >= 0
        require(good, f"{option}: {name!r}", "a number of 0 or more", value)
        exact[name] = Fraction(value if isinstance(value, Rational) else repr(float(value)))
    require(any(exact.values()), option, "more than 0 for one source at least", weights)
    return exact


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def checked_schedule(schedule: Any, names: Sequence[str]) -> Schedule:

    def check(good: Any, value: Any) -> None:
        rule = (
            "a list of (draws, weights), with draws of the whole mix that increase from 0 or more"
        )
        require(good, "mix(schedule)", rule, value)

    check(several(schedule) and len(schedule), schedule)
    checked: Schedule = []
    for step in schedule:
        check(several(step) and len(step) == 2, step)
        start, weights = step
        whole = isinstance(start, Integral) and not isinstance(start, bool)
        check(
            whole and start > (checked[-1][0] if checked else -1), [point[0] for point in schedule]
        )
        checked.append((int(start), checked_weights(weights, names, f"mix(schedule) at {start}")))
    return checked


def steps_of(points: Schedule, linear: bool) -> Schedule:
    """Steps of constant weights; a linear stretch becomes several, with the weights of their middles."""
    if not linear:
        return points
    spread: Schedule = []
    for (start, before), (stop, after) in pairwise(points):
        before, after = _shares(before), _shares(after)
        steps = min(LINEAR_STEPS, stop - start)
        for k in range(steps):
            part = Fraction(2 * k + 1, 2 * steps)
            weights = {n: w + (after[n] - w) * part for n, w in before.items()}
            spread.append((start + (stop - start) * k // steps, weights))
    return [*spread, points[-1]]


def _shares(weights: Mapping[str, Fraction]) -> dict[str, Fraction]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def by_size(sizes: Mapping[str, int], temperature: float | None) -> dict[str, Fraction]:
    if temperature is None or temperature == 1:
        return {name: Fraction(size) for name, size in sizes.items()}
    most = max(sizes.values())
    shares = {name: (size / most) ** (1 / temperature) for name, size in sizes.items()}
    return {name: Fraction(max(1, round(share * SIZE_WEIGHTS))) for name, share in shares.items()}


#: Options that define a source's rows in a mix: they stay.
KEPT = ("weight_by", "output_column")
Stop = Literal["all_exhausted", "first_exhausted", "repeat"]
#: What a stage that cannot stand in a source is to do instead.
_ELSEWHERE: dict[type[Stage], str] = {
    kinds.ShardStage: "put it after mix(): it deals all sources",
    kinds.RepeatStage: 'leave it out: sources start again by themselves; see mix(stop="repeat")',
    kinds.DeviceStage: "put it at the end of the chain, after mix()",
}


class Mix(MixingSource):
    """Mixes the rows of several pipelines by weights. The choice is not random: among the first n rows of a
    shard, a source has its share of n to within one row (with ``weight_by="tokens"``, the longest row).

    Filters, shuffles and caches belong to the pipelines; ``sharding_filter`` comes after the mix. All sources
    must have the same columns.

    With ``batch`` in each source whole batches are mixed, each with rows of a single source, and rows are
    read as batches below. Sources that also collate may have other columns each.

    Args:
        sources: pipelines by name; errors and checkpoints use the names.
        weights: a number for each source; 0 leaves it out. By default, the sources' numbers of rows.
        weight_by: "rows" or "tokens": the unit of shares. A batch's tokens are those of its rows,
            without padding. Tokens that ``pack``, ``truncate`` or ``pad_collate`` cut off do not count.
        column: with ``weight_by="tokens"``, a column of lists or of token counts.
        temperature: T, instead of ``weights``: shares are in proportion to ``size ** (1 / T)``.
        max_epochs: how often a source may be read in an epoch of the mix, by name or for all. Its share then
            goes to the others. More than 1 needs ``weights``, or another ``stop``.
        stop: where an epoch of the mix ends, in each shard:

            - "all_exhausted": when each source was read once, and the others have their shares beside the
              last one; shorter sources start again. Without weights each row comes once.
            - "first_exhausted": when the first source ends (with its ``max_epochs``), and the others have
              their shares beside it.
            - "repeat": never, as with ``repeat()``.
        schedule: a list of ``(draws, weights)``: new weights after so many rows (or tokens) of an epoch, over
            all shards. ``weights`` hold until the first.
        interpolation: of the schedule: "constant", or "linear" in 64 small steps.
        output_column: a column to add, or a key of a collated batch: the source's name.

    Raises:
        ConfigError: a weight is missing, negative or no number; a stage belongs after the mix.
        DataError: a source has no rows.
        SchemaError: the sources have different columns; names both.

    >>> import trainpipes as tp
    >>> web, code = tp.from_iterable(lambda: "abcdefg"), tp.from_iterable(lambda: "12345")
    >>> "".join(tp.mix({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3}))
    'abc1de2fg3abc4de5'
    """

    free = frozenset({"sources", "column"})

    sources: Mapping[str, Any]
    _: KW_ONLY
    weights: Mapping[str, float] | None = None
    weight_by: Literal["rows", "tokens"] = "rows"
    column: ColumnName = "input_ids"
    temperature: float | None = None
    max_epochs: Mapping[str, int | None] | int | None = None
    stop: Stop = "all_exhausted"
    schedule: Sequence[tuple[int, Mapping[str, float]]] | None = None
    interpolation: Literal["constant", "linear"] = "constant"
    output_column: ColumnName | None = None

    def check(self) -> None:
        is_dict = isinstance(self.sources, Mapping) and self.sources
        self._require(is_dict, "sources", "a dict of pipelines by name, one or more")
        self._set(sources=dict(self.sources))
        for name, pipeline in self.sources.items():
            is_name = isinstance(name, str) and name
            require(is_name, "mix(sources)", "a dict whose keys are strings", name)
            _check_source(name, pipeline, self.stop)
            inner, by_tokens = pipeline.stages[0], self.weight_by == "tokens"
            if by_tokens and isinstance(inner, Mix) and inner.gives is Gives.FINISHED:
                raise errors.ConfigError(
                    f"mix(weight_by): {name!r} is a mix of finished batches, whose tokens are not "
                    'counted any more: name its sources in this mix, or leave out weight_by="tokens"'
                )
        _ = self.gives  # refuses sources that give rows beside others that give batches
        weights, schedule, limits = self._weights, self._schedule, self.limits
        good: Any = not schedule or (schedule[0][0] == 0) == (weights is None)
        self._require(good, "schedule", "a list that starts at 0, or later where weights are given")
        good = schedule or self.interpolation == "constant"
        self._require(good, "interpolation", '"constant" without a schedule')
        if self.temperature is not None:
            good = is_number(self.temperature) and self.temperature > 0
            self._require(good, "temperature", "a number above 0")
            alone = weights is None and not schedule
            self._require(alone, "temperature", "left out beside weights or a schedule")
        last = schedule[-1][1] if schedule else weights
        goes_on = any(limits[name] is None and (last is None or last[name]) for name in limits)
        rule = 'None with stop="repeat", for a source at least that has a weight at the end'
        self._require(goes_on or self.stop != "repeat", "max_epochs", rule)
        once = set(_limits(self.max_epochs, list(self.sources)).values()) <= {1, None}
        rule = "1 or None without weights, where each row comes once"
        way = "give weights too, such as each source's rows times the epochs that it shall have"
        self._require(once or not self._takes_each_once, "max_epochs", rule, way)

    @cached_property
    def _weights(self) -> dict[str, Fraction] | None:
        if self.weights is None:
            return None
        return checked_weights(self.weights, list(self.sources), "mix(weights)")

    @cached_property
    def _schedule(self) -> Schedule:
        return [] if self.schedule is None else checked_schedule(self.schedule, list(self.sources))

    @cached_property
    def limits(self) -> dict[str, int | None]:
        limits = _limits(self.max_epochs, list(self.sources))
        return dict.fromkeys(limits, 1) if self._takes_each_once else limits

    @property
    def _takes_each_once(self) -> bool:
        """Whether shares are the sources' sizes, so that all end together but for a few rows of a shard."""
        sized = self.weights is None and self.schedule is None and self.temperature in (None, 1)
        return sized and self.stop == "all_exhausted"

    def _traits(self) -> dict[str, Any]:
        batches = self.gives is not Gives.ROWS
        return super()._traits() | {"endless": self.stop == "repeat", "makes_batches": batches}

    @cached_property
    def gives(self) -> Gives:
        """What is mixed. Raises ConfigError where it is not the same of all sources."""
        given_by = {name: _gives(pipeline.stages) for name, pipeline in self.sources.items()}
        (first, gives), *others = given_by.items()
        for name, other in others:
            if other is not gives:
                raise errors.ConfigError(
                    f"mix(sources): {first!r} gives {gives.value} and {name!r} {other.value}: batch() and "
                    "collate in all sources, or in none and after mix()"
                )
        return gives

    @property
    def chains(self) -> Sequence[Sequence[Stage]]:
        return [pipeline.stages for pipeline in self.sources.values()]

    def of_chains(self, chains: Sequence[Sequence[Stage]]) -> Mix:
        pairs = zip(self.sources.items(), chains, strict=True)
        return self._replaced(sources={name: type(p)(chain) for (name, p), chain in pairs})

    # The sources

    def open(self) -> Mixture:
        return self.opened(dict.fromkeys(self.sources))

    def opened(self, sources: Mapping[str, Any]) -> Mixture:
        plans = {}
        for name, pipeline in self.sources.items():
            with _named(name):
                stages = [stage._fresh() for stage in pipeline.stages]
                path = name if self._inputs is None else self._inputs.name_of(name)
                plans[name] = plan = Plan.of(stages, sources[name], name=path)
                if 0 in (plan.inputs.epoch_rows, rows_of(plan)):
                    chain_text = " > ".join(map(str, plan.chain.stages))
                    raise errors.DataError(f"{chain_text} gives no rows: leave it out of the mix")
        return Mixture(self, plans)

    def parts(self, mixed: MixedInputs, shard: kinds.ShardStage | None) -> dict[str, Inputs]:
        shards = 1 if shard is None else shard.num_shards
        above: list[Stage] = [] if shard is None else [shard._replaced(tail="even")]
        mixture = mixed.source
        assert isinstance(mixture, Mixture)
        parts: dict[str, Inputs] = {}
        columns = CommonColumns(self)
        for name, pipeline in sorted(self.sources.items()):
            alike = [] if self.gives is Gives.FINISHED else [Alike(columns, name)]
            with _named(name):
                stages = [*pipeline.stages, *alike, *above, kinds.RepeatStage()]
                stages = [stage._fresh() for stage in stages]
                source, path = mixture.plans[name].inputs.source, mixed.name_of(name)
                parts[name] = part = Inputs(arrange(stages), source, name=path)
            if alike:
                steps = part.chain.steps
                below = next(n for n, stage in enumerate(steps) if isinstance(stage, Alike))
                columns.parts[name] = part, kinds.without(steps[:below], kinds.BatchingStage)
            size = mixture.sizes[name]
            if self.stop == "first_exhausted" and (size or math.inf) < shards:
                raise errors.DataError(
                    f"{self}: source {name!r} has {size} {self.gives.unit}, so that some of {shards} shards "
                    'have none: lower num_shards in sharding_filter(), or take mix(stop="all_exhausted")'
                )
        return parts

    def migrate(self, saved: dict[str, Any], now: dict[str, Any], position: Position) -> None:
        before, after = saved["stages"][0], now["stages"][0]
        as_written = {key: value for key, value in before.items() if key != NEW_WEIGHTS}
        if before["stage"] != "mix" or as_written == after:
            return
        for name in sorted(before["sources"].keys() & after["sources"].keys()):
            _same(
                f"data/sources/{name}",
                *(identity["data"]["sources"][name] for identity in (saved, now)),
            )
            _same(f"stages/mix/sources/{name}", *(m["sources"][name] for m in (before, after)))
        # Under "repeat", epochs are numbered otherwise.
        stop = ["stop"] if "repeat" in (before.get("stop"), after["stop"]) else []
        for option in (*KEPT, *stop):
            _same(f"stages/mix/{option}", before.get(option), after.get(option))
        for shard, cursor in position.cursors.items():
            position.cursors[shard] = cursor = without_shares(cursor, shard)
            place = innermost(cursor)
            if place.get("sources"):
                place["sources"] = {
                    name: source_place
                    for name, source_place in place["sources"].items()
                    if name in after["sources"]
                }
        saved["data"], saved["stages"][0] = now["data"], after

    # Weights

    def reweighed(self, weights: Mapping[str, Any]) -> Mix:
        """This mix with other weights; texts are fractions."""
        exact = {name: Fraction(w) if isinstance(w, str) else w for name, w in weights.items()}
        return self._replaced(weights=exact)

    def steps(self, sizes: Mapping[str, int | None]) -> tuple[list[int], list[tuple[int, ...]]]:
        """Where steps begin, and the whole weights of each, in the order of the names."""
        points = list(self._schedule)
        if not points or points[0][0] > 0:
            points.insert(0, (0, self._weights or self._by_size(sizes)))
        steps = steps_of(points, self.interpolation == "linear")
        weights = [[step[name] for name in sorted(self.sources)] for _, step in steps]
        leaves = any(limit is not None for limit in self.limits.values())
        ends = (
            self.stop == "first_exhausted" or self._takes_each_once
        )  # no share changes before the end
        total = common_total(weights, leaves and not ends)
        return [start for start, _ in steps], [whole_weights(w, total) for w in weights]

    def _by_size(self, sizes: Mapping[str, int | None]) -> dict[str, Fraction]:
        counted = {name: size for name, size in sizes.items() if size is not None}
        unknown = [name for name in sizes if name not in counted]
        if self.weight_by == "tokens" or unknown:
            unit = self.gives.unit
            lacking = f"{unit} {unknown[0]!r} has" if unknown else "tokens the sources have"
            raise errors.ConfigError(
                f"mix() without weights takes the sources' numbers of {unit}, and how many {lacking} is "
                f"not known in advance: give weights={{{', '.join(f'{name!r}: ...' for name in sizes)}}}"
            )
        return by_size(counted, self.temperature)

    # The record

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if self.weight_by == "tokens":
            identity["weight_by"] = f"tokens of {self.column}"
        plans = self._inputs.source.plans.items()
        sources = {name: json.loads(plan.identity)["stages"] for name, plan in plans}
        return {**identity, "sources": sources}

    def __repr__(self) -> str:
        shown = []
        for name, pipeline in self.sources.items():
            text = ".".join(map(repr, pipeline.stages))
            shown.append(f"{name!r}: {text if len(text) <= 60 else text[:56] + ' ...'}")
        options = [
            f"{field.name}={show(getattr(self, field.name))}"
            for field in fields(self)
            if field.name != "sources" and getattr(self, field.name) != field.default
        ]
        return f"mix({', '.join(['{' + ', '.join(shown) + '}', *options])})"


def _limits(max_epochs: Any, names: Sequence[str]) -> dict[str, int | None]:
    if not isinstance(max_epochs, Mapping):
        max_epochs = dict.fromkeys(names, max_epochs)
    option, known = "mix(max_epochs)", f"names of sources ({', '.join(names)})"
    for name, limit in max_epochs.items():
        require(name in names, option, known, name)
        if limit is not None:
            whole_number(limit, 1, option, "times that a source is gone through, or None")
    return {name: max_epochs.get(name) for name in names}


def _gives(stages: Sequence[Stage]) -> Gives:
    opener, *later = stages
    gives = opener.gives if isinstance(opener, Mix) else Gives.ROWS
    for stage in later:
        batches = isinstance(stage, kinds.BatchingStage)
        if gives is Gives.ROWS:
            gives = Gives.BATCHES if batches else gives
        elif batches or isinstance(stage, kinds.FinishingStage) or stage.traits.per_row:
            gives = Gives.FINISHED
    return gives


def _check_source(name: str, pipeline: Any, stop: str) -> None:
    option = f"mix(sources): {name!r}"
    good, rule = is_pipeline(pipeline), "a pipeline, such as list_files(...).read_parquet()"
    require(good, option, rule, pipeline, "" if good else instead(pipeline))
    if getattr(pipeline, "_ranks", None) is not None:
        raise errors.ConfigError(f"{option} is distributed(): put that after mix()")
    opener, *_ = stages = pipeline.stages
    for stage in stages:
        for kind, way in _ELSEWHERE.items():
            if isinstance(stage, kind):
                raise errors.ConfigError(f"{option} has {stage}: {way}")
    if opener.traits.makes_batches and not isinstance(opener, Mix):
        raise errors.ConfigError(
            f"{option} gives batches that are Python objects ({opener}): mix rows, and batch() them in "
            "each source or after mix()"
        )
    if opener.traits.endless and stop != "repeat":
        raise errors.ConfigError(
            f"{option} is a mix without an end, and stop={stop!r} would wait for it: use "
            'stop="repeat" here, or another stop there'
        )


def _same(path: str, saved: Any, now: Any) -> None:
    difference = first_difference(saved, now, path)
    if difference is not None:
        where, old, new = difference
        raise errors.StateError(
            f"{cut(where)}: saved {said(old)}, now {said(new)}; allow_changes=['mix'] covers sources that "
            "come and go, weights, schedule and max_epochs, and not this: give a changed source a new name, "
            "by which it starts at its beginning, and leave the rest as it was"
        )


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except errors.TrainpipesError as error:
        error.message = f"mix(sources): {name!r}: {error.message}"
        raise
