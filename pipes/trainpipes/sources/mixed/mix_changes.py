"""Makes a state of one mix a state of another.

Sources that stay go on where they stand in each shard, new ones start at their beginning, and shares are
counted anew from there, in all shards alike. The rows drawn so far still count for the schedule. Called by
the thread that loads a state.
"""

from __future__ import annotations

from typing import Any

from trainpipes._internal.text import cut
from trainpipes.columns.run import innermost, levels
from trainpipes.errors import StateError
from trainpipes.state.cursor import shard_key
from trainpipes.state.format import Position
from trainpipes.state.identity import damaged, first_difference, said

#: Options that say what a source's rows are to a mix: they stay.
KEPT = ("weight_by", "output_column")


def change_mix(saved: dict[str, Any], now: dict[str, Any], position: Position) -> None:
    """Make a state of another mix one of the mix at hand; leave it as it is where there was no mix. See
    ``MixingSource.migrate``."""
    before, after = saved["stages"][0], now["stages"][0]
    if before["stage"] != "mix" or before == after:
        return
    data = saved["data"].get("sources")
    if not isinstance(data, dict) or not isinstance(before.get("sources"), dict):
        raise damaged("it does not say what was mixed")
    for name in before["sources"]:
        if name in after["sources"]:
            _same(f"data/sources/{name}", data.get(name), now["data"]["sources"][name])
            _same(f"stages/mix/sources/{name}", *(m["sources"][name] for m in (before, after)))
    for option in KEPT:
        _same(f"stages/mix/{option}", before.get(option), after.get(option))
    if "repeat" in (before.get("stop"), after["stop"]):  # epochs are numbered otherwise
        _same("stages/mix/stop", before.get("stop"), after["stop"])
    for shard, cursor in position.cursors.items():
        if any(level.get("row") for level in levels(cursor)):
            raise StateError(
                f"{shard_key(shard)}: a stage after mix() still holds mixed rows, so that the mix "
                "cannot change here: load the state with the mix as it was; where pack() and "
                "take() are in the sources, before mix(), it can change"
            )
        place = innermost(cursor)
        place.pop("ahead", None)
        kept = place.get("sources")
        if isinstance(kept, dict) and kept:
            place["sources"] = {
                name: _without_gone(own) for name, own in kept.items() if name in after["sources"]
            }
    saved["data"], saved["stages"][0] = now["data"], after


def _without_gone(cursor: Any) -> Any:
    """A source's cursor, back in the mix if it had left."""
    if not isinstance(cursor, dict):
        return cursor
    return {key: value for key, value in cursor.items() if key != "gone"}


def _same(path: str, saved: Any, now: Any) -> None:
    found = first_difference(saved, now, path)
    if found is not None:
        where, old, new = found
        raise StateError(
            f"{cut(where)}: saved {said(old)}, now {said(new)}; allow_changes=['mix'] lets sources "
            "come and go, and their weights, schedule and max_epochs change: a source that stays, and what "
            "is counted, must be as it was; give a source that is another now another name"
        )
