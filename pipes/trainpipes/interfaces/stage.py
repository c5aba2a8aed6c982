"""What the engine asks of a stage: its options, its traits for the plan of a chain, and what it
counts.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, dataclass_transform, get_args

from trainpipes._internal import checks, locks, messages
from trainpipes._internal.checks import IntArray
from trainpipes.errors import ConfigError
from trainpipes.interfaces.options import (
    DRAWS,
    EXAMPLES,
    declared_checks,
    hint,
    identify,
    identify_named,
    in_our_words,
    refuse_unknown,
    same,
    show_named,
)
from trainpipes.interfaces.watched_calls import DrawWatch

if TYPE_CHECKING:
    made_once = locks.cached_property
else:

    class made_once(locks.cached_property):
        """A property made once, even by several threads."""

        def __get__(self, stage, owner=None):
            with _lock:
                return super().__get__(stage, owner)


Beside = Literal["row", "place", "epoch"]


@dataclass(frozen=True)
class Traits:
    """What a stage is to the plan: class keywords, as its options change them.

    Args:
        keeps_rows: one row comes out for each that goes in; in order, except of a shuffle.
        share: the share of rows that it lets through on average, if known.
        depends_on: inputs of the result beside the values of a row: its number ("row"), its
            file ("place"), the "epoch".
        takes: Arrow "columns", made of Python objects if need be; "columns or objects" that Arrow
            cannot hold; else "rows" of any kind.
        gives: Python "objects"; columns of "found types", those of the first rows; a "choice" of the
            columns, perhaps under other names; else "rows" of the kind that it gets.
        ragged: with ``takes``, the columns whose arrays may differ in length; None for all.
        pads: with ``takes``, arrays of two dimensions or more may differ in the first.
        per_row: it calls Python for each row or batch: those that are due, and few ahead.
        in_caller: only the thread that iterates (or a worker process) may call it.
        reorders: rows come in another order every epoch.
        versioned: an option that is a function; a state knows it by ``version`` if that is given.
        asks_inputs: it is bound to the pipeline's inputs, as ``_inputs``.
        holds_data: its options hold rows, which are not copied.
        has_blocks: of a source: its rows are Arrow, in blocks with a key for ``cache()``.
        random_access: of a source: rows can be chosen by number.
        orders_rows: of a source: a shuffle would undo the order of its rows.
        makes_batches: of a source: an item is a batch already.
        read_once: of a source: rows can be read only once.
        endless: of a source: an epoch has no end.
        grows: of a source: each epoch has the files that stand there when it begins.
        pins: of a source: all epochs have the version that is the newest when the run begins; states name it.
        one_consumer: of a source: why ranks or workers cannot share it; "" if they can.
    """

    keeps_rows: bool = True
    share: float | None = None
    depends_on: Iterable[Beside] = frozenset()
    takes: Literal["rows", "columns", "columns or objects"] = "rows"
    gives: Literal["rows", "objects", "found types", "choice"] = "rows"
    ragged: Collection[str] | None = None
    pads: bool = False
    per_row: bool = False
    in_caller: bool = False
    reorders: bool = False
    versioned: str | None = None
    asks_inputs: bool = False
    holds_data: bool = False
    has_blocks: bool = False
    random_access: bool = False
    orders_rows: bool = False
    makes_batches: bool = False
    read_once: bool = False
    endless: bool = False
    grows: bool = False
    pins: bool = False
    one_consumer: str = ""

    def __post_init__(self) -> None:
        known = get_args(Beside)
        if isinstance(self.depends_on, str) or not {*self.depends_on} <= {*known}:
            raise ConfigError(f"depends_on must be a set of {known}, got {self.depends_on!r}")


#: Of rows: those seen, those counted, and a number that the counted ones add up to.
Numbers = tuple[int, int, int]

_aside: ContextVar[bool | None] = ContextVar("aside", default=None)


@contextmanager
def aside(counts: bool = False) -> Iterator[None]:
    """Rows that are looked at beside those of an epoch, as to find types, which come again in their turn:
    within, this thread logs and lists none of them, and counts them only where ``counts``, for a report.
    """
    token = _aside.set(counts)
    try:
        yield
    finally:
        _aside.reset(token)


def is_aside() -> bool:
    return _aside.get() is not None


class Tally:
    """Counts rows in this process; any thread may. What a ``Loader``'s workers count is added to that of
    the process that trains.
    """

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self._lock = locks.ForkLock()
        self.numbers: Numbers = (0, 0, 0)
        #: Whether counts of this process are reported elsewhere: in a worker.
        self.is_silent = False

    #: Whether it is worth a warning at an epoch's end.
    warns = True

    def add(self, more: Numbers) -> Numbers:
        """Count more rows; returns the sums."""
        with self._lock:
            if _aside.get() is not False:
                self.numbers = _plus(self.numbers, more)
            return self.numbers

    def adopt(self, more: Numbers) -> None:
        """Count rows that a worker has counted."""
        self.add(more)

    def since(self, before: Numbers) -> Numbers:
        seen, counted, size = before
        return _plus(self.numbers, (-seen, -counted, -size))

    def end(self) -> None:
        """Called at the end of a pass."""

    def check_pass(self, numbers: Numbers) -> None:
        """Called for the counts of a whole pass of a process; may raise."""

    def said(self, numbers: Numbers) -> str:
        """In words, with the name of a mix's source; "" for none."""
        said, name = self._said(numbers), getattr(self.stage._inputs, "name", None)
        return f"source {name!r}: {said}" if said and name else said

    def _said(self, numbers: Numbers) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.said(self.numbers)


