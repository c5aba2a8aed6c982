"""Attacks on stores: requests that fail, each alike for one seed, but for the order in which threads ask."""

from __future__ import annotations

import gzip
import io
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import trainpipes as tp
from attacks.rounds import Round, digests, new_folder
from faulty_server import BODY, BUSY, SLOW, XML, Fault, serving
from s3_store import address_of, s3_store
from sources import test_changed_files as changed
from trainpipes.filesystems import places, retry
from unfinished import contents
from writers import test_failing_store as writing

__all__ = ["QUICK", "Faults", "failing_store", "failing_storage"]

BUCKET = "campaigns"
#: What a request may get that is answered at once.
QUICK: list[Fault] = [
    BUSY,
    SLOW,
    (500, {**XML, "body": BODY.format("InternalError")}),
    (429, {**XML, "body": BODY.format("TooManyRequests")}),
    "close",
    "reset",
    "lost",
]
#: Enough for many tries on a machine that is busy.
RETRY = tp.Retry(deadline=60, timeout=4)


def texts(values: list[int]) -> bytes:
    return b"".join(b"%d\n" % n for n in values)


def arrays(values: list[int]) -> bytes:
    sink = io.BytesIO()
    np.savez(sink, x=np.array(values), y=np.array(values) / 2)
    return sink.getvalue()


Write, Read = Callable[[list[int]], bytes], Callable[[Any], tp.Pipeline]
FORMATS: dict[str, tuple[Write, Read]] = {
    **{name: (write, read) for name, (write, read, _) in changed.FORMATS.items()},
    "jsonl.gz": (
        lambda values: gzip.compress(changed.FORMATS["jsonl"][0](values), mtime=0),
        lambda files: files.read_json(),
    ),
    "tar.gz": (
        lambda values: gzip.compress(changed.tar(values), mtime=0),
        lambda files: files.read_webdataset(),
    ),
    "txt": (texts, lambda files: files.read_text()),
    "npz": (arrays, lambda files: files.read_numpy()),
}


class Faults:
    """Which requests fail: that is drawn for the how manyth request it is for a name."""

    def __init__(self, seed: int, chance: float, faults: Sequence[Fault]) -> None:
        self._seed, self._chance, self._faults = seed, chance, faults
        self._seen, self._lock = Counter[tuple[str, str]](), threading.Lock()

    def __call__(self, method: str, name: str, number: int) -> Fault:
        with self._lock:
            self._seen[method, name] += 1
            which = self._seen[method, name]
        draw = random.Random(f"{self._seed} {method} {name} {which}")
        return draw.choice(self._faults) if draw.random() < self._chance else None


@contextmanager
def failing_store(folder: Path) -> Iterator[Any]:
    """A store behind a proxy: its server, a file system without it, and options of one with it."""
    with s3_store(BUCKET) as options, serving(folder) as server:
        server.upstream = address_of(options)
        with pytest.MonkeyPatch.context() as quick:
            quick.setattr(retry, "FIRST_PAUSE", 0.01)
            quick.setattr(places, "LEASE", 0.2)
            quick.setattr(places, "BEAT", 1e6)  # no request between others
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            system = fsspec.filesystem("s3", **options)
            yield server, system, {**options, "endpoint_url": server.url}


def failing_storage(folder: Path, draw: random.Random) -> Iterator[Round]:
    """Reads with a resume, from S3 or HTTP; writes. What ends in an error is done once more, and is exact."""
    served = new_folder(folder)
    with failing_store(folder) as (server, system, options), serving(served) as web:

        def faults() -> Faults:
            stalls: list[Fault] = ["stall"] if draw.random() < 0.2 else []
            seed, chance = draw.randrange(1 << 32), draw.choice([0.05, 0.2, 0.4])
            return Faults(seed, chance, [*QUICK, "half, then close", *stalls])

        def reads() -> Iterator[str]:
            name, where = draw.choice(sorted(FORMATS)), f"{draw.randrange(1 << 60):x}"
            write, read = FORMATS[name]
            here = served / where
            here.mkdir()
            for file, rows in enumerate(draw.choices(range(5, 300), k=draw.randint(1, 5))):
                content = write(list(range(10_000 + 1000 * file, 10_000 + 1000 * file + rows)))
                (here / f"{file}.{name}").write_bytes(content)
                system.pipe(f"{BUCKET}/{where}/{file}.{name}", content)
            paths = sorted(path.name for path in here.iterdir())
            on_s3 = draw.random() < 0.6
            shards, buffer, seed = draw.choice([None, 2, 4]), draw.randint(1, 200), draw.random()

            def pipeline(files: tp.Pipeline) -> tp.Pipeline:
                rows = read(files)
                rows = rows if shards is None else rows.sharding_filter(shards)
                return rows.shuffle(buffer, seed=int(9 * seed)).batch(4)

            def far() -> tp.Pipeline:
                if on_s3:
                    url = f"s3://{BUCKET}/{where}/*"
                    return pipeline(tp.list_files(url, storage_options=options, retry=RETRY))
                urls = [f"{web.url}/{where}/{path}" for path in paths]
                return pipeline(tp.list_files(urls, retry=RETRY))

            whole = digests(pipeline(tp.list_files(str(here))))
            taken, found, state = draw.randrange(len(whole)), list[str](), None
            (server if on_s3 else web).fault = faults()
            said = "exact"
            try:
                run = iter(far())
                for _ in range(taken):
                    found += digests(run, 1)
                    state = run.state_dict()
                pipe = far()
                if state is not None:
                    pipe.load_state_dict(state)
                rest = iter(pipe)
                while more := digests(rest, 1):
                    found += more
                    state = rest.state_dict()
            except tp.UnreachableError:
                said = "named"
                server.fault = web.fault = lambda *_: None
                pipe = far()
                if state is not None:
                    pipe.load_state_dict(state)
                if len(found) < len(whole):
                    found += digests(pipe)
            server.fault = web.fault = lambda *_: None
            yield said if found == whole else f"{name}, {on_s3=}: {len(found)} of {len(whole)}"

        def writes() -> Iterator[str]:
            name, out = (
                draw.choice(sorted(writing.JOBS)),
                f"s3://{BUCKET}/{draw.randrange(1 << 60):x}",
            )
            job, here, said = writing.JOBS[name], new_folder(folder) / "out", "exact"
            job(here)
            server.fault = faults()
            try:
                job(out, storage_options=options, retry=RETRY)
            except tp.UnreachableError:
                said = "named"
            server.fault = lambda *_: None
            if said == "named":
                job(out, storage_options=options, retry=RETRY)
            system.invalidate_cache()
            root = out.removeprefix("s3://")
            found = {
                path.removeprefix(f"{root}/"): system.cat_file(path) for path in system.find(root)
            }
            wanted = contents(here)
            same = {one: found.get(one) == wanted[one] for one in wanted}
            left = [one for one in found if one not in wanted and not one.startswith("_unfinished")]
            yield said if all(same.values()) and not left else f"{name}: {same}, and left: {left}"

        while True:
            yield draw.choice([reads, reads, writes])
