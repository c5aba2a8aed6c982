"""Which kind of tokenizer something is."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainpipes._internal.checks import need, pip_install
from trainpipes.errors import ConfigError, UnreadableError
from trainpipes.errors.text import shown
from trainpipes.tokenizers.adapters import Bytes, Function, SentencePiece, Slow, Tiktoken
from trainpipes.tokenizers.engine import TokenizerEngine
from trainpipes.tokenizers.hf import HuggingFace

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
    raise ConfigError(f"{KINDS}; got {shown(tokenizer)}")


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
            raise ConfigError(f"the directory {path} holds no {names}; it holds {there}")
        path = os.path.join(path, file)
    elif "://" not in text and not os.path.isfile(path):
        if not isinstance(tokenizer, str) or not is_hub_name(text):
            parent = next(p for p in Path(path).absolute().parents if p.exists())
            nearest = f"the nearest directory that exists is {parent}"
            raise ConfigError(f"there is no tokenizer {text}: {nearest}")
        if find_spec("transformers") is None:
            way = f"For a name on the Hugging Face hub: {pip_install('transformers')}"
            raise ConfigError(f"{text!r} is not a path; {KINDS}. {way}")
        return load(auto_tokenizer(text), engine)
    if path.endswith(".json"):
        return HuggingFace(path, engine)
    if path.endswith(".model"):
        return SentencePiece(path)
    rule = "a tokenizer.json ends in .json, a SentencePiece model in .model"
    raise ConfigError(f"{path} has no known ending of a tokenizer file: {rule}")


def is_hub_name(text: str) -> bool:
    path = text.endswith((".json", ".model")) or text.count("/") > 1 or text[:1] in "./~"
    return not path and ":" not in text and text != "bytes"


def auto_tokenizer(name: str) -> Any:
    """What transformers makes of a folder, or of a name on the Hugging Face hub."""
    need("transformers", f"the tokenizer {name}")
    from transformers import AutoTokenizer

    folder = os.path.isdir(name)
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=folder, trust_remote_code=False)
    except Exception as error:
        why = (str(error) or repr(error)).splitlines()[0]
        if folder:
            message = f"transformers makes no tokenizer of {name}: {why}"
            raise UnreadableError(message, path=name) from error
        said = f"{name!r} is not a path, and AutoTokenizer finds no tokenizer of that name: {why}"
        way = f"without a network, fetch it elsewhere (hf download {name}) and give the folder"
        raise ConfigError(f"{said}; {way}") from error
