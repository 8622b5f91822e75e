"""The whole training step as CUDA graphs: one launch a step in place of some two hundred.

Augmentation, forward, backward, the sum over the ranks and the update are recorded once and replayed from then on. What
changes between steps (sample numbers, labels, the epoch's keys, learning rates) is copied into tensors that the
recording reads. With the check for NaN the step is two graphs, gradients and update, with one look at the device
between them; with `nonfinite: ignore` it is one.

Steps of another shape (the short last one of an epoch) run eagerly, and so does everything where a recording fails.
The weights' average has a launch of its own every few steps, outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from lockstep.training.checkpoint.state import TrainState
from lockstep.training.config import Config
from lockstep.training.data.augment import draw_keys
from lockstep.training.data.loader import Batch
from lockstep.training.observe.clock import RecordedPoints
from lockstep.training.optim.rates import RatedOptimizer
from lockstep.training.parallel.exchange import all_gather_trees
from lockstep.training.trainer import Trainer

WARM_UP = 3
"""Eager steps before the recording: they make optimizer state, choose algorithms and open the communicators."""
Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a body, records it without running it, and gives back what replays it."""


def obstacle(config: Config, state: TrainState) -> str | None:
    """Why the steps of this run cannot be recorded; None if they can."""
    if state.world.device.type != "cuda":
        return "there is no GPU"
    if not state.sync.capturable:
        return f"sync.name={config.sync.name} cannot be recorded in a CUDA graph: use flat"
    if not isinstance(state.optimizer, RatedOptimizer):
        return f"optim.name={config.optim.name} cannot be recorded in a CUDA graph: use nesterov or muon"
    return None


@contextlib.contextmanager
def capture_stream(config: Config, device: torch.device) -> Iterator[None]:
    """A stream of our own: nothing can be recorded on the default one, and autograd binds a parameter's gradient to the
    stream that the sync strategy hooked it on. So model, hooks and steps all live on this stream."""
    if config.capture == "never" or device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


class CudaGraphs:
    """Records bodies as CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Meanwhile the loader's thread may pin memory, which a recording in the mode "global" would not survive.
        stream, mode = torch.cuda.current_stream(), "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode=mode):
            body()
        return graph.replay


@dataclass(slots=True)
class _Recorded:
    """What replays the step on its input tensors."""

    inputs: Batch
    gradients: Callable[[], None] | None = None
    """None where they are part of the update's recording."""
    updates: dict[int, Callable[[], None]] = field(default_factory=dict)
    """By the optimizer's kind of step (`RatedOptimizer.step_kind`)."""
    norm: torch.Tensor | None = None
    """Where `gradients` leaves the gradient's norm."""
    norms: dict[int, torch.Tensor | None] = field(default_factory=dict)
    """Where the whole step has left it: that of the clipping, if there is one."""
    grads: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    """Where `gradients` leaves the gradients, for the recording of an update of another kind."""
    bytes_sent: int = 0
    """What one replay hands to collectives."""


