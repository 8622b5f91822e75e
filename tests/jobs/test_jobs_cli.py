"""`lockstep` as people and scripts use it: exit codes, JSON fields, one-line errors, and how fast it answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_cluster import Fault
from k8s_server import ApiServer

from tests import product
from tests.jobs import helpers
from tests.processes import PYTHON, ROOT, Result, clean_env, run, started


def places(folder: Path) -> dict[str, str]:
    return {"KUBECONFIG": str(folder / "kubeconfig"), "LOCKSTEP_HOME": str(folder / "home")}


def start(folder: Path, *words: str, **more: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **places(folder), **more}
    return started([PYTHON, "-c", product.PROGRAM, *words], env, folder, stderr=subprocess.PIPE)


def process(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    with start(folder, *words, **more) as running:
        out, err = running.communicate(timeout=60)
    return subprocess.CompletedProcess(words, running.returncode, out, err)


def lockstep(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return helpers.lockstep(folder, *words, **places(folder))


def job(folder: Path, text: str = "name: smoke\nrecipe: smoke\nimage: localhost:5000/a:1\nnodes: 2\n") -> str:
    (folder / "job.yaml").write_text(text)
    return str(folder / "job.yaml")


def submitted_job(folder: Path, server: ApiServer) -> dict[str, Any]:
    """Submits the job `smoke` and returns its object in the cluster."""
    lockstep(folder, "submit", "k8s", job(folder))
    live = server.cluster.get("pytorchjobs", "smoke")
    assert live is not None
    return live


def pod(server: ApiServer, number: int = 0, **status: Any) -> None:
    server.cluster.pod("smoke", f"smoke-worker-{number}", status)


SCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}


def test_render_is_what_submit_applies(server: ApiServer, tmp_path: Path) -> None:
    shown = process(tmp_path, "render", "k8s", job(tmp_path))
    flags = ["--name", "smoke", "--recipe", "smoke", "--image", "localhost:5000/a:1", "--nodes", "2"]
    assert lockstep(tmp_path, "render", "k8s", *flags).stdout == shown.stdout, "flags and file are one job"
    done = process(tmp_path, "submit", "k8s", job(tmp_path), "--json")
    assert done.returncode == 0 and json.loads(done.stdout).keys() == {"name", "created", "where", "restarted"}, done
    assert "warning: LS" in done.stderr
    sent, policy = [body for method, _, _, body in server.cluster.requests if method == "POST"]
    assert sent["spec"]["runPolicy"].pop("suspend") is True, "until its policy is there"
    for sent_object, rendered in zip((policy, sent), yaml.safe_load_all(shown.stdout), strict=True):
        assert (sent_object["apiVersion"], sent_object["spec"]) == (rendered["apiVersion"], rendered["spec"])
        assert rendered["metadata"]["labels"] == sent_object["metadata"]["labels"]


def test_waits_that_end_first_say_124_or_3(server: ApiServer, tmp_path: Path) -> None:
    submitted_job(tmp_path, server)
    assert lockstep(tmp_path, "wait", "k8s", "smoke", "--timeout", "0.2").returncode == 124
    pod(server, phase="Pending", conditions=[SCHEDULED])
    assert lockstep(tmp_path, "wait", "k8s", "smoke", "--timeout", "0.2").returncode == 3
    assert lockstep(tmp_path, "status", "k8s", "smoke").returncode == 3


def test_a_wait_says_on_stderr_what_changes(server: ApiServer, tmp_path: Path) -> None:
    """A queued job's new reason is printed, too: the job may never start."""
    live = submitted_job(tmp_path, server)

    def with_status(kind: str) -> dict[str, Any]:
        return {**live, "status": {"conditions": [{"type": kind, "status": "True"}]}}

    with start(tmp_path, "wait", "k8s", "smoke", "--timeout", "60", "--json") as waiting:
        bound = threading.Timer(60, waiting.kill)
        bound.start()
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("smoke: pending – ")
        pod(server, phase="Pending", conditions=[SCHEDULED])
        server.cluster.put("pytorchjobs", with_status("Created"))  # as its operator does when a pod changes
        assert waiting.stderr.readline() == "smoke: unschedulable – 0/2 pods are placed: 0/2 nodes\n"
        for number in (0, 1):
            pod(server, number, phase="Running")
        server.cluster.put("pytorchjobs", with_status("Running"))
        between = list(itertools.takewhile(lambda line: not line.startswith("smoke: running"), waiting.stderr))
        assert len(between) <= 2 and all(line.startswith("smoke: pending") for line in between), between
        server.cluster.put("pytorchjobs", with_status("Succeeded"))
        out, err = waiting.communicate(timeout=60)
        bound.cancel()
    status = json.loads(out)
    assert waiting.returncode == 0 and status["state"] == "succeeded" and err == "", "nothing twice"
    assert status.keys() == {"name", "state", "reason", "ranks", "exit_code", "goodput", "slow_rank", "final"}
    (row,) = json.loads(lockstep(tmp_path, "list", "k8s", "--json").stdout)
    assert row.keys() == {"name", "state", "nodes", "created"}


