"""Whether two training runs saw the same batches and had the same losses.

Compares the logs that training scripts write: a line a step, with its number, a hash of its batch and
its loss.
"""

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
        repeated: places in the other run with a batch that it had more often than the reference.
        changed: places in the other run with a batch that the reference never had.
        moved: places at which the batches differ, though both are in both logs.
        losses: places at which the batches are the same and the losses are not, to the last bit.
        misnumbered: places in the other run that have another number than the reference's.
    """

    compared: int
    lost: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    losses: tuple[int, ...] = ()
    misnumbered: tuple[int, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether there was something to compare, and nothing differs."""
        return self.compared > 0 and not any(places for _, places in self._found())

    def _found(self) -> list[tuple[str, tuple[int, ...]]]:
        return [
            ("lost", self.lost),
            ("repeated", self.repeated),
            ("changed", self.changed),
            ("out of place", self.moved),
            ("with another loss", self.losses),
            ("with another number", self.misnumbered),
        ]

    def __str__(self) -> str:
        parts = []
        for number, (what, places) in enumerate(self._found()):
            where = f" (first at {places[0]})" if places else ""
            if places or number < 3:
                parts.append(f"{len(places)} {what}{where}")
        return f"{self.compared} batches compared: " + ", ".join(parts)


def compare(reference: Sequence[Step], other: Sequence[Step]) -> Comparison:
    """How ``other`` differs from ``reference``.

    >>> a, b, c = Step(1, "a", 3.0), Step(2, "b", 2.0), Step(3, "c", 1.0)
    >>> compare([a, b, c], [a, b, c]).identical
    True
    >>> print(compare([a, b], [a, a]))  # doctest: +NORMALIZE_WHITESPACE
    2 batches compared: 1 lost (first at 2), 1 repeated (first at 2), 0 changed,
    1 with another number (first at 2)
    """
    had, has = Counter(s.batch for s in reference), Counter(s.batch for s in other)
    lost = _beyond(reference, has)
    more = _beyond(other, had)
    pairs = list(enumerate(zip(reference, other, strict=False), start=1))
    odd = {*lost, *more}
    return Comparison(
        compared=len(pairs),
        lost=tuple(lost),
        repeated=tuple(place for place in more if other[place - 1].batch in had),
        changed=tuple(place for place in more if other[place - 1].batch not in had),
        moved=tuple(p for p, (a, b) in pairs if a.batch != b.batch and p not in odd),
        losses=tuple(
            p for p, (a, b) in pairs if a.batch == b.batch and a.loss.hex() != b.loss.hex()
        ),
        misnumbered=tuple(p for p, (a, b) in pairs if a.number != b.number),
    )


def _beyond(steps: Sequence[Step], counts: Counter[str]) -> list[int]:
    """Places of batches that come more often than ``counts`` says."""
    left = Counter(counts)
    places = []
    for place, step in enumerate(steps, start=1):
        if left[step.batch] > 0:
            left[step.batch] -= 1
        else:
            places.append(place)
    return places
