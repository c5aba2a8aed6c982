"""A config from a stranger runs nothing, imports nothing, writes nothing, and takes little time and memory.

Each document is loaded in one process that reports, by audit hooks, what is imported, run and opened for
writing. Most of them try to make a file, the canary, which must not be there in the end.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import trainpipes as tp
from chats import small_tokenizer
from interpreters import python
from trainpipes.config import loads, parse_change

#: A module that a document tries to have imported: it makes the canary.
MODULE = """
import pathlib
pathlib.Path("canary").touch()
def run(*args, **options):
    pathlib.Path("canary").touch()
class Tokenizer:
    pass
"""
STAGES = "stages:\n- list_files: d\n"
#: Stages that take a function; "draw" is none.
TAKE_FUNCTIONS = (
    "map filter collate flat_map map_batches with_columns image_transform read_files draw tokenize"
)

HOSTILE = [
    # Tags of PyYAML, by their short and long names, and through handles of the document's own.
    *(
        f"stages: !!python/{tag}"
        for tag in (
            "object/apply:os.system ['touch canary']",
            "object/apply:hostile.run []",
            "object/new:hostile.run []",
            "object:hostile.Tokenizer {}",
            "name:hostile.run ''",
            "module:hostile ''",
            "tuple [1]",
            "object/apply:builtins.exec ['open(chr(99),chr(119))']",
        )
    ),
    "stages: !<tag:yaml.org,2002:python/object/apply:os.system> ['touch canary']",
    "%TAG !p! tag:yaml.org,2002:python/\n---\nstages: !p!object/apply:os.system ['touch canary']",
    "%TAG ! tag:yaml.org,2002:python/object/apply:\n---\nstages: !os.system ['touch canary']",
    "? !!python/object/apply:os.system ['touch canary']\n: 1",
    "!!python/object/apply:os.system ['touch canary']: 1",
    "stages: [&a !!python/object/apply:os.system ['touch canary'], *a]",
    # Functions and classes of ours, at every place where one can stand.
    *(
        STAGES + f"- {stage}\n"
        for stage in (
            *(f"{name}: hostile:run" for name in TAKE_FUNCTIONS.split()),
            "map: !function hostile:run",
            "map: !function os:system",
            "map: {fn: hostile:run, num_workers: 2, method: process}",
            "filter: [[x, '==', !function hostile:run]]",
            "filter: [[__import__, in, [hostile]]]",
            "read_files: {fn: hostile:run, count: hostile:run}",
            "hostile:Tokenizer",
            "hostile:run: {}",
            "hostile: {}",
            "os.system: touch canary",
            "__class__: {}",
            "_plan: {}",
            "then: {stage: x}",
            "to_yaml: {path: canary}",
            "write_parquet: {path: canary}",
            "write_memmap: canary",
            *(
                f"pad_collate: {{dtype: {t}}}"
                for t in ("hostile", "os.system", "onnx", "!dtype int32")
            ),
            "read_json: {schema: {x: hostile}}",
            "tokenize: !function hostile:run",
            "to: hostile",
            "cache: {version: !function hostile:run}",
            "read_parquet: {storage_options: {protocol: hostile}}",
        )
    ),
    *(
        f"stages: [{{{name}: hostile:run}}]"
        for name in ("from_iterable", "from_dataset", "from_torchdata")
    ),
    "stages: [{from_iterable: !function hostile:run}]",
    "stages: [{from_hf: hostile}]",
    "stages: [{mix: {sources: {a: !pipeline {stages: [{list_files: d}, {map: hostile:run}]}}}}]",
    "stages: [{concat: [!function hostile:run]}]",
    # Recipes are those that are installed, by name.
    *(
        f"recipe: {name}"
        for name in ("hostile", "hostile:run", "../hostile", "trainpipes_recipes.sft")
    ),
    "recipe: !function hostile:run",
    "recipe: sft\noptions: {files: !function hostile:run, tokenizer: bytes}",
    "recipe: sft\noptions: {files: x.jsonl, tokenizer: hostile:run}",
    "recipe: sft\noptions: {files: x.jsonl, tokenizer: coded}",
    "recipe: chat\noptions: {files: chats.jsonl, tokenizer: coded}",
    "recipe: chat\noptions: {files: chats.jsonl, tokenizer: templated}",
    "recipe: images\noptions: {files: pictures, transform: hostile:run}",
    "recipe: sft\noptions: {files: pickled.npy, tokenizer: bytes}",
    # What the environment holds is no code either.
    "stages: ${CODE}",
    "stages:\n- list_files: d\n- map: ${NAME}",
    "recipe: ${NAME}",
]

#: Those that are not refused: the text is no function, and its characters are the rows.
TEXT = ["stages: [{from_dataset: hostile:run}]"]

#: Loads each document, and iterates what comes of it; reports what happened.
PROGRAM = """
import json, os, sys, warnings
import torch, numpy, pyarrow, yaml, trainpipes as tp
import trainpipes.config, trainpipes_recipes, transformers, tokenizers
from trainpipes.config import loads
warnings.simplefilter("ignore")
loads("stages: [list_files: d]").to_yaml()
seen = []
def hook(event, args):
    if event == "import" and str(args[0]).split(".")[0] in ("hostile", "coded"):
        seen.append(["import", args[0]])
    elif event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pickle.find_class"):
        seen.append([event, repr(args)[:200]])
    elif event == "open" and str(args[0]).endswith(("canary", "hostile.py")):
        seen.append(["open", str(args[0])])
    elif event == "exec" and args[0].co_filename.endswith("hostile.py"):
        seen.append(["exec", args[0].co_filename])
