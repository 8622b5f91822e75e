"""A stranger on the network, or a file of another user, can do nothing to a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.jobs.helpers import lockstep
from tests.processes import PYTHON, ROOT, clean_env, inside, poll, require
from tests.ranks import training
from tests.runs import Job
from tests.warm.gang import python

pytestmark = pytest.mark.promise("other-users")


def _listening(pids: list[int]) -> set[tuple[str, int]]:
    """(address, port) of each TCP socket on which one of these processes listens."""
    require(shutil.which("ss"), "needs ss (iproute2)")
    rows = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    sockets = set()
    for row in rows:
        if any(f"pid={pid}," in row for pid in pids):
            address, _, port = row.split()[3].rpartition(":")
            sockets.add((address.strip("[]"), int(port)))
    return sockets


def test_a_run_on_one_machine_listens_on_loopback_only(job: Job) -> None:
    """The ranks' store, gloo and the metrics take connections from anyone, so they listen on 127.0.0.1."""
    held = job.run_dir.parent / "held"
    with job.launched(LOCKSTEP_TEST_FATE="1:5:HOLD", LOCKSTEP_TEST_HELD=str(held)) as gang:
        poll(held.exists, what="rank 1 in its fifth pass")
        sockets = _listening(inside(job.run_dir.parent))
        gang.end()
    assert len(sockets) == 5, sockets  # the ranks' store; gloo and metrics of two ranks; of the launcher none
    assert {address for address, _ in sockets} == {"127.0.0.1"}, sockets


@pytest.mark.promise("no-foreign-code")
def test_only_a_network_is_called(tmp_path: Path) -> None:
    for model in ("subprocess:Popen", "os:system", "pathlib:Path.touch"):
        result = training(
            "run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", f"model={model}", "model_options={}"
        )
        assert result.code == 2 and model in result.output and len(result.output.splitlines()) == 1, result


@pytest.mark.promise("no-foreign-code")
def test_a_run_directory_runs_no_code_unless_it_is_trusted(job: Job, tmp_path: Path) -> None:
    """Another user may have written the directory. `evaluate`, `export` and `report` import no model that it names, unless
    `--trust-model` is given."""
    job.ranks = 1
    assert job.go().code == 0
    refused = training("evaluate", str(job.run_dir))
    assert refused.code == 2 and "tests.nets:Dying" in refused.output, refused.output
    assert training("evaluate", str(job.run_dir), "--trust-model").code == 0
    (tmp_path / "evil.py").write_text("open('bomb-went-off', 'w')\n")
    run_file = job.run_dir / "run.yaml"
    content = run_file.read_text()
    env, bomb, exported = clean_env(PYTHONPATH=f"{ROOT}:{tmp_path}"), tmp_path / "bomb-went-off", tmp_path / "w.pth"
    words = {"evaluate": [], "export": [str(exported)], "report": []}
    for name, evil in (("model: tests.nets:Dying", "model: evil:Net"), ("source: synthetic", "source: evil:f")):
        assert name in content
        run_file.write_text(content.replace(name, evil).replace("tests.nets:Dying", "fashion_cnn"))
        for command, more in words.items():
            result = python("-m", "lockstep", command, str(job.run_dir), *more, env=env, cwd=tmp_path)
            assert result.code == (2 if command == "evaluate" else 0), result
        assert not bomb.exists()
        python("-m", "lockstep", "evaluate", str(job.run_dir), "--trust-model", env=env, cwd=tmp_path)
        bomb.unlink()
        exported.unlink()


NOBODY = 65534


def _lockstep(home: Path, *words: str) -> tuple[int, str]:
    result = lockstep(home.parent.parent, *words, LOCKSTEP_HOME=str(home))
    return result.returncode, result.stdout + result.stderr


FORGED = """
import os, sys
os.setgid(65534); os.setuid(65534)
os.execve("/bin/sh", ["sh", "-c", "echo ready; sleep 120"], dict(word.split("=", 1) for word in sys.argv[1:]))
"""


