"""What is kept is known by all that functions do: an edit anywhere makes rows anew, and no edit does not."""

from __future__ import annotations

import importlib
import linecache
import os
import shutil
import subprocess
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

import trainpipes as tp
from interpreters import python
from trainpipes import ConfigError, Pipeline
from trainpipes.interfaces import contents
from trainpipes.interfaces.contents import cache_key
from trainpipes.interfaces.stage_kinds import TableStage
from trainpipes.stages.map import Map


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINPIPES_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def rows() -> Pipeline:
    return tp.from_arrow(pa.table({"x": list(range(20))}))


#: The user's module, or several by name; K is edited. The function is ``f`` of ``user``.
EDITS: dict[str, str | dict[str, str]] = {
    "its code": "def f(row): return {'n': row['x'] * K}",
    "a default": "def f(row, k=K): return {'n': row['x'] * k}",
    "a keyword's default": "def f(row, *, k=K): return {'n': row['x'] * k}",
    "what it closes over": "def make(k):\n return lambda row: {'n': row['x'] * k}\nf = make(K)",
    "a helper far away": (
        "def a(x): return x * K\n"
        + "".join(f"def {b}(x): return {a}(x)\n" for a, b in pairwise("abcdeghi"))
        + "def f(row): return {'n': i(row['x'])}"
    ),
    "helpers that call each other": (
        "def a(x, n): return b(x, n - 1) if n else x * K\ndef b(x, n): return a(x, n)\n"
        "def f(row): return {'n': a(row['x'], 3)}"
    ),
    "a constant": "FACTOR = K\ndef f(row): return {'n': row['x'] * FACTOR}",
    "a global number": "factor = K\ndef f(row): return {'n': row['x'] * factor}",
    "a global dict": "table = {'k': K}\ndef f(row): return {'n': row['x'] * table['k']}",
    "a global in a comprehension": (
        "factor = K\ndef f(row): return {'n': [x * factor for x in [row['x']]][0]}"
    ),
    "a class": "class C:\n def do(self, x): return x * K\ndef f(row): return {'n': C().do(row['x'])}",
    "a global object's class": (
        "class C:\n def do(self, x): return x * K\nc = C()\ndef f(row): return {'n': c.do(row['x'])}"
    ),
    "a global object's state": (
        "class C:\n def __init__(self, k): self.k = k\nc = C(K)\ndef f(row): return {'n': row['x'] * c.k}"
    ),
    "a method of a callable object": (
        "class C:\n def do(self, x): return x * K\n"
        " def __call__(self, row): return {'n': self.do(row['x'])}\nf = C()"
    ),
    "another method of a method's object": (
        "class C:\n def do(self, x): return x * K\n def go(self, row): return {'n': self.do(row['x'])}\n"
        "f = C().go"
    ),
    "a base class": (
        "class B:\n def do(self, x): return x * K\nclass C(B):\n"
        " def __call__(self, row): return {'n': self.do(row['x'])}\nf = C()"
    ),
    "a class's attribute": (
        "class C:\n k = K\n def __call__(self, row): return {'n': row['x'] * self.k}\nf = C()"
    ),
    "a property": (
        "class C:\n @property\n def k(self): return K\n"
        " def __call__(self, row): return {'n': row['x'] * self.k}\nf = C()"
    ),
    "a static method": (
        "class C:\n @staticmethod\n def do(x): return x * K\ndef f(row): return {'n': C.do(row['x'])}"
    ),
    "slots": (
        "class C:\n __slots__ = ('k',)\n def __init__(self, k): self.k = k\n"
        " def __call__(self, row): return {'n': row['x'] * self.k}\nf = C(K)"
    ),
    "a dataclass": (
        "import dataclasses\n@dataclasses.dataclass(frozen=True, slots=True)\nclass C:\n k: int\n"
        " def __call__(self, row): return {'n': row['x'] * self.k}\nf = C(K)"
    ),
    "an enum": "import enum\nclass E(enum.Enum):\n k = K\ndef f(row): return {'n': row['x'] * E.k.value}",
    "a function of a module": {
        "user": "import helpers\ndef f(row): return {'n': helpers.do(row['x'])}",
        "helpers": "def do(x): return x * K",
    },
    "a name from a module": {
        "user": "from helpers import do\ndef f(row): return {'n': do(row['x'])}",
        "helpers": "factor = K\ndef do(x): return x * factor",
    },
    "a module in a package": {
        "user": "import package.inner\ndef f(row): return {'n': package.inner.do(row['x'])}",
        "package": "",
        "package.inner": "def do(x): return x * K",
    },
    "a function that keeps results": (
        "import functools\n@functools.lru_cache\ndef do(x): return x * K\n"
        "def f(row): return {'n': do(row['x'])}"
    ),
    "a decorated function": (
        "import functools\ndef around(g):\n @functools.wraps(g)\n def inner(*a): return g(*a)\n"
        " return inner\n@around\ndef f(row): return {'n': row['x'] * K}"
    ),
    "a decorator": (
        "def around(g):\n def inner(row): return {'n': g(row)['n'] * K}\n return inner\n@around\n"
        "def f(row): return {'n': row['x']}"
    ),
    "a decorator of a library": (
        "import contextlib\n@contextlib.contextmanager\ndef k(): yield K\ndef f(row):\n"
        " with k() as factor: return {'n': row['x'] * factor}"
    ),
    "a partial": "import functools\nf = functools.partial(lambda k, row: {'n': row['x'] * k}, K)",
    "a global partial": (
        "import functools\ndo = functools.partial(lambda k, x: x * k, K)\n"
        "def f(row): return {'n': do(row['x'])}"
    ),
    "a function's attribute": "def f(row): return {'n': row['x'] * f.k}\nf.k = K",
    "functions by type": (
        "import functools\n@functools.singledispatch\ndef do(x): pass\n@do.register\n"
        "def _(x: int): return x * K\ndef f(row): return {'n': do(row['x'])}"
    ),
    "functions in a tuple": (
        "def do(x): return x * K\nall_of = (do,)\ndef f(row): return {'n': [g(row['x']) for g in all_of][0]}"
    ),
    "a C function's object": (
        "def make(get): return lambda row: get(row['x'])\nf = make({n: {'n': n * K} for n in range(20)}.get)"
    ),
    "a long pattern": (
        "import re\npattern = re.compile('a' * 300 + str(K))\n"
        "def f(row): return {'n': row['x'] * int(pattern.pattern[-1])}"
    ),
    "a table": (
        "import pyarrow as pa\nt = pa.table({'k': [0] * 500 + [K] + [0] * 500})\n"
        "def f(row): return {'n': row['x'] * t['k'][500].as_py()}"
    ),
    "an array of objects": (
        "import numpy as np\na = np.array(['x' * K, None], dtype=object)\n"
        "def f(row): return {'n': row['x'] * len(a[0])}"
    ),
    "a tensor of 16 bits": (
        "import torch\nt = torch.tensor([K], dtype=torch.bfloat16)\n"
        "def f(row): return {'n': int(row['x'] * t[0].item())}"
    ),
    "the weights of a module": (
        "import torch\nclass M(torch.nn.Module):\n def __init__(self):\n  super().__init__()\n"
        "  self.w = torch.nn.Parameter(torch.tensor(float(K)))\n def forward(self, x): return x * self.w\n"
        "m = M()\ndef f(row): return {'n': int(m(row['x']).item())}"
    ),
    "the forward of a module": (
        "import torch\nclass M(torch.nn.Module):\n def forward(self, row): return {'n': row['x'] * K}\n"
        "f = M()"
    ),
    "where an error is caught": (
        "def f(row):\n n = row['x']\n try:\n  int('x' * (K - 1) or '1')\n  n += 100\n except ValueError:\n"
        "  n -= 100\n return {'n': n}"
    ),
}  # fmt: skip


