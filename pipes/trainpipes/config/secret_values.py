"""Texts that hold a secret: URLs with a user or password, or a signed query."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

from trainpipes.secret_text import hidden, is_secret

__all__ = ["secret_in"]

#: A URL from its host on.
_URL = re.compile(r"://([^\s'\"]*)")
#: Parameters of signed URLs.
_SIGNED = re.compile(
    r"sig|signature|token|se|sp|(x-amz|x-goog)-(signature|credential|security-token)", re.I
)


def secret_in(text: str) -> str:
    """What is secret in a text; nothing if nothing is.

    >>> secret_in("https://me:pw@host/a.csv"), secret_in("s3://bucket/part-?.parquet")
    ('it is a URL with a user or password', '')
    """
    if hidden(text).count("://…@"):
        return "it is a URL with a user or password"
    for rest in _URL.findall(text):
        host = re.split(r"[/?#]", rest, maxsplit=1)[0]
        if "@" in host:
            return "it is a URL with a user or password"
        try:
            query = parse_qsl(urlsplit(f"//{rest}").query)
        except ValueError:
            query = []
        for name, _ in query:
            if is_secret(name) or _SIGNED.fullmatch(name):
                return f"it is a URL with {name}= in its query"
    return ""
