"""`lockstep exec` on a real SLURM: the rank's node, a part of an array, a container. Over ssh: test_slurm_laptop.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.processes import PYTHON, poll
from tests.slurm.conftest import LATER, Bench, lockstep

pytestmark = pytest.mark.promise("exec")

WAITS = (
    "import os, time\nprint('begun', flush=True)\nwhile not os.path.exists('GO'): time.sleep(0.05)\nprint('went on')"
)
BOUND = 60


def await_ranks(bench: Bench, name: str, ranks: int = 2) -> None:
    poll(lambda: sum("begun" in line for line in bench.backend.logs(name)) == ranks, BOUND, "the ranks")


def exec_output(name: str, command: str, rank: int = 0) -> str:
    """Returns the output of a shell command on a rank's node."""
    done = lockstep("exec", "slurm", name, "--rank", str(rank), "--", "sh", "-c", command)
    assert done.returncode == 0, done
    return done.stdout


def test_a_command_is_on_the_ranks_node_of_that_part_of_the_array(bench: Bench) -> None:
    specs = [
        bench.command(f"grid-{part}", WAITS, nodes=2, ranks_per_node=1, env={"PART": str(part)}) for part in (0, 1)
    ]
    bench.backend.sweep("grid", specs)
    for part in (0, 1):
        await_ranks(bench, f"grid-{part}")
        lines = [exec_output(f"grid-{part}", "echo $PART $RANK $SLURMD_NODENAME", rank).split() for rank in (0, 1)]
        assert [line[:2] for line in lines] == [[str(part), "0"], [str(part), "1"]], lines
        assert lines[0][2] != lines[1][2], "each on its node"
    bench.backend.submit(bench.command("later", WAITS, slurm=LATER))
    done = lockstep("exec", "slurm", "later", "--", "true")
    assert done.returncode == 2 and "later does not run" in done.stderr, done


IN_APPTAINER = {"container": "apptainer", "image": "/images/none.sif", "python": PYTHON}


def stand_in(bench: Bench, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Replaces Apptainer with a program that runs `first`, then the words after the image on the node."""
    programs = bench.folder / "bin"
    programs.mkdir()
    program = programs / "apptainer"
    program.write_text(f'#!/bin/sh\n{first}\nwhile [ "$1" != sh ]; do shift; done\nexec "$@"\n')
    program.chmod(0o755)
    for name in ("sh", "env"):
        Path(programs, name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
