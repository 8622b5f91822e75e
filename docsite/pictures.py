"""`python -m docsite.pictures`: the drawings, and screenshots of a real run. Needs chromium; takes a minute.

The drawings come from docs/pictures/*.yaml and are the same every time; a test holds that they are current. Screenshots show
whatever the run did, so they are made by hand and kept in the repository.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from docsite import ROOT, drawing
from lockstep.training.contract import UserError, user_errors

THEMES = ("light", "dark")
WIDTH, HEIGHT = 1180, 760


def _smoke(ranks: int, run: Path, *settings: str) -> list[str]:
    launch = [sys.executable, "-m", "lockstep.training", "launch", "--ranks", str(ranks)]
    return [*launch, "run", "smoke", "--run-dir", str(run), "--set", *settings]


def train(folder: Path) -> list[Path]:
    """Two runs that differ in their learning rate."""
    runs = [folder / "runs/smoke", folder / "runs/half-rate"]
    for run, rate in zip(runs, ("0.002", "0.001")):
        subprocess.run(_smoke(2, run, f"optim.lr={rate}", "epochs=8"), cwd=ROOT, check=True)
    return runs


def top(folder: Path) -> None:
    """`lockstep top` over four ranks of which one is slow, while they train: as rich draws it, as SVG."""
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI

    from lockstep.tools.ranks import Reader
    from lockstep.tools.top import picture

    run = Path("runs/smoke")
    settings = ["model=tests.prometheus.slow:Paced", "model_options={}", "epochs=400", "optim.lr=1e-4", "capture=never"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LOCKSTEP_TEST_SLOW": "2:backward", "LOCKSTEP_METRICS_PORT": "0"}
    training = subprocess.Popen(_smoke(4, run, *settings), cwd=folder, env=env, start_new_session=True)
    here = Path.cwd()
    os.chdir(folder)  # the table's title names the run as a user would
    try:
        end, before = time.monotonic() + 300, {}
        while not before or len(before) < 4 or min(one.values.get("step", 0) for one in before.values()) < 20:
            if time.monotonic() > end or training.poll() is not None:
                raise UserError("the run for the picture of lockstep top did not get to step 20")
            time.sleep(0.5)
            before = Reader(run).read() if run.joinpath("run.yaml").exists() else {}
        time.sleep(15)
        os.environ["COLUMNS"] = "118"
        table = picture(str(run), Reader(run).judged(before, Reader(run).read()))
    finally:
        os.chdir(here)
        os.killpg(training.pid, signal.SIGTERM)
        training.wait(60)
    for theme, colours in zip(THEMES, (DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI)):
        console = Console(record=True, width=128, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        console.print(table)
        text = console.export_svg(title=f"lockstep top {run}", theme=colours, unique_id=f"top-{theme}")
        # The drawing of a window names fonts on a server; whoever opens it has one of their own.
        text = re.sub(r"@font-face\s*\{.*?\}\s*", "", text, flags=re.DOTALL)
        text = text.replace("Fira Code", "DejaVu Sans Mono").replace(
            "<!-- Generated with Rich https://www.textualize.io -->", ""
        )
        (drawing.FOLDER / f"top-{theme}.svg").write_text(text, encoding="utf-8")


def photograph(page: Path, name: str, width: int = WIDTH, height: int = HEIGHT) -> None:
    """A page in Chromium, light and dark, as PNG."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for theme in THEMES:
            context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": height})  # type: ignore[arg-type]
            tab = context.new_page()
            tab.goto(page.as_uri())
            tab.wait_for_load_state("networkidle")
            tab.wait_for_timeout(1000)  # the charts move in
            above = tab.locator("h2", has_text="Loss").bounding_box()
            begin = max(0.0, (above["y"] if above else 0.0) - 30)
            area = {"x": 0, "y": begin, "width": width, "height": height}
            tab.screenshot(path=drawing.FOLDER / f"{name}-{theme}.png", full_page=True, clip=area)  # type: ignore[arg-type]
            context.close()
        browser.close()


def smaller(path: Path) -> None:
    """The same picture in 128 colours: a third of the bytes."""
    from PIL import Image

    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def main() -> None:
    for path, text in drawing.drawn().items():
        path.write_text(text, encoding="utf-8")
    if "--drawings" in sys.argv:
        return
    with user_errors(), tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "live").mkdir()
        runs = train(Path(folder))
        page = Path(folder) / "compare.html"
        subprocess.run(
            [sys.executable, "-m", "lockstep.training", "report", *map(str, runs), "--out", str(page)],
            cwd=ROOT,
            check=True,
        )
        top(Path(folder) / "live")
        photograph(page, "report")
    for theme in THEMES:
        smaller(drawing.FOLDER / f"report-{theme}.png")


if __name__ == "__main__":
    main()
