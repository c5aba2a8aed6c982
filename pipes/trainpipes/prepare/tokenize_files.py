"""``tokenize``: the files of a pipeline as token ids, made once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pyarrow as pa

from trainpipes._internal.checks import require, whole_number
from trainpipes.engine.planning.arrange import arrange
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError
from trainpipes.filesystems.places import place_at
from trainpipes.filesystems.retry import NORMAL, Retry
from trainpipes.interfaces.options import either
from trainpipes.interfaces.stage import Stage
from trainpipes.pipeline.chain import Pipeline
from trainpipes.pipeline.starts import list_files
from trainpipes.prepare.ahead import Parts, cut, open_plan
from trainpipes.prepare.token_files import BareFile, Task, first_rows, make, tasks_of
from trainpipes.stages.tokenizing import Tokenizes
from trainpipes.tokenizers.adapters import Bytes
from trainpipes.writers.executor import Executor, Processes, Threads, checked_executor, cores
from trainpipes.writers.formats import CODECS, check_codec, parquet_form
from trainpipes.writers.inputs import open_output
from trainpipes.writers.output_folder import Manifest
from trainpipes.writers.output_folder import run as make_files
from trainpipes.writers.write import Format, refuse_functions

#: Bytes of an input file after which another output file begins.
FILE_BYTES = 256 << 20
#: Bytes of input for which a process more is worth the seconds that it takes to start.
WORTH_BYTES = 64 << 20
#: Ids, masks and labels are small numbers that come again: a level above this saves 1 or 2 % and takes twice
#: the time.
LEVEL = 1
DTYPES = ("uint16", "uint32", "int32", "int64")


@dataclass(frozen=True)
class Tokenized(Manifest):
    """Files of token ids, a ``Manifest``.

    Attributes:
        tokens: in all files.
        read: rows that were read; stages may have left some out.
        format: "parquet" or "bin".
        dtype: of the ids in "bin"; None in Parquet.
    """

    tokens: int = field(kw_only=True)
    read: int = field(kw_only=True)
    format: str = field(kw_only=True)
    dtype: str | None = field(kw_only=True)
    _parts: Parts = field(kw_only=True, repr=False, compare=False)
    _storage_options: Mapping[str, Any] | None = field(kw_only=True, repr=False, compare=False)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that trains on these files: what of the one given is left to do, on their rows.

        Raises:
            ConfigError: they are bare ids, which have no rows.
        """
        if self.format != "parquet":
            raise ConfigError(
                "files of bare ids have no rows: "
                f'trainpipes.from_memmap(files, dtype="{self.dtype}", length=...) cuts them into some'
            )
        rows = list_files(self.folder, storage_options=self._storage_options).read_parquet()
        return Pipeline([*rows.stages, *self._parts.makers, *self._parts.training])


