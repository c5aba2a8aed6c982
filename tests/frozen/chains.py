"""The chains, as they are written down in ``chains.txt``: a line each, of four parts.

The number; the digest of what it gave; how it is read: by the pipeline or a ``Loader``, so many epochs or at
most so many items, and the legs [ranks, workers, epochs, items of each rank, "own" where each rank goes on
from its own state]; and the chain as code. The first line names the chains that always run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["FILE", "Chain", "read", "sample", "write"]

FILE = Path(__file__).parent / "chains.txt"


class Chain(NamedTuple):
    """What is written down of one chain."""

    digest: str
    plan: dict[str, Any]
    code: str


@cache
def read() -> dict[int, Chain]:
    """All chains, by number."""
    found = {}
    for line in FILE.read_text().splitlines()[1:]:
        number, digest, plan, code = line.split("\t")
        found[int(number)] = Chain(digest, json.loads(plan), code)
    return found


def sample() -> list[int]:
    """The chains that always run."""
    return [int(word) for word in FILE.read_text().partition("\n")[0].split()[2:]]


def write(digests: Mapping[int, str]) -> None:
    """Write new digests of some chains."""
    head, *lines = FILE.read_text().splitlines()
    for place, line in enumerate(lines):
        number, digest, rest = line.split("\t", 2)
        lines[place] = f"{number}\t{digests.get(int(number), digest)}\t{rest}"
    FILE.write_text("\n".join([head, *lines]) + "\n")
