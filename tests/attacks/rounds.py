"""What an attack is made of, and what attacks have in common."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from trainpipes.testing import digest

__all__ = ["Attack", "Round", "digests", "ends_with", "new_folder"]

#: What came of the cases of a round, each "exact", "named" or a sentence on what was wrong. An exception is
#: wrong, too.
Round = Callable[[], Iterator[str]]
#: Gives rounds for ever. What it draws with has another seed for each round.
Attack = Callable[[Path, random.Random], Iterator[Round]]


def new_folder(folder: Path) -> Path:
    return Path(mkdtemp(dir=folder))


def digests(items: Any, most: int | None = None) -> list[str]:
    return [digest(item)[:12] for item in islice(items, most)]


def ends_with(work: Callable[[], Any]) -> int:
    """What a fork of this process ends with; 0 if the work is done."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
