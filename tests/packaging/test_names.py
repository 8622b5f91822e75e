"""Packages and images that pages, templates and messages name are ours, or meant: a name of nobody's can be taken by anybody."""

from __future__ import annotations

import re

from tests.environments import project, sources
from tests.processes import ROOT

DISTRIBUTION = project()["name"]
MEANT = {
    DISTRIBUTION,
    "einops",
    "mkdocs-material",
    "pip",
    "tensorboard",
    "torch",
    "torchvision",
    "uv",
    "wandb",
    "zensical",
}
IMAGES = re.compile(
    r"(lockstep(-cuda|-cpu)?(:[\w.-]+)?"  # what `make image` builds on this machine; Docker Hub's own namespace, where it is not
    r"|registry\.example(\.com)?[/:].+|registry/name.*|localhost.+|127\.0\.0\.1.+"  # nobody's, by RFC 2606
    r"|python[:@].+|prom/prometheus:.+|grafana/grafana:.+|[A-Za-z]+(-\$\{FLAVOUR\})?)$"  # a single word is a stage of the same Dockerfile
)
VALUED = r"--(?:find-links|group|target|python|extra)\b"
INSTALL = re.compile(  # the first word that is a name: no option, path, file, or NAME to be filled in
    rf"(?:pip3?|pipx|uv pip|uv tool) install (?:(?:{VALUED} \S+|(?!{VALUED})-\S+) )*['\"]?([A-Za-z][\w-]*)(?![\w./-])"
)
FROM = re.compile(r"^\s*(?:FROM (?:--\S+ )?|ARG BASE(?:_IMAGE)?=|-?\s*image: )[\"']?([^\s\"'#]+)", re.MULTILINE)
KINDS = (".md", ".py", ".yaml", ".yml", ".sh", ".toml", ".j2", ".cpu", ".sbatch", "Makefile", "Dockerfile", "run")


def strange(text: str) -> list[str]:
    """Packages and images in a text that are neither ours nor meant."""
    found = [f"pip install {name}" for name in INSTALL.findall(text) if name not in MEANT and not name.isupper()]
    found += [f"lockstep{extra}" for extra in re.findall(r"(?<![\w/.-])lockstep(\[[a-z0-9,]+\])", text)]
    images = [re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", name) for name in FROM.findall(text)]
    return found + [f"image {name}" for name in images if name[0] not in "$/" and not IMAGES.match(name)]


def test_nothing_names_a_package_or_an_image_of_nobody() -> None:
    names = {name for name in sources() if name.endswith(KINDS) and not name.startswith("tests/")}
    assert {"README.md", "Makefile", "docker/Dockerfile", "training/extras.py", "job.yaml"} <= names
    assert {name: found for name in names if (found := strange((ROOT / name).read_text(encoding="utf-8")))} == {}
    assert (
        len(
            strange("pip install lockstep[k8s]\nimage: ${IMAGE:-trainer/lockstep:cpu}\nFROM ghcr.io/lockstep/x AS base")
        )
        == 4
    )


def test_one_version() -> None:
    version = project()["version"]
    assert f'VERSION = "{version}"' in (ROOT / "training/contract.py").read_text()
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
