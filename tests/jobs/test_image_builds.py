"""What the images install, and which image a submission takes. No engine is needed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.checkout import copy_to, environment
from tests.processes import ROOT, clean_env, run

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

pytestmark = pytest.mark.promise("images")


def test_a_submission_takes_the_image_that_was_pushed_of_this_revision(tmp_path: Path) -> None:
    """A job with GPUs takes the CUDA image. A copy of the checkout has the revision `unknown`."""
    here = copy_to(tmp_path / "lockstep")
    (here / "build").mkdir(exist_ok=True)
    env = environment(here, tmp_path / "home", KUBECONFIG=str(tmp_path / "none"))
    cuda_image, cpu_image = (f"localhost:5000/a@sha256:{digit * 64}" for digit in "12")

    def submit_output(notes: object, *words: str) -> str:
        (here / "build/images.json").write_text(json.dumps(notes))
        done = run(["make", "--silent", "submit-k8s", *words], env, cwd=here)
        assert done.code == 2 and "Traceback" not in done.output + done.error, done
        return done.output + done.error

    for notes in ([], {}, {"other": {"cuda": cuda_image}}, {"unknown": {"cpu": cpu_image}}, {"unknown": {"cuda": 7}}):
        output = submit_output(notes, "GPUS=4")
        assert "error: no CUDA image of this revision (unknown) was pushed: make image push " in output, output
    assert "no CUDA image" in submit_output({"unknown": {"cpu": cpu_image}}, "SET=gpus=4"), "it took the CPU image"
    notes = {"unknown": {"cuda": cuda_image, "cpu": cpu_image}}
    # The next error is the missing cluster.
    assert "kubeconfig" in submit_output(notes, "GPUS=4").lower() and "kubeconfig" in submit_output(notes).lower()
    (here / "own.yaml").write_text("name: own\nrecipe: smoke\nimage: localhost:5000/own:1\n")
    assert "kubeconfig" in submit_output({}, "JOB=own.yaml", "GPUS=1").lower(), (
        "a file that names an image is left alone"
    )
    (here / "build/images.json").write_text(json.dumps(notes))
    flags = [
        run([sys.executable, "docker/pushed.py", "find", "unknown", "job.yaml", *gpus], env, cwd=here).output.strip()
        for gpus in ([], ["gpus=4"])
    ]
    assert flags == [f"--image {cpu_image}", f"--image {cuda_image}"]
    command = "make --no-print-directory --dry-run submit-slurm NODES=2 GPUS=4 PROFILE=gpu-cluster SWEEP=lr=0.1,0.2"
    command_words = run(shlex.split(command), env, cwd=here).output.split()
    arguments = "slurm job.yaml --nodes 2 --gpus 4 --profile gpu-cluster --sweep lr=0.1,0.2"
    assert command_words[command_words.index("submit") + 1 :] == arguments.split()


ENGINE = """#!/bin/sh
for last; do :; done
case "$*" in
  "image ls "*) [ "$last" != me/lockstep ] || echo abc-cpu ;;
  "image inspect "*) cat "$(dirname "$0")/digests" ;;