def test_another_users_process_with_the_marks_of_a_job_is_none_of_it(tmp_path: Path) -> None:
    """A process of another user has the job's variables. `exec` does not take its environment, `cancel` does not wait for it, and the
    job ends."""
    require(os.geteuid() == 0, "needs root, to act as another user")
    job, went_off = tmp_path / "job.yaml", tmp_path / "went-off"
    program = "import os, time; open('started', 'w').write(str(os.getppid())); time.sleep(300)"
    job.write_text(
        f"name: own\ncommand: [python, -c, {json.dumps(program)}]\nmax_restarts: 0\nranks_per_node: 1\ngrace_seconds: 5\n"
    )
    home, marks = tmp_path / "home", {}
    assert _lockstep(home, "submit", "local", str(job))[0] == 0
    try:
        poll((home.parent.parent / "started").exists, what="a rank")
        record = json.loads((home / "local/own/job.json").read_text())
        marks = {
            "RANK": "0", "LOCAL_RANK": "0", "LOCKSTEP_JOB": record["job"], "PATH": os.environ["PATH"], "FORGED": "1",
            "LOCKSTEP_LAUNCHER": (home.parent.parent / "started").read_text(), "BASH_ENV": "/dev/null",
        }  # fmt: skip
        words = [f"{name}={value}" for name, value in marks.items()]
        with subprocess.Popen([PYTHON, "-c", FORGED, *words], stdout=subprocess.PIPE) as stranger:
            try:
                assert stranger.stdout is not None and stranger.stdout.readline() == b"ready\n"
                begun = Path(f"/proc/{stranger.pid}/stat").read_text()
                code, output = _lockstep(home, "exec", "local", "own", "--", "env")
                assert code == 0 and "FORGED" not in output, (begun, output)
                began = time.monotonic()
                code, output = _lockstep(home, "cancel", "local", "own")
                assert code == 0 and time.monotonic() - began < 60, output
                assert "cancelled" in _lockstep(home, "status", "local", "own")[1]
                assert stranger.poll() is None, "it was not ended either"
                code, output = _lockstep(home, "exec", "local", "own", "--", "touch", str(went_off))
                assert code == 2 and not went_off.exists(), output
            finally:
                stranger.kill()
    finally:
        _lockstep(home, "cancel", "local", "own")


def test_a_link_of_another_user_in_a_run_directory_is_refused(job: Job, tmp_path: Path) -> None:
    require(os.geteuid() == 0, "needs root, to act as another user")
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    for name in (".lock", "events.jsonl", "metrics"):
        job.run_dir.mkdir(parents=True, exist_ok=True)
        link = job.run_dir / name
        link.symlink_to(tmp_path if name == "metrics" else victim)
        os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
        result = job.go()
        assert result.code == 2 and f"{link} is a link of user {NOBODY}" in result.output, result.output
        link.unlink()
    assert victim.read_text() == "mine\n"


def test_a_link_of_another_user_in_the_place_of_a_runs_folder_is_not_followed(job: Job, tmp_path: Path) -> None:
    """While a run trains, another user puts links in the place of its folders. The run warns, trains on, and writes nothing behind the
    links."""
    require(os.geteuid() == 0, "needs root, to act as another user")
    job.ranks = 1
    victim, held = tmp_path / "victim", tmp_path / "held"
    victim.mkdir()
    (victim / "rank-00000.json").write_text("mine\n")
    (victim / "step-00000001").mkdir()
    (victim / "step-00000001/state.json").write_text("mine\n")
    held.touch()
    with job.started(LOCKSTEP_TEST_FATE="0:5:WAIT", LOCKSTEP_TEST_HELD=str(held)) as gang:
        poll((job.run_dir / "metrics/rank-00000.prom").exists, what="a textfile")
        saved = job.run_dir / "checkpoints"
        poll(lambda: saved.exists() and not list(saved.glob(".*")), what="a checkpoint")
        for name in ("metrics", "checkpoints"):
            folder = job.run_dir / name
            folder.rename(tmp_path / name)
            folder.symlink_to(victim)
            os.chown(folder, NOBODY, NOBODY, follow_symlinks=False)
        held.unlink()
        result = gang.wait(240)
    assert result.output.count(f"cannot write {job.run_dir}/metrics/rank-00000.prom") == 1, result
    assert "a checkpoint could not be saved, the run continues" in result.output, result
    names = sorted(path.name for path in victim.rglob("*"))
    assert names == ["rank-00000.json", "state.json", "step-00000001"], "neither written nor removed there"
    assert (victim / "step-00000001/state.json").read_text() == "mine\n"
