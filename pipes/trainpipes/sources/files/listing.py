"""What a path, a folder, a glob or a URL stands for: files and their sizes, in natural order.

Local names are matched here, so that links are followed and no folder is passed over in silence;
``remote_listing`` asks fsspec for all others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import fsspec
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from trainpipes._internal.checks import pip_install, refuse_special
from trainpipes._internal.clean_errors import clean
from trainpipes._internal.messages import nearest
from trainpipes._internal.progress import counted
from trainpipes.errors import (
    ConfigError,
    MissingExtraError,
    MissingFilesError,
    UnreachableError,
    UnreadableError,
)
from trainpipes.sources.files.patterns import (
    Found,
    Told,
    check_outputs,
    fixed_root,
    has_magic,
    hidden,
)
from trainpipes.sources.files.remote_listing import list_remote
from trainpipes.sources.remote.request import try_once
from trainpipes.sources.remote.retry import Requests, try_seconds

#: Connections to one store, at most.
CONNECTIONS = 64
#: Names shown of a folder that does not hold what was asked for.
SHOWN = 6


def natural(path: str) -> tuple[list[list[str | int]], str]:
    """A sort key that goes folder by folder and counts as people do.

    >>> sorted(["d/part-10", "d/part-2", "d/a/x"], key=natural)
    ['d/a/x', 'd/part-2', 'd/part-10']
    """
    pieces = (re.split("([0-9]+)", part) for part in path.split("/"))
    return [[int(p) if n % 2 else p for n, p in enumerate(piece)] for piece in pieces], path


def is_local(system: Any) -> bool:
    """Whether an fsspec file system is this machine's."""
    return isinstance(system, LocalFileSystem)


def open_system(url: str, options: Mapping[str, Any], seconds: float) -> tuple[Any, str]:
    """The fsspec file system of a URL or path, and the path in it.

    Args:
        url: what to open.
        options: for the file system.
        seconds: how long its requests will be tried again.

    Raises:
        MissingExtraError: the package that speaks this protocol is not installed.
        ConfigError: there is no file system for the protocol, it does not take these options, or it makes up
            data.
    """
    if os.path.exists(url) or not ("::" in url or "://" in url):
        return LocalFileSystem(), os.path.abspath(os.path.expanduser(url))
    try:
        plain = "::" not in url
        if plain and url.startswith(("http://", "https://")):
            options = _http_options(seconds, options)
        elif plain and url.startswith(("s3://", "s3a://")):
            options = _s3_options(options)
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
        if protocol not in known_implementations and protocol not in fsspec.available_protocols():
            hint = nearest(protocol, sorted(known_implementations))
            raise ConfigError(
                f"{url!r}: fsspec has no file system for the protocol {protocol!r}{hint}; one of your own is "
                "known once it is registered by fsspec.register_implementation()"
            ) from clean(error)
        raise ConfigError(
            f"{url!r} cannot be opened with storage_options {sorted(options)}: {error}"
        ) from clean(error)
    if type(system) is CachingFileSystem:
        raise ConfigError(
            f"{url!r}: once a request fails, 'blockcache::' returns zeros in place of the data; take "
            "'simplecache::', or .cache() after read_parquet()"
        )
    system.invalidate_cache()  # a listing of earlier may not be what is there now
    return system, path.rstrip("/") or path


def _s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by which botocore does not try again by itself, and has a connection for each part."""
    own = {"retries": {"total_max_attempts": 1}, "max_pool_connections": CONNECTIONS}
    return {**options, "config_kwargs": {**own, **(options.get("config_kwargs") or {})}}


def _http_options(seconds: float, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by which a connection over HTTP is given up when nothing comes for some time, not when
    much has to come; and by which a redirection to nowhere is no answer."""
    import aiohttp

    silence = try_seconds(seconds)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=silence, sock_read=silence)
    client = {"raise_for_status": _refuse_redirection, **(options.get("client_kwargs") or {})}
    return {"timeout": timeout, **options, "client_kwargs": client}


async def _refuse_redirection(response: Any) -> None:
    """Raise for a redirection that could not be followed: its page is not the file."""
    if 300 <= response.status < 400:
        import aiohttp

        raise aiohttp.ClientResponseError(
            response.request_info,
            response.history,
            status=response.status,
            message=f"{response.reason}, and it does not say where to",
            headers=response.headers,
        )


def expand(url: str, opened: tuple[Any, str], suffixes: Sequence[str], requests: Requests) -> Found:
    """The files that a path, folder, glob or URL stands for, in natural order.

    Args:
        url: what to look for.
        opened: what ``open_system`` gave for it.
        suffixes: what the names of files found in folders end with, in lower case.
        requests: makes those to servers.

    Raises:
        MissingFilesError: there are none; says what is there instead.
        UnreachableError: a server does not answer, or denies access.
        UnreadableError: a folder or bucket cannot be listed.
    """
    system, path = opened
    try:
        local = is_local(system)
        found = _local(path, suffixes) if local else list_remote(*opened, suffixes, requests)
    except (UnreachableError, ConfigError):
        raise
    except FileNotFoundError as error:
        if isinstance(error, MissingFilesError):
            raise
        found = {}
    except Exception as error:
        raise _unlistable(url, error) from error
    if not found:
        raise _nothing(url, system, path, suffixes, requests)
    return {name: found[name] for name in sorted(found, key=natural)}


# This machine


def _local(path: str, suffixes: Sequence[str]) -> Found:
    if os.path.isdir(path):
        found = _sized(_below(path, suffixes))
        check_outputs(path, found, os.path.exists)
        return found
    if os.path.lexists(path) or not has_magic(path):
        return _sized([path])
    root, parts = fixed_root(path)
    matches = dict.fromkeys(_matches("/" + "/".join(root), parts))
    names: dict[str, None] = {}
    for match in matches:
        if not os.path.isdir(match):
            names[match] = None
        elif parts[-1] != "**":
            names.update(dict.fromkeys(_below(match, suffixes)))
    return _sized(list(names))


