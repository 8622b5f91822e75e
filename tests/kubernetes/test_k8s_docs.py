"""The Kubernetes commands of the documentation, as they are printed, against the emulated API server.

`kubectl` is the real one. Where a page goes on to a job's logs and its end, the pods are real launchers with real ranks.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from k8s_cluster import Cluster
from k8s_operator import Running
from k8s_server import ApiServer

from tests.checkout import copy_to, environment
from tests.printed import Reader, marked, pages
from tests.processes import Result, poll, require, run

NAMESPACE = "lockstep"
BOUND = 180
PODS_RUN = {"docs/tutorials/to-kubernetes.md": "digits", "docs/how-to/start-a-project.md": "mine"}
"""Page → its job, whose pods are processes here. On the other pages a job is only created: it wants GPUs."""


def pods(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    return found


class Page(Reader):
    MARKER = "on Kubernetes"

    def __init__(self, page: str, cluster: Cluster, folder: Path, env: dict[str, str]) -> None:
        super().__init__(folder, env)
        self.cluster, self.role, self.runs_pods = cluster, cluster.role, page in PODS_RUN
        if PODS_RUN.get(page) != "mine":
            self.NEEDED = "never"

    def own(self, text: str) -> str:
        table = {"IMAGE=…": "IMAGE=registry.example/team/lockstep:cpu"}  # the reader's to fill in
        if self.runs_pods:
            runs = self.folder / "runs"  # a pod is a process of this machine, so the volume is a folder of the test
            table |= {
                "\nmemory: 2Gi": "\ncpus: 1\nmemory: 2Gi",  # both pods share this machine's cores
                "{claim: lockstep-runs, path: /runs}": f"{{claim: lockstep-runs, path: {runs}}}\nrun_dir: {runs}/job",
            }
        for printed, here in table.items():
            text = text.replace(printed, here)
        return text

    def job(self, name: str) -> dict[str, Any]:
        found = self.cluster.get("pytorchjobs", name, NAMESPACE)
        assert found is not None, f"there is no {name} in {[*self.cluster.objects]}"
        return found

    def before(self, command: str) -> None:
        self.role = self.cluster.role
        if command.startswith(("make install-k8s", "kubectl ")):
            self.cluster.role = None  # an administrator's
        if command.startswith("lockstep logs "):  # a rank says nothing before it has started
            lines = self.cluster.logs
            first = re.compile(r'\[rank 0\].*"start"')  # a port that is taken is warned of before that
            poll(lambda: any(first.search(line) for pod in lines.values() for line in pod), BOUND, f"a log in {lines}")

    def passes(self, command: str, done: Result) -> bool:
        """Doctor finds that the cluster has no operator, and says so."""
        return done.code == 0 or (done.code == 1 and " doctor " in command)

    def check(self, command: str, done: Result) -> None:
        self.cluster.role = self.role
        super().check(command, done)

    def installed(self, done: Result) -> None:
        """From now on nobody may do more than what was installed allows."""
        kinds = {kind for kind, place, _ in self.cluster.objects if place == NAMESPACE}
        assert {"roles", "rolebindings", "persistentvolumeclaims", "networkpolicies"} <= kinds, done.output
        assert self.cluster.get("namespaces", NAMESPACE, "") is not None
        self.cluster.allow(*self.cluster.all("roles", NAMESPACE))

    def examined(self, done: Result) -> None:
        """No operator is installed here, and the Role may not look for one: doctor says what it could not tell."""
        assert re.search(r"^cluster +ok .*Kubernetes v1", done.output, re.MULTILINE), done.output
        assert re.search(r"^rights +ok ", done.output, re.MULTILINE), done.output
        exec_ = re.search(r"^exec +note .*components/debug", done.output, re.MULTILINE)
        assert bool(exec_) == (self.cluster.get("roles", "lockstep-debug", NAMESPACE) is None), done.output

    def prepares(self, done: Result) -> None:
        job = self.cluster.get("jobs", "smoke-prepare", NAMESPACE)
        assert job is not None and "digits" in json.dumps(job), done.output

    def gpus(self, done: Result) -> None:
        job = pods(self.job("smoke"))
        (container,) = job["template"]["spec"]["containers"]
        assert (job["replicas"], container["resources"]["limits"]["nvidia.com/gpu"]) == (2, "4"), container
        assert self.job("smoke")["spec"]["nprocPerNode"] == "4" and container["image"].startswith("registry.example/")

    def queued(self, done: Result) -> None:
        self.gpus(done)
        assert self.job("smoke")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"

    def cancelled(self, done: Result) -> None:
        """A job that has ended by then stays, with its result."""
        ended = "digits: succeeded" in done.output
        assert ended or self.cluster.all("pytorchjobs", NAMESPACE) == [], done.output

    def submitted(self, done: Result) -> None:
        assert pods(self.job("digits"))["replicas"] == 2

    def located(self, done: Result) -> None:
        assert done.output.startswith("digits: "), done.output

    def listed(self, done: Result) -> None:
        assert re.search(r"^digits +", done.output, re.MULTILINE), done.output

    def differs(self, done: Result) -> None:
        assert re.search(r"gpus: 0 → 1", done.output), done.output

    def rank_0(self, done: Result) -> None:
        assert '"event": "start"' in done.output and "[rank " not in done.output, done.output

    def ended_well(self, done: Result) -> None:
        assert "succeeded" in done.output, done.output
        summary = json.loads((self.folder / "runs/job/summary.json").read_text())
        assert summary["epochs"] == 2 and summary["world_size"] == 2, summary

    def project(self, done: Result) -> None:
        """Its code travels in ConfigMaps, and its own loop trains on two ranks."""
        assert [name for kind, _, name in self.cluster.objects if kind == "configmaps"], "its code"
        summary = self.folder / "runs/job/summary.json"
        poll(summary.exists, BOUND, f"the end of the project's run: {self.cluster.logs}")
        poll(lambda: self.job("mine").get("status", {}).get("conditions", [{}])[-1].get("type") == "Succeeded", BOUND)

    def secret(self, done: Result) -> None:
        found = self.cluster.get("secrets", "team-registry", NAMESPACE)
        assert found is not None and found["type"] == "kubernetes.io/dockerconfigjson", done.output
        held = json.loads(base64.b64decode(found["data"][".dockerconfigjson"]))
        assert held["auths"]["registry.example"]["username"] == "USER"
        job = yaml.safe_load((self.folder / "private.yaml").read_text())
        assert job["k8s"]["image_pull_secrets"] == [found["metadata"]["name"]], "what the page's job names"

    CHECKS: ClassVar = {
        "make install-k8s": installed,
        "kubectl apply -k ": installed,
        "kubectl .* create secret ": secret,
        "lockstep doctor ": examined,
        "lockstep prepare ": prepares,
        "make submit-k8s .*GPUS": gpus,
        "make submit-k8s$": project,
        "lockstep submit .*queue=gpu": queued,
        "lockstep submit ": submitted,
        "lockstep status ": located,
        "lockstep list ": listed,
        "lockstep diff ": differs,
        "lockstep logs ": rank_0,
        "lockstep wait ": ended_well,
        "lockstep cancel ": cancelled,
    }


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Path:
    """A clone. The cluster knows who sends no token: kubectl has none where there is no TLS."""
    require(shutil.which("kubectl"), "kubectl is not installed")
    cluster.tokens.add("")
    return copy_to(tmp_path / "lockstep")


@pytest.fixture
def running(request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """The operator of the pages whose pods run."""
    if request.getfixturevalue("page") not in PODS_RUN:
        yield
        return
    (tmp_path / "pods").mkdir()
    operator = Running(cluster, tmp_path / "pods", NAMESPACE)
    yield
    operator.stop()


@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("page", pages(Page.MARKER))
def test_what_the_page_prints_works_on_the_emulated_cluster(
    page: str, server: ApiServer, cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    env = environment(folder, home, HOME=str(home), KUBECONFIG=str(server.kubeconfig(tmp_path / "kubeconfig")))
    reader = Page(page, cluster, folder, env)
    if "make install-k8s" not in marked(Page.MARKER, page):  # the other pages take it for granted
        reader.before("make install-k8s")
        reader.check("make install-k8s", reader.run("make install-k8s"))
    reader.reads(page)


@pytest.mark.nightly
@pytest.mark.parametrize("overlay", ["full", "single-node", "trainer", "debug"])
def test_what_the_table_of_overlays_names_can_be_applied(
    overlay: str, server: ApiServer, folder: Path, tmp_path: Path
) -> None:
    """And once more, which changes nothing."""
    env = environment(folder, tmp_path / "home", HOME=str(tmp_path / "home"))
    env["KUBECONFIG"] = str(server.kubeconfig(tmp_path / "kubeconfig"))
    command = f"make install-k8s OVERLAY=overlays/{overlay}"
    assert f"`{command}`" in (folder / "docs/kubernetes.md").read_text()
    done = run(["bash", "-c", command], env, cwd=folder)
    assert done.code == 0 and "namespace/lockstep created" in done.output, done.output
    done = run(["bash", "-c", command], env, cwd=folder)
    assert done.code == 0 and " created" not in done.output and " configured" not in done.output, done.output
