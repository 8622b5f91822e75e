"""Every strategy × {1, 2, 3 ranks} × {MLP, small conv net}, against one plain process. One gang a world size runs them all."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep.training import config, optim, sync
from lockstep.training.checkpoint.state import Cursor, TrainState, gather, scatter
from lockstep.training.contract import UserError
from lockstep.training.data.order import bounds
from lockstep.training.observe.clock import StepClock
from lockstep.training.optim import Muon
from lockstep.training.optim.ema import Ema
from lockstep.training.parallel.exchange import broadcast_tree, pack, unpack
from lockstep.training.parallel.world import World
from lockstep.training.resilience.closeness import ReplicasDiffer, check_parameter_closeness
from lockstep.training.sync.base import GradientSync, global_norm
from lockstep.training.sync.fsdp import MEAN_ON_CPU
from tests.events import events
from tests.nets import SmallConv
from tests.ranks import on_ranks

STEPS, HALF, BATCH = 10, 5, 25
Shapes = list[tuple[int, ...]]
Bytes = Callable[[Shapes, int, int], int]
"""(shapes of the float32 parameters, world size, step) → what a rank hands to collectives in that step."""


def _gradients_and_parameters(shapes: Shapes, size: int, step: int) -> int:
    """Gradients to their owners, parameters back."""
    return 2 * 4 * _elements(shapes)


def _padded(shapes: Shapes, size: int, step: int) -> int:
    """The same, with the first dimension filled up to a multiple of the world size."""
    return 2 * 4 * sum(-(-shape[0] // size) * size * math.prod(shape[1:]) for shape in shapes)


def _low_rank(shapes: Shapes, size: int, step: int) -> int:
    """Of rank 2 from step 3 on, where that halves a matrix at least."""
    if step < 3:
        return 4 * _elements(shapes)
    compressed = 0
    for shape in shapes:
        n, m = shape[0], math.prod(shape[1:])
        low = (n + m) * min(n, m, 2)
        compressed += 4 * (low if low * 2 < n * m else n * m)
    assert compressed < 4 * _elements(shapes)
    return compressed


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


@dataclass(frozen=True)
class Row:
    """What the contract expects of a case. `Row()` is a strategy that is exact, and sends after the backward pass."""

    error: float | None = None
    """Of a lossy strategy: the largest distance to the exact weights after `STEPS` steps, relative to the way they have
    gone (L2). None: each weight is within 1e-6."""
    sum_error: float | None = None
    """Of a lossy strategy that rounds: an element of one sum on w ranks is off by at most w · `sum_error` of the sum of the
    parts' magnitudes. None: not measured."""
    magnitudes: int = 40
    """The orders of magnitude within one gradient for which `sum_error` holds."""
    step_bytes: float | Bytes = 4
    """What a rank hands to collectives in a step: bytes for each element of the parameters, or a function."""
    sent_early: bool = False
    """Gradients are sent from autograd's hooks (`Reducer`), so a second pass that is not announced is refused."""
    unused: Literal["zero", "left out", "refused"] = "zero"
    """What a parameter that no rank used is: given a gradient of zero, left out of the step, or refused by name."""
    replicas: bool = True
    """Every rank holds all parameters."""
    clips: bool = True
    """All gradients are known before the step, so that they can be clipped."""
    ranks: bool = True
    """Works on more than one rank."""
    variants_only: bool = False
    """Trained with `_variants` alone."""
    options: dict[str, Any] = field(default_factory=dict)
    bucket_mb: float = 0.001
    """Small, so that there are several buckets."""


_POWERSGD = {"rank": 2, "start": 3}
ROWS: dict[str, Row] = {
    "ddp": Row(unused="refused"),
    "allreduce": Row(),
    "flat": Row(sent_early=True),
    "hooks": Row(sent_early=True),
    "horovod": Row(sent_early=True),
    "zero1": Row(sent_early=True, step_bytes=_gradients_and_parameters),
    "powersgd": Row(error=0.35, unused="refused", step_bytes=_low_rank, options=_POWERSGD),
    "bf16_compress": Row(error=0.01, sum_error=2**-8, sent_early=True, step_bytes=2),
    "fsdp": Row(replicas=False, step_bytes=_padded),
    "data_parallel": Row(ranks=False),
    "ddp, find_unused": Row(unused="left out", options={"find_unused": True}, bucket_mb=25),
    "hooks, overlapped": Row(sent_early=True, clips=False, options={"step": "overlapped"}, bucket_mb=25),
    "powersgd, find_unused": Row(
        error=0.35, unused="left out", variants_only=True, options={**_POWERSGD, "find_unused": True}, bucket_mb=25
    ),
}
"""One row for each strategy, under its name, and for each further case of one: `NAME, what is different`."""
SETTINGS: dict[str, config.Sync] = {
    name: config.Sync(name=name.partition(",")[0], bucket_mb=row.bucket_mb, options=row.options)  # type: ignore[arg-type]
    for name, row in ROWS.items()
}
CASES = {name: settings for name, settings in SETTINGS.items() if not ROWS[name].variants_only}
RANKLESS = {name for name, row in ROWS.items() if not row.ranks}
NON_FINITE = {"nan": math.nan, "infinity": math.inf}


