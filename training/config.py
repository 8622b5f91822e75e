"""The settings of a training run: one tree, every field with its own docstring.

    config = load("bag_of_tricks", ["epochs=2", "optim.lr=1e-3"])

`python -m training settings` prints what stands here. A field marked `_FREE` may change between two starts of one
run; all others are part of the run's identity, and a run directory refuses a config in which they differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from training import settings
from training.contract import UserError

RECIPES = Path(__file__).parent / "recipes"
_FREE = {"free": True}


@dataclass(kw_only=True, slots=True)
class Augment:
    crop: int = 0
    """Largest shift of the random crop, in pixels, in each direction; 0: no crop."""
    padding: Literal["reflect", "zero"] = "reflect"
    """What the crop shows beyond the edge: the mirrored image, or black."""
    flip: Literal["none", "random", "alternating"] = "none"
    """Horizontal flip: `random` draws anew each epoch, `alternating` draws once an image and flips it every other epoch."""
    cutout: int = 0
    """Side in pixels of a square that is set to the mean, at a random place; 0: none."""
    brightness: float = 0.0
    """Largest shift of an image's normalised values, up or down, drawn once an image; 0: none."""
    contrast: float = 0.0
    """An image's normalised values are scaled by 1 ± up to this, drawn once an image, after the brightness; 0: none."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "crop", "cutout", "brightness", "contrast")


@dataclass(kw_only=True, slots=True)
class Data:
    source: Literal["digits", "synthetic", "cifar10", "fashion_mnist", "classification"] = "digits"
    """Where the samples come from."""
    split: Literal["honest", "exercise"] = "honest"
    """`honest`: the source's own training and test samples. `exercise`: the first tenth is both, so nothing is held out."""
    root: str = field(default="data", metadata=_FREE)
    """Folder of the downloaded data set; the shards are cached below it."""
    shards: str | None = field(default=None, metadata=_FREE)
    """Folder with ready shards (`python -m training shard`); null: made once below `root`."""
    num_shards: int = 8
    """Files to cut the training set into when shards are made."""
    download: bool = field(default=True, metadata=_FREE)
    """Download what is missing, where a network is there."""
    prepare_timeout: float = field(default=1800.0, metadata=_FREE)
    """Seconds to wait for another process that prepares the same data."""
    verify: bool = field(default=True, metadata=_FREE)
    """Check the sha256 of every shard that a rank opens."""
    shuffle: Literal["global", "shard", "none"] = "global"
    """`global`: one order over all samples, the same at every world size. `shard`: a rank keeps its own files. `none`: in order."""
    resident: Literal["auto", "always", "never"] = field(default="auto", metadata=_FREE)
    """Keep the uint8 images on the device: where they fit in a quarter of its free memory, always, or never."""
    prefetch: int = field(default=2, metadata=_FREE)
    """Batches that the loader prepares ahead when the images are not resident."""
    mean: list[float] = field(default_factory=lambda: [0.0])
    """Mean of each channel, or one for all, for pixels in 0…1 or for features as they are."""
    std: list[float] = field(default_factory=lambda: [1.0])
    """Standard deviation of each channel, or one for all."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the source itself, e.g. `{n: 4096, size: 32}` for `synthetic`."""
    augment: Augment = field(default_factory=Augment)
    """What happens to a training image on the device."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_shards", "prefetch")
        if not self.mean or min(self.std, default=0) <= 0:
            raise ValueError(
                f"mean and std must hold a number or one a channel, std above 0; got {self.mean}, {self.std}"
            )


@dataclass(kw_only=True, slots=True)
class Loss:
    smoothing: float = 0.0
    """Label smoothing: the share of the target that is spread evenly over all classes."""
    reduction: Literal["mean", "sum"] = "mean"
    """Over the global batch. With `sum` the learning rate is per sample and holds at any batch size."""

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing must be in [0, 1), got {self.smoothing}")


@dataclass(kw_only=True, slots=True)
class Optim:
    name: Literal["nesterov", "sgd", "adam", "muon"] = "sgd"
    """`nesterov` is the bag-of-tricks update, with the learning rate inside the velocity; `sgd` and `adam` are torch's;
    `muon` is Muon for convolution filters and Nesterov SGD for the rest."""
    lr: float = 0.1
    """Learning rate of the weights where the schedule stands at 1."""
    momentum: float = 0.9
    """Momentum of the velocity; Adam's first beta (its second is 0.999)."""
    weight_decay: float = 0.0
    """Weight decay, added to the gradient (of the summed loss where `loss.reduction` is `sum`)."""
    bias_lr_factor: float = 1.0
    """Biases and other one-dimensional parameters learn at `lr` times this, with `weight_decay` divided by it."""
    reference_batch_size: int = 0
    """The global batch size that `weight_decay` was tuned at, for a summed loss: it then grows with the batch. 0: fixed."""
    schedule: list[tuple[float, float]] = field(default_factory=list)
    """Points (when, factor) of a piecewise linear schedule of the learning rate; flat outside, constant when empty."""
    schedule_scale: float = 1.0
    """Stretches the schedule: 0.2 fits one that is made for 10 epochs into 2."""
    schedule_unit: Literal["epoch", "step"] = "epoch"
    """What the points of `schedule` count. In epochs it holds at every batch size; in steps it is what many scripts have."""
    clip: float = 0.0
    """Largest norm of the gradient of the loss; 0: no clipping."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Parameters with settings of their own, by a part of their dotted name: `{head: {lr: 0.67, momentum: 0.85}}`; each
    may have `lr, momentum, weight_decay, schedule`."""
    normalise_every: int = 1
    """Steps between two scalings of the filters to norm √out (`muon` only)."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "normalise_every")
        for name, own in self.groups.items():
            _check_group(name, own)
        _at_least(self, 0, "lr", "momentum", "weight_decay", "reference_batch_size", "clip")
        if self.bias_lr_factor <= 0 or self.schedule_scale <= 0:
            raise ValueError("bias_lr_factor and schedule_scale must be above 0")
        _check_schedule("schedule", self.schedule)


@dataclass(kw_only=True, slots=True)
class Ema:
    decay: float = 0.0
    """Decay a step of the averaged weights that evaluation uses; 0: no average."""
    every: int = 5
    """Steps between two updates of the average, each with decay ** every."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "every")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {self.decay}")


