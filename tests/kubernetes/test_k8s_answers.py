"""What a server may answer, and what a command does with an answer of another shape."""

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
    """Stands between the server and its client: up to two answers of a command are not what they were."""

    def __init__(self, seed: int) -> None:
        self.chance, self.left = random.Random(seed), 2
        self.done: list[str] = []

    def __call__(self, path: str, value: Any) -> bytes | None:
        """What is answered instead; None: what the server says. `value`: None for a stream."""
        if not self.left or self.chance.random() < 0.5:
            return None
        self.left -= 1
        if value is None or self.chance.random() < 0.25:
            found = PAGE if value is None else self.chance.choice(WHOLE)
            self.done.append(f"{path}: {found[:40]!r}")
            return found
        value = json.loads(json.dumps(value))
        holder, key = self.chance.choice(list(places(value)))
        if self.chance.random() < 0.2:
            del holder[key]
        else:
            holder[key] = self.chance.choice(VALUES)
        self.done.append(f"{path}: {key} is {holder.get(key, 'missing') if isinstance(holder, dict) else holder!r}")
        return json.dumps(value).encode()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in an answer, as what holds it and its key or number."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def test_no_answer_is_a_traceback(cluster: Cluster, tmp_path: Path) -> None:
    """Answers have missing, null or wrong fields, are no JSON, or a web page. Each command ends with one line, and a code that says
    whose mistake it is."""
    (tmp_path / "job.yaml").write_text(JOB)
    cluster.lag = 0.01
    states = [there(cluster, tmp_path, ended) for ended in (False, True)]
    met = Counter[int]()
    for seed in range(2 * len(COMMANDS)):  # each command while the job runs and after its end
        command = COMMANDS[seed % len(COMMANDS)]
        cluster.objects = copy.deepcopy(states[seed // len(COMMANDS) % 2])
        cluster.spoil = spoiler = Spoiler(seed)
        try:
            done = lockstep(tmp_path, *command)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {' '.join(command)}: {spoiler.done}") from error
        finally:
            cluster.spoil = None
        said = f"seed {seed}: {' '.join(command)}: {spoiler.done}: {done}"
        assert done.returncode in (0, 1, 2, 69, *((3, 4, 75, 124) if command[0] in ("status", "wait") else ())), said
        assert "Traceback" not in done.stderr and done.stderr.count("error: ") <= 1, said
        met[done.returncode] += 1
        for collector in threading.enumerate():
            if isinstance(collector, threading.Timer):
                collector.join(10)
    assert met[69] and met[0], met


def there(cluster: Cluster, folder: Path, ended: bool) -> dict[tuple[str, str, str], Any]:
    """The objects of a job with two pods and their logs, which runs or has failed."""
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
