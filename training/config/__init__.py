"""The settings of a training run: one tree, every field with its own docstring.

    config = load("bag_of_tricks", ["epochs=2", "optim.lr=1e-3"])

`python -m lockstep.training settings` prints these docstrings. A field that is `Free` may change between two starts of one run.
All others are part of the run's identity, and a run directory refuses a config in which they differ.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from ..contract import UserError
from . import settings
from .sections import (
    FREE,
    Augment,
    Checkpoint,
    Count,
    Data,
    Ema,
    Evaluate,
    Free,
    Log,
    Loss,
    Metrics,
    Number,
    Optim,
    OwnSync,
    Plain,
    Positive,
    Preempt,
    Sync,
)  # fmt: skip
from .settings import Section

RECIPES = Path(__file__).parents[1] / "recipes"
FORM = ("precision", "channels_last", "compile")
"""Settings of a recipe whose `auto` is decided at a run's first start. run.yaml has what was decided."""
__all__ = [
    "FORM", "Augment", "Checkpoint", "Config", "Data", "Ema", "Evaluate", "Log", "Loss", "Metrics", "Optim", "OwnSettings",
    "Preempt", "Recipe", "RunSettings", "Sync", "check_overrides", "differences", "form_of", "load", "of_run", "own_settings", "recipes",
    "to_dict",
]  # fmt: skip


class Recipe(Section):
    """What is trained: model, data, loss and optimizer."""

    recipe: str = "custom"
    """Name of the recipe that this config started from."""
    model: str = "bag_of_tricks"
    """A model of ours, or a class of your own as `package.module:Class`."""
    model_options: Plain = Field(default_factory=dict)
    """Keyword arguments of the model, e.g. `{width: 0.5}`."""
    init_from: str | None = None
    """File of weights to start from (`lockstep export`); a leading `module.` in its names is dropped."""
    epochs: Free[Positive] = 10
    """Passes over the training set."""
    batch_size: Positive | None = None
    """Samples per rank and step. Give this or `global_batch_size`. A resumed run keeps the global size of the first start."""
    global_batch_size: Positive | None = None
    """Samples per step, all ranks together."""
    uneven: Literal["drop", "pad", "weight", "mean"] = "drop"
    """A batch that cannot be divided equally: leave it out, fill it up, weight its parts exactly, or average the ranks' means."""
    precision: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "float32"
    """Arithmetic of the network. The half formats run under autocast, with float32 weights. float16 scales the loss, but not with
    `nonfinite: ignore`. `auto`: bfloat16 on a GPU that has it, else float32; a run keeps what it began with."""
    channels_last: bool | Literal["auto"] = False
    """Memory format of images and convolutions. `auto`: true on a GPU; a run keeps what it began with."""
    compile: bool | Literal["auto"] = False
    """Run the network through torch.compile (needs a C++ compiler on the CPU, Triton on a GPU). `auto`: on a GPU, where the training is
    long enough to repay it; a run keeps what it began with."""
    data: Data = Field(default_factory=Data)
    """The images."""
    loss: Loss = Field(default_factory=Loss)
    """The loss."""
    optim: Optim = Field(default_factory=Optim)
    """The optimizer and its schedule."""
    ema: Ema = Field(default_factory=Ema)
    """The average of the weights."""
    evaluate: Evaluate = Field(default_factory=Evaluate)
    """Validation."""

    @model_validator(mode="after")
    def _one_batch_size(self) -> Self:
        if (self.batch_size is None) == (self.global_batch_size is None):
            raise ValueError("set exactly one of batch_size (per rank) and global_batch_size")
        if self.uneven == "mean" and self.loss.reduction == "sum":
            raise ValueError("uneven=mean averages the ranks' mean losses: set loss.reduction=mean, or uneven=weight")
        return self


