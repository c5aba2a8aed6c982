"""``generate``: each row once in the output, over kills."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trainpipes as tp
from interpreters import pid_of, python
from recipes.generate_runs import ROWS, run
from trainpipes_recipes.generate import ask, generate, main, write
from trainpipes_recipes.prompts import prompts


@pytest.mark.parametrize("order", ["ordered", "as they come"])
def test_each_row_is_written_once_over_kills(tmp_path: Path, order: str) -> None:
    draw, kills = random.Random(order), 0
    folder = tmp_path / "out"
    for _ in range(3):
        process = subprocess.Popen(
            [*python(), "-m", "recipes.generate_runs", str(folder), order],
            cwd=Path(__file__).parent.parent,
        )
        before = len(list(folder.glob("part-*")))
        more = draw.randrange(1, 5)
        while process.poll() is None and len(list(folder.glob("part-*"))) < before + more:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.03)
        with suppress(ProcessLookupError):  # it has ended by itself
            os.kill(pid_of(process), signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills
    assert run(str(folder), order == "ordered") == ROWS
    parts = [pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))]
    rows = pa.concat_tables(parts).to_pylist()
    ids = [row["id"] for row in rows]
    assert sorted(ids) == [*range(ROWS)]
    assert all(row["response"] == f"answer {row['id']}" for row in rows)
    if order == "ordered":
        assert ids == [*range(ROWS)]
    assert list(tp.read_parquet(str(folder)).select("id")) == [{"id": n} for n in ids]


def test_an_error_that_stays_ends_all_and_loses_nothing(tmp_path: Path) -> None:
    rows = tp.from_dataset([{"id": n} for n in range(40)])

    def fails(row: dict[str, int]) -> int:
        if row["id"] == 20:
            raise ValueError("no answer to 20")
        return -row["id"]

    with pytest.raises(ValueError, match="no answer to 20"):
        generate(rows, fails, tmp_path, in_flight=4, rows_per_file=5)
    assert generate(rows, lambda row: -row["id"], tmp_path, in_flight=4, rows_per_file=5) == 40
    found = pq.read_table(tmp_path, filters=None).to_pylist()
    assert found == [{"id": n, "response": -n} for n in range(40)]


def test_rows_that_cannot_be_read_end_all_and_lose_nothing(tmp_path: Path) -> None:
    def damaged(row: dict[str, int]) -> dict[str, int]:
        if row["id"] == 20:
            raise ValueError("20 is damaged")
        return row

    options: dict[str, Any] = {"in_flight": 2, "rows_per_file": 5}
    rows = tp.from_dataset([{"id": n} for n in range(40)])
    with pytest.raises(ValueError, match="20 is damaged"):
        generate(rows.map(damaged), lambda row: -row["id"], tmp_path, **options)


@pytest.mark.parametrize("name", ["part-00000.parquet", "part-00007.parquet", "notes.txt"])
def test_files_of_others_are_refused_and_stay(name: str, tmp_path: Path) -> None:
    rows = tp.from_dataset([{"id": n} for n in range(4)])
    (tmp_path / name).write_text("mine")
    with pytest.raises(tp.ConfigError, match="must be a folder without other files, got") as caught:
        generate(rows, str, tmp_path, in_flight=2)
    assert name in str(caught.value)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_files_that_come_later_stay(tmp_path: Path) -> None:
    rows = tp.from_dataset([{"id": n} for n in range(4)])
    assert generate(rows, str, tmp_path, in_flight=2) == 4
    for name in ("part-00007.parquet", "part-00003-abc.parquet"):
        (tmp_path / name).write_text("mine")
        assert generate(rows, str, tmp_path, in_flight=2) == 4
        assert (tmp_path / name).read_text() == "mine"


def test_a_first_file_that_was_not_noted_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = []

    def stops(path: Path, value: Any) -> None:
        times.append(path)
        if len(times) == 2:
            raise OSError("no space")
        write(path, value)

    rows = tp.from_dataset([{"id": n} for n in range(20)])
    monkeypatch.setattr("trainpipes_recipes.generate.write", stops)
    with pytest.raises(OSError, match="no space"):
        generate(rows, lambda row: row["id"], tmp_path, in_flight=2, rows_per_file=5)
    assert len([*tmp_path.glob("part-*")]) == 1
    assert generate(rows, lambda row: row["id"], tmp_path, in_flight=2, rows_per_file=5) == 20
    assert pq.read_table(tmp_path)["response"].to_pylist() == [*range(20)]


@pytest.mark.parametrize("option", ["in_flight", "rows_per_file"])
def test_no_requests_or_rows_at_all_are_refused(option: str, tmp_path: Path) -> None:
    rows = tp.from_dataset([{"id": 1}])
    with pytest.raises(tp.ConfigError, match=rf"generate\({option}\) must be an integer of 1"):
        generate(rows, str, tmp_path, **{option: 0})  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_several_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    rows = tp.from_dataset([{"id": n} for n in range(4)]).sharding_filter(2)
    with pytest.raises(
        tp.ConfigError, match="must be read by a single process, got '2 ranks'; start"
    ):
        generate(rows, str, tmp_path)
    alone = rows.distributed(rank=0, world_size=1)
    assert generate(alone, str, tmp_path, in_flight=2) == 4


def test_an_endpoint_answers(tmp_path: Path) -> None:
    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            question = asked["messages"][-1]["content"]
            said = None if question == "c" else f"{asked['model']}: {question}"
            body = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pq.write_table(pa.table({"question": ["a", "b", "c"], "n": [1, 2, 3]}), tmp_path / "in.parquet")
    url = f"http://127.0.0.1:{server.server_port}/v1"
    main([
        "--files", str(tmp_path / "in.parquet"), "--output", str(tmp_path / "out"), "--url", url,
        "--model", "small", "--in-flight", "2",
    ])  # fmt: skip
    server.shutdown()
    server.server_close()
    found = pq.read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()
    assert found == [
        {"prompt": "a", "n": 1, "response": "small: a"},
        {"prompt": "b", "n": 2, "response": "small: b"},
        {"prompt": "c", "n": 3, "response": None},
    ]


def test_rows_keep_columns_that_come_late_and_a_pipeline_may_have_been_read(tmp_path: Path) -> None:
    rows = tp.from_dataset([{"prompt": "a"}, {"prompt": "b", "note": 1}])
    assert len(list(rows)) == 2  # so that the next epoch is not the first
    assert generate(rows, lambda row: row["prompt"].upper(), tmp_path, in_flight=2) == 2
    written = pq.read_table(tmp_path / "part-00000.parquet").select(["prompt", "note", "response"])
    assert written.to_pylist() == [
        {"prompt": "a", "note": None, "response": "A"},
        {"prompt": "b", "note": 1, "response": "B"},
    ]


@pytest.mark.parametrize(
    ("data", "answers", "asked", "said"),
    [
        ([{"prompt": "a", "response": "gold"}], ["b"], 0, "a name that no column has, got 'response'"),
        ([{"x": object()}], ["b"], 0, "column 'x' cannot be written"),
        (["a"], ["b"], 0, "generate takes rows that are dicts, got 'a'"),
        ([{"n": n} for n in range(900)], [{"a": 1}, "b"], 2, "column 'response' cannot be written"),
        ([{"n": n, "meta": {}} for n in range(900)], ["b"], 64, "column 'meta' cannot be written"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_named_before_many_answers_are_paid_for(
    data: list[Any], answers: list[Any], asked: int, said: str, tmp_path: Path
) -> None:
    made: list[Any] = []

    def answer(row: Any) -> Any:
        made.append(row)
        time.sleep(0.001)
        return answers[(len(made) - 1) % len(answers)]

    with pytest.raises((tp.ConfigError, tp.DataError), match=said):
        generate(tp.from_dataset(data), answer, tmp_path, in_flight=1)
    assert asked <= len(made) < (900 if asked else 1)
    assert not list(tmp_path.glob("part-*"))


def test_a_column_of_prompts_is_for_an_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--files", "x", "--output", "y", "--function", "a:b", "--prompt", "question"])
    assert "--prompt is for --url" in capsys.readouterr().err


def test_messages_are_sent_without_the_nulls_of_their_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []

    def answers(request: Any, timeout: float) -> io.BytesIO:
        sent.append(json.loads(request.data)["messages"])
        return io.BytesIO(b'{"choices": [{"message": {"content": "yes"}}]}')

    monkeypatch.setattr("urllib.request.urlopen", answers)
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "a", "name": "me"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "b"},
    ]
    rows = tp.from_arrow(pa.Table.from_pylist([{"prompt": talk}]))
    (row,) = prompts(rows, batch_size=None, num_shards=1, train=False)
    assert ask("http://host/v1", "m", 5, row) == "yes"
    assert sent == [talk]


@pytest.mark.parametrize("function", ["answers", "answers:", ":answer"])
def test_a_function_has_a_module_and_a_name(
    function: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--files", "x", "--output", "y", "--function", function])
    assert f"--function must be module:name, got {function}" in capsys.readouterr().err
