"""Tokenizers beside Hugging Face's, and which kind of tokenizer something is."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from trainpipes import errors
from trainpipes._internal import checks, locks
from trainpipes._internal.checks import IntArray
from trainpipes._internal.messages import nearest
from trainpipes.columns.arrays import apart
from trainpipes.columns.rectangles import Side
from trainpipes.interfaces.options import identify, show
from trainpipes.tokenizers.engine import (
    Affixes,
    Ragged,
    Special,
    TokenizerEngine,
    digest,
    has_targets,
    no_language,
    read,
    utf8,
)
from trainpipes.tokenizers.hf import HuggingFace

#: Of bytes, the ids that are none.
SPECIAL = {"<eos>": 256, "<pad>": 257}
NAMES = {number: name for name, number in SPECIAL.items()}
#: Size of an embedding for these ids.
VOCABULARY = 258


class Bytes(TokenizerEngine):
    """The UTF-8 bytes of a text, 0 to 255; 256 ends a text, 257 pads."""

    def __init__(self) -> None:
        super().__init__("bytes")

    def _load(self) -> None:
        return None

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        texts.validate(full=True)  # nothing else would notice bytes that are not UTF-8
        values, offsets = apart(texts)
        return Ragged(values.astype(np.int32), offsets)

    def runs_on(self) -> str:
        return ""

    special = Special({"<eos>": 256}, pad=257)

    def token_id(self, token: str) -> int | None:
        return SPECIAL.get(token)

    def _named(self, token: int) -> str:
        return "" if 0 <= token < 256 else NAMES.get(token, f"<{token}>")

    def _text(self, ids: list[int]) -> str:
        return utf8(bytes(ids))

    def fingerprint(self) -> str:
        return "bytes"


class Function(TokenizerEngine):
    """A user's function from texts to lists of ids."""

    def __init__(self, function: Callable[[list[str]], Sequence[Sequence[int]]]) -> None:
        super().__init__(show(function))
        self._function = function

    def _load(self) -> Any:
        return self._function

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        python_texts = texts.to_pylist()
        with self.turn:  # reading the ids too: the function may use the same list again
            return ids_of(self._function(python_texts), len(texts), self)

    def decode(self, ids: Sequence[int]) -> None:
        return None

    def runs_on(self) -> str:
        return "a function of yours, called by one thread at a time"

    def fingerprint(self) -> Any:
        return identify(self._function)


