"""Faults in the library's code, all in one copy of it, switched on one at a time.

A fault is an expression written otherwise (another comparison, another sign, a number one higher), a
condition turned round, a call that is left out, or an error that is not raised.
"""

from __future__ import annotations

import ast
import copy
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

__all__ = ["Fault", "all_faults", "draw", "instrument", "judged", "load", "save"]

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
#: What a copy of the library gets: which fault is on, and where it is asked, the test that asks.
SWITCH = '''"""Which fault is on: that of ``FAULT``. ``RECORD`` names a folder for the faults that each test
comes by: a file for each process, a test's name in a line of its own and then the numbers.
"""

import os

RECORD = os.environ.get("FAULT_RECORD")
_seen, _of, _out = set(), None, -1
_environment = os.environ._data


def on(number):
    if RECORD:
        _record(number)
    # Asked anew: a process may be forked from one in which another fault, or none, is on.
    return _environment.get(b"FAULT") == b"%d" % number


def _record(number):
    global _of, _out
    test = os.environ._data.get(b"PYTEST_CURRENT_TEST")
    if not test:
        return
    if (os.getpid(), test) != _of:
        if _of is None or _of[0] != os.getpid():
            os.makedirs(RECORD, exist_ok=True)
            _out = os.open(f"{RECORD}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        _of = os.getpid(), test
        _seen.clear()
        os.write(_out, b"\\n" + test.rpartition(b" (")[0] + b"\\n")
    if number not in _seen:
        _seen.add(number)
        os.write(_out, b"%d " % number)
'''


@dataclass(frozen=True)
class Fault:
    """One piece of code written otherwise.

    Attributes:
        file: the file, from the root of the library.
        function: the qualified name of the function that it is in.
        old: the code.
        new: what stands there instead.
        place: which of those in the function that are written alike.
        noticed: the test that failed; empty if none did.
        why: why no test need notice it.
    """

    file: str
    function: str
    old: str
    new: str
    place: int = 0
    noticed: str = ""
    why: str = ""

    @property
    def room(self) -> str:
        return self.file.partition("/")[0].removesuffix(".py")

    @property
    def code(self) -> tuple[str, str, str, str, int]:
        return self.file, self.function, self.old, self.new, self.place


def load(path: Path) -> list[Fault]:
    """The faults of a list, one a line."""
    return [Fault(**json.loads(line)) for line in path.read_text().splitlines()]


def save(path: Path, faults: Sequence[Fault]) -> None:
    lines = (
        {name: value for name, value in asdict(one).items() if value not in ("", 0)}
        for one in faults
    )
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


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


Node = ast.expr | ast.Raise


def _written_otherwise(function: ast.AST) -> Iterator[tuple[Node, str]]:
    """Code of a function's own body, and what stands there instead: not of functions in it, defaults or
    annotations.
    """
    todo: list[ast.AST] = list(getattr(function, "body", []))
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.JoinedStr):
            continue
        if isinstance(node, ast.Raise):
            if node.exc is not None:
                yield node, "pass"
            continue
        if isinstance(node, ast.AnnAssign):
            todo[:0] = [one for one in (node.target, node.value) if one is not None]
            continue
        if isinstance(node, ast.match_case):
            todo[:0] = [one for one in (node.guard, *node.body) if one is not None]
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node.value, "None"
        if isinstance(node, ast.If) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
            yield node.test, f"not ({ast.unparse(node.test)})"
        if isinstance(node, ast.expr) and (new := _otherwise(node)) is not None:
            yield node, ast.unparse(new)
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


def all_faults(root: Path, path: Path) -> Iterator[tuple[Fault, Node]]:
    """All faults of a file, each with the code that it replaces."""
    file = path.relative_to(root).as_posix()
    for function, body in _functions(ast.parse(path.read_text())):
        alike: Counter[tuple[str, str]] = Counter()
        for node, new in _written_otherwise(body):
            old = ast.unparse(node)
            yield Fault(file, function, old, new, alike[old, new]), node
            alike[old, new] += 1


def draw(root: Path, count: int, seed: str) -> list[Fault]:
    """So many faults of each room, and of each file at its root."""
    rooms: dict[str, list[Fault]] = {}
    for path in sorted(root.rglob("*.py")):
        for fault, _ in all_faults(root, path):
            rooms.setdefault(fault.room, []).append(fault)
    drawn = []
    for room, faults in sorted(rooms.items()):
        drawn += random.Random(f"{seed} {room}").sample(faults, min(count, len(faults)))
    return drawn


def instrument(root: Path, to: Path, faults: Sequence[Fault]) -> set[int]:
    """Write a copy of a source tree with all faults in it, none of which is on.

    Returns:
        numbers of those that are in it: none that lies within another one, or whose code is no more there.
    """
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(root, to, ignore=shutil.ignore_patterns("__pycache__"))
    (to / "_faults.py").write_text(SWITCH)
    numbers = {fault.code: number for number, fault in enumerate(faults)}
    found: set[int] = set()
    for file in sorted({fault.file for fault in faults}):
        if not (root / file).exists():
            continue
        edits = [
            (numbers[fault.code], fault, node)
            for fault, node in all_faults(root, root / file)
            if fault.code in numbers
        ]
        found |= _write(to / file, edits)
    return found


def _write(path: Path, edits: list[tuple[int, Fault, Node]]) -> set[int]:
    """Write faults into a file, but for those that are within another one."""
    text = path.read_bytes()
    starts = [0]
    for line in text.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    spans = []
    for number, fault, node in edits:
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        spans.append((start, -stop, number, fault))
    out, at, found = b"", 0, set()
    for start, stop, number, fault in sorted(spans, key=lambda span: span[:3]):
        if start < at:
            continue
        code, at_once = text[start:-stop], b"_fault_on(%d)" % number
        if fault.new == "pass":
            code = b"if not " + at_once + b": " + code
        else:
            code = b"((%s) if %s else (%s))" % (fault.new.encode(), at_once, code)
        out += text[at:start] + code
        at = -stop
        found.add(number)
    lines = (out + text[at:]).decode().split("\n")
    first = 0
    for node in ast.parse(text).body:
        doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not doc and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        first = node.end_lineno or 0
    lines.insert(first, "from trainpipes._faults import on as _fault_on")
    path.write_text("\n".join(lines))
    return found


def judged(fault: Fault, noticed: str) -> Fault:
    """The fault with the test that noticed it; what was said of one that went unnoticed stays."""
    return replace(fault, noticed=noticed, why="" if noticed else fault.why)
