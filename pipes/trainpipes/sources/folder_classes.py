"""Classes of files by the names of their folders."""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Sequence
from functools import cache as once

import numpy as np
import pyarrow as pa

from trainpipes import errors
from trainpipes.columns.arrays import python_to_arrow, to_arrow
from trainpipes.engine.planning.row_names import names_below
from trainpipes.filesystems.systems import listed_as
from trainpipes.interfaces.stage import Stage
from trainpipes.sources.files.list_files import FileList, ListFiles

log = logging.getLogger("trainpipes")


def urls_of(stage: Stage) -> list[str]:
    assert isinstance(stage, ListFiles)
    return [stage.urls] if isinstance(stage.urls, str) else stage.urls


def below_all(files: FileList, urls: Sequence[str]) -> list[str]:
    """Names below the folder that all listed ones have in common."""
    return names_below(urls, files.known_names()) or files.relative_names()


def _below_classes(files: FileList, urls: Sequence[str], caller: str) -> tuple[list[str], bool]:
    """Names that begin with the class, and whether listed folders hold the folders of classes, rather than
    being such folders.
    """
    shared = below_all(files, urls)
    if len(urls) == 1 or not files.below:
        return shared, len(urls) == 1
    known, roots = files.known_names(), [int(name.split("/", 1)[0]) for name in files.below]
    below = list(shared)
    for root, url in enumerate(urls):
        which = [n for n, of in enumerate(roots) if of == root]
        for n, name in zip(
            which, names_below([url], [known[n] for n in which]) or [], strict=False
        ):
            below[n] = name
    loose = {root: n for n, root in enumerate(roots) if "/" not in below[n]}
    if not loose:
        return below, True
    if len(loose) < len(set(roots)):
        within = next(n for n, root in enumerate(roots) if root not in loose)
        names = files.names[next(iter(loose.values()))], files.names[within]
        raise errors.ConfigError(
            f"{caller}: of several folders all must hold folders of classes, or all must be classes, got "
            f"{names[0]}, which lies in its listed folder, and {names[1]}, which lies deeper: list "
            "folders of one kind, or take labels=None",
            path=names[0],
        )
    if len(files.listed) < len(urls):  # some are files
        return shared, False
    folders = [name.removesuffix(below[n]).rstrip("/") for n, name in enumerate(known)]
    return [f"{posixpath.basename(folders[n])}/{name}" for n, name in enumerate(below)], False


def _note_empty_classes(urls: Sequence[str], classes: Sequence[str], caller: str) -> None:
    for url in filter(os.path.isdir, map(listed_as, urls)):
        with os.scandir(url) as entries:
            names = [e.name for e in entries if not e.name.startswith((".", "_")) and e.is_dir()]
        if empty := sorted({*names} - {*classes}):
            more = f" and {len(empty) - 3:,} more" if len(empty) > 3 else ""
            _say_empty(url, ", ".join(empty[:3]) + more, caller)


@once
def _say_empty(folder: str, names: str, caller: str) -> None:
    what = "an image" if caller == "read_images" else "a file"
    log.warning(
        "%s: folders of %s without %s that it reads are no classes: %s", caller, folder, what, names
    )


def by_folder(
    files: FileList, urls: Sequence[str], reader: Stage, chosen: bool
) -> tuple[FileList, pa.Table]:
    """The files class by class, and the columns ``class`` and ``label`` of them. Unless they were ``chosen``
    among those listed, folders without any are logged.
    """
    caller = str(reader)
    below, held = _below_classes(files, urls, caller)
    loose = next((n for n, name in enumerate(below) if "/" not in name), None)
    if loose is not None:
        raise errors.ConfigError(
            f"{caller}: {files.names[loose]} lies in no folder of a class: list the folder above those of "
            "the classes, or take labels=None",
            path=files.names[loose],
        )
    # As ImageFolder sorts them: by class, folder and name, each as text.
    order = sorted(
        range(len(below)),
        key=lambda n: (below[n].split("/", 1)[0], *posixpath.split(below[n])),
    )
    classes = [below[n].split("/", 1)[0] for n in order]
    names = sorted(set(classes))
    number = {name: label for label, name in enumerate(names)}
    if held and not chosen:
        _note_empty_classes(urls, names, reader.name)
    labels = np.array([number[name] for name in classes], dtype=np.int64)
    more = pa.table({"class": python_to_arrow(classes, pa.string()), "label": to_arrow(labels)})
    return files.pick(np.array(order, dtype=np.int64)), more
