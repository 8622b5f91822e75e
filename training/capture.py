"""The whole training step as CUDA graphs: one launch a step in place of some two hundred.

Augmentation, forward, backward, the sum over the ranks and the update are recorded once and replayed from then on. What
changes between steps (sample numbers, labels, the epoch's keys, learning rates) is copied into tensors that the
recording reads. With the check for NaN the step is two graphs, gradients and update, with one look at the device
between them; with `nonfinite: ignore` it is one.

Steps of another shape (the short last one of an epoch) run eagerly, and so does everything where a recording fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
    if config.optim.name == "muon" and config.optim.normalise_every > 1:
        return "optim.normalise_every above 1 makes steps differ"
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
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            body()
        return graph.replay


@dataclass(slots=True)
class _Recorded:
    """One shape of batch: its input tensors and what replays the step on them."""

    inputs: Batch
    parts: list[Callable[[], None]]
    bytes_sent: int
    """What one replay hands to collectives."""


class CapturedStep(Step):
    """A `Step` that is recorded after `WARM_UP` steps of the same shape.

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
        state.optimizer.use_tensor(device)
        self._say, self._record = say, record
        self._keys = torch.zeros(len(draw_keys(0, 0)), dtype=torch.int64, device=device)
        self._epoch: int | None = None
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._before: list[torch.Tensor] = []
        self._seen: dict[tuple[int, int, float], int] = {}
        self._recorded: dict[tuple[int, int, float], _Recorded] = {}
        self._failed = False

    def __call__(self, batch: Batch, epoch: int, when: float) -> None:
        shape = (len(batch.rows), batch.total, batch.weight)
        recorded = self._recorded.get(shape)
        if recorded is None and not self._failed and batch.weight == 1.0:
            self._seen[shape] = self._seen.get(shape, 0) + 1
            if self._seen[shape] > WARM_UP:
                recorded = self._try(batch, shape)
        if recorded is None:
            super().__call__(batch, epoch, when)
        else:
            self._replay(recorded, batch, epoch, when)

    def _try(self, batch: Batch, shape: tuple[int, int, float]) -> _Recorded | None:
        """Records on all ranks, or on none. Collective."""
        error = ""
        try:
            recorded = self._make(batch)
        except Exception as caught:  # noqa: BLE001 - whatever a model does that cannot be recorded; eager steps go on
            error = f"{type(caught).__name__}: {str(caught).splitlines()[0] if str(caught) else ''}"
        errors = all_gather_trees(error, self.state.world)
        self.state.sync.zero_grad()
        failed = next(((rank, text) for rank, text in enumerate(errors) if text), None)
        if failed is not None:
            self._failed = True
            self._recorded.clear()
            self._say(f"the step cannot be recorded (rank {failed[0]}: {failed[1]}); it runs eagerly")
            return None
        self._recorded[shape] = recorded
        return recorded

    def _make(self, batch: Batch) -> _Recorded:
        if self._record is None:
            self._record = CudaGraphs()
        state, looks = self.state, self.config.nonfinite != "ignore"
        inputs = Batch(
            batch.images, batch.rows.clone(), batch.ids.clone(), batch.labels.clone(), batch.total, batch.weight
        )
        if not self._resident(batch):
            inputs = Batch(batch.images.clone(), inputs.rows, inputs.ids, inputs.labels, batch.total, batch.weight)
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

        sent = state.sync.bytes_sent
        parts = [self._record(gradients), self._record(self.update)] if looks else [self._record(both)]
        sent, state.sync.bytes_sent = state.sync.bytes_sent - sent, sent
        return _Recorded(inputs, parts, sent)

    def _resident(self, batch: Batch) -> bool:
        """Whether `batch` is rows of images that stay where they are, rather than images of its own."""
        return len(batch.images) > len(batch.rows)

    def _replay(self, recorded: _Recorded, batch: Batch, epoch: int, when: float) -> None:
        state, inputs = self.state, recorded.inputs
        set_rates(state.optimizer, self.config.optim, when)
        if epoch != self._epoch:
            self._keys.copy_(torch.tensor(draw_keys(self.config.seed, epoch)))
            self._epoch = epoch
        inputs.rows.copy_(batch.rows)
        inputs.ids.copy_(batch.ids)
        inputs.labels.copy_(batch.labels)
        if inputs.images is not batch.images:
            inputs.images.copy_(batch.images)
        recorded.parts[0]()
        state.sync.bytes_sent += recorded.bytes_sent
        if self.config.nonfinite != "ignore":
            if not bool(self._finite):
                self.restore(self._before)
                state.sync.abandon()
                raise NonFinite
            recorded.parts[1]()
