"""An inspection as text for a terminal of any width."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence

from trainpipes._internal.amount import amount
from trainpipes.look.inspection.cells import harmless, width_of
from trainpipes.look.inspection.inspection import Column, Inspection, Lengths
from trainpipes.look.inspection.row_findings import percent

__all__ = ["as_text", "bar", "head_lines", "length_lines", "near"]

#: Columns, and files that cannot be read, that are shown; ``to_dict`` has them all.
MOST_COLUMNS, MOST_BAD = 40, 20
#: Characters of a line at least and at most, and from which on a table has more than names and types.
LEAST_WIDTH, MOST_WIDTH, WIDE = 24, 140, 72
#: Blocks of one to eight eighths.
EIGHTHS = " ▏▎▍▌▋▊▉"


def as_text(found: Inspection, width: int) -> str:
    """All of it, in lines of about ``width`` characters; paths and commands are not broken."""
    width = max(LEAST_WIDTH, min(MOST_WIDTH, width))
    parts: list[Iterator[str]] = [
        _wrapped(head_lines(found), width),
        _columns(found.columns, width),
        _shown(found, width),
    ]
    parts += [_lengths(found, lengths, width) for lengths in found.lengths]
    parts.append(_findings(found, width))
    return "\n\n".join(text for part in parts if (text := "\n".join(part)))


def head_lines(found: Inspection) -> Iterator[tuple[str, str]]:
    """What there is, as label and text."""
    yield "files", f"{found.files:,} of {amount(found.bytes)}, for {found.reader}()"
    about = "" if found.rows_counted else "about "
    rows = "not known" if found.rows is None else f"{about}{found.rows:,}"
    if found.memory_bytes is not None:
        rows += f", about {amount(found.memory_bytes)} in memory"
    yield "rows", rows
    if found.groups is not None:
        each, size = found.groups.rows, found.groups.bytes
        yield (
            found.groups.called,
            f"{found.groups.count:,} of {each.least:,} / {each.median:,} / {each.most:,} rows, "
            f"{amount(size.least)} / {amount(size.median)} / {amount(size.most)} (least / median / most)",
        )
    total = sum(found.codecs.values())
    if total and set(found.codecs) != {"none"}:
        said = ", ".join(f"{name} {percent(size / total)}" for name, size in found.codecs.items())
        yield "compressed", said
    if found.sampled_rows and found.sampled_rows != found.rows:
        only = ", of large row groups only the beginning" if found.beginnings else ""
        yield "looked at", f"a sample of {found.sampled_rows:,} rows{only}"


def length_lines(lengths: Lengths) -> Iterator[str]:
    """What is told of lengths besides the histogram."""
    marks = ", ".join(f"{p} % up to {value:,}" for p, value in lengths.percentiles.items())
    yield (
        f"{marks}, longest {lengths.most:,}; {lengths.mean:,.1f} on average, {lengths.total:,} "
        f"{lengths.unit} in all"
    )
    if lengths.longer:
        said = ", ".join(f"{int(n):,}: {percent(share)}" for n, share in lengths.longer.items())
        yield f"rows that would be cut at {said}"
    if lengths.padding is not None:
        yield f"padding in batches of 8 in random order: {percent(lengths.padding)}"
    if lengths.packed_padding is not None:
        yield f"packed to {lengths.packed_length:,}: {percent(lengths.packed_padding)} padding"


def near(text: str) -> str:
    """A text in which paths of files below the working folder are written without that folder."""
    here = os.getcwd()
    return text.replace(f"{here}/", "") if here.strip("/") else text


def bar(share: float, width: int) -> str:
    """A bar of block characters, ``width`` characters for 1.

    >>> bar(0.5, 5)
    '██▌'
    """
    eighths = round(max(0.0, share) * width * 8)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()) or ("▏" if share else "")


def _wrapped(lines: Iterator[tuple[str, str]], width: int) -> Iterator[str]:
    told = list(lines)
    label = max(len(name) for name, _ in told) + 2
    for name, text in told:
        yield from textwrap.wrap(
            harmless(text), width, initial_indent=f"{name:<{label}}", subsequent_indent=" " * label,
            break_on_hyphens=False,
        )  # fmt: skip


def _columns(columns: Sequence[Column], width: int) -> Iterator[str]:
    if not columns:
        return
    heads = ["column", "type", "nulls"]
    wide = width >= WIDE
    bounds = any(c.least is not None for c in columns)
    if wide:
        heads += ["bytes"] + ["least", "most"] * bounds
    rows = [heads]
    for column in columns[:MOST_COLUMNS]:
        nulls = "?" if column.nulls is None else percent(column.nulls) if column.nulls else "0"
        row = [harmless(column.name), harmless(column.type), nulls]
        if wide:
            row.append("" if column.bytes is None else amount(column.bytes))
            row += [column.least or "", column.most or ""] * bounds
        rows.append(row)
    most = [width // 3, width // 3] + [14, 12] + [max(8, width // 8)] * 2
    widths = [min(most[n], max(width_of(row[n]) for row in rows)) for n in range(len(heads))]
    for row in rows:
        yield "  ".join(fitted(text, w) for text, w in zip(row, widths, strict=True)).rstrip()
    if len(columns) > MOST_COLUMNS:
        yield f"… {len(columns) - MOST_COLUMNS:,} more columns"


def fitted(text: str, width: int) -> str:
    """A text in just so many columns of a terminal: cut, or filled up with spaces."""
    if width_of(text) > width:
        while text and width_of(text) > width - 1:
            text = text[:-1]
        text += "…"
    return text + " " * (width - width_of(text))


def _shown(found: Inspection, width: int) -> Iterator[str]:
    for number, row in enumerate(found.shown):
        yield f"row {number + 1} of {len(found.shown)} shown"
        for place, (name, value) in enumerate(row.items()):
            if place == MOST_COLUMNS:
                yield f"  … {len(row) - MOST_COLUMNS:,} more"
                break
            yield from textwrap.wrap(
                f"{fitted(harmless(name), min(width // 3, width_of(harmless(name))))}: {value}", width,
                initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False,
            )  # fmt: skip


def _lengths(found: Inspection, lengths: Lengths, width: int) -> Iterator[str]:
    names = " + ".join(map(repr, map(harmless, lengths.columns)))
    whole = lengths.rows == lengths.rows_of_files
    how = "all rows" if whole else f"a sample of {lengths.rows:,} rows"
    partial = lengths.rows_of_files != found.rows
    how += f" of the files that have {'it' if len(lengths.columns) == 1 else 'them'}" * partial
    yield from textwrap.wrap(f"{lengths.unit} of {names} in {how}", width)
    edges, total = lengths.edges, sum(lengths.counts)
    labels = []
    for n in range(len(lengths.counts)):
        last = n == len(lengths.counts) - 1
        labels.append((f"{edges[n]:,}", f"{edges[n + 1] if last else edges[n + 1] - 1:,}"))
    left, right = (max(len(label[k]) for label in labels) for k in (0, 1))
    most = max(lengths.counts)
    room = max(4, min(60, width - left - right - 14))
    for (low, high), count in zip(labels, lengths.counts, strict=True):
        drawn = bar(count / most, room)
        yield f"{low:>{left}} - {high:<{right}} {drawn:<{room}} {percent(count / total) if count else '0'}"
    for line in length_lines(lengths):
        yield from textwrap.wrap(line, width)


def _findings(found: Inspection, width: int) -> Iterator[str]:
    for bad in found.unreadable[:MOST_BAD]:
        yield from textwrap.wrap(
            harmless(near(f"cannot be read: {bad.path}: {bad.reason}")), width, subsequent_indent="  ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    if len(found.unreadable) > MOST_BAD:
        yield f"cannot be read: {len(found.unreadable) - MOST_BAD:,} more files"
    for one in found.findings:
        yield from textwrap.wrap(
            harmless(near(f"{one.level}: {one.text}")), width, subsequent_indent="  ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        if one.cure:
            yield f"  -> {harmless(near(one.cure))}"
