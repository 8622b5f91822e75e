"""What a server may answer, and what a command does with an answer of another shape."""

from __future__ import annotations

from pathlib import Path

from k8s_cluster import Cluster
from k8s_server import ApiServer

from tests.processes import PYTHON, ROOT, clean_env, run


def test_a_job_is_submitted_and_cancelled_where_an_empty_list_is_null(
    server: ApiServer, cluster: Cluster, tmp_path: Path
) -> None:
    """As every API server answers who asks for the metadata of objects that are not there. It was a traceback."""
    env = clean_env(PYTHONPATH=str(ROOT), KUBECONFIG=str(server.kubeconfig(tmp_path / "kubeconfig")))
    (tmp_path / "job.yaml").write_text(
        "name: smoke\nrecipe: smoke\nimage: registry.example/lockstep:1\nnodes: 2\ngpus: 4\n"
    )
    lockstep = [PYTHON, "-c", "from jobs.cli.main import main; main()"]
    done = run([*lockstep, "submit", "k8s", "job.yaml"], env, cwd=tmp_path)
    assert done.code == 0 and cluster.get("pytorchjobs", "smoke") is not None, done
    done = run([*lockstep, "cancel", "k8s", "smoke"], env, cwd=tmp_path)
    assert done.code == 0 and cluster.get("pytorchjobs", "smoke") is None, done
