"""Where a job can run. `open_backend` imports only the one that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.contract import UserError

if TYPE_CHECKING:
    from jobs.backend import Backend

NAMES = ("local", "k8s", "slurm", "compose")


def open_backend(name: str, namespace: str | None = None, context: str | None = None) -> Backend:
    """The backend of that name. Raises `UserError` for an unknown name, or a cluster without credentials."""
    if name in ("k8s", "kubernetes"):
        from jobs.kubernetes.backend import KubernetesBackend

        return KubernetesBackend.connect(namespace, context)
    if namespace or context:
        raise UserError(f"--namespace and --context belong to k8s, not to {name}")
    if name == "local":
        from jobs.local.backend import LocalBackend

        return LocalBackend()
    if name == "slurm":
        from jobs.slurm.backend import SlurmBackend

        return SlurmBackend()
    if name == "compose":
        from jobs.compose.backend import ComposeBackend

        return ComposeBackend()
    from training import settings

    raise UserError(f"unknown backend {name!r}{settings.nearest(name, NAMES)}")
