from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from types import CoroutineType, GeneratorType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from trainpipes._internal import checks
from trainpipes._internal.checks import (
    ColumnName,
    ColumnNames,
    IntArray,
    Seed,
    Share,
    column_names,
    is_finite,
    require,
)
from trainpipes._internal.locks import cached_property
from trainpipes._internal.messages import need_columns
from trainpipes.columns.arrays import to_numpy
from trainpipes.columns.block import BadCell
from trainpipes.columns.columns import as_expression, table_of, text_of
from trainpipes.columns.run import Run
from trainpipes.engine.planning.chain import MixingSource
from trainpipes.engine.planning.row_names import (
    HashArray,
    RowNames,
    hash_keys,
    mix,
    row_names,
    unit,
)
from trainpipes.errors import ConfigError, DataError, shown
from trainpipes.interfaces.quarantine import CallsFunction, OnBadRow
from trainpipes.interfaces.read_columns import blame, each, in_column, matching, naming
from trainpipes.interfaces.stage import Numbers, Stage, Tally, made_once
from trainpipes.interfaces.stage_kinds import BatchingStage, PackingStage, RunStage, stages_within
from trainpipes.order.permutation import random_key
from trainpipes.stages.features import floats_of
from trainpipes.stages.labels import Label, LabelColumn, as_label, near_label

#: The last edge of all: every draw is below.
EVERY = 2.0


class Filter(CallsFunction, RunStage, keeps_rows=False):
    """Keep the rows for which a predicate holds; after ``batch``, the batches.

    The number of rows of an epoch is then unknown: ``len()`` raises a TypeError. Several
    ranks then agree on the last step that all of them have, which needs ``torch.distributed``; with
    ``.repeat()`` there is no end to agree on.

    Args:
        predicate: a function of an item that returns a bool; a ``pyarrow.compute`` expression over
            columns (much faster), where null counts as False; or conditions that all hold:
            ``[["x", ">", 20], ["lang", "in", ["en", "de"]]]``, or a list of such lists, of which
            one holds. Null counts as False there, too, but for "not in", which keeps it.
        version: names the function in checkpoints; see ``map``.
        thread_safe: whether several threads may call the function at once; see ``map``.
        on_error: for a row of which a function raises; see ``map``.

    >>> import pyarrow as pa, pyarrow.compute as pc, trainpipes as tp
    >>> pipe = tp.from_arrow(pa.table({"x": [1, 2, 3]}))
    >>> list(pipe.filter(pc.field("x") > 1))
    [{'x': 2}, {'x': 3}]
    """

    free = frozenset({"thread_safe"})

    predicate: Callable[[Any], bool] | pc.Expression | Sequence[Any]
    _: KW_ONLY
    version: str | None = None
    thread_safe: bool = False
    on_error: OnBadRow = "raise"

    def check(self) -> None:
        way = "an expression raises for no row, and counts null as False: leave it out"
        needless = self.leaves_out and not callable(self.predicate)
        self._require(not needless, "on_error", '"raise" beside an expression', way)
        if isinstance(self.predicate, list | tuple):
            as_expression(self.predicate, "filter(predicate)")
            return
        good = isinstance(self.predicate, pc.Expression) or callable(self.predicate)
        self._require(good, "predicate", "a function of one row or a pyarrow.compute expression")
        if callable(self.predicate):
            checks.returning(self.predicate, "filter(predicate)")

    @made_once
    def _expression(self) -> pc.Expression | None:
        if callable(self.predicate):
            return None
        return as_expression(self.predicate, "filter(predicate)")

    def _traits(self) -> dict[str, Any]:
        kind = {"per_row": True} if callable(self.predicate) else {"takes": "columns"}
        return {**super()._traits(), **kind}

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if self._expression is not None:
            identity["predicate"] = text_of(self._expression)
        elif self.version is not None:
            identity["predicate"] = f"version {identity.pop('version')}"
        return identity

    def process(self, run: Run) -> Run:
        if callable(self.predicate):
            self.refuse_batches(run)
            seen = run.with_items(run.unroll())  # and no copies, which it might change
            answers = each(self, self.guarded(self.predicate), seen)
            passes = self._truth(run, answers)
            if self.leaves_out:
                there = np.zeros(len(run), dtype=np.bool_)
                there[self.without_failed(run, answers)] = True
                passes &= there
            return run.keep(passes)
        self._check_rows(run, single=True)
        return run.keep(matching(run, self._expression, self))

    def _truth(self, run: Run, answers: Sequence[Any]) -> npt.NDArray[np.bool_]:
        """Whether each answer of the predicate holds."""
        if set(map(type, answers)) <= {bool}:
            return np.array(answers, dtype=np.bool_)
        passes: list[bool] = []
        try:
            for answer in answers:
                if type(answer) in (CoroutineType, GeneratorType):  # which are always true
                    got = type(answer).__name__
                    raise DataError(
                        f"{self}: the predicate must return True or False, got a {got}: have it call what "
                        "that would give"
                    )
                passes.append(bool(answer))
        except Exception as error:
            ids = run.row_ids(len(passes))
            blame(error, self, int(ids[0]) if len(ids) else None)
            raise
        return np.array(passes, dtype=np.bool_)


