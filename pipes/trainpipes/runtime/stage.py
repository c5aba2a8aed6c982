"""What a stage is: a record of its options.

A stage is a frozen dataclass: its fields are its options, and all that a pipeline records, prints, compares
and pickles. ``Stage`` makes one of each class below it. How a stage is carried out, its kind says: see
``runtime.kinds``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Literal,
    Self,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

import numpy as np
import pyarrow as pa
import torch

from trainpipes.errors import ConfigError
from trainpipes.naming import nearest
from trainpipes.runtime.rows.content import table_digest, tensor_digest
from trainpipes.runtime.rows.row_types import written
from trainpipes.runtime.warn_once import warn_once
from trainpipes.shown import shown

__all__ = ["Role", "Stage", "identify", "option", "same", "spelt"]

Role = Literal[
    "files",  # lists files; first in a chain
    "reader",  # turns files into a source of rows
    "source",  # rows from elsewhere; first in a chain
    "rows",  # each row by itself: may stand before or after a shuffle, and above batches
    "shuffle",
    "shard",
    "pack",  # makes rows of several others, after they are dealt
    "batch",  # cuts rows into micro-batches
    "finish",  # micro-batches to what the training loop gets
    "cache",
    "repeat",
    "take",
    "skip",
    "place",  # where finished batches lie: pinned memory, a device
]

#: What classes had when a stage was a node with an ``__init__`` of its own.
_BEFORE = ("__init__", "__post_init__", "begin", "bind", "open_source")


def option(
    *, default: Any = dataclasses.MISSING, key: str | None = None, was: str | None = None
) -> Any:
    """A field of a stage that differs from others in what states or callers call it.

    Args:
        default: the option's default.
        key: what a state knows it by, where that is not its name: names may change, and states may not.
        was: an older name, which is still accepted, and warned about.
    """
    return dataclasses.field(default=default, metadata={"key": key, "was": was})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(option,))
class Stage:
    """One step of a pipeline: a frozen dataclass of options.

    A class below this one lists its options as fields; those after ``_: KW_ONLY`` are given by name. For a
    stage of your own take one of its kinds: ``TableStage``, ``RowStage``, ``BatchStage``, or ``Source``.

    Raises:
        ConfigError: the class defines what it must not, or ``check`` refuses an option.
        TypeError: there is no such option.

    Attributes:
        role: what the stage is to the plan.
        keeps_rows: whether as many rows come out as go in, each made of the one it stands for.
        thread_safe: whether several threads may call it at once. Known of stages of ours that call no
            function of the user's; others say so.
        share: the part of the rows that it lets through on average, where that is known beforehand.
        per_row: whether it calls Python for each row, so that it is given few at a time.
        versioned: an option with a function, which a state knows by ``version`` where that is given.
        free: options that change how the stage runs and not what comes out of it.
        by_row: whether what becomes of a row depends on its number, too, as random choices do.
        by_place: whether it depends on where the row is from.
        finds_types: whether types of columns that come out are those of the data's first rows.
        by_epoch: whether it depends on the epoch: then nothing above it can be kept in a ``cache()``.
        needs_columns: whether it works on Arrow columns, which rows that are Python objects are turned
            into below it.
        takes_objects: of one that does, whether it also takes rows of which Arrow can't make columns.
        makes_objects: whether rows that come out are Python objects.
        asks_plan: whether it asks the plan that it is part of; as one does that is ``by_place``.
        plan: that it is part of, once it is, if it asks.
    """

    role: ClassVar[Role] = "rows"
    thread_safe: ClassVar[bool] = False
    versioned: ClassVar[str | None] = None
    free: ClassVar[frozenset[str]] = frozenset()
    keeps_rows = True
    share: ClassVar[float | None] = None
    per_row = False
    by_row = False
    by_place: ClassVar[bool] = False
    asks_plan: ClassVar[bool] = False
    finds_types = False
    by_epoch = False
    needs_columns = False
    takes_objects: ClassVar[bool] = False
    makes_objects = False
    plan: ClassVar[Any] = None

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        refuse_old(cls)
        dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        cls.free = frozenset().union(*(vars(base).get("free", ()) for base in cls.__mro__))
        check_class(cls)
        cls.__init__ = _spelt(cls.__init__)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        self._set(**{name: _copied(value) for name, value in self.options.items()})
        kind: Any = type(self)
        for name, allowed in _allowed(kind).items():
            value = getattr(self, name)
            if not any(type(value) is type(one) and value == one for one in allowed):
                raise ConfigError(f"{self.name}({name}) is {either(allowed)}, got {shown(value)}")
        self.check()
        lost = [name for name in vars(self).keys() - self.options.keys() if not made(self, name)]
        if lost and not is_ours(kind):
            raise ConfigError(
                f"{self.name}: check() sets {lost[0]!r}, and a stage keeps its options only: list it as a "
                "field, or make it where it is needed"
            )

    def check(self) -> None:
        """Raise ConfigError unless the options are what they must be. Those that are declared as ``bool`` or
        ``Literal`` are looked at before."""

    def resolve(self, below: Sequence[Stage]) -> Self:
        """This stage as it is above others, first one first: what it takes from them, such as a tokenizer's
        pad token, goes to ``resolved``. Raises ConfigError where it cannot stand there."""
        return self

    def settle(self, threads: int) -> None:
        """Get ready to be called by so many threads at once; 0 for none but the one that iterates."""

    def report(self) -> str:
        """What it has left out so far in this process, in words, for ``explain()``; nothing if nothing."""
        return ""

    # The record

    @property
    def options(self) -> dict[str, Any]:
        """The options by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """The stage's name in a chain: its class in snake case."""
        return snake_case(type(self).__name__)

    @property
    def runs_user_code(self) -> bool:
        """Whether functions that are not ours are called, so that it is not known whether several
        threads may call them at once, or any but the one that iterates."""
        if self.thread_safe:
            return False
        return not is_ours(type(self)) or any(callable(value) for value in self.options.values())

    def fresh(self) -> Self:
        """A stage of the same options, with nothing that has run."""
        found = object.__new__(type(self))
        vars(found).update(self.options)
        return found

    def replaced(self, **options: Any) -> Self:
        """A stage with some options of other values."""
        return type(self)(**{**self.options, **options})

    def resolved(self, **found: Any) -> Self:
        """This stage, with what was found out beside its options."""
        if all(vars(self).get(name) is value for name, value in found.items()):
            return self
        stage = self.fresh()
        vars(stage).update(found)
        return stage

    def _set(self, **options: Any) -> None:
        """Give options the form that they are kept in; in ``check``."""
        vars(self).update(options)

    def identity(self) -> dict[str, Any]:
        """The stage's name and the options that shape rows or their order, of JSON types."""
        found = {"stage": self.name}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = identify(getattr(self, field.name))
            if field.name not in self.free and value is not None:
                found[field.metadata.get("key") or field.name] = value
        if self.versioned is not None and found.pop("version", None) is not None:
            found[self.versioned] = f"version {vars(self)['version']}"
        return found

    def __getstate__(self) -> dict[str, Any]:
        return self.options

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        """The stage as it is written in a chain; options left at their defaults are left out."""
        shown = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, default = getattr(self, field.name), field.default
            if value is None or (type(value) is type(default) and same(value, default)):
                continue
            shown.append(f"{field.name}={show(value)}" if field.kw_only else show(value))
        return f"{self.name}({', '.join(shown)})"


