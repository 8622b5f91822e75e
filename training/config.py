"""The settings of a training run: one tree, every field with its own docstring.

    config = load("bag_of_tricks", ["epochs=2", "optim.lr=1e-3"])

`python -m training settings` prints what stands here. A field marked `FREE` may change between two starts of one
run; all others are part of the run's identity, and a run directory refuses a config in which they differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from training import settings
from training.contract import UserError
from training.sections import (
    FREE,
    Augment,
    Checkpoint,
    Data,
    Ema,
    Evaluate,
    Log,
    Loss,
    Metrics,
    Optim,
    Preempt,
    Sync,
    at_least,
)  # fmt: skip

RECIPES = Path(__file__).parent / "recipes"
__all__ = [
    "Augment", "Checkpoint", "Config", "Data", "Ema", "Evaluate", "Log", "Loss", "Metrics", "Optim", "Preempt", "Sync",
    "differences", "from_dict", "load", "recipes", "to_dict",
]  # fmt: skip


@dataclass(kw_only=True, slots=True)
class Config:
    recipe: str = "custom"
    """Name of the recipe that this config started from."""
    model: str = "bag_of_tricks"
    """A model of ours, or a class of your own as `package.module:Class`."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the model, e.g. `{width: 0.5}`."""
    init_from: str | None = None
    """File of weights to start from (`training export`); a leading `module.` in its names is dropped."""
    init: Literal["broadcast", "seed"] = "broadcast"
    """Rank 0 sends its fresh weights, or every rank draws the same ones from the seed."""
    seed: int = 0
    """Seed of the weights, the order and the augmentation."""
    epochs: int = field(default=10, metadata=FREE)
    """Passes over the training set."""
    batch_size: int | None = None
    """Samples a rank takes a step. Give this or `global_batch_size`; the global size stays as the first start had it."""
    global_batch_size: int | None = None
    """Samples all ranks together take a step."""
    uneven: Literal["drop", "pad", "weight"] = "drop"
    """A batch that does not divide: leave it out, fill it up from the epoch's start, or give ranks unequal parts, weighted exactly."""
    accumulate: int = 1
    """Micro-batches a step is cut into, to save memory."""
    precision: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Arithmetic of the network. The half formats run under autocast, with float32 weights."""
    channels_last: bool = False
    """Memory format of images and convolutions."""
    compile: bool = False
    """Run the network through torch.compile (needs a C++ compiler on the CPU, Triton on a GPU)."""
    capture: Literal["never", "auto"] = "never"
    """`auto`: record the whole step as CUDA graphs and replay it, where that can be done."""
    nonfinite: Literal["stop", "skip", "ignore"] = "stop"
    """A gradient that is NaN or infinite: end the run before the optimizer step, leave the step out, or do not look."""
    nonfinite_limit: int = field(default=100, metadata=FREE)
    """Steps in a row that `nonfinite: skip` may leave out; one more ends the run: its weights are lost, not one gradient."""
    check_closeness: int = field(default=0, metadata=FREE)
    """Steps between two checks that all ranks hold the same parameters; a difference ends the run and is named. 0: never."""
    deterministic: bool = False
    """Only deterministic kernels; an operation that has none is an error."""
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata=FREE)
    """Where to train; `auto` takes a GPU where one is visible."""
    collective_timeout: float = field(default=600.0, metadata=FREE)
    """Seconds after which a collective that some rank did not join ends the job."""
    threads: int = field(default=0, metadata=FREE)
    """CPU threads a rank; 0: the cores of the node divided by its ranks."""
    data: Data = field(default_factory=Data)
    """The images."""
    loss: Loss = field(default_factory=Loss)
    """The loss."""
    optim: Optim = field(default_factory=Optim)
    """The optimizer and its schedule."""
    ema: Ema = field(default_factory=Ema)
    """The average of the weights."""
    sync: Sync = field(default_factory=Sync)
    """Gradient synchronisation."""
    evaluate: Evaluate = field(default_factory=Evaluate)
    """Validation."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Saving."""
    preempt: Preempt = field(default_factory=Preempt)
    """How the run ends early."""
    log: Log = field(default_factory=Log)
    """What the person sees."""
    metrics: Metrics = field(default_factory=Metrics)
    """What Prometheus sees."""

    def __post_init__(self) -> None:
        at_least(self, 1, "epochs", "accumulate")
        at_least(self, 0, "threads", "seed", "check_closeness", "nonfinite_limit")
        at_least(self, 1, "collective_timeout")
        if self.collective_timeout > 1e6:
            raise ValueError(f"collective_timeout must be at most 1e6 seconds, got {self.collective_timeout}")
        if (self.batch_size is None) == (self.global_batch_size is None):
            raise ValueError("set exactly one of batch_size (per rank) and global_batch_size")
        if min(self.batch_size or 1, self.global_batch_size or 1) < 1:
            raise ValueError("batch_size and global_batch_size must be at least 1")

    def hash(self) -> str:
        """sha256 of all settings that make the run what it is."""
        text = json.dumps(settings.flatten(self, "free"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


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
        raise UserError(f"unknown recipe {recipe!r}{hint} (a file of your own must end in .yaml)")
    values = settings.read_yaml(path)
    changed = settings.override(values, Config, assignments or [])
    for chosen, other in (("batch_size", "global_batch_size"), ("global_batch_size", "batch_size")):
        # Whoever sets one of the two batch sizes on the command line replaces the other one of the recipe.
        if changed.get(chosen) != values.get(chosen) and changed.get(other) == values.get(other):
            changed.pop(other, None)
            break
    if changed.get("model") != values.get("model") and changed.get("model_options") == values.get("model_options"):
        changed.pop("model_options", None)  # they were another model's
    changed.setdefault("recipe", name)
    return settings.build(Config, changed, f"recipe {name}" if not assignments else f"recipe {name} with --set")


def from_dict(values: dict[str, Any], where: str) -> Config:
    """A config from what `to_dict` wrote. Raises `UserError`."""
    return settings.build(Config, values, where)


def to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values, ready for YAML."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def differences(old: Config, new: Config) -> list[str]:
    """`name: old → new` for each setting that makes `new` another run than `old`."""
    before, after = (settings.flatten(config, "free") for config in (old, new))
    return [f"{name}: {before[name]} → {after[name]}" for name in after if before[name] != after[name]]
