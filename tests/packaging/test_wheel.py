"""The wheel and the sdist: what is in them, and what they do in environments that have nothing else.

uv builds and installs them; the environments with torch are links to what is installed here, so that none is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.environments import declared, linked, project, sources, uv
from tests.processes import PYTHON, ROOT, clean_env, require

pytestmark = pytest.mark.promise("installing")
DISTRIBUTION = project()["name"]
LINKED = ("training", "jobs")
"""Folders of the checkout that `lockstep/` has links to: in the wheel they are folders of it."""
WHEEL = f"{DISTRIBUTION.replace('-', '_')}-{project()['version']}-py3-none-any.whl"
JOB = ["--recipe", "smoke", "--image", "localhost:5000/lockstep@sha256:" + "0" * 64]
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, the wheel that was made of it, and in `direct/` the wheel of the checkout.

    Built in a copy: setuptools writes beside the sources.
    """
    folder = tmp_path_factory.mktemp("built")
    for name in sources():
        (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "checkout" / name, follow_symlinks=False)
    uv("build", "--out-dir", str(folder), cwd=folder / "checkout")
    uv("build", "--wheel", "--out-dir", str(folder / "direct"), cwd=folder / "checkout")
    return folder


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and what it names, from the index: no extra, no torch."""
    folder = tmp_path_factory.mktemp("bare")
    uv("venv", "--python", PYTHON, "--seed", "--clear", str(folder))  # with pip, which error messages name
    uv("pip", "install", "--python", str(folder / "bin/python"), str(built / WHEEL))
    return folder / "bin"


@pytest.fixture(scope="module")
def with_torch(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that had torch before the wheel came, without an index in reach."""
    folder = tmp_path_factory.mktemp("torch")
    linked(folder, declared().union(*map(declared, ("train", "k8s", "slurm")), {"pip"}))
    wheel = f"{built / WHEEL}[train,k8s,slurm]"
    done = ran(folder / "bin", "python", "-m", "pip", "install", "--no-index", wheel, PIP_CONFIG_FILE=os.devnull)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin"


