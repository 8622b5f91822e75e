"""report.html of real runs: what is in it, whatever is left of the run directory, and how a real Chromium shows it."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.processes import LAUNCH, poll, require, started
from tests.ranks import gang, training

pytestmark = pytest.mark.promise("report")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two real runs of 2 ranks: one preempted and resumed, one undisturbed at another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    settings = [
        f"data.root={folder / 'data'}", "data.source=synthetic", "data.options={n: 384, n_test: 50, size: 8, noise: 1.5}",
        "model=tests.prometheus.slow:Paced", "model_options={}", "global_batch_size=24",
        "uneven=drop", "epochs=4", "evaluate.every=1", "loss.reduction=mean", "optim.name=sgd", "bias_lr_factor=1",
        "weight_decay=0", "schedule=[]", "log.every=2", "threads=1",
    ]  # fmt: skip
    first, second = folder / "first", folder / "second"
    words = ["run", "smoke", "--run-dir", str(first), "--set", *settings, "lr=0.05"]
    with started([*LAUNCH, "--ranks", "2", *words]) as process:
        poll(lambda: process.poll() is not None or (first / "checkpoints/step-00000016").exists(), 240, "a checkpoint")
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 75
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
        "Where the time of the job went",
    }  # fmt: skip
    assert charts["Test accuracy"]["lines"][0]["points"][-1] == [64, summary["accuracy"]]
    assert len(charts["Loss"]["lines"][0]["points"]) == 33  # the first and every second of 64 steps
    moments = [point[2] for point in charts["Progress, checkpoints, restarts and preemptions"]["lines"][0]["points"]]
    assert [moment for moment in moments if moment in ("start", "preempted", "restart", "done")] == [
        "start",
        "preempted",
        "restart",
        "done",
    ]
    assert moments.count("checkpoint") >= 4
    ranks = charts["Where a step goes, by rank"]["lines"]
    assert [point[0] for point in ranks[0]["points"]] == ["rank 0", "rank 1"]
    assert sum(line["points"][0][1] for line in ranks) > 30  # milliseconds: the pace of the test's network
    spent = charts["Where the time of the job went"]["lines"]
    assert [point[0] for point in spent[0]["points"]] == ["attempt 1", "attempt 2"]
    wall, productive = summary["goodput"]["wall_seconds"], summary["goodput"]["seconds"]["productive"]
    drawn = sum(point[1] for line in spent for point in line["points"])
    assert drawn == pytest.approx(wall, abs=1), "the summary is a moment older"
    assert sum(point[1] for point in spent[0]["points"]) == pytest.approx(productive, abs=0.01)
    for number in (f"{summary['accuracy']:.4f}", f"{summary['train_loss']:.4f}", summary["config_hash"][:12]):
        assert number in text
    assert "optim.lr" in text and "versions.torch" in text and text.count("<canvas") == text.count("<details>") == 6


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
    assert done.code == 2 and "thesis.html" in done.output and done.output.count("\n") == 1
    assert mine.read_text() == "years of work"
    nowhere = training("report", str(tmp_path))
    assert nowhere.code == 2 and str(tmp_path) in nowhere.output


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


def _drawn(page: Any, scheme: str) -> None:
    """Playwright's own waiting needs `eval`, which the page forbids."""
    poll(lambda: page.evaluate("document.documentElement.dataset.scheme") == scheme, 240, f"the {scheme} charts")


@pytest.mark.parametrize(("compared", "width", "scheme"), [(1, 1280, "light"), (2, 390, "dark")])
def test_in_chromium(
    browser: Any, runs: tuple[Path, Path], tmp_path: Path, compared: int, width: int, scheme: str
) -> None:
    out = tmp_path / "report.html"
    product.report(list(runs[:compared]), out)
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(out.as_uri())
    _drawn(page, scheme)
    expected = 4 + 2 * compared  # each run has a chart of its ranks, and one of its attempts
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
    other = "light" if scheme == "dark" else "dark"
    page.emulate_media(color_scheme=other)  # while it is open
    _drawn(page, other)  # drawn with the next frame
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    assert all(new[2] != old[2] for new, old in zip(page.evaluate(INK), drawn))
    assert said == [] and [url for url in asked if not url.startswith("data:")] == [out.as_uri()]
    context.close()
