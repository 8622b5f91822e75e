"""The CPU image as it was built: its layers, its files, its user, and what it refuses."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import IO, Any

import pytest

from tests.engine import SENTINEL, docker, inspect
from tests.processes import ROOT

pytestmark = [pytest.mark.containers, pytest.mark.promise("images")]
COMPILERS = {"cc", "gcc", "g++", "c++", "clang", "clang++", "tcc", "nvcc", "ld", "as"}


def run(image: str, *words: str, options: tuple[str, ...] = (), timeout: float = 600) -> tuple[int, str]:
    """Runs a container and removes it. Returns (exit code, output)."""
    done = subprocess.run(
        ["docker", "run", "--rm", *options, image, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=timeout,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def files(cpu_image: str) -> list[tarfile.TarInfo]:
    """Everything in the image's file system."""
    container = docker("create", cpu_image).strip()
    try:
        with subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as process:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                members = list(archive)
            assert process.wait() == 0
    finally:
        docker("rm", container)
    assert len(members) > 5000, "a file system"
    return members


def test_nothing_is_writable_by_everybody_lends_rights_or_compiles(files: list[tarfile.TarInfo]) -> None:
    for item in files:
        if item.issym() or item.isdev():
            continue
        assert not item.mode & 0o4000 and not (item.isfile() and item.mode & 0o2000), f"{item.name} is setuid"
        sticky = item.isdir() and item.mode & 0o1000
        assert not item.mode & 0o002 or sticky, f"{item.name} may be written by everybody"
        assert not (Path(item.name).name in COMPILERS and "bin" in item.name.split("/")), f"{item.name} is a compiler"
    real = [item for item in files if not item.issym() and not item.isdev() and not item.mode & 0o1000]
    writable = {item.name.strip("/") for item in real if item.uid == 1000 or (item.gid == 0 and item.mode & 0o020)}
    assert writable == {"runs", "data"}, "what the user may write"


