"""Paths of the rendered job that the renderer sets right, so that only a `patch` can spoil them: a table.

What needs a look at more than one path, or at what the job itself says, is a rule of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from operator import eq, ne
from typing import Any, Literal, NamedTuple

from lockstep.jobs.command import GRACE_MARGIN
from lockstep.jobs.kubernetes import pytorchjob, trainjob
from lockstep.jobs.kubernetes.section import k8s
from lockstep.jobs.kubernetes.subject import KINDS, PYTORCHJOB, TRAINJOB, Subject, number, rule
from lockstep.jobs.lint import Level
from lockstep.jobs.manifest import HASH, JOB, get


class Path(NamedTuple):
    """What must stand at a path of the job, or of each of its pods, whose replica's name begins the message."""

    place: Literal["job", "pod"]
    path: str
    """Keys, with blanks between them."""
    holds: Callable[[Any, Any], bool]
    """Of what is there and of `want`, which may be a function of the subject."""
    want: Any
    message: str
    """May name `{value}`, `{want}` and `{spec}`."""
    kinds: tuple[str, ...] = ()
    """Only for these, and never where a patch has taken the kind away."""


def protect(id: str, title: str, *paths: Path, level: Level = "error", kinds: tuple[str, ...] = ()) -> None:
    def look(subject: Subject) -> Iterator[str]:
        for place, prefix, item in [
            ("job", "", subject.job),
            *(("pod", f"{p.replica}: ", p.plain) for p in subject.pods),
        ]:
            for path in paths:
                if path.place == place and (not path.kinds or subject.kind in path.kinds):
                    value = get(item, *path.path.split())
                    want = path.want(subject) if callable(path.want) else path.want
                    if not path.holds(value, want):
                        yield prefix + path.message.format(value=value, want=want, spec=subject.spec)

    look.__doc__ = title
    rule(id, level, kinds)(look)


def _is_number(value: Any, _: Any) -> bool:
    return number(value) is not None


def _among(value: Any, want: tuple[str, ...]) -> bool:
    return value in want


def _name(subject: Subject) -> str:
    return subject.spec.name


def _hash(subject: Subject) -> str:
    return subject.spec.hash()


def _restarts(subject: Subject) -> int:
    return sum(number(pod.count) or 0 for pod in subject.pods) * subject.spec.max_restarts + 1


_API_VERSION = {"PyTorchJob": pytorchjob.API_VERSION, "TrainJob": trainjob.API_VERSION}
_ENDLESS = "activeDeadlineSeconds is not set: set time_limit"
_LABELS = f"the patch removed the labels {JOB} or {HASH}: lockstep finds the job by them"
_MISSED = "the patch removed the label {}, so the NetworkPolicy misses the pod"

# fmt: off
protect("LS003", "`nprocPerNode` is a number written as text; `auto` counts the host's CPUs.",
    Path("job", "spec nprocPerNode", lambda value, _: isinstance(value, str) and bool(re.fullmatch(r"[1-9]\d{0,3}", value)), None,
         'nprocPerNode must be a number written as text such as "4", got {value!r}: set ranks_per_node'), kinds=PYTORCHJOB)
protect("LS005", "`cleanPodPolicy` defaults to None, which lets running workers keep their GPUs.",
    Path("job", "spec runPolicy cleanPodPolicy", _among, ("Running", "All"),
         "cleanPodPolicy is {value!r}: use Running, else workers keep their GPUs after the end"), kinds=PYTORCHJOB)
protect("LS006", "`backoffLimit` unset is infinite, and one gang restart costs as many as there are pods.",
    Path("job", "spec runPolicy backoffLimit", _is_number, _restarts,
         "backoffLimit is not set, which means restarts without end: set it to {want}"),
    Path("job", "spec runPolicy backoffLimit", lambda value, want: number(value) is None or value >= want, _restarts,
         "backoffLimit {value} ends the job before max_restarts {spec.max_restarts}: it must be {want}"), kinds=PYTORCHJOB)
protect("LS007", "Finished jobs stay for ever without a TTL.",
    Path("job", "spec runPolicy ttlSecondsAfterFinished", _is_number, None,
         "ttlSecondsAfterFinished is not set: the finished job is never cleaned up; set k8s.ttl"), level="warning", kinds=PYTORCHJOB)
