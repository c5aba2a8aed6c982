"""The schemas of a pipeline's rows that are Python objects: given, kept in a state, or found."""

from __future__ import annotations

import base64
import binascii
import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from trainpipes.errors import StateError
from trainpipes.runtime.rows.row_types import written
from trainpipes.shown import cut, shown

__all__ = ["Schemas"]

#: Bytes of a schema that a state keeps whole; of a larger one it keeps a digest.
MOST_KEPT = 4096
DIGEST = "sha256:"
#: What stands for rows that stay Python objects.
NONE = "none"

#: One schema is found at a time: the search may run functions of the user's.
_searching = threading.RLock()


class Schemas:
    """One for each place in a chain where rows become columns. Threads may share it.

    Those of the pipelines that are mixed or joined are in here too, under the names of these.
    """

    def __init__(self) -> None:
        self._prefix = ""
        self._given: dict[str, pa.Schema] = {}
        self._found: dict[str, pa.Schema | None] = {}
        self._saved: dict[str, str] = {}  # digests
        self._parts: list[tuple[str, Schemas]] = []

    def give(self, key: str, schema: pa.Schema) -> None:
        """Say what a user gave."""
        self._given[self._prefix + key] = schema

    def get(self, key: str, find: Callable[[], pa.Schema | None]) -> pa.Schema | None:
        """A schema, found if it is not known yet; None where rows stay as they are.

        Raises:
            StateError: it is not the one that a state says.
        """
        key = self._prefix + key
        if key in self._given:
            return self._given[key]
        if key not in self._found:
            with _searching:
                if key not in self._found:
                    found = find()
                    if key in self._saved and self._saved[key] != _digest(found):
                        raise StateError(
                            "the rows that Python functions make had other columns or types when the state "
                            f"was saved, now {_said(found)}: make them as they were, or load it with "
                            "allow_changes=['schema']"
                        )
                    self._found[key] = found
        return self._found[key]

    def join(self, name: str, part: Schemas) -> None:
        """Take in those of a pipeline that is part of this one."""
        self._parts.append((name, part))
        part._move(self, f"{self._prefix}{name}/")

    def _move(self, whole: Schemas, prefix: str) -> None:
        for own, others in ((self._given, whole._given), (self._found, whole._found)):
            if own is not others:
                its = {k: v for k, v in own.items() if k.startswith(self._prefix)}
                others.update({prefix + k.removeprefix(self._prefix): v for k, v in its.items()})
        self._given, self._found, self._saved = whole._given, whole._found, whole._saved
        self._prefix = prefix
        for name, part in self._parts:
            part._move(self, f"{prefix}{name}/")

    def notes(self) -> dict[str, str]:
        """What a state keeps of them, by place."""
        known = {**self._saved, **{key: _text(schema) for key, schema in self._found.items()}}
        known |= {key: _text(schema) for key, schema in self._given.items()}
        return dict(sorted(known.items()))

    def load(self, notes: Any) -> None:
        """Go on with what a state kept.

        Raises:
            StateError: it is damaged, or another schema is given now.
        """
        if not isinstance(notes, Mapping) or not all(isinstance(v, str) for v in notes.values()):
            raise StateError(
                f"schemas: damaged, got {shown(notes)}; load the state as it was saved"
            )
        for key, text in notes.items():
            given = self._given.get(key)
            if given is not None and text != _text(given):
                raise StateError(
                    f"schema of {cut(key)}: saved {_said(_read(key, text))}, now {_said(given)}; give it as "
                    "it was, or go on with the new one by load_state_dict(state, allow_changes=['schema'])"
                )
            if text.startswith(DIGEST):
                self._saved[key] = text
            elif given is None:
                self._found[key] = _read(key, text)


def _text(schema: pa.Schema | None) -> str:
    if schema is None:
        return NONE
    content: bytes = schema.serialize().to_pybytes()
    return base64.b64encode(content).decode() if len(content) <= MOST_KEPT else _digest(schema)


def _digest(schema: pa.Schema | None) -> str:
    return DIGEST + hashlib.sha256(_said(schema).encode()).hexdigest()


def _said(schema: pa.Schema | None) -> str:
    return NONE if schema is None else written(schema)


def _read(key: str, text: str) -> pa.Schema | None:
    if text == NONE or text.startswith(DIGEST):
        return None
    try:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text, validate=True)))
    except (pa.ArrowException, binascii.Error, OSError, ValueError) as error:
        raise StateError(
            f"schema of {cut(key)}: damaged, got {shown(text)}; load the state as it was saved"
        ) from error
