"""`lockstep exec` on a real SLURM: the rank's node, a part of an array, signals, a terminal, a container."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from lockstep.jobs.foreground import Streams
from lockstep.jobs.slurm import beside, render
from lockstep.jobs.slurm.transport.local import LOCAL
from lockstep.training.contract import UserError
from tests.processes import PYTHON, poll
from tests.slurm.conftest import Bench
from tests.terminal import at_a_terminal, until_shown

WAITS = "import time; print('begun', flush=True); time.sleep(600)"
PROGRAM = "import sys; sys.argv[0] = 'lockstep'; from lockstep.jobs.cli.main import main; main()"
TRAPS = "trap 'echo got; exit 5' INT; echo ready; while :; do sleep 0.05; done"
BOUND = 60


def begun(bench: Bench, name: str, ranks: int) -> None:
    poll(lambda: sum("begun" in line for line in bench.backend.logs(name)) == ranks, BOUND, "the ranks")


def said(bench: Bench, name: str, command: str, rank: int = 0) -> str:
    """The output of a shell command beside a rank."""
    with (bench.folder / "said").open("w+") as out, open(os.devnull) as nothing:
        streams = Streams(nothing.fileno(), out.fileno(), out.fileno())
        assert bench.backend.execute(name, ["sh", "-c", command], rank, streams) == 0, out.seek(0) or out.read()
        out.seek(0)
        return out.read()


def test_a_command_is_on_the_ranks_node_of_that_part_of_the_array(bench: Bench) -> None:
    specs = [
        bench.command(f"grid-{part}", WAITS, nodes=2, ranks_per_node=1, env={"PART": str(part)}) for part in (0, 1)
    ]
    bench.backend.sweep("grid", specs)
    for part in (0, 1):
        begun(bench, f"grid-{part}", 2)
        found = [said(bench, f"grid-{part}", "echo $PART $RANK $SLURMD_NODENAME", rank).split() for rank in (0, 1)]
        assert [line[:2] for line in found] == [[str(part), "0"], [str(part), "1"]], found
        assert found[0][2] != found[1][2], "each on its node"
    bench.backend.submit(bench.command("later", WAITS, slurm={"patch": {"begin": "now+1hour"}}))
    with pytest.raises(UserError, match=r"later has not started: pending .*; wait until it runs"):
        bench.backend.execute("later", ["true"])


def test_signals_and_a_terminal_reach_the_command(bench: Bench) -> None:
    bench.backend.submit(bench.command("long", WAITS))
    begun(bench, "long", 2)
    words = [PYTHON, "-c", PROGRAM, "exec", "slurm", "long", "--rank", "1", "--"]
    process = subprocess.Popen([*words, "sh", "-c", TRAPS], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=BOUND)[0] == b"got\n" and process.returncode == 5
    finally:
        process.kill()
        process.wait()
    with at_a_terminal([*words, "sh", "-c", f"stty size; echo rank $RANK; {TRAPS}"]) as (process, ours, _):
        shown = until_shown(ours, b"ready", BOUND)
        assert b"33 77" in shown and b"rank 1" in shown, shown
        os.write(ours, b"\x03")
        assert process.wait(BOUND) == 5


def test_in_apptainer_the_command_is_in_a_container_of_the_jobs_image(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of its own, from which the rank's process may not be seen."""
    programs = bench.folder / "bin"
    programs.mkdir()
    (programs / "apptainer").write_text(
        '#!/bin/sh\necho "$*" >> "$(dirname "$0")/words"\n'
        'while [ "$1" != sh ] && [ "$1" != env ]; do shift; done\n'
        '[ "$1" = env ] && exec unshare --pid --fork --mount-proc "$@"\nexec "$@"\n'
    )
    (programs / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    slurm = {"container": "apptainer", "image": "/images/none.sif", "python": PYTHON}
    bench.backend.submit(bench.command("boxed", WAITS, slurm=slurm))
    begun(bench, "boxed", 2)
    shown = said(bench, "boxed", "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCKSTEP_RUN_DIR; ls -d /proc/[0-9]* | wc -l", 1)
    assert shown.splitlines()[0] == f"1 1 2 {bench.folder}/boxed" and int(shown.splitlines()[1]) < 10, shown
    used = (programs / "words").read_text().splitlines()[-1]
    assert used.startswith("exec --bind ") and " /images/none.sif env -u " in used, used


def test_under_pyxis_the_step_has_the_jobs_image_and_folders(bench: Bench) -> None:
    """Rendered only: there is no pyxis here."""
    slurm = {"container": "pyxis", "image": "/images/a.sqsh", "mounts": ["/scratch"]}
    spec = bench.command("boxed", WAITS, slurm=slurm)
    options, _ = render.container(spec, PurePosixPath("/shared/submitit"), LOCAL.place())
    words = beside.step(options, "7", "node1")
    assert words[:3] == ["srun", "--jobid=7", "--overlap"] and "--nodelist=node1" in words
    assert "--container-image=/images/a.sqsh" in words
    mounts = next(word for word in words if word.startswith("--container-mounts="))
    assert "/shared/submitit:/shared/submitit" in mounts and "/scratch:/scratch" in mounts


def test_a_job_that_ends_ends_the_command(bench: Bench) -> None:
    """It keeps no node: it is a step of the job."""
    go = bench.folder / "go"
    ends = f"import os, time; print('begun', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)"
    bench.backend.submit(bench.command("short", ends))
    begun(bench, "short", 2)
    words = [PYTHON, "-c", PROGRAM, "exec", "slurm", "short", "--", "sh", "-c", "echo ready; exec sleep 600"]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        Path(go).touch()
        assert process.wait(BOUND) != 0
        assert bench.wait("short").state == "succeeded"
    finally:
        process.kill()
        process.communicate()
