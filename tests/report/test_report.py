"""report.html: what is in it, whatever the run directory looks like, and how a real Chromium shows it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.training.observe import report
from lockstep.training.observe.report import record
from lockstep.training.observe.report.charts import Chart, Line
from tests.processes import PYTHON, poll, require, started
from tests.ranks import gang, training

TRICK = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)><!--"
SCREENSHOTS = os.environ.get("LOCKSTEP_SCREENSHOTS")
"""A folder to keep pictures in, for people to look at."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two real runs of 2 ranks: one preempted and resumed, one undisturbed at another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    settings = [
        f"data.root={folder / 'data'}", "data.source=synthetic", "data.options={n: 384, n_test: 50, size: 8, noise: 1.5}",
        "data.num_shards=3", "model=tests.prometheus.slow:Paced", "model_options={}", "global_batch_size=24",
        "uneven=drop", "epochs=4", "evaluate.every=1", "loss.reduction=mean", "optim.name=sgd", "bias_lr_factor=1",
        "weight_decay=0", "schedule=[]", "log.every=2", "threads=1",
    ]  # fmt: skip
    first, second = folder / "first", folder / "second"
    words = ["run", "smoke", "--run-dir", str(first), "--set", *settings, "lr=0.05"]
    with started([PYTHON, "-m", "lockstep.training", "launch", "--ranks", "2", *words]) as process:
        poll(lambda: process.poll() is not None or (first / "checkpoints/step-00000016").exists(), 60, "a checkpoint")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
    assert "preempted" in (first / "report.html").read_text()
    done = gang(2, *words)
    assert done.code == 0, done.output
    done = gang(2, "run", "smoke", "--run-dir", str(second), "--set", *settings, "lr=0.01")
    assert done.code == 0, done.output
    return first, second


def _charts(text: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def test_a_run_writes_its_report_with_the_numbers_of_its_files(runs: tuple[Path, Path]) -> None:
    text = (runs[0] / "report.html").read_text()
    charts = {chart["title"]: chart for chart in _charts(text)}
    summary = json.loads((runs[0] / "summary.json").read_text())
    assert set(charts) == {
        "Loss", "Test accuracy", "Throughput", "Progress, checkpoints, restarts and preemptions", "Where a step goes, by rank",
    }  # fmt: skip
    assert charts["Test accuracy"]["lines"][0]["points"][-1] == [4, summary["accuracy"]]
    assert len(charts["Loss"]["lines"][0]["points"]) == 32  # every second of 64 steps
    moments = [point[2] for point in charts["Progress, checkpoints, restarts and preemptions"]["lines"][0]["points"]]
    assert [m for m in moments if m in ("start", "preempted", "restart", "done")] == [
        "start",
        "preempted",
        "restart",
        "done",
    ]
    assert moments.count("checkpoint") >= 4
    ranks = charts["Where a step goes, by rank"]["lines"]
    assert [point[0] for point in ranks[0]["points"]] == ["rank 0", "rank 1"]
    assert sum(line["points"][0][1] for line in ranks) > 30  # milliseconds: the pace of the test's network
    for number in (f"{summary['accuracy']:.4f}", f"{summary['train_loss']:.4f}", summary["config_hash"][:12]):
        assert number in text
    assert "optim.lr" in text and "versions.torch" in text and text.count("<canvas") == text.count("<details>") == 5


def test_several_runs_are_compared(runs: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    done = training("report", *map(str, runs), "--out", str(out))
    assert done.code == 0 and done.output.strip() == str(out)
    text = out.read_text()
    assert [line["label"] for line in _charts(text)[1]["lines"]] == ["first", "second"]
    assert "optim.lr (differs)" in text and "config_hash" not in text.split("Config</h2>")[0].split("Final")[0]
    again = training("report", *map(str, runs), "--out", str(out))
    assert again.code == 0  # a report may be replaced


def test_nothing_but_a_report_is_replaced(runs: tuple[Path, Path], tmp_path: Path) -> None:
    mine = tmp_path / "thesis.html"
    mine.write_text("years of work")
    done = training("report", str(runs[0]), "--out", str(mine))
    assert done.code == 2 and done.output.startswith("error: ") and done.output.count("\n") == 1
    assert mine.read_text() == "years of work"
    nowhere = training("report", str(tmp_path))
    assert nowhere.code == 2 and "does not hold a run" in nowhere.output


def _copy(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to, ignore=shutil.ignore_patterns("checkpoints", ".lock")))


def test_names_and_reasons_cannot_leave_their_place(runs: tuple[Path, Path], tmp_path: Path) -> None:
    path = _copy(runs[0], tmp_path / "hostile")
    (path / "status.json").write_text(json.dumps({"code": 1, "reason": TRICK}))
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "preempted", "time": 2e9, "step": 64, "reason": TRICK}) + "\n")
    run = record.read(path)
    run.name = TRICK
    run.about["config"]["model"] = TRICK
    text = report.page([run])
    assert TRICK not in text and "<img" not in text and text.count("</script>") == 3
    assert "&lt;/script&gt;" in text


