"""Attacks of many minutes, with drawn faults: ``python -m tests.campaigns --minutes 60``.

Each campaign runs in a process of its own for its share of the minutes, and ends with a line of figures. Its
seed is printed; ``--only NAME --seed N`` draws the same again. ``--write`` puts the table into
docs/how-it-works.md. The exit code is 1 if anything was wrong.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from trainpipes.testing import digest

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))  # campaigns import the tests that they extend
PAGE = TESTS.parent / "docs" / "how-it-works.md"
HEAD = "| attack | cases | exact | an error that names it | wrong |\n|---|---|---|---|---|\n"
TABLE = re.compile(re.escape(HEAD) + r"(?:\|.*\|\n)*")

#: A round of a campaign: what came of its cases, each "exact", "named" or a sentence on what was wrong.
Round = Callable[[], Iterator[str]]
Campaign = Callable[[Path, random.Random], Iterator[Round]]


def new_folder(folder: Path) -> Path:
    return Path(mkdtemp(dir=folder))


# Files


def damaged_files(folder: Path, draw: random.Random) -> Iterator[Round]:
    from sources.test_damaged_files import read_damaged

    def read() -> Iterator[str]:
        said = read_damaged(new_folder(folder), draw.randrange(1 << 32), 100)
        yield from ["exact"] * (said["same"] + said["reference"]) + ["named"] * said["refused"]

    while True:
        yield read


def rewritten_files(folder: Path, draw: random.Random) -> Iterator[Round]:
    """While they are read, to the same size; and between a state and a resume, to another one."""
    from sources import test_changed_files as changed
    from trainpipes.sources.files import range_file
    from trainpipes.sources.text import pieces

    def while_read() -> Iterator[str]:
        name = draw.choice(sorted(changed.FORMATS))
        path = new_folder(folder) / f"rows.{name}"
        with pytest.MonkeyPatch.context() as small:
            small.setattr(pieces, "PIECE_BYTES", 20_000)
            small.setattr(range_file, "HELD_BYTES", 40_000)
            small.setattr(range_file, "LEAST_BYTES", 10_000)
            changed.check(name, tp.list_files(str(path)), path.write_bytes)
        yield "named"

    def before_a_resume() -> Iterator[str]:
        name = draw.choice(sorted(changed.FORMATS))
        write, reader, _ = changed.FORMATS[name]
        where = new_folder(folder)
        paths = [where / f"{n}.{name}" for n in range(4)]
        counts = draw.sample(range(20, 400), 4)
        for path, count in zip(paths, counts, strict=True):
            path.write_bytes(write(list(range(10_000, 10_000 + count))))

        def pipeline() -> tp.Pipeline:
            return reader(tp.list_files(where)).sharding_filter(2).shuffle(50, seed=3).batch(4)

        run, taken = iter(pipeline()), draw.randrange(1, sum(counts) // 4 - 1)
        for _ in range(taken):
            next(run)
        state, rest = run.state_dict(), [digest(batch) for batch in run]
        way = draw.choice(["exchanged", "shorter", "longer", "cut", "gone", "new", "touched"])
        one, other = draw.sample(range(4), 2)
        if way == "exchanged":
            content = paths[one].read_bytes()
            paths[one].write_bytes(paths[other].read_bytes())
            paths[other].write_bytes(content)
        elif way in ("shorter", "longer"):
            count = max(1, counts[one] + (draw.randrange(1, 50) * (1 if way == "longer" else -1)))
            paths[one].write_bytes(write(list(range(10_000, 10_000 + count))))
        elif way == "cut":
            os.truncate(paths[one], draw.randrange(paths[one].stat().st_size))
        elif way == "gone":
            paths[one].unlink()
        elif way == "new":
            (where / f"4.{name}").write_bytes(paths[one].read_bytes())
        else:
            paths[one].touch()
        try:
            resumed = iter(pipeline())
            resumed.load_state_dict(state)
            found = [digest(batch) for batch in resumed]
        except tp.TrainpipesError:
            yield "named" if way != "touched" else f"{name}: a touched file is refused"
        else:
            yield "exact" if found == rest and way == "touched" else f"{name}: {way}, not noticed"

    while True:
        yield draw.choice([while_read, before_a_resume, before_a_resume])


# Storage


def error(status: int, code: str) -> tuple[int, dict[str, str]]:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>so it is</Message></Error>"
    return status, {"Content-Type": "application/xml", "body": body}


FAULTS = [
    error(503, "SlowDown"),
    error(500, "InternalError"),
    error(429, "TooManyRequests"),
    "close",
    "half, then close",
]


@contextmanager
def failing_store(folder: Path, draw: random.Random, files: int, rows: int) -> Iterator[Any]:
    """A store behind a proxy: its server, and options of a file system."""
    from faulty_server import serving
    from s3_store import address_of, s3_store
    from trainpipes.filesystems import retry

    with s3_store("campaigns") as options, serving(folder) as server:
        system = fsspec.filesystem("s3", **options)
        for file in range(files):
            sink = pa.BufferOutputStream()
            numbers = list(range(rows * file, rows * file + rows))
            pq.write_table(pa.table({"x": numbers}), sink, row_group_size=max(1, rows // 4))
            system.pipe(f"campaigns/in/{file}.parquet", sink.getvalue().to_pybytes())
        server.upstream = address_of(options)
        with pytest.MonkeyPatch.context() as quick:
            quick.setattr(retry, "FIRST_PAUSE", 0.01)
            yield server, system, {**options, "endpoint_url": server.url}


def failing_storage(folder: Path, draw: random.Random) -> Iterator[Round]:
    """Reads and writes; a write that ends in an error is done once more, to the same files."""
    from trainpipes.filesystems.retry import Retry

    with failing_store(folder, draw, 4, 100) as (server, system, options):
        fsspec.get_filesystem_class("s3").clear_instance_cache()

        def pipeline() -> tp.Pipeline:
            files = tp.list_files(
                "s3://campaigns/in/*.parquet", storage_options=options, retry=Retry(deadline=30)
            )
            return files.read_parquet(index=False)

        def fail() -> None:
            chance, lucky = draw.choice([0.05, 0.2, 0.4]), random.Random(draw.random())
            server.fault = lambda *_: lucky.choice(FAULTS) if lucky.random() < chance else None

        def reads() -> Iterator[str]:
            fail()
            try:
                found = sorted(row["x"] for row in pipeline().shuffle(50))
            except tp.UnreachableError:
                yield "named"
            else:
                yield "exact" if found == list(range(400)) else f"{len(found)} rows of 400"
            server.fault = lambda *_: None

        def writes() -> Iterator[str]:
            name = f"campaigns/out/{draw.randrange(1 << 60):x}"
            said = "exact"
            fail()
            try:
                pipeline().write_parquet(f"s3://{name}", storage_options=options, num_files=2)
            except tp.TrainpipesError:
                said = "named"
            server.fault = lambda *_: None
            if said == "named":
                pipeline().write_parquet(f"s3://{name}", storage_options=options, num_files=2)
            system.invalidate_cache()
            written = tp.read_parquet(f"s3://{name}/*.parquet", storage_options=options)
            found = [row["x"] for row in written]
            yield said if found == list(range(400)) else f"{len(found)} rows of 400 written"

        while True:
            yield draw.choice([reads, reads, writes])


# Kills


def killed_trainers(folder: Path, draw: random.Random) -> Iterator[Round]:
    from test_killed_trainers import CASES, killed

    def kill() -> Iterator[str]:
        for one in killed(draw.sample(CASES, 3)):
            yield f"left: {one}" if one["alive"] or one["files"] else "exact"

    while True:
        yield kill


def killed_workers(folder: Path, draw: random.Random) -> Iterator[Round]:
    """The run goes on from the state that it had when a worker died."""
    from test_dead_workers import WHOLE, large, pipeline, take

    def kill() -> Iterator[str]:
        before = set(multiprocessing.active_children())
        loader = tp.Loader(pipeline(large), num_workers=2)
        batches, found = iter(loader), list[list[int]]()
        take(found, batches, draw.randrange(1, 20))
        victim = draw.choice(
            [one for one in multiprocessing.active_children() if one not in before]
        )
        threading.Timer(draw.random() / 4, victim.kill).start()
        try:
            take(found, batches)
        except tp.WorkerError:
            state, said = loader.state_dict(), "named"
            loader = tp.Loader(pipeline(large))
            loader.load_state_dict(state)
            take(found, iter(loader), 5)
        else:
            said = "exact"  # all was there already
        yield said if found == WHOLE[: len(found)] else f"{found[-9:]} after a kill"

    while True:
        yield kill


def killed_writers(folder: Path, draw: random.Random) -> Iterator[Round]:
    from writers.test_killed import RANDOM, check_killed

    def kill() -> Iterator[str]:
        check_killed(draw.choice(RANDOM), new_folder(folder), 3, "at random")
        yield from ["exact"] * 3

    while True:
        yield kill


# States


def changed_states(folder: Path, draw: random.Random) -> Iterator[Round]:
    from test_damaged_states import made, refused

    subjects = made(folder, 6)

    def change() -> Iterator[str]:
        named = refused(subjects, 100, draw.randrange(1 << 32))
        yield from ["named"] * named + ["exact"] * (100 - named)

    while True:
        yield change


# For long


def soak(folder: Path, draw: random.Random) -> Iterator[Round]:
    """Epoch after epoch from a store that fails at times; memory, open files and threads stay as they are."""
    from flat_memory import held

    with failing_store(folder, draw, 8, 2000) as (server, _, options):
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        lucky = random.Random(draw.random())
        server.fault = lambda *_: lucky.choice(FAULTS) if lucky.random() < 0.05 else None
        found: list[tuple[int, int, int]] = []

        def epoch() -> Iterator[str]:
            # Small files stay in memory once they are read: each epoch lists and reads them anew.
            files = tp.list_files("s3://campaigns/in/*.parquet", storage_options=options)
            rows = files.read_parquet(index=False).sharding_filter(4).shuffle(500, seed=1)
            loader = tp.Loader(rows.batch(16))
            loader.set_epoch(len(found))
            numbers = sorted(row["x"] for batch in loader for row in batch)
            pa.default_memory_pool().release_unused()
            if len(server.asked) <= 8:
                yield f"only {len(server.asked)} requests of an epoch"
            server.asked.clear()
            found.append((held(), len(os.listdir("/proc/self/fd")), threading.active_count()))
            yield "exact" if numbers == list(range(16_000)) else f"{len(numbers)} rows of 16,000"
            if len(found) > 10:  # by then all is as large as it gets
                (memory, opened, threads), now = max(found[5:10]), found[-1]
                if now[0] > 1.1 * memory + (32 << 20):
                    yield f"memory grew from {memory:,} to {now[0]:,} bytes in {len(found)} epochs"
                if now[1] > opened + 40 or now[2] > threads + 40:  # connections that are kept
                    yield f"open files and threads: {opened, threads}, then {now[1:]}"

        while True:
            yield epoch


CAMPAIGNS: dict[str, tuple[str, Campaign]] = {
    "files": ("damaged files of all formats, beside their reference libraries", damaged_files),
    "rewritten": ("files rewritten, cut, exchanged, added or removed", rewritten_files),
    "storage": (
        "an object store that fails: errors, lost connections, half answers",
        failing_storage,
    ),
    "trainers": ("trainers killed: processes and shared memory that are left", killed_trainers),
    "workers": ("workers killed, and the run resumed", killed_workers),
    "writers": ("writers killed at random moments, and started again", killed_writers),
    "states": ("changed states", changed_states),
    "soak": ("epochs over a store that fails, with memory, files and threads flat", soak),
}


def run(name: str, seed: int, seconds: float) -> tuple[Counter[str], list[str]]:
    """Rounds of a campaign until the time is over, one at least: what came, and what was wrong."""
    came: Counter[str] = Counter()
    wrong: list[str] = []
    until = time.monotonic() + seconds
    with TemporaryDirectory() as folder:
        rounds = CAMPAIGNS[name][1](Path(folder), random.Random(seed))
        for one in rounds:
            try:
                said = list(one())
            except Exception:
                said = [traceback.format_exc()[-3000:]]
            came.update(each if each in ("exact", "named") else "wrong" for each in said)
            wrong += [each for each in said if each not in ("exact", "named")]
            if time.monotonic() > until or len(wrong) > 9:
                break
        rounds.close()  # type: ignore[attr-defined]
    return came, wrong


def in_process(name: str, seed: int, seconds: float) -> tuple[dict[str, int], list[str]]:
    """The same in a process of its own."""
    print(f"{name}: --only {name} --seed {seed}", flush=True)
    command = [sys.executable, "-W", "ignore", "-m", "tests.campaigns", "--child"]
    command += ["--only", name, "--seed", str(seed), "--minutes", str(seconds / 60)]
    done = subprocess.run(
        command, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True, timeout=seconds + 600
    )
    if done.returncode:
        return {"wrong": 1}, [f"the process ended with {done.returncode}"]
    came, wrong = json.loads(done.stdout.splitlines()[-1])
    return came, wrong


def line(name: str, came: dict[str, int]) -> str:
    figures = [sum(came.values()), *(came.get(kind, 0) for kind in ("exact", "named", "wrong"))]
    return f"| {CAMPAIGNS[name][0]} | " + " | ".join(f"{one:,}" for one in figures) + " |\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60, help="of all campaigns together")
    parser.add_argument(
        "--only", choices=CAMPAIGNS, action="append", help="one of them, or several"
    )
    parser.add_argument("--seed", type=int, help="drawn if left out")
    parser.add_argument("--write", action="store_true", help="write the table into the docs")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.only or list(CAMPAIGNS)
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    seconds = 60 * args.minutes / len(names)
    if args.child:
        warnings.simplefilter("ignore")
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # each request
        print(json.dumps(run(names[0], seed, seconds)), flush=True)
        os._exit(0)  # whatever a fault has left
    lines, failed = [], False
    for name in names:
        came, wrong = in_process(name, seed, seconds)
        lines.append(line(name, came))
        print(lines[-1], *(f"WRONG {one}\n" for one in wrong), sep="", flush=True)
        failed = failed or bool(wrong)
    if args.write:
        PAGE.write_text(TABLE.sub(lambda _: HEAD + "".join(lines), PAGE.read_text()))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
