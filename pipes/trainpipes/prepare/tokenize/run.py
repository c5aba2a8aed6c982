"""``tokenize``: the files of a pipeline as token ids, made once, in several processes or on Ray."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from trainpipes._internal.checks import flag, whole_number
from trainpipes._internal.progress import JobReport
from trainpipes._internal.text import shown
from trainpipes.engine.planning.arrange import arrange
from trainpipes.engine.planning.plan import Plan
from trainpipes.errors import ConfigError
from trainpipes.integrations.on_ray import RayCluster
from trainpipes.kinds.options import either
from trainpipes.pipeline import Pipeline
from trainpipes.prepare.tokenize.cut import Parts, cut, files_of, open_plan
from trainpipes.prepare.tokenize.formats import DTYPES, Bare, Form, Parquet, narrowest
from trainpipes.prepare.tokenize.job import Job, Report
from trainpipes.prepare.tokenize.make import first_rows
from trainpipes.prepare.tokenize.opener import Opener, in_processes, on_ray
from trainpipes.prepare.tokenize.tasks import Task, tasks_of
from trainpipes.storage.writers.formats import CODECS, check_codec
from trainpipes.storage.writers.inputs import about_inputs, refuse_own_input
from trainpipes.storage.writers.manifest import Written, check_bytes
from trainpipes.storage.writers.on_ray import Cluster
from trainpipes.storage.writers.output_folder import OutputFolder
from trainpipes.storage.writers.storage import storage_at

#: Bytes of an input file after which another output file begins.
FILE_BYTES = 256 << 20
#: Bytes of input for which a process more is worth the seconds that it takes to start.
WORTH_BYTES = 64 << 20


@dataclass(frozen=True)
class Tokenized(Written):
    """Files of token ids that are whole.

    Attributes:
        tokens: in all files.
        read: rows that they were made of; stages may have left some out.
        kept: files that were there already.
        format: "parquet" or "bin".
        dtype: of the ids in files of nothing else; None in Parquet.
        columns: of Parquet files, and their types.
        bytes: of all files.
    """

    tokens: int
    read: int
    kept: int
    format: str
    dtype: str | None
    columns: dict[str, str]
    bytes: int = field(compare=False)
    _parts: Parts = field(repr=False, compare=False)
    _storage_options: Mapping[str, Any] | None = field(repr=False, compare=False)

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
        return self._parts.on(self.folder, self._storage_options)


def tokenize(
    pipeline: Pipeline,
    folder: str | os.PathLike[str],
    *,
    format: Literal["parquet", "bin"] = "parquet",
    dtype: str | None = None,
    compression: str | None = "zstd",
    bytes_per_file: int = FILE_BYTES,
    processes: int | None = None,
    overwrite: bool = False,
    verify: bool = False,
    progress: Report | None = None,
    engine: Literal["processes", "ray"] = "processes",
    address: str | None = None,
    shared_filesystem: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Tokenized:
    """Do ahead what a pipeline does with each row up to its token ids, and write that, so that training reads
    numbers only. See docs/prepare.md.

    What is done ahead are the stages up to ``tokenize`` or ``chat_template``, and those after it that only
    cut, name or choose columns. There is one output file for each input file (several for a large one), with
    the same rows in the same order, and in Parquet a row group for each of the input's (of text: for each
    block that is read). So what is left of the pipeline, ``result.pipeline``, gives the same rows; and the
    same batches in the same order, unless a stage before the ids drops rows.

    A file appears once it is whole. If processes are killed, the same call makes what is missing; the bytes
    are always the same, whatever ``processes`` is. Once all are there it does nothing. Memory is some
    megabytes a process, and one row group of ids.

    Args:
        pipeline: of files; a recipe's, or your own. Shuffling, packing and batching are left to training.
        folder: for the files, named "part-00000.parquet" and so on, and "_manifest.json", which appears last.
            A path or any fsspec URL; new or empty.
        format: "parquet"; or "bin", files of nothing but ids, one document after the other, as nanoGPT has
            them: for ``from_memmap(dtype=, length=)`` and the recipe "tokens".
        dtype: of ids in "bin"; "uint16" if left out, where the tokenizer's ids fit, else "uint32".
        compression: of Parquet: "zstd", "snappy", "gzip", "brotli", "lz4" or None.
        bytes_per_file: of an input file, after which another output file begins, between two row groups.
        processes: how many work at once; with 1 this one does. Left out, as many as there are cores and work
            for. A script calls it below ``if __name__ == "__main__":``.
        overwrite: whether to remove what was written there before, and write everything anew.
        verify: whether to read all files back at the end and compare them, those that are there already, too.
        progress: is called with "tokenizing", the rows done, and all there are.
        engine: "processes" of this machine; or "ray", tasks on a Ray cluster, one for each output file.
        address: of the Ray cluster, as ``ray.init()`` takes it. Left out, the one that this process is
            connected to, that of ``RAY_ADDRESS``, or one that is started on this machine for the call.
        shared_filesystem: whether all nodes of the Ray cluster see the same files at the paths given, as with
            NFS. Else paths of one machine are refused where there are several.
        storage_options: of the folder's file system, where it is a URL. Those of the input are given where
            its files are.

    Raises:
        ConfigError: the pipeline makes no ids, or not of files; the folder holds other files, or those of
            another pipeline or other options; or it cannot be written, or nodes cannot get at it.
        DataChangedError: the input has changed since the work was begun, also where all was finished, or a
            file since it was written.
        DataError: a row cannot be tokenized; says which file and row.
        WorkerError: a process was killed, on Ray four times; says which file it was at.
        UnreachableError: a server does not answer, or denies access; or no Ray cluster answers.
        MissingExtraError: Ray, or a package for the URL, is not installed.

    >>> import pathlib, tempfile, trainpipes as tp
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("one\\ntwo\\n")
    >>> pipe = tp.list_files(folder / "a.txt").read_text().tokenize("bytes").shuffle(2).batch(2)
    >>> done = tokenize(pipe, folder / "ids", processes=1)
    >>> done.rows, done.tokens, done.columns
    (2, 6, {'input_ids': 'list<item: int32>'})
    >>> list(done.pipeline) == list(pipe)
    True
    """
    flag(verify, "tokenize(verify)")
    whole_number(bytes_per_file, 1, "tokenize(bytes_per_file)", "bytes of an input file")
    if processes is not None:
        whole_number(processes, 1, "tokenize(processes)", "how many work at once")
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"tokenize(pipeline) is a trainpipes Pipeline, got {shown(pipeline)}")
    where = Cluster(engine, address, shared_filesystem, "processes").checked("tokenize")
    if engine == "ray" and processes is not None:
        raise ConfigError(
            f'tokenize(processes={processes}) is of engine="processes": Ray runs a task on each core of its '
            "nodes; leave processes out"
        )
    parts = cut(pipeline)
    form = _form(format, dtype, compression, parts)
    if format == "parquet":
        _check_training(pipeline, parts)
    storage = storage_at(folder, "tokenize", storage_options)
    with ExitStack() as stack:
        cluster = where.enter(stack, "tokenize")
        if cluster is not None:
            cluster.check_path(storage.root, "tokenize(folder)")
        plan = open_plan([stage.fresh() for stage in parts.ahead])
        refuse_own_input(plan.inputs.source, storage, [f"part{form.suffix}"], "tokenize")
        if cluster is not None:
            _check_inputs(cluster, plan)
        first = first_rows(plan)
        form.check(first.schema)
        tasks = tasks_of(plan, form.suffix, bytes_per_file)
        about = _about(plan, parts, form, bytes_per_file, first.schema)
        opener = Opener(
            parts.ahead, plan.inputs.source, plan.inputs.schemas.known(), form, first.schema,
            about["tokenized"]["ids"], storage, secrets.token_hex(4),
        )  # fmt: skip
        with OutputFolder(storage, "tokenize", about, overwrite) as out:
            opened = out.open()
            report = JobReport(out.name) if progress is None else progress
            job = Job(out, tasks, opened, plan, report)
            if opened.written is None:
                try:
                    if cluster is not None:
                        job.make(lambda missing, tell: on_ray(cluster, missing, opener, tell))
                    else:
                        count = processes or _worthwhile(plan, job.missing)
                        job.make(lambda missing, tell: in_processes(missing, opener, tell, count))
                finally:
                    if isinstance(report, JobReport):
                        report.close()
                columns = {field.name: str(field.type) for field in first.schema}
                out.finish(job.entries, columns)
            entries = job.entries
            if verify:
                check_bytes(storage, entries)
    return Tokenized(
        storage.root,
        tuple(storage.at(entry["file"]) for entry in entries),
        sum(entry["rows"] for entry in entries),
        sum(entry["tokens"] for entry in entries),
        sum(task.rows for task in tasks),
        len(opened.files),
        format,
        getattr(form, "dtype", None),
        {field.name: str(field.type) for field in first.schema},
        sum(entry["bytes"] for entry in entries),
        parts,
        storage_options,
        _storage=storage,
    )


def _check_inputs(cluster: RayCluster, plan: Plan) -> None:
    """Raise where nodes cannot get at the files that are read."""
    files = files_of(plan).files
    for system in set(files.system_of.tolist()):
        first = files.system_of.tolist().index(system)
        cluster.check_path(files.names[first], "tokenize(pipeline)")


def _check_training(pipeline: Pipeline, parts: Parts) -> None:
    """Raise unless what is left to training gets what it needs of the tokenizer."""
    for stage in arrange([stage.fresh() for stage in pipeline.stages]).stages:
        if any(type(stage) is type(left) for left in parts.training):
            stage.identity()


def _form(format: str, dtype: str | None, compression: str | None, parts: Parts) -> Form:
    if format not in ("parquet", "bin"):
        raise ConfigError(f'tokenize(format) is "parquet" or "bin", got {shown(format)}')
    check_codec(compression, CODECS, "tokenize")
    if format == "parquet":
        if dtype is not None:
            raise ConfigError(
                f'tokenize(dtype) is of format="bin", got dtype={shown(dtype)} and Parquet, which keeps the '
                "types of its columns: leave it out"
            )
        return Parquet(compression)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"tokenize(dtype) is {either(DTYPES)}, got {shown(dtype)}")
    return Bare(dtype or narrowest(parts.ahead))


def _about(
    plan: Plan, parts: Parts, form: Form, bytes_per_file: int, schema: pa.Schema
) -> dict[str, Any]:
    """What the manifest says besides the files."""
    ids = [name for maker in parts.makers for name in maker.id_columns if name in schema.names]
    return {
        "options": {**form.options, "bytes_per_file": bytes_per_file},
        "pipeline": json.loads(plan.identity),
        "tokenized": {"ids": ids},
        **about_inputs(plan.inputs.source),
    }


def _worthwhile(plan: Plan, missing: list[Task]) -> int:
    """How many processes are worth the time that they take to start."""
    mine = getattr(os, "sched_getaffinity", None)
    cores = (os.cpu_count() or 1) if mine is None else len(mine(0))
    rows = sum(task.rows for task in missing)
    size = rows * (files_of(plan).row_bytes or 1024.0)
    return int(max(1, min(cores, len(missing), 1 + size // WORTH_BYTES)))
