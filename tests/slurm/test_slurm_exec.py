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


def begun(bench: Bench, name: str, ranks: int = 2) -> None:
    poll(lambda: sum("begun" in line for line in bench.backend.logs(name)) == ranks, BOUND, "the ranks")


def said(name: str, command: str, rank: int = 0) -> str:
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
        begun(bench, f"grid-{part}")
        found = [said(f"grid-{part}", "echo $PART $RANK $SLURMD_NODENAME", rank).split() for rank in (0, 1)]
        assert [line[:2] for line in found] == [[str(part), "0"], [str(part), "1"]], found
        assert found[0][2] != found[1][2], "each on its node"
    bench.backend.submit(bench.command("later", WAITS, slurm=LATER))
    done = lockstep("exec", "slurm", "later", "--", "true")
    assert done.returncode == 2 and "later has not started" in done.stderr, done


def test_in_apptainer_the_command_is_in_a_container_of_the_jobs_image(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command runs in its own container, from which the rank's process may not be visible."""
    stand_in(
        bench, monkeypatch, 'echo "$*" >> "$(dirname "$0")/words"',
        '[ "$1" = env ] && exec unshare --pid --fork --mount-proc "$@"', until="env",
    )  # fmt: skip
    bench.backend.submit(bench.command("boxed", WAITS, slurm=IN_APPTAINER))
    begun(bench, "boxed")
    shown = said("boxed", "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCKSTEP_RUN_DIR; ls -d /proc/[0-9]* | wc -l", 1)
    assert shown.splitlines()[0] == f"1 1 2 {bench.folder}/boxed" and int(shown.splitlines()[1]) < 10, shown
    used = (bench.folder / "bin/words").read_text().splitlines()[-1]
    assert used.startswith("exec --bind ") and f" {IN_APPTAINER['image']} env -u " in used, used


IN_APPTAINER = {"container": "apptainer", "image": "/images/none.sif", "python": PYTHON}


def stand_in(bench: Bench, monkeypatch: pytest.MonkeyPatch, first: str, then: str = ":", until: str = "sh") -> None:
    """In Apptainer's place: a program that does `first`, and runs the words behind the image on the node."""
    programs = bench.folder / "bin"
    programs.mkdir()
    program = programs / "apptainer"
    looking = f'while [ "$1" != sh ] && [ "$1" != {until} ]; do shift; done'
    program.write_text(f'#!/bin/sh\n{first}\n{looking}\n{then}\nexec "$@"\n')
    program.chmod(0o755)
    for name in ("sh", "env"):
        Path(programs, name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