class Drawn(RunStage, keeps_rows=False, depends_on={"place"}, asks_inputs=True):
    """A stage that keeps rows by a hash, as a number from 0 to 1, of the row, or its key, and
    ``seed``.
    """

    def _resolve(self, below: Sequence[Stage]) -> Self:
        for stage in below:
            if isinstance(stage, PackingStage | BatchingStage):
                raise ConfigError(f"{self} chooses single rows: put it before {stage.name}()")
            if stage.traits.makes_batches:
                way = f"and {stage} gives batches: use a sampler of rows"
                raise ConfigError(f"{self} chooses single rows, {way}")
        for other in stages_within(below, MixingSource):  # rows keep who they are in a mix
            if isinstance(other, Drawn) and other._draw == self._draw:
                way = f"give one of the two another seed, such as seed={self.options['seed'] + 1}"
                said = f"{self} comes after {other}, which draws the same number for a row"
                raise ConfigError(f"{said}: it would find rows that are chosen already; {way}")
        return self

    @property
    def _draw(self) -> tuple[Any, ...]:
        return self.name, self.options["seed"], self._key

    @cached_property
    def _key(self) -> list[str] | None:
        key = self.options.get("key")
        return None if key is None else column_names(key, f"{self.name}(key)")

    @cached_property
    def _salt(self) -> HashArray:
        return random_key(self.options["seed"], self.name)[:1]

    @made_once
    def _names(self) -> RowNames:
        return row_names(self._inputs)

    def draws(self, run: Run) -> npt.NDArray[np.float64]:
        self._check_rows(run, single=True)
        key, ids = self._key, run.block.ids
        hashes = self._names.hashes(ids) if key is None else hash_keys(run.block, key, self)
        return unit(mix(hashes ^ self._salt))


class DrawnOnce(Drawn):
    """A stage that keeps the same rows in each epoch."""

    @property
    @abstractmethod
    def _edges(self) -> tuple[float, float]:
        """Between which draws are kept."""

    def process(self, run: Run) -> Run:
        draws, (low, high) = self.draws(run), self._edges
        return run.keep((draws >= low) & (draws < high))


class Sample(DrawnOnce):
    """Keep a fraction of the rows: always the same ones.

    A hash of the row's file name, relative to the folder given, and of its number in the file
    chooses. Where each file is a row (``read_images``, ``read_bytes``, ``list_files`` alone), and where there
    are no files, it is the row's number, which moves as files come: ``key="path"`` keeps rows of the first
    two where they are, while the folder stays where it is. A smaller fraction keeps some of the rows of a
    larger fraction; a second ``sample`` or ``split`` in the same chain needs another seed.

    Args:
        fraction: of the rows to keep, 0 to 1.
        key: a column, or several, whose values are hashed instead: rows of the same key (a user, a
            document) stay together.
        seed: for the choice.

    Raises:
        DataError: a row's key is null.
        SchemaError: there is no such column, or its values are lists or structs.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"x": range(10)}))
    >>> [row["x"] for row in rows.sample(0.3)]
    [0, 3, 5]
    """

    fraction: Share
    _: KW_ONLY
    key: ColumnNames | None = None
    seed: Seed = 0

    def _traits(self) -> dict[str, Any]:
        return {"share": float(self.fraction)}

    @cached_property
    def _edges(self) -> tuple[float, float]:
        return 0.0, EVERY if self.fraction == 1 else float(self.fraction)


