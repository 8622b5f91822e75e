"""Looks at the site that was built: `python -m docsite.check`. Every link leads somewhere, nothing is fetched, pages are small."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from docsite import ROOT

LIMIT = 300_000
"""Bytes of a page."""
_FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "srcset"}


class Page(HTMLParser):
    """Links, anchors and what the browser would fetch."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in _FETCHED and values.get(_FETCHED[tag]) and values.get("rel") != "canonical":
            self.fetched.append(values[_FETCHED[tag]])


def wrong(site: Path) -> list[str]:
    """A line for everything that is wrong with the site."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        if path.stat().st_size > LIMIT:
            found.append(f"{name} has {path.stat().st_size} bytes; a page may have {LIMIT}")
        found += [
            f"{name} fetches {link}"
            for link in page.fetched
            if urlsplit(link).scheme in ("http", "https") or link.startswith("//")
        ]
        for link in [*page.links, *(link for link in page.fetched if not link.startswith("data:"))]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if parts.path.startswith("/"):
                found += [] if name.name == "404.html" else [f"{name}: {link} works on one server only"]
            elif not target.is_file():
                found.append(f"{name}: {link} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: {link} names no place on that page")
    return found


def main() -> None:
    site = ROOT / "build/site"
    found = wrong(site)
    print("\n".join(found), file=sys.stderr)
    pages = list(site.rglob("*.html"))
    largest = max(pages, key=lambda path: path.stat().st_size)
    print(f"{len(pages)} pages, the largest {largest.stat().st_size // 1000} kB ({largest.relative_to(site)})")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
