"""A run whose nodes keep nothing: its checkpoints are in a bucket, and every start has an empty run directory."""

from __future__ import annotations

import contextlib
import email.utils
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.events import events, weights_digest
from tests.faults.test_launcher_nodes import two_namespaces
from tests.objects.server import FAULTS, Proxy, environment, objects, put, read
from tests.processes import PYTHON, ROOT, Result, poll, ranks_of, started
from tests.ranks import live
from tests.warm.gang import Gang, running

pytestmark = pytest.mark.promise("object-stores")
JOB = str(ROOT / "tests/objects/job.py")
BOUND = 240
_prefixes = iter(range(10**6))


def new() -> str:
    """Returns a prefix that no other test has."""
    return f"run-{os.getpid()}-{next(_prefixes)}"


def start(proxy: Proxy, run_dir: Path, name: str, *words: str, ranks: int = 1, **variables: str) -> Any:
    """Starts the job. By default (`PACE`) it waits for the bucket before each checkpoint, so its requests are always the same."""
    env = {**environment(proxy.port), "SERVER": str(proxy.server), "PACE": str(BOUND), **variables}
    return running([[JOB, str(run_dir), f"s3://bucket/{name}", *words]] * ranks, env)


def go(proxy: Proxy, run_dir: Path, name: str, *words: str, ranks: int = 1, **variables: str) -> Result:
    with start(proxy, run_dir, name, *words, ranks=ranks, **variables) as gang:
        result: Result = gang.wait(BOUND)
    return result


