"""Which classes there are, found in the data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from trainpipes import DataError, Pipeline

__all__ = ["found_classes", "number_of"]

log = logging.getLogger("trainpipes")


def found_classes(
    recipe: str, rows: Pipeline, label: str, hint: str = ""
) -> tuple[int | list[str | int], list[int]]:
    """The classes of the data, and the rows of each: texts in sorted order; integers as they are, and as many
    classes as the largest says, or as Hugging Face's ``ClassLabel`` has names.

    Args:
        recipe: who asks, for messages.
        rows: of the data.
        label: the column, of labels or of lists of them.
        hint: what else one may do where integers are no classes.

    Raises:
        DataError: there are no rows, texts and integers, negative integers, or few and large ones.

    >>> import trainpipes as tp
    >>> found_classes("mine", tp.from_dataset([{"y": "b"}, {"y": "a"}, {"y": "b"}]), "y")
    (['a', 'b'], [1, 2])
    """
    counts = rows.stats(0, labels=label).labels[label]
    numbers = [value for value in counts if isinstance(value, int)]
    names = list(counts)
    if not counts:
        raise DataError(f"{recipe}: column {label!r} holds no label: there are no rows")
    if numbers and len(numbers) < len(counts):
        raise DataError(
            f"{recipe}: column {label!r} holds texts and integers, {names[0]!r} and {names[-1]!r} "
            "among them: give the class of each by classes={label: class}"
        )
    if numbers:
        found = f"list(rows.stats(0, labels={label!r}).labels[{label!r}])"
        classes: Any = _class_names(rows, label) or max(numbers) + 1
        if min(numbers) < 0 or max(numbers) >= number_of(classes):
            try:
                coded = rows.encode_labels(label, classes=classes)
                coded.stats(0, labels="labels")  # says in which row
            except DataError as error:
                few = sorted(numbers) if len(numbers) < 10 else found
                raise DataError(
                    f"{recipe}: {error}; integers are classes as they are, from 0 on: to number others, pass "
                    f"classes={few}{hint}"
                ) from None
        if number_of(classes) > max(1000, 10 * len(numbers)):
            raise DataError(
                f"{recipe}: column {label!r} holds integers up to {max(numbers):,}, and only "
                f"{len(numbers):,} different ones; integers are classes as they are: pass "
                f"classes={found} to number them, or name another column{hint}"
            )
        return classes, [counts.get(number, 0) for number in range(number_of(classes))]
    alike: dict[str, str | int] = {}
    for name in counts:
        other = alike.setdefault(str(name).strip().casefold(), name)
        if other != name:
            log.warning(
                "%s: labels %r and %r of column %r are two classes: pass classes={label: class} to make one "
                "of them", recipe, other, name, label,
            )  # fmt: skip
    if len(counts) == 1:
        log.warning("%s: column %r holds one class only, %r", recipe, label, names[0])
    return names, list(counts.values())


def number_of(classes: int | Sequence[Any] | Mapping[Any, int]) -> int:
    """C, of classes as ``encode_labels`` takes them."""
    if isinstance(classes, Mapping):
        return max(classes.values()) + 1
    return classes if isinstance(classes, int) else len(classes)


def _class_names(rows: Pipeline, label: str) -> list[str | int] | None:
    """The names that a dataset of Hugging Face gives to classes; None where it gives none."""
    dataset: Any = getattr(rows.stages[0], "chosen", None)
    feature = (getattr(dataset, "features", None) or {}).get(label)
    names = getattr(getattr(feature, "feature", feature), "names", None)  # of lists, those inside
    return list(names) if names else None
