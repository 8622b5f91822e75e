"""Links of a page: in the repository they name files, on the site they name pages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import PurePosixPath

_FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(`+)(?:(?!\1).)+?\1", re.DOTALL)
_MARKDOWN = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_HTML = re.compile(r"(?<=\ssrc=\")[^\"]+(?=\")|(?<=\shref=\")[^\"]+(?=\")|(?<=\ssrcset=\")[^\"]+(?=\")")
_CODE = re.compile(r"\x00(\d+)\x00")


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """`change` of the text without its code, which comes back as it was."""
    kept: list[str] = []

    def keep(found: re.Match[str]) -> str:
        kept.append(found[0])
        return f"\x00{len(kept) - 1}\x00"

    text = change(_INLINE.sub(keep, _FENCE.sub(keep, text)))
    while _CODE.search(text):  # a kept piece may hold another
        text = _CODE.sub(lambda found: kept[int(found[1])], text)
    return text


def is_local(link: str) -> bool:
    return not re.match(r"[a-z][a-z0-9+.-]*:|//|#", link)


def rewrite(text: str, change: Callable[[str], str]) -> str:
    """The page with `change` of each local link in it. A link keeps what follows its `#`."""

    def one(found: re.Match[str]) -> str:
        link = found[0]
        if not is_local(link):
            return link
        path, mark, anchor = link.partition("#")
        return change(path) + mark + anchor

    return outside_code(text, lambda plain: _HTML.sub(one, _MARKDOWN.sub(one, plain)))


def found_in(text: str) -> list[str]:
    """The local links of a page, in order."""
    links: list[str] = []

    def note(link: str) -> str:
        links.append(link)
        return link

    rewrite(text, note)
    return links


def resolve(page: str, link: str) -> str:
    """The path that `link` means on `page`, both from the top of the same tree."""
    return os.path.normpath(str(PurePosixPath(page).parent / link))


def relative(page: str, target: str) -> str:
    """`target` as a link on `page`."""
    return os.path.relpath(target, str(PurePosixPath(page).parent))
