"""A state of a mix whose sources, weights, schedule or repetitions were others, made one of the mix at hand.

What is promised: sources that stay go on where they stand in each shard, new ones start at their beginning,
and shares are counted anew from there, in all shards alike. The rows drawn so far still count for the
schedule.
"""

from __future__ import annotations

import json
from typing import Any

from trainpipes.cursor import shard_key
from trainpipes.errors import StateError
from trainpipes.identity import as_old_as, damaged, first_difference, said
from trainpipes.shown import cut
from trainpipes.state import Position

__all__ = ["remix"]

#: Options that say what a source's rows are to the mix: they stay.
KEPT = ("by", "tokens", "column")


def remix(identity: dict[str, Any], position: Position, plan: Any) -> None:
    """Make a state one of the mix of ``plan``; leave it as it is where there is no mix.

    Args:
        identity: of the pipeline that saved it.
        position: where it stands.
        plan: of the pipeline that loads it.

    Raises:
        StateError: a source that stays is another now, or what stands above the mix holds rows of it.
    """
    now = json.loads(plan.identity)
    before, after = identity["stages"][0], now["stages"][0]
    if any(mix["stage"] != "mix" for mix in (before, after)) or before == after:
        return
    data = identity["data"].get("sources")
    if not all(isinstance(names, dict) for names in (data, before.get("sources"))):
        raise damaged("it does not say what was mixed")
    for name in before["sources"]:
        if name in after["sources"]:
            present = as_old_as(data.get(name), now["data"]["sources"][name])
            _same(f"data/sources/{name}", data.get(name), present)
            _same(f"stages/mix/sources/{name}", *(m["sources"][name] for m in (before, after)))
    for option in KEPT:
        _same(f"stages/mix/{option}", before.get(option), after.get(option))
    if "repeat" in (before.get("stop"), after["stop"]):  # epochs are numbered otherwise
        _same("stages/mix/stop", before.get("stop"), after["stop"])
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
        here.pop("ahead", None)
        kept = here.get("sources")
        if isinstance(kept, dict) and kept:
            here["sources"] = {
                name: {k: v for k, v in own.items() if k != "gone"}
                if isinstance(own, dict)
                else own
                for name, own in kept.items()
                if name in after["sources"]
            }
    identity["data"], identity["stages"][0] = now["data"], after


def _same(path: str, saved: Any, now: Any) -> None:
    found = first_difference(saved, now, path)
    if found is not None:
        where, old, new = found
        raise StateError(
            f"{cut(where)}: saved {said(old)}, now {said(new)}; allow_changes=['mix'] lets sources "
            "come and go, and their weights, schedule and repetitions change: a source that stays, and what "
            "is counted, must be as it was; give a source that is another now another name"
        )
