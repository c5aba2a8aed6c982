"""Options of stages: how they are declared, written in a config (YAML 1.2's scalars) and in a ``repr``, and
texts of messages about a stage, or of ``Loader``, beside its own text, by the name of its class.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, IterableDataset

from trainpipes import errors
from trainpipes._internal.checks import require, several
from trainpipes._internal.messages import nearest
from trainpipes.columns.content import table_digest, tensor_digest
from trainpipes.columns.types import written
from trainpipes.errors import shown

#: How the names of YAML's own tags begin.
STANDARD = "tag:yaml.org,2002:"

#: Where an object lies in memory, which is elsewhere in each process.
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
#: A set of texts as it prints, in an order that each process has for itself.
TEXTS = re.compile(r"""\{((?:'[^']*'|"[^"]*")(?:, (?:'[^']*'|"[^"]*"))+)\}""")

#: YAML 1.2's core schema: `yes` and `12:30` are text, `1e-4` is a float, `010` is ten.
SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", lambda _: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (
        r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
        lambda text: int(text, 0 if text[:2] in ("0o", "0x") else 10),
    ),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
}


def with_scalars(kind: Any, **members: Any) -> Any:
    """PyYAML's loader or dumper, which knows more numbers, bools and nulls: ``SCALARS``."""
    loader: Any = type(kind.__name__, (kind,), members)
    for name, (rule, _) in SCALARS.items():
        loader.add_implicit_resolver(f"{STANDARD}{name}", re.compile(rf"(?:{rule})\Z"), None)
    return loader


def declared_kinds(make: Any) -> dict[str, list[Any]]:
    """The types of each option, without those of items: ``[Sequence, NoneType]``."""
    try:
        types = get_type_hints(make)
    except Exception:  # of types that are only there for type checkers
        return {}
    kinds = {}
    for name, declared in types.items():
        union = get_origin(declared) in (Union, UnionType)
        parts = get_args(declared) if union else (declared,)
        kinds[name] = [get_origin(part) or part for part in parts]
    return kinds


def _arrow_type(text: Any) -> pa.DataType:
    inner = re.fullmatch(r"list<(?:item: )?(.{1,200})>", str(text))
    if inner is not None:
        return pa.list_(_arrow_type(inner[1]))
    try:
        return pa.type_for_alias(str(text))
    except ValueError:
        rule = "an Arrow type must be int64, string, timestamp[us], list<int32> or the like"
        raise ValueError(f"{rule}, got {shown(text)}") from None


def arrow_schema(value: Any) -> pa.Schema:
    """The schema of a mapping of names to types as text; raises ValueError.

    >>> arrow_schema({"x": "list<list<int32>>"})
    x: list<item: list<item: int32>>
      child 0, item: list<item: int32>
          child 0, item: int32
    """
    if not isinstance(value, dict):
        raise ValueError(f"a schema must be a mapping such as {{x: int64}}, got {shown(value)}")
    return pa.schema([(str(name), _arrow_type(kind)) for name, kind in value.items()])


T = TypeVar("T")
#: How a user's function draws at random there.
DRAWS = {
    "Stage": "draw in a map(fn, rng=True) before it, whose function gets a row and a generator of its own",
    "TableStage": (
        "define open(), whose function gets the numbers and epochs of the rows, and draw from these and a "
        "seed (docs/extend.md has an example), or add what is drawn by a map(fn, rng=True) before it"
    ),
    "RowStage": "use map(fn, rng=True) instead, whose function gets a row and a generator of its own",
    "FinishingStage": "use map(fn, rng=True) instead, whose function gets a batch and a generator of its own",
    "Filter": "draw in a map(fn, rng=True) before it, and look here at its column; or use sample(fraction)",
    "Fetch": "draw in a map(fn, rng=True) after it, whose function gets a row and a generator of its own",
    "FlatMap": "draw in a map(fn, rng=True) before it, which adds what was drawn to the row",
    "FromIterable": "draw from a generator that it makes, as random.Random(0), or leave out Loader(threads)",
    "ImageTransform": "draw from torch's generator, which is seeded for each row, or use map(fn, rng=True)",
    "Map": "pass rng=True: the function is called as fn(row, rng), with a generator for each row",
    "ColumnFunction": "draw in a map(fn, rng=True) before it, or in a TableStage (see docs/extend.md)",
}
_COLUMNS = "map() takes a row; map_batches(fn) takes columns of many and replaces them, with_columns(fn) adds"
_SEED = "orders are drawn with the seed of a stage: pipe.shuffle(n, seed=0)"
BATCHES = "the pipeline makes the batches: pipe.batch(batch_size)"
#: What to write instead of other libraries' options.
ELSEWHERE = {
    "Stage": {},
    "Map": {
        "batched": _COLUMNS,
        "batch_size": _COLUMNS,
        "num_proc": "use num_workers=..., method='process'",
        "remove_columns": "map() replaces the row; drop_columns() leaves columns out",
        "with_indices": "enumerate() adds the row's number as a column",
    },
    "Loader": {
        "batch_sampler": "give it to trainpipes.from_dataset(dataset, batch_sampler=...)",
        "batch_size": BATCHES,
        "collate_fn": "a stage after batch() makes the batch: pipe.batch(n).collate(fn), or pad_collate()",
        "dataset": "the pipeline is its first argument; trainpipes.from_dataset(dataset) makes one",
        "drop_last": "pipe.batch(n, drop_last=True)",
        "generator": _SEED,
        "in_order": "batches always come in order",
        "pin_memory_device": "pipe.to(device) brings batches to a device",
        "sampler": "give it to trainpipes.from_dataset(dataset, sampler=...)",
        "seed": _SEED,
        "shuffle": "a stage shuffles: pipe.shuffle(buffer_size, seed=0) before batch()",
    },
}
#: An example call, where other libraries' calls look different.
EXAMPLES = {"Stage": "", "Mix": 'mix({"a": a, "b": b}, weights={"a": 0.7, "b": 0.3})'}


