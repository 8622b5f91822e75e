"""The commands that take a job file: render, lint, submit, diff, prepare, schema."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli import options
from jobs.cli.options import (
    Backend,
    Context,
    File,
    Gpus,
    Image,
    Json,
    NameFlag,
    Namespace,
    Nodes,
    Profile,
    Recipe,
    Sets,
    Sweep,
)
from jobs.terminal import say, show, warn
from training.contract import EXIT_DONE, EXIT_FAILED, UserError

if TYPE_CHECKING:
    from jobs.backend import Mode


def _no_sweep(backend: str, sweep: list[str] | None) -> None:
    if sweep and backend != "slurm":
        raise UserError(f"--sweep belongs to slurm, not to {backend}")


def render(
    backend: Backend,
    file: File = None,
    name: NameFlag = None,
    recipe: Recipe = None,
    image: Image = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    namespace: Namespace = None,
    sets: Sets = None,
    profile: Profile = None,
    sweep: Sweep = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write there instead of to standard output.")] = None,
    as_json: Json = False,
) -> None:
    """Print the manifest that submit would apply. No cluster is needed."""
    _no_sweep(backend, sweep)
    values = options.parse(
        sets, name=name, recipe=recipe, image=image, nodes=nodes, gpus=gpus, **{"k8s.namespace": namespace}
    )
    spec = options.build(file, values, profile)
    objects: object
    if backend == "slurm":
        from jobs.cli import arrays as slurm_commands

        text, objects = slurm_commands.script(spec, sweep or [])
    else:
        from jobs.manifest import to_yaml

        objects = options.manifests(spec, backend, "render")
        text = to_yaml(objects)
    if as_json:
        show(objects)
        return
    if out is None:
        print(text, end="", flush=True)
    else:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror}") from None


def lint(
    file: File = None,
    backend: Annotated[str, typer.Option(help="The backend to check the job for.")] = "k8s",
    name: NameFlag = None,
    recipe: Recipe = None,
    image: Image = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    sets: Sets = None,
    profile: Profile = None,
    rules: Annotated[bool, typer.Option("--rules", help="List all rules and end.")] = False,
    as_json: Json = False,
) -> None:
    """Check a job for known mistakes; exit code 1 where submit would refuse it."""
    from jobs.checks import lint as linter

    if rules:
        rows = [{"id": rule.id, "level": rule.level, "title": rule.title} for rule in linter.rules()]
        if as_json:
            show(rows)
        for row in [] if as_json else rows:
            say(f"{row['id']}  {row['level']:7}  {row['title']}")
        return
    values = options.parse(sets, name=name, recipe=recipe, image=image, nodes=nodes, gpus=gpus)
    spec = options.build(file, values, profile)
    found = linter.lint(spec, options.manifests(spec, backend, "lint"))
    if as_json:
        show([{"id": item.id, "level": item.level, "message": item.message} for item in found])
    for item in [] if as_json else found:
        say(str(item))
    raise typer.Exit(EXIT_FAILED if linter.errors(found) else EXIT_DONE)


def submit(
    backend: Backend,
    file: File = None,
    name: NameFlag = None,
    recipe: Recipe = None,
    image: Image = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    namespace: Namespace = None,
    context: Context = None,
    sets: Sets = None,
    profile: Profile = None,
    sweep: Sweep = None,
    replace: Annotated[bool, typer.Option("--replace", help="Delete a finished job of this name first.")] = False,
    new: Annotated[bool, typer.Option("--new", help="Take a numbered name where this one is taken.")] = False,
    run_dir: Annotated[
        str | None, typer.Option("--run-dir", help="Where the run is kept; the same one resumes.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; an earlier run is moved aside.")] = False,
    wait: Annotated[float | None, typer.Option(help="Wait for the end, at most so many seconds.", min=0)] = None,
    as_json: Json = False,
) -> None:
    """Submit a job; the same job again attaches to it, or goes on where it was cut off."""
    if replace and new:
        raise UserError("--replace and --new exclude each other")
    replace = replace or (fresh and not new)
    _no_sweep(backend, sweep)
    # A word that no run was begun with.
    flags = {
        "k8s.namespace": namespace,
        "k8s.context": context,
        "run_dir": run_dir,
        "fresh": uuid.uuid4().hex[:12] if fresh else None,
    }
    values = options.parse(sets, name=name, recipe=recipe, image=image, nodes=nodes, gpus=gpus, **flags)
    spec = options.build(file, values, profile)
    if backend != "local":
        from jobs.checks import lint as linter

        for item in linter.lint(spec, options.manifests(spec, backend, "submit")):
            if item.level == "warning":
                warn(f"{item.id}: {item.message}")
    mode: Mode = "replace" if replace else "new" if new else "attach"
    if sweep:
        from jobs.cli import arrays as slurm_commands

        raise typer.Exit(slurm_commands.submit_sweep(spec, sweep, mode, wait, as_json))
    from jobs import job as driver

    job, done = driver.start(spec, backend, mode)
    if wait is None:
        if as_json:
            show({"name": done.name, "created": done.created, "where": done.where})
        else:
            say(
                f"{done.name}: {'submitted' if done.created else 'is there already, with the same spec'} ({done.where})"
            )
        return
    from jobs.cli.names import report, teller

    report(done.name, job.wait(wait, teller(done.name)), as_json, waited=True)


def diff(
    backend: Backend,
    file: File = None,
    name: NameFlag = None,
    recipe: Recipe = None,
    image: Image = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    namespace: Namespace = None,
    context: Context = None,
    sets: Sets = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Compare a job file with the job that was submitted; exit code 1 where they differ."""
    flags = {"k8s.namespace": namespace, "k8s.context": context}
    values = options.parse(sets, name=name, recipe=recipe, image=image, nodes=nodes, gpus=gpus, **flags)
    spec = options.build(file, values, profile)
    from jobs import job as driver

    changed = driver.compare(spec, backend)
    if as_json:
        show({"name": spec.name, "same": not changed, "differences": changed})
    else:
        for line in changed or ["no difference"]:
            say(line)
    raise typer.Exit(EXIT_FAILED if changed else EXIT_DONE)


def prepare(
    backend: Backend,
    file: File = None,
    image: Image = None,
    namespace: Namespace = None,
    context: Context = None,
    recipe: Recipe = None,
    name: NameFlag = None,
    sets: Sets = None,
    profile: Profile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the manifest instead.")] = False,
    as_json: Json = False,
) -> None:
    """Write the recipe's shards once onto the data volume, before the job runs."""
    flags = {"k8s.namespace": namespace, "k8s.context": context}
    spec = options.build(file, options.parse(sets, image=image, recipe=recipe, name=name, **flags), profile)
    text, objects, start = options.preparation(spec, backend)
    if dry_run:
        if as_json:
            show(objects)
        else:
            print(text, end="")
        return
    done = start()
    if as_json:
        show({"name": done.name, "created": done.created, "where": done.where})
    else:
        say(f"{done.name}: {'submitted' if done.created else 'is there already'} ({done.where})")


def schema() -> None:
    """Print the JSON Schema of job.yaml, for editors."""
    from jobs.spec.model import json_schema

    show(json_schema())
