"""``tokenizers`` (``tokenizer.json``), the fast tokenizers of transformers that are built on it, and
gigatoken: the same ids, a hundred times as fast on a single core.

gigatoken writes out the regular expressions of published tokenizers by hand, so ``Checked`` compares it
with ``tokenizers``. Its own threads would not survive a fork: it runs on the caller's.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trainpipes import errors
from trainpipes._internal.checks import IntArray, need, pip_install
from trainpipes._internal.locks import cached_property
from trainpipes.columns.arrays import apart, to_arrow, to_numpy
from trainpipes.columns.rectangles import Side
from trainpipes.tokenizers.engine import (
    Affixes,
    Pair,
    Ragged,
    Special,
    TokenizerEngine,
    assemble,
    digest,
    has_targets,
    no_language,
    read,
    settle,
)

#: Bytes of text after which the engine is made anew. It keeps every word that it has ever seen: some
#: 10 MiB of them in so much prose or code, where words are random letters up to 60 bytes for each.
RENEWED = 1 << 29
#: Texts of the first call that are compared, in each process.
FIRST = 64
#: Rows are compared whose number is a multiple of this.
EVERY = 1000
#: Characters that are shown of a text, at most.
SHOWN = 500

#: Code points that Unicode came to know in this century, and what has none yet: the packages'
#: tables are of different versions, so that they disagree on the class, or on the canonical order,
#: of some. Texts with any of these go to ``tokenizers``. A class of RE2, wider than need be.
YOUNG = (
    r"[\x{5C8}-\x{5CF}\x{7FD}\x{870}-\x{8FF}\x{9FE}\x{C3C}\x{C5C}\x{CDC}\x{D3B}-\x{D3C}\x{EBA}\x{1715}"
    r"\x{1AB0}-\x{1AFF}\x{1DF0}-\x{1DFF}\x{20C1}\x{2B96}\x{A7C0}-\x{A7F6}\x{A82C}\x{FBC3}-\x{FBD2}"
    r"\x{FD90}-\x{FD91}\x{FDC8}-\x{FDCE}\x{10000}-\x{1D3FF}\x{1D800}-\x{1EFFF}\x{1F6D8}"
    r"\x{1F777}-\x{1F77A}\x{1F8D0}-\x{1F8D8}\x{1FA54}-\x{1FA57}\x{1FA8A}-\x{1FA8F}\x{1FAC8}\x{1FACD}\x{1FAEA}\x{1FAEF}\x{1FBFA}"
    r"\x{2A6DE}-\x{10FFFF}]"
)


def why_not(content: Mapping[str, Any], splits_special: bool = False) -> str | None:
    """Why gigatoken cannot do the work of a ``tokenizer.json``, if so."""
    try:
        version("gigatoken")
    except PackageNotFoundError:
        return f"gigatoken is not installed: {pip_install('gigatoken')}"
    model = content["model"]
    if splits_special:
        return "it reads special tokens in a text as plain text"
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, and gigatoken does BPE"
    if model.get("dropout"):
        return f"its model has dropout = {model['dropout']!r}"
    # Bytes are tokens by number, or by letter: those that print by themselves, others by 256 and more.
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = map(chr, [*printed, *range(0x100, 0x200 - len(printed))])
    numbers = (f"<0x{byte:02X}>" for byte in range(256))
    if not any(all(name in model["vocab"] for name in names) for names in (letters, numbers)):
        return "its vocabulary lacks tokens for some bytes, which gigatoken needs"
    for token in content.get("added_tokens") or ():
        name = token.get("content")
        for flag in ("rstrip", "single_word"):
            if token.get(flag):
                return f"its added token {name!r} has {flag}, which gigatoken does not follow"
        if token.get("normalized") and not token.get("special") and content.get("normalizer"):
            return f"its added token {name!r} is looked for in normalized text"
    return None


class Gigatoken:
    """gigatoken's tokenizer, made anew from time to time as its cache only grows."""

    def __init__(self, text: str) -> None:
        from gigatoken import Tokenizer

        self._make: Callable[[], Any] = lambda: Tokenizer.from_json(text).backend
        self._backend: Any = self._make()
        self._read = 0

    def encode(self, texts: pa.LargeStringArray) -> Ragged:
        if not len(texts):
            return Ragged.of_lists([])
        self._read += texts.nbytes
        if self._read > RENEWED:
            self._read, self._backend = 0, self._make()
        rows = self._backend.encode_batch(texts.to_pylist(), parallel=False).layout
        offsets = np.asarray(rows.offsets.data, dtype=np.int64)
        values = np.asarray(rows.content.data)[offsets[0] : offsets[-1]]
        return Ragged(values.astype(np.uint32, copy=False).view(np.int32), offsets - offsets[0])


