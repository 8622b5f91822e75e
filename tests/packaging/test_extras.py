"""What the dispatcher alone, and each extra of pyproject.toml, lets one do.

An environment with some of the packages needs no index: it is made of links to those that are installed here.
"""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from lockstep.training.extras import DISTRIBUTION, EXTRAS
from tests.environments import declared, linked
from tests.processes import ROOT, clean_env

Lockstep = Callable[..., "subprocess.CompletedProcess[str]"]
MAIN = "from lockstep.jobs.cli.main import main; main()"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`installed("k8s")`: the Python of an environment with the dispatcher and this extra. Ours is only on the path.

    The packages are linked one by one: beside them in a checkout an installation may have left what it says of itself.
    """
    checkout = tmp_path_factory.mktemp("checkout")
    for package in ("lockstep", "jobs", "training"):
        (checkout / package).symlink_to(ROOT / package)

    @cache
    def make(*extras: str) -> Path:
        folder = tmp_path_factory.mktemp("-".join(["with", *extras]))
        site = linked(folder, declared().union(*map(declared, extras)))
        (site / "lockstep.pth").write_text(f"{checkout}\n")
        return folder / "bin/python"

    return make


@pytest.fixture
def started(installed: Callable[..., Path], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`started("k8s", words=[…])`: runs Python there, in an empty folder."""

    def run(*extras: str, words: list[str], **env: str) -> subprocess.CompletedProcess[str]:
        settings = clean_env(PYTHONPATH="", LOCKSTEP_HOME=str(tmp_path / "home"), KUBECONFIG=str(tmp_path / "none"))
        command = [str(installed(*extras)), *words]
        return subprocess.run(
            command, env={**settings, **env}, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )

    return run


JOB = ["--recipe", "smoke", "--image", "lockstep@sha256:" + "0" * 64]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], "Train PyTorch models"),
        (["schema"], '"recipe"'),
        (["render", "k8s", *JOB], "kind: PyTorchJob"),
        (["render", "compose", *JOB], "services:"),
        (["lint", *JOB], ""),
        (["lint", "--rules"], "LS001"),
        (["prepare", "k8s", str(ROOT / "job.yaml"), "--dry-run"], "kind: Job"),
        (["list", "local"], "NAME"),
        (["list", "slurm"], "NAME"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_the_dispatcher_alone(started: Lockstep, words: list[str], said: str) -> None:
    done = started(words=["-c", MAIN, *words])
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("train", ["-c", MAIN, "run", "smoke"]),
        ("train", ["-c", MAIN, "submit", "local", "--recipe", "smoke"]),
        ("train", ["-m", "lockstep.training", "run", "smoke"]),
        ("train", ["-m", "lockstep.training", "launch", "run", "smoke"]),
        ("train", ["-m", "lockstep.training", "shard", "smoke"]),
        ("train", ["-m", "lockstep.training", "toy"]),
        ("k8s", ["-c", MAIN, "submit", "k8s", *JOB]),
        ("k8s", ["-c", MAIN, "status", "k8s", "smoke"]),
        ("k8s", ["-c", MAIN, "doctor", "k8s"]),
        ("slurm", ["-c", MAIN, "submit", "slurm", "--recipe", "smoke"]),
        ("slurm", ["-c", MAIN, "render", "slurm", "--recipe", "smoke"]),
        ("slurm", ["-c", MAIN, "lint", "--backend", "slurm", "--recipe", "smoke"]),
    ],
    ids=lambda value: " ".join(value[2:4]) if isinstance(value, list) else value,
)
def test_a_missing_extra_is_one_line_that_names_it(
    started: Lockstep, extra: str, words: list[str], tmp_path: Path
) -> None:
    done = started(words=words)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert done.returncode == 2 and len(errors) == 1, done.stdout + done.stderr
    assert errors[0].startswith(f"error: this needs Lockstep's extra [{extra}]")
    assert errors[0].endswith(f"run pip install '.[{extra}]' in Lockstep's checkout")
    assert not (tmp_path / "runs").exists() and not list(tmp_path.glob("home/*/smoke"))


