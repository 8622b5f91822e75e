"""The pages of the reference that are made from the code: commands, settings, recipes, lint rules, metrics, environment, API."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
import typing
from collections.abc import Iterator
from typing import Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from docsite import ROOT
from lockstep.jobs.backend import Cluster
from lockstep.jobs.cli.main import app
from lockstep.jobs.job import BACKENDS, backend_of
from lockstep.jobs.spec.model import JobSpec
from lockstep.tools import COMMANDS as TOOLS
from lockstep.training.cli import COMMANDS, INSIDE
from lockstep.training.config import Config, OwnSettings, recipes
from lockstep.training.config.sections import FREE
from lockstep.training.config.settings import json_schema
from lockstep.training.contract import ENV_PROGRAM
from lockstep.training.observe.metrics import BUCKETS, PREFIX, TABLE

API = {
    "lockstep": {
        "lockstep.jobs.job.submit": "Submits a job. `from lockstep import submit`.",
        "lockstep.jobs.job.Job": "A submitted job. `from lockstep import Job`.",
        "lockstep.jobs.spec.model.JobSpec": "The job file as an object. `from lockstep import JobSpec`.",
    },
    "Dispatching": {
        "lockstep.jobs.status.Status": "Where a job stands.",
        "lockstep.jobs.backend.Backend": "The base class of backends.",
        "lockstep.jobs.sweep.parse": "The texts of `--sweep`. `from lockstep.jobs import sweep`, for all three.",
        "lockstep.jobs.sweep.expand": "The jobs of a sweep.",
        "lockstep.jobs.sweep.submit": "Submits the jobs of a sweep.",
        "lockstep.jobs.spec.model.load_profile": "A cluster profile, for `JobSpec.load(FILE, below=…)`.",
        "lockstep.jobs.slurm.render.slurm_parameters": "submitit's parameters for a job.",
        "lockstep.jobs.slurm.render.training_task": "What submitit can run as a task of a job.",
        "lockstep.wire.submitit_api.resumable": "A function that submitit starts again. `from lockstep import resumable`.",
        "lockstep.jobs.status.say": "Prints a line that may hold text of others.",
        "lockstep.jobs.status.table": "Prints a table that may hold text of others.",
    },
    "Ranks": {
        "lockstep.training.parallel.world.script": "Joins the ranks of a program of your own. `from lockstep.training import parallel`.",
        "lockstep.training.parallel.world.joined": "The same, for a program that handles errors itself.",
        "lockstep.training.parallel.world.detect": "Reads what the launcher says of this process.",
        "lockstep.training.parallel.world.World": "A process's place among the ranks.",
    },
    "Gradient sync": {
        "lockstep.training.sync.build": "A gradient strategy by its name.",
        "lockstep.training.sync.from_words": "A gradient strategy from the words of a command line.",
        "lockstep.training.sync.base.GradientSync": "What every gradient strategy can do.",
    },
    "Data and models": {
        "lockstep.training.data.order.key": "The key of a data order.",
        "lockstep.training.data.order.permute": "The data order itself.",
        "lockstep.training.data.order.bounds": "A rank's part of a batch.",
        "lockstep.training.data.sources.load": "The samples of a data source. `from lockstep.training.data import sources`.",
        "lockstep.training.data.sources.raw.Raw": "What `load` returns.",
        "lockstep.training.models.bag_of_tricks.BagOfTricks": "The model of the recipes `bag_of_tricks` and `smoke`.",
        "lockstep.training.models.resnet9.ResNet9": "The model of the recipe `resnet9`.",
    },
    "Errors": {
        "lockstep.training.contract.UserError": "An error that the user can mend: one line, exit code 2.",
        "lockstep.training.contract.user_errors": "Ends a program at such an error.",
    },
}
"""What the API page shows, from the docstrings, beside `Session`. Of a module: the names in its `__all__`."""
FOOTER = "\n<!-- Made from the code by docsite/reference.py. -->\n"


def schemas() -> dict[str, str]:
    """Path on the site → JSON Schema, for editors."""
    made = {"recipe": json_schema(Config), "job": json_schema(JobSpec)}
    return {f"reference/{name}.schema.json": json.dumps(schema, indent=1) + "\n" for name, schema in made.items()}


@functools.cache
def pages() -> dict[str, str]:
    """Path on the site → text."""
    made = {
        "commands": commands(),
        "recipe-settings": settings(
            Config,
            "Settings of a recipe",
            "Set them in a recipe's YAML file, with `--set name=value`, or below `overrides:` in a job file. "
            "`lockstep settings RECIPE` prints them with the values of that recipe. Editors read [its schema](recipe.schema.json).",
        ),
        "session-settings": session_settings(),
        "job-settings": settings(
            JobSpec,
            "Settings of a job",
            "Set them in `job.yaml` or with `--set name=value`. The sections `k8s`, `slurm` and `compose` belong to one backend each. "
            "Editors read [its schema](job.schema.json).",
            free=False,
        ),
        "recipes": recipe_page(),
        "lint-rules": lint_rules(),
        "metrics": metrics(),
        "environment": environment(),
        "session": session(),
        "api": api(),
    }
    return {f"reference/{name}.md": text + FOOTER for name, text in made.items()}


def command_names() -> list[str]:
    """Every command of `lockstep`, as it lists them."""
    commands = typer.main.get_group(app).commands
    return sorted(name for name, command in commands.items() if not command.hidden)


_ASK = """
import contextlib, io, json, runpy, sys
found = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["training", *words, "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        runpy.run_module("lockstep.training", run_name="__main__", alter_sys=True)
    found.append(out.getvalue())
print(json.dumps(found))
"""
"""Asks several commands in one process: torch is imported once."""
_WIDTH = 100


def _helps(program: str, commands: list[list[str]]) -> dict[tuple[str, ...], str]:
    """What commands of `training` print with `--help` where `program` is how they are called."""
    env = {**os.environ, "COLUMNS": str(_WIDTH), "NO_COLOR": "1", "PYTHONPATH": str(ROOT), ENV_PROGRAM: program}
    asked = [sys.executable, "-c", _ASK, json.dumps(commands)]
    done = subprocess.run(asked, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=300)
    return {(program, *words): _tidy(text) for words, text in zip(commands, json.loads(done.stdout))}


OF_THEIR_OWN = (*TOOLS, "torture")
"""Commands of `lockstep` that parse their own words."""


def _tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _of_lockstep() -> dict[tuple[str, ...], str]:
    """The help of `lockstep` and of the commands that are its own, as it prints them."""
    group: Any = typer.main.get_command(app)
    found: dict[tuple[str, ...], str] = {}
    above = group.make_context("lockstep", [], resilient_parsing=True, terminal_width=_WIDTH, max_content_width=_WIDTH)
    found["lockstep",] = _tidy(group.get_help(above))
    for name, command in group.commands.items():
        if name in OF_THEIR_OWN:
            done = subprocess.run(
                [sys.executable, "-m", "lockstep", name, "--help"], cwd=ROOT, env={**os.environ, "COLUMNS": str(_WIDTH), "NO_COLOR": "1"},
                capture_output=True, text=True, check=True, timeout=60,
            )  # fmt: skip
            found["lockstep", name] = _tidy(done.stdout)
        elif name not in COMMANDS or name in INSIDE:
            context = command.make_context(name, [], parent=above, resilient_parsing=True)
            found["lockstep", name] = _tidy(command.get_help(context))
    return found


def commands() -> str:
    """Every command with its real help."""
    texts = _of_lockstep()
    texts |= _helps("lockstep", [[name] for name in COMMANDS if name not in INSIDE])
    texts |= _helps("python -m lockstep.training", [[name] for name in INSIDE])
    parts = [
        "# Commands\n",
        "What each command prints with `--help`. [Exit codes](exit-codes.md) are the same everywhere.\n",
        f"```text\n{texts.pop(('lockstep',))}\n```\n",
    ]
    parts += [f"## {' '.join(words)}\n\n```text\n{texts[words]}\n```\n" for words in sorted(texts)]
    return "\n".join(parts)


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def code(text: object) -> str:
    return f"`{cell(text)}`" if str(text) else ""


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field may hold, also within a list or beside null."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, Any, str, bool]]:
    """(dotted name, type, default, meaning, whether a run may go on with another value) of each setting below a model."""
    from lockstep.training.config import settings as typed

    for name, field in typed.described(model).model_fields.items():
        meaning = " ".join((field.description or "").split())
        if typed.is_section(field.annotation):
            yield from rows(typing.cast(type[BaseModel], field.annotation), f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        yield prefix + name, typed.type_name(field.annotation), default, meaning, FREE in field.metadata
        for inner in dict.fromkeys(_models(field.annotation)):
            mark = "[]" if "list" in str(field.annotation).lower() else ""
            yield from rows(inner, f"{prefix}{name}{mark}.")


def shown(default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "null"
    return {True: "true", False: "false"}[default] if isinstance(default, bool) else str(default)


def settings(model: type[BaseModel], title: str, lead: str, free: bool = True) -> str:
    """A table for each group of settings."""
    groups: dict[str, list[tuple[str, str, Any, str, bool]]] = {}
    for row in rows(model):
        group, _, _ = row[0].rpartition(".")
        groups.setdefault(group, []).append(row)
    parts = [f"# {title}\n", lead + "\n"]
    if free:
        parts.append("*Free* settings may change when a run resumes; a change of any other is refused.\n")
    for group, found in groups.items():
        parts.append(f"## {f'`{group}`' if group else 'General'}\n")
        parts.append(
            f"| setting | type | default |{' free |' if free else ''} meaning |\n|---|---|---|{'---|' if free else ''}---|"
        )
        for name, kind, default, meaning, may in found:
            mark = f" {'yes' if may else ''} |" if free else ""
            parts.append(f"| `{name}` | {cell(kind)} | {code(shown(default))} |{mark} {cell(meaning)} |")
        parts.append("")
    return "\n".join(parts)


def session_settings() -> str:
    """The page that is in the checkout, too: `make generate` writes it."""
    return settings(
        OwnSettings,
        "Settings of a Session",
        'Give them to `Session` by name (`seed=3`) or as overrides (`"checkpoint.every_steps=100"`). '
        "They are the settings of a recipe that are not about its model and data.",
    )


def recipe_page() -> str:
    parts = [
        "# Recipes\n",
        "The recipes that come with Lockstep, each as its YAML file. `lockstep run NAME` trains one.\n",
    ]
    for name in recipes():
        text = (ROOT / f"training/recipes/{name}.yaml").read_text(encoding="utf-8")
        parts.append(f"## {name}\n\n```yaml\n{text}```\n")
    return "\n".join(parts)


def rules() -> list[Any]:
    """The lint rules of all backends, by id."""
    found = [backend_of(name) for name in BACKENDS]
    known = {rule.id: rule for one in found if issubclass(one, Cluster) for rule in one.rules().all()}
    return [known[id] for id in sorted(known)]


def lint_rules() -> str:
    parts = [
        "# Lint rules\n",
        "`lockstep lint` reads the final manifest, after a job's `patch`. `submit` refuses errors and prints warnings.\n",
    ]
    for letters, name in (("LJ", "Every backend"), ("LC", "Compose"), ("LS", "Kubernetes and SLURM")):
        parts.append(f"## {name}\n\n| rule | level | what it finds |\n|---|---|---|")
        parts += [
            f"| `{rule.id}` | {rule.level} | {cell(rule.title)} |" for rule in rules() if rule.id.startswith(letters)
        ]
        parts.append("")
    return "\n".join(parts)


def metrics() -> str:
    """What every rank serves, each metric with its own labels and their values."""
    buckets = ", ".join(f"{bound:g}" for bound in BUCKETS)
    parts = [
        "# Metrics\n",
        "What [every rank serves](../metrics.md). Each has the labels `run` (the run directory's name, or `metrics.run`) and `rank`. "
        f"Histograms have the buckets {buckets} s. Loss and gradient norm are read every `log.every` steps.\n",
        f"| `{PREFIX}…` | kind | labels | meaning |\n|---|---|---|---|",
    ]
    for name, row in TABLE.items():
        labels = ", ".join(f"{label}={'|'.join(values)}" if values else label for label, values in row.labels.items())
        parts.append(f"| `{name}` | {row.kind} | {code(labels)} | {cell(row.help)} |")
    return "\n".join(parts) + "\n"


def constants(file: str, prefix: str) -> Iterator[tuple[str, Any, str]]:
    """(name, value, docstring) of the constants of a module whose names begin with `prefix`."""
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    for node, after in zip(body, [*body[1:], None]):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        ):
            if not node.targets[0].id.startswith(prefix):
                continue
            about = after.value if isinstance(after, ast.Expr) else None
            text = about.value if isinstance(about, ast.Constant) else ""
            yield node.targets[0].id, node.value.value, " ".join(str(text).split())


OTHERS = {
    "LOCKSTEP_HOME": "Folder of the jobs that this machine has submitted; default `~/.local/state/lockstep`. "
    "With SLURM the nodes must see it.",
    "LOCKSTEP_PROFILES": "Folder of cluster profiles, looked at first.",
    "LOCKSTEP_SLURM_HOST": "Login node of a SLURM cluster, HOST or HOST:/PYTHON, where no flag, job file or profile names one.",
    "LOCKSTEP_SLURM_HERE": "Folder that relative paths of a SLURM job begin at, if not the current one. A command over ssh has it.",
    "LOCKSTEP_THREADS": "CPU threads of a rank; default: an equal share of the node's cores.",
    "LOCKSTEP_METRICS_PORT": "First port of the metrics servers; the local rank is added.",
}
"""Variables that a user sets, where the code has no sentence for users."""


def environment() -> str:
    modules = "../source/examples/modules.md#what-does-each-launch-variable-mean"
    parts = ["# Environment variables\n", f"Lockstep's own. [The five modules]({modules}) "
        "explain those of the launchers.\n",
             "| variable | meaning |\n|---|---|"]  # fmt: skip
    known = {value: text for _, value, text in constants("training/contract.py", "ENV_")} | OTHERS
    parts += [f"| `{name}` | {cell(text)} |" for name, text in sorted(known.items())]
    return "\n".join(parts) + "\n"


def members(name: str) -> list[str]:
    """What a module of `API` has in its `__all__`; [] for a class or a function."""
    path = ROOT / f"{name.replace('.', '/')}.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def documented(name: str, lead: str, level: int) -> str:
    """What mkdocstrings makes the description of a name from."""
    return (
        f"{lead}\n\n::: {name}\n    options:\n      heading_level: {level}\n      filters: ['!^_']\n"
        "      show_root_full_path: true\n"
    )


def session() -> str:
    lead = (
        "A training loop of your own. `from lockstep import Session`. [Own training](../own-training.md) explains it, and "
        "[its settings](session-settings.md) have a page.\n\n"
        "In the examples `F` is `torch.nn.functional`; `Net`, `dataset`, `loader` and `pretrained` are yours."
    )
    return (
        "# Session\n\n" + documented("lockstep.training.session.Session", lead, 2) + "      inherited_members: true\n"
    )


def api() -> str:
    parts = [
        "# Python API\n",
        "From the docstrings. What is neither here nor on the page of [`Session`](session.md) is not meant to be imported.\n",
    ]
    for title, names in API.items():
        parts.append(f"## {title}\n")
        for name, lead in names.items():
            parts.append(documented(name, lead, 3))
            if offered := members(name):
                parts[-1] += f"      members: {json.dumps(offered)}\n"
    return "\n".join(parts)


if __name__ == "__main__":
    print(session_settings() + FOOTER, end="")
