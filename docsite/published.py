"""README.md as a package index shows it, with addresses for its links: `python -m docsite.published REPOSITORY TAG`.

Before a wheel is built. In the checkout the links are relative, so that they hold in a fork and on a branch; an index has
the page alone.
"""

from __future__ import annotations

import sys
from pathlib import PurePosixPath

from docsite import ROOT, links

PICTURES = (".svg", ".png")


def absolute(text: str, repository: str, tag: str) -> str:
    """The page with `REPOSITORY/raw/TAG/…` for each picture, and `REPOSITORY/blob/TAG/…` for each other file that it links."""

    def change(link: str) -> str:
        kind = "raw" if PurePosixPath(link).suffix in PICTURES else "blob"
        return f"{repository}/{kind}/{tag}/{links.resolve('README.md', link)}"

    return links.rewrite(text, change)


def main() -> None:
    page = ROOT / "README.md"
    page.write_text(absolute(page.read_text(encoding="utf-8"), *sys.argv[1:]), encoding="utf-8")


if __name__ == "__main__":
    main()
