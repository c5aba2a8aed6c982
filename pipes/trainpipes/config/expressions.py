"""Filters of pyarrow as text, both ways: ``x > 20 and lang in ["en", "de"] and not is_null(y)``.

The text is Python's grammar for comparisons, ``and``, ``or``, ``not``, ``in [...]`` and ``+ - * /``, of
columns by name (``field("a b")`` for a name of several words), texts, numbers and bools. It is parsed and
never run.

pyarrow tells what an expression is only by printing it. So what it prints is parsed, written in that form,
read again, and compared; an expression that does not come back equal is not written.
"""

from __future__ import annotations

import ast
import itertools
import json
import keyword
import operator
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trainpipes.shown import shown

__all__ = ["expression_text", "parse_expression"]

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
_ASKED = ("is_null", "is_valid", "is_nan")
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
    if name in _ASKED and len(given) == 1:
        return getattr(_expression(given[0]), name)()
    raise ValueError(
        f"there is no function {name!r} in an expression; there are {', '.join(_ASKED)}, field"
    )


def expression_text(expression: pc.Expression) -> str:
    """The text that ``parse_expression`` reads as that expression.

    Raises:
        ValueError: there is none.

    >>> expression_text((pc.field("x") > 20) & pc.field("lang").isin(["en", "de"]))
    "x > 20 and lang in ['en', 'de']"
    """
    printed = str(expression)
    refused = ValueError(
        f"the expression {shown(printed)} has no form as text: write it with columns, comparisons, in, and, "
        "or, not; or put it behind as a .map_batches() of a function"
    )
    if len(printed) > LONGEST:
        raise refused
    try:
        parser = _Printed(printed)
        tree = parser.whole()
    except (ValueError, RecursionError):
        raise refused from None
    for kinds in _kinds(len(parser.numbers)):
        for number, kind in zip(parser.numbers, kinds, strict=True):
            number.value = kind(number.value)
        text = ast.unparse(tree)
        try:
            if parse_expression(text).equals(expression):
                return text
        except ValueError:
            continue
    raise refused


def _kinds(count: int) -> list[tuple[type, ...]]:
    """Which of so many numbers without a point may be floats; they print alike."""
    if count > 6:
        return [(int,) * count, (float,) * count]
    return list(itertools.product((int, float), repeat=count))


_TOKEN = re.compile(
    r"\s*(?:(?P<string>\"(?:[^\"\\]|\\.)*\")|(?P<operator>==|!=|<=|>=|<|>)|(?P<mark>[()\[\]{},])|"
    r"(?P<word>[^\s()\[\]{},\"]+))",
    re.DOTALL,
)
_OPERATORS = {"==": ast.Eq, "!=": ast.NotEq, "<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE}
_FUNCTIONS = {
    "add_checked": ast.Add, "subtract_checked": ast.Sub, "multiply_checked": ast.Mult,
    "divide_checked": ast.Div,
}  # fmt: skip


class _Printed:
    """The syntax tree of what pyarrow prints.

    Attributes:
        numbers: constants that may be ints or floats.
    """

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        self.numbers: list[ast.Constant] = []
        at = 0
        while text[at:].strip():
            token = _TOKEN.match(text, at)
            if token is None:
                raise ValueError
            self._tokens.append((str(token.lastgroup), token[str(token.lastgroup)]))
            at = token.end()
        self._at = 0

    def whole(self) -> ast.expr:
        found = self._one()
        if self._at != len(self._tokens):
            raise ValueError
        return found

    def _next(self) -> tuple[str, str]:
        if self._at == len(self._tokens):
            raise ValueError
        self._at += 1
        return self._tokens[self._at - 1]

    def _need(self, text: str) -> None:
        if self._next()[1] != text:
            raise ValueError

    def _sees(self, text: str) -> bool:
        return self._at < len(self._tokens) and self._tokens[self._at][1] == text

    def _one(self) -> ast.expr:
        kind, text = self._next()
        if text == "(":
            left = self._one()
            name = self._next()[1]
            right = self._one()
            self._need(")")
            if name in ("and", "or"):
                return ast.BoolOp(ast.And() if name == "and" else ast.Or(), [left, right])
            if name not in _OPERATORS:
                raise ValueError
            return ast.Compare(left, [_OPERATORS[name]()], [right])
        if kind == "string":
            return ast.Constant(json.loads(text, strict=False))
        if kind != "word":
            raise ValueError
        return self._called(text) if self._sees("(") else self._word(text)

    def _word(self, text: str) -> ast.expr:
        if text in ("true", "false"):
            return ast.Constant(text == "true")
        if re.fullmatch(r"-?\d+", text):
            found = ast.Constant(int(text))
            self.numbers.append(found)
            return found
        if re.fullmatch(r"-?\d+\.?\d*(e[-+]\d+)?", text):
            return ast.Constant(float(text))
        if text.isidentifier() and not keyword.iskeyword(text):
            return ast.Name(text)
        return ast.Call(ast.Name("field"), [ast.Constant(text)], [])

    def _called(self, name: str) -> ast.expr:
        self._need("(")
        first = self._one()
        if name in _FUNCTIONS:
            self._need(",")
            second = self._one()
            self._need(")")
            return ast.BinOp(first, _FUNCTIONS[name](), second)
        if name == "invert":
            self._need(")")
            return ast.UnaryOp(ast.Not(), first)
        if name == "is_in":
            return self._is_in(first)
        if name not in _ASKED:
            raise ValueError
        while self._next()[1] != ")":  # options, at their defaults or not: compared at the end
            pass
        return ast.Call(ast.Name(name), [first], [])

    def _is_in(self, first: ast.expr) -> ast.expr:
        self._need(",")
        self._need("{")
        self._next()  # value_set=int64:
        self._need("[")
        values: list[ast.expr] = []
        while not self._sees("]"):
            if values:
                self._need(",")
            values.append(self._one())
        while self._next()[1] != ")":
            pass
        return ast.Compare(first, [ast.In()], [ast.List(values)])
