"""Puts the site's sources together: `python -m docsite.stage build/docs`.

The pages of docs/, README.md as the front page, the reference that is made from the code, and a page for every other file
of the repository that one of them links to, so that no link leads out of the site. MkDocs builds what lies in OUT/pages.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path, PurePosixPath

import yaml

from docsite import ROOT, links, nav, reference
from lockstep.training.contract import UserError, user_errors

LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".sh": "bash",
    ".json": "json",
    ".sbatch": "bash",
    "": "",
}
_PICTURE = re.compile(
    r"<picture>.*?srcset=\"([^\"]+)\".*?<img alt=\"([^\"]*)\" src=\"([^\"]+)\"(?: (width=\"[^\"]+\"))?>.*?</picture>",
    re.DOTALL,
)


LIST = "<!-- pages -->"
"""Where a section's first page lists the others."""
_ASKED = re.compile(r"(?<=reference/)index\.md#([\w-]+)(?=\))")
"""A link to the place that says how to ask the code: on the site to the page that is made from it."""


def written() -> dict[str, str]:
    """The pages that people write: path on the site → file in the repository."""
    pages = {
        str(path.relative_to(ROOT / "docs")): str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")
    }
    return {nav.FRONT: "README.md", **dict(sorted(pages.items()))}


def place(file: str) -> str:
    """Where a file of the repository is on the site."""
    if file == "README.md":
        return nav.FRONT
    path = PurePosixPath(file)
    if path.parts[0] == "docs":
        return str(path.relative_to("docs"))
    if path.name == "README.md":  # an index page would take its section's place in the navigation
        return f"source/{path.parent}.md"
    return f"source/{file}" if path.suffix == ".md" else f"source/{file}.md"


def pictures(text: str) -> str:
    """`<picture>` of light and dark, as two images of which the site's theme shows one."""

    def two(it: re.Match[str]) -> str:
        size = f"{{ {it[4]} }}" if it[4] else ""
        return f"![{it[2]}]({it[3]}#only-light){size}\n![{it[2]}]({it[1]}#only-dark){size}"

    return _PICTURE.sub(two, text)


def source_page(file: str) -> str:
    """A file of the repository as a page."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if file.endswith(".md"):
        return text
    fence = "`" * (3 + max(map(len, re.findall(r"`{3,}", text)), default=0))
    return f"---\nsearch:\n  exclude: true\n---\n\n# {file}\n\n{fence}{LANGUAGES.get(Path(file).suffix, '')}\n{text}{fence}\n"


def pages() -> dict[str, str]:
    """Every page of the site with its text. Raises `UserError` for a link that leads nowhere."""
    made = reference.pages()
    origin = written()
    found: dict[str, str] = dict(made)
    waiting = list(origin.items())
    while waiting:
        page, file = waiting.pop()
        text = pictures((ROOT / file).read_text(encoding="utf-8")) if page in origin else source_page(file)

        def change(link: str, page: str = page, file: str = file) -> str:
            target = links.resolve(file, link)
            if (ROOT / target / "index.md").is_file():  # a section: in the repository its folder, which lists the pages
                target += "/index.md"
            if target.startswith("docs/reference/") and place(target) in made:
                return links.relative(page, place(target))
            if not (ROOT / target).is_file():
                raise UserError(f"{file} links to {link}: there is no file {target}; folders have no page")
            there = place(target)
            if there.endswith(".md") and there not in found and there not in dict(waiting):
                waiting.append((there, target))
            return links.relative(page, there)

        text = _ASKED.sub(r"\1.md", text)
        found[page] = text if file.endswith(".py") else links.rewrite(text, change)
    return {page: text.replace(LIST, listed(page, found)) if LIST in text else text for page, text in found.items()}


def title(text: str) -> str:
    """A page's first heading."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found[1] if found else ""


def listed(page: str, texts: dict[str, str]) -> str:
    """The other pages of a page's section, as a list of links."""
    section = next(pages for entry in nav.navigation(texts) for pages in entry.values() if page in pages)
    return "\n".join(f"- [{title(texts[one])}]({links.relative(page, one)})" for one in section if one != page)


def write(out: Path) -> None:
    """Writes the sources below `out`; a file that has not changed keeps its time, so that `serve` does not run in circles."""
    everything = {f"pages/{name}": text.encode() for name, text in pages().items()}
    everything |= {f"pages/{name}": text.encode() for name, text in reference.schemas().items()}
    for folder in (ROOT / "docs/pictures", ROOT / "docsite/theme"):
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix in (".svg", ".png", ".css", ".js"):
                place_ = f"pages/{'pictures' if folder.name == 'pictures' else 'theme'}/{path.relative_to(folder)}"
                everything[place_] = path.read_bytes()
    config = {"INHERIT": "../../docsite/mkdocs.yml", "nav": nav.navigation(sorted(name[6:] for name in everything))}
    everything["mkdocs.yml"] = yaml.safe_dump(config, sort_keys=False).encode()
    for path in [path for path in out.rglob("*") if path.is_file()]:
        if str(path.relative_to(out)) not in everything:
            path.unlink()
    for name, content in everything.items():
        path = out / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def main() -> None:
    with user_errors():
        out = ROOT / (sys.argv[1] if len(sys.argv) > 1 else "build/docs")
        write(out)
        shutil.rmtree(out.parent / "site", ignore_errors=True)


if __name__ == "__main__":
    main()
