"""Whether rows of one value stand together, as they do in files that are sorted by a label.

A shuffle within a buffer mixes rows that are near each other, so that batches of such files hold few labels.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.columns.arrays import to_numpy
from trainpipes.look.inspection.part import Found
from trainpipes.look.inspection.sample import Sample
from trainpipes.look.inspection.texts import is_text, plain_array

__all__ = ["Clustered", "clustered_columns"]

#: Distinct values of a label, at most, and rows that each has on average, at least.
MOST_VALUES, LEAST_ROWS = 1000, 4
#: Stretches that are compared, at least, and rows of each.
LEAST_STRETCHES, STRETCH_ROWS = 4, 8
#: From 0, where stretches of rows have the values of all rows, to 1, where each has one value: rows in random
#: order are below 0.05 (measured, 64 stretches of 150 rows of 2 to 100 labels), sorted ones above 0.8.
CLUSTERED = 0.5
#: The part of row groups whose least value is their greatest one, above which they are sorted.
CONSTANT = 0.5


@dataclass(frozen=True)
class Clustered:
    """A column whose equal values stand together.

    Args:
        name: of the column.
        values: distinct ones that were seen.
        alike: the chance that two rows near each other have the same value.
        usual: the chance that any two rows have.
    """

    name: str
    values: int
    alike: float
    usual: float


def clustered_columns(found: Found, sample: Sample) -> list[Clustered]:
    """Columns of few values by which rows are sorted or clustered, the clearest first."""
    told: list[Clustered] = []
    for name in sample.names:
        one = _of_sample(sample, name) or _of_groups(found, name)
        # A class and its number are one label.
        if one is not None and replace(one, name="") not in [replace(o, name="") for o in told]:
            told.append(one)
    return sorted(told, key=lambda one: one.usual - one.alike)


def _of_groups(found: Found, name: str) -> Clustered | None:
    """By row groups that have one value each."""
    facts = found.columns.get(name)
    if facts is None or facts.groups < LEAST_STRETCHES or not 1 < len(facts.values) <= MOST_VALUES:
        return None
    if facts.constant / facts.groups < CONSTANT or len(facts.values) > facts.constant / 2:
        return None
    return Clustered(name, len(facts.values), facts.constant / facts.groups, 1 / len(facts.values))


def _of_sample(sample: Sample, name: str) -> Clustered | None:
    """By stretches of rows: how often two rows of one have the same value, and two of all."""
    counts: Counter[object] = Counter()
    same = pairs = stretches = 0
    for stretch in _stretches(sample, name):
        array = plain_array(stretch)
        if not _has_labels(array.type):
            return None
        told = pc.value_counts(array)
        own = to_numpy(told.field("counts")).astype(np.int64)
        if len(own) > MOST_VALUES:
            return None
        # By what the values are as bytes, so that text need not be UTF-8.
        keys = told.field("values")
        if is_text(keys.type):
            keys = keys.cast(pa.large_string()).view(pa.large_binary())
        counts.update(dict(zip(keys.to_pylist(), own.tolist(), strict=True)))
        rows = int(own.sum())
        same += int((own * (own - 1)).sum())
        pairs += rows * (rows - 1)
        stretches += 1
    total = sum(counts.values())
    if stretches < LEAST_STRETCHES or not 1 < len(counts) <= min(MOST_VALUES, total / LEAST_ROWS):
        return None
    usual = sum(count * (count - 1) for count in counts.values()) / (total * (total - 1))
    alike = same / pairs if pairs else 0.0
    if usual < 1 and (alike - usual) / (1 - usual) >= CLUSTERED:
        return Clustered(name, len(counts), alike, usual)
    return None


def _stretches(sample: Sample, name: str) -> list[pa.Array]:
    """A column's stretches. One that is long is cut in several."""
    whole = sample.rows // (4 * LEAST_STRETCHES)
    most = max(STRETCH_ROWS, min(256, whole))
    found = [
        chunk.slice(at, most) for chunk in sample.chunks(name) for at in range(0, len(chunk), most)
    ]
    return [array for array in found if len(array) >= STRETCH_ROWS]


def _has_labels(kind: pa.DataType) -> bool:
    """Whether values of a type may be labels."""
    return bool(is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))
