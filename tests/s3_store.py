"""A store that speaks S3, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def s3_store(bucket: str) -> Iterator[dict[str, Any]]:
    """Options of a file system with an empty bucket; skips the test where the packages are missing."""
    s3fs = pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server")
    served = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    host, port = served.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "someone", "secret": "hush"}
    s3fs.S3FileSystem(**options).mkdir(bucket)
    try:
        yield options
    finally:
        served.stop()
