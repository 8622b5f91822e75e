"""python -m tests [SUITE|FILE …]: `make test SUITE=…`. The table of the suites, what each needs, and what was not run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Suite(NamedTuple):
    says: str
    words: str
    """For pytest; `-n` with as many processes as `WORKERS` says where the suite may share its tests out."""
    needs: str = "nothing"
    env: dict[str, str] = {}  # noqa: RUF012 - no suite changes it


SHARED = "-n WORKERS -p tests.sharing --dist loadscope "
SCOPES = "-n WORKERS --dist loadscope "
SUITES = {
    "default": Suite("unit tests, and jobs", SHARED + "-m 'not containers' tests/jobs tests/unit"),
    "training": Suite("real runs on 2 and 3 ranks", SHARED + "tests/training"),
    "fast": Suite(
        "unit tests and one real run",
        SCOPES + "tests/unit tests/training/test_launching.py::test_two_ranks_under_lockstep_run",
    ),
    "own": Suite("loops of your own on a Session", SHARED + "tests/own", "Open MPI for one row"),
    "sync": Suite("other launchers, and scripts that call the strategies", SCOPES + "tests/sync", "Open MPI"),
    "exercises": Suite(
        "the modules' recipes, and the commands of README and the tutorials",
        "-n WORKERS --dist worksteal tests/exercises",
    ),
    "k8s": Suite("manifests, and an API server and operator emulated over real sockets", SHARED + "tests/kubernetes"),
    "faults": Suite("killed, cut off, starved and hostile runs", SHARED + "tests/faults", "root"),
    "prometheus": Suite(
        "a real Prometheus, and the report",
        SCOPES + "tests/prometheus tests/report",
        "Debian: prometheus prometheus-node-exporter",
    ),
    "objects": Suite(
        "checkpoints in moto's S3 server, behind a proxy that disturbs",
        "-n WORKERS tests/objects",
        "a package index, or uv's cache",
    ),
    "packaging": Suite(
        "the wheel and the sdist, installed, and a new project", SCOPES + "tests/packaging -rs", "a package index"
    ),
    "docs": Suite("whether the site names everything", "-q tests/docs", "make docs"),
    "gpu": Suite(
        "runs that are recorded, killed and hung up on this machine's GPUs", "tests/gpu -rs --device cuda", "a GPU"
    ),
    "slurm": Suite(
        "a real SLURM of two nodes",
        "-n 3 --dist loadfile --no-loadscope-reorder tests/slurm/test_slurm_survival.py tests/slurm",  # the longest first
        "root, Debian: slurm-wlm slurmdbd mariadb-server munge openssh-server tcsh fish; a package index, or uv's cache",
    ),
    "containers": Suite(
        "images and Compose jobs in a real engine",
        "-n 2 --dist loadfile --no-loadscope-reorder -m 'containers and not cuda_image' tests/containers tests/jobs",
        "docker (tests/containers/ci.sh starts Debian's)",
    ),
    "cuda-image": Suite("the CUDA image (gigabytes)", "-s -m cuda_image tests/containers", "docker"),
}
NIGHTLY = [
    Suite(
        "programs of pages, and the worked example",
        "-n WORKERS -m nightly tests/exercises tests/training tests/own tests/packaging",
    ),
    Suite("every request to the object store", "-m nightly tests/objects"),
    Suite("the whole GPU rehearsal", SCOPES + "tests/gpu_rehearsal"),
    Suite("the runs of the suite gpu, on the CPU", "-n WORKERS tests/gpu"),
    Suite("benchmarks' programs", "-n WORKERS tests/benchmarks"),
    Suite(
        "random scenarios, damaged files",
        SCOPES + "tests/faults/test_scenarios.py tests/faults/test_hostile_files.py",
        env={"LOCKSTEP_SCENARIOS": "50", "LOCKSTEP_HOSTILE": "3000"},
    ),
]


def run(name: str, suite: Suite, more: list[str] | None = None) -> int:
    """One suite, to its end; its exit code. The first line comes at once, before pytest has imported anything."""
    workers = os.environ.get("WORKERS", "4")  # two more than cores of a small machine, as they also wait
    words = shlex.split(suite.words.replace("WORKERS", workers))
    print(f"{name}: {suite.says}", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", *words, *(more or [])]
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **suite.env}, check=False).returncode
    print(f"{name} ended with {code} after {time.monotonic() - began:.0f} s", flush=True)
    return code


def nightly() -> int:
    os.environ["LOCKSTEP_NIGHTLY"] = "1"
    codes = [run("nightly", suite) for suite in NIGHTLY]
    return int(any(codes))


def main(words: list[str]) -> int:
    if words in ([], ["list"]):
        for name, suite in SUITES.items():
            print(f"  {name:<14} {suite.says} (needs {suite.needs})")
        return 0
    if words == ["nightly"]:
        return nightly()
    codes = []
    for word in words:
        if word in SUITES:
            codes.append(run(word, SUITES[word]))
        elif (ROOT / word.partition("::")[0]).exists():
            codes.append(run(word, Suite("as named", "-p tests.sharing"), [word]))
        else:
            print(f"error: no suite and no file is called {word!r}: make test SUITE=list", file=sys.stderr)
            return 2
    if "default" in words:
        print("not run, each with `make test SUITE=…`:")
        for name, suite in SUITES.items():
            if name not in ("fast", *words):
                print(f"  {name:<14} {suite.says} (needs {suite.needs})")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