@pytest.mark.parametrize(("target", "flavour"), [("image", "cuda"), ("image-cpu", "cpu")])
def test_what_a_build_is_asked_for(target: str, flavour: str, engine: str, tmp_path: Path) -> None:
    """The lock file of torch's CPU build is for x86-64 only: on arm64 the engine must emulate it."""
    inputs = {"CA": tmp_path / "ca.pem", "PIP_CONF": tmp_path / "pip.conf", "WHEELS": tmp_path}
    for file in (inputs["CA"], inputs["PIP_CONF"]):
        file.write_text(SENTINEL)
    words = ["make", "--silent", target, "BUILD_FLAGS=--print", "PLATFORM=linux/arm64", "IMAGE=localhost:5000/a"]
    words += [f"{name}={value}" for name, value in inputs.items()]
    env = {**os.environ, "PIP_INDEX_URL": f"https://me:{SENTINEL}@mirror.example/simple"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and SENTINEL not in done.stdout, done.stdout + done.stderr
    plan = json.loads(done.stdout)["target"][flavour]
    assert plan["platforms"] == [{"cuda": "linux/arm64", "cpu": "linux/amd64"}[flavour]]
    assert plan["args"]["FLAVOUR"] == flavour and plan["args"]["PIP_NO_INDEX"] == "1" and plan["target"] == "runtime"
    assert plan["contexts"] == {"wheels": str(tmp_path)}
    assert {str(inputs["CA"]), str(inputs["PIP_CONF"])} <= set(re.findall(r"/[^,\"]+", json.dumps(plan["secret"])))
    assert plan["tags"][1] == {"cuda": "localhost:5000/a:latest", "cpu": "localhost:5000/a:cpu"}[flavour]
    text = (ROOT / "docker/Dockerfile").read_text()
    assert "--mount=type=secret,id=ca " in text and "--mount=type=secret,id=pip " in text


def test_only_what_is_named_enters_a_build(engine: str, tmp_path: Path) -> None:
    context, out = tmp_path / "context", tmp_path / "out"
    shutil.copytree(ROOT / "docker", context / "docker")
    for name in ("lockstep", "training", "jobs"):
        shutil.copytree(ROOT / name, context / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".dockerignore"):
        shutil.copy(ROOT / name, context / name)
    secrets = (".env", "runs/x/run.yaml", "data/x", "docker/secret.txt", "training/.token", "jobs/a.pyc", ".git/config")
    for name in secrets:
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text("secret")
    (context / "all.Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    docker("build", "-f", str(context / "all.Dockerfile"), "--output", f"type=local,dest={out}", str(context))
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    folders = {"docker", "lockstep", "training", "jobs", "pyproject.toml", "README.md", "LICENSE"}
    assert {name.split("/")[0] for name in files} == folders
    assert {name for name in files if name.startswith("docker/")} == {
        "docker/harden.sh", "docker/install.sh", "docker/healthcheck.py", "docker/requirements-cpu.txt",
        "docker/requirements-cuda.txt",
    }  # fmt: skip
    assert not any("secret" in (out / name).read_text(errors="ignore")[:6] for name in files)


def search(image: IO[bytes], needle: bytes) -> tuple[list[str], int]:
    """Returns (members of a saved image that hold `needle`, bytes read). Engines save layers plain or compressed."""
    members, total = [], 0
    with tarfile.open(fileobj=image, mode="r|") as archive:
        for member in archive:
            if not member.isfile():
                continue
            file: Any = archive.extractfile(member)
            magic = file.peek(4)[:4]
            assert magic != b"\x28\xb5\x2f\xfd", f"{member.name} is compressed with zstd, which nothing here reads"
            content = gzip.GzipFile(fileobj=file) if magic[:2] == b"\x1f\x8b" else file
            rest = b""
            while chunk := content.read(1 << 22):
                if needle in rest + chunk:
                    members.append(member.name)
                rest, total = chunk[-len(needle) :], total + len(chunk)
    return members, total


def test_no_secret_is_in_any_layer(cpu_image: str, files: list[tarfile.TarInfo]) -> None:
    """The build's secrets, certificates and a pip.conf, contain a sentence that no layer may contain."""
    with subprocess.Popen(["docker", "save", cpu_image], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        members, total = search(process.stdout, SENTINEL.encode())
        assert process.wait() == 0
    assert members == [] and total > 5e8, "all layers"
    names = {Path(item.name).name for item in files}
    assert not names & {".env", ".git", ".netrc", "id_rsa", ".pypirc", "pip.conf", ".docker"}
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", cpu_image)
    assert "pip.conf" not in history and "://" not in history.replace("https://download.pytorch.org/whl/cpu", "")


def test_the_secret_pip_conf_decides_where_packages_come_from(engine: str, tmp_path: Path) -> None:
    """The secret's package index has no server: pip installs nothing, whatever the arguments are."""
    settings = tmp_path / "pip.conf"
    settings.write_text("[global]\nindex-url = http://127.0.0.1:9/simple\nretries = 0\n")
    output = docker(
        "build", "-f", str(ROOT / "docker/Dockerfile"), "--build-arg", "FLAVOUR=cpu",
        "--target", "dependencies", "--no-cache-filter", "dependencies", "--progress", "plain",
        "--secret", f"id=pip,src={settings}", "--build-arg", "PIP_INDEX_URL=https://pypi.org/simple",
        "--build-arg", f"BASE_IMAGE={os.environ.get('BASE_IMAGE') or 'python:3.11-slim-bookworm'}", str(ROOT),
        check=False, timeout=300,
    )  # fmt: skip
    assert "No matching distribution found" in output and "127.0.0.1:9" in output, output[-2000:]
    assert "pypi.org" not in output.replace("PIP_INDEX_URL=https://pypi.org/simple", ""), output[-2000:]


def test_who_it_is_and_what_it_refuses(cpu_image: str) -> None:
    config = inspect(cpu_image)[0]["Config"]
    assert config["User"] == "1000:0"
    assert config["Entrypoint"] == ["python", "-m", "lockstep.training", "launch"], "exec form: PID 1 gets TERM"
    assert config["Healthcheck"]["Test"][:2] == ["CMD", "python"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    labels = config["Labels"]
    assert labels["org.opencontainers.image.revision"] == (head or "unknown")
    assert labels["org.opencontainers.image.version"] and labels["org.opencontainers.image.source"]
    one = ("--ranks", "1", "run")
    for words, expected, message in (
        ((), 0, "usage: python -m lockstep.training launch"), (("run", "smok"), 2, "did you mean 'smoke'"),
        ((*one, "smoke", "--run-dir", "/runs/x", "--set", "compile=true"), 2, "C++ compiler"),
        ((*one, "resnet18", "--run-dir", "/runs/x", "--set", "data.source=digits"), 2, "torchvision"),
    ):  # fmt: skip
        code, output = run(cpu_image, *words)
        assert code == expected and message in output and "Traceback" not in output, output
    program = ("--", "python", "-c", "import os; print('threads', os.environ['OMP_NUM_THREADS'])")
    submitit = ("-c", "import submitit, lockstep.jobs.slurm.task")  # srun starts this module
    assert run(cpu_image, *submitit, options=("--entrypoint", "python")) == (0, "")
    _, output = run(cpu_image, "--ranks", "1", *program, options=("--cpus", "1"))
    assert output.strip() == "[rank 0] threads 1", "the container's share, which the launcher computes"


def test_a_derived_image_trains_its_model_as_an_arbitrary_user_on_a_read_only_root(cpu_image: str) -> None:
    """OpenShift: any user id, group 0."""
    image = "lockstep-test-own"
    docker("build", "-q", "-t", image, "--build-arg", f"BASE={cpu_image}", str(ROOT / "docker/example"))
    volume = docker("volume", "create").strip()
    try:
        closed = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--network", "none")
        options = (*closed, "--tmpfs", "/tmp:mode=1777", "--user", "1234567:0", "--volume", f"{volume}:/runs")
        words = ("--ranks", "2", "run", "smoke", "--run-dir", "/runs/any", "--set", "model=tiny:Tiny",
                 "model_options={width: 8}", "epochs=1", "threads=1")  # fmt: skip
        code, output = run(image, *words, options=options)
        assert code == 0 and "Final validation accuracy" in output, output
        code, output = run(image, "-c", "exec 2>&1; touch /opt/x; touch /app/x; touch /runs/x; id -u", options=(
            *options, "--entrypoint", "sh"))  # fmt: skip
        assert output.count("Read-only file system") == 2 and output.endswith("1234567\n"), output
        # The revision is known without git.
        _, output = run(image, "/runs/any/run.yaml", options=(*options, "--entrypoint", "cat"))
        revision = inspect(cpu_image)[0]["Config"]["Labels"]["org.opencontainers.image.revision"]
        assert f"git_revision: {revision}" in output
    finally:
        docker("volume", "rm", volume)
        docker("image", "rm", image)
