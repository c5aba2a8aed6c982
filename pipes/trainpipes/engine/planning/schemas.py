"""The schemas of rows that are Python objects, one for each place in a chain where rows become
columns. Any thread may ask; one is looked for at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyarrow as pa

from trainpipes._internal.fork_lock import ForkLock

#: Held while a schema is looked for: functions of the user's may be called for it.
searching = ForkLock()


class Schemas:
    def __init__(self) -> None:
        self._found: dict[str, pa.Schema | None] = {}
        self._parts: dict[str, Schemas] = {}

    def give(self, key: str, schema: pa.Schema) -> None:
        self._found[key] = schema

    def get(self, key: str, find: Callable[[], pa.Schema | None]) -> pa.Schema | None:
        if key not in self._found:
            with searching:
                if key not in self._found:
                    self._found[key] = find()
        return self._found[key]

    def join(self, name: str, part: Schemas) -> None:
        """Take in those of a part of this pipeline, under its name."""
        self._parts[name] = part
        self._tell(name, part)

    def known(self) -> dict[str, pa.Schema | None]:
        """All that are known, for another process, which would find the same."""
        found = dict(self._found)
        for name, part in self._parts.items():
            found |= {f"{name}/{key}": schema for key, schema in part.known().items()}
        return found

    def adopt(self, known: Mapping[str, pa.Schema | None]) -> None:
        self._found |= known
        for name, part in self._parts.items():
            self._tell(name, part)

    def _tell(self, name: str, part: Schemas) -> None:
        own = {
            k.removeprefix(f"{name}/"): v
            for k, v in self._found.items()
            if k.startswith(f"{name}/")
        }
        part.adopt(own)