class Users:
    """The user's modules, as they are after an edit."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._patch = monkeypatch
        monkeypatch.syspath_prepend(str(folder))

    def load(self, given: str | dict[str, str], k: int) -> Any:
        texts = {"user": given} if isinstance(given, str) else given
        for name in ("user", "helpers", "package", "package.inner"):
            self._patch.delitem(sys.modules, name, raising=False)
        for name in texts:
            module = types.ModuleType(name)
            module.__file__ = str(self._folder / f"{name}.py")
            if name == "package":
                module.__path__ = []
            self._patch.setitem(sys.modules, name, module)
        for name, text in reversed(texts.items()):
            exec(compile(text.replace("K", str(k)), f"{name}.py", "exec"), vars(sys.modules[name]))
            above, _, last = name.rpartition(".")
            if above:
                setattr(sys.modules[above], last, sys.modules[name])
        linecache.clearcache()
        return sys.modules["user"]


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Users:
    return Users(tmp_path, monkeypatch)


def blocks() -> int:
    return tp.cache.info().blocks


@pytest.mark.sample(20)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_seen_and_what_was_before_is_known_again(edit: str, users: Users) -> None:
    found = []
    for k, made in ((1, 1), (1, 1), (2, 2), (1, 2), (2, 2)):
        pipe = rows().map(users.load(EDITS[edit], k).f)
        found.append(list(pipe))
        assert list(pipe.cache()) == found[-1]
        assert blocks() == made
    assert found[0] == found[1] == found[3] != found[2] == found[4]


def test_what_a_function_counts_or_logs_does_not_make_rows_anew(users: Users) -> None:
    text = (
        "import logging, threading\nlog = logging.getLogger('user')\nlock = threading.Lock()\ncalls = 0\n"
        "def f(row):\n global calls\n with lock: calls += 1\n log.debug('x')\n return {'n': row['x'] * K}"
    )
    user = users.load(text, 1)
    for _ in range(3):
        assert [row["n"] for row in rows().map(user.f).cache()] == list(range(20))
    assert user.calls == 40  # of which 20 to find the types of columns
    assert blocks() == 1


class Times(TableStage):
    """A stage of the user's own."""

    def apply(self, table: pa.Table) -> pa.Table:
        return times(table)


