"""The sections of the config tree. A field's docstring is what `python -m training settings` prints of it.

A field marked `FREE` may change between two starts of one run; all others are part of the run's identity.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

FREE = {"free": True}


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
        at_least(self, 0, "crop", "cutout", "brightness", "contrast")


@dataclass(kw_only=True, slots=True)
class Data:
    source: Literal["digits", "synthetic", "cifar10", "fashion_mnist", "classification"] = "digits"
    """Where the samples come from."""
    split: Literal["honest", "exercise"] = "honest"
    """`honest`: the source's own training and test samples. `exercise`: the first tenth is both, so nothing is held out."""
    root: str = field(default="data", metadata=FREE)
    """Folder of the downloaded data set; the shards are cached below it."""
    shards: str | None = field(default=None, metadata=FREE)
    """Folder with ready shards (`python -m training shard`); null: made once below `root`."""
    num_shards: int = 8
    """Files to cut the training set into when shards are made."""
    download: bool = field(default=True, metadata=FREE)
    """Download what is missing, where a network is there."""
    prepare_timeout: float = field(default=1800.0, metadata=FREE)
    """Seconds to wait for another process that prepares the same data."""
    verify: bool = field(default=True, metadata=FREE)
    """Check the sha256 of every shard that a rank opens."""
    shuffle: Literal["global", "shard", "none"] = "global"
    """`global`: one order over all samples, the same at every world size. `shard`: a rank keeps its own files. `none`: in order."""
    resident: Literal["auto", "always", "never"] = field(default="auto", metadata=FREE)
    """Keep the uint8 images on the device: where they fit in a quarter of its free memory, always, or never."""
    prefetch: int = field(default=2, metadata=FREE)
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
        at_least(self, 1, "num_shards", "prefetch")
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
        at_least(self, 1, "normalise_every")
        for name, own in self.groups.items():
            _check_group(name, own)
        if self.normalise_every != 1 and self.name != "muon":
            raise ValueError(f"normalise_every={self.normalise_every} has no use with {self.name}: it is muon's")
        at_least(self, 0, "lr", "momentum", "weight_decay", "reference_batch_size", "clip")
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
        at_least(self, 1, "every")
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
    every: int = field(default=1, metadata=FREE)
    """Epochs between two evaluations; the last epoch is always evaluated."""
    per_class: bool = field(default=False, metadata=FREE)
    """Print the accuracy of each class at the end (summary.json always has it)."""
    batch_size: int = field(default=512, metadata=FREE)
    """Images a rank evaluates at a time."""
    tta: Literal["none", "flip", "flip_shift"] = "none"
    """Test-time augmentation: `flip` averages the logits of an image and its mirror image; `flip_shift` does so for the
    image (weight 1/2) and for it moved by one pixel up and left, and down and right (1/4 each)."""
    tta_share: float = 1.0
    """Share of each batch's images, the least confident ones, that test-time augmentation looks at again."""

    def __post_init__(self) -> None:
        at_least(self, 1, "every", "batch_size")
        if not 0 < self.tta_share <= 1:
            raise ValueError(f"tta_share must be in (0, 1], got {self.tta_share}")


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    every_steps: int = field(default=0, metadata=FREE)
    """Steps between two checkpoints; 0: one at the end of every epoch."""
    every_seconds: float = field(default=0.0, metadata=FREE)
    """Also save when this many seconds have passed since the last one; 0: never."""
    keep: int = field(default=3, metadata=FREE)
    """Newest checkpoints to keep."""
    keep_best: bool = field(default=True, metadata=FREE)
    """Also keep the one with the best accuracy."""
    write: Literal["rank0", "node"] = field(default="rank0", metadata=FREE)
    """Who writes: rank 0, or one rank a node (for run directories on node-local disks)."""
    on_signal: bool = field(default=True, metadata=FREE)
    """Save when a signal or a STOP file ends the run early."""

    def __post_init__(self) -> None:
        at_least(self, 0, "every_steps", "every_seconds")
        at_least(self, 1, "keep")


