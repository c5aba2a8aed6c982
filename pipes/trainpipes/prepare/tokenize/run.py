"""``tokenize``: the files of a pipeline as token ids, made once, in several processes."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from trainpipes.checks import flag, local_path, whole_number
from trainpipes.errors import ConfigError
from trainpipes.pipeline import Pipeline
from trainpipes.prepare.tokenize.cut import Parts, cut, files_of, open_plan
from trainpipes.prepare.tokenize.formats import DTYPES, Bare, Form, Parquet, narrowest
from trainpipes.prepare.tokenize.make import Made, Maker, first_rows
from trainpipes.prepare.tokenize.tasks import Task, tasks_of
from trainpipes.prepare.tokenize.workers import Tell, made_by_processes, made_here
from trainpipes.progress import JobReport
from trainpipes.runtime.options import either
from trainpipes.runtime.planning.arrange import arrange
from trainpipes.runtime.planning.plan import Plan
from trainpipes.runtime.stage import Stage
from trainpipes.shown import shown
from trainpipes.writers.inputs import about_inputs
from trainpipes.writers.output_folder import (
    PART,
    Opened,
    OutputFolder,
    Written,
    check_bytes,
)
from trainpipes.writers.parquet import CODECS
from trainpipes.writers.write import check_codec

__all__ = ["Tokenized", "tokenize"]

#: Bytes of an input file after which another output file begins.
FILE_BYTES = 256 << 20
#: Bytes of input for which a process more is worth the seconds that it takes to start.
WORTH_BYTES = 64 << 20
#: Seconds between two notes of what is whole: what is finished after the last is made again after a kill.
EVERY = 1.0

#: Is called with the job, the rows that are done, and all there are.
Report = Callable[[str, int, int | None], None]


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
    """

    tokens: int
    read: int
    kept: int
    format: str
    dtype: str | None
    columns: dict[str, str]
    _parts: Parts = field(repr=False, compare=False)

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
        return self._parts.on(self.folder)


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
            On this machine, and new or empty.
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

    Raises:
        ConfigError: the pipeline makes no ids, or not of files; the folder holds other files, or those of
            another pipeline or other options; or it cannot be written.
        DataChangedError: the input has changed since the work was begun, also where all was finished, or a
            file since it was written.
        DataError: a row cannot be tokenized; says which file and row.
        WorkerError: a process was killed; says which file it was at.

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
    parts = cut(pipeline)
    form = _form(format, dtype, compression, parts)
    if format == "parquet":
        _check_training(pipeline, parts)
    plan = open_plan([stage.fresh() for stage in parts.ahead])
    _apart(folder, plan)
    first = first_rows(plan)
    form.check(first.schema)
    tasks = tasks_of(plan, form.suffix, bytes_per_file)
    about = _about(plan, parts, form, bytes_per_file, first.schema)
    opener = _Opener(
        parts.ahead, plan.inputs.source, plan.notes, form, first.schema, about["tokenized"]["ids"]
    )
    with OutputFolder(folder, "tokenize", about, overwrite) as out:
        opened = out.open()
        report = JobReport(out.path.name) if progress is None else progress
        job = _Job(out, tasks, opened, plan, report)
        if opened.written is None:
            count = processes or _worthwhile(plan, job.missing)
            try:
                job.make(opener, count)
            finally:
                if isinstance(report, JobReport):
                    report.close()
            columns = {field.name: str(field.type) for field in first.schema}
            out.finish(job.entries, columns)
        entries = job.entries
        if verify:
            check_bytes(out.path, entries)
    return Tokenized(
        str(out.path),
        tuple(str(out.path / entry["file"]) for entry in entries),
        sum(entry["rows"] for entry in entries),
        sum(entry["tokens"] for entry in entries),
        sum(task.rows for task in tasks),
        len(opened.files),
        format,
        getattr(form, "dtype", None),
        {field.name: str(field.type) for field in first.schema},
        parts,
    )


class _Job:
    """The files that are to be made, and those that are whole."""

    def __init__(
        self,
        out: OutputFolder,
        tasks: list[Task],
        opened: Opened,
        plan: Plan,
        progress: Report,
    ) -> None:
        self._out = out
        self._tasks = tasks
        self._progress = progress
        self._names = files_of(plan).files.relative_names()
        self._number = {str(name): n for n, name in enumerate(files_of(plan).files.names)}
        self._made = {entry["file"]: entry for entry in opened.files}
        self._total = sum(task.rows for task in tasks)
        self._done = sum(task.rows for task in tasks if task.name in self._made)
        self._token = secrets.token_hex(4)
        if opened.written is None:
            self._clear()

    @property
    def missing(self) -> list[Task]:
        return [task for task in self._tasks if task.name not in self._made]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Of the files that are whole, in the order of the rows."""
        return [self._made[task.name] for task in self._tasks if task.name in self._made]

    def make(self, opener: _Opener, processes: int) -> None:
        """Make what is missing."""
        saved = time.monotonic()
        self._tell(0, 0)
        made = self._making(opener, processes)
        try:
            with closing(made):
                for task, file in made:
                    self._out.publish(self._path(task), task.name)
                    self._made[task.name] = {
                        "file": task.name, "rows": file.rows, "bytes": file.bytes, "crc32": file.crc32,
                        "tokens": file.tokens, "source": self._names[self._number[task.source]],
                    }  # fmt: skip
                    if time.monotonic() - saved > EVERY:
                        self._save()
                        saved = time.monotonic()
        except BaseException:
            with suppress(OSError):
                self._clear()  # which makes room on a disk that is full
            with suppress(ConfigError):
                self._save()
            raise

    def _making(self, opener: _Opener, processes: int) -> Any:
        missing = self.missing
        if processes == 1 or len(missing) < 2:
            return made_here(missing, opener, self._path, self._tell)
        return made_by_processes(missing, opener, self._path, self._tell, processes)

    def _path(self, task: Task) -> Path:
        """Where a file lies until it is whole; a process that outlives this call may write on there."""
        return self._out.path / f"{PART}{self._token}-{task.name}"

    def _tell(self, rows: int, _: int) -> None:
        self._done += rows
        self._progress("tokenizing", self._done, self._total)

    def _save(self) -> None:
        self._out.save(Opened(None, self.entries, None, {}, None))

    def _clear(self) -> None:
        """Remove parts of files, and files that nobody has noted."""
        for name in os.listdir(self._out.path):
            own = name.startswith(("part-", PART))
            if own and name not in self._made:
                (self._out.path / name).unlink(missing_ok=True)


@dataclass
class _Opener:
    """Opens the plan in a process. Pickles."""

    stages: tuple[Stage, ...]
    source: Any
    notes: dict[str, Any]
    form: Form
    schema: pa.Schema
    ids: list[str]

    def __call__(self) -> Callable[[Task, Path, Tell], Made]:
        plan = open_plan(self.stages, self.source)
        plan.adopt(self.notes)
        return Maker(plan, self.form, self.schema, self.ids).make


def _apart(folder: str | os.PathLike[str], plan: Plan) -> None:
    """Raise where the files are written below those that are read: another call would read them, too."""
    urls = plan.chain.urls
    target = Path(local_path(folder, "tokenize(folder)")).expanduser().absolute()
    for url in [urls] if isinstance(urls, str) else urls or ():
        place = Path(url).expanduser().absolute()
        if place.is_dir() and target.is_relative_to(place):
            raise ConfigError(
                f"tokenize(folder): {target} lies below {url}, whose files are read, and what is written "
                "there would be read with them: give a folder elsewhere",
                path=str(target),
            )


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
