"""The wheel and the sdist: their content, and the wheel's behaviour with and without optional packages.

uv builds both. The environments link to the packages that are installed here. So they need no index, and an
installation that lacks a package fails.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests import product
from tests.checkout import copy_to, sources
from tests.environments import declared, linked, project, uv
from tests.imports import imports_of, modules
from tests.processes import PYTHON, ROOT, clean_env, run

pytestmark = pytest.mark.promise("installing")
DISTRIBUTION = project()["name"]
LINKED = ("training", "jobs", "tools", "torture")
"""Folders that `lockstep/` links to in the checkout, and contains in the wheel."""
WHEEL = f"{DISTRIBUTION.replace('-', '_')}-{project()['version']}-py3-none-any.whl"
JOB = ["--recipe", "smoke", "--image", "localhost:5000/lockstep@sha256:" + "0" * 64]
Done = subprocess.CompletedProcess[str]
Installed = Callable[..., Path]
TRAINS = ("train", "k8s", "slurm")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the sdist and its wheel into a folder. The build runs in a copy: setuptools writes next to the sources."""
    folder = tmp_path_factory.mktemp("built")
    uv("build", "--out-dir", str(folder), cwd=copy_to(folder / "checkout"))
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """`installed("k8s")` returns the programs of an environment with the wheel, this extra and their dependencies."""

    @cache
    def make(*extras: str) -> Path:
        folder = tmp_path_factory.mktemp("-".join(["with", *extras]))
        linked(folder, declared().union({"pip"}, *map(declared, extras)))
        wheel = str(built / WHEEL) + (f"[{','.join(extras)}]" if extras else "")
        done = run_program(
            folder / "bin", "python", "-m", "pip", "install", "--no-index", wheel, PIP_CONFIG_FILE=os.devnull
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return folder / "bin"

    return make


def run_program(programs: Path, *words: str, cwd: Path | None = None, **env: str) -> Done:
    """Runs a program of the environment in a folder where the checkout is not on the path."""
    here = cwd or programs
    settings = clean_env(
        LOCKSTEP_HOME=str(here / "home"), KUBECONFIG=str(here / "none"), PYTHONWARNINGS="ignore", **env
    )
    if "PIP_CONFIG_FILE" in env:  # neither another index nor a folder of wheels
        settings = {name: value for name, value in settings.items() if name == "PIP_CONFIG_FILE" or name[:4] != "PIP_"}
    if "PYTHONPATH" not in env:
        del settings["PYTHONPATH"]
    settings["PATH"] = f"{programs}{os.pathsep}{settings['PATH']}"
    return subprocess.run(
        [str(programs / words[0]), *words[1:]], cwd=here, env=settings, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip


def test_the_wheel_and_the_sdist_hold_the_packages_and_nothing_else(built: Path) -> None:
    names = set(zipfile.ZipFile(built / WHEEL).namelist())
    about = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert {name.split("/", 1)[1] for name in about} >= {"METADATA", "entry_points.txt", "licenses/LICENSE"}
    links = {f"lockstep/{package}" for package in LINKED}
    ours = {name for name in sources() if name.startswith("lockstep/")} - links
    ours |= {f"lockstep/{name}" for name in sources() if name.startswith(tuple(f"{package}/" for package in LINKED))}
    assert names - about == ours
    for suffix in (".yaml", "py.typed"):
        assert any(name.endswith(suffix) for name in ours), suffix
    with tarfile.open(built / WHEEL.replace("-py3-none-any.whl", ".tar.gz")) as archive:
        members = [member.name.split("/")[1:] for member in archive.getmembers() if member.isfile()]
    assert {parts[0] for parts in members} == {
        "lockstep", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg",
        f"{DISTRIBUTION.replace('-', '_')}.egg-info",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--version"], f"lockstep {project()['version']}"), (["schema"], '"recipe"'), (["settings", "smoke"], "sync.name"),
        (["render", "k8s", *JOB, "--profile", "pyxis-cluster", "--set", "overrides.optim.lr=0.25"], "optim.lr=0.25"),
        (["render", "compose", *JOB], "services:"), (["lint", *JOB], ""), (["lint", "--rules"], "LS001"),
        (["prepare", "k8s", str(ROOT / "job.yaml"), "--image", "localhost:5000/a:1", "--dry-run"], "name: smoke-prepare"),
        (["list", "local"], "NAME"), (["list", "slurm"], "NAME"), (["report", "run"], "run/report.html\n"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)  # fmt: skip
def test_the_dispatcher_alone(installed: Installed, tmp_path: Path, words: list[str], expected: str) -> None:
    """It works without torch, and reads its profiles and recipes."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.yaml").write_text("config: {recipe: smoke}\n")
    done = run_program(installed(), "lockstep", *words, cwd=tmp_path)
    assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr


def test_with_their_extras_backends_answer_without_torch(installed: Installed, tmp_path: Path) -> None:
    programs = installed("k8s", "slurm")
    done = run_program(programs, "lockstep", "status", "k8s", "smoke", cwd=tmp_path)
    assert done.returncode == 2 and "kubeconfig" in done.stderr, done.stderr
    render = ["lockstep", "render", "slurm", "--recipe", "smoke"]
    done = run_program(programs, *render, cwd=tmp_path)
    assert done.returncode == 0 and "#SBATCH" in done.stdout, done.stderr
    done = run_program(programs, *render, "--set", "overrides.sync.name=gossip", cwd=tmp_path)
    assert done.returncode == 2 and "sync.name" in done.stderr and done.stderr.count("\n") == 1, done.stderr


DRIVER = (
    "from lockstep.jobs import JobSpec, submit; from lockstep.training.contract import user_errors\n"
    "with user_errors(): submit(JobSpec(name='a', recipe='smoke', image='a@sha256:' + '0' * 64), backend='k8s')"
)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("train", ["lockstep", "run", "smoke"]), ("train", ["lockstep", "submit", "local", "--recipe", "smoke"]),
        ("train", ["python", "-m", "lockstep.training", "launch", "run", "smoke"]),
        ("k8s", ["lockstep", "submit", "k8s", *JOB]), ("k8s", ["python", "-c", DRIVER]),
        ("slurm", ["lockstep", "submit", "slurm", "--recipe", "smoke"]),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) and value[1] != "-c" else "",
)  # fmt: skip
def test_a_missing_extra_is_one_line_that_names_it(
    installed: Installed, extra: str, words: list[str], tmp_path: Path
) -> None:
    done = run_program(installed(), *words, cwd=tmp_path)
    (error,) = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert done.returncode == 2 and f"extra [{extra}]" in error and f"pip install '{DISTRIBUTION}[{extra}]'" in error
    assert not (tmp_path / "runs").exists() and not list(tmp_path.glob("home/*/smoke"))


def test_a_package_that_is_there_and_broken_is_not_called_missing(installed: Installed, tmp_path: Path) -> None:
    for package in ("kubernetes", "urllib3"):
        (tmp_path / f"broken/{package}").mkdir(parents=True)
        (tmp_path / f"broken/{package}/__init__.py").write_text("import kubernetes._native")
    broken = str(tmp_path / "broken")
    done = run_program(installed(), "lockstep", "status", "k8s", "smoke", cwd=tmp_path, PYTHONPATH=broken)
    assert done.returncode == 1 and "Traceback" in done.stderr and "extra [" not in done.stderr, done.stderr


def test_no_second_torch_is_installed_and_the_wheel_trains(installed: Installed, tmp_path: Path) -> None:
    programs = installed(*TRAINS)
    site = next(programs.parent.glob("lib/python*/site-packages"))
    assert (site / "torch").is_symlink() and not (site / "lockstep").is_symlink()
    words = ["run", "smoke", "--ranks", "1", "--run-dir", "run", "--set", "epochs=1", "--set", "threads=1"]
    done = run_program(programs, "lockstep", *words, cwd=tmp_path)
    assert done.returncode == 0 and "Final validation accuracy" in done.stdout, done.stdout + done.stderr


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


def test_a_project_with_packages_training_and_jobs_uses_lockstep(installed: Installed, tmp_path: Path) -> None:
    """Its packages travel with its job, and its Session runs next to them."""
    programs, project = installed(*TRAINS), tmp_path / "project"
    net = "import torch\n\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(3, 1)\n"
    for package, module, text in (("training", "net", net), ("jobs", "names", "NAME = 'theirs'\n")):
        (project / package).mkdir(parents=True)
        (project / package / "__init__.py").touch()
        (project / package / f"{module}.py").write_text(text)
    (project / "train.py").write_text(THEIRS)
    (project / "job.yaml").write_text("name: theirs\ncommand: [python, train.py]\ncode: .\nranks_per_node: 1\n")
    done = run_program(programs, "lockstep", "submit", "local", "job.yaml", "--wait", "120", cwd=project)
    output = run_program(programs, "lockstep", "logs", "local", "theirs", cwd=project).stdout
    assert done.returncode == 0 and "trained theirs" in output, done.stdout + done.stderr + output
    where = run_program(programs, "python", "-c", "import training", cwd=ROOT)
    assert where.returncode == 1 and "is imported as lockstep.training" in where.stderr, where


def test_a_run_loads_no_compiler(tmp_path: Path) -> None:
    """torch imports its compiler for some harmless calls, which costs seconds of every start. One process runs each optimizer. Garbage is
    collected again after the imports."""
    code = (
        "import gc, sys; from lockstep.training.__main__ import leave, main\n"
        "def run(name): return main(['run', 'smoke', '--run-dir', f'{sys.argv[1]}/{name}', '--set', *sys.argv[2:], f'optim.name={name}'])\n"
        "def loaded(): return [m for m in ('torch._dynamo', 'torch._inductor', 'sympy', 'matplotlib') if m in sys.modules]\n"
        "print([(name, run(name), loaded()) for name in ('nesterov', 'sgd', 'adam')], gc.isenabled())\n"
        "leave(0)"
    )
    words = ["data.source=synthetic", "data.options={n: 64}", f"data.root={tmp_path}", "model_options.width=0.0625"]
    words += ["epochs=1", "global_batch_size=32", "metrics.enabled=false", "checkpoint.every_steps=1"]
    done = run([PYTHON, "-c", code, str(tmp_path), *words])
    assert "[('nesterov', 0, []), ('sgd', 0, []), ('adam', 0, [])] True" in done.output, done.output


def test_what_is_imported_is_declared() -> None:
    """A package that only a dependency brings may go with its next version."""
    distributions = importlib.metadata.packages_distributions()

    def declared_as(package: str) -> set[str]:
        return {canonicalize_name(name) for name in distributions.get(package, [package])}  # not here: the name itself

    known = sys.stdlib_module_names | {"lockstep", "triton"}  # torch's builds for GPUs bring triton
    for package, extras in (("jobs", ("k8s", "slurm")), ("training", ("train", "cloud", "tensorboard", "wandb"))):
        allowed = declared().union(*map(declared, extras))
        for module, path in modules(package).items():
            for name in {name.split(".")[0] for name in imports_of(module, path, {})} - known:
                assert declared_as(name) & allowed, f"{module} imports {name}, which pyproject.toml does not declare"
    for extra, packages in product.EXTRAS.items():
        assert {name for package in packages for name in declared_as(package)} == declared(extra), extra


def test_no_message_advises_to_install_a_package_of_another_project() -> None:
    """`lockstep` on the public index is another project."""
    advice = re.compile(r"pipx? install (?:-\S+ )*['\"]?lockstep(?![\w/.-])|(?<![\w/.-])lockstep\[[a-z0-9,]+\]")
    assert advice.search("pip install -q lockstep") and not advice.search(f"pip install '{DISTRIBUTION}[k8s]'")
    for name in sources():
        if name.endswith((".md", ".py", ".yaml", "Makefile", "Dockerfile")) and not name.startswith("tests/"):
            assert not advice.search((ROOT / name).read_text(encoding="utf-8")), name


def test_one_version() -> None:
    version = project()["version"]
    assert f'VERSION = "{version}"' in (ROOT / "training/contract.py").read_text()
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
