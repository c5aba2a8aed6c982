"""The options of ``repack``: each is what it must be, and which of them shape the files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainpipes._internal.checks import column_names, flag, whole_number
from trainpipes.engine.pool import default_threads
from trainpipes.errors import ConfigError
from trainpipes.prepare.repack.row_groups import Form
from trainpipes.storage.writers.formats import CODECS, GROUP_BYTES, GROUP_ROWS, check_codec

#: Threads, at most: more would have little memory each.
MOST_THREADS = 4


@dataclass(frozen=True)
class Options:
    """What is to be done.

    Attributes:
        asker: for messages.
        seed: of the shuffle; None for none.
        sort: columns to sort by.
        descending: whether the largest come first.
        by: columns in which rows are the same as earlier ones, which are dropped; () for all; None for none.
        files: how many files; or
        rows_per_file: how many rows in each.
        form: of row groups.
        memory: bytes.
        threads: how many.
        verify: whether files are read back.
    """

    asker: str
    seed: int | None
    sort: tuple[str, ...]
    descending: bool
    by: tuple[str, ...] | None
    files: int | None
    rows_per_file: int | None
    form: Form
    memory: int
    threads: int
    verify: bool

    @property
    def moves_rows(self) -> bool:
        """Whether rows come out elsewhere than in their order."""
        return self.seed is not None or bool(self.sort) or self.by is not None

    @property
    def needs_all(self) -> bool:
        """Whether where a row goes is known only when all are read."""
        return bool(self.sort) or self.by is not None


def checked(
    asker: str, shuffle: Any, seed: Any, sort: Any, descending: Any, drop_duplicates: Any,
    row_group_size: Any, rows_per_file: Any, files: Any, compression: Any, level: Any,
    memory: Any, verify: Any, threads: Any,
) -> Options:  # fmt: skip
    """The options, each of which is what it must be."""
    flag(shuffle, f"{asker}(shuffle)")
    whole_number(seed, None, f"{asker}(seed)", "the seed of the shuffle")
    flag(descending, f"{asker}(descending)")
    flag(verify, f"{asker}(verify)")
    order = () if sort is None else tuple(_names(sort, f"{asker}(sort)"))
    if shuffle and order:
        raise ConfigError(
            f"{asker}() takes shuffle or sort, got shuffle=True and sort={list(order)}: give one of the two"
        )
    by: tuple[str, ...] | None = None
    if isinstance(drop_duplicates, bool):
        by = () if drop_duplicates else None
    else:
        by = tuple(_names(drop_duplicates, f"{asker}(drop_duplicates)"))
    for value, name, meaning in (
        (row_group_size, "row_group_size", "rows of each row group"),
        (rows_per_file, "rows_per_file", "rows of each file"),
        (files, "num_files", "how many to write"),
        (threads, "threads", "how many"),
    ):
        if value is not None:
            whole_number(value, 1, f"{asker}({name})", meaning)
    if files is not None and rows_per_file is not None:
        raise ConfigError(
            f"{asker}() takes num_files or rows_per_file, got num_files={files} and "
            f"rows_per_file={rows_per_file}: give one of the two"
        )
    check_codec(compression, CODECS, asker)
    if level is not None:
        _check_level(asker, level, compression or "none")
    form = Form(
        row_group_size or GROUP_ROWS,
        None if row_group_size else GROUP_BYTES,
        compression or "none",
        level,
    )
    return Options(
        asker, seed if shuffle else None, order, descending, by, files, rows_per_file, form, memory,
        threads or min(MOST_THREADS, default_threads()), verify,
    )  # fmt: skip


def _names(value: Any, option: str) -> list[str]:
    return column_names([value] if isinstance(value, str) else value, option)


def _check_level(asker: str, level: int, compression: str) -> None:
    """Raise ConfigError unless a compression has a level."""
    leveled = compression in ("zstd", "gzip", "brotli")
    if not leveled:
        raise ConfigError(
            f"{asker}(compression_level) is of zstd, gzip or brotli, got {level} for {compression}: "
            "leave it out"
        )
    least, most = (1, 22) if compression == "zstd" else (1, 9) if compression == "gzip" else (0, 11)
    whole_number(level, least, f"{asker}(compression_level)", f"a level of {compression}", most)


def about(options: Options) -> dict[str, Any]:
    """The options that shape the files, of JSON types."""
    form = options.form
    by = options.by
    return {
        "format": options.asker,
        "shuffle": options.seed is not None,
        "seed": options.seed,
        "sort": list(options.sort),
        "descending": options.descending,
        "drop_duplicates": by is not None if not by else list(by),
        "row_group_size": form.rows if form.size is None else None,
        "rows_per_file": options.rows_per_file,
        "num_files": options.files,
        "compression": form.compression,
        "compression_level": form.level,
    }
