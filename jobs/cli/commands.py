"""The commands: those that take a job file or describe a job, those that take its name, and the options that several share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer

from lockstep.training.contract import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_TIMED_OUT,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    UserError,
)

from ..status import answer, columns, note, progress_printer, say, show, warn

if TYPE_CHECKING:
    from ..backend import Backend as JobBackend
    from ..backend import Cluster, Mode
    from ..spec.model import JobSpec
    from ..status import Check, Status

Backend = Annotated[str, typer.Argument(metavar="BACKEND", help="local, k8s, slurm or compose.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The job's name.")]
NameOrFile = Annotated[str, typer.Argument(metavar="NAME|FILE", help="The job's name, or its job file.")]
File = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="A job file. Without one, the options describe the job.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value with stable fields.")]
Namespace = Annotated[str | None, typer.Option(help="Kubernetes namespace.")]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig.")]
Host = Annotated[str | None, typer.Option(help="Login node of a SLURM cluster, over ssh: slurm.host.")]
Image = Annotated[str | None, typer.Option(help="Container image.")]
Profile = Annotated[str | None, typer.Option(help="Cluster profile: a name, or a YAML file (docs/slurm.md).")]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="NAME=A,B,…",
        help="One run for each value: a job array on SLURM, separate jobs elsewhere. Repeat the option for a grid.",
    ),
]


@dataclasses.dataclass
class ClusterOptions:
    """Options that name the place of a cluster."""

    namespace: Namespace = None
    context: Context = None
    host: Host = None

    def job(self, backend: str, name: str) -> tuple[JobBackend, str]:
        """Returns the backend and the job's name. A file gives its job's name, with a warning if another job has that name."""
        if not name.endswith((".yaml", ".yml")):
            return self.open(backend, name), name
        from ..backend import backend_of
        from ..status import Unreachable

        spec = Job(Path(name), **vars(self)).spec(backend)
        opened = backend_of(backend).at(spec)
        with contextlib.suppress(Unreachable):  # the command itself reports the outage
            if changed := [line for line in opened.drift(spec) if not line.startswith("fresh: ")]:
                warn(f"the job {spec.name} is another one than that of {name}: {'; '.join(changed[:8])}")
        return opened, spec.name

    def open(self, backend: str, name: str | None = None) -> JobBackend:
        """Returns the backend, ready for queries about the job of that name, or about all. Raises `UserError`."""
        from .. import records
        from ..backend import backend_of  # imports pydantic, which `--help` does not need

        kind = backend_of(backend)
        check_flags(kind, vars(self))
        place: dict[str, str | None] = vars(self)
        submitted = records.place_of(kind.name, name) if name is not None and not any(place.values()) else {}
        _at_its_host(kind, self.host or submitted.get("host"))
        if submitted:
            flags = " ".join(f"--{flag} {value}" for flag, value in submitted.items())
            note(f"{name} was submitted from here with {flags}")
        return kind.at(None, **(submitted or place))


@dataclasses.dataclass
class Job:
    """Options that describe a job, with a job file or without one."""

    file: File = None
    name: Annotated[str | None, typer.Option("--name", help="Name of the job.")] = None
    recipe: Annotated[str | None, typer.Option(help="A recipe of training.")] = None
    image: Image = None
    nodes: Annotated[int | None, typer.Option(help="Nodes.")] = None
    gpus: Annotated[int | None, typer.Option(help="GPUs per node.")] = None
    namespace: Namespace = None
    context: Context = None
    host: Host = None
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any setting of the job: memory=32Gi, k8s.queue=gpu, overrides.epochs=4.",
        ),
    ] = None
    profile: Profile = None

    def spec(
        self, backend: str | None, submitted: Callable[[JobSpec, str], None] | None = None, **more: Any
    ) -> JobSpec:
        """Returns the spec of the file with the options in it, or of the options alone. A profile lies below both.

        Args:
            backend: backend whose flags `--namespace`, `--context` and `--host` may be given.
            submitted: as in `_at_its_host`.
            more: further settings; None values do not count.

        Raises:
            UserError: a flag belongs to another backend, or the settings are no valid job.
        """
        from lockstep.training.config import settings

        from ..backend import backend_of
        from ..spec.model import JobSpec, load_profile, place

        flags = {"namespace": self.namespace, "context": self.context, "host": self.host}
        kind = backend_of(backend) if backend is not None else None
        if kind is not None:
            check_flags(kind, flags)
            more |= {kind.places[flag]: value for flag, value in flags.items() if flag in kind.places}
        elif given := [flag for flag, value in flags.items() if value is not None]:
            raise UserError(f"--{given[0]} is for one backend: say which, with --backend")
        named = {name: getattr(self, name) for name in ("name", "recipe", "image", "nodes", "gpus")}
        values = {name: value for name, value in {**named, **more}.items() if value is not None}
        values |= dict(settings.assignments(JobSpec, self.sets or []))
        below = load_profile(self.profile) if self.profile is not None else {}
        if self.file is not None:
            spec = JobSpec.load(self.file, values, below)
        else:
            for name, value in values.items():
                place(below, name, value)
            if "recipe" in below and "name" not in below and isinstance(below["recipe"], str):
                below["name"] = Path(below["recipe"]).stem.replace("_", "-").lower()
            spec = JobSpec.of(below, "the flags")
        if kind is not None and "host" in kind.places:
            _at_its_host(kind, spec.slurm.host, spec, self.file, submitted)
        return spec


def _at_its_host(
    kind: type[JobBackend], host: str | None, spec: JobSpec | None = None, file: Path | None = None,
    submitted: Callable[[JobSpec, str], None] | None = None,
) -> None:  # fmt: skip
    """Ends this command with the exit code of the login node's command, if `slurm.host` names a login node.

    Args:
        submitted: called with the spec and that host if the command has submitted it: after exit codes 1, 75 and 124, too.
    """
    if (there := kind.login(host)) is not None:
        from ..slurm import ssh

        code = ssh.run(there, sys.argv[1:], spec, str(file) if file is not None else None)
        if submitted is not None and spec is not None and code not in (EXIT_USAGE, EXIT_UNREACHABLE):
            submitted(spec, there)
        raise typer.Exit(code)


def _runs(spec: JobSpec, sweep: list[str] | None) -> list[JobSpec]:
    """Returns the runs of a sweep; for a single job, that job."""
    if not sweep:
        return [spec]
    from .. import sweep as sweeps

    return sweeps.expand(spec, sweeps.parse(sweep))


def check_flags(kind: type[JobBackend], flags: Mapping[str, str | None]) -> None:
    """Raises `UserError` for a flag that names the place of another backend's cluster."""
    if foreign := next((name for name, value in flags.items() if value is not None and name not in kind.places), None):
        raise UserError(f"--{foreign} is not for {kind.name}")


