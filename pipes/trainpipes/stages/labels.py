from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal import checks
from trainpipes._internal.checks import IntArray
from trainpipes._internal.locks import cached_property
from trainpipes._internal.messages import nearest
from trainpipes.columns import arrays
from trainpipes.columns.block import BadCell
from trainpipes.columns.run import Run
from trainpipes.errors import ConfigError, DataError, shown
from trainpipes.interfaces.read_columns import in_column, refused, row_at
from trainpipes.interfaces.stage import Stage, made_once
from trainpipes.interfaces.stage_kinds import RunStage
from trainpipes.stages.columns import row_table

Label: TypeAlias = "str | int"

#: Up to so many bytes of JSON, a state holds the classes themselves, so that an error can show them.
SHOWN_BYTES = 1024


class LabelColumn:
    """Labels, Arrow text or int64, and how many each row has; None for one each.

    With ``nulls``, values may be null, NaN is one, and a list that is null has no value.
    """

    def __init__(
        self, column: Any, name: str, caller: Stage, ids: IntArray, nulls: bool = False
    ) -> None:
        self.name, self._caller, self._ids, self._nulls = name, caller, ids, nulls
        array, self.lengths = arrays.one_chunk(column), None
        array = array.storage if isinstance(array, pa.ExtensionArray) else array
        kind = array.type
        if pa.types.is_fixed_size_list(kind):
            array = array.cast(pa.list_(kind.value_type))
        if arrays.is_list(array.type):
            self._refuse_null(array)
            lengths = array.value_lengths()
            self.lengths = arrays.to_numpy(lengths.fill_null(0)).astype(np.int64)
            array = array.flatten()
        if pa.types.is_dictionary(array.type):
            array = arrays.decoded(array)
        if array.type == pa.string_view():  # of which Arrow has fewer functions
            array = array.cast(pa.large_string())
        self._refuse_null(array)
        self.values, self.is_text = array, arrays.is_text(array.type)
        if pa.types.is_null(array.type):
            self.values = array.cast(pa.int64())
        elif arrays.is_number(array.type):
            self.values = self._whole_numbers(array)
        elif not self.is_text:
            rule = "labels, which are texts, integers, bools or lists of these"
            way = "make texts of them with map(), or name another column"
            raise refused(caller, f": column {name!r} must hold {rule}, got {kind}: {way}")

    def fail(self, place: int, message: str) -> DataError:
        row = place if self.lengths is None else row_at(place, self.lengths)
        return in_column(BadCell(row, message), self.name, self._caller, self._ids)

    def _refuse_null(self, array: pa.Array) -> None:
        if array.null_count and not self._nulls:
            way = "leave such rows out with filter(), or give them a label with map()"
            raise self.fail(arrays.first_null(array), f"holds a null, which is no label: {way}")

    def _whole_numbers(self, array: pa.Array) -> pa.Array:
        if not self._nulls:
            return arrays.to_arrow(self._whole(arrays.to_numpy(array)))
        if pa.types.is_floating(array.type):
            array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
        null = arrays.to_numpy(array.is_null())
        zero = pa.scalar(0, pa.int64()).cast(array.type)
        whole = self._whole(arrays.to_numpy(array.fill_null(zero)))
        return arrays.to_arrow(whole, null if null.any() else None)

    def _whole(self, values: Any) -> IntArray:
        with np.errstate(invalid="ignore"):
            numbers: IntArray = values.astype(np.int64)
        bad = np.flatnonzero((numbers != values) | ((numbers < 0) != (values < 0)))
        if len(bad):
            place, rule = int(bad[0]), "a label is a text or a whole number"
            if values.dtype.kind == "u":
                way = "make texts of such numbers with map()"
                rule = f"a label that is a number is below 2**63: {way}"
                raise self.fail(place, f"holds {values[place]}, and {rule}")
            rather = f"a chain of stages with rename({{{self.name!r}: 'labels'}})"
            way = f"to predict numbers, write {rather} in place of encode_labels() or the recipe"
            raise self.fail(place, f"holds {values[place]}, and {rule}: {way}")
        return numbers