def _chosen(only: str | None) -> list[str]:
    """The cases of that strategy, or that case; all where none is asked for."""
    return [name for name in ROWS if only in (None, name, name.partition(",")[0])]


ONLY = os.environ.get("LOCKSTEP_STRATEGY") or None
"""Train this strategy alone, while one writes it: LOCKSTEP_STRATEGY=flat pytest -k flat. Ranks do not have the variable: they are
told the names."""
CHOSEN = _chosen(ONLY)
TRAINED = [name for name in CHOSEN if MEAN_ON_CPU or name != "fsdp"]
"""Those that this torch can train on the CPU. The tests of the others skip (`_fsdp_on_this_torch`)."""
if not CHOSEN and ONLY not in sync.STRATEGIES:
    pytest.fail(f"LOCKSTEP_STRATEGY={ONLY} is no strategy: name one of {', '.join(sync.STRATEGIES)}", pytrace=False)
ORDER = (1, 3, 2)
FEW = 1
"""The step of `_variants` that has so few samples that ranks differ in their micro-batches."""
BEFORE: dict[int, tuple[int, ...]] = {1: (), 3: (1,), 2: (3,)}
"""World size → the one of the gang before it, whose checkpoints it loads."""


class Mlp(nn.Module):
    """Four layers; the third dimension of the first does not divide by 2 or 3."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [24, 31, 16, 8, 10]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {"mlp": (Mlp, (24,)), "conv": (SmallConv, (3, 8, 8))}


class Spare(Mlp):
    """`nobody` gets no gradient at all, `somebody` only from samples that are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.nobody = nn.Linear(5, 3)
        self.somebody = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        marked = x[:, 0] > 100
        if bool(marked.any()):
            out = out + self.somebody(x) * marked[:, None] / 100
        return out


def _few(size: int) -> int:
    """One sample on rank 0, two on the others."""
    return max(2 * size - 1, 2)


def _batch(step: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 + step)
    return torch.randn(BATCH, *shape, generator=draw), torch.randint(10, (BATCH,), generator=draw)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.005},
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.05, momentum=0.9)


def _ours(parameters: Any) -> torch.optim.Optimizer:
    """The same as `_sgd` builds, from the settings of a run."""
    settings = config.Optim(name="sgd", lr=0.05, momentum=0.9, weight_decay=0.01, bias_lr_factor=2.0)
    return optim.build(parameters, config.Config(global_batch_size=BATCH, optim=settings), BATCH)


