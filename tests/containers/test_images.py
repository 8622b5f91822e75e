"""The CPU image as it was built: its layers, its files, its user, and what it refuses."""

from __future__ import annotations

import gzip
import io
import itertools
import os
import shutil
import subprocess
import tarfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.engine import NAME, SENTINEL, Built, docker, inspect, registry_at
from tests.processes import ROOT, require

pytestmark = pytest.mark.containers
COMPILERS = {"cc", "gcc", "g++", "c++", "clang", "clang++", "tcc", "nvcc", "ld", "as"}


def run(image: str, *words: str, options: tuple[str, ...] = (), timeout: float = 120) -> tuple[int, str]:
    """(exit code, output) of a container that is removed afterwards."""
    done = subprocess.run(
        ["docker", "run", "--rm", *options, image, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=timeout,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def files(cpu_image: Built) -> list[tarfile.TarInfo]:
    """Everything in the image's file system."""
    container = docker("create", cpu_image.name).strip()
    try:
        with subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as process:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                found = list(archive)
            assert process.wait() == 0
    finally:
        docker("rm", container)
    assert len(found) > 5000, "a file system"
    return found


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


def test_only_what_is_named_enters_a_build(engine: str, tmp_path: Path) -> None:
    context, out = tmp_path / "context", tmp_path / "out"
    shutil.copytree(ROOT / "docker", context / "docker")
    for name in ("lockstep", "training", "jobs"):
        shutil.copytree(ROOT / name, context / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".dockerignore"):
        shutil.copy(ROOT / name, context / name)
    for name in (
        ".env",
        "runs/x/run.yaml",
        "data/x",
        "docker/secret.txt",
        "training/.token",
        "jobs/a.pyc",
        ".git/config",
    ):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text("secret")
    (context / "all.Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    docker("build", "-f", str(context / "all.Dockerfile"), "--output", f"type=local,dest={out}", str(context))
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert {name.split("/")[0] for name in found} == {
        "docker",
        "lockstep",
        "training",
        "jobs",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }
    assert {name for name in found if name.startswith("docker/")} == {
        "docker/harden.sh", "docker/install.sh", "docker/healthcheck.py", "docker/requirements-cpu.txt",
        "docker/requirements-cuda.txt",
    }  # fmt: skip
    assert not any("secret" in (out / name).read_text(errors="ignore")[:6] for name in found)


def search(saved: IO[bytes], needle: bytes) -> tuple[list[str], int]:
    """(members of a saved image that hold `needle`, bytes looked at); engines save layers plain or compressed."""
    found, total = [], 0
    with tarfile.open(fileobj=saved, mode="r|") as archive:
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
                    found.append(member.name)
                rest, total = chunk[-len(needle) :], total + len(chunk)
    return found, total


@pytest.mark.parametrize("compressed", [False, True])
def test_the_search_looks_into_every_layer(compressed: bool) -> None:
    saved = io.BytesIO()
    with tarfile.open(fileobj=saved, mode="w") as archive:
        for name, text in {"one": b"harmless" * 500, "two": b"x" * 70_000 + SENTINEL.encode()}.items():
            data = gzip.compress(text) if compressed else text
            item = tarfile.TarInfo(f"blobs/{name}")
            item.size = len(data)
            archive.addfile(item, io.BytesIO(data))
    saved.seek(0)
    assert search(saved, SENTINEL.encode()) == (["blobs/two"], 4000 + 70_000 + len(SENTINEL))


def test_no_secret_is_in_any_layer(cpu_image: Built, files: list[tarfile.TarInfo]) -> None:
    """The build was given certificates and a pip.conf as secrets, with a sentence in them that must be nowhere."""
    with subprocess.Popen(["docker", "save", cpu_image.name], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found, total = search(process.stdout, SENTINEL.encode())
        assert process.wait() == 0
    assert found == [] and total > 5e8, "all layers"
    names = {Path(item.name).name for item in files}
    assert not names & {".env", ".git", ".netrc", "id_rsa", ".pypirc", "pip.conf", ".docker"}
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", cpu_image.name)
    assert "pip.conf" not in history and "://" not in history.replace("https://download.pytorch.org/whl/cpu", "")


def test_a_source_change_costs_one_thin_layer(cpu_image: Built, tmp_path: Path) -> None:
    """The dependencies are a layer of their own: clusters pull what changed, and a rebuild takes seconds.

    Timed three times, a change each: the best one says what it costs where the machine does nothing else meanwhile.
    """
    context = tmp_path / "context"
    shutil.copytree(
        ROOT, context, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", "runs", "data", ".*_cache")
    )
    name = f"{NAME}-changed"
    env = {**os.environ, "BUILDKIT_PROGRESS": "plain"}
    times, ids = [], []
    try:
        for _ in range(3):
            with (context / "training/trainer.py").open("a") as file:
                file.write(f"# {uuid.uuid4()}\n")
            began = time.monotonic()
            done = subprocess.run(
                ["make", "-C", str(context), "image-cpu", f"IMAGE={name}"], env=env, capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            times.append(time.monotonic() - began)
            assert done.returncode == 0, done.stderr[-3000:]
            ids.append(inspect(f"{name}:cpu")[0]["Id"])
        before, after = (inspect(image)[0]["RootFS"]["Layers"] for image in (cpu_image.name, f"{name}:cpu"))
        shared = next(index for index, (old, new) in enumerate(zip(before, after)) if old != new)
        changed = docker("history", "--format", "{{.Size}}", "--human=false", f"{name}:cpu").split()
        thin = list(itertools.takewhile(lambda size: size < 1e8, map(int, changed)))  # newest first, empty ones too
        took = " ".join(f"{seconds:.1f}" for seconds in times)
        print(f"rebuilds after a source change: {took} s, {sum(thin) / 1e6:.1f} MB in {sum(map(bool, thin))} layers")
        assert sum(thin) < 5e6 and len(after) - shared <= len(thin), (thin, shared, len(after))
        assert min(times) <= 15, times
    finally:
        docker("image", "rm", "--force", *ids, check=False)


def test_a_package_that_is_not_the_locked_one_stops_the_build(engine: str, tmp_path: Path) -> None:
    wheels = os.environ.get("WHEELS", "")
    require(wheels, "WHEELS names no folder of packages to tamper with")
    for wheel in Path(wheels).iterdir():
        os.link(wheel, tmp_path / wheel.name)
    victim = next(tmp_path.glob("annotated_doc-*.whl"))
    content = victim.read_bytes()
    victim.unlink()
    victim.write_bytes(content + b"tampered")
    said = docker(
        "build", "-f", str(ROOT / "docker/Dockerfile.cpu"), "--target", "dependencies", "--no-cache", "--build-context",
        f"wheels={tmp_path}", "--build-arg", "PIP_NO_INDEX=1", "--progress", "plain",
        *based(), str(ROOT),
        check=False, timeout=300,
    )  # fmt: skip
    assert "DO NOT MATCH THE HASHES" in said, said[-2000:]


def test_the_secret_pip_conf_decides_where_packages_come_from(engine: str, tmp_path: Path) -> None:
    """One that names an empty folder and no index: nothing can be installed, whatever the arguments say."""
    settings = tmp_path / "pip.conf"
    settings.write_text("[global]\nno-index = true\nfind-links = /nowhere\n")
    said = docker(
        "build", "-f", str(ROOT / "docker/Dockerfile.cpu"), "--target", "dependencies", "--no-cache", "--progress", "plain",
        "--secret", f"id=pip,src={settings}", "--build-arg", "PIP_INDEX_URL=https://pypi.org/simple", *based(), str(ROOT),
        check=False, timeout=300,
    )  # fmt: skip
    assert "No matching distribution found" in said and "'/nowhere'" in said and "pypi.org" not in said, said[-2000:]


def based() -> list[str]:
    base = os.environ.get("BASE_IMAGE")
    return ["--build-arg", f"BASE_IMAGE={base}"] if base else []


def test_who_it_is(cpu_image: Built) -> None:
    config = inspect(cpu_image.name)[0]["Config"]
    assert config["User"] == "1000:0"
    assert config["Entrypoint"] == ["python", "-m", "lockstep.training", "launch"], "exec form: PID 1 gets TERM"
    assert config["Healthcheck"]["Test"][:2] == ["CMD", "python"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    labels = config["Labels"]
    assert labels["org.opencontainers.image.revision"] == (head or "unknown")
    assert labels["org.opencontainers.image.version"] and labels["org.opencontainers.image.source"]
    assert not any("OMP_NUM_THREADS" in text for text in config["Env"]), "the launcher computes it"


def test_what_it_prints_and_refuses(cpu_image: Built) -> None:
    code, output = run(cpu_image.name)
    assert code == 0 and "usage: python -m lockstep.training launch" in output
    code, output = run(cpu_image.name, "run", "smok")
    assert code == 2 and "did you mean 'smoke'" in output
    words = ("--ranks", "1", "run", "smoke", "--run-dir", "/runs/x", "--set", "compile=true")
    code, output = run(cpu_image.name, *words)
    assert code == 2 and "compile=true needs a C++ compiler" in output, output
    code, output = run(
        cpu_image.name, "--ranks", "1", "run", "resnet18", "--run-dir", "/runs/x", "--set", "data.source=digits"
    )
    assert code == 2 and "resnet18 needs a torchvision" in output and "Traceback" not in output, output


def test_threads_are_the_containers_share(cpu_image: Built) -> None:
    program = ("--", "python", "-c", "import os; print('threads', os.environ['OMP_NUM_THREADS'])")
    _, output = run(cpu_image.name, "--ranks", "1", *program, options=("--cpus", "1"))
    assert output.strip() == "[rank 0] threads 1", output


def test_an_arbitrary_user_on_a_read_only_root_trains(cpu_image: Built) -> None:
    """OpenShift: any user id, group 0."""
    volume = docker("volume", "create").strip()
    try:
        closed = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--network", "none")
        options = (*closed, "--tmpfs", "/tmp:mode=1777", "--user", "1234567:0", "--volume", f"{volume}:/runs")
        words = ("--ranks", "2", "run", "smoke", "--run-dir", "/runs/any", "--set", "epochs=1", "threads=1")
        code, output = run(cpu_image.name, *words, options=options)
        assert code == 0 and "Final validation accuracy" in output, output
        code, output = run(cpu_image.name, "-c", "touch /opt/x; touch /app/x; touch /runs/x; id -u", options=(
            *options, "--entrypoint", "sh"))  # fmt: skip
        assert output.count("Read-only file system") == 2 and output.endswith("1234567\n"), output
        # The revision is known without git.
        _, output = run(cpu_image.name, "/runs/any/run.yaml", options=(*options, "--entrypoint", "cat"))
        revision = inspect(cpu_image.name)[0]["Config"]["Labels"]["org.opencontainers.image.revision"]
        assert f"git_revision: {revision}" in output
    finally:
        docker("volume", "rm", volume)


@pytest.fixture
def registry(engine: str) -> Iterator[str]:
    with registry_at() as address:
        yield address


def test_pushed_by_revision_and_built_upon_by_digest(engine: str, registry: str, tmp_path: Path) -> None:
    """`make push` sends what was built of this revision; a base by digest is what a FROM of ours can name."""
    base, name = os.environ.get("BASE_IMAGE") or "python:3.11-slim-bookworm", f"{registry}/team/lockstep"
    nothing = subprocess.run(
        ["make", "--no-print-directory", "push", f"IMAGE={name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert nothing.returncode == 2 and "make image" in nothing.stderr
    tag = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    # A small stand-in: what goes over the wire is not what is tested here.
    docker("tag", base, f"{name}:{tag.stdout.strip()}-cpu")
    try:
        pushed = subprocess.run(
            ["make", "--no-print-directory", "push", f"IMAGE={name}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert pushed.returncode == 0, pushed.stderr
        digest = pushed.stdout.strip().splitlines()[-1]
        assert digest.startswith(f"{name}@sha256:"), pushed.stdout
        docker("image", "rm", f"{name}:{tag.stdout.strip()}-cpu")
        out = docker(
            "build", "-f", str(ROOT / "docker/Dockerfile.cpu"), "--target", "base", "--build-arg", f"BASE_IMAGE={digest}",
            "--progress", "plain", str(ROOT), timeout=300,
        )  # fmt: skip
        assert digest.rpartition("@")[2] in out
    finally:
        left = docker("images", "--digests", "--format", "{{.ID}}", name).split()
        references = [
            item for found in (inspect(*left) if left else []) for item in found["RepoTags"] + found["RepoDigests"]
        ]
        docker("image", "rm", *[item for item in references if item.startswith(name)], check=False)


def test_an_image_of_ones_own_carries_a_model(cpu_image: Built) -> None:
    docker(
        "build", "-q", "-t", "lockstep-test-own", "--build-arg", f"BASE={cpu_image.name}", str(ROOT / "docker/example")
    )
    try:
        words = ("--ranks", "2", "run", "smoke", "--run-dir", "/runs/own", "--set", "model=tiny:Tiny",
                 "model_options={width: 8}", "epochs=1", "threads=1")  # fmt: skip
        code, output = run("lockstep-test-own", *words)
        assert code == 0 and "Final validation accuracy" in output, output
    finally:
        docker("image", "rm", "lockstep-test-own")


def test_both_dockerfiles_are_what_the_other_one_is() -> None:
    """They differ where CUDA is; a fix of one that forgets the other shows here."""
    own = {"cpu": (ROOT / "docker/Dockerfile.cpu").read_text(), "cuda": (ROOT / "docker/Dockerfile").read_text()}
    after = {kind: text.partition("FROM dependencies AS project")[2] for kind, text in own.items()}
    assert after["cpu"] == after["cuda"] and after["cpu"]
