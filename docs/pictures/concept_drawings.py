"""Draws an epoch for docs/how-it-works.md, and a resume on more ranks for docs/resume.md."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
from drawing import Drawing

import trainpipes as tp

__all__ = ["elastic", "epoch"]

#: The epoch that is drawn, as the code of the page makes it.
FILES, GROUPS, GROUP_ROWS, SHARDS, WINDOW, BATCH, RANKS = 2, 3, 8, 2, 12, 4, 2
ROWS = FILES * GROUPS * GROUP_ROWS
LEFT, CELL = 12, 16


def batches() -> list[list[int]]:
    """The rows of each batch."""
    with TemporaryDirectory() as folder:
        each = ROWS // FILES
        for number in range(FILES):
            rows = pa.table({"row": range(number * each, (number + 1) * each)})
            pq.write_table(rows, Path(folder, f"{number}.parquet"), row_group_size=GROUP_ROWS)
        pipe = tp.list_files(folder).read_parquet().sharding_filter(SHARDS)
        found = pipe.shuffle(WINDOW, seed=0).batch(BATCH)
        return [[row["row"] for row in batch] for batch in found]


def group_order(windows: list[list[int]]) -> list[int]:
    """The row groups of a span in the order of its epoch: those of earlier windows come first."""
    where: dict[int, list[int]] = {}
    for number, rows in enumerate(windows):
        for row in rows:
            where.setdefault(row // GROUP_ROWS, []).append(number)
    return sorted(where, key=lambda group: (min(where[group]), max(where[group])))


def epoch() -> str:
    """Narrow enough for a phone: a line for each file and span, and two lines of the sequence."""
    drawn = Drawing(
        2 * LEFT + ROWS // SHARDS * CELL, 800,
        "An epoch of 48 rows: row groups of two files are put in another order, cut into two spans of two "
        "windows each, mixed within the windows, and cut into batches that the spans give in turn",
    )  # fmt: skip
    made = batches()
    spans = [[row for batch in made[span::SHARDS] for row in batch] for span in range(SHARDS)]
    windows = [[rows[at : at + WINDOW] for at in range(0, len(rows), WINDOW)] for rows in spans]
    orders = [group_order(each) for each in windows]
    files = [list(range(at, at + ROWS // FILES)) for at in range(0, ROWS, ROWS // FILES)]
    moved = [[GROUP_ROWS * group + n for group in order for n in range(8)] for order in orders]

    def label(y: float, name: str, more: str) -> None:
        drawn.text(LEFT, y, name, "strong")
        drawn.text(2 * LEFT + ROWS // SHARDS * CELL - LEFT, y, more, "tp-flow", "end")

    def stage(y: float, lines: list[list[int]], of: int, names: list[list[str]]) -> None:
        """Rows in lines, with a frame around so many of them, and its name above."""
        for number, rows in enumerate(lines):
            top = y + 26 + 50 * number
            for n, row in enumerate(rows):
                drawn.box(LEFT + n * CELL, top, CELL, 22, f"cell c{row // GROUP_ROWS}")
                drawn.text(LEFT + (n + 0.5) * CELL, top + 15, row, "small", "middle")
            for n, name in enumerate(names[number]):
                x = LEFT + n * of * CELL
                drawn.box(x, top - 3, of * CELL, 28, "line")
                drawn.text(x + 4, top - 7, name, "tp-flow")

    label(24, "files", "color: row group of the file")
    stage(34, files, ROWS // FILES, [[f"file {n}"] for n in range(FILES)])
    label(160, "spans", "row groups moved")
    stage(170, moved, ROWS // SHARDS, [[f"span {n}"] for n in range(SHARDS)])
    label(296, "windows", "rows mixed in each")
    named = [[f"span {s}, window {w}" for w in range(len(windows[s]))] for s in range(SHARDS)]
    stage(306, spans, WINDOW, named)
    label(432, "batches", f"of {BATCH} rows")
    each = range(len(made) // SHARDS)
    stage(442, spans, BATCH, [[f"m = {m * SHARDS + s}" for m in each] for s in range(SHARDS)])
    label(568, "the sequence, in steps of two ranks", "spans take turns")
    wide = BATCH * CELL
    for m in range(len(made)):
        x, y = LEFT + m % 6 * wide, 584 + 92 * (m // 6)
        drawn.box(x + 4, y + 4, wide - 8, 26, "tp-box", 4)
        drawn.text(x + wide / 2, y + 22, f"m = {m}", "said", "middle")
        for n, words in enumerate((f"shard {m % SHARDS}", f"rank {m % RANKS}")):
            drawn.text(x + wide / 2, y + 45 + 15 * n, words, "tp-flow", "middle")
        if m % RANKS == 0:
            drawn.box(x, y, RANKS * wide, 84, "faint")
            drawn.text(x + wide, y + 78, f"step {m // RANKS}", "said", "middle")
    drawn.text(LEFT, 786, "sharding_filter(2).shuffle(12).batch(4), two ranks", "tp-options")
    return drawn.svg


def elastic() -> str:
    """Narrow enough for a phone: what two ranks take, and below it what three take."""
    wide, left, saved = 56, 66, 6
    drawn = Drawing(
        left + saved * wide + 8, 386,
        "Elastic: two ranks take m = 0 to 5 in three steps, and save. Three ranks load that state, and take "
        "m = 6 to 11 in two steps. The sequence is the same",
    )  # fmt: skip
    for part, (ranks, words) in enumerate(
        ((2, "two ranks, which then save"), (3, "three ranks, which load that"))
    ):
        top = 24 + 168 * part
        drawn.text(12, top, words, "strong")
        drawn.text(12, top + 30, "batch", "tp-flow")
        for rank in range(ranks):
            drawn.text(12, top + 74 + 38 * rank, f"rank {rank}", "said")
        for n in range(saved):
            m, rank, x = saved * part + n, n % ranks, left + n * wide
            y = top + 54 + 38 * rank
            drawn.box(x, top + 10, wide - 6, 30, f"cell c{rank}", 4)
            drawn.text(x + wide / 2 - 3, top + 30, f"m = {m}", "said", "middle")
            drawn.line((x + wide / 2 - 3, top + 40), (x + wide / 2 - 3, y))
            drawn.box(x, y, wide - 6, 30, f"cell c{rank}", 4)
            drawn.text(x + wide / 2 - 3, y + 20, f"step {n // ranks}", "said", "middle")
    drawn.line((12, 172), (left + saved * wide - 6, 172), kind="line")
    return drawn.svg
