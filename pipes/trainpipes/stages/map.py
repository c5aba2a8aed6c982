"""``map``: a Python function on each row, or on each item above a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchdata.nodes import BaseNode

from trainpipes.errors import ConfigError, DataError
from trainpipes.runtime.run import Run
from trainpipes.runtime.stage import Stage
from trainpipes.stages.blame import each

__all__ = ["Map"]


class Map(Stage):
    """Applies a function to each item.

    In: rows, or what stands above a batch: lists of rows, collated batches. Out: what the function
    returns; None is refused (to drop rows use ``filter``). Cursor: none of its own. Costs a Python
    call an item; rows come as dicts of Python values (about 1 us a column), so prefer
    ``map_batches`` where Arrow or NumPy can do the work.

    Args:
        source: the node below, or None as a step of a pipeline.
        fn: function of one item.
        version: names the function in checkpoints instead of its module and name: change it when
            what the function does changes.

    >>> import trainpipes as tp
    >>> list(tp.from_iterable(lambda: range(3)).map(lambda x: x * 10))
    [0, 10, 20]
    """

    role = "rows"
    per_row = True

    def __init__(
        self,
        source: BaseNode[Any] | None = None,
        fn: Callable[[Any], Any] | None = None,
        *,
        version: str | None = None,
    ) -> None:
        if not callable(fn):
            raise ConfigError(f"map(fn) takes a function of one row, got {fn!r}")
        super().__init__(source, fn=fn, version=version)
        self._fn = fn

    def identity(self) -> dict[str, Any]:
        return named(super().identity(), self.options["version"])

    def process(self, run: Run) -> Run:
        items = each(self, self._apply, run)
        if run.items is None and run.bounds is None:
            return run.with_block(run.block.with_data(items))
        return run.with_items(items)

    def _apply(self, item: Any) -> Any:
        result = self._fn(item)
        if result is None:
            raise DataError(
                f"{self}: the function returned None; it returns the row to go on with (drop rows "
                "with filter())"
            )
        return result


def named(identity: dict[str, Any], version: str | None) -> dict[str, Any]:
    """An identity in which ``version``, if given, stands for the function."""
    if version is not None:
        identity["fn"] = f"version {version}"
        identity.pop("version")
    return identity
