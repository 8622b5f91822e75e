"""A whole step as CUDA graphs: one launch in place of some two hundred.

Forward, backward, the sum over the ranks and the update are recorded once and replayed from then on. What changes between
steps is copied into tensors that the recording reads: the batch, and the learning rates of our optimizers. With the check for
NaN the step is two graphs, gradients and update, with one read of the device between them. With `nonfinite: ignore` it is one.

Under `exact` a part of the batch is a graph, which is replayed for each part. The work after the sums over the parts is the update's.
The sums themselves are launched between them. A step that proves the function (`proof.py`) runs eagerly.

Steps of another shape (the short last one of an epoch) run eagerly, and so does everything if a recording fails. A
recording reads a tensor again, but no Python variable. So a step also runs eagerly if it trains other parameters than the
recorded ones, or if its function or a variable in its closure has changed. The weights' average has a separate launch every few
steps, outside.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..contract import ENV_LIVE, first_line
from ..data import pytree
from ..observe.account import TimeCategory
from ..observe.steps import RecordedPoints
from ..optim.base import RatedOptimizer
from ..parallel.exchange import all_gather_trees
from ..parallel.world import World
from ..sync.base import GradientSync
from .logical_workers import LogicalWorkers
from .replica import kept_buffers
from .step import Step
from .step_input import StepInput

WARM_UP = 3
"""Eager steps before the recording: they make optimizer state, choose algorithms and open the communicators."""


def obstacle(sync: GradientSync, optimizers: dict[str, torch.optim.Optimizer], world: World) -> str | None:
    """Returns why the steps of this run cannot be recorded; None if they can."""
    if sync.batch_parts is not None and os.environ.get(ENV_LIVE):
        return "under launch --live a rank that comes later has recorded nothing"
    if world.size > 1 and not world.nccl and sync.batch_parts is None:
        return "collectives of gloo cannot be recorded in a CUDA graph: use backend=auto, with a GPU for each rank"
    if not sync.capturable:
        return f"sync.name={sync.settings.name} cannot be recorded in a CUDA graph: use flat"
    if len(optimizers) != 1 or not all(isinstance(optimizer, RatedOptimizer) for optimizer in optimizers.values()):
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers.values())
        return f"the optimizer ({kinds}) cannot be recorded in a CUDA graph: use one Nesterov or Muon of lockstep.training.optim"
    return None


def graph_of(pool: Any, body: Callable[[], None]) -> Callable[[], None]:
    """Records a function as a CUDA graph, and does not run it. Returns a function that replays the graph.

    Args:
        pool: the memory pool, which graphs may share.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Meanwhile the loader's thread may pin memory, which a recording in the mode "global" would not survive.
    stream, mode = torch.cuda.current_stream(), "thread_local"
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
        body()
    return graph.replay


