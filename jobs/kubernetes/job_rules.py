"""Rules about the job as a whole: names, replicas, restarts, run policy, elasticity."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.jobs.kubernetes.pod import KUEUE_QUEUE
from lockstep.jobs.kubernetes.section import k8s
from lockstep.jobs.kubernetes.subject import PYTORCHJOB, TRAINJOB, Subject, number, rule
from lockstep.jobs.manifest import HASH, JOB, get, mappings


@rule("LS001")
def name_length(subject: Subject) -> Iterator[str]:
    """Pod and Service names hold the job's name and have at most 63 characters."""
    name = get(subject.job, "metadata", "name")
    if not isinstance(name, str):
        return
    if subject.is_pytorchjob:
        highest = max([number(pod.count) or 1 for pod in subject.pods] or [1]) - 1
        longest = 63 - len(f"-worker-{highest}")
    else:
        longest = 63 - len(f"-node-0-{subject.spec.nodes - 1}-xxxxx")
    if len(name) > longest:
        yield f"the name {name[:40]}… has {len(name)} characters, at most {longest} are possible with these pods: shorten it"


@rule("LS002")
def container(subject: Subject) -> Iterator[str]:
    """The operator needs one container named `pytorch` (TrainJob: `node`) with an image."""
    for pod in subject.pods:
        if not pod.container:
            yield f"{pod.replica} has no container named pytorch: undo the patch that renamed it"
        elif subject.is_pytorchjob and not isinstance(pod.container.get("image"), str):
            yield "image is not set: add `image: registry/name@sha256:…` to the job, or pass --image"
    if not subject.is_pytorchjob and subject.job and not isinstance(get(subject.job, "spec", "trainer", "image"), str):
        yield "image is not set: add `image: registry/name@sha256:…` to the job, or pass --image"


@rule("LS004", kinds=PYTORCHJOB)
def replica_keys(subject: Subject) -> Iterator[str]:
    """Replica keys are exactly Master and Worker, with one Master and at least one Worker."""
    if not subject.replicas:
        yield "the job has no replicas: undo the patch of pytorchReplicaSpecs"
    for pod in subject.pods:
        if pod.replica not in ("Master", "Worker"):
            yield f"replica {pod.replica!r} is unknown to the operator: use Master and Worker"
        elif (number(pod.count) or 0) < 1:
            yield f"{pod.replica} has {pod.count!r} replicas, expected at least 1"
        elif pod.replica == "Master" and pod.count != 1:
            yield f"Master has {pod.count} replicas, the operator accepts 1: put the others under Worker"
    total = sum(number(pod.count) or 0 for pod in subject.pods)
    if subject.replicas and total != subject.spec.nodes:
        yield f"the replicas are {total} pods, nodes is {subject.spec.nodes}: set nodes, do not patch the manifest"


@rule("LS021", kinds=PYTORCHJOB)
def elastic(subject: Subject) -> Iterator[str]:
    """An elastic job has workers only, a rendezvous id, and never `standalone`."""
    policy = get(subject.job, "spec", "elasticPolicy")
    if policy is None:
        return
    if "Master" in subject.replicas:
        yield "elasticPolicy beside a Master: PET_NNODES counts workers only, so the nodes never meet; remove the Master"
    if "Worker" not in subject.replicas:
        yield "elasticPolicy needs Worker replicas"
    if get(policy, "standalone") is not None:
        yield "elasticPolicy.standalone injects an empty PET_STANDALONE, which torch refuses: remove it"
    if not get(policy, "rdzvId"):
        yield "elasticPolicy.rdzvId is not set: two jobs on one endpoint would join each other"


@rule("LS022")
def network_policy(subject: Subject) -> Iterator[str]:
    """The ports of ranks and launchers ask nobody who he is: only the job's own pods may reach them."""
    policies = [item for item in subject.objects if item.get("kind") == "NetworkPolicy"]
    selectors = [get(item, "spec", "podSelector", "matchLabels") for item in policies]
    if {JOB: subject.spec.name, HASH: subject.spec.hash()} not in selectors:
        yield "no NetworkPolicy selects the job's pods: anyone who reaches their ports can stop the job"


@rule("LS026")
def topology(subject: Subject) -> Iterator[str]:
    """Topology-aware scheduling is Kueue's: without a queue the annotation does nothing."""
    queue = get(subject.job, "metadata", "labels", KUEUE_QUEUE)
    for pod in subject.pods:
        annotations = get(pod.metadata, "annotations") or {}
        if not queue and isinstance(annotations, dict) and any("podset-" in str(key) for key in annotations):
            yield "k8s.topology does nothing without k8s.queue: set the queue, or remove topology"


@rule("LS045", "warning", TRAINJOB)
def plain_runtime(subject: Subject) -> Iterator[str]:
    """Kubeflow's own runtime mounts a token, has no metrics ports, keeps finished jobs and retries wrong usage (exit 2)."""
    if k8s(subject.spec).runtime == "torch-distributed":
        yield (
            "the runtime torch-distributed mounts a token, has no metrics ports, keeps finished jobs and retries wrong usage: "
            "set k8s.runtime to lockstep, the one of deploy/k8s/components/trainer"
        )


@rule("LS036", kinds=TRAINJOB)
def trainjob_limits(subject: Subject) -> Iterator[str]:
    """A TrainJob cannot be elastic, and what its pods get beyond a patch is set in the runtime."""
    if subject.spec.elastic:
        yield "a TrainJob cannot be elastic: use k8s.kind PyTorchJob"
    given = subject.spec.plain().get("k8s", {})
    for name in ("priority_class", "image_pull_policy", "ttl", "master"):
        if name in given:
            yield f"a TrainJob cannot set k8s.{name}: put it into the runtime that k8s.runtime names, or use k8s.kind PyTorchJob"
    for patch in mappings(get(subject.job, "spec", "runtimePatches")):
        if not get(patch, "manager"):
            yield "a runtimePatch needs a manager"
