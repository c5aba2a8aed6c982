"""What reading JSON lines, CSV and text in blocks costs beside the bare reader, and what their index costs.

    python benchmarks/text_files.py [--rows 100000] [--repeats 7]

Makes files, and reads all rows of each in this thread: by a pipeline's source, block by block, and by
``pyarrow.json``, ``pyarrow.csv`` and ``bytes.split`` on blocks of the same size, without threads. In turn;
ratios of medians of processor time. The index of each is made anew each time; a second run finds it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.csv as pcsv
import pyarrow.json as pj

import trainpipes as tp

__all__ = ["measured"]

BLOCK = 4 << 20


def write(folder: Path, rows: int) -> None:
    """The same rows in each format, of 400 to 500 bytes."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(5000)]
    with (
        open(folder / "rows.jsonl", "w") as lines,
        open(folder / "rows.csv", "w") as cells,
        open(folder / "rows.txt", "w") as texts,
    ):
        cells.write("id,text,score\n")
        for number in range(rows):
            text, score = " ".join(draw.choices(words, k=draw.randint(20, 100))), draw.random()
            chat = [{"role": "user", "content": text[:50]}]
            row = {"id": number, "text": text, "score": score, "messages": chat}
            lines.write(json.dumps(row) + "\n")
            cells.write(f'{number},"{text}",{score}\n')
            texts.write(text + "\n")


def bare_json(path: Path) -> int:
    options = pj.ReadOptions(use_threads=False, block_size=BLOCK)
    return len(pj.read_json(path, read_options=options))


def bare_csv(path: Path) -> int:
    options = pcsv.ReadOptions(use_threads=False, block_size=BLOCK)
    return len(pcsv.read_csv(path, read_options=options))


def bare_text(path: Path) -> int:
    count, rest = 0, b""
    with open(path, "rb") as file:
        while data := file.read(BLOCK):
            *lines, rest = (rest + data).split(b"\n")
            count += len(lines)
    return count


def opened(pipe: tp.Pipeline) -> tp.RowSource:
    """The source of a pipeline's rows."""
    *below, reader = pipe.stages
    source: tp.RowSource = reader.open_files(below)  # type: ignore[attr-defined]
    return source


def ours(source: tp.RowSource) -> int:
    """Rows of all blocks, one after the other."""
    reader = source.reader()
    return sum(len(reader.read(n, 0, int(rows))) for n, rows in enumerate(source.lengths))


def measured(rows: int, repeats: int) -> dict[str, float]:
    """Processor time of reading beside that of the bare readers; ms of an index for each MB; and of all its
    processor time, what is left where the index is there."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, rows)
        kinds: dict[str, tuple[Path, Callable[..., tp.Pipeline], Callable[[Path], int]]] = {
            "json": (folder / "rows.jsonl", tp.read_json, bare_json),
            "csv": (folder / "rows.csv", tp.read_csv, bare_csv),
            "text": (folder / "rows.txt", tp.read_text, bare_text),
        }
        for kind, (path, read, bare) in kinds.items():
            index = str(folder / f"{kind}.arrow")
            len(read(path, index=index))
            times: dict[str, list[float]] = {"ours": [], "bare": [], "made": [], "found": []}
            for _ in range(repeats):
                pipe = read(path, index=index)
                times["found"].append(taken(lambda pipe=pipe: len(pipe)))  # type: ignore[misc]
                source = opened(pipe)
                times["ours"].append(taken(lambda source=source: ours(source)))  # type: ignore[misc]
                times["bare"].append(taken(lambda path=path, bare=bare: bare(path)))  # type: ignore[misc]
                fresh = read(path, index=False)
                times["made"].append(taken(lambda fresh=fresh: len(fresh)))  # type: ignore[misc]
            middle = {name: statistics.median(values) for name, values in times.items()}
            found[f"{kind}, of the bare reader"] = middle["ours"] / middle["bare"]
            found[f"{kind}, index, s a GB"] = middle["made"] / (path.stat().st_size / 1e9)
            found[f"{kind}, index found, of made"] = middle["found"] / middle["made"]
    return found


def taken(work: Callable[[], object]) -> float:
    """Seconds of processor time."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    for what, value in measured(args.rows, args.repeats).items():
        print(f"{what:<32} {value:.2f}")


if __name__ == "__main__":
    main()
