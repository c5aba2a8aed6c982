"""Whether two training runs saw the same batches and had the same losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trainpipes_recipes.demo.logged import Step

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """How a run differs from a reference. Steps are named by their place in the log, from 1.

    Args:
        compared: places at which both logs have a step.
        lost: places in the reference whose batch the other run never had (or not as often).
        more: places in the other run whose batch the reference never had (or not as often).
        differs: places at which number, batch or loss is another one, to the last bit.
    """

    compared: int
    lost: tuple[int, ...] = ()
    more: tuple[int, ...] = ()
    differs: tuple[int, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether there was something to compare, and nothing differs."""
        return self.compared > 0 and not (self.lost or self.more or self.differs)

    def __str__(self) -> str:
        found = {"lost": self.lost, "repeated or changed": self.more, "different": self.differs}
        parts = [
            f"{len(places)} {what}" + (f" (first at {places[0]})" if places else "")
            for what, places in found.items()
        ]
        return f"{self.compared} batches compared: " + ", ".join(parts)


def compare(reference: Sequence[Step], other: Sequence[Step]) -> Comparison:
    """How ``other`` differs from ``reference``.

    >>> a, b, c = Step(1, "a", 3.0), Step(2, "b", 2.0), Step(3, "c", 1.0)
    >>> compare([a, b, c], [a, b, c]).identical
    True
    >>> print(compare([a, b], [a, a]))
    2 batches compared: 1 lost (first at 2), 1 repeated or changed (first at 2), 1 different (first at 2)
    """
    pairs = list(enumerate(zip(reference, other, strict=False), start=1))
    differs = tuple(place for place, (one, two) in pairs if one != two)
    return Comparison(len(pairs), _beyond(reference, other), _beyond(other, reference), differs)


def _beyond(steps: Sequence[Step], others: Sequence[Step]) -> tuple[int, ...]:
    """Places of batches that come more often than in ``others``."""
    left, places = Counter(step.batch for step in others), []
    for place, step in enumerate(steps, start=1):
        if left[step.batch] > 0:
            left[step.batch] -= 1
        else:
            places.append(place)
    return tuple(places)
