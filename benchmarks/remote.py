"""How fast remote files start, and how much of a store's bandwidth reading them takes.

    python -m benchmarks.remote [--files 400] [--megabytes 200] [--rate 100] [--only parquet tar]

A store in a process of its own speaks S3 on loopback: each answer takes 20 ms, and all together no more than
``--rate`` MB/s. Two things are measured:

start       Small Parquet files: seconds to the first batch, over those of ``find`` and one ``cat_ranges`` of
            all tails by the same file system.
read-ahead  Large files, with the index there: the bytes that an epoch fetches after its first quarter, over
            what the store could have sent in that time. With 0 and 2 workers. Beside it the same share of
            ``bare``, 16 plain connections that throw the bytes away: it is below 1 where the store lacks a
            core. If only ``bare`` is fast, the limit is the CPU of reading, which is shown in cores; with a
            lower ``--rate`` it no longer is.
steady      Shuffled rows of 2,048 ids, 24 shards, at half of ``--rate``: batches in each second, the share of
            the bandwidth over the epoch, the first batch over two answers and a row group, the slowest 5
            seconds and the slowest second over the median; with 0 and 2 workers. Then, at ``--rate``, a
            trainer that needs half of it: the share of its time that it waits after 100 batches.

And how many requests the store gets for each row group of a shuffled epoch.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import trainpipes as tp

__all__ = ["row_group_requests", "start_ratio", "steady", "store", "used_bandwidth", "waiting"]

LATENCY, RATE, PIECE = 0.020, 100e6, 64 << 10
LARGE = 16  # files of each format
PART = 4 << 20  # bytes of a request
#: Of the rows that are shuffled: ids in each, rows of a batch, row groups of a file.
IDS, BATCH, GROUP = 2048, 32, 128
#: Seconds of a stretch; batches before a trainer's waits are counted.
STRETCH, WARM = 5, 100
KEPT = {"retries": {"total_max_attempts": 1}, "max_pool_connections": 64}


# The store


class Store:
    """A folder, whose folders are buckets."""

    def __init__(self, folder: Path, rate: float) -> None:
        self.folder, self.rate, self.free = folder, rate, 0.0
        self.told: dict[str, Any] = {}
        self.forget()

    def forget(self) -> None:
        self.told = {"requests": 0, "bytes": 0, "first": 0.0, "last": 0.0}

    async def serve(self) -> None:
        server = await asyncio.start_server(self.talk, "127.0.0.1", 0, backlog=512)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
                method, target, _ = first.split(" ")
                await self.answer(writer, method, target, headers)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str]
    ) -> None:
        url = urlsplit(target)
        if url.path == "/told":
            content = json.dumps(self.told).encode()
            self.forget()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
            return
        self.told["requests"] += method == "GET"
        await asyncio.sleep(LATENCY)
        query, status, more = parse_qs(url.query), 200, b""
        path = self.folder / unquote(url.path).strip("/")
        if "list-type" in query:
            content = listing(self.folder, path.name, query)
        elif not path.is_file():
            status, content = 200 if path.is_dir() else 404, b""
        else:
            size, asked = path.stat().st_size, headers.get("range")
            more = b'ETag: "%d"\r\nAccept-Ranges: bytes\r\n' % path.stat().st_mtime_ns
            begin, end = 0, size
            if asked:
                given = asked.removeprefix("bytes=").split("-")
                status, begin, end = 206, int(given[0]), min(size, int(given[1]) + 1)
                more += b"Content-Range: bytes %d-%d/%d\r\n" % (begin, end - 1, size)
            with open(path, "rb") as file:
                file.seek(begin)
                content = file.read(end - begin)
        writer.write(
            b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n%s\r\n" % (status, len(content), more)
        )
        for at in range(0, len(content) if method == "GET" else 0, PIECE):
            piece = content[at : at + PIECE]
            now = time.monotonic()
            self.free = max(self.free, now) + len(piece) / self.rate
            await asyncio.sleep(self.free - now)
            writer.write(piece)
            await writer.drain()
            self.told["first"] = self.told["first"] or now
            self.told["last"] = time.monotonic()
            self.told["bytes"] += len(piece)


def listing(folder: Path, bucket: str, query: dict[str, list[str]]) -> bytes:
    """1,000 objects of a bucket, as S3 lists them."""
    prefix, after = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
    names = sorted(f"{p.relative_to(folder / bucket)}" for p in (folder / bucket).rglob("*.*"))
    names = [name for name in names if name.startswith(prefix) and name > after]
    page, rest = names[:1000], names[1000:]
    items = "".join(
        f"<Contents><Key>{name}</Key><Size>{(folder / bucket / name).stat().st_size}</Size>"
        f'<ETag>"{(folder / bucket / name).stat().st_mtime_ns}"</ETag>'
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for name in page
    )
    more = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if rest else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket}</Name><KeyCount>{len(page)}</KeyCount>"
        f"<IsTruncated>{'true' if rest else 'false'}</IsTruncated>{more}{items}</ListBucketResult>"
    ).encode()


class Served:
    """A store that runs."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.options = {"endpoint_url": self.url, "key": "someone", "secret": "hush"}

    def told(self) -> dict[str, Any]:
        """What it did since the last call."""
        with urllib.request.urlopen(f"{self.url}/told") as reply:
            found: dict[str, Any] = json.load(reply)
        return found