def hint(of: Mapping[str, T], kind: type) -> T:
    """What a table says of a class of stages: of the first of its bases here that is in it."""
    ours = (base.__name__ for base in kind.__mro__ if base.__module__.startswith("trainpipes."))
    return next(of[name] for name in ours if name in of)


def refuse_unknown(options: Iterable[str], known: Sequence[str], kind: type, name: str) -> None:
    """Raise TypeError for an option that a class, called ``name``, does not take."""
    elsewhere = hint(ELSEWHERE, kind)
    for option in (option_name for option_name in options if option_name not in known):
        takes = f"{nearest(option, known)}; it takes {', '.join(known) or 'none'}"
        said = f": {elsewhere[option]}" if option in elsewhere else takes
        raise TypeError(f"{name}() has no option {option!r}{said}")


# Objects that have epochs, an order or a position of their own


def is_pipeline(value: Any) -> bool:
    return hasattr(value, "stages") and hasattr(value, "then")


def is_hf_stream(value: Any) -> bool:
    """Whether it is a ``datasets.IterableDataset``."""
    return all(hasattr(value, name) for name in ("features", "iter", "num_shards", "state_dict"))


def as_table(value: Any) -> str:
    """The code that makes an Arrow table of what holds columns or rows otherwise; "" for all others.

    >>> as_table({"x": [1, 2], "y": [3, 4]}), as_table([{"x": 1}]), as_table([1])
    ('pa.table(data)', 'pa.Table.from_pylist(data)', '')
    """
    if any(hasattr(value, name) for name in ("__dataframe__", "__arrow_c_stream__")):
        if isinstance(value, pa.ChunkedArray) or hasattr(value, "dtype"):  # a single column
            return 'pa.table({"x": data})'
        return "pa.table(data)"  # frames of pandas and Polars, and Arrow's readers
    if isinstance(value, Mapping):
        columns = [v for k, v in value.items() if isinstance(k, str) and _is_column(v)]
        even = len({*map(len, columns)}) == 1 and len(columns) == len(value)
        return "pa.table(data)" if even else ""
    first = value[0] if isinstance(value, list | tuple) and value else None
    if isinstance(first, pa.RecordBatch):
        return "pa.Table.from_batches(data)"
    return "pa.Table.from_pylist(data)" if isinstance(first, dict) else ""


def _is_column(value: Any) -> bool:
    return several(value) or (isinstance(value, np.ndarray) and value.ndim == 1)


def instead(value: Any) -> str:
    """What to write instead of a pipeline, a loader, a node or a stream where rows or keys are taken that
    have no position of their own; "" for all others.

    >>> from torch.utils.data import DataLoader
    >>> instead(DataLoader([1, 2]))
    'a DataLoader has an order of its own: write from_dataset(loader.dataset), then .shuffle() and .batch()'
    >>> instead([1, 2])
    ''
    """
    kind = type(value)
    ours = kind.__module__.startswith("trainpipes.")
    if is_pipeline(value):
        return "a pipeline has epochs and a state of its own: use it itself, as in pipe.map(fn)"
    if ours and is_pipeline(getattr(value, "pipeline", None)):
        return "a Loader has epochs and a state of its own: write loader.pipeline"
    if ours and isinstance(value, Iterator) and hasattr(value, "state_dict"):
        passes = "of trainpipes.nodes" if hasattr(value, "stage") else "over a pipeline"
        return f"an iterator {passes} has a position of its own: use a pipeline itself"
    if isinstance(value, DataLoader) or kind.__name__ == "StatefulDataLoader":
        return _of_loader(kind.__name__, value.dataset)
    if is_hf_stream(value):
        return (
            "a datasets.IterableDataset has epochs and a state of its own: write from_hf(dataset)"
        )
    if _is_node(value):
        return f"{kind.__name__} has a state of its own: write from_torchdata(node)"
    if _is_node(getattr(value, "root", None)):
        return (
            f"a {kind.__name__} of nodes has a state of its own: write from_torchdata(loader.root)"
        )
    return ""


