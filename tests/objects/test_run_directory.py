"""The run directory in the bucket, as of the last commit: another node has its whole history, and other machines show it."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.events import status_of, weights_digest
from tests.objects.server import Proxy, environment, objects, put
from tests.objects.test_checkpoints import BOUND, assert_nothing_else, go, head, new, start, steps
from tests.processes import LOCKSTEP, Result, clean_env, free_port, poll, run

pytestmark = pytest.mark.promise("object-stores")
METRICS = "metrics.enabled=true"
UNSENT = "the end of this attempt is not in the bucket"


def second_checkpoint(server: int, name: str) -> None:
    """Waits until the bucket has the checkpoint. The job trains on to step 9."""
    poll(lambda: "head" in objects(server, name) and steps(server, name) == [6], BOUND, "the second checkpoint")


def lockstep(env: dict[str, str], cwd: Path, *words: str) -> Result:
    return run([LOCKSTEP, *words], env, cwd=cwd)


def output_of(proxy: Proxy, cwd: Path, *words: str) -> str:
    done = lockstep(environment(proxy.port), cwd, *words)
    assert done.code == 0, done.output
    return done.output


def fetch(proxy: Proxy, cwd: Path, name: str) -> Path:
    """Fetches the run into a new directory with the name of the prefix."""
    folder = Path(tempfile.mkdtemp(dir=cwd), name)
    output_of(proxy, cwd, "fetch", f"s3://bucket/{name}", str(folder))
    return folder


def goodput(proxy: Proxy, cwd: Path, run_dir: Path) -> Any:
    value = json.loads(output_of(proxy, cwd, "goodput", str(run_dir), "--json"))
    assert [entry.pop("run") for entry in value["runs"]] == [str(run_dir)]
    return value


def lines(run_dir: Path) -> list[str]:
    return (run_dir / "events.jsonl").read_text().splitlines()


def attempts(run_dir: Path) -> list[int]:
    return [event["attempt"] for event in map(json.loads, lines(run_dir)) if event["event"] == "start"]


def assert_shown_alike(proxy: Proxy, run_dir: Path, name: str, cwd: Path) -> None:
    """The commands show the same from an empty folder with only the credentials."""
    copy = fetch(proxy, cwd, name)
    assert goodput(proxy, cwd, copy) == goodput(proxy, cwd, run_dir)
    tables = [json.loads(output_of(proxy, cwd, "top", str(target), "--once", "--json")) for target in (copy, run_dir)]
    assert tables[0] == tables[1]


def test_a_run_that_another_node_resumes_has_its_whole_history(
    server: int, proxy: Proxy, expected: str, tmp_path: Path
) -> None:
    name = new()
    nodes, laptop = [tmp_path / node / name for node in "abc"], tmp_path / "laptop"
    laptop.mkdir()
    with start(proxy, nodes[0], name, METRICS, WAIT=str(tmp_path / "never")) as first:
        second_checkpoint(server, name)
        copy = fetch(proxy, laptop, name)
        running = goodput(proxy, laptop, copy)["total"]
        assert running["restarts"] == 0 and running["wall_seconds"] > 0
        (rank,) = json.loads(output_of(proxy, laptop, "top", str(copy), "--once", "--json"))
        assert rank["exit_code"] is None
        os.kill(first.rank_pid(0), signal.SIGKILL)
        first.wait(BOUND)
    # A node takes over, and is lost before its first commit.
    proxy.reset(lambda _, method, path: "kill before" if method == "PUT" and "files.zip" in path else "")
    with start(proxy, nodes[2], name, METRICS) as lost:
        proxy.kill = lambda: os.kill(lost.rank_pid(0), signal.SIGKILL)
        assert lost.wait(BOUND).code == -signal.SIGKILL
    paths = list[str]()

    def busy(_: int, method: str, path: str) -> str:
        """At the end the bucket answers 503 a few times."""
        late = method == "PUT" and "files.zip" in path and (nodes[1] / "summary.json").exists()
        paths.extend([path] * late)
        return "503" if late and len(paths) < 5 else ""

    proxy.reset(busy)
    done = go(proxy, nodes[1], name, METRICS)
    assert done.code == 0 and weights_digest(nodes[1]) == expected and len(paths) > 4, done.output
    before = [line for line in lines(nodes[0]) if json.loads(line).get("step", 6) < 6]
    assert len(before) > 3 and set(before) <= set(lines(nodes[1]))
    assert attempts(nodes[1]) == [1, 2] and status_of(nodes[1])["attempt"] == 2
    total = goodput(proxy, laptop, fetch(proxy, laptop, name))["total"]
    assert total["restarts"] == 1 and total["wall_seconds"] > running["wall_seconds"]
    assert_shown_alike(proxy, nodes[1], name, laptop)
    # The run returns to the first node, whose disk is behind.
    last = go(proxy, nodes[0], name, METRICS, STEPS="15")
    assert last.code == 0 and attempts(nodes[0]) == [1, 2, 3], last.output
    assert lines(nodes[0])[: len(lines(nodes[1]))] == lines(nodes[1])
    checkpoints = [*(fetch(proxy, laptop, name) / "checkpoints").iterdir()]
    assert {path.name for path in checkpoints} == {"step-00000006", "step-00000015"}
    for path in checkpoints:
        product.checkpoint(path)
        local = nodes[0] / "checkpoints" / path.name / "state.safetensors"
        assert (path / "state.safetensors").read_bytes() == local.read_bytes()


def test_a_bucket_that_does_not_take_the_end_costs_a_warning_and_one_that_does_not_give_the_history_a_start(
    server: int, proxy: Proxy, expected: str, tmp_path: Path
) -> None:
    name = new()

    def ended_put(method: str, path: str) -> bool:
        return method == "PUT" and "files.zip" in path and (tmp_path / "a/summary.json").exists()

    proxy.reset(lambda _, method, path: "403" if ended_put(method, path) else "")
    done = go(proxy, tmp_path / "a", name)
    assert done.code == 0 and weights_digest(tmp_path / "a") == expected and steps(server, name) == [12, 6], done.output
    assert done.output.count(UNSENT) == 1, done.output
    proxy.reset()
    again = go(proxy, tmp_path / "a", name, STEPS="15")
    assert again.code == 0 and UNSENT not in again.output, again.output
    assert goodput(proxy, tmp_path, fetch(proxy, tmp_path, name)) == goodput(proxy, tmp_path, tmp_path / "a")
    proxy.reset(lambda _, method, path: "503" if method == "GET" and "files.zip" in path else "")
    unread = go(proxy, tmp_path / "b", name)
    assert unread.code == 1 and "checkpoint.to cannot be used" in unread.output, unread.output
    assert "Traceback" not in unread.output
    proxy.reset()
    put(server, f"{name}/{head(server, name)['archive']}", b"")
    lost = go(proxy, tmp_path / "b", name)
    assert lost.code == 0 and "earlier attempts have written down is lost" in lost.output, lost.output
    assert "files.zip" in lost.output


def test_of_two_that_write_the_later_one_has_it(server: int, proxy: Proxy, expected: str, tmp_path: Path) -> None:
    """Another attempt takes over between two saves of the first. When the first attempt continues, it commits nothing."""
    name = new()
    with start(proxy, tmp_path / "a", name, WAIT=str(tmp_path / "go")) as early:
        second_checkpoint(server, name)
        late = go(proxy, tmp_path / "b", name)
        assert late.code == 0 and weights_digest(tmp_path / "b") == expected, late.output
        before = goodput(proxy, tmp_path, fetch(proxy, tmp_path, name))
        (tmp_path / "go").touch()
        done = early.wait(BOUND)
    assert done.code == 2 and f"another attempt has taken s3://bucket/{name} over" in done.output, done.output
    assert "Traceback" not in done.output and steps(server, name) == [12, 6]
    assert goodput(proxy, tmp_path, fetch(proxy, tmp_path, name)) == before == goodput(proxy, tmp_path, tmp_path / "b")
    assert go(proxy, tmp_path / "c", name, STEPS="15").code == 0 and attempts(tmp_path / "c") == [1, 2, 3]
    assert_nothing_else(server, name)


def test_what_cannot_be_fetched_is_one_line(server: int, proxy: Proxy, tmp_path: Path) -> None:
    env, name = environment(proxy.port), new()
    assert go(proxy, tmp_path / "a", name, STEPS="3").code == 0
    put(server, f"{name}/{head(server, name)['archive']}", b"of somebody else")
    nowhere = environment(free_port())
    anonymous = clean_env(AWS_REGION="us-east-1", AWS_METADATA_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    rows = (
        (env, "https://bucket/run", 2, "expected s3://BUCKET/PREFIX"),
        (env, "s3://bucket", 2, "expected s3://BUCKET/PREFIX"),
        (env, "s3://bucket/nothing", 2, "s3://bucket/nothing has no run"),
        (env, "s3://no-bucket/run", 69, "there is no such bucket"),
        (nowhere, f"s3://bucket/{name}", 69, f"s3://bucket/{name} cannot be read"),
        (anonymous, f"s3://bucket/{name}", 69, "latest/api/token"),
    )
    with ThreadPoolExecutor() as pool:  # two of them wait for a store that does not answer
        results = list(pool.map(lambda row: lockstep(row[0], tmp_path, "fetch", row[1], "x"), rows))
    for (_, target, code, message), done in zip(rows, results, strict=True):
        assert (done.code, len(done.output.splitlines())) == (code, 1) and message in done.output, (target, done.output)
    assert not (tmp_path / "x").exists()
    warned = lockstep(env, tmp_path, "fetch", f"s3://bucket/{name}", "x")
    assert warned.code == 0 and "what earlier attempts have written down is lost" in warned.output, warned.output
    there = lockstep(env, tmp_path, "fetch", f"s3://bucket/{name}", "a")
    assert there.code == 2 and "a exists already: choose another directory" in there.output, there.output
