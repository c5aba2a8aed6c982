"""Objects that are still there. No code of Python's runs when one goes: Ctrl-C there would be lost."""

from __future__ import annotations

import _weakrefset
import gc
import sys
import threading
from typing import Any

import pyarrow as pa

import trainpipes as tp
from trainpipes._internal.living import Living


class One:
    pass


def test_what_is_gone_is_no_more_in_it() -> None:
    living, kept = Living[One](), [One() for _ in range(3)]
    for one in kept:
        living.add(one)
    for _ in range(1000):
        living.add(One())
    assert {*living} == {*kept}
    assert len(living._refs) < 10
    del kept[0], one
    assert {*living} == {*kept}


def test_no_callback_runs_where_batches_are_made() -> None:
    pipe = (
        tp.from_arrow(pa.table({"x": range(100)})).sharding_filter(2).shuffle(10, seed=0).batch(4)
    )
    seen: list[Any] = []

    def watch(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and name == (_weakrefset.__file__, "_remove"):
            of = frame.f_locals["selfref"]()
            seen.extend([of] * (of is not threading._dangling))  # type: ignore[attr-defined]

    sys.setprofile(watch)
    try:
        for _ in range(3):
            list(tp.Loader(pipe, threads=2))
            gc.collect()
    finally:
        sys.setprofile(None)
    assert not seen
