"""The schemas of a pipeline's rows that are Python objects: given, kept in a state, or found.

Owns what was found, one schema for each place in a chain where rows become columns, and knows the schemas of
the pipelines that are mixed or joined. Any thread may ask for one; one is looked for at a time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from trainpipes._internal.shown import cut, shown
from trainpipes.columns.row_types import written
from trainpipes.errors import StateError

__all__ = ["Schemas", "searching"]

#: Bytes of a schema that a state keeps whole; of a larger one it keeps a digest.
MOST_KEPT = 4096
DIGEST = "sha256:"
#: What stands for rows that stay Python objects.
NONE = "none"

#: Held while a schema is looked for: functions of the user's may be called for it.
searching = threading.RLock()


class Schemas:
    """One for each key."""

    def __init__(self) -> None:
        self._given: dict[str, pa.Schema] = {}
        self._found: dict[str, pa.Schema | None] = {}
        self._saved: dict[str, str] = {}  # as a state has them
        self._parts: dict[str, Schemas] = {}

    def give(self, key: str, schema: pa.Schema) -> None:
        """Say what a user gave."""
        self._given[key] = schema

    def get(self, key: str, find: Callable[[], pa.Schema | None]) -> pa.Schema | None:
        """A schema, found if it is not known yet; None where rows stay as they are.

        Raises:
            StateError: it is not the one that a state says.
        """
        if key in self._given:
            return self._given[key]
        if key not in self._found:
            with searching:
                if key not in self._found:
                    found, saved = find(), self._saved.get(key)
                    if saved not in (None, _digest(found)):
                        raise StateError(
                            "the rows that Python functions make had other columns or types when the state "
                            f"was saved, now {_said(found)}: make them as they were, or load it with "
                            "allow_changes=['schema']"
                        )
                    self._found[key] = found
        return self._found[key]

    def join(self, name: str, part: Schemas) -> None:
        """Take in those of a pipeline that is part of this one: a state has them with its name before."""
        self._parts[name] = part
        self._tell(name, part, "")

    def notes(self) -> dict[str, str]:
        """What a state keeps of them."""
        known = self._found | self._given
        texts = self._saved | {key: _text(schema) for key, schema in known.items()}
        for name, part in self._parts.items():
            texts |= {f"{name}/{key}": text for key, text in part.notes().items()}
        return dict(sorted(texts.items()))

    def load(self, notes: Any, path: str = "") -> None:
        """Go on with what a state kept.

        Args:
            notes: as ``notes`` gave them.
            path: what stands before their keys, for messages.

        Raises:
            StateError: it is damaged, or another schema is given now.
        """
        if not isinstance(notes, Mapping) or not all(isinstance(v, str) for v in notes.values()):
            raise StateError(
                f"schemas: damaged, got {shown(notes)}; load the state as it was saved"
            )
        for key, text in notes.items():
            given, name = self._given.get(key), cut(path + key)
            if given is not None and text != _text(given):
                raise StateError(
                    f"schema of {name}: saved {_said(_read(name, text))}, now {_said(given)}; give it as "
                    "it was, or go on with the new one by load_state_dict(state, allow_changes=['schema'])"
                )
            self._saved[key] = text
            if given is None and not text.startswith(DIGEST):
                self._found[key] = _read(name, text)
        for name, part in self._parts.items():
            self._tell(name, part, path)

    def _tell(self, name: str, part: Schemas, path: str) -> None:
        prefix = f"{name}/"
        own = {k.removeprefix(prefix): v for k, v in self._saved.items() if k.startswith(prefix)}
        part.load(own, path + prefix)


def _text(schema: pa.Schema | None) -> str:
    if schema is None:
        return NONE
    content: bytes = schema.serialize().to_pybytes()
    return base64.b64encode(content).decode() if len(content) <= MOST_KEPT else _digest(schema)


def _digest(schema: pa.Schema | None) -> str:
    return DIGEST + hashlib.sha256(_said(schema).encode()).hexdigest()


def _said(schema: pa.Schema | None) -> str:
    return NONE if schema is None else written(schema)


def _read(name: str, text: str) -> pa.Schema | None:
    if text == NONE or text.startswith(DIGEST):
        return None
    try:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text, validate=True)))
    except (pa.ArrowException, binascii.Error, OSError, ValueError) as error:
        raise StateError(
            f"schema of {name}: damaged, got {shown(text)}; load the state as it was saved"
        ) from error
