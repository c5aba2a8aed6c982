"""One run of one cell, in a process of its own: ``python -m benchmarks.one <what, as JSON>``."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks import storage
from benchmarks.contestants import ENTRIES
from benchmarks.contestants.contestant import Cannot
from benchmarks.corpus import Data
from benchmarks.jobs import job
from benchmarks.settings import SETTINGS, Spec

__all__ = ["CONVERT", "run"]

#: In place of a job: the contestant writes its own format.
CONVERT = "convert"


def run(
    name: str, entry: str, folder: Path, size: str, round: int, text: bool = False
) -> dict[str, Any]:
    """A result; or why there is none, as "cannot".

    Args:
        name: of the job, or ``CONVERT``.
        entry: the contestant.
        folder: the data.
        size: of the settings.
        round: which repeat.
        text: what to convert.
    """
    settings = SETTINGS[size]
    storage.register()
    try:
        cls = ENTRIES[entry].load()
        if name == CONVERT:
            cls(Data(folder, text, settings.sizes.buffer)).convert()
            return {}
        task = job(name)
        data = Data(folder, task.TEXT, settings.sizes.buffer, slow=task.SLOW, many=task.MANY)
        states = folder / "states" / f"{entry}.pickle"
        spec = Spec(settings, round, states, ENTRIES[entry].group == "peer")
        found: dict[str, Any] = task.measure(lambda: cls(data), spec)
        return found
    except Cannot as reason:
        return {"cannot": str(reason)}
    except Exception as error:
        traceback.print_exc()
        return {"cannot": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    told["folder"] = Path(told["folder"])
    out = Path(told.pop("out"))
    out.write_text(json.dumps(run(**told)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some contestants' threads do not survive an interpreter's end
