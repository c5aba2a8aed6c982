"""Options that are plain values, and optional packages: an error unless they are right, or installed. And the
type of arrays of row numbers, which every room writes.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from inspect import (
    isasyncgenfunction,
    iscoroutinefunction,
    isfunction,
    isgeneratorfunction,
    signature,
)
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainpipes import errors

#: Numbers of rows, and other counts.
IntArray = npt.NDArray[np.int64]
#: The largest count that arrays of row numbers can hold.
LARGEST = 2**63 - 1
#: Characters of a path, at most.
LONGEST_PATH = 4096
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE)
#: Names of packages for pip, where Python has another name or not every version will do.
_REQUIREMENTS = {
    "PIL": "pillow",
    "lance": "pylance",
    "gigatoken": "'gigatoken>=0.10,<0.11'",
    "ray": "'ray[train]>=2.40,<3'",
    "yaml": "pyyaml",
}
#: Lists and dicts within one another, at most.
DEEPEST = 100
#: Bits of an integer, at most: floats reach as far.
MOST_BITS = 1023


def wrong(option: str, rule: str, value: Any, way: str = "") -> errors.ConfigError:
    """The error of an option with a bad value.

    >>> wrong("batch(batch_size)", "an integer of 1 or more", 0, "leave it out")
    ConfigError('batch(batch_size) must be an integer of 1 or more, got 0; leave it out')
    """
    return errors.ConfigError(
        f"{option} must be {rule}, got {errors.shown(value)}{way and f'; {way}'}"
    )


def require(good: Any, option: str, rule: str, value: Any, way: str = "") -> None:
    """Raise ``wrong(...)`` unless an option is good."""
    if not good:
        raise wrong(option, rule, value, way)


def whole_number(
    value: Any, least: int | None, option: str, meaning: str = "", most: int = LARGEST
) -> int:
    """``value``, if it is an integer from ``least`` to ``most``."""
    whole = _is_int(value)
    bound = "" if least is None else f" of {least} or more"
    if least is not None and whole and value > most:
        bound = f" of {most} or less"
    good = whole and (least is None or least <= value <= most)
    require(good, option, f"an integer{bound}{meaning and f' ({meaning})'}", value)
    return int(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def fraction(value: Any, option: str) -> float:
    """``value``, if it is a number from 0 to 1."""
    number = _is_int(value) or isinstance(value, float | np.floating)
    require(number and 0 <= value <= 1, option, "a number from 0 to 1", value)
    return float(value)


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a float holds, neither infinite nor NaN."""
    number = _is_int(value) or isinstance(value, float | np.floating)
    try:
        return number and bool(np.isfinite(float(value)))
    except OverflowError:
        return False


def checked_schema(value: Any, option: str) -> pa.Schema | None:
    """``value``, if it is None or a schema that names each column once."""
    if value is None:
        return None
    rule = 'a pyarrow.Schema, such as pa.schema([("x", pa.int64())])'
    require(isinstance(value, pa.Schema) and value.names, option, rule, value)
    _once(value.names, option)
    return value


def text(value: Any, option: str) -> str:
    require(value == "" or is_name(value), option, "text", value)
    return str(value)


def flag(value: Any, option: str) -> bool:
    require(isinstance(value, bool), option, "True or False", value)
    return bool(value)


def byte_count(value: Any, option: str, least: int = 1) -> int:
    """A number of bytes, as an integer or as text with a unit; raises ConfigError below ``least``.

    >>> byte_count("1.5 GB", "x"), byte_count("4MiB", "x"), byte_count(10, "x")
    (1500000000, 4194304, 10)
    """
    written = value
    match = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    if match:
        number, prefix, binary = match.groups()
        power = " kmgtp".index(prefix.lower() or " ")
        value = int(float(number) * (1024 if binary else 1000) ** power)
    bound = f" of {least:,} or more" if least > 1 else ""
    rule = f'a number of bytes{bound}, such as 500_000_000 or "500MB"'
    require(_is_int(value) and value >= least, option, rule, written)
    return int(value)


def refuse_special(path: str, mode: int | None = None) -> None:
    """Raise if a local path is a pipe, a socket or a device."""
    if mode is None:
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError):
            return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise errors.UnreadableError(
            f"{path} must be a file, got a pipe, a socket or a device: write what comes from it to a file",
            path=path,
        )


def is_path(value: Any) -> bool:
    """Whether a value can be the path of a file."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    return 0 < len(path) <= LONGEST_PATH and "\0" not in str(path)


def local_path(value: Any, option: str) -> str:
    """``value`` as text, if it is a path on this machine."""
    require(is_path(value), option, "a path", value)
    path = str(os.fspath(value))
    local = "://" not in path
    require(local, option, "a path on this machine", path, "write there, and copy it")
    return path


def takes(function: Any, arguments: int) -> bool:
    """Whether a value is a function of so many arguments, as far as it says.

    >>> takes(lambda table: table, 2), takes(lambda table, *rows: table, 2)
    (False, True)
    """
    if not callable(function):
        return False
    try:
        signature(function).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:  # it does not say
        return True
    return True


def several(value: Any) -> bool:
    """Whether a value is a sequence in a fixed order."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def one_by_one(values: Sequence[Any]) -> Sequence[Any]:
    """Arguments, or the items of a single list or tuple."""
    first = values[0] if len(values) == 1 else None
    return first if isinstance(first, list | tuple) else values