esac
"""


def test_a_push_to_docker_hub_and_what_an_engine_tells_of_it(tmp_path: Path) -> None:
    """An engine lists `docker.io/me/lockstep` as `me/lockstep`. Its digest is recorded."""
    here = copy_to(tmp_path / "lockstep")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text(ENGINE)
    (tmp_path / "bin/docker").chmod(0o755)
    env = environment(here, tmp_path / "home")
    env["PATH"] = f"{tmp_path}/bin:{env['PATH']}"
    image, second_image = (f"me/lockstep@sha256:{digit * 64}" for digit in "12")
    words = [sys.executable, "-S", "docker/pushed.py", "push", "docker.io/me/lockstep", "abc"]  # -S: no package at all
    for digests, code in (([image], 0), ([], 2), (None, 2), ([image, second_image], 2)):
        (tmp_path / "bin/digests").write_text(json.dumps(digests))
        done = run(words, env, cwd=here)
        assert done.code == code and "Traceback" not in done.output and ("digests" in done.output) == bool(code), done
    assert json.loads((here / "build/images.json").read_text()) == {"abc": {"cpu": image}}


def test_a_password_in_an_argument_is_refused(tmp_path: Path) -> None:
    """PATH has no programs, so an accepted argument ends at the installation with 127."""

    def install(name: str, value: str) -> tuple[int, str]:
        env = {"PATH": str(tmp_path), name: value}
        words = ["/bin/sh", str(ROOT / "docker/install.sh"), "none.txt"]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=30)
        return done.returncode, done.stderr

    for name, value in (
        ("PIP_INDEX_URL", "https://me:secret@mirror.example/simple"),
        ("PIP_EXTRA_INDEX_URL", "https://mirror.example/a https://secret@mirror.example/b"),
    ):
        code, error = install(name, value)
        assert code == 2 and name in error and "secret" not in error, error
    code, error = install("PIP_INDEX_URL", "https://mirror.example/~me@team/simple")
    assert code == 127 and "password" not in error, "an @ in the path is none"


def lines(*files: str) -> set[str]:
    text = "\n".join((ROOT / "docker" / file).read_text() for file in files)
    return {line.split("=")[0].strip() for line in text.splitlines() if line and not line.startswith("#")}


@pytest.mark.parametrize(("variant", "excluded"), [("cuda", []), ("cpu", ["excluded-cpu.txt"])])
def test_the_lock_is_the_projects_with_a_hash_for_every_file(variant: str, excluded: list[str]) -> None:
    versions = {}
    for block in re.split(r"\n(?=[a-z0-9])", (ROOT / f"docker/requirements-{variant}.txt").read_text()):
        if match := re.match(r"([a-z0-9.-]+)==(\S+)", block):
            versions[match[1]] = Version(match[2])
            assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", block), block
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    exclusions, extras = lines(*excluded), project["optional-dependencies"]
    extra_requirements = [extras[name] for name in ("train", "slurm", "cloud")]
    requirements = [Requirement(text) for text in sum(extra_requirements, project["dependencies"])]
    for requirement in requirements:  # submitit runs in the container, too
        assert (requirement.name in versions) != (requirement.name in exclusions), f"{requirement.name}: make lock"
        assert requirement.name in exclusions or requirement.specifier.contains(
            versions[requirement.name], prereleases=True
        ), f"{requirement.name}: make lock"
    assert exclusions <= {requirement.name for requirement in requirements}, "an exclusion that excludes nothing"
    assert any(name.startswith("nvidia-") for name in versions) == (variant == "cuda")


FAKE = """#!{python}
import json, sys
words = " ".join(sys.argv[1:])
if words.startswith("info"):
    print(2)
elif words.startswith("ps --all --quiet --filter label=lockstep/job"):
    print("one two")
elif words.startswith("inspect"):
    state = {{"Status": "{state}", "ExitCode": 3}}
    print(json.dumps([{{"Id": "1", "Name": "/smoke-0", "State": state}}, {{"Id": "2", "Name": "/smoke-1", "State": state}}]))
"""
"""An engine whose two nodes stay in one state."""


@pytest.mark.parametrize(("state", "words"), [("running", ["--timeout", "0.1"]), ("exited", [])])
def test_smoke_says_what_it_waits_for_and_how_long(state: str, words: list[str], tmp_path: Path) -> None:
    """By default `make smoke` waits for the time of 150 container starts, or of 300 if four ranks share two cores."""
    docker = tmp_path / "docker"
    docker.write_text(FAKE.format(python=sys.executable, state=state))
    docker.chmod(0o755)
    done = run(
        [sys.executable, str(ROOT / "docker/smoke.py"), *words], clean_env(PATH=f"{tmp_path}:{os.environ['PATH']}")
    )
    if words:
        assert done.code == 2 and "smoke-0 (running) and smoke-1 (running) did not end within 0.1 s" in done.output, (
            done.output
        )
        assert "make smoke TIMEOUT=SECONDS" in done.output and "4 ranks" not in done.output
    else:
        assert re.search(
            r"a container starts in \d+\.\d s, and 4 ranks share 2 cores: the nodes have \d{3,} s", done.output
        ), done.output
        assert done.code == 1 and re.search(r"^NOT +exit codes of the nodes +3 3$", done.output, re.M), done.output
