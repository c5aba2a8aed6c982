"""``shuffle``: another order every epoch, within a buffer of rows."""

from __future__ import annotations

from dataclasses import KW_ONLY
from functools import cached_property
from typing import Any, Literal

from trainpipes._internal.checks import whole_number
from trainpipes.errors import ConfigError
from trainpipes.kinds.stage_kinds import OrderStage
from trainpipes.samplers import RandomSampler

__all__ = ["Shuffle"]


class Shuffle(OrderStage):
    """Shuffles the order of row groups, and rows within windows.

    In: rows. Out: the same rows in another order, a new one every epoch, the same for the same
    seed in any process and on any topology. Cursor: the window and the row within it: no rows, no
    random state; a resume reads that window again. Costs memory for a window of
    ``buffer_size`` to ``2 * buffer_size`` rows for each open span, and about 60 ns a row for the permutation.

    Every micro-batch is drawn from at least ``buffer_size`` rows, or from all where there are
    fewer. A file of one huge row group is shuffled within windows of consecutive rows.

    With ``scope="global"`` the order is a true permutation of all rows, for sources that can be read by
    row number: ``from_dataset``, ``from_arrow``, ``from_tensors``, ``from_memmap``. It holds no rows, only
    up to 65,536 row numbers of 8 bytes, and costs about 30 ns a row. Rows are then read one by one, which
    is slow on a spinning disk. The order is the same for any ``num_shards``.

    Args:
        buffer_size: the fewest rows that are mixed with each other.
        seed: for the order. Global seeds are neither read nor changed.
        max_bytes: the most memory for the pipeline in one process, estimated from the file footers: two
            thirds for windows, the rest for what is read and made ahead. Where rows are large it makes
            windows smaller than ``buffer_size``. 1 GiB if left out. It shapes the order, so a resume needs
            the same value.
        scope: "buffer", or "global" for all rows at once, without a buffer.

    >>> import trainpipes as tp
    >>> pipe = tp.from_iterable(lambda: range(6)).shuffle(6, seed=0)
    >>> list(pipe), list(pipe)
    ([5, 0, 4, 2, 1, 3], [5, 0, 1, 2, 4, 3])
    """

    buffer_size: int = 40_960
    _: KW_ONLY
    seed: int = 0
    max_bytes: int = 1 << 30
    scope: Literal["buffer", "global"] = "buffer"

    def check(self) -> None:
        whole_number(self.buffer_size, 1, "shuffle(buffer_size)", "rows to mix with each other")
        whole_number(self.seed, None, "shuffle(seed)", "a seed")
        whole_number(self.max_bytes, 1, "shuffle(max_bytes)", "bytes for all windows")
        if self.scope == "global" and (self.buffer_size, self.max_bytes) != (40_960, 1 << 30):
            raise ConfigError(
                'shuffle(scope="global") has no buffer: leave buffer_size and max_bytes out, got '
                f"{self.buffer_size!r} and {self.max_bytes!r}"
            )

    @cached_property
    def order(self) -> RandomSampler | None:
        """The order of all rows; None where they are shuffled within a buffer."""
        return RandomSampler(seed=self.seed) if self.scope == "global" else None

    @property
    def resolved_options(self) -> dict[str, Any]:
        if self.scope == "global":
            return {**self.options, "buffer_size": None, "max_bytes": None}
        return self.options

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if self.order is not None:
            del identity["buffer_size"], identity["max_bytes"]
        return identity
