"""Writes the repository's address into the files that a package index shows, before a wheel is built.

`python -m docsite.published REPOSITORY TAG`. The checkout has relative links, which hold in a fork and on a branch.
"""

from __future__ import annotations

import sys

from docsite import ROOT, stage


def main() -> None:
    repository, tag = sys.argv[1:]
    page, project = ROOT / "README.md", ROOT / "pyproject.toml"

    def absolute(link: str) -> str:
        kind = "raw" if link.endswith((".svg", ".png")) else "blob"
        return f"{repository}/{kind}/{tag}/{stage.resolve('README.md', link)}"

    page.write_text(stage.rewrite(page.read_text(encoding="utf-8"), absolute), encoding="utf-8")
    with project.open("a", encoding="utf-8") as file:
        file.write(f'\n[project.urls]\nRepository = "{repository}"\n')


if __name__ == "__main__":
    main()
