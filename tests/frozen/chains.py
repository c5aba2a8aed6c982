"""The chains, as they are written down in ``chains.txt``: number, digest of what it gave, and the chain.

A chain is plain data in words of its own, which ``adapter.py`` puts into the library's:

    {"source": [name, options], "stages": [[name, options], ...], "run": {...}}

Texts that begin with "$" are code. Options of "" are given by place. ``run`` says how it is read: by the
pipeline or a ``Loader``, how many epochs, and the legs: [ranks, workers, until], where ``until`` is a number
of items of each rank, "last" (the last item has come) or "end" (the epoch has ended).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["FILE", "Chain", "Line", "read", "sample", "short", "write"]

FILE = Path(__file__).parent / "chains.txt"
ALWAYS = "# always: "

Chain = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """What is written down of one chain."""

    digest: str
    chain: Chain


@cache
def read() -> dict[int, Line]:
    """What is written down, by number."""
    found = {}
    for line in FILE.read_text().splitlines():
        if not line.startswith("#"):
            number, digest, chain = line.split(" ", 2)
            found[int(number)] = Line(digest, json.loads(chain))
    return found


def sample() -> list[int]:
    """The chains that always run."""
    lines = FILE.read_text().splitlines()
    return [int(n) for line in lines if line.startswith(ALWAYS) for n in line.split()[2:]]


def write(digests: Mapping[int, str]) -> None:
    """Write new digests of some chains."""
    lines = read()
    lines |= {number: replace(lines[number], digest=digest) for number, digest in digests.items()}
    head = [line for line in FILE.read_text().splitlines() if line.startswith("#")]
    for number, line in sorted(lines.items()):
        chain = json.dumps(line.chain, separators=(",", ":"), ensure_ascii=False)
        head.append(f"{number} {line.digest} {chain}")
    FILE.write_text("\n".join(head) + "\n")


def short(chain: Chain) -> str:
    """A chain in one line: its stages, and how it is read."""
    name, options = chain["source"]
    if name == "recipe":
        name = f"recipe:{options['name']}"
    parts = options.get("parts")
    if parts:
        each = parts.values() if isinstance(parts, dict) else parts
        name += f"({','.join(part['source'][0] for part in each)})"
    legs = " ".join(
        f"{ranks}{'w' if workers else ''}:{'' if until is None else until}"
        for ranks, workers, until in chain["run"]["legs"]
    )
    return f"{' '.join([name, *(stage[0] for stage in chain['stages'])])} | {legs}"
