"""Chains of any stages in any order, against plain Python, and over resumes on other ranks, workers and
threads."""

from __future__ import annotations

import json
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import trainpipes as tp
from attacks.rounds import Round
from chains import Chain, build, tp_plain
from drawn_chains import draw_chain
from laws import Whole, given_by
from plain_chains import bounds_of, check_stages
from plain_stages import Differs, atoms
from ranks import Leg, Reads
from trainpipes.testing import digest

__all__ = ["any_chains", "came_of"]

#: Seconds of a chain, after which it hangs.
HANGS = 120
#: What is said of chains that cannot be; each names a way out.
REFUSED = re.compile(
    r"directly after the source|leave out the option of \w+\(\) that drops rows|"
    r"would wait forever(: |, since an epoch of .* gives no batch)|"
    r"gives no rows: leave it out of the mix|"
    r"so that some of \d+ shards have none: lower num_shards|"
    r"must hold a list of numbers a row, got list<item: null>|"
    r"collated them already: leave one of the two out|give the stage that makes the rows schema="
)
RANKS = 1, 7, 5, 8, 3


@contextmanager
def no_hang() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"no end within {HANGS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(HANGS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def came_of(chain: Chain, folder: Path, draw: random.Random) -> str:
    """ "exact", "named" for one that is refused, or what is wrong."""
    try:
        with no_hang():
            if chain.shards == 1 and draw.random() < 0.3:
                check_stages(chain, folder)
            check_rows(chain, folder)
            check_runs(chain, folder, draw)
    except tp.TrainpipesError as error:
        return (
            "named" if REFUSED.search(str(error)) else f"{chain}: {type(error).__name__}: {error}"
        )
    except Differs as error:
        return f"{chain}: {error}"
    except BaseException as error:
        error.add_note(str(chain))
        raise
    return "exact"


def check_rows(chain: Chain, folder: Path) -> None:
    """Every row of an epoch comes as often as it is to come."""
    low, high, slack = bounds_of(chain)
    if chain.endless or (low is None and high is None):
        return
    pipe = build(chain, folder)
    for _ in range(2):
        found = Counter(atom for item in pipe for atom in atoms(tp_plain(item)))
        if high is not None and found - high:
            raise Differs(f"too often: {found - high}")
        if low is not None and (low - found).total() > slack:
            raise Differs(f"lost, and {slack} may be: {low - found}")


def check_runs(chain: Chain, folder: Path, draw: random.Random) -> None:
    """Threads, workers and ranks give one sequence, and a run goes on with it wherever it was saved."""
    whole = Whole(build(chain, folder))
    items = list(whole.items.values())
    first = tp.Loader(build(chain, folder), **options(draw))
    stop = draw.randint(0, len(items))
    iterator = iter(first)
    begun = [digest(item) for item in islice(iterator, stop)]
    state = json.loads(json.dumps(first.state_dict()))
    if begun + [digest(item) for item in islice(iterator, len(items) - stop)] != items:
        raise Differs(f"{first}: other items than of the pipeline by itself")
    if state["epoch"] or not stop:
        return
    m, seen = state["batches"], [f"one process, {stop} items"]
    for ranks in draw.sample(RANKS if chain.shards > 1 else (1, 1), draw.randint(0, 2)):
        reads: Reads = draw.choice(["pipe", "loader"])
        workers = draw.randint(1, 3) if ranks < 5 else 1
        steps = min(draw.randint(0, 14 // ranks), whole.steps(ranks, m))
        seen.append(f"{ranks} ranks by {reads} {workers}, {steps} steps")
        leg = Leg(build(chain, folder), ranks, workers, reads, [state] * ranks)
        for at, item in given_by(leg, whole, m, steps):
            if item != whole.items[at]:
                raise Differs(f"{seen}: item {at} is another one")
        state = json.loads(json.dumps(tp.merge_states(leg.states())))
        leg.close()
        if state["epoch"]:
            return
        m = state["batches"]
    last = tp.Loader(build(chain, folder), **options(draw))
    last.load_state_dict(state)
    left = [item for at, item in whole.items.items() if at >= m]
    found = [digest(item) for item in islice(last, len(left))]
    if left and found != left:
        raise Differs(f"{seen}, {last}: {len(found)} other items than the {len(left)} from {m} on")


def options(draw: random.Random) -> dict[str, Any]:
    """How a loader works: seldom by processes, which take long to start."""
    ways = [{}, {"threads": 0}, {"threads": 2}] * 8 + [{"num_workers": 2}]
    return draw.choice(ways)


def any_chains(folder: Path, draw: random.Random) -> Iterator[Round]:
    def some() -> Iterator[str]:
        for _ in range(10):
            yield came_of(draw_chain(draw), folder, draw)

    while True:
        yield some
