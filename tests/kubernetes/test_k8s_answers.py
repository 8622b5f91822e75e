"""Malformed answers of a server, and how commands end with them."""

from __future__ import annotations

import copy
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from k8s_cluster import Cluster
from k8s_operator import Operator, finish

from tests.jobs.helpers import lockstep

pytestmark = [pytest.mark.promise("bad-input"), pytest.mark.promise("k8s-states")]
COMMANDS = (
    ("submit", "k8s", "job.yaml"), ("submit", "k8s", "job.yaml", "--replace"),
    ("status", "k8s", "smoke"), ("status", "k8s", "smoke", "--json"), ("list", "k8s"), ("list", "k8s", "--json"),
    ("logs", "k8s", "smoke"), ("logs", "k8s", "smoke", "--rank", "1", "--tail", "2"),
    ("wait", "k8s", "smoke", "--timeout", "0.2"), ("doctor", "k8s", "job.yaml"), ("cancel", "k8s", "smoke"),
)  # fmt: skip
JOB = "name: smoke\nrecipe: smoke\nimage: localhost:5000/lockstep:1\nnodes: 2\ngpus: 1\n"
PAGE = b"<!DOCTYPE html><html><title>Sign in</title></html>"
WHOLE = (
    b"", PAGE, b"null", b"[]", b"{}", b"7", b'"text"', b"[" * 100_000, b"\xff\xfe{", b'{"items": null}', b'{"items": [null]}',
)  # fmt: skip
VALUES = (
    None, 7, -1, 10**12, 0.5, True, "text", "²", "", [], {}, [None], [[]], [7], {"x": None}, {"uid": {}}, {"name": []},
)  # fmt: skip


class Spoiler:
    """Changes one or two answers of the server to a command."""

    def __init__(self, seed: int, passes: int) -> None:
        self.chance, self.left = random.Random(seed), 2
        self.passes = passes
        """Number of answers that may pass before the first changed one."""
        self.done: list[str] = []

    def __call__(self, path: str, value: Any) -> bytes | None:
        """Returns the replaced answer; None keeps the server's answer. `value` is None for a stream."""
        if not self.left or (self.chance.random() < 0.5 and (self.done or self.passes)):
            self.passes -= not self.done
            return None
        self.left -= 1
        if value is None or self.chance.random() < 0.25:
            answer = PAGE if value is None else self.chance.choice(WHOLE)
            self.done.append(f"{path}: {answer[:40]!r}")
            return answer
        value = json.loads(json.dumps(value))
        holder, key = self.chance.choice(list(places(value)))
        if self.chance.random() < 0.2:
            del holder[key]
        else:
            holder[key] = self.chance.choice(VALUES)
        self.done.append(f"{path}: {key} is {holder.get(key, 'missing') if isinstance(holder, dict) else holder!r}")
        return json.dumps(value).encode()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every place in an answer as (container, key or index)."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def test_whatever_the_server_answers_a_command_ends_in_a_line_and_a_code(cluster: Cluster, tmp_path: Path) -> None:
    """Answers have missing, null or wrong fields, are no JSON, or a web page. Each command ends with at most one error line and a
    documented exit code."""
    (tmp_path / "job.yaml").write_text(JOB)
    cluster.lag = 0.01
    states = [job_objects(cluster, tmp_path, ended) for ended in (False, True)]
    codes = Counter[int]()
    for seed in range(2 * len(COMMANDS)):  # each command while the job runs and after its end
        command = COMMANDS[seed % len(COMMANDS)]
        cluster.objects = copy.deepcopy(states[seed // len(COMMANDS) % 2])
        cluster.spoil = spoiler = Spoiler(seed, passes=int(command[0] != "list"))  # a list has one answer
        try:
            done = lockstep(tmp_path, *command)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {' '.join(command)}: {spoiler.done}") from error
        finally:
            cluster.spoil = None
        report = f"seed {seed}: {' '.join(command)}: {spoiler.done}: {done}"
        assert spoiler.done and done.returncode in (
            0,
            1,
            2,
            69,
            *((3, 4, 75, 124) if command[0] in ("status", "wait") else ()),
        ), report
        assert "Traceback" not in done.stderr and done.stderr.count("error: ") <= 1, report
        codes[done.returncode] += 1
        for collector in threading.enumerate():
            if isinstance(collector, threading.Timer):
                collector.join(10)
    assert codes[69] and codes[0], codes


def job_objects(cluster: Cluster, folder: Path, ended: bool) -> dict[tuple[str, str, str], Any]:
    """Returns the objects of a job with two pods and their logs. The job runs or has failed."""
    cluster.objects = {}
    assert lockstep(folder, "submit", "k8s", "job.yaml").returncode == 0
    Operator(cluster).round()
    for pod in cluster.all("pods"):
        cluster.logs[pod["metadata"]["name"]] = [f"2026-01-01T00:00:0{n}.5Z [rank {n % 2}] {n}" for n in range(4)]
        if ended:
            finish(cluster, pod, 1)
    about = {"name": "smoke", "uid": cluster.get("pytorchjobs", "smoke")["metadata"]["uid"]}
    event = {"metadata": {"name": "e"}, "type": "Warning", "reason": "FailedCreatePod", "message": "no"}
    cluster.put("events", {**event, "lastTimestamp": "2026-01-01T00:00:00Z", "involvedObject": about})
    Operator(cluster).round()
    return copy.deepcopy(cluster.objects)
