"""The settings of a training run: one tree, every field with its own docstring.

    config = load("bag_of_tricks", ["epochs=2", "optim.lr=1e-3"])

`lockstep settings` prints these docstrings. A field that is `Free` may change between two starts of one run.
All others are part of the run's identity, and a run directory refuses a config in which they differ.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat, JsonValue, model_validator
from typing_extensions import Self, TypedDict

from ..contract import BUCKET_URL, UserError
from ..limits import GRACE_SECONDS
from . import settings
from .settings import Section, shown

RECIPES = Path(__file__).parents[1] / "recipes"
FORM = ("precision", "channels_last", "compile")
"""Settings of a recipe whose `auto` is decided at a run's first start. run.yaml has what was decided."""
OwnCode = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
"""A user's function or class, as `package.module:name`."""
Signal = Literal["TERM", "USR1", "USR2", "INT", "HUP"]
FREE = "may change"
T = TypeVar("T")
Free = Annotated[T, FREE]


def _number(value: Any) -> Any:
    """YAML 1.1 reads `1e-3` as text, so text that is a number passes."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _bucket(value: str) -> str:
    if not re.fullmatch(BUCKET_URL, value):
        raise ValueError(f"must be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, got {shown(value)}")
    return value


def _rising(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    epochs = [float(epoch) for epoch, _ in points]
    if epochs != sorted(set(epochs)):
        raise ValueError(f"must have increasing epochs, got {epochs}")
    return points


def _equal_to_itself(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if json.loads(json.dumps(value)) != value:
        raise ValueError("must not have a NaN: it differs from itself, so that the run could never resume")
    return value


LOGGED = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
"""A name under which a script logs numbers."""
_Better = dict[Annotated[str, Field(pattern=f"^{LOGGED}$")], Literal["max", "min"]]
KeepBest = bool | Annotated[_Better, Field(min_length=1, max_length=1)]
Number = Annotated[FiniteFloat, BeforeValidator(_number)]
SecondsOrAuto = Annotated[FiniteFloat, Field(ge=0), BeforeValidator(_number)] | Literal["auto"]
PositiveNumber = Annotated[FiniteFloat, Field(gt=0), BeforeValidator(_number)]
Rate = Annotated[FiniteFloat, Field(ge=0, lt=1_000_000_000), BeforeValidator(_number)]
Momentum = Annotated[FiniteFloat, Field(ge=0, lt=1), BeforeValidator(_number)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
BucketUrl = Annotated[str, AfterValidator(_bucket)]
FolderOrBucketUrl = Annotated[str, AfterValidator(lambda value: _bucket(value) if "://" in value else value)]
Plain = Annotated[dict[str, JsonValue], AfterValidator(_equal_to_itself)]
"""Settings of something that this package does not know: they go into run.yaml, and identify the run."""
Items = Annotated[list[T], BeforeValidator(lambda value: list(value) if isinstance(value, tuple) else value)]
Pair = Annotated[tuple[T, T], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
Schedule = Annotated[Items[T], AfterValidator(_rising)]
"""Of points (when, factor)."""


Channels = Annotated[Items[T], Field(min_length=1)]
Source = Literal["digits", "synthetic", "cifar10", "fashion_mnist", "classification", "images"] | OwnCode
Strategy = Literal["ddp", "flat", "zero1", "bf16_compress", "exact"] | OwnCode


class Augment(Section):
    crop: Count = 0
    """Largest shift of the random crop, in pixels, in each direction; 0: no crop."""
    padding: Literal["reflect", "zero"] = "reflect"
    """What the crop contains outside the image: the mirrored image, or black."""
    flip: Literal["none", "random", "alternating"] = "none"
    """Horizontal flip: `random` draws again in each epoch; `alternating` draws once per image and flips it in every other epoch."""


class Data(Section):
    source: Source = "digits"
    """Where the samples come from: a built-in source, your own files (docs/data.md), or a function as `package.module:function`."""
    split: Literal["honest", "exercise"] = "honest"
    """`honest`: the training and test samples of the source. `exercise`: the first tenth is used for both, so nothing is held out."""
    root: Free[str] = "data"
    """Folder of the data set, which is downloaded if it is missing; the shards are cached below it."""
    shards: Free[FolderOrBucketUrl | None] = None
    """Folder with ready shards (`lockstep shard`), or where they are in a bucket, `s3://BUCKET/PREFIX` (`gs://`, `az://`; needs
    obstore): a node fetches each once, below `root`. null: made once below `root`."""
    workers: Free[Count] = 0
    """Processes that decode images when shards are made; 0: one for each core."""
    shuffle: Literal["global", "none"] = "global"
    """`global`: one order over all samples, the same at every world size. `none`: in order."""
    resident: Free[Literal["auto", "always", "never"]] = "auto"
    """Keep the uint8 images on the device: if they fit in a quarter of its free memory, always, or never."""
    mean: Channels[Number] = Field(default_factory=lambda: [0.0])
    """Mean of each channel, or one for all, for pixels in 0…1 or for features as they are."""
    std: Channels[PositiveNumber] = Field(default_factory=lambda: [1.0])
    """Standard deviation of each channel, or one for all."""
    options: Plain = Field(default_factory=dict)
    """Settings of the source, e.g. `{n: 4096, size: 32}` for `synthetic`."""
    augment: Augment = Field(default_factory=Augment)
    """Augmentation of the training images, on the device."""

    @property
    def shards_name(self) -> str:
        """A folder's name for ready shards of this source. A user's images may be those of many data sets."""
        if self.source != "images" and ":" not in self.source:
            return self.source
        identity = json.dumps([self.root, self.options, self.split], sort_keys=True)
        name = re.sub(r"[^\w.]+", "-", self.source)
        return f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


class Loss(Section):
    smoothing: Number = Field(default=0.0, ge=0, lt=1)
    """Label smoothing: the share of the target that is spread evenly over all classes."""
    reduction: Literal["mean", "sum"] = "mean"
    """Over the global batch. With `sum` the learning rate is per sample and holds at any batch size."""


class Group(TypedDict, total=False):
    """Settings of some parameters alone. (A dictionary: a config tells, and compares, only those that are given.)"""

    __pydantic_config__ = Section.model_config  # type: ignore[misc]

    lr: Rate
    momentum: Momentum
    weight_decay: Rate
    schedule: Schedule[Pair[Number]]


class Optim(Section):
    name: Literal["nesterov", "sgd", "adam", "muon"] = "sgd"
    """`nesterov` is the bag-of-tricks update, with the learning rate inside the velocity; `sgd` and `adam` are torch's;
    `muon` is Muon for convolution filters and Nesterov SGD for the rest."""
    lr: Number = Field(default=0.1, ge=0)
    """Learning rate of the weights, multiplied by the schedule."""
    momentum: Momentum = 0.9
    """Momentum of the velocity; Adam's first beta (its second is 0.999)."""
    weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay, added to the gradient (of the summed loss where `loss.reduction` is `sum`)."""
    bias_lr_factor: PositiveNumber = 1.0
    """Biases and other one-dimensional parameters use `lr` times this factor, and `weight_decay` divided by it."""
    reference_batch_size: Count = 0
    """The global batch size that `weight_decay` was tuned at, for a summed loss: it then grows with the batch. 0: fixed."""
    schedule: Schedule[Pair[Number]] = Field(default_factory=list)
    """Points (when, factor) of a piecewise linear schedule of the learning rate; flat outside, constant when empty."""
    schedule_unit: Literal["epoch", "step"] = "epoch"
    """Unit of the points of `schedule`. Epochs do not depend on the batch size; many scripts use steps."""
    clip: Number = Field(default=0.0, ge=0)
    """Largest norm of the gradient of the loss; 0: no clipping."""
    groups: dict[str, Group] = Field(default_factory=dict)
    """Settings for some parameters, chosen by a part of their dotted name: `{head: {lr: 0.67, momentum: 0.85}}`; each
    may have `lr, momentum, weight_decay, schedule`."""


class Ema(Section):
    decay: Number = Field(default=0.0, ge=0, lt=1)
    """Decay a step of the averaged weights that evaluation uses; 0: no average."""
    every: Positive = 5
    """Steps between two updates of the average, each with decay ** every."""


class Sync(Section):
    name: Strategy = "ddp"
    """How gradients are summed over the ranks: a built-in strategy (docs/sync.md compares them), or a class as `package.module:Class`."""
    bucket_mb: PositiveNumber = 25.0
    """Megabytes (10⁶ bytes) of gradient per collective; collectives overlap the backward pass."""
    options: Plain = Field(default_factory=dict)
    """Settings of the strategy, e.g. `{parts: 4}` for `exact`."""


class OwnSync(Sync):
    name: Strategy = "flat"
    """How gradients are summed over the ranks: a built-in strategy (docs/sync.md compares them), or a class as `package.module:Class`."""


class Evaluate(Section):
    every: Free[Positive] = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    per_class: Free[bool] = False
    """Print the accuracy of each class at the end (summary.json always has it)."""
    batch_size: Free[Positive] = 512
    """Images a rank evaluates at a time."""
    tta: Literal["none", "flip", "flip_shift"] = "none"
    """Test-time augmentation: `flip` averages the logits of an image and its mirror image; `flip_shift` does so for the
    image (weight 1/2) and for it moved by one pixel up and left, and down and right (1/4 each)."""


class Checkpoint(Section):
    every_steps: Free[Count] = 0
    """Steps between two checkpoints; 0: one at the end of every epoch."""
    every_seconds: Free[SecondsOrAuto] = 0.0
    """Also save when this many seconds have passed since the last save; 0: never. `auto`: the interval that loses
    least time, between 30 s and an hour, from a save's cost and the run's failures."""
    keep: Free[Positive] = 3
    """Newest checkpoints to keep."""
    keep_best: Free[KeepBest] = True
    """Also keep the weights with the best score so far. true: the highest accuracy. `{val_loss: min}`: the lowest `val_loss`;
    likewise `max`, and other logged numbers. false: none."""
    to: Free[BucketUrl | None] = None
    """Also keep the checkpoints in a bucket, from which the run resumes on any node: `s3://BUCKET/PREFIX`, `gs://…` or
    `az://CONTAINER/PREFIX`. Needs obstore."""


class Preempt(Section):
    signals: Free[Items[Signal]] = Field(default_factory=lambda: list(typing.get_args(Signal)))
    """Signals after which the run saves a checkpoint and ends with exit code 75."""
    grace_seconds: Free[Number] = Field(default=GRACE_SECONDS, ge=1)
    """Seconds between such a signal and the end. No rank waits longer for the checkpoint."""


class Log(Section):
    format: Free[Literal["table", "json"]] = "table"
    """`table` for people, `json` (one object per line) for clusters."""
    every: Free[Positive] = 50
    """Steps between two readings of the loss and the gradient's norm (events `step`). The first step is always read, and the last one
    if its number is known. The output shows both, unless an epoch's line precedes them."""
    score_every: Free[Count] = 0
    """Steps between two lines `step N | train_loss | test_loss | step time`, instead of one line per epoch; 0: one line per epoch."""
    weights_every: Free[Count] = 0
    """Steps between two events `weights`; 0: none. Each has the sha256 of the model's weights and buffers, to compare two runs."""
    tensorboard: Free[bool] = False
    """Write TensorBoard event files to `tensorboard` in the run directory; needs tensorboard."""
    wandb: Free[str | None] = None
    """Project at Weights & Biases to log to; needs wandb, and its key in the environment (or WANDB_MODE=offline)."""


