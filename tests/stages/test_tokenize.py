"""``tokenize``: the ids that the tokenizer itself gives, whichever kind it is."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainpipes as tp
from interpreters import python
from tokenizer_fixtures import (
    BOS,
    EOS,
    PAD,
    TEXTS,
    bpe,
    bpe_json,
    bracketed,
    column,
    run_of,
    sentencepiece_model,
    tiktoken_encoding,
)
from trainpipes.errors import ConfigError, DataError, MissingExtraError, UnreadableError
from trainpipes.stages.tokenize import Tokenize

PROMPTS = ["Q: why?", "", "a longer prompt than its answer", "🙂"]
ANSWERS = ["because", "nothing asked", "", "中文 and more text than the prompt has"]


@pytest.fixture(scope="session")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sentencepiece")
    return sentencepiece_model(tmp_path_factory.mktemp("spm"))


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    bracketed().save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def hugging(tokenizer: Any, texts: Any, **options: Any) -> list[list[int]]:
    return [e.ids for e in tokenizer.encode_batch(texts, **options)]


def transformed(tokenizer: Any, **names: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


class TestIds:
    def test_are_those_of_the_tokenizer(self) -> None:
        tokenizer = bracketed()
        assert column(Tokenize(tokenizer=tokenizer), TEXTS) == hugging(tokenizer, TEXTS)
        plain = Tokenize(tokenizer=tokenizer, add_special_tokens=False)
        assert column(plain, TEXTS) == hugging(tokenizer, TEXTS, add_special_tokens=False)

    @given(
        st.lists(st.text(max_size=20) | st.sampled_from(TEXTS), min_size=1, max_size=8),
        st.none() | st.integers(2, 9) | st.sampled_from([40, 1000]),
        st.sampled_from(["right", "left"]),
    )
    def test_agree_on_any_text(self, texts: list[str], max_length: int | None, side: Any) -> None:
        tokenizer = bracketed()
        if max_length is not None:
            tokenizer.enable_truncation(max_length, direction=side)
        stage = Tokenize(tokenizer=bracketed(), max_length=max_length, truncation_side=side)
        assert column(stage, texts) == hugging(tokenizer, texts)

    def test_do_not_depend_on_what_the_file_truncates_and_pads(self) -> None:
        padding = bracketed()
        padding.enable_padding(length=64, pad_id=PAD)
        padding.enable_truncation(3)
        settings = padding.to_str()
        stage = Tokenize(tokenizer=padding)
        assert column(stage, TEXTS) == hugging(bracketed(), TEXTS)
        assert padding.to_str() == settings  # the user's object is as it was
        assert stage.identity() == Tokenize(tokenizer=bracketed()).identity()

    def test_are_those_of_transformers(self) -> None:
        fast = transformed(bracketed(), eos_token="</s>", pad_token="<pad>")
        assert column(Tokenize(tokenizer=fast), TEXTS) == fast(TEXTS)["input_ids"]
        cut = fast(TEXTS, truncation=True, max_length=6)["input_ids"]
        assert column(Tokenize(tokenizer=fast, max_length=6), TEXTS) == cut

    def test_of_special_tokens_in_a_text_follow_transformers_split_special_tokens(self) -> None:
        fast = transformed(bracketed(), split_special_tokens=True)
        found = column(Tokenize(tokenizer=fast), ["a </s> b"])
        assert found == fast(["a </s> b"])["input_ids"]
        assert found[0].count(EOS) == 1
        whole = transformed(bracketed())
        assert column(Tokenize(tokenizer=whole), ["a </s> b"])[0].count(EOS) == 2
        assert Tokenize(tokenizer=fast).identity() != Tokenize(tokenizer=whole).identity()

    @pytest.mark.parametrize("max_length", [None, 4])
    def test_of_a_slow_transformers_tokenizer_are_its_own(self, max_length: int | None) -> None:
        slow = pytest.importorskip("transformers").ByT5Tokenizer()
        stage = Tokenize(tokenizer=slow, max_length=max_length)
        expected = slow(TEXTS, truncation=max_length is not None, max_length=max_length)
        assert column(stage, TEXTS) == expected["input_ids"]
        assert stage.pad_id == slow.pad_token_id
        assert column(Tokenize(tokenizer=slow, add_eos=True), TEXTS) == slow(TEXTS)["input_ids"]

    def test_of_a_sentencepiece_model_are_its_own(self, spm: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_file=str(spm))
        expected = processor.encode(TEXTS, out_type=int)
        assert column(Tokenize(tokenizer=str(spm)), TEXTS) == expected
        assert column(Tokenize(tokenizer=processor), TEXTS) == expected
        adding = SentencePieceProcessor(model_file=str(spm), add_bos=True, add_eos=True)
        assert column(Tokenize(tokenizer=adding), TEXTS) == adding.encode(TEXTS, out_type=int)
        ended = column(Tokenize(tokenizer=spm, add_eos=True), TEXTS)
        assert ended == [[*ids, processor.eos_id()] for ids in expected]
        assert Tokenize(tokenizer=spm).pad_id == processor.pad_id() == 3
        special = [processor.unk_id(), processor.bos_id(), processor.eos_id(), processor.pad_id()]
        assert Tokenize(tokenizer=spm).maker.special.all_ids() == sorted(special)

    def test_of_tiktoken_are_its_own(self) -> None:
        pytest.importorskip("tiktoken")
        encoding = tiktoken_encoding()
        stage = Tokenize(tokenizer=encoding)
        assert column(stage, TEXTS) == [encoding.encode_ordinary(text) for text in TEXTS]
        ended = column(Tokenize(tokenizer=encoding, add_eos=True), ["the end<|endoftext|>"])
        assert ended == [[*encoding.encode_ordinary("the end<|endoftext|>"), 300]]
        assert column(stage, []) == []

    @given(st.lists(st.text(max_size=9), min_size=1, max_size=9), st.integers(0, 3))
    def test_of_bytes_are_the_bytes(self, texts: list[str], skipped: int) -> None:
        stage = Tokenize(tokenizer="bytes", add_eos=True)
        for kind in (pa.string(), pa.large_string(), pa.string_view()):
            rows = pa.table({"text": pa.array(texts, kind)}).slice(skipped)
            assert column(stage, rows) == [[*t.encode(), 256] for t in texts[skipped:]]

    def test_of_a_function_are_what_it_returns(self) -> None:
        def words(texts: list[str]) -> list[list[int]]:
            return [[len(word) for word in text.split()] for text in texts]

        assert column(Tokenize(tokenizer=words, add_eos=9), ["a bb", ""]) == [[1, 2, 9], [9]]
        arrays = Tokenize(tokenizer=lambda texts: [np.array([*range(len(t))]) for t in texts])
        assert column(arrays, ["ab", ""]) == [[0, 1], []]


class TestWhereATokenizerComesFrom:
    def test_a_file_a_directory_and_an_object_are_the_same(self, json_file: Path) -> None:
        ways = (json_file, str(json_file), json_file.parent, bracketed(), f"file://{json_file}")
        stages = [Tokenize(tokenizer=given) for given in ways]
        expected = hugging(bracketed(), TEXTS)
        assert all(column(stage, TEXTS) == expected for stage in stages)
        assert len({json.dumps(stage.identity()) for stage in stages}) == 1

    def test_a_directory_of_transformers_is_loaded_by_it(self, tmp_path: Path) -> None:
        slow = pytest.importorskip("transformers").ByT5Tokenizer()
        slow.save_pretrained(tmp_path)
        assert not (tmp_path / "tokenizer.json").exists()
        stage = Tokenize(tokenizer=tmp_path, add_eos=True)
        assert column(stage, TEXTS) == slow(TEXTS)["input_ids"]
        assert stage.pad_id == slow.pad_token_id
        assert stage.padding_side == "right"
        moved = shutil.copytree(tmp_path, tmp_path / "moved")
        assert Tokenize(tokenizer=moved, add_eos=True).identity() == stage.identity()

    def test_a_directory_may_hold_a_sentencepiece_model(self, spm: Path, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.model").write_bytes(spm.read_bytes())
        by_directory, by_path = Tokenize(tokenizer=tmp_path), Tokenize(tokenizer=spm)
        assert column(by_directory, TEXTS) == column(by_path, TEXTS)
        assert by_directory.identity() == by_path.identity()

    def test_settings_beside_a_tokenizer_json_name_its_tokens(self, json_file: Path) -> None:
        config = {"eos_token": {"content": "<s>"}, "pad_token": "<unk>", "padding_side": "left"}
        (json_file.parent / "tokenizer_config.json").write_text(json.dumps(config))
        stage = Tokenize(tokenizer=json_file, add_eos=True, add_special_tokens=False)
        assert column(stage, ["x"])[0][-1] == BOS
        assert stage.pad_id == 0
        assert stage.padding_side == "left"

    @pytest.mark.parametrize(
        "settings",
        [
            {"tokenizer_config.json": {"extra_special_tokens": ["<think>"], "pad_token": "<my>"}},
            {"tokenizer_config.json": {"extra_special_tokens": {"think_token": "<think>"}}},
            {"tokenizer_config.json": {"additional_special_tokens": ["<think>"]}},
            {
                "tokenizer_config.json": {
                    "eos_token": {"content": "<think>", "__type": "AddedToken"}
                }
            },
            {"tokenizer_config.json": {"added_tokens_decoder": {"999": {"content": "<think>"}}}},
            {"special_tokens_map.json": {"eos_token": "<think>"}},
            {"added_tokens.json": {"<think>": 999}},
        ],
        ids=str,
    )
    def test_tokens_that_only_the_settings_name_are_those_of_transformers(
        self, settings: Any, json_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        transformers = pytest.importorskip("transformers")
        own = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "</s>",
            "pad_token": "<s>",
        }
        folder, name, texts = (
            json_file.parent,
            "tokenizer_config.json",
            ["<think>it", "a <think> b"],
        )
        (folder / name).write_text(json.dumps(own))
        with monkeypatch.context() as patch:
            patch.setattr("trainpipes.tokenizers.adapters.auto_tokenizer", None)
            plain = Tokenize(tokenizer=folder, add_eos=True)
        assert plain.identity() == Tokenize(tokenizer=json_file, add_eos=True).identity()
        for file, content in ({name: {}} | settings).items():
            (folder / file).write_text(json.dumps((own if file == name else {}) | content))
        known = transformers.AutoTokenizer.from_pretrained(folder)
        stage = Tokenize(tokenizer=folder, add_eos=True, add_special_tokens=False)
        ids = known(texts, add_special_tokens=False)["input_ids"]
        assert column(stage, texts) == [[*row, known.eos_token_id] for row in ids]
        assert stage.pad_id == known.pad_token_id
        assert stage.identity()["tokenizer"] != plain.identity()["tokenizer"]

        said = r"names the token '<.*>', which its tokenizer.json lacks"
        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: 1 / 0)
        with pytest.raises(ConfigError, match=f"{said}, and transformers makes no .*: give .*json"):
            Tokenize(tokenizer=folder)
        monkeypatch.setattr("trainpipes.tokenizers.adapters.find_spec", lambda _: None)
        with pytest.raises(ConfigError, match=f"{said}: pip install transformers, or give .*json"):
            Tokenize(tokenizer=folder)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                "nowhere/tokenizer.json",
                "no tokenizer nowhere/tokenizer.json: the nearest directory",
            ),
            ("s3://bucket/tokenizer.txt", "ends in .json, a SentencePiece model in .model"),
            ("tiktoken:cl100k", r"'cl100k' \(did you mean 'cl100k_base'\?\)"),
            (None, "a tokenizer is the path of a tokenizer.json.*got None"),
            (7, "got 7"),
        ],
    )
    def test_what_is_no_tokenizer_is_refused_at_once(self, given: Any, message: str) -> None:
        pytest.importorskip("tiktoken")
        with pytest.raises(ConfigError, match=message):
            Tokenize(tokenizer=given)

    @pytest.mark.parametrize("name", ["words", "team/words"])
    def test_a_name_is_one_on_the_hub(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        transformers = pytest.importorskip("transformers")
        asked, known = [], transformed(bpe())

        def found(name: str, **options: Any) -> Any:
            asked.append((name, options))
            if known is None:
                raise OSError("no network\nand more")
            return known

        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", found)
        stage = Tokenize(tokenizer=name)
        assert column(stage, TEXTS) == [e.ids for e in bpe().encode_batch(TEXTS)]
        assert asked == [(name, {"local_files_only": False, "trust_remote_code": False})]
        known = None
        said = f"'{name}' is not a path.*: no network; .*download {name}"
        with pytest.raises(ConfigError, match=said):
            Tokenize(tokenizer=name)

    def test_a_directory_without_a_tokenizer_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=f"that exists is {tmp_path}$"):
            Tokenize(tokenizer=tmp_path / "a" / "b" / "tokenizer.json")
        (tmp_path / "weights.bin").touch()
        with pytest.raises(ConfigError, match=r"holds no tokenizer.json.*it holds weights.bin"):
            Tokenize(tokenizer=tmp_path)

    def test_a_file_that_is_no_tokenizer_is_named(self, tmp_path: Path) -> None:
        for name in ("broken.json", "broken.model"):
            path = tmp_path / name
            path.write_text("{}")
            with pytest.raises(UnreadableError, match="broken") as caught:
                column(Tokenize(tokenizer=path), ["x"])
            assert caught.value.path == str(path)
            assert not hasattr(caught.value, "_trainpipes")  # it is about no row

    @pytest.mark.parametrize(
        ("package", "given"),
        [("tokenizers", "a.json"), ("sentencepiece", "a.model"), ("tiktoken", "tiktoken:gpt2")],
    )
    def test_a_missing_package_is_named_with_what_to_type(
        self, package: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path(given).touch()
        monkeypatch.setattr("trainpipes._internal.checks.find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match=rf"pip install {package}$"):
            Tokenize(tokenizer=given)

    def test_parts_written_in_python_cannot_be_copied(self) -> None:
        from tokenizers import pre_tokenizers

        class Nothing:
            def pre_tokenize(self, text: Any) -> None: ...

        tokenizer = bpe()
        tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Nothing())
        with pytest.raises(ConfigError, match="give a function instead"):
            column(Tokenize(tokenizer=tokenizer), ["x"])


class TestColumns:
    def test_text_columns_give_way_to_ids(self) -> None:
        rows = pa.table({"n": [1, 2], "text": ["a", "b"]})
        stage = Tokenize(tokenizer="bytes")
        assert stage.process(run_of(rows)).block.data.column_names == ["n", "input_ids"]
        kept = Tokenize(tokenizer="bytes", keep_text=True).process(run_of(rows)).block.data
        assert kept.column_names == ["n", "text", "input_ids"]

    def test_a_dict_names_what_each_becomes(self) -> None:
        tokenizer = bracketed()
        rows = pa.table({"prompt": PROMPTS, "response": ANSWERS})
        columns = {"prompt": "input_ids", "response": "target_ids"}
        stage = Tokenize(tokenizer=tokenizer, columns=columns, max_length=8)
        tokenizer.enable_truncation(8)
        assert column(stage, rows, "input_ids") == hugging(tokenizer, PROMPTS)
        assert column(stage, rows, "target_ids") == hugging(tokenizer, ANSWERS)
        assert stage.id_columns == ["input_ids", "target_ids"]
        listed = Tokenize(tokenizer=tokenizer, columns=["prompt", "response"], max_length=8)
        named = {"prompt": "prompt_ids", "response": "response_ids"}
        same = Tokenize(tokenizer=tokenizer, columns=named, max_length=8)
        assert listed.id_columns == ["prompt_ids", "response_ids"]
        assert listed.process(run_of(rows)).block.data == same.process(run_of(rows)).block.data
        assert listed.identity() == same.identity()

    @pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), "dictionary"])
    def test_any_kind_of_text_will_do(self, kind: Any) -> None:
        texts = pa.array(TEXTS + TEXTS)
        texts = texts.dictionary_encode() if kind == "dictionary" else texts.cast(kind)
        chunks = pa.chunked_array([texts.slice(3, 4), texts.slice(9)])
        expected = hugging(bracketed(), TEXTS[3:7] + (TEXTS + TEXTS)[9:])
        assert column(Tokenize(tokenizer=bracketed()), pa.table({"text": chunks})) == expected

    def test_rows_that_are_dicts_stay_dicts(self) -> None:
        rows = [{"n": k, "text": text} for k, text in enumerate(TEXTS)]
        stage = Tokenize(tokenizer=bracketed(), labels=True)
        found = stage.process(run_of(rows)).block.data
        expected = hugging(bracketed(), TEXTS)
        for k, row in enumerate(found):
            assert list(row) == ["n", "input_ids", "labels"]
            assert row["input_ids"].dtype == np.int32
            assert row["input_ids"].tolist() == row["labels"].tolist() == expected[k]
            row["labels"][:] = -100
            assert row["input_ids"].tolist() == expected[k]
        assert "text" in rows[0]  # the user's rows are as they were
        assert stage.process(run_of([])).block.data == []

    @pytest.mark.parametrize("template", ["{{{n}}} Q: {q}\nA: {a}{q}", "{a}"])
    def test_a_template_is_filled_with_columns(self, template: str) -> None:
        rows = pa.table({"q": PROMPTS, "n": [1, -2, 3, 40], "a": ANSWERS})
        stage = Tokenize(tokenizer=bracketed(), template=template)
        expected = hugging(bracketed(), [template.format(**row) for row in rows.to_pylist()])
        found = stage.process(run_of(rows)).block.data.to_pylist()
        dicts = rows.to_pylist()
        of_dicts = stage.process(run_of(dicts)).block.data
        of_numpys = [row | {"n": np.int32(row["n"]), "a": np.str_(row["a"])} for row in dicts]
        for made in (found, of_dicts, stage.process(run_of(of_numpys)).block.data):
            assert [list(row["input_ids"]) for row in made] == expected

    @given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    def test_what_comes_out_does_not_depend_on_how_rows_come(self, sizes: list[int]) -> None:
        texts = (TEXTS * 4)[: sum(sizes)]
        sizes = sizes if sum(sizes) <= len(texts) else [len(texts)]
        stage = Tokenize(tokenizer=bracketed(), max_length=9, labels=True, add_eos=True)
        rows = pa.table({"text": texts})
        whole = stage.process(run_of(rows)).block.data.to_pylist()
        parts, start = [], 0
        for size in sizes:
            part = run_of(rows.slice(start, size), first=start)
            parts += stage.process(part).block.data.to_pylist()
            start += size
        assert parts == whole[:start]


class TestJoined:
    def joined(self, **options: Any) -> tuple[list[list[int]], list[list[int]] | None]:
        stage = Tokenize(tokenizer=bracketed(), concat=["prompt", "response"], **options)
        rows = pa.table({"prompt": PROMPTS, "response": ANSWERS})
        found = stage.process(run_of(rows)).block.data
        labels = found.column("labels").to_pylist() if "labels" in found.column_names else None
        return found.column("input_ids").to_pylist(), labels

    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("max_length", [None, 2, 3, 5, 9, 14])
    @pytest.mark.parametrize("labels", [None, "response", ["prompt"], True])
    def test_columns_are_segments_of_one_sequence(
        self, side: Any, max_length: int | None, labels: Any
    ) -> None:
        found, marks = self.joined(
            max_length=max_length, truncation_side=side, labels=labels, on_error="keep"
        )
        bare = bpe()
        for k, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
            a, b = bare.encode(prompt).ids, bare.encode(answer).ids
            told = [x if labels in (True, ["prompt"]) else -100 for x in a]
            told += [x if labels in (True, "response") else -100 for x in b]
            text, room = a + b, None if max_length is None else max_length - 2
            if room is not None:
                first = 0 if side == "right" else max(len(text) - room, 0)
                text, told = text[first : first + room], told[first : first + room]
            assert found[k] == [BOS, *text, EOS]
            if labels is not None:
                assert marks is not None
                cut = side == "right" and len(text) < len(a + b)
                assert marks[k] == [BOS if labels is True else -100, *told, -100 if cut else EOS]

    def test_the_end_token_counts_as_a_label_whoever_puts_it_there(self) -> None:
        for options in ({"add_special_tokens": False, "add_eos": True}, {"add_eos": True}, {}):
            found, marks = self.joined(labels="response", **options)
            assert marks is not None
            assert all(ids[-1] == EOS for ids in found)
            assert all(mark[-1] == EOS and mark.count(EOS) == 1 for mark in marks)

    def test_a_text_that_is_cut_teaches_no_end(self) -> None:
        # As where end-of-text is written first and cut off with the rest: the loss is over the same tokens.
        pairs = [("ab", "cd"), ("ab", "cdef"), ("abcdef", "g")]
        rows = pa.Table.from_pylist([{"a": a, "b": b} for a, b in pairs])
        options: dict[str, Any] = {"tokenizer": "bytes", "concat": ["a", "b"], "add_eos": True}
        for labels, first in (("b", -100), (True, None)):
            stage = Tokenize(**options, labels=labels, max_length=5)
            found = stage.process(run_of(rows)).block.data.to_pylist()
            for row, (a, b) in zip(found, pairs, strict=True):
                text = list(f"{a}{b}".encode())
                marks = [*([first] * len(a) if first else text[: len(a)]), *text[len(a) :], 256]
                assert row["input_ids"] == [*text[:4], 256]
                assert row["labels"] == (marks if len(text) < 5 else [*marks[:4], -100])

    def test_of_hundreds_of_columns_are_joined(self) -> None:
        rows = pa.table({f"c{n}": [chr(97 + n % 26), "-"] for n in range(300)})
        stage = Tokenize(tokenizer="bytes", concat=rows.column_names, add_eos=True)
        assert [bytes(ids[:-1]) for ids in column(stage, rows)] == [
            bytes(97 + n % 26 for n in range(300)), b"-" * 300
        ]  # fmt: skip

    def test_specials_after_the_text_that_end_nothing_are_no_labels(self) -> None:
        rows = pa.table({"a": ["x"], "b": ["y"]})
        stage = Tokenize(tokenizer=bpe("$A <unk>"), concat=["a", "b"], labels="b")
        assert column(stage, rows, "labels")[0][-1] == -100


class TestPairs:
    def test_may_end_with_an_end_token_of_their_own(self) -> None:
        tokenizer = bpe("$A", "$A <unk> $B:1")
        rows = pa.table({"a": ["one two"], "b": ["three four"]})
        options: dict[str, Any] = {"columns": ["a", "b"], "pair": True, "add_eos": True}
        stage = Tokenize(tokenizer=tokenizer, max_length=5, labels=True, **options)
        assert column(stage, rows)[0][-1] == EOS
        assert len(column(stage, rows)[0]) == 5
        assert column(stage, rows, "token_type_ids")[0][-1] == 1
        assert column(stage, rows, "labels") == [[*column(stage, rows)[0][:-1], -100]]  # it is cut

    def test_need_a_tokenizer_that_knows_pairs(self) -> None:
        rows = pa.table({"a": ["x"], "b": ["y"]})
        stage = Tokenize(tokenizer="bytes", columns=["a", "b"], pair=True)
        with pytest.raises(ConfigError, match=r"bytes does not: give a tokenizer.json"):
            stage.process(run_of(rows))


class TestEndToken:
    def test_is_appended_and_room_kept_for_it(self) -> None:
        stage = Tokenize(tokenizer=bpe("<s> $A"), add_eos=True, max_length=4)
        for ids, text in zip(column(stage, TEXTS), TEXTS, strict=True):
            assert ids == [BOS, *bpe().encode(text).ids[:2], EOS]

    @pytest.mark.parametrize("eos", ["<unk>", 0, "Ġ"])
    def test_may_be_any_token(self, eos: Any) -> None:
        expected = bpe().token_to_id(eos) if isinstance(eos, str) else eos
        assert column(Tokenize(tokenizer=bpe(), add_eos=eos), ["x"])[0][-1] == expected

    @pytest.mark.parametrize(
        ("tokenizer", "eos", "message"),
        [
            ("two ends", True, r"has several \(</s>, <\|im_end\|>\); give it: add_eos=\"<token>\""),
            ("bytes", "</s>", "token that the tokenizer bytes has.*; give another, or its id"),
            ("function", True, r"does not tell which token that is; give it"),
        ],
    )
    def test_must_be_known(self, tokenizer: Any, eos: Any, message: str) -> None:
        given: Any = tokenizer
        if tokenizer == "two ends":
            given = bpe()
            given.add_special_tokens(["<|im_end|>"])
        elif tokenizer == "function":
            given = list
        with pytest.raises(ConfigError, match=message):
            column(Tokenize(tokenizer=given, add_eos=eos), ["x"])


class TestPadding:
    def test_and_end_are_the_tokenizers_else_0(self) -> None:
        assert Tokenize(tokenizer=bpe()).pad_id == PAD
        assert Tokenize(tokenizer=transformed(bpe(), pad_token="<s>")).pad_id == BOS
        assert Tokenize(tokenizer="bytes").pad_id == 257
        assert Tokenize(tokenizer=len).pad_id == 0
        assert Tokenize(tokenizer=bpe()).padding_side == "right"
        left = transformed(bpe(), padding_side="left", eos_token="<unk>")
        assert Tokenize(tokenizer=left).padding_side == "left"
        assert column(Tokenize(tokenizer=left, add_eos=True), ["x"])[0][-1] == 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_length": 0}, "max_length.* of 1 or more.*got 0"),
            ({"truncation_side": "top"}, "truncation_side.* must be .*, got 'top'"),
            ({"add_eos": -1}, "eos.* got -1"),
            ({"add_eos": 1.5}, "eos.* got 1.5"),
            ({"columns": []}, r"a column name or several in a list, got \[\]"),
            ({"columns": ["a", "a"]}, "each column once"),
            ({"columns": {"a": 1}}, "dict of text columns"),
            ({"columns": {"a": "x", "b": "x"}}, r"concat=\[\'a\', \'b\'\]"),
            ({"columns": ["a", "b", "c"], "pair": True}, "a list of two columns"),
            ({"pair": True}, "a list of two columns, got 'text'"),
            ({"template": "no column"}, "text with {column} for one or more.*got 'no column'"),
            ({"template": "{"}, "must be text with {column} for one or more"),
            ({"template": "{}"}, "without index, format"),
            ({"template": "{a:>3}"}, "without index, format"),
            ({"template": "{a!r}"}, "without index, format"),
            ({"template": "{a.b}"}, "without index, format"),
            ({"template": "{a}", "columns": "a"}, "takes one of columns, concat and template"),
            ({"concat": ["a", "b"], "columns": "a"}, "takes one of columns, concat"),
            ({"concat": ["a", "b"], "pair": True}, "takes one of columns, concat"),
            ({"concat": []}, r"tokenize\(concat\) must be"),
            ({"labels": "a", "columns": ["a", "b"]}, r"join columns by concat="),
            ({"labels": "txt"}, r"got 'txt'; did you mean 'text'"),
            ({"labels": "a", "columns": {"a": "b"}}, 'needs ids in a column "input_ids"'),
            ({"keep_text": True, "columns": {"a": "a"}}, "keeps the text column 'a'"),
        ],
    )
    def test_options_that_do_not_go_together(self, options: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Tokenize(tokenizer="bytes", **options)

    def test_a_length_without_room_for_special_tokens(self) -> None:
        for options in ({"columns": "a"}, {"columns": ["a", "b"], "pair": True}):
            stage = Tokenize(tokenizer=bracketed(), max_length=1, **options)
            with pytest.raises(ConfigError, match=r"counts \d special tokens.*got 1"):
                stage.process(run_of(pa.table({"a": ["x"], "b": ["y"]})))

    def test_a_template_that_writes_the_text_twice(self) -> None:
        with pytest.raises(ConfigError, match="puts a text 2 times"):
            column(Tokenize(tokenizer=bpe("$A </s> $A")), ["x"])

    @pytest.mark.parametrize("kind", ["column", "dictionary", "rows"])
    def test_null_is_no_text(self, kind: str) -> None:
        rows: Any = pa.table({"text": ["a", "b", None]})
        if kind == "dictionary":
            entries = pa.DictionaryArray.from_arrays(pa.array([0, 0, 1]), pa.array(["a", None]))
            rows = pa.table({"text": entries})
        run = run_of(rows.to_pylist() if kind == "rows" else rows, first=40)
        message = r"column 'text' is null.*\.filter\(pc.field\('text'\).is_valid\(\)\)"
        with pytest.raises(DataError, match=message) as caught:
            Tokenize(tokenizer="bytes").process(run)
        assert caught.value._trainpipes[1] == 42  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (pa.table({"text": [1]}), "column 'text' holds int64.*make it a string"),
            (pa.table({"text": [[{"role": "user"}]]}), r"holds list.*or the recipe chat"),
            (pa.table({"text": [b"x"]}), "holds binary"),
            (pa.table({"txt": ["x"]}), r"no column 'text' \(did you mean 'txt'\?\)"),
            (pa.table({"text": ["x"], "input_ids": [1]}), "have a column 'input_ids' already"),
            ([{"text": 1}], "column 'text' holds int"),
            ([{"text": [{"role": "user"}]}], "holds list.*or the recipe chat"),
            ([{"text": ["a", "b"]}], "holds list.*; flat_map.. makes a row of each"),
            ([{"text": ()}], "holds tuple.*; flat_map.. makes a row of each"),
            (pa.table({"text": [["a"]]}), "holds list.*; flat_map.. makes a row of each"),
            ([{"text": [1, 2]}], "holds list.*; make it a string"),
            ([{"txt": "x"}], "no column 'text'"),
            (
                ["x"],
                r"each row must be a dict, got str; make dicts .* or add a reader, such as .read_parquet",
            ),
        ],
    )
    def test_what_is_no_text(self, rows: Any, message: str) -> None:
        with pytest.raises(DataError, match=message):
            Tokenize(tokenizer="bytes").process(run_of(rows))

    def test_half_a_character(self) -> None:
        with pytest.raises(DataError, match="holds a surrogate") as caught:
            Tokenize(tokenizer="bytes").process(run_of([{"text": "a"}, {"text": "\ud800"}]))
        assert caught.value._trainpipes[1] == 1  # type: ignore[attr-defined]

    def test_bytes_that_are_no_utf8(self) -> None:
        broken = pa.Array.from_buffers(
            pa.string(), 2, [None, pa.py_buffer(np.int32([0, 1, 2])), pa.py_buffer(b"a\xff")]
        )
        with pytest.raises(UnicodeDecodeError) as caught:
            column(Tokenize(tokenizer=bpe()), pa.table({"text": broken}))
        assert caught.value._trainpipes[1] == 1  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (lambda texts: [[1]], "got 1 for 2 texts"),
            (lambda texts: [1, 2], "gives a list of ids"),
            (lambda texts: [[1], ["x"]], "got values such as 'x'"),
            (lambda texts: [[1, None], [2]], "got values such as None"),
            (lambda texts: [[[1], [2]], [[3]]], r"got values such as \[1\]"),
            (lambda texts: [[[1]], [[2, 3]]], "got setting an array element"),
            (lambda texts: [[True], [False]], "got values such as True"),
            (lambda texts: [[1.5], [2]], "got values such as 1.5"),
            (lambda texts: [[2**31], [1]], "of 32 bits, got 2147483648"),
            (lambda texts: [[2**31], [2**31]], "of 32 bits, got 2147483648"),
            (lambda texts: [[-(2**31) - 1], [1]], "of 32 bits, got -2147483649"),
        ],
    )
    def test_a_function_that_gives_no_ids(self, function: Any, message: str) -> None:
        with pytest.raises(DataError, match=message):
            column(Tokenize(tokenizer=function), ["a", "b"])

    def test_an_error_of_a_function_is_of_the_row_it_fails_on(self) -> None:
        def fussy(texts: list[str]) -> list[list[int]]:
            return [[1 // len(text)] for text in texts]

        with pytest.raises(ZeroDivisionError) as caught:
            Tokenize(tokenizer=fussy).process(run_of(pa.table({"text": ["a", "", "b"]}), first=7))
        assert caught.value._trainpipes[1] == 8  # type: ignore[attr-defined]


class TestIdentity:
    def test_is_the_content(self, tmp_path: Path, spm: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        other = bpe()
        other.add_tokens(["new"])
        processor = SentencePieceProcessor(model_file=str(spm))
        again, more = tiktoken_encoding(), tiktoken_encoding(**{"<|endoftext|>": 301})
        first, *rest = [
            [Tokenize(tokenizer=one).identity() for one in alike]
            for alike in ([bpe(), bpe()], [other], [spm, processor], [tiktoken_encoding(), again], [more])
        ]  # fmt: skip
        assert all(one == alike[0] for alike in (first, *rest) for one in alike)
        assert len({alike[0]["tokenizer"] for alike in (first, *rest)}) == 5
        assert Tokenize(tokenizer="bytes").identity()["tokenizer"] == "bytes"
        named = Tokenize(tokenizer=bracketed).identity()
        assert named["tokenizer"] == "tokenizer_fixtures.bracketed"

    def test_is_plain_json_and_names_what_shapes_rows(self) -> None:
        identity = Tokenize(tokenizer=bpe(), add_eos=True, max_length=5).identity()
        assert json.loads(json.dumps(identity)) == identity
        assert identity["tokenizer"].startswith("sha256:")
        assert identity["add_eos"] == EOS
        assert identity["max_length"] == 5

    def test_does_not_depend_on_what_wrote_the_file(self, tmp_path: Path) -> None:
        content = json.loads(bpe_json())
        content["version"] = "2.0"
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
        content["model"] |= {"ignore_merges": False, "a_later_option": None}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=1))
        assert Tokenize(tokenizer=tmp_path).identity() == Tokenize(tokenizer=bpe()).identity()


class TestProcesses:
    def stages(self, spm: Path) -> list[Tokenize]:
        given = [bracketed(), transformed(bpe()), spm, tiktoken_encoding(), "bytes", sorted_bytes]
        return [Tokenize(tokenizer=tokenizer) for tokenizer in given]

    def test_a_stage_can_be_pickled_before_and_after_use(self, spm: Path) -> None:
        for stage in self.stages(spm):
            fresh = pickle.loads(pickle.dumps(stage))
            expected = column(stage, TEXTS)
            used = pickle.loads(pickle.dumps(stage))
            assert not used.maker._loaded
            assert column(fresh, TEXTS) == column(used, TEXTS) == expected
            assert column(copy.deepcopy(stage), TEXTS) == expected
            assert fresh.identity() == used.identity() == stage.identity()

    def test_a_forked_child_goes_on_by_itself(self, spm: Path) -> None:
        context = multiprocessing.get_context("fork")
        for stage in self.stages(spm):
            expected = column(stage, TEXTS)
            queue = context.SimpleQueue()
            child = context.Process(target=lambda s=stage, q=queue: q.put(column(s, TEXTS)))
            child.start()
            assert queue.get() == expected
            child.join()

    def test_the_content_of_a_file_travels(self, json_file: Path) -> None:
        beside = json_file.with_name("tokenizer_config.json")
        beside.write_text('{"pad_token": "</s>"}')
        stage = Tokenize(tokenizer=json_file)
        sent = pickle.dumps(stage)
        json_file.write_text("{}")
        beside.unlink()
        for either in (stage, pickle.loads(sent)):
            assert column(either, ["x"]) == hugging(bracketed(), ["x"])
            assert either.pad_id == EOS

    def test_forked_workers_print_nothing(self) -> None:
        script = """
            import os, torch, pyarrow as pa, trainpipes as tp
            from tokenizer_fixtures import TEXTS, bracketed
            tokenizer = bracketed()
            tokenizer.encode_batch(TEXTS * 200)
            def guarded(batch):
                if torch.utils.data.get_worker_info() is not None:
                    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
                return batch
            pipe = tp.from_arrow(pa.table({"text": TEXTS * 20})).sharding_filter(num_shards=2)
            pipe = pipe.tokenize(tokenizer, max_length=9).batch(4).pad_collate().map(guarded)
            alone = [batch["input_ids"].tolist() for batch in tp.Loader(pipe, threads=0)]
            loader = torch.utils.data.DataLoader(pipe, batch_size=None, num_workers=2)
            assert [batch["input_ids"].tolist() for batch in loader] == alone
        """
        environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        few_cores = "ignore:This DataLoader will create"
        command = [*python(), "-W", "error", "-W", few_cores, "-c", textwrap.dedent(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def sorted_bytes(texts: list[str]) -> list[list[int]]:
    return [sorted(text.encode()) for text in texts]


def test_a_second_token_at_the_beginning_is_warned_of() -> None:
    from tokenizers import processors

    tokenizer = bpe()
    tokenizer.add_special_tokens(["<s>"])
    begins = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begins)
    rendered = tp.from_arrow(pa.table({"text": ["", "<s>user: hi"]}))
    with pytest.warns(UserWarning, match=r"begin with '<s>'.*pass add_special_tokens=False"):
        (_, row) = rendered.tokenize(tokenizer)
    assert row["input_ids"][:2] == [begins[0][1]] * 2
    (_, once) = rendered.tokenize(tokenizer, add_special_tokens=False)
    assert once["input_ids"] == row["input_ids"][1:]
    list(tp.from_arrow(pa.table({"text": ["user: hi"]})).tokenize(tokenizer))


@pytest.mark.parametrize("concat", [None, ["prompt", "text"]])
def test_a_second_token_at_the_end_is_warned_of(concat: list[str] | None) -> None:
    from tokenizers import processors

    tokenizer = bpe()
    tokenizer.add_special_tokens(["</s>", "[SEP]"])
    end, separator = (tokenizer.token_to_id(token) for token in ("</s>", "[SEP]"))
    columns = {"prompt": ["hi", "ho</s>"], "text": ["", "user: hi</s>"]}
    options: dict[str, Any] = {} if concat is None else {"concat": concat}
    rows = tp.from_arrow(pa.table(columns))
    with pytest.warns(UserWarning, match=r"end with '</s>'.*with map\(\), or pass add_eos=False"):
        (_, row) = rows.tokenize(tokenizer, **options, add_eos="</s>")
    assert row["input_ids"][-2:] == [end] * 2
    list(rows.tokenize(tokenizer, **options))
    separated = [("[SEP]", separator)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", special_tokens=separated
    )
    list(rows.tokenize(tokenizer, **options))
    rows = tp.from_arrow(pa.table({**columns, "text": ["", "hi[SEP]"]}))
    with pytest.warns(UserWarning, match=r"end with '\[SEP\]'.*pass add_special_tokens=False"):
        list(rows.tokenize(tokenizer, **options))


def test_python_rows_that_were_batched_are_tokenized_and_padded() -> None:
    rows = [{"text": "a" * n} for n in range(8)]
    pipe = tp.from_dataset(rows).batch(4).tokenize("bytes").pad_collate()
    table = tp.from_arrow(pa.Table.from_pylist(rows)).batch(4).tokenize("bytes").pad_collate()
    pairs = zip(pipe, table, strict=True)
    assert all(a["input_ids"].tolist() == b["input_ids"].tolist() for a, b in pairs)