def _plus(a: Numbers, b: Numbers) -> Numbers:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "trainpipes"


def check_kind(kind: type, root: type) -> None:
    """Raise for a user's class of no kind of stage, or with an ``__init__``."""
    if is_ours(kind):
        return
    if root in kind.__bases__:
        raise ConfigError(
            f"{kind.__name__} must be a kind of stage: subclass Source, RowStage, TableStage, BatchStage or "
            "StatefulStage"
        )
    for name in sorted({"__init__", "__post_init__"} & vars(kind).keys()):
        raise ConfigError(
            f"{kind.__name__} must not define {name}(): a stage is a dataclass, so list its options as "
            "fields, and check them in check()"
        )
    for name in sorted({"apply", "open", "process", "start", "finish"} & vars(kind).keys()):
        defined = vars(kind)[name]
        if inspect.iscoroutinefunction(defined) or inspect.isasyncgenfunction(defined):
            raise ConfigError(
                f"{kind.__name__}.{name}() must be a function without async: call asyncio.run() in it"
            )


def check_options(kind: Any, root: type) -> None:
    if is_ours(kind):
        return
    bases: list[Any] = [base for base in kind.__mro__ if is_ours(base) and base is not root]
    known = {field.name for base in bases for field in dataclasses.fields(base)}
    ours = {name for base in (*bases, root) for name in vars(base)} - known
    names = {field.name for field in dataclasses.fields(kind)}
    for name in sorted(names & ours):
        raise ConfigError(
            f"{kind.__name__}: every stage has {name!r}, so that an option needs another name; to set it for "
            f"the class, leave its type out: {name} = ..."
        )
    for name in sorted(kind.free - names):
        raise ConfigError(
            f"{kind.__name__}: free must be a frozenset of options, and there is no {name!r}"
        )


#: The library's stages by their names in a chain, entered where their methods and functions are made.
_classes: dict[str, type[Stage]] = {}

#: A single lock for all: a property may ask for another while it is made.
_lock = locks.ForkLock()


class ListsWhatIsUsed(type):
    """``dir()`` and ``help()`` of a stage name the members that users call or define, and fit on a screen."""

    _inside: frozenset[str]

    def __dir__(cls) -> list[str]:
        return [n for n in super().__dir__() if not n.startswith("__") and n not in cls._inside]