@dataclass(kw_only=True, slots=True)
class Preempt:
    signals: list[str] = field(default_factory=lambda: ["TERM", "USR1", "USR2", "INT", "HUP"], metadata=FREE)
    """Signals that ask for a checkpoint and an end with exit code 75."""
    grace_seconds: float = field(default=60.0, metadata=FREE)
    """Seconds between such a signal and the end: no rank waits longer for rank 0's checkpoint."""

    def __post_init__(self) -> None:
        at_least(self, 1, "grace_seconds")
        for name in self.signals:
            if name not in ("TERM", "USR1", "USR2", "INT", "HUP"):
                raise ValueError(f"signals may hold TERM, USR1, USR2, INT and HUP, got {name!r}")


@dataclass(kw_only=True, slots=True)
class Log:
    format: Literal["table", "json"] = field(default="table", metadata=FREE)
    """`table` for people, `json` (one object a line) for clusters."""
    every: int = field(default=50, metadata=FREE)
    """Steps between two loss readings (a reading waits for the device)."""
    score_every: int = field(default=0, metadata=FREE)
    """Steps between two lines `step N | train_loss | test_loss | step time`, instead of a line an epoch; 0: the latter."""
    verbose: bool = field(default=False, metadata=FREE)
    """Let all ranks speak, not only rank 0."""
    report: bool = field(default=True, metadata=FREE)
    """Write report.html into the run directory at the end of every attempt."""
    tensorboard: bool = field(default=False, metadata=FREE)
    """Write TensorBoard event files to `tensorboard` in the run directory; needs tensorboard."""
    wandb: str | None = field(default=None, metadata=FREE)
    """Project at Weights & Biases to log to; needs wandb, and its key in the environment (or WANDB_MODE=offline)."""

    def __post_init__(self) -> None:
        at_least(self, 1, "every")
        at_least(self, 0, "score_every")


@dataclass(kw_only=True, slots=True)
class Metrics:
    enabled: bool = field(default=True, metadata=FREE)
    """Serve every rank's metrics for Prometheus, and write them to a textfile."""
    run: str | None = field(default=None, metadata=FREE)
    """Label `run` of all metrics; null: the name of the run directory."""
    port: int | None = field(default=None, metadata=FREE)
    """Port of local rank 0, the others follow; null: LOCKSTEP_METRICS_PORT, else 9470. 0: any free ports. A taken one is replaced."""
    address: str | None = field(default=None, metadata=FREE)
    """Address to serve on, `any` for every one, IPv4 and IPv6; null: LOCKSTEP_METRICS_ADDRESS (the images say `any`), else any on
    several nodes and under SLURM, and 127.0.0.1 on one machine."""
    stale_seconds: float = field(default=600.0, metadata=FREE)
    """`/healthz` fails when the last step or evaluation batch is older."""
    textfile_seconds: float = field(default=10.0, metadata=FREE)
    """Seconds between two writings of a rank's textfile; the last one is written in any case. 0: only that one."""
    textfiles: str | None = field(default=None, metadata=FREE)
    """Folder for a second copy of the textfiles, e.g. the node exporter's; the first is in the run directory."""
    file_sd: str | None = field(default=None, metadata=FREE)
    """Folder in which each rank names itself to Prometheus' `file_sd_configs` while it runs; null: LOCKSTEP_FILE_SD, else none."""

    def __post_init__(self) -> None:
        at_least(self, 0, "textfile_seconds")
        at_least(self, 1, "stale_seconds")
        if self.port is not None and not 0 <= self.port < 65536:
            raise ValueError(f"port must be in 0 … 65535, got {self.port}")


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


def at_least(instance: Any, bound: float, *names: str) -> None:
    for name in names:
        if getattr(instance, name) < bound:
            raise ValueError(f"{name} must be at least {bound}, got {getattr(instance, name)}")
