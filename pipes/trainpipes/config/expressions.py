"""Filters of pyarrow as text: ``x > 20 and lang in ["en", "de"] and not is_null(y)``.

The text is Python's grammar for comparisons, ``and``, ``or``, ``not``, ``in [...]`` and ``+ - * /``, of
columns by name (``field("a b")`` for a name of several words), texts, numbers and bools. It is parsed and
never run.

See printed_expressions for the way back.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trainpipes._internal.shown import shown

__all__ = ["ASKED", "LONGEST", "OF_ONE", "parse_expression"]

#: Characters of an expression, at most.
LONGEST = 8192

_COMPARED: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_REACHED: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
}  # fmt: skip
ASKED = ("is_null", "is_valid", "is_nan")
#: Functions of pyarrow.compute of one column, without options.
OF_ONE = ("abs", "binary_length", "list_value_length", "utf8_length", "utf8_lower", "utf8_upper")
_RULE = "an expression compares columns, such as x > 20 and lang in ['en', 'de']"


def parse_expression(text: str) -> pc.Expression:
    """The expression that a text stands for.

    Raises:
        ValueError: it is none.

    >>> parse_expression("x > 20 and not is_null(y)")
    <pyarrow.compute.Expression ((x > 20) and invert(is_null(y, {nan_is_null=false})))>
    """
    if len(text) > LONGEST:
        raise ValueError(f"an expression has {LONGEST:,} characters at most, got {len(text):,}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _expression(tree)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{_RULE}; got {shown(text)}") from None
    except pa.ArrowException as error:
        raise ValueError(f"{shown(text)}: {error}") from None


def _expression(node: ast.expr) -> pc.Expression:
    found = _value(node)
    return found if isinstance(found, pc.Expression) else pc.scalar(found)


def _value(node: ast.expr) -> Any:
    """An expression, or a constant."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float):
        return node.value
    if isinstance(node, ast.Name):
        return pc.field(node.id)
    if isinstance(node, ast.UnaryOp):
        inner = _value(node.operand)
        if isinstance(node.op, ast.USub) and isinstance(inner, int | float):
            return -inner
        if isinstance(node.op, ast.Not | ast.Invert):
            return ~_expression(node.operand)
    if isinstance(node, ast.BoolOp):
        join = operator.and_ if isinstance(node.op, ast.And) else operator.or_
        found = _expression(node.values[0])
        for one in node.values[1:]:
            found = join(found, _expression(one))
        return found
    if isinstance(node, ast.BinOp) and type(node.op) in _REACHED:
        return _REACHED[type(node.op)](_expression(node.left), _expression(node.right))
    if isinstance(node, ast.Compare):
        return _comparison(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _call(node.func.id, node.args)
    raise ValueError(f"{_RULE}; got {shown(ast.unparse(node))}")


def _comparison(node: ast.Compare) -> pc.Expression:
    if len(node.ops) > 1:
        raise ValueError(f"{_RULE}; join two comparisons by and: {shown(ast.unparse(node))}")
    kind, right = node.ops[0], node.comparators[0]
    left = _expression(node.left)
    if isinstance(kind, ast.In | ast.NotIn):
        if not isinstance(right, ast.List | ast.Tuple) or not right.elts:
            raise ValueError(f"in needs a list of values, got {shown(ast.unparse(right))}")
        values = [_value(one) for one in right.elts]
        if any(isinstance(one, pc.Expression) for one in values):
            raise ValueError(f"in needs a list of values, got {shown(ast.unparse(right))}")
        found = left.isin(values)
        return ~found if isinstance(kind, ast.NotIn) else found
    if type(kind) not in _COMPARED:
        raise ValueError(f"{_RULE}; got {shown(ast.unparse(node))}")
    return _COMPARED[type(kind)](left, _expression(right))


def _call(name: str, given: list[ast.expr]) -> pc.Expression:
    if name == "field":
        parts = [one.value for one in given if isinstance(one, ast.Constant)]
        if parts and len(parts) == len(given) and all(isinstance(one, str) for one in parts):
            return pc.field(*parts)
        raise ValueError("field('a b') takes the name of a column")
    if name in ASKED and len(given) == 1:
        return getattr(_expression(given[0]), name)()
    if name in OF_ONE and len(given) == 1:
        return getattr(pc, name)(_expression(given[0]))
    raise ValueError(
        f"an expression has no function {name!r}; it has {', '.join((*ASKED, *OF_ONE))} and field"
    )
