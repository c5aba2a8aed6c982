"""Faults in the library's code, all in one copy of it, switched on one at a time.

A fault is one expression written otherwise: another comparison, another sign, a number one higher. It is
known by the function that it is in and by its text, not by its file: code that moves keeps its faults.
"""

from __future__ import annotations

import ast
import copy
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["LIST", "Fault", "draw", "faults", "instrument", "save"]

LIST = Path(__file__).parent / "faults.json"
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
INNER = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
#: What a copy of the library gets: which fault is on, and where it is asked, the test that asks.
SWITCH = '''"""Which fault is on. ``RECORD`` names a folder for the tests that come by each."""

import hashlib
import os

ACTIVE = int(os.environ.get("FAULT", -1))
RECORD = os.environ.get("FAULT_RECORD")
_seen = set()


def on(number):
    if RECORD:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
        if (number, test) not in _seen and test:
            _seen.add((number, test))
            folder = os.path.join(RECORD, str(number))
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, hashlib.sha1(test.encode()).hexdigest()), "w") as file:
                file.write(test)
    return number == ACTIVE
'''


@dataclass(frozen=True)
class Fault:
    """One expression written otherwise.

    Attributes:
        function: the qualified name of the function that it is in.
        nth: which of the expressions in it that read alike.
        old: the expression.
        new: what stands there instead.
        area: a word for the part of the library, for the table.
    """

    function: str
    nth: int
    old: str
    new: str
    area: str


def faults() -> list[Fault]:
    """The faults of the list."""
    return [Fault(**one) for one in json.loads(LIST.read_text())]


def save(found: list[Fault]) -> None:
    LIST.write_text(json.dumps([asdict(one) for one in found], indent=0, ensure_ascii=False) + "\n")


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    def within(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".lstrip(".")
                if not isinstance(child, ast.ClassDef):
                    yield inner, child
                yield from within(child, inner)
            else:
                yield from within(child, name)

    return within(tree, "")


def _expressions(function: ast.AST) -> Iterator[ast.expr]:
    """Those of a function's own body: not of functions in it, defaults or annotations."""
    todo: list[ast.AST] = list(getattr(function, "body", []))
    while todo:
        node = todo.pop(0)
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.JoinedStr | ast.Raise
        ):
            continue
        if isinstance(node, ast.AnnAssign):
            todo[:0] = [one for one in (node.target, node.value) if one is not None]
            continue
        if isinstance(node, ast.match_case):
            todo[:0] = [one for one in (node.guard, *node.body) if one is not None]
            continue
        if isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp | ast.UnaryOp | ast.Constant):
            yield node
        todo[:0] = ast.iter_child_nodes(node)


def _otherwise(node: ast.expr) -> ast.expr | None:
    """The expression with a fault in it, if it is of a kind that has one."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and len(new.ops) == 1 and type(new.ops[0]) in SWAPS:
        new.ops[0] = SWAPS[type(new.ops[0])]()
        return new
    if isinstance(new, ast.BinOp | ast.BoolOp) and type(new.op) in SWAPS:
        if isinstance(new, ast.BinOp) and any(
            isinstance(side, ast.JoinedStr) for side in ast.walk(new)
        ):
            return None
        new.op = SWAPS[type(new.op)]()
        return new
    if isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        return new.operand
    if isinstance(new, ast.Constant) and type(new.value) in (int, bool):
        new.value = (not new.value) if isinstance(new.value, bool) else new.value + 1
        return new
    return None


def _found(path: Path, area: str) -> Iterator[tuple[Fault, ast.expr]]:
    for function, node in _functions(ast.parse(path.read_text())):
        alike: dict[str, int] = {}
        for one in _expressions(node):
            text = ast.unparse(one)
            nth = alike[text] = alike.get(text, -1) + 1
            new = _otherwise(one)
            if new is not None:
                yield Fault(function, nth, text, ast.unparse(new), area), one


def draw(root: Path, areas: dict[str, tuple[list[str], int]], seed: int) -> list[Fault]:
    """So many faults of each area, of its files."""
    drawn = []
    for area, (patterns, count) in areas.items():
        files = sorted({path for pattern in patterns for path in root.glob(pattern)})
        at_all = [fault for path in files for fault, _ in _found(path, area)]
        drawn += random.Random(f"{seed} {area}").sample(at_all, count)
    return drawn


def instrument(root: Path, to: Path, wanted: list[Fault]) -> list[int]:
    """Write a copy of a source tree with all faults in it, none of which is on.

    Returns:
        the numbers of those that are not found: their code is no more, or is there more than once.
    """
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(root, to, ignore=shutil.ignore_patterns("__pycache__"))
    (to / "_faults.py").write_text(SWITCH)
    places: dict[Fault, list[tuple[Path, ast.expr]]] = {}
    for path in sorted(to.rglob("*.py")):
        for fault, node in _found(path, ""):
            places.setdefault(fault, []).append((path, node))
    lost, edits = [], {}
    for number, fault in enumerate(wanted):
        there = places.get(Fault(fault.function, fault.nth, fault.old, fault.new, ""), [])
        if len(there) != 1:
            lost.append(number)
            continue
        path, node = there[0]
        edits.setdefault(path, []).append((node, number, fault))
    for path, all_of_it in edits.items():
        lost += _write(path, all_of_it)
    return sorted(lost)


def _write(path: Path, edits: list[tuple[ast.expr, int, Fault]]) -> list[int]:
    """Write them into a file, but for those that are within another one."""
    text = path.read_bytes()
    starts = [0]
    for line in text.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    spans = []
    for node, number, fault in edits:
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        spans.append((start, stop, number, fault))
    spans.sort()
    within, out, at = [], b"", 0
    for start, stop, number, fault in spans:
        if start < at:
            within.append(number)
            continue
        out += text[at:start]
        out += b"((%s) if _fault_on(%d) else (" % (fault.new.encode(), number)
        out += text[start:stop] + b"))"
        at = stop
    out += text[at:]
    lines = out.decode().split("\n")
    tree = ast.parse(out)
    body = tree.body
    first = 0
    for node in body:
        doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not (doc or future):
            break
        first = node.end_lineno or 0
    lines.insert(first, "from trainpipes._faults import on as _fault_on")
    path.write_text("\n".join(lines))
    return within
