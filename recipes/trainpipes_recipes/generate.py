"""Run a model over a dataset: hundreds of requests under way, each row once in the output.

    python -m trainpipes_recipes.generate --files 'rows/*.parquet' --output answers \\
        --url http://localhost:8000/v1 --model my-model
    python -m trainpipes_recipes.generate --files rows.jsonl --output labels --function mymodule:label

Each row is written with its answer to the folder --output, as Parquet: in the order of the input, or
with --unordered as answers come. Kill it at any time, and start it again with the same options: it
goes on, and no row is left out or written twice. Requests under way at the kill are made again.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import queue as queues
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import trainpipes as tp
from trainpipes._internal.checks import require, whole_number, wrong
from trainpipes.tokenizers.chat import messages_of
from trainpipes_recipes.inputs import Input
from trainpipes_recipes.prompts import prompts

__all__ = ["ask", "generate", "main"]

STATE = ".state.json"
#: Rows after which a column that no file can hold is found before the file is full.
FEW = 64


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--files", nargs="+", required=True, help="paths, folders, globs or URLs")
    add("--output", type=Path, required=True, help="folder for Parquet files")
    add("--url", help="of an endpoint like OpenAI's, up to /v1; the key is in OPENAI_API_KEY")
    add("--model", default="default", help="as the endpoint calls it")
    add("--max-tokens", type=int, default=1024, help="of an answer")
    add("--function", help="module:name of a function of a row, instead of an endpoint")
    add("--prompt", help="column of the prompt; found by common names if left out")
    add("--column", default="response", help="for the answers")
    add("--in-flight", type=int, default=256, help="requests at a time")
    add("--rows-per-file", type=int, default=1000)
    add("--unordered", action="store_true", help="write answers as they come")
    args = parser.parse_args(arguments)
    if (args.url is None) == (args.function is None):
        parser.error("give --url or --function")
    if args.function is not None and args.prompt is not None:
        parser.error("--prompt is for --url: a function takes the whole row")
    if args.function is not None and not all(args.function.partition(":")):
        parser.error(f"--function must be module:name, got {args.function}")
    if args.url is not None:
        answer = functools.partial(ask, args.url, args.model, args.max_tokens)
        rows = prompts(args.files, prompt=args.prompt, train=False, num_shards=1, batch_size=None)
    else:
        module, _, name = args.function.partition(":")
        answer = getattr(importlib.import_module(module), name)
        rows = Input("generate", args.files).rows()
    written = generate(
        rows, answer, args.output, column=args.column, in_flight=args.in_flight,
        rows_per_file=args.rows_per_file, ordered=not args.unordered,
    )  # fmt: skip
    print(f"{written} rows in {args.output}")


def ask(url: str, model: str, max_tokens: int, row: Mapping[str, Any]) -> str | None:
    """The answer of an endpoint to a row's prompt; None of one without text, as of a call of a tool."""
    prompt = row["prompt"]
    is_text = isinstance(prompt, str)
    # Nulls that Arrow puts in for missing keys are refused by some endpoints.
    messages = [{"role": "user", "content": prompt}] if is_text else messages_of(prompt, False)
    body = {"model": model, "messages": messages, "max_tokens": max_tokens}
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=3600) as response:
        content = json.load(response)["choices"][0]["message"]["content"]
    return None if content is None else str(content)


