"""The commands that take a job file: render, lint, submit, diff, prepare, schema."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from lockstep.jobs.cli.names import Backend, Job, Json, Sweep, cluster, flat
from lockstep.jobs.status import note, say, show, table, teller, warn
from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, UserError

if TYPE_CHECKING:
    from lockstep.jobs.backend import Mode
    from lockstep.jobs.status import Check


@flat
def render(
    backend: Backend,
    job: Job,
    sweep: Sweep = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write to this file instead of standard output.")
    ] = None,
    with_code: Annotated[
        bool, typer.Option("--with-code", help="Write the job and the objects with its code into the folder --out.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the manifest that submit would apply. No cluster is needed."""
    if with_code and out is None:
        raise UserError("--with-code needs -o DIR: it writes several files")
    from lockstep.jobs import sweep as sweeps
    from lockstep.jobs.code import store
    from lockstep.jobs.manifest import to_yaml

    found = cluster(backend, "render")
    spec, code = store.pinned(job.spec(backend))
    for line in code.lines() if code is not None else []:
        note(line)
    runs = sweeps.expand(spec, sweeps.parse(sweep)) if sweep else [spec]
    for item in found.lint(spec):
        warn(f"{item.id}: {item.message}")
    text, objects = found.render(spec, runs)
    if with_code and out is not None:
        if spec.code is None or spec.code.hash is None:
            raise UserError(f"--with-code: {spec.name} has no code: add `code: .` to the job")
        packed = code.packed if code is not None else store.packed(spec.code.hash)
        pieces = [piece for run in runs for piece in found.code_manifests(run, packed)]
        named = {f"0-code-{index:03d}.yaml": to_yaml([piece]) for index, piece in enumerate(pieces)}
        write_folder(out, {**named, "1-job.yaml": text})  # in the order in which kubectl applies a folder
        return
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


def write_folder(folder: Path, texts: dict[str, str]) -> None:
    """A new folder with these files. Raises `UserError`."""
    try:
        folder.mkdir(parents=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise UserError(f"{folder} is there already: name a new folder, or remove it") from None
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from None


@flat
def lint(
    job: Job,
    backend: Annotated[
        str | None, typer.Option(help="The backend to check the job for; without: what all have in common.")
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="List all rules and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Check a job for known mistakes. Exit code 1 if submit would refuse it."""
    from lockstep.jobs import registry
    from lockstep.jobs.backend import Cluster
    from lockstep.jobs.code import store
    from lockstep.jobs.lint import COMMON, errors

    if rules:
        backends = [registry.backend(name) for name in registry.packages()]
        known = {rule.id: rule for found in backends if issubclass(found, Cluster) for rule in found.rules().all()}
        rows = [{"id": id, "level": known[id].level, "title": known[id].title} for id in sorted(known)]
        if as_json:
            show(rows)
        for row in [] if as_json else rows:
            say(f"{row['id']}  {row['level']:7}  {row['title']}")
        return
    spec = job.spec(backend)
    if backend is not None:
        found = cluster(backend, "lint").lint(spec)
    else:
        spec.check_training(spec.name)
        found = COMMON.apply(store.pinned(spec)[0], [])
    if as_json:
        show([{"id": item.id, "level": item.level, "message": item.message} for item in found])
    for item in [] if as_json else found:
        say(str(item))
    raise typer.Exit(EXIT_FAILED if errors(found) else EXIT_DONE)


@flat
def submit(
    backend: Backend,
    job: Job,
    sweep: Sweep = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Delete a finished job of this name, and submit again.")
    ] = False,
    new: Annotated[bool, typer.Option("--new", help="Use a numbered name (NAME-v2) if the name is taken.")] = False,
    run_dir: Annotated[
        str | None, typer.Option("--run-dir", help="Run directory; a run that is there is resumed.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; an earlier run in the directory is renamed, not deleted.")
    ] = False,
    wait: Annotated[
        float | None, typer.Option(help="Wait until the job has ended, at most this many seconds.", min=0)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Send nothing: say whether it would start, when, and why not.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Submit a job. The same job again attaches to it, or resumes it where it was interrupted."""
    if replace and new:
        raise UserError("give --replace or --new, not both")
    replace = replace or (fresh and not new)
    # A word that no run was begun with.
    spec = job.spec(backend, run_dir=run_dir, fresh=uuid.uuid4().hex[:12] if fresh else None)
    mode: Mode = "replace" if replace else "new" if new else "attach"
    if dry_run and (sweep or wait is not None):
        raise UserError("--dry-run is of one job, and waits for none: leave out --sweep and --wait")
    if sweep:
        from lockstep.jobs import sweep as sweeps

        raise typer.Exit(sweeps.submit_and_tell(spec, backend, sweep, mode, wait, as_json))
    from lockstep.jobs.registry import backend as backend_of

    found = backend_of(backend).at(spec)
    if dry_run:
        _outlook(spec.name, found.dry_run(spec, mode), as_json)
    done = found.submit(spec, mode)
    if wait is None:
        if as_json:
            show(done.plain())
        else:
            say(done.text())
        return
    from lockstep.jobs.cli.names import report

    report(done.name, found.wait(done.name, wait, teller(done.name)), as_json, waited=True)


def _outlook(name: str, checks: list[Check], as_json: bool) -> NoReturn:
    """Prints what a submission would meet, and ends: with 2 where it would be refused, or could not start."""
    results = {check.name: check.result for check in checks}
    refused = "missing" in results.values()
    attach = results["job"] == "note"
    would = "not start" if refused else "attach" if attach else "wait" if results.get("start") == "warning" else "start"
    if as_json:
        show({"name": name, "would": would, "checks": [check.plain() for check in checks]})
    else:
        table(("CHECK", "RESULT", "DETAIL"), [(check.name, check.result, check.detail) for check in checks])
        say(f"{name} would {would}")
    raise typer.Exit(EXIT_USAGE if refused else EXIT_DONE)


@flat
def diff(
    backend: Backend,
    job: Job,
    as_json: Json = False,
) -> None:
    """Compare a job file with the job that was submitted. Exit code 1 if they differ."""
    spec = job.spec(backend)
    from lockstep.jobs.registry import backend as backend_of

    changed = backend_of(backend).at(spec).drift(spec)
    if as_json:
        show({"name": spec.name, "same": not changed, "differences": changed})
    else:
        for line in changed or ["no difference"]:
            say(line)
    raise typer.Exit(EXIT_FAILED if changed else EXIT_DONE)


@flat
def prepare(
    backend: Backend,
    job: Job,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the manifest instead.")] = False,
    as_json: Json = False,
) -> None:
    """Write the shards of the recipe's data to the data volume, once, before the job runs."""
    found = cluster(backend, "prepare")
    spec = job.spec(backend)
    text, objects = found.preparation(spec)
    if dry_run:
        if as_json:
            show(objects)
        else:
            print(text, end="")
        return
    done = found.at(spec).prepare(spec)
    if as_json:
        show({"name": done.name, "created": done.created, "where": done.where})
    else:
        say(f"{done.name}: {'submitted' if done.created else 'is there already'} ({done.where})")


def schema() -> None:
    """Print the JSON Schema of job.yaml, for editors."""
    from lockstep.jobs.spec.model import json_schema

    show(json_schema())
