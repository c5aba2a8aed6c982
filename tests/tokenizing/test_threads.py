"""Threads that tokenize at the same time get what one thread gets."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tokenizer_fixtures import TEXTS, bracketed, run_of, sentencepiece_model, tiktoken_encoding
from trainpipes.stages.tokenize import Tokenize
from trainpipes.tokenizers import parallelism
from trainpipes.tokenizers.gigatoken import FIRST

THREADS = 4
RUNS = 12


def slow() -> Any:
    return pytest.importorskip("transformers").ByT5Tokenizer()


def fast() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bracketed())


KINDS: dict[str, Callable[[Path], Tokenize]] = {
    "auto": lambda _: Tokenize(tokenizer=bracketed()),
    "tokenizers": lambda _: Tokenize(tokenizer=bracketed(), engine="tokenizers"),
    "cut": lambda _: Tokenize(tokenizer=bracketed(), max_length=6, engine="tokenizers"),
    "pairs": lambda _: Tokenize(
        tokenizer=bracketed(), columns=["text", "text_too"], pair=True, max_length=9
    ),
    "transformers": lambda _: Tokenize(tokenizer=fast()),
    "transformers, slow": lambda _: Tokenize(tokenizer=slow()),
    "tiktoken": lambda _: Tokenize(tokenizer=tiktoken_encoding()),
    "sentencepiece": lambda path: Tokenize(tokenizer=sentencepiece_model(path)),
    "bytes": lambda _: Tokenize(tokenizer="bytes"),
}


def tables() -> list[pa.Table]:
    """Different texts for each run; enough of them for a faster engine to start."""
    texts = [text for text in TEXTS for _ in range(FIRST // len(TEXTS) + 1)]
    return [
        pa.table({
            "text": [f"{k}: {text}" for text in texts],
            "text_too": [f"{text} {k}" for text in texts],
        })
        for k in range(RUNS)
    ]  # fmt: skip


def in_threads(work: Callable[[int], None], count: int = THREADS) -> None:
    """The same work in threads that begin together; raises what one of them raises."""
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def begin(number: int) -> None:
        try:
            barrier.wait(30)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_one_thread(kind: str, tmp_path: Path) -> None:
    if kind in ("tiktoken", "sentencepiece"):
        pytest.importorskip(kind)
    runs = tables()
    alone = KINDS[kind](tmp_path)
    expected = [alone.process(run_of(table)).block.data for table in runs]
    shared = KINDS[kind](tmp_path)
    found: list[Any] = [None] * len(runs)

    def work(number: int) -> None:
        for _ in range(2):
            for k in range(number, len(runs), THREADS):
                found[k] = shared.process(run_of(runs[k])).block.data

    in_threads(work)
    assert found == expected


def test_a_forked_child_starts_an_engine_of_its_own() -> None:
    pytest.importorskip("gigatoken")
    stage = Tokenize(tokenizer=bracketed())
    runs = tables()[:3]
    expected = [stage.process(run_of(table)).block.data for table in runs]
    assert stage.identity()["engine"] == "gigatoken"

    def work(found: Any) -> None:
        same = [stage.process(run_of(table)).block.data for table in runs] == expected
        found.send((same, stage._engine.loaded.checked._fast is not None))  # type: ignore[attr-defined]

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs,))
    child.start()
    assert ours.poll(60)
    assert ours.recv() == (True, True)
    child.join(30)
    assert child.exitcode == 0


def test_a_function_is_called_by_one_thread_at_a_time() -> None:
    inside = 0
    most = 0
    scratch: list[list[int]] = []

    def ids(texts: list[str]) -> list[list[int]]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        scratch.clear()  # a function may well use one list again and again
        for text in texts:
            scratch.append([len(text)])
        time.sleep(0.002)
        inside -= 1
        return scratch

    stage = Tokenize(tokenizer=ids)
    found: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        for k in range(5):
            table = pa.table({"text": ["x" * (10 * number + k)] * (number + 1)})
            made = stage.process(run_of(table)).block.data.column("input_ids").to_pylist()
            found[10 * number + k] = made

    in_threads(work)
    assert most == 1
    assert found == {n * 10 + k: [[10 * n + k]] * (n + 1) for n in range(THREADS) for k in range(5)}


class TestThePoolOfTokenizers:
    @pytest.fixture(autouse=True)
    def unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(parallelism.VARIABLE, "true")  # put back when the test is over
        monkeypatch.setattr(parallelism, "_ours", None)
        monkeypatch.delenv(parallelism.VARIABLE)

    def test_is_on_for_one_thread_and_off_for_several(self) -> None:
        for threads, expected in [(1, "true"), (2, "false"), (8, "false"), (1, "true")]:
            parallelism.take_turns(threads)
            assert os.environ[parallelism.VARIABLE] == expected
            Tokenize(tokenizer=bracketed())
            assert os.environ[parallelism.VARIABLE] == expected

    @pytest.mark.parametrize("said", ["true", "false", "0"])
    def test_stays_what_the_user_has_set(self, monkeypatch: Any, said: str) -> None:
        monkeypatch.setenv(parallelism.VARIABLE, said)
        for threads in (1, 2, 1):
            parallelism.take_turns(threads)
            assert os.environ[parallelism.VARIABLE] == said

    def test_stays_off_in_a_forked_child(self) -> None:
        script = (
            "import os\n"
            "from trainpipes.tokenizers.parallelism import take_turns\n"
            "take_turns(1)\n"
            "if os.fork() == 0:\n"
            "    take_turns(1)\n"
            "    print(os.environ['TOKENIZERS_PARALLELISM'], flush=True)\n"
            "    os._exit(0)\n"
            "os.wait()\n"
        )
        clean = {k: v for k, v in os.environ.items() if k != parallelism.VARIABLE}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            env=clean, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert done.stdout == "false\n"
