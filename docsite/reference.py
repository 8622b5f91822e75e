"""Makes the pages of the reference from the code: commands, settings, recipes, rules, metrics, environment, API."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import typing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from docsite import ROOT
from lockstep.jobs.backend import BACKENDS, Cluster, backend_of
from lockstep.jobs.cli.main import app_of
from lockstep.jobs.spec.model import JobSpec
from lockstep.tools.settings import described, json_schema, models_in
from lockstep.training.config import FREE, Config, OwnSettings, recipes
from lockstep.training.config import settings as typed
from lockstep.training.observe.metrics import BUCKETS, PREFIX, TABLE

API = (
    "jobs.job.submit", "jobs.job.Job", "jobs.spec.model.JobSpec", "jobs.status.Status", "jobs.backend.Backend",
    "jobs.sweep.parse", "jobs.sweep.expand", "jobs.sweep.submit", "jobs.spec.model.load_profile",
    "wire.submitit_api.resumable", "jobs.status.say", "jobs.status.columns",
    "training.parallel.world.script", "training.parallel.world.joined", "training.parallel.world.detect",
    "training.parallel.world.World",
    "training.sync.build", "training.sync.base.GradientSync",
    "training.data.order.key", "training.data.order.permute", "training.data.order.bounds",
    "training.data.sources.load", "training.data.sources.raw.Raw", "training.models.bag_of_tricks.BagOfTricks",
    "training.models.resnet9.ResNet9", "training.contract.UserError", "training.contract.user_errors",
)  # fmt: skip
"""Names of `lockstep` on the API page. `Session` has its own page."""
FOOTER = "\n<!-- Made from the code by docsite/reference.py. -->\n"


def schemas() -> dict[str, str]:
    """Returns each JSON Schema for editors, by its path on the site."""
    made = {"recipe": json_schema(Config), "job": json_schema(JobSpec)}
    return {f"reference/{name}.schema.json": json.dumps(schema, indent=1) + "\n" for name, schema in made.items()}


def pages() -> dict[str, str]:
    """Returns each page's text, by its path on the site."""
    recipe = "Set them in a recipe, with `--set NAME=VALUE`, or below `overrides:` of a job. Editors read [the schema](recipe.schema.json)."
    job = "Set them in `job.yaml` or with `--set NAME=VALUE`. Editors read [the schema](job.schema.json)."
    made = {
        "commands": commands(),
        "recipe-settings": settings(Config, "Settings of a recipe", recipe),
        "session-settings": session_settings(),
        "job-settings": settings(JobSpec, "Settings of a job", job, free=False),
        "recipes": recipe_page(),
        "lint-rules": lint_rules(),
        "metrics": metrics(),
        "environment": environment(),
        "session": "# Session\n\nIn the examples `F` is `torch.nn.functional`; `Net`, `dataset`, `loader` and `pretrained` are yours.\n\n"
        + documented("lockstep.training.session.Session", "      inherited_members: true\n"),
        "api": "# Python API\n\nOther names are internal. [`Session`](session.md) has its own page.\n\n"
        + "\n".join(documented(f"lockstep.{name}") for name in API),
    }
    return {f"reference/{name}.md": text + FOOTER for name, text in made.items()}


def command_names() -> list[str]:
    """Returns the name of every command of `lockstep`, sorted."""
    found = typer.main.get_group(app_of()).commands
    return sorted(name for name, command in found.items() if not command.hidden)


