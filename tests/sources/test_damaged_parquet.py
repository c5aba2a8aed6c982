"""Parquet files that are encrypted or damaged end in an error that names them, never the process."""

from __future__ import annotations

import base64
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

import trainpipes as tp
from interpreters import python
from trainpipes.errors import UnreadableError

KEYS = {"of the footer": "0123456789012345", "of a column": "1234567890123450"}


class Vault(pe.KmsClient):
    """Keeps the keys, and wraps others by writing them beside."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def wrap_key(self, key: bytes, name: str) -> bytes:
        return base64.b64encode(KEYS[name].encode() + key)

    def unwrap_key(self, wrapped: bytes, name: str) -> bytes:
        return base64.b64decode(wrapped)[len(KEYS[name]) :]


def encrypted(path: Path, plaintext_footer: bool) -> Path:
    """A file of which the column "secret" is encrypted."""
    config = pe.EncryptionConfiguration(
        footer_key="of the footer",
        column_keys={"of a column": ["secret"]},
        plaintext_footer=plaintext_footer,
    )
    factory = pe.CryptoFactory(Vault)
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), config)
    rows = pa.table({"id": list(range(50)), "secret": [f"s{n}" for n in range(50)]})
    with pq.ParquetWriter(path, rows.schema, encryption_properties=properties) as writer:
        writer.write_table(rows)
    return path


def in_a_process(code: str, *arguments: object) -> str:
    """What Python code prints, in a process of its own, which must not die."""
    command = [*python(), "-c", textwrap.dedent(code), *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


#: Reads the first argument, once with each of the others as columns.
READ = """
    import sys, trainpipes as tp
    for names in sys.argv[2:] or [""]:
        columns = names.split(",") if names else None
        try:
            print(len(list(tp.list_files(sys.argv[1]).read_parquet(columns=columns, index=False))))
        except tp.errors.UnreadableError as error:
            print(error.path, " ".join(str(error).split()))
"""


def test_encrypted_columns_are_refused_by_name_and_others_can_be_read(tmp_path: Path) -> None:
    whole = encrypted(tmp_path / "whole.parquet", plaintext_footer=False)
    part = encrypted(tmp_path / "part.parquet", plaintext_footer=True)
    for said in in_a_process(READ, whole, "", "id").splitlines():
        assert said.startswith(f"{whole} ")
        assert f"{whole}: encrypted, which is not supported" in said
    *refused, read = in_a_process(READ, part, "", "secret", "id,secret", "id").splitlines()
    assert read == "50"
    for said in refused:
        assert said.startswith(f"{part} ")
        assert "its column 'secret' is encrypted, which is not supported" in said


def test_an_encrypted_file_is_refused_wherever_it_stands_among_others(tmp_path: Path) -> None:
    for number in range(130):  # sizes are told from some of so many
        pq.write_table(
            pa.table({"id": [number], "secret": ["no"]}), tmp_path / f"{number:03}.parquet"
        )
    path = encrypted(tmp_path / "077.parquet", True)
    said = in_a_process(READ, tmp_path)
    assert "1 of 130 files" in said
    assert said.startswith(f"{path} ")


def test_an_encrypted_column_whose_footer_is_kept_is_refused_where_it_is_read(
    tmp_path: Path,
) -> None:
    path, kept = encrypted(tmp_path / "rows.parquet", True), tmp_path / "footers.arrow"
    code = """
        import sys, time, trainpipes as tp
        files = tp.list_files(sys.argv[1])
        time.sleep(0.05)
        assert len(list(files.read_parquet(columns=["id"], index=sys.argv[2]))) == 50
        try:
            list(files.read_parquet(index=sys.argv[2]))
        except tp.errors.UnreadableError as error:
            print(error)
    """
    said = in_a_process(code, path, kept)
    assert str(path) in said
    assert "encrypted" in said


def damaged(path: Path, old: bytes, new: bytes) -> Path:
    """The file with some bytes of its footer replaced, at the first place where they stand."""
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    place = content.index(old, start)
    path.write_bytes(content[:place] + new + content[place + len(old) :])
    return path


def test_a_footer_that_contradicts_its_schema_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), path)
    whole = path.read_bytes()
    # Optional becomes required: its levels are not those that were counted.
    damaged(path, b"\x25\x02\x18\x04text", b"\x25\x00\x18\x04text")
    said = in_a_process(READ, path)
    assert f"{path}, row group 0, row 0: the rows here cannot be read" in said
    # A row group's column says that it holds int64, and its pages hold text, as the schema says: statistics
    # serve an estimate only.
    path.write_bytes(whole)
    damaged(path, b"\x1c\x15\x0c\x19", b"\x1c\x15\x04\x19")
    assert in_a_process(READ, path) == "2\n"


def test_row_groups_must_have_the_rows_that_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": pa.array([7] * 100, pa.int8())}), path, store_schema=False)
    content = path.read_bytes()
    place = content.rindex(b"\x16\xc8\x01")  # 100, of the row group
    path.write_bytes(content[:place] + b"\x16\xca\x01" + content[place + 3 :])
    said = "damaged footer: 100 rows, and 101 in its row groups"
    with pytest.raises(UnreadableError, match=said):
        tp.list_files(path).read_parquet(index=False).explain()


def test_the_name_of_a_column_that_is_not_utf8_is_an_error_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": [1]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"text", b"t\xffxt"))
    with pytest.raises(UnreadableError, match="the name of a column is not UTF-8") as caught:
        list(tp.list_files(path).read_parquet(index=False))
    assert caught.value.path == str(path)
