"""Which images were pushed, by revision and flavour: `make push` notes their digests, `make submit-k8s` takes one.

python docker/pushed.py push registry/name REVISION        # pushes what this machine has of it
python docker/pushed.py find REVISION job.yaml [gpus=4 …]  # prints --image NAME@sha256:…, or nothing where the job has its own

Who pushes needs an engine, and no package of Python's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lockstep.jobs.compose.engine import docker
from lockstep.jobs.status import warn
from lockstep.training import files
from lockstep.training.contract import UserError, user_errors

NOTES = Path(__file__).parents[1] / "build/images.json"
FLAVOURS = {"cuda": "", "cpu": "-cpu"}
"""What an image was built for → what its tag ends with behind the revision."""
PUSH_SECONDS = 3600.0


def notes() -> dict[str, dict[str, str]]:
    """Revision → flavour → name with digest. What is no such note counts as none."""
    found = files.read_json(NOTES)
    rows = found.items() if isinstance(found, dict) else ()
    return {
        revision: {flavour: name for flavour, name in row.items() if flavour in FLAVOURS and isinstance(name, str)}
        for revision, row in rows
        if isinstance(row, dict)
    }


def push(name: str, revision: str) -> None:
    """Pushes the flavours that were built of this revision, prints and notes their digests. Raises `UserError`."""
    name = name.removeprefix("docker.io/")  # as the engine lists it
    built = docker("image", "ls", "--format", "{{.Tag}}", name).split()
    flavours = [flavour for flavour, end in FLAVOURS.items() if revision + end in built]
    if not flavours:
        raise UserError(f"there is no {name}:{revision} yet: make image IMAGE={name}, or make image-cpu IMAGE={name}")
    for flavour in flavours:
        tag = f"{name}:{revision}{FLAVOURS[flavour]}"
        docker("push", "--quiet", tag, timeout=PUSH_SECONDS)
        digests = json.loads(docker("image", "inspect", "--format", "{{json .RepoDigests}}", tag))
        found = [one for one in digests or () if one.startswith(f"{name}@sha256:")]
        if len(found) != 1:
            raise UserError(
                f"{tag} is pushed, but the engine tells {len(found)} digests of it, not one: take the registry's"
            )
        digest = found[0]
        known = notes()
        known.setdefault(revision, {})[flavour] = digest
        NOTES.parent.mkdir(exist_ok=True)
        files.replace_json(NOTES, known)
        print(digest, flush=True)


def find(revision: str, job: str, *given: str) -> None:
    """Raises `UserError`: no image of this revision was pushed that the job could run in."""
    from lockstep.jobs.spec.model import JobSpec
    from lockstep.training.config.settings import assignments

    spec = JobSpec.load(Path(job), dict(assignments(JobSpec, given)))
    if spec.image is not None and not spec.image.startswith("registry.example/"):
        return
    pushed = notes().get(revision, {})
    image = pushed.get("cuda") if spec.gpus else pushed.get("cpu") or pushed.get("cuda")
    if image is None:
        build = "image" if spec.gpus else "image-cpu"
        raise UserError(
            f"no {'CUDA ' if spec.gpus else ''}image of this revision ({revision}) was pushed: make {build} push IMAGE=registry/name, "
            "or say which one: IMAGE=registry/name@sha256:…"
        )
    if revision.endswith("-dirty"):
        warn("the working tree has changes, and the image has those that were there when it was built")
    print(f"--image {image}")


if __name__ == "__main__":
    with user_errors():
        {"push": push, "find": find}[sys.argv[1]](*sys.argv[2:])
