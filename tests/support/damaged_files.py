"""Files, damaged at random: what a bad disk, a stranger or a killed process may leave. What makes some."""

from __future__ import annotations

import io
import random
import tarfile

import pyarrow as pa

#: What is put into a file in one go: what formats of text are made of, and what some of them trip over.
TOKENS = (
    *(b'"', b"'", b"\n", b"\r", b"\r\n", b",", b"\t", b":", b"{", b"}", b"[", b"]", b"\\", b"\0"),
    *(b"\xef\xbb\xbf", b"\xc3", b"-", b".", b"0", b"9" * 20, b"1e400", b"null", b"NaN", b'{"id": 1}\n'),
    *(b"[" * 100, b"[" * 700 + b"]" * 700, b'{"a":' * 20_000, b"[" * 20_000 + b"]" * 20_000),
)  # fmt: skip


def arrow(stream: bool = False, columns: int = 2, table: pa.Table | None = None) -> bytes:
    """200 rows in two record batches, or a table."""
    table = table or pa.table({f"c{n}": range(200) for n in range(columns)})
    sink = io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return sink.getvalue()


def tar(*members: tuple[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return sink.getvalue()


def footer_of(content: bytes) -> range:
    """Where the footer of an Arrow file lies."""
    length = int.from_bytes(content[-10:-6], "little")
    return range(len(content) - 10 - length, len(content) - 10)


def damaged(content: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """Bytes of a file after something has happened to them.

    Args:
        content: the file's.
        others: those of other files, which may come in its place.
        draw: what is drawn with.
    """
    how = draw.choice(
        (
            *("bits", "bits", "bits", "bits", "flip", "flip", "cut", "cut", "head", "longer"),
            *("zeros", "other", "mixed", "token", "token", "twice"),
        )
    )
    place = draw.randrange(len(content) + 1)
    changed = bytearray(content)
    if how == "flip":
        for _ in range(draw.choice((1, 1, 2, 8))):
            changed[draw.randrange(len(content))] ^= draw.randrange(1, 256)
    elif how == "bits":
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif how == "cut":
        changed = changed[:place]
    elif how == "head":
        changed = changed[place:]
    elif how == "longer":
        changed[place:place] = draw.randbytes(draw.randrange(1, 100))
    elif how == "zeros":
        length = draw.randrange(1, 600)
        changed[place : place + length] = bytes(length)
    elif how == "token":
        changed[place : place + draw.choice((0, 0, 1))] = draw.choice(TOKENS)
    elif how == "twice":
        changed[place:place] = content[draw.randrange(len(content) + 1) :][: draw.randrange(1, 400)]
    elif how == "other":
        return draw.choice([b"", b"\0" * 40, b"ARROW1\0\0", b"PAR1" * 20, *others])
    else:
        other = draw.choice([content, *others])
        changed = changed[:place] + other[draw.randrange(len(other) + 1) :]
    return bytes(changed)
