"""The code of `code:` in ConfigMaps: whenever a submission is killed, no job runs without its code, and no object is left."""

from __future__ import annotations

import base64
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from k8s_cluster import Cluster, Fault
from k8s_operator import Running

from tests import product
from tests.processes import poll
from tests.product import JobSpec, UserError

BOUND = 60
pytestmark = [pytest.mark.usefixtures("rights"), pytest.mark.promise("code-archives")]
"""All tests here have only the rights of deploy/k8s/base."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    code_folder = tmp_path / "own"
    code_folder.mkdir()
    (code_folder / "train.py").write_text(
        "import helper, os\nprint(helper.WORD, os.environ['LOCKSTEP_CODE'], flush=True)\n"
    )
    (code_folder / "helper.py").write_text("WORD = 'submitted'\n")
    (code_folder / "weights.bin").write_bytes(os.urandom(1 << 20))
    return code_folder


def spec(folder: Path, **more: Any) -> JobSpec:
    values = {
        "name": "own", "command": ["python", "train.py"], "code": str(folder), "image": "localhost:5000/a:1", "nodes": 2,
        "ranks_per_node": 1, "max_restarts": 0, "run_dir": str(folder.parent / "run"),
        "volumes": [{"claim": "runs", "path": str(folder.parent)}],
    }  # fmt: skip
    return JobSpec.of({**values, **more})


def config_maps(cluster: Cluster) -> dict[str, Any]:
    return {item["metadata"]["name"]: item for item in cluster.all("configmaps")}


def job(cluster: Cluster) -> Any:
    return cluster.get("pytorchjobs", "own")


def archive(maps: dict[str, Any], live: Any) -> bytes:
    """Returns the archive that a job's pods mount."""
    (volume,) = [
        item
        for item in live["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"]
        if "projected" in item
    ]
    names = [source["configMap"]["name"] for source in volume["projected"]["sources"]]
    return b"".join(base64.b64decode(maps[name]["binaryData"]["part"]) for name in names)


def complete(backend: Any, cluster: Cluster) -> bool:
    """Returns whether the code is stored, is owned by the job, and has the hash of its record."""
    owners = [item["metadata"].get("ownerReferences", [{}])[0].get("uid") for item in config_maps(cluster).values()]
    files = product.files_of_code(
        archive(config_maps(cluster), job(cluster)), backend.require("own").plain["code"]["hash"]
    )
    return "train.py" in files and set(owners) == {job(cluster)["metadata"]["uid"]}


def none_left(cluster: Cluster) -> bool:
    return not config_maps(cluster)


@pytest.mark.promise("code-travels")
def test_the_maps_are_small_immutable_the_jobs_own_and_go_with_it(backend: Any, cluster: Cluster, folder: Path) -> None:
    assert backend.submit(spec(folder)).created
    changes = [path.rpartition("/")[2] for method, path, *_ in cluster.requests if method == "POST"]
    assert changes == ["pytorchjobs", "networkpolicies", "configmaps", "configmaps"], "first their owner"
    assert complete(backend, cluster) and len(config_maps(cluster)) == 2
    for item in config_maps(cluster).values():
        assert item["immutable"] is True and len(base64.b64decode(item["binaryData"]["part"])) <= 900 << 10
        assert "blockOwnerDeletion" not in item["metadata"]["ownerReferences"][0]
    assert (
        not backend.submit(spec(folder)).created
        and len(config_maps(cluster)) == 2
        and backend.drift(spec(folder)) == []
    )
    cluster.requests.clear()
    backend.list(), backend.status("own")
    assert not [path for _, path, *_ in cluster.requests if "configmaps" in path]
    backend.cancel("own")
    poll(lambda: none_left(cluster), 60, "the garbage collection")


@pytest.mark.promise("code-travels")
def test_the_job_runs_what_was_submitted_whatever_is_edited_meanwhile(
    backend: Any, cluster: Cluster, running: Running, folder: Path
) -> None:
    running.absent_pods.update({"own-worker-0", "own-worker-1"})  # their image is being pulled
    backend.submit(spec(folder))
    (folder / "helper.py").write_text("WORD = 'edited'\n")
    with pytest.raises(UserError, match="own exists with another spec .*code: "):
        backend.submit(spec(folder))
    running.absent_pods.clear()
    assert backend.wait("own", BOUND).state == "succeeded", [*backend.logs("own")]
    identity = backend.require("own").plain["code"]["hash"]
    output = {line.partition("] ")[2] for line in backend.logs("own") if "launch: warning: " not in line}
    assert output == {f"submitted {identity}"}, (
        "what the ranks have printed; the launchers warn of a secret that is not set"
    )
    backend.submit(spec(folder), "replace")
    assert backend.require("own").plain["code"]["hash"] != identity
    poll(lambda: len(config_maps(cluster)) == 2, 60, "those of the first job are gone")
    assert complete(backend, cluster)


