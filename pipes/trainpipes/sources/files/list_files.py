"""``list_files``, and the list of files that it makes: their names, sizes and stamps."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache as once
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np

from trainpipes import cache, errors
from trainpipes._internal import checks
from trainpipes._internal.checks import IntArray
from trainpipes.cache.kept_file import Store
from trainpipes.filesystems.retry import NORMAL, Requests, Retry
from trainpipes.filesystems.systems import is_local, open_system
from trainpipes.interfaces.source import Place, RowSource
from trainpipes.interfaces.stage import made_once
from trainpipes.interfaces.stage_kinds import ListingSource
from trainpipes.sources.files.folders import TAGS, Found, Reported, Wanted, by_exact_name, expand

#: Digests in a fingerprint, at most.
MAX_DIGESTS = 16
#: Bytes that a process fetches ahead, unless the user says otherwise.
PREFETCH_BYTES = 256 << 20


@dataclass(frozen=True)
class Listed:
    """A path, glob or folder of the user: where it is, and which files it means."""

    url: str
    system: Any
    wanted: Wanted


@dataclass(eq=False)
class FileList:
    """Files in order, int64 ``[files]``: ``sizes`` (-1 unknown), ``stamps`` (time of change in ns, or etag),
    ``inodes`` (0 remote). Pickles hold credentials.
    """

    names: list[str] = field(repr=False)
    paths: list[str] = field(repr=False)
    sizes: IntArray
    system_of: IntArray
    systems: tuple[Any, ...]
    stamps: list[str]
    inodes: IntArray
    retry: Retry = NORMAL
    cache: Store | None = None
    prefetch_bytes: int = PREFETCH_BYTES
    listed: tuple[Listed, ...] = ()
    #: The names below the listed folder, which are the same wherever that stands.
    below: list[str] = field(default_factory=list, repr=False)
    _process: int = field(default_factory=os.getpid, repr=False)
    _machine: str = field(default_factory=platform.node, repr=False)

    def __len__(self) -> int:
        return len(self.names)

    def pick(self, index: IntArray) -> FileList:
        which = index.tolist()
        texts = ("names", "paths", "stamps", *(["below"] if self.below else []))
        chosen: dict[str, Any] = {name: [getattr(self, name)[i] for i in which] for name in texts}
        chosen |= {name: getattr(self, name)[index] for name in ("sizes", "system_of", "inodes")}
        return replace(self, **chosen)

    def local(self, which: Iterable[int]) -> list[int]:
        """The files that are on this machine."""
        here = [is_local(system) for system in self.systems]
        return [n for n in which if here[int(self.system_of[n])]]

    def inode(self, file: int) -> int:
        return int(self.inodes[file]) if self._machine == platform.node() else 0

    def system(self, file: int) -> Any:
        """A forked child makes its own file system: connections do not survive a fork."""
        if self._process != os.getpid():
            again = [
                type(system)(*system.storage_args, **system.storage_options)
                for system in self.systems
            ]
            self.systems = tuple(again)
            self._process = os.getpid()
        return self.systems[int(self.system_of[file])]

    def known_names(self) -> list[str]:
        """The names for a state: URLs without users and signatures."""
        names = list(map(errors.known_name, self.names))
        if len(set(names)) == len(names):
            return names
        return self.kept_names()  # only possible secrets tell them apart

    def kept_names(self) -> list[str]:
        """The names for files on this machine, without secrets of URLs."""
        return list(map(errors.kept_name, self.names))

    def relative_names(self) -> list[str]:
        """Names below the lowest common folder, wherever that is."""
        parts = [name.split("://", 1)[-1].split("/") for name in self.known_names()]
        if not parts:
            return []
        alike = len(os.path.commonprefix(parts))  # noqa: RUF071  (of lists)
        shared = min(alike, *(len(p) - 1 for p in parts))
        return ["/".join(p[shared:]) for p in parts]

    def content(self, read: Sequence[str]) -> dict[str, Any]:
        """What a state knows of the files' content: what was ``read`` of it; where that is "", what the store
        calls it, which counts for the same URL only.
        """
        pairs = []
        for url, stamp, read_digest in zip(self.known_names(), self.stamps, read, strict=True):
            tagged = stamp.partition("=")[0] in TAGS
            pairs.append(
                ("read", read_digest) if read_digest else (url, stamp) if tagged else ("", "")
            )
        if not any(known for _, known in pairs):
            return {}
        by, known = zip(*pairs, strict=True)
        return {"content": {"by": digest(by), "of": digests(known)}}


def digest(lines: Sequence[str]) -> str:
    """36 bits of a SHA-256, as 6 characters: a state has up to 34 of them."""
    content = hashlib.sha256(os.fsencode("\n".join(lines))).digest()
    return urlsafe_b64encode(content).decode()[:6]


def digests(lines: Sequence[str]) -> list[str]:
    """Up to 16 digests, each of a contiguous group of lines."""
    edges = np.linspace(0, len(lines), min(MAX_DIGESTS, len(lines)) + 1).astype(int).tolist()
    return [digest(lines[a:b]) for a, b in pairwise(edges)]


log = logging.getLogger("trainpipes")

#: Ends of names that are Parquet in a folder.
SUFFIXES = (".parquet", ".pq")


class ListFiles(ListingSource):
    """Lists files by path, folder, glob or URL, for a reader such as ``read_parquet``; without one, rows are
    their names. Files are listed when the first row, ``len()`` or the state is needed.

    - A folder stands for all files of the reader's format in it and its subfolders (without a reader,
      ``.parquet`` and ``.pq``), except hidden ones and names that begin with ``_``.
    - A glob (``*``, ``?``, ``[...]``, ``**`` for any number of folders) stands for the files and folders that
      it matches, or for a file or folder of exactly this name.
    - A URL (``s3://``, ``gs://``, ``hf://``, also chained) is any of these on that file system; over HTTP a
      folder is a page of links, and ends in ``/``.

    Files come in natural order (``part-2`` before ``part-10``), folder by folder; a list keeps its order. Of
    tables with versions see ``read_delta``, ``read_iceberg`` and ``read_lance``.

    Args:
        urls: a path, folder, glob or URL, or a list of them.
        suffix: endings of files in folders, instead of the reader's; ``""`` for all files.
        storage_options: options of the fsspec file system, such as credentials; never shown or saved.
        retry: how long failing requests are tried again.
        cache_dir: a local folder that keeps remote bytes for later epochs and runs. Paths, also on NFS, are
            read where they are.
        cache_bytes: its limit, such as ``"500GB"``.
        prefetch_bytes: remote bytes that each process fetches ahead, such as ``"1GB"``.
        refresh: "epoch" for folders that grow: each epoch has the files that stand there when it begins, on
            rank 0 for all ranks. A state within an epoch names them, and a resume reads exactly these. Not
            with ``repeat()``, and not in workers of a plain ``DataLoader``.

    Raises:
        ConfigError: no path is given, a file is named twice, or a folder holds files and output made of them,
            or is a table's with versions.
        MissingFilesError: nothing matches; a file of the epoch to be resumed is gone, or one that a writer's
            manifest names.
        UnreadableError: a file is shorter than a writer's manifest says.
        UnreachableError: a server does not answer, or denies access.
        MissingExtraError: the package for a protocol is not installed.

    >>> import tempfile, pathlib
    >>> import trainpipes as tp
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ["part-10.parquet", "part-2.parquet", "_SUCCESS"]:
    ...     (folder / name).touch()
    >>> [name.rsplit("/", 1)[1] for name in tp.list_files(folder)]
    ['part-2.parquet', 'part-10.parquet']
    """

    free = frozenset({"retry", "cache_dir", "cache_bytes", "prefetch_bytes", "refresh"})

    urls: Any
    _: KW_ONLY
    suffix: str | Sequence[str] | None = None
    storage_options: Mapping[str, Any] | None = None
    retry: Retry | Mapping[str, Any] = Retry()
    cache_dir: str | os.PathLike[str] | None = None
    cache_bytes: int | str = "100GB"
    prefetch_bytes: int | str = PREFETCH_BYTES
    refresh: Literal["epoch"] | None = None

    #: The only files that are listed, by their names below the listed folder.
    only: ClassVar[tuple[str, ...] | None] = None
    #: Whether these are files by the very names of ``urls``, as a table's log has them.
    exact: ClassVar[bool] = False
    _known: ClassVar[FileList | None] = None

    @staticmethod
    def of(files: FileList, urls: Sequence[str]) -> ListFiles:
        """Files that were listed, by their names."""
        return ListFiles(urls=list(urls))._resolved(_known=replace(files, below=[], listed=()))

    def check(self) -> None:
        self._set(
            urls=_checked_urls(self.urls),
            retry=Retry.of(self.retry, "list_files(retry)"),
        )
        if self.cache_dir is not None:
            self._set(cache_dir=checks.local_path(self.cache_dir, "list_files(cache_dir)"))
        for name in ("cache_bytes", "prefetch_bytes"):
            checks.byte_count(getattr(self, name), f"list_files({name})")
        if self.storage_options is not None:
            option = "list_files(storage_options)"
            self._set(storage_options=checked_options(self.storage_options, option))
        ends = self._ends()
        good = checks.several(ends) and ends and all(isinstance(end, str) for end in ends)
        rule = "an end of names such as '.parquet', or several in a list"
        checks.require(good, "list_files(suffix)", rule, self.suffix)
        if self.suffix is not None and not isinstance(self.suffix, str):
            self._set(suffix=list(ends))

    def _ends(self, suffixes: Sequence[str] = SUFFIXES) -> Sequence[str]:
        if self.suffix is None:
            return suffixes
        return (self.suffix,) if isinstance(self.suffix, str) else self.suffix

    def _traits(self) -> dict[str, Any]:
        return {"grows": self.refresh is not None}

    def _fresh(self) -> ListFiles:
        stage = super()._fresh()
        vars(stage).update({k: v for k, v in vars(self).items() if k in ("only", "_known")})
        return stage

    @made_once
    def _listed(self) -> dict[str, FileList]:
        return {}

    def files(
        self, storage_options: Mapping[str, Any] | None = None, suffixes: Sequence[str] = SUFFIXES
    ) -> FileList:
        """The files, listed once, with a reader's options and endings."""
        if self._known is not None:
            return self._known
        options = {**(self.storage_options or {}), **(storage_options or {})}
        ends = self._ends(suffixes)
        key = repr((sorted(options.items()), list(ends)))
        if key not in self._listed:
            self._listed[key] = self._list(options, tuple(end.lower() for end in ends))
        return self._listed[key]

    def _list(self, options: Mapping[str, Any], suffixes: tuple[str, ...]) -> FileList:
        retry = Retry.of(self.retry, "list_files(retry)")
        requests = Requests(retry)
        urls = [self.urls] if isinstance(self.urls, str) else self.urls
        opened = [open_system(url, options, retry) for url in urls]

        def find(which: int) -> tuple[Found, Wanted | None]:
            if self.exact:
                return by_exact_name(opened[which], requests), None
            return expand(urls[which], opened[which], suffixes, requests)

        listings = requests.map(find, range(len(urls)), 16)
        systems: list[Any] = []
        rows: dict[str, tuple[str, str, int, Reported]] = {}
        below: dict[str, str] = {}
        listed = []
        for which, (url, (system, _), (files, wanted)) in enumerate(
            zip(urls, opened, listings, strict=True)
        ):
            if not any(system is known for known in systems):
                systems.append(system)
            number = next(n for n, known in enumerate(systems) if known is system)
            listed += [Listed(url, system, wanted)] if wanted is not None else []
            for path, about in files.items():
                name = path if is_local(system) else str(system.unstrip_protocol(path))
                if name in rows:
                    raise errors.ConfigError(
                        f"{self}: {name} is named twice, by {rows[name][0]!r} and by {url!r}; give each "
                        "file once. To see rows more often, mix() pipelines with weights",
                        path=name,
                    )
                rows[name] = url, path, number, about
                below[f"{which}/{_below(path, wanted)}"] = name
                if about.stamp.startswith("Last-Modified="):
                    _say_no_etag("/".join(name.split("/")[:3]))
        if self.only is not None:
            self._require_all(below)
            below = {key: below[key] for key in self.only}
            rows = {name: rows[name] for name in below.values()}
        _, paths, system_of, reported = zip(*rows.values(), strict=True)
        return FileList(
            list(rows),
            list(paths),
            np.array(
                [-1 if report.size is None else report.size for report in reported], dtype=np.int64
            ),
            np.array(system_of, dtype=np.int64),
            tuple(systems),
            [report.stamp for report in reported],
            np.array([report.inode for report in reported], dtype=np.int64),
            retry,
            self._cache(),
            checks.byte_count(self.prefetch_bytes, "list_files(prefetch_bytes)"),
            tuple(listed),
            list(below),
        )

    def _require_all(self, below: Mapping[str, str]) -> None:
        only = self.only or ()
        gone = [key.split("/", 1)[1] for key in only if key not in below]
        if gone:
            raise errors.MissingFilesError(
                f"{self}: an epoch must have all files that it began with, and {len(gone):,} of "
                f"{len(only):,} are not there, such as {gone[0]!r}; put them back, on all ranks, or "
                "load a state of an epoch's start, which lists the files again",
                path=gone[0],
            )

    def _cache(self) -> Store | None:
        root = cache.folder(self.cache_dir) if self.cache_dir is not None else None
        if root is None:
            return None
        most = checks.byte_count(self.cache_bytes, "list_files(cache_bytes)")
        caller = f"list_files(cache_dir={str(root)!r})"
        return Store(root, cache.BYTES, most, "cache_bytes", caller, "name another cache_dir")

    def open(self) -> PathSource:
        return PathSource(self.files())


def _below(path: str, wanted: Wanted | None) -> str:
    """A file's name below the folder that was listed; of a file that was named, its last part."""
    return path.rsplit("/", 1)[-1] if wanted is None else path.removeprefix(wanted.root).lstrip("/")


@once
def _say_no_etag(server: str) -> None:
    log.warning(
        "%s gives no ETag: changes are seen by Last-Modified and size", errors.hidden(server)
    )


class PathSource(RowSource):
    """Names of files as rows: ``list_files`` without a reader."""

    def __init__(self, files: FileList) -> None:
        self.files, self.epoch_files = files, files.below
        self.lengths = np.array([len(files)], dtype=np.int64)
        self.row_bytes = 64.0 + sum(map(len, files.names)) / max(1, len(files))

    def read(self, block: int, start: int, stop: int) -> list[Any]:
        return self.files.names[start:stop]

    def place(self, block: int, row: int) -> Place:
        return Place(path=self.files.names[row])

    def fingerprint(self) -> dict[str, Any]:
        sizes = self.files.sizes.tolist()
        names = self.files.relative_names()
        lines = [f"{name}\0{size}" for name, size in zip(names, sizes, strict=True)]
        return {"files": len(lines), "bytes": sum(sizes), "digests": digests(lines)}

    def describe(self) -> list[tuple[str, str]]:
        return [("files", f"{len(self.files):,}")]


class StorageOptions(dict[str, Any]):
    """Options of a file system, whose values are never shown."""

    def __repr__(self) -> str:
        return repr(dict.fromkeys(self, "…"))


def checked_options(value: Any, option: str) -> StorageOptions:
    good = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    checks.require(good, option, "a dict of fsspec options", type(value).__name__)
    return StorageOptions(value)


def _checked_urls(value: Any) -> str | list[str]:
    urls = [value] if isinstance(value, str | os.PathLike) else value
    if isinstance(urls, list | tuple) and not urls:
        raise errors.MissingFilesError(
            "list_files(urls) must name at least one file, got an empty list"
        )
    good = isinstance(urls, list | tuple)
    paths = [
        os.fspath(url) if isinstance(url, os.PathLike) else url for url in (urls if good else ())
    ]
    good = good and all(isinstance(url, str) and url.strip() for url in paths)
    rule = "a path, folder, glob or URL as text or Path, or a list of them"
    checks.require(good, "list_files(urls)", rule, value)
    return paths if urls is value else paths[0]
