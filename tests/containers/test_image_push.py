"""`make image-cpu push`, as the tutorial prints it: the image comes to a registry with a password."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import copy_to, environment
from tests.engine import Built, docker, registry_at
from tests.printed import Reader, marked, pages
from tests.processes import Result

PAGE = "docs/tutorials/to-kubernetes.md"
READER, PASSWORD = "reader", "PASSWORD"
USER = f"{READER}:$2b$04$EdmwOrEqKVoiAc5Nt5uOTOj.6DIE5KbqsuHGjUSxci/PnLYKxjpnm"


class Place(Reader):
    NEED = "in an engine"
    BOUND = 900

    def __init__(self, folder: Path, registry: str, env: dict[str, str]) -> None:
        super().__init__(folder, env)
        self.registry = registry

    def own(self, text: str) -> str:
        return text.replace("registry.example", self.registry)

    def after(self, command: str, done: Result) -> None:
        super().after(command, done)
        (digest,) = re.findall(rf"^{self.registry}/team/lockstep@sha256:[0-9a-f]{{64}}$", done.output, re.MULTILINE)
        assert "Name:" in docker("buildx", "imagetools", "inspect", digest, env=self.env), "the registry has it"
        noted = json.loads((self.folder / "build/images.json").read_text())
        assert digest in [name for flavours in noted.values() for name in flavours.values()], "for make submit-k8s"


@pytest.fixture
def registry(engine: str) -> Iterator[str]:
    with registry_at(USER) as address:
        yield address
        known = docker("images", "--format", "{{.Repository}}:{{.Tag}}").split()
        docker("image", "rm", "--force", *(name for name in known if name.startswith(address)), check=False)


@pytest.mark.containers
@pytest.mark.promise("printed", "images")
def test_what_the_tutorial_prints_pushes_an_image(cpu_image: Built, registry: str, tmp_path: Path) -> None:
    """The whole image would be a gigabyte to compress. What is pushed is its first stage."""
    assert pages(Place.NEED) == [PAGE] and len(marked(Place.NEED, PAGE)) == 1
    folder = copy_to(tmp_path / "lockstep")
    env = environment(folder, tmp_path / "home", DOCKER_CONFIG=str(tmp_path / "docker"), MAKEFLAGS="TARGET=base")
    place = Place(folder, registry, env)
    login = f"echo {PASSWORD} | docker login {registry} -u {READER} --password-stdin"
    assert place.run(login).code == 0
    place.reads(PAGE)