def column_name(value: Any, option: str) -> str:
    require(is_name(value), option, "the name of a column", value)
    return str(value)


def is_name(value: Any) -> bool:
    """Whether a value can be the name of a column: text that UTF-8 can hold."""
    return isinstance(value, str) and bool(value) and not re.search("[\ud800-\udfff]", value)


def is_given_name(value: Any) -> bool:
    """Whether rows can have a column of the name: also "", as pandas writes it for an index to CSV."""
    return value == "" or is_name(value)


def column_names(
    value: Any, option: str, least: int = 1, is_valid: Callable[[Any], bool] = is_name
) -> list[str]:
    """The names of a column or of several, each once."""
    names = [value] if isinstance(value, str) else value
    good = several(names) and len(names) >= least
    good = good and all(map(is_valid, names))
    require(good, option, "a column name or several in a list", value)
    _once(names, option)
    return list(names)


def _once(names: Sequence[str], option: str) -> None:
    twice = sorted(repeated(names))
    if twice:
        raise errors.ConfigError(
            f"{option} must name each column once, got {errors.shown(twice[0])} twice"
        )


def repeated(names: Iterable[str]) -> list[str]:
    """The names that come more than once, in order.

    >>> repeated(["b", "a", "c", "a", "b", "b"])
    ['b', 'a']
    """
    return [name for name, count in Counter(names).items() if count > 1]


# How options are declared: the function in Annotated is called with the value and the option's name


@dataclass(frozen=True)
class Ge:
    """An integer from ``least`` to ``most``; any integer where ``least`` is None."""

    least: int | None
    most: int = LARGEST

    def __call__(self, value: Any, option: str) -> int:
        return whole_number(value, self.least, option, most=self.most)


@dataclass(frozen=True)
class Each:
    """A list of values that pass ``check``."""

    check: Callable[[Any, str], Any]

    def __call__(self, value: Any, option: str) -> None:
        require(several(value), option, "a list", value)
        for element in value:
            self.check(element, option)


def function(value: Any, option: str) -> None:
    require(callable(value), option, "a function", value)
    called = _called(value)
    waits = iscoroutinefunction(called) or isasyncgenfunction(called)
    way = "call asyncio.run() in it, or ask with threads: map(fn, num_workers=16)"
    require(not waits, option, "a function without async", value, way)


def returning(value: Any, option: str) -> None:
    """Of a function that is no generator: what it gives would be an object that is always true."""
    function(value, option)
    way = "flat_map(fn) takes one that yields rows"
    require(not isgeneratorfunction(_called(value)), option, "a function that returns", value, way)


def _called(value: Any) -> Any:
    """What a call of a value calls: of an object its method."""
    kind = type(value)
    method = None if isinstance(value, type) else getattr(kind, "__call__", None)  # noqa: B004
    return method if isfunction(method) else value


Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(None)]
Share = Annotated[float, fraction]
ColumnName = Annotated[str, column_name]
ColumnNames = Annotated[str | Sequence[str], column_names]
Text = Annotated[str, text]
Schema = Annotated[pa.Schema, checked_schema]
Function = Annotated[Callable[..., Any], function]
Returning = Annotated[Callable[..., Any], returning]


def need(package: str, feature: str, oldest: str = "") -> None:
    """Raise unless a package of this version is installed."""
    if find_spec(package) is None:
        raise errors.MissingExtraError(
            f"{feature} needs the package {package}, which is not installed: {pip_install(package)}"
        )
    if oldest and _version(installed := version(package)) < _version(oldest):
        way = f"pip install '{package}>={oldest}'"
        raise errors.MissingExtraError(
            f"{feature} needs {package} {oldest} or later, got {installed}: {way}"
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


def pip_install(package: str) -> str:
    """The command that installs a package.

    >>> pip_install("PIL")
    'pip install pillow'
    """
    return f"pip install {_REQUIREMENTS.get(package, package)}"


def copied(value: Any, depth: int = 0) -> Any:
    """A value whose dicts and lists are copies, with Python's numbers and text in place of NumPy's."""
    if depth > DEEPEST:
        rule = f"of lists and dicts within one another up to {DEEPEST} deep"
        raise wrong("an option", rule, value, "it may hold itself")
    if type(value) is dict:
        return {copied(k): copied(inner, depth + 1) for k, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(inner, depth + 1) for inner in value)
    if isinstance(value, np.number | np.bool_ | np.str_):
        return value.item()
    if not isinstance(value, int) or type(value) is bool:
        return value
    require(value.bit_length() <= MOST_BITS, "an option", "an integer of up to 308 digits", value)
    return int(value)
