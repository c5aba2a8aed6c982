"""A corpus that is on every machine: the source of Python's standard library."""

from __future__ import annotations

import ast
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["END", "PAD", "function_pairs", "train_tokenizer", "write_parquet"]

END, PAD = "<eos>", "<pad>"

#: Folders of the standard library that hold no library code, or packages of others.
LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})

#: Rows of each file as parts of the whole, and rows of its row groups: uneven, as real files are.
SHARES = (0.4, 0.05, 0.25, 0.02, 0.28)
ROW_GROUPS = (700, 90, 1100, 33, 256)


def function_pairs(every: int = 1) -> Iterator[tuple[str, str]]:
    """Prompt and response of each function of the standard library with a docstring."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in root.rglob("*.py") if not LEFT_OUT & set(p.relative_to(root).parts))
    for path in paths[::every]:
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # deliberately broken examples, and other encodings
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
                body = node.body[1]
                first = body.lineno - len(getattr(body, "decorator_list", ()))
                docstring_end = node.body[0].end_lineno or 0
                if ast.get_docstring(node) and first > docstring_end:
                    prompt = "\n".join(lines[node.lineno - 1 : docstring_end])
                    response = "\n".join(lines[docstring_end : node.end_lineno])
                    yield textwrap.dedent(prompt), textwrap.dedent(response).strip("\n")


def write_parquet(pairs: Sequence[tuple[str, str]], directory: Path) -> list[Path]:
    """Write "prompt" and "response" to files of uneven sizes and row groups."""
    directory.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {"prompt": [prompt for prompt, _ in pairs], "response": [body for _, body in pairs]}
    )
    paths, start = [], 0
    for number, (share, rows) in enumerate(zip(SHARES, ROW_GROUPS, strict=True)):
        last = number == len(SHARES) - 1
        stop = len(table) if last else start + round(share * len(table))
        path = directory / f"functions-{number}.parquet"
        pq.write_table(table.slice(start, stop - start), path, row_group_size=rows)
        paths.append(path)
        start = stop
    return paths


def train_tokenizer(
    pairs: Sequence[tuple[str, str]],
    path: Path,
    vocabulary: int = 2048,
    special: Sequence[str] = (END, PAD),
) -> None:
    """Train a byte-level BPE tokenizer and write its ``tokenizer.json``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
    tokenizer.save(str(path))