@dataclass_transform(frozen_default=True, eq_default=False)
class Stage(metaclass=ListsWhatIsUsed):
    """One step of a pipeline: a frozen dataclass of options.

    Subclass ``TableStage``, ``RowStage``, ``BatchStage``, ``StatefulStage`` or ``Source``, whose texts show
    examples. Set the attributes below, and define ``check``; all else is made from these. Fields with a
    type are options; those after ``_: KW_ONLY`` are given by name. A result that depends on more than the
    row's values says so: ``class Noise(TableStage, depends_on={"row", "epoch"})``, of its number, its file
    ("place") or the epoch.

    Attributes:
        thread_safe: several threads may call it at once.
        free: options that do not change the result: a state resumes with other values of these.
    """

    thread_safe = False
    free: ClassVar[frozenset[str]] = frozenset()

    #: What only plans and states ask.
    _inside = frozenset({"equals", "fingerprint", "identity", "traits"})
    _given: ClassVar[dict[str, Any]] = {}
    _fixed: ClassVar[Traits] = Traits()
    _option_names: ClassVar[tuple[str, ...]] = ()
    _inputs: ClassVar[Any] = None

    def __init_subclass__(cls, **traits: Any) -> None:
        """Make it a dataclass; ``traits`` tell the plan what it is."""
        super().__init_subclass__()
        check_kind(cls, Stage)
        known = [field.name for field in dataclasses.fields(Traits)]
        for name in (name for name in traits if name not in known):
            raise ConfigError(
                f"{cls.__name__}: there is no trait {name!r}{messages.nearest(name, known)}"
            )
        cls._given = traits
        keywords = (vars(base).get("_given", {}) for base in cls.__mro__)
        cls._fixed = Traits(**ChainMap(*keywords))
        dataclasses.dataclass(frozen=True, eq=False, repr=False, match_args=False)(cls)
        cls._option_names = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
        free = frozenset().union(*(vars(base).get("free", ()) for base in cls.__mro__))
        if free != cls.free:
            cls.free = free
        check_options(cls, Stage)
        cls.__init__ = with_hints(cls.__init__)  # type: ignore[method-assign]
        cls.__setattr__ = _refuse_to_set  # type: ignore[method-assign, assignment]

    def __post_init__(self) -> None:
        kind: Any = type(self)
        with in_our_words(self.name, self.options) if is_ours(kind) else nullcontext():
            for name, value in self.options.items():
                if not self._fixed.holds_data or name == "version":
                    self._set(**{name: checks.copied(value)})
            for name, check in declared_checks(kind).items():
                check(getattr(self, name), f"{self.name}({name})")
            self.check()
        added = vars(self).keys() - self.options.keys()
        lost = [name for name in added if not is_derived(self, name)]
        if lost and not is_ours(kind):
            raise ConfigError(
                f"{self.name}: check() sets {lost[0]!r}, and a stage keeps its options only: list it as a "
                "field, or make it where it is needed"
            )

    def check(self) -> None:
        """Raise ConfigError for a wrong option. Those declared as ``bool``, ``Literal`` or
        ``Annotated[..., check]`` were checked before.
        """

    def _require(self, good: Any, option: str, rule: str, way: str = "") -> None:
        checks.require(good, f"{self.name}({option})", rule, getattr(self, option), way)

    @locks.cached_property
    def traits(self) -> Traits:
        """What the plan asks of it."""
        return dataclasses.replace(self._fixed, **self._traits())

    def _traits(self) -> dict[str, Any]:
        """Traits that follow from its options."""
        return {}

    def _resolve(self, below: Sequence[Stage]) -> Self:
        """This stage after the stages ``below``, the first stage first. It takes from them what it needs,
        with ``_resolved()``, and raises ConfigError if it cannot stand there.
        """
        return self

    def _bound(self, inputs: Any) -> Self:
        """This stage, bound to the ``Inputs`` of a plan."""
        return self._resolved(**{**vars(self), "_inputs": inputs})

    def _kept_lengths(self, column: str, lengths: IntArray) -> IntArray:
        """How many tokens of rows, whose ``column`` has so many, it lets through: int64 ``[rows]``."""
        return lengths

    def _tallies(self) -> Sequence[Tally]:
        """What it counts of the rows that pass."""
        return ()

    def _describe(self) -> list[tuple[str, str]]:
        """Lines for ``explain()``: pairs of a label and a text."""
        return []

    # The record

    @property
    def options(self) -> dict[str, Any]:
        """The options by name."""
        return {name: getattr(self, name) for name in self._option_names}

    @property
    def name(self) -> str:
        """The stage's name in a chain: its class in snake case."""
        return snake_case(type(self).__name__)

    @property
    def _runs_user_code(self) -> bool:
        """Whether it calls the user's functions, perhaps only on the thread that iterates."""
        if self.thread_safe:
            return False
        return not is_ours(type(self)) or any(callable(value) for value in self.options.values())

    @property
    def _calls_function(self) -> bool:
        """Whether a user's function decides the result, on any thread."""
        fn = self._fixed.versioned and self.options.get(self._fixed.versioned)
        return self._runs_user_code or callable(fn)

    @made_once
    def _draw_watch(self) -> DrawWatch:
        user_class = None if is_ours(type(self)) else type(self)
        fn = next(filter(callable, self.options.values()), None)
        return DrawWatch(user_class or fn, str(self), hint(DRAWS, type(self)))

    def _fresh(self) -> Self:
        """A copy with the same options, and no state of earlier runs."""
        fresh = object.__new__(type(self))
        vars(fresh).update(self.options)
        return fresh

    def _replaced(self, **options: Any) -> Self:
        """A copy with other values for some options."""
        return type(self)(**{**self.options, **options})

    def _resolved(self, **resolved: Any) -> Self:
        """This stage, together with values that were found for it beside its options."""
        if all(vars(self).get(name) is value for name, value in resolved.items()):
            return self
        stage = self._fresh()
        vars(stage).update(resolved)
        return stage

    def _set(self, **options: Any) -> None:
        vars(self).update(options)

    def identity(self) -> dict[str, Any]:
        """The stage's name and the options that shape rows or order, of JSON types."""
        identity = {"stage": self.name}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = identify_named(field.name, getattr(self, field.name))
            if field.name not in self.free and value is not None:
                identity[field.name] = value
        versioned = self._fixed.versioned
        if versioned is not None and identity.pop("version", None) is not None:
            identity[versioned] = f"version {identify(vars(self)['version'])}"
        return identity

    def fingerprint(self) -> dict[str, Any]:
        """What a state knows it by as an option of another stage."""
        return self.identity()

    def equals(self, other: Stage) -> bool:
        """Whether another stage of this class has the same options."""
        return same(self.options, other.options)

    def __getstate__(self) -> dict[str, Any]:
        return self.options

    def __repr__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, default = getattr(self, field.name), field.default
            if value is None or (type(value) is type(default) and same(value, default)):
                continue
            text = show_named(field.name, value)
            shown.append(f"{field.name}={text}" if field.kw_only else text)
        return f"{self.name}({', '.join(shown)})"


