"""Every strategy on 1, 2 and 3 ranks against one plain process. One gang a world size runs them all."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep.training.parallel.world import World
from tests import product
from tests.product import UserError
from tests.ranks import on_ranks, training

pytestmark = pytest.mark.promise("strategies")

STEPS, HALF, BATCH = 10, 5, 25
Shapes = list[tuple[int, ...]]
Tensors = dict[str, torch.Tensor]
Bytes = Callable[[Shapes, int, int], int]
"""(shapes of the float32 parameters, world size, step) → what a rank hands to collectives in that step."""


def _gradients_and_parameters(shapes: Shapes, size: int, step: int) -> int:
    """Gradients to their owners, parameters back."""
    return 2 * 4 * _elements(shapes)


def _by_blocks(shapes: Shapes, size: int, step: int) -> int:
    """Gradients to their owners, parameters back, with the first dimension filled up to a multiple of the world size. The two
    matrices of `Net.layers` are gathered once more, for the backward pass."""
    padded = [4 * -(-shape[0] // size) * size * math.prod(shape[1:]) for shape in shapes]
    return 2 * sum(padded) + sum(padded[2:4])


def _low_rank(shapes: Shapes, size: int, step: int) -> int:
    """Rank 2 from step 3 on, for each matrix that this at least halves."""
    if step < 3:
        return 4 * _elements(shapes)
    compressed = 0
    for shape in shapes:
        n, m = shape[0], math.prod(shape[1:])
        low = (n + m) * min(n, m, 2)
        compressed += 4 * (low if low * 2 < n * m else n * m)
    assert compressed < 4 * _elements(shapes)
    return compressed


def _exact(shapes: Shapes, size: int, step: int) -> int:
    """One tree node to its owners and the sums back, with a number a parameter, padded to a multiple of the world size."""
    return 2 * 4 * -(-(_elements(shapes) + len(shapes)) // size) * size


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


@dataclass(frozen=True)
class Row:
    """The contract's expectations of a case. `Row()` is an exact strategy that sends after the backward pass."""

    error: float | None = None
    """Lossy strategies: largest distance to the exact weights after `STEPS` steps, relative to their distance from the
    start (L2). None: each weight is within 1e-6."""
    sum_error: float | None = None
    """Error of a lossy strategy that rounds. An element of one sum on w ranks is off by at most w · `sum_error` of the sum of the
    parts' magnitudes. That holds over 40 orders of magnitude. None: not measured."""
    step_bytes: float | Bytes = 4
    """Bytes that a rank hands to collectives in a step, for each element of the parameters, or a function."""
    sent_early: bool = False
    """Gradients are sent from autograd's hooks (`Reducer`), so a second pass that is not announced is refused."""
    unused: Literal["zero", "left out", "refused"] = "left out"
    """A parameter that no rank used gets a zero gradient, is left out of the step, or is refused by name."""
    unfreezes: bool = True
    """A parameter may begin to train later. Else it is refused by name."""
    ranks: bool = True
    """Works on more than one rank."""
    variants_only: bool = False
    """Trained with `_variants` alone."""
    options: dict[str, Any] = field(default_factory=dict)
    bucket_mb: float = 0.001
    """Small, so that there are several buckets."""


