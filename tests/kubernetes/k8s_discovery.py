"""What kubectl asks an API server before it applies anything: which kinds there are, and that the server checks fields."""

from __future__ import annotations

from typing import Any

from k8s_cluster import KINDS

VERSIONS = {
    "v1": "namespaces serviceaccounts persistentvolumeclaims configmaps secrets pods events",
    "apps/v1": "deployments",
    "batch/v1": "jobs",
    "networking.k8s.io/v1": "networkpolicies",
    "rbac.authorization.k8s.io/v1": "roles rolebindings",
    "kubeflow.org/v1": "pytorchjobs",
    "trainer.kubeflow.org/v1alpha1": "trainjobs clustertrainingruntimes",
    "kueue.x-k8s.io/v1beta2": "localqueues clusterqueues resourceflavors workloads",
    "monitoring.coreos.com/v1": "podmonitors prometheusrules",
}
CLUSTER_WIDE = {"namespaces", "clustertrainingruntimes", "clusterqueues", "resourceflavors"}
VERBS = ["create", "delete", "get", "list", "patch", "watch"]
Object = dict[str, Any]


def answer(path: str) -> Object | None:
    """The answer to a request of discovery; None where it is about objects."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(one) for one in VERSIONS if "/" in one]}
    if path == "/openapi/v3":
        return {"paths": {_root(one)[1:]: {"serverRelativeURL": f"{path}{_root(one)}"} for one in VERSIONS}}
    for version, names in VERSIONS.items():
        if path == _root(version):
            resources = [
                {"name": name, "singularName": "", "namespaced": name not in CLUSTER_WIDE, "kind": KINDS[name], "verbs": VERBS}
                for name in names.split()
            ]  # fmt: skip
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        if path == f"/openapi/v3{_root(version)}":  # that the server checks the fields, so that kubectl needs no schema
            group, _, name = version.rpartition("/")
            checks = {"parameters": [{"name": "fieldValidation", "in": "query"}]}
            kinds = {plural: {"group": group, "version": name, "kind": KINDS[plural]} for plural in names.split()}
            paths = {
                f"{_root(version)}/{plural}/{{name}}": {"patch": {**checks, "x-kubernetes-group-version-kind": kind}}
                for plural, kind in kinds.items()
            }
            return {"openapi": "3.0.0", "info": {"title": "emulated", "version": "1"}, "paths": paths}
    return None


def _root(version: str) -> str:
    return f"/{'apis' if '/' in version else 'api'}/{version}"


def _group(version: str) -> Object:
    served = {"groupVersion": version, "version": version.rpartition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [served], "preferredVersion": served}