def _fresh(net: str, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return NETS[net][0]()


@functools.cache
def _reference(
    build: Callable[[], nn.Module], shape: tuple[int, ...], steps: int, clip: float = 0.0, mark: int = 0,
    fill: bool = False, few: tuple[int, int] = (-1, 0),
) -> nn.Module:  # fmt: skip
    """Plain PyTorch in one process. With `fill`, a gradient that is not there counts as zero.

    `few` is a step, and the number of samples that it has instead of `BATCH`.
    """
    torch.manual_seed(1)
    model = build()
    optimizer = _sgd(model.parameters())
    for step in range(steps):
        x, y = _batch(step, shape)
        if step == few[0]:
            x, y = x[: few[1]], y[: few[1]]
        x[:mark, 0] = 101
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters() if fill else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


@functools.cache
def _config() -> config.Config:
    return config.load("smoke", ["nonfinite=ignore"])


class Run:
    """What a user's own loop over the protocol does."""

    def __init__(
        self, settings: config.Sync, model: nn.Module, world: World, shape: tuple[int, ...], mark: int = 0,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> None:  # fmt: skip
        self.world, self.shape, self.mark, self.layout = world, shape, mark, layout
        model.to(memory_format=layout)
        self.sync: GradientSync = sync.build(settings)
        self.sync.check(_config(), world)
        self.network = self.sync.wrap(model, world, torch.zeros(2, *shape).contiguous(memory_format=layout))
        self.optimizer = self.sync.make_optimizer(_ours)
        ema = Ema(model, 0.9, 1, self.sync.duplicate())
        self.state = TrainState(
            world, model, self.optimizer, self.sync, ema, Cursor(), StepClock(), torch.zeros(2, dtype=torch.float64), {}
        )

    def step(
        self, number: int, pieces: int = 1, clip: float = 0.0, samples: int = BATCH, forget: bool = True,
        announce: bool = True, spoil: float | None = None,
    ) -> None:  # fmt: skip
        """With `forget` unset the optimizer is told to forget the gradients, with `announce` unset `accumulate` is left out.

        `spoil` replaces the gradient of this rank's first logit.
        """
        x, y = _batch(number, self.shape)
        x[: self.mark, 0] = 101
        low, high = bounds(samples, self.world.rank, self.world.size)
        (self.sync if forget else self.optimizer).zero_grad()
        cuts = [low + bounds(high - low, piece, pieces)[0] for piece in range(pieces)] + [high]
        parts = [(a, b) for a, b in itertools.pairwise(cuts) if a < b]
        for a, b in parts:
            with self.sync.accumulate() if announce and (a, b) != parts[-1] else contextlib.nullcontext():
                part = x[a:b].contiguous(memory_format=self.layout)
                output = self.network(part)
                if spoil is not None:
                    output.register_hook(functools.partial(_spoilt, value=spoil))
                loss = F.cross_entropy(output, y[a:b], reduction="sum")
                if pieces == 1 and number % 2 and forget:
                    self.sync.zero_grad()  # many loops do it here
                (loss * (self.sync.loss_factor / samples)).backward()
        self.sync.synchronize()
        if clip:
            self.sync.clip(clip)
        self.optimizer.step()
        self.state.ema.update(number + 1)  # type: ignore[union-attr]

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.sync.full_module(self.state.model).named_parameters()}


def _spoilt(grad: torch.Tensor, value: float) -> torch.Tensor:
    grad = grad.clone()
    grad[0, 0] = value
    return grad


def _distance(found: dict[str, torch.Tensor], model: nn.Module) -> float:
    """Largest element of the difference."""
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).detach().abs().max()) for name in found)


def _relative(found: dict[str, torch.Tensor], model: nn.Module, start: nn.Module) -> float:
    off = gone = 0.0
    begun = dict(start.named_parameters())
    for name, expected in model.named_parameters():
        off += float((found[name] - expected).detach().square().sum())
        gone += float((begun[name] - expected).detach().square().sum())
    return math.sqrt(off / gone)


def _case(world: World, name: str, net: str, folder: Path) -> dict[str, Any]:
    shape = NETS[net][1]
    run = Run(CASES[name], _fresh(net, seed=1 + 7 * world.rank), world, shape)
    file = folder / f"{name}-{net}-{world.size}"
    for number in range(STEPS):
        if number == HALF:
            gathered = gather(run.state)
            if gathered is not None:
                file.write_bytes(pack(gathered).numpy().tobytes())
            half = broadcast_tree(unpack(pack(gathered)) if gathered is not None else None, world)
        run.step(number)
    found: dict[str, Any] = {"weights": run.weights(), "bytes": run.sync.bytes_sent}
    found["average"] = {n: p.clone() for n, p in run.sync.full_module(run.state.ema.average).named_parameters()}  # type: ignore[union-attr]

    again = Run(CASES[name], _fresh(net, seed=99 + world.rank), world, shape)
    scatter(half, again.state)
    for number in range(HALF, STEPS):
        again.step(number)
    found["resumed"] = again.weights()
    found["resumed average"] = dict(again.sync.full_module(again.state.ema.average).named_parameters())  # type: ignore[union-attr]

    for other in BEFORE[world.size]:
        earlier = folder / f"{name}-{net}-{other}"
        if earlier.exists():
            moved = Run(CASES[name], _fresh(net, seed=99 + world.rank), world, shape)
            scatter(unpack(torch.frombuffer(bytearray(earlier.read_bytes()), dtype=torch.uint8)), moved.state)
            for number in range(HALF, STEPS):
                moved.step(number)
            found[f"moved from {other}"] = moved.weights()

    check_parameter_closeness(run.state.model)
    found["perturbed"] = None
    if world.size > 1 and run.sync.replicas:
        last, parameter = list(run.state.model.named_parameters())[-1]
        with torch.no_grad():
            parameter.view(-1)[0] += 1e-6 if world.rank == world.size - 1 else 0.0
        try:
            check_parameter_closeness(run.state.model)
        except ReplicasDiffer as error:
            found["perturbed"] = (last, str(error))
    return found