def test_a_file_that_differs_from_the_job_that_was_submitted_is_named(server: ApiServer, tmp_path: Path) -> None:
    submitted_job(tmp_path, server)
    dry_run = lockstep(tmp_path, "submit", "k8s", job(tmp_path), "--nodes", "4", "--dry-run")
    assert dry_run.returncode == 2 and "another spec (nodes: 2 → 4)" in dry_run.stdout, dry_run
    for nodes in (2, 4):
        file = job(tmp_path, f"name: smoke\nrecipe: smoke\nimage: localhost:5000/a:1\nnodes: {nodes}\n")
        for verb, code, *words in (("status", 0), ("wait", 124, "--timeout", "0"), ("logs", 2)):
            done = lockstep(tmp_path, verb, "k8s", file, *words)
            has_warning = f"warning: the job smoke is another one than that of {file}: nodes: 2 → 4" in done.stderr
            assert (done.returncode, has_warning) == (code, nodes == 4), done


def test_where_a_job_goes_is_remembered_and_no_part_of_what_it_is(server: ApiServer, tmp_path: Path) -> None:
    """The kubeconfig names another namespace."""
    server.kubeconfig(tmp_path / "kubeconfig", namespace="elsewhere")
    text = "name: smoke\nrecipe: smoke\nimage: localhost:5000/a:1\n"
    assert lockstep(tmp_path, "submit", "k8s", job(tmp_path, f"{text}k8s: {{namespace: team}}\n")).returncode == 0
    shown = lockstep(tmp_path, "status", "k8s", "smoke")
    assert shown.returncode == 0 and "smoke: pending" in shown.stdout, shown
    assert "submitted from here with --namespace team" in shown.stderr
    again = lockstep(tmp_path, "submit", "k8s", job(tmp_path, text), "--namespace", "team", "--context", "here")
    assert (again.returncode, again.stdout.partition(" (")[0]) == (0, "smoke: is there already, with the same spec"), (
        again
    )
    assert lockstep(tmp_path, "logs", "k8s", "smoke", "--namespace", "elsewhere").returncode == 2, "a flag wins"
    assert lockstep(tmp_path, "cancel", "k8s", "smoke").returncode == 0 and not server.cluster.all("pytorchjobs")
    server.kubeconfig(tmp_path / "kubeconfig")
    lockstep(tmp_path, "submit", "k8s", job(tmp_path, text))
    assert "submitted from here" not in lockstep(tmp_path, "status", "k8s", "smoke").stderr


