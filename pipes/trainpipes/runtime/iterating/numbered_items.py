"""Items with who they are: number and rows, for ``Loader(with_provenance=True)`` and ``locate``.

What a consumer gives travels with that through all that takes items ahead; ``KnownLast``, outermost, gives
the bare items and keeps what is known of the last one. Used by the thread that iterates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from trainpipes.kinds.stage_kinds import PlaceStage
from trainpipes.left_out_batches import LeftOutBatches
from trainpipes.runtime.iterating.delivered_state import ConsumerState, ItemIterator
from trainpipes.runtime.iterating.provenance import Provenance
from trainpipes.runtime.planning.inputs import Inputs
from trainpipes.runtime.shards.items import Items
from trainpipes.runtime.shards.known_items import ItemRows
from trainpipes.runtime.shards.shard_iterator import ENDED
from trainpipes.state import Position

__all__ = ["KnownLast", "NumberedItem", "NumberedItems", "PlaceWithin"]


class NumberedItem(NamedTuple):
    """An item, and who it is.

    Args:
        item: as it is given.
        rows: which it is made of.
        epoch: the pass.
        m: its number in the whole sequence of that.
    """

    item: Any
    rows: ItemRows
    epoch: int
    m: int

    def provenance(self, inputs: Inputs) -> Provenance:
        """Where its rows stand."""
        return Provenance(self.epoch, self.m, self.rows, inputs)


class NumberedItems:
    """Items of one consumer, each as a ``NumberedItem``.

    Args:
        items: with their rows.
        position: where the pass starts.
    """

    def __init__(self, items: Items, position: Position) -> None:
        self._items = items
        self._epoch = position.epoch
        self._left_out = LeftOutBatches.of(position)
        self.work_ahead = items.work_ahead
        self.make_ahead = items.make_ahead
        self.cursor_text = items.cursor_text
        self.close = items.close

    def take(self, m: int) -> Any:
        """Micro-batch ``m``, or ENDED if its shard has no more."""
        found = self._items.take(m)
        if found is ENDED:
            return ENDED
        number = self._left_out.number(m)
        return NumberedItem(found.item, found.rows, self._epoch, number)


class PlaceWithin:
    """Places items that are known.

    Args:
        stage: that places items.
    """

    def __init__(self, stage: PlaceStage) -> None:
        self._stage = stage
        self.ahead = stage.ahead

    def place(self, known: NumberedItem) -> NumberedItem:
        """A known item where it is to lie."""
        return known._replace(item=self._stage.place(known.item))

    def begun(self, known: NumberedItem) -> Callable[[], NumberedItem]:
        """Begin to place one; what is returned gives it."""
        ready = self._stage.begun(known.item)
        return lambda: known._replace(item=ready())


class KnownLast:
    """Gives bare items, and keeps who the last one was.

    Args:
        source: gives them as ``NumberedItem``s.

    Attributes:
        last: the one given last, without the item; None where none was.
    """

    def __init__(self, source: ItemIterator) -> None:
        self.source = source
        self.last: NumberedItem | None = None

    def __next__(self) -> Any:
        found = next(self.source)
        self.last = found._replace(item=None)
        return found.item

    def state(self) -> ConsumerState:
        """The state after the last item given."""
        return self.source.state()

    def close(self) -> None:
        """Let threads and worker processes go. What is known stays."""
        self.source.close()