class EncodeLabels(RunStage, takes="columns"):
    """Turn labels into class numbers, int64.

    Labels are texts, integers, bools, or lists of these if a row may have several classes.

    Args:
        column: the labels.
        classes: which labels there are:

            - a list: the first label is class 0
            - a dict from labels to class numbers; several labels may have the same class
            - a number C: labels are integers from 0 to C - 1, and stay as they are

            If ``classes`` are texts and the labels are integers, as in Hugging Face's
            ``ClassLabel``, the integers stay as they are.
        output_column: the new column, in place of ``column``.
        counts: rows of each class, if known; ``stats(labels=...)`` then counts none.

    Raises:
        DataError: a null, or a label that ``classes`` does not have; names the nearest.
        SchemaError: the column is not there, or holds no labels; or ``output_column`` already is
            there.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"label": "spam"}, {"label": "ham"}, {"label": "ham"}])
    >>> list(rows.encode_labels(classes=["ham", "spam"]))
    [{'labels': 1}, {'labels': 0}, {'labels': 0}]
    """

    thread_safe = True
    free = frozenset({"counts"})

    column: checks.ColumnName = "label"
    _: KW_ONLY
    classes: int | Sequence[Label] | Mapping[Label, int]
    output_column: checks.ColumnName = "labels"
    counts: Annotated[Sequence[int], checks.Each(checks.Ge(0))] | None = None

    def check(self) -> None:
        classes: Any = self.classes
        rule = "encode_labels(classes)"
        forms = "a list of labels, a dict of labels and their classes, or a number of classes"
        good = isinstance(classes, int | Mapping) or checks.several(classes)
        way = f"pipe.stats(0, labels={self.column!r}) counts them"
        checks.require(good, rule, forms, classes, way)
        if isinstance(classes, int):
            checks.whole_number(classes, 1, rule, most=2**31)
        else:
            names: Any = [as_label(name, rule) for name in classes]
            for name in checks.repeated(names):
                raise ConfigError(f"{rule} must name each label once, got {name!r} twice")
            if isinstance(classes, Mapping):
                numbers = (checks.whole_number(n, 0, rule, most=2**31) for n in classes.values())
                names = dict(zip(names, numbers, strict=True))
            checks.require(names, rule, "one or more", classes)
            self._set(classes=names)
        good = self.counts is None or len(self.counts) == self.num_classes
        self._require(good, "counts", f"the rows of each of {self.num_classes:,} classes")

    @property
    def num_classes(self) -> int:
        classes = self.classes
        if isinstance(classes, Mapping):
            return max(classes.values()) + 1
        return classes if isinstance(classes, int) else len(classes)

    def identity(self) -> dict[str, Any]:
        classes = self.classes
        pairs = (
            [list(pair) for pair in classes.items()] if isinstance(classes, Mapping) else classes
        )
        text = json.dumps(pairs)
        if len(text) > SHOWN_BYTES:
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            pairs = f"{self.num_classes} classes:{digest}"
        return {**super().identity(), "classes": pairs}

    @made_once
    def _numbers(self) -> dict[Label, int]:
        classes = range(self.classes) if isinstance(self.classes, int) else self.classes
        if isinstance(classes, Mapping):
            return dict(classes)
        return {name: number for number, name in enumerate(classes)}

    @cached_property
    def _stay(self) -> bool:
        classes = self.classes
        return isinstance(classes, int) or all(isinstance(name, str) for name in classes)

    def process(self, run: Run) -> Run:
        block, table = row_table(run, self, [self.column], {self.output_column} - {self.column})
        labels = LabelColumn(table[self.column], self.column, self, block.ids)
        codes = self._encode(labels)
        column = arrays.to_arrow(codes)
        if labels.lengths is not None:
            column = arrays.list_array(codes, labels.lengths)
        place = table.column_names.index(self.column)
        return run.with_block(block.with_data(table.set_column(place, self.output_column, column)))

    def _encode(self, labels: LabelColumn) -> IntArray:
        if not labels.is_text and self._stay:
            codes: IntArray = arrays.to_numpy(labels.values)
            bad = (codes < 0) | (codes >= self.num_classes)
        else:
            coded = labels.values.dictionary_encode()
            numbers = [self._numbers.get(name, -1) for name in coded.dictionary.to_pylist()]
            codes = np.array(numbers, dtype=np.int64)[arrays.to_numpy(coded.indices)]
            bad = codes < 0
        if bad.any():
            place = int(np.argmax(bad))
            raise self._unknown(labels, place, labels.values[place].as_py())
        return codes

    def _unknown(self, labels: LabelColumn, place: int, label: Label) -> DataError:
        count, out = self.num_classes, "leave such rows out with filter()"
        if isinstance(label, int) and self._stay:
            known = (
                f"{count:,} classes: they are 0 to {count - 1}"
                if count > 1
                else "one class: it is 0"
            )
            problem = f"{label}, of {known}; give more, or {out}"
        elif isinstance(self.classes, int):
            problem = f"{label!r}, and classes={count} is for labels that are integers: list them"
        else:
            names = list(self._numbers)
            near, known = near_label(label, names), shown(names, 200)
            problem = (
                f"{label!r}, which classes do not have{near}; they are {known}: add it, or {out}"
            )
        return labels.fail(place, f"holds the label {problem}")


def near_label(label: Label, labels: Sequence[Label]) -> str:
    """`` (did you mean 'x'?)`` for a label like another in ``labels``."""
    text = str(label)
    for known in labels:
        if str(known).strip().casefold() == text.strip().casefold():
            return f" (did you mean {known!r}?)"
    return nearest(text, [known for known in labels if isinstance(known, str)])


def as_label(value: Any, rule: str) -> Label:
    """A label as JSON has it: True and False are 1 and 0."""
    if not isinstance(value, str | int | np.integer | np.bool_):
        raise ConfigError(f"{rule}: a label must be a text or an integer, got {shown(value)}")
    return value if isinstance(value, str) else int(value)
