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

from tests import product
from tests.environments import declared, linked, project
from tests.processes import PYTHON, ROOT, clean_env, run

pytestmark = pytest.mark.promise("installing")
DISTRIBUTION = project()["name"]
Lockstep = Callable[..., "subprocess.CompletedProcess[str]"]
MAIN = ["-c", "from lockstep.jobs.cli.main import main; main()"]
TRAINING = ["-m", "lockstep.training"]
JOB = ["--recipe", "smoke", "--image", "lockstep@sha256:" + "0" * 64]


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


WITHOUT_TORCH: list[tuple[list[str], str]] = [
    (["--help"], "Train PyTorch models"), (["schema"], '"recipe"'), (["settings", "smoke"], "sync.name"),
    (["render", "k8s", *JOB, "--set", "overrides.sync.name=powersgd"], "powersgd"), (["render", "compose", *JOB], "services:"),
    (["lint", *JOB], ""), (["lint", "--rules"], "LS001"), (["prepare", "k8s", str(ROOT / "job.yaml"), "--dry-run"], "kind: Job"),
    (["list", "local"], "NAME"), (["list", "slurm"], "NAME"), (["report", "run"], "run/report.html\n"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"), WITHOUT_TORCH, ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else ""
)
def test_the_dispatcher_alone(started: Lockstep, tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.yaml").write_text("config: {recipe: smoke}\n")
    done = started(words=[*MAIN, *words])
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


def test_with_their_extras_backends_answer_without_torch(started: Lockstep) -> None:
    done = started("k8s", words=[*MAIN, "status", "k8s", "smoke"])
    assert done.returncode == 2 and "kubeconfig" in done.stderr, done.stderr
    render = [*MAIN, "render", "slurm", "--recipe", "smoke"]
    done = started("slurm", words=render)
    assert done.returncode == 0 and "#SBATCH" in done.stdout, done.stderr
    for setting in ("optim.lrr=1", "optim.lr=fast", "sync.name=gossip"):
        done = started("slurm", words=[*render, "--set", f"overrides.{setting}"])
        assert done.returncode == 2 and setting.partition("=")[0] in done.stderr and done.stderr.count("\n") == 1, (
            done.stderr
        )
    program = (
        "import importlib, pkgutil\nfrom lockstep import jobs\n"
        "names = [one.name for one in pkgutil.walk_packages(jobs.__path__, 'lockstep.jobs.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names))"
    )
    done = started("k8s", "slurm", words=["-c", program])
    assert done.returncode == 0 and int(done.stdout) > 40, done.stderr


DRIVER = (
    "from lockstep.jobs import JobSpec, submit; from lockstep.training.contract import user_errors\n"
    "with user_errors(): submit(JobSpec(name='a', recipe='smoke', image='a@sha256:' + '0' * 64), backend='k8s')"
)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("train", [*MAIN, "run", "smoke"]), ("train", [*MAIN, "submit", "local", "--recipe", "smoke"]),
        ("train", [*TRAINING, "launch", "run", "smoke"]), ("train", [*TRAINING, "shard", "smoke"]),
        ("train", [*TRAINING, "bench", "scaling"]),
        ("k8s", [*MAIN, "submit", "k8s", *JOB]), ("k8s", [*MAIN, "doctor", "k8s"]), ("k8s", ["-c", DRIVER]),
        ("slurm", [*MAIN, "submit", "slurm", "--recipe", "smoke"]), ("slurm", [*MAIN, "lint", "--backend", "slurm", "--recipe", "smoke"]),
    ],
    ids=lambda value: " ".join(value[2:4]) if isinstance(value, list) else value,
)  # fmt: skip
def test_a_missing_extra_is_one_line_that_names_it(
    started: Lockstep, extra: str, words: list[str], tmp_path: Path
) -> None:
    done = started(words=words)
    (error,) = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    assert done.returncode == 2 and f"extra [{extra}]" in error and f"pip install '.[{extra}]'" in error, done
    assert not (tmp_path / "runs").exists() and not list(tmp_path.glob("home/*/smoke"))


@pytest.mark.parametrize(
    "content", ["import no_such_module", "from kubernetes import client", "import kubernetes._native"]
)
def test_a_package_that_is_there_and_broken_is_not_called_missing(
    started: Lockstep, tmp_path: Path, content: str
) -> None:
    for package in ("kubernetes", "urllib3"):
        (tmp_path / f"broken/{package}").mkdir(parents=True)
        (tmp_path / f"broken/{package}/__init__.py").write_text(content)
    done = started(words=[*MAIN, "status", "k8s", "smoke"], PYTHONPATH=str(tmp_path / "broken"))
    assert done.returncode == 1 and "Traceback" in done.stderr and "extra [" not in done.stderr, done.stderr


def test_a_run_loads_no_compiler(tmp_path: Path) -> None:
    """torch imports its own for some harmless calls; that costs seconds of every start. One process, a run for each optimizer."""
    code = (
        "import sys; from lockstep.training.__main__ import leave, main\n"
        "def run(name): return main(['run', 'smoke', '--run-dir', f'{sys.argv[1]}/{name}', '--set', *sys.argv[2:], f'optim.name={name}'])\n"
        "def loaded(): return [m for m in ('torch._dynamo', 'torch._inductor', 'sympy', 'matplotlib') if m in sys.modules]\n"
        "print([(name, run(name), loaded()) for name in ('nesterov', 'sgd', 'adam')])\n"
        "leave(0)"
    )
    words = ["data.source=synthetic", "data.options={n: 64}", f"data.root={tmp_path}", "model_options.width=0.0625"]
    words += ["epochs=1", "global_batch_size=32", "metrics.enabled=false", "checkpoint.every_steps=1"]
    command = [PYTHON, "-c", code, str(tmp_path), *words]
    done = run(command)
    assert "[('nesterov', 0, []), ('sgd', 0, []), ('adam', 0, [])]" in done.output, done.output


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
        return {canonicalize_name(name) for name in distributions.get(package, [package])}  # not here: its own name

    known = sys.stdlib_module_names | {"lockstep", "triton"}  # torch's builds for GPUs bring triton
    for package, extras in (("jobs", ("k8s", "slurm")), ("training", ("train", "tensorboard", "wandb"))):
        allowed = declared().union(*map(declared, extras))
        for file, name in imported(package):
            if name not in known:
                assert declared_as(name) & allowed, f"{file} imports {name}, which pyproject.toml does not declare"
    for extra, packages in product.extras().items():
        assert {one for package in packages for one in declared_as(package)} == declared(extra), extra
