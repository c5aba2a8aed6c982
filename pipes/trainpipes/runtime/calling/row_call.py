"""A user's function as it is called for rows, here, in a thread or in another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainpipes.errors import DataError
from trainpipes.runtime.calling.row_random import RowKey, Words

__all__ = ["RowCall"]


class RowCall:
    """Calls a function of one item, or of an item and its generator.

    Args:
        fn: the function.
        key: whose generators it gets; None for none.
        said: the stage, as messages name it.
    """

    def __init__(self, fn: Callable[..., Any], key: RowKey | None, said: str) -> None:
        self.fn = fn
        self.key = key
        self.said = said

    def each(
        self, items: Sequence[Any], words: Words | None, note: Callable[[int], None] | None = None
    ) -> tuple[list[Any], BaseException | None]:
        """What it returns for each item, up to the first for which it raises, and what that is.

        Args:
            items: the items.
            words: of their generators.
            note: told the number of each item before it is called for it.
        """
        results: list[Any] = []
        given = None if words is None else words.tolist()
        try:
            for number, item in enumerate(items):
                if note is not None:
                    note(number)
                if self.key is None or given is None:
                    result = self.fn(item)
                else:
                    result = self.fn(item, self.key.generator(given[number]))
                if result is None:
                    raise DataError(
                        f"{self.said}: the function returned None; it returns the row to go on with (drop "
                        "rows with filter())"
                    )
                results.append(result)
        except BaseException as error:
            return results, error
        return results, None
