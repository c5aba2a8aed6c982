from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

import numpy as np

from trainpipes._internal.checks import ColumnNames, column_names
from trainpipes._internal.locks import cached_property
from trainpipes._internal.messages import warn_once
from trainpipes.columns.run import Cursors, Run
from trainpipes.engine.planning.row_names import hash_keys
from trainpipes.errors import StateError
from trainpipes.interfaces.stage_kinds import OpenBelow, PackingStage
from trainpipes.interfaces.stateful_stage import LARGE_STATE

#: Bytes of the hash of a row.
DIGEST = 16
_SALTS = (0, 0x5851F42D4C957F2D)


class Deduplicate(PackingStage):
    """Leave out rows that have the same values in some columns as an earlier row.

    Each epoch keeps the first row of each shard, so that duplicates in different shards stay: without
    ``sharding_filter``, or with ``num_shards=1``, none does. For each row that is kept, the memory of
    the process and the state of each shard hold a hash of 16 bytes (about 150 bytes of memory).

    Args:
        columns: a column or several: texts, bytes, numbers or times.

    Raises:
        DataError: a value is null.
        SchemaError: there is no such column, or its values are lists or structs.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"url": ["a", "b", "a", "c"], "n": [0, 1, 2, 3]}))
    >>> [row["n"] for row in rows.deduplicate("url")]
    [0, 1, 3]
    """

    columns: ColumnNames

    @cached_property
    def _names(self) -> list[str]:
        return column_names(self.columns, f"{self.name}(columns)")

    def open(self, below: OpenBelow, at: dict[str, Any]) -> Iterator[Run]:
        seen = None
        if "below" in at:
            at, seen = at["below"], _Seen(self, int(at["of"]), self._read(at["seen"]))
        return self._kept(below(at), seen)

    def _kept(self, below: Iterator[Run], seen: _Seen | None) -> Iterator[Run]:
        for run in below:
            epoch = run.cursors.place(0).get("epoch", 0)
            if seen is None or seen.epoch != epoch:
                seen = _Seen(self, epoch)
            yield seen.first_of_each(run)

    def digests(self, run: Run) -> list[bytes]:
        """A hash of 16 bytes of each row's values."""
        halves = [hash_keys(run.block, self._names, self, salt) for salt in _SALTS]
        both = np.stack(halves, axis=1).astype("<u8", copy=False)
        return both.view(f"V{DIGEST}").reshape(-1).tolist()

    def _read(self, text: Any) -> bytes:
        try:
            hashes = base64.b64decode(text, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise StateError(f"{self}: its state is damaged: {error}") from error
        if len(hashes) % DIGEST:
            raise StateError(
                f"{self}: its state is damaged: {len(hashes)} bytes are no whole hashes"
            )
        return hashes


class _Seen:
    """The rows of a shard that were kept in an epoch, in order: those before a position are the first
    of them, so that any position can still be asked for.
    """

    def __init__(self, stage: Deduplicate, epoch: int, hashes: bytes = b"") -> None:
        self.epoch, self._stage, self._kept = epoch, stage, bytearray(hashes)
        self._known = {hashes[k : k + DIGEST] for k in range(0, len(hashes), DIGEST)}

    def first_of_each(self, run: Run) -> Run:
        digests, before = self._stage.digests(run), len(self._known)
        first = dict(zip(reversed(digests), reversed(range(len(digests))), strict=True))
        new = sorted(map(first.__getitem__, {*first}.difference(self._known)))
        self._known.update(first)
        self._kept += b"".join(map(digests.__getitem__, new))
        first_rows = run.pick(np.array(new, dtype=np.int64))
        rows = np.arange(len(new) + 1, dtype=np.int64)
        return Run(
            first_rows.block, Cursors.counting(_Kept(self, before, first_rows.cursors), rows)
        )

    def state(self, rows: int, below: dict[str, Any]) -> dict[str, Any]:
        seen = base64.b64encode(self._kept[: rows * DIGEST]).decode()
        if len(seen) > LARGE_STATE:
            way = "put it before fewer rows, or remove duplicates once and write the rows to files"
            warn_once(f"{self._stage}: its state has {len(seen):,} bytes for a shard: {way}")
        return {"below": below, "of": self.epoch, "seen": seen}


class _Kept:
    """Positions after the rows that were kept of a run."""

    def __init__(self, seen: _Seen, before: int, below: Cursors) -> None:
        self._seen, self._before, self._below = seen, before, below

    def at(self, row: int) -> dict[str, Any]:
        return self._seen.state(self._before + row, self._below.state(row))

    def place(self, row: int) -> dict[str, Any]:
        return self._below.place(row)
