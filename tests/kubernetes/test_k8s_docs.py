"""The commands of the Kubernetes tutorial, as they are printed, against the emulated API server."""

from __future__ import annotations

from pathlib import Path

import pytest
from k8s_cluster import Cluster

from tests.printed import PAGES, marked, write_files
from tests.processes import PYTHON, clean_env, run

MARKER = "on Kubernetes"


@pytest.mark.parametrize("page", [page for page in PAGES if marked(MARKER, page)])
def test_what_the_page_prints_works_on_the_emulated_cluster(page: str, cluster: Cluster, tmp_path: Path) -> None:
    kubeconfig = next(path for path in tmp_path.iterdir() if path.name == "kubeconfig")
    write_files(page, tmp_path)
    env = clean_env(KUBECONFIG=str(kubeconfig), LOCKSTEP_HOME=str(tmp_path / "home"))
    env["PATH"] = f"{Path(PYTHON).parent}:{env['PATH']}"
    for command in marked(MARKER, page):
        done = run(["bash", "-c", command], env, timeout=120, cwd=tmp_path)
        if " doctor " in command:  # it finds that the cluster has no operator and no volumes, and says so
            assert done.code in (0, 1) and "lockstep-runs" in done.output, done.output
            continue
        assert done.code == 0, f"{command}\n{done.output}"
