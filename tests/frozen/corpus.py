"""The file of digests, and runs of many chains at once."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from frozen.chains import Chain, draw, fingerprint, short

__all__ = [
    "FILE",
    "Line",
    "Result",
    "read",
    "run_all",
    "run_one",
    "sample",
    "small_data",
    "spread",
    "write",
]

FILE = Path(__file__).parent / "chains.txt"
#: How many chains always run.
SAMPLE = 60
ALWAYS = "# always: "
#: Seconds that one chain may take.
MOST = 120


@dataclass(frozen=True)
class Line:
    """What is written down of one chain."""

    number: int
    chain: str
    digest: str
    text: str


@dataclass(frozen=True)
class Result:
    """What a chain gave."""

    number: int
    digest: str
    kind: str
    said: str
    counted: bool = False
    accident: bool = False


def read() -> dict[int, Line]:
    """What is written down, by number."""
    found = {}
    for line in FILE.read_text().splitlines():
        if not line.startswith("#"):
            number, chain, digest, text = line.split(" ", 3)
            found[int(number)] = Line(int(number), chain, digest, text)
    return found


def write(lines: Iterable[Line], chosen: Sequence[int] | None = None) -> None:
    """Write all lines, in order, and which chains always run: those from before if they are left out."""
    chosen = sample() if chosen is None else chosen
    head = "# number, fingerprint of the chain, digest of what it gave, the chain and its legs\n"
    head += f"{ALWAYS}{' '.join(map(str, chosen))}\n"
    ordered = sorted(lines, key=lambda line: line.number)
    FILE.write_text(head + "".join(f"{x.number} {x.chain} {x.digest} {x.text}\n" for x in ordered))


def sample() -> list[int]:
    """The chains that always run."""
    for line in FILE.read_text().splitlines() if FILE.exists() else []:
        if line.startswith(ALWAYS):
            return list(map(int, line.removeprefix(ALWAYS).split()))
    return []


def line_of(result: Result) -> Line:
    chain = draw(result.number)
    refused = "refused " if result.kind == "refused" else ""
    return Line(result.number, fingerprint(chain), result.digest, refused + short(chain))


def spread(lines: Iterable[Line], count: int = SAMPLE) -> list[int]:
    """Numbers of so many chains, none of them refused, that together have as many of the sources, stages,
    options and ways of reading as they can, each of these more than once where there is room."""
    running = [line.number for line in lines if not line.text.startswith("refused ")]
    features = {number: frozenset(_features(draw(number))) for number in running}
    seen: Counter[str] = Counter()
    chosen: list[int] = []
    while features and len(chosen) < count:
        best = max(features, key=lambda n: sum(1 / 9 ** seen[one] for one in features[n]))
        seen.update(features.pop(best))
        chosen.append(best)
    return sorted(chosen)


def _features(chain: Chain) -> Iterator[str]:
    """What is special about a chain."""
    run = chain["run"]
    ranks = [leg[0] for leg in run["legs"]]
    yield f"{max(ranks)} ranks, {run['reads']}"
    yield f"elastic {len(set(ranks)) > 1}, uncounted {run['uncounted']}, endless {run['limit'] is not None}"
    yield f"processes {any(leg[1] for leg in run['legs'])}, apart {run['apart']}"
    yield from (f"until {until}" for _, _, until in run["legs"] if isinstance(until, str))
    yield from _features_of(chain)


def _features_of(part: dict[str, Any]) -> Iterator[str]:
    for name, options in [part["source"], *part["stages"]]:
        yield name
        yield from (
            f"{name} {value}" for key, value in options.items() if key in ("as", "name", "method")
        )
        yield from (f"{name}.{option}" for option in options if option and name != "recipe")
    below = part["source"][1].get("parts", [])
    for one in below.values() if isinstance(below, dict) else below:
        yield from _features_of(one)


@contextmanager
def small_data() -> Iterator[Path]:
    """A folder with the files that the chains read."""
    from frozen import adapter, data

    with tempfile.TemporaryDirectory(prefix="frozen-", ignore_cleanup_errors=True) as folder:
        before = os.environ.get("TRAINPIPES_CACHE")
        os.environ["TRAINPIPES_CACHE"] = f"{folder}/cache"
        files = Path(folder) / "data"
        files.mkdir()
        data.make(files, adapter.write_memmap)
        try:
            yield files
        finally:
            if before is None:
                del os.environ["TRAINPIPES_CACHE"]
            else:
                os.environ["TRAINPIPES_CACHE"] = before


def run_one(number: int) -> Result:
    """Run one chain, where ``small_data`` is."""
    from frozen import adapter
    from frozen.running import run

    chain = draw(number)
    if adapter.words(chain) & adapter.GONE:
        return Result(number, "-" * 16, "gone", "of what the library has no more")
    found = run(chain, number)
    return Result(number, found.digest, found.kind, found.said, found.counted, found.accident)


def _within_time(number: int) -> Result:
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(MOST)
    try:
        return run_one(number)
    except TimeoutError:
        return Result(number, "0" * 16, "hangs", f"more than {MOST} seconds")
    finally:
        signal.alarm(0)


def _too_long(*_: Any) -> None:
    raise TimeoutError


_kept: Any = None


def _prepare() -> None:
    import torch

    global _kept
    torch.set_num_threads(1)
    _kept = small_data()
    _kept.__enter__()
    import atexit

    atexit.register(_kept.__exit__, None, None, None)


def _some(numbers: list[int]) -> list[Result]:
    return [_within_time(number) for number in numbers]


def run_all(numbers: list[int], jobs: int) -> Iterator[Result]:
    """Run chains in so many processes; results come as they are there."""
    size = max(1, min(20, len(numbers) // (4 * jobs)))
    parts = [numbers[first : first + size] for first in range(0, len(numbers), size)]
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _prepare)
    try:
        for done in as_completed([pool.submit(_some, part) for part in parts]):
            yield from done.result()
    finally:
        pool.shutdown(cancel_futures=True)
