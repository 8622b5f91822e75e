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

from training.clock import StepClock
from training.config import Config
from training.data.augment import draw_keys
from training.data.loader import Batch
from training.exchange import all_gather_trees
from training.optim import set_rates
from training.optim.rates import RatedOptimizer
from training.state import TrainState
from training.step import NonFinite, Step

WARM_UP = 3
"""Eager steps before the recording: they make optimizer state, choose algorithms and open the communicators."""
Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a body, records it without running it, and gives back what replays it."""


def why_not(config: Config, state: TrainState) -> str | None:
    """Why the steps of this run cannot be recorded, or None where they can."""
    if state.world.device.type != "cuda":
        return "there is no GPU"
    if not state.sync.capturable:
        return f"sync.name={config.sync.name} cannot be recorded: use flat"
    if not isinstance(state.optimizer, RatedOptimizer):
        return f"optim.name={config.optim.name} cannot be recorded: use nesterov or muon"
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
    """By the optimizer's kind of step (`RatedOptimizer.kind`)."""
    norm: torch.Tensor | None = None
    """Where `gradients` leaves the gradient's norm."""
    norms: dict[int, torch.Tensor | None] = field(default_factory=dict)
    """Where the whole step has left it: that of the clipping, if there is one."""
    bytes_sent: int = 0
    """What one replay hands to collectives."""


class CapturedStep(Step):
    """A `Step` that is recorded after `WARM_UP` steps over the same number of samples.

    One size of global batch is recorded, the first that has come so often: whether to record is thereby the same question
    on all ranks, and no second recording can take the memory of the first.

    Args:
        say: told once, in a sentence, when recording failed.
        record: what records a body; CUDA graphs where None.
    """

    def __init__(
        self, config: Config, state: TrainState, network: nn.Module, multiple: int, say: Callable[[str], None],
        record: Record | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, state, network, multiple)
        assert isinstance(state.optimizer, RatedOptimizer)
        device = state.world.device
        self._optimizer = state.optimizer
        self._optimizer.use_tensor(device)
        self._say, self._record = say, record
        self._keys = torch.zeros(len(draw_keys(0, 0)), dtype=torch.int64, device=device)
        self._epoch: int | None = None
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._before: list[torch.Tensor] = []
        self._seen: dict[int, int] = {}
        self._recorded: _Recorded | None = None
        self._failed = False

    def __call__(self, batch: Batch, epoch: int, when: float) -> None:
        kind = self._optimizer.kind
        if not self._failed and self._is_due(batch, kind):
            self._try(batch, kind)
        recorded = self._recorded
        if recorded is not None and kind in recorded.updates and _shape(batch) == _shape(recorded.inputs):
            self._replay(recorded, batch, kind, epoch, when)
        else:
            super().__call__(batch, epoch, when)

    def _is_due(self, batch: Batch, kind: int) -> bool:
        """Whether a step of this kind is to be recorded now. The same on all ranks."""
        if self._recorded is not None:
            return batch.total == self._recorded.inputs.total and kind not in self._recorded.updates
        self._seen[batch.total] = self._seen.get(batch.total, 0) + 1
        return self._seen[batch.total] > WARM_UP

    def _try(self, batch: Batch, kind: int) -> None:
        """Records on all ranks, or on none. Collective."""
        error = ""
        try:
            self._make(batch, kind)
        except Exception as caught:  # noqa: BLE001 - whatever a model does that cannot be recorded; eager steps go on
            error = f"{type(caught).__name__}: {str(caught).splitlines()[0] if str(caught) else ''}"
        errors = all_gather_trees(error, self.state.world)
        self.state.sync.zero_grad()
        failed = next(((rank, text) for rank, text in enumerate(errors) if text), None)
        if failed is not None:
            self._failed, self._recorded = True, None
            self._say(f"the step cannot be recorded (rank {failed[0]}: {failed[1]}); it runs eagerly")

    def _make(self, batch: Batch, kind: int) -> None:
        if self._record is None:
            self._record = CudaGraphs()
        state, looks = self.state, self.config.nonfinite != "ignore"
        if batch.weight != 1.0:
            raise ValueError("this rank has no sample of the batch")
        recorded = self._recorded or _Recorded(self._inputs(batch))
        if _shape(batch) != _shape(recorded.inputs):
            raise ValueError("this rank's part of the batch changes its size")
        inputs = recorded.inputs
        if self._recorded is None:
            self._before = [tensor.clone() for tensor in self.statistics()] if looks else []

        def gradients() -> None:
            for kept, tensor in zip(self._before, self.statistics()):
                kept.copy_(tensor)
            state.sync.zero_grad()
            self.backward(inputs, self._keys)
            state.sync.finish(StepClock())  # no clock can be read inside a recording
            if looks:
                self.grad_norm = state.sync.grad_norm()
                self._finite.copy_(torch.isfinite(self.grad_norm))

        def both() -> None:
            gradients()
            self.update()

        sent, taken = state.sync.bytes_sent, self._optimizer.taken
        try:
            if self._recorded is None and looks:
                recorded.gradients = self._record(gradients)
                recorded.norm = self.grad_norm
            self.grad_norm = recorded.norm
            recorded.updates[kind] = self._record(self.update if looks else both)
            recorded.norms[kind] = self.grad_norm
            recorded.bytes_sent = max(recorded.bytes_sent, state.sync.bytes_sent - sent)
        finally:
            state.sync.bytes_sent, self._optimizer.taken = sent, taken  # nothing has run yet
        self._recorded = recorded

    def _inputs(self, batch: Batch) -> Batch:
        """Tensors of its own for the recording to read."""
        images = batch.images if self._resident(batch) else batch.images.clone()
        return Batch(images, batch.rows.clone(), batch.ids.clone(), batch.labels.clone(), batch.total, batch.weight)

    def _resident(self, batch: Batch) -> bool:
        """Whether `batch` is rows of images that stay where they are, rather than images of its own."""
        return len(batch.images) > len(batch.rows)

    def _replay(self, recorded: _Recorded, batch: Batch, kind: int, epoch: int, when: float) -> None:
        state, inputs, taken = self.state, recorded.inputs, self._optimizer.taken
        set_rates(state.optimizer, self.config.optim, when)
        if epoch != self._epoch:
            self._keys.copy_(torch.tensor(draw_keys(self.config.seed, epoch)))
            self._epoch = epoch
        inputs.rows.copy_(batch.rows)
        inputs.ids.copy_(batch.ids)
        inputs.labels.copy_(batch.labels)
        if inputs.images is not batch.images:
            inputs.images.copy_(batch.images)
        self.grad_norm = recorded.norms[kind]
        state.sync.bytes_sent += recorded.bytes_sent
        if recorded.gradients is not None:
            recorded.gradients()
            if not bool(self._finite):
                self.restore(self._before)
                state.sync.abandon()
                raise NonFinite
        recorded.updates[kind]()
        self._optimizer.taken = taken + 1


def _shape(batch: Batch) -> tuple[int, int, float]:
    return len(batch.rows), batch.total, batch.weight