class Checked:
    """Ids by gigatoken, compared with the reference's on a process's first texts, then every
    1,000th row.
    """

    def __init__(
        self, make: Callable[[], Any], reference: Callable[[Any], Ragged], name: str
    ) -> None:
        self._make, self._reference, self._name = make, reference, name
        self._fast: Any = None
        self._starting = threading.Lock()

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        sampled = np.zeros(len(texts), dtype=np.bool_) if numbers is None else numbers % EVERY == 0
        try:
            with self._starting:
                if self._fast is None:
                    self._fast = self._make()
                    sampled[:FIRST] = True
            rows_of_ids: Ragged = self._fast.encode(texts)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic of Rust is no ``Exception``
            self._reference(texts)  # which raises for a wrong text
            raise self._refused(f"failed: {error!r}") from error
        if len(rows_of_ids) != len(texts):
            raise self._refused(f"gave {len(rows_of_ids)} rows for {len(texts)} texts")
        young = young_texts(texts)
        looked_at = np.flatnonzero(sampled | young)
        if not len(looked_at):
            return rows_of_ids
        rows = rows_of_ids.to_rows()
        right = self._reference(texts.take(to_arrow(looked_at))).to_rows()
        for row, ids in zip(looked_at.tolist(), right, strict=True):
            if not young[row] and not np.array_equal(rows[row], ids):
                text = errors.cut(repr(texts[row].as_py()), SHOWN)
                raise self._refused(f"gives other ids than tokenizers for the text {text}")
            rows[row] = ids
        return Ragged.of_rows(rows) if young.any() else rows_of_ids

    def _refused(self, why: str) -> errors.ConfigError:
        said = f"tokenize({errors.hidden(self._name)}): gigatoken, which is installed, {why}"
        return errors.ConfigError(f'{said}; write tokenize(..., engine="tokenizers")')


def young_texts(texts: pa.LargeStringArray) -> npt.NDArray[np.bool_]:
    """Whether each text has a code point that packages know differently: bool ``[texts]``."""
    flags = np.zeros(len(texts), dtype=np.bool_)
    if apart(texts)[0].max(initial=0) >= 0x80:
        wide = pc.indices_nonzero(pc.invert(pc.string_is_ascii(texts)))
        young = pc.match_substring_regex(texts.take(wide), YOUNG)
        flags[to_numpy(wide.filter(young))] = True
    return flags


#: Names that end a text in published tokenizers.
ENDS = ("</s>", "<|endoftext|>", "<eos>", "<|im_end|>", "<|end_of_text|>", "<|eos|>", "[EOS]")
PADS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")
#: What a ``tokenizer_config.json`` says, and objects of transformers have as attributes.
NAMED = ("eos_token", "pad_token", "padding_side", "mask_token")

#: How classes of transformers begin that write the language beside a text.
OF_LANGUAGES = ("MBart", "Nllb", "PLBart", "SeamlessM4T")


