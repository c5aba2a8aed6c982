"""Opens every page of the built site in Chromium: ``make docs-check``.

In light and dark colors, at the width of a desktop and of a phone, a page must load without an error and
without a request to another host, must not be wider than its window, and axe-core must find nothing wrong
with it: contrast, names of links, order of headings, regions that a keyboard cannot scroll. Lines of code and
outputs do not wrap; copy buttons lie over no code, and stand on no output; words of pictures are large enough
on a phone, and pictures of speeds say on what machine, when and with what versions. So it is for the page
that a profile writes, ``run.html``. Prints what is wrong; ends with 1 if anything is.

    python docs/site/check.py                                   # after `make docs`
    python docs/site/check.py questions.html --screenshots /tmp/shots # some pages, and what they look like
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SITE = Path(__file__).parents[2] / "build" / "site"
SCHEMES = ("light", "dark")
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
#: Milliseconds after a page has loaded until the scripts of the theme are through.
SETTLE = 300
#: Names under which systems install it.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: Elements that are wider than the page, with those inside boxes that scroll left out.
TOO_WIDE = """() => {
    const wide = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth <= wide) return [];
    const cuts = e => /(auto|scroll|hidden)/.test(getComputedStyle(e).overflowX);
    const scrolls = e => e && (cuts(e) || scrolls(e.parentElement));
    return [...document.body.querySelectorAll('*')]
        .filter(e => e.getBoundingClientRect().right > wide + 1 && !scrolls(e.parentElement))
        .map(e => e.outerHTML.slice(0, 100));
}"""

#: What is wrong with blocks of code: lines that wrap, and buttons that lie over code or stand on outputs.
CODE = """() => {
    const shown = e => e.offsetWidth && getComputedStyle(e).visibility !== 'hidden';
    const short = e => e.textContent.trim().slice(0, 60);
    const faults = [];
    for (const code of document.querySelectorAll('pre > code')) {
        if (getComputedStyle(code).whiteSpace !== 'pre') faults.push('lines wrap: ' + short(code));
        const block = code.closest('.highlight') || code.parentElement;
        const range = document.createRange();
        range.selectNodeContents(code);
        const frame = code.getBoundingClientRect();
        for (const button of block.querySelectorAll('button')) {
            if (!shown(button)) continue;
            if (block.closest('.language-text')) faults.push('a button on an output: ' + short(code));
            const b = button.getBoundingClientRect();
            const over = [...range.getClientRects()].some(r => r.width > 1 && r.left < b.right
                && Math.min(r.right, frame.right) > b.left && r.top < b.bottom && r.bottom > b.top);
            if (over) faults.push('a button over code: ' + short(code));
        }
    }
    return faults;
}"""
#: What is wrong with pictures, where words have fewer than so many pixels.
LEAST = 8
PICTURES = """async least => {
    const faults = [];
    for (const image of document.querySelectorAll('img[src$=".svg"]')) {
        const name = image.src.split('/').pop();
        const svg = await (await fetch(image.src)).text();
        const wide = Number(/viewBox="0 0 ([0-9.]+)/.exec(svg)?.[1] || image.naturalWidth);
        const words = svg.includes('class="tp-back"')
            ? [...svg.matchAll(/class="([a-z-]+)" x=/g)].map(m => m[1]) : [];
        const rules = words.length ? words.map(word => svg.split(`.${word}{`)[1] || '') : [svg];
        const sizes = rules.flatMap(rule => [...(words.length ? rule.split('}')[0] : rule)
            .matchAll(/font(?:-size)?:[^;}"]*?([0-9.]+)px/g)].map(m => Number(m[1])));
        const smallest = Math.min(...sizes) * image.getBoundingClientRect().width / wide;
        if (smallest < least) faults.push(`words of ${smallest.toFixed(1)} pixels in ${name}`);
        if (name.startsWith('speed-') && !/ cores .*20\\d\\d/.test(svg))
            faults.push(`no machine and date in ${name}`);
    }
    return faults;
}"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and says nothing."""

    def log_message(self, *_: object) -> None: ...


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder, served from this machine."""
    handler = functools.partial(Quiet, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def check(
    browser: Any, axe: Any, home: str, names: Sequence[str], shots: Path | None
) -> Iterator[str]:
    """What is wrong with pages, one line each."""
    for scheme in SCHEMES:
        for device, (width, height) in WIDTHS.items():
            size = {"width": width, "height": height}
            context = browser.new_context(color_scheme=scheme, viewport=size)
            page = context.new_page()
            heard = listen(page, home)
            for name in names:
                page.goto(home + name, wait_until="load")
                page.wait_for_timeout(SETTLE)
                wide = [f"wider than the page: {element}" for element in page.evaluate(TOO_WIDE)]
                # Contrast is the slow rule, and no other at a phone's width.
                off = {"rules": {"color-contrast": {"enabled": device == "desktop"}}}
                wrong = axe.run(page, options=off).response["violations"]
                looks = [*page.evaluate(CODE), *page.evaluate(PICTURES, LEAST)]
                found = [*heard, *wide, *looks, *map(_fault, wrong)]
                heard.clear()
                yield from (f"{name} ({scheme}, {device}): {fault}" for fault in found)
                if shots:
                    to = (
                        shots
                        / f"{name.removesuffix('.html').replace('/', '-')}-{scheme}-{device}.png"
                    )
                    page.screenshot(path=to, full_page=True)
            if "index.html" in names:
                yield from (f"search ({scheme}, {device}): {fault}" for fault in search(page, home))
            context.close()


def write_run(path: Path) -> None:
    """The page of a short run."""
    import trainpipes as tp

    rows = [
        {"prompt": f"What is {n}?", "response": f"<b>{n}</b> & more. " * (n % 9)}
        for n in range(5000)
    ]
    texts = tp.from_dataset(rows).sharding_filter(4).shuffle(500)
    ids = texts.tokenize("bytes", concat=["prompt", "response"], labels="response", max_length=128)
    loader = tp.Loader(ids.batch(16).pad_collate())
    with tp.profile(loader) as run:
        for _ in loader:
            pass
    run.save(path)


def listen(page: Any, home: str) -> list[str]:
    """What goes wrong while a page loads, filled in as it happens."""
    heard: list[str] = []

    def request(sent: Any) -> None:
        if not sent.url.startswith((home, "data:", "blob:")):
            heard.append(f"asks another host: {sent.url}")

    def response(got: Any) -> None:
        if got.status >= 400:
            heard.append(f"answered with {got.status}: {got.url}")

    def console(said: Any) -> None:
        if said.type in ("error", "warning"):
            heard.append(f"console {said.type}: {said.text}")

    page.on("request", request)
    page.on("response", response)
    page.on("requestfailed", lambda sent: heard.append(f"request failed: {sent.url}"))
    page.on("console", console)
    page.on("pageerror", lambda error: heard.append(f"JavaScript: {error}"))
    return heard


def search(page: Any, home: str) -> Iterator[str]:
    """What is wrong with the search: a word that stands on many pages must be found."""
    from playwright.sync_api import TimeoutError

    page.goto(home + "index.html", wait_until="networkidle")
    page.keyboard.press("f")
    try:
        page.wait_for_selector("input[name=query]:focus", timeout=10_000)
        page.keyboard.type("checkpoint", delay=20)
        page.wait_for_selector(".md-search-result__item a", timeout=30_000)
    except TimeoutError:
        yield "finds nothing for 'checkpoint'"


def _fault(wrong: dict[str, Any]) -> str:
    """A rule of axe that a page breaks: how often, and the first place."""
    nodes = wrong["nodes"]
    checks = [*nodes[0]["any"], *nodes[0]["all"], *nodes[0]["none"]]
    why = checks[0]["message"] if checks else wrong["help"]
    return f"{wrong['id']} ({len(nodes)}): {' '.join(nodes[0]['html'].split())[:120]} {why}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", help="such as questions.html; all unless given")
    parser.add_argument("--site", type=Path, default=SITE, help="the built site")
    parser.add_argument("--chromium", help="its executable, where it is not on the PATH")
    parser.add_argument("--screenshots", type=Path, help="a folder for a picture of each page")
    args = parser.parse_args(arguments)
    if not (args.site / "index.html").exists():
        return _stop(f"{args.site} holds no site: run `make docs` first")
    try:
        from axe_playwright_python.sync_playwright import Axe
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        return _stop(f"{error.name} is missing: pip install playwright axe-playwright-python")
    chromium = args.chromium or next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        return _stop(
            "Chromium is missing: install it (Debian: `apt install chromium`), or pass --chromium PATH"
        )
    write_run(args.site / "run.html")
    there = sorted(p.relative_to(args.site).as_posix() for p in args.site.rglob("*.html"))
    names = args.pages or there
    if unknown := sorted({*names} - {*there}):
        return _stop(
            f"no such pages in {args.site}: {unknown}; write questions.html or reference/loader.html"
        )
    if args.screenshots:
        args.screenshots.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, served(args.site) as home:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        faults = 0
        for fault in check(browser, Axe(), home, names, args.screenshots):
            print(fault, flush=True)
            faults += 1
        print(
            f"{len(names)} pages in Chromium {browser.version}, {len(SCHEMES)} color schemes, "
            f"{len(WIDTHS)} widths: {faults or 'no'} faults"
        )
        browser.close()
    return min(faults, 1)


def _stop(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