def cluster(name: str, command: str) -> type[Cluster]:
    """Returns a backend that renders. Raises `UserError` for a backend that `command` does not support."""
    from ..backend import Cluster, backend_of

    kind = backend_of(name)
    if not issubclass(kind, Cluster):
        raise UserError(f"{command} is for k8s, slurm and compose, got {name}: a job on this machine needs none")
    return kind


def flatten_options(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command for typer, with the fields of a `Job` or `ClusterOptions` as options in place of these parameters."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Callable[..., Any]] = {
        name: kind for name, kind in hints.items() if kind in (Job, ClusterOptions)
    }
    fields = {name: get_type_hints(kind, include_extras=True) for name, kind in groups.items()}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field: given.pop(field) for field in fields[name]})
        command(**given)

    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        one = parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name])
        each = [one.replace(name=field, annotation=kind, default=None) for field, kind in fields.get(name, {}).items()]
        parameters += each or [one]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads the options from it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__
    return run


def render(backend: Backend, job: Job, sweep: Sweep = None) -> None:
    """Print the manifest that submit would apply. No cluster is needed."""
    from .. import snapshots

    kind = cluster(backend, "render")
    spec, code = snapshots.resolve(job.spec(backend))
    if code is not None:
        note(f"code {code.identity}: {len(code.files)} files, {len(code.packed)} bytes packed")
    runs = _runs(spec, sweep)
    for item in kind.lint(spec):
        warn(f"{item.id}: {item.message}")
    print(kind.render(spec, runs), end="", flush=True)