def test_where_it_is_installed_pip_is_given_the_distributions_name(started: Lockstep, tmp_path: Path) -> None:
    about = tmp_path / f"site/{DISTRIBUTION.replace('-', '_')}-1.dist-info/METADATA"
    about.parent.mkdir(parents=True)
    about.write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 1\n")
    done = started(words=["-c", MAIN, "status", "k8s", "smoke"], PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 2 and done.stderr.endswith(f"run pip install '{DISTRIBUTION}[k8s]'\n"), done.stderr


def test_a_driver_of_ones_own_is_told_too(started: Lockstep) -> None:
    program = (
        "from lockstep.jobs import JobSpec, submit; from lockstep.training.contract import user_errors\n"
        "with user_errors(): submit(JobSpec(name='a', recipe='smoke', image='a@sha256:' + '0' * 64), backend='k8s')"
    )
    done = started(words=["-c", program])
    assert done.returncode == 2 and done.stderr.startswith("error: this needs Lockstep's extra [k8s]"), done.stderr


@pytest.mark.parametrize(
    "content", ["import no_such_module", "from kubernetes import client", "import kubernetes._native"]
)
def test_a_package_that_is_there_and_broken_is_not_called_missing(
    started: Lockstep, tmp_path: Path, content: str
) -> None:
    for package in ("kubernetes", "urllib3"):
        (tmp_path / f"broken/{package}").mkdir(parents=True)
        (tmp_path / f"broken/{package}/__init__.py").write_text(content)
    done = started(words=["-c", MAIN, "status", "k8s", "smoke"], PYTHONPATH=str(tmp_path / "broken"))
    assert done.returncode == 1 and "Traceback" in done.stderr and "extra [" not in done.stderr, done.stderr


def test_with_its_extra_a_backend_answers(started: Lockstep) -> None:
    done = started("k8s", words=["-c", MAIN, "status", "k8s", "smoke"])
    assert done.returncode == 2 and "cannot read the kubeconfig" in done.stderr, done.stderr
    done = started("slurm", words=["-c", MAIN, "render", "slurm", "--recipe", "smoke"])
    assert done.returncode == 0 and "#SBATCH" in done.stdout, done.stderr


def test_a_report_needs_no_extra(started: Lockstep, tmp_path: Path) -> None:
    """People look at runs where nothing trains."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.yaml").write_text("config: {recipe: smoke}\n")
    done = started(words=["-m", "lockstep.training", "report", "run"])
    assert done.returncode == 0 and done.stdout == "run/report.html\n", done.stdout + done.stderr


def test_every_module_of_the_dispatcher_loads_with_its_extras(started: Lockstep) -> None:
    program = (
        "import importlib, pkgutil\nfrom lockstep import jobs\n"
        "names = [one.name for one in pkgutil.walk_packages(jobs.__path__, 'lockstep.jobs.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names))"
    )
    done = started("k8s", "slurm", words=["-c", program])
    assert done.returncode == 0 and int(done.stdout) > 40, done.stderr


def imported(package: str) -> Iterator[tuple[str, str]]:
    """(file, package) of what is imported, in functions too."""
    for path in sorted((ROOT / package).rglob("*.py")):
        if "templates" in path.parts:  # of somebody's own project
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                yield str(path.relative_to(ROOT)), name.split(".")[0]


def test_what_is_imported_is_declared() -> None:
    """A package that only another one brings may go with its next version."""
    distributions = importlib.metadata.packages_distributions()

    def declared_as(package: str) -> set[str]:
        return {
            canonicalize_name(name) for name in distributions.get(package, [package])
        }  # not installed here: its own name

    known = sys.stdlib_module_names | {"lockstep", "triton"}  # torch's builds for GPUs bring triton
    for package, extras in (("jobs", ("k8s", "slurm")), ("training", ("train", "tensorboard", "wandb"))):
        allowed = declared().union(*map(declared, extras))
        for file, name in imported(package):
            if name not in known:
                assert declared_as(name) & allowed, f"{file} imports {name}, which pyproject.toml does not declare"
    for extra, packages in EXTRAS.items():
        assert {one for package in packages for one in declared_as(package)} == declared(extra), extra
