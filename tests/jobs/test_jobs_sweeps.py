"""One table at the end of a sweep: what each run was given, how it ended, what it reached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from k8s_server import ApiServer

from lockstep.jobs.backend import next_name
from lockstep.jobs.local.backend import LocalBackend
from tests.jobs.helpers import lockstep
from tests.processes import ROOT


def test_a_sweep_of_this_machine_ends_in_a_table(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run trains, the other one finds its data unusable."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LOCKSTEP_METRICS_PORT", "0")
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    settings = [word for text in [*tiny, "epochs=1"] for word in ("--set", f"overrides.{text}")]
    words = ["--recipe", "smoke", "--set", "ranks_per_node=1", "--run-dir", str(tmp_path / "runs"), *settings]
    sweep = ["--sweep", "data.source=synthetic,images"]
    try:
        done = lockstep(tmp_path, "submit", "local", *words, *sweep, "--wait", "120")
        head, *rows = [line.split() for line in done.stdout.splitlines()]
        metrics = ["ACCURACY", "BEST_ACCURACY", "TEST_LOSS", "TRAIN_LOSS", "STEPS"]
        assert head == ["NAME", "DATA.SOURCE", "STATE", "EXIT", *metrics]
        told = [["smoke-0", "synthetic", "succeeded", "0"], ["smoke-1", "images", "failed", "2"]]
        assert [row[:4] for row in rows] == told, done
        summary = json.loads((tmp_path / "runs/smoke-0/summary.json").read_text())
        assert rows[0][4] == f"{summary['accuracy']:.4f}" and rows[0][8] == str(summary["steps"])
        assert len(rows[1]) == 4, "what has left no summary has no metrics"
        assert done.returncode == 2, "of the worst"
        again = lockstep(tmp_path, "wait", "local", "smoke", "--sweep", "--timeout", "10")
        assert (again.returncode, again.stdout) == (2, done.stdout), "the table can be had later, too"
        refused = lockstep(tmp_path, "submit", "local", *words, *sweep)
        assert refused.returncode == 2 and "smoke-0 has already finished" in refused.stderr, refused
    finally:
        for row in LocalBackend(tmp_path / "home/local").list():
            LocalBackend(tmp_path / "home/local").cancel(row.name)


def test_a_numbered_job_takes_no_name_of_a_sweeps_run(tmp_path: Path) -> None:
    """`smoke-2` is the third run of a sweep of `smoke`, whichever of the two comes first."""
    assert next_name("s" * 63, set()) == f"{'s' * 60}-v2", "a name has 63 characters at most"
    words = ["k8s", "--recipe", "smoke", "--image", "registry.example/a:1"]
    sweep = ["--sweep", "lr=0.1,0.2,0.3", "--json"]
    for first, name in ((True, "smoke"), (False, "other")):
        with ApiServer() as server:
            places = {
                "KUBECONFIG": str(server.kubeconfig(tmp_path / "kubeconfig")),
                "LOCKSTEP_HOME": str(tmp_path / "home"),
            }
            own = [*words, "--name", name]
            before = None if first else lockstep(tmp_path, "submit", *own, *sweep, **places)
            for _ in range(3):
                done = lockstep(tmp_path, "submit", *own, "--new", "--json", **places)
                assert done.returncode == 0 and json.loads(done.stdout)["created"], done
            done = before or lockstep(tmp_path, "submit", *own, *sweep, **places)
            assert done.returncode == 0 and all(row["created"] for row in json.loads(done.stdout)), done
            done = lockstep(tmp_path, "wait", "k8s", name, "--sweep", "--timeout", "0", "--json", **places)
            assert [row["name"] for row in json.loads(done.stdout)] == [f"{name}-{run}" for run in range(3)], done


def test_a_sweep_on_kubernetes_has_its_table_from_the_logs(tmp_path: Path) -> None:
    with ApiServer() as server:
        places = {
            "KUBECONFIG": str(server.kubeconfig(tmp_path / "kubeconfig")),
            "LOCKSTEP_HOME": str(tmp_path / "home"),
        }
        words = ["--recipe", "smoke", "--image", "registry.example/a:1", "--set", "overrides.epochs=3"]
        lockstep(tmp_path, "submit", "k8s", *words, "--sweep", "lr=0.1,0.2,0.3", **places)
        lockstep(tmp_path, "submit", "k8s", *words, "--name", "smoke-x-0", **places)
        late = "Job smoke-1 has failed because it was active longer than specified deadline"
        ends = {"smoke-0": ("Succeeded", ""), "smoke-1": ("Failed", late)}
        for name, (kind, message) in ends.items():
            live = server.cluster.get("pytorchjobs", name)
            assert live is not None
            condition = {"type": kind, "status": "True", "message": message}
            server.cluster.put("pytorchjobs", {**live, "status": {"conditions": [condition]}})
            meta = {"name": f"{name}-worker-0", "labels": {"lockstep/job": name}}
            server.cluster.put(
                "pods", {"metadata": meta, "status": {"phase": "Succeeded" if kind == "Succeeded" else "Failed"}}
            )
        said = json.dumps({"event": "done", "accuracy": 0.875, "steps": 12})
        server.cluster.logs["smoke-0-worker-0"] = [
            f"2026-01-01T00:00:00Z [rank 0] {said}",
            "2026-01-01T00:00:01Z [rank 0] bye",
        ]
        done = lockstep(tmp_path, "wait", "k8s", "smoke", "--sweep", "--timeout", "0.5", **places)
        assert [line.split() for line in done.stdout.splitlines()] == [
            ["NAME", "LR", "STATE", "EXIT", "ACCURACY", "STEPS"], ["smoke-0", "0.1000", "succeeded", "0", "0.8750", "12"],
            ["smoke-1", "0.2000", "timed_out", "124"], ["smoke-2", "0.3000", "pending"],
        ], done  # fmt: skip
        assert done.returncode == 124, "and one has not ended"
        rows = json.loads(
            lockstep(tmp_path, "wait", "k8s", "smoke", "--sweep", "--timeout", "0", "--json", **places).stdout
        )
        assert rows[0] == {
            "name": "smoke-0", "lr": 0.1, "state": "succeeded", "exit_code": 0, "accuracy": 0.875, "best_accuracy": None,
            "test_loss": None, "train_loss": None, "steps": 12,
        }  # fmt: skip
        refused = lockstep(tmp_path, "wait", "k8s", "smok", "--sweep", **places)
        assert refused.returncode == 2 and "there is no sweep smok: no job is called smok-0" in refused.stderr, refused
