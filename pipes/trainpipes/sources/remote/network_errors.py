"""What an error of an fsspec file system says about the server.

fsspec reports an HTTP 503 as ``FileNotFoundError``, so the whole chain of errors counts.
"""

from __future__ import annotations

import email.utils
import errno
import http.client
import math
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainpipes._internal.clean_errors import OriginalError
from trainpipes._internal.secrets import hidden

#: Statuses below 500 that may pass: request timeout, too early, too many requests.
PASSING_STATUSES = {408, 425, 429}
#: Statuses about credentials.
ACCESS_STATUSES = {401, 403, 407}
#: Statuses that tell something about the file: its end lies before the range asked for, or it is
#: another version than the one asked for.
CHANGED_STATUSES = {412, 416}

#: Error numbers that may pass. OSErrors with others are about files, or about this machine.
PASSING_NUMBERS = {
    getattr(errno, name)
    for name in (
        "EAGAIN", "EBUSY", "ECOMM", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN",
        "EHOSTUNREACH", "EINTR", "EIO", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENOBUFS", "ENOTCONN",
        "EPIPE", "EPROTO", "EREMOTEIO", "ESHUTDOWN", "ESTALE", "ETIME", "ETIMEDOUT",
    )
    if hasattr(errno, name)
}  # fmt: skip
#: Built-in errors that may pass; so may an OSError without a number, if it is not one like FileNotFoundError.
PASSING = (TimeoutError, ConnectionError, EOFError, ssl.SSLError, http.client.HTTPException)
#: The same in packages, as "package.class". They stand for their subclasses, too.
PASSING_NAMES = {
    "aiohttp.ClientConnectionError", "aiohttp.ClientPayloadError", "azure.ServiceRequestError",
    "azure.ServiceResponseError", "azure.IncompleteReadError", "botocore.ChecksumError",
    "botocore.FlexibleChecksumError", "botocore.HTTPClientError", "botocore.IncompleteReadError",
    "botocore.ResponseParserError", "botocore.ResponseStreamingError", "google.TransportError",
    "httpx.TransportError", "paramiko.SSHException", "requests.ChunkedEncodingError",
    "requests.ConnectionError", "requests.Timeout", "socket.gaierror", "urllib3.HTTPError",
}  # fmt: skip
#: Credentials that are missing, or cannot be renewed.
ACCESS_NAMES = {
    "azure.ClientAuthenticationError", "azure.CredentialUnavailableError",
    "botocore.CredentialRetrievalError", "botocore.NoCredentialsError", "botocore.NoAuthTokenError",
    "botocore.PartialCredentialsError", "botocore.SSOError", "botocore.TokenRetrievalError",
    "google.DefaultCredentialsError", "google.RefreshError",
}  # fmt: skip
#: Redirections that end nowhere.
REJECTED_NAMES = {"aiohttp.TooManyRedirects", "aiohttp.InvalidURL", "httpx.TooManyRedirects"}
#: Codes of S3 about credentials that come as "400 Bad Request".
ACCESS_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
#: Attributes that hold a status, of an error or its response.
STATUS_NAMES = ("status", "status_code", "code")
#: Characters shown of an error.
SHOWN = 300


class OtherVersionError(Exception):
    status = 412


@dataclass(frozen=True)
class Failure:
    """An error's text and kind: only "passing" is tried again; "other" is not about the server."""

    kind: Literal["passing", "access", "rejected", "changed", "missing", "other"]
    text: str
    wait: float = 0.0


def understand(error: Exception, handled: BaseException | None = None) -> Failure:
    """The cause of an error; of all in its chain, a server's status tells most."""
    chain = list(_chain(error, handled))
    for one in chain:
        if isinstance(one, ssl.SSLCertVerificationError):
            return Failure("rejected", _line(one))
        denied = isinstance(one, PermissionError) or _named(one, ACCESS_NAMES)
        if denied or _code(one) in ACCESS_CODES:
            return Failure("access", _line(one))
    for one in chain:
        if isinstance(one, PASSING) or _named(one, PASSING_NAMES):  # some have a status like 400
            return Failure("passing", _line(one))
        if _named(one, REJECTED_NAMES):
            return Failure("rejected", _line(one))
        status = _status(one)
        if status is not None:
            kind: Any = "rejected"
            if status >= 500 or status in PASSING_STATUSES:
                kind = "passing"
            elif status in ACCESS_STATUSES:
                kind = "access"
            elif status in (404, 410):
                kind = "missing"
            elif status in CHANGED_STATUSES:
                kind = "changed"
            return Failure(kind, _line(one), _wait(one))
    passing = next(filter(_may_pass, chain), None)
    if passing is not None:
        return Failure("passing", _line(passing))
    missing = isinstance(error, FileNotFoundError)
    return Failure("missing" if missing else "other", _line(error))


def _chain(error: BaseException | None, end: BaseException | None) -> Iterator[BaseException]:
    seen = set()
    while error is not None and error is not end and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _may_pass(error: BaseException) -> bool:
    if not isinstance(error, OSError):
        return False
    if error.errno is None:
        return type(error).__module__ != "builtins" or type(error) is OSError
    return error.errno in PASSING_NUMBERS


def _named(error: BaseException, names: set[str]) -> bool:
    classes = type(error).__mro__
    return any(f"{cls.__module__.split('.')[0]}.{cls.__name__}" in names for cls in classes)


def _response(error: BaseException) -> Any:
    return getattr(error, "response", None)


def _code(error: BaseException) -> str:
    response = _response(error)
    found = response.get("Error") if isinstance(response, dict) else None
    return str(found.get("Code", "")) if isinstance(found, dict) else ""


def _status(error: BaseException) -> int | None:
    response = _response(error)
    if isinstance(response, dict):
        reported: Iterator[Any] = iter([response.get("ResponseMetadata", {}).get("HTTPStatusCode")])
    else:
        reported = map(_own_status, (error, response))
    return next((n for n in reported if isinstance(n, int) and 300 <= n < 600), None)


def _own_status(of: Any) -> Any:
    """By the first of its names that there is: aiohttp warns of another one."""
    return next((getattr(of, name) for name in STATUS_NAMES if hasattr(of, name)), None)


def _wait(error: BaseException) -> float:
    """Seconds that a server asks to wait by ``Retry-After``, a number or a date."""
    response = _response(error)
    headers = getattr(error, "headers", None)
    if isinstance(response, dict):
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    elif headers is None:
        headers = getattr(response, "headers", None)
    reported = None
    if isinstance(headers, Mapping):
        reported = headers.get("Retry-After") or headers.get("retry-after")
    try:
        seconds = float(str(reported))
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(str(reported)).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _line(error: BaseException) -> str:
    text = " ".join(hidden(str(error)).split())
    if isinstance(error, OriginalError):
        return text
    text = text if len(text) <= SHOWN else text[:SHOWN] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
