"""The commands of the documentation that need a container engine, as they are printed, in a real one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.checkout import copy_to, environment
from tests.engine import NAME, Built, docker, inspect, registry_at, remove_jobs
from tests.printed import Reader, marked, pages
from tests.processes import Result, poll, require

pytestmark = [pytest.mark.containers, pytest.mark.promise("printed")]
BASE = os.environ.get("BASE_IMAGE") or "python:3.11-slim-bookworm"
READER, PASSWORD = "reader", "PASSWORD"
USER = f"{READER}:$2b$04$EdmwOrEqKVoiAc5Nt5uOTOj.6DIE5KbqsuHGjUSxci/PnLYKxjpnm"
VARIABLES = {
    "make image": {"IMAGE": NAME},  # lockstep:cpu may be the one of whoever runs the tests
    "make smoke": {"IMAGE": NAME, "SET": "epochs=2", "ACCURACY": "0"},  # a few steps: it is the same three nodes
    "make submit-compose": {"IMAGE": f"{NAME}:cpu"},
    # The whole image would be a gigabyte to compress; what is pushed is its first stage.
    "make image-cpu push": {"MAKEFLAGS": "TARGET=base"},
}
"""What stands in a command's environment, by how it begins; the longest last."""


class Place(Reader):
    """A clone, and names of its own in the engine."""

    MARKER = "in an engine"
    BOUND = 900

    def __init__(self, folder: Path, registry: str, env: dict[str, str]) -> None:
        super().__init__(folder, env)
        self.registry, self.suffix = registry, f"-{os.getpid()}"

    def own(self, text: str) -> str:
        """What a page or a job file prints, but for what differs here."""
        registry, suffix = self.registry, self.suffix
        table = {
            r"(?<![\w/.-])lockstep:cpu": f"{NAME}:cpu",  # what make image-cpu builds here
            r"registry\.example/team": f"{registry}/team",  # a real registry, with a password
            r"registry\.example/python": "localhost:5000/python",
            r"docker login registry\.example": f"echo {PASSWORD} | docker login {registry} -u {READER} --password-stdin",
            r"WHEELS=wheels": f"WHEELS={os.environ.get('WHEELS')}",  # downloaded already
            # Jobs and volumes of others on this engine are left alone.
            r"(?m)^name: (rehearsal|smoke|mine)$": rf"name: \1{suffix}",
            r"(?<=compose )(rehearsal|smoke|mine)(?= |$)": rf"\1{suffix}",
            r"lockstep-rehearsal-node": f"lockstep-rehearsal{suffix}-node",
            r"(?<=claim: )(lockstep-\w+)": rf"\1{suffix}",
            # Long enough for a node to be killed in the middle; short where the end is waited for.
            r"(?m)^overrides: \{epochs: 1\}$": "overrides: {epochs: 20}",
            r"(?m)^recipe: smoke\nimage:": "recipe: smoke\noverrides: {epochs: 1}\nimage:",
            r"config\.epochs: 6": "config.epochs: 2",
        }
        for pattern, replacement in table.items():
            text = re.sub(pattern, replacement, text)
        return text

    def passes(self, command: str, done: Result) -> bool:
        """A small machine may have too little memory, of which doctor says so."""
        return super().passes(command, done) or (" doctor " in command and "missing" in done.output)

    def run(self, command: str) -> Result:
        # `make smoke` as it stands is run by test_smoke.py; a node is killed in the middle of its job.
        if command == "make smoke" or command.startswith("docker kill"):
            return Result(0, "")
        usual = self.env
        self.env = dict(usual)
        for begins, more in VARIABLES.items():
            self.env |= more if command.startswith(begins) else {}
        try:
            return super().run(command)
        finally:
            self.env = usual

    def pushed(self, done: Result) -> None:
        (digest,) = re.findall(rf"^{self.registry}/team/lockstep@sha256:[0-9a-f]{{64}}$", done.output, re.MULTILINE)
        assert "Name:" in docker("buildx", "imagetools", "inspect", digest, env=self.env), "the registry has it"
        noted = json.loads((self.folder / "build/images.json").read_text())
        assert digest in [name for flavours in noted.values() for name in flavours.values()], "for make submit-k8s"

    def submitted(self, done: Result) -> None:
        """To the end."""
        (name,) = set(re.findall(r"\b(?:smoke|mine)-\d+\b", done.output))
        ended = self.run(f"lockstep wait compose {name} --timeout 600")
        assert ended.code == 0 and "succeeded" in ended.output, ended.output
        logs = self.run(f"lockstep logs compose {name} --rank 0").output
        assert '"event": "done"' in logs, logs

    def killed_and_brought_back(self, done: Result) -> None:
        """What the page says of a node that is killed: printed for the middle of a job, so it is done in the middle."""
        (kill,) = [text for text in marked(self.MARKER, "docs/containers.md") if text.startswith("docker kill")]
        job = f"rehearsal{self.suffix}"

        def trains() -> bool:
            return '"event": "checkpoint_written"' in self.run(f"lockstep logs compose {job} --rank 0").output

        poll(trains, 180, "a checkpoint")
        assert super().run(self.own(kill)).code == 0
        said = ""

        def named() -> bool:
            nonlocal said
            said = self.run(f"lockstep status compose {job}").output
            return "node-1 was killed" in said

        try:
            poll(named, 60, "the node is named")
        except AssertionError as error:
            raise AssertionError(said) from error
        again = self.run("lockstep submit compose rehearsal.yaml")
        assert again.code == 0, again.output

    def ran(self, done: Result) -> None:
        """What its job or image does is shown where it is about that."""

    CHECKS: ClassVar = {
        "make image-cpu push": pushed,
        "lockstep submit compose rehearsal": killed_and_brought_back,
        "lockstep submit|make submit": submitted,
        "": ran,
    }


