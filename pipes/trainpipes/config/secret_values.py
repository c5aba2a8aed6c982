"""Texts that no config holds: URLs with a user or password, or with values in their query."""

from __future__ import annotations

import re

from trainpipes._internal.secret_text import without_url_secrets

__all__ = ["secret_in"]

_USER = re.compile(r"://[^\s'\"/?#]*@")


def secret_in(text: str) -> str:
    """What may be secret in a text; nothing if nothing may.

    >>> secret_in("https://me:pw@host/a.csv"), secret_in("s3://bucket/part-?.parquet")
    ('it is a URL with a user or password', '')
    >>> secret_in("https://host/a.csv?v=1")
    'it is a URL with values in its query, which may be secret'
    """
    left = without_url_secrets(text)
    if left.count("://…@") > text.count("://…@") or _USER.search(left.replace("://…@", "://")):
        return "it is a URL with a user or password"
    if left == text:
        return ""
    return "it is a URL with values in its query, which may be secret"
