"""Executors as options: checked, and named by text, as configs and commands do. It stands above those that it
names, Ray's among them.
"""

from __future__ import annotations

from typing import Annotated, Any

from trainpipes._internal.checks import require
from trainpipes.engine.processes.executors import Executor, Processes, Threads
from trainpipes.engine.processes.ray_cluster import Ray


def named_executor(text: str, shared_filesystem: bool = False) -> Executor | None:
    """The executor that a text names: "threads:4", "processes:8", "ray" or "ray:ADDRESS"; None if none."""
    name, _, rest = text.partition(":")
    if name == "ray":
        return Ray(rest or None, shared_filesystem)
    kind: Any = {"threads": Threads, "processes": Processes}.get(name)
    if kind and (not rest or (rest.isdigit() and int(rest))):
        return kind(int(rest)) if rest else kind()  # type: ignore[no-any-return]
    return None


def name_of_executor(executor: Executor) -> str:
    """The text that names an executor; raises ValueError where none does."""
    number = getattr(executor, "n", None) or getattr(executor, "address", None)
    name = type(executor).__name__.lower() + (f":{number}" if number else "")
    if named_executor(name) != executor or getattr(executor, "start_method", None) is not None:
        raise ValueError(f"{executor} has options beyond a number or an address: give it in code")
    return name


def check_executor(value: Any, option: str) -> Any:
    """An executor, or the text that names one."""
    by_name = isinstance(value, str)
    known = named_executor(value) is not None if by_name else hasattr(type(value), "map_unordered")
    require(known, option, 'tp.Threads(n), tp.Processes(n), tp.Ray(...), or "processes:4"', value)
    return value


def as_options(executor: Executor) -> dict[str, Any]:
    """The options of ``map`` that say the same; those of this machine have some for which they are short."""
    if isinstance(executor, Threads):
        return {"executor": None, "num_workers": executor.n, "method": "thread"}
    if isinstance(executor, Processes):
        said = {"num_workers": executor.workers, "method": "process"}
        return {"executor": None, **said, "start_method": executor.start_method}
    return {"executor": executor}


AnExecutor = Annotated[Executor | str, check_executor]


def executor_of(value: Any, option: str, default: Executor | None = None) -> Executor:
    """The executor that is given, or that a text names; the default for None."""
    if value is None and default is not None:
        return default
    check_executor(value, option)
    chosen: Executor | None = named_executor(value) if isinstance(value, str) else value
    assert chosen is not None
    return chosen
