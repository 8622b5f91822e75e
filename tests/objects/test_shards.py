"""Shards in a bucket: sent once, fetched once a node, and verified."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.events import weights_digest
from tests.objects.server import Proxy, environment, objects, put, read
from tests.processes import Result, poll
from tests.ranks import gang, training
from tests.warm.process import start

pytestmark = pytest.mark.promise("bucket-shards")
NAME = "shards"


@pytest.fixture(scope="module")
def shards_url(server: int, tiny: list[str]) -> str:
    """Sends the small run's shards. Returns their URL."""
    done = training("shard", "smoke", "--out", f"s3://bucket/{NAME}", "--set", *tiny, env=environment(server))
    assert done.code == 0 and f"sent to s3://bucket/{NAME}" in done.output, done.output
    return f"s3://bucket/{NAME}"


@pytest.fixture
def here(proxy: Proxy, shards_url: str, tiny: list[str], tmp_path: Path) -> Node:
    return Node(proxy, [*tiny, f"data.shards={shards_url}", "epochs=1"], tmp_path)


class Node:
    """Runs on a node with a separate disk, and their requests to the bucket."""

    def __init__(self, proxy: Proxy, settings: list[str], folder: Path) -> None:
        self.proxy, self.settings, self.folder = proxy, settings, folder

    def go(self, name: str = "run", *words: str, ranks: int = 1) -> Result:
        settings = [*self.settings, f"data.root={self.folder / 'data'}", *words]
        run = ["run", "smoke", "--run-dir", str(self.folder / name), "--set", *settings]
        return gang(ranks, *run, env=environment(self.proxy.port))

    def weights(self, name: str = "run") -> str:
        return weights_digest(self.folder / name)

    @property
    def shards(self) -> dict[str, Path]:
        return {path.name: path for path in (self.folder / "data/shards/fetched").glob("[!.]*")}

    def fetch_counts(self) -> Counter[str]:
        """Returns how often each shard's body was sent, in full or in part."""
        paths = [path for method, path in self.proxy.requests if method == "GET" and path.endswith(".safetensors")]
        shards = [path for path in paths if "/evaluated/" not in path]  # a checkpoint
        return Counter(shards)


@pytest.fixture(scope="module")
def expected(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the weights of one rank that reads the shards of its local disk."""
    run_dir = tmp_path_factory.mktemp("local") / "run"
    assert gang(1, "run", "smoke", "--run-dir", str(run_dir), "--set", *tiny, "epochs=1").code == 0
    return weights_digest(run_dir)


def test_a_node_fetches_each_shard_once_and_trains_as_from_its_disk(here: Node, expected: str) -> None:
    first = here.go("two", ranks=2)
    assert first.code == 0, first.output
    assert len(here.shards) == 2 and set(here.fetch_counts().values()) == {1} and len(here.fetch_counts()) == 2
    here.proxy.reset()
    second = here.go("one")
    assert second.code == 0 and here.weights("one") == expected and not here.fetch_counts(), second.output
    file = next(iter(here.shards.values()))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    third = here.go("again")
    assert third.code == 0 and here.weights("again") == expected, third.output
    assert list(here.fetch_counts().values()) == [1]
    done = training("evaluate", str(here.folder / "one"), "--trust-model", env=environment(here.proxy.port))
    assert done.code == 0 and "of 50" in done.output, done.output


@pytest.mark.parametrize("fault", ["cut", "truncated"])
def test_what_is_lost_on_the_way_is_fetched_again(fault: str, here: Node, expected: str) -> None:
    here.proxy.reset(lambda number, *_: fault if number % 4 == 1 else "")
    done = here.go()
    assert done.code == 0 and here.weights() == expected, done.output


def test_what_stays_damaged_is_named(here: Node) -> None:
    here.proxy.reset(lambda _, method, path: "flipped" if method == "GET" and "safetensors" in path else "")
    done = here.go()
    assert done.code == 2 and ".safetensors has sha256 " in done.output, done.output
    assert not here.shards
    here.proxy.reset(lambda _, method, path: "403" if method == "GET" and "safetensors" in path else "")
    done = here.go()
    assert done.code == 2 and "data.shards cannot be used: s3://bucket/shards/" in done.output, done.output
    here.proxy.reset()
    done = here.go("run", "data.shards=s3://bucket/nothing-there")
    assert done.code == 2 and "s3://bucket/nothing-there/manifest.json: there is no such object" in done.output
    put(here.proxy.server, "strange/manifest.json", b'{"format": 1}')
    done = here.go("run", "data.shards=s3://bucket/strange")
    assert done.code == 2 and "s3://bucket/strange/manifest.json is malformed" in done.output, done.output
    done = here.go("run", "data.shards=ftp://bucket/shards")
    assert done.code == 2 and "must be s3://BUCKET/PREFIX" in done.output, done.output


def test_shards_are_there_with_their_manifest_or_not_at_all(proxy: Proxy, tiny: list[str], tmp_path: Path) -> None:
    """A killed sender leaves no manifest, and the next sends all. Of two senders one succeeds, and the other reports it."""
    words = ["shard", "smoke", "--out", "s3://bucket/once", "--set", *tiny]
    kills = []

    def kill() -> None:
        kills.append(1)
        process.end()

    proxy.kill = kill
    proxy.reset(lambda _, method, path: "kill before" if method == "PUT" and path.endswith("manifest.json") else "")
    with (tmp_path / "log").open("w") as log:
        process = start(["-m", "lockstep.training", *words], environment(proxy.port), log.fileno(), cwd=tmp_path)
        poll(lambda: process.poll() is not None, 120, "the end of the sender")
    assert kills and len(objects(proxy.server, "once")) == 2
    lost_paths: list[str] = []

    def once(_: int, method: str, path: str) -> str:
        if lost_paths or method != "PUT" or not path.endswith("manifest.json"):
            return ""
        lost_paths.append(path)
        return "lost"

    proxy.reset(once)
    done = training(*words, env=environment(proxy.port))
    assert done.code == 0, done.output
    before = objects(proxy.server, "once")
    assert before.keys() == {
        "manifest.json",
        *(name for name in before if re.fullmatch(r"[0-9a-f]{64}\.safetensors", name)),
    }

    def late(number: int, method: str, path: str) -> str:
        if method == "PUT" and "twice/manifest.json" in path:
            put(proxy.server, "twice/manifest.json", b"of another one")
        return ""

    proxy.reset(late)
    words[3] = "s3://bucket/twice"
    done = training(*words, env=environment(proxy.port))
    assert done.code == 2 and "exists already, and has shards" in done.output, done.output
    assert read(proxy.server, "twice/manifest.json") == b"of another one"
    words[3] = "s3://no-bucket/x"
    done = training(*words, env=environment(proxy.port))
    assert done.code == 1 and "there is no such bucket" in done.output and "Traceback" not in done.output, done.output
