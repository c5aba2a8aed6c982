"""Where temporary files lie, and whether the disks have room."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainpipes._internal.checks import local_path
from trainpipes._internal.text import amount
from trainpipes.errors import ConfigError, UnreadableError
from trainpipes.prepare.repack.options import Options
from trainpipes.prepare.repack.temporary import TemporaryFiles
from trainpipes.state.checksum import checksum
from trainpipes.storage.writers.manifest import UNFINISHED, read_manifest
from trainpipes.storage.writers.storage import LocalStorage, Storage

#: What temporary files take, and files that are written, of the rows' bytes in memory: at least, since
#: data that cannot be compressed takes twice and four times as much.
TEMPORARY_SHARE, OUTPUT_SHARE = 0.5, 0.25
#: The folder of temporary files, where none is given.
TEMPORARY = ".repack"


class TemporaryPlace:
    """Where the temporary files of a folder lie.

    Args:
        storage: the folder that is written to.
        given: a path or URL of the user's, or None.
        options: of the folder's file system.
        shared: whether other machines read them.
        asker: for messages.

    Attributes:
        root: their folder; None where it is made on this machine when it is needed.
    """

    def __init__(
        self,
        storage: Storage,
        given: Any,
        options: Mapping[str, Any] | None,
        shared: bool,
        asker: str,
    ) -> None:
        self._storage, self._options, self._asker = storage, options or {}, asker
        self.root: str | None = None
        # More than one output may have its temporary files in one folder.
        name = f"repack-{checksum(storage.root)}"
        if given is None:
            if shared or isinstance(storage, LocalStorage):
                self.root = storage.at(TEMPORARY)
        elif isinstance(given, str) and "://" in given:
            self.root = f"{given.rstrip('/')}/{name}"
        else:
            folder = local_path(given, f"{asker}(temp_dir)")
            self.root = str(Path(folder).expanduser().absolute() / name)

    def files(self, before: str | None) -> TemporaryFiles:
        """The temporary files.

        Args:
            before: their folder when the work was begun. If it is not to be any more, they are removed.
        """
        root = self.root
        if root is None and before is not None and os.path.isdir(before):
            root = before
        if before not in (None, root):
            self._at(str(before)).clear()
        return self._at(root or tempfile.mkdtemp(prefix="trainpipes-repack-"))

    def clear(self) -> None:
        """Remove those of what is overwritten."""
        with suppress(UnreadableError, KeyError):
            self._at(read_manifest(self._storage, UNFINISHED)["notes"]["temporary"]).clear()
        self._at(self._storage.at(TEMPORARY)).clear()

    def _at(self, root: str) -> TemporaryFiles:
        kind = root.partition("://")[0]
        own = "://" in root and self._storage.root.startswith(f"{kind}://")
        return TemporaryFiles(root, self._asker, self._options if own else {})


def check_space(size: float, options: Options, out: Storage, temporary: TemporaryFiles) -> None:
    """Raise ConfigError where a disk of this machine is too small, as far as can be told.

    Args:
        size: bytes of all rows in memory.
        options: what is done with them.
        out: where they are written to.
        temporary: where they are in between.
    """
    needs: dict[int, tuple[Path, float]] = {}
    wanted = []
    if isinstance(out, LocalStorage):
        wanted.append((Path(out.root), OUTPUT_SHARE * size))
    if options.moves_rows and temporary.local:
        twice = 2 if options.needs_all else 1
        wanted.append((Path(temporary.root), twice * TEMPORARY_SHARE * size))
    for path, need in wanted:
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        device = os.stat(there).st_dev
        needs[device] = there, needs.get(device, (there, 0.0))[1] + need
    for path, need in needs.values():
        free = shutil.disk_usage(path).free
        if free < need:
            raise ConfigError(
                f"{options.asker}() needs about {amount(need)} on the disk of {path}, which has "
                f"{amount(free)} free: free space there, or give temp_dir=... on another disk"
            )
