"""The page of the report, from run directories that are written by hand: no run, no torch, no browser."""

from __future__ import annotations

import json
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from lockstep.training.observe import report
from tests.processes import PYTHON, ROOT, clean_env

HOSTILE = "</script></style></title></td><script>alert(1)</script><img src=x onerror=alert(2)>\"' onload='x' --><!-- {{ 7 * 7 }} {% raw %}"
IN_A_NAME = "<script>alert(1)<!-- \"' onload=x {{ 7 * 7 }}"
"""A folder's name has no slash."""


def run_directory(path: Path, text: str = "plain", events: list[dict[str, Any]] | None = None) -> Path:
    """A run of two ranks that was preempted and has ended. `text` stands wherever somebody else may have chosen the words."""
    path.mkdir(parents=True)
    about = {
        "config": {"recipe": text, "model": text, text: {text: text}}, "world": {"size": text, "launcher": text},
        "versions": {"torch": text}, "git_revision": text, "environment": {"HOSTNAME": text}, "data": {"name": [text]},
    }  # fmt: skip
    (path / "run.yaml").write_text(json.dumps(about))  # which is YAML, too
    (path / "status.json").write_text(json.dumps({"code": 1, "reason": text}))
    (path / "summary.json").write_text(json.dumps({"accuracy": 0.5, "sync": text, "config_hash": 7, "steps": text}))
    if events is None:
        events = [{"event": "start", "time": 1.7e9, "step": 0, "reason": text}]
        events += [
            {"event": "epoch", "time": 1.7e9 + n, "epoch": n, "step": 8 * n, "accuracy": n / 10, "train_loss": 2 / n, "test_loss": text}
            for n in range(1, 5)
        ]  # fmt: skip
        events += [{"event": "preempted", "time": 1.7e9 + 9, "step": 32, "reason": text, "path": text},
                   {"event": "checkpoint_written", "time": 1.7e9 + 9, "step": 32, "path": text},
                   {"event": text, "time": 1.7e9 + 9, "step": text}]  # fmt: skip
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (path / "metrics").mkdir()
    for rank in (0, 1):
        (path / f"metrics/rank-0000{rank}.prom").write_text(
            "training_step_duration_seconds_count 4\ntraining_step_duration_seconds_sum 3\n"
        )
    return path


class Tree(HTMLParser):
    """The elements of a page with their attributes, and the texts between them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.texts: list[str] = []
        self.comments = 0
        self.charts: list[dict[str, Any]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        if dict(self.elements[-1][1] if self.elements else []).get("id") == "charts" and not self.charts:
            self.charts = json.loads(data)
        self.texts.append(data.strip())

    def handle_comment(self, data: str) -> None:
        self.comments += 1


def written(runs: list[Path], out: Path) -> Tree:
    report.write(runs, out)
    return Tree(out.read_text())


def test_hostile_words_are_text_wherever_they_stand(tmp_path: Path) -> None:
    """Of names, reasons and settings nothing becomes an element, an attribute, a comment or the end of a script."""
    plain = written([run_directory(tmp_path / "a/plain"), run_directory(tmp_path / "b/other")], tmp_path / "plain.html")
    runs = [run_directory(tmp_path / "c" / IN_A_NAME, HOSTILE), run_directory(tmp_path / "d/other")]
    hostile = written(runs, tmp_path / "hostile.html")
    # The settings differ, so their rows are marked; nothing else may.
    assert [tag for tag, _ in hostile.elements if tag not in ("tr", "th", "td")] == [
        tag for tag, _ in plain.elements if tag not in ("tr", "th", "td")
    ]
    assert hostile.comments == plain.comments == 1
    allowed = {"class", "style", "id", "role", "aria-label", "scope", "type", "charset", "name", "content", "lang", "rel", "href",
               "http-equiv"}  # fmt: skip
    assert {name for _, attributes in hostile.elements for name, _ in attributes} <= allowed
    # And nothing is lost: it is there to be read.
    for told in (f"failed: {HOSTILE}", f"{HOSTILE}.{HOSTILE} (differs)", HOSTILE, f"{IN_A_NAME}, other"):
        assert told in hostile.texts, told
    labels = [line["label"] for chart in hostile.charts for line in chart["lines"]]
    assert f"{IN_A_NAME}, training" in labels and IN_A_NAME in labels
    moments = next(chart for chart in hostile.charts if chart["kind"] == "timeline")["lines"][0]["points"]
    assert [point[3] for point in moments if point[2] == "preempted"] == [HOSTILE]
    assert any(
        value == f"Where a step goes, by rank: {IN_A_NAME}: milliseconds a step, mean of the last attempt. "
        "The numbers are in the table beneath." for _, attributes in hostile.elements for _, value in attributes
    )  # fmt: skip


def test_half_characters_do_not_keep_it_from_being_written(tmp_path: Path) -> None:
    """JSON can hold half of a surrogate pair, which no encoding has."""
    run = run_directory(tmp_path / "run", "half \ud800 and \x00")
    assert any("half ? and" in text for text in written([run], tmp_path / "out.html").texts)


def test_a_long_run_costs_no_more_page_than_a_short_one(tmp_path: Path) -> None:
    events = [
        {"event": kind, "time": 1.7e9 + step, "step": step, "epoch": step, "train_loss": 1.0, "accuracy": 0.5, "path": "x"}
        for step in range(1, 20_001) for kind in ("step", "epoch", "checkpoint_written")
    ]  # fmt: skip
    began = time.monotonic()
    tree = written([run_directory(tmp_path / "run", events=events)], tmp_path / "out.html")
    assert time.monotonic() - began < 30
    assert all(len(line["points"]) <= 800 for chart in tree.charts for line in chart["lines"])
    assert sum(tag == "tr" for tag, _ in tree.elements) < 2000
    assert (tmp_path / "out.html").stat().st_size < 600_000


def test_it_loads_no_torch(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run")
    code = (
        "import sys; from lockstep.training.__main__ import main\ncode = main(['report', sys.argv[1]])\n"
        "print(code, [name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [PYTHON, "-c", code, str(run)], env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [str(run / "report.html"), "0 []"], done.stdout + done.stderr