def commands() -> str:
    """Returns the page of all commands, with the help that each one prints."""
    env = {**os.environ, "COLUMNS": "88", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}

    def help_of(name: str) -> str:
        words = [sys.executable, "-m", "lockstep", *filter(None, [name]), "--help"]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=120)
        text = "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
        return f"## lockstep {name}".rstrip() + f"\n\n```text\n{text}\n```\n"

    lead = "# Commands\n\nThe help of each command. [Exit codes](exit-codes.md) are the same everywhere.\n\n"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return lead + "\n".join(pool.map(help_of, ["", *command_names()]))


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, Any, str, bool]]:
    """Yields (dotted name, type, default, meaning, whether a resume may change it) of each setting of a model."""
    for name, field in described(model).model_fields.items():
        meaning = " ".join((field.description or "").split())
        if typed.is_section(field.annotation):
            yield from rows(typing.cast(type[BaseModel], field.annotation), f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        yield prefix + name, typed.type_name(field.annotation), default, meaning, FREE in field.metadata
        for inner in dict.fromkeys(models_in(field.annotation)):
            mark = "[]" if "list" in str(field.annotation).lower() else ""
            yield from rows(inner, f"{prefix}{name}{mark}.")


def shown(default: Any) -> str:
    """Returns a default as a cell of the table, in backquotes."""
    text = typed.written(default, str)
    return "`required`" if default is PydanticUndefined else f"`{cell(text)}`" if text else ""


def settings(model: type[BaseModel], title: str, lead: str, free: bool = True) -> str:
    """Returns a page with one table for each group of settings."""
    groups: dict[str, list[tuple[str, str, Any, str, bool]]] = {}
    for row in rows(model):
        groups.setdefault(row[0].rpartition(".")[0], []).append(row)
    parts = [f"# {title}\n", lead + "\n"]
    if free:
        parts.append("*Free* settings may change when a run resumes; a change of any other is refused.\n")
    head = (
        f"| setting | type | default |{' free |' if free else ''} meaning |\n|---|---|---|{'---|' if free else ''}---|"
    )
    for group, found in groups.items():
        parts += [f"## {f'`{group}`' if group else 'General'}\n", head]
        for name, kind, default, meaning, may in found:
            mark = f" {'yes' if may else ''} |" if free else ""
            parts.append(f"| `{name}` | {cell(kind)} | {shown(default)} |{mark} {cell(meaning)} |")
        parts.append("")
    return "\n".join(parts)


def session_settings() -> str:
    """Returns the page that the checkout has, too: `make generate` writes it."""
    lead = 'Give them to `Session` by name (`seed=3`) or as overrides (`"checkpoint.every_steps=100"`).'
    return settings(OwnSettings, "Settings of a Session", lead)


def recipe_page() -> str:
    texts = {name: (ROOT / f"training/recipes/{name}.yaml").read_text(encoding="utf-8") for name in recipes()}
    parts = [f"\n## {name}\n\n```yaml\n{text}```\n" for name, text in texts.items()]
    return "".join(["# Recipes\n\n`lockstep run NAME` trains one.\n", *parts])


def rules() -> list[Any]:
    """Returns the lint rules of all backends, by id."""
    found = [backend_of(name) for name in BACKENDS]
    known = {rule.id: rule for one in found if issubclass(one, Cluster) for rule in one.rules.all()}
    return [known[id] for id in sorted(known)]


def lint_rules() -> str:
    parts = [
        "# Lint rules\n\n`lockstep lint` reads the final manifest, after a job's `patch`. `submit` refuses errors and "
        "prints warnings. LJ: every backend. LC: Compose. LS: Kubernetes and SLURM.\n\n"
        "| rule | level | what it reports |\n|---|---|---|"
    ]
    parts += [f"| `{rule.id}` | {rule.level} | {cell(rule.title)} |" for rule in rules()]
    return "\n".join(parts) + "\n"


def metrics() -> str:
    """Returns the page of the metrics that every rank serves, with their labels and values."""
    parts = [
        "# Metrics\n\n[Every rank serves](../metrics.md) them, with the labels `run` (the run directory's name) "
        f"and `rank`. Histograms have the buckets {', '.join(f'{bound:g}' for bound in BUCKETS)} s. "
        "Loss and gradient norm are read every `log.every` steps.\n\n"
        f"| `{PREFIX}…` | kind | labels | meaning |\n|---|---|---|---|"
    ]
    for name, row in TABLE.items():
        labels = ", ".join(f"{label}={'|'.join(values)}" if values else label for label, values in row.labels.items())
        parts.append(f"| `{name}` | {row.kind} | {shown(labels)} | {cell(row.help)} |")
    return "\n".join(parts) + "\n"


def constants(file: str, prefix: str) -> Iterator[tuple[Any, str]]:
    """Yields (value, docstring) of a module's constants whose names begin with `prefix`."""
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    for node, after in zip(body, [*body[1:], None]):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith(prefix):
            about = after.value if isinstance(after, ast.Expr) else None
            text = about.value if isinstance(about, ast.Constant) else ""
            yield ast.literal_eval(node.value), " ".join(str(text).split())


OTHERS = {
    "LOCKSTEP_HOME": "Folder of submitted jobs; default `~/.local/state/lockstep`. With SLURM the nodes must see it.",
    "LOCKSTEP_PROFILES": "Folder of cluster profiles, searched first.",
    "LOCKSTEP_SLURM_HOST": "Login node of a SLURM cluster, HOST or HOST:/PYTHON, if no flag, job file or profile names one.",
    "LOCKSTEP_SLURM_HERE": "Folder that relative paths of a SLURM job begin at, if not the current one. A command over ssh has it.",
    "LOCKSTEP_THREADS": "CPU threads of a rank; default: an equal share of the node's cores.",
    "LOCKSTEP_METRICS_PORT": "First port of the metrics servers; the local rank is added.",
}
"""Variables that a user sets, where the code has no sentence for users."""


def environment() -> str:
    known = dict(constants("training/contract.py", "ENV_")) | OTHERS
    lead = "# Environment variables\n\n[Those of launchers](../answers.md#what-does-each-launch-variable-mean).\n\n"
    table = "\n".join(f"| `{name}` | {cell(text)} |" for name, text in sorted(known.items()))
    return f"{lead}| variable | meaning |\n|---|---|\n{table}\n"


def documented(name: str, more: str = "") -> str:
    """Returns the directive for which mkdocstrings writes the description of a name."""
    return f"::: {name}\n    options:\n      filters: ['!^_']\n{more}"


if __name__ == "__main__":
    print(session_settings() + FOOTER, end="")
