"""Plain scripts, `examples/NAME_plain.py`, and the same scripts with a Session, `examples/NAME.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests import product
from tests.events import status_of, weights_digest
from tests.processes import PYTHON, ROOT, Result, clean_env
from tests.ranks import live
from tests.runs import tensors
from tests.warm.gang import running

EXAMPLES = ROOT / "examples"
CODE = """
import json, os, re, signal, sys
from lockstep import Session
path, constants, fate = sys.argv[1:]
with open(path, encoding="utf-8") as file:
    source = file.read()
for name, value in json.loads(constants).items():  # as in `EPOCHS, BATCH = 20, 64`
    for line in re.findall(rf"^(?:[A-Z]+, )*{name}\\b.* = .*$", source, re.M):
        names, values = (part.split(", ") for part in line.split(" = "))
        values[names.index(name)] = str(value)
        source = source.replace(line, f"{', '.join(names)} = {', '.join(values)}")
source = source.replace(", 160)", ", 32)").replace(", 50)", ", 9)")  # images of each shape
step = Session.step
def fated(run, *args, **named):
    if f"{run.rank}:{run.steps}" == fate:
        os.kill(os.getpid(), signal.SIGKILL)
    step(run, *args, **named)
Session.step = fated
exec(compile(source, path, "exec"), {"__name__": "__main__", "__file__": path})
"""
SMALL = {
    "gpt": {"STEPS": 12, "EVERY": 4, "WARM_UP": 3, "CONTEXT": 16, "WIDTH": 16, "LAYERS": 1},
    "folders": {"EPOCHS": 5, "PATIENCE": 1, "BATCH": 16},
    "gan": {"EPOCHS": 2, "BATCH": 256, "WIDTH": 8},
}
"""Constants that make the examples short."""


def start(
    name: str, folder: Path, ranks: int, *settings: str, fate: str = "", survive: bool = False, **changed: float
) -> Result:
    """Starts an example in `folder`, with short constants. `fate` is RANK:STEP before which that rank is killed.

    Args:
        survive: Starts under `launch --live`, with a restart for runs that cannot continue.
    """
    folder.mkdir(exist_ok=True)
    constants = json.dumps({**SMALL.get(name.removesuffix("_plain"), {}), **changed})
    words = ["-c", CODE, str(EXAMPLES / f"{name}.py"), constants, fate]
    options = {"run_dir": str(folder / "run"), "settings": ["checkpoint.every_steps=2", *settings]}
    env = {"LOCKSTEP_THREADS": "1", "LOCKSTEP_SESSION": json.dumps(options), "PYTHONPATH": str(ROOT)}
    if survive:
        launch = ("--ranks", str(ranks), "--max-restarts", "2", "--", PYTHON, *words)
        with live(*launch, env=clean_env(**env), cwd=folder) as started:
            return started.wait(240)
    with running([words] * ranks, env, cwd=folder) as started:
        return started.wait(240)


@pytest.mark.promise("kill-resume", "session-same")
@pytest.mark.parametrize(
    ("name", "sync", "fate"),
    [("gpt", "flat", "1:7"), ("folders", "flat", "0:9"), ("gan", "ddp", "1:9")],
)
def test_killed_in_the_middle_and_started_again_it_ends_in_the_same_bits(
    tmp_path: Path, name: str, sync: str, fate: str
) -> None:
    """At the kill, one of two models has stepped on its batch, and the other has not."""
    ends = []
    for folder in (tmp_path / "undisturbed", tmp_path / "killed"):
        if folder.name == "killed":
            killed = start(name, folder, 2, f"sync.name={sync}", fate=fate)
            assert killed.code not in (0, 2), killed.output
        done = start(name, folder, 2, f"sync.name={sync}")
        assert done.code == 0 and ("Resuming at step" in done.output) == (folder.name == "killed"), done.output
        ends.append(tensors(folder / "run", product.checkpoint_steps(folder / "run")[0]))
    expected, actual = ends
    assert expected.keys() == actual.keys() and len(expected["/ranks/0/rng/python/1"]) == 625
    assert [place for place, leaf in expected.items() if not torch.equal(leaf, actual[place])] == []
    if name == "folders":
        reason = status_of(tmp_path / "killed/run")["reason"]
        assert reason == "stopped: no better for 1 epochs"
        assert len(torch.load(tmp_path / "killed/run/files/predictions.pt")) == 27


@pytest.mark.promise("survivors")
@pytest.mark.parametrize(("name", "fate"), [("gpt", "1:7"), ("folders", "0:9")])
def test_a_rank_that_is_lost_changes_no_bit(tmp_path: Path, name: str, fate: str) -> None:
    """A rank of each example is killed, and the weights stay. `folders` gathers after its last step, so its complete run is started
    again."""
    ends = []
    for folder, ranks, killed in (("alone", 1, ""), ("live", 3, fate)):
        done = start(name, tmp_path / folder, ranks, "sync.name=exact", survive=folder == "live", fate=killed)
        assert done.code == 0, done.output
        ends.append(weights_digest(tmp_path / folder / "run"))
    assert ends[0] == ends[1]
    assert done.output.count("was lost after step") == 1, done.output
    assert ("all ranks start again" in done.output) == (name == "folders"), done.output


@pytest.mark.promise("session-same")
def test_alone_it_trains_what_the_script_for_one_process_trains(tmp_path: Path) -> None:
    """The example on one rank ends in the weights of the plain script. Dropout is off, as a step has separate generators."""
    plain, *sessions = (
        start(name, tmp_path / f"{name}-{ranks}", ranks, DROPOUT=0.0)
        for name, ranks in (("gpt_plain", 1), ("gpt", 1), ("gpt", 2))
    )
    assert plain.code == 0, plain.output
    losses = [float(loss) for loss in re.findall(r"val_loss (\d+\.\d+)", plain.output)]
    assert len(losses) == 3 and losses[2] < losses[0] - 0.1, losses
    for session in sessions:
        assert session.code == 0, session.output
        session_losses = [float(loss) for loss in re.findall(r"val_loss (\d+\.\d+)", session.output)]
        assert session_losses == pytest.approx(losses, abs=2e-4), session.output