@contextmanager
def store(folder: Path, rate: float = RATE) -> Iterator[Served]:
    """A store of the folders in a folder."""
    command = [sys.executable, "-m", "benchmarks.remote", "--serve", str(folder), str(rate)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Served(int(process.stdout.readline()))
    finally:
        process.terminate()
        process.wait()


# What is measured


def start_ratio(folder: Path, files: int) -> tuple[float, float]:
    """Seconds of ``find`` and ``cat_ranges``, and of the first batch; the best of three."""
    import s3fs

    there = folder / f"small{files}"
    there.mkdir()
    table = pa.table({"input_ids": [list(range(200))] * 8})
    for number in range(files):
        pq.write_table(table, there / f"{number:05d}.parquet")
    bare, ours = [], []
    with store(folder) as served:
        for _ in range(3 if files < 1000 else 1):
            s3fs.S3FileSystem.clear_instance_cache()
            system = s3fs.S3FileSystem(**served.options, config_kwargs=KEPT)
            begun = time.perf_counter()
            sizes = {p: info["size"] for p, info in system.find(there.name, detail=True).items()}
            starts = [max(0, size - (64 << 10)) for size in sizes.values()]
            system.cat_ranges(list(sizes), starts, list(sizes.values()), batch_size=256)
            bare.append(time.perf_counter() - begun)
            s3fs.S3FileSystem.clear_instance_cache()
            begun = time.perf_counter()
            pipe = tp.list_files(f"s3://{there.name}", storage_options=served.options)
            next(iter(pipe.read_parquet(index=False).batch(8)))
            ours.append(time.perf_counter() - begun)
    return min(bare), min(ours)


def row_group_requests(folder: Path) -> float:
    """Requests of a shuffled epoch after the start, for each row group."""
    there = folder / "groups"
    there.mkdir()
    table = pa.table({"x": np.arange(400_000)})
    for number in range(4):
        pq.write_table(table, there / f"{number}.parquet", row_group_size=40_000)
    with store(folder) as served:
        pipe = tp.list_files(f"s3://{there.name}", storage_options=served.options)
        pipe = pipe.read_parquet(index=False).shuffle(80_000, seed=1).batch(1000)
        len(pipe)
        served.told()
        for _ in pipe:
            pass
        return served.told()["requests"] / 40


def parquet(folder: Path, each: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, (each // (4 * IDS), IDS), np.int32)
    rows = pa.FixedSizeListArray.from_arrays(tokens.ravel(), IDS)
    for n in range(LARGE):
        pq.write_table(
            pa.table({"input_ids": rows.cast(pa.list_(pa.int32()))}), folder / f"{n}.parquet",
            row_group_size=GROUP, compression="none", use_dictionary=False,
        )  # fmt: skip


def tar(folder: Path, each: int) -> None:
    content = os.urandom(100_000)
    for n in range(LARGE):
        with tarfile.open(folder / f"{n}.tar", "w") as archive:
            for k in range(each // len(content)):
                member = tarfile.TarInfo(f"{k}.bin")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def numpy(folder: Path, each: int) -> None:
    for n in range(LARGE):
        np.save(folder / f"{n}.npy", np.zeros((each // 4096, 1024), np.int32))


def whole_files(folder: Path, each: int) -> None:
    content = os.urandom(500_000)
    for n in range(LARGE * each // len(content)):
        (folder / f"{n}.bin").write_bytes(content)


def json_lines(folder: Path, each: int) -> None:
    line = json.dumps({"text": "some words of a text " * 100}).encode() + b"\n"
    for n in range(LARGE):
        (folder / f"{n}.jsonl").write_bytes(line * (each // len(line)))


FORMATS: dict[str, tuple[Callable[[Path, int], None], Callable[[tp.Pipeline], tp.Pipeline]]] = {
    "parquet": (parquet, lambda files: files.read_parquet(index=True).batch(32).pad_collate()),
    "tar": (tar, lambda files: files.read_webdataset(index=True).batch(16)),
    "numpy": (numpy, lambda files: files.read_numpy(index=True).batch(64)),
    "whole_files": (whole_files, lambda files: files.read_bytes().batch(4)),
    "json_lines": (json_lines, lambda files: files.read_json(index=True).batch(256)),
}


@dataclass
class Used:
    """Shares of the store's bandwidth, and CPU seconds of reading for each second."""

    share: float
    bare: float
    cores: float


def used_bandwidth(folder: Path, name: str, megabytes: int, workers: int, rate: float) -> Used:
    """What an epoch takes of the store; the best of three."""
    there, (write, read) = folder / name.replace("_", ""), FORMATS[name]
    if not there.exists():
        there.mkdir()
        write(there, megabytes * 10**6 // LARGE)
    with store(folder, rate) as served:

        def share() -> float:
            told = served.told()
            return float(told["bytes"] / (told["last"] - told["first"]) / rate)

        files = tp.list_files(
            f"s3://{there.name}",
            storage_options=served.options,
            suffix="" if "_f" in name else None,
        )
        pipe = read(files)
        batches = len(pipe)  # and the index is made
        found = []
        for _ in range(3):
            served.told()
            bare(served, there)
            alone, began, before = share(), 0.0, 0.0
            for number, _ in enumerate(tp.Loader(pipe, num_workers=workers)):
                if number == batches // 4:
                    served.told()
                    began, before = time.perf_counter(), cpu_seconds()
            used, spent = share(), time.perf_counter() - began
            cores = (cpu_seconds() - before) / spent
            found.append(Used(used, alone, cores))
        return max(found, key=lambda one: one.share)


@dataclass
class Steady:
    """Batches in each second of an epoch, and when the first one came.

    Args:
        seconds: batches in each.
        took: of the whole epoch.
        first: seconds to the first batch, over two answers and a row group.
        share: of the store's bandwidth.
    """

    seconds: list[int]
    took: float
    first: float
    share: float

    def slowest(self, length: int) -> float:
        """The slowest so many seconds, over the median of all seconds."""
        counts = self.seconds[:-1] or self.seconds  # the last one is not whole
        length = min(length, len(counts))
        usual = max(1e-9, statistics.median(counts))
        starts = range(len(counts) - length + 1)
        return min(sum(counts[n : n + length]) for n in starts) / length / usual


def shuffled(served: Served, there: Path, megabytes: int) -> tp.Pipeline:
    """Rows of files on the store, each span of which has about eight windows; its index is made."""
    if not there.exists():
        there.mkdir()
        parquet(there, megabytes * 10**6 // LARGE)
    files = tp.list_files(f"s3://{there.name}", storage_options=served.options)
    buffer = max(1, megabytes * 10**6 // (4 * IDS) // (24 * 15 // 2))
    pipe = files.read_parquet(index=True).sharding_filter().shuffle(buffer).batch(BATCH)
    len(pipe)
    return pipe.pad_collate()


def steady(folder: Path, megabytes: int, workers: int, rate: float) -> Steady:
    """An epoch that is only read."""
    there = folder / f"steady{megabytes}"
    with store(folder, rate) as served:
        loader = tp.Loader(shuffled(served, there, megabytes), num_workers=workers)
        size, came = sum(file.stat().st_size for file in there.iterdir()), []
        began = time.perf_counter()
        for _ in loader:
            came.append(time.perf_counter() - began)
    least = 2 * LATENCY + 4 * IDS * GROUP / rate
    seconds = np.bincount(np.array(came, dtype=np.int64)).tolist()
    return Steady(seconds, came[-1], came[0] / least, size / rate / came[-1])


def waiting(folder: Path, megabytes: int, workers: int, rate: float) -> float:
    """The share of its time that a trainer waits that needs half of the bandwidth, after ``WARM`` batches."""
    step = 4 * IDS * BATCH / (rate / 2)
    with store(folder, rate) as served:
        loader = tp.Loader(
            shuffled(served, folder / f"steady{megabytes}", megabytes), num_workers=workers
        )
        waited, batches = 0.0, iter(loader)
        for number in count():
            asked = time.perf_counter()
            batch = next(batches, None)
            now = time.perf_counter()
            if number == WARM:
                began, waited = asked, 0.0
            waited += now - asked
            if batch is None:
                return waited / (now - began)
            del batch
            time.sleep(step)
    raise AssertionError


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def bare(served: Served, there: Path) -> None:
    """Fetch all files by plain connections, and throw the bytes away."""
    jobs = [
        (file.name, at, min(at + PART, file.stat().st_size))
        for file in there.iterdir()
        for at in range(0, file.stat().st_size, PART)
    ]

    async def connection() -> None:
        address = urlsplit(served.url)
        reader, writer = await asyncio.open_connection(
            address.hostname, address.port, limit=1 << 20
        )
        while jobs:
            name, begin, end = jobs.pop()
            asked = f"GET /{there.name}/{name} HTTP/1.1\r\nRange: bytes={begin}-{end - 1}\r\n\r\n"
            writer.write(asked.encode())
            await reader.readuntil(b"\r\n\r\n")
            while begin < end:
                begin += len(await reader.read(min(end - begin, 1 << 20)))
        writer.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(connection() for _ in range(16)))

    asyncio.run(all_of_them())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--files", type=int, nargs="*", default=[400])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rate", type=float, default=RATE / 1e6, help="MB/s")
    parser.add_argument("--only", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument(
        "--steady", type=int, default=1500, help="MB of rows that are shuffled; 0: none"
    )
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(Store(Path(args.serve[0]), float(args.serve[1])).serve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["TRAINPIPES_CACHE"] = str(folder / "kept")
        for files in args.files:
            bare, ours = start_ratio(folder, files)
            print(
                f"start, {files:,} files: {ours:.2f} s, bare {bare:.2f} s: {ours / bare:.2f} times"
            )
        print(f"requests for a row group: {row_group_requests(folder):.2f}")
        for form in args.only:
            for workers in (0, 2):
                used = used_bandwidth(folder, form, args.megabytes, workers, args.rate * 1e6)
                print(
                    f"read-ahead, {form}, {workers} workers: {used.share:.2f} of {args.rate:g} MB/s, bare "
                    f"{used.bare:.2f}; the process that trains takes {used.cores:.2f} cores",
                    flush=True,
                )
        if args.steady:
            tell_steady(folder, args.steady, args.rate * 1e6)


def tell_steady(folder: Path, megabytes: int, rate: float) -> None:
    for workers in (0, 2):
        found = steady(folder, megabytes, workers, rate / 2)
        print(
            f"steady, {workers} workers: {found.share:.2f} of {rate / 2e6:g} MB/s; first batch "
            f"{found.first:.2f} times two answers and a row group; of the median the slowest {STRETCH} s "
            f"{found.slowest(STRETCH):.2f}, the slowest second {found.slowest(1):.2f}; batches in each second"
        )
        print(f"    {' '.join(map(str, found.seconds))}")
        waits = waiting(folder, megabytes, workers, rate)
        print(f"    a trainer that needs half of {rate / 1e6:g} MB/s waits {waits:.1%}", flush=True)


if __name__ == "__main__":
    main()