class CapturedTrainer(Trainer):
    """A `Trainer` whose steps are recorded after `WARM_UP` steps over the same number of samples.

    One size of global batch is recorded, the first that has come so often: so whether to record is the same question
    on all ranks, and no second recording can take the memory of the first.

    Args:
        say: called once, with a sentence, if the recording fails.
        record: what records a body; CUDA graphs where None.
    """

    def __init__(
        self, config: Config, state: TrainState, network: nn.Module, say: Callable[[str], None],
        record: Record | None = None, *, batch_multiple: int = 1, steps_per_epoch: int,
    ) -> None:  # fmt: skip
        super().__init__(config, state, network, batch_multiple=batch_multiple, steps_per_epoch=steps_per_epoch)
        assert isinstance(state.optimizer, RatedOptimizer)
        device = state.world.device
        self._optimizer = state.optimizer
        self._optimizer.use_tensor(device)
        self._say, self._record = say, record
        self._keys = torch.zeros(len(draw_keys(0, 0)), dtype=torch.int64, device=device)
        self._epoch: int | None = None
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._before: list[torch.Tensor] = []
        self._points = RecordedPoints(device)
        self._seen: dict[int, int] = {}
        self._recorded: _Recorded | None = None
        self._replays: _Recorded | None = None
        """Set while a step is replayed."""
        self._failed = False

    def step(self, batch: Batch) -> None:
        kind = self._optimizer.step_kind
        if not self._failed and self._is_due(batch, kind):
            self._record_on_all_ranks(batch, kind)
        recorded, self._replays = self._recorded, None
        if recorded is not None and kind in recorded.updates and _shape(batch) == _shape(recorded.inputs):
            self._replays = recorded
            self._copy_inputs(recorded.inputs, batch)
            self.state.clock.before_replay()
        super().step(batch)

    def _is_due(self, batch: Batch, kind: int) -> bool:
        """Whether a step of this kind is to be recorded now. The same on all ranks."""
        if self._recorded is not None:
            return batch.total == self._recorded.inputs.total and kind not in self._recorded.updates
        self._seen[batch.total] = self._seen.get(batch.total, 0) + 1
        return self._seen[batch.total] > WARM_UP

    def _record_on_all_ranks(self, batch: Batch, kind: int) -> None:
        """Records on all ranks, or on none. Collective."""
        error = ""
        try:
            self._record_step(batch, kind)
        except Exception as caught:  # noqa: BLE001 - whatever a model does that cannot be recorded; eager steps go on
            error = f"{type(caught).__name__}: {str(caught).splitlines()[0] if str(caught) else ''}"
        errors = all_gather_trees(error, self.state.world)
        self.state.sync.zero_grad()
        failed = next(((rank, text) for rank, text in enumerate(errors) if text), None)
        if failed is not None:
            self._failed, self._recorded = True, None
            self._say(f"the step cannot be recorded (rank {failed[0]}: {failed[1]}); it runs eagerly")

    def _record_step(self, batch: Batch, kind: int) -> None:
        if self._record is None:
            self._record = CudaGraphs()
        state = self.state
        if batch.weight != 1.0:
            raise ValueError("this rank has no sample of the batch")
        recorded = self._recorded or _Recorded(self._inputs(batch))
        if _shape(batch) != _shape(recorded.inputs):
            raise ValueError("this rank's part of the batch changes its size")
        inputs = recorded.inputs
        if self._recorded is None:
            self._before = [tensor.clone() for tensor in self.statistics()] if self.checks_gradient else []

        def gradients() -> None:
            for kept, tensor in zip(self._before, self.statistics()):
                kept.copy_(tensor)
            state.sync.zero_grad()
            self.forward_backward(inputs, self._keys)
            self._points.mark(0)
            state.sync.synchronize()
            self._points.mark(1)
            if self.checks_gradient:
                self._finite.copy_(torch.isfinite(self.unscale_and_measure()))

        def whole_step() -> None:
            gradients()
            super(CapturedTrainer, self).update()

        sent, steps_taken = state.sync.bytes_sent, self._optimizer.steps_taken
        try:
            if self._recorded is None and self.checks_gradient:
                recorded.gradients = self._record(gradients)
                recorded.norm = self.grad_norm
                recorded.grads = {p: p.grad for p in state.model.parameters() if p.grad is not None}
            self.grad_norm = recorded.norm
            for parameter, grad in recorded.grads.items():
                parameter.grad = grad  # eager steps have taken others since
            recorded.updates[kind] = self._record(super().update if self.checks_gradient else whole_step)
            recorded.norms[kind] = self.grad_norm
            recorded.bytes_sent = max(recorded.bytes_sent, state.sync.bytes_sent - sent)
        finally:
            state.sync.bytes_sent, self._optimizer.steps_taken = sent, steps_taken  # nothing has run yet
        self._recorded = recorded

    def _inputs(self, batch: Batch) -> Batch:
        """Tensors of its own for the recording to read."""
        images = batch.images if self._resident(batch) else batch.images.clone()
        return Batch(images, batch.rows.clone(), batch.ids.clone(), batch.labels.clone(), batch.total, batch.weight)

    def _resident(self, batch: Batch) -> bool:
        """Whether `batch` is rows of images that stay where they are, rather than images of its own."""
        return len(batch.images) > len(batch.rows)

    def _copy_inputs(self, inputs: Batch, batch: Batch) -> None:
        """Copies what differs between steps to where the recording reads it."""
        epoch = self.state.cursor.epoch
        if epoch != self._epoch:
            self._keys.copy_(torch.tensor(draw_keys(self.config.seed, epoch)))
            self._epoch = epoch
        inputs.rows.copy_(batch.rows)
        inputs.ids.copy_(batch.ids)
        inputs.labels.copy_(batch.labels)
        if inputs.images is not batch.images:
            inputs.images.copy_(batch.images)

    def compute_gradients(self, batch: Batch) -> bool:
        recorded, state = self._replays, self.state
        if recorded is None:
            return super().compute_gradients(batch)
        if recorded.gradients is None:
            return True
        recorded.gradients()
        self.grad_norm = recorded.norm
        self._count_replay(recorded)
        if bool(self._finite) or self.accepts_nonfinite():
            return True
        state.sync.abandon()
        self.restore(self._before)
        return False

    def update(self) -> None:
        recorded = self._replays
        if recorded is None:
            super().update()
            return
        kind, steps_taken = self._optimizer.step_kind, self._optimizer.steps_taken
        recorded.updates[kind]()
        self.grad_norm = recorded.norms[kind]
        self._optimizer.steps_taken = steps_taken + 1
        if recorded.gradients is None:
            self._count_replay(recorded)

    def _count_replay(self, recorded: _Recorded) -> None:
        """Counts what the replay sends, and has its points in time read later. The replay need not have ended."""
        self.state.sync.bytes_sent += recorded.bytes_sent
        self.state.clock.replayed(self._points)


def _shape(batch: Batch) -> tuple[int, int, float]:
    return len(batch.rows), batch.total, batch.weight