@dataclass(slots=True)
class _Recorded:
    """A recorded step: its graphs, and the tensors that they read and write. The `replay_` methods take the place of the eager step."""

    step: Step
    inputs: StepInput
    """The input whose tensors the recording reads; each step is copied into them."""
    identity: tuple[Any, ...]
    held: list[Any]
    """The objects whose ids are in `identity`, kept alive so that no other object gets such an id."""
    points: RecordedPoints
    before: list[torch.Tensor]
    """Copies of the buffers before the step, which a replay fills."""
    gradients: Callable[[], None] | None = None
    """Replays the gradients' graph; None: the update's graph computes them."""
    update: Callable[[], None] = lambda: None
    """Replays the graph of the update."""
    part: Callable[[], None] | None = None
    """Replays the forward and backward pass of one part of a batch, of as many samples as `inputs`; None without parts."""
    collected: list[torch.Tensor] = field(default_factory=list)
    """The tensors in which `part` leaves its gradients and statistics. Each replay overwrites them."""
    sums: list[torch.Tensor] = field(default_factory=list)
    """The tensors from which the update's graph reads the sums over all parts."""
    norm: torch.Tensor | None = None
    """The tensor in which a replay leaves the gradient's norm, before the clipping; None: nothing reads the norm."""
    bytes_sent: int = 0
    """Bytes that one replay passes to collectives."""

    def replay_gradients(self) -> torch.Tensor | None:
        """Replays the gradients' graph. Returns their norm, a scalar; None: the update's graph computes the gradients."""
        if self.gradients is None:
            return None
        self.gradients()
        self._count_replay()
        return self.norm

    def replay_update(self) -> torch.Tensor | None:
        """Replays the update's graph. Returns the gradient's norm before the clipping, a scalar; None: nothing reads the norm."""
        self.update()
        if self.gradients is None:
            self._count_replay()
        return self.norm

    def replay_part(self, inputs: StepInput, part: int, low: int, high: int) -> bool:
        """Replays a part of the batch and adds its results to the sums. Returns False if its shape is not the recorded one."""
        parts = self.step.logical_workers
        assert self.part is not None and parts is not None
        of_one = inputs.of_samples(low, high)
        if of_one.samples != self.inputs.samples or not pytree.fill(self.inputs.batch, list(of_one.batch)):
            return False
        parts.draw(part)
        self.part()
        parts.put(part, self.collected)
        return True

    def _count_replay(self) -> None:
        """Counts the bytes that the replay sends, and queues its time stamps for reading. The replay need not have ended."""
        if self.part is not None:
            return  # nothing is sent within a part
        self.step.replica.sync.bytes_sent += self.bytes_sent
        self.step.run.state.clock.replayed(self.points)