def lint(
    job: Job,
    backend: Annotated[
        str | None, typer.Option(help="The backend to check the job for; without: what all have in common.")
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="List all rules and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Check a job for known mistakes. Exit code 1 if submit would refuse it."""
    from .. import snapshots
    from ..backend import BACKENDS, Cluster, backend_of
    from ..lint import COMMON, errors

    if rules:
        backends = [backend_of(name) for name in BACKENDS]
        known = {rule.id: rule for kind in backends if issubclass(kind, Cluster) for rule in kind.rules.all()}
        rows = [{"id": id, "level": known[id].level, "title": known[id].title} for id in sorted(known)]
        return answer(as_json, rows, (f"{row['id']}  {row['level']:7}  {row['title']}" for row in rows))
    spec = job.spec(backend)
    if backend is not None:
        findings = cluster(backend, "lint").lint(spec)
    else:
        spec.check_training(spec.name)
        findings = COMMON.apply(snapshots.resolve(spec)[0], [])
    answer(as_json, findings, map(str, findings))
    raise typer.Exit(EXIT_FAILED if errors(findings) else EXIT_DONE)


def submit(
    backend: Backend,
    job: Job,
    sweep: Sweep = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Delete a finished job of this name, and submit again.")
    ] = False,
    run_dir: Annotated[
        str | None, typer.Option("--run-dir", help="Run directory; a run that is there is resumed.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over, with --replace; an earlier run is renamed, not deleted.")
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
    from .. import records

    def remember(sent: JobSpec, host: str) -> None:
        for run in _runs(sent, sweep) if not dry_run else ():
            records.remember("slurm", run.name, {"host": host})

    # A word with which no run has begun.
    spec = job.spec(backend, remember, run_dir=run_dir, fresh=uuid.uuid4().hex[:12] if fresh else None)
    mode: Mode = "replace" if replace or fresh else "attach"
    if dry_run and (sweep or wait is not None):
        raise UserError("--dry-run is of one job, and waits for none: leave out --sweep and --wait")
    from ..backend import backend_of

    opened = backend_of(backend).at(spec)
    if sweep:
        from .. import sweep as sweeps

        raise typer.Exit(sweeps.submit_and_tell(opened, spec, sweep, mode, wait, as_json))
    if dry_run:
        _print_preflight(spec.name, opened.dry_run(spec, mode), as_json)
    done = opened.submit(spec, mode)
    if wait is None:
        return answer(as_json, done, [done.text()])
    report(done.name, opened.wait(done.name, wait, progress_printer(done.name)), as_json, waited=True)


def _print_preflight(name: str, checks: list[Check], as_json: bool) -> NoReturn:
    """Prints the checks of a submission, and ends: with 2 if the job would be refused, or could not start."""
    results = {check.name: check.result for check in checks}
    refused = any(check.result == "missing" for check in checks)  # several checks may have the same name
    attach = results["job"] == "note"
    would = "not start" if refused else "attach" if attach else "wait" if results.get("start") == "warning" else "start"
    plain = {"name": name, "would": would, "checks": checks}
    answer(as_json, plain, [*_rows(checks), f"{name} would {would}"])
    raise typer.Exit(EXIT_USAGE if refused else EXIT_DONE)


def prepare(
    backend: Backend,
    job: Job,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the manifest instead.")] = False,
    as_json: Json = False,
) -> None:
    """Write the shards of the recipe's data to the data volume, once, before the job runs."""
    from ..lint import refuse

    kind = cluster(backend, "prepare")
    spec = job.spec(backend)
    if dry_run:
        own = kind.preparation(spec)
        refuse({own.name: kind.lint(own)}, backend)
        show(kind.manifests(own)) if as_json else print(kind.render(own, [own]), end="")
        return
    done = kind.at(spec).prepare(spec)
    line = f"{done.name}: {'submitted' if done.created else 'is there already'} ({done.where})"
    answer(as_json, {"name": done.name, "created": done.created, "where": done.where}, [line])


def status(backend: Backend, name: NameOrFile, place: ClusterOptions, as_json: Json = False) -> None:
    """Show the state of a job, and the reason for it."""
    opened, name = place.job(backend, name)
    report(name, opened.status(name), as_json)


def report(name: str, status: Status, as_json: bool, waited: bool = False) -> None:
    """Prints a status and ends with its exit code; 124 if a wait ended before the job."""
    answer(as_json, {"name": name, **status.plain()}, status.lines(name))
    raise typer.Exit(EXIT_TIMED_OUT if waited and status.unfinished else status.code)


def logs(
    backend: Backend,
    name: NameOrFile,
    place: ClusterOptions,
    rank: Annotated[int | None, typer.Option(help="Only the lines of this global rank.", min=0)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the job has ended.")] = False,
    tail: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Only the last N lines of each log: of each pod or container, on SLURM of each rank, on this machine of the job. "
            "With -f also all later lines.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the output of the ranks; with --json one object per line."""
    import json

    printed_nothing = True
    opened, name = place.job(backend, name)
    for text in opened.logs(name, rank, follow, tail):
        printed_nothing = False
        if as_json:
            print(json.dumps({"line": text}), flush=True)
        else:
            say(text)
    if printed_nothing and tail != 0 and not follow:
        status = opened.status(name)
        if status.state in ("pending", "queued", "unschedulable"):
            raise UserError(f"{name} has no log yet: {status.state} ({status.reason}); logs -f waits for it")
    if rank and printed_nothing and tail != 0:
        note(f"rank {rank} has printed nothing: ranks above 0 print only warnings")


def execute(
    backend: Backend,
    name: Name,
    place: ClusterOptions,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND [ARG]...", help="The command, after --. It is not changed.")
    ],
    rank: Annotated[int, typer.Option(help="Run it on the node of this global rank.", min=0)] = 0,
) -> None:
    """Run a command next to a rank of a running job: in its folder, with its variables (RANK, LOCAL_RANK and others).

    The command gets a terminal if standard input and standard output are terminals. The exit code is the command's own;
    2 if the job or the rank is not running, 69 if the connection is lost.
    """
    raise typer.Exit(place.open(backend, name).execute(name, command, rank))


def wait(
    backend: Backend,
    name: NameOrFile,
    place: ClusterOptions,
    timeout: Annotated[float, typer.Option(help="Longest time to wait, in seconds.", min=0)] = 86400,
    as_json: Json = False,
) -> None:
    """Wait until a job has ended. The exit code says how it ended. Changes of its state are printed to stderr."""
    opened, name = place.job(backend, name)
    report(name, opened.wait(name, timeout, progress_printer(name)), as_json, waited=True)


def cancel(backend: Backend, name: NameOrFile, place: ClusterOptions, as_json: Json = False) -> None:
    """End a job. It gets the grace period to save its state."""
    opened, name = place.job(backend, name)
    status = opened.cancel(name)
    answer(as_json, {"name": name, **status.plain()}, [status.line(name)])


def list_jobs(backend: Backend, place: ClusterOptions, as_json: Json = False) -> None:
    """List the jobs."""
    rows = place.open(backend).list()
    cells = [(row.name, row.state, str(row.nodes), row.created) for row in rows]
    answer(as_json, rows, columns(("NAME", "STATE", "NODES", "CREATED"), cells))


def doctor(
    backend: Annotated[
        str,
        typer.Argument(
            metavar="BACKEND",
            help="k8s, slurm or compose; gpu: this machine's GPUs; or s3://BUCKET/PREFIX: what a run may do there.",
        ),
    ],
    place: ClusterOptions,
    file: File = None,
    image: Image = None,
    profile: Profile = None,
    as_json: Json = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ROW", help="gpu: only the rows whose names begin with this; repeat for more."),
    ] = None,
) -> None:
    """Check whether a cluster can run a job, what this machine's GPUs can do, or what a bucket allows. Exit code 1 if something is
    missing."""
    if backend == "gpu" or "://" in backend:
        places = {**{f"--{flag}": value for flag, value in vars(place).items()}, "--profile": profile}
        for name, unwanted in {"FILE": file, "--image": image, **places}.items():
            if unwanted is not None:
                raise UserError(f"doctor {backend} looks at no cluster, and {name} belongs to one: leave it out")
    if backend == "gpu":
        from lockstep.tools import doctor as gpus  # torch

        raise typer.Exit(gpus.main(only or (), as_json))
    if only:
        raise UserError(f"--only belongs to doctor gpu, not to {backend}")
    if "://" in backend:
        from .. import buckets

        _answer(buckets.check(backend), as_json)
    from .. import snapshots
    from ..status import Check

    kind = cluster(backend, "doctor")
    check_flags(kind, vars(place))
    spec = None
    if (file, image, profile) != (None, None, None):
        job = Job(file, recipe=None if file is not None else "smoke", image=image, profile=profile, host=place.host)
        spec, _ = snapshots.resolve(job.spec(backend))
    else:
        _at_its_host(kind, place.host)
    checks = kind.doctor(spec, **vars(place))
    for url in spec.buckets if spec is not None else ():
        checks.append(Check("bucket", "note", f"lockstep doctor {url} tries it, with the credentials of this shell"))
    _answer(checks, as_json)


def _rows(checks: list[Check]) -> list[str]:
    return columns(("CHECK", "RESULT", "DETAIL"), [(item.name, item.result, item.detail) for item in checks])


def _answer(checks: list[Check], as_json: bool) -> NoReturn:
    """Prints the rows of `doctor`, and ends with their exit code."""
    answer(as_json, checks, _rows(checks))
    raise typer.Exit(EXIT_FAILED if any(item.result == "missing" for item in checks) else EXIT_DONE)
