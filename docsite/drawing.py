"""Drawings as SVG, from a few lines of YAML in docs/pictures/*.yaml, in a light and a dark form.

    size: [columns, rows]               units of 20 pixels
    boxes:
      - {at: [x, y], size: [w, h], text: "a title\\nsecond line with a `name`", kind: strong}
    arrows:
      - {from: [x, y], to: [x, y], text: a word beside it}

What stands between backquotes is a name: a file, a command, a setting or a function. A test holds that it exists.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

import yaml

from docsite import ROOT

FOLDER = ROOT / "docs/pictures"
UNIT = 20
LINE = 17
COLOURS = {
    "light": {"paper": "none", "ink": "#1f2430", "dim": "#5b6270", "line": "#8a93a5", "plain": "#f4f6fb", "strong": "#dfe6ff",
              "data": "#fff0c7", "compute": "#d9f2dd", "sync": "#d8e6fb", "code": "#30409f"},
    "dark": {"paper": "none", "ink": "#e7eaf2", "dim": "#a5adbd", "line": "#7d879b", "plain": "#2a2f3d", "strong": "#34406e",
             "data": "#5a4a1c", "compute": "#24492c", "sync": "#243f63", "code": "#aebcff"},
}  # fmt: skip
SANS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, Menlo, 'DejaVu Sans Mono', monospace"


def sources() -> list[Path]:
    return sorted(FOLDER.glob("*.yaml"))


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def names(drawing: dict[str, Any]) -> list[str]:
    """What stands between backquotes."""
    parts = [*drawing.get("boxes", []), *drawing.get("arrows", []), *drawing.get("texts", [])]
    return [name for part in parts for name in re.findall(r"`([^`]+)`", part.get("text", ""))]


def _line(
    text: str, x: float, y: float, colours: dict[str, str], bold: bool, dim: bool, anchor: str, size: float
) -> str:
    spans = []
    for number, piece in enumerate(re.split(r"`([^`]+)`", text)):
        if number % 2:
            spans.append(
                f'<tspan font-family="{MONO}" font-size="{size - 1:g}" fill="{colours["code"]}">{escape(piece)}</tspan>'
            )
        elif piece:
            spans.append(escape(piece))
    weight = ' font-weight="600"' if bold else ""
    fill = colours["dim" if dim else "ink"]
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}"'
    return f'<text {place} fill="{fill}"{weight} xml:space="preserve">{"".join(spans)}</text>'


def svg(drawing: dict[str, Any], theme: str) -> str:
    """The drawing in one of the two themes."""
    colours = COLOURS[theme]
    width, height = (UNIT * value for value in drawing["size"])
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        f'role="img" font-family="{SANS}">',
        f"<title>{escape(drawing['title'])}</title>",
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{colours["line"]}"/></marker></defs>',
    ]
    for box in drawing.get("boxes", []):
        (x, y), (w, h) = ((UNIT * value for value in box[key]) for key in ("at", "size"))
        x, y, w, h = float(x), float(y), float(w), float(h)
        fill = colours[box.get("kind", "plain")]
        out.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="7" fill="{fill}" stroke="{colours["line"]}"/>'
        )
        lines = box["text"].split("\n")
        top = box.get("align") == "top"
        begin = y + 20 if top else y + h / 2 - LINE * (len(lines) - 1) / 2 + 4.5
        for number, text in enumerate(lines):
            bold = number == 0 and box.get("title", True)
            out.append(
                _line(text, x + w / 2, begin + LINE * number, colours, bold, number > 0, "middle", 13 if bold else 12)
            )
    for arrow in drawing.get("arrows", []):
        (x1, y1), (x2, y2) = ([UNIT * value for value in arrow[key]] for key in ("from", "to"))
        dash = ' stroke-dasharray="4 4"' if arrow.get("dashed") else ""
        ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        out.append(f'<line {ends} stroke="{colours["line"]}" stroke-width="1.6" marker-end="url(#head)"{dash}/>')
        if "text" in arrow:
            side = 8 if x1 == x2 else 0
            out.append(
                _line(
                    arrow["text"],
                    (x1 + x2) / 2 + side,
                    (y1 + y2) / 2 + (4 if side else -6),
                    colours,
                    False,
                    True,
                    "start" if side else "middle",
                    12,
                )
            )
    for text in drawing.get("texts", []):
        x, y = (UNIT * value for value in text["at"])
        for number, line in enumerate(text["text"].split("\n")):
            out.append(_line(line, x, y + LINE * number, colours, False, True, text.get("anchor", "start"), 12))
    return "\n".join([*out, "</svg>"]) + "\n"


def drawn() -> dict[Path, str]:
    """File → SVG of every drawing in both themes."""
    return {
        path.with_name(f"{path.stem}-{theme}.svg"): svg(read(path), theme) for path in sources() for theme in COLOURS
    }