def times(table: pa.Table) -> pa.Table:
    return table.set_column(0, "x", pc.multiply(table["x"], 2))


def test_a_stage_of_ones_own_is_known_by_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for function, factor in (
        (times, 2),
        (lambda table: table.set_column(0, "x", pc.multiply(table["x"], 3)), 3),
    ):
        monkeypatch.setitem(globals(), "times", function)
        assert [row["x"] for row in rows().then(Times()).cache()] == [factor * n for n in range(20)]
    monkeypatch.setattr(Times, "process", lambda self, run: run)
    assert [row["x"] for row in rows().then(Times()).cache()] == list(range(20))


def test_an_expression_is_known_by_all_of_its_values() -> None:
    for odd_one in (1, 2):
        wanted = [*range(100, 150), odd_one, *range(200, 300)]
        pipe = rows().filter(pc.field("x").isin(wanted))
        assert [row["x"] for row in pipe.cache()] == [odd_one]


@pytest.mark.parametrize("told_by", ["its distribution", "__version__"])
@pytest.mark.parametrize(
    "text",
    [
        "import ours_alone\ndef f(row): return {'n': ours_alone.do(row['x'])}",
        "from ours_alone import do\ndef f(row): return {'n': do(row['x'])}",
        "def f(row):\n import ours_alone\n return {'n': ours_alone.do(row['x'])}",
        "def make():\n import ours_alone\n return lambda row: {'n': ours_alone.do(row['x'])}\nf = make()",
    ],
)
def test_another_version_of_a_package_is_seen(
    text: str, told_by: str, tmp_path: Path, users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    if told_by == "__version__" and "\n import ours_alone\n return {" in text:
        pytest.skip("it may not be imported yet")
    packages = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for k, made in ((1, 1), (1, 1), (2, 2)):
        shutil.rmtree(packages, ignore_errors=True)
        (packages / "ours_alone").mkdir(parents=True)
        lines = f"def do(x): return x * {k}\n" + f"__version__ = '{k}'\n" * (
            told_by == "__version__"
        )
        (packages / "ours_alone/__init__.py").write_text(lines)
        if told_by == "its distribution":
            about = packages / f"ours_alone-{k}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: ours_alone\nVersion: {k}\n"
            )
        monkeypatch.delitem(sys.modules, "ours_alone", raising=False)
        importlib.invalidate_caches()
        contents.is_installed.cache_clear()
        contents._distributed.cache_clear()
        pipe = rows().map(users.load(text, k).f)
        assert [row["n"] for row in pipe.cache()] == [k * n for n in range(20)]
        assert blocks() == made


