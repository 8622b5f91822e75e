"""The page of the report, from run directories that are written by hand: hostile, damaged, and of a million steps."""

from __future__ import annotations

import json
import math
import resource
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.processes import PYTHON, clean_env

pytestmark = pytest.mark.promise("report")
HOSTILE = "</script></style></title></td><script>alert(1)</script><img src=x onerror=alert(2)>\"' onload='x' --><!-- {{ 7 * 7 }} {% raw %}"


IN_A_NAME = "<script>alert(1)<!-- \"' onload=x {{ 7 * 7 }}"
"""A folder's name has no slash."""


def run_directory(path: Path, text: str = "plain", events: list[dict[str, Any]] | None = None) -> Path:
    """A run of two ranks that was preempted and has ended. `text` stands wherever another user may have chosen the words."""
    path.mkdir(parents=True)
    about = {
        "config": {"recipe": text, "model": text, text: {text: text}}, "world": {"size": text, "launcher": text},
        "versions": {"torch": text}, "git_revision": text, "environment": {"HOSTNAME": text}, "data": {"name": [text]},
    }  # fmt: skip
    (path / "run.yaml").write_text(json.dumps(about))  # which is YAML, too
    slow = {"rank": 1, "phase": text, "share": 0.1}
    (path / "status.json").write_text(json.dumps({"code": 1, "reason": text, "slow_rank": slow}))
    (path / "summary.json").write_text(json.dumps({"accuracy": 0.5, "sync": text, "config_hash": 7, "steps": text}))
    if events is None:
        events = [{"event": "start", "time": 1.7e9, "step": 0, "reason": text}]
        events += [
            {"event": "epoch", "time": 1.7e9 + n, "epoch": n, "step": 8 * n, "accuracy": n / 10, "train_loss": 2 / n, "test_loss": text}
            for n in range(1, 5)
        ]  # fmt: skip
        events += [{"event": "slow_rank", "time": 1.7e9 + 8, "step": 3, **slow},
                   {"event": "preempted", "time": 1.7e9 + 9, "step": 32, "reason": text, "path": text},
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
    product.report(runs, out)
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
    slow = f", in {HOSTILE}: costs 10 % of every step"
    assert [point[3].endswith(slow) for point in moments if point[2] == "slow rank"] == [True]
    head = f"Where a step goes, by rank: {IN_A_NAME}: milliseconds a step, mean of the last attempt. At its end: rank 1, in "
    spoken = [value or "" for _, attributes in hostile.elements for _, value in attributes]
    assert any(
        value.startswith(head) and value.endswith(f"{slow}. The numbers are in the table beneath.") for value in spoken
    )


def test_half_characters_do_not_keep_it_from_being_written(tmp_path: Path) -> None:
    """JSON can hold half of a surrogate pair, which no encoding has."""
    run = run_directory(tmp_path / "run", "half \ud800 and \x00")
    assert any("half ? and" in text for text in written([run], tmp_path / "out.html").texts)


EVENT = '{"event": "epoch", "time": 1700000000, "step": 8, "epoch": 1, "accuracy": 0.5}\n'
DAMAGED = {
    "no world": ("run.yaml", "config: {recipe: x}\nworld: null\n"),
    "a config of another kind": ("run.yaml", "config: [1]\nworld: 3\nversions: 2020-01-01\n"),
    "dates, sets and bytes": ("run.yaml", "config: {recipe: 2020-01-01, a: !!set {b}, c: !!binary aGk=, d: [{2020-01-01: .inf}]}\n"),
    "deep": ("run.yaml", "config: " + "{a: " * 60 + "1" + "}" * 60),
    "a code of another kind": ("status.json", '{"code": [], "reason": {}}'),
    "a list as a step": ("events.jsonl", EVENT + '{"event": "epoch", "time": 1700000001, "step": [1]}\n' * 2),
    "a time out of the world": ("events.jsonl", '{"event": "start", "time": 1e300}\n{"event": "x", "time": -1}\n' + EVENT),
    "400 digits": ("events.jsonl", EVENT + EVENT.replace("8", "9" * 400).replace("0.5", "8" * 400)),
    "400 digits at the end": ("summary.json", f'{{"accuracy": {"9" * 400}, "steps": {"9" * 400}, "config_hash": 7, "epochs": []}}'),
    "huge": ("events.jsonl", EVENT + '{"event": "epoch", "time": 1700000001, "step": 1e308, "epoch": 1e-308, "examples_seen": 1e308, '
             '"trained_seconds": 1e-308}\n'),
    "no seconds": ("metrics/rank-00000.prom", "training_step_duration_seconds_count 4\ntraining_sync_wait_seconds_sum NaN\n"),
    "negative seconds": ("metrics/rank-00000.prom", "training_step_duration_seconds_count 4\ntraining_step_duration_seconds_sum 3\n"
                         "training_sync_wait_seconds_sum -1e308\ntraining_data_wait_seconds_sum +Inf\n"),
    "another digit": ("metrics/rank-²²²²².prom", "training_step_duration_seconds_count 4\ntraining_step_duration_seconds_sum 3\n"),
}  # fmt: skip
"""What is damaged → (file, its content)."""


@pytest.mark.promise("hostile-files")
@pytest.mark.parametrize("damage", DAMAGED)
def test_no_damaged_file_keeps_the_report_from_being_written(tmp_path: Path, damage: str) -> None:
    """In a run directory that is otherwise well; two runs of it are compared, too."""
    name, content = DAMAGED[damage]
    well = {
        "run.yaml": "config: {recipe: smoke}\nworld: {size: 2}\n", "events.jsonl": EVENT, "status.json": '{"code": 0}',
        "summary.json": '{"accuracy": 0.5}',
        "metrics/rank-00001.prom": "training_step_duration_seconds_count 4\ntraining_step_duration_seconds_sum 3\n",
    }  # fmt: skip
    for file, text in {**well, name: content}.items():
        path = tmp_path / "run" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    written([tmp_path / "run"] * 2, tmp_path / "two.html")
    charts = {chart["title"]: chart for chart in written([tmp_path / "run"], tmp_path / "one.html").charts}
    # Of what is not damaged, nothing is lost.
    assert charts["Test accuracy"]["lines"][0]["points"][0][1] == 0.5
    assert ["rank 1", 750.0] in charts["Where a step goes, by rank"]["lines"][3]["points"]


def _events(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.mkdir()
    (path / "run.yaml").write_text("config: {recipe: x}\n")
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _lines(tree: Tree, title: str) -> list[list[Any]]:
    (chart,) = [chart for chart in tree.charts if chart["title"].startswith(title)]
    return [line["points"] for line in chart["lines"]]


MEASURED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""A process begins with the peak memory of the one that started it: a small one stands between."""


def test_a_hundred_thousand_readings_take_little_memory_and_page(tmp_path: Path) -> None:
    """The page also shows what stands out: a spike of the loss, a value logged once, a preemption, the slow rank."""
    lines: list[dict[str, Any]] = []
    for step in range(1, 100_001):
        at = {"time": 1.7e9 + step, "step": step}
        loss = 9.0 if step == 37_700 else 1 + math.sin(step / 9)
        lines.append(
            {"event": "step", **at, "epoch": step / 1000, "train_loss": loss, "lr": 0.1, "images_per_second": 9.0}
        )
        if step < 3:
            lines[-1]["train_hits"] = 0.25
        if step % 5 == 0:
            lines.append(
                {"event": "log", **at, "attempt": 1, "values": {"a": -7.0 if step == 61_700 else 1.0, "b": 0.5}}
            )
        if step % 20 == 0:
            lines.append({"event": "checkpoint_written", **at, "path": "x"})
    lines.insert(31_313, {"event": "preempted", "time": 1.7e9 + 26_000.5, "step": 26_000, "reason": "TERM"})
    lines.append({"event": "log", "time": 1.8e9, "step": 100_000, "attempt": 2, "values": {"b": -1.0}})
    run = _events(tmp_path / "long", lines)
    (run / "metrics").mkdir()
    for rank in range(64):
        wait = 1 if rank == 41 else 50
        (run / f"metrics/rank-{rank:05d}.prom").write_text(
            f"training_step_duration_seconds_count 100\ntraining_step_duration_seconds_sum 100\ntraining_sync_wait_seconds_sum {wait}\n"
        )
    peaks = []
    for path in (_events(tmp_path / "short", lines[:9]), run):
        words = [PYTHON, "-c", MEASURED, PYTHON, "-m", "lockstep.training", "report", str(path)]
        done = subprocess.run(words, env=clean_env(), capture_output=True, text=True, check=True, timeout=120)
        peaks.append(int(done.stdout.split()[-1]) << 10)
    assert peaks[1] - peaks[0] < 40 * 2**20, peaks  # 12 MB; as mappings they take 116 MB
    page = (run / "report.html").read_text()
    tree = Tree(page)
    assert all(len(points) <= 1000 for chart in tree.charts for points in (line["points"] for line in chart["lines"]))
    assert sum(tag == "tr" for tag, _ in tree.elements) < 2000 and len(page) < 900_000
    (loss, *_) = _lines(tree, "Loss")
    assert len(loss) <= 400 and max(y for _, y in loss) == 9.0 and loss[-1][0] == 100_000
    assert min(y for _, y in _lines(tree, "Logged: a")[0]) == -7.0 and _lines(tree, "Logged: b")[0][-1] == [
        100_000,
        -1.0,
    ]
    assert _lines(tree, "Logged: train_hits")[0] == [[1, 0.25], [2, 0.25]]
    assert [point[2] for point in _lines(tree, "Progress")[0]].count("preempted") == 1
    ranks = [point[0] for point in _lines(tree, "Where a step goes")[0]]
    assert len(ranks) == 32 and "rank 41" in ranks


def test_millions_of_lines_without_an_event_cost_seconds(tmp_path: Path) -> None:
    """A user has filled the events with invalid lines."""
    run = run_directory(tmp_path / "run")
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"[\n" * (100 << 20))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([PYTHON, "-m", "lockstep.training", "report", str(run)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert (run / "report.html").is_file() and spent < 45, spent


def test_steps_that_were_made_again_count_once(tmp_path: Path) -> None:
    """Also after a script has logged more names than are kept. And one run that diverges does not hide the good one: the scale is then
    logarithmic."""
    lines: list[dict[str, Any]] = [
        {"event": "log", "time": 10, "step": 0, "values": {f"v{n}": 1.0 for n in range(150)}}
    ]
    lines += [
        {"event": "step", "time": 10 + n, "step": n, "epoch": n / 1000, "train_loss": 9.0} for n in range(1, 2001)
    ]
    lines += [
        {"event": "step", "time": 5000 + n, "step": n, "epoch": n / 1000, "train_loss": 1.0} for n in range(1001, 2001)
    ]
    good = _events(tmp_path / "good", lines)
    tree = written([good], tmp_path / "one.html")
    (loss,) = _lines(tree, "Loss")
    assert len(loss) <= 400 and [y for x, y in loss if x > 1000] == [1.0] * sum(x > 1000 for x, _ in loss)
    bad = [{"event": "step", "time": 10 + n, "step": n, "epoch": n, "train_loss": 10.0**n} for n in range(1, 13)]
    both = written([good, _events(tmp_path / "bad", bad)], tmp_path / "two.html")
    scales = [next(chart for chart in one.charts if chart["title"] == "Loss")["log"] for one in (tree, both)]
    assert scales == [False, True]


def test_the_number_of_ranks_is_drawn_where_it_has_changed(tmp_path: Path) -> None:
    sizes = {"start": [(0, 4), (40, 2)], "regrouped": [(10, 3), (15, 4)]}
    lines = [
        {"event": kind, "time": 100 + at, "step": at, "world_size": size}
        for kind, all in sizes.items()
        for at, size in all
    ]
    lines += [{"event": "regrouped", "time": 120, "world_size": "many"}, {"event": "done", "time": 160, "step": 60}]
    tree = written([_events(tmp_path / "live", lines)], tmp_path / "one.html")
    assert _lines(tree, "Ranks that train") == [[[0, 4], [10, 3], [15, 4], [40, 2], [60, 2]]]
    lines = [{"event": "start", "time": 100 + at, "step": at, "world_size": 2} for at in (0, 9)]
    tree = written([_events(tmp_path / "calm", lines)], tmp_path / "two.html")
    assert "Ranks that train" not in [chart["title"] for chart in tree.charts]