@dataclass(kw_only=True, slots=True)
class Sync:
    name: Literal[
        "ddp", "allreduce", "flat", "hooks", "horovod", "zero1", "powersgd", "bf16_compress", "fsdp", "data_parallel"
    ] = "ddp"
    """How gradients are summed over the ranks; docs/sync.md compares the strategies."""
    bucket_mb: float = 25.0
    """Megabytes (10⁶ bytes) of gradient that travel in one collective, overlapped with the backward pass."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the strategy itself, e.g. `{rank: 2}` for `powersgd`."""

    def __post_init__(self) -> None:
        if self.bucket_mb <= 0:
            raise ValueError(f"bucket_mb must be above 0, got {self.bucket_mb}")


@dataclass(kw_only=True, slots=True)
class Evaluate:
    every: int = field(default=1, metadata=_FREE)
    """Epochs between two evaluations; the last epoch is always evaluated."""
    per_class: bool = field(default=False, metadata=_FREE)
    """Print the accuracy of each class at the end (summary.json always has it)."""
    batch_size: int = field(default=512, metadata=_FREE)
    """Images a rank evaluates at a time."""
    tta: Literal["none", "flip", "flip_shift"] = "none"
    """Test-time augmentation: `flip` averages the logits of an image and its mirror image; `flip_shift` does so for the
    image (weight 1/2) and for it moved by one pixel up and left, and down and right (1/4 each)."""
    tta_share: float = 1.0
    """Share of each batch's images, the least confident ones, that test-time augmentation looks at again."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "every", "batch_size")
        if not 0 < self.tta_share <= 1:
            raise ValueError(f"tta_share must be in (0, 1], got {self.tta_share}")


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    every_steps: int = field(default=0, metadata=_FREE)
    """Steps between two checkpoints; 0: one at the end of every epoch."""
    every_seconds: float = field(default=0.0, metadata=_FREE)
    """Also save when this many seconds have passed since the last one; 0: never."""
    keep: int = field(default=3, metadata=_FREE)
    """Newest checkpoints to keep."""
    keep_best: bool = field(default=True, metadata=_FREE)
    """Also keep the one with the best accuracy."""
    write: Literal["rank0", "node"] = field(default="rank0", metadata=_FREE)
    """Who writes: rank 0, or one rank a node (for run directories on node-local disks)."""
    on_signal: bool = field(default=True, metadata=_FREE)
    """Save when a signal or a STOP file ends the run early."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "every_steps", "every_seconds")
        _at_least(self, 1, "keep")


