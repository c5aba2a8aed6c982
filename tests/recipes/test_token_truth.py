"""What labels say, token by token, is what a plain reading of the rows says: over real rows, cut anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

import trainpipes as tp
from chats import CHATML, conversations_of
from trained import real_text
from trainpipes_recipes import chat, sft
from trainpipes_recipes.samples import END, PAD, train_tokenizer

UNMARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Added to responses, so that characters of several bytes and empty responses stand everywhere.
ENDINGS = ["", "", "  # é", "🙂", "\n猫が\n", " \t"]
OPTIONS: dict[str, Any] = {
    "batch_size": 16, "drop_last": False, "num_shards": 1, "buffer_size": 100,
}  # fmt: skip
KEEP = OPTIONS | {"on_error": "keep"}

#: Rows differ in length, so that each third place is in all parts of some.
EVERY = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])

#: A row as bytes: stretches of tokens, and whether they are learnt.
Stretches = tuple[tuple[bool, bytes], ...]


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    found = []
    for number, (ask, answer) in enumerate(real_text()):
        answer = "" if number % 17 == 0 else answer[:400] + ENDINGS[number % len(ENDINGS)]
        found.append((f"{number}: {ask[-300:]}", answer))
    return found


@pytest.fixture(scope="module")
def tokenizer(pairs: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(pairs[::3], path, vocabulary=1500)
    found = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=END, pad_token=PAD)
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    found.chat_template = CHATML
    return found


class Bytes:
    """What each token of a byte-level tokenizer stands for."""

    def __init__(self, tokenizer: Any) -> None:
        places = dict.fromkeys(
            [*range(33, 127), *range(161, 173), *range(174, 256)]
        )  # GPT-2's alphabet: bytes that can be printed stand for themselves
        letters = {chr(byte): byte for byte in places}
        others = (byte for byte in range(256) if byte not in places)
        letters |= {chr(256 + n): byte for n, byte in enumerate(others)}
        assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
        special = set(tokenizer.all_special_tokens)
        self.of = {
            number: piece.encode() if piece in special else bytes(letters[c] for c in piece)
            for piece, number in tokenizer.get_vocab().items()
        }

    def stretches(self, ids: Sequence[int], learnt: Sequence[bool]) -> Stretches:
        found: list[tuple[bool, bytes]] = []
        for token, flag in zip(ids, learnt, strict=True):
            before = found.pop() if found and found[-1][0] == flag else (flag, b"")
            found.append((flag, before[1] + self.of[token]))
        return tuple(found)


def given(batches: Any, decode: Bytes) -> Counter[Stretches]:
    """The rows of batches."""
    found: Counter[Stretches] = Counter()
    for batch in batches:
        rows = zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
        for ids, mask, labels in rows:
            length = int(mask.sum())
            assert mask[:length].all()
            assert (labels[length:] == -100).all()
            learnt = labels[:length] != -100
            assert (labels[:length][learnt] == ids[:length][learnt]).all()
            found[decode.stretches(ids[:length].tolist(), learnt.tolist())] += 1
    return found


def cut(parts: Iterator[tuple[bool, list[int]]], length: int) -> tuple[list[int], list[bool]]:
    tokens = [(token, flag) for flag, ids in parts for token in ids][:length]
    return [token for token, _ in tokens], [flag for _, flag in tokens]


def test_sft_learns_the_response_and_its_end(pairs: Any, tokenizer: Any) -> None:
    decode = Bytes(tokenizer)
    rows = tp.from_dataset([{"prompt": ask, "response": answer} for ask, answer in pairs])
    found = given(sft(rows, tokenizer, max_length=4096, **OPTIONS), decode)
    wanted: Counter[Stretches] = Counter()
    for ask, answer in pairs:
        wanted[(False, ask.encode()), (True, answer.encode() + END.encode())] += 1
    assert len(pairs) > 250
    assert found == wanted


@EVERY
def test_sft_cut_at_every_token(pairs: Any, tokenizer: Any, every: int) -> None:
    decode = Bytes(tokenizer)
    some = [(ask[:12], answer[-12:]) for ask, answer in pairs[::24]]
    rows = tp.from_dataset([{"prompt": ask, "response": answer} for ask, answer in some])
    ids = [[tokenizer.encode(text, add_special_tokens=False) for text in pair] for pair in some]
    longest = max(len(ask) + len(answer) for ask, answer in ids)
    end = tokenizer.eos_token_id
    for length in [*range(1, longest, every), longest, longest + 1, longest + 2]:
        found = given(sft(rows, tokenizer, max_length=length, **OPTIONS), decode)
        wanted: Counter[Stretches] = Counter()
        for ask, answer in ids:
            tokens, learnt = cut(iter([(False, ask), (True, answer)]), length - 1)
            whole = len(tokens) == len(ask) + len(answer)
            wanted[decode.stretches([*tokens, end], [*learnt, whole])] += 1
        assert found == wanted, length


def plain(conversation: Sequence[dict[str, str]]) -> list[tuple[bool, str]]:
    """A conversation as ChatML, and which parts are learnt, written by hand."""
    parts = []
    for message in conversation:
        parts.append((False, f"<|im_start|>{message['role']}\n"))
        parts.append((message["role"] == "assistant", message["content"] + "<|im_end|>"))
        parts.append((False, "\n"))
    return parts


def expected(conversation: Any, tokenizer: Any, decode: Bytes) -> tuple[list[int], list[bool]]:
    """Tokens of the whole text; one is learnt if any of its bytes is."""
    parts = plain(conversation)
    flags = [flag for flag, part in parts for _ in part.encode()]
    ids = tokenizer.encode("".join(part for _, part in parts), add_special_tokens=False)
    learnt, place = [], 0
    for token in ids:
        stop = place + len(decode.of[token])
        learnt.append(any(flags[place:stop]))
        place = stop
    assert place == len(flags)
    return ids, learnt


@pytest.mark.parametrize("template", [CHATML, UNMARKED])
def test_chat_learns_what_the_assistant_says(pairs: Any, tokenizer: Any, template: str) -> None:
    decode = Bytes(tokenizer)
    conversations = conversations_of(pairs)
    rows = tp.from_dataset([{"messages": each} for each in conversations])
    found = given(chat(rows, tokenizer, template=template, max_length=10_000, **KEEP), decode)
    wanted: Counter[Stretches] = Counter()
    as_texts = 0
    for conversation in conversations:
        stretches = decode.stretches(*expected(conversation, tokenizer, decode))
        wanted[stretches] += 1
        said = [text.decode() for learnt, text in stretches if learnt]
        as_texts += said == [
            each["content"] + "<|im_end|>" for each in conversation if each["role"] == "assistant"
        ]
    assert len(conversations) > 125
    assert found == wanted
    # Where a response starts with a line end or a space, it may share its first token with what is before.
    assert as_texts > 0.95 * len(conversations)


@EVERY
@pytest.mark.parametrize("template", [CHATML, UNMARKED])
def test_chat_cut_at_every_token(pairs: Any, tokenizer: Any, template: str, every: int) -> None:
    decode = Bytes(tokenizer)
    conversations = conversations_of([(ask[:12], answer[-12:]) for ask, answer in pairs[::120]])
    rows = tp.from_dataset([{"messages": each} for each in conversations])
    whole = [expected(each, tokenizer, decode) for each in conversations]
    longest = max(len(ids) for ids, _ in whole)
    for length in [*range(1, longest, every), longest, longest + 1]:
        pipe = chat(rows, tokenizer, template=template, max_length=length, **KEEP)
        wanted = Counter(decode.stretches(ids[:length], learnt[:length]) for ids, learnt in whole)
        assert given(pipe, decode) == wanted, length


def test_a_folder_of_a_tokenizer_gives_the_same(pairs: Any, tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    decode = Bytes(tokenizer)
    rows = tp.from_dataset([{"messages": each} for each in conversations_of(pairs[:60])])
    whole = given(chat(rows, str(tmp_path), **KEEP), decode)
    assert whole == given(chat(rows, tokenizer, **KEEP), decode)