def _sized(paths: Sequence[str] | Iterator[str]) -> Found:
    found: Found = {}
    for path in counted(paths, "listing", None, "files"):
        try:
            about = os.stat(path)
            found[path] = Told(about.st_size, str(about.st_mtime_ns), about.st_ino)
        except FileNotFoundError:
            if not os.path.islink(path):
                raise
            raise MissingFilesError(
                f"{path} is a link to {os.readlink(path)}, which does not exist; repair the link or "
                "remove it",
                path=path,
            ) from None
        refuse_special(path, about.st_mode)
    return found


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _enters(entry: os.DirEntry[str]) -> bool:
    """Whether to go into an entry: a folder, and not a link back to one above it."""
    if not entry.is_dir():
        return False
    if not entry.is_symlink():
        return True
    target = os.path.realpath(entry.path)
    here = os.path.realpath(os.path.dirname(entry.path))
    return os.path.commonpath([target, here]) != target


def _below(folder: str, suffixes: Sequence[str]) -> Iterator[str]:
    for entry in _entries(folder):
        if hidden(entry.name):
            continue
        if entry.is_dir():
            if _enters(entry):
                yield from _below(entry.path, suffixes)
        elif entry.name.lower().endswith(tuple(suffixes)):
            yield entry.path


def _matches(folder: str, parts: Sequence[str]) -> Iterator[str]:
    """Paths below a folder that match a pattern, part by part."""
    part, rest = parts[0], parts[1:]
    if part == "**":
        if rest:
            yield from _matches(folder, rest)
        for entry in _entries(folder):
            if hidden(entry.name):
                continue
            if _enters(entry):
                yield from _matches(entry.path, parts)
            elif not rest and not entry.is_dir():
                yield entry.path
    elif not has_magic(part):
        path = os.path.join(folder, part)
        if rest and os.path.isdir(path):
            yield from _matches(path, rest)
        elif not rest and os.path.lexists(path):
            yield path
    else:
        for entry in _entries(folder):
            if not fnmatchcase(entry.name, part) or (hidden(entry.name) and part[0] not in "._"):
                continue
            if not rest:
                yield entry.path
            elif entry.is_dir():
                yield from _matches(entry.path, rest)


# What to say


def _unlistable(url: str, error: Exception) -> UnreadableError:
    if isinstance(error, UnreadableError):
        return error
    path = getattr(error, "filename", None) or url
    if isinstance(error, PermissionError):
        return UnreadableError(
            f"permission to list {path} is denied ({error}); change it, or give credentials by "
            "storage_options={...}",
            path=str(path),
        )
    return UnreadableError(
        f"{url} cannot be listed: {type(error).__name__}: {error}; is the address right, and "
        "are credentials given (environment, or storage_options={...})?",
        path=url,
    )


def _nothing(
    url: str, system: Any, path: str, suffixes: Sequence[str], requests: Requests
) -> MissingFilesError:
    folder, names = _nearest_folder(system, path, requests)
    if folder == path:
        there = "it is empty"
        if names:
            glob = f"{url.rstrip('/')}/*"
            there = f"there are: {_shown(names)}. Name another suffix=, or a glob such as {glob!r}"
        return MissingFilesError(
            f"no file{_that_ends(suffixes)} in the folder {url!r} or below it; {there}", path=url
        )
    what = "no file matches" if has_magic(path) else "there is no file or folder"
    if folder is None:
        return MissingFilesError(f"{what} {url!r}, and nothing above it can be listed", path=url)
    missing = path[len(folder) :].strip("/").split("/")[0]
    hint = "" if has_magic(missing) else nearest(missing, [name.rstrip("/") for name in names])
    shown = folder if is_local(system) else system.unstrip_protocol(folder)
    return MissingFilesError(
        f"{what} {url!r}{hint}; the nearest folder that exists is {shown}, with: {_shown(names)}",
        path=url,
    )


def _that_ends(suffixes: Sequence[str]) -> str:
    """Which files are looked for; that they may be compressed, too, in two words.

    >>> _that_ends([".csv", ".csv.gz", ".csv.zst", ".tsv", ".tsv.gz"])
    ' that ends in .csv or .tsv, compressed or not,'
    """
    plain = [end for end in suffixes if not any(end.startswith(f"{other}.") for other in suffixes)]
    if plain == [""]:
        return ""
    said = f"{', '.join(plain[:-1])} or {plain[-1]}" if plain[1:] else plain[0]
    return f" that ends in {said}" + (", compressed or not," if len(plain) < len(suffixes) else "")


def _nearest_folder(system: Any, path: str, requests: Requests) -> tuple[str | None, list[str]]:
    """The lowest folder above or at a path that exists, and the names in it."""
    folder = path
    while folder:
        if not has_magic(folder):
            try:
                if is_local(system):
                    names = [e.name + "/" * e.is_dir() for e in _entries(folder)]
                else:
                    names = [
                        info["name"].rstrip("/").rsplit("/", 1)[-1]
                        + "/" * (info["type"] == "directory")
                        for info in requests.call(system, "ls", folder, detail=True)
                    ]
                return folder, sorted(names, key=natural)
            except UnreachableError:
                break
            except Exception:
                names = []  # not there, no folder, or not ours to list: look above it
        above = folder.rpartition("/")[0]
        folder = above or ("/" if folder != "/" and folder.startswith("/") else "")
    return None, []


def _shown(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    more = f", … ({len(names):,} in all)" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
