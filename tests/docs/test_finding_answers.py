"""What a newcomer asks is answered within two clicks of the README; headings of errors are their messages."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
#: Where the answer to a newcomer's question begins.
ANSWERS = {
    "how do I install it": "README.md#install",
    "my files are JSON lines": "docs/formats.md#json-lines-and-json",
    "I use the Hugging Face Trainer": "docs/frameworks.md#hugging-face-trainer",
    "how well is it shuffled": "docs/datasets.md#how-to-measure-a-shuffle",
    "how many steps are in an epoch": "docs/questions.md#how-many-steps-are-in-an-epoch",
    "how do I evaluate every row once": "docs/evaluation.md#evaluation",
    "how do I train on several GPUs": "docs/resume.md#several-ranks",
    "how do I resume": "docs/resume.md#resume-and-distributed-training",
    "workers or threads": "docs/speed.md#how-a-pipeline-runs",
    "how do I look at a row": "docs/questions.md#how-do-i-look-at-a-row",
}
MOST_CLICKS = 2
#: What users ask: words of a heading of docs/questions.md, one click from the README.
ASKED = (
    "S3", "gated", "FSDP", "torch.compile", "packed documents", "slow", "batch size", "memory", "bad rows",
    "augment", "evaluate in the middle", "curriculum", "shuffled", "checkpoint", "later versions",
    "weights", "infinite stream", "Kafka", "wandb", "several nodes", "context parallelism", "remote files",
)  # fmt: skip

LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#{1,4} (.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
#: A heading of docs/errors.md that is an error or a warning of ours, and what stands below it.
MESSAGE = re.compile(
    r"^### (\w+(?:Error|Warning)): ([^\n]+)\n(.*?)(?=^###|\Z)", re.DOTALL | re.MULTILINE
)
PRINTED = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@cache
def links(page: str) -> set[tuple[str, str]]:
    """Page and anchor that a page leads to, in one click."""
    text = CODE.sub("", (ROOT / page).read_text())
    folder = (ROOT / page).parent
    found = set()
    for path, anchor in LINK.findall(text):
        there = (folder / path).resolve().relative_to(ROOT).as_posix() if path else page
        found.add((there, anchor))
    return found


@cache
def sections(page: str) -> dict[str, str]:
    """Each heading's anchor, as GitHub and the site make it, and what stands below it."""
    text = (ROOT / page).read_text()
    plain = CODE.sub(lambda code: re.sub(r"^#", " ", code[0], flags=re.MULTILINE), text)
    heads = list(HEADING.finditer(plain))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return {slug(h[1]): text[h.end() : end] for h, end in zip(heads, ends, strict=True)}


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def clicks(page: str, anchor: str) -> int:
    """How many clicks a section is away from the README."""
    seen = {("README.md", "")}
    if page == "README.md":
        return 1
    for number in range(1, 4):
        seen |= {link for there, _ in seen if there.endswith(".md") for link in links(there)}
        if (page, anchor) in seen or (page, "") in seen:
            return number
    return 99


@pytest.mark.parametrize("question", ANSWERS)
def test_a_newcomers_question_is_answered_within_two_clicks(question: str) -> None:
    page, anchor = ANSWERS[question].split("#")
    assert anchor in sections(page)
    assert clicks(page, anchor) <= MOST_CLICKS
    assert CODE.search(sections(page)[anchor]), "an answer shows what to type"


@pytest.mark.parametrize("asked", ASKED)
def test_what_users_ask_is_answered_within_one_click(asked: str) -> None:
    page = "docs/questions.md"
    assert (page, "") in links("README.md")
    heads = HEADING.findall(CODE.sub("", (ROOT / page).read_text()))
    (head,) = (head for head in heads if asked in head)
    answer = sections(page)[slug(head)]
    assert len([line for line in CODE.sub("", answer).splitlines() if line]) <= 10
    assert CODE.search(answer) or LINK.search(answer), "it shows what to type, or leads there"


@pytest.mark.parametrize("page", PAGES)
def test_anchors_of_links_are_headings(page: str) -> None:
    anchors = [(there, name) for there, name in links(page) if name and there.endswith(".md")]
    assert not [f"{there}#{name}" for there, name in anchors if name not in sections(there)]


