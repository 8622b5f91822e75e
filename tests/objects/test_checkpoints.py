"""A run whose nodes keep nothing: its checkpoints are in a bucket, and every start has an empty run directory."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests import product
from tests.objects.server import FAULTS, Proxy, environment, moto, objects, put, read
from tests.printed import PAGES, Reader, marked
from tests.processes import PYTHON, ROOT, Result, poll
from tests.warm.gang import Gang, running

pytestmark = pytest.mark.promise("object-stores")
JOB = str(ROOT / "tests/objects/job.py")
BOUND = 240
_prefixes = iter(range(10**6))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with moto(tmp_path_factory.mktemp("moto")) as port:
        yield port


@pytest.fixture(scope="module")
def _proxy(server: int) -> Iterator[Proxy]:
    proxy = Proxy(server)
    yield proxy
    proxy.close()


@pytest.fixture
def proxy(_proxy: Proxy) -> Iterator[Proxy]:
    _proxy.reset()
    yield _proxy
    _proxy.reset()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the weights at the end of a run without a bucket."""
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    with running([[JOB, str(run_dir), "s3://bucket/none", "checkpoint.to=null"]]) as gang:
        done = gang.wait(BOUND)
    assert done.code == 0, done.output
    return ended(run_dir)


def new() -> str:
    """A prefix that no other test has."""
    return f"run-{os.getpid()}-{next(_prefixes)}"


def start(proxy: Proxy, run_dir: Path, name: str, *words: str, ranks: int = 1, **variables: str) -> Any:
    env = {**environment(proxy.port), **variables}
    return running([[JOB, str(run_dir), f"s3://bucket/{name}", *words]] * ranks, env)


def go(proxy: Proxy, run_dir: Path, name: str, *words: str, ranks: int = 1, **variables: str) -> Result:
    with start(proxy, run_dir, name, *words, ranks=ranks, **variables) as gang:
        found: Result = gang.wait(BOUND)
    return found


def ended(run_dir: Path) -> str:
    return str(json.loads((run_dir / "summary.json").read_text())["weights_sha256"])


def head(server: int, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read(server, f"{name}/head"))
    return found


def steps(server: int, name: str) -> list[int]:
    return [kept["step"] for kept in head(server, name)["checkpoints"]]


def assert_nothing_else(server: int, name: str) -> None:
    """The bucket has what the head names, and nothing that is not."""
    found = head(server, name)
    files = [found["settings"], *(file for kept in found["checkpoints"] for file in kept["files"].values())]
    assert objects(server, name).keys() == {"head", *(file["key"] for file in files)}
    assert all(objects(server, name)[file["key"]] == file["bytes"] for file in files)


def test_another_node_resumes_and_has_the_best_one_too(
    server: int, proxy: Proxy, expected: str, tmp_path: Path
) -> None:
    name = new()
    first = go(proxy, tmp_path / "a", name, ranks=2, STEPS="9")
    assert first.code == 0 and steps(server, name) == [9, 6], first.output
    second = go(proxy, tmp_path / "b", name)
    assert second.code == 0 and "Resuming at step 9" in second.output, second.output
    assert ended(tmp_path / "b") == expected and steps(server, name) == [12, 6]
    assert sorted(path.name for path in (tmp_path / "b/checkpoints").iterdir()) == ["step-00000006", "step-00000012"]
    go(proxy, tmp_path / "c", name)  # a start that has nothing to do cleans up all the same
    assert_nothing_else(server, name)


def assert_killed_at(proxy: Proxy, number: int, when: str, expected: str, tmp_path: Path) -> None:
    """The node is lost at this request of its first start. Another one ends the run, and the bucket has always had what it names."""
    name = new()
    gang: Gang
    killed: list[int] = []

    def kill() -> None:
        os.kill(gang.rank_pid(0), signal.SIGKILL)
        killed.append(number)

    proxy.kill = kill
    proxy.reset(lambda count, *_: f"kill {when}" if count == number else "")
    with start(proxy, tmp_path / "a", name) as gang:
        gang.wait(BOUND)
    assert killed == [number]
    proxy.reset()
    before = set(objects(proxy.server, name))
    if "head" in before:
        for kept in head(proxy.server, name)["checkpoints"]:
            assert {file["key"] for file in kept["files"].values()} <= before
    then = tmp_path / ("a" if number % 3 == 0 else "b")  # or it comes anew on the same node
    done = go(proxy, then, name)
    assert done.code == 0 and ended(then) == expected, done.output
    assert_nothing_else(proxy.server, name)


