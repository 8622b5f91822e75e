"""Packages and images that pages, templates and messages name are ours, or meant: a name of nobody's can be taken by anybody."""

from __future__ import annotations

import re
import subprocess

import pytest

from lockstep.training.contract import VERSION
from lockstep.training.extras import DISTRIBUTION
from tests.environments import project
from tests.processes import ROOT

PACKAGES = {"einops", "mkdocs-material", "pip", "tensorboard", "torch", "torchvision", "uv", "wandb", "zensical"}
"""Of others, and meant."""
IMAGES = re.compile(
    r"(lockstep(-cuda|-cpu)?(:[\w.-]+)?"  # what `make image` builds on this machine; Docker Hub's own namespace, where it is not
    r"|registry\.example(\.com)?[/:].+|registry/name.*|localhost.+|127\.0\.0\.1.+"  # nobody's, by RFC 2606
    r"|python[:@].+|prom/prometheus:.+|grafana/grafana:.+|[A-Za-z]+)$"  # a single word is a stage of the same Dockerfile
)
VALUED = r"--(?:find-links|group|target|python|extra)\b"
INSTALL = re.compile(  # the first word that is a name: no option, path, file, or NAME to be filled in
    rf"(?:pip3?|pipx|uv pip|uv tool) install (?:(?:{VALUED} \S+|(?!{VALUED})-\S+) )*['\"]?([A-Za-z][\w-]*)(?![\w./-])"
)
FROM = re.compile(r"^\s*(?:FROM (?:--\S+ )?|ARG BASE(?:_IMAGE)?=|-?\s*image: )[\"']?([^\s\"'#]+)", re.MULTILINE)


def pages() -> dict[str, str]:
    """Texts that a person reads or a machine runs; not what tests write, nor the assets of others."""
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    paths = [ROOT / name for name in listed] or [path for path in ROOT.rglob("*") if ".venv" not in path.parts]
    kept = (".md", ".py", ".yaml", ".yml", ".sh", ".toml", ".j2", ".cpu", ".sbatch", "Makefile", "Dockerfile", "run")
    return {
        name: path.read_text(encoding="utf-8")
        for path in paths
        if path.is_file() and path.name.endswith(kept) and not (name := str(path.relative_to(ROOT))).startswith("tests/")
    }  # fmt: skip


def strange(text: str) -> list[str]:
    """Packages and images in a text that are neither ours nor meant."""
    known = {DISTRIBUTION, *PACKAGES}
    found = [f"pip install {name}" for name in INSTALL.findall(text) if name not in known and not name.isupper()]
    found += [f"lockstep{extra}" for extra in re.findall(r"(?<![\w/.-])lockstep(\[[a-z0-9,]+\])", text)]
    images = [re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", name) for name in FROM.findall(text)]
    return found + [f"image {name}" for name in images if name[0] not in "$/" and not IMAGES.match(name)]


def test_nothing_names_a_package_or_an_image_of_nobody() -> None:
    found = pages()
    assert {"README.md", "Makefile", "docker/Dockerfile", "training/extras.py", "job.yaml"} <= found.keys()
    assert {name: names for name, text in found.items() if (names := strange(text))} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`pip install lockstep[k8s]` does it", ["pip install lockstep", "lockstep[k8s]"]),
        ("RUN pip install --no-cache-dir -q 'lockstep-tools'", ["pip install lockstep-tools"]),
        ("the package lockstep[train] has it", ["lockstep[train]"]),
        ("    image: ${IMAGE:-trainer/lockstep:cpu}", ["image trainer/lockstep:cpu"]),
        ("FROM ghcr.io/lockstep/lockstep:latest AS base", ["image ghcr.io/lockstep/lockstep:latest"]),
        ("image: lockstep/lockstep:cpu", ["image lockstep/lockstep:cpu"]),
        (f"pip install '{DISTRIBUTION}[k8s]' and pip install '.[k8s]', -e \".[train]\" or NAME", []),
        ("pip install --group dev -e . ; pip install --no-index --target /opt/lockstep /src; pip install NAME", []),
        ("FROM lockstep:cpu\nFROM ${BASE}\nimage: registry.example/lockstep:cpu", []),
    ],
)
def test_a_name_is_found(text: str, found: list[str]) -> None:
    assert strange(text) == found


def test_one_version() -> None:
    assert project()["version"] == VERSION and project()["name"] == DISTRIBUTION
    assert re.search(rf"^## \[{re.escape(VERSION)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
