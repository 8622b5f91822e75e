"""The Kubernetes commands of the tutorial, as they are printed, and the overlays, against the emulated API server.

`kubectl` is the real one, and the pods are real launchers with real ranks.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
from k8s_cluster import Cluster
from k8s_discovery import CLUSTER_WIDE
from k8s_operator import Running
from k8s_server import ApiServer

from tests.checkout import copy_to, environment
from tests.printed import Reader, pages
from tests.processes import Result, poll, require, run

CORE = ("v1", "apps/v1", "batch/v1", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1")
NAMESPACE = "lockstep"
BOUND = 180
PAGE = "docs/tutorials/to-kubernetes.md"


class Page(Reader):
    NEED = "on Kubernetes"

    def __init__(self, cluster: Cluster, folder: Path, env: dict[str, str]) -> None:
        super().__init__(folder, env)
        self.cluster, self.role = cluster, cluster.role

    def own(self, text: str) -> str:
        runs = self.folder / "runs"  # a pod is a process of this machine, so the volume is a folder of the test
        table = {
            "registry.example": "localhost:5000",  # the reader's to fill in
            "\nmemory: 2Gi": "\ncpus: 1\nmemory: 2Gi",  # both pods share this machine's cores
            "{claim: lockstep-runs, path: /runs}": f"{{claim: lockstep-runs, path: {runs}}}\nrun_dir: {runs}/job",
        }
        for printed, here in table.items():
            text = text.replace(printed, here)
        return text

    def before(self, command: str) -> None:
        self.role = self.cluster.role
        if command == "make install-k8s":
            self.cluster.role = None  # an administrator's
        if command.startswith("lockstep logs "):  # a rank says nothing before it has started
            lines = self.cluster.logs
            first = re.compile(r'\[rank 0\].*"start"')  # a port that is taken is warned of before that
            poll(lambda: any(first.search(line) for pod in lines.values() for line in pod), BOUND, f"a log in {lines}")

    def after(self, command: str, done: Result) -> None:
        """Doctor finds that the cluster has no operator, and says so. Once it is installed, only its rights are there."""
        assert done.code == 0 or (done.code == 1 and " doctor " in command), f"{command}\n{done.output}"
        self.cluster.role = self.role
        if command == "make install-k8s":
            self.cluster.allow(*self.cluster.all("roles", NAMESPACE), namespace=NAMESPACE)
        if command.startswith("lockstep wait "):
            summary = json.loads((self.folder / "runs/job/summary.json").read_text())
            assert "succeeded" in done.output and (summary["epochs"], summary["world_size"]) == (2, 2), summary


@pytest.fixture
def folder(cluster: Cluster, tmp_path: Path) -> Path:
    """A clone. The cluster knows who sends no token: kubectl has none where there is no TLS."""
    require(shutil.which("kubectl"), "kubectl is not installed")
    cluster.tokens.add("")
    return copy_to(tmp_path / "lockstep")


@pytest.fixture
def pods(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """An operator whose pods are real launchers."""
    (tmp_path / "pods").mkdir()
    operator = Running(cluster, tmp_path / "pods", NAMESPACE)
    yield
    operator.stop()


@pytest.mark.promise("printed")
@pytest.mark.usefixtures("pods")
def test_what_the_tutorial_prints_works_on_the_emulated_cluster(
    server: ApiServer, cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    env = environment(folder, home, HOME=str(home), KUBECONFIG=str(server.kubeconfig(tmp_path / "kubeconfig")))
    assert pages(Page.NEED) == [PAGE]
    Page(cluster, folder, env).reads(PAGE)


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