_POWERSGD = {"rank": 2, "start": 3}
ROWS: dict[str, Row] = {
    "ddp": Row(unused="refused", unfreezes=False),
    product.ALLREDUCE: Row(),
    "flat": Row(sent_early=True),
    product.HOOKS: Row(sent_early=True),
    product.HOROVOD: Row(sent_early=True),
    "zero1": Row(sent_early=True, step_bytes=_gradients_and_parameters),
    product.POWERSGD: Row(error=0.35, unused="refused", unfreezes=False, step_bytes=_low_rank, options=_POWERSGD),
    "bf16_compress": Row(error=0.01, sum_error=2**-8, sent_early=True, step_bytes=2),
    "exact": Row(step_bytes=_exact),
    product.FSDP: Row(unused="zero", step_bytes=_by_blocks),
    product.DATA_PARALLEL: Row(ranks=False),
    "ddp, find_unused": Row(unfreezes=False, variants_only=True, options={"find_unused": True}, bucket_mb=25),
    f"{product.POWERSGD}, find_unused": Row(
        error=0.35, unfreezes=False, variants_only=True, options={**_POWERSGD, "find_unused": True}, bucket_mb=25
    ),
}
"""One row for each strategy, under its name, and for each further case: `NAME, difference`."""
CASES = {name for name, row in ROWS.items() if not row.variants_only}
RANKLESS = {name for name, row in ROWS.items() if not row.ranks}
ONLY = os.environ.get("LOCKSTEP_STRATEGY") or None
"""Train this strategy alone, while one writes it: LOCKSTEP_STRATEGY=flat pytest -k flat. Ranks do not have the variable: they get
the names."""
CHOSEN = [name for name in ROWS if ONLY in (None, name, name.partition(",")[0])]
if not CHOSEN and ONLY not in product.strategies():
    pytest.fail(f"LOCKSTEP_STRATEGY={ONLY} is no strategy: name one of {product.strategies()}", pytrace=False)
RANKED = [name for name in CHOSEN if name in CASES and name not in RANKLESS]
VARIED = [name for name in CHOSEN if name not in RANKLESS]
SIZES = (1, 3, 2)
"""In this order: each size loads the checkpoints of the size before."""
FEW = 1
"""The step of `_variants` that has so few samples that ranks differ in their micro-batches."""
SHAPE = (3, 8, 8)


class Net(nn.Module):
    """A convolution, and matrices without a bias. 31 and 7 divide by neither 2 nor 3."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, padding=1)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in ((28, 31), (31, 16)))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.avg_pool2d(F.relu(self.conv(x)), 4).flatten(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Spare(Net):
    """`nobody` gets no gradient at all, `somebody` only from samples that are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.nobody, self.somebody = nn.Linear(5, 3), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, marked = super().forward(x), x[:, 0, 0, 0] > 100
        if bool(marked.any()):
            out = out + self.somebody(x.flatten(1)[:, :24]) * marked[:, None] / 100
        return out


def _few(size: int) -> int:
    """One sample on rank 0, two on the others."""
    return max(2 * size - 1, 2)


def _batch(step: int, marked: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 + step)
    x, y = torch.randn(BATCH, *SHAPE, generator=draw), torch.randint(10, (BATCH,), generator=draw)
    x[:marked, 0, 0, 0] = 101
    return x, y


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.005, "lr": 0.1},
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.05, momentum=0.9)


