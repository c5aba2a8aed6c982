"""Samples of tar archives: grouped by key, found by an index, and nothing of them lost without a word."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

import trainpipes as tp
from every_format import opened
from trainpipes.testing import digest


def tar(path: Path, members: list[tuple[str, bytes]], **options: Any) -> Path:
    mode = "w:gz" if path.suffix == ".gz" else "w"
    with tarfile.open(path, mode, **options) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def pairs(count: int, first: int = 0) -> list[tuple[str, bytes]]:
    return [
        (f"{n:05}.{kind}", f"{kind} {n}".encode())
        for n in range(first, first + count)
        for kind in ("jpg", "cls")
    ]


def test_members_that_follow_each_other_under_one_name_are_a_sample(tmp_path):
    members = [
        ("a/0001.jpg", b"J"),
        ("a/0001.seg.PNG", b"S"),
        ("b/0001.jpg", b"K"),
        ("b/0001.seg.png", b""),
    ]
    assert list(tp.read_webdataset(tar(tmp_path / "x.tar", members))) == [
        {"__key__": "a/0001", "jpg": b"J", "seg.png": b"S"},
        {"__key__": "b/0001", "jpg": b"K", "seg.png": b""},
    ]


def test_what_is_no_sample_is_passed_over(tmp_path):
    path = tmp_path / "x.tar"
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.txt").symlink_to("nowhere")
    with tarfile.open(path, "w") as archive:
        archive.add(tmp_path / "folder", "folder")
        archive.add(tmp_path / "link.txt", "link.txt")
        for name in ("README", ".hidden.txt", "__about__.json", "dir/.DS_Store", "0.txt"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
    assert list(tp.read_webdataset(path)) == [{"__key__": "0", "txt": b"abc"}]


def test_a_member_called_as_the_column_of_names_is_refused(tmp_path):
    path = tar(tmp_path / "x.tar", [("0.txt", b"a"), ("0.__key__", b"0")])
    with pytest.raises(tp.UnreadableError, match=r"'0\.__key__' has the extension '__key__'"):
        list(tp.read_webdataset(path))


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_names_of_any_length_and_script_are_read(format, tmp_path):
    names = ["n" * 99, "ä" * 40, "m" * 150, "d" * 120 + "/" + "f" * 120, "ü" * 130, "short"]
    path = tar(tmp_path / "x.tar", [(f"{name}.txt", b"x") for name in names], format=format)
    assert [row["__key__"] for row in tp.read_webdataset(path)] == names


def test_columns_are_chosen_and_text_is_text(tmp_path):
    members = [("0.txt", "Grüße".encode()), ("0.cls", b"1"), ("1.txt", b"two"), ("1.cls", b"2")]
    path = tar(tmp_path / "x.tar", members)
    assert list(tp.read_webdataset(path, ["txt"], text="txt")) == [{"txt": "Grüße"}, {"txt": "two"}]
    assert list(tp.read_webdataset(path, ["cls", "__key__"]))[1] == {"cls": b"2", "__key__": "1"}
    assert list(tp.read_webdataset(path, ["cls"], text=["txt", "__key__"]))[1] == {"cls": b"2"}
    for options in ({"columns": ["text"]}, {"text": ["text"]}, {"text": "text", "missing": "null"}):
        with pytest.raises(
            tp.SchemaError, match=r"no sample has a member 'text' \(did you mean 'txt'\?\)"
        ):
            list(tp.read_webdataset(path, **options))


def test_a_sample_without_its_pair_is_named_or_has_a_null(tmp_path):
    tar(tmp_path / "a.tar", pairs(5))
    tar(tmp_path / "b.tar", [*pairs(3, 5), ("00008.jpg", b"alone"), ("00009.jpg", b"too")])
    with pytest.raises(
        tp.SchemaError, match=r"sample '00008' of .*b\.tar has no member 'cls'"
    ) as caught:
        list(tp.read_webdataset(tmp_path))
    assert caught.value.row == 3
    assert "1 more" in str(caught.value)
    rows = list(tp.read_webdataset(tmp_path, missing="null"))
    assert [row["cls"] for row in rows[7:]] == [b"cls 7", None, None]
    assert len(list(tp.read_webdataset(tmp_path, ["jpg"]))) == 10
    tar(tmp_path / "b.tar", [("00005.jpg", b"x"), ("00005.cls", b"1"), ("00005.json", b"{}")])
    with pytest.raises(tp.SchemaError, match="alone has a member 'json'"):
        list(tp.read_webdataset(tmp_path))
    assert next(iter(tp.read_webdataset(tmp_path, missing="null")))["json"] is None


def test_samples_of_compressed_archives_cannot_be_chosen_by_number(tmp_path):
    tar(tmp_path / "a.tar", pairs(20))
    tar(tmp_path / "c.tar.gz", pairs(3, 31))
    with pytest.raises(tp.ConfigError, match=r"c\.tar\.gz is not.*within a buffer"):
        list(tp.read_webdataset(tmp_path).shuffle(scope="global"))


def wds2idx(path: Path) -> str:
    """An index beside an archive, as DALI's tool of that name writes it."""
    samples: dict[str, list[str]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            key, _, kind = member.name.partition(".")
            place = f"{kind} {member.offset_data} {member.size} {member.name}"
            samples.setdefault(key, []).append(place)
    lines = [f"v1.2 {len(samples)}", *(" ".join(each) for each in samples.values())]
    return "\n".join(lines) + "\n"


def test_an_index_beside_an_archive_on_a_server_is_read_in_its_place(tmp_path, counted):
    members = [(f"{n:05}.{kind}", bytes([n]) * 40_000) for n in range(50) for kind in ("a", "b")]
    path = tar(tmp_path / "x.tar", members)
    counted.pipe_file("/d/x.tar", path.read_bytes())
    expected = [digest(row) for row in tp.read_webdataset("counted://d/x.tar", index=False)]
    counted.pipe_file("/d/x.idx", wds2idx(path).encode())
    counted.fetched = 0
    rows = tp.read_webdataset("counted://d/x.tar", index=False)
    assert len(rows) == 50
    assert counted.fetched < 100_000
    assert [digest(row) for row in rows] == expected


STALE = {
    "not all members": lambda text: "v1.2 29\n" + text.split("\n", 1)[1].rsplit("\n", 2)[0] + "\n",
    "other places": lambda text: text.replace("jpg 512 ", "jpg 1024 "),
    "another version": lambda text: text.replace("v1.2", "v1.1"),
    "no index": lambda text: "\0" * 50,
    "nothing": lambda text: "",
    "members beyond the end": lambda text: text.replace("cls 1536 5", "cls 1536000 5"),
    "cut off": lambda text: text[:-30],
}


@pytest.mark.parametrize("how", STALE)
def test_an_index_beside_an_archive_that_does_not_fit_it_is_not_used(tmp_path, how):
    path = tar(tmp_path / "x.tar", pairs(30))
    expected = [digest(row) for row in tp.read_webdataset(path)]
    text = wds2idx(path)
    assert STALE[how](text) != text
    (tmp_path / "x.idx").write_text(STALE[how](text))
    assert [digest(row) for row in tp.read_webdataset(path)] == expected


def test_a_member_of_which_an_index_beside_is_wrong_is_found_when_it_is_read(tmp_path):
    path = tar(tmp_path / "x.tar", pairs(30))
    lines = wds2idx(path).splitlines()
    assert lines[5].startswith("jpg 8704 5 ")
    lines[5] = lines[5].replace("jpg 8704 5", "jpg 8704 6")
    (tmp_path / "x.idx").write_text("\n".join(lines))
    with pytest.raises(tp.DataChangedError, match=r"row 4: .*or the \.idx beside it"):
        list(tp.read_webdataset(path, block_rows=1))


def test_members_of_2_gib_and_more_come_in_a_column_of_a_large_type(tmp_path, monkeypatch):
    members = [("0.bin", b"a" * 11), ("0.txt", b"b"), ("1.bin", b""), ("1.txt", b"c")]
    path = tar(tmp_path / "x.tar", members)
    rows = list(tp.read_webdataset(path, text="txt"))
    monkeypatch.setattr("trainpipes.sources.read_webdataset.MOST_MEMBER", 10)
    pipe = tp.read_webdataset(path, text="txt")
    kinds = [str(field.type) for field in opened(pipe).schema]
    assert kinds == ["string", "large_binary", "string"]
    assert list(pipe) == rows


def test_what_is_decompressed_again_is_reported(tmp_path):
    tar(
        tmp_path / "x.tar.gz",
        [(f"{n:05}.bin", random.Random(n).randbytes(2000)) for n in range(300)],
    )
    pipe = tp.read_webdataset(tmp_path).batch(10)
    state = pipe.state_at(25)
    later = tp.read_webdataset(tmp_path).batch(10)
    later.load_state_dict(state)
    assert len(list(later)) == 5
    assert "read again" in str(later.explain())
    assert gzip.decompress((tmp_path / "x.tar.gz").read_bytes())


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
@pytest.mark.parametrize("kind", ["v7", "size by PAX"])
def test_archives_of_old_programs_and_of_pax_are_read(kind: str, name: str, tmp_path: Path) -> None:
    content = io.BytesIO()
    form = tarfile.USTAR_FORMAT if kind == "v7" else tarfile.PAX_FORMAT
    with tarfile.open(fileobj=content, mode="w", format=form) as archive:
        for n in range(3):
            member = tarfile.TarInfo(f"{n}.txt")
            member.size = 5
            if kind != "v7":
                member.pax_headers = {"size": "5"}
            archive.addfile(member, io.BytesIO(b"text" + b"%d" % n))
    data = bytearray(content.getvalue())
    for start in range(0, len(data), 512):
        header = data[start : start + 512]
        if header[257:262] != b"ustar" or header[156:157] == b"x":
            continue
        if kind == "v7":
            header[257:] = bytes(255)
        else:
            header[124:136] = b"0" * 11 + b"\0"
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        data[start : start + 512] = header
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    rows = tp.read_webdataset(tmp_path / name)
    for _ in range(2):  # and with its index
        assert [row["txt"] for row in rows] == [b"text0", b"text1", b"text2"]
    if name == "a.tar":
        assert {row["txt"] for row in rows.shuffle(scope="global")} == {
            b"text0",
            b"text1",
            b"text2",
        }
