"""What names kept rows: a digest of the data and of the stages that made them, functions included.

Pure functions, called by the thread that plans.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from trainpipes.kinds.options import identify
from trainpipes.kinds.own_class import is_ours
from trainpipes.kinds.stage import Stage
from trainpipes.storage.caching.contents import Contents


def digest_of(*parts: Any) -> str:
    """A SHA-256 digest of values of JSON types, in hexadecimal."""
    # The script that was started is a module of another name in processes that it spawns, and objects
    # lie elsewhere in each.
    text = json.dumps(parts).replace("__mp_main__.", "__main__.")
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    return hashlib.sha256(text.encode()).hexdigest()


def cache_key(stages: Sequence[Stage], asker: str, *, strict: bool = True) -> list[Any]:
    """What identifies stages and what they do, of JSON types.

    More careful than a state's fingerprint, which goes by names: lambdas share theirs, and a function
    that was edited keeps it. See ``Contents`` for what a function is known by; with ``version=`` it is
    known by that. A stage of the user's own is known by its class, too.

    Args:
        stages: first one first.
        asker: who keeps their rows, for messages.
        strict: whether it is refused that a function uses what cannot be told from others.

    Raises:
        ConfigError: one does.
    """
    try:
        release = version("trainpipes")
    except PackageNotFoundError:  # run from its sources
        release = ""
    contents = Contents(asker, strict)
    return [release, [[stage.identity(), _done_by(stage, contents)] for stage in stages]]


def _done_by(stage: Stage, contents: Contents) -> dict[str, str]:
    """What a class of the user's own does, and each option that is known by its name or text only."""
    identity = stage.identity()
    found = {
        name: contents.digest(value, f"{stage.name}({name})")
        for name, value in sorted(stage.options.items())
        if name in identity and identity[name] in (identify(value), str(value))
    }
    if not is_ours(type(stage)):
        found["class"] = contents.digest(type(stage), stage.name)
    return found
