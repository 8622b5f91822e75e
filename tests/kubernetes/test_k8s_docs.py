"""The Kubernetes commands of the tutorial, as they are printed, against the emulated API server.

The pods are real launchers with real ranks. An administrator's `kubectl apply` is not emulated: the test creates its objects.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from k8s_cluster import Cluster
from k8s_operator import Running
from k8s_server import ApiServer

from tests.checkout import copy_to, environment
from tests.events import summary_of
from tests.printed import Reader, pages
from tests.processes import Result, poll, require

NAMESPACE = "lockstep"
BOUND = 180
PAGE = "docs/tutorials/to-kubernetes.md"


class Page(Reader):
    NEED = "on Kubernetes"

    def __init__(self, cluster: Cluster, folder: Path, env: dict[str, str]) -> None:
        super().__init__(folder, env)
        self.cluster = cluster

    def own(self, text: str) -> str:
        runs = self.folder / "runs"  # a pod is a process of this machine, so the volume is a folder of the test
        table = {
            "registry.example": "localhost:5000",  # the reader fills it in
            "\nmemory: 2Gi": "\ncpus: 1\nmemory: 2Gi",  # both pods share this machine's cores
            "{claim: lockstep-runs, path: /runs}": f"{{claim: lockstep-runs, path: {runs}}}\nrun_dir: {runs}/job",
        }
        for printed, here in table.items():
            text = text.replace(printed, here)
        return text

    def run(self, command: str) -> Result:
        if command != "make install-k8s":
            return super().run(command)
        done = super().run("make -n --no-print-directory install-k8s && kubectl kustomize deploy/k8s/base")
        applied, _, objects = done.output.partition("\n")
        assert applied.startswith("kubectl apply -k deploy/k8s/base "), done.output
        for item in yaml.safe_load_all(objects):
            if item["kind"] == "Role":
                self.cluster.allow(item, namespace=NAMESPACE)
            if item["kind"] == "PersistentVolumeClaim":
                self.cluster.put("persistentvolumeclaims", item, NAMESPACE)
        return done

    def before(self, command: str) -> None:
        if command.startswith("lockstep logs "):  # a rank prints nothing before it has started
            lines = self.cluster.logs
            first = re.compile(r'\[rank 0\].*"start"')  # a warning of a busy port may come earlier
            poll(lambda: any(first.search(line) for pod in lines.values() for line in pod), BOUND, f"a log in {lines}")

    def after(self, command: str, done: Result) -> None:
        """`doctor` may exit with 1: before the installation it reports a missing operator. `--dry-run` finds another job."""
        codes = {0, 1} if " doctor " in command else {2} if "--dry-run" in command else {0}
        assert done.code in codes, f"{command}\n{done.output}"
        if command.startswith("lockstep wait "):
            summary = summary_of(self.folder / "runs/job")
            assert "succeeded" in done.output and (summary["epochs"], summary["world_size"]) == (2, 2), summary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the checkout."""
    require(shutil.which("kubectl"), "kubectl is not installed")
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
