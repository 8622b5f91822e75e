"""Preemption, the run directory, weights, and who imports whom."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pytest
import safetensors.torch
import torch

from lockstep.training import config, contract
from lockstep.training.checkpoint import weights
from lockstep.training.checkpoint.store import Writer
from lockstep.training.contract import UserError
from lockstep.training.observe import rundir
from lockstep.training.observe.metrics import Metrics
from lockstep.training.observe.rundir import RunDirectory
from lockstep.training.parallel.world import World
from lockstep.training.resilience.preempt import Consensus, Decision, Signals
from lockstep.training.run.saver import Saver
from tests.imports import SHARED, modules
from tests.processes import ROOT, poll


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def signals(clock: list[float]) -> Iterator[Signals]:
    caught = Signals(["USR1", "TERM"], now=lambda: clock[0])
    yield caught
    caught.restore()


def test_one_signal_sets_a_flag_and_its_echo_is_the_same_one(signals: Signals, clock: list[float]) -> None:
    assert signals.received is None
    os.kill(os.getpid(), signal.SIGUSR1)
    poll(lambda: signals.received, 10, "the signal")
    clock[0] = 1.9
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == "SIGUSR1"


def test_a_second_signal_ends_the_process_at_once() -> None:
    code = (
        "import os, signal, sys, threading\nfrom lockstep.training.resilience.preempt import Signals\nclock = [0.0]\n"
        "s = Signals(['TERM'], now=lambda: clock[0])\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "while s.received is None: pass\n"
        "clock[0] = 2.1\nos.kill(os.getpid(), signal.SIGTERM)\nthreading.Event().wait(30)\nprint('survived')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM and "survived" not in done.stdout


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_not_asked_to_save(signals: Signals) -> None:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM and signals.received is None


def test_one_rank_decides_at_once(tmp_path: Path, signals: Signals) -> None:
    now = [0.0]
    consensus = Consensus(World(), signals, tmp_path / "STOP", now=lambda: now[0])
    assert consensus.poll() == Decision() and consensus.poll(save_due=True) == Decision(save=True)
    (tmp_path / "STOP").touch()
    assert not consensus.poll().stop  # looked less than a second ago
    now[0] = 1.0
    assert consensus.poll().stop and consensus.reason == "STOP file"


def test_the_run_directory_refuses_another_config_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "LOCK_SECONDS", 0.1)
    path = tmp_path / "run"
    first = config.load("smoke")
    run = RunDirectory.open(path, first, fresh=False)
    with pytest.raises(UserError, match="is in use by another run"):
        RunDirectory.open(path, first, fresh=False)
    run.describe(first, World(), 128, {"name": "digits", "checksum": "0"}, "1 thread")
    run.status(75, "preempted", 3)
    run.close()
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(UserError, match=r"optim.lr: 0.002 → 0.1.*--fresh"):
        RunDirectory.open(path, config.load("smoke", ["lr=0.1"]), fresh=False)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    again = RunDirectory.open(path, config.load("smoke", ["epochs=99"]), fresh=False)
    assert again.attempt == 2 and again.saved is not None and again.saved["global_batch_size"] == 128
    again.close()
    fresh = RunDirectory.open(path, config.load("smoke", ["lr=0.1"]), fresh=True)
    assert fresh.attempt == 1 and (tmp_path / "run.old-1" / contract.RUN_FILE).exists()
    fresh.close()


def test_a_restart_waits_longer_for_the_lock_of_the_node_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(rundir, "LOCK_SECONDS_AGAIN", 20)
    smoke = config.load("smoke")
    first = RunDirectory.open(tmp_path / "run", smoke, fresh=False)
    with pytest.raises(UserError, match="is in use by another run"):
        RunDirectory.open(tmp_path / "run", smoke, fresh=False)
    monkeypatch.setenv(contract.ENV_RESTARTS, "1")
    attempts: list[int] = []

    def again() -> None:
        second = RunDirectory.open(tmp_path / "run", smoke, fresh=False)
        attempts.append(second.attempt)
        second.close()

    waiting = threading.Thread(target=again)
    waiting.start()
    time.sleep(0.5)
    first.close()
    waiting.join(20)
    assert attempts == [1]


def test_run_yaml_records_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    monkeypatch.setenv("WORLD_SIZE", "1")
    run = RunDirectory.open(tmp_path / "run", config.load("smoke"), fresh=False)
    run.describe(config.load("smoke"), World(), 128, {"name": "digits", "checksum": "0"}, "1 thread")
    run.close()
    text = (tmp_path / "run" / "run.yaml").read_text()
    assert "hunter2" not in text and "WORLD_SIZE" in text


@pytest.mark.parametrize("damage", ["", "config: 3", "config: {}\nglobal_batch_size: x", "\x00", "- 1"])
def test_a_damaged_run_yaml(tmp_path: Path, damage: str) -> None:
    (tmp_path / "run.yaml").write_text(damage)
    with pytest.raises(UserError, match=r"run\.yaml"):
        rundir.read_run(tmp_path)


def test_events_survive_a_disk_that_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory.open(tmp_path / "run", config.load("smoke"), fresh=False)
    (tmp_path / "run" / "events.jsonl").mkdir()
    run.event("step", step=1)
    run.event("step", step=2)
    run.close()
    assert capsys.readouterr().err.count("the run continues") == 1


def test_weight_files(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    path = tmp_path / "w.pth"
    torch.save({f"module.{name}": tensor for name, tensor in model.state_dict().items()}, path)
    other = torch.nn.Linear(2, 2)
    weights.load_into(other, path)
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(UserError, match="weight has shape"):
        weights.load_into(torch.nn.Linear(3, 2), path)
    with pytest.raises(UserError, match="bias is not in the model"):
        weights.load_into(torch.nn.Linear(2, 2, bias=False), path)
    with pytest.raises(UserError, match="exists already"):
        weights.write({}, path)
    for content in (b"", b"nonsense", b"\x80\x04cposix\nsystem\n"):
        for bad in (path, tmp_path / "bad.safetensors"):
            bad.write_bytes(content)
            with pytest.raises(UserError, match=r"is not a file of plain weights"):
                weights.read(bad)
    plain = {"weight": torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last), "bias": torch.randn(2)}
    weights.write(plain, tmp_path / "w.safetensors")
    for read in (weights.read, safetensors.torch.load_file):  # ours, and anybody's
        found = read(tmp_path / "w.safetensors")
        assert found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)
    torch.save([1], path)
    with pytest.raises(UserError, match="does not hold a state dict"):
        weights.read(path)
    with pytest.raises(UserError, match="cannot read"):
        weights.read(tmp_path / "none.pth")


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


FORBIDDEN = {
    "jobs": ("torch",), "training/contract.py": ("torch", "yaml", "lockstep.training."), "training/extras.py": ("torch", "yaml"),
    "training/config/settings.py": ("torch",), "training/config/__init__.py": ("torch",),
    "training/config/sections.py": ("torch",), "training/config/types.py": ("torch", "yaml"),
    "training/config/complaints.py": ("torch", "yaml", "lockstep.training."),
    "training/checkpoint/store.py": (
        "torch.distributed", "lockstep.training.run.recipe", "lockstep.training.sync", "lockstep.training.checkpoint.state",
    ),
    "training/checkpoint": ("lockstep.training.run", "lockstep.training.trainer"),
    "training/data/order.py": ("lockstep.training.config", "lockstep.training.parallel.world", "torch.distributed"),
    "training/models": ("lockstep.training.optim", "lockstep.training.sync", "lockstep.training.data", "lockstep.training.run.recipe"),
    "training/optim": ("lockstep.training.models", "lockstep.training.sync", "lockstep.training.data", "lockstep.training.run.recipe"),
    "training/sync": (
        "lockstep.training.run.recipe", "lockstep.training.models", "lockstep.training.optim",
        "lockstep.training.trainer", "lockstep.training.checkpoint.state",
        "lockstep.training.data.loader", "lockstep.training.data.shards", "lockstep.training.data.sources",
        "lockstep.training.data.augment",
    ),
    "training/data/partition.py": ("lockstep.training.parallel.world", "lockstep.training.config", "torch.distributed"),
}  # fmt: skip


def test_who_may_import_whom() -> None:
    assert not _imports(ROOT / "training/__init__.py")
    for path in [*modules("training").values(), *modules("jobs").values()]:
        name = str(path.relative_to(ROOT))
        imports = _imports(path)
        if name.startswith("training/"):
            assert not any(module.startswith("lockstep.jobs") for module in imports), name
        else:
            ours = {module for module in imports if module.startswith("lockstep.training.")}
            assert all(module.startswith(SHARED) for module in ours), (name, ours)
        for place, forbidden in FORBIDDEN.items():
            if name == place or name.startswith(place + "/"):
                bad = {module for module in imports if module.startswith(forbidden)}
                assert not bad, (name, bad)


def test_the_dispatcher_loads_no_torch() -> None:
    code = "import sys, lockstep.jobs.cli.main; print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_run_loads_no_compiler(tmp_path: Path) -> None:
    """torch imports its own for some harmless calls; that costs seconds of every start. One process, a run for each optimizer."""
    code = (
        "import sys; from lockstep.training.__main__ import leave, main\n"
        "def run(name): return main(['run', 'smoke', '--run-dir', f'{sys.argv[1]}/{name}', '--set', *sys.argv[2:], f'optim.name={name}'])\n"
        "def loaded(): return [m for m in ('torch._dynamo', 'torch._inductor', 'sympy', 'matplotlib') if m in sys.modules]\n"
        "print([(name, run(name), loaded()) for name in ('nesterov', 'sgd', 'adam')])\n"
        "leave(0)"
    )
    words = ["data.source=synthetic", "data.options={n: 64}", f"data.root={tmp_path}", "model_options.width=0.0625"]
    words += ["epochs=1", "global_batch_size=32", "metrics.enabled=false", "checkpoint.every_steps=1"]
    command = [sys.executable, "-c", code, str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert "[('nesterov', 0, []), ('sgd', 0, []), ('adam', 0, [])]" in done.stdout, done.stdout + done.stderr


def test_the_revision_is_of_this_source_and_not_of_the_project_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed into a project's .venv, the nearest history is the project's."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "theirs")
    monkeypatch.delenv("LOCKSTEP_REVISION", raising=False)
    for place, found in ((".venv/lib/training/observe", ""), ("training/observe", git("rev-parse", "HEAD").strip())):
        (tmp_path / place).mkdir(parents=True)
        monkeypatch.setattr(rundir, "__file__", str(tmp_path / place / "rundir.py"))
        assert rundir.git_revision() == found


def test_a_lock_is_of_the_directory_that_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start with `fresh` renames the directory at the moment at which its lock is taken."""
    path, aside = tmp_path / "run", tmp_path / "run.old-1"

    class Renamed(filelock.FileLock):
        def acquire(self, *args: Any, **more: Any) -> Any:
            taken = super().acquire(*args, **more)
            if not aside.exists():
                path.rename(aside)
            return taken

    with monkeypatch.context() as patched:
        patched.setattr(filelock, "FileLock", Renamed)
        lock = rundir._locked(path, 10.0)
    with pytest.raises(filelock.Timeout):
        filelock.FileLock(path / ".lock", timeout=0).acquire()
    filelock.FileLock(aside / ".lock", timeout=0).acquire().lock.release()
    lock.release()