class Metrics(Section):
    enabled: Free[bool] = True
    """Serve every rank's metrics for Prometheus, and write them to a textfile."""
    stale_seconds: Free[Number] = Field(default=600.0, ge=1)
    """`/healthz` fails if the last step or evaluation batch is older than this."""


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
    """Consecutive steps that `nonfinite: skip` may skip. One more ends the run: the weights are probably NaN."""
    micro_batch_size: Count = 0
    """Largest micro-batch, in samples. A rank cuts its part of a batch into micro-batches to save memory. 0: the whole part."""
    capture: Literal["never", "auto"] = "never"
    """`auto`: record the whole step as CUDA graphs and replay it, if possible."""
    check_closeness: Free[Count] = 0
    """Steps between two checks that all ranks have the same parameters. A difference ends the run, and the error names it. 0: no checks."""
    deterministic: bool = False
    """Use only deterministic kernels. An operation without one is an error."""
    tf32: bool = False
    """Let a GPU compute float32 matrix products and convolutions in TF32: faster, with 10 bits of mantissa, not 23."""
    cudnn_benchmark: bool = False
    """Let cuDNN measure its convolution kernels and use the fastest. Another start may choose other kernels: the last bits may differ."""
    device: Free[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where to train; `auto` takes a GPU where one is visible."""
    backend: Free[Literal["auto", "gloo"]] = "auto"
    """What sends tensors between GPUs. `auto`: NCCL, with a GPU for each rank. `gloo` sends through the host:
    slow, but several ranks can share one GPU for a try."""
    collective_timeout: Free[Number] = Field(default=600.0, ge=1, le=1_000_000)
    """Seconds after which a collective ends the job, if a rank has not joined it."""
    end_hangs: Free[bool] = False
    """Kill a rank that hangs while the others wait for it. Then all ranks restart; with `--live` the others continue."""
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
        for is_on, name in ((self.deterministic, "deterministic: true"), (self.exact, "sync.name=exact")):
            if is_on and (self.tf32 or self.cudnn_benchmark):
                raise ValueError(f"{name} needs tf32: false and cudnn_benchmark: false")
        return self

    @property
    def exact(self) -> bool:
        """Whether the bits must not depend on the number of ranks."""
        return self.sync.name == "exact"


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
        if not isinstance(kept, bool) and kept not in ({"accuracy": "max"}, {"test_loss": "min"}):
            raise ValueError(
                f"checkpoint.keep_best is {settings.written(kept)}, and the best of a recipe has the most accuracy or the least test_loss: "
                "set true, or {test_loss: min}"
            )
        return self


class OwnSettings(RunSettings):
    """The settings of a script (`lockstep.training.session`)."""

    script: str
    """Name of the program, in the metrics."""
    sync: OwnSync = Field(default_factory=OwnSync)
    """Gradient synchronisation."""
    config: Plain = Field(default_factory=dict)
    """The settings of the script itself. Lockstep refuses a start whose settings differ from the run directory's."""

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
    if recipe in recipes():
        path, name = RECIPES / f"{recipe}.yaml", recipe
    elif recipe.endswith((".yaml", ".yml")):
        path, name = Path(recipe), Path(recipe).stem
    else:
        hint = settings.nearest(recipe, recipes())
        raise UserError(
            f"unknown recipe {recipe!r}{hint} (your own file of settings ends in .yaml; your program goes after --)"
        )
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
    return config.model_dump(mode="json")


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