UNTOLD: dict[str, Any] = {
    "a generator": (n for n in range(3)),
    "an open file": open(os.devnull),  # noqa: SIM115
    "what C keeps to itself": compile("1", "", "eval").co_positions(),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_what_cannot_be_told_is_refused_unless_a_version_is_given(name: str) -> None:
    thing = UNTOLD[name]

    def function(row: dict[str, Any]) -> dict[str, Any]:
        return {"n": row["x"] if thing else 0}

    said = r".*function.* cannot be seen: it uses a .*\(map\(fn\), thing.*\).*version=\"\.\.\.\""
    with pytest.raises(ConfigError, match=said):
        rows().map(function).cache()._iteration.plan.inputs.cached_blocks  # noqa: B018
    assert len(list(rows().map(function, version="1").cache())) == 20
    assert len(list(rows().map(function).cache(version="1"))) == 20


def test_a_module_of_ones_own_that_is_imported_when_it_is_called_is_refused(users: Users) -> None:
    text = "def f(row):\n from helpers import do\n return {'n': do(row['x'])}"
    user = users.load({"user": text, "helpers": "def do(x): return x"}, 1)
    with pytest.raises(ConfigError, match=r"uses the module 'helpers', imported when it is called"):
        list(rows().map(user.f).cache())
    assert len(list(rows().map(user.f, version="1").cache())) == 20


def test_what_holds_itself_is_known() -> None:
    endless: list[Any] = []
    endless.append(endless)
    pair: dict[str, Any] = {}
    pair["other"] = {"other": pair}
    for made, thing in enumerate((endless, pair), start=1):
        for _ in range(2):
            known = rows().map(lambda row, thing=thing: row if thing else {}).cache()
            assert len(list(known)) == 20
        assert blocks() == made


def test_what_holds_too_much_within_itself_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ConfigError, match="RecursionError"):
        list(rows().map(lambda row: row if deep else {}).cache())


def test_arrays_are_known_by_all_that_they_hold_and_not_by_how_they_lie() -> None:
    def key(value: Any) -> Any:
        return cache_key([Map(fn=lambda row: value)], "test")

    array = np.arange(10_000).reshape(100, 100)
    other = array.copy()
    other[70, 70] = 0
    assert key(array) == key(array.copy()) == key(np.asfortranarray(array)) != key(other)
    assert key(torch.from_numpy(array)) == key(torch.from_numpy(array.copy()))
    assert key(torch.from_numpy(array)) != key(torch.from_numpy(other))
    assert key([1]) != key([1.0]) != key([True]) != key(["1"]) != key((1,))
    assert key({"a": 1, "b": 2}) != key({"a": 2, "b": 1})
    assert key({1: 0}) != key({"1": 0})
    assert key({"b", "a"}) == key({"a", "b"})


def test_a_mapped_file_is_known_by_its_time_and_is_not_read(tmp_path: Path) -> None:
    def key(value: Any) -> Any:
        return cache_key([Map(fn=lambda row: value)], "test")

    def mapped(shape: int = 1 << 40) -> Any:  # far more than memory
        return np.memmap(tmp_path / "large", np.uint8, "r", shape=shape)

    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 40)
    before = key(mapped())
    assert before == key(mapped()) != key(mapped(9))
    os.utime(tmp_path / "large", ns=(0, 0))
    assert before != key(mapped())


SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import user
from trainpipes.stages.map import Map
from trainpipes.interfaces import contents
from trainpipes.interfaces.contents import cache_key
for name in user.names:
    print(json.dumps(cache_key([Map(fn=getattr(user, name))], "test")))
"""


def test_every_process_knows_a_function_alike(tmp_path: Path) -> None:
    texts = [text for text in EDITS.values() if isinstance(text, str)]
    whole = "\n".join(
        f"def make_{n}():\n" + "\n".join(f"  {line}" for line in text.split("\n")) + "\n  return f"
        for n, text in enumerate(texts)
    )
    names = [f"f_{n}" for n in range(len(texts))]
    made = "\n".join(f"f_{n} = make_{n}()" for n in range(len(texts)))
    (tmp_path / "user.py").write_text(
        f"K = 1\n{whole}\n{made}\nfrom string import ascii_letters\nnames = {names}\n"
        "words = set(ascii_letters)\ndef with_set(row): return words\nnames.append('with_set')\n"
    )
    said = []
    for seed in ("1", "2"):
        command = [*python(), "-c", SCRIPT, str(tmp_path)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
    assert said[0] == said[1]
    assert len(set(said[0])) == len(names) + 1