@pytest.fixture(scope="module")
def requests(_proxy: Proxy, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Of an undisturbed run."""
    _proxy.reset()
    done = go(_proxy, tmp_path_factory.mktemp("count") / "run", new())
    assert done.code == 0, done.output
    return len(_proxy.requests)


def test_killed_at_a_request(proxy: Proxy, requests: int, expected: str, tmp_path: Path) -> None:
    """Six of all, others each night."""
    draw = random.Random(1)
    for place in range(6):
        number = draw.randrange(place * requests // 6, (place + 1) * requests // 6)
        assert_killed_at(proxy, number, draw.choice(("before", "after")), expected, tmp_path / str(place))


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_request(when: str, proxy: Proxy, requests: int, expected: str, tmp_path: Path) -> None:
    for number in range(requests):
        assert_killed_at(proxy, number, when, expected, tmp_path / str(number))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_now_and_then(fault: str, proxy: Proxy, expected: str, tmp_path: Path) -> None:
    """Every fifth request fails in this way. What was damaged on the way is sent again at the next save; the run ends as it would."""
    name = new()
    proxy.reset(lambda count, *_: fault if count % 5 == 3 else "")
    done = go(proxy, tmp_path / "a", name)
    proxy.reset()
    assert done.code in (0, 1) and "Traceback" not in done.output, done.output
    again = go(proxy, tmp_path / "b", name)
    assert again.code == 0 and ended(tmp_path / "b") == expected, done.output + again.output
    assert_nothing_else(proxy.server, name)


def test_of_two_that_write_the_later_one_has_it(server: int, proxy: Proxy, expected: str, tmp_path: Path) -> None:
    """The earlier attempt is stopped between two saves, as on a node that was cut off, and goes on when another has taken over."""
    name = new()
    with start(proxy, tmp_path / "a", name, WAIT=str(tmp_path / "go")) as early:
        poll(lambda: "head" in objects(server, name) and steps(server, name) == [6], BOUND, "the second checkpoint")
        late = go(proxy, tmp_path / "b", name)
        assert late.code == 0 and ended(tmp_path / "b") == expected, late.output
        (tmp_path / "go").touch()
        done = early.wait(BOUND)
    assert done.code == 2 and f"another attempt has taken s3://bucket/{name} over" in done.output, done.output
    assert "Traceback" not in done.output and steps(server, name) == [12, 6]
    go(proxy, tmp_path / "c", name)
    assert_nothing_else(server, name)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    server: int, proxy: Proxy, expected: str, tmp_path: Path
) -> None:
    name = new()

    def damage() -> str:
        file = head(server, name)["checkpoints"][0]["files"]["state.safetensors"]["key"]
        data = read(server, f"{name}/{file}")
        put(server, f"{name}/{file}", data[:-1] + bytes([data[-1] ^ 1]))
        return str(file)

    assert go(proxy, tmp_path / "a", name, "checkpoint.keep=3", STEPS="9").code == 0
    before = {kept["step"]: kept for kept in head(server, name)["checkpoints"]}
    assert before.keys() == {9, 6, 3}
    newest = damage()
    done = go(proxy, tmp_path / "b", name)
    assert done.code == 0 and "Resuming at step 6" in done.output, done.output
    assert "corrupt in the bucket" in done.output and newest in done.output, done.output
    assert ended(tmp_path / "b") == expected and steps(server, name) == [12, 6]
    file = tmp_path / "b/checkpoints/step-00000012/state.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    again = go(proxy, tmp_path / "b", name)
    assert again.code == 0 and "The run is complete" in again.output, again.output
    product.checkpoint(file.parent)
    damage()
    less = go(proxy, tmp_path / "c", name, STEPS="9")  # it ends before the step of the damaged one
    assert less.code == 0 and "Resuming at step 6" in less.output and steps(server, name) == [9, 6], less.output


def test_what_could_not_be_sent_is_sent_by_the_next_start(
    server: int, proxy: Proxy, expected: str, tmp_path: Path
) -> None:
    name = new()
    proxy.reset(lambda _, method, path: "500" if method == "PUT" and "step-00000012" in path else "")
    done = go(proxy, tmp_path / "a", name)
    assert done.code == 1 and "could not be saved" in done.output and steps(server, name) == [9, 6], done.output
    proxy.reset()
    again = go(proxy, tmp_path / "a", name)
    assert again.code == 0 and steps(server, name) == [12, 6], again.output
    assert ended(tmp_path / "a") == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[]", "is not what a run writes"),
        (b"{" * 100_000, "is not what a run writes"),
        (b'{"format": 2}', "is not what a run writes"),
        (b" " * (5 << 20), "has 5242880 bytes, at most 4194304 are read"),
    ],
)
def test_a_head_of_somebody_else_is_left_alone(
    text: bytes, says: str, server: int, proxy: Proxy, tmp_path: Path
) -> None:
    name = new()
    put(server, f"{name}/head", text)
    done = go(proxy, tmp_path / "a", name)
    assert done.code == 1 and says in done.output and "Traceback" not in done.output, done.output
    assert read(server, f"{name}/head") == text


def test_the_bucket_of_another_run_is_refused_and_fresh_keeps_the_old_one(
    server: int, proxy: Proxy, expected: str, tmp_path: Path
) -> None:
    name, other = new(), new()
    assert go(proxy, tmp_path / "a", name).code == 0
    assert go(proxy, tmp_path / "b", other, STEPS="3").code == 0
    before = head(server, name)
    refused = go(proxy, tmp_path / "b", name)
    assert refused.code == 2 and "has the checkpoints of another run" in refused.output, refused.output
    assert head(server, name) == before
    different = go(proxy, tmp_path / "c", name, "seed=5")
    assert different.code == 2 and "holds a run with another config" in different.output, different.output
    now = head(server, name)
    assert now == before
    proxy.reset(lambda _, method, path: "503" if method == "GET" and path.endswith("run.yaml") else "")
    done = go(proxy, tmp_path / "d", name, FRESH="a job's word")
    assert done.code == 1 and "checkpoint.to cannot be used" in done.output and head(server, name) == now, done.output
    proxy.reset()
    done = go(proxy, tmp_path / "b", name, FRESH="1")
    assert done.code == 0 and ended(tmp_path / "b") == expected, done.output
    assert head(server, name)["run"] != now["run"] and steps(server, name) == [12, 6]
    old = json.loads(read(server, f"{name}/replaced/{now['commit']}"))
    kept = [file["key"] for kept in old["checkpoints"] for file in kept["files"].values()]
    assert kept and {*kept} <= objects(server, name).keys()


def test_without_a_bucket_or_a_server_it_says_so(proxy: Proxy, tmp_path: Path) -> None:
    with running([[JOB, str(tmp_path / "a"), "s3://no-bucket/run"]], environment(proxy.port)) as gang:
        done = gang.wait(BOUND)
    assert done.code == 1 and "s3://no-bucket/run/head: there is no such bucket" in done.output, done.output
    proxy.reset(lambda *_: "503")
    done = go(proxy, tmp_path / "b", new())
    assert done.code == 1 and "checkpoint.to cannot be used" in done.output and "503" in done.output, done.output
    proxy.reset()
    with running([[JOB, str(tmp_path / "c"), "http://bucket/run"]], environment(proxy.port)) as gang:
        done = gang.wait(BOUND)
    assert done.code == 2 and "must be s3://BUCKET/PREFIX" in done.output, done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("header", ["if-match", "if-none-match"])
def test_a_store_without_conditional_writes_is_refused(header: str, proxy: Proxy, tmp_path: Path) -> None:
    proxy.unconditional = header
    done = go(proxy, tmp_path / "a", new())
    assert done.code == 1 and "the store has no conditional writes" in done.output, done.output
    assert "Traceback" not in done.output


class Place(Reader):
    """A folder, and a bucket that is there."""

    MARKER = "in a bucket"
    CHECKS: ClassVar[dict[str, Callable[[Any, Result], None]]] = {
        r".*runs/a": lambda _, done: done.output.index("Final validation accuracy"),
        r".*runs/b": lambda _, done: done.output.index("Resuming at step"),
    }

    def own(self, text: str) -> str:
        return text.replace("s3://BUCKET", "s3://bucket")


@pytest.mark.parametrize("page", [page for page in PAGES if marked(Place.MARKER, page)])
def test_a_page_as_it_is_printed(page: str, proxy: Proxy, tmp_path: Path) -> None:
    path = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
    Place(tmp_path, {**environment(proxy.port), "PATH": path}).reads(page)
