"""What is to be made: a stage or a recipe with the options that a document gives it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainpipes._internal.naming import nearest
from trainpipes._internal.shown import shown
from trainpipes.config.declared import parameters_of, types_of
from trainpipes.config.nodes import Keyed, Node
from trainpipes.config.origin import joined
from trainpipes.config.read_values import Reader, Wanted
from trainpipes.config.stage_names import public_stages
from trainpipes.errors import ConfigError, MissingFilesError, TrainpipesError

__all__ = ["Step", "need_options", "placed", "read_options"]

#: How errors of stages and recipes name an option: ``shuffle(buffer_size) is ...``.
_ASKED = re.compile(r"(\w+)\((\w+)\)")


@dataclass
class Step:
    """A stage, or a recipe, that is to be made.

    Args:
        name: as errors of it say.
        make: it, with the options.
        node: where it stands.
        path: of it.
        options: by name.
        nodes: those that the document gives, by name.
        prefix: of the paths of its options.
        called: what the document calls an option, where that is not its name.
    """

    name: str
    make: Callable[..., Any]
    node: Node
    path: str
    options: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    prefix: str = ""
    called: dict[str, str] = field(default_factory=dict)

    def place(self, name: str) -> tuple[Node, str]:
        """Where the document gives an option."""
        return self.nodes[name], joined(self.prefix, self.called.get(name, name))


def read_options(reader: Reader, step: Step, given: Keyed, asker: str) -> None:
    """Read the options of a step, each of which it must know, as what they are declared.

    Args:
        reader: of the document.
        step: takes them.
        given: by name.
        asker: what the step is called where it has no such option.
    """
    origin = reader.origin
    known, types = parameters_of(step.make), types_of(step.make)
    older = _older(step.make)
    any_name = any(
        p.kind is p.VAR_KEYWORD for p in inspect.signature(step.make).parameters.values()
    )
    for key, node in given:
        name, at = key.text, joined(step.prefix, key.text)
        if name == "storage_options":
            raise origin.error(
                key,
                at,
                "a config holds no storage_options: give them to tp.load(..., storage_options=...), so that "
                "credentials are in no file",
            )
        if older.get(name, name) not in known and not any_name:
            elsewhere = getattr(step.make, "elsewhere", {})
            hint = f": {elsewhere[name]}" if name in elsewhere else nearest(name, list(known))
            takes = ", ".join(_shown(known))
            raise origin.error(
                key, at, f"{asker} has no option {shown(name)}{hint}; it takes {takes}"
            )
        declared = types.get(older.get(name, name), Any)
        wanted = Wanted(f"{step.name}({name})", at, declared, _own_words(step, name))
        step.options[name] = reader.read(node, wanted)
        step.nodes[name] = node


def need_options(reader: Reader, step: Step, asker: str) -> None:
    """Raise unless a step has the options that it needs."""
    given = {_older(step.make).get(name, name) for name in step.options}
    known = parameters_of(step.make)
    missing = [name for name, needed in known.items() if needed and name not in given]
    if missing:
        raise reader.origin.error(
            step.node,
            step.path,
            f"{asker} needs {' and '.join(missing)}; it takes {', '.join(_shown(known))}",
        )


def _shown(known: Mapping[str, bool]) -> list[str]:
    """Options that a config may give, or "none"."""
    return [name for name in known if name != "storage_options"] or ["none"]


def _own_words(step: Step, name: str) -> Callable[[Any], str | None] | None:
    """What a stage of ours says of an option that is of another type than declared: it says more than its
    type, such as what the least is. Nothing is read for it."""
    if public_stages().get(step.name) is not step.make or "tokenizer" in parameters_of(step.make):
        return None

    def words(value: Any) -> str | None:
        try:
            step.make(**{**step.options, name: value})
        except ConfigError as error:
            if error.message.startswith(f"{step.name}({name})"):
                return error.message
        except (TypeError, ValueError, TrainpipesError):
            pass
        return None

    return words


def _older(make: Any) -> Mapping[str, str]:
    fields = getattr(make, "__dataclass_fields__", {}).values()
    return {one.metadata["was"]: one.name for one in fields if one.metadata.get("was")}


def placed(reader: Reader, step: Step, error: Exception) -> Exception:
    """An error of a stage or recipe with the place of what it is about in front."""
    text = str(error)
    node, path = step.node, step.path
    asked = _ASKED.match(text)
    if asked is not None and asked[2] in step.nodes:
        same = asked[1] == step.name
        if same or text.endswith(f"got {shown(step.options[asked[2]])}"):
            node, path = step.place(asked[2])
    elif (
        "tokenizer" in step.nodes and "tokenizer" in text and str(step.options["tokenizer"]) in text
    ):
        node, path = step.place("tokenizer")
    elif "files" in step.nodes and text.startswith(f"{step.name} takes files"):
        node, path = step.place("files")
    elif isinstance(error, MissingFilesError):
        quoted = [
            name for name, one in step.options.items() if name in step.nodes and repr(one) in text
        ]
        if len(quoted) == 1:
            node, path = step.place(quoted[0])
    said = reader.origin.at(node, path)
    if isinstance(error, TrainpipesError) and not isinstance(error, ConfigError):
        error.message = f"{said}{error.message}"
        return error
    if isinstance(error, ConfigError):
        error.message = f"{said}{error.message}"
        error.path = error.path or reader.origin.name
        return error
    return ConfigError(f"{said}{text}", path=reader.origin.name)
