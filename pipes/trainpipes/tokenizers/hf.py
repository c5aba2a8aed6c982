"""``tokenizers`` (``tokenizer.json``), and the fast tokenizers of transformers that are built on
it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa

from trainpipes._internal.checks import need
from trainpipes.columns.rectangles import Side
from trainpipes.engine.layout import IntArray
from trainpipes.errors import ConfigError, UnreadableError
from trainpipes.tokenizers.engine import Affixes, Engine, File, digest, with_unknown
from trainpipes.tokenizers.gigatoken import EVERY, Checked, Gigatoken, why_not
from trainpipes.tokenizers.parallelism import settle
from trainpipes.tokenizers.ragged import Ragged, assemble


@dataclass(frozen=True)
class Frame:
    """What stands around and between two texts."""

    order: tuple[int, int]
    ids: list[list[int]]  # before, between and behind the texts
    types: list[list[int]]
    of_texts: list[int]  # the type of each

    @staticmethod
    def of(probe: Any) -> Frame | None:
        """From the encoding of two texts of one token; None unless each stands there once."""
        texts = list(probe.sequence_ids)
        once = texts.count(0) == texts.count(1) == 1
        if not once or list(probe.special_tokens_mask).count(0) != 2:
            return None
        low, high = sorted((texts.index(0), texts.index(1)))
        cuts = slice(0, low), slice(low + 1, high), slice(high + 1, None)
        ids, types = ([values[cut] for cut in cuts] for values in (probe.ids, probe.type_ids))
        of_texts = [probe.type_ids[texts.index(number)] for number in (0, 1)]
        return Frame((texts[low], texts[high]), ids, types, of_texts)

    @property
    def special(self) -> int:
        return sum(map(len, self.ids))

    def join(self, pair: tuple[Ragged, Ragged]) -> tuple[Ragged, Ragged]:
        types = [
            Ragged(np.full_like(text.values, kind), text.offsets)
            for text, kind in zip(pair, self.of_texts, strict=True)
        ]
        return self._around(pair, self.ids), self._around(types, self.types)

    def _around(self, texts: Sequence[Ragged], special: list[list[int]]) -> Ragged:
        before, between, behind = special
        joint = Ragged.of_lists([between] * len(texts[0]))
        first, second = self.order
        return assemble([texts[first], joint, texts[second]], before, behind)[0]


def longest_first(first: Ragged, second: Ragged, room: int, side: Side) -> tuple[Ragged, Ragged]:
    """Cut pairs to ``room`` tokens: the longer text down to the other's length, then both. Of an
    odd number the one that was longer, else the second, keeps one more.
    """
    a, b = first.lengths, second.lengths
    short, long = np.minimum(a, b), np.maximum(a, b)
    too_long = short + long > room
    kept_short = np.where(too_long, np.minimum(short, room // 2), short)
    kept_long = np.where(too_long, room - kept_short, long)
    swapped = a > b
    kept_a = np.where(swapped, kept_long, kept_short)
    kept_b = np.where(swapped, kept_short, kept_long)
    return _cut(first, kept_a, side), _cut(second, kept_b, side)


def _cut(rows: Ragged, kept: IntArray, side: Side) -> Ragged:
    if not (kept < rows.lengths).any():
        return rows
    starts = rows.offsets[:-1] if side == "right" else rows.offsets[1:] - kept
    return rows.parts(starts, kept)


#: Names that end a text in published tokenizers.
ENDS = ("</s>", "<|endoftext|>", "<eos>", "<|im_end|>", "<|end_of_text|>", "<|eos|>", "[EOS]")
PADS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")


@dataclass(frozen=True)
class Named:
    eos: str | None = None
    pad: str | None = None
    padding_side: str | None = None

    @staticmethod
    def of_config(content: bytes | None) -> Named:
        """From a ``tokenizer_config.json``; what is not there or not understood is None."""
        try:
            config = json.loads(content or b"{}")
        except (ValueError, RecursionError):
            return Named()
        eos, pad, side = (config.get(k) for k in ("eos_token", "pad_token", "padding_side"))
        return Named(_token(eos), _token(pad), side if side in ("left", "right") else None)


def _token(entry: Any) -> str | None:
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


@dataclass(frozen=True)
class TokenizerJson:
    fingerprint: str
    tokens: dict[str, int]

    @staticmethod
    def of(text: str) -> TokenizerJson:
        content = json.loads(text)
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise ValueError('it is no JSON object with a "model"')
        model = content["model"]
        vocab = model.get("vocab")
        if isinstance(vocab, list):  # Unigram: pairs of a piece and its score
            vocab = {entry[0]: number for number, entry in enumerate(vocab)}
        vocab = vocab or {}
        tokens = {name: vocab[name] for name in (*ENDS, *PADS) if name in vocab}
        tokens |= {t["content"]: t["id"] for t in content.get("added_tokens") or ()}
        if model.get("merges"):
            model["merges"] = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        unused = ("version", "truncation", "padding")
        shaping = {k: v for k, v in content.items() if k not in unused}
        canonical = json.dumps(_set_only(shaping), sort_keys=True, separators=(",", ":"))
        return TokenizerJson(digest(canonical.encode("utf-8", "surrogatepass")), tokens)


def _set_only(value: Any) -> Any:
    """Without options that are off: newer versions write more of them."""
    if isinstance(value, list):
        return [_set_only(v) for v in value]
    if not isinstance(value, dict):
        return value
    return {
        k: _set_only(v) for k, v in value.items() if v is not None and v is not False and v != ""
    }


class HuggingFace(Engine):
    def __init__(self, tokenizer: Any, fast: bool = True) -> None:
        super().__init__()
        need("tokenizers", "a tokenizer.json")
        settle()
        self._tokenizer = tokenizer
        self._fast = fast

    def __repr__(self) -> str:
        own = self._tokenizer
        return own.path if isinstance(own, File) else type(own).__name__

    @cached_property
    def _text(self) -> str:
        """An object's JSON now; later changes do not count."""
        inner = getattr(self._tokenizer, "backend_tokenizer", self._tokenizer)
        try:
            return str(inner.to_str())
        except Exception as error:
            raise ConfigError(
                f"{self} has parts written in Python, which cannot be copied ({error}); give a "
                "function instead: lambda texts: [e.ids for e in tokenizer.encode_batch(texts)]"
            ) from error

    def _json(self) -> str:
        if isinstance(self._tokenizer, File):
            return self._tokenizer.read().decode("utf-8")
        return self._text

    def _load(self) -> _Copy:
        from tokenizers import Tokenizer

        settle()
        text = self._json()
        try:
            copy = _Copy(Tokenizer.from_str(text), self._splits_special)
        except Exception as error:
            raise self._unreadable(error) from error
        if self._refusal is None:
            copy.checked = Checked(self._faster, copy.encode_all, repr(self))
        return copy

    @cached_property  # the JSON of a large vocabulary takes a while to parse
    def _refusal(self) -> str | None:
        if not self._fast:
            return 'engine="tokenizers"'
        try:
            return why_not(json.loads(self._json()), self._splits_special)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"what it is made of is not understood: {error}"

    def _faster(self) -> Gigatoken:
        content = json.loads(self._json())
        content |= {"truncation": None, "padding": None, "post_processor": None}
        return Gigatoken(json.dumps(content))

    def runs_on(self) -> str:
        plain = f"tokenizers {version('tokenizers')}"
        why = self._refusal
        if why is not None:
            return f"{plain}; not gigatoken: {why}"
        return f"gigatoken {version('gigatoken')}, checked against {plain} on 1 row in {EVERY:,}"

    def package(self) -> str:
        return "tokenizers" if self._refusal else "gigatoken"

    def _unreadable(self, error: Exception) -> UnreadableError:
        return UnreadableError(
            f"{self} is not a tokenizer.json that this version of tokenizers reads: {error}",
            path=str(self),
        )

    @property
    def _splits_special(self) -> bool:
        plain = getattr(self._tokenizer, "split_special_tokens", None)
        return bool(getattr(self._tokenizer, "encode_special_tokens", False) or plain)

    @cached_property
    def facts(self) -> TokenizerJson:
        try:
            return TokenizerJson.of(self._json())
        except (ValueError, KeyError, TypeError) as error:
            raise self._unreadable(error) from error

    @cached_property
    def named(self) -> Named:
        given = self._tokenizer
        if isinstance(given, File):
            return Named.of_config(given.beside("tokenizer_config.json"))
        names = ("eos_token", "pad_token", "padding_side")
        return Named(*(getattr(given, name, None) for name in names))

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        copy: _Copy = self.loaded
        if copy.checked is None:
            return copy.encode_all(texts)
        return copy.checked.encode(texts, numbers)

    def encode_pairs(
        self, first: pa.LargeStringArray, second: pa.LargeStringArray, special: bool,
        max_length: int | None, side: Side, numbers: IntArray,
    ) -> tuple[Ragged, Ragged]:  # fmt: skip
        frame = self._frames[special]
        if frame is None:
            raise ConfigError(
                f"pair=True needs a tokenizer that writes each text of a pair once, and {self} does not: "
                "leave pair out to join the columns"
            )
        pair = self.encode(first, numbers), self.encode(second, numbers)
        if max_length is not None:
            pair = longest_first(*pair, max_length - frame.special, side)
        return frame.join(pair)

    @cached_property
    def _frames(self) -> dict[bool, Frame | None]:
        probe = self.loaded.probe()
        return {s: Frame.of(probe.encode("x", "x", add_special_tokens=s)) for s in (False, True)}

    def affixes(self) -> Affixes:
        found = self.loaded.probe().encode("x")
        ids, special = found.ids, found.special_tokens_mask
        if special.count(0) != 1:
            raise ConfigError(
                f"{self} puts a text {special.count(0)} times between its special tokens, and only "
                "once is supported here; pass add_special_tokens=False"
            )
        place = special.index(0)
        return tuple(ids[:place]), tuple(ids[place + 1 :])

    def pair_affixes(self) -> tuple[int, int | None]:
        found = self.loaded.probe().encode("x", "x")
        ids, texts = found.ids, found.sequence_ids
        return texts.count(None), ids[-1] if texts[-1] is None else None

    def ends(self) -> dict[str, int]:
        said = self.named.eos
        if said is not None:
            found = self.token_id(said)
            return {} if found is None else {said: found}
        tokens = self.facts.tokens
        return {name: tokens[name] for name in ENDS if name in tokens}

    def pad_id(self) -> int | None:
        said = self.named.pad
        if said is not None:
            return self.token_id(said)
        tokens = self.facts.tokens
        return next((tokens[name] for name in PADS if name in tokens), None)

    def padding(self) -> Side | None:
        side = self.named.padding_side
        return None if side is None else "left" if side == "left" else "right"

    def token_id(self, token: str) -> int | None:
        known = self.facts.tokens.get(token)
        if known is not None:
            return known
        found: int | None = self.loaded.plain.token_to_id(token)
        return found

    def pieces(self) -> dict[str, int]:
        return dict(self.loaded.plain.get_vocab(with_added_tokens=True))

    def special_ids(self) -> list[int]:
        added = self.loaded.plain.get_added_tokens_decoder()
        return sorted(number for number, token in added.items() if token.special)

    def decode(self, ids: Sequence[int]) -> str:
        plain = self.loaded.plain
        return with_unknown(
            list(map(int, ids)),
            lambda i: 0 <= i < 2**32 and plain.id_to_token(i) is not None,
            lambda known: str(plain.decode(known, skip_special_tokens=False)),
        )

    def fingerprint(self) -> str:
        content = self.facts.fingerprint
        return f"{content} (special tokens as text)" if self._splits_special else content


class _Copy:
    """A tokenizer of its own: changing it while a thread encodes raises "Already borrowed"."""

    def __init__(self, tokenizer: Any, splits_special: bool) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = splits_special
        self.plain = tokenizer
        self.checked: Checked | None = None

    def encode_all(self, texts: pa.LargeStringArray) -> Ragged:
        encode = getattr(self.plain, "encode_batch_fast", self.plain.encode_batch)
        return Ragged.of_encodings(encode(texts.to_pylist(), add_special_tokens=False))

    def probe(self) -> Any:
        """A tokenizer of one-token texts, "x", with this one's post-processor."""
        from tokenizers import Tokenizer, models

        probe = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
        if self.plain.post_processor is not None:
            probe.post_processor = self.plain.post_processor
        return probe
