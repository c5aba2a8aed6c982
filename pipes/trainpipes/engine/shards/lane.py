"""A shard, or one of the lanes that take turns at it: its runs, epoch after epoch, and their items."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, MutableSequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from trainpipes._internal import activity
from trainpipes.columns.run import Cursors, Run, Unroll, innermost
from trainpipes.columns.tensor_rows import LazyBatches
from trainpipes.engine.calling import Submitted, open_stages, stopped
from trainpipes.engine.planning.chain import without_shares
from trainpipes.engine.planning.plan import Plan
from trainpipes.engine.reading.windows import MixedWindows
from trainpipes.engine.shards.shard_rows import Shards, open_rows, own_items
from trainpipes.errors import DataError
from trainpipes.interfaces.held import check_shard
from trainpipes.interfaces.read_columns import is_about_a_row, say_where
from trainpipes.interfaces.stage_kinds import CountingStage
from trainpipes.order.layout import WindowKey, slots_before
from trainpipes.state.cursor import cursor_text

#: What a lane gives past its last item.
ENDED: Any = object()
#: What stands for a batch of another consumer.
PASSED = "passed over"


class RunItems(NamedTuple):
    """The items of a run, of which ``first`` to ``last`` are given, and the position before each."""

    items: MutableSequence[Any]
    cursors: Cursors
    first: int
    last: int


class Lane:
    """The items of one shard, or of one of the lanes that take turns at it, epoch after epoch. One thread
    makes the next run, while another takes the items of the run before. Whoever meets an error opens
    the lane anew.

    Args:
        cursor: where it begins; at the start of the pass by default.
        singly: whether runs are as small as can be.
    """

    def __init__(
        self,
        shards: Shards,
        shard: int,
        pass_number: int,
        cursor: dict[str, Any] | None = None,
        unroll: Unroll = Run.unroll,
        singly: bool = False,
    ) -> None:
        # Set once: the shards of the process, the plan, the shard's number, and how a run becomes items.
        self._shards, self._plan = shards, shards.plan
        self._shard, self._pass_number = shard, pass_number
        self._unroll = unroll
        self.singly = singly
        start = dict(cursor or {})
        #: Items of the pass that were taken (``advance``), and that are in runs made so far (``make``).
        self._delivered = self._given_out = int(start.pop("delivered", 0))
        #: Whether all items are taken; set by ``go_to``.
        self.ended = bool(start.pop("ended", False))
        chain = self._plan.chain
        #: How many items come before each change of a mix's weights; set once.
        self._changes = [
            slots_before(new.batch, shard, chain.num_shards) for new in self._plan.new_weights
        ]
        #: Which of the new weights the opened runs have; set by ``_change_weights``.
        self._weights: int | None = None
        self._first_epoch = first = chain.first_epoch(pass_number)
        self._endless = chain.endless and not self._plan.counts.known
        starts = not start or chain.rolling
        self._enter(first if starts else innermost(start)["epoch"], start or None)
        #: The last epoch that gave an item; set by ``next_run``.
        self._given = self.epoch if start else self.epoch - 1
        # The run whose items are taken, set by ``go_to``: items, positions, the next item's number
        # and the items left, which ``advance`` counts.
        self._items: MutableSequence[Any] = []
        self._cursors: Cursors | None = None
        self._k = 0
        self.left = 0
        #: The position while there is no run; set by ``go_to`` at the end.
        self._stands = dict(self._start)

    # Runs

    def _enter(self, epoch: int, cursor: dict[str, Any] | None = None) -> None:
        """Begin an epoch; sets the fields of the epoch that runs are made of."""
        plan, self.epoch = self._plan, epoch
        slot = plan.counts.slot(self._shard, epoch, self._first_epoch)
        self._skip, self._until = plan.counts.chunks(slot)
        if cursor is None:
            # Without counts, items to skip are made and dropped.
            at = self._skip if plan.counted else 0
            cursor = {**plan.counts.start(slot, at), "at": at}
            stream = self._shards.windows.start(epoch)
            if stream:
                cursor["stream"] = stream
            if self._given_out and plan.chain.takes_turns:
                cursor["turn"] = [self._given_out, self._first_epoch]
        #: Where runs are opened; ``_change_weights`` moves it on.
        self._start = cursor
        #: Batches of the slot before the next run; ``next_run`` counts them.
        self._at = int(cursor["at"])
        #: Positions of the epoch's last run, and where it ends; set by ``next_run``.
        self._made: tuple[Cursors, int] | None = None
        #: The open stages; set by ``_open``, None where they are to be opened anew.
        self._opened: tuple[Iterator[Run], Submitted | None] | None = None
        self._expect(cursor)

    def _expect(self, cursor: dict[str, Any]) -> None:
        """Keep the windows that this shard needs."""
        windows, place = self._shards.windows, innermost(cursor)
        if isinstance(windows, MixedWindows):
            windows.expect(self._shard, place, self._shards.count)
            return
        span = self._plan.counts.slot(self._shard, place["epoch"], self._first_epoch).span
        key = WindowKey(place["epoch"], span, place["window"])
        windows.expect(self._shard, key, int(place["row"]))

    def next_run(self) -> tuple[Run, int, int] | None:
        """The next run with something to give: which of its items, from the first to before the last.
        None at the end. Its cursors say where the lane stands.
        """
        chain = self._plan.chain
        while True:
            run = None if self._is_over else next(self._open()[0], None)
            if run is not None:
                before = self._at
                first = min(max(0, self._skip - before), len(run))
                last = len(run) if self._until is None else min(len(run), self._until - before)
                if self._changes:
                    last = min(last, first + self._items_to_change())
                self._at = before + last
                run.cursors = run.cursors.after(before)
                self._made = run.cursors, last
                if first < last:
                    self._given = self.epoch
                    return run, first, last
                continue
            self._check_share()
            if chain.rolling or not chain.goes_on(self.epoch, self._first_epoch):
                return None
            if self._endless:
                layout = self._plan.layouts.of(self.epoch)
                check_shard(layout, self._shard, self.epoch, self._given)
            self._enter(self.epoch + 1)

    def _check_share(self) -> None:
        """Raise if an epoch under ``repeat`` gives less than this shard's share of what take() and skip()
        count: others may have more, and the shards do not wait for each other.
        """
        chain, counts = self._plan.chain, self._plan.counts
        share = self._skip if self._until is None else self._until
        shares = chain.repeat is not None and chain.num_shards > 1 and not counts.known
        if not shares or self._at >= share:
            return
        stages = " and ".join(str(s) for s in chain.stages if isinstance(s, CountingStage))
        raise DataError(
            f"{stages}: under repeat() each of the {chain.num_shards} shards must have its share, {share} "
            f"items of an epoch, got {self._at} of shard {self._shard} in epoch {self.epoch}; ask for fewer, "
            "put take() and skip() directly after the source, or leave sharding_filter() out"
        )

    @property
    def skipped(self) -> int:
        """Items of its epoch before the first that it gives."""
        return self._skip

    def begin(self) -> None:
        """Have workers of a stage begin with the next run."""
        if self._shards.has_workers and not self._is_over:
            _, submitted = self._open()
            if submitted is not None:
                submitted.begin()

    def make(self) -> RunItems | None:
        """The items of the next run; None at the end."""
        found = self.next_run()
        if found is None:
            return None
        run, first, last = found
        shards = self._plan.chain.num_shards
        start = self._shard + (self._given_out - first) * shards
        self._given_out += last - first
        numbers = range(start, start + len(run) * shards, shards)
        items = own_items(self._shards, run, numbers, first, self._unroll)
        if activity.observer is not None:
            activity.look_at(items, first)
        return RunItems(items, run.cursors, first, last)

    @property
    def _is_over(self) -> bool:
        return self._until is not None and self._at >= self._until

    def _open(self) -> tuple[Iterator[Run], Submitted | None]:
        if self._changes:
            self._change_weights()
        if self._opened is None:
            state = {key: value for key, value in self._start.items() if key != "at"}
            shards, size = self._shards, self._plan.chain.batch_size
            # First runs differ in length: one batch in the first shard's, and so on.
            first = size * (1 + self._shard % max(1, shards.run_rows // size))
            rows = (min(size, shards.run_rows),) * 2 if self.singly else (shards.run_rows, first)
            # This does not refer to the lane, which lets go of all rows when nobody else has it.
            below = partial(open_rows, shards, self._shard, rows, self._first_epoch, self._weights)
            self._opened = open_stages(shards.stages, below, state, size)
        return self._opened

    def _items_to_change(self) -> int:
        """Items up to the next change of weights."""
        later = bisect_right(self._changes, self._given_out)
        return self._changes[later] - self._given_out if later < len(self._changes) else 1 << 62

    def _change_weights(self) -> None:
        """Where a change of weights is due, let the next runs be those of the new ones."""
        weights = bisect_right(self._changes, self._given_out) - 1
        if self._opened is None:
            self._weights = None if weights < 0 else weights
        elif weights >= 0 and weights != self._weights:
            assert self._made is not None
            cursors, last = self._made
            self._enter(self.epoch, cursors.state(last))
            self._weights = weights
        if self._opened is None and self._given_out in self._changes:
            self._start = without_shares(self._start, self._shard)

    # Items

    def go_to(self, made: RunItems | None) -> None:
        """Take the items of the next run, or end."""
        if made is None:
            cursors, last = self._made or (None, 0)
            self._stands = dict(self._start) if cursors is None else cursors.state(last)
            self._cursors, self.ended = None, True
        else:
            self._items, self._cursors, self._k, last = made
            self.left = last - self._k

    def made(self) -> Any:
        """The next item of the run; ENDED where there is no run any more."""
        if not self.left:
            return ENDED
        try:
            return self._items[self._k]
        except BaseException as error:
            raise_placed(error, self._plan)

    def advance(self) -> None:
        """To the item after the next."""
        self._items[self._k] = None  # free its memory
        self._k += 1
        self.left -= 1
        self._delivered += 1

    def let_go(self) -> None:
        """Let go of all rows: no more are taken."""
        self._items, self._opened = [], None

    def late(self, ahead: int) -> list[tuple[LazyBatches, int]]:
        """The item after so many others, if it is made only when it is taken."""
        if ahead < self.left and isinstance(self._items, LazyBatches):
            return [(self._items, self._k + ahead)]
        return []

    def again(self, error: BaseException) -> Lane:
        """The lane from the last item taken on, after an error in making a run. No row is lost."""
        ours = is_about_a_row(error) and not self._plan.runs_user_code
        divisible = self._shards.run_rows > self._plan.chain.batch_size
        singly = ours and not self.singly and divisible
        return Lane(
            self._shards, self._shard, self._pass_number, self.cursor(), self._unroll, singly
        )

    def cursor(self) -> dict[str, Any]:
        position = dict(self._stands) if self._cursors is None else self._cursors.state(self._k)
        at = position.pop("at")
        cursor = {**position, "delivered": self._delivered, "at": at}
        if self.ended:
            cursor["ended"] = True
        return cursor

    def cursor_text(self) -> str:
        try:
            return cursor_text(self.cursor(), self._shard, self._plan.tag, self._pass_number)
        except TypeError as error:
            raise DataError(
                f"get_state() of a node must give what JSON can hold, got other values: {error}; make "
                "numbers, texts, lists and dicts of them"
            ) from error


def raise_placed(error: BaseException, plan: Plan) -> NoReturn:
    if isinstance(error, StopIteration):
        cause, error = error, stopped(error)
        error.__cause__ = cause
    if isinstance(error, Exception):
        say_where(error, plan.inputs.place_of)
    raise error