def _variants(world: World, name: str) -> dict[str, Any]:
    """Accumulation, clipping, and parameters without a gradient."""
    found: dict[str, Any] = {}
    settings = SETTINGS[name]
    shape = NETS["conv"][1]
    run = Run(settings, _fresh("conv"), world, shape)
    for number in range(4):  # in one step rank 0 has fewer samples, and so passes, than the others
        run.step(number, pieces=3, samples=_few(world.size) if number == FEW else BATCH)
    found["micro-batches"] = run.weights()
    run = Run(settings, _fresh("conv"), world, shape)
    for number in range(4):
        run.step(number, forget=False)
    found["optimizer.zero_grad"] = run.weights()
    run = Run(settings, _fresh("conv"), world, shape, layout=torch.channels_last)
    for number in range(4):
        run.step(number)
    found["channels_last"] = run.weights()
    run = Run(settings, _fresh("conv"), world, shape)
    try:
        for number in range(4):
            run.step(number, pieces=2, announce=False)
        found["two passes"] = run.weights()
    except (UserError, AssertionError) as error:
        found["two passes"] = f"{type(error).__name__}: {error}"
    if ROWS[name].clips:
        run = Run(settings, _fresh("conv"), world, shape)
        for number in range(4):
            run.step(number, clip=0.5)
        found["clipped"] = run.weights()
    found["sparse"] = _sparse(world, settings)
    for kind, value in NON_FINITE.items():
        run = Run(settings, _fresh("conv"), world, shape)
        last = world.rank == world.size - 1
        for number in range(4):  # in the last step powersgd compresses
            run.step(number, spoil=value if number == 3 and last else None)
        finite = [parameter for parameter, weights in run.weights().items() if bool(weights.isfinite().all())]
        found[kind] = (finite, float(run.sync.grad_norm()) if ROWS[name].clips else math.nan)
    for mark in (0, 2) if world.size == 2 else (2,):
        torch.manual_seed(1)
        try:  # marked samples are rank 0's: with mark=2 only that rank has a gradient of `somebody`
            run = Run(settings, Spare(), world, (24,), mark)
            for number in range(4):
                run.step(number)
            found[f"unused, {mark} marked"] = run.weights()
        except UserError as error:
            found[f"unused, {mark} marked"] = str(error)
    return found


def _embedded() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(12, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))


def _words(rank: int) -> torch.Tensor:
    """One sample of two words, the second of which all ranks have."""
    return torch.tensor([[rank, 3]])


def _plain_step(parameters: Any) -> torch.optim.Optimizer:
    """Takes sparse gradients."""
    return torch.optim.SGD(parameters, lr=0.1)


def _sparse(world: World, settings: config.Sync) -> dict[str, torch.Tensor] | str:
    """The weights after one step with a sparse gradient, or what was said against it."""
    strategy, model = sync.build(settings), _embedded()
    try:
        network = strategy.wrap(model, world, torch.zeros(1, 2, dtype=torch.long))
        optimizer = strategy.make_optimizer(_plain_step)
        (network(_words(world.rank)).sum() * strategy.loss_factor).backward()
        strategy.synchronize()
        optimizer.step()
    except UserError as error:
        return str(error)
    return {name: p.detach().clone() for name, p in strategy.full_module(model).named_parameters()}


def _lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


def _muon(parameters: Any) -> torch.optim.Optimizer:
    return Muon(parameters, lr=0.01, normalise_every=4)


def _built(name: str, world: World, build: Any = _sgd, change: Any = lambda model: model) -> GradientSync:
    strategy = sync.build(CASES[name])
    strategy.wrap(change(_fresh("conv")), world, torch.zeros(2, *NETS["conv"][1]))
    strategy.make_optimizer(build)
    return strategy