class Split(DrawnOnce):
    """Keep one of several parts of the rows; each row is in exactly one part.

    A hash of the row, as in ``sample``, chooses the part. Parts are ranges of this hash in the
    order given: a new part taken from the last part leaves the others as they are.

    Args:
        parts: fraction of each part, by name; they sum to 1.
        part: which part.
        key: a column, or several, whose values are hashed instead: rows of the same key stay
            together.
        seed: for the choice.

    Raises:
        DataError: a row's key is null.
        SchemaError: there is no such column, or its values are lists or structs.

    >>> import pyarrow as pa, trainpipes as tp
    >>> rows = tp.from_arrow(pa.table({"x": range(10)}))
    >>> parts = rows.split({"train": 0.7, "valid": 0.3})
    >>> {name: [row["x"] for row in part] for name, part in parts.items()}
    {'train': [0, 1, 2, 3, 4, 5, 6, 7, 9], 'valid': [8]}
    """

    parts: Mapping[str, float]
    part: str
    _: KW_ONLY
    key: ColumnNames | None = None
    seed: Seed = 0

    def check(self) -> None:
        self._set(parts=checked_parts(self.parts))
        self._require(self.part in self.parts, "part", f"one of {', '.join(self.parts)}")

    def _traits(self) -> dict[str, Any]:
        return {"share": float(self.parts[self.part])}

    @cached_property
    def _edges(self) -> tuple[float, float]:
        edges = np.cumsum([0.0, *self.parts.values()])
        edges[-1] = EVERY
        number = list(self.parts).index(self.part)
        return float(edges[number]), float(edges[number + 1])

    def identity(self) -> dict[str, Any]:
        # What is cut where: independent of the names and the order of the other parts.
        identity = super().identity()
        del identity["parts"]
        low, high = self._edges
        return {**identity, "from": low, "to": high}


class KeptByWeight(Tally):
    """Counts the rows that ``sample_by`` has seen, and those that it kept."""

    warns = False

    def _said(self, numbers: Numbers) -> str:
        seen, passed, _ = numbers
        share = self.stage.traits.share
        parts = [f"kept {passed:,} of {seen:,} rows, {passed / seen:.1%}"] if seen else []
        parts += [] if share is None else [f"about {share:.1%} of the rows are expected"]
        return ", ".join(parts)