def generate(
    rows: tp.Pipeline,
    answer: Callable[[Any], Any],
    output: Path,
    *,
    column: str = "response",
    in_flight: int = 256,
    rows_per_file: int = 1000,
    ordered: bool = True,
    tries: int = 3,
) -> int:
    """Write each row with its answer. Goes on where an earlier call was killed.

    Args:
        rows: in the order in which they are to be written; of a single shard, without a shuffle.
        answer: makes a row's answer; is called by ``in_flight`` threads.
        output: folder, new, empty, or of an earlier call; holds "part-00000.parquet" and so on, and
            ".state.json".
        column: for the answers; one that rows do not have.
        in_flight: calls at a time.
        rows_per_file: rows in each file; files written last may have fewer.
        ordered: whether answers wait for those of rows before them.
        tries: calls for a row, the first included, before its error ends all.

    Returns:
        How many rows are in the folder.

    Raises:
        ConfigError: rows have that column already, or the folder holds other files.
        DataError: a row or an answer cannot be written, or not in one file with those before it.
    """
    whole_number(in_flight, 1, "generate(in_flight)")
    whole_number(rows_per_file, 1, "generate(rows_per_file)")
    ranks = rows._iteration.ranks()[1]
    way = "start it once, and without WORLD_SIZE in the environment"
    require(ranks == 1, "generate(rows)", "read by a single process", f"{ranks} ranks", way)
    output.mkdir(parents=True, exist_ok=True)
    loader = tp.Loader(rows)
    loader.set_epoch(
        0
    )  # wherever the pipeline stands: rows are known by their number in the first one
    queue = tp.WorkQueue(loader, max_in_flight=in_flight + 4 * rows_per_file)
    parts = count = 0
    if (output / STATE).exists():
        saved = json.loads((output / STATE).read_text())
        queue.load_state_dict(saved["queue"])
        parts, count = saved["parts"], saved["rows"]
        part_of(output, parts).unlink(missing_ok=True)  # written, and not noted as done
    elif others := sorted(name for name in os.listdir(output) if not name.startswith(".")):
        way = "give another one, which is empty or not there yet"
        raise wrong("generate(output)", "a folder without other files", others, way)

    answers: queues.SimpleQueue[tuple[tp.Work | None, Any]] = queues.SimpleQueue()

    def work_on() -> None:
        try:
            for work in queue:
                try:
                    check_row(work.item, column)
                    answers.put((work, answer(work.item)))
                except Exception as error:
                    answers.put((work, error))
        except BaseException as error:
            answers.put((None, error))

    def note() -> None:
        write(output / STATE, {"queue": queue.state_dict(), "parts": parts, "rows": count})

    threads = [threading.Thread(target=work_on, daemon=True) for _ in range(in_flight)]
    for thread in threads:
        thread.start()
    held: dict[tp.WorkKey, dict[str, Any]] = {}  # rows with their answers, not written
    ready: list[tp.WorkKey] = []  # of them those whose turn it is
    failed: Counter[tp.WorkKey] = Counter()
    last: dict[str, Any] = {}  # of each column of this file a value that came last, and is not None
    try:
        while True:
            waits = False
            try:
                work, generated = answers.get(timeout=0.2)
            except queues.Empty:
                waits = True
            else:
                if work is None:  # of reading
                    raise generated
                if isinstance(generated, Exception):
                    failed[work.key] += 1
                    if failed[work.key] >= tries:
                        raise generated
                    queue.again(work.key)
                    continue
                held[work.key] = row = {**work.item, column: generated}
                check_values(row, last)
                if len(held) == FEW:
                    table_of([*held.values()])
                if not ordered:
                    ready.append(work.key)
                while ordered and (0, count + len(ready)) in held:
                    ready.append(tp.WorkKey(0, count + len(ready)))
            if len(ready) >= rows_per_file or (waits and ready and len(held) == queue.in_flight):
                if not parts:
                    note()  # so that after a kill the file is known
                save(output, parts, [held.pop(key) for key in ready])
                for key in ready:
                    queue.done(key)
                parts, count = parts + 1, count + len(ready)
                ready.clear()
                last.clear()
                note()
            elif waits and not any(thread.is_alive() for thread in threads) and not held:
                return count
    finally:
        queue.close()


def check_row(row: Any, column: str) -> None:
    """Raise before a row is answered, if it could not be written with its answer."""
    if not isinstance(row, Mapping):
        raise tp.DataError(
            f"generate takes rows that are dicts, got {row!r:.80}: make them by map()"
        )
    way = "give another one, as by --column answer"
    require(column not in row, "generate(column)", "a name that no column has", column, way)
    check_values(row, {})


def check_values(row: Mapping[str, Any], last: dict[str, Any]) -> None:
    """Raise DataError for a value that no column holds together with the one before it."""
    for name, value in row.items():
        with naming(name):
            pa.array([last.get(name), value])
        if value is not None:
            last[name] = value


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table; raises DataError for a column that Parquet cannot hold."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        with naming(name):
            column = pa.table({name: [row.get(name) for row in rows]})
            pq.write_table(column[:0], pa.BufferOutputStream())
        columns[name] = column[name]
    return pa.table(columns)


@contextlib.contextmanager
def naming(column: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OverflowError) as error:
        way = "make values of one type of it, text for instance, or leave the column out"
        raise tp.DataError(
            f"generate: column {column!r} cannot be written: {error}; {way}"
        ) from error


def save(output: Path, number: int, rows: list[dict[str, Any]]) -> None:
    """A file, whole or not there."""
    pq.write_table(table_of(rows), output / ".new")
    os.replace(output / ".new", part_of(output, number))


def part_of(output: Path, number: int) -> Path:
    return output / f"part-{number:05d}.parquet"


def write(path: Path, value: Any) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value))
    os.replace(new, path)


if __name__ == "__main__":
    main()