class Recorder:
    """Records the steps of a run after `WARM_UP` steps over the same number of samples.

    It records one size of global batch: the first that more than `WARM_UP` steps had. So all ranks decide alike whether to record,
    and no second recording can take the memory of the first.

    Args:
        optimizer: the one that moves the weights.
    """

    def __init__(self, step: Step, optimizer: RatedOptimizer) -> None:
        optimizer.use_tensor(step.run.world.device)
        self._step, self._optimizer = step, optimizer
        self._times: dict[int | None, int] = {}
        self._recorded: _Recorded | None = None
        self.failure = ""
        """Why the recording failed; "": it has not failed."""

    def prepare(self, inputs: StepInput) -> _Recorded | None:
        """Prepares a step: records it if that is due. Returns the recording that replays it; None: it runs eagerly. Collective if a
        recording is due."""
        step, parts = self._step, self._step.logical_workers
        self._optimizer.publish_rates()
        if not self.failure and self._is_due(inputs):
            with step.run.goodput.on(TimeCategory.START):
                self._record_on_all_ranks(inputs)
        recorded = self._recorded
        if recorded is None or self._identity(inputs) != recorded.identity:
            return None
        if parts is None:
            if not pytree.fill(recorded.inputs.batch, list(inputs.batch)):
                return None
            step.run.state.clock.before_replay()
        else:
            if parts.proves(after_save=not step.attempt.saver.steps_since) or parts.refused:
                return None
            for kept, tensor in zip(recorded.before, step.replica.model.buffers()):
                kept.copy_(tensor)
        return recorded

    def _is_due(self, inputs: StepInput) -> bool:
        """Returns whether to record this step now. The same on all ranks."""
        if self._recorded is not None:
            return False
        self._times[inputs.total] = self._times.get(inputs.total, 0) + 1
        return self._times[inputs.total] > WARM_UP

    def _record_on_all_ranks(self, inputs: StepInput) -> None:
        """Records on all ranks, or on none. Collective."""
        error = ""
        try:
            self._record_step(inputs)
        except Exception as caught:  # noqa: BLE001 - a model may do anything that cannot be recorded; eager steps continue
            error = f"{type(caught).__name__}: {first_line(caught)}"
        errors = all_gather_trees(error, self._step.run.world)
        self._step.replica.sync.zero_grad()
        failed = next(((rank, text) for rank, text in enumerate(errors) if text), None)
        if failed is not None:
            self.failure, self._recorded = f"rank {failed[0]}: {failed[1]}", None
            self._step.run.console.warn(f"the step cannot be recorded ({self.failure}); it runs eagerly")

    def _record_step(self, inputs: StepInput) -> None:
        step, record = self._step, functools.partial(graph_of, torch.cuda.graph_pool_handle())
        if inputs.total is None:
            raise ValueError(
                "the size of the global batch is not known before the step: use run.batches() or run.part()"
            )
        if isinstance(inputs.divisor, torch.Tensor):
            raise ValueError("the ranks sum its divisor: give it a number")  # noqa: TRY004 - a value that cannot be recorded
        if not inputs.samples or inputs.weight != 1.0:
            raise ValueError("this rank has no sample of the batch")
        sync, checks, parts = step.replica.sync, step.looks or inputs.scaler is not None, step.logical_workers
        of_one = inputs if parts is None or inputs.part is None else inputs.of_samples(*inputs.part.parts[0])
        static_inputs = replace(of_one, batch=tuple(pytree.recorded(item) for item in of_one.batch))
        # The graph reads these rates, and writes into these gradients also after the strategy has made others.
        held = [*self._objects(inputs), *sync.gradients()]
        points = RecordedPoints(step.run.world.device)
        before = kept_buffers(step.replica.model) if checks or parts is not None else []
        recorded = _Recorded(step, static_inputs, self._identity(inputs), held, points, before)

        def part(parts: LogicalWorkers) -> None:
            parts.restore()
            step.sums.begin()
            step._forward_backward(static_inputs, 0, static_inputs.samples)
            recorded.collected = parts.collect(static_inputs.samples / (inputs.total or 1))

        def gradients() -> None:
            if parts is not None:
                parts.finish(recorded.sums)
                recorded.norm = step.measure(inputs)
                return
            for kept, tensor in zip(before, step.replica.model.buffers()):
                kept.copy_(tensor)
            sync.zero_grad()
            step.forward_backward(recorded.inputs)
            points.mark(0)
            sync.synchronize()
            points.mark(1)
            recorded.norm = step.measure(inputs)

        def update() -> None:
            if recorded.gradients is None:
                gradients()
            recorded.norm = step.move(inputs, recorded.norm)

        sent = sync.bytes_sent
        try:
            if parts is not None and inputs.part is not None:
                parts.begin(inputs.part, before, after_save=False)
                recorded.part = record(functools.partial(part, parts))
                recorded.sums = [torch.zeros_like(leaf) for leaf in recorded.collected]
            if checks:
                recorded.gradients = record(gradients)
            recorded.update = record(update)
            recorded.bytes_sent = sync.bytes_sent - sent
        finally:
            if parts is None:  # else nothing is sent in it
                sync.bytes_sent = sent  # nothing has run yet
        self._recorded = recorded

    def _objects(self, inputs: StepInput) -> list[Any]:
        """Returns the objects that a recording fixes: the trained parameters, and what else its step reads."""
        trained = [parameter for parameter in self._step.replica.model.parameters() if parameter.requires_grad]
        return [inputs.scaler, self._optimizer.rates, *_closure(inputs), *trained]

    def _identity(self, inputs: StepInput) -> tuple[Any, ...]:
        """Returns everything that a recording fixes, except the tensors' values. A step with another identity runs eagerly."""
        cut = inputs.micro_batch_size, inputs.part and (inputs.part.multiple, inputs.part.num_parts)
        numbers = inputs.samples, inputs.total, inputs.divisor, inputs.weight, inputs.clip, cut
        return (*map(id, self._objects(inputs)), *numbers)


def _closure(inputs: StepInput) -> list[Any]:
    """Returns the code, the object, the closure and the defaults of the step's function: all that it reads but arguments and globals."""
    compute: Any = inputs.compute
    defaults = getattr(compute, "__defaults__", None) or ()
    cells = [cell.cell_contents for cell in getattr(compute, "__closure__", None) or ()]
    return [getattr(compute, "__code__", compute), getattr(compute, "__self__", None), *cells, *defaults]
