"""The exceptions that trainpipes raises, and values and data as text in them, and in what else others read (a
``repr``, a log, a state): short, without secrets or control characters.

    TrainpipesError
    ├── ConfigError            (ValueError)         a stage, loader or recipe got something it cannot use
    │   └── TopologyError      (ValueError)         ranks, workers and shards do not fit together
    ├── DataError              (ValueError)         the data is not what it should be
    │   ├── MissingFilesError  (FileNotFoundError)  nothing to read
    │   ├── UnreadableError    (OSError)            files that cannot be opened or decoded
    │   ├── SchemaError        (TypeError)          columns are missing, or have another type
    │   └── DataChangedError   (OSError)            a file has changed since it was listed
    ├── UnreachableError       (OSError)            a server does not answer, or denies access
    ├── StateError             (ValueError)         a checkpoint does not fit this pipeline
    ├── WorkerError            (RuntimeError)       worker processes have died
    └── MissingExtraError      (ImportError)        an optional package is not installed

Each message states the rule, the value received and a way out, without secrets: of a URL's user and
query only the names of the query remain.
"""

from __future__ import annotations

import functools
import hashlib
import re
import reprlib
import signal
from collections.abc import Mapping
from itertools import islice
from typing import Any
from unicodedata import east_asian_width

__all__ = [
    "ConfigError",
    "DataChangedError",
    "DataError",
    "MissingExtraError",
    "MissingFilesError",
    "SchemaError",
    "StateError",
    "TopologyError",
    "TrainpipesError",
    "UnreachableError",
    "UnreadableError",
    "WorkerError",
]

#: Characters of a message, at most: of a longer message, the start and the end are left.
MOST_SHOWN = 20_000


class TrainpipesError(Exception):
    """Base of all errors raised by trainpipes.

    Attributes:
        path: the file concerned.
        row_group: row group within ``path``, from 0.
        row: row within ``path``, from 0.
        stage: the stage that raised, as it prints in the pipeline.
        source: in a mix, the name of the source that ``path`` belongs to.
    """

    def __init__(
        self,
        message: str = "",
        *,
        path: str | None = None,
        row_group: int | None = None,
        row: int | None = None,
        stage: str | None = None,
        source: str | None = None,
    ) -> None:
        self.message = message
        super().__init__(self.message)
        self.path = path
        self.row_group = row_group
        self.row = row
        self.stage = stage
        self.source = source

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(
            name, cut(hidden(value), MOST_SHOWN) if isinstance(value, str) else value
        )

    def add_note(self, note: str, /) -> None:
        super().add_note(hidden(note))

    def __str__(self) -> str:
        return self.message


class ConfigError(TrainpipesError, ValueError):
    """A stage, loader or recipe was given something it cannot use."""


class TopologyError(ConfigError):
    """The numbers of ranks, workers and shards do not fit together."""


class DataError(TrainpipesError, ValueError):
    """The data is not what it should be."""


class MissingFilesError(DataError, FileNotFoundError):
    """No file matches, or a file that was listed is gone."""


class UnreadableError(DataError, OSError):
    """Files that cannot be opened or decoded."""


class SchemaError(DataError, TypeError):
    """A column is missing, or has another type than it must have."""


class DataChangedError(DataError, OSError):
    """A file has changed since it was listed, or a dataset has other rows than at first."""


class UnreachableError(TrainpipesError, OSError):
    """A server does not answer, or denies access. This says nothing about the data.

    Attributes:
        attempts: how many times it was asked.
        seconds: how long that took.
    """

    def __init__(
        self, message: str = "", *, attempts: int = 1, seconds: float = 0.0, **context: Any
    ) -> None:
        super().__init__(message, **context)
        self.attempts = attempts
        self.seconds = seconds


class StateError(TrainpipesError, ValueError):
    """A checkpoint does not fit this pipeline, is incomplete, or was damaged."""


class WorkerError(TrainpipesError, RuntimeError):
    """Worker processes of ``map`` or of a ``Loader`` have died again and again, or a result cannot be
    sent.
    """


class MissingExtraError(TrainpipesError, ImportError):
    """An optional package is needed and not installed."""


