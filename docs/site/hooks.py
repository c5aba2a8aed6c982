"""What the site has beside the pages of ``docs/``: the README, the benchmarks, the changelog, code that pages
link to, and a reference made of docstrings. mkdocs calls these functions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from reference import pages
from tour import page as tour

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: Pages that stand elsewhere in the repository.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
}
#: Names of stages and sources above their entries.
ENTRY = re.compile(r"^\| `[^|]+ \|", re.MULTILINE)
NAMED = re.compile(r"`(\w+)[^`]*`")
LINK = re.compile(r"(?<=\]\()([^)#\s]+)(#[^)\s]*)?(?=\))")
#: Names of stages and sources, and where the reference tells of them: filled when the site is built.
REFERENCE: dict[str, str] = {}
EMPTY_CELL = re.compile(r"<th( [^>]*)?></th>")
EMPTY_HEAD = re.compile(r"<thead>\s*<tr>\s*(<th( [^>]*)?></th>\s*)+</tr>\s*</thead>\n?")
FENCE = re.compile(r"^( *```\w+) .+$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    added = {
        name: _linked((ROOT / place).read_text(), (ROOT / place).parent)
        for place, name in ELSEWHERE.items()
    }
    added["tour.md"] = tour()
    made = list(pages())
    added |= {f"reference/{name}.md": f"# {title}\n\n{text}" for name, title, text in made}
    REFERENCE.update(_places(made))
    for page in [*DOCS.glob("*.md"), *(ROOT / place for place in ELSEWHERE)]:
        for path in map(_path_of(page.parent), LINK.finditer(page.read_text())):
            if path and not path.startswith("docs/") and path not in ELSEWHERE:
                added[f"code/{path}.md"] = _code(path)
    for name, text in added.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links out of ``docs/`` lead to where things are here; marks for the tests go."""
    if page.file.generated_by is None:
        markdown = _linked(markdown, DOCS)
    if page.file.src_uri == "stages.md":
        markdown = ENTRY.sub(_with_reference, markdown)
    return FENCE.sub(r"\1", markdown)


def _places(made: list[tuple[str, str, str]]) -> dict[str, str]:
    """Where the reference tells of each stage and source."""
    return {
        heading[1]: f"reference/{name}.md#{heading[1].lower()}"
        for name, _, text in made
        if name in ("sources", "stages", "pipeline")
        for heading in re.finditer(r"^## (?:tp\.)?(\w+) \{", text, re.MULTILINE)
    }


def _with_reference(entry: re.Match[str]) -> str:
    """The first cell of a row, whose stages lead to the reference."""
    return NAMED.sub(
        lambda name: f"[{name[0]}]({REFERENCE[name[1]]})" if name[1] in REFERENCE else name[0],
        entry[0],
    )


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Cells that head nothing are no headings. A whole row of them goes: only Markdown asks for it."""
    html = EMPTY_HEAD.sub("", html)
    return EMPTY_CELL.sub(r"<td\1></td>", html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The theme's search has no name for those who hear the page."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same for 404.html, which is no page."""
    return on_post_page(output_content, None, config)


def _path_of(folder: Path) -> Callable[[re.Match[str]], str]:
    """What a link on a page of that folder leads to, from the root of the repository; "" for a URL."""
    return lambda link: (
        "" if "://" in link[1] else (folder / link[1]).resolve().relative_to(ROOT).as_posix()
    )


def _linked(text: str, folder: Path) -> str:
    """A page with its links as they are on the site."""
    path_of = _path_of(folder)

    def there(link: re.Match[str]) -> str:
        path, anchor = path_of(link), link[2] or ""
        if not path:
            return link[0]
        inside = path.removeprefix("docs/") if path.startswith("docs/") else f"code/{path}.md"
        inside = "tour.md" if inside == "tour.ipynb" else inside
        return ELSEWHERE.get(path, inside) + anchor

    return LINK.sub(there, text)


def _code(path: str) -> str:
    """A file as a page, or all of a folder."""
    found = ROOT / path
    shown = [f"# {path}"]
    for file in sorted(found.iterdir()) if found.is_dir() else [found]:
        kind = {".py": "python", ".yaml": "yaml"}.get(file.suffix, "text")
        name = [f"## {file.name}"] if found.is_dir() else []
        shown += [*name, f"````{kind}\n{file.read_text()}````"]
    return "\n\n".join(shown) + "\n"
