"""A store that speaks S3, in this process. What it needs is imported where it starts: that takes a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

__all__ = ["address_of", "s3_store"]


@contextmanager
def s3_store(bucket: str) -> Iterator[dict[str, Any]]:
    """Options of a file system with a bucket; skips the test where the packages are missing."""
    s3fs = pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server")
    served = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    host, port = served.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "someone", "secret": "hush"}
    system = s3fs.S3FileSystem(**options)
    try:
        if not system.exists(bucket):  # what moto holds is of the process, not of the server
            system.mkdir(bucket)
        yield options
    finally:
        served.stop()
        # Each server has a client of its own, which fsspec keeps, with 300,000 objects of botocore's.
        s3fs.S3FileSystem.clear_instance_cache()


def address_of(options: dict[str, Any]) -> tuple[str, int]:
    """Host and port of the store."""
    address = urlsplit(options["endpoint_url"])
    return str(address.hostname), int(address.port or 0)