def _fresh(build: Callable[[], nn.Module] = Net, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return build()


@functools.cache
def _reference(
    build: Callable[[], nn.Module], steps: int, clip: float = 0.0, mark: int = 0, fill: bool = False, few: int = 0,
    toggle: int = -1,
) -> Tensors:  # fmt: skip
    """Plain PyTorch in one process. With `fill`, a missing gradient counts as zero. `few`: samples in step `FEW`;
    `toggle`: the step before which a layer is frozen, or unfrozen."""
    model = _fresh(build)
    optimizer = _sgd(model.parameters())
    for step in range(steps):
        if step == toggle:
            _toggle(model)
        x, y = (part[:few] if few and step == FEW else part for part in _batch(step, mark))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters() if fill else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class Run(product.StrategyLoop):
    """A user's loop over the protocol."""

    def __init__(
        self, name: str, model: nn.Module, world: World, mark: int = 0, layout: Any = torch.contiguous_format
    ) -> None:
        self.world, self.mark, self.layout = world, mark, layout
        model.to(memory_format=layout)
        row = ROWS[name]
        strategy = product.strategy(name.partition(",")[0], row.bucket_mb, row.options)
        super().__init__(strategy, model, world, torch.zeros(2, *SHAPE).contiguous(memory_format=layout), _sgd)

    def step(
        self, number: int, pieces: int = 1, clip: float = 0.0, samples: int = BATCH, forget: bool = True,
        announce: bool = True, spoil: float | None = None,
    ) -> None:  # fmt: skip
        """Without `forget`, calls the optimizer's `zero_grad`. Without `announce`, leaves out `accumulate`.

        `spoil` replaces the gradient of this rank's first logit.
        """
        x, y = _batch(number, self.mark)
        low, high = (samples * rank // self.world.size for rank in (self.world.rank, self.world.rank + 1))
        (self.sync if forget else self.optimizer).zero_grad()
        cuts = [low + (high - low) * piece // pieces for piece in range(pieces + 1)]
        parts = [(a, b) for a, b in itertools.pairwise(cuts) if a < b]
        for a, b in parts:
            with self.sync.accumulate() if announce and (a, b) != parts[-1] else contextlib.nullcontext():
                output = self.network(x[a:b].contiguous(memory_format=self.layout))
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
        self.ema.update(number + 1)

    def steps(self, *numbers: int, **how: Any) -> Tensors:
        for number in numbers:
            self.step(number, **how)
        return self.weights()


def _spoilt(grad: torch.Tensor, value: float) -> torch.Tensor:
    grad = grad.clone()
    grad[0, 0] = value
    return grad


def _case(world: World, name: str, folder: Path) -> dict[str, Any]:
    run = Run(name, _fresh(seed=1 + 7 * world.rank), world)
    run.steps(*range(HALF))
    run.save(folder / f"{name}-{world.size}")
    results: dict[str, Any] = {"weights": run.steps(*range(HALF, STEPS)), "average": run.weights(average=True)}
    results["bytes"] = run.sync.bytes_sent
    for size in SIZES[max(SIZES.index(world.size) - 1, 0) : SIZES.index(world.size) + 1]:
        file = folder / f"{name}-{size}"
        if file.exists():  # a strategy of one process has one file
            again = Run(name, _fresh(seed=99 + world.rank), world)
            again.load(file)
            results[f"from {size}"] = again.steps(*range(HALF, STEPS))
            results[f"average from {size}"] = again.weights(average=True)
    return results


def _variants(world: World, name: str) -> dict[str, Any]:
    """Trains with micro-batches, clipping, another layout, and gradients that are not finite."""
    results: dict[str, Any] = {}
    run = Run(name, _fresh(), world)
    for number in range(4):  # in one step rank 0 has fewer samples, and so passes, than the others
        run.step(number, pieces=3, clip=0.5, samples=_few(world.size) if number == FEW else BATCH)
    results["micro-batches, clipped"] = run.weights()
    run = Run(name, _fresh(), world, layout=torch.channels_last)
    results["channels_last, optimizer.zero_grad"] = run.steps(*range(4), forget=False)
    try:
        results["two passes"] = Run(name, _fresh(), world).steps(*range(4), pieces=2, announce=False)
    except (UserError, AssertionError) as error:
        results["two passes"] = f"{type(error).__name__}: {error}"
    results["sparse"] = _sparse(world, name)
    for value in (math.nan, math.inf):
        run = Run(name, _fresh(), world)
        run.steps(*range(3))
        spoilt = run.steps(3, spoil=value if world.rank == world.size - 1 else None)  # in which powersgd compresses
        finite = [parameter for parameter, weights in spoilt.items() if bool(weights.isfinite().all())]
        results[f"{value}"] = finite, float(run.sync.grad_norm())
    return results


def _without_gradient(world: World, name: str) -> dict[str, Any]:
    """Parameters without a gradient: on all or on some ranks, from some step on, or until then."""
    results: dict[str, Any] = {}
    for mark in (0, 2) if world.size == 2 else (2,):
        try:  # marked samples are rank 0's: with mark=2 only that rank has a gradient of `somebody`
            results[f"unused, {mark} marked"] = Run(name, _fresh(Spare), world, mark).steps(*range(4))
        except UserError as error:
            results[f"unused, {mark} marked"] = str(error)
    for change in ("freezes", "unfreezes"):
        try:
            run = Run(name, _fresh(functools.partial(_partly_frozen, change)), world)
            run.steps(0, 1)
            _toggle(run.sync.model)
            results[change] = run.steps(2, 3)
        except UserError as error:
            results[change] = str(error)
    return results


def _partly_frozen(change: str) -> nn.Module:
    model = Net()
    if change == "unfreezes":
        _toggle(model)
    return model


def _toggle(model: nn.Module) -> None:
    """Freezes the first layer, or unfreezes it."""
    for name, parameter in model.named_parameters():
        if name.startswith("conv."):
            parameter.requires_grad_(not parameter.requires_grad)


def _embedded() -> nn.Module:
    return _fresh(lambda: nn.Sequential(nn.Embedding(12, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3)))


def _words(rank: int) -> torch.Tensor:
    """Returns one sample of two words. All ranks share the second word."""
    return torch.tensor([[rank, 3]])


def _plain_step(parameters: Any) -> torch.optim.Optimizer:
    """Returns an optimizer that takes sparse gradients."""
    return torch.optim.SGD(parameters, lr=0.1)


def _sparse(world: World, name: str) -> Tensors | str:
    """Returns the weights after one step with a sparse gradient, or the error that refuses it."""
    row = ROWS[name]
    strategy, model = product.strategy(name.partition(",")[0], row.bucket_mb, row.options), _embedded()
    try:
        network = strategy.wrap(model, world, torch.zeros(1, 2, dtype=torch.long))
        optimizer = strategy.make_optimizer(_plain_step)
        (network(_words(world.rank)).sum() * strategy.loss_factor).backward()
        strategy.synchronize()
        optimizer.step()
    except UserError as error:
        return str(error)
    return {name: p.detach().clone() for name, p in strategy.full_module(model).named_parameters()}


def _part(rank: int) -> torch.Tensor:
    """Gradients of many orders of magnitude."""
    return torch.randn(4096, generator=torch.Generator().manual_seed(rank)) * torch.logspace(-20, 20, 4096)


def _one_sum(world: World, name: str) -> torch.Tensor:
    """Returns the strategy's sum of the ranks' parts in one step."""
    strategy, model = product.strategy(name, ROWS[name].bucket_mb, ROWS[name].options), nn.Linear(64, 64, bias=False)
    network = strategy.wrap(model, world, torch.zeros(1, 64))
    # The output for the unit matrix is the weights, transposed.
    network(torch.eye(64)).backward(_part(world.rank).view(64, 64).T * strategy.loss_factor)
    strategy.synchronize()
    return model.weight.grad.reshape(-1)  # type: ignore[union-attr]


def _all(world: World, names: list[str], folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        if name in RANKLESS and world.size > 1:
            continue
        results[name] = (_variants(world, name) if world.size > 1 else {}) | (
            _case(world, name, Path(folder)) if name in CASES else {}
        )
        if name not in RANKLESS:
            results[name] |= _without_gradient(world, name)
        if ROWS[name].sum_error is not None:
            results[name]["one sum"] = _one_sum(world, name)
        dist.barrier()
    return results


@pytest.fixture(scope="module")
def by_size(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("states"))
    return {size: on_ranks(_all, size, CHOSEN, folder, timeout=300) for size in SIZES}


@dataclass(frozen=True)
class Place:
    """Names the rank and the worker group of a failure, for its message."""

    name: str
    size: int
    rank: int
    results: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return f"sync.name={self.name}, rank {self.rank} of {self.size}"

    def check(self, what: str, expected: Tensors, start: nn.Module | None = None) -> None:
        """Asserts weights near those of one plain process, as near as the row says. `start`: initial weights."""
        actual, bound = self.results[what], ROWS[self.name].error
        assert isinstance(actual, dict) and actual.keys() == expected.keys(), f"{self}: {what}: {actual}"
        if bound is None:
            off = {name: float((actual[name] - weights).abs().max()) for name, weights in expected.items()}
            worst = max(off, key=lambda name: off[name])
            assert off[worst] < 1e-6, f"{self}: {what}: {worst} is off by {off[worst]:.3g}"
        else:
            begun = dict((start or _fresh()).named_parameters())
            off2 = sum(float((actual[name] - weights).square().sum()) for name, weights in expected.items())
            gone2 = sum(float((begun[name] - weights).detach().square().sum()) for name, weights in expected.items())
            off = math.sqrt(off2 / gone2)
            assert off < bound, f"{self}: {what}: {off:.3g} of the way are off, {bound} are allowed"
            if what == "weights" and self.size > 1:
                assert off > 1e-6, f"{self}: nothing was compressed"

    def check_same(self, what: str, expected: Tensors) -> None:
        """Asserts equal weights, to the bit."""
        different = [name for name, value in self.results[what].items() if not torch.equal(value, expected[name])]
        assert different == [], f"{self}: {what}"


def _places(by_size: dict[int, list[dict[str, Any]]], name: str, least: int = 1) -> list[Place]:
    return [
        Place(name, size, rank, results[name])
        for size, ranks in by_size.items()
        for rank, results in enumerate(ranks)
        if name in results and size >= least
    ]


@pytest.mark.parametrize("name", [name for name in product.strategies() if ONLY in (None, name)])
def test_every_strategy_has_a_row(name: str) -> None:
    if name not in ROWS:
        pytest.fail(
            f"sync.name={name} has no row in ROWS of {Path(__file__).name}: add "
            f'`"{name}": Row()`, with `error` and `step_bytes` for a lossy strategy, `sent_early=True` for one with a Reducer '
            "(the docstrings of Row say what else there is)",
            pytrace=False,
        )


@pytest.mark.parametrize("name", [name for name in CHOSEN if name in CASES])
def test_ten_steps_give_the_parameters_of_one_plain_process_on_every_rank(by_size: Any, name: str) -> None:
    expected = _reference(Net, STEPS)
    for place in _places(by_size, name):
        place.check("weights", expected)
        place.check_same("weights", by_size[place.size][0][name]["weights"])
    assert len(_places(by_size, name)) == (6 if name not in RANKLESS else 1)
    assert any((expected[of] - begun).abs().max() > 0.1 for of, begun in _fresh().named_parameters()), "nothing trained"


@pytest.mark.parametrize("name", [name for name in CHOSEN if ROWS[name].sum_error is not None])
def test_one_sum_is_within_its_bound_of_rounding(by_size: Any, name: str) -> None:
    bound = ROWS[name].sum_error
    for place in _places(by_size, name):
        parts = [_part(rank).double() for rank in range(place.size)]
        off = (place.results["one sum"].double() - sum(parts)).abs() / torch.stack(parts).abs().sum(0)
        assert place.size == 1 or bound / 4 < float(off.max()) <= place.size * bound, f"{place}: {float(off.max()):.3g}"  # type: ignore[operator]


@pytest.mark.parametrize("name", [name for name in CHOSEN if name in CASES])
def test_a_checkpoint_resumes_bit_for_bit_and_at_another_world_size(by_size: Any, name: str) -> None:
    for place in _places(by_size, name):
        place.check_same(f"from {place.size}", place.results["weights"])
        place.check_same(f"average from {place.size}", place.results["average"])
        for other in {3: (1,), 2: (3,)}.get(place.size, ()):
            place.check(f"from {other}", _reference(Net, STEPS))


@pytest.mark.parametrize("name", RANKED)
def test_bytes_are_counted(by_size: Any, name: str) -> None:
    """The count is the one that follows from the shapes."""
    shapes, each = [tuple(p.shape) for p in Net().parameters()], ROWS[name].step_bytes
    for place in _places(by_size, name):
        steps = [each(shapes, place.size, n) if callable(each) else each * _elements(shapes) for n in range(STEPS)]
        assert place.results["bytes"] == (sum(steps) if place.size > 1 else 0), str(place)


@pytest.mark.parametrize("name", VARIED)
def test_micro_batches_clipping_and_layout(by_size: Any, name: str) -> None:
    for place in _places(by_size, name, least=2):
        place.check("micro-batches, clipped", _reference(Net, 4, clip=0.5, few=_few(place.size)))
        place.check("channels_last, optimizer.zero_grad", _reference(Net, 4))


@pytest.mark.parametrize("name", VARIED)
def test_two_backward_passes_that_are_not_announced_are_summed_or_refused(by_size: Any, name: str) -> None:
    for place in _places(by_size, name, least=2):
        if ROWS[name].sent_early:
            error = place.results["two passes"]
            assert "head.bias" in error and "inside accumulate()" in error and "\n" not in error, f"{place}: {error}"
        else:
            place.check("two passes", _reference(Net, 4))


@pytest.mark.parametrize("name", VARIED)
def test_what_is_not_finite_on_one_rank_reaches_all(by_size: Any, name: str) -> None:
    for place in _places(by_size, name, least=2):
        for kind in ("nan", "inf"):
            finite, norm = place.results[kind]
            assert not finite and not math.isfinite(norm), f"{place}: {kind} has not reached {finite}, norm {norm}"


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.promise("missing-gradients")
def test_sparse_and_missing_gradients_are_summed_or_refused_by_name(by_size: Any, name: str) -> None:
    """Parameters without a gradient, on all or on some ranks; sparse ones."""
    unused = ROWS[name].unused
    for place in _places(by_size, name):
        for mark in (0, 2) if place.size == 2 else (2,):
            what = f"unused, {mark} marked"
            error = place.results[what]
            if unused == "refused":
                assert "nobody" in error and "find_unused: true" in error and "\n" not in error, f"{place}: {error}"
            else:
                place.check(what, _reference(Spare, 4, mark=mark, fill=unused != "left out"), _fresh(Spare))
    for place in _places(by_size, name, least=2):
        expected = _embedded()
        optimizer = _plain_step(expected.parameters())
        for rank in range(place.size):
            expected(_words(rank)).sum().backward()
        optimizer.step()
        if isinstance(error := place.results["sparse"], str):
            assert error.startswith("0.weight has a sparse gradient") and "\n" not in error, f"{place}: {error}"
        else:
            place.check("sparse", {of: weights.detach() for of, weights in expected.named_parameters()}, _embedded())


@pytest.mark.parametrize("change", ["freezes", "unfreezes"])
@pytest.mark.parametrize("name", VARIED)
@pytest.mark.promise("missing-gradients")
def test_a_layer_that_is_frozen_stands_still_and_one_that_is_unfrozen_trains(
    by_size: Any, name: str, change: str
) -> None:
    row, build = ROWS[name], functools.partial(_partly_frozen, change)
    refused = row.unused == "refused" if change == "freezes" else not row.unfreezes
    for place in _places(by_size, name):
        if refused:
            error = place.results[change]
            assert "conv." in error and "sync.name=flat" in error and "\n" not in error, f"{place}: {error}"
        else:
            place.check(change, _reference(build, 4, toggle=2), _fresh(build))


REFUSED = {
    "an unknown option": (product.POWERSGD, "sync.options={rnk: 1}", "did you mean 'rank'"),
    "an option of another strategy": ("flat", "sync.options={rank: 1}", "sync.options.rank"),
    "a start before the warm-up": (product.POWERSGD, "sync.options={start: 1}", "start must be greater than or equal to 2"),
    "a class that is not there": ("examples.strategies.fsdp:Fspd", "epochs=1", "cannot import sync.name"),
    "a class that is no strategy": ("tests.nets:SmallConv", "epochs=1", "extends lockstep.training.sync.base.GradientSync"),
    "a strategy without its methods": ("lockstep.training.sync.base:GradientSync", "epochs=1", "with its abstract methods"),
    "exact by another name": ("lockstep.training.sync.exact:Exact", "epochs=1", "only sync.name=exact"),
    "fsdp and compile": (product.FSDP, "compile=true", "compile=false"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_strategy_cannot_do_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, setting, message = REFUSED[case]
    done = training("run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", f"sync.name={name}", setting)
    assert done.code == 2 and message in done.output and name in done.output and done.output.count("\n") == 1, done
