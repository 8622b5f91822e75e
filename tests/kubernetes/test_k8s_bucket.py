"""A job without volumes: its pods' disks are lost with them, and a bucket has the shards and the checkpoints."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_cluster import Cluster
from k8s_operator import Running

from tests.kubernetes.test_k8s_environment import trained_here
from tests.objects.server import environment, moto, objects, read
from tests.processes import ROOT, poll
from tests.product import JobSpec
from tests.ranks import training

BOUND = 240
pytestmark = pytest.mark.promise("object-stores")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with moto(tmp_path_factory.mktemp("moto")) as port:
        yield port


def job(store: int, folder: Path, name: str, **more: Any) -> JobSpec:
    """Returns a small examples/bucket.yaml with two nodes that share no disk."""
    plain = yaml.safe_load((ROOT / "examples/bucket.yaml").read_text().replace("s3://BUCKET", "s3://bucket"))
    variables = environment(store)
    plain["env"] = {key: variables[key] for key in ("AWS_REGION", "AWS_ENDPOINT_URL")} | more.pop("env", {})
    plain["env"]["LOCKSTEP_METRICS_PORT"] = "0"
    plain["overrides"] |= {
        "checkpoint.to": f"s3://bucket/runs/{name}", "checkpoint.every_steps": 4, "epochs": 2, "evaluate.every": 2, "threads": 1,
        "data.root": str(folder / f"data-{name}"), "model": "tests.nets:PacedNormed", "model_options": {},
    }  # fmt: skip
    fields = {"name": name, "image": "localhost:5000/local:1", "nodes": 2, "run_dir": f"/runs/{name}", "k8s": {}}
    return JobSpec.of({**plain, **fields, **more})


def committed_steps(store: int, prefix: str) -> list[int]:
    """Returns the steps of the checkpoints that a run's head names."""
    if "head" not in objects(store, prefix):
        return []
    return [checkpoint["step"] for checkpoint in json.loads(read(store, f"{prefix}/head"))["checkpoints"]]


@pytest.mark.promise("kill-resume")
def test_a_lost_pod_resumes_on_an_empty_disk_from_the_bucket(
    store: int, backend: Any, running: Running, cluster: Cluster, tmp_path: Path
) -> None:
    data = {key: base64.b64encode(value).decode() for key, value in {"id": b"name", "key": b"secret"}.items()}
    cluster.put("secrets", {"metadata": {"name": "bucket"}, "data": data})
    file = tmp_path / "slow"
    file.touch()
    env = {"LOCKSTEP_TEST_PACE": "0.25", "LOCKSTEP_TEST_PACE_FILE": str(file)}
    spec = job(store, tmp_path, "stormy", env=env)
    done = training(
        "shard", "smoke", "--out", str(spec.shard_folder), "--set", f"data.root={tmp_path}", env=environment(store)
    )
    assert done.code == 0, done.output
    assert backend.submit(spec).created
    poll(lambda: committed_steps(store, "runs/stormy"), BOUND, "a checkpoint in the bucket")
    running.kubelet.lose("stormy-worker-0")
    file.unlink()
    status = backend.wait("stormy", BOUND)
    assert status.state == "succeeded", (status, *backend.logs("stormy"))
    assert running.kubelet.starts["stormy-worker-0"] >= 2
    starts = [event["step"] for event in map(json.loads, backend.logs("stormy", rank=0)) if event["event"] == "start"]
    assert max(starts) > 0, "it began anew"
    local = {name: value for name, value in spec.overrides.items() if name != "checkpoint.to"}
    undisturbed = trained_here(spec.model_copy(update={"overrides": local}), tmp_path / "calm", 2 * spec.ranks)
    assert backend.summary("stormy")["weights_sha256"] == undisturbed
    data = tmp_path / "data-stormy/shards"
    assert (data / "fetched").is_dir() and not (data / "digits").exists(), "no pod has made shards"
