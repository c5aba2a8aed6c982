"""A value in a column that a stage cannot use."""

from __future__ import annotations


class BadCell(Exception):
    """A value that a column cannot have.

    Args:
        row: which, within the column; None if the column's type is at fault.
        problem: what is wrong, and the way out.
    """

    def __init__(self, row: int | None, problem: str) -> None:
        super().__init__(problem)
        self.row = row