MISUSED: dict[str, tuple[Callable[[World], object], str]] = {
    "data_parallel among ranks": (lambda world: _built("data_parallel", world), "works in one process, and was started on 2"),
    "fsdp, compiled": (lambda world: _built("fsdp", world, change=torch.compile), "compile=false"),
    "overlapped steps and clipping": (lambda world: _built("hooks, overlapped", world).clip(1.0), "optim.clip=0"),
    "overlapped steps and the norm": (lambda world: _built("hooks, overlapped", world).grad_norm(), "nonfinite=ignore"),
    "overlapped steps that are counted": (lambda world: _built("hooks, overlapped", world, _muon), "normalise_every=1"),
    "overlapped steps and LBFGS": (lambda world: _built("hooks, overlapped", world, _lbfgs), "LBFGS combines them"),
    "zero1 and LBFGS": (lambda world: _built("zero1", world, _lbfgs), "LBFGS combines them"),
}  # fmt: skip
"""What a script of one's own, which has no config to check, does wrong on two ranks."""


def _misused(world: World) -> dict[str, str]:
    found = {}
    for name, (action, _) in MISUSED.items():
        try:
            action(world)
        except UserError as error:
            found[name] = str(error)
    return found


def _part(rank: int, magnitudes: int) -> torch.Tensor:
    """Gradients of so many orders of magnitude."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(4096, generator=draw) * torch.logspace(-magnitudes / 2, magnitudes / 2, 4096)


def _one_sum(world: World, name: str) -> torch.Tensor:
    """What the strategy makes of the ranks' parts in one step."""
    strategy = sync.build(SETTINGS[name])
    model = nn.Linear(64, 64, bias=False)
    network = strategy.wrap(model, world, torch.zeros(1, 64))
    # Of the unit matrix the output is the weights, transposed.
    network(torch.eye(64)).backward(_part(world.rank, ROWS[name].magnitudes).view(64, 64).T * strategy.loss_factor)
    strategy.synchronize()
    return model.weight.grad.reshape(-1)  # type: ignore[union-attr]


def _whole_run(world: World, name: str, base: list[str], folder: Path) -> dict[str, Any]:
    """One epoch more of a run that the gangs before have begun."""
    from lockstep.training.run import recipe

    settings = CASES[name]
    options = "{" + ", ".join(f"{key}: {str(value).lower()}" for key, value in settings.options.items()) + "}"
    words = [*base, f"sync.name={settings.name}", f"sync.options={options}", f"epochs={ORDER.index(world.size) + 1}"]
    words += ["optim.clip=3"] if ROWS[name].clips else ["nonfinite=ignore"]
    run, norms = folder / f"run-{name}", 0

    def counted(*args: Any) -> torch.Tensor:
        nonlocal norms
        norms += 1
        return global_norm(*args)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("zero1", "fsdp"):
            patch.setattr(f"lockstep.training.sync.{module}.global_norm", counted)
        code = recipe.train(config.load("smoke", words), world, run)
    return {"code": code, "epochs": events(run, "epoch"), "norms": norms}