def _refuse_to_set(stage: Stage, name: str, _: Any) -> None:
    raise dataclasses.FrozenInstanceError(
        f"{stage.name} cannot set {name!r}: a stage keeps its options only, and these don't change; keep "
        "such things in a functools.cached_property, or in the function that open() of a TableStage returns"
    )


def with_hints(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)
    plain = [p.replace(annotation=p.empty) for p in list(signature.parameters.values())[1:]]

    @functools.wraps(init)
    def __init__(self: Stage, *args: Any, **options: Any) -> None:
        known = list(self._option_names)
        if options.keys() - set(known):  # a name may depend on options
            refuse_unknown(options, known, type(self), self.name)
        try:
            signature.bind(self, *args, **options)
        except TypeError as error:
            shown, example = f"{self.name}{inspect.Signature(plain)}", hint(EXAMPLES, type(self))
            such = f", such as {example}" if example else ""
            raise TypeError(f"{self.name}(): {error}; it is {shown}{such}") from None
        init(self, *args, **options)

    return __init__


def is_derived(stage: Stage, name: str) -> bool:
    return hasattr(inspect.getattr_static(type(stage), name, None), "__get__")


def snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def enter(*kinds: type[Stage]) -> None:
    """Have classes among those that chains, configs and nodes know by name."""
    _classes.update((snake_case(kind.__name__), kind) for kind in kinds)


def stage_classes() -> Mapping[str, type[Stage]]:
    """The class of each stage of the library, by its name in a chain."""
    return _classes
