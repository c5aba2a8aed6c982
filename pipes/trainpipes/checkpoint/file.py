"""One file: what ``torch.save`` or ``json.dump`` wrote. Nothing is run that a file names, and no weights are
read."""

from __future__ import annotations

import json
import mmap
import os
import re
import stat
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from trainpipes.checkpoint.inert import read_inert
from trainpipes.errors import MissingFilesError, StateError, TrainpipesError, UnreadableError
from trainpipes.shown import cut

__all__ = ["check_regular", "load_torch", "mentions_us", "read_file"]

#: Bytes of a JSON file, and of one in torch's format before 1.6 or of a pickle: they are read as a whole.
MOST_JSON = 1 << 28
MOST_OLD = 1 << 31
#: Bytes at the start of an archive in which the mark is looked for where its list of parts is lost.
MOST_PICKLE = 1 << 22
ZIP, PICKLE = b"PK\x03\x04", b"\x80"
#: What every file with a state of ours holds.
MARK = b"trainpipes"
SAVE = (
    "save the state by itself, torch.save(loader.state_dict(), path), or as JSON; from a checkpoint that you "
    "trust: json.dump(torch.load(path, weights_only=False)[...], file)"
)


def read_file(path: Path) -> Any:
    """What is in a file; tensors stay where they are.

    Raises:
        StateError: it is none of these formats, is damaged, or would run something.
        UnreadableError: it cannot be read.
    """
    head = _head(path)
    if not head:
        raise StateError(f"{path} is empty: use another checkpoint", path=str(path))
    if head.startswith(ZIP):
        _check_zip(path)
        return load_torch(path)
    if head.startswith(PICKLE):
        return _read_old(path)
    if head.lstrip()[:1] in (b"{", b"["):
        return _read_json(path)
    what = (
        "is safetensors, which hold tensors alone" if head[8:9] == b"{" else "is of no known format"
    )
    raise StateError(
        f"{path} {what}: a state is in a file of torch.save, in JSON, or in a folder of "
        "torch.distributed.checkpoint",
        path=str(path),
    )


def mentions_us(path: Path) -> bool:
    """Whether a file may hold a state of ours: it is of a format that is read, and names us. Weights are not
    looked at."""
    try:
        if not stat.S_ISREG(path.stat().st_mode) or path.stat().st_size < len(MARK):
            return False
        head = _head(path)
        if head.startswith(ZIP):
            with zipfile.ZipFile(path) as archive:
                pickles = [e for e in archive.infolist() if e.filename.endswith("/data.pkl")]
                return any(
                    e.compress_type == zipfile.ZIP_STORED and MARK in archive.read(e)
                    for e in pickles
                )
        if head.startswith(PICKLE) or head.lstrip()[:1] in (b"{", b"["):
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as all_of_it,
            ):
                return all_of_it.find(MARK, 0, MOST_OLD) >= 0
    except zipfile.BadZipFile:  # cut short, which is to be told
        with path.open("rb") as file:
            return MARK in file.read(MOST_PICKLE)
    except (OSError, ValueError, TrainpipesError, RuntimeError):  # some of zipfile's are of these
        return False
    return False


def check_regular(path: Path) -> None:
    """Raise unless this is a file with content: a pipe would be waited for, a device has no end.

    Raises:
        MissingFilesError: it is not there.
        UnreadableError: it is something else.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise MissingFilesError(
            f"{path} is not there: give the file or folder of a checkpoint", path=str(path)
        ) from None
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}", path=str(path)) from error
    if not stat.S_ISREG(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "no regular file"
        raise UnreadableError(
            f"{path} is {kind}: give the file or folder of a checkpoint", path=str(path)
        )


def load_torch(source: Path | Any) -> Any:
    """What ``torch.save`` wrote into a file of a path, which is mapped into memory, or into an open file.

    Raises:
        StateError: it holds objects that are not read, or is damaged.
    """
    name = source if isinstance(source, Path) else "a part of it"
    path = str(source) if isinstance(source, Path) else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old tensors
            return torch.load(
                source, map_location="cpu", weights_only=True, mmap=isinstance(source, Path)
            )
    except (RecursionError, MemoryError):
        raise
    except Exception as error:
        told = str(error)
        if "Weights only load failed" in told:
            found = re.search(r"(?:GLOBAL|class) ([\w.]*\w)", told)
            what = (
                f"objects of other kinds ({cut(found[1])})" if found else "objects of other kinds"
            )
            raise StateError(
                f"{name} holds {what}, and reading what is neither tensor nor plain value could run code, so "
                f"nothing of it was read: {SAVE}",
                path=path,
            ) from None
        why = (told.splitlines() or [type(error).__name__])[0]
        raise StateError(
            f"{name} is damaged, cut short, or not of torch.save ({cut(why, 200)}): use another checkpoint",
            path=path,
        ) from None


def _check_zip(path: Path) -> None:
    """Raise unless an archive is one of ``torch.save``, whose content is no larger than the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:
        raise StateError(
            f"{path} is damaged or cut short ({error}): use another checkpoint", path=str(path)
        ) from None
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise StateError(
            f"{path} is a compressed archive, which torch.save never writes: give a file as it was saved",
            path=str(path),
        )
    size = path.stat().st_size
    if sum(entry.file_size for entry in entries) > size:
        raise StateError(
            f"{path} is damaged: its parts are larger than the file; use another checkpoint",
            path=str(path),
        )
    content = next((e for e in entries if e.filename.endswith("/data.pkl")), None)
    if content is None:
        raise StateError(
            f"{path} is an archive that torch.save has not written: give a checkpoint as it was saved",
            path=str(path),
        )
    try:  # what would take for ever, or more memory than there is
        with zipfile.ZipFile(path) as archive:
            read_inert(archive.read(content))
    except Exception as error:  # of many kinds, where the archive is damaged
        raise StateError(
            f"{path} is damaged or cut short ({cut(str(error))}): use another checkpoint",
            path=str(path),
        ) from None


def _read_old(path: Path) -> Any:
    """A file of torch's format before 1.6, or a pickle of something else, which is refused."""
    size = path.stat().st_size
    if size > MOST_OLD:
        raise StateError(
            f"{path} is a pickle of {size:,} bytes, all of which would have to be read: save the state by "
            "itself, torch.save(loader.state_dict(), path)",
            path=str(path),
        )
    with path.open("rb") as file:
        try:
            return load_torch(file)
        except StateError as error:
            told = str(error).replace("a part of it", str(path), 1)
            if any(one in told for one in ("agic number", "not of torch.save", "kinds, and")):
                told = (
                    f"{path} is a pickle that torch.save has not written, or damaged, and reading it could "
                    f"run code, so nothing of it was read: {SAVE}"
                )
            raise StateError(told, path=str(path)) from None


def _read_json(path: Path) -> Any:
    size = path.stat().st_size
    if size > MOST_JSON:
        raise StateError(
            f"{path} is JSON of {size:,} bytes, and no state is so large: give the file that "
            "the state was saved to",
            path=str(path),
        )
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise StateError(
            f"{path} is JSON that is nested too deeply to be read, and no state is: give the file that the "
            "state was saved to",
            path=str(path),
        ) from None
    except ValueError as error:
        raise StateError(
            f"{path} is no JSON, or is cut short ({cut(str(error))}): use another checkpoint",
            path=str(path),
        ) from None


def _head(path: Path) -> bytes:
    check_regular(path)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return file.read(64)
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}", path=str(path)) from error
