"""Writes the site's sources to build/docs: `python -m docsite.stage`. Zensical builds the site and checks its links."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from docsite import ROOT, reference

OUT = ROOT / "build/docs"
ELSEWHERE = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/modules/README.md": "modules.md",
    "examples/modules/answers.md": "answers.md",
    "tests/README.md": "tests.md",
} | {f"{name}.md": f"{name.lower()}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG")}
"""Pages outside docs/, with their place on the site."""
_LINK = re.compile(
    r"(?P<code>^(?P<fence>```+).*?^(?P=fence)\s*?$|(?P<tick>`+)(?:(?!(?P=tick)).)+(?P=tick))"
    r"|(?P<before>\]\(|\s(?:src|href|srcset)=\")(?P<link>[^)\s\"]+)",
    re.DOTALL | re.MULTILINE,
)
_PICTURE = re.compile(
    r"<picture>.*?srcset=\"([^\"]+)\".*?<img alt=\"([^\"]*)\" src=\"([^\"]+)\".*?</picture>", re.DOTALL
)
_GENERATED = re.compile(r"(?<=reference/)index\.md#([\w-]+)(?=\))")
"""A link to the place that names the command for a part of the reference: the site has a page for that part."""


def rewrite(text: str, change: Callable[[str], str]) -> str:
    """Returns the page with `change` applied to each local link outside code. The part after # stays."""

    def one(match: re.Match[str]) -> str:
        if match["code"] or re.match(r"[a-z][a-z0-9+.-]*:|//|#", match["link"]):
            return match[0]
        path, mark, anchor = match["link"].partition("#")
        return match["before"] + change(path) + mark + anchor

    return _LINK.sub(one, text)


def resolve(page: str, link: str) -> str:
    """Returns the path that `link` on `page` names. Both paths start at the root of the repository."""
    return os.path.normpath(PurePosixPath(page).parent / link)


def place(file: str) -> str:
    """Returns where a file of the repository lies on the site."""
    if file in ELSEWHERE:
        return ELSEWHERE[file]
    return file.removeprefix("docs/") if file.startswith("docs/") else f"files/{file}"


def pages() -> tuple[dict[str, str], set[str]]:
    """Returns each page's place on the site with its text, and the files that pages link to."""
    texts, files = dict(reference.pages()), set[str]()
    sources = [*ELSEWHERE, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
    for file in sources:

        def change(link: str, file: str = file) -> str:
            target = resolve(file, link)
            if not target.endswith(".md"):
                files.add(target)
            return os.path.relpath(place(target), PurePosixPath(place(file)).parent)

        text = (ROOT / file).read_text(encoding="utf-8")
        text = _PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", text)
        texts.setdefault(place(file), _GENERATED.sub(r"\1.md", rewrite(text, change)))
    return texts, files


def main() -> None:
    texts, files = pages()
    shutil.rmtree(OUT, ignore_errors=True)
    for name, text in {**texts, **reference.schemas()}.items():
        (OUT / name).parent.mkdir(parents=True, exist_ok=True)
        (OUT / name).write_text(text, encoding="utf-8")
    for file in files:
        (OUT / place(file)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, OUT / place(file))
    shutil.copytree(Path(__file__).parent / "theme", OUT / "theme")


if __name__ == "__main__":
    main()
