"""The Kubernetes commands of the documentation, as they are printed, against the emulated API server.

`kubectl` is the real one. Where a page goes on to a job's logs and its end, the pods are real launchers with real ranks.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import kubernetes_validate
import pytest
from k8s_cluster import Cluster
from k8s_discovery import CLUSTER_WIDE
from k8s_operator import Running
from k8s_server import ApiServer

from tests.checkout import copy_to, environment
from tests.printed import Reader, marked, pages
from tests.processes import Result, poll, require, run

CORE = ("v1", "apps/v1", "batch/v1", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1")
NAMESPACE = "lockstep"
BOUND = 180
pytestmark = pytest.mark.promise("printed")
REGISTRY = "localhost:5000"
PODS_RUN = {"docs/tutorials/to-kubernetes.md": "digits", "docs/how-to/start-a-project.md": "mine"}
"""Page → its job, whose pods are processes here. On the other pages a job is only created: it wants GPUs."""


class Page(Reader):
    MARKER = "on Kubernetes"

    def __init__(self, page: str, cluster: Cluster, folder: Path, env: dict[str, str]) -> None:
        super().__init__(folder, env)
        self.cluster, self.role, self.runs_pods = cluster, cluster.role, page in PODS_RUN
        if PODS_RUN.get(page) != "mine":
            self.NEEDED = "never"

    def own(self, text: str) -> str:
        table = {"registry.example": REGISTRY}  # the reader's to fill in
        if not self.runs_pods:
            table |= {"lockstep:cpu": "lockstep:cuda"}  # these pages ask for GPUs
        else:
            runs = self.folder / "runs"  # a pod is a process of this machine, so the volume is a folder of the test
            table |= {
                "\nmemory: 2Gi": "\ncpus: 1\nmemory: 2Gi",  # both pods share this machine's cores
                "{claim: lockstep-runs, path: /runs}": f"{{claim: lockstep-runs, path: {runs}}}\nrun_dir: {runs}/job",
            }
        for printed, here in table.items():
            text = text.replace(printed, here)
        # kubectl sends a Secret in a form that the emulation does not read, unless it is applied.
        return f"{text} --dry-run=client -o json | kubectl apply -f -" if " create secret " in text else text

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
        self.cluster.allow(*self.cluster.all("roles", NAMESPACE), namespace=NAMESPACE)

    def ended_well(self, done: Result) -> None:
        summary = json.loads((self.folder / "runs/job/summary.json").read_text())
        assert "succeeded" in done.output and (summary["epochs"], summary["world_size"]) == (2, 2), (
            done.output,
            summary,
        )

    def project(self, done: Result) -> None:
        """Its code travels in ConfigMaps, and its own loop trains on two ranks."""
        assert self.cluster.all("configmaps", NAMESPACE), "its code"
        status: Any = lambda: self.cluster.get("pytorchjobs", "mine", NAMESPACE).get("status", {})  # noqa: E731
        poll(lambda: status().get("conditions", [{}])[-1].get("type") == "Succeeded", BOUND)
        assert (self.folder / "runs/job/summary.json").exists(), self.cluster.logs

    def ran(self, done: Result) -> None:
        """What else it does is shown where it is about that."""

    CHECKS: ClassVar = {
        "make install-k8s|kubectl apply -k ": installed,
        "make submit-k8s$": project,
        "lockstep wait ": ended_well,
        "": ran,
    }


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Path:
    """A clone. The cluster knows who sends no token: kubectl has none where there is no TLS."""
    require(shutil.which("kubectl"), "kubectl is not installed")
    cluster.tokens.add("")
    found = copy_to(tmp_path / "lockstep")
    (found / "build").mkdir(exist_ok=True)  # as `make push` notes it: a copy has no revision
    pushed = {"unknown": {"cuda": f"{REGISTRY}/team/lockstep@sha256:{'0' * 64}"}}
    (found / "build/images.json").write_text(json.dumps(pushed))
    return found


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


def test_what_the_table_of_overlays_names_can_be_applied(
    server: ApiServer, cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    """And once more, which changes nothing."""
    env = environment(folder, tmp_path / "home", HOME=str(tmp_path / "home"))
    env["KUBECONFIG"] = str(server.kubeconfig(tmp_path / "kubeconfig"))
    for overlay in ("full", "single-node", "trainer", "debug"):
        command = f"make install-k8s OVERLAY=overlays/{overlay}"
        assert f"`{command}`" in (folder / "docs/install.md").read_text()
        cluster.objects.clear()
        done = run(["bash", "-c", command], env, cwd=folder)
        assert done.code == 0 and "namespace/lockstep created" in done.output, done.output
        objects = [item for (kind, *_), item in cluster.objects.items() if item["apiVersion"] in CORE]
        for item in copy.deepcopy(objects):
            kubernetes_validate.validate(
                item | {"metadata": {**item["metadata"], "resourceVersion": "1"}}, "1.32", strict=True
            )
        spaces = {place for kind, place, _ in cluster.objects if kind not in CLUSTER_WIDE}
        modes = {
            mode for item in cluster.all("persistentvolumeclaims", NAMESPACE) for mode in item["spec"]["accessModes"]
        }
        assert spaces == {NAMESPACE} and modes == {"ReadWriteOnce" if "single" in overlay else "ReadWriteMany"}, overlay
        done = run(["bash", "-c", command], env, cwd=folder)
        assert done.code == 0 and " created" not in done.output and " configured" not in done.output, done.output