def test_headings_of_errors_are_the_words_of_messages() -> None:
    found = list(MESSAGE.finditer((ROOT / "docs" / "errors.md").read_text()))
    assert len(found) >= 10
    for kind, heading, below in (match.groups() for match in found):
        said = "".join(PRINTED.findall(below))
        place = 0
        for part in heading.split("…"):
            place = said.find(part.strip(), place)
            assert place >= 0, f"{kind}: {heading}"
        caught = "catch_warnings" if kind.endswith("Warning") else f"except (?:tp\\.)?{kind} as"
        assert re.search(caught, below), f"{kind} is what is caught"


#: Twenty questions of users: the page, one click from the README, and the anchor of the section.
ONE_CLICK = {
    "can I resume on fewer GPUs": ("docs/resume.md", "several-ranks"),
    "how do I train on two nodes": ("docs/nodes.md", "start"),
    "which slices does a context parallel rank get": (
        "docs/nodes.md", "tensor-pipeline-and-context-parallel"),
    "rows turned out to be of a test set: how do I train on without them": (
        "docs/epochs.md", "how-to-leave-out-rows-from-a-batch-on"),
    "can it read shards of MosaicML": ("docs/migrating.md", "grain-litdata-energon-mds-tfdata-dali"),
    "I come from Grain": ("docs/migrating.md", "grain-litdata-energon-mds-tfdata-dali"),
    "I use torchtitan": ("docs/frameworks.md", "torchtitan"),
    "how large is a state, and what is in it": ("docs/resume.md", "what-a-state-holds"),
    "what must not change between two runs": ("docs/resume.md", "what-may-change"),
    "my job gets SIGTERM": ("docs/preemption.md", "in-the-loop"),
    "how do I weight two sources": ("docs/mixing.md", "weights"),
    "pairs for DPO": ("docs/recipes.md", "preference"),
    "my optimizer step must be the same on 4 GPUs as on 8": (
        "docs/resume.md", "the-same-step-on-any-number-of-ranks"),
    "a file is damaged": ("docs/bad-rows.md", "damaged-files"),
    "ranks have different numbers of batches": ("docs/epochs.md", "the-end-of-an-epoch"),
    "how fast is it beside the others": ("benchmarks/README.md", "results"),
    "can I tokenize before I train": ("docs/prepare.md", "how-to-tokenize-ahead"),
    "why does my GPU wait": ("docs/speed.md", "why-does-my-run-wait"),
    "does packing let documents see each other": ("docs/tokens.md", "attention-within-documents"),
    "TFRecord files": ("docs/extend.md", "a-file-format"),
}  # fmt: skip


def test_nineteen_of_twenty_questions_are_answered_within_one_click() -> None:
    here = {page for page, _ in links("README.md")}
    found = [page in here and anchor in sections(page) for page, anchor in ONE_CLICK.values()]
    assert len(found) == 20
    assert sum(found) >= 19, [q for q, good in zip(ONE_CLICK, found, strict=True) if not good]


#: Words of the README and of all pages, without code blocks, addresses of links and what pictures show; and
#: of all pages without code that stands in lines, too.
MOST_WORDS = {"README.md": 700, "docs": 25_500, "prose": 22_300}


def words(text: str) -> int:
    for left_out in (
        r"<!--.*?-->",
        r"!\[[^\]]*\]\([^)]*\)",
        r"(?<=\])\([^)]*\)",
        r"</?(?:details|summary)[^>]*>",
    ):
        text = re.sub(left_out, "", text, flags=re.DOTALL)
    return len(re.findall(r"\S*\w\S*", CODE.sub("", text)))


def test_pages_are_short() -> None:
    texts = [(ROOT / page).read_text() for page in PAGES if page != "README.md"]
    assert words((ROOT / "README.md").read_text()) <= MOST_WORDS["README.md"]
    assert sum(map(words, texts)) <= MOST_WORDS["docs"], "what is said twice goes"
    prose = [re.sub(r"`[^`\n]+`", "", CODE.sub("", text)) for text in texts]
    assert sum(map(words, prose)) <= MOST_WORDS["prose"]