#: What stands in place of a secret: in a record, and in a text.
LEFT_OUT, MARK = "(left out)", "…"
#: How stand-ins for secrets in a state begin.
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
_ASSIGNED = re.compile(
    rf"""((?:\b(?:{STRONG})\s*=|(?P<q>['"])(?:{STRONG})(?P=q)\s*:)\s*)"""
    r"""('[^']*'|"[^"]*"|[^\s,;)&}\]'"]+)""",
    re.IGNORECASE,
)
#: Values that are no secrets: Python's names, counts, and dots in an example.
_PLAIN = re.compile(r"None|True|False|[\d.,_]+|\.\.\.")
#: A URL in a text. In quotes it ends with them; else with a space, or where the next URL of a chain begins.
_IN_QUOTES = re.compile(
    r"""(?P<q>['"])(?P<chain>(?:[\w+.-]+(?:://[^\s'"?#:@]*)?::)*)(?P<scheme>[\w+.-]+)://"""
    r"""(?P<rest>(?:\\.|(?!(?P=q)(?:[\s,;:.)\]}>]|$))[^\n\\])*)(?P=q)"""
)
_IN_TEXT = re.compile(
    r"""(?<![\w+.-])(?P<scheme>[\w+.-]+)://(?P<rest>(?:[^\s'"?#]|'(?=\w))*?"""
    r"""(?:[?#][^\s"<>]*?(?=::[\w+.-]+(?:://|::)|[\s"<>]|$)|(?=::|'(?!\w)|[\s"]|$)))"""
)
#: A query without the URL before it.
_LOOSE = re.compile(r"""(?<=[^\s?&])\?[\w.%\[\]-]+=[^\s"<>]*""")
#: Where a query begins in a text that may also be a glob or the name of an object.
_NAMED = re.compile(r"[?#][\w.%\[\]-]+=")
#: What ends a sentence or a quotation, not a URL.
ENDS = ".,:;'\")]}»"
_NAME = re.compile(r"[\w.%\[\]-]{1,64}")
#: Before the host; the text after a colon there is no port.
_USER = re.compile(r"[^/?#]*@|[^/:?#]*:(?!\d+(?:[/?#]|$))[^@]*@")
#: Parameters that sign a URL, or let somebody in: another value stands for the same file.
_SIGNING = re.compile(
    r"x-(amz|goog|oss|cos|obs)-.*|awsaccesskeyid|googleaccessid|ossaccesskeyid|expires|expiry|exp|policy|key-pair-id"
    r"|s[eptvrs]|srt|spr|sip|sdd|ses|sk(oid|tid|t|e|s|v)|saoid|suoid|scid|hdnts|hdnea|hmac|jwt|ticket|nonce"
    r"|key|code|pwd|pw|pass|sign|security-token",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a value of that name may be a credential.

    >>> is_secret("api_key"), is_secret("token"), is_secret("key"), is_secret("pad_token")
    (True, True, False, False)
    """
    return _SECRET.fullmatch(name) is not None


def hidden(text: str) -> str:
    """A text without its secrets. Of a URL's query only the names of its parameters are left.

    >>> hidden("s3://key:se/cret@bucket/a.csv is no bucket: 'key:se/cret@bucket'")
    "s3://…@bucket/a.csv is no bucket: '…@bucket'"
    >>> hidden("https://host/a?page=2&sig=abc, api_key='abc', api_key=None")
    "https://host/a?page=…&sig=…, api_key='…', api_key=None"
    """
    text = without_url_secrets(text)
    if "?" in text:
        text = _LOOSE.sub(_loose, text)
    return _ASSIGNED.sub(_assigned, text)


def assigns_secret(text: str) -> bool:
    """Whether a text, such as an object's ``repr``, gives a secret by its name.

    >>> assigns_secret("Client(api_key='abc')"), assigns_secret("Client(api_key=None)")
    (True, False)
    """
    return _ASSIGNED.sub(_assigned, text) != text


def without_url_secrets(text: str) -> str:
    """URLs without users, values of queries, and fragments."""
    if "://" not in text:
        return text
    users: set[str] = set()
    text = _IN_QUOTES.sub(lambda match: _quoted(match, users), text)
    text = _IN_TEXT.sub(lambda match: _bare(match, users), text)
    for user in sorted(users, key=len, reverse=True):  # also where it stands without its URL
        text = text.replace(user, f"{MARK}@")
    return text


def known_name(url: str) -> str:
    """What a URL is known by: without user and signature, with a digest of the rest of its query.

    >>> known_name("https://me:pw@host/a.csv?X-Amz-Signature=abc&sig=c#d")
    'https://host/a.csv'
    >>> known_name("https://host/a.csv?versionId=3&X-Amz-Signature=abc")
    'https://host/a.csv?7e75e2b65898ec36'
    """
    bare, _, query = _split(url)
    parameters = [
        parameter
        for parameter in query.split("&")
        if parameter and not _signs(parameter.partition("=")[0])
    ]
    return _with_digest(bare, "&".join(parameters))


def without_query(url: str) -> str:
    """A URL up to its query, without user."""
    return _split(url)[0]


def kept_name(url: str) -> str:
    """A URL as it is written to a file: without secrets, and distinguished from others."""
    bare, user, query = _split(url)
    return _with_digest(bare, f"{user}?{query}" if user or query else "")


def _with_digest(bare: str, more: str) -> str:
    if not more:
        return bare
    return f"{bare}?{hashlib.sha256(more.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def _split(url: str) -> tuple[str, str, str]:
    if "://" not in url:
        return url, "", ""
    scheme, rest = url.split("://", 1)
    user = _user(scheme, rest)
    rest = rest[len(user) :]
    start = _query_start(scheme, rest)
    return f"{scheme}://{rest[:start]}", user, rest[start:].partition("#")[0][1:]


def stand_in(text: str) -> str:
    """What stands for a secret in a state: equal for equal ones, and the secret can't be read from it.

    >>> stand_in("hunter2") == stand_in("hunter2") != stand_in("hunter3")
    True
    """
    return f"{STANDS_IN}{_digest(text)}"


@functools.lru_cache(maxsize=256)
def _digest(text: str) -> str:
    content = text.encode("utf-8", "surrogatepass")
    return hashlib.pbkdf2_hmac("sha256", content, b"trainpipes", ROUNDS).hex()[:16]


def _signs(name: str) -> bool:
    return is_secret(name) or _SIGNING.fullmatch(name) is not None


def _user(scheme: str, rest: str) -> str:
    """What stands before the host, with its @; names and containers are none."""
    match = _USER.match(rest)
    return match[0] if match and (":" in match[0] or scheme.startswith("http")) else ""


def _quoted(match: re.Match[str], users: set[str]) -> str:
    quote = match["q"]
    return f"{quote}{match['chain']}{_url(match['scheme'], match['rest'], users)}{quote}"


def _bare(match: re.Match[str], users: set[str]) -> str:
    rest = match["rest"].rstrip(ENDS)
    return _url(match["scheme"], rest, users) + match["rest"][len(rest) :]


def _url(scheme: str, rest: str, users: set[str]) -> str:
    user = _user(scheme, rest)
    if user:
        users.add(user)
        rest = f"{MARK}@{rest[len(user) :]}"
    start = _query_start(scheme, rest)
    return f"{scheme}://{rest[:start]}{_names_only(rest[start:])}"


def _query_start(scheme: str, rest: str) -> int:
    """Where a query or a fragment begins; a ``?`` may belong to a glob."""
    by_http = scheme.lower().rpartition("::")[2].startswith("http")
    start = re.search("[?#]", rest) if by_http else _NAMED.search(rest)
    return len(rest) if start is None else start.start()


def _loose(match: re.Match[str]) -> str:
    text = match[0].rstrip(ENDS)
    return _names_only(text) + match[0][len(text) :]


def _names_only(text: str) -> str:
    """A query, from its ``?`` on, without values, and without fragment."""
    query, sharp, fragment = text.partition("#")
    if query:
        query = "?" + "&".join(map(_parameter, re.split("[&?]", query[1:])))
    return query + sharp + MARK * bool(fragment)


def _parameter(text: str) -> str:
    name, equals, _ = text.partition("=")
    if not text:
        return ""
    return f"{name}={MARK}" if equals and _NAME.fullmatch(name) else MARK


def _assigned(match: re.Match[str]) -> str:
    return match[0] if _PLAIN.fullmatch(match[3]) else f"{match[1]}'{MARK}'"


#: Not printable by itself; joins several emojis into one.
JOINER = "\u200d"
#: Characters of a value that a message quotes, at most.
MOST = 100
#: Values that are looked at for that.
MOST_LOOKED_AT = 1000
#: Characters of a text at either end that are looked at for secrets: more than a URL has.
MOST_OF_URL = 20_000


def cut(text: str, most: int = MOST) -> str:
    """A text, or the start and the end of a long text.

    >>> cut("abcdefghijklmnop", 9)
    'abcd…mnop'
    """
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[: most - 1 - half]}…{text[len(text) - half :]}"


def shown(value: Any, most: int = MOST) -> str:
    """``repr(value)`` without secrets, on a single line, cut where it is long.

    >>> shown([1, "b"])
    "[1, 'b']"
    >>> shown("x" * 1_000_000, 20)
    "'xxxxxxxxx…xxxxxxxx'"
    >>> shown(list(range(1000)), 20)
    '[0, 1, 2, … 99, ...]'
    """
    return cut(_in_one_line(hidden(_Short().repr(value))), most)


def _in_one_line(text: str) -> str:
    return re.sub(r"\n\s*(\.?)", lambda end: end[1] or " ", text) if "\n" in text else text


class _Short(reprlib.Repr):
    """``repr`` that looks at some elements, and at so many in all."""

    def __init__(self) -> None:
        super().__init__()
        self.left = MOST_LOOKED_AT
        self.maxlevel = 8
        self.maxstring = self.maxother = self.maxlong = 4 * MOST
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = MOST
        self.maxarray = self.maxdeque = self.maxdict = MOST

    def repr1(self, value: Any, level: int) -> str:
        self.left -= 1
        try:
            return super().repr1(value, level) if self.left >= 0 else "..."
        except Exception:  # of a class that has the name of another class
            return f"<{type(value).__name__}>"

    def repr_str(self, value: str, level: int) -> str:
        if len(value) > 2 * MOST_OF_URL:
            value = value[:MOST_OF_URL] + value[-MOST_OF_URL:]
        if len(value) > self.maxstring:  # before it is cut: else the end of a URL would be left
            value = hidden(value)
        return super().repr_str(value, level)

    def repr_bytes(self, value: bytes, level: int) -> str:
        if len(value) > 2 * MOST_OF_URL:
            value = value[:MOST_OF_URL] + value[-MOST_OF_URL:]
        return cut(hidden(repr(value)), self.maxstring)

    def repr_dict(self, value: Mapping[Any, Any], level: int) -> str:
        if not value or level <= 0:
            return "{...}" if value else "{}"
        pairs = islice(value.items(), self.maxdict)  # in their order: reprlib sorts them
        parts = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in pairs]
        return "{" + ", ".join(parts) + (", ..." if len(value) > len(parts) else "") + "}"

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() < 512:
            return repr(value)
        return f"a number of {value.bit_length() * 3 // 10:,} digits"


def escaped(text: str, most: int | None = None) -> str:
    """A text on a single line, with control characters as escapes.

    >>> escaped("red: \\x1b[31m, line\\n")
    'red: \\\\x1b[31m, line\\\\n'
    >>> escaped("x" * 1000, 9)
    'xxxx…xxxx'
    """
    text = text if most is None else cut(text, most)
    good = (
        c if c.isprintable() or c == JOINER else c.encode("unicode_escape").decode() for c in text
    )
    return "".join(good)


def columns_of(text: str) -> int:
    """Columns of a terminal that a text takes, about."""
    return len(text) if text.isascii() else sum(1 + (east_asian_width(c) in "WF") for c in text)


def amount(count: float) -> str:
    """So many bytes.

    >>> amount(512), amount(40_960)
    ('512 B', '41.0 kB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def how_ended(code: int | None) -> str:
    """How a process ended, by its exit code.

    >>> how_ended(1), how_ended(-15)
    ('has ended with exit code 1', 'was ended by signal 15 (SIGTERM)')
    >>> how_ended(-9)
    'was ended by signal 9 (SIGKILL, as the system does where memory runs out)'
    """
    if code is None or code >= 0:
        return f"has ended with exit code {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else "unknown"
    hints = {
        "SIGKILL": ", as the system does where memory runs out",
        "SIGBUS": ", as the system does where /dev/shm is full or a file that is mapped was cut",
    }
    hint = hints.get(name, "")
    return f"was ended by signal {-code} ({name}{hint})"
