"""gigatoken does the work where it is installed, is compared while it runs, and stands in the state."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import trainpipes as tp
from interpreters import python
from resuming import check_resume
from tokenizer_fixtures import (
    TEXTS,
    bpe,
    bracketed,
    column,
    run_of,
    sentencepiece_model,
    tiktoken_encoding,
)
from trainpipes.errors import ConfigError
from trainpipes.stages.tokenize import Tokenize
from trainpipes.tokenizers import engine, hf
from trainpipes.tokenizers.engine import Ragged
from trainpipes.tokenizers.hf import EVERY, FIRST, SHOWN, Checked, HuggingFace

BAD = "a text that goes wrong"


def lengths_of(texts: pa.LargeStringArray) -> Ragged:
    """Each text as one id, its length: the reference."""
    return Ragged.of_lists([[len(text)] for text in texts.to_pylist()])


class Panic(BaseException):
    """What a panic of Rust is to Python."""


class Engine:
    """Right but for one text."""

    def __init__(self, bad: list[int] | BaseException | None = None) -> None:
        self.bad = bad

    def encode(self, texts: pa.LargeStringArray) -> Ragged:
        found = [[len(text)] for text in texts.to_pylist()]
        for number, text in enumerate(texts.to_pylist()):
            if text.startswith(BAD) and isinstance(self.bad, BaseException):
                raise self.bad
            if text.startswith(BAD) and self.bad is not None:
                found[number] = self.bad
        return Ragged.of_lists(found)


def array(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def started(engine: Any) -> Checked:
    """An engine that has encoded its first texts."""
    checked = Checked(lambda: engine, lengths_of, "some.json")
    assert len(checked.encode(array(["x"]))) == 1
    return checked


@pytest.mark.parametrize("bad", [[7], [], [1, 2], [len(BAD), 0]])
@pytest.mark.parametrize("place", [0, FIRST - 1, FIRST])
def test_the_first_texts_are_compared(bad: list[int], place: int) -> None:
    texts = ["x"] * (2 * FIRST)
    texts[place] = BAD
    checked = Checked(lambda: Engine(bad), lengths_of, "some.json")
    if place == FIRST:
        assert checked.encode(array(texts)).to_rows()[place].tolist() == bad
        return
    with pytest.raises(ConfigError, match=rf"some.json\).* other ids .*{BAD}'; write .*tokenizers"):
        checked.encode(array(texts))


@pytest.mark.parametrize("number", [0, 999, EVERY, 5 * EVERY + 1])
def test_rows_are_compared_by_their_number(number: int) -> None:
    checked = started(Engine([7]))
    texts, numbers = array(["x", BAD + "x" * 10_000]), np.array([3, number])
    if number % EVERY:
        assert checked.encode(texts, numbers).values.tolist() == [1, 7]
        return
    with pytest.raises(ConfigError, match=r"other ids .*xxx…") as caught:
        checked.encode(texts, numbers)
    assert len(str(caught.value)) < SHOWN + 200


class Short(Engine):
    def encode(self, texts: pa.LargeStringArray) -> Ragged:
        return super().encode(texts.slice(1) if BAD in texts.to_pylist() else texts)


FAILED = r"failed: .*no such byte.*engine="


@pytest.mark.parametrize(("engine", "said"), [
    (Engine(RuntimeError("no such byte")), FAILED),
    (Engine(Panic("no such byte")), FAILED),
    (Short(), "gave 1 rows for 2 texts"),
])  # fmt: skip
def test_an_engine_that_fails_is_named(engine: Engine, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        started(engine).encode(array(["x", BAD]))

    def fail() -> Engine:
        raise Panic("unknown pre-tokenizer")

    with pytest.raises(ConfigError, match=r"failed: .*unknown pre-tokenizer"):
        Checked(fail, lengths_of, "some.json").encode(array(["x"]))


def test_rows_with_young_code_points_are_the_references() -> None:
    class Wrong(Engine):
        def encode(self, texts: pa.LargeStringArray) -> Ragged:
            return Ragged.of_lists([[0] * ("\u1ae0" in t) or [len(t)] for t in texts.to_pylist()])

    texts = array(["é", "x\u1ae0", "abc", "\u1ae0"]).slice(1)
    assert started(Wrong()).encode(texts).values.tolist() == [2, 3, 1]


@pytest.fixture
def installed() -> None:
    pytest.importorskip("gigatoken")


@pytest.mark.usefixtures("installed")
class TestTokenize:
    def test_gives_the_same_with_either_engine(self) -> None:
        texts = [text + word for text in TEXTS for word in ("", " a", "\n</s> a") * 10]
        cut = {"max_length": 5}
        for options in ({}, cut, {**cut, "truncation_side": "left"}):
            given: Any = {"tokenizer": bracketed(), "add_eos": True, **options}
            auto, plain = Tokenize(**given), Tokenize(**given, engine="tokenizers")
            assert column(auto, texts) == column(plain, texts)
            assert auto.identity()["engine"] == "gigatoken"
            assert plain.identity()["engine"] == "tokenizers"

    def test_a_difference_stops_the_run_at_its_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Wrong:
            def __init__(self, right: Any) -> None:
                self.right = right

            def encode(self, texts: pa.LargeStringArray) -> Ragged:
                found: Ragged = self.right.encode(texts)
                wrong = np.repeat([text == BAD for text in texts.to_pylist()], found.lengths)
                return Ragged(found.values + wrong.astype(np.int32), found.offsets)

        faster = HuggingFace._faster
        monkeypatch.setattr(
            HuggingFace, "_faster", staticmethod(lambda content: Wrong(faster(content)))
        )
        rows = tp.from_arrow(pa.table({"text": [f"row {k}" for k in range(EVERY)] + [BAD] * 9}))
        with pytest.raises(ConfigError, match=f"gives other ids than tokenizers for .*{BAD}"):
            list(rows.tokenize(bpe()).batch(100))
        assert len(list(rows.tokenize(bpe(), engine="tokenizers").batch(100))) == 11

    def test_names_the_engine_and_the_reason_in_explain(self) -> None:
        rows = tp.from_arrow(pa.table({"text": ["a"] * 8}))

        def said(tokenizer: Any, **options: Any) -> str:
            lines = dict(rows.tokenize(tokenizer, **options).batch(2).explain().lines)
            return lines["tokenizer"]

        assert said(bpe()).startswith("Tokenizer: gigatoken 0.10")
        assert 'not gigatoken: engine="tokenizers"' in said(bpe(), engine="tokenizers")
        assert "tokenizer" not in dict(rows.tokenize("bytes").batch(2).explain().lines)
        assert "one thread at a time" in said(lambda texts: [[1] for _ in texts])

    def test_a_state_is_resumed_with_the_engine_that_saved_it(self) -> None:
        rows = tp.from_arrow(pa.table({"text": [f"row {k}" for k in range(40)]})).shuffle(16)
        auto, plain = (rows.tokenize(bpe(), engine=e).batch(4) for e in ("auto", "tokenizers"))
        ours, theirs = auto.state_at(1), plain.state_at(1)
        with pytest.raises(tp.StateError, match=r"engine: saved \"gigatoken\".*pip install"):
            plain.load_state_dict(ours)
        said = r"now \"gigatoken\"; write .*engine=\"tokenizers\""
        with pytest.raises(tp.StateError, match=said):
            auto.load_state_dict(theirs)

    def test_resumes_exactly_at_every_batch(self) -> None:
        texts = [f"row {k} of some text" for k in range(FIRST + 128)]
        rows = tp.from_arrow(pa.table({"text": texts})).shuffle(64).tokenize(bpe(), max_length=6)
        check_resume(rows.batch(96).pad_collate())


def test_without_the_package_tokenizers_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        if name == "gigatoken":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(hf, "version", absent)
    stage = Tokenize(tokenizer=bpe())
    assert column(stage, TEXTS) == [e.ids for e in bpe().encode_batch(TEXTS)]
    assert stage.identity()["engine"] == "tokenizers"
    assert "pip install 'gigatoken>=0.10,<0.11'" in str(stage._describe())


def test_another_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="'kitoken'"):
        Tokenize(tokenizer=bpe(), engine="kitoken")  # type: ignore[arg-type]


THREADS = 4
RUNS = 8


def of_transformers(kind: str, **options: Any) -> Any:
    return getattr(pytest.importorskip("transformers"), kind)(**options)


FAST = "PreTrainedTokenizerFast"
PAIR: Any = {"columns": ["text", "text_too"], "pair": True, "max_length": 9}
KINDS: dict[str, Callable[[Path], Tokenize]] = {
    "auto": lambda _: Tokenize(tokenizer=bracketed()),
    "tokenizers": lambda _: Tokenize(tokenizer=bracketed(), engine="tokenizers"),
    "cut": lambda _: Tokenize(tokenizer=bracketed(), max_length=6, engine="tokenizers"),
    "pairs": lambda _: Tokenize(tokenizer=bracketed(), **PAIR),
    "transformers": lambda _: Tokenize(
        tokenizer=of_transformers(FAST, tokenizer_object=bracketed())
    ),
    "transformers, slow": lambda _: Tokenize(tokenizer=of_transformers("ByT5Tokenizer")),
    "tiktoken": lambda _: Tokenize(tokenizer=tiktoken_encoding()),
    "sentencepiece": lambda path: Tokenize(tokenizer=sentencepiece_model(path)),
    "bytes": lambda _: Tokenize(tokenizer="bytes"),
}


def tables() -> list[pa.Table]:
    """Different texts for each run; enough of them for a faster engine to start."""
    texts = [text for text in TEXTS for _ in range(FIRST // len(TEXTS) + 1)]
    both = ("{k}: {text}", "{text} {k}")
    columns = [
        [[form.format(k=k, text=text) for text in texts] for form in both] for k in range(RUNS)
    ]
    return [pa.table(pair, ["text", "text_too"]) for pair in columns]


def in_threads(work: Callable[[int], None], count: int = THREADS) -> None:
    """The same work in threads that begin together; raises what one of them raises."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> None:
        barrier.wait(30)
        work(number)

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(begin, number) for number in range(count)]:
            done.result(60)


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
        found.send((same, stage.maker.loaded[1]._fast is not None))  # type: ignore[attr-defined]

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs,))
    child.start()
    assert ours.poll(60)
    assert ours.recv() == (True, True)
    child.join(30)
    assert child.exitcode == 0


