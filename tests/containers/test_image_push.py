"""`make image-cpu push`, as the tutorial prints it, pushes the image to a registry with a password."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import copy_to, environment
from tests.engine import NAME, docker
from tests.printed import Reader, marked, pages
from tests.processes import Result, poll

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
        images = json.loads((self.folder / "build/images.json").read_text())
        assert digest in [name for flavours in images.values() for name in flavours.values()], "for make submit-k8s"


START = f"""
cat > /tmp/registry.yml <<END
version: 0.1
storage: {{filesystem: {{rootdirectory: /tmp/registry}}}}
http: {{addr: ':5000'}}
auth: {{htpasswd: {{realm: here, path: /tmp/users}}}}
END
echo '{USER}' > /tmp/users
exec docker-registry serve /tmp/registry.yml
"""


@pytest.fixture
def registry(engine: str) -> Iterator[str]:
    """Yields HOST:PORT of Debian's docker-registry with a user. It takes a moment to start."""
    base, here = os.environ.get("BASE_IMAGE") or "python:3.11-slim-bookworm", Path(__file__).parent
    name, address = f"{NAME}-registry", ""
    recipe = ("--build-arg", f"BASE_IMAGE={base}", "-f", str(here / "services.Dockerfile"), str(here))
    docker("build", "-q", "-t", name, *recipe, timeout=600)
    try:
        where = ("--publish", "127.0.0.1::5000", "--entrypoint", "sh")
        docker("run", "--detach", "--name", name, *where, name, "-c", START)
        address = docker("port", name, "5000").strip().splitlines()[0]
        yield address
    finally:
        docker("rm", "--force", "--volumes", name, check=False)
        images = docker("images", "--format", "{{.Repository}}:{{.Tag}}").split()
        own_images = [tag for tag in images if tag.startswith(f"{name}:") or (address and tag.startswith(address))]
        docker("image", "rm", "--force", *own_images, check=False)


@pytest.mark.containers
@pytest.mark.promise("printed", "images")
def test_what_the_tutorial_prints_pushes_an_image(cpu_image: str, registry: str, tmp_path: Path) -> None:
    """The test pushes the image's first stage: the whole image has a gigabyte to compress."""
    assert pages(Place.NEED) == [PAGE] and len(marked(Place.NEED, PAGE)) == 1
    folder = copy_to(tmp_path / "lockstep")
    env = environment(folder, tmp_path / "home", DOCKER_CONFIG=str(tmp_path / "docker"), MAKEFLAGS="TARGET=base")
    place = Place(folder, registry, env)
    login = f"echo {PASSWORD} | docker login {registry} -u {READER} --password-stdin"
    poll(lambda: place.run(login).code == 0, 60, f"a registry on {registry}")
    place.reads(PAGE)
