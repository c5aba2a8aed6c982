"""Faults in the library's code, all in one copy of it, switched on one at a time.

A fault is one expression written otherwise: another comparison, another sign, a number one higher.
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

__all__ = ["Fault", "draw", "instrument", "load", "save"]

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
        file: the file, from the root of the library.
        function: the qualified name of the function that it is in.
        old: the expression.
        new: what stands there instead.
        area: a word for the part of the library, for the table.
    """

    file: str
    function: str
    old: str
    new: str
    area: str


def load(folder: Path) -> list[Fault]:
    """The faults of a record."""
    return [Fault(**one) for one in json.loads((folder / "faults.json").read_text())]


def save(folder: Path, found: list[Fault]) -> None:
    text = json.dumps([asdict(one) for one in found], indent=0, ensure_ascii=False)
    (folder / "faults.json").write_text(text + "\n")


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


def _found(root: Path, path: Path, area: str) -> Iterator[tuple[Fault, ast.expr]]:
    file = path.relative_to(root).as_posix()
    for function, node in _functions(ast.parse(path.read_text())):
        for one in _expressions(node):
            if (new := _otherwise(one)) is not None:
                yield Fault(file, function, ast.unparse(one), ast.unparse(new), area), one


def draw(
    root: Path, areas: dict[str, tuple[list[str], int]], seed: str
) -> list[tuple[Fault, ast.expr]]:
    """So many faults of each area, of its files."""
    drawn: list[tuple[Fault, ast.expr]] = []
    for area, (patterns, count) in areas.items():
        files = sorted({path for pattern in patterns for path in root.glob(pattern)})
        at_all = [fault for path in files for fault in _found(root, path, area)]
        drawn += random.Random(f"{seed} {area}").sample(at_all, count)
    return drawn


def instrument(root: Path, to: Path, drawn: list[tuple[Fault, ast.expr]]) -> list[Fault]:
    """Write a copy of a source tree with all faults in it, none of which is on.

    Returns:
        those that are in it: none that lies within another one.
    """
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(root, to, ignore=shutil.ignore_patterns("__pycache__"))
    (to / "_faults.py").write_text(SWITCH)
    by_file: dict[str, list[tuple[Fault, ast.expr]]] = {}
    for fault, node in drawn:
        by_file.setdefault(fault.file, []).append((fault, node))
    found: list[Fault] = []
    for file, all_of_it in by_file.items():
        _write(to / file, all_of_it, found)
    return found


def _write(path: Path, edits: list[tuple[Fault, ast.expr]], found: list[Fault]) -> None:
    """Write them into a file, but for those that are within another one."""
    text = path.read_bytes()
    starts = [0]
    for line in text.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    spans = []
    for fault, node in edits:
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        spans.append((start, stop, fault))
    out, at = b"", 0
    for start, stop, fault in sorted(spans, key=lambda span: (span[0], -span[1])):
        if start >= at:
            out += text[at:start] + b"((%s) if _fault_on(%d) else (" % (
                fault.new.encode(),
                len(found),
            )
            out += text[start:stop] + b"))"
            at = stop
            found.append(fault)
    lines = (out + text[at:]).decode().split("\n")
    first = 0
    for node in ast.parse(text).body:
        doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not doc and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        first = node.end_lineno or 0
    lines.insert(first, "from trainpipes._faults import on as _fault_on")
    path.write_text("\n".join(lines))
