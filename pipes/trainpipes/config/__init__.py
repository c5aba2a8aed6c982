"""Pipelines as YAML: ``load`` reads a config, ``Pipeline.to_yaml`` writes it. See docs/yaml.md."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainpipes._internal.checks import flag, require
from trainpipes.config.read import LARGEST, SIZE, Document, Reader, has_comment, path_steps
from trainpipes.errors import ConfigError
from trainpipes.pipeline.chain import Pipeline

__all__ = ["load", "loads", "parse_change"]


def load(
    path: str | os.PathLike[str],
    *,
    allow_imports: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Pipeline:
    r"""The pipeline of a YAML file: a recipe with its options, or stages. See docs/yaml.md.

    ``${NAME}`` and ``${NAME:-default}`` stand for environment variables.

    Args:
        path: of the file.
        allow_imports: import functions and classes that the file names as ``package.module:function``. Only
            for files that you would run as a program.
        storage_options: for all stages that read files, as fsspec takes them; a config holds none.
        changes: other values for some of the file's, by their paths: ``{"options.batch_size": 16,
            "stages[2].buffer_size": 100}``.

    Raises:
        ConfigError: names the file, the line and the path of the value: ``train.yaml:7: stages[3].count:
            ...``.
        MissingExtraError: PyYAML is not installed.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> path = pathlib.Path(tempfile.mkdtemp(), "train.yaml")
    >>> _ = path.write_text("stages:\n- list_files: ${DATA:-data}/*.parquet\n- take: 3\n")
    >>> tp.load(path)
    list_files('data/*.parquet')
      .take(3)
    >>> tp.load(path, changes={"stages[1].count": 5}).stages[1]
    take(5)
    """
    way = "of a text, trainpipes.config.loads(text) makes the pipeline"
    require(isinstance(path, str | os.PathLike), "load(path)", "the path of a YAML file", path, way)
    name = os.fspath(path)
    try:
        with open(os.path.expanduser(name), "rb") as file:
            content = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config {name!r} cannot be read: {error}", path=name) from error
    Document(name).need(len(content) <= LARGEST, None, "", SIZE)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: a config must be UTF-8: {error}", path=name) from None
    options = {"storage_options": storage_options, "changes": changes}
    return loads(text, name=name, allow_imports=allow_imports, **options)


def loads(
    text: str,
    *,
    name: str = "config",
    allow_imports: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Pipeline:
    """``load`` of a YAML text, which errors call ``name``.

    >>> loads("stages: [{list_files: data}, {take: 3}]")
    list_files('data')
      .take(3)
    """
    require(isinstance(text, str), "loads(text)", "text", text)
    flag(allow_imports, "load(allow_imports)")
    for option, value in (("storage_options", storage_options), ("changes", changes)):
        good = value is None or isinstance(value, Mapping)
        got = type(value).__name__  # no values: secrets
        require(good, f"load({option})", "a dict", got)
    reader = Reader(name, allow_imports, storage_options)
    root = reader.parse(text)
    for path, value in (changes or {}).items():
        reader.change(root, path, value)
    pipeline = reader.pipeline(root)
    if storage_options and not reader.used_storage:
        raise ConfigError(f"{name}: storage_options were given, and no stage of it takes any")
    return pipeline


def parse_change(text: str, *, allow_imports: bool = False) -> tuple[str, Any]:
    """The path and the value of ``path=value``, for ``load(..., changes=)``; imports as in ``load``.

    Raises:
        ConfigError: there is no ``=``, or the value is no YAML, or has a comment.

    >>> parse_change("options.batch_size=16"), parse_change("stages[0].columns=[a, '1']")
    (('options.batch_size', 16), ('stages[0].columns', ['a', '1']))
    """
    path, mark, value = text.partition("=")
    path = path.strip()
    require(mark and path, "a change", "path=value, such as options.batch_size=16", text)
    path_steps(path)
    reader = Reader(f"the change {path}", allow_imports)
    root = reader.parse(value)
    way = f"put the text in quotes, in a shell as \"{path}='a #1'\""
    reader.need(not has_comment(value), None, "", f"what follows a # is a comment: {way}")
    return path, reader.value(root, path)