protect("LS008", "Without a deadline a hung job holds its GPUs for ever.",
    Path("job", "spec runPolicy activeDeadlineSeconds", _is_number, None, _ENDLESS, PYTORCHJOB),
    Path("job", "spec activeDeadlineSeconds", _is_number, None, _ENDLESS, TRAINJOB), level="warning")
protect("LS009", "The kubelet must wait longer than the ranks' grace, or it kills them in the middle of a save.",
    Path("pod", "spec terminationGracePeriodSeconds", lambda value, want: (number(value) or 0) >= want,
         lambda subject: subject.spec.grace_seconds + GRACE_MARGIN,
         f"terminationGracePeriodSeconds is {{value!r}}, below grace_seconds + {GRACE_MARGIN} = {{want}}"))
protect("LS017", "Headless Services publish no unready address: a readinessProbe on Master delays DNS until workers give up.",
    Path("pod", "container readinessProbe", eq, None,
         "a readinessProbe delays the DNS name that the workers wait for: remove it"), kinds=PYTORCHJOB)
protect("LS018", "Only `ExitCode` tells wrong usage from a crash; OnFailure retries both.",
    Path("pod", "restartPolicy", eq, "ExitCode", "restartPolicy is {value!r}, expected ExitCode: others retry wrong usage (exit 2)"),
    Path("pod", "spec restartPolicy", eq, None, "restartPolicy in the pod template is overwritten by the operator: remove it"),
    kinds=PYTORCHJOB)
protect("LS023", "A `prometheus.io/port` annotation beside the PodMonitor scrapes one port twice and the others never.",
    Path("pod", "metadata annotations",
         lambda value, want: not isinstance(value, dict) or not any(str(key).startswith(want) for key in value), "prometheus.io/",
         "prometheus.io annotations carry one port only: use the PodMonitor of deploy/k8s"))
protect("LS027", "`schedulingPolicy` is silently ignored where the operator runs without --gang-scheduler-name.",
    Path("job", "spec runPolicy schedulingPolicy", eq, None,
         "schedulingPolicy works only with the operator's --gang-scheduler-name: see `lockstep doctor`, or use k8s.queue"),
    level="warning", kinds=PYTORCHJOB)
protect("LS028", "`patch` must not take away what `status`, `logs`, `cancel` and the NetworkPolicy find the job by.",
    Path("job", "kind", _among, KINDS, "the patch changed kind: patch the fields below it"),
    Path("job", "apiVersion", eq, lambda subject: _API_VERSION[subject.kind], "apiVersion is {value!r}, expected {want}", KINDS),
    Path("job", "metadata name", eq, _name, "the patch changed metadata.name: change name in the job instead", KINDS),
    Path("job", "metadata namespace", eq, lambda subject: k8s(subject.spec).namespace,
         "the patch changed metadata.namespace: set k8s.namespace instead", KINDS),
    Path("job", f"metadata labels {JOB}", eq, _name, _LABELS, KINDS),
    Path("job", f"metadata labels {HASH}", eq, _hash, _LABELS, KINDS),
    Path("pod", f"metadata labels {JOB}", eq, _name, _MISSED.format(JOB)),
    Path("pod", f"metadata labels {HASH}", eq, _hash, _MISSED.format(HASH)))
protect("LS030", "Without the launcher the operator's RANK is the pod's index, and each pod trains alone.",
    Path("pod", "container command", lambda value, want: isinstance(value, list) and bool(want & {str(word) for word in value}),
         {"launch", "torchrun"}, "the command is not `python -m lockstep.training launch …`: no rank would be started"))
protect("LS032", "A service mesh's proxy never ends, and so would the pod.",
    Path("pod", "metadata annotations sidecar.istio.io/inject", eq, "false",
         'the annotation sidecar.istio.io/inject: "false" is gone: put it back'), level="warning")
protect("LS033", "Without memory and CPU limits a pod is the first to be evicted.",
    Path("pod", "container resources limits cpu", ne, None, "no limit of cpu: set cpus"),
    Path("pod", "container resources limits memory", ne, None, "no limit of memory: set memory"))