class SampleBy(Drawn, takes="columns", depends_on={"place", "epoch"}):
    """Keep each row with a probability by its weight: other rows in each epoch.

    For rare classes, or rows that matter less: a row of weight w is kept with probability
    w / the largest weight, by a number drawn from seed, epoch and row alone: the same after a resume, and
    on any number of ranks. The rows left out are read nevertheless. How many rows an epoch has is known
    only at its end; see ``filter``.

    Args:
        column: the weights, or with ``weights`` the classes.
        weights: of each class, ``{"spam": 10, "ham": 1}``: texts, integers or bools.
        largest: the largest weight that the column may hold; rows of it are all kept. Without classes.
        expected: the share of the rows that is kept on average, 0 to 1, or the rows of each class, as
            ``stats(0, labels=column)`` gives them: for ``explain()`` and ``estimate_len()``, which else
            has to read rows.
        seed: for the draws.

    Raises:
        DataError: a weight is null, NaN, below 0 or above ``largest``; or a class has no weight.
        SchemaError: there is no such column, or it holds no numbers, or no classes.

    >>> import trainpipes as tp
    >>> rows = tp.from_dataset([{"x": n, "rare": n % 10 == 0} for n in range(40)])
    >>> pipe = rows.sample_by("rare", {True: 1, False: 0.1})
    >>> [row["x"] for row in pipe], [row["x"] for row in pipe]
    ([0, 6, 10, 20, 21, 30, 33], [0, 5, 10, 11, 18, 20, 22, 30, 31])
    """

    thread_safe = True
    free = frozenset({"expected"})

    column: ColumnName
    weights: Mapping[Label, float] | None = None
    _: KW_ONLY
    largest: float = 1.0
    expected: float | Mapping[Label, int] | None = None
    seed: Seed = 0

    def check(self) -> None:
        good = is_finite(self.largest) and self.largest > 0
        self._require(good, "largest", "a finite number above 0")
        if self.weights is not None:
            rule = 'a dict of classes and weights such as {"spam": 10, "ham": 1}'
            good = isinstance(self.weights, Mapping) and len(self.weights) > 0
            self._require(good, "weights", rule)
            weights = {as_label(name, "sample_by(weights)"): w for name, w in self.weights.items()}
            good = all(is_finite(weight) and weight >= 0 for weight in weights.values())
            self._require(good and max(weights.values()) > 0, "weights", f"{rule}, not all 0")
            self._require(self.largest == 1, "largest", "left out beside weights")
            self._set(weights=weights)
        if isinstance(self.expected, Mapping):
            rule = "the rows of each class, of which there are some"
            counts = self.expected.values()
            good = self.weights is not None and all(isinstance(n, int) and n >= 0 for n in counts)
            self._require(good and sum(counts) > 0, "expected", rule)
            counted = {
                as_label(name, "sample_by(expected)"): n for name, n in self.expected.items()
            }
            for name in counted:
                self._require(name in (self.weights or ()), "expected", f"{rule} with a weight")
            self._set(expected=counted)
        elif self.expected is not None:
            checks.fraction(self.expected, "sample_by(expected)")

    def _traits(self) -> dict[str, Any]:
        share = self.expected
        if isinstance(share, Mapping):
            passed = sum(count * self._shares[name] for name, count in share.items())
            share = passed / sum(share.values())
        return {"share": None if share is None else float(share)}

    @made_once
    def _kept(self) -> KeptByWeight:
        return KeptByWeight(self)

    def _tallies(self) -> Sequence[Tally]:
        return (self._kept,)

    @made_once
    def _shares(self) -> dict[Label, float]:
        """The probability with which a row of each class is kept."""
        weights = self.weights or {}
        most = max(weights.values(), default=1)
        return {name: weight / most for name, weight in weights.items()}

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        if self.weights is not None:
            identity["weights"] = [[name, weight] for name, weight in self.weights.items()]
        return identity

    def draws(self, run: Run) -> npt.NDArray[np.float64]:
        self._check_rows(run, single=True)
        hashes, block = self._names.hashes(run.block.ids), run.block
        for number in (block.epoch, block.part):
            hashes = mix(hashes + self._salt) ^ np.asarray(number, np.int64).astype(np.uint64)
        return unit(mix(hashes ^ self._salt))

    def process(self, run: Run) -> Run:
        self._check_rows(run, single=True)
        table = table_of(run.block.data, self)
        need_columns(table.column_names, [self.column], self)
        column, ids = table[self.column], run.block.ids
        by_class = self.weights is not None
        shares = self._of_classes(column, ids) if by_class else self._of_weights(column, ids)
        passes = self.draws(run) < shares
        self._kept.add((len(passes), int(np.count_nonzero(passes)), 0))
        return run.keep(passes)

    def _of_weights(self, column: Any, ids: IntArray) -> npt.NDArray[np.float64]:
        with naming(self.column, self, ids):
            weights, missing = floats_of(column)
            bad = missing | ~((weights >= 0) & (weights <= self.largest))
            if bad.any():
                row = int(np.argmax(bad))
                got = "null or NaN" if missing[row] else weights[row]
                way = "divide by the largest in with_columns(), or give it: sample_by(largest=...)"
                raise BadCell(row, f"is {got}, and weights are from 0 to {self.largest:g}: {way}")
        return weights / self.largest

    def _of_classes(self, column: Any, ids: IntArray) -> npt.NDArray[np.float64]:
        labels = LabelColumn(column, self.column, self, ids)
        if labels.lengths is not None:
            raise in_column(BadCell(None, "must hold one class a row"), self.column, self, ids)
        coded = labels.values.dictionary_encode()
        names = coded.dictionary.to_pylist()
        shares = np.array([self._shares.get(name, -1.0) for name in names])[to_numpy(coded.indices)]
        if (shares < 0).any():
            place = int(np.argmax(shares < 0))
            label, known = labels.values[place].as_py(), list(self._shares)
            way = "give it one, or leave such rows out with filter()"
            said = f"{label!r}, which weights do not have{near_label(label, known)}; they have "
            raise labels.fail(place, f"holds the class {said}{shown(known, 200)}: {way}")
        return shares


def checked_parts(parts: Any) -> dict[str, float]:
    rule = 'a dict such as {"train": 0.9, "valid": 0.1}'
    require(isinstance(parts, Mapping) and parts, "split(parts)", rule, parts)
    for name, fraction in parts.items():
        number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        good = isinstance(name, str) and number and 0 < fraction <= 1
        require(good, "split(parts)", "names and fractions above 0, up to 1", {name: fraction})
    total, way = sum(parts.values()), "name the rest too, or take a sample() first"
    require(abs(total - 1) <= 1e-9, "split(parts)", "fractions that sum to 1", round(total, 9), way)
    return dict(parts)