def instead_of_path(value: Any) -> str:
    """What to write where a path stands in place of rows; "" for all others."""
    if not isinstance(value, str | os.PathLike):
        return ""
    return "read_parquet(path), read_json(path) and the like give the rows of files"


def _of_loader(name: str, dataset: Any) -> str:
    if is_pipeline(dataset):
        return f"a {name} over a pipeline has a position of its own: write loader.dataset"
    if is_hf_stream(dataset):
        return f"a {name} has a position of its own: write from_hf(loader.dataset)"
    if isinstance(dataset, IterableDataset):
        way = "from_iterable(loader.dataset), then .batch()"
    else:
        way = "from_dataset(loader.dataset), then .shuffle() and .batch()"
    return f"a {name} has an order of its own: write {way}"


def _is_node(value: Any) -> bool:
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
    return "torchdata.nodes.base_node.BaseNode" in names


#: Raises ConfigError unless a value is good for the option of a name.
Check = Callable[[Any, str], Any]


@functools.cache
def declared_checks(kind: Any) -> dict[str, Check]:
    """The checks of options declared as ``bool``, ``Literal`` or ``Annotated[..., check]``."""
    checks: dict[str, Check] = {}
    for field in dataclasses.fields(kind):
        owners = (c for c in kind.__mro__ if field.name in vars(c).get("__annotations__", {}))
        owner = next(owners)
        declared: Any = field.type
        if isinstance(declared, str):
            try:
                declared = eval(declared, vars(sys.modules[owner.__module__]))
            except Exception:  # of types that are not there when it runs, or are none
                continue
        union = get_origin(declared) in (Union, UnionType)
        parts = get_args(declared) if union else (declared,)
        rules = [rule for p in parts if get_origin(p) is Annotated for rule in p.__metadata__]
        if declared is bool:
            checks[field.name] = functools.partial(_one_of, (True, False))
        elif all(part is NoneType or get_origin(part) is Literal for part in parts):
            values = [value for part in parts for value in get_args(part) or (None,)]
            checks[field.name] = functools.partial(_one_of, values)
        elif rules:
            checks[field.name] = functools.partial(_good, rules, NoneType in parts)
    return checks


def _one_of(allowed: Sequence[Any], value: Any, option: str) -> None:
    good = any(type(value) is type(choice) and value == choice for choice in allowed)
    require(good, option, either(allowed), value)


def _good(checks: Sequence[Check], or_none: bool, value: Any, option: str) -> None:
    for check in () if or_none and value is None else checks:
        check(value, option)