def either(values: Sequence[Any]) -> str:
    """``"a", "b" or "c"``; None goes without saying."""
    said = [f'"{one}"' if isinstance(one, str) else str(one) for one in values if one is not None]
    return f"{', '.join(said[:-1])} or {said[-1]}"


@functools.cache
def _allowed(kind: Any) -> dict[str, tuple[Any, ...]]:
    """The values that options may have, of those that are declared as ``bool`` or ``Literal``."""
    found: dict[str, tuple[Any, ...]] = {}
    for field in dataclasses.fields(kind):
        owner = next(
            base for base in kind.__mro__ if field.name in vars(base).get("__annotations__", {})
        )
        declared: Any = field.type
        if isinstance(declared, str):
            try:
                declared = eval(declared, vars(sys.modules[owner.__module__]))
            except (
                NameError,
                TypeError,
                AttributeError,
            ):  # of types that are not there when it runs
                continue
        union = get_origin(declared) in (Union, UnionType)
        parts = get_args(declared) if union else (declared,)
        if declared is bool:
            found[field.name] = (True, False)
        elif all(part is NoneType or get_origin(part) is Literal for part in parts):
            values = [value for part in parts for value in get_args(part) or (None,)]
            found[field.name] = tuple(values)
    return found


def is_ours(kind: type) -> bool:
    """Whether a class is one of this library's."""
    return kind.__module__.split(".")[0] == "trainpipes"


