"""One epoch from end to end: what came, the memory it took, and the states on the way."""

from __future__ import annotations

import json
import pickle
from typing import Any

from benchmarks.contestants.contestant import Cannot
from benchmarks.digest import Tally
from benchmarks.race import Make
from benchmarks.settings import Spec

TITLE = "A whole epoch, pretokenised: rows, memory, state"
TEXT = SLOW = MANY = False
ONCE = MEMORY = True
ENTRIES = (
    "ours", "ours-serial", "ours-workers", "blog-stateful", "blog-workers", "nodes", "hf", "hf-arrow",
    "grain", "mosaic", "litdata", "lance", "spdl",
)  # fmt: skip
QUICK = ("ours", "ours-serial", "ours-workers", "blog-stateful", "hf-arrow", "grain")
COLUMNS = (
    ("rows", "rows", ",.0f"),
    ("same", "every row once", ""),
    ("memory", "peak memory (PSS), MB", "MB"),
    ("state", "state at half, bytes", ",.0f"),
)
POSITIONS = (0.1, 0.5, 0.9)


def measure(make: Make, spec: Spec) -> dict[str, Any]:
    contestant = make()
    at = {int(contestant.data.batches * part): part for part in POSITIONS}
    states: dict[float, bytes] = {}
    after: dict[float, Tally] = {}
    cannot = ""
    tally = Tally()
    sizes: dict[float, int] = {}
    for batch in contestant.epoch():
        tally.add(batch)
        for follower in after.values():
            if follower.batches < spec.settings.check:
                follower.add(batch)
        if tally.batches in at and not cannot:
            part = at[tally.batches]
            try:
                state = contestant.state()
                states[part] = pickle.dumps(state)
                sizes[part] = size(state)
                after[part] = Tally()
            except Cannot as reason:
                cannot = str(reason)
    followers = {part: (t.batches, t.sequence) for part, t in after.items()}
    spec.states.parent.mkdir(parents=True, exist_ok=True)
    spec.states.write_bytes(pickle.dumps((states, followers)))
    made = contestant.data.made
    same = tally.multiset == made["digest"]
    return {
        "rows": tally.rows,
        "tokens": tally.tokens,
        "right": float(same),
        "same": "yes" if same else f"no: {tally.rows - made['rows']:+,} rows",
        "state": cannot or sizes.get(0.5, "none"),
    }


def size(state: Any) -> int:
    """Bytes of a state as JSON, or pickled where it cannot be JSON."""
    try:
        return len(json.dumps(state))
    except TypeError:
        return len(pickle.dumps(state))
