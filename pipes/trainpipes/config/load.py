"""``load``: a pipeline that is written down."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainpipes._internal.shown import shown
from trainpipes.config.build import build
from trainpipes.config.changes import apply
from trainpipes.config.compose import LARGEST, compose, decoded
from trainpipes.config.origin import Origin
from trainpipes.config.read_values import Reader
from trainpipes.errors import ConfigError
from trainpipes.pipeline import Pipeline

__all__ = ["load", "loads"]


def load(
    path: str | os.PathLike[str],
    *,
    allow_imports: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Pipeline:
    """The pipeline of a YAML file: a recipe with its options, or stages. See docs/config.md.

    Nothing that the file names is imported or run, unless ``allow_imports`` says so. ``${NAME}`` and
    ``${NAME:-default}`` stand for environment variables.

    Args:
        path: of the file.
        allow_imports: import functions and classes that the file names as ``package.module:function``. Only
            for files that you would run as a program.
        storage_options: for all stages that read files, as fsspec takes them; a config holds none.
        changes: other values for some of the file's, by their paths: ``{"options.batch_size": 16,
            "stages[2].buffer_size": 100}``. ``trainpipes.config.parse_change`` reads one of a command line.

    Raises:
        ConfigError: something in it is not as it must be; names the file, the line and the path of the
            value: ``train.yaml:7: stages[3].buffer_size: ...``.
        MissingExtraError: PyYAML is not installed.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp(), "train.yaml")
    >>> _ = path.write_text("stages:\\n- list_files: ${DATA:-data}/*.parquet\\n- take: 3\\n")
    >>> tp.load(path)
    list_files('data/*.parquet')
      .take(3)
    >>> tp.load(path, changes={"stages[1].count": 5}).stages[1]
    take(5)
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(
            f"load(path) is the path of a YAML file, got {shown(path)}; for a text there is "
            "trainpipes.config.loads(text)"
        )
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no config {name}", path=name) from None
    except IsADirectoryError:
        raise ConfigError(f"a config is a file, and {name} is a folder", path=name) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config {name!r} cannot be read: {error}", path=name) from error
    origin = Origin(name)
    text = decoded(data, origin)
    return _loaded(text, origin, allow_imports, storage_options, changes)


def loads(
    text: str,
    *,
    name: str = "config",
    allow_imports: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Pipeline:
    """The pipeline of a YAML text. See ``load``.

    Args:
        text: what a file would hold.
        name: what errors call it.
        allow_imports: see ``load``.
        storage_options: see ``load``.
        changes: see ``load``.

    >>> loads("stages: [{list_files: data}, {take: 3}]")
    list_files('data')
      .take(3)
    """
    if not isinstance(text, str):
        raise ConfigError(f"loads(text) is text, got {shown(text)}")
    return _loaded(text, Origin(name), allow_imports, storage_options, changes)


def _loaded(
    text: str,
    origin: Origin,
    allow_imports: bool,
    storage_options: Mapping[str, Any] | None,
    changes: Mapping[str, Any] | None,
) -> Pipeline:
    root = compose(text, origin)
    if changes:
        root = apply(root, changes, origin)
    reader = Reader(origin, allow_imports, storage_options, build)
    pipeline = build(reader, root)
    if storage_options and not reader.used_storage:
        raise origin.error(None, "", "storage_options were given, and no stage of it takes any")
    return pipeline
