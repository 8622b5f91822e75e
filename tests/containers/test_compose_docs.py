"""The commands of the documentation that need a container engine, as they are printed, in a real one."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.checkout import copy_to, environment
from tests.engine import NAME, Built, docker, inspect, registry_at, remove_jobs
from tests.printed import Reader, marked, pages
from tests.processes import Result, poll, require
from tests.terminal import at_a_terminal, drained, until_shown

pytestmark = [pytest.mark.containers, pytest.mark.promise("printed")]
BASE = os.environ.get("BASE_IMAGE") or "python:3.11-slim-bookworm"
READER, PASSWORD = "reader", "PASSWORD"
USER = f"{READER}:$2b$04$EdmwOrEqKVoiAc5Nt5uOTOj.6DIE5KbqsuHGjUSxci/PnLYKxjpnm"
VARIABLES = {
    "make image": {"IMAGE": NAME},  # lockstep:cpu may be the one of whoever runs the tests
    "make smoke": {"IMAGE": NAME, "SET": "epochs=2", "ACCURACY": "0"},  # a few steps: it is the same three nodes
    "make submit-compose": {"IMAGE": f"{NAME}:cpu"},
    # The whole image would be a gigabyte to compress; what is pushed is its first stage.
    "make image-cpu push": {"BUILD_FLAGS": "--target base"},
}
"""What stands in a command's environment, by how it begins; the longest last."""