def _copied(value: Any) -> Any:
    """A value whose dicts and lists are copies: who gave them may change theirs."""
    if type(value) is dict:
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if type(value) is list else value


def _spelt(init: Callable[..., None]) -> Callable[..., None]:
    """A stage's ``__init__`` that knows older names of options, and says which names there are."""

    signature = inspect.signature(init)
    plain = [p.replace(annotation=p.empty) for p in list(signature.parameters.values())[1:]]

    @functools.wraps(init)
    def __init__(self: Stage, *args: Any, **options: Any) -> None:
        known = {field.name: field.metadata.get("was") for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        older = {was: name for name, was in known.items() if was}
        options = spelt(self.name, older, options)
        for name in options:
            if name not in known:
                raise TypeError(
                    f"{self.name}() has no option {name!r}{nearest(name, list(known))}; it takes "
                    f"{', '.join(known) or 'none'}"
                )
        try:
            signature.bind(self, *args, **options)
        except TypeError as error:
            shown = f"{self.name}{inspect.Signature(plain)}"
            raise TypeError(f"{self.name}(): {error}; it is {shown}") from None
        init(self, *args, **options)

    return __init__


def spelt(asker: str, older: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by the names that they have now, with one warning for each older one.

    Args:
        asker: whose options.
        older: the name now of each older one.
        options: as given.

    Raises:
        TypeError: one is given by both names.
    """
    found = {}
    for given, value in options.items():
        name = older.get(given, given)
        if name in found or (name != given and name in options):
            raise TypeError(f"{asker}({name}) was called {given!r} before, and both are given")
        if name != given:
            warn_once(f"{asker}({given}=...) is called {name!r} now: write {name}=")
        found[name] = value
    return found


def refuse_old(kind: type[Stage]) -> None:
    """Raise for a class of the user's that is written as stages were before they were dataclasses."""
    found = [name for name in _BEFORE if name in vars(kind)]
    if "process" in vars(kind) and Stage in kind.__bases__:
        found.append("process")
    if Stage in kind.__bases__:
        found.append("nothing that says how it is carried out")
    if is_ours(kind) or not found:
        return
    parameters = list(
        inspect.signature(vars(kind).get("__init__", lambda: None)).parameters.values()
    )
    lines = [f"class {kind.__name__}(trainpipes.RowStage):"]
    for parameter in parameters:
        if parameter.name not in ("self", "source") and parameter.kind.name[:3] != "VAR":
            default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
            kinds = parameter.annotation
            said = kinds if isinstance(kinds, str) else getattr(kinds, "__name__", "object")
            lines.append(f"    {parameter.name}: {'object' if said == '_empty' else said}{default}")
    lines.append("    def apply(self, row): ...")
    raise ConfigError(
        f"{kind.__name__} defines {', '.join(found)}, and a stage is a dataclass of its options now: leave "
        "them out, list the options as fields, and define apply() of a RowStage, TableStage or BatchStage:\n"
        + "\n".join(lines)
    )


def made(stage: Stage, name: str) -> bool:
    """Whether an attribute is made of the options, as a ``cached_property`` is."""
    return hasattr(inspect.getattr_static(type(stage), name, None), "__get__")


def check_class(kind: type[Stage]) -> None:
    """Raise for a class of the user's whose options have names that mean something else."""
    if is_ours(kind):
        return
    bases: list[Any] = [base for base in kind.__mro__ if is_ours(base) and base is not Stage]
    known = {field.name for base in bases for field in dataclasses.fields(base)}
    ours = {name for base in (*bases, Stage) for name in vars(base)} - known
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in sorted(names & ours):
        raise ConfigError(
            f"{kind.__name__}: every stage has {name!r}, so that an option needs another name; to set it for "
            f"the class, leave its type out: {name} = ..."
        )
    for name in sorted(kind.free - names):
        raise ConfigError(
            f"{kind.__name__}: free is a frozenset of options, and there is no {name!r}"
        )


def same(a: Any, b: Any) -> bool:
    """Equality of options, also of arrays, tensors and stages."""
    if a is b:
        return True
    if isinstance(a, Stage) and isinstance(b, Stage):
        return type(a) is type(b) and same(a.options, b.options)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and np.array_equal(a, b)
    equals = getattr(a, "equals", None)
    return bool(equals(b) if callable(equals) and type(a) is type(b) else a == b)


def snake_case(name: str) -> str:
    """``PadCollate`` -> ``pad_collate``."""
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def show(value: Any) -> str:
    """A short form of an option for ``repr``: functions by name, file and line."""
    code = getattr(value, "__code__", None)
    if code is not None:
        name = getattr(value, "__qualname__", "?").replace("<locals>.", "")
        return f"{name} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
    text = written(value) if isinstance(value, pa.Schema) else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({type(value).__name__})"


def identify(value: Any) -> Any:
    """What stands for an option in a fingerprint: plain values as they are, functions by module
    and qualified name, arrays and bytes by their content, other objects by what their
    ``fingerprint()`` says, else by their type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): identify(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [identify(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted((identify(v) for v in value), key=repr)
    if isinstance(value, bytes):
        return f"sha256:{hashlib.sha256(value).hexdigest()[:16]}"
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        content = np.ascontiguousarray(value).tobytes()
        if value.dtype.hasobject:  # else by where its objects lie in memory
            content = repr(value.tolist()).encode()
        digest = hashlib.sha256(content).hexdigest()[:16]
        return f"{value.dtype}{list(value.shape)}:{digest}"
    if isinstance(value, torch.Tensor) and value.numel() > 1000:  # its text leaves some out
        return f"{value.dtype}{list(value.shape)}:{tensor_digest(value)[:16]}"
    if isinstance(value, pa.Table):
        return f"table[{len(value)}]:{table_digest(value)[:16]}"
    if isinstance(value, Stage):
        return value.identity()
    if hasattr(value, "fingerprint"):
        return json.loads(json.dumps(value.fingerprint()))
    qualified = getattr(value, "__qualname__", None)
    if qualified is not None:
        return f"{getattr(value, '__module__', '?')}.{qualified}"
    inner = getattr(value, "func", None)  # functools.partial
    if inner is not None:
        return {"function": identify(inner), "arguments": identify([value.args, value.keywords])}
    return f"{type(value).__module__}.{type(value).__qualname__}: {stable_text(value)}"


def stable_text(value: Any) -> str:
    """``str`` of a value whose class defines one (a dtype, an expression), else nothing."""
    named = any({"__repr__", "__str__"} & vars(c).keys() for c in type(value).__mro__[:-1])
    return str(value) if named else ""
