"""Values that no tensor, array or Python object can be made of, named by their row and column."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from trainpipes._internal.activity import UNROLL, doing
from trainpipes.columns.arrays import has_text, holds, is_utf8
from trainpipes.columns.block import Block
from trainpipes.errors import UnreadableError

#: Bytes of a text that a message shows.
SHOWN = 40
#: How the text of a time begins that Python has no value for.
_NANOSECONDS = "a time in nanoseconds"


class naming_bad_values(doing):
    """Around a stage's work, or where Python objects are made of Arrow values: errors name the row and
    column of a bad value, text that is not UTF-8, or a number or time that Python has none for. Nothing is
    looked at before something is raised.
    """

    __slots__ = ("_block", "_caller")

    def __init__(self, block: Block, caller: object = None) -> None:
        self._block, self._caller = block, caller
        self._what = caller or UNROLL

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._slot is not None:
            self._slot.to(self._before)
        if isinstance(error, UnreadableError):  # which was raised here, by stages within a stage
            return
        bad = _first_bad_value(self._block.data) if _is_about_values(error) else None
        if bad is None or (bad[2].startswith(_NANOSECONDS) and not _is_about_nanoseconds(error)):
            return
        caller, (number, name, said) = self._caller, bad
        problem = UnreadableError(
            f"{'' if caller is None else f'{caller}: '}column {name!r} holds {said}",
            stage=None if caller is None else str(caller),
        )
        problem._trainpipes = caller and str(caller), int(self._block.ids[number])
        raise problem from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_about_values(error: BaseException | None) -> bool:
    kinds = ValueError | ArithmeticError | pa.ArrowException
    return any(isinstance(raised, kinds) for raised in _chain(error))


def _is_about_nanoseconds(error: BaseException | None) -> bool:
    """Whether a time was to become Python's: as a number it is none that is bad."""
    return any(str(raised).startswith("Nanosecond") for raised in _chain(error))


def _first_bad_value(data: Any) -> tuple[int, str, str] | None:
    """The first row with a value that Python lacks, its column, and the value in words."""
    places: list[tuple[int, str, str]] = []
    for name in data.column_names if isinstance(data, pa.Table) else ():
        first = 0
        for chunk in data.column(name).chunks:
            bad = _bad_in(chunk)
            if bad is not None:
                places.append((first + bad[0], name, bad[1]))
                break
            first += len(chunk)
    return min(places, key=lambda place: place[0], default=None)


def _bad_in(array: Any) -> tuple[int, str] | None:
    text = has_text(array.type) and not is_utf8(array)
    if not text and not holds(array.type, pa.types.is_temporal, pa.types.is_decimal):
        return None
    for row in range(len(array)):  # of nested columns, Arrow has looked at others, too
        try:
            array[row].as_py()
        except UnicodeDecodeError as error:
            content = bytes(error.object)
            part = content[max(0, error.start - SHOWN // 2) :][:SHOWN]
            return row, (
                f"text that is not UTF-8: {part!r}{' …' * (len(content) > SHOWN)}; write the file as UTF-8, "
                'or if it is Parquet, take read_parquet(errors="replace")'
            )
        except (ValueError, ArithmeticError) as error:
            if str(error).startswith("Nanosecond"):
                return row, (
                    f"{_NANOSECONDS}, as {array.type}, and Python has microseconds only: cast it to "
                    '"us" by with_columns() and .cast(..., safe=False), leave the column out by '
                    "columns=[...], or pip install pandas"
                )
            return row, (
                f"a value that Python has none for, as {array.type}: {str(error)[:SHOWN]}; fix the file, or "
                "leave the column out by columns=[...]"
            )
    return None


def first_bad(rows: int, fails: Callable[[int, int], bool]) -> int:
    """The first row with which ``fails``, a function of start and stop, is true.

    >>> first_bad(100, lambda start, stop: start <= 42 < stop)
    42
    """
    low, high = 0, rows  # rows up to low are good, those up to high are not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(low, middle) else (middle, high)
    return low


class BadCell(Exception):
    """A value that cannot become a tensor, an array or JSON, by its row in the block (None: the column).
    Whoever knows the stage catches it, and raises it with the stage's name.
    """

    def __init__(self, row: int | None, problem: str) -> None:
        super().__init__(problem)
        self.row = row
