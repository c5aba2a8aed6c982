"""Which source each row of a mix is from, against what the weights say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainpipes._internal.progress import Progress
from trainpipes.columns.run import Run
from trainpipes.engine.iterating.one_pass import OnePass
from trainpipes.engine.layout import IntArray
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.topology import Topology
from trainpipes.errors import ConfigError
from trainpipes.kinds.stage import Stage
from trainpipes.kinds.stage_kinds import RunStage
from trainpipes.sources.mixed.mix_rules import MixRules
from trainpipes.sources.mixed.mixture import Mixture
from trainpipes.stages.batch import Batch
from trainpipes.state.format import Position

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MixtureShares", "mixture_shares"]

#: Rows that are looked at together where nothing makes batches of a fixed size.
LOT = 32


@dataclass(frozen=True)
class MixtureShares:
    """The sources of the first rows of a mix.

    Attributes:
        names: of the sources.
        rows: of each source.
        amounts: rows of each source, or tokens where the mix counts these.
        shares: their parts of all, 0 to 1.
        targets: what the weights say, on average over the rows that were looked at, 0 to 1.
        unit: what is counted, "rows" or "tokens".
        sources: for each row the number of its source, int64 ``[rows]``.
        sizes: for each row what it counts, int64 ``[rows]``.
        steps: where each step of the schedule begins, in units, and the shares that it says.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    amounts: tuple[int, ...]
    shares: tuple[float, ...]
    targets: tuple[float, ...]
    unit: str
    sources: IntArray = field(repr=False, compare=False)
    sizes: IntArray = field(repr=False, compare=False)
    steps: tuple[tuple[int, tuple[float, ...]], ...] = field(repr=False, compare=False)

    def __str__(self) -> str:
        wide = max(len(name) for name in ("source", *self.names))
        lines = [f"{'source':<{wide}}  {'target':>6}  {'drawn':>6}  {self.unit:>12}"]
        for name, target, share, amount in zip(
            self.names, self.targets, self.shares, self.amounts, strict=True
        ):
            lines.append(f"{name:<{wide}}  {target:>6.1%}  {share:>6.1%}  {amount:>12,}")
        return "\n".join(lines)

    __repr__ = __str__

    def plot(self, ax: Axes | None = None) -> Figure:
        """Draw the shares of the sources over the draws, with their targets as dashed lines; of more than
        seven sources, the smallest as one. A Matplotlib figure, to ``savefig``.

        Args:
            ax: axes to draw on; a new figure's if left out.

        Raises:
            MissingExtraError: Matplotlib is not installed.
        """
        from trainpipes.look.pictures.mixture import draw

        return draw(self, ax)


def mixture_shares(stages: Sequence[Stage], most: int) -> MixtureShares:
    """Look at the rows that a mix draws in an epoch, over all ranks.

    Args:
        stages: of a pipeline that begins with a mix; what stands above it changes nothing but the size of
            the micro-batches, which its shards take turns with.
        most: rows to look at.

    Raises:
        ConfigError: it begins with something else.
    """
    chain = Plan.of([stage.fresh() for stage in stages]).chain
    if not chain.mixes:
        raise ConfigError(
            f"mixture() looks at the sources of mix(...), and this pipeline begins with {stages[0]}"
        )
    shard = [] if chain.shard is None else [chain.shard.fresh()]
    kept: list[Stage] = [chain.opener.fresh(), *shard]
    cutting = next((s for s in stages if s.role == "batch" and s.options.get("batch_size")), None)
    size = LOT if cutting is None else int(cutting.options["batch_size"])
    looking = _Drawn([])
    plan = Plan.of([*kept, Batch(size), looking], quiet=True)
    mixture = plan.inputs.source
    assert isinstance(mixture, Mixture)
    looking.rules.append(mixture.rules)
    ids, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    found = 0
    walk = OnePass(plan, Topology(), Position(0, 0, plan.chain.num_shards))
    with Progress("looking at the mix", most, "rows") as progress:
        while found < most:
            try:
                own, units = next(walk)
            except StopIteration:
                break
            ids.append(own[: most - found])
            sizes.append(units[: most - found])
            found += len(own)
            progress.advance(len(ids[-1]))
    walk.close()
    return _shares(
        mixture, list(chain.opener.options["sources"]), np.concatenate(ids), np.concatenate(sizes)
    )


def _shares(
    mixture: Mixture, names: Sequence[str], ids: IntArray, sizes: IntArray
) -> MixtureShares:
    rules = mixture.rules
    sources = np.zeros(len(ids), dtype=np.int64)
    for path, places, _ in mixture.ids.split(ids):
        sources[places] = names.index(path[0])
    count = len(names)
    amounts = np.bincount(sources, weights=sizes, minlength=count)
    total = float(sizes.sum())
    steps = tuple(
        (start, tuple(weights[rules.names.index(name)] / sum(weights) for name in names))
        for start, weights in zip(rules.starts, rules.steps, strict=True)
    )
    edges = np.minimum([*rules.starts, np.inf], max(1.0, total))
    parts = np.array([after - before for before, after in pairwise(edges.tolist())])
    targets: npt.NDArray[np.float64] = parts @ np.array([w for _, w in steps]) / parts.sum()
    return MixtureShares(
        names=tuple(names),
        rows=tuple(np.bincount(sources, minlength=count).tolist()),
        amounts=tuple(round(amount) for amount in amounts.tolist()),
        shares=tuple((amounts / max(1.0, total)).tolist()),
        targets=tuple(targets.tolist()),
        unit="rows" if rules.lengths is None else "tokens",
        sources=sources,
        sizes=sizes,
        steps=steps,
    )


class _Drawn(RunStage):
    """Makes of each micro-batch the numbers of its rows, and what they count."""

    holds_data = True  # what it looks with is known only when the mix is open

    rules: list[MixRules]

    def process(self, run: Run) -> Run:
        lengths = self.rules[0].lengths
        sizes = np.ones(len(run.block), np.int64) if lengths is None else lengths(run.block)
        assert run.bounds is not None
        cuts = list(pairwise(run.bounds.tolist()))
        items: list[Any] = [(run.block.ids[a:b], sizes[a:b]) for a, b in cuts]
        return run.with_items(items)
