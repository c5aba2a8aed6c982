"""An HTTP server on loopback that serves a folder, with ranges and index pages, and fails as told."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import socket
import struct
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

#: What a request gets: nothing special; a status with headers (and "body"); or one of
#: "whole": all of the file, whatever range is asked for; "stall": no answer ever; "half, then stall";
#: "half, then close"; "close": no answer, and the connection is closed; "reset": that, at once; "lost": the
#: request is done upstream, and its answer is lost.
Fault = tuple[int, dict[str, str]] | str | None
#: What S3 says.
BODY = "<?xml version='1.0'?><Error><Code>{}</Code><Message>so it is</Message></Error>"
XML = {"Content-Type": "application/xml"}
BUSY: Fault = (503, {**XML, "body": BODY.format("ServiceUnavailable")})
SLOW: Fault = (503, {**XML, "body": BODY.format("SlowDown")})
EXPIRED: Fault = (400, {**XML, "body": BODY.format("ExpiredToken")})
DENIED: Fault = (403, {**XML, "body": BODY.format("AccessDenied")})


def first(times: int, fault: Fault) -> Callable[[str, str, int], Fault]:
    """So many requests for each file fail."""
    seen: Counter[tuple[str, str]] = Counter()

    def said(method: str, name: str, _: int) -> Fault:
        seen[method, name] += 1
        return fault if seen[method, name] <= times else None

    return said


class FaultyServer(ThreadingHTTPServer):
    """Serves a folder.

    Attributes:
        fault: says for each request (method, name, number of the request from 0) what it gets.
        asked: the requests so far, "GET 1.parquet".
        versions: the header that tells a file's version: "ETag" or "Last-Modified".
        upstream: host and port of a server that answers in place of the folder.
        expired: keys of S3 whose requests are refused, since their tokens have expired.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.fault: Callable[[str, str, int], Fault] = lambda *_: None
        self.asked: list[str] = []
        self.versions = "ETag"
        self.upstream: tuple[str, int] | None = None
        self.expired: set[str] = set()
        self.lock = threading.Lock()
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is none."""


class Handler(BaseHTTPRequestHandler):
    server: FaultyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    do_PUT = do_POST = do_DELETE = do_HEAD

    def do_GET(self) -> None:
        name = self.path.strip("/")
        with self.server.lock:
            number = len(self.server.asked)
            self.server.asked.append(f"{self.command} {name}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault(self.command, name, number)
        if fault == "stall":
            self.server.over.wait()
        if any(
            f"Credential={key}/" in self.headers.get("Authorization", "")
            for key in self.server.expired
        ):
            fault = EXPIRED
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        if fault in ("stall", "close", "reset"):
            self.close_connection = True
            return
        if isinstance(fault, tuple):
            headers = dict(fault[1])
            self.answer(fault[0], headers.pop("body", "no").encode(), headers)
            return
        if self.server.upstream is not None:
            self.forward(*self.server.upstream, lost=fault == "lost")
            return
        path = self.server.folder / name.partition("?")[0]
        if path.is_dir():
            names = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir())
            page = "".join(f'<a href="{name}">{name}</a>' for name in names)
            self.answer(200, page.encode(), {"Content-Type": "text/html"})
        elif not path.exists():
            self.answer(404, b"no", {})
        else:
            changed = formatdate(path.stat().st_mtime, usegmt=True)
            self.give(path.read_bytes(), str(fault or ""), changed)

    def forward(self, host: str, port: int, lost: bool) -> None:
        upstream = http.client.HTTPConnection(host, port, timeout=30)
        upstream.request(self.command, self.path, self.body, headers=dict(self.headers))
        answer = upstream.getresponse()
        if lost:
            answer.read()
            self.close_connection = True
            return
        left = ("connection", "content-length", "date", "server", "transfer-encoding")
        headers = {key: value for key, value in answer.getheaders() if key.lower() not in left}
        length = answer.getheader("Content-Length")
        if self.command == "HEAD" and length is not None:
            headers["Content-Length"] = length
        self.answer(answer.status, answer.read(), headers)
        upstream.close()

    def give(self, content: bytes, fault: str, changed: str) -> None:
        asked = None if fault == "whole" else self.headers.get("Range")
        told = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Last-Modified": changed}
        status = 200
        headers = {"Accept-Ranges": "bytes", self.server.versions: told[self.server.versions]}
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            start, stop = int(first), min(len(content), int(last) + 1 if last else len(content))
            if start >= len(content):
                self.answer(416, b"", {})
                return
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            status, content = 206, content[start:stop]
        self.answer(status, content, headers, half=fault.startswith("half"))
        if fault == "half, then stall" and self.command == "GET":
            self.wfile.flush()
            self.server.over.wait()

    def answer(
        self, status: int, content: bytes, headers: dict[str, str], half: bool = False
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if half else content)
            self.close_connection = self.close_connection or half


@contextmanager
def serving(folder: Path) -> Iterator[FaultyServer]:
    server = FaultyServer(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def write_each_format(folder: Path) -> None:
    """Forty rows in a file of each format."""
    ids = list(range(40))
    table = pa.table({"id": ids, "text": [f"row {n} " * 40 for n in ids]})
    pq.write_table(table, folder / "a.parquet", row_group_size=10, compression="none")
    pyarrow.feather.write_feather(
        table, folder / "a.arrow", compression="uncompressed", chunksize=10
    )
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    lines = "".join(f"{row['id']},{row['text']}\n" for row in table.to_pylist())
    (folder / "a.csv").write_text("id,text\n" + lines)
    (folder / "a.txt").write_text(lines)
    np.save(folder / "a.npy", np.arange(4000).reshape(40, 100))
    with tarfile.open(folder / "a.tar", "w") as tar:
        for n in ids:
            info = tarfile.TarInfo(f"{n:03}.txt")
            info.size = 400
            tar.addfile(info, io.BytesIO(b"x" * 400))