def _all(world: World, names: list[str], folder: str, base: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        if name in RANKLESS and world.size > 1:
            try:
                Run(CASES[name], _fresh("mlp"), world, (24,))
            except UserError as error:
                found[name] = str(error)
            continue
        found[f"{name}, variants"] = _variants(world, name)
        if name in CASES:
            for net in NETS:
                found[f"{name}, {net}"] = _case(world, name, net, Path(folder))
            found[f"{name}, run"] = _whole_run(world, name, base, Path(folder))
        if ROWS[name].sum_error is not None:
            found[f"{name}, one sum"] = _one_sum(world, name)
        dist.barrier()
    if "allreduce" not in names:
        found["allreduce, run"] = _whole_run(world, "allreduce", base, Path(folder))
    found["misused"] = _misused(world) if world.size == 2 else {}
    return found


@pytest.fixture(scope="module")
def by_size(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> dict[int, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("states"))
    base = [
        f"data.root={data_root}", "data.source=synthetic", "data.options={n: 192, n_test: 50, size: 8, noise: 1.5}",
        "data.num_shards=3", "augment.crop=1", "augment.flip=random", "model=tests.nets:SmallConv", "model_options={}",
        "global_batch_size=24", "uneven=drop", "precision=float64", "ema.decay=0.9", "ema.every=3", "accumulate=2",
        "loss.reduction=mean", "optim.name=adam", "lr=0.002", "bias_lr_factor=1", "weight_decay=0", "schedule=[]",
        "check_closeness=1",
    ]  # fmt: skip
    found = {size: on_ranks(_all, size, TRAINED, folder, base, timeout=300) for size in ORDER}
    runs = {key.removesuffix(", run") for key in found[1][0] if key.endswith(", run")}
    assert runs == {name for name in TRAINED if name in CASES} | {"allreduce"}, "the ranks trained other strategies"
    return found


RANKED = [name for name in CHOSEN if name in CASES and name not in RANKLESS]
LOSSLESS = [name for name in RANKED if ROWS[name].error is None]
LOSSY = [name for name in RANKED if ROWS[name].error is not None]
VARIED = [name for name in CHOSEN if name not in RANKLESS]


@pytest.mark.parametrize("name", [name for name in sync.STRATEGIES if ONLY in (None, name)])
def test_every_strategy_has_a_row(name: str) -> None:
    if name not in ROWS:
        pytest.fail(
            f"sync.name={name} has no row in ROWS of {Path(__file__).name}: add "
            f'`"{name}": Row()`, with `error` and `step_bytes` for a lossy strategy, `sent_early=True` for one with a Reducer '
            "(the docstrings of Row say what else there is)",
            pytrace=False,
        )


@pytest.fixture(scope="module")
def trained() -> dict[str, nn.Module]:
    return {net: _reference(build, shape, STEPS) for net, (build, shape) in NETS.items()}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_ten_steps_give_the_parameters_of_one_plain_process(by_size: Any, trained: Any, name: str, net: str) -> None:
    for size in (1, 2, 3):
        for rank in by_size[size]:
            assert _distance(rank[f"{name}, {net}"]["weights"], trained[net]) < 1e-6
    assert _relative(by_size[1][0][f"{name}, {net}"]["weights"], _fresh(net), trained[net]) > 0.1, "nothing was trained"


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_strategy_stays_within_its_bound_and_all_ranks_agree(
    by_size: Any, trained: Any, name: str, net: str
) -> None:
    for size in (2, 3):
        ranks = by_size[size]
        off = _relative(ranks[0][f"{name}, {net}"]["weights"], trained[net], _fresh(net))
        assert 1e-6 < off < _bound(name), off
        for rank in ranks[1:]:
            for parameter, value in rank[f"{name}, {net}"]["weights"].items():
                assert torch.equal(value, ranks[0][f"{name}, {net}"]["weights"][parameter])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [name for name in CHOSEN if ROWS[name].sum_error is not None])
def test_one_sum_is_within_its_bound_of_rounding(by_size: Any, name: str, size: int) -> None:
    bound = ROWS[name].sum_error
    assert bound is not None
    parts = [_part(rank, ROWS[name].magnitudes).double() for rank in range(size)]
    scale = torch.stack(parts).abs().sum(0)
    for rank in by_size[size]:
        off = (rank[f"{name}, one sum"].double() - sum(parts)).abs() / scale
        assert bound / 4 < float(off.max()) <= size * bound


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", [name for name in CHOSEN if name in CASES])
def test_a_checkpoint_round_trip_is_bit_identical(by_size: Any, name: str, net: str) -> None:
    for size in (1, 2, 3) if name not in RANKLESS else (1,):
        for rank in by_size[size]:
            found = rank[f"{name}, {net}"]
            for after in ("weights", "average"):
                resumed = found["resumed" if after == "weights" else "resumed average"]
                for parameter, value in found[after].items():
                    assert torch.equal(value, resumed[parameter]), (size, after, parameter)


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", RANKED)
def test_a_checkpoint_loads_at_another_world_size(by_size: Any, trained: Any, name: str, net: str) -> None:
    for saved, size in ((1, 3), (3, 2)):
        for rank in by_size[size]:
            moved = rank[f"{name}, {net}"][f"moved from {saved}"]
            if name in LOSSY:
                assert _relative(moved, trained[net], _fresh(net)) < _bound(name)
            else:
                assert _distance(moved, trained[net]) < 1e-6


def _expected_bytes(name: str, net: str, size: int) -> int:
    """Of `STEPS` steps, reckoned from the shapes alone."""
    shapes, each = [tuple(p.shape) for p in NETS[net][0]().parameters()], ROWS[name].step_bytes
    if size == 1:
        return 0
    if callable(each):
        return sum(each(shapes, size, step) for step in range(STEPS))
    return int(STEPS * each * _elements(shapes))


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", RANKED)
def test_bytes_are_counted(by_size: Any, name: str, net: str) -> None:
    for size in (1, 2, 3):
        for rank in by_size[size]:
            assert rank[f"{name}, {net}"]["bytes"] == _expected_bytes(name, net, size)


def _calls_from_hook_to_collective(world: World, strategies: list[str]) -> dict[str, set[tuple[str, ...]]]:
    """By strategy: the functions between autograd's hook and the collective, for every collective of a backward pass."""
    found: dict[str, set[tuple[str, ...]]] = {name: set() for name in strategies}
    collectives = {"all_reduce": dist.all_reduce, "reduce": dist.reduce}

    def spy(name: str, collective: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            names = [frame.name for frame in traceback.extract_stack()[:-1]]
            if "hook" in names:
                found[name].add(tuple(names[names.index("hook") + 1 :]))
            return collective(*args, **kwargs)

        return called

    for name in strategies:
        run = Run(CASES[name], _fresh("mlp"), world, NETS["mlp"][1])
        with pytest.MonkeyPatch.context() as patch:
            for collective, original in collectives.items():
                patch.setattr(dist, collective, spy(name, original))
            run.step(0)
    return found


def test_at_most_three_calls_lead_from_autograds_hook_to_the_collective() -> None:
    early = {("on_gradient", "send")}
    names = [name for name in RANKED if name in TRAINED]
    for found in on_ranks(_calls_from_hook_to_collective, 2, names):
        assert found == {name: early if ROWS[name].sent_early else set() for name in names}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", [name for name in RANKED if ROWS[name].replicas])
def test_the_closeness_check_names_the_parameter_that_one_rank_has_changed(by_size: Any, name: str, net: str) -> None:
    for size in (2, 3):
        for rank in by_size[size]:
            last, message = rank[f"{name}, {net}"]["perturbed"]
            assert last in message and f"rank {size - 1}" in message, message


def _bound(name: str) -> float:
    bound = ROWS[name].error
    assert bound is not None, f"{name} is exact"
    return bound


def _check(name: str, size: int, found: dict[str, torch.Tensor], expected: nn.Module, start: nn.Module) -> None:
    if ROWS[name].error is not None:
        off = _relative(found, expected, start)
        assert off < _bound(name), off
        assert off > 1e-6 or size == 1, "nothing was compressed"
    else:
        assert _distance(found, expected) < 1e-6


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        (name, variant)
        for name in VARIED
        for variant in ("micro-batches", "clipped", "optimizer.zero_grad", "channels_last")
        if ROWS[name].clips or variant != "clipped"
    ],  # refused, see below
)
def test_micro_batches_clipping_and_layout(by_size: Any, name: str, variant: str) -> None:
    build, shape = NETS["conv"]
    for size in (1, 2, 3):
        few = (FEW, _few(size)) if variant == "micro-batches" else (-1, 0)
        expected = _reference(build, shape, 4, clip=0.5 if variant == "clipped" else 0.0, few=few)
        for rank in by_size[size]:
            _check(name, size, rank[f"{name}, variants"][variant], expected, _fresh("conv"))