@contextmanager
def in_our_words(name: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Where options are looked at: errors of Python or a library about an odd value become ours."""
    try:
        yield
    except (ArithmeticError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, errors.TrainpipesError):
            raise
        shown_options = ", ".join(f"{option}={shown(value)}" for option, value in options.items())
        raise errors.ConfigError(
            f"{name}() must have options that it can use, got {shown_options}: {errors.cut(str(error))}; its "
            "docstring says what they are"
        ) from error


def either(values: Sequence[Any]) -> str:
    """``"a", "b" or "c"``; None goes without saying where there are several."""
    said = [
        f'"{value}"' if isinstance(value, str) else str(value)
        for value in values
        if value is not None
    ]
    if len(said) == 1:
        return f"{said[0]} or None"
    return f"{', '.join(said[:-1])} or {said[-1]}"


def same(a: Any, b: Any) -> bool:
    """Equality of options, also of arrays, tensors and stages."""
    if a is b:
        return True
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, functools.partial) and isinstance(b, functools.partial):
        return same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and np.array_equal(a, b)
    equals = getattr(a, "equals", None)
    try:
        return bool(equals(b) if callable(equals) and type(a) is type(b) else a == b)
    except (TypeError, ValueError, RuntimeError):  # of arrays, which compare number by number
        return False


def show(value: Any) -> str:
    """An option's short form for ``repr``: functions by name, file and line."""
    if isinstance(value, functools.partial):
        return _show_partial(value)
    code = getattr(value, "__code__", None)
    if code is not None:
        name = getattr(value, "__qualname__", "?").replace("<locals>.", "")
        return f"{name} ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"
    if getattr(type(value), "__repr__", None) is object.__repr__:
        return f"{type(value).__qualname__}()".replace("<locals>.", "")
    try:
        text = errors.hidden(written(value) if isinstance(value, pa.Schema) else repr(value))
    except Exception:  # of an object within it, or of a number of many digits
        text = shown(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({type(value).__name__})"


def _show_partial(value: functools.partial[Any]) -> str:
    names = argument_names(value)
    arguments = [
        show_named(name, argument) for name, argument in zip(names, value.args, strict=False)
    ]
    arguments += [
        f"{name}={show_named(name, argument)}" for name, argument in value.keywords.items()
    ]
    return f"partial({', '.join([show(value.func), *arguments])})"


def argument_names(value: Any) -> list[str]:
    """Names of a partial's positional arguments; "" if unknown."""
    try:
        names = [
            name
            for name, parameter in inspect.signature(value.func).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):  # of some functions in C
        names = []
    return [*names, *[""] * len(value.args)][: len(value.args)]


def show_named(name: str, value: Any) -> str:
    """``show``, but nothing of an option that may be a credential."""
    return "'…'" if errors.is_secret(name) and isinstance(value, str | bytes) else show(value)


def identify_named(name: str, value: Any) -> Any:
    """``identify``, but a digest of an option that may be a credential."""
    identity = identify(value)
    return (
        errors.stand_in(identity)
        if isinstance(identity, str) and errors.is_secret(name)
        else identity
    )


def identify(value: Any) -> Any:
    """An option in a fingerprint: plain values as they are, functions by module and qualified name,
    arrays and bytes by content, other objects by ``fingerprint()``, else by type.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _identify_text(value)
    if isinstance(value, Mapping):
        return {str(k): _identify_item(str(k), v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [identify(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted((identify(v) for v in value), key=repr)
    if isinstance(value, bytes):
        return f"sha256:{hashlib.sha256(value).hexdigest()[:16]}"
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return identify(value.item())  # which of a date is one
    if isinstance(value, np.ndarray):
        content = np.ascontiguousarray(value).tobytes()
        if value.dtype.hasobject:  # else by where its objects lie in memory
            content = repr([identify(part) for part in value.reshape(-1).tolist()]).encode()
        digest = hashlib.sha256(content).hexdigest()[:16]
        return f"{value.dtype}{list(value.shape)}:{digest}"
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return f"{value.dtype}{list(value.shape)}:{tensor_digest(value)[:16]}"
    if isinstance(value, pa.Table):
        return f"table[{len(value)}]:{table_digest(value)[:16]}"
    if hasattr(value, "fingerprint"):
        return json.loads(json.dumps(value.fingerprint()))
    qualified = getattr(value, "__qualname__", None)
    if qualified is not None:
        return f"{getattr(value, '__module__', '?')}.{qualified}"
    inner = getattr(value, "func", None)  # functools.partial
    if inner is not None:
        named_parts = zip(argument_names(value), value.args, strict=False)
        named = {str(k): identify_named(str(k), part) for k, part in value.keywords.items()}
        arguments = [[identify_named(name, part) for name, part in named_parts], named]
        return {"function": identify(inner), "arguments": arguments}
    text = f"{type(value).__module__}.{type(value).__qualname__}: {stable_text(value)}"
    return errors.stand_in(text) if errors.assigns_secret(text) else _identify_text(text)


def _identify_item(key: str, value: Any) -> Any:
    is_secret = isinstance(value, str) and errors.assigns_secret(f"{key}=x")
    return errors.stand_in(value) if is_secret else identify(value)


def _identify_text(text: str) -> str:
    """A text, or its digest where a URL in it may hold a secret."""
    if "://" not in text or errors.without_url_secrets(text) == text:
        return text
    if "://…@" in (shown := errors.without_url_secrets(text)) or any(map(str.isspace, text)):
        return errors.stand_in(text)
    name = errors.known_name(text)
    return name if name == shown.partition("?")[0] else errors.stand_in(name)


def stable_text(value: Any) -> str:
    """``str`` of a value whose class defines it (a dtype, an expression), else nothing; the same in every
    process.
    """
    named = any({"__repr__", "__str__"} & vars(c).keys() for c in type(value).__mro__[:-1])
    with suppress(Exception):  # of one that fails, the type alone
        text = ADDRESS.sub("", str(value)) if named else ""
        return TEXTS.sub(lambda texts: f"{{{', '.join(sorted(texts[1].split(', ')))}}}", text)
    return ""
