"""The commands that take a job's name: status, logs, wait, cancel, list, doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli import options
from jobs.cli.options import Backend, Context, File, Json, Name, Namespace, Profile
from jobs.cli.waiting import line, teller, unfinished
from jobs.terminal import say, show, table
from training.contract import EXIT_DONE, EXIT_FAILED, EXIT_TIMED_OUT

if TYPE_CHECKING:
    from jobs.backend import Backend as JobBackend
    from jobs.status import Part, Status


def _open(backend: str, namespace: str | None, context: str | None) -> JobBackend:
    from jobs import connect  # and pydantic with it: `--help` does without

    return connect.connect(backend, namespace=namespace, context=context)


def status(
    backend: Backend, name: Name, namespace: Namespace = None, context: Context = None, as_json: Json = False
) -> None:
    """Say where a job stands, and why."""
    report(name, _open(backend, namespace, context).status(name), as_json)


def report(name: str, found: Status, as_json: bool, waited: bool = False) -> None:
    """Prints a status and ends with its exit code; 124 where a wait ended before the job."""
    if as_json:
        show({"name": name, **found.plain()})
    else:
        say(line(name, found))
        rows: list[tuple[str, ...]] = [
            (part.name, _span(part), part.state, str(part.restarts), part.reason) for part in found.ranks
        ]
        if len(rows) > 1 and rows:
            table(("NODE", "RANKS", "STATE", "RESTARTS", "REASON"), rows)
    raise typer.Exit(EXIT_TIMED_OUT if waited and unfinished(found) else found.code)


def _span(part: Part) -> str:
    if not part.ranks:
        return "?"
    return str(part.ranks[0]) if len(part.ranks) == 1 else f"{part.ranks[0]}–{part.ranks[-1]}"


def logs(
    backend: Backend,
    name: Name,
    rank: Annotated[int | None, typer.Option(help="Only this global rank.", min=0)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for the job, and go on to its end.")] = False,
    tail: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Only the last N lines: of that rank with --rank, else of all ranks together by their times "
            "(with slurm, whose lines have none, an equal share of each rank's). With -f also all that come later.",
        ),
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    as_json: Json = False,
) -> None:
    """Print what the ranks wrote; with --json one object a line."""
    import json

    for text in _open(backend, namespace, context).logs(name, rank, follow, tail):
        if as_json:
            print(json.dumps({"line": text}), flush=True)
        else:
            say(text)


def execute(
    backend: Backend,
    name: Name,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND [ARG]...", help="Behind --, as it is.")],
    rank: Annotated[int, typer.Option(help="The global rank to run it beside.", min=0)] = 0,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Run a command beside a rank of a job that runs: in its folder, with its RANK, LOCAL_RANK and the like.

    It gets a terminal where standard input and output are one, and else both ends kept apart. Its exit code is the exit
    code; 2 where the job or the rank does not run, 69 where the connection is lost.
    """
    raise typer.Exit(_open(backend, namespace, context).execute(name, command, rank))


def wait(
    backend: Backend,
    name: Name,
    timeout: Annotated[float, typer.Option(help="Seconds to wait at most.", min=0)] = 86400,
    sweep: Annotated[bool, typer.Option("--sweep", help="NAME is a sweep: wait for all of its runs.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    as_json: Json = False,
) -> None:
    """Wait for the end; the exit code tells how it ended. What changes on the way is said on stderr."""
    if sweep:
        from jobs.cli import sweeps

        raise typer.Exit(sweeps.wait(_open(backend, namespace, context), name, timeout, as_json))
    report(
        name,
        _open(backend, namespace, context).wait(name, timeout, teller(name)),
        as_json,
        waited=True,
    )


def cancel(
    backend: Backend, name: Name, namespace: Namespace = None, context: Context = None, as_json: Json = False
) -> None:
    """End a job, with time to save its state."""
    found = _open(backend, namespace, context).cancel(name)
    if as_json:
        show({"name": name, **found.plain()})
    else:
        say(line(name, found))


def list_jobs(backend: Backend, namespace: Namespace = None, context: Context = None, as_json: Json = False) -> None:
    """List the jobs."""
    rows = _open(backend, namespace, context).list()
    if as_json:
        show([row.plain() for row in rows])
    else:
        table(("NAME", "STATE", "NODES", "CREATED"), [(r.name, r.state, str(r.nodes), r.created) for r in rows])


def doctor(
    backend: Backend,
    file: File = None,
    namespace: Namespace = None,
    context: Context = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Check the cluster for a job before GPUs are spent; exit code 1 where something is missing."""
    from jobs import connect

    found_in = connect.cluster(backend, "doctor")
    spec = None
    if file is not None or profile is not None:
        spec = options.build(file, {} if file is not None else {"recipe": "smoke"}, profile)
    found = found_in.doctor(spec, **connect.where(found_in, spec, namespace=namespace, context=context))
    if as_json:
        show([item.plain() for item in found])
    else:
        table(("CHECK", "RESULT", "DETAIL"), [(item.name, item.result, item.detail) for item in found])
    raise typer.Exit(EXIT_FAILED if any(item.result == "missing" for item in found) else EXIT_DONE)