@pytest.mark.parametrize("name", VARIED)
def test_two_backward_passes_that_are_not_announced_are_summed_or_refused(by_size: Any, name: str) -> None:
    expected = _reference(*NETS["conv"], 4)
    for size in (1, 2, 3):
        for rank in by_size[size]:
            found = rank[f"{name}, variants"]["two passes"]
            if ROWS[name].sent_early:
                assert found.startswith("SentAlready: head.bias got a gradient in more than 1 backward passes"), found
                assert "inside accumulate()" in found and "\n" not in found
            else:
                assert isinstance(found, dict), found
                _check(name, size, found, expected, _fresh("conv"))


@pytest.mark.parametrize("kind", NON_FINITE)
@pytest.mark.parametrize("name", VARIED)
def test_what_is_not_finite_on_one_rank_reaches_all(by_size: Any, name: str, kind: str) -> None:
    for size in (1, 2, 3):
        for rank in by_size[size]:
            finite, norm = rank[f"{name}, variants"][kind]
            assert not finite, f"{finite}: the update did not see it"
            assert not math.isfinite(norm)


@pytest.mark.parametrize("name", VARIED)
def test_sparse_gradients_are_summed_or_refused_by_name(by_size: Any, name: str) -> None:
    for size in (1, 2, 3):
        expected = _embedded()
        optimizer = _plain_step(expected.parameters())
        for rank in range(size):
            expected(_words(rank)).sum().backward()
        optimizer.step()
        for each in by_size[size]:
            found = each[f"{name}, variants"]["sparse"]
            if isinstance(found, str):
                assert found.startswith("0.weight has a sparse gradient") and "\n" not in found
            elif ROWS[name].error is None:
                assert _distance(found, expected) < 1e-6
            else:
                assert _relative(found, expected, _embedded()) < _bound(name)