def test_a_function_is_called_by_one_thread_at_a_time() -> None:
    inside = most = 0
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
        monkeypatch.setenv(engine.VARIABLE, "true")  # put back when the test is over
        monkeypatch.setattr(engine, "_ours", None)
        monkeypatch.delenv(engine.VARIABLE)

    def test_is_on_for_one_thread_and_off_for_several(self) -> None:
        for threads, expected in [(1, "true"), (2, "false"), (8, "false"), (1, "true")]:
            engine.take_turns(threads)
            assert os.environ[engine.VARIABLE] == expected
            Tokenize(tokenizer=bracketed())
            assert os.environ[engine.VARIABLE] == expected

    @pytest.mark.parametrize("said", ["true", "false", "0"])
    def test_stays_what_the_user_has_set(self, monkeypatch: Any, said: str) -> None:
        monkeypatch.setenv(engine.VARIABLE, said)
        for threads in (1, 2, 1):
            engine.take_turns(threads)
            assert os.environ[engine.VARIABLE] == said

    def test_stays_off_in_a_forked_child(self) -> None:
        script = (
            "import os\n"
            "from trainpipes.tokenizers.engine import take_turns\n"
            "take_turns(1)\n"
            "if os.fork() == 0:\n"
            "    take_turns(1)\n"
            "    print(os.environ['TOKENIZERS_PARALLELISM'], flush=True)\n"
            "    os._exit(0)\n"
            "os.wait()\n"
        )
        clean = {k: v for k, v in os.environ.items() if k != engine.VARIABLE}
        done = subprocess.run(
            [*python(), "-W", "ignore", "-c", script],
            env=clean, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert done.stdout == "false\n"