sys.addaudithook(hook)
texts = json.load(sys.stdin)
for number, text in enumerate(texts):
    seen.clear()
    try:
        pipe = loads(text, allow_imports=number == len(texts) - 1)
        said = "loaded"
        next(iter(pipe))
    except tp.TrainpipesError as error:
        said = f"{type(error).__name__}: {error}"
    except BaseException as error:
        said = f"other {type(error).__name__}: {error}"
    canary = os.path.exists("canary")
    print(json.dumps([number, said, seen, canary]), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what documents name: a module, a tokenizer with code, pickles."""
    (tmp_path / "hostile.py").write_text(MODULE)
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 30)
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 30)
    (tmp_path / "pictures").mkdir()
    coded = tmp_path / "coded"
    coded.mkdir()
    (coded / "tokenization_hostile.py").write_text(MODULE)
    own = {"AutoTokenizer": ["tokenization_hostile.Tokenizer", None]}
    told = {"tokenizer_class": "Tokenizer", "auto_map": own}
    (coded / "tokenizer_config.json").write_text(json.dumps(told))
    (coded / "config.json").write_text(json.dumps({"model_type": "hostile", **told}))
    run = "cycler.__init__.__globals__.os.system('touch canary')"
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}{{ " + run + " }}"
    small_tokenizer(template).save_pretrained(tmp_path / "templated")

    class Made:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("touch canary",)

    (tmp_path / "fit.pkl").write_bytes(pickle.dumps(Made()))
    np.save(tmp_path / "pickled.npy", np.array([Made()], dtype=object), allow_pickle=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nothing_is_run_unless_the_caller_allows_it(folder: Path) -> None:
    environment = {
        **os.environ,
        "CODE": "!!python/object/apply:os.system ['touch canary']",
        "NAME": "hostile:run",
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "HF_HUB_OFFLINE": "1",
    }
    texts = [*HOSTILE, STAGES + "- map: hostile:run\n"]  # the last one with leave to import
    run = subprocess.run(
        [*python(), "-c", PROGRAM], input=json.dumps(texts), capture_output=True, text=True,
        cwd=folder, env=environment, timeout=200,
    )  # fmt: skip
    told = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    assert len(told) == len(texts), run.stderr
    *told, (_, _, allowed, _) = told
    for number, said, seen, canary in told:
        assert seen == [], f"{HOSTILE[number]}: {seen}"
        assert not canary, HOSTILE[number]
        refused = not said.startswith(("loaded", "other"))
        assert refused or HOSTILE[number] in TEXT, f"{HOSTILE[number]}: {said}"
    assert ["exec", str(folder / "hostile.py")] in allowed, "what is looked for would be seen"
    assert ["open", "canary"] in allowed
    assert (folder / "canary").exists()


def test_a_change_of_a_command_line_runs_nothing(folder: Path) -> None:
    for value in ("!!python/object/apply:os.system ['touch canary']", "!function hostile:run"):
        with pytest.raises(tp.ConfigError):
            loads(STAGES + "- map: x:y", changes=dict([parse_change(f"stages[1].fn={value}")]))
    assert not (folder / "canary").exists()


def large(times: int) -> dict[str, str]:
    """Documents that are too large, too deep or too odd: the largest are of ``times`` 100,000 characters."""
    much = 100_000 * times
    return {
        "many keys": "stages:\n" + "".join(f"- a{n}: {n}\n" for n in range(600 * times)),
        "many brackets": "[" * much,
        "many flow keys": "{" + ",".join(f"a{n}: b" for n in range(600 * times)),
        "a long number": "stages: [list_files: d, take: " + "9" * much + "]",
        "a long float": "stages: [list_files: d, take: " + "9" * much + ".5e5]",
        "a long word": STAGES + "- " + "a" * much,
        "many variables": "stages: [list_files: '" + "${" * (much // 4) + "']",
        "a deep filter": STAGES + "- filter: " + "[" * 60 + "]" * 60,
        "many aliases": "\n".join(["a0: &a0 [x, x]",
            *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]),
        "deep aliases": "\n".join(["- &a0 [x]", *(f"- &a{n} [*a{n - 1}]" for n in range(1, 5000))]),
        "an alias of itself": "a: &a [*a]",
        "a deep type": STAGES + "- read_json: {schema: {x: '" + "list<" * 100_000 + "'}}",
        "many anchors": "a: [" + ",".join(f"&a{n} x" for n in range(600 * times)) + "]",
        "many quotes": '"' + "\\\\" * (much // 2),
        "many comments": "# x\n" * (much // 4),
        "many spaces": " " * much + "x",
    }  # fmt: skip


@pytest.mark.sample(8)
@pytest.mark.parametrize("times", [1, pytest.param(9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", large(0))
def test_a_large_document_ends_soon(name: str, times: int) -> None:
    started = time.monotonic()
    with pytest.raises(tp.ConfigError) as found:
        loads(large(times)[name])
    assert len(str(found.value)) < 2000
    assert time.monotonic() - started < 60
