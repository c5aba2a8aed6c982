"""Real ranks, killed at any moment and resumed on other topologies, train on one sequence."""

from __future__ import annotations

import json
import random
from itertools import count
from pathlib import Path

import psutil
import pytest

from elastic.train_on_ranks import resume_point
from every_stage import files
from interleaved import PIPELINES, RAGGED
from launch import Launch
from trainpipes.testing import digest

SCRIPT = Path(__file__).parent / "train_on_ranks.py"


class Reference:
    """What one process gives that nothing interrupts: digests by pass and number m, as far as some legs came
    and a little further."""

    def __init__(self, name: str, folder: Path, legs: list[Path]) -> None:
        logged = [(line[2], line[3]) for leg in legs for line in lines(leg) if line[0] == name]
        last_pass, most = max(logged)[0], max(m for _, m in logged) + 100
        pipe = PIPELINES[name](folder)
        self.passes: list[dict[int, str]] = []
        for _ in range(last_pass + 1):
            found: dict[int, str] = {}
            last = 0
            iterator = iter(pipe)
            for batch in iterator:
                state = iterator.state_dict()
                last = state["batches"] - 1 if state["batches"] else last + 1
                found[last] = digest(batch)
                if last == most:
                    break
            self.passes.append(found)

    def rest(self, number: int, m: int, ranks: int) -> list[int]:
        """The numbers that so many ranks give from ``m`` on to the end of a pass."""
        batches = self.passes[number]
        if ranks == 1:
            return [at for at in batches if at >= m]
        hole = next(at for at in count(m) if at not in batches)
        return list(range(m, m + (hole - m) // ranks * ranks))


def lines(leg: Path) -> list[tuple[str, int, int, int, str]]:
    """What all ranks of a leg have logged, as far as it is whole: pipeline, step, epoch, m, digest."""
    found = []
    for path in sorted(leg.glob("log-*.txt")):
        for line in path.read_text().split("\n")[:-1]:
            name, step, epoch, m, content = line.split()
            found.append((name, int(step), int(epoch), int(m), content))
    return found


def rounds_of(leg: Path) -> int:
    """Whole rounds that the slowest rank has logged."""
    logs = [path.read_text().count("\n") for path in leg.glob("log-*.txt")]
    started = list(leg.glob("processes-*.json"))
    return min(logs) // len(PIPELINES) if logs and len(started) == len(logs) else 0


def kill(run: Launch, leg: Path, rounds: int, rank: int | None) -> None:
    """Kill all processes of a leg, or those of one rank, once it has run so many rounds."""

    def ready() -> bool:
        return rounds_of(leg) >= rounds

    def victim() -> int:
        return int(json.loads((leg / f"processes-{rank}.json").read_text())[0])

    run.kill_when(ready, None if rank is None else victim)


def run_chain(
    folder: Path, work: Path, topologies: list[tuple[int, int]], seed: int, rounds: int = 12
) -> list[Path]:
    """Legs on (ranks, workers), each killed after some rounds but the last; their folders."""
    chance = random.Random(seed)
    legs: list[Path] = []
    for number, (ranks, workers) in enumerate(topologies):
        leg = work / f"leg-{number}-{ranks}x{workers}"
        last = number == len(topologies) - 1
        resumed = [str(legs[-1])] if legs else []
        asked = rounds if last else 10_000
        run = Launch(SCRIPT, ranks, leg, str(folder), str(leg), str(workers), str(asked), *resumed)
        legs.append(leg)
        if last:
            assert run.wait() == 0, run.said()
            break
        rank = chance.randrange(ranks) if chance.random() < 0.5 else None
        kill(run, leg, chance.randint(2, 5), rank)
    return legs


def check_sequence(name: str, reference: Reference, legs: list[Path], ranks: list[int]) -> int:
    """What counts of all legs is the one sequence, and what was made twice was the same twice. How many
    batches that is."""
    counted: list[tuple[int, int]] = []
    wanted: list[tuple[int, int]] = []
    epoch = m = 0
    for leg, world in zip(legs, ranks, strict=True):
        own = [line for line in lines(leg) if line[0] == name]
        for _, step, at_epoch, at, content in own:
            assert reference.passes[at_epoch][at] == content, (
                f"{name}, step {step}: {at_epoch}/{at}"
            )
        step, state = resume_point(leg, name)
        if leg is legs[-1]:
            step = max(line[1] for line in own)
        counted += [(line[2], line[3]) for line in own if line[1] <= step]
        if state is None:  # killed before its first step
            continue
        while (epoch, m) < (state["epoch"], state["batches"]):
            rest = reference.rest(epoch, m, world)
            if epoch < state["epoch"]:
                wanted += [(epoch, at) for at in rest]
                epoch, m = epoch + 1, 0
            else:
                wanted += [(epoch, at) for at in rest if at < state["batches"]]
                m = state["batches"]
    assert len(set(counted)) == len(counted), f"{name}: a batch counts twice"
    assert sorted(counted) == sorted(wanted), name
    return len(counted)


def check_ragged(reference: Reference, legs: list[Path]) -> None:
    """The whole pass was given."""
    given = {(line[2], line[3]) for leg in legs for line in lines(leg) if line[0] == RAGGED}
    assert given == {(0, at) for at in reference.passes[0]}


def check_chain(tmp_path: Path, topologies: list[tuple[int, int]], seed: int) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    files(folder)
    legs = run_chain(folder, tmp_path, topologies, seed)
    ranks = [ranks for ranks, _ in topologies]
    for name in PIPELINES:
        reference = Reference(name, folder, legs)
        if name == RAGGED:
            check_ragged(reference, legs)
        else:
            check_sequence(name, reference, legs, ranks)
    check_agreements(legs[-1], ranks[-1])
    started = [
        pid
        for leg in legs
        for path in leg.glob("processes-*.json")
        for pid in json.loads(path.read_text())
    ]
    _, alive = psutil.wait_procs(
        [psutil.Process(p) for p in started if psutil.pid_exists(p)], timeout=15
    )
    assert not [process.pid for process in alive]


def check_agreements(leg: Path, ranks: int) -> None:
    """All ranks ended a filtered epoch at one step, and talked of it once in 8 steps, more often at first."""
    found = [json.loads((leg / f"agreements-{rank}.json").read_text()) for rank in range(ranks)]
    assert all(one == found[0] for one in found)
    steps = found[0]["steps"]
    assert 300 < steps * ranks <= 340
    most = steps // 8 + 6 if ranks > 1 else 0
    assert most // 2 <= found[0]["agreements"] <= most


@pytest.mark.timeout(200)
def test_ranks_that_are_killed_at_any_step_go_on_with_one_sequence_on_other_topologies(
    tmp_path: Path,
) -> None:
    check_chain(tmp_path, [(2, 1), (3, 0)], seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_long_chains_of_topologies(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    topologies = [(chance.randint(1, 4), chance.randint(0, 2)) for _ in range(6)]
    check_chain(tmp_path, [*topologies, (chance.randint(2, 4), chance.randint(0, 2))], seed)
