"""Numbers that follow from a seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

__all__ = ["Draws"]


class Draws:
    """Numbers drawn one after the other, the same with every version of Python: SplitMix64, of a seed."""

    def __init__(self, seed: int) -> None:
        first = sha256(f"chain {seed}".encode()).digest()  # else neighbours draw the same, shifted
        self._state = int.from_bytes(first[:8], "big")

    def _bits(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) % 2**64
        z = self._state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    def below(self, count: int) -> int:
        return self._bits() % count

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent

    def pick(self, values: Sequence[Any]) -> Any:
        return values[self.below(len(values))]

    def weighted(self, choices: Sequence[tuple[int, Any]]) -> Any:
        left = self.below(sum(weight for weight, _ in choices))
        for weight, value in choices:
            left -= weight
            if left < 0:
                return value
        raise AssertionError

    def some(self, values: Sequence[Any], count: int) -> list[Any]:
        """So many of them, in their order."""
        left = list(range(len(values)))
        while len(left) > count:
            left.pop(self.below(len(left)))
        return [values[i] for i in left]
