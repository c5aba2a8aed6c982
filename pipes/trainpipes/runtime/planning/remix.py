"""A state of a mix whose sources, weights, schedule or repetitions were others, made one of the mix at hand.

What is promised: sources that stay go on where they stand in each shard, new ones start at their beginning,
and shares are counted anew from there, in all shards alike. The rows drawn so far still count for the
schedule.
"""

from __future__ import annotations

import json
from typing import Any

from trainpipes.errors import StateError
from trainpipes.runtime.run import innermost
from trainpipes.state import first_difference, parse, read_identity, shard_key

__all__ = ["remixed"]

#: Options that say what a source's rows are to the mix: they stay.
KEPT = ("by", "tokens", "column")


def remixed(state: dict[str, Any], plan: Any) -> dict[str, Any]:
    """The state as the mix of ``plan`` would have it; as it is where there is no mix.

    Raises:
        StateError: a source that stays is another now, or what stands above the mix holds rows of it.
    """
    saved, now = read_identity(state["pipeline"]), json.loads(plan.identity)
    mixes = [identity["stages"][0] for identity in (saved, now)]
    if any(mix["stage"] != "mix" for mix in mixes) or saved["stages"][0] == now["stages"][0]:
        return state
    before, after = mixes
    for name in before["sources"]:
        if name in after["sources"]:
            _same(f"data/sources/{name}", *(i["data"]["sources"][name] for i in (saved, now)))
            _same(f"stages/mix/sources/{name}", *(m["sources"][name] for m in mixes))
    for option in KEPT:
        _same(f"stages/mix/{option}", before.get(option), after.get(option))
    if "repeat" in (before["stop"], after["stop"]):  # epochs are numbered otherwise
        _same("stages/mix/stop", before["stop"], after["stop"])
    position = parse(state, state["pipeline"], plan.num_shards)
    changed = dict(state)
    for shard, cursor in position.cursors.items():
        here = cursor
        while "below" in here:
            if here.get("row"):
                raise StateError(
                    f"{shard_key(shard)}: a stage above mix() holds rows that were mixed and are not used "
                    "up, so that the mix cannot change here: load the state with the mix as it was, or build "
                    "the pipeline with pack() and take() in the sources, where it can"
                )
            here = here["below"]
        mixed = innermost(cursor)
        mixed.pop("ahead", None)
        kept = mixed.get("sources", {})
        if kept:
            mixed["sources"] = {
                name: {k: v for k, v in own.items() if k != "gone"}
                for name, own in kept.items()
                if name in after["sources"]
            }
        changed[shard_key(shard)] = json.dumps(cursor, separators=(",", ":"))
    saved["data"], saved["stages"][0] = now["data"], now["stages"][0]
    return {**changed, "pipeline": json.dumps(saved, separators=(",", ":"))}


def _same(path: str, saved: Any, now: Any) -> None:
    found = first_difference(saved, now, path)
    if found is not None:
        where, old, new = found
        raise StateError(
            f"{where}: saved {json.dumps(old)}, now {json.dumps(new)}; allow_changes=['mix'] lets sources "
            "come and go, and their weights, schedule and repetitions change: a source that stays, and what "
            "is counted, must be as it was; give a source that is another now another name"
        )