@pytest.fixture(scope="module")
def registry(engine: str) -> Iterator[str]:
    with registry_at(USER) as address:
        yield address


@pytest.fixture
def place(cpu_image: Built, registry: str, tmp_path: Path) -> Iterator[Place]:
    """Who pushed has logged in; the page that prints how begins without that."""
    folder = copy_to(tmp_path / "lockstep")
    env = environment(folder, tmp_path / "home", DOCKER_CONFIG=str(tmp_path / "docker"))
    found = Place(folder, registry, env)
    session = inspect(cpu_image.name)[0]["Id"]
    yield found
    pages = inspect(cpu_image.name)[0]["Id"]
    docker("tag", session, cpu_image.name)  # a page's `make image-cpu` takes the tag, and its copy knows no revision
    remove_jobs(*(f"{name}{found.suffix}" for name in ("rehearsal", "smoke", "mine")))
    volumes = [name for name in docker("volume", "ls", "--quiet").split() if name.endswith(found.suffix)]
    known = docker("images", "--format", "{{.Repository}}:{{.Tag}}").split()
    images = [name for name in known if name.startswith((registry, "localhost:5000/python"))]
    images += [pages] if pages != session else []
    for words in (["volume", "rm", "--force", *volumes], ["image", "rm", "--force", *images]):
        docker(*words, check=False)


@pytest.mark.parametrize("page", pages(Place.MARKER))
def test_what_the_page_prints_works_in_the_engine(page: str, place: Place) -> None:
    commands = marked(Place.MARKER, page)
    (place.folder / "pip.conf").write_text("[global]\nretries = 5\n")
    (place.folder / "proxy.pem").write_text("# no proxy here\n")
    if any("registry.example/python" in command for command in commands):
        require(os.environ.get("WHEELS"), "WHEELS names no folder of packages")
        docker("tag", BASE, "localhost:5000/python:3.11-slim-bookworm")  # as if it had been carried there
    if "docker login registry.example" not in commands:
        assert place.run(place.own("docker login registry.example")).code == 0
    if "make submit-compose" not in commands:
        place.NEEDED = "never"
    place.reads(page)
