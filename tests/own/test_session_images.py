"""Images that a script logs: files in the run directory, in the report and in TensorBoard."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tests.events import events
from tests.own.job import script
from tests.own.test_session import SCRIPT
from tests.ranks import training

LOOP = """
import numpy as np, PIL.Image
with Session(sys.argv[1], "log.tensorboard=true") as run:
    model, optimizer = make(run)
    picture = PIL.Image.new("RGB", (2000, 1000), (255, 0, 0))
    picture.save(run.path("red.jpg"))
    for epoch in run.epochs(2):
        for batch in run.batches(DATA, 16):
            step(run, model, batch)
        values = torch.tensor([[0.0, 0.5], [float("nan"), 7.0]])
        run.log_image("gray", values)
        run.log_image("rgb", torch.stack([values, values * 0, values * 0]))
        run.log_image("last", np.full((4, 6, 3), 9, dtype=np.uint8)[::-1])
        run.log_image("large", torch.rand(3, 3000, 50))
        run.log_image("red", picture)
        run.log_image("file", run.path("red.jpg"))
"""


def test_an_image_is_kept_at_its_step_and_shown_and_the_report_shows_no_other_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = tmp_path / "run"
    done = script(2, SCRIPT + LOOP, run_dir)
    assert done.code == 0 and "tensorboard is off" not in done.output, done.output
    names = ("gray", "rgb", "last", "large", "red", "file")
    assert [(event["name"], event["step"]) for event in events(run_dir, "image")] == [
        (n, s) for s in (2, 4) for n in names
    ]
    files = {name: (run_dir / f"images/{name}-00000004.png").read_bytes() for name in names}
    pictures = {name: PIL.Image.open(io.BytesIO(data)) for name, data in files.items()}
    assert np.asarray(pictures["gray"]).tolist() == [[0, 128], [0, 255]], "NaN is black"
    assert np.asarray(pictures["rgb"]).tolist() == [[[0, 0, 0], [128, 0, 0]], [[0, 0, 0], [255, 0, 0]]]
    assert np.asarray(pictures["last"]).shape == (4, 6, 3)
    assert max(pictures["large"].size) <= 512 and pictures["red"].size == (512, 256)
    assert pictures["red"].getpixel((9, 9)) == (255, 0, 0)
    assert pictures["file"].getpixel((9, 9))[0] > 250
    shown = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"images": 0}).Reload().Images("rgb")
    assert [image.step for image in shown] == [2, 4] and shown[0].width == 2
    page = (run_dir / "report.html").read_text()
    embedded = re.findall(r'src="data:image/png;base64,([^"]+)" alt="(\w+), step (\d+)"', page)
    assert {(name, int(step)) for _, name, step in embedded} == {(n, s) for s in (2, 4) for n in names}
    data = {name: base64.b64decode(text) for text, name, step in embedded if step == "4"}
    assert PIL.Image.open(io.BytesIO(data["red"])).size == (512, 256)

    (run_dir / "images/gray-00000004.png").write_text("<script>alert(1)</script>")
    (run_dir / "images/rgb-00000004.png").unlink()
    (run_dir / "images/rgb-00000004.png").symlink_to("/etc/passwd")
    with open(run_dir / "events.jsonl", "a") as file:
        file.write(
            '{"event": "image", "time": 1, "name": "../../x", "step": 4}\n{"event": "image", "time": 1, "name": [], "step": {}}\n'
        )
    done = training("report", str(run_dir))
    assert done.code == 0, done.output
    named = re.findall(r'alt="(\w+), step (\d+)"', (run_dir / "report.html").read_text())
    assert ("red", "4") in named and ("gray", "4") not in named and ("rgb", "4") not in named and len(named) == 10