class Place(Reader):
    """A clone, and names of its own in the engine."""

    MARKER = "in an engine"
    BOUND = 900

    def __init__(self, folder: Path, registry: str, env: dict[str, str]) -> None:
        super().__init__(folder, env)
        self.registry, self.suffix, self.digest = registry, f"-{os.getpid()}", ""

    def own(self, text: str) -> str:
        """What a page or a job file prints, but for what differs here."""
        registry, suffix = self.registry, self.suffix
        table = {
            r"(?<![\w/.-])lockstep:cpu": f"{NAME}:cpu",  # what make image-cpu builds here
            r"registry\.example/team": f"{registry}/team",  # a real registry, with a password
            r"(?<=login )registry\.example": registry,
            r"registry\.example/python": "localhost:5000/python",
            r"(?<=inspect )python:": f"{registry}/python:",
            r"python@sha256:…": f"{registry}/python@{self.digest}",  # what the command before it has printed
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

    def run(self, command: str) -> Result:
        # `make smoke` as it stands is run by test_smoke.py; a node is killed in the middle of its job.
        if command == "make smoke" or command.startswith("docker kill"):
            return Result(0, "")
        if command.startswith("docker login"):
            return self.type(command)
        usual = self.env
        self.env = dict(usual)
        for begins, more in VARIABLES.items():
            self.env |= more if command.startswith(begins) else {}
        try:
            return super().run(command)
        finally:
            self.env = usual

    def type(self, command: str) -> Result:
        """`docker login` asks a person."""
        words = ["bash", "-c", f"cd {shlex.quote(str(self.here))}; exec {command}"]
        with at_a_terminal(words, self.env) as (process, ours, _):
            shown = b""
            for asked, answer in (("Username", READER), ("Password", PASSWORD)):
                shown += until_shown(ours, asked.encode(), 60)
                os.write(ours, f"{answer}\n".encode())
            poll(lambda: process.poll() is not None, 60, f"the end of {command}")
            return Result(process.returncode, (shown + drained(ours)).decode())

    def built(self, done: Result) -> None:
        assert inspect(f"{NAME}:cpu")[0]["Config"]["User"] == "1000:0"

    def smoke(self, done: Result) -> None:
        assert re.search(r"^ok +ranks that trained +3 in 3 containers$", done.output, re.MULTILINE), done.output
        assert re.search(r"^ok +left behind +nothing$", done.output, re.MULTILINE), done.output

    def logged_in(self, done: Result) -> None:
        held = json.loads((Path(self.env["DOCKER_CONFIG"]) / "config.json").read_text())
        assert "Login Succeeded" in done.output and self.registry in held["auths"], done.output

    def pushed(self, done: Result) -> None:
        (digest,) = re.findall(rf"^{self.registry}/team/lockstep@sha256:[0-9a-f]{{64}}$", done.output, re.MULTILINE)
        assert "Name:" in docker("buildx", "imagetools", "inspect", digest, env=self.env), "the registry has it"
        noted = json.loads((self.folder / "build/images.json").read_text())
        assert digest in [name for flavours in noted.values() for name in flavours.values()], "for make submit-k8s"

    def named(self, done: Result) -> None:
        self.digest = done.output.strip().strip('"')
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", self.digest), done.output

    def prepared(self, done: Result) -> None:
        assert f"lockstep-data{self.suffix}" in docker("volume", "ls", "--quiet"), done.output

    def examined(self, done: Result) -> None:
        assert re.search(r"^engine +ok", done.output, re.MULTILINE), done.output
        missing = re.findall(r"^(\S+) +missing", done.output, re.MULTILINE)
        assert set(missing) <= {"memory"}, done.output  # a small machine may have too little

    def shards_are_there(self, done: Result) -> None:
        self.examined(done)
        assert re.search(r"^shards +ok", done.output, re.MULTILINE), done.output

    def submitted(self, done: Result) -> None:
        """To the end."""
        (name,) = set(re.findall(r"\b(?:smoke|mine)-\d+\b", done.output))
        ended = self.run(f"lockstep wait compose {name} --timeout 600")
        assert ended.code == 0 and "succeeded" in ended.output, ended.output
        logs = self.run(f"lockstep logs compose {name} --rank 0").output
        assert '"event": "done"' in logs, logs

    def killed_and_brought_back(self, done: Result) -> None:
        """What the page says of a node that is killed: printed for the middle of a job, so it is done in the middle."""
        (kill,) = [
            text for text in marked(self.MARKER, "docs/how-to/rehearse-in-compose.md") if text.startswith("docker kill")
        ]
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

    def located(self, done: Result) -> None:
        assert done.output.startswith(f"rehearsal{self.suffix}: "), done.output

    def ended_well(self, done: Result) -> None:
        assert "succeeded" in done.output, done.output

    def told(self, done: Result) -> None:
        """What a job logs is JSON, of both attempts."""
        events = [json.loads(line) for line in done.output.splitlines() if line.startswith('{"event"')]
        starts = [event["step"] for event in events if event["event"] == "start"]
        assert starts[0] == 0 and starts[-1] > 0 and events[-1]["event"] == "done", done.output

    def listed(self, done: Result) -> None:
        assert re.search(rf"^rehearsal{self.suffix} +succeeded", done.output, re.MULTILINE), done.output

    def elsewhere(self, done: Result) -> None:
        """Nothing was run here."""

    CHECKS: ClassVar = {
        "make smoke$|docker kill": elsewhere,
        "make image-cpu push": pushed,
        "make image-cpu": built,
        "make smoke NODES=3": smoke,
        "docker login": logged_in,
        "docker buildx imagetools": named,
        "lockstep prepare": prepared,
        "lockstep doctor compose job.yaml": shards_are_there,
        "lockstep doctor": examined,
        "lockstep submit compose rehearsal": killed_and_brought_back,
        "lockstep submit|make submit": submitted,
        "lockstep status": located,
        "lockstep wait": ended_well,
        "lockstep logs": told,
        "lockstep list": listed,
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
        place.logged_in(place.type(f"docker login {place.registry}"))
    if any("imagetools" in command for command in commands):
        docker("tag", BASE, f"{place.registry}/python:3.11-slim-bookworm")
        docker("push", f"{place.registry}/python:3.11-slim-bookworm", env=place.env)
    if "make submit-compose" not in commands:
        place.NEEDED = "never"
    place.reads(page)
