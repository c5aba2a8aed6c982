"""Which kind of tokenizer something is."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainpipes._internal.checks import pip_install
from trainpipes._internal.text import shown
from trainpipes.errors import ConfigError
from trainpipes.tokenizers.engine import Engine, File
from trainpipes.tokenizers.hf import HuggingFace
from trainpipes.tokenizers.simple import Bytes, Function
from trainpipes.tokenizers.trained import SentencePiece, Tiktoken
from trainpipes.tokenizers.transformers import Slow, auto_tokenizer, is_hub_name

KINDS = (
    "a tokenizer is the path of a tokenizer.json, of a *.model, or of a directory that holds one; a name on "
    'the Hugging Face hub; "bytes"; "tiktoken:NAME"; a tokenizer object of '
    "tokenizers, transformers, tiktoken or sentencepiece; or a function from a list of texts to lists of ids"
)


def load(tokenizer: Any, engine: str = "auto") -> Engine:
    if isinstance(tokenizer, Engine):
        return tokenizer
    fast = engine == "auto"
    if isinstance(tokenizer, str | os.PathLike):
        return _from_text(tokenizer, fast)
    classes = {(c.__module__.split(".")[0], c.__name__) for c in type(tokenizer).__mro__}
    if ("transformers", "PreTrainedTokenizerBase") in classes:
        if hasattr(tokenizer, "backend_tokenizer"):
            return HuggingFace(tokenizer, fast)
        return Slow(tokenizer)
    if classes & {("tokenizers", "Tokenizer"), ("tokenizers", "BaseTokenizer")}:
        return HuggingFace(tokenizer, fast)
    if ("tiktoken", "Encoding") in classes:
        return Tiktoken(tokenizer)
    if ("sentencepiece", "SentencePieceProcessor") in classes:
        return SentencePiece(tokenizer)
    if callable(tokenizer):
        return Function(tokenizer)
    raise ConfigError(f"{KINDS}; got {shown(tokenizer)}")


def _from_text(tokenizer: str | os.PathLike[str], fast: bool) -> Engine:
    text = os.fspath(tokenizer)
    if isinstance(tokenizer, str):
        if text == "bytes":
            return Bytes()
        if text.startswith("tiktoken:"):
            return Tiktoken(text.removeprefix("tiktoken:"))
    path = text if "://" in text else os.path.expanduser(text)
    if "://" in text or os.path.isfile(path):
        return _from_file(path, fast)
    if os.path.isdir(path):
        return _from_directory(path, fast)
    if not isinstance(tokenizer, str) or not is_hub_name(text):
        raise ConfigError(_not_there(text))
    if find_spec("transformers") is None:
        way = f"For a name on the Hugging Face hub: {pip_install('transformers')}"
        raise ConfigError(f"{text!r} is not a path; {KINDS}. {way}")
    return load(auto_tokenizer(text), "auto" if fast else "tokenizers")


def _from_file(path: str, fast: bool) -> Engine:
    if path.endswith(".json"):
        return HuggingFace(File(path), fast)
    if path.endswith(".model"):
        return SentencePiece(File(path))
    rule = "a tokenizer.json ends in .json, a SentencePiece model in .model"
    raise ConfigError(f"{path} has no known ending of a tokenizer file: {rule}")


def _from_directory(path: str, fast: bool) -> Engine:
    found = sorted(os.listdir(path))
    if "tokenizer.json" in found:
        return HuggingFace(File(os.path.join(path, "tokenizer.json")), fast)
    if "tokenizer.model" in found:
        return SentencePiece(File(os.path.join(path, "tokenizer.model")))
    if {"tokenizer_config.json", "config.json"} & set(found):
        return load(auto_tokenizer(path), "auto" if fast else "tokenizers")
    there = f"{', '.join(found[:8]) or 'nothing'}{', …' if len(found) > 8 else ''}"
    names = "tokenizer.json, tokenizer.model or tokenizer_config.json"
    raise ConfigError(f"the directory {path} holds no {names}; it holds {there}")


def _not_there(text: str) -> str:
    parent = Path(os.path.expanduser(text)).absolute().parent
    while not parent.exists():
        parent = parent.parent
    return f"there is no tokenizer {text}: the nearest directory that exists is {parent}"