class Slow(TokenizerEngine):
    """A transformers tokenizer written in Python, used by calling it, one thread at a time."""

    def __init__(self, tokenizer: Any, text: Literal["text", "text_target"] = "text") -> None:
        super().__init__(type(tokenizer).__name__)
        self._text_option = text
        # The program goes on with the object, and may change it.
        self._tokenizer = copy.deepcopy(tokenizer)

    def _load(self) -> Any:
        return copy.deepcopy(self._tokenizer)

    def _ids(self, texts: list[str], special: bool) -> Any:
        off = ("padding", "truncation", "return_attention_mask", "return_token_type_ids", "verbose")
        with self.turn:
            texts_of = {self._text_option: texts}
            encoding = self.loaded(
                **texts_of, add_special_tokens=special, **dict.fromkeys(off, False)
            )
        return encoding["input_ids"]

    @locks.cached_property
    def targets(self) -> TokenizerEngine:
        if not has_targets(self._tokenizer):
            return self
        if getattr(self._tokenizer, "tgt_lang", "") is None:
            raise no_language(self)
        return Slow(self._tokenizer, "text_target")

    def runs_on(self) -> str:
        return "transformers, in Python, by one thread at a time"

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        return ids_of(self._ids(texts.to_pylist(), special=False), len(texts), self)

    def affixes(self) -> Affixes:
        for probe in ("a", "0", "The end", "."):
            (bare,), (full,) = self._ids([probe], special=False), self._ids([probe], special=True)
            places = [k for k in range(len(full)) if full[k : k + len(bare)] == bare]
            if bare and len(places) == 1:
                return tuple(full[: places[0]]), tuple(full[places[0] + len(bare) :])
        said = f"which special tokens {self} puts around a text is not known"
        raise errors.ConfigError(f"{said}: pass add_special_tokens=False")

    @locks.cached_property
    def special(self) -> Special:
        tokenizer = self._tokenizer
        ends = (
            {} if tokenizer.eos_token_id is None else {tokenizer.eos_token: tokenizer.eos_token_id}
        )
        side: Side = "left" if tokenizer.padding_side == "left" else "right"
        ids, mask = tokenizer.all_special_ids, tokenizer.mask_token_id
        return Special(ends, tokenizer.pad_token_id, side, ids, mask)

    def token_id(self, token: str) -> int | None:
        return self.pieces().get(token)

    def pieces(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def _named(self, token: int) -> str:
        return "" if 0 <= token < len(self.loaded) else f"<{token}>"

    def _text(self, ids: list[int]) -> str:
        with self.turn:
            return str(self.loaded.decode(ids, clean_up_tokenization_spaces=False))

    @locks.cached_property
    def _digest(self) -> str:
        options = {k: v for k, v in self._tokenizer.init_kwargs.items() if not _says_where(k)}
        parts = [self._tokenizer.get_vocab(), options]
        content = json.dumps(parts, sort_keys=True, default=str)
        return digest(content.encode("utf-8", "surrogatepass"))

    def fingerprint(self) -> dict[str, Any]:
        kind = type(self._tokenizer).__qualname__
        found: dict[str, Any] = {"class": kind, "content": self._digest}
        if self._text_option == "text_target":
            found["language"] = getattr(self._tokenizer, "tgt_lang", None)
        return found


def _says_where(option: str) -> bool:
    """Whether an option that transformers keeps of a tokenizer tells only where it was."""
    return option in ("name_or_path", "is_local", "local_files_only") or option.endswith("_file")


INTEGERS = (int, np.integer)


def ids_of(rows: Any, count: int, caller: object) -> Ragged:
    """What a function returned, if it is a list of ids for each text."""
    rule = f"the tokenizer {caller} gives a list of ids for each text"
    try:
        rows = list(rows)
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    except TypeError as error:
        raise errors.DataError(f"{rule}, got {error}") from error
    if len(rows) != count:
        raise errors.DataError(f"{rule}, got {len(rows)} for {count} texts")
    some = [row for row in rows if len(row)]  # an empty array may be of floats
    arrays = some and all(isinstance(row, np.ndarray) for row in some)
    each = [] if arrays else list(chain.from_iterable(some))
    try:
        values = np.concatenate(some) if arrays else np.array(each)
    except ValueError as error:  # lists within lists
        raise errors.DataError(f"{rule}, got {error}") from error
    if values.size:
        if values.ndim != 1 or values.dtype.kind not in "iu":
            each = each or values.tolist()
            odd = next((v for v in each if type(v) is bool or not isinstance(v, INTEGERS)), each[0])
            raise errors.DataError(f"{rule}, got values such as {errors.shown(odd)}")
        least, most = int(values.min()), int(values.max())
        if most > np.iinfo(np.int32).max or least < np.iinfo(np.int32).min:
            got = least if -least > most else most
            raise errors.DataError(f"{rule}, of 32 bits, got {got}")
    return Ragged.of_lengths(values.astype(np.int32).reshape(-1), lengths)


class SentencePiece(TokenizerEngine):
    """The path of a model, or a ``SentencePieceProcessor``."""

    def __init__(self, model: Any) -> None:
        super().__init__(model if isinstance(model, str) else type(model).__name__)
        checks.need("sentencepiece", "a SentencePiece model")
        is_path = isinstance(model, str)
        self._content = read(model) if is_path else bytes(model.serialized_model_proto())
        others = {"bos": "add_eos", "eos": "add_bos"}
        self._adds = [
            name for name, other in others.items()
            if not is_path and model.encode("", out_type=int, **{other: False})
        ]  # fmt: skip

    def _load(self) -> Any:
        from sentencepiece import SentencePieceProcessor

        try:
            return SentencePieceProcessor(model_proto=self._content)
        except RuntimeError as error:
            way = "if it holds tiktoken's ranks, as some do, give the tokenizer.json"
            said = f"{self} is not a SentencePiece model: {error}; {way}"
            raise errors.UnreadableError(said, path=str(self)) from error

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        plain = {"add_bos": False, "add_eos": False, "reverse": False, "enable_sampling": False}
        ids = self.loaded.encode(texts.to_pylist(), out_type=int, num_threads=1, **plain)
        return Ragged.of_lists(ids)

    def affixes(self) -> Affixes:
        bos, eos = (self._id(name) if name in self._adds else None for name in ("bos", "eos"))
        return () if bos is None else (bos,), () if eos is None else (eos,)

    def _id(self, name: str) -> int | None:
        token_id = int(getattr(self.loaded, f"{name}_id")())
        return None if token_id < 0 else token_id

    @locks.cached_property
    def special(self) -> Special:
        end = self._id("eos")
        ends = {} if end is None else {self.loaded.id_to_piece(end): end}
        ids = [i for name in ("unk", "bos", "eos", "pad") if (i := self._id(name)) is not None]
        return Special(ends, self._id("pad"), ids=ids)

    def token_id(self, token: str) -> int | None:
        number = int(self.loaded.piece_to_id(token))
        return number if self.loaded.id_to_piece(number) == token else None

    def _named(self, token: int) -> str:  # of a control token, which decoding leaves out
        model = self.loaded
        if not 0 <= token < model.get_piece_size():
            return f"<{token}>"
        return str(model.id_to_piece(token)) if model.is_control(token) else ""

    def _text(self, ids: list[int]) -> str:
        return str(self.loaded.decode(ids))

    def fingerprint(self) -> str:
        return digest(self._content) + "".join(f" +{name}" for name in self._adds)


class Tiktoken(TokenizerEngine):
    """The name of an encoding, or an ``Encoding``."""

    def __init__(self, encoding: Any) -> None:
        super().__init__(f"tiktoken:{getattr(encoding, 'name', encoding)}")
        checks.need("tiktoken", "a tiktoken encoding")
        import tiktoken

        self._encoding = encoding
        names = tiktoken.list_encoding_names()
        if isinstance(encoding, str) and encoding not in names:
            said = f"tiktoken has no encoding {encoding!r}{nearest(encoding, names)}"
            raise errors.ConfigError(f"{said}; it has {', '.join(names)}")

    def _load(self) -> Any:
        if not isinstance(self._encoding, str):
            return self._encoding  # never changes, and keeps its regular expressions by thread
        import tiktoken

        try:
            return tiktoken.get_encoding(self._encoding)
        except Exception as error:
            said = "tiktoken gets its ranks from the network, or the folder that TIKTOKEN_CACHE_DIR names"
            raise errors.UnreadableError(f"{self}: {said}, and neither worked: {error}") from error

    def encode(self, texts: pa.LargeStringArray, numbers: IntArray | None = None) -> Ragged:
        to_numpy = self.loaded.encode_to_numpy
        return Ragged.of_rows([to_numpy(t, disallowed_special=()) for t in texts.to_pylist()])

    @locks.cached_property
    def special(self) -> Special:
        end = self.token_id("<|endoftext|>")
        return Special({} if end is None else {"<|endoftext|>": end})

    def token_id(self, token: str) -> int | None:
        try:
            return int(self.loaded.encode_single_token(token))
        except KeyError:
            return None

    def _named(self, token: int) -> str:
        try:
            self.loaded.decode_single_token_bytes(token)
        except (KeyError, OverflowError):
            return f"<{token}>"
        return ""

    def _text(self, ids: list[int]) -> str:
        return utf8(self.loaded.decode_bytes(ids))

    @locks.cached_property
    def _digest(self) -> str:
        encoding = self.loaded
        content = hashlib.sha256(encoding._pat_str.encode())
        for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
            content.update(b"%d:%d:" % (rank, len(token)) + token)
        content.update(repr(sorted(encoding._special_tokens.items())).encode())
        return f"sha256:{content.hexdigest()[:32]}"

    def fingerprint(self) -> str:
        return self._digest


KINDS = (
    "a tokenizer is the path of a tokenizer.json, a *.model or a folder of one; a name on the Hugging Face "
    'hub; "bytes"; "tiktoken:NAME"; an object of tokenizers, transformers, tiktoken or sentencepiece; or a '
    "function from a list of texts to lists of ids"
)


def load(tokenizer: Any, engine: str = "auto") -> TokenizerEngine:
    if isinstance(tokenizer, TokenizerEngine):
        return tokenizer
    if isinstance(tokenizer, str) and tokenizer == "bytes":
        return Bytes()
    if isinstance(tokenizer, str) and tokenizer.startswith("tiktoken:"):
        return Tiktoken(tokenizer.removeprefix("tiktoken:"))
    if isinstance(tokenizer, str | os.PathLike):
        return _from_path(tokenizer, engine)
    classes = {(c.__module__.split(".")[0], c.__name__) for c in type(tokenizer).__mro__}
    of_transformers = ("transformers", "PreTrainedTokenizerBase") in classes
    if of_transformers and not hasattr(tokenizer, "backend_tokenizer"):
        return Slow(tokenizer)
    if of_transformers or classes & {("tokenizers", "Tokenizer"), ("tokenizers", "BaseTokenizer")}:
        return HuggingFace(tokenizer, engine)
    if ("tiktoken", "Encoding") in classes:
        return Tiktoken(tokenizer)
    if ("sentencepiece", "SentencePieceProcessor") in classes:
        return SentencePiece(tokenizer)
    if callable(tokenizer):
        return Function(tokenizer)
    raise errors.ConfigError(f"{KINDS}; got {errors.shown(tokenizer)}")


def _from_path(tokenizer: str | os.PathLike[str], engine: str) -> TokenizerEngine:
    text = os.fspath(tokenizer)
    path = text if "://" in text else os.path.expanduser(text)
    if os.path.isdir(path):
        inside = sorted(os.listdir(path))
        file = next((n for n in ("tokenizer.json", "tokenizer.model") if n in inside), None)
        if file is None and {"tokenizer_config.json", "config.json"} & set(inside):
            return load(auto_tokenizer(path), engine)
        if file is None:
            names = "tokenizer.json, tokenizer.model or tokenizer_config.json"
            there = f"{', '.join(inside[:8]) or 'nothing'}{', …' if len(inside) > 8 else ''}"
            raise errors.ConfigError(f"the directory {path} holds no {names}; it holds {there}")
        own = _of_file(os.path.join(path, file), engine)
        lacking = (token for token in _named_in(path) if not own.has_special(token))
        token = next(lacking, None)
        return own if token is None else _with_added(path, file, token, engine)
    if "://" not in text and not os.path.isfile(path):
        if not isinstance(tokenizer, str) or not is_hub_name(text):
            parent = next(p for p in Path(path).absolute().parents if os.path.exists(p))
            nearest = f"the nearest directory that exists is {parent}"
            raise errors.ConfigError(f"there is no tokenizer {text}: {nearest}")
        if find_spec("transformers") is None:
            way = f"For a name on the Hugging Face hub: {checks.pip_install('transformers')}"
            raise errors.ConfigError(f"{text!r} is not a path; {KINDS}. {way}")
        return load(auto_tokenizer(text), engine)
    return _of_file(path, engine)


def _of_file(path: str, engine: str) -> TokenizerEngine:
    if path.endswith(".json"):
        return HuggingFace(path, engine)
    if path.endswith(".model"):
        return SentencePiece(path)
    rule = "a tokenizer.json ends in .json, a SentencePiece model in .model"
    raise errors.ConfigError(f"{path} has no known ending of a tokenizer file: {rule}")


#: Keys of ``tokenizer_config.json`` with several tokens.
SEVERAL = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")


def _named_in(folder: str) -> Iterator[str]:
    """Tokens that transformers adds to a folder's tokenizer, if it lacks them."""

    def read_json(name: str) -> dict[str, Any]:
        with suppress(OSError, ValueError, RecursionError):
            content = json.loads(Path(folder, name).read_bytes())
            return content if isinstance(content, dict) else {}
        return {}

    config = read_json("tokenizer_config.json")
    more: list[Any] = [config.get("added_tokens_decoder")]
    if "added_tokens_decoder" not in config:  # of older versions
        config |= read_json("special_tokens_map.json")
        more = [[*read_json("added_tokens.json")]]
    more += [[v for k, v in config.items() if fnmatch(k, "*_token")], *map(config.get, SEVERAL)]
    for tokens in more:
        tokens = [*tokens.values()] if isinstance(tokens, dict) else tokens
        for token in tokens if isinstance(tokens, list) else ():
            name = token.get("content") if isinstance(token, dict) else token
            if isinstance(name, str) and name:
                yield name


def _with_added(folder: str, file: str, token: str, engine: str) -> TokenizerEngine:
    """A folder's tokenizer as transformers makes it, with tokens that are not in its file."""
    said = f"{folder} names the token {token!r}, which its {file} lacks"
    way = f"give {os.path.join(folder, file)}, which takes it as plain text"
    if find_spec("transformers") is None:
        raise errors.ConfigError(f"{said}: {checks.pip_install('transformers')}, or {way}")
    try:
        return load(auto_tokenizer(folder), engine)
    except errors.UnreadableError as error:
        raise errors.ConfigError(f"{said}, and {error.message}: {way}") from error


def is_hub_name(text: str) -> bool:
    path = text.endswith((".json", ".model")) or text.count("/") > 1 or text[:1] in "./~"
    return not path and ":" not in text and text != "bytes"


def auto_tokenizer(name: str) -> Any:
    """What transformers makes of a folder, or of a name on the Hugging Face hub."""
    checks.need("transformers", f"the tokenizer {name}")
    from transformers import AutoTokenizer

    folder = os.path.isdir(name)
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=folder, trust_remote_code=False)
    except Exception as error:
        why = (str(error) or repr(error)).splitlines()[0]
        if folder:
            message = f"transformers makes no tokenizer of {name}: {why}"
            raise errors.UnreadableError(message, path=name) from error
        said = f"{name!r} is not a path, and AutoTokenizer finds no tokenizer of that name: {why}"
        way = f"without a network, fetch it elsewhere (hf download {name}) and give the folder"
        raise errors.ConfigError(f"{said}; {way}") from error
