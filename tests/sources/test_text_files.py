"""JSON, CSV and text files: what their rows are, and what is said of those that are none."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.json as pj
import pytest

import trainpipes as tp
from every_format import opened
from trainpipes.sources import text_pieces

GOOD = '{"a":1,"b":"x"}\n'
CELLS = "id,t\n1,x\n2,y\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], str]:
    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pieces, "PIECE_BYTES", 100)


def rows(pipe: tp.Pipeline) -> list[Any]:
    return list(pipe)


# JSON


def test_conversations_and_other_nested_json_come_as_structs_and_lists(write):
    given = [
        {"id": n, "messages": [{"role": "user", "content": f"{m}é"} for m in range(n % 3)]}
        for n in range(1, 50)
    ]
    path = write("chats.jsonl", "".join(json.dumps(row) + "\n" for row in given))
    assert rows(tp.read_json(path)) == given
    assert rows(tp.read_json(path, ["messages"])) == [{"messages": r["messages"]} for r in given]


def test_fields_of_objects_can_be_chosen(write):
    path = write("a.jsonl", '{"m": {"x": 1, "y": "t"}, "n": 2}\n{"m": {"x": 3}}\n')
    assert rows(tp.read_json(path, ["m.x"])) == [{"m": {"x": 1}}, {"m": {"x": 3}}]
    with pytest.raises(tp.SchemaError, match=r"no column 'm\.z'"):
        rows(tp.read_json(path, ["m.z"]))


def test_rows_without_a_field_are_refused(write):
    path = write("a.jsonl", "{}\n{}\n")
    with pytest.raises(tp.SchemaError, match=r"a\.jsonl has rows without a single field.*schema="):
        rows(tp.read_json(path))
    assert rows(tp.read_json(path, schema=pa.schema({"x": pa.int64()}))) == [{"x": None}] * 2


def test_lines_and_an_array_are_read_alike(write):
    given = [{"x": n, "t": '[{,}]\\"' * (n % 3)} for n in range(100)]
    lines = write("a.jsonl", "\n".join(map(json.dumps, given)))
    array = write("a.json", "\ufeff" + json.dumps(given, indent=2))
    assert rows(tp.read_json(lines)) == rows(tp.read_json(array)) == given


def test_what_a_row_lacks_is_null_and_blank_lines_are_no_rows(write):
    path = write("a.jsonl", '\n{"a": 1}\r\n \t\n{"b": "x"}\n\n')
    assert rows(tp.read_json(path)) == [{"a": 1, "b": None}, {"a": None, "b": "x"}]


def test_texts_that_look_like_times_stay_texts(write):
    path = write("a.jsonl", '{"day": "2020-01-01", "in": [{"at": "2020-01-01 00:00:00"}]}\n')
    assert rows(tp.read_json(path)) == [
        {"day": "2020-01-01", "in": [{"at": "2020-01-01 00:00:00"}]}
    ]
    times = pa.schema([("day", pa.timestamp("s"))])
    assert str(rows(tp.read_json(path, schema=times))[0]["day"]) == "2020-01-01 00:00:00"


def test_a_schema_says_columns_and_types(write):
    path = write("a.jsonl", '{"a": 1, "b": "x", "c": [1, 2]}\n')
    schema = pa.schema(
        [
            ("c", pa.list_(pa.int8(), 2)),
            ("b", pa.large_string()),
            ("a", pa.float16()),
            ("none", pa.int64()),
        ]
    )
    pipe = tp.read_json(path, schema=schema)
    assert rows(pipe) == [{"c": [1, 2], "b": "x", "a": 1.0, "none": None}]
    assert opened(pipe).schema == schema
    with pytest.raises(tp.ConfigError, match="column 'm' as map<string, int8>"):
        rows(tp.read_json(path, schema=pa.schema([("m", pa.map_(pa.string(), pa.int8()))])))


def later(line: str) -> str:
    """A file whose first 100 bytes do not show a line that comes later."""
    return GOOD * 50 + line + "\n" + GOOD * 5


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"a":"z","b":"x"}', "column 'a' is string here, and should be int64"),
        ('{"a":1.5,"b":"x"}', "column 'a' is double here, and should be int64"),
        ('{"a":1,"b":"x","c":2}', "column 'c' is new here"),
        ('{"a":1,"b":["x"]}', "column 'b' is list<item: string> here, and should be string"),
    ],
)
def test_types_of_the_first_blocks_are_held_to(write, small_pieces, line, said):
    path = write("a.jsonl", later(line))
    with pytest.raises(tp.SchemaError) as caught:
        rows(tp.read_json(path))
    assert f"{path}, line 51: {said}" in str(caught.value)
    apart = said.endswith(("here, and should be string", "is string here, and should be int64"))
    assert ("schema= without it" if apart else 'infer="all"') in str(caught.value)
    assert (caught.value.path, caught.value.row) == (path, 50)


def test_looking_at_all_rows_makes_types_wider(write, small_pieces):
    path = write("a.jsonl", later('{"a":1.5,"b":"x","c":{"d":null}}') + '{"c":{"d":2,"e":[3]}}\n')
    found = rows(tp.read_json(path, infer="all"))
    assert found[0] == {"a": 1.0, "b": "x", "c": None}
    assert found[50] == {"a": 1.5, "b": "x", "c": {"d": None, "e": None}}
    assert found[-1] == {"a": None, "b": None, "c": {"d": 2, "e": [3]}}
    paths = [write("b.jsonl", GOOD), write("c.jsonl", '{"a":"z"}')]
    with pytest.raises(tp.SchemaError, match=r"column 'a' is int64 in .* and string in"):
        rows(tp.read_json(paths))


def test_chosen_columns_leave_out_new_fields(write, small_pieces):
    path = write("a.jsonl", later('{"a":1,"b":"x","c":2}'))
    assert len(rows(tp.read_json(path, ["b", "a"]))) == 56


@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize("other", ["2", '"two"', '{"c": 1}'])  # in a column that is not chosen
def test_a_new_field_within_a_chosen_column_is_named(write, small_pieces, other, array):
    good = ['{"m": [{"r": "x"}], "n": {"o": {"p": 1}}, "k": 2}'] * 50
    odd = good[0].replace("[", "[null, ").replace("}]", ', "w": 0}]').replace("p", "q")
    lines = [*good, good[0].replace("2", other), odd, *good]
    path = write("a.json", f"[{', '.join(lines)}]" if array else "\n".join(lines))

    def read(columns: list[str] | None, **more: Any) -> tp.Pipeline:
        return tp.read_json(path, columns, index=False, **more)

    with pytest.raises(tp.SchemaError, match=r"'m' is .* w: int64.* here, and.*infer=\"all\""):
        rows(read(["m"]))
    with pytest.raises(tp.SchemaError, match=r"'n' is .*<q: int64.* here, and should be"):
        rows(read(["n", "m.list.item.r"]))
    want = [{"m": [{"r": "x"}]}] * 51 + [{"m": [None, {"r": "x"}]}] + [{"m": [{"r": "x"}]}] * 50
    assert rows(read(["m.list.item.r"])) == want
    assert rows(read(None, schema=pa.schema([opened(read(["m"])).schema.field("m")]))) == want
    assert rows(read(["m"], on_error="skip")) == [{"m": [{"r": "x"}]}] * 101
    if other == "2":
        assert rows(read(["m"], infer="all"))[51]["m"][1] == {"r": "x", "w": 0}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"a":1,"b":', "Invalid value"),
        ('{"a":1,"b":"x"}{"a":2}', "the line has 2 rows"),
        ("[1, 2]", "changed from object to array"),
        ("oops", "Invalid value"),
        ('{"a":1,"a":2}', "specified twice"),
        ("\0\0\0", "document is empty"),
        ('{"a":1,"b":"x"},', """document is empty: '{"a":1,"b":"x"},'"""),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_broken_line_is_named(write, small_pieces, line, said, packed):
    content = ("\n" + later(line)).encode()
    path = write("a.jsonl", gzip.compress(content) if packed else content)
    with pytest.raises(tp.UnreadableError) as caught:
        rows(tp.read_json(path))
    assert f"{path}, line 52: " in str(caught.value)
    assert said in str(caught.value)
    assert "fix or remove the line" in str(caught.value)
    assert (caught.value.path, caught.value.row) == (path, 50)


def test_a_file_that_is_no_json_is_named_among_others(write):
    write("a.jsonl", GOOD)
    path = write("b.jsonl", "[1, 2]")
    with pytest.raises(tp.UnreadableError) as caught:
        len(tp.list_files(str(Path(path).parent)).read_json())
    assert f"1 of 2 files cannot be read as JSON:\n  {path}: " in str(caught.value)


# CSV


def test_quoted_cells_hold_line_ends_delimiters_and_quotes(write, small_pieces):
    given = [{"n": i, "t": f'a,\n"{i}"\r\n' * (i % 4) + "."} for i in range(200)]
    lines = [f'{row["n"]},"{str(row["t"]).replace(chr(34), chr(34) * 2)}"' for row in given]
    path = write("a.csv", "n,t\r\n" + "\r\n".join(lines))
    assert rows(tp.read_csv(path)) == given
    assert rows(tp.read_csv(path, ["t"])) == [{"t": row["t"]} for row in given]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_blank_lines_are_no_rows_wherever_a_piece_ends(write, small_pieces, end):
    lines = ["x", "", "1", "", "", *map(str, range(10, 60)), "", "2", ""]
    found = rows(tp.read_csv(write("a.csv", end.join(lines))))
    assert [row["x"] for row in found] == [1, *range(10, 60), 2]


def test_nothing_is_null_and_quoted_nothing_is_the_empty_text(write):
    path = write("a.csv", 'a,b,c\n,,1\n"","",\nx,NA,3\n')
    assert rows(tp.read_csv(path)) == [
        {"a": None, "b": None, "c": 1},
        {"a": "", "b": "", "c": None},
        {"a": "x", "b": "NA", "c": 3},
    ]
    nulls = tp.read_csv(path, null_values=["", "NA"])
    assert [row["b"] for row in nulls] == [None, "", None]


def test_other_delimiters_quotes_and_files_without_a_line_of_names(write):
    assert rows(tp.read_csv(write("a.csv", "a;b\n1;'x;y'\n"), delimiter=";", quote="'")) == [
        {"a": 1, "b": "x;y"}
    ]
    assert rows(tp.read_csv(write("a.tsv", 'a\tb\n1\t"x"\n'), quote=None)) == [{"a": 1, "b": '"x"'}]
    named = tp.read_csv(write("b.csv", "1,x\n2,y\n"), column_names=["i", "t"])
    assert rows(named) == [{"i": 1, "t": "x"}, {"i": 2, "t": "y"}]


def test_names_of_csv_columns_hold_what_only_python_takes_for_line_ends(write):
    odd = "a\u2028b,c\x0cd,e\x1cf,g\x85h,i\x0bj"
    assert rows(tp.read_csv(write("a.csv", f"{odd}\n1,2,3,4,5\n"))) == [
        dict(zip(odd.split(","), range(1, 6), strict=True))
    ]
    assert rows(tp.read_csv(write("b.csv", '"a\nb",c\r\n1,2\r\n'))) == [{"a\nb": 1, "c": 2}]


def test_the_index_without_a_name_that_pandas_writes_is_dropped_or_renamed(write):
    read = tp.read_csv(write("a.csv", ",x\n0,a\n1,b\n"))
    assert rows(read.drop_columns("")) == [{"x": "a"}, {"x": "b"}]
    assert rows(read.rename({"": "n"})) == [{"n": 0, "x": "a"}, {"n": 1, "x": "b"}]
    assert rows(read.select("")) == [{"": 0}, {"": 1}]
    assert rows(read.filter([["", ">", 0]])) == [{"": 1, "x": "b"}]
    with pytest.raises(tp.SchemaError, match=r"no column ''; there are .'n', 'x'"):
        rows(read.rename({"": "n"}).drop_columns(""))


def test_columns_of_csv_files_are_found_by_name(write):
    paths = [write("a.csv", "a,b\n1,x\n"), write("b.csv", "b,a\ny,2\n")]
    assert rows(tp.read_csv(paths)) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    other = write("c.csv", "a,c\n3,z\n")
    with pytest.raises(tp.SchemaError, match=r"has a column 'b', and .*c\.csv has not"):
        rows(tp.read_csv([*paths, other]))
    assert rows(tp.read_csv([*paths, other], ["a"])) == [{"a": 1}, {"a": 2}, {"a": 3}]
    with pytest.raises(tp.SchemaError, match=r"no column 'b' in .*c\.csv"):
        rows(tp.read_csv([*paths, other], ["b"]))


def test_csv_types_are_held_to_or_made_wider(write, small_pieces):
    path = write("a.csv", CELLS + "3,z\n" * 60 + "zz,w\n")
    with pytest.raises(tp.SchemaError, match=r"line 64: column 'id' is string here"):
        rows(tp.read_csv(path))
    assert rows(tp.read_csv(path, infer="all"))[-1] == {"id": "zz", "t": "w"}
    path = write("b.csv", CELLS + "3,z\n" * 60 + "0.5,w\n")
    assert rows(tp.read_csv(path, infer="all"))[-1] == {"id": 0.5, "t": "w"}
    schema = pa.schema([("id", pa.float32())])
    assert rows(tp.read_csv(path, schema=schema))[-1] == {"id": 0.5}


@pytest.mark.parametrize(
    ("line", "said"), [("3", "Expected 2 columns, got 1"), ("3,a,b", "Expected 2 columns, got 3")]
)
def test_a_record_of_other_cells_is_named(write, small_pieces, line, said):
    path = write("a.csv", "id,t\n" + '1,"x\ny"\n' * 50 + line + "\n4,z\n")
    with pytest.raises(tp.UnreadableError, match=rf"line 102: {said}"):
        rows(tp.read_csv(path))


@pytest.mark.parametrize("mark", [";", "|", "\t"])
def test_another_delimiter_is_told_of_where_there_is_one_column(mark, write, caplog):
    files = tp.list_files(write(f"{ord(mark)}.csv", f"a{mark}b\n1{mark}x\n2{mark}y\n"))
    assert list(files.read_csv()) == [{f"a{mark}b": f"1{mark}x"}, {f"a{mark}b": f"2{mark}y"}]
    assert [text.partition(": if ")[2] for text in caplog.messages] == [
        f"{mark!r} parts its cells, take delimiter={mark!r}"
    ]
    assert list(files.read_csv(delimiter=mark)) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    assert len(caplog.messages) == 1
    bad = tp.list_files(write(f"bad{ord(mark)}.csv", f"a{mark}b\n1,5{mark}x\n"))
    said = re.escape(f"(if {mark!r} parts them, take delimiter={mark!r})")
    with pytest.raises(tp.errors.UnreadableError, match=said):
        list(bad.read_csv())
    assert list(bad.read_csv(delimiter=mark)) == [{"a": "1,5", "b": "x"}]


def test_an_object_over_several_lines_is_read_as_the_message_says(write):
    path = Path(write("a.json", json.dumps({"id": 7, "tags": ["x"]}, indent=2)))
    with pytest.raises(tp.errors.UnreadableError, match=r"read_text\('\*.json', 'document'\)"):
        list(tp.read_json(path))
    rows = tp.read_text(f"{path.parent}/*.json", "document").map(
        lambda row: json.loads(row["text"])
    )
    assert list(rows) == [{"id": 7, "tags": ["x"]}]


def test_a_quote_without_its_end_and_names_given_twice_are_named(write):
    path = write("a.csv", CELLS + '3,"abc\n4,z\n')
    with pytest.raises(tp.UnreadableError, match="line 4: cut off: a quoted cell has no end"):
        rows(tp.read_csv(path))
    with pytest.raises(tp.UnreadableError, match="names a column 'a' twice"):
        rows(tp.read_csv(write("b.csv", "a,a\n1,2\n")))


# Text


def test_lines_paragraphs_and_documents(write):
    path = write("a.txt", "one\r\ntwo\n\n \n\nthree\n\nfour")
    assert [row["text"] for row in tp.read_text(path)] == [
        *("one", "two", "", " ", "", "three", "", "four")
    ]
    assert [row["p"] for row in tp.read_text(path, "paragraph", output_column="p")] == [
        *("one\ntwo", "three", "four")
    ]
    empty = write("b.txt", "")
    documents = tp.read_text([path, empty], "document")
    assert rows(documents) == [{"text": "one\r\ntwo\n\n \n\nthree\n\nfour"}, {"text": ""}]
    assert len(documents) == 2


# Encodings and compression


@pytest.mark.parametrize(
    ("read", "name", "content"),
    [
        (tp.read_json, "a.jsonl", '{"a":"é"}\n' * 30),
        (tp.read_csv, "a.csv", "a,b\n" + "é,1\n" * 30),
        (tp.read_text, "a.txt", "é\n" * 30),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_text_that_is_not_utf8_is_named_by_line_and_byte(
    write, small_pieces, read, name, content, packed
):
    lines = content.encode().splitlines(keepends=True)
    lines[20] = lines[20].decode().encode("latin-1")
    written = b"".join(lines)
    place = written.index(b"\xe9")
    path = write(name, gzip.compress(written) if packed else written)
    with pytest.raises(tp.UnreadableError) as caught:
        rows(read(path))
    assert f"{path}, line 21: byte {place:,}" in str(caught.value)
    assert "iconv" in str(caught.value)
    replaced = rows(read(path, errors="replace"))
    assert "\ufffd" in json.dumps(replaced, ensure_ascii=False)


def test_names_of_csv_columns_that_are_not_utf8_are_replaced_if_that_is_asked(write):
    path = write("a.csv", "größe,b\n1,ß\n".encode("latin-1"))
    names = "gr\ufffd\ufffde", "b"
    index = path.removesuffix(".csv") + ".arrow"
    for _ in range(2):
        pipe = tp.read_csv(path, errors="replace", index=index)
        assert rows(pipe) == [dict(zip(names, (1, "\ufffd"), strict=True))]
    with pytest.raises(tp.UnreadableError, match="byte 2 of its first line is not UTF-8"):
        rows(tp.read_csv(path, index=index))


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": lambda data: bytes(pa.Codec("zstd").compress(data, asbytes=True)),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.sample(5)
@pytest.mark.parametrize(("members", "block_rows"), [(1, None), (1, 7), (9, None), (9, 7)])
@pytest.mark.parametrize("ending", PACK)
def test_compressed_files_hold_the_same_rows(write, small_pieces, ending, members, block_rows):
    lines = [f'{{"x": {n}, "t": "{"word " * (n % 9)}"}}\n'.encode() for n in range(90)]
    step = len(lines) // members
    parts = [b"".join(lines[n : n + step]) for n in range(0, len(lines), step)]
    plain = tp.read_json(write("a.jsonl", b"".join(lines)), block_rows=block_rows)
    packed = write("b.jsonl" + ending, b"".join(map(PACK[ending], parts)))
    pipe = tp.read_json(packed, block_rows=block_rows)
    assert rows(pipe) == rows(plain)
    blocks = len(opened(pipe).lengths)
    if block_rows is not None:
        assert blocks == -(-90 // block_rows)
        seeking = pipe.shuffle(8, seed=1).batch(4)
        assert list(seeking) == list(plain.shuffle(8, seed=1).batch(4))
    else:
        assert (
            blocks == 1 if members == 1 else 5 <= blocks <= 9
        )  # a file of one member is one block
    unnamed = tp.read_json(write("c.jsonl", Path(packed).read_bytes()))
    assert rows(unnamed) == rows(plain)


@pytest.mark.parametrize("ending", PACK)
def test_a_compressed_file_that_is_none_or_cut_off_is_named(write, ending):
    path = write("a.jsonl" + ending, GOOD)
    with pytest.raises(tp.UnreadableError, match=r"its name says \w+, and it starts with"):
        len(tp.read_json(path))
    path = write("b.jsonl" + ending, PACK[ending](GOOD.encode() * 1000)[:-9])
    with pytest.raises(tp.UnreadableError, match=r"cut off|damaged"):
        len(tp.read_json(path))


def test_explain_says_which_files_are_read_again_from_their_start(write, small_pieces):
    lines = [f'{{"x": {n}}}\n'.encode() for n in range(2000)]
    one = write("a.jsonl.gz", gzip.compress(b"".join(lines)))
    parts = [gzip.compress(b"".join(lines[n : n + 20])) for n in range(0, len(lines), 20)]
    many = write("b.jsonl.gz", b"".join(parts))
    pipe = tp.read_json([one, many], block_rows=5).shuffle(100, seed=1)
    assert "up to 22.9 kB are decompressed" in str(pipe.explain())
    assert "bgzip" in str(pipe.explain())
    assert "so far" not in str(pipe.explain())
    list(pipe)
    assert "so far, in this process" in str(pipe.explain())
    assert "up to 240 B are decompressed" in str(tp.read_json(many, block_rows=5).explain())


# As pyarrow reads it


def test_what_pyarrow_reads_from_json_is_read_alike(write):
    given = [
        {"i": 1, "f": 0.5, "s": "é\u2028", "b": True, "n": None, "l": [1, None], "e": [], "o": {}},
        {"i": None, "f": -1e300, "s": "", "b": None, "n": None, "l": None, "e": [], "o": None},
    ]
    path = write("a.jsonl", "".join(json.dumps(row) + "\n" for row in given))
    assert rows(tp.read_json(path)) == pj.read_json(path).to_pylist()


def test_what_pyarrow_reads_from_csv_is_read_alike(write):
    path = write(
        "a.csv", "i,f,b,d,t,s\n1,.5,true,2020-01-01,2020-01-01 00:00:01,x\n-2,,false,,,y\n"
    )
    found, expected = rows(tp.read_csv(path)), pcsv.read_csv(path).to_pylist()
    assert repr(found) == repr(expected)


# Names


def test_a_reader_that_is_given_files_is_the_one_after_list_files(write):
    path = write("a.jsonl", GOOD)
    listed = tp.list_files(path)
    assert tp.read_json(path, ["a"], block_rows=3) == listed.read_json(["a"], block_rows=3)
    assert tp.read_text(files=path) == listed.read_text()
    assert tp.read_parquet([path], ["a"]) == tp.list_files([path]).read_parquet(["a"])
    assert repr(tp.read_csv(path, null_values=["", "NA"])).endswith(
        ".read_csv(null_values=('', 'NA'))"
    )
    assert repr(tp.read_csv(path)).endswith(".read_csv()")


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("read_jsonl", "read_json"),
        ("from_csv", "read_csv"),
        ("read_tsv", "read_csv"),
        ("scan_parquet", "read_parquet"),
        ("load_txt", "read_text"),
        ("from_webdataset", "read_webdataset"),
        ("read_npy", "read_numpy"),
        ("list_file", "list_files"),
        ("from_tensor", "from_tensors"),
    ],
)
def test_a_name_that_is_not_there_leads_to_the_one_that_is(name, ours):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}' \(did you mean '{ours}'"):
        getattr(tp, name)
    if ours.startswith("read_"):
        with pytest.raises(AttributeError, match=rf"no '{name}' \(did you mean '{ours}'"):
            getattr(tp.list_files("a"), name)


def test_names_that_python_looks_for_are_not_there_without_a_word():
    pipe = tp.list_files("a")
    assert not hasattr(pipe, "__array__")
    assert not hasattr(pipe, "nothing_of_the_kind")
    assert not hasattr(tp, "__wrapped__")


def test_a_folder_stands_for_the_files_of_its_reader(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a.jsonl", "sub/b.json", "c.ndjson.gz", "_SUCCESS", "d.csv", "e.TXT", "f.parquet"):
        data = GOOD.encode() if "json" in name else b"a\n1\n"
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert len(tp.read_json(tmp_path)) == 3
    assert len(tp.read_csv(tmp_path)) == 1
    assert len(tp.read_text(tmp_path)) == 2
    assert len(tp.list_files(tmp_path, suffix=".jsonl").read_json()) == 1
    assert [Path(name).name for name in tp.list_files(tmp_path)] == ["f.parquet"]
    with pytest.raises(tp.MissingFilesError, match=r"no file that ends in \.csv"):
        len(tp.read_csv(tmp_path / "sub"))


def test_explain_says_that_rows_of_one_large_block_are_mixed_within_a_buffer(write):
    lines = [f'{{"x": {n}}}\n'.encode() for n in range(5000)]
    pipe = tp.read_json(write("a.jsonl.gz", gzip.compress(b"".join(lines)))).shuffle(100)
    assert "blocks have up to 5,000 rows: rows are mixed within" in str(pipe.explain())


def test_rows_of_csv_may_be_longer_than_what_is_parsed_at_once(tmp_path):
    long = 'a "quoted" cell,\n' * 150_000  # 2.5 MB
    rows = [{"x": 1, "text": "short"}, {"x": 2, "text": long}, {"x": 3, "text": "last"}]
    cells = "".join(
        f'{row["x"]},"{str(row["text"]).replace(chr(34), chr(34) * 2)}"\n' for row in rows
    )
    (tmp_path / "rows.csv").write_text(f"x,text\n{cells}")
    assert list(tp.read_csv(tmp_path / "rows.csv")) == rows


def test_types_are_those_of_all_rows_of_the_first_block(tmp_path):
    """Also where the first of what is parsed at once has integers only."""
    lines = [*(f"{n},text {n}" for n in range(150_000)), "0.5,last"]  # 2.3 MB
    (tmp_path / "rows.csv").write_text("\n".join(["x,text", *lines]))
    pipe = tp.read_csv(tmp_path / "rows.csv")
    assert opened(pipe).schema.field("x").type == pa.float64()
    assert sum(row["x"] for row in pipe) == sum(range(150_000)) + 0.5


def test_an_empty_last_cell_is_null_with_and_without_a_line_end(write):
    for end in ("", "\n"):
        found = rows(tp.read_csv(write("a.csv", f'a,b\n1,2\n"3",{end}')))
        assert found == [{"a": 1, "b": 2}, {"a": 3, "b": None}]


@pytest.mark.parametrize(("cells", "kind"), [
    (["", "", "5", "7"], pa.int64()),
    (["1.5", "", "2", ""], pa.float64()),
    (["", "", "", ""], pa.string()),
    (["", "x", "", "5"], pa.string()),
    (["", "", "true", "false"], pa.bool_()),
    (["2020-01-01", "2020-01-02", "2020-01-01 10:00:00", ""], pa.timestamp("s")),
    (["2020-01-01 10:00:00", "", "2020-01-01 10:00:00.5", ""], pa.timestamp("ns")),
    (["2020-01-01", "", "2020-01-01T10:00:00Z", ""], pa.string()),
])  # fmt: skip
@pytest.mark.parametrize("turned", [False, True])
def test_types_of_csv_are_those_of_one_file_however_its_rows_are_cut(write, cells, kind, turned):
    cells = cells[::-1] if turned else cells
    lines = [f"{n},{cell}\n" for n, cell in enumerate(cells)]
    whole = write("whole.csv", "n,x\n" + "".join(lines))
    paths = [write(f"part-{n}.csv", "n,x\n" + line) for n, line in enumerate(lines)]
    expected = tp.read_csv(whole)
    assert opened(expected).schema.field("x").type == kind
    for cut in (tp.read_csv(paths), tp.read_csv(whole, block_rows=1, infer="all")):
        assert opened(cut).schema.field("x").type == kind
        assert rows(cut) == rows(expected)


def test_a_csv_file_of_0_bytes_has_no_rows(write):
    empty, full = write("0.csv", ""), write("1.csv", CELLS)
    both = [{"id": 1, "t": "x"}, {"id": 2, "t": "y"}]
    assert rows(tp.read_csv([empty, full])) == rows(tp.read_csv([full, empty])) == both
    assert rows(tp.read_csv([empty, full], ["t"])) == [{"t": "x"}, {"t": "y"}]
    with pytest.raises(tp.SchemaError, match=r"2\.csv has a column 'u', and .*1\.csv has not"):
        rows(tp.read_csv([empty, full, write("2.csv", "id,t,u\n")]))


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl"])
def test_zstd_whose_frames_each_follow_a_frame_that_is_skipped(name: str, tmp_path: Path) -> None:
    """As pzstd writes them: first a frame with the size of the one that holds data."""
    codec, content = pa.Codec("zstd"), b""
    for first in range(0, 3000, 1000):
        text = "".join(f'{{"x": {n}}}\n' for n in range(first, first + 1000))
        frame = bytes(codec.compress(text.encode(), asbytes=True))
        content += (
            b"\x50\x2a\x4d\x18"
            + (4).to_bytes(4, "little")
            + len(frame).to_bytes(4, "little")
            + frame
        )
    (tmp_path / name).write_bytes(content)
    rows = tp.read_json(tmp_path / name)
    assert [row["x"] for row in rows] == [*range(3000)]
    batches = rows.sharding_filter(3).shuffle(100).batch(50)
    assert sorted(row["x"] for batch in batches for row in batch) == [*range(3000)]


ROWS = {"united": [{"a": 1, "b": 0}] * 30 + [{"a": 1.5, "b": 0}],
        "apart": [{"a": 1, "b": 0}] * 30 + [{"a": "x", "b": 0}]}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(
    "given", [{}, {"infer": "all"}, {"schema": pa.schema([("a", pa.int64())])}]
)
def test_what_is_advised_for_a_row_of_another_type_reads_the_files(
    kind: str, given: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS[kind])))
    if kind == "united" and "infer" in given:
        assert len(list(tp.read_json(path, block_rows=10, **given))) == 31
        return
    with pytest.raises(tp.SchemaError, match="column 'a' is ") as caught:
        list(tp.read_json(path, block_rows=10, **given))
    said = str(caught.value)
    if "infer" in given:  # before any row is read
        assert "no type can hold both: convert one, or give the other columns by schema=" in said
        assert len(list(tp.read_json(path, schema=pa.schema([("b", pa.int64())])))) == 31
        return
    assert "line 31: " in said
    assert ('infer="all"' in said) == (kind == "united" and not given)
    assert ("schema= without it" in said) == (kind == "apart")
    assert f"types are {'those of schema=' if given else 'found in the first blocks'}" in said
    wider = pa.schema([("a", pa.float64())]) if kind == "united" else pa.schema([("b", pa.int64())])
    assert len(list(tp.read_json(path, block_rows=10, schema=wider))) == 31
    if kind == "apart":
        assert len(list(tp.read_json(path, block_rows=10, on_error="skip", **given))) == 30
    elif not given:
        assert len(list(tp.read_json(path, block_rows=10, infer="all"))) == 31
