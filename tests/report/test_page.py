"""`lockstep report` of run directories that are written by hand: hostile, damaged and long."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.processes import PYTHON, run

pytestmark = pytest.mark.promise("report")
HOSTILE = (
    "</script></style></title></td><script>alert(1)</script><img src=x onerror=alert(2)>\"' onload='x' --><!-- &lt;"
)
IN_A_NAME = "<script>alert(1)<!-- \"' onload=x"
"""A folder's name has no slash."""


class Tree(HTMLParser):
    """The elements of a page with their attributes, and the texts between them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.texts: list[str] = []
        self.comments = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def handle_comment(self, data: str) -> None:
        self.comments += 1


def written(runs: list[Path], out: Path) -> tuple[str, Tree]:
    product.report(runs, out)
    return (page := out.read_text()), Tree(page)


def run_directory(path: Path, text: str = "plain", events: list[dict[str, Any]] | None = None) -> Path:
    """A failed run. `text` stands wherever another user may have chosen the words."""
    path.mkdir(parents=True)
    about = {"config": {"recipe": text, text: {text: text}}, "world": {"size": text}, "environment": {"HOSTNAME": text}}
    (path / "run.yaml").write_text(json.dumps(about))  # which is YAML, too
    (path / "status.json").write_text(json.dumps({"code": 1, "reason": text}))
    (path / "summary.json").write_text(json.dumps({"accuracy": 0.5, "sync": text, text: {text: 7}}))
    if events is None:
        events = [{"event": "log", "time": 1.7e9 + n, "step": 8 * n, "values": {text: n}} for n in range(1, 5)]
        events += [{"event": text, "time": 1.7e9 + 9, "step": text}, {"event": "step", "step": 3, "train_loss": None}]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_hostile_words_are_text_wherever_they_stand(tmp_path: Path) -> None:
    """Names, reasons and settings never become an element, an attribute, a comment or the end of a style."""
    _, plain = written([run_directory(tmp_path / "a/plain"), run_directory(tmp_path / "b/other")], tmp_path / "a.html")
    runs = [run_directory(tmp_path / "c" / IN_A_NAME, HOSTILE), run_directory(tmp_path / "d/other")]
    _, hostile = written(runs, tmp_path / "b.html")
    structure = [
        [tag for tag, _ in tree.elements if tag in ("script", "img", "link", "a")] for tree in (plain, hostile)
    ]
    assert structure == [[], []] and hostile.comments == plain.comments == 0
    allowed = {"charset", "name", "content", "lang", "http-equiv", "viewBox", "role", "d", "points", "stroke", "x", "y",
               "stroke-dasharray", "text-anchor"}  # fmt: skip
    assert {name for _, attributes in hostile.elements for name, _ in attributes} <= {*allowed, "viewbox"}
    # And nothing is lost: it is there to be read.
    for text in (f"failed: {HOSTILE}", f"{HOSTILE}.{HOSTILE} (differs)", HOSTILE, str(runs[0]), f"{runs[0]}: 4 values"):
        assert text in hostile.texts, text


def test_half_characters_do_not_keep_it_from_being_written(tmp_path: Path) -> None:
    """JSON can hold half of a surrogate pair, which no encoding has."""
    path = run_directory(tmp_path / "run", "half \ud800 and \x00")
    assert "half ? and" in written([path], tmp_path / "out.html")[0]


EVENT = '{"event": "epoch", "time": 1700000000, "step": 8, "epoch": 1, "accuracy": 0.5}\n'
DAMAGED = {
    "a config of another kind": ("run.yaml", "config: [1]\nworld: 3\nversions: 2020-01-01\n"),
    "dates, sets and bytes": ("run.yaml", "config: {recipe: 2020-01-01, a: !!set {b}, c: !!binary aGk=, d: [{2020-01-01: .inf}]}\n"),
    "deep": ("run.yaml", "config: " + "{a: " * 60 + "1" + "}" * 60),
    "a code of another kind": ("status.json", '{"code": [], "reason": {}}'),
    "a list as a step": ("events.jsonl", EVENT + '{"event": "epoch", "time": 1700000001, "step": [1]}\n' * 2),
    "lines of other kinds": ("events.jsonl", EVENT + '[\n{\n{"event": []}\n{"event": "log", "step": 1, "values": [1]}\n' * 9),
    "400 digits": ("events.jsonl", EVENT + EVENT.replace("8", "9" * 400).replace("0.5", "8" * 400)),
    "400 digits at the end": ("summary.json", f'{{"accuracy": {"9" * 400}, "steps": {"9" * 400}, "epochs": []}}'),
    "negative and huge": ("events.jsonl", EVENT + '{"event": "epoch", "step": -1e99, "accuracy": 1e99}\n'),
}  # fmt: skip
"""What is damaged → (file, its content)."""


@pytest.mark.promise("hostile-files")
@pytest.mark.parametrize("damage", DAMAGED)
def test_no_damaged_file_keeps_the_report_from_being_written(tmp_path: Path, damage: str) -> None:
    """In a run directory that is otherwise well; two runs of it are compared, too."""
    name, content = DAMAGED[damage]
    well = {
        "run.yaml": "config: {recipe: smoke}\n",
        "events.jsonl": EVENT,
        "status.json": '{"code": 0}',
        "summary.json": '{"accuracy": 0.5}',
    }
    (tmp_path / "run").mkdir()
    for file, text in {**well, name: content}.items():
        (tmp_path / "run" / file).write_text(text)
    written([tmp_path / "run"] * 2, tmp_path / "two.html")
    page, tree = written([tmp_path / "run"], tmp_path / "one.html")
    assert "accuracy" in tree.texts and "<polyline" in page and "nan" not in page


def _points(page: str, title: str) -> list[list[tuple[float, float]]]:
    """The points of each curve in a chart, in SVG units."""
    chart = page.partition(f"<h2>{title}</h2>")[2].partition("</svg>")[0]
    lines = re.findall(r'<polyline points="([^"]*)"', chart)
    return [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]  # type: ignore[misc]


def test_a_hundred_thousand_readings_make_a_small_page_that_shows_what_stands_out(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    for step in range(1, 100_001):
        loss = 9.0 if step == 37_700 else 2 + math.sin(step / 9)
        lines.append({"event": "step", "step": step, "train_loss": loss, "lr": 0.1, "train_hits": 0.25})
    page, _ = written([run_directory(tmp_path / "long", events=lines)], tmp_path / "out.html")
    (loss_line,) = _points(page, "train_loss")
    assert len(page) < 50_000 and len(loss_line) < 450
    assert [x for x, y in loss_line if y == 10.0] == [pytest.approx(70 + 640 * 0.377, abs=0.1)], "the highest is on top"
    assert "step 0" in page and ">100000<" in page and "<h2>train_hits</h2>" in page


def test_steps_that_were_made_again_count_once_and_a_run_that_diverges_hides_no_other(tmp_path: Path) -> None:
    lines = [{"event": "step", "step": n, "train_loss": 9.0} for n in range(1, 201)]
    lines += [{"event": "step", "step": n, "train_loss": 1.0} for n in range(101, 201)]
    good = run_directory(tmp_path / "good", events=lines)
    page, tree = written([good], tmp_path / "one.html")
    assert f"{good}: 200 values" in tree.texts and "(log)" not in page
    assert {y for x, y in _points(page, "train_loss")[0] if x > 70 + 320 + 1} == {230.0}, "the later ones"
    bad = run_directory(
        tmp_path / "bad", events=[{"event": "step", "step": n, "train_loss": 10.0**n} for n in range(1, 13)]
    )
    page, _ = written([good, bad], tmp_path / "two.html")
    assert "(log)" in page and len(_points(page, "train_loss")) == 2


def test_nothing_but_a_report_is_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "thesis.html"
    mine.write_text("years of work")
    words = [PYTHON, "-m", "lockstep", "report"]
    result = run([*words, str(run_directory(tmp_path / "run")), "--out", str(mine)])
    assert result.code == 2 and "thesis.html" in result.output and result.output.count("\n") == 1
    assert mine.read_text() == "years of work"
    nowhere = run([*words, str(tmp_path)])
    assert nowhere.code == 2 and str(tmp_path) in nowhere.output
