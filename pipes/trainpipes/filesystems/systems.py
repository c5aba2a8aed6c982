"""The file system of a path or URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import fsspec
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from trainpipes._internal.checks import pip_install
from trainpipes._internal.messages import clean, nearest
from trainpipes.errors import ConfigError, MissingExtraError
from trainpipes.filesystems.request import try_once
from trainpipes.filesystems.retry import NORMAL, Retry

#: Connections to one store, at most.
CONNECTIONS = 64


def is_local(system: Any) -> bool:
    return isinstance(system, LocalFileSystem)


def open_system(url: str, options: Mapping[str, Any], retry: Retry = NORMAL) -> tuple[Any, str]:
    if os.path.exists(url) or not ("::" in url or "://" in url):
        return LocalFileSystem(), os.path.abspath(os.path.expanduser(url))
    try:
        if "::" not in url and url.startswith(("http://", "https://")):
            client = {"raise_for_status": _refuse_redirection}
            options = {**options, "client_kwargs": client | (options.get("client_kwargs") or {})}
        elif "::" not in url and url.startswith(("s3://", "s3a://")):
            # botocore does not try again by itself, and has a connection for each part.
            own: dict[str, Any] = {"retries": {"total_max_attempts": 1}}
            own["max_pool_connections"] = CONNECTIONS
            own |= {"read_timeout": retry.timeout} if retry.timeout else {}
            options = {**options, "config_kwargs": own | (options.get("config_kwargs") or {})}
        system, path = fsspec.url_to_fs(url, **options)
        try_once(system)
    except ImportError as error:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        package = (cause.name or "").split(".")[0]
        said = pip_install(package) if package else str(error)
        raise MissingExtraError(
            f"{url} needs the package {package or '?'}, which is not installed: {said}", path=url
        ) from clean(error)
    except (TypeError, ValueError) as error:
        protocol = url.split("://")[0].split("::")[-1]
        said = f"{url!r} cannot be opened with storage_options {sorted(options)}: {error}"
        if protocol not in known_implementations and protocol not in fsspec.available_protocols():
            hint = nearest(protocol, sorted(known_implementations))
            said = (
                f"{url!r}: fsspec has no file system for the protocol {protocol!r}{hint}; one of your own is "
                "known once it is registered by fsspec.register_implementation()"
            )
        raise ConfigError(said) from clean(error)
    if type(system) is CachingFileSystem:
        raise ConfigError(
            f"{url!r}: once a request fails, 'blockcache::' returns zeros in place of the data; take "
            "'simplecache::', or .cache() after read_parquet()"
        )
    system.invalidate_cache()  # a listing of earlier may not be what is there now
    return system, path.rstrip("/") or path


async def _refuse_redirection(response: Any) -> None:
    if 300 <= response.status < 400:  # to nowhere, else it was followed
        import aiohttp

        said = f"{response.reason}, and it does not say where to"
        about = response.request_info, response.history
        raise aiohttp.ClientResponseError(*about, status=response.status, message=said)