def submit_and_kill(job_spec: JobSpec, cluster: Cluster, at: int) -> bool:
    """Submits in a process that is killed before its change number `at`. Returns whether the process was killed."""
    killed = threading.Event()
    count = iter(range(1000))
    start, ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(start, 1)
            with product.kubernetes() as backend:
                backend.submit(job_spec)
        finally:
            os._exit(0)
    os.close(start)

    def arrived(method: str, path: str) -> bool:
        if method == "GET" or "dryRun" in path or killed.is_set() or next(count) != at:
            return False
        killed.set()
        os.kill(child, signal.SIGKILL)
        return True

    cluster.arrived = arrived
    os.write(ready, b".")
    os.close(ready)
    os.waitpid(child, 0)
    cluster.arrived = None
    poll(lambda: not cluster.busy, 60, "what had arrived is carried out")
    return killed.is_set()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("then", ["submit", "cancel"])
def test_a_submitter_that_is_killed_between_any_two_steps(
    backend: Any, cluster: Cluster, folder: Path, then: str
) -> None:
    job_spec = spec(folder)
    steps, cluster.lag = 0, 0.05
    while submit_and_kill(job_spec, cluster, steps):
        steps += 1
        live = job(cluster)
        assert live is None or live["spec"]["runPolicy"].get("suspend") or archive(config_maps(cluster), live), (
            "none runs without it"
        )
        if then == "submit":
            backend.submit(job_spec)
            assert complete(backend, cluster) and len(config_maps(cluster)) == 2, steps
        if job(cluster) is not None:
            backend.cancel("own")
        else:
            with pytest.raises(UserError, match="there is no k8s job own"):
                backend.cancel("own")
        assert job(cluster) is None
        poll(lambda: none_left(cluster), 60, f"nothing is left after step {steps}")
    assert steps == 5, "the job, the policy, two maps, and the job may run"


@pytest.mark.promise("one-protocol")
def test_two_at_once_leave_one_job_and_its_code(
    connect: Callable[..., Any], cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    """Two submissions overlap, with the same spec or with the same name. One job and its code remain."""
    backends = connect(), connect()
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    (other_folder / "train.py").write_text("print('other')\n")
    cluster.faults.append(Fault("POST", r"(configmaps|networkpolicies)\?", delay=0.03, times=99))
    for second in (folder, other_folder):
        results: list[Any] = []

        def go(backend: Any, code: Path, results: list[Any] = results) -> None:
            try:
                results.append(backend.submit(spec(code)))
            except UserError as error:
                results.append(str(error))

        threads = [threading.Thread(target=go, args=pair) for pair in zip(backends, (folder, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(results) == 2 and complete(backends[0], cluster), results
        backends[0].cancel("own")
        poll(lambda: none_left(cluster), 60, "the garbage collection")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_code_that_another_machine_has_packed_otherwise_is_not_mixed_with_ours(
    backend: Any, cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first submission was killed before it sent its ConfigMaps. The second submission did not see the first one's job."""
    submit_and_kill(spec(folder), cluster, 1)
    packed = int(backend.require("own").plain["code"]["packed"])
    marks = job(cluster)["metadata"]["annotations"]
    marks["lockstep/spec"] = marks["lockstep/spec"].replace(f'"packed":{packed}', f'"packed":{packed + 1}')
    cluster.change("pytorchjobs", "own", metadata={"annotations": marks})
    find = backend.find
    monkeypatch.setattr(backend, "find", lambda name, submitting=False: None if submitting else find(name))
    with pytest.raises(UserError, match="packed on another machine"):
        backend.submit(spec(folder))
    assert not config_maps(cluster) and job(cluster) is not None


def test_limits_of_the_cluster_are_named_and_nothing_is_left(backend: Any, cluster: Cluster, folder: Path) -> None:
    cluster.put("resourcequotas", {"metadata": {"name": "team"}, "spec": {"hard": {"count/configmaps": "1"}}})
    with pytest.raises(UserError, match="exceeded quota: team"):
        backend.submit(spec(folder))
    poll(lambda: none_left(cluster) and job(cluster) is None, 60, "the garbage collection")
