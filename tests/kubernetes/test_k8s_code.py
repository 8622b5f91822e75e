"""Code of one's own in ConfigMaps: whatever happens to who submits, no job runs without its code, and nothing is left."""

from __future__ import annotations

import base64
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_cluster import Cluster, Fault
from k8s_operator import Running, until
from k8s_server import ApiServer

from lockstep.jobs.code import pin, store
from lockstep.jobs.kubernetes import checks
from lockstep.jobs.kubernetes.api import Api, load_configuration
from lockstep.jobs.kubernetes.backend import KubernetesBackend
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import UserError
from lockstep.training.launch import archive
from tests.jobs.helpers import lockstep
from tests.processes import ROOT

BOUND = 60
ROLE = next(
    item
    for item in yaml.safe_load_all((ROOT / "deploy/k8s/base/rbac.yaml").read_text())
    if item["kind"] == "Role"
)  # fmt: skip


@pytest.fixture(autouse=True)
def _rights(cluster: Cluster) -> None:
    """Everything here is done with the rights of deploy/k8s/base alone."""
    cluster.allow(ROLE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    found = tmp_path / "own"
    found.mkdir()
    (found / "train.py").write_text("import helper, os\nprint(helper.WORD, os.environ['LOCKSTEP_CODE'], flush=True)\n")
    (found / "helper.py").write_text("WORD = 'submitted'\n")
    (found / "weights.bin").write_bytes(os.urandom(1 << 20))
    return found


def spec(folder: Path, **more: Any) -> JobSpec:
    values = {
        "name": "own", "command": ["python", "train.py"], "code": str(folder), "image": "registry.example/a:1", "nodes": 2,
        "ranks_per_node": 1, "max_restarts": 0, "run_dir": str(folder.parent / "run"),
        "volumes": [{"claim": "runs", "path": str(folder.parent)}],
    }  # fmt: skip
    return JobSpec.of({**values, **more})


def held(cluster: Cluster) -> dict[str, dict[str, Any]]:
    with cluster.changed:
        return {name: item for (plural, _, name), item in cluster.objects.items() if plural == "configmaps"}


def whole(cluster: Cluster) -> bytes:
    """The archive that the live job's pods are shown."""
    job = cluster.get("pytorchjobs", "own")
    assert job is not None
    (template,) = [item["template"] for item in job["spec"]["pytorchReplicaSpecs"].values()]
    (volume,) = [item for item in template["spec"]["volumes"] if "projected" in item]
    found = held(cluster)
    pieces = [found[source["configMap"]["name"]] for source in volume["projected"]["sources"]]
    return b"".join(base64.b64decode(piece["binaryData"]["part"]) for piece in pieces)


def owners(cluster: Cluster) -> set[str | None]:
    found = [item["metadata"].get("ownerReferences") or [{}] for item in held(cluster).values()]
    return {references[0].get("uid") for references in found}


def test_the_maps_are_small_immutable_the_jobs_own_and_go_with_it(
    backend: KubernetesBackend, cluster: Cluster, folder: Path
) -> None:
    assert backend.submit(spec(folder)).created
    found = held(cluster)
    job = cluster.get("pytorchjobs", "own")
    assert job is not None and len(found) == 2
    identity = backend.require("own").plain["code"]["hash"]
    for name, item in found.items():
        assert name.startswith(f"own-{identity[:12]}-") and item["immutable"] is True
        assert len(base64.b64decode(item["binaryData"]["part"])) <= 900 << 10
        (reference,) = item["metadata"]["ownerReferences"]
        assert reference["uid"] == job["metadata"]["uid"] and "blockOwnerDeletion" not in reference
    assert {file.path for file in archive.read(whole(cluster), identity)} == {"helper.py", "train.py", "weights.bin"}
    requests = [
        (method, path) for method, path, *_ in cluster.requests if method in ("POST", "PATCH") and "dryRun" not in path
    ]
    posts = [path.rpartition("/")[2] for method, path in requests if method == "POST"]
    assert posts == ["pytorchjobs", "configmaps", "configmaps", "networkpolicies", "pytorchjobs"], (
        "the first one is a dry run"
    )
    assert not backend.submit(spec(folder)).created and len(held(cluster)) == 2
    assert backend.drift(spec(folder)) == []
    before = len(cluster.requests)
    backend.list(), backend.status("own")
    assert not [path for _, path, *_ in cluster.requests[before:] if "configmaps" in path]
    backend.cancel("own")
    until(lambda: not held(cluster), 10, "the garbage collection")


@pytest.fixture
def operator(cluster: Cluster, tmp_path: Path) -> Iterator[Running]:
    running = Running(cluster, tmp_path)
    yield running
    running.stop()


def _of_ranks(backend: KubernetesBackend) -> set[str]:
    """What the ranks have printed: the launchers warn of a secret that is not set."""
    return {line.partition("] ")[2] for line in backend.logs("own") if "launch: warning: " not in line}


def test_the_job_runs_what_was_submitted_whatever_is_edited_meanwhile(
    backend: KubernetesBackend, cluster: Cluster, operator: Running, folder: Path
) -> None:
    operator.held.update({"own-worker-0", "own-worker-1"})  # their image is being pulled
    backend.submit(spec(folder))
    (folder / "helper.py").write_text("WORD = 'edited'\n")
    with pytest.raises(UserError, match="own exists with another spec .*code: "):
        backend.submit(spec(folder))
    operator.held.clear()
    assert backend.wait("own", BOUND).state == "succeeded", [*backend.logs("own")]
    identity = backend.require("own").plain["code"]["hash"]
    assert _of_ranks(backend) == {f"submitted {identity}"}
    backend.submit(spec(folder), "replace")
    assert backend.wait("own", BOUND).state == "succeeded"
    assert all("edited" in line for line in _of_ranks(backend))
    until(lambda: len(held(cluster)) == 2, 10, "those of the first job are gone")


# Killed between any two steps.


def submitting(job: JobSpec, cluster: Cluster, at: int, lost: bool) -> bool:
    """Submits in a process of its own, which is killed when its change number `at` arrives at the server.

    Args:
        lost: the change is not carried out.

    Returns:
        Whether it came that far.
    """
    killed = threading.Event()
    count = iter(range(1000))
    start, ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(start, 1)
            load, namespace = load_configuration(None)
            KubernetesBackend(Api(load, timeout=5), namespace).submit(job)
        finally:
            os._exit(0)

    os.close(start)

    def arrived(method: str, path: str) -> bool:
        if method == "GET" or "dryRun" in path or killed.is_set() or next(count) != at:
            return False
        killed.set()
        os.kill(child, signal.SIGKILL)
        return lost

    cluster.arrived = arrived
    os.write(ready, b".")
    os.close(ready)
    os.waitpid(child, 0)
    cluster.arrived = None
    until(lambda: not cluster.busy, 10, "what had arrived is carried out")
    return killed.is_set()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("lost", [True, False], ids=["before the step", "after the step"])
@pytest.mark.parametrize("then", ["submit", "cancel"])
def test_a_submitter_that_is_killed_between_any_two_steps(
    backend: KubernetesBackend, cluster: Cluster, folder: Path, lost: bool, then: str
) -> None:
    job = pin.keep(spec(folder))
    steps, cluster.lag = 0, 0.05
    while submitting(job, cluster, steps, lost):
        steps += 1
        if cluster.get("pytorchjobs", "own") is not None:
            assert whole(cluster), "no job without its code"
        if then == "submit":
            backend.submit(job)
            live = cluster.get("pytorchjobs", "own")
            assert live is not None and whole(cluster) == store.packed(str(job.code.hash if job.code else ""))
            assert len(held(cluster)) == 2 and owners(cluster) == {live["metadata"]["uid"]}, steps
            backend.cancel("own")
        elif cluster.get("pytorchjobs", "own") is not None:
            backend.cancel("own")
        else:
            with pytest.raises(UserError, match="there is no job own"):
                backend.cancel("own")
        assert cluster.get("pytorchjobs", "own") is None
        until(lambda: not held(cluster), 10, f"nothing is left after step {steps}")
    assert steps == 7, "two maps, the policy, the job, and three owners"


def test_two_at_once_leave_one_job_and_its_code(
    backend: KubernetesBackend, cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    """Whoever comes first, whoever settles what the other has not made its own yet."""
    load, namespace = load_configuration(None)
    other = folder.parent / "other"
    other.mkdir()
    (other / "train.py").write_text("print('other')\n")
    for round_, second in enumerate([folder, other, folder, other]):
        cluster.faults.append(Fault("POST", r"configmaps\?", delay=0.03, times=2))
        cluster.faults.append(Fault("POST", r"networkpolicies\?", delay=0.03, times=1))
        said: list[Any] = []

        def go(job: JobSpec, said: list[Any] = said) -> None:
            api = Api(load, timeout=5)
            try:
                said.append(KubernetesBackend(api, namespace, interval=0.2).submit(job))
            except UserError as error:
                said.append(str(error))
            finally:
                api.close()

        threads = [threading.Thread(target=go, args=(pin.keep(spec(own)),)) for own in (folder, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        live = cluster.get("pytorchjobs", "own")
        assert live is not None and len(said) == 2, (round_, said)
        assert archive.read(whole(cluster), backend.require("own").plain["code"]["hash"])
        assert owners(cluster) == {live["metadata"]["uid"]}, (round_, said)
        backend.cancel("own")
        until(lambda: not held(cluster), 10, "the garbage collection")


def test_maps_that_somebody_took_for_left_over_are_made_anew(
    backend: KubernetesBackend, cluster: Cluster, folder: Path
) -> None:
    """Deleted between the job and its ownership: by another command, which saw no job yet."""
    job = pin.keep(spec(folder))

    def arrived(method: str, path: str) -> bool:
        if method == "POST" and "pytorchjobs" in path and "dryRun" not in path:
            cluster.arrived = None
            code_of_nobody = [
                name for name, item in held(cluster).items() if not item["metadata"].get("ownerReferences")
            ]
            for name in code_of_nobody:
                cluster.remove("configmaps", name)
        return False

    cluster.arrived = arrived
    backend.submit(job)
    live = cluster.get("pytorchjobs", "own")
    assert live is not None and owners(cluster) == {live["metadata"]["uid"]} and len(held(cluster)) == 2
    cluster.remove("configmaps", next(iter(held(cluster))))
    backend.submit(job)
    assert whole(cluster) == store.packed(str(job.code.hash if job.code else "")) and len(owners(cluster)) == 1


# What a cluster refuses.


@pytest.mark.parametrize(
    ("status", "message", "told"),
    [
        (413, "Request entity too large: limit is 3145728", "the cluster refuses a ConfigMap of 900 KiB .413: Request entity too large: "
         "limit is 3145728.; a piece of code has 900 KiB at most"),
        (422, "ConfigMap is invalid: Too long: must have at most 524288 bytes", "must have at most 524288 bytes"),
        (403, 'configmaps "x" is forbidden: exceeded quota: team, requested: count/configmaps=1, used: count/configmaps=4, '
         "limited: count/configmaps=4", "the namespace's quota does not allow it: .*limited: count/configmaps=4"),
    ],
)  # fmt: skip
def test_limits_of_the_cluster_are_named_and_nothing_is_left(
    backend: KubernetesBackend, cluster: Cluster, folder: Path, status: int, message: str, told: str
) -> None:
    seen: list[str] = []

    def arrived(method: str, path: str) -> bool:
        if method == "POST" and "configmaps" in path:
            seen.append(path)
            if len(seen) == 1 + (status == 403):  # the quota has room for one
                cluster.faults.append(Fault("POST", "configmaps", status=status, message=message))
        return False

    cluster.arrived = arrived
    with pytest.raises(UserError, match=told):
        backend.submit(spec(folder))
    assert not held(cluster) and cluster.get("pytorchjobs", "own") is None


def test_who_has_no_rights_on_maps_submits_without_code(
    backend: KubernetesBackend, cluster: Cluster, folder: Path
) -> None:
    """A Role of an earlier version's deploy/k8s."""
    rules = [rule for rule in ROLE["rules"] if rule["resources"] != ["configmaps"]]
    cluster.allow({**ROLE, "rules": rules})
    backend.submit(spec(folder, code=None))
    backend.cancel("own")
    with pytest.raises(UserError, match=r"not allowed: configmaps .*rbac\.yaml"):
        backend.submit(spec(folder))
    assert cluster.get("pytorchjobs", "own") is None


def test_doctor_asks_for_the_rights_of_a_job_with_code(
    backend: KubernetesBackend, cluster: Cluster, folder: Path
) -> None:
    cluster.role = None
    cluster.denied.add("patch configmaps")
    rows = {check.name: check for check in checks.check(backend, spec(folder), None)}
    assert rows["rights"].result == "missing" and "may not patch configmaps" in str(rows["rights"])
    assert "configmaps" not in {check.name: check for check in checks.check(backend, None, None)}["rights"].detail


# What is rendered.


def test_render_with_code_writes_what_a_cluster_needs(server: ApiServer, folder: Path, tmp_path: Path) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump({**spec(folder).plain(), "code": "."}))
    out = tmp_path / "out"
    told = lockstep(folder, "render", "k8s", "job.yaml", "--with-code", "-o", str(out))
    assert told.returncode == 0, told
    objects = [item for path in sorted(out.iterdir()) for item in yaml.safe_load_all(path.read_text())]
    assert [item["kind"] for item in objects] == ["ConfigMap", "ConfigMap", "NetworkPolicy", "PyTorchJob"]
    identity = pin.look(JobSpec.load(folder / "job.yaml"))[0].code
    assert identity is not None and str(identity.hash) in told.stderr
    packed = b"".join(base64.b64decode(item["binaryData"]["part"]) for item in objects[:2])
    assert archive.read(packed, str(identity.hash))
    sources = objects[3]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"][-1]["projected"][
        "sources"
    ]
    assert [source["configMap"]["name"] for source in sources] == [item["metadata"]["name"] for item in objects[:2]]
    plain = lockstep(folder, "render", "k8s", "job.yaml")
    assert [item["kind"] for item in yaml.safe_load_all(plain.stdout)] == ["NetworkPolicy", "PyTorchJob"]
    again = lockstep(folder, "render", "k8s", "job.yaml", "--with-code", "-o", str(out))
    assert again.returncode == 2 and "is there already" in again.stderr
    for words, message in (
        (("k8s", "--with-code"), "--with-code needs -o DIR"),
        (("slurm", "--with-code", "-o", "x"), "no code to write"),
    ):
        told = lockstep(folder, "render", words[0], "job.yaml", *words[1:])
        assert told.returncode == 2 and message in told.stderr, told
