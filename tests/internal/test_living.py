"""Objects that are still there. No code of Python's runs when one goes: Ctrl-C there would be lost."""

from __future__ import annotations

import subprocess

from interpreters import python
from trainpipes._internal.locks import Living


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


PASSES = """
import _weakrefset, gc, sys, threading
import pyarrow as pa
import trainpipes as tp

pipe = tp.from_arrow(pa.table({"x": range(100)})).sharding_filter(2).shuffle(10, seed=0).batch(4)
seen = []

def watch(frame, event, _):
    name = frame.f_code.co_filename, frame.f_code.co_name
    if event == "call" and name == (_weakrefset.__file__, "_remove"):
        seen.extend([name] * (frame.f_locals["selfref"]() is not threading._dangling))

sys.setprofile(watch)
for _ in range(3):
    list(tp.Loader(pipe, threads=2))
    gc.collect()
sys.setprofile(None)
print(len(seen))
"""


def test_no_callback_runs_where_batches_are_made() -> None:
    made = subprocess.run([*python(), "-c", PASSES], capture_output=True, text=True, check=True)
    assert made.stdout == "0\n"