class RunSettings(Section):
    """The settings around the steps of any run, of a recipe or of a script."""

    seed: Count = 0
    """Seed of the weights, the order and the augmentation."""
    nonfinite: Literal["stop", "skip", "ignore"] = "stop"
    """A gradient that is NaN or infinite: end the run before the optimizer step, skip the step, or do not check."""
    nonfinite_limit: Free[Count] = 100
    """Consecutive steps that `nonfinite: skip` may skip. One more ends the run, because then the weights are lost."""
    micro_batch_size: Count = 0
    """Most samples that a rank computes at once, to save memory: its part of a batch is cut into micro-batches. 0: the whole part."""
    capture: Literal["never", "auto"] = "never"
    """`auto`: record the whole step as CUDA graphs and replay it, if possible."""
    check_closeness: Free[Count] = 0
    """Steps between two checks that all ranks have the same parameters. A difference ends the run, and the error names it. 0: no checks."""
    deterministic: bool = False
    """Use only deterministic kernels. An operation without one is an error."""
    tf32: bool = False
    """Let a GPU compute float32 matrix products and convolutions in TF32: faster, with 10 bits of mantissa for 23."""
    cudnn_benchmark: bool = False
    """Let cuDNN measure its convolution kernels and use the fastest. Another start may use another one: the last bits may differ."""
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where to train; `auto` takes a GPU where one is visible."""
    backend: Free[Literal["auto", "gloo"]] = "auto"
    """What sends tensors between GPUs. `auto`: NCCL, a GPU for each rank. `gloo`: through the host, and ranks may share a GPU: slow, to try
    several ranks where there is one GPU."""
    collective_timeout: Free[Number] = Field(default=600.0, ge=1, le=1_000_000)
    """Seconds after which a collective ends the job, if a rank has not joined it."""
    end_hangs: Free[bool] = False
    """Kill a rank that gets no further while the others wait for it: all start again, or under `--live` the others train on."""
    threads: Free[Count] = 0
    """CPU threads per rank; 0: the cores of the node divided by its ranks."""
    sync: Sync = Field(default_factory=Sync)
    """Gradient synchronisation."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """Saving."""
    preempt: Preempt = Field(default_factory=Preempt)
    """Early end of the run: preemption."""
    log: Log = Field(default_factory=Log)
    """Output for people."""
    metrics: Metrics = Field(default_factory=Metrics)
    """Metrics for Prometheus."""

    @property
    def title(self) -> str:
        """What is trained, as metrics and the summary name it."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _deterministic_arithmetic(self) -> Self:
        if self.deterministic and (self.tf32 or self.cudnn_benchmark):
            raise ValueError("deterministic: true needs tf32: false and cudnn_benchmark: false")
        if self.exact and (self.tf32 or self.cudnn_benchmark):
            raise ValueError("sync.name=exact needs tf32: false and cudnn_benchmark: false")
        return self

    @property
    def exact(self) -> bool:
        """Whether the bits must not depend on the number of ranks."""
        return self.sync.name == "exact"

    @property
    def only_deterministic(self) -> bool:
        """Whether only deterministic kernels may run."""
        return self.deterministic or self.exact

    def hash(self) -> str:
        """Returns the sha256 of all settings that identify the run."""
        identity = json.dumps(settings.flatten(self, FREE), sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()


class Config(RunSettings, Recipe):
    """All settings of a recipe's run."""

    @property
    def title(self) -> str:
        return self.recipe

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.compile is True and self.exact:
            raise ValueError("sync.name=exact does not take compile=true: set compile=false, or use sync.name=flat")
        bound = {"batch_size": self.batch_size, "uneven=mean": self.uneven == "mean"}
        if self.exact and (of_ranks := [name for name, value in bound.items() if value]):
            raise ValueError(
                f"sync.name=exact does not take {of_ranks[0]}, which is another thing at another number of ranks: set global_batch_size, "
                "and uneven=drop, pad or weight"
            )
        kept = self.checkpoint.keep_best
        if not isinstance(kept, bool) and not kept.keys() <= {"accuracy", "test_loss"}:
            raise ValueError(
                f"checkpoint.keep_best names {next(iter(kept))}, and what a recipe measures is accuracy and test_loss: set true, "
                "or {test_loss: min}"
            )
        return self


class OwnSettings(RunSettings):
    """The settings of a script (`lockstep.training.session`)."""

    script: str
    """Name of the program, in the metrics."""
    sync: OwnSync = Field(default_factory=OwnSync)
    """Gradient synchronisation."""
    config: Plain = Field(default_factory=dict)
    """The settings of the script itself. A start with other settings than the run directory has is refused."""

    @property
    def title(self) -> str:
        return self.script


def recipes() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load(recipe: str, assignments: list[str] | None = None) -> Config:
    """The config of a recipe (its name, or the path of a YAML file) with `name=value` overrides.

    Raises:
        UserError: there is no such recipe, or a setting is unknown or has the wrong type.
    """
    named = RECIPES / f"{recipe}.yaml"
    if recipe in recipes():
        path, name = named, recipe
    elif recipe.endswith((".yaml", ".yml")):
        path, name = Path(recipe), Path(recipe).stem
    else:
        hint = settings.nearest(recipe, recipes())
        raise UserError(f"unknown recipe {recipe!r}{hint} (the name of your own file must end in .yaml)")
    values = settings.read_yaml(path)
    changed = settings.override(values, Config, assignments or [])
    for chosen, other in (("batch_size", "global_batch_size"), ("global_batch_size", "batch_size")):
        # One of the two batch sizes on the command line replaces the other one of the recipe.
        if changed.get(chosen) != values.get(chosen) and changed.get(other) == values.get(other):
            changed.pop(other, None)
            break
    if changed.get("model") != values.get("model") and changed.get("model_options") == values.get("model_options"):
        changed.pop("model_options", None)  # they were another model's
    changed.setdefault("recipe", name)
    return settings.build(Config, changed, f"recipe {name}" if not assignments else f"recipe {name} with --set")


def own_settings(
    script: str, config: Mapping[str, Any], given: Mapping[str, Any], overrides: Sequence[str]
) -> OwnSettings:
    """`given` by name, then `overrides` as NAME=VALUE; `config.NAME=VALUE` changes one of the script's own.

    Raises:
        UserError: an unknown setting, or a value of another type than the script's own.
    """
    values = copy.deepcopy({**given, "script": script, "config": dict(config)})
    if isinstance(values.get("sync"), str):
        values["sync"] = {"name": values["sync"]}
    for name, value in settings.assignments(OwnSettings, overrides):
        settings.put(values, name.split("."), _like(config, name, value) if name.startswith("config") else value)
    return settings.build(OwnSettings, values, "Session")


def check_overrides(overrides: Sequence[str]) -> None:
    """The part that is known without the script: names, and values of ours. Raises `UserError`."""
    values = settings.override({"script": "program"}, OwnSettings, overrides)
    settings.build(OwnSettings, values, "overrides")


def _like(config: Mapping[str, Any], name: str, value: Any) -> Any:
    """`value`, where the script has a setting of this name and type. Raises `UserError`."""
    known = settings.dotted(config)
    short = name.removeprefix("config.")
    if short not in known:
        hint = settings.nearest(short, known) if known else ": its Session is given no config"
        raise UserError(f"--set {name}: the script has no setting {short!r} in config{hint}")
    before = list(known[short]) if isinstance(known[short], tuple) else known[short]
    if type(before) is float and type(value) is int:
        return float(value)
    if before is not None and type(value) is not type(before):
        raise UserError(
            f"--set {name}: expected {settings.type_name(type(before))} like the script's {settings.written(before)}, "
            f"got {settings.written(value)}"
        )
    return value


def of_run(values: dict[str, Any], where: str) -> RunSettings:
    """Returns the settings of a recipe's or a script's run from the values of `to_dict`. Raises `UserError`."""
    return settings.build(OwnSettings if "script" in values else Config, values, where)


def to_dict(config: RunSettings) -> dict[str, Any]:
    """Nested plain values, ready for YAML."""
    values: dict[str, Any] = json.loads(json.dumps(config, default=dict))
    return values


def form_of(config: RunSettings) -> dict[str, Any]:
    """The settings of a recipe that its first start has decided; of a script's own loop none."""
    return {name: getattr(config, name) for name in FORM} if isinstance(config, Config) else {}


def differences(old: RunSettings, new: RunSettings) -> list[str]:
    """`name: old → new` for each setting that makes `new` another run than `old`. In its form a new `auto` is what the old one has."""
    if type(old) is not type(new):
        kinds = [f"script {c.script}" if isinstance(c, OwnSettings) else "a recipe" for c in (old, new)]
        return [f"it trains {kinds[0]} → {kinds[1]}"]
    before, after = (settings.flatten(config, FREE) for config in (old, new))
    decided = {name for name in FORM if after.get(name) == "auto"}
    return [
        f"{name}: {settings.written(before[name], str)} → {settings.written(after[name], str)}"
        for name in after
        if before[name] != after[name] and name not in decided
    ]
