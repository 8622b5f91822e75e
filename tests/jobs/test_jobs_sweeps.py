"""One table at the end of a sweep: each run's settings, end and metrics."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from k8s_server import ApiServer

from tests.events import summary_of
from tests.jobs.helpers import lockstep
from tests.processes import ROOT, poll

pytestmark = pytest.mark.promise("sweeps")


def test_a_sweep_of_this_machine_ends_in_a_table(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run trains, the other run fails because its data are unusable."""
    for name, value in (("PYTHONPATH", str(ROOT)), ("LOCKSTEP_HOME", str(tmp_path / "home"))):
        monkeypatch.setenv(name, value)
    settings = ["ranks_per_node=1", *(f"overrides.{text}" for text in [*tiny, "epochs=1"])]
    words = ["--recipe", "smoke", "--run-dir", str(tmp_path / "runs"), *(f"--set={text}" for text in settings)]
    sweep = ["--sweep", "data.source=synthetic,images"]
    try:
        done = lockstep(tmp_path, "submit", "local", *words, *sweep, "--wait", "120", "--json")
        rows = json.loads(done.stdout)
        table = [["smoke-0", "synthetic", "succeeded", 0], ["smoke-1", "images", "failed", 2]]
        assert [[row[name] for name in ("name", "data.source", "state", "exit_code")] for row in rows] == table, done
        summary = summary_of(tmp_path / "runs/smoke-0")
        metrics = ("accuracy", "best_accuracy", "test_loss", "train_loss", "steps")
        assert {name: rows[0][name] for name in metrics} == {name: summary[name] for name in metrics}
        assert rows[0]["logged"] == {} and all(rows[1][name] is None for name in metrics), "it has left no summary"
        assert done.returncode == 2, "of the worst"
        refused = lockstep(tmp_path, "submit", "local", *words, *sweep)
        assert refused.returncode == 2 and "smoke-0 has already finished" in refused.stderr, refused
    finally:
        for number in range(2):
            lockstep(tmp_path, "cancel", "local", f"smoke-{number}")


def k8s(folder: Path, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    job = ["--recipe", "smoke", "--image", "localhost:5000/a:1"] if command in ("submit", "render") else []
    return lockstep(folder, command, "k8s", *words, *job)


def test_a_sweep_on_kubernetes_has_its_table_from_the_logs(server: ApiServer, tmp_path: Path) -> None:
    """Each run gets a job. If one is refused, none is submitted."""
    sweep = ("--sweep", "lr=0.1,0.2,0.3")
    rendered = yaml.safe_load_all(k8s(tmp_path, "render", *sweep).stdout)
    names = [item["metadata"]["name"] for item in rendered if item["kind"] == "PyTorchJob"]
    assert names == ["smoke-0", "smoke-1", "smoke-2"]
    refused = lockstep(tmp_path, "submit", "k8s", "--recipe", "smoke", "--image", "lockstep:1", "--nodes", "2", *sweep)
    assert refused.returncode == 2 and server.cluster.get("pytorchjobs", "smoke-0") is None, "all or none"
    k8s(tmp_path, "submit", "--name", "smoke-x-0")

    def run() -> None:
        poll(lambda: all(server.cluster.get("pytorchjobs", f"smoke-{run}") for run in range(3)), 60, "the runs")
        for name, rate, kind, message in (("smoke-0", 0.1, "Succeeded", ""), ("smoke-1", 0.2, "Failed", late)):
            live = server.cluster.get("pytorchjobs", name)
            assert json.loads(live["metadata"]["annotations"]["lockstep/spec"])["overrides"] == {
                "epochs": 3,
                "lr": rate,
            }
            condition = {"type": kind, "status": "True", "message": message}
            server.cluster.put("pytorchjobs", {**live, "status": {"conditions": [condition]}})
            server.cluster.pod(name, f"{name}-worker-0", {"phase": kind})

    event = json.dumps({"event": "done", "accuracy": 0.875, "steps": 12, "logged": {"accuracy": 0.875, "wer": 0.25}})
    server.cluster.logs["smoke-0-worker-0"] = [
        f"2026-01-01T00:00:0{n}Z [rank 0] {text}" for n, text in enumerate((event, "bye"))
    ]
    late = "Job smoke-1 has failed because it was active longer than specified deadline"
    words = (*sweep, "--set", "overrides.epochs=3", "--wait", "2")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        done = k8s(tmp_path, "submit", *words)
        running.result()
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["NAME", "LR", "STATE", "EXIT", "WER", "ACCURACY", "STEPS"],
        ["smoke-0", "0.1000", "succeeded", "0", "0.2500", "0.8750", "12"],
        ["smoke-1", "0.2000", "timed_out", "124"], ["smoke-2", "0.3000", "pending"],
    ], done  # fmt: skip
    assert done.returncode == 124, "and one has not ended"
