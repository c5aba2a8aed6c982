"""``help()`` of what is public: an example, and nothing that sends a reader to what is not public."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Iterator
from typing import Any

import pytest

import trainpipes as tp
from trainpipes import cache, errors, samplers

#: Names without an example of their own, and why.
WITHOUT = {
    "an example needs a package, a model or a device": {
        "from_hf", "Pipeline.chat_template", "Pipeline.pin", "Pipeline.to_hf", "Pipeline.to_ray",
    },
    "an example needs several processes": {"Loader.gather_state", "Loader.full_state_dict"},
    "its kinds show examples": {"Stage", "Source", "StreamReader"},
    "a value that others give or take, with no use alone": {
        "Layout", "Rows", "Pipeline.stages", "Work", "WorkKey", "cache.CacheInfo", "cache.folder",
    },
    "the same as of the pipeline, or as the class shows": {
        "Loader.explain", "Loader.show", "Loader.set_epoch", "Loader.state_dict",
    },
    "the example of cache.info clears, too": {"cache.clear"},
    "the same as write_parquet": {"Pipeline.write_arrow", "Pipeline.write_json"},
    "a module": {"samplers"},
    "an error": set(errors.__all__),
}  # fmt: skip
SEES = re.compile(r"\b[Ss]ee(?: also)? (?:the )?``([\w.]+)")


def public() -> Iterator[tuple[str, Any]]:
    for name in (*tp.__all__, "zip"):
        yield name, getattr(tp, name)
    for kind in (tp.Pipeline, tp.Loader):
        for name in dir(kind):
            if not name.startswith("_") and name != "is_last":
                yield f"{kind.__name__}.{name}", getattr(kind, name)
    for module in (cache, samplers):
        for name in module.__all__:
            yield f"{module.__name__.removeprefix('trainpipes.')}.{name}", getattr(module, name)


PUBLIC = dict(public())
REASONS = {name: why for why, names in WITHOUT.items() for name in names}


def test_help_shows_an_example_or_there_is_a_reason() -> None:
    for name, value in PUBLIC.items():
        text = inspect.getdoc(value)
        assert text, name
        assert (">>>" in text) != (name in REASONS), (name, REASONS.get(name, "no example"))
    assert REASONS.keys() <= PUBLIC.keys()


def test_help_refers_to_what_is_public() -> None:
    own = {one.rpartition(".")[2] for one in PUBLIC}
    for name, value in PUBLIC.items():
        for seen in SEES.findall(inspect.getdoc(value) or ""):
            assert seen.removeprefix("trainpipes.") in PUBLIC or seen in own, f"{name}: see {seen}"


@pytest.mark.parametrize(("kind", "most"), [
    (tp.Stage, 40), (tp.TableStage, 60), (tp.RowStage, 60), (tp.BatchStage, 60), (tp.Source, 60),
    (tp.StatefulStage, 90),
])  # fmt: skip
def test_help_of_a_stage_fits_on_a_screen_and_has_what_a_subclass_uses(
    kind: Any, most: int
) -> None:
    text = pydoc.plain(pydoc.render_doc(kind))
    assert len(text.splitlines()) <= most
    taught = {"check", "free", "name", "options", "thread_safe"}
    shown = set(re.findall(r"^ \|  (\w+)(?:\(| =|$)", text, re.MULTILINE))
    assert taught <= shown
    stateful = {"process", "start", "state_dict", "load_state_dict", "finish"}
    assert (stateful <= shown) == (kind is tp.StatefulStage)


@pytest.mark.parametrize("module", [tp, cache, samplers], ids=lambda one: one.__name__)
def test_dir_shows_what_is_public(module: Any) -> None:
    assert dir(module) == sorted(module.__all__)
