"""Exit code 75 says that a checkpoint to go on from is on the disk: whoever ends the run, and whatever is set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.training.checkpoint import store
from tests.own.job import OwnJob, script
from tests.own.test_session_scores import EPOCHS, SCRIPT, STOPPED
from tests.runs import Job

NEVER = {"checkpoint.every_steps": 0}
"""None before the end of the first epoch, after 8 steps."""
TABLE = {
    "TERM": ("1:5:TERM", {}, 75, ""),
    "USR1": ("0:5:USR1", {}, 75, ""),
    "TERM before the first checkpoint": ("1:3:TERM", NEVER, 75, ""),
    "STOP": ("", {}, 75, "STOP file"),
    "none on signal": ("1:6:TERM", {"checkpoint.on_signal": "false"}, 75, ", saved at step"),
    "none on signal, and none before": (
        "1:3:TERM", {**NEVER, "checkpoint.on_signal": "false"}, 1,
        "and nothing is saved: there was no checkpoint yet, and checkpoint.on_signal is false",
    ),
    "none on USR1, and none before": ("0:3:USR1", {**NEVER, "checkpoint.on_signal": "false"}, 1, "and nothing is saved: "),
    "none on STOP, and none before": ("", {**NEVER, "checkpoint.on_signal": "false"}, 1, "and nothing is saved: "),
}  # fmt: skip
"""Fate of a rank, settings, exit code, and what the last line says."""


@pytest.mark.parametrize("kind", ["recipe", "Session"])
@pytest.mark.parametrize("name", TABLE)
def test_75_is_given_where_a_checkpoint_is_on_the_disk(tmp_path: Path, data_root: Path, kind: str, name: str) -> None:
    fate, settings, code, why = TABLE[name]
    run_dir = tmp_path / "run"
    words = [f"{setting}={value}" for setting, value in settings.items()]
    job = Job(run_dir, data_root, 2, **settings) if kind == "recipe" else OwnJob(run_dir, 2, "batches", *words)
    if "STOP" in name:
        run_dir.mkdir()
        (run_dir / "STOP").touch()
    done = job.go(**({"LOCKSTEP_TEST_FATE": fate} if fate else {}))
    assert done.code == code and why in done.output and "Traceback" not in done.output, done.output
    status = json.loads((run_dir / "status.json").read_text())
    assert status["code"] == code and why in status["reason"]
    saved = store.candidates(run_dir / "checkpoints")
    assert (code == 75) == bool(saved)
    (run_dir / "STOP").unlink(missing_ok=True)
    again = job.go()
    assert again.code == 0 and (not saved or f"Resuming at step {store.step_of(saved[0])} " in again.output)


@pytest.mark.parametrize("words", [(), ("checkpoint.on_signal=false",)], ids=["saving", "not saving"])
def test_a_session_whose_disk_refuses_does_not_say_75(tmp_path: Path, words: tuple[str, ...]) -> None:
    code = f"""{SCRIPT}{EPOCHS}{STOPPED}
from lockstep.training.checkpoint.store import Writer
def full(*arguments):
    raise OSError(28, "No space left on device")
Writer._write = full
sys.exit(start(sys.argv[1], 4, "checkpoint.every_steps=2", *sys.argv[2:]))
"""
    done = script(1, code, tmp_path / "run", *words)
    assert done.code == 1 and "and could not save (see the warnings)" in done.output, done.output
    assert "No space left on device" in done.output and store.candidates(tmp_path / "run/checkpoints") == []