@dataclass(kw_only=True, slots=True)
class Preempt:
    signals: list[str] = field(default_factory=lambda: ["TERM", "USR1", "USR2", "INT"], metadata=_FREE)
    """Signals that ask for a checkpoint and an end with exit code 75."""
    grace_seconds: float = field(default=60.0, metadata=_FREE)
    """Seconds between such a signal and the end: no rank waits longer for rank 0's checkpoint."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "grace_seconds")
        for name in self.signals:
            if name not in ("TERM", "USR1", "USR2", "INT", "HUP"):
                raise ValueError(f"signals may hold TERM, USR1, USR2, INT and HUP, got {name!r}")


@dataclass(kw_only=True, slots=True)
class Log:
    format: Literal["table", "json"] = field(default="table", metadata=_FREE)
    """`table` for people, `json` (one object a line) for clusters."""
    every: int = field(default=50, metadata=_FREE)
    """Steps between two loss readings (a reading waits for the device)."""
    score_every: int = field(default=0, metadata=_FREE)
    """Steps between two lines `step N | train_loss | test_loss | step time`, instead of a line an epoch; 0: the latter."""
    verbose: bool = field(default=False, metadata=_FREE)
    """Let all ranks speak, not only rank 0."""
    report: bool = field(default=True, metadata=_FREE)
    """Write report.html into the run directory at the end of every attempt."""
    tensorboard: bool = field(default=False, metadata=_FREE)
    """Write TensorBoard event files to `tensorboard` in the run directory; needs tensorboard."""
    wandb: str | None = field(default=None, metadata=_FREE)
    """Project at Weights & Biases to log to; needs wandb, and its key in the environment (or WANDB_MODE=offline)."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "every")
        _at_least(self, 0, "score_every")


@dataclass(kw_only=True, slots=True)
class Metrics:
    enabled: bool = field(default=True, metadata=_FREE)
    """Serve every rank's metrics for Prometheus, and write them to a textfile."""
    run: str | None = field(default=None, metadata=_FREE)
    """Label `run` of all metrics; null: the name of the run directory."""
    port: int | None = field(default=None, metadata=_FREE)
    """Port of local rank 0, the others follow; null: LOCKSTEP_METRICS_PORT, else 9470. 0: any free ports. A taken one is replaced."""
    address: str | None = field(default=None, metadata=_FREE)
    """Address to serve on; null: every one, IPv4 and IPv6."""
    stale_seconds: float = field(default=600.0, metadata=_FREE)
    """`/healthz` fails when the last step or evaluation batch is older."""
    textfile_seconds: float = field(default=10.0, metadata=_FREE)
    """Seconds between two writings of a rank's textfile; the last one is written in any case. 0: only that one."""
    textfiles: str | None = field(default=None, metadata=_FREE)
    """Folder of the textfiles, e.g. the node exporter's; null: `metrics` in the run directory."""
    file_sd: str | None = field(default=None, metadata=_FREE)
    """Folder in which each rank names itself to Prometheus' `file_sd_configs` while it runs; null: LOCKSTEP_FILE_SD, else none."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "textfile_seconds")
        _at_least(self, 1, "stale_seconds")
        if self.port is not None and not 0 <= self.port < 65536:
            raise ValueError(f"port must be in 0 … 65535, got {self.port}")


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
    epochs: int = field(default=10, metadata=_FREE)
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
    check_closeness: int = field(default=0, metadata=_FREE)
    """Steps between two checks that all ranks hold the same parameters; a difference ends the run and is named. 0: never."""
    deterministic: bool = False
    """Only deterministic kernels; an operation that has none is an error."""
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata=_FREE)
    """Where to train; `auto` takes a GPU where one is visible."""
    collective_timeout: float = field(default=600.0, metadata=_FREE)
    """Seconds after which a collective that some rank did not join ends the job."""
    threads: int = field(default=0, metadata=_FREE)
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
        _at_least(self, 1, "epochs", "accumulate")
        _at_least(self, 0, "threads", "seed", "check_closeness")
        _at_least(self, 1, "collective_timeout")
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


def _check_group(name: str, own: Any) -> None:
    known = ("lr", "momentum", "weight_decay", "schedule")
    if not isinstance(own, dict) or not set(own) <= set(known):
        raise ValueError(f"groups.{name} must hold some of {', '.join(known)}, got {own!r}")
    for key, value in own.items():
        if key != "schedule" and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9
        ):
            raise ValueError(f"groups.{name}.{key} must be a number of at least 0, got {value!r}")
    _check_schedule(f"groups.{name}.schedule", own.get("schedule", []))


def _check_schedule(name: str, points: Any) -> None:
    try:
        pairs = [(float(epoch), float(factor)) for epoch, factor in points]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must hold points [epoch, factor], got {points!r}") from None
    epochs = [epoch for epoch, _ in pairs]
    if any(b <= a for a, b in itertools.pairwise(epochs)):
        raise ValueError(f"{name} must have rising epochs, got {epochs}")


def _at_least(instance: Any, bound: float, *names: str) -> None:
    for name in names:
        if getattr(instance, name) < bound:
            raise ValueError(f"{name} must be at least {bound}, got {getattr(instance, name)}")
