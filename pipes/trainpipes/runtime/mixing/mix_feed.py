"""Several pipelines read side by side: each shard takes the next row of the one whose turn it is.

A shard of the mix has the same shard of every source, each with its chain, its windows and its epochs, which
go on for ever. A run is made of stretches in which no source runs out of the rows that it has ready; between
them more are read, and it is seen which sources have been gone through. The rows of a run are gathered
source by source and put in order at once.

The cursor: rows drawn in this epoch of the mix, how far each source is ahead, and each source's own cursor
at its next row. So a resume reads no row that was used.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np

from trainpipes.errors import DataError, StateError
from trainpipes.fair_queue import by_rows, by_tokens, phases_of, whole_weights
from trainpipes.order import IntArray, slots_before
from trainpipes.runtime.mixing.mix_columns import with_names
from trainpipes.runtime.mixing.mix_part import Drawn, Part, Piece, Stretch, add_piece, moved_on
from trainpipes.runtime.rows.block import Block
from trainpipes.runtime.run import Cursors, Run
from trainpipes.runtime.shards.chains import Chains

if TYPE_CHECKING:
    from trainpipes.runtime.mixing.mix_windows import MixWindows

__all__ = ["MixFeed"]

#: Times that each source is read on for one run, about.
FILLS = 4


class MixFeed:
    """Runs of mixed rows of one shard. See ``MixWindows.feed``."""

    def __init__(
        self,
        windows: MixWindows,
        chains: list[Chains],
        shard: int,
        state: dict[str, Any],
        rows: tuple[int, int],
        last_epoch: int | None,
        rolling: bool,
    ) -> None:
        self._windows = windows
        self._rules = rules = windows.rules
        self._chains = chains
        self._shard = shard
        self._run_rows, self._next_rows = rows
        if windows.calls_rows:
            few = max(8, windows.plan.batch_size)
            self._run_rows, self._next_rows = min(few, rows[0]), min(few, rows[1])
        self._last_epoch = last_epoch
        self._rolling = rolling
        self._phases = phases_of(shard, len(rules.names))
        self._starts = [self._own(start) for start in rules.starts]
        self._ended = False
        self._fills = 0  # times that a source was read on, for the run at hand
        self._most_fills = FILLS * len(rules.names)
        self._enter(int(state["epoch"]), state)

    def _enter(self, epoch: int, state: dict[str, Any]) -> None:
        names = self._rules.names
        self._epoch = epoch
        self._row = int(state.get("row", 0))
        self._tokens = int(state.get("tokens", 0))
        self._ahead = tuple(state.get("ahead", (0,) * len(names)))
        if len(self._ahead) != len(names):
            raise StateError(
                f"{self._rules.asker}: the state is of {len(self._ahead)} sources, the mix has {len(names)}; "
                "it was edited or is damaged: load it as it was saved"
            )
        cursors = state.get("sources", {})
        self._parts = [
            Part(self._windows, name, chains, self._shard, epoch, cursors.get(name))
            for name, chains in zip(names, self._chains, strict=True)
        ]

    def next_run(self) -> Run:
        while not self._ended:
            run = self._draw()
            if run is not None:
                return run
            if self._rolling and self._epoch != self._last_epoch:
                if not self._row:
                    raise self._dry()
                self._enter(self._epoch + 1, {})
            else:
                self._ended = True
        raise StopIteration

    def _dry(self) -> DataError:
        return DataError(
            f"{self._rules.asker}: an epoch of the mix gave shard {self._shard} nothing, since a source has "
            'no row there: lower num_shards in sharding_filter(), or mix(stop="all_exhausted")'
        )

    # Draws

    def _draw(self) -> Run | None:
        """The next run; None at the end of the mix's epoch."""
        stretches: list[Stretch] = []
        pieces: list[list[Piece]] = [[] for _ in self._parts]
        start, drawn, self._fills = self._row, 0, 0
        enough = self._windows.plan.batch_size
        # Where a source is small, it is read again and again: then runs are short.
        while drawn < self._next_rows and (self._fills < self._most_fills or drawn < enough):
            weights = self._settle()
            if weights is None:
                break
            stretch = self._stretch(weights, drawn, self._next_rows - drawn)
            stretches.append(stretch)
            counts = np.bincount(stretch.order, minlength=len(self._parts)).tolist()
            for part, count, own in zip(self._parts, counts, pieces, strict=True):
                if count:
                    add_piece(own, part, count)
                    part.used += count
            drawn += len(stretch.order)
            self._row += len(stretch.order)
        if not stretches:
            return None
        self._next_rows = self._run_rows
        base = Drawn(self._rules.names, self._epoch, start, stretches)
        order = np.concatenate([stretch.order for stretch in stretches])
        cursors = Cursors.counting(base, np.arange(drawn + 1, dtype=np.int64))
        return Run(self._gather(pieces, order), cursors)

    def _stretch(self, weights: tuple[int, ...], first: int, rows: int) -> Stretch:
        """Draws until a source has no row ready, or the schedule's next step."""
        rules, ahead, tokens = self._rules, self._ahead, self._tokens
        until = self._until()
        before = tuple(
            part.cursor() if part.made is None else (part.made, part.used, part.gone)
            for part in self._parts
        )
        if rules.lengths is None:
            most = rows if until is None else min(rows, until - self._row)
            left = [part.left for part in self._parts]
            order = by_rows(weights, ahead, self._phases, left, most)
            counts = np.bincount(order, minlength=len(weights)).tolist()
            self._ahead = moved_on(ahead, weights, counts)
            return Stretch(first, order, None, ahead, weights, 0, before)
        ready = [part.lengths[len(part.lengths) - part.left :] for part in self._parts]
        found, self._ahead = by_tokens(
            weights, ahead, self._first(weights), ready, rows,
            None if until is None else until - tokens,
        )  # fmt: skip
        order = np.array(found, dtype=np.int64)
        lengths = np.empty(len(order), dtype=np.int64)
        for i, own in enumerate(ready):
            places = np.flatnonzero(order == i)
            lengths[places] = own[: len(places)]
        self._tokens += int(lengths.sum())
        return Stretch(first, order, lengths, ahead, weights, tokens, before)

    def _first(self, weights: tuple[int, ...]) -> int | None:
        """The source of the first row of all, another one in other shards."""
        if self._tokens or self._row:
            return None
        place = phases_of(self._shard, 2)[0] * sum(weights)
        return bisect_right(np.cumsum(np.array(weights, dtype=object)).tolist(), place // 1024)

    def _gather(self, pieces: list[list[Piece]], order: IntArray) -> Block:
        """The rows of all pieces, in the order of their sources."""
        blocks = [piece.block.slice(piece.start, piece.stop) for own in pieces for piece in own]
        joined = Block.join(blocks)
        if self._rules.column is not None:
            counts = np.bincount(order, minlength=len(pieces))
            joined = with_names(joined, np.repeat(np.arange(len(pieces)), counts), self._rules)
        place = np.empty(len(order), dtype=np.int64)
        place[np.argsort(order, kind="stable")] = np.arange(len(order))
        return joined.take(place)

    # What is drawn from

    def _step(self) -> int:
        """The step of the schedule at hand."""
        drawn = self._row if self._rules.lengths is None else self._tokens
        return bisect_right(self._starts, drawn) - 1

    def _own(self, units: int) -> int:
        """Of so many units of the whole mix, this shard's."""
        shards = self._windows.plan.num_shards
        if self._rules.lengths is None:
            return slots_before(units, self._shard, shards)
        return -(-units // shards)

    def _until(self) -> int | None:
        """The shard's own unit with which the next step of the schedule begins."""
        step = self._step() + 1
        return None if step == len(self._starts) else self._starts[step]

    def _settle(self) -> tuple[int, ...] | None:
        """Have a row of each source ready, and look which are exhausted: the weights for what comes
        next, or None where the mix's epoch ends."""
        rules = self._rules
        while True:
            own = rules.steps[self._step()]
            active = [i for i, w in enumerate(own) if w and not self._parts[i].gone]
            left = False
            for i in active:
                part, most = self._parts[i], rules.repetitions[i]
                if not part.left:
                    part.fill()
                    self._fills += 1
                if rules.stop == "first_exhausted":
                    if part.passes >= (most or 1):
                        return None
                elif most is not None and part.passes >= most:
                    part.gone = left = True
            if left:
                continue
            if not active and rules.stop == "repeat":
                raise DataError(
                    f"{rules.asker}: all sources that have a weight here were gone through as often as "
                    "repetitions lets them: leave one without a limit"
                )
            if not active or (rules.stop == "all_exhausted" and self._all_exhausted()):
                return None
            if len(active) == sum(w > 0 for w in own):
                return own
            return whole_weights([own[i] if i in active else 0 for i in range(len(own))], sum(own))

    def _all_exhausted(self) -> bool:
        later = self._rules.steps[self._step() :]
        wanted = [i for i, column in enumerate(zip(*later, strict=True)) if any(column)]
        return all(self._parts[i].gone or self._parts[i].passes > 0 for i in wanted)
