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
LEFT, CELL = 150, 16


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
    drawn = Drawing(
        LEFT + ROWS * CELL + 40, 520,
        "An epoch of 48 rows: row groups of two files are put in another order, cut into two spans of two "
        "windows each, mixed within the windows, and cut into batches that the spans give in turn",
    )  # fmt: skip
    made = batches()
    spans = [[row for batch in made[span::SHARDS] for row in batch] for span in range(SHARDS)]
    windows = [[rows[at : at + WINDOW] for at in range(0, len(rows), WINDOW)] for rows in spans]
    orders = [group_order(each) for each in windows]

    def cells(y: float, rows: list[int]) -> None:
        for n, row in enumerate(rows):
            x = LEFT + n * CELL
            drawn.box(x, y, CELL, 26, f"cell c{row // GROUP_ROWS}")
            drawn.text(x + CELL / 2, y + 17, row, "small", "middle")

    def frames(y: float, h: float, rows: int, names: list[str], kind: str = "line") -> None:
        """Frames of so many rows each, with a name above each of them."""
        for n, name in enumerate(names):
            x = LEFT + n * rows * CELL
            drawn.box(x, y, rows * CELL, h, kind)
            drawn.text(x + 4, y - 5, name, "tp-flow")

    def label(y: float, *lines: str) -> None:
        for n, line in enumerate(lines):
            drawn.text(12, y + 17 * n, line, "strong" if not n else "tp-flow")

    label(50, "files, row groups", "color: row group")
    cells(36, list(range(ROWS)))
    frames(32, 34, ROWS // FILES, [f"file {n}" for n in range(FILES)])
    label(130, "spans", "row groups moved")
    moved = [GROUP_ROWS * group + n for order in orders for group in order for n in range(8)]
    cells(116, moved)
    frames(112, 34, ROWS // SHARDS, [f"span {n}" for n in range(SHARDS)])
    label(210, "windows", "rows mixed in each")
    cells(196, [row for rows in spans for row in rows])
    names = [f"span {s}, window {w}" for s in range(SHARDS) for w in range(len(windows[s]))]
    frames(192, 34, WINDOW, names)
    label(290, "batches", f"of {BATCH} rows")
    cells(276, [row for rows in spans for row in rows])
    count = len(made)
    of_spans = [m for span in range(SHARDS) for m in range(span, count, SHARDS)]
    frames(272, 34, BATCH, [f"m = {m}" for m in of_spans])
    label(370, "the sequence", "spans take turns")
    for m in range(count):
        x = LEFT + m * BATCH * CELL
        drawn.box(x + 3, 352, BATCH * CELL - 6, 26, "tp-box", 4)
        drawn.text(x + BATCH * CELL / 2, 370, f"m = {m}", "said", "middle")
        for n, words in enumerate((f"shard {m % SHARDS}", f"rank {m % RANKS}")):
            drawn.text(x + BATCH * CELL / 2, 394 + 17 * n, words, "tp-flow", "middle")
    label(450, "steps", "one number a rank")
    frames(436, 22, RANKS * BATCH, [""] * (count // RANKS), "faint")
    for n in range(count // RANKS):
        drawn.text(LEFT + (n + 0.5) * RANKS * BATCH * CELL, 452, f"step {n}", "said", "middle")
    drawn.text(
        LEFT, 492, "sharding_filter(2).shuffle(12, seed=0).batch(4), two ranks", "tp-options"
    )
    return drawn.svg


def elastic() -> str:
    drawn = Drawing(
        932, 250,
        "Elastic: two ranks take m = 0 to 5 in three steps, and save. Three ranks load that state, and take "
        "m = 6 to 11 in two steps. The sequence is the same",
    )  # fmt: skip
    wide, top = 62, 70
    drawn.text(20, top - 14, "the one sequence", "strong")
    saved = 6
    for m in range(12):
        x = 162 + m * wide + 12 * (m >= saved)
        before = m < saved
        rank, ranks = (m % 2, 2) if before else (m % 3, 3)
        drawn.box(x, top - 34, wide - 6, 30, f"cell c{rank}", 4)
        drawn.text(x + wide / 2 - 3, top - 14, f"m = {m}", "said", "middle")
        y = top + 14 + 40 * rank
        drawn.line((x + wide / 2 - 3, top - 4), (x + wide / 2 - 3, y))
        drawn.box(x, y, wide - 6, 30, f"cell c{rank}", 4)
        drawn.text(
            x + wide / 2 - 3,
            y + 20,
            f"step {(m - saved * (not before)) // ranks}",
            "said",
            "middle",
        )
    for rank in range(3):
        drawn.text(20, top + 34 + 40 * rank, f"rank {rank}", "strong")
    x = 162 + saved * wide + 3
    drawn.line((x, 26), (x, top + 140), kind="line")
    drawn.text(x - 8, top + 158, "two ranks, then saved", "tp-flow", "end")
    drawn.text(x + 8, top + 158, "loaded by three ranks", "tp-flow")
    return drawn.svg