def _saving(folder: Path, warn: Callable[[str], object], event: Callable[..., object]) -> Any:
    """What a `Saver` reads of a run that is at its third step."""
    return SimpleNamespace(
        config=config.Config(batch_size=8), run=SimpleNamespace(checkpoints=folder), steps_done=3, attempt=1,
        state=SimpleNamespace(history={}), metrics=Metrics("x", 0, torch.device("cpu")),
        console=SimpleNamespace(warn=warn), event=event,
    )  # fmt: skip


def test_a_disk_that_hangs_holds_up_the_end_no_longer_than_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, told = threading.Event(), []
    monkeypatch.setattr(Writer, "_write", lambda *_: answer.wait(60))
    prepared = _saving(tmp_path, told.append, lambda kind, **_: told.append(kind))
    prepared.config.preempt.grace_seconds = 0.3
    asked: list[float] = []
    saver = Saver(prepared, lambda: asked[0] if asked else None)
    assert saver._writer is not None
    saver._future = saver._writer.save(3, {"a": torch.ones(2)})
    try:
        threading.Timer(0.5, lambda: asked.append(time.monotonic())).start()
        began = time.monotonic()
        saver._reap()
        saver.close()
        assert time.monotonic() - began < 5, "a signal that comes while it waits starts the grace"
        assert told[0] == "checkpoint_failed" and "did not answer" in told[1]
        assert not answer.is_set() and saver._future is None, "it has not waited for the disk"
    finally:
        answer.set()


def test_a_disk_that_answers_with_its_own_timeout_costs_its_checkpoints_and_they_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a network disk raises (ETIMEDOUT) has the name of a wait that is over: it is neither waited for nor a hang."""

    def refused(*_: object) -> None:
        raise TimeoutError(110, "Connection timed out")

    monkeypatch.setattr(Writer, "_write", refused)
    told: list[str] = []
    counted: list[int] = []
    saver = Saver(_saving(tmp_path, told.append, lambda kind, failures, **_: counted.append(failures)))
    assert saver._writer is not None
    for step in (3, 4):
        saver._future = saver._writer.save(step, {"a": torch.ones(2)})
        saver._reap()
        assert saver._last_failed and not saver._hangs, "the next one is tried"
    assert len(told) == 2 and all("Connection timed out" in line for line in told)
    assert counted == [1, 2] and saver.failures == 2
    saver.close()
