"""What a package index shows, with the repository's address: `python -m docsite.published REPOSITORY TAG`, before a wheel is built.

In the checkout the links of README.md are relative, so that they hold in a fork and on a branch. An index has the page alone.
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
    repository, tag = sys.argv[1:]
    page, project = ROOT / "README.md", ROOT / "pyproject.toml"
    page.write_text(absolute(page.read_text(encoding="utf-8"), repository, tag), encoding="utf-8")
    with project.open("a", encoding="utf-8") as file:
        file.write(f'\n[project.urls]\nRepository = "{repository}"\n')


if __name__ == "__main__":
    main()