def tokenize(
    pipeline: Pipeline,
    folder: str | os.PathLike[str],
    *,
    format: Literal["parquet", "bin"] = "parquet",
    dtype: str | None = None,
    compression: str | None = "zstd",
    bytes_per_file: int = FILE_BYTES,
    overwrite: bool = False,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
    retry: Retry | Mapping[str, Any] = NORMAL,
) -> Tokenized:
    r"""Tokenize a pipeline's rows once, ahead of training, and write the token ids.

    The stages up to ``tokenize`` or ``chat_template`` are done ahead, and those after it that only cut, name
    or choose columns. Each input file becomes one output file (a large one several) with the same rows in the
    same order. ``result.pipeline`` is the rest, and gives the same rows; and the same batches, unless a stage
    before the ids drops rows. After a kill the same call goes on; when all is there, it does nothing.

    Args:
        pipeline: of files.
        folder: a path or fsspec URL, new or empty, for "part-00000.parquet" and so on, and "_manifest.json".
        format: "parquet"; or "bin", files of nothing but ids, as nanoGPT has them: for
            ``from_memmap(dtype=, length=)`` and the recipe "tokens".
        dtype: of ids in "bin"; "uint16" if left out, where the tokenizer's ids fit, else "uint32".
        compression: of Parquet: "zstd", "snappy", "gzip", "brotli", "lz4" or None.
        bytes_per_file: of an input file, after which another output file begins, between two row groups.
        overwrite: whether to remove what was written there before.
        executor: ``Processes(n)``, ``Threads(n)`` or ``Ray(address)`` of ``trainpipes.writers``; if left out,
            as many processes as there are cores and work for.
        storage_options: of the folder's file system.
        retry: how long failing requests to a URL are made again.

    Raises:
        ConfigError: the pipeline makes no ids, or not of files; the folder holds other files, cannot be
            written, or workers cannot get at it.
        DataChangedError: the input, or a file that was written, has changed.
        DataError: a row cannot be tokenized; says which file and row.
        WorkerError: a process was killed, on Ray four times.
        UnreachableError: a server or Ray cluster does not answer, or denies access.
        MissingExtraError: Ray, or a package for the URL, is not installed.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("one\ntwo\n")
    >>> pipe = tp.list_files(folder / "a.txt").read_text().tokenize("bytes").shuffle(2).batch(2)
    >>> done = tokenize(pipe, folder / "ids")
    >>> done.rows, done.tokens, list(done.pipeline) == list(pipe)
    (2, 6, True)
    """
    whole_number(bytes_per_file, 1, "tokenize(bytes_per_file)", "bytes of an input file")
    is_pipeline = isinstance(pipeline, Pipeline)
    require(is_pipeline, "tokenize(pipeline)", "a trainpipes Pipeline", pipeline)
    given = checked_executor(executor, "tokenize", Threads(1))
    parts = cut(pipeline)
    dtype = _checked_format(format, dtype, compression, parts)
    is_parquet = format == "parquet"
    if is_parquet:
        _check_training(pipeline, parts)
    place = place_at(folder, "tokenize", storage_options, retry)
    with given:  # before anything is read: Ray starts processes
        plan = open_plan(parts.ahead)
        suffix = ".parquet" if is_parquet else ".bin"
        refuse_functions(plan, given, "tokenize")
        schema = first_rows(plan).schema
        if not is_parquet and schema.names != ["input_ids"]:
            raise ConfigError(
                'tokenize(format="bin") writes ids and nothing besides, and rows have columns '
                f'{", ".join(schema.names)}: write format="parquet"'
            )
        tasks = tasks_of(plan, suffix, bytes_per_file)
        ids = [name for maker in parts.makers for name in maker.id_columns if name in schema.names]
        options: dict[str, Any] = {"format": format, "bytes_per_file": bytes_per_file}
        options |= {"compression": compression} if is_parquet else {"dtype": dtype}
        about = {"options": options, "tokenized": {"ids": ids}}
        opened = partial(open_plan, parts.ahead, plan.inputs.source, plan.inputs.schemas.known())
        open_file = partial(BareFile, dtype) if dtype else _form(compression, schema).open
        with open_output(place, plan, [f"part{suffix}"], given, about, overwrite) as out:
            missing = [task for task in tasks if task.name not in out.files]
            workers = _worthwhile(plan, missing) if executor is None else given
            read = sum(task.rows for task in tasks)
            made = make_files(
                tasks, partial(make, open_file, schema, ids), out, workers,
                open_state=opened, total=read, job="tokenizing",
            )  # fmt: skip
    tokens = sum(entry.notes["tokens"] for entry in made.entries)
    return Tokenized(
        **vars(made), tokens=tokens, read=read, format=format, dtype=dtype,
        _parts=parts, _storage_options=storage_options,
    )  # fmt: skip


def _form(compression: str | None, schema: pa.Schema) -> Format:
    # Of token ids there are too many for a dictionary.
    plain = [field.name for field in schema if not pa.types.is_nested(field.type)]
    level = LEVEL if compression == "zstd" else None
    return parquet_form("tokenize", {}, None, compression, level, use_dictionary=plain)


def _check_training(pipeline: Pipeline, parts: Parts) -> None:
    for stage in arrange([stage._fresh() for stage in pipeline.stages]).stages:
        if any(type(stage) is type(left) for left in parts.training):
            stage.identity()


def _checked_format(
    format: str, dtype: str | None, compression: str | None, parts: Parts
) -> str | None:
    require(format in ("parquet", "bin"), "tokenize(format)", '"parquet" or "bin"', format)
    check_codec(compression, CODECS, "tokenize")
    if format == "parquet":
        rule = 'left out with format="parquet", which keeps the types of its columns'
        require(dtype is None, "tokenize(dtype)", rule, dtype)
        return None
    require(dtype is None or dtype in DTYPES, "tokenize(dtype)", either(DTYPES), dtype)
    return dtype or _narrowest(parts.ahead)


def _narrowest(stages: Sequence[Stage]) -> str:
    """The narrowest type that holds every id of the tokenizer, as far as known."""
    known = [0]
    for stage in stages:
        if isinstance(stage, Tokenizes):
            maker, end = stage.maker, stage.identity().get("add_eos")
            pieces = range(256) if isinstance(maker, Bytes) else (maker.pieces() or {}).values()
            known += [*pieces, *maker.special.all_ids(), end if type(end) is int else 0]
            if not pieces:
                return "uint32"
    return "uint16" if max(known) < 1 << 16 else "uint32"


def _worthwhile(plan: Plan, missing: list[Task]) -> Executor:
    size = sum(task.rows for task in missing) * (
        getattr(plan.inputs.source, "row_bytes", None) or 1024.0
    )
    count = int(max(1, min(cores(), len(missing), 1 + size // WORTH_BYTES)))
    return Threads(1) if count == 1 else Processes(count)
