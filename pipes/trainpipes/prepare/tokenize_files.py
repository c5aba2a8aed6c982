"""``tokenize``: the files of a pipeline as token ids, made once, and read again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import require, whole_number
from trainpipes.columns.arrays import one_chunk, to_numpy
from trainpipes.columns.block import Block
from trainpipes.columns.columns import table_of
from trainpipes.engine.planning.plan import Plan, arrange
from trainpipes.engine.processes.channel import pickled
from trainpipes.engine.processes.executor_options import executor_of
from trainpipes.engine.processes.executors import Executor, Processes, Threads, cores
from trainpipes.errors import ConfigError, DataError, SchemaError
from trainpipes.filesystems.places import MANIFEST, OutputFile, Place, place_at
from trainpipes.filesystems.retry import NORMAL, Retry
from trainpipes.interfaces.options import either
from trainpipes.interfaces.quarantine import OnError
from trainpipes.interfaces.read_columns import say_where
from trainpipes.interfaces.source import LooksAhead, Reader, read_rows
from trainpipes.interfaces.stage import Stage, aside
from trainpipes.interfaces.stage_kinds import put_through
from trainpipes.pipeline.chain import Pipeline
from trainpipes.pipeline.starts import list_files
from trainpipes.prepare.ahead import CALLER, Parts, cut, open_plan
from trainpipes.sources.files.file_reader import FileBlocks, cut_by_bytes
from trainpipes.stages.tokenize import Tokenize
from trainpipes.stages.tokenizing import ChatTemplate, TokenizedBy, Tokenizes
from trainpipes.state.format import said
from trainpipes.tokenizers.adapters import Bytes, load
from trainpipes.writers.epoch_rows import check_columns, compact, decoded
from trainpipes.writers.formats import CODECS, check_codec, parquet_form
from trainpipes.writers.output_folder import ABOUT, FileInfo, Manifest
from trainpipes.writers.output_folder import run as make_files
from trainpipes.writers.write import FileWriter, Format, open_output, refuse_functions

#: Rows of the first piece, and from which columns are taken; rows and bytes of ids of any piece, at most: a
#: tokenizer's own objects take some 50 times what the text does.
FIRST_ROWS, PIECE_ROWS, PIECE_BYTES = 16, 8192, 1 << 20


@dataclass(frozen=True)
class Task:
    """One output file: blocks ``first`` to ``stop`` of an input file, named below the folder that was asked
    for.
    """

    name: str
    source: str
    source_name: str
    first: int
    stop: int
    rows: int

    def __str__(self) -> str:
        return f"{self.name} of {self.source}"


def tasks_of(plan: Plan, suffix: str, bytes_per_file: int) -> list[Task]:
    source: Any = plan.inputs.source
    lengths = plan.inputs.blocks.lengths
    block_bytes = source.block_bytes
    block_bytes = source.lengths * (source.row_bytes or 1.0) if block_bytes is None else block_bytes
    sizes = (block_bytes * lengths / np.maximum(1, source.lengths)).astype(np.int64)
    parts = []
    for file in range(len(source.files)):
        first, stop = np.searchsorted(source.file_of_block, [file, file + 1]).tolist()
        edges = first + cut_by_bytes(sizes[first:stop], bytes_per_file)
        parts += [(file, *edge) for edge in pairwise(edges.tolist())] or [(file, first, stop)]
    names, short = source.files.names, source.files.relative_names()
    width = max(5, len(str(len(parts) - 1)))
    return [
        Task(
            f"part-{number:0{width}d}{suffix}", names[file], short[file], first, stop,
            int(lengths[first:stop].sum()),
        )
        for number, (file, first, stop) in enumerate(parts)
    ]  # fmt: skip


class BareFile:
    """Nothing but the documents' ids in order, native numbers of a fixed type, as nanoGPT's ``train.bin``."""

    def __init__(self, dtype: str, file: OutputFile, schema: pa.Schema) -> None:
        self.columns = {field.name: str(field.type) for field in schema}
        self._file, self._dtype = file, np.dtype(dtype)

    def write(self, group: pa.Table, first_row: int) -> None:
        ids = to_numpy(one_chunk(group.column("input_ids")).flatten())
        narrow = ids.astype(self._dtype)
        odd = ids[narrow != ids]
        if len(odd):
            raise DataError(
                f'tokenize(format="bin", dtype="{self._dtype}"): there is a token {odd[0]}, which that type '
                "cannot hold; give a dtype that does"
            )
        self._file.write(narrow.data)

    def close(self) -> None:
        """Nothing follows the last id."""


def make(
    open_file: Callable[[OutputFile, pa.Schema], FileWriter], schema: pa.Schema, ids: Sequence[str],
    task: Task, file: OutputFile, plan: Plan,
) -> FileInfo:  # fmt: skip
    source: Any = plan.inputs.source
    blocks, step = plan.inputs.blocks, FIRST_ROWS
    rows = tokens = 0
    with closing(source.reader()) as reader, closing(open_file(file, schema)) as writer:
        if isinstance(reader, LooksAhead):
            reader.expect(range(task.first, task.stop))
        for block in range(task.first, task.stop):
            # A row group for each block of the input, which may have no rows.
            parts = [pa.Table.from_batches([], schema)]
            begin = int(blocks.begins[block])
            stop = begin + int(blocks.lengths[block])
            while begin < stop:  # piece by piece, of as many rows as have few bytes
                end = min(begin + step, stop)
                table = rows_of(plan, reader, block, begin, end)
                check_columns(schema, table.schema, "tokenize", f" in {task.source}")
                parts.append(table)
                tokens += sum(len(one_chunk(table.column(name)).flatten()) for name in ids)
                file.advance(end - begin)
                if table.nbytes < PIECE_BYTES // 2 and end < stop:
                    step = min(2 * step, PIECE_ROWS)
                elif table.nbytes > PIECE_BYTES:
                    step = max(step // 2, 1)
                begin = end
            group = pa.concat_tables(parts)
            writer.write(group, rows)
            rows += len(group)
    return FileInfo(rows, writer.columns, notes={"tokens": tokens, "source": task.source_name})


def rows_of(plan: Plan, reader: Reader, block: int, begin: int, end: int) -> pa.Table:
    """Run the stages on rows of a block; the result is a table of these alone."""
    inputs = plan.inputs
    ids = int(inputs.blocks.firsts[block]) + np.arange(begin, end, dtype=np.int64)
    try:
        data = read_rows(inputs.listed, reader, block, begin, end)
        rows_made = put_through(plan.chain.steps, Block(data, ids, epoch=0))
        return compact(decoded(table_of(rows_made.data, CALLER)).replace_schema_metadata())
    except Exception as error:
        say_where(error, plan.inputs.place_of)
        raise


def first_rows(plan: Plan) -> pa.Table:
    source: Any = plan.inputs.source
    blocks = plan.inputs.blocks
    there = np.flatnonzero(blocks.lengths)
    if not len(there):
        raise DataError(
            f"{CALLER}: {plan.chain.opener} has no rows, and nothing is written: check which files are named"
        )
    block = int(there[0])
    begin, length = int(blocks.begins[block]), int(blocks.lengths[block])
    with aside(), closing(source.reader()) as reader:
        return rows_of(plan, reader, block, begin, begin + min(FIRST_ROWS, length))


#: The stages that make ids, by their names in a manifest.
MAKERS: dict[str, Any] = {"tokenize": Tokenize, "chat_template": ChatTemplate}


def tokenized_rows(
    rows: Pipeline,
    tokenizer: Any,
    columns: Sequence[str],
    *,
    caller: str,
    made_by: Mapping[str, Mapping[str, Any]],
    on_error: OnError | None = None,
) -> Pipeline | None:
    """Rows of token ids with the tokenizer that made them; None where the files are not of ``tokenize``."""
    source = Plan.of(rows.stages, quiet=True).inputs.source
    if not isinstance(source, FileBlocks) or source.schema is None:
        return None
    folders = _folders(source)
    about: Any = next(filter(None, folders.values()), None)
    if about is None:
        return None
    stages = about["pipeline"]["stages"]
    for folder, manifest in folders.items():
        if manifest is None or manifest["pipeline"]["stages"] != stages:
            raise ConfigError(
                f"{caller}: {folder} and {next(iter(folders))} were not tokenized by the same pipeline: "
                "give files of one",
                path=folder,
            )
    lacking = [name for name in columns if name not in source.schema.names]
    if lacking:
        raise SchemaError(
            f"{caller} needs a column {lacking[0]!r}, and the files that were tokenized have "
            f"{source.schema.names}: tokenize them for this recipe, trainpipes tokenize ... --recipe "
            f"{caller}",
            stage=caller,
        )
    for stage in stages:
        maker = stage["stage"]
        if maker not in MAKERS or "tokenizer" not in stage:
            continue
        if maker not in made_by:
            raise ConfigError(
                f"{caller}: the files were tokenized by {maker}(), for another recipe: tokenize the texts "
                "for this one"
            )
        _check(caller, stage, tokenizer, made_by[maker])
    return rows.then(TokenizedBy(tokenizer, about["tokenized"]["ids"], on_error=on_error))


def _check(
    caller: str, saved: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any]
) -> None:
    """Raise ConfigError for the first option that differs; ``...`` is anything but None."""
    changed = {name: value for name, value in options.items() if value is not ...}
    now = {"tokenizer": load(tokenizer).fingerprint()}
    if saved["tokenizer"] == json.loads(json.dumps(now["tokenizer"])):
        now = MAKERS[saved["stage"]](tokenizer, **changed).identity()
    now = json.loads(json.dumps(now))
    for name in ("tokenizer", *options):
        before, present = saved.get(name), now.get(name)
        if options.get(name) is ...:
            if before is None:
                raise ConfigError(
                    f"{caller}: the files were tokenized without {name}, for another recipe: tokenize the "
                    "texts for this one"
                )
        elif before is not None and present is None and options.get(name) is None:
            raise ConfigError(
                f"{caller}: the files were tokenized with {name}={said(before)}, for another recipe: "
                "tokenize the texts for this one"
            )
        elif before != present:
            present = options[name] if name in options and present is None else present
            raise ConfigError(
                f"{caller}({name}): the files were tokenized with {said(before)}, and now it is "
                f"{said(present)}: give the same, or tokenize the texts again"
            )


def _folders(source: FileBlocks) -> dict[str, dict[str, Any] | None]:
    """The notes on the files of each folder; None for a folder that ``tokenize`` has not written."""
    abouts: dict[str, dict[str, Any] | None] = {}
    files = source.files
    for number, (name, path) in enumerate(zip(files.names, files.paths, strict=True)):
        folder = str(name).rpartition("/")[0]
        if folder in abouts:
            continue
        place = Place(folder, "tokenize", files.system(number), str(path).rpartition("/")[0])
        abouts[folder] = _about(place, MANIFEST)
        if abouts[folder] is None and _about(place, ABOUT):
            raise ConfigError(
                f"{folder} is not finished: some of its files are still to be made; tokenize again, which "
                "goes on where it was",
                path=folder,
            )
    return abouts


def _about(place: Place, name: str) -> dict[str, Any] | None:
    about: Any = None
    with suppress(OSError, ValueError, RecursionError):
        about = json.loads(place.read(name))
    ours = isinstance(about, dict) and {"tokenized", "pipeline"} <= about.keys()
    return about if ours else None


#: Bytes of an input file after which another output file begins.
FILE_BYTES = 256 << 20
#: Bytes of input for which a process more is worth the seconds that it takes to start.
WORTH_BYTES = 64 << 20
#: Ids, masks and labels are small numbers that come again: a level above this saves 1 or 2 % and takes twice
#: the time.
LEVEL = 1
DTYPES = ("uint16", "uint32", "int32", "int64")


@dataclass(frozen=True, repr=False)
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
        """The pipeline that trains on these files: the rest of the given pipeline, on their rows.

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
    before the ids drops rows, or ``shuffle(max_bytes=)``, 1 GiB if left out, makes windows smaller: texts are
    larger than ids. After a kill the same call goes on; when all is there, it does nothing.

    Args:
        pipeline: of files.
        folder: a path or fsspec URL, new or empty, for "part-00000.parquet" and so on, and "_manifest.json".
        format: "parquet"; or "bin", files of nothing but ids, as nanoGPT has them: for
            ``from_memmap(dtype=, length=)`` and the recipe "tokens".
        dtype: of ids in "bin"; "uint16" if left out, where the tokenizer's ids fit, else "uint32".
        compression: of Parquet: "zstd", "snappy", "gzip", "brotli", "lz4" or None.
        bytes_per_file: of an input file, after which another output file begins, between two row groups.
        overwrite: whether to remove files written there before.
        executor: ``tp.Processes(n)``, ``tp.Threads(n)`` or ``tp.Ray(address)``; if left out,
            as many processes as there are cores and work for, where they can load the functions.
        storage_options: of the folder's file system.
        retry: how long failing requests to a URL are made again.

    Raises:
        ConfigError: the pipeline makes no ids, or not of files; the folder holds other files, cannot be
            written, or workers cannot get at it.
        DataChangedError: the input, a function, or a file that was written has changed.
        DataError: a row cannot be tokenized; says which file and row.
        WorkerError: three worker processes died at one file, or a task of Ray four times.
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
    bytes_per_file = whole_number(
        bytes_per_file, 1, "tokenize(bytes_per_file)", "bytes of an input file"
    )
    is_pipeline = isinstance(pipeline, Pipeline)
    require(is_pipeline, "tokenize(pipeline)", "a trainpipes Pipeline", pipeline)
    chosen = executor_of(executor, "tokenize(executor)", Threads(1))
    parts = cut(pipeline)
    dtype = _checked_format(format, dtype, compression, parts)
    is_parquet = format == "parquet"
    if is_parquet:
        _check_training(pipeline, parts)
    place = place_at(folder, "tokenize", storage_options, retry)
    with chosen:  # before anything is read: Ray starts processes
        plan = open_plan(parts.ahead)
        suffix = ".parquet" if is_parquet else ".bin"
        refuse_functions(plan, chosen, "tokenize")
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
        with open_output(place, plan, [f"part-00000{suffix}"], chosen, about, overwrite) as out:
            missing = [task for task in tasks if task.name not in out.files]
            workers = _worthwhile(plan, missing, opened) if executor is None else chosen
            read = sum(task.rows for task in tasks)
            manifest = make_files(
                tasks, partial(make, open_file, schema, ids), out, workers,
                open_state=opened, total=read, job="tokenizing", needs_rows=True,
            )  # fmt: skip
    tokens = sum(entry.notes["tokens"] for entry in manifest.entries)
    return Tokenized(
        **vars(manifest), tokens=tokens, read=read, format=format, dtype=dtype,
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


def _worthwhile(plan: Plan, missing: list[Task], opened: Callable[[], Plan]) -> Executor:
    size = sum(task.rows for task in missing) * (
        getattr(plan.inputs.source, "row_bytes", None) or 1024.0
    )
    count = int(max(1, min(cores(), len(missing), 1 + size // WORTH_BYTES)))
    return Processes(count) if count > 1 and _loads_elsewhere(opened) else Threads(1)


def _loads_elsewhere(opened: Callable[[], Plan]) -> bool:
    """Whether other processes can load it: nothing in it is local, nor of a session that has no file."""
    try:
        content = bytes(pickled(opened)[0])
    except Exception:  # what an object's class raises
        return False
    script = getattr(sys.modules["__main__"], "__file__", None)
    return os.path.exists(script) if script else b"__main__" not in content