@dataclass(frozen=True)
class Facts:
    """What a ``tokenizer.json`` says: its fingerprint, ids by name of the tokens that may end or pad
    a text, the special tokens, those that were added, and why gigatoken cannot do its work.
    """

    fingerprint: str
    tokens: dict[str, int]
    special: list[int]
    added: frozenset[str]
    refusal: str | None


class HuggingFace(TokenizerEngine):
    """The path of a ``tokenizer.json``; or an object as it is now: later changes do not count."""

    def __init__(self, tokenizer: Any, engine: str = "auto") -> None:
        is_file = isinstance(tokenizer, str)
        super().__init__(tokenizer if is_file else type(tokenizer).__name__)
        need("tokenizers", "a tokenizer.json")
        settle()
        self._fast = engine == "auto"
        split = ("encode_special_tokens", "split_special_tokens")
        self._splits_special = any(getattr(tokenizer, option, False) for option in split)
        named: Any = {key: getattr(tokenizer, key, None) for key in NAMED}
        if is_file:
            self._content = read(tokenizer)
            with suppress(OSError, ValueError, RecursionError):
                beside = Path(tokenizer).with_name("tokenizer_config.json").read_bytes()
                named |= json.loads(beside)
            languages = "src_lang" in named or str(named.get("tokenizer_class")).startswith(
                OF_LANGUAGES
            )
            #: The post-processor of labels; None if it is the same, False if their language is not known.
            self._of_labels: Any = False if languages else None
        else:
            try:
                text = getattr(tokenizer, "backend_tokenizer", tokenizer).to_str()
            except Exception as error:
                said = f"{self} has parts written in Python, which cannot be copied ({error})"
                way = "lambda texts: [e.ids for e in tokenizer.encode_batch(texts)]"
                raise errors.ConfigError(f"{said}; give a function instead: {way}") from error
            self._content = text.encode()
            self._of_labels = post_processor_of_labels(tokenizer)
        entries = {k: v.get("content") if isinstance(v := named[k], dict) else v for k in NAMED}
        self._said = {k: v if isinstance(v, str) else None for k, v in entries.items()}

    def _load(self) -> tuple[Any, Checked | None]:
        from tokenizers import Tokenizer

        settle()
        try:
            plain = Tokenizer.from_buffer(self._content)
        except Exception as error:
            raise self._unreadable(error) from error
        # A copy of its own: changing it while a thread encodes raises "Already borrowed".
        plain.no_truncation()
        plain.no_padding()
        plain.encode_special_tokens = self._splits_special
        if self._refusal is not None:
            return plain, None
        # Without a circle of references: all this may take tens of MB.
        return plain, Checked(
            partial(self._faster, self._content), partial(encode_all, plain), str(self)
        )

    @cached_property
    def targets(self) -> TokenizerEngine:
        from tokenizers import Tokenizer

        if self._of_labels is False:
            raise no_language(self)
        if self._of_labels is None:
            return self
        content = json.loads(self._content) | {"post_processor": self._of_labels}
        plain = Tokenizer.from_str(json.dumps(content))
        targets = HuggingFace(plain, "auto" if self._fast else "tokenizers")
        targets._name, targets._said = self._name, self._said
        targets._splits_special = self._splits_special
        return targets

    @property
    def _plain(self) -> Any:
        return self.loaded[0]

    @staticmethod
    def _faster(content: bytes) -> Gigatoken:
        unused = {"truncation": None, "padding": None, "post_processor": None}
        return Gigatoken(json.dumps(json.loads(content) | unused))

    def _unreadable(self, error: Exception) -> errors.UnreadableError:
        said = f"{self} is not a tokenizer.json that this version of tokenizers reads: {error}"
        return errors.UnreadableError(said, path=str(self))

    @cached_property
    def _facts(self) -> Facts:
        try:
            content = json.loads(self._content)
            model = content["model"]
            vocab = model.get("vocab") or {}
            if isinstance(vocab, list):  # Unigram: pairs of a piece and its score
                vocab = {entry[0]: number for number, entry in enumerate(vocab)}
            tokens = {name: vocab[name] for name in (*ENDS, *PADS) if name in vocab}
            added = content.get("added_tokens") or ()
            ids_of_added = {t["content"]: t["id"] for t in added}
            tokens |= ids_of_added
            special = [t["id"] for t in added if t.get("special")]
            refusal = why_not(content, self._splits_special)
            if model.get("merges"):
                merges = model["merges"]
                model["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
            unused = ("version", "truncation", "padding")
            shaping = _set_only({k: v for k, v in content.items() if k not in unused})
            canonical = json.dumps(shaping, sort_keys=True, separators=(",", ":"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._unreadable(error) from error
        fingerprint = digest(canonical.encode("utf-8", "surrogatepass"))
        return Facts(fingerprint, tokens, special, frozenset(ids_of_added), refusal)

    @property
    def _refusal(self) -> str | None:
        return self._facts.refusal if self._fast else 'engine="tokenizers"'

    def runs_on(self) -> str:
        plain = f"tokenizers {version('tokenizers')}"
        if self._refusal is not None:
            return f"{plain}; not gigatoken: {self._refusal}"
        return f"gigatoken {version('gigatoken')}, checked against {plain} on 1 row in {EVERY:,}"

    def package(self) -> str:
        return "tokenizers" if self._refusal else "gigatoken"

    def fingerprint(self) -> str:
        content = self._facts.fingerprint
        return f"{content} (special tokens as text)" if self._splits_special else content

    # The work

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        plain, checked = self.loaded
        return encode_all(plain, texts) if checked is None else checked.encode(texts, numbers)

    def encode_pairs(
        self, texts: Pair, special: bool, max_length: int | None, side: Side, numbers: IntArray
    ) -> tuple[Ragged, Ragged, Ragged, IntArray]:
        frame = self._probes[2, special]
        if sorted(text for _, _, text in frame if text is not None) != [0, 1]:
            rule = "pair=True needs a tokenizer that writes each text of a pair once"
            raise errors.ConfigError(
                f"{rule}, and {self} does not: leave pair out to join the columns"
            )
        pair, rows = (self.encode(texts[0], numbers), self.encode(texts[1], numbers)), len(numbers)
        whole = pair[0].lengths + pair[1].lengths
        if max_length is not None:
            pair = longest_first(*pair, max_length - (len(frame) - 2), side)
        each = np.arange(rows + 1)
        ids, types, text_numbers = [], [], []
        for token, kind, text in frame:
            ragged = Ragged(np.full(rows, token, np.int32), each) if text is None else pair[text]
            ids.append(ragged)
            of_text = -1 if text is None else text
            types.append(Ragged(np.full_like(ragged.values, kind), ragged.offsets))
            text_numbers.append(Ragged(np.full_like(ragged.values, of_text), ragged.offsets))
        gone = whole - pair[0].lengths - pair[1].lengths
        return assemble(ids)[0], assemble(types)[0], assemble(text_numbers)[0], gone

    @cached_property
    def _probes(self) -> dict[tuple[int, bool], list[tuple[int, int, int | None]]]:
        """What the post-processor makes of one text and of two, each of one token, without and with
        special tokens: id and type of each token, and its text; None for special ones, -1 where a text
        comes once more.
        """
        from tokenizers import Tokenizer, models

        probe = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
        if self._plain.post_processor is not None:
            probe.post_processor = self._plain.post_processor
        probes = {}
        for count, special in ((1, True), (2, False), (2, True)):
            encoding = probe.encode("x", "x" if count == 2 else None, add_special_tokens=special)
            mask, which = encoding.special_tokens_mask, encoding.sequence_ids
            rows = zip(encoding.ids, encoding.type_ids, which, mask, strict=True)
            texts = (
                (i, kind, -1 if text is None else text, is_special)
                for i, kind, text, is_special in rows
            )
            probes[count, special] = [
                (i, t, None if is_special else text) for i, t, text, is_special in texts
            ]
        return probes

    def affixes(self) -> Affixes:
        probe = self._probes[1, True]
        ids = [token for token, _, _ in probe]
        places = [place for place, (_, _, text) in enumerate(probe) if text is not None]
        if len(places) != 1:
            said = f"{self} puts a text {len(places)} times between its special tokens, not once"
            raise errors.ConfigError(f"{said}; pass add_special_tokens=False")
        return tuple(ids[: places[0]]), tuple(ids[places[0] + 1 :])

    def pair_affixes(self) -> tuple[int, int | None]:
        probe = self._probes[2, True]
        token, _, text = probe[-1]
        return sum(entry[2] is None for entry in probe), token if text is None else None

    # What it knows of itself

    @cached_property
    def special(self) -> Special:
        known, (end, pad, side, mask) = self._facts.tokens, (self._said[key] for key in NAMED)
        usual = {name: known.get(name) for name in ENDS}
        ends = usual if end is None else {end: self.token_id(end)}
        pads = [known.get(name) for name in PADS] if pad is None else [self.token_id(pad)]
        return Special(
            {name: number for name, number in ends.items() if number is not None},
            next((number for number in pads if number is not None), None),
            side if side in ("left", "right") else None,  # type: ignore[arg-type]
            self._facts.special,
            None if mask is None else self.token_id(mask),
        )

    def token_id(self, token: str) -> int | None:
        known = self._facts.tokens.get(token)
        number: int | None = self._plain.token_to_id(token) if known is None else known
        return number

    def has_special(self, token: str) -> bool:
        return token in self._facts.added

    def pieces(self) -> dict[str, int]:
        return dict(self._plain.get_vocab(with_added_tokens=True))

    def _named(self, token: int) -> str:
        known = 0 <= token < 2**32 and self._plain.id_to_token(token) is not None
        return "" if known else f"<{token}>"

    def _text(self, ids: list[int]) -> str:
        return str(self._plain.decode(ids, skip_special_tokens=False))


def post_processor_of_labels(tokenizer: Any) -> Any:
    """See ``HuggingFace``."""
    if not has_targets(tokenizer):
        return None
    if getattr(tokenizer, "tgt_lang", "") is None:
        return False
    own = copy.deepcopy(tokenizer)
    own._switch_to_target_mode()
    return json.loads(own.backend_tokenizer.to_str())["post_processor"]


def encode_all(tokenizer: Any, texts: pa.LargeStringArray) -> Ragged:
    encodings = tokenizer.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)
    return Ragged.of_lists(encoding.ids for encoding in encodings)


def longest_first(first: Ragged, second: Ragged, room: int, side: Side) -> tuple[Ragged, Ragged]:
    """Cut pairs to ``room`` tokens: the longer text down to the other's length, then both. Of an
    odd number the longer text, else the second, keeps one more.
    """
    a, b = first.lengths, second.lengths
    short = np.minimum(a, b)
    of_shorter = np.where(a + b > room, np.minimum(short, room // 2), short)  # of the shorter one
    longer = np.minimum(np.maximum(a, b), room - of_shorter)
    swapped = a > b
    rooms = np.where(swapped, longer, of_shorter), np.where(swapped, of_shorter, longer)
    pairs = zip((first, second), rooms, strict=True)
    first_part, second_part = (assemble([t], room=room, side=side)[0] for t, room in pairs)
    return first_part, second_part


def _set_only(value: Any) -> Any:
    """Without options that are off: newer versions write more of them."""
    if isinstance(value, list):
        return [_set_only(v) for v in value]
    if not isinstance(value, dict):
        return value
    set_values = ((k, v) for k, v in value.items() if v is not None and v is not False and v != "")
    return {k: _set_only(v) for k, v in set_values}