@pytest.mark.parametrize("name", VARIED)
def test_parameters_without_a_gradient_on_all_or_some_ranks(by_size: Any, name: str) -> None:
    torch.manual_seed(1)
    start = Spare()
    for size, mark in ((1, 2), (2, 0), (2, 2), (3, 2)):
        expected = _reference(Spare, (24,), 4, mark=mark, fill=ROWS[name].unused != "left out")
        for rank in by_size[size]:
            found = rank[f"{name}, variants"][f"unused, {mark} marked"]
            if ROWS[name].unused == "refused":
                assert "nobody" in found and "find_unused: true" in found and "\n" not in found
            else:
                _check(name, size, found, expected, start)


@pytest.mark.parametrize("name", RANKED)
def test_a_run_goes_on_at_another_world_size_with_evaluation_average_and_adam(by_size: Any, name: str) -> None:
    """One epoch on each of 1, 3 and 2 ranks, resumed from the checkpoint before; scored as by `allreduce`."""
    found, plain = (by_size[ORDER[-1]][0][f"{which}, run"] for which in (name, "allreduce"))
    assert found["code"] == 0 and [epoch["epoch"] for epoch in found["epochs"]] == [1, 2, 3]
    for own, expected in zip(found["epochs"], plain["epochs"]):
        close = 1e-9 if name in LOSSLESS and ROWS[name].clips else 0.05  # the plain run clips
        assert own["test_loss"] == pytest.approx(expected["test_loss"], rel=close)
        assert own["train_loss"] == pytest.approx(expected["train_loss"], rel=close)
    assert found["epochs"][-1]["train_loss"] < found["epochs"][0]["train_loss"]
    # One collective a step: the norm that is looked at is the one that is clipped with.
    steps = found["epochs"][-1]["step"] - found["epochs"][-2]["step"]
    assert found["norms"] == (steps if name in ("zero1", "fsdp") else 0)


@pytest.mark.parametrize("name", [name for name in CHOSEN if name in RANKLESS])
def test_a_strategy_of_one_process_has_one_rank_only(by_size: Any, trained: Any, name: str) -> None:
    for net in NETS:
        assert _distance(by_size[1][0][f"{name}, {net}"]["weights"], trained[net]) < 1e-6
    for size in (2, 3):
        for rank in by_size[size]:
            assert f"sync.name={name} works in one process" in rank[name]


REFUSED: dict[str, tuple[config.Sync, list[str], str]] = {
    "an unknown option": (config.Sync(name="powersgd", options={"rnk": 1}), [], "did you mean 'rank'"),
    "an option of another strategy": (config.Sync(name="flat", options={"rank": 1}), [], "sync.options.rank"),
    "an ill-typed option": (config.Sync(name="hooks", options={"step": 3}), [], "after | overlapped"),
    "a start before the warm-up": (config.Sync(name="powersgd", options={"start": 1}), [], "start must be at least 2"),
    "overlapped steps and clipping": (
        config.Sync(name="hooks", options={"step": "overlapped"}), ["optim.clip=1", "nonfinite=ignore"], "optim.clip=0",
    ),
    "overlapped steps and the check for NaN": (
        config.Sync(name="hooks", options={"step": "overlapped"}), [], "nonfinite=ignore",
    ),
    "overlapped steps and Muon that counts them": (
        config.Sync(name="hooks", options={"step": "overlapped"}),
        ["nonfinite=ignore", "optim.clip=0", "optim.name=muon", "optim.normalise_every=2"], "optim.normalise_every=1",
    ),
    "fsdp and compile": (config.Sync(name="fsdp"), ["compile=true"], "compile=false"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_strategy_cannot_do_is_refused_by_name(case: str) -> None:
    settings, assignments, message = REFUSED[case]
    with pytest.raises(UserError) as caught:
        sync.build(settings).check(config.load("smoke", assignments), World(size=2))
    assert message in str(caught.value) and settings.name in str(caught.value) and "\n" not in str(caught.value)


def test_a_torch_that_takes_the_sum_for_the_mean_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.sync.fsdp.MEAN_ON_CPU", False)
    with pytest.raises(
        UserError, match="sync.name=fsdp gets wrong gradients from torch .* install torch 2.9"
    ) as caught:
        sync.build(config.Sync(name="fsdp")).check(config.load("smoke", []), World(size=2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", MISUSED)
def test_what_a_script_of_ones_own_cannot_do_is_refused_by_name_on_every_rank(by_size: Any, case: str) -> None:
    for rank in by_size[2]:
        message = rank["misused"].get(case, "went through")
        assert message.startswith("sync.name=") and MISUSED[case][1] in message and "\n" not in message, message
