"""Secrets in texts that others read: in a ``repr``, an error, a log, and in what a state knows an option by.

Users and passwords of URLs, values of signed queries, and what is written under names such as ``api_key``.
"""

from __future__ import annotations

import functools
import hashlib
import re

__all__ = ["ASSIGNED", "LEFT_OUT", "STANDS_IN", "URL", "USER", "hidden", "is_secret", "stand_in"]

#: What stands in place of a secret: in a record, and in a text.
LEFT_OUT, MARK = "(left out)", "…"
#: How what stands for a secret in a state begins.
STANDS_IN = "secret:"
#: Rounds of the hash that stands for a secret in a state: some 20 ms, so that short ones are not guessed.
ROUNDS = 100_000

STRONG = (
    r"\w*(?:password|passwd|passphrase|secret|credential|api_?key|access_?key|private_?key|account_?key"
    r"|conn(?:ection)?_str(?:ing)?|authorization|bearer|cookie)\w*"
    r"|(?:\w*_)?(?:hf|auth|access|api|session|security|refresh|sas)_?token"
)
_SECRET = re.compile(rf"(?:{STRONG}|token|auth|headers?|sas|sig|signature)", re.IGNORECASE)
#: In a text, such as an object's ``repr``: name=value, and "name": value.
ASSIGNED = re.compile(
    rf"""((?:\b(?:{STRONG})\s*=|(?P<q>['"])(?:{STRONG})(?P=q)\s*:)\s*)"""
    r"""('[^']*'|"[^"]*"|[^\s,;)&}\]'"]+)""",
    re.IGNORECASE,
)
#: Values that are no secrets: Python's names, counts, and dots in an example.
_PLAIN = re.compile(r"None|True|False|[\d.,_]+|\.\.\.")
URL = re.compile(r"[\w+.-]+://[^\s'\"]*?(?=::|[\s'\"]|$)")
#: Before the host; what stands after a colon there is no port.
USER = re.compile(r"[^/]*@|[^/:]*:(?!\d+(?:/|$))[^@]*@")
#: A parameter of a query, and the names of those that sign a URL.
_PARAMETER = re.compile(r"(?<=[?&])([\w.-]+)=([^&\s'\"#:,;)\]]+)")
_SIGNED = re.compile(r"se|sp|(x-amz|x-goog)-(signature|credential|security-token)", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a value of that name may be a credential.

    >>> is_secret("api_key"), is_secret("token"), is_secret("key"), is_secret("pad_token")
    (True, True, False, False)
    """
    return _SECRET.fullmatch(name) is not None


def hidden(text: str) -> str:
    """A text without its secrets.

    >>> hidden("s3://key:se/cret@bucket/a.csv is no bucket: 'key:se/cret@bucket'")
    "s3://…@bucket/a.csv is no bucket: '…@bucket'"
    >>> hidden("https://host/a?page=2&sig=abc, api_key='abc', api_key=None")
    "https://host/a?page=2&sig=…, api_key='…', api_key=None"
    """
    if "://" in text:
        users = {user for url in URL.findall(text) if (user := _user(url))}
        for user in sorted(users, key=len, reverse=True):  # also where it stands without its URL
            text = text.replace(user, f"{MARK}@")
        text = _PARAMETER.sub(_parameter, text)
    return ASSIGNED.sub(_assigned, text)


def stand_in(text: str) -> str:
    """What stands for a secret in a state: the same for the same one, and nothing that it can be read from.

    >>> stand_in("hunter2") == stand_in("hunter2") != stand_in("hunter3")
    True
    """
    return f"{STANDS_IN}{_digest(text)}"


@functools.lru_cache(maxsize=256)
def _digest(text: str) -> str:
    content = text.encode("utf-8", "surrogatepass")
    return hashlib.pbkdf2_hmac("sha256", content, b"trainpipes", ROUNDS).hex()[:16]


def _user(url: str) -> str:
    """What stands before the host, with its @. ``hf://datasets/org/name@main`` has none, and in
    ``abfs://container@account`` it is no user."""
    scheme, rest = url.split("://", 1)
    found = USER.match(rest)
    return found[0] if found and (":" in found[0] or scheme.startswith("http")) else ""


def _parameter(found: re.Match[str]) -> str:
    secret = is_secret(found[1]) or _SIGNED.fullmatch(found[1])
    return f"{found[1]}={MARK}" if secret else found[0]


def _assigned(found: re.Match[str]) -> str:
    return found[0] if _PLAIN.fullmatch(found[3]) else f"{found[1]}'{MARK}'"