def ran(programs: Path, *words: str, cwd: Path | None = None, **env: str) -> Done:
    """A program of the environment, in a folder where the checkout is not on the path."""
    settings = clean_env(LOCKSTEP_HOME=str((cwd or programs) / "home"), PYTHONWARNINGS="ignore", **env)
    if "PIP_CONFIG_FILE" in env:  # neither another index nor a folder of wheels
        settings = {name: value for name, value in settings.items() if name == "PIP_CONFIG_FILE" or name[:4] != "PIP_"}
    del settings["PYTHONPATH"]
    settings["PATH"] = f"{programs}{os.pathsep}{settings['PATH']}"
    return subprocess.run(
        [str(programs / words[0]), *words[1:]], cwd=cwd or programs, env=settings, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip


def _lockstep(bare: Path, folder: Path, *words: str) -> Done:
    return ran(bare, "lockstep", *words, cwd=folder)


def test_the_wheel_holds_the_packages_and_nothing_else(built: Path) -> None:
    names = set(zipfile.ZipFile(built / WHEEL).namelist())
    about = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert {name.split("/", 1)[1] for name in about} >= {"METADATA", "entry_points.txt", "licenses/LICENSE"}
    links = {f"lockstep/{package}" for package in LINKED}
    ours = {name for name in sources() if name.startswith("lockstep/")} - links
    ours |= {f"lockstep/{name}" for name in sources() if name.startswith(tuple(f"{package}/" for package in LINKED))}
    assert names - about == ours
    for suffix in (".yaml", ".j2", ".js", "py.typed"):
        assert any(name.endswith(suffix) for name in ours), suffix


def test_the_sdist_makes_the_same_wheel_and_brings_no_tests(built: Path) -> None:
    made, direct = (zipfile.ZipFile(built / path) for path in (WHEEL, f"direct/{WHEEL}"))
    assert {entry.filename: entry.CRC for entry in made.infolist()} == {
        entry.filename: entry.CRC for entry in direct.infolist()
    }
    with tarfile.open(built / WHEEL.replace("-py3-none-any.whl", ".tar.gz")) as archive:
        members = [member.name.split("/")[1:] for member in archive.getmembers() if member.isfile()]
    inside = {parts[0] for parts in members}
    assert inside == {
        "lockstep", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg",
        f"{DISTRIBUTION.replace('-', '_')}.egg-info",
    }  # fmt: skip


def test_the_dispatcher_brings_no_torch(bare: Path) -> None:
    listed = ran(bare, "python", "-m", "pip", "list", "--format=freeze").stdout.lower()
    assert f"{DISTRIBUTION}==" in listed and "pydantic==" in listed
    assert not {"torch", "numpy", "kubernetes", "submitit"} & {line.split("==")[0] for line in listed.splitlines()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--version"], f"lockstep {project()['version']}"), (["schema"], '"recipe"'), (["settings", "smoke"], "optim.lr"),
        (["render", "k8s", *JOB, "--profile", "pyxis-cluster", "--set", "overrides.optim.lr=0.25"], "optim.lr=0.25"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_the_dispatcher_does_alone(bare: Path, tmp_path: Path, words: list[str], said: str) -> None:
    """With the files that it reads: profiles, the recipes."""
    done = _lockstep(bare, tmp_path, *words)
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


def test_the_command_of_the_message_installs_the_extra(built: Path, tmp_path: Path) -> None:
    """pip completes what is installed: it asks the index for submitit alone, where nobody has published this wheel."""
    copy = tmp_path / "copy"
    uv("venv", "--python", PYTHON, "--seed", str(copy))
    uv("pip", "install", "--python", str(copy / "bin/python"), str(built / WHEEL))
    done = _lockstep(copy / "bin", tmp_path, "render", "slurm", "--recipe", "smoke")
    assert done.returncode == 2 and f"pip install '{DISTRIBUTION}[slurm]'" in done.stderr, done.stderr
    done = ran(copy / "bin", "python", "-m", "pip", "install", f"{DISTRIBUTION}[slurm]")
    if "No matching distribution found for submitit" in done.stderr:
        require(False, f"pip reaches no package index: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    done = _lockstep(copy / "bin", tmp_path, "render", "slurm", "--recipe", "smoke")
    assert done.returncode == 0 and "#SBATCH" in done.stdout, done.stderr


def test_beside_torch_no_second_one_is_installed_and_the_wheel_trains(with_torch: Path, tmp_path: Path) -> None:
    site = next(with_torch.parent.glob("lib/python*/site-packages"))
    assert (site / "torch").is_symlink() and not (site / "lockstep").is_symlink()
    done = ran(
        with_torch, "lockstep", "run", "smoke", "--ranks", "1", "--run-dir", "run", "--set", "epochs=1", "threads=1",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0 and "Final validation accuracy" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "run/report.html").stat().st_size > 10_000  # its template and its assets came along
    where = ran(
        with_torch, "python", "-c", "from lockstep import training; print(training.__file__)", cwd=tmp_path
    ).stdout
    assert where.startswith(str(site)), where


THEIRS = """
from pathlib import Path

import torch

from jobs.names import NAME
from lockstep import Session
from training.net import Net

with Session("run") as run:
    model = run.replicate(Net())
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for epoch in run.epochs(1):
        for x, y in run.batches(torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1)), 4):
            run.step(torch.nn.functional.mse_loss(model(x), y))
print("trained", NAME)
"""


def test_a_project_with_packages_training_and_jobs_uses_lockstep(with_torch: Path, tmp_path: Path) -> None:
    """Its Session runs beside them, and they travel with its job."""
    project = tmp_path / "project"
    net = "import torch\n\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(3, 1)\n"
    for package, module, text in (("training", "net", net), ("jobs", "names", "NAME = 'theirs'\n")):
        (project / package).mkdir(parents=True)
        (project / package / "__init__.py").touch()
        (project / package / f"{module}.py").write_text(text)
    (project / "train.py").write_text(THEIRS)
    (project / "job.yaml").write_text(
        "name: theirs\ncommand: [python, train.py]\ncode: .\nranks_per_node: 2\nmax_restarts: 0\n"
    )
    done = ran(with_torch, "lockstep", "run", "--ranks", "2", "--", "python", "train.py", cwd=project)
    assert done.returncode == 0 and done.stdout.count("trained theirs") >= 1, done.stdout + done.stderr
    done = ran(with_torch, "lockstep", "submit", "local", "job.yaml", "--wait", "120", cwd=project)
    told = ran(with_torch, "lockstep", "logs", "local", "theirs", cwd=project).stdout
    assert done.returncode == 0 and "trained theirs" in told, done.stdout + done.stderr + told
    where = ran(with_torch, "python", "-c", "import training", cwd=ROOT)
    assert where.returncode == 1 and "is imported as lockstep.training" in where.stderr, where