def head(server: int, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(read(server, f"{name}/head"))
    return content


def steps(server: int, name: str) -> list[int]:
    return [entry["step"] for entry in head(server, name)["checkpoints"]]


def files(entry: dict[str, Any]) -> set[str]:
    """Returns the keys of a checkpoint in the head."""
    names = ("state.json", "state.safetensors", "manifest.json")
    return {f"{entry['commit']}/step-{entry['step']:08d}/{name}" for name in names}


def assert_nothing_else(server: int, name: str) -> None:
    """The bucket has exactly the objects that the head names."""
    content = head(server, name)
    assert objects(server, name).keys() == {"head", content["archive"]}.union(*map(files, content["checkpoints"]))


def test_another_node_resumes_and_fetches_the_best_checkpoint(
    server: int, proxy: Proxy, expected: str, tmp_path: Path
) -> None:
    """The times in the server's answers do not matter."""
    name, draw = new(), random.Random(1)
    proxy.clock = lambda: email.utils.formatdate(draw.uniform(0, 2**32), usegmt=True)
    first = go(proxy, tmp_path / "a", name, ranks=2, STEPS="9")
    assert first.code == 0 and steps(server, name) == [9, 6], first.output
    second = go(proxy, tmp_path / "b", name)
    assert second.code == 0 and "Resuming at step 9" in second.output, second.output
    assert weights_digest(tmp_path / "b") == expected and steps(server, name) == [12, 6]
    assert sorted(path.name for path in (tmp_path / "b/checkpoints").iterdir()) == ["step-00000006", "step-00000012"]
    go(proxy, tmp_path / "c", name)  # a start that has nothing to do cleans up all the same
    assert_nothing_else(server, name)


def assert_killed_at(proxy: Proxy, number: int, when: str, expected: str, tmp_path: Path) -> None:
    """The node is lost at this request of its first start. Another node ends the run, and every object in the head exists."""
    name = new()
    gang: Gang
    kills: list[int] = []

    def kill() -> None:
        os.kill(gang.rank_pid(0), signal.SIGKILL)
        kills.append(number)

    proxy.kill = kill
    proxy.reset(lambda count, *_: f"kill {when}" if count == number else "")
    with start(proxy, tmp_path / "a", name) as gang:
        gang.wait(BOUND)
    assert kills == [number]
    proxy.reset()
    before = set(objects(proxy.server, name))
    if "head" in before:
        for entry in head(proxy.server, name)["checkpoints"]:
            assert files(entry) <= before
    run_dir = tmp_path / ("a" if number % 3 == 0 else "b")  # the same node, or another
    done = go(proxy, run_dir, name)
    assert done.code == 0 and weights_digest(run_dir) == expected, done.output
    assert_nothing_else(proxy.server, name)


@pytest.fixture(scope="module")
def requests(shared_proxy: Proxy, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Returns the requests of an undisturbed run."""
    shared_proxy.reset()
    done = go(shared_proxy, tmp_path_factory.mktemp("count") / "run", new())
    assert done.code == 0, done.output
    return [*shared_proxy.requests]


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_request(
    when: str, proxy: Proxy, requests: list[tuple[str, str]], expected: str, tmp_path: Path
) -> None:
    for number in range(len(requests)):
        assert_killed_at(proxy, number, when, expected, tmp_path / str(number))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 54))])
def test_nodes_are_lost_at_any_moment(
    seed: int, proxy: Proxy, requests: list[tuple[str, str]], expected: str, tmp_path: Path
) -> None:
    """Up to three nodes are lost, one after the other, at any moment of a start; each start has an empty disk."""
    draw, name = random.Random(seed), new()
    for number in range(draw.choice((1, 2, 3))):
        at, when, pause = (
            draw.randrange(len(requests)),
            draw.choice(("before", "after")),
            draw.choice((0.0, 0.0, 0.01, 0.2)),
        )
        proxy.reset(lambda count, *_, at=at, when=when: f"kill {when}" if count == at else "")
        run_dir = tmp_path / str(number)
        with start(proxy, run_dir, name, PACE=draw.choice(("0", str(BOUND)))) as gang:

            def kill(gang: Gang = gang, pause: float = pause) -> None:
                time.sleep(pause)  # also at a moment between two requests
                with contextlib.suppress(ProcessLookupError):
                    os.kill(gang.rank_pid(0), signal.SIGKILL)

            proxy.kill = kill
            done = gang.wait(BOUND)
        assert done.code in (0, -signal.SIGKILL), done.output
    proxy.reset()
    done = go(proxy, tmp_path / "last", name)
    assert done.code == 0 and weights_digest(tmp_path / "last") == expected, done.output
    assert steps(proxy.server, name)[0] == 12
    assert_nothing_else(proxy.server, name)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_now_and_then(fault: str, proxy: Proxy, expected: str, tmp_path: Path) -> None:
    """Every fifth request fails in this way. The next save sends damaged files again, and the run ends with the same weights."""
    name = new()
    proxy.reset(lambda count, *_: fault if count % 5 == 3 else "")
    done = go(proxy, tmp_path / "a", name, PACE="1")
    proxy.reset()
    assert done.code in (0, 1) and "Traceback" not in done.output, done.output
    again = go(proxy, tmp_path / "b", name)
    assert again.code == 0 and weights_digest(tmp_path / "b") == expected, done.output + again.output
    assert_nothing_else(proxy.server, name)


def uploads_of(*held_steps: int) -> Callable[[int, str, str], str]:
    """Returns a fault that holds the files of these checkpoints."""
    return lambda _, method, path: (
        "held" if method == "PUT" and any(f"step-{step:08d}" in path for step in held_steps) else ""
    )


def test_training_does_not_wait_for_the_bucket(server: int, proxy: Proxy, expected: str, tmp_path: Path) -> None:
    """An upload takes longer than a collective may. The run then sends the newest and the best checkpoint, and skips the others."""
    name, run_dir, limit = new(), tmp_path / "a", 8
    proxy.reset(uploads_of(3))
    with start(proxy, run_dir, name, f"collective_timeout={limit}", ranks=2, PACE="0") as gang:
        poll(lambda: any(event["step"] == 12 for event in events(run_dir, "checkpoint")), BOUND, "the last save")
        assert "head" in objects(server, name) and steps(server, name) == []
        until = time.monotonic() + limit + 2
        poll(lambda: time.monotonic() > until)
        proxy.release.set()
        done = gang.wait(BOUND)
    assert done.code == 0 and weights_digest(run_dir) == expected and steps(server, name) == [12, 6], done.output
    assert {event["path"][-2:] for event in events(run_dir, "checkpoint_sent")} == {"03", "12", "06"}
    assert len(events(run_dir, "checkpoint_written")) == 4


@pytest.mark.parametrize("in_time", [True, False])
def test_a_signal_while_an_upload_is_under_way(
    in_time: bool, server: int, proxy: Proxy, expected: str, tmp_path: Path
) -> None:
    """The save goes to the disk, then to the bucket. Code 75 means that the bucket has it; if the grace ends first, the bucket keeps
    the previous checkpoint."""
    name, run_dir, grace = new(), tmp_path / "a", 100 if in_time else 6
    assert go(proxy, run_dir, name, STEPS="3").code == 0
    proxy.reset(uploads_of(6, 9))
    words = [f"preempt.grace_seconds={grace}"]
    with start(proxy, run_dir, name, *words, PACE="0", WAIT=str(tmp_path / "go")) as gang:
        poll(lambda: any(event["step"] == 9 for event in events(run_dir, "log")), BOUND, "step 9")
        gang.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        poll(lambda: (run_dir / "checkpoints/step-00000009").exists(), BOUND, "the local save")
        assert steps(server, name) == [3]
        if in_time:
            proxy.release.set()
        done = gang.wait(BOUND)
    product.checkpoint(run_dir / "checkpoints/step-00000009")
    if in_time:
        assert done.code == 75 and steps(server, name) == [9, 6], done.output
    else:
        assert done.code == 1 and "within the grace period of 6 s" in done.output, done.output
        assert steps(server, name) == [3]
    proxy.release.set()
    proxy.reset()
    again = go(proxy, run_dir, name)
    assert again.code == 0 and "Resuming at step 9" in again.output, again.output
    assert weights_digest(run_dir) == expected and steps(server, name) == [12, 6]
    go(proxy, tmp_path / "c", name)
    assert_nothing_else(server, name)


def assert_survives(proxy: Proxy, number: int, when: str, expected: str, tmp_path: Path) -> None:
    """Rank 0 of two is killed at this request; with --live the other rank trains on, and takes over the bucket."""
    name, run_dir = new(), tmp_path / "run"
    kills: list[int] = []
    on_disk: list[str] = []
    env = {**environment(proxy.port), "SERVER": str(proxy.server), "PACE": str(BOUND)}
    words = ["--ranks", "2", "--max-restarts", "0", "--", PYTHON, JOB, str(run_dir), f"s3://bucket/{name}"]
    with live(*words, env=env) as gang:

        def kill() -> None:
            ranks = ranks_of(gang.processes[0].pid)
            if set(ranks) == {0, 1}:
                on_disk.extend(path.name for path in (run_dir / "checkpoints").iterdir())
                os.kill(ranks[0], signal.SIGKILL)
                kills.append(number)

        proxy.kill = kill
        proxy.reset(lambda count, *_: f"kill {when}" if count == number else "")
        done = gang.wait(BOUND)
    assert kills == [number] and done.code == 0, done.output
    (lost,) = events(run_dir, "rank_lost")
    assert "Resuming" not in done.output, done.output
    saves = [event["step"] for event in events(run_dir, "checkpoint") if event["time"] < lost["time"]]
    best = (6, 9) if 6 in saves and "step-00000006" not in on_disk else (6,)  # rank 0 may have died in this save
    newest, second = steps(proxy.server, name)
    assert weights_digest(run_dir) == expected and newest == 12 and second in best, done.output
    proxy.reset()
    go(proxy, tmp_path / "c", name)
    assert_nothing_else(proxy.server, name)


def upload_requests(requests: list[tuple[str, str]]) -> list[int]:
    """Numbers of the requests between the first file of a checkpoint and its last swap."""
    first = next(number for number, (_, path) in enumerate(requests) if "step-00000003" in path)
    swaps = [number for number, (method, path) in enumerate(requests) if method == "PUT" and path.endswith("/head")]
    return list(range(first, swaps[-2]))  # the last swap is at the end


@pytest.mark.promise("survivors")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_rank_0_is_lost_in_an_upload_and_another_one_has_the_bucket(
    when: str, every: bool, proxy: Proxy, requests: list[tuple[str, str]], expected: str, tmp_path: Path
) -> None:
    """At one of its requests, nightly at each of them."""
    numbers = upload_requests(requests)
    for number in numbers if every else [random.Random(when).choice(numbers)]:
        assert_survives(proxy, number, when, expected, tmp_path / str(number))


def test_a_node_that_was_cut_off_commits_nothing_when_the_network_is_back(
    server: int, proxy: Proxy, expected: str, tmp_path: Path
) -> None:
    name, run_dir = new(), tmp_path / "a"
    near, far = (f"10.214.{os.getpid() % 250}.{number}" for number in (1, 2))

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True)

    with two_namespaces() as (here, there), contextlib.ExitStack() as stack:
        ip(f"-n {here} link set ls0 netns {os.getpid()} name ls{os.getpid()}")  # removed with the other end
        ip(f"addr add {near}/24 dev ls{os.getpid()}")
        ip(f"link set ls{os.getpid()} up")
        ip(f"-n {there} addr add {far}/24 dev ls1")
        cable = Proxy(server, near)
        stack.callback(cable.close)
        command = ["ip", "netns", "exec", there, PYTHON, JOB, str(run_dir), f"s3://bucket/{name}"]
        env = {**environment(cable.port, near), "WAIT": str(tmp_path / "go")}
        early = stack.enter_context(started(command, env))
        poll(lambda: "head" in objects(server, name) and steps(server, name)[:1] == [6], BOUND, "the second checkpoint")
        ip(f"-n {there} link set ls1 down")
        before = cable.refusals
        late = go(proxy, tmp_path / "b", name)
        assert late.code == 0 and weights_digest(tmp_path / "b") == expected, late.output
        (tmp_path / "go").touch()
        poll(lambda: any(event["step"] == 12 for event in events(run_dir, "checkpoint")), BOUND, "its last save")
        assert cable.refusals == before
        ip(f"-n {there} link set ls1 up")
        output = early.communicate(timeout=BOUND)[0]
    assert early.returncode == 2 and f"another attempt has taken s3://bucket/{name} over" in output, output
    assert cable.refusals > before and "Traceback" not in output and steps(server, name) == [12, 6], output
    go(proxy, tmp_path / "c", name)
    assert_nothing_else(server, name)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    server: int, proxy: Proxy, expected: str, tmp_path: Path
) -> None:
    name = new()

    def damage() -> str:
        (file,) = (key for key in files(head(server, name)["checkpoints"][0]) if key.endswith("state.safetensors"))
        data = read(server, f"{name}/{file}")
        put(server, f"{name}/{file}", data[:-1] + bytes([data[-1] ^ 1]))
        return str(Path(file).parent)

    assert go(proxy, tmp_path / "a", name, "checkpoint.keep=3", STEPS="9").code == 0
    before = {entry["step"]: entry for entry in head(server, name)["checkpoints"]}
    assert before.keys() == {9, 6, 3}
    newest = damage()
    done = go(proxy, tmp_path / "b", name)
    assert done.code == 0 and "Resuming at step 6" in done.output, done.output
    assert "corrupt in the bucket" in done.output and newest in done.output, done.output
    assert weights_digest(tmp_path / "b") == expected and steps(server, name) == [12, 6]
    file = tmp_path / "b/checkpoints/step-00000012/state.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    again = go(proxy, tmp_path / "b", name)
    assert again.code == 0 and "The run is complete" in again.output, again.output
    product.checkpoint(file.parent)
    damage()
    less = go(proxy, tmp_path / "c", name, STEPS="9")  # it ends before the step of the damaged one
    assert less.code == 0 and "Resuming at step 6" in less.output and steps(server, name) == [9, 6], less.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{" * 100_000, "is not what a run writes"),
        (b'{"format": 2}', "is not what a run writes"),
        (b" " * (5 << 20), "has 5242880 bytes, at most 4194304 are read"),
    ],
)
def test_a_head_of_another_program_is_left_alone(
    text: bytes, message: str, server: int, proxy: Proxy, tmp_path: Path
) -> None:
    name = new()
    put(server, f"{name}/head", text)
    done = go(proxy, tmp_path / "a", name)
    assert done.code == 1 and message in done.output and "Traceback" not in done.output, done.output
    assert read(server, f"{name}/head") == text


def test_the_bucket_of_another_run_is_refused_and_fresh_replaces_no_run(
    server: int, proxy: Proxy, expected: str, tmp_path: Path
) -> None:
    name, other_name = new(), new()
    assert go(proxy, tmp_path / "a", name).code == 0
    assert go(proxy, tmp_path / "b", other_name, STEPS="3").code == 0
    before = head(server, name)
    refused = go(proxy, tmp_path / "b", name)
    assert refused.code == 2 and "has the checkpoints of another run" in refused.output, refused.output
    assert head(server, name) == before
    different = go(proxy, tmp_path / "c", name, "seed=5")
    assert different.code == 2 and "holds a run with another config" in different.output, different.output
    assert head(server, name) == before
    for word in ("1", "a job's word"):
        done = go(proxy, tmp_path / "d", name, FRESH=word)
        assert done.code == 2 and "choose another prefix" in done.output, done.output
        assert head(server, name) == before
    third = new()
    for folder, last in (("e", "9"), ("f", "12")):  # the job's restart, also on another node
        done = go(proxy, tmp_path / folder, third, FRESH="a job's word", STEPS=last)
        assert done.code == 0, done.output
    assert "Resuming at step 9" in done.output and weights_digest(tmp_path / "f") == expected


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
    proxy.dropped_header = header
    done = go(proxy, tmp_path / "a", new())
    assert done.code == 1 and "the store has no conditional writes" in done.output, done.output
    assert "Traceback" not in done.output
