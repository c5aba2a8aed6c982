"""Filters of pyarrow to text that ``parse_expression`` reads.

pyarrow tells what an expression is only by printing it, and names of columns as they are. So what it prints
is parsed, written as text in each way that it may be meant, read again, and compared; an expression that does
not come back equal is not written.
"""

from __future__ import annotations

import ast
import itertools
import json
import keyword
import re

import pyarrow.compute as pc

from trainpipes._internal.shown import shown
from trainpipes.config.expressions import ASKED, LONGEST, OF_ONE, parse_expression

__all__ = ["expression_text"]

#: Words of which every meaning is tried, at most.
MOST_DOUBTFUL = 6
#: What has no form as text, by how pyarrow prints it.
_LACKING = {
    r"FieldPath\(": "a column by its number",
    r"\d{4}-\d\d-\d\d": "a date or time",
    r"(?<!\w)-?(nan|inf)\b": "NaN or infinity",
    r"\bnull\b": "null as a value",
    r"nan_is_null=true": "an option of a function, nan_is_null",
}


def expression_text(expression: pc.Expression) -> str:
    """The text that ``parse_expression`` reads as that expression.

    Raises:
        ValueError: there is none.

    >>> expression_text((pc.field("x") > 20) & pc.field("lang").isin(["en", "de"]))
    "x > 20 and lang in ['en', 'de']"
    """
    printed = str(expression)
    if len(printed) > LONGEST:
        raise _refused(printed, f"more than {LONGEST:,} characters")
    try:
        parser = _Printed(printed)
        tree = parser.whole()
    except (ValueError, RecursionError):
        raise _refused(
            printed, "a function, or a column's name, that text has no form for"
        ) from None
    for meanings in _meanings([list(texts) for _, texts in parser.doubtful]):
        for (node, _), meaning in zip(parser.doubtful, meanings, strict=True):
            node.id = meaning
        text = ast.unparse(tree)
        try:
            if parse_expression(text).equals(expression):
                return text
        except ValueError:
            continue
    raise _refused(
        printed,
        "a value of a type that text does not tell, such as bytes or pa.scalar(1, pa.int32()), or a column's "
        "name that reads as something else",
    )


def _refused(printed: str, otherwise: str) -> ValueError:
    """The error for an expression: says which part of it has no form."""
    outside = re.sub(r"\"(?:[^\"\\]|\\.)*\"", "", printed)
    part = next((said for look, said in _LACKING.items() if re.search(look, outside)), otherwise)
    return ValueError(
        f"the expression {shown(printed)} has no form as text, as it has {part}: write it "
        "with columns, comparisons, in, and, or, not; or put it behind as a .map_batches() of a function"
    )


def _meanings(each: list[list[str]]) -> list[tuple[str, ...]]:
    """In which ways doubtful words may be meant together."""
    if len(each) > MOST_DOUBTFUL:
        return list(zip(*each, strict=False))
    return list(itertools.product(*each))


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
        doubtful: words that may be meant in several ways, and these.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        self._ends: list[tuple[int, int]] = []  # of each token in the text
        self.doubtful: list[tuple[ast.Name, tuple[str, ...]]] = []
        at = 0
        while text[at:].strip():
            token = _TOKEN.match(text, at)
            if token is None:
                raise ValueError
            self._tokens.append((str(token.lastgroup), token[str(token.lastgroup)]))
            self._ends.append(token.span(str(token.lastgroup)))
            at = token.end()
        self._at = 0

    def whole(self) -> ast.expr:
        found = self._one(commas=True)
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

    def _sees(self, text: str, later: int = 0) -> bool:
        at = self._at + later
        return at < len(self._tokens) and self._tokens[at][1] == text

    def _one(self, commas: bool = False) -> ast.expr:
        """An operand; with ``commas`` one at whose place a comma can only be of a name."""
        if self._at < len(self._tokens) and self._tokens[self._at][0] == "operator":
            return _field("")
        kind, text = self._next()
        if text == "(":
            left = self._one(commas=True)
            name = self._next()[1]
            right = self._one(commas=True)
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
        return self._called(text) if self._sees("(") else self._word(self._whole_name(commas))

    def _whole_name(self, commas: bool) -> str:
        """The word before, with those that follow it: a name may have spaces, and commas."""
        first = self._at - 1
        while self._at < len(self._tokens):
            kind, text = self._tokens[self._at]
            comma = commas and text == "," and not self._sees("{", later=1)
            if not comma and (kind != "word" or text in ("and", "or")):
                break
            self._at += 1
        return self._text[self._ends[first][0] : self._ends[self._at - 1][1]]

    def _word(self, text: str) -> ast.expr:
        if text in ("true", "false"):
            return self._doubt(text.title(), _quoted(text))
        if re.fullmatch(r"-?\d+", text):
            return self._doubt(str(int(text)), repr(float(int(text))), _quoted(text))
        if re.fullmatch(r"-?\d+\.?\d*(e[-+]\d+)?", text):
            return self._doubt(repr(float(text)), _quoted(text))
        if text.isidentifier() and not keyword.iskeyword(text):
            return ast.Name(text)
        return _field(text)

    def _doubt(self, *meanings: str) -> ast.expr:
        """A word of several meanings, each as it is written; the likeliest first."""
        found = ast.Name(meanings[0])
        self.doubtful.append((found, meanings))
        return found

    def _called(self, name: str) -> ast.expr:
        self._need("(")
        if name == "FieldRef.Nested":
            return self._nested()
        first = self._one(commas=name not in _FUNCTIONS)
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
        if name not in (*ASKED, *OF_ONE):
            raise ValueError
        while self._next()[1] != ")":  # options, at their defaults or not: compared at the end
            pass
        return ast.Call(ast.Name(name), [first], [])

    def _nested(self) -> ast.expr:
        """A field of a struct."""
        names = []
        while not self._sees(")"):
            self._need("FieldRef.Name")
            self._need("(")
            self._next()
            names.append(self._whole_name(commas=True))
            self._need(")")
        self._need(")")
        return _field(*names)

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


def _field(*names: str) -> ast.expr:
    return ast.Call(ast.Name("field"), [ast.Constant(name) for name in names], [])


def _quoted(name: str) -> str:
    return ast.unparse(_field(name))
