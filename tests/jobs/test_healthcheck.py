"""The images' health check: it asks every rank that the launcher has started, where it can."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import PYTHON, ROOT, Result, clean_env, poll, run, started


def check(proc: Path, **env: str) -> Result:
    return run([sys.executable, str(ROOT / "docker/healthcheck.py"), str(proc)], clean_env(**env), timeout=60)


def two_ports() -> int:
    """A free port whose successor is free, too; none of those that the system deals out meanwhile."""
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise AssertionError("no two free ports in a row")


def family(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    with contextlib.suppress(OSError):  # a short-lived child, git for one
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from family(int(child))


@pytest.mark.promise("metrics")
def test_a_rank_that_no_longer_answers_is_unhealthy(tmp_path: Path) -> None:
    """In a container /proc shows the job alone; here a folder of links to its processes does."""
    port = two_ports()
    words = ["--ranks", "2", "--grace", "5", "run", "smoke", "--run-dir", str(tmp_path / "run")]
    words += ["--set", "epochs=100000", "threads=1", f"metrics.port={port}"]
    env = clean_env(TMPDIR=str(tmp_path))  # what a killed launcher leaves behind goes with this folder
    with started([PYTHON, "-m", "lockstep.training", "launch", *words], env) as launcher:
        endpoints = tmp_path / "run/endpoints"
        poll(lambda: len(list(endpoints.glob("rank-*.json"))) == 2, 60, "both ranks serve")
        ranks = [json.loads(path.read_text())["pid"] for path in sorted(endpoints.glob("rank-*.json"))]
        proc = tmp_path / "proc"
        proc.mkdir()
        for pid in family(launcher.pid):
            (proc / str(pid)).symlink_to(f"/proc/{pid}")
        assert all((proc / str(pid)).is_symlink() for pid in ranks)
        try:
            found_well = check(proc)
            assert found_well.code == 0, found_well
            os.kill(ranks[1], signal.SIGSTOP)
            found_still = check(proc)
            assert found_still.code == 1 and f"local rank 1 does not answer on port {port + 1}" in found_still.output
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)  # not the launcher's group


@pytest.mark.parametrize("words", ["metrics.enabled=False", "enabled=no", "metrics.port=0", ""])
def test_what_serves_nothing_on_known_ports_is_not_asked(tmp_path: Path, words: str) -> None:
    rank = tmp_path / "17"
    rank.mkdir()
    (rank / "environ").write_text("LOCAL_RANK=0\0LOCAL_WORLD_SIZE=2\0")
    (rank / "cmdline").write_text("\0".join(["python", "-m", "lockstep.training", "run", "smoke", "--set", words, ""]))
    found = check(tmp_path, LOCKSTEP_METRICS_PORT=str(two_ports()))
    assert (found.code, "local rank 0 does not answer" in found.output) == ((0, False) if words else (1, True)), found
    assert check(tmp_path, LOCKSTEP_METRICS_PORT="0").code == 0
