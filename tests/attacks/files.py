"""Attacks on files: damaged, with rows that cannot be used, exchanged, added."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import trainpipes as tp
from attacks.rounds import Round, digests, new_folder
from bad_data import FORMATS as BAD_FORMATS
from every_format import FORMATS, Format, table, written
from sources import test_changed_files as changed
from sources import test_growing_folders as growing
from sources import test_replaced_files as replaced
from sources.test_damaged_files import read_damaged
from stages import test_quarantine_chains as chains
from trainpipes.sources import text_pieces
from trainpipes.sources.files import file_bytes as range_file

__all__ = ["bad_rows", "damaged_files", "growing_folders", "replaced_files"]


def damaged_files(folder: Path, draw: random.Random) -> Iterator[Round]:
    def read() -> Iterator[str]:
        said = read_damaged(new_folder(folder), draw.randrange(1 << 32), 100)
        yield from ["exact"] * (said["same"] + said["reference"]) + ["named"] * said["refused"]

    while True:
        yield read


def bad_rows(folder: Path, draw: random.Random) -> Iterator[Round]:
    """Rows given and rows set aside are the rows of the files, and the sequence is that of "skip"."""
    tests = [
        chains.test_an_epoch_gives_each_row_or_sets_it_aside,
        chains.test_any_ranks_give_the_sequence_of_skip,
    ]

    def read() -> Iterator[str]:
        case = {
            "kind": draw.choice([*BAD_FORMATS]),
            "bad": set(draw.sample(range(chains.FILES * chains.ROWS), draw.randrange(13))),
            "buffer": draw.choice([None, 4, 16, 100]),
            "shards": draw.choice([1, 4, 12]),
            "size": draw.randint(1, 7),
            "cached": draw.random() < 0.25,
            "stops": [draw.randint(1, 8) for _ in range(draw.randrange(4))],
            "ways": draw.sample(range(4), 4),
        }
        draw.choice(tests).hypothesis.inner_test(case)  # type: ignore[attr-defined]
        yield "exact"

    while True:
        yield read


def replaced_files(folder: Path, draw: random.Random) -> Iterator[Round]:
    """While they are read, to the same size; and between a state and a resume."""

    def while_read() -> Iterator[str]:
        name = draw.choice(sorted(changed.FORMATS))
        path = new_folder(folder) / f"rows.{name}"

        def put(content: bytes) -> None:
            first = not path.exists()
            if first or in_place:
                path.write_bytes(content)
            else:
                path.with_suffix(".new").write_bytes(content)
                path.with_suffix(".new").replace(path)
            if first:
                os.utime(path, ns=(0, 10**9))  # long ago, whatever the clock of files

        in_place = draw.random() < 0.5
        with pytest.MonkeyPatch.context() as small:
            small.setattr(text_pieces, "PIECE_BYTES", 20_000)
            small.setattr(range_file, "HELD_BYTES", 40_000)
            small.setattr(range_file, "LEAST_BYTES", 10_000)
            changed.check(name, tp.list_files(str(path)), put)
        yield "named"

    def other_rows(format: Format, found: pa.Table, rows: int) -> bytes:
        """Two rows exchanged, where possible in as many bytes."""
        content = format.write(found, rows)
        for _ in range(30):
            order = list(range(len(found)))
            one, other = draw.sample(order, 2)
            order[one], order[other] = order[other], order[one]
            changed = format.write(found.take(order), rows)
            if len(changed) == len(content) and changed != content:
                break
        return changed

    def before_a_resume() -> Iterator[str]:
        name = draw.choice(sorted(FORMATS))
        format, where = FORMATS[name], new_folder(folder)
        counts, rows = draw.sample(range(8, 60), 4), draw.randint(3, 20)
        paths = [Path(path) for path in written(where, format, counts, rows)]
        shards, buffer, size = draw.choice([None, 2, 4]), draw.randint(1, 60), draw.randint(1, 5)

        def pipeline(folder: Path = where) -> tp.Pipeline:
            found = format.read(sorted(map(str, folder.glob(f"*{format.suffix}"))), rows)
            found = found if shards is None else found.sharding_filter(shards)
            return found.shuffle(buffer, seed=3).batch(size)

        run = iter(pipeline())
        for _ in range(draw.randrange(sum(counts) // size)):
            next(run)
        state, rest = json.loads(json.dumps(run.state_dict())), digests(run)
        ways = ["same size", "exchanged", "shorter", "longer", "cut", "gone", "new", "elsewhere"]
        way, one, other = draw.choice(ways), *draw.sample(range(4), 2)
        now = pipeline
        if (
            way == "same size" and name in replaced.BY_SIZE
        ):  # as the docs say, these are not noticed
            way = "elsewhere"
        if way == "same size":
            paths[one].write_bytes(other_rows(format, table(sum(counts[:one]), counts[one]), rows))
        elif way == "exchanged":
            content = paths[one].read_bytes()
            paths[one].write_bytes(paths[other].read_bytes())
            paths[other].write_bytes(content)
        elif way in ("shorter", "longer"):
            count = counts[one] + draw.randrange(1, 8) * (1 if way == "longer" else -1)
            paths[one].write_bytes(format.write(table(sum(counts[:one]), count), rows))
        elif way == "cut":
            os.truncate(paths[one], draw.randrange(paths[one].stat().st_size))
        elif way == "gone":
            paths[one].unlink()
        elif way == "new":
            paths[one].with_name(f"4{format.suffix}").write_bytes(paths[one].read_bytes())
        else:
            elsewhere = shutil.copytree(where, new_folder(folder) / "other")
            for path in elsewhere.iterdir():
                os.utime(path, ns=(0, draw.randrange(1 << 60)))
            now = lambda: pipeline(elsewhere)  # noqa: E731
        resumed = now()
        try:
            resumed.load_state_dict(state)
            found = digests(resumed)
        except tp.TrainpipesError as error:
            suspects = [paths[one], *([paths[other]] if way == "exchanged" else [])]
            good = way in ("gone", "new") or any(str(path) in str(error) for path in suspects)
            if way == "elsewhere":
                yield f"{name}: files elsewhere are refused: {error}"
            else:
                yield "named" if good else f"{name}: {way}, the file is not named: {error}"
        else:
            yield "exact" if way == "elsewhere" and found == rest else f"{name}: {way}, not noticed"

    while True:
        yield draw.choice([while_read, *[before_a_resume] * 9])


def growing_folders(folder: Path, draw: random.Random) -> Iterator[Round]:
    """A resume has the files of its epoch, and the next epoch all that are there."""

    def grow() -> Iterator[str]:
        make, where = draw.choice(growing.ALL), new_folder(folder)
        files = draw.randint(1, 3)
        for number in range(files):
            growing.write(where, number)
        loader = tp.Loader(make(where))
        for _ in range(draw.randrange(3)):
            list(loader)
            growing.write(where, files)
            files += 1
        batches = iter(loader)
        taken = digests(batches, draw.randrange(1, 4))
        state = json.loads(json.dumps(loader.state_dict()))
        growing.write(where, files)
        began, files = files, files + 1
        rows = list(batches)
        if make in (growing.counted, growing.joined, growing.cached):
            newest = growing.ROWS * began
            if any(row["x"] in range(newest, newest + growing.ROWS) for b in rows for row in b):
                yield f"{make.__name__}: a file came in the middle of an epoch"
        rest, after = digests(rows), digests(loader)
        ways = [
            lambda: tp.Loader(make(where)),
            lambda: tp.Loader(make(where), num_workers=draw.randint(1, 2)),
            lambda: make(where),
        ]
        resumed = draw.choice(ways)()
        resumed.load_state_dict(state)
        found = digests(resumed)
        if found != rest:
            yield f"{make.__name__}: {len(taken)} taken, then {found} in place of {rest}"
        found = digests(resumed)
        yield (
            "exact"
            if found == after
            else f"{make.__name__}: {found} in place of {after}, the next epoch"
        )

    while True:
        yield grow
