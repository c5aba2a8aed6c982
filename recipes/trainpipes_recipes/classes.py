"""The classes that a column of labels holds."""

from __future__ import annotations

from typing import Any

from trainpipes import DataError, Pipeline

__all__ = ["classes_of"]


def classes_of(rows: Pipeline, label: str, first: Any = None) -> tuple[int | list[str], list[int]]:
    """The classes of the data, and the rows of each: sorted texts; or integers as they are, up to
    the largest or as many as ``ClassLabel`` has names.

    >>> import trainpipes as tp
    >>> classes_of(tp.from_dataset([{"y": "b"}, {"y": "a"}, {"y": "b"}]), "y")
    (['a', 'b'], [1, 2])
    """
    counts = rows.stats(0, labels=label).labels[label]
    names: list[Any] = list(counts)
    numbers = [name for name in names if isinstance(name, int)]
    of = f"classification: column {label!r} holds"
    if not names:
        raise DataError(f"{of} no label: there are no rows")
    if numbers and len(numbers) < len(names):
        both = f"{of} texts and integers, {names[0]!r} and {names[-1]!r} among them"
        raise DataError(f"{both}: give the class of each by classes={{label: class}}")
    if not numbers:
        return names, list(counts.values())

    classes: Any = _class_names(rows, label) or max(numbers) + 1
    number = classes if isinstance(classes, int) else len(classes)
    found = f"list(rows.stats(0, labels={label!r}).labels[{label!r}])"
    if min(numbers) < 0 or max(numbers) >= number:
        found = str(sorted(numbers)) if len(numbers) < 10 else found
        try:
            rows.encode_labels(label, classes=classes).stats(0, labels="labels")  # says which row
        except DataError as error:
            rule = "integers are classes as they are, from 0 on"
            way = f"to number others, pass classes={found}"
            raise DataError(f"classification: {error}; {rule}: {way}") from None
    if number > max(1000, 10 * len(numbers)):
        got = f"integers up to {max(numbers):,}, and only {len(numbers):,} different ones"
        way = f"pass classes={found} to number them, or name another column"
        raise DataError(f"{of} {got}; integers are classes as they are: {way}")
    if isinstance(first, list) and classes == 2 and len(set(first)) < len(first):
        rule = "must hold the numbers or names of a row's classes: make these by map(), or say classes="
        raise DataError(f"{of} lists such as {first}, a 1 or 0 for each class, and {rule}")
    return classes, [counts.get(number, 0) for number in range(number)]


def _class_names(rows: Pipeline, label: str) -> list[str] | None:
    """The names of classes in a dataset of Hugging Face, or None."""
    dataset: Any = getattr(rows.stages[0], "chosen", None)
    feature = (getattr(dataset, "features", None) or {}).get(label)
    names = getattr(getattr(feature, "feature", feature), "names", None)  # of lists, those inside
    return list(names) if names else None