@pytest.mark.parametrize("damage", ["events", "summary", "metrics", "status", "everything", "torn", "nonsense"])
def test_a_report_of_what_is_left(runs: tuple[Path, Path], tmp_path: Path, damage: str) -> None:
    path = _copy(runs[0], tmp_path / "run")
    (path / "report.html").unlink()
    files = {"events": ["events.jsonl"], "summary": ["summary.json"], "status": ["status.json"]}
    files["metrics"] = [f"metrics/rank-0000{rank}.prom" for rank in (0, 1)]
    files["everything"] = [name for names in files.values() for name in names]
    for name in files.get(damage, []):
        (path / name).unlink()
    if damage == "torn":
        for name in files["everything"]:
            content = (path / name).read_bytes()
            (path / name).write_bytes(content[: len(content) * 2 // 3])
    if damage == "nonsense":
        for name in files["everything"]:
            (path / name).write_bytes(
                b'\xff\x00{"event": 3}\n[1]\n{"event": "epoch", "time": 1, "epoch": "x", "step": NaN}\n{"a" 3\n'
            )
    done = training("report", str(path))
    assert done.code == 0, done.output
    assert len(_charts((path / "report.html").read_text())) <= 5


EVENT = '{"event": "epoch", "time": 1700000000, "step": 8, "epoch": 1, "accuracy": 0.5}\n'
DAMAGED = {
    "no world": ("run.yaml", "config: {recipe: x}\nworld: null\n"),
    "no config": ("run.yaml", "config: null\nworld: [1]\n"),
    "a config of another kind": ("run.yaml", "config: [1]\nworld: 3\nversions: 2020-01-01\n"),
    "dates, sets and bytes": ("run.yaml", "config: {recipe: 2020-01-01, a: !!set {b}, c: !!binary aGk=, d: [{2020-01-01: .inf}]}\n"),
    "deep": ("run.yaml", "config: " + "{a: " * 60 + "1" + "}" * 60),
    "a code of another kind": ("status.json", '{"code": [], "reason": {}}'),
    "a code that is none": ("status.json", '{"code": 1e300, "reason": [1]}'),
    "a list as a step": ("events.jsonl", EVENT + '{"event": "epoch", "time": 1700000001, "step": [1]}\n' * 2),
    "milliseconds": ("events.jsonl", '{"event": "start", "time": 1e12}\n' + EVENT),
    "a time out of the world": ("events.jsonl", '{"event": "start", "time": 1e300}\n{"event": "x", "time": -1}\n' + EVENT),
    "400 digits": ("events.jsonl", EVENT + EVENT.replace("8", "9" * 400).replace("0.5", "8" * 400)),
    "400 digits at the end": ("summary.json", f'{{"accuracy": {"9" * 400}, "steps": {"9" * 400}, "config_hash": 7, "epochs": []}}'),
    "huge": ("events.jsonl", EVENT + '{"event": "epoch", "time": 1700000001, "step": 1e308, "epoch": 1e-308, "examples_seen": 1e308, '
             '"trained_seconds": 1e-308}\n'),
    "infinite seconds": ("metrics/rank-00000.prom", "training_step_duration_seconds_count 4\ntraining_step_duration_seconds_sum +Inf\n"),
    "no seconds": ("metrics/rank-00000.prom", "training_step_duration_seconds_count 4\ntraining_sync_wait_seconds_sum NaN\n"),
    "negative seconds": ("metrics/rank-00000.prom", "training_step_duration_seconds_count 4\ntraining_step_duration_seconds_sum 3\n"
                         "training_sync_wait_seconds_sum -1e308\ntraining_data_wait_seconds_sum +Inf\n"),
    "another digit": ("metrics/rank-²²²²².prom", "training_step_duration_seconds_count 4\ntraining_step_duration_seconds_sum 3\n"),
}  # fmt: skip
"""What is damaged → (file, its content)."""


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
    report.write([tmp_path / "run"], tmp_path / "one.html")
    report.write([tmp_path / "run"] * 2, tmp_path / "two.html")
    charts = {chart["title"]: chart for chart in _charts((tmp_path / "one.html").read_text())}
    # Of what is not damaged, nothing is lost.
    assert charts["Test accuracy"]["lines"][0]["points"][0][1] == 0.5
    assert ["rank 1", 750.0] in charts["Where a step goes, by rank"]["lines"][3]["points"]


def test_repeated_steps_count_once_and_many_points_are_thinned(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("config: {recipe: x}\n")
    lines = [{"event": "step", "time": 10 + n, "step": n, "train_loss": 9.0} for n in range(1, 2001)]
    lines += [{"event": "step", "time": 5000 + n, "step": n, "train_loss": 1.0} for n in range(1001, 2001)]
    lines += [{"event": "epoch", "time": 9000, "step": 2000, "epoch": 2, "train_loss": 1.0, "accuracy": None}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = record.read(tmp_path)
    assert len(run.of("step")) == 2000 and run.of("step")[-1]["train_loss"] == 1.0
    loss = _charts(report.page([run]))[0]["lines"][0]["points"]
    assert len(loss) == 400 and loss[-1] == [2.0, 1.0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    require(program is not None, "chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield launched
        finally:
            launched.close()


INK = """() => [...document.querySelectorAll("canvas")].map((canvas) => {
  const copy = document.createElement("canvas");  // reading the page's own would make the browser remark on it
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const pixels = new Uint32Array(pen.getImageData(0, 0, copy.width, copy.height).data.buffer);
  const inked = pixels.filter((pixel) => pixel >>> 24);
  return [inked.length, new Set(inked).size, inked.reduce((sum, pixel) => (sum * 31 + pixel) | 0, 7)];
})"""
"""Of each canvas: pixels that something was drawn on, how many colours they have, and their hash."""


def _drawn(page: Any, scheme: str) -> None:
    """Playwright's own waiting needs `eval`, which the page forbids."""
    poll(lambda: page.evaluate("document.documentElement.dataset.scheme") == scheme, 30, f"the {scheme} charts")


STYLES = """() => [...document.querySelectorAll("canvas")].map((canvas) => {
  const chart = Chart.getChart(canvas);
  if (chart.config.type !== "line") { return null; }
  return chart.data.datasets.map((set, number) => {
    const drawn = chart.getDatasetMeta(number).data.map((point) => point.options);
    const marks = drawn.filter((options) => options.radius > 0);
    return { dash: set.borderDash.join(), width: set.borderWidth, marks: marks.length, at: drawn.findIndex((o) => o.radius > 0),
             shapes: [...new Set(marks.map((o) => o.pointStyle + o.rotation + (o.backgroundColor === o.borderColor)))].join() };
  });
})"""
"""Of each chart's lines: how they are told apart without their colour, as Chart.js has resolved it."""


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_lines_of_many_long_runs_differ_without_colour(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    paths, names, epochs = [], [f"run-{number}" for number in range(8)], 90
    for number, name in enumerate(names):
        path = tmp_path / name
        path.mkdir()
        (path / "run.yaml").write_text("config: {recipe: x}\n")
        events = [{"event": "start", "time": 1.7e9, "attempt": 1}]
        events += [
            {"event": "epoch", "time": 1.7e9 + epoch, "epoch": epoch, "step": 10 * epoch, "accuracy": 1 - 1 / (epoch + 1 + number),
             "train_loss": (2 + number / 8) / epoch**0.5, "test_loss": (2.4 + number / 8) / epoch**0.4,
             "examples_seen": 100 * epoch, "trained_seconds": epoch * (1 + number / 20)}
            for epoch in range(1, epochs + 1)
        ]  # fmt: skip
        (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        paths.append(path)
    report.write(paths, tmp_path / "many.html")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto((tmp_path / "many.html").as_uri())
    _drawn(page, scheme)
    loss, accuracy, speed, timeline = page.evaluate(STYLES)
    assert len(loss) == 16 and len(accuracy) == len(speed) == 8
    for chart in (loss, accuracy, speed):
        looks = [(line["shapes"], line["dash"]) for line in chart]
        assert len(set(looks)) == len(chart), looks
        assert all("," not in line["shapes"] and 8 <= line["marks"] <= 20 for line in chart), chart
    # Two runs that run together: each has marks, and they do not cover one another.
    assert len({line["at"] for line in loss[:6]}) > 2
    assert len({(line["dash"], line["width"]) for line in timeline}) == 8
    for first, second in zip(loss[::2], loss[1::2]):
        assert first["shapes"].endswith("true") and second["shapes"] == first["shapes"].replace("true", "false")
    if SCREENSHOTS:
        Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(Path(SCREENSHOTS) / f"many-{width}-{scheme}.png"), full_page=True)
    context.close()


@pytest.mark.parametrize(
    ("which", "width", "scheme"),
    [("one", 1280, "light"), ("one", 1280, "dark"), ("both", 390, "dark"), ("hostile", 390, "light")],
)
def test_in_chromium(
    browser: Any, runs: tuple[Path, Path], tmp_path: Path, which: str, width: int, scheme: str
) -> None:
    out = tmp_path / "report.html"
    if which == "hostile":
        run = record.read(runs[0])
        run.name, run.status = TRICK, {"code": 1, "reason": TRICK}
        out.write_text(report.page([run]))
    else:
        report.write(runs[: 1 if which == "one" else 2], out)
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(out.as_uri())
    _drawn(page, scheme)
    expected = 6 if which == "both" else 5
    assert page.locator("canvas").count() == expected == int(page.locator("html").get_attribute("data-drawn"))
    drawn = page.evaluate(INK)
    assert all(inked > 2000 and colours > 8 for inked, colours, _ in drawn), drawn
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out sideways
    sizes = page.evaluate("[...document.querySelectorAll('figure')].map((f) => f.getBoundingClientRect().width)")
    assert all(size > (350 if width == 390 else 480) for size in sizes), sizes
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    for figure in page.locator("figure").all():
        figure.locator("summary").click()
        assert figure.locator("h2").inner_text() and figure.locator("figcaption p").first.inner_text()
        assert figure.locator("details table tbody tr").count() >= 2 and figure.locator("td").first.is_visible()
        figure.locator("summary").click()
    assert page.title().startswith("Lockstep report: ")
    if SCREENSHOTS:
        Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(Path(SCREENSHOTS) / f"{which}-{width}-{scheme}.png"), full_page=True)
    other = "light" if scheme == "dark" else "dark"
    page.emulate_media(color_scheme=other)  # while it is open
    _drawn(page, other)  # told with the next frame
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    assert all(new[2] != old[2] for new, old in zip(page.evaluate(INK), drawn))
    assert said == [] and [url for url in asked if not url.startswith("data:")] == [out.as_uri()]
    context.close()


def test_one_bad_run_does_not_hide_the_good_one() -> None:
    def log(*lines: Line) -> bool:
        return Chart("Loss", "epochs", "loss", "line", list(lines)).log

    good = Line("good", 0, [[step, 2.0 - step / 100] for step in range(100)])
    bad = Line("bad", 1, [[step, 10.0**step] for step in range(13)])
    assert not log(good)
    assert log(good, bad)
    assert not log(good, Line("negative", 1, [*bad.points, [13, -1.0]]))
