"""Makes the schemas beside this file anew: `python tests/kubernetes/crds/strip.py`, or `strip.py FOLDER` from copies of the originals.

They are the OpenAPI schemas of the custom resources that the manifests are validated against, as upstream published
them at a pinned revision, without the descriptions, which are most of the originals and which no validation reads.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
REPOSITORY = "kubeflow/trainer"
PINNED = {
    "PyTorchJob": ("release-1.9", "3a3a1da8d5287f9f96e1b2d3be6a4b6ad756566d", "kubeflow.org_pytorchjobs.yaml"),
    "TrainJob": ("master", "8c0f5059bd51ec3ba6d6a6a7b2e1471de7bc13b3", "trainer.kubeflow.org_trainjobs.yaml"),
}
"""kind → branch, revision and name of the original in manifests/base/crds"""
WIDTH = 120


def original(kind: str, folder: Path | None) -> str:
    """The CRD as upstream wrote it."""
    _, revision, name = PINNED[kind]
    if folder is not None:
        return (folder / name).read_text()
    address = f"https://raw.githubusercontent.com/{REPOSITORY}/{revision}/manifests/base/crds/{name}"
    with urllib.request.urlopen(address, timeout=60) as answer:
        return answer.read().decode()


def stripped(kind: str, text: str) -> dict[str, Any]:
    """The one version's schema of a CRD, and where it comes from."""
    branch, revision, name = PINNED[kind]
    spec = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]
    (version,) = spec["versions"]
    assert spec["names"]["kind"] == kind
    return {
        "source": f"https://github.com/{REPOSITORY}/blob/{revision}/manifests/base/crds/{name} (branch {branch})",
        "notice": "Apache-2.0, see LICENSE. Changed: one schema taken out, its descriptions removed, written as JSON.",
        "apiVersion": f"{spec['group']}/{version['name']}",
        "kind": kind,
        "openAPIV3Schema": without_descriptions(version["schema"]["openAPIV3Schema"]),
    }


def without_descriptions(schema: Any) -> Any:
    """A schema without the keyword `description`; a field of that name and what is no schema (a default) stay."""
    if isinstance(schema, list):
        return [without_descriptions(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: without_descriptions(item) for name, item in value.items()}
        elif key != "description":
            found[key] = value if key in ("default", "enum", "example") else without_descriptions(value)
    return found


def pretty(value: Any, indent: int = 0, before: int = 0) -> str:
    """JSON in which whatever fits into one line stands in one: a tenth of the lines, and still a diff that can be read."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or indent + before + len(flat) < WIDTH:
        return flat
    if isinstance(value, list):
        parts, (left, right) = [pretty(item, indent + 1) for item in value], "[]"
    else:
        keys = [f"{json.dumps(key)}: " for key in value]
        parts = [key + pretty(item, indent + 1, len(key)) for key, item in zip(keys, value.values())]
        left, right = "{}"
    inner = ",\n".join(" " * (indent + 1) + part for part in parts)
    return f"{left}\n{inner}\n{' ' * indent}{right}"


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else None
    for kind in PINNED:
        made = stripped(kind, original(kind, folder))
        (HERE / f"{kind.lower()}.json").write_text(pretty(made) + "\n")


if __name__ == "__main__":
    main()