def test_lint_the_rules_and_the_schema(tmp_path: Path) -> None:
    done = lockstep(tmp_path, "lint", job(tmp_path, "name: a\nrecipe: smoke\n"), "--set", "env.API_TOKEN=x")
    assert (done.returncode, re.findall(r"L\w\d\d\d", done.stdout)) == (1, ["LJ006"]), (
        "what all backends have in common"
    )
    rules = json.loads(lockstep(tmp_path, "lint", "--rules", "--json").stdout)
    assert len({rule["id"] for rule in rules}) == len(rules) == 16 and all(rule["title"] for rule in rules)
    schema = json.loads(lockstep(tmp_path, "schema").stdout)
    assert schema["additionalProperties"] is False and "nodes" in schema["properties"]


@pytest.mark.promise("bad-input")
def test_control_codes_reach_no_terminal(server: ApiServer, tmp_path: Path) -> None:
    submitted_job(tmp_path, server)
    pod(server, phase="Running")
    server.cluster.logs["smoke-worker-0"] = ["2026-01-01T00:00:00Z [rank 0] \x1b]0;owned\x07 \x1b[2Jgone\u202e"]
    done = lockstep(tmp_path, "logs", "k8s", "smoke", "--rank", "0")
    assert done.stdout == "\\x1b]0;owned\\x07 \\x1b[2Jgone\\u202e\n"
    server.cluster.faults.append(Fault("GET", "pytorchjobs", status=422, message="no\x1b[31m"))
    refused = lockstep(tmp_path, "status", "k8s", "smoke")
    assert refused.returncode == 2 and refused.stderr.endswith("no\\x1b[31m\n")


@pytest.mark.promise("bad-input")
@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ("submit nowhere --recipe smoke", "'nowhere'"), ("list lokal", "did you mean 'local'"), ("render k8s missing.yaml", "missing.yaml"),
        ("render k8s --recipe smok", "did you mean 'smoke'"), ("render k8s --recipe smoke --set nodse=2", "did you mean 'nodes'"),
        ("render k8s --recipe smoke --set overrides.lrr=2", "did you mean 'lr'"), ("render local --recipe smoke", "k8s, slurm and compose"),
        ("render slurm --recipe smoke --profile none", "'none'"),
        ("status local nothing", "nothing"), ("status slurm nothing", "nothing"), ("list local --namespace x", "--namespace"),
        ("exec local long ls -l", "No such option"),
        ("list local --host x", "--host"), ("status slurm a --host -oProxyCommand=x", "slurm.host"), ("status k8s", "Missing argument"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_code_2(tmp_path: Path, words: str, fragment: str) -> None:
    done = lockstep(tmp_path, *words.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert fragment in done.stderr and done.stderr.startswith("error: ")


# Standard output and errors.


def _typed(words: str, redirections: str, folder: Path) -> Result:
    """Runs `lockstep` in a shell with these redirections."""
    command = f"{PYTHON} -c {shlex.quote(product.PROGRAM)} {words} {redirections}"
    return run(["bash", "-c", command], clean_env(LOCKSTEP_HOME=str(folder / "home")), 60, folder)


def test_who_reads_the_answer_has_left(tmp_path: Path) -> None:
    """The reader closes the pipe, as `head` does. The exit code is not 1, which means that a job failed."""
    code = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); " + product.PROGRAM
    done = run([PYTHON, "-c", code, "schema"], clean_env(LOCKSTEP_HOME=str(tmp_path / "home")), 60, tmp_path)
    assert done.code == 141 and "Traceback" not in done.output, done


@pytest.mark.parametrize("words", ["schema", "settings smoke", "status local none"])
def test_what_the_answer_is_written_to_is_full_or_closed(words: str, tmp_path: Path) -> None:
    error = words.startswith("status")
    done = _typed(words, "> /dev/full", tmp_path)
    message = "there is no local job" if error else "No space left on device"
    assert done.code == 2 and message in done.output and "Traceback" not in done.output, done
    for redirection in ("> /dev/full 2>&1", "2>&-" if error else ">&-"):
        done = _typed(words, redirection, tmp_path)
        closed = redirection == ">&-"
        assert (done.code, done.output) == (0 if closed else 2, ""), (redirection, done)
