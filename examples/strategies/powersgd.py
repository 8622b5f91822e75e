"""Gradients as low-rank products: torch's PowerSGD hook under DDP. For models of many MB on slow networks.

    lockstep run smoke --ranks 2 --set sync.name=examples.strategies.powersgd:PowerSgd 'sync.options={rank: 2}'

Lossy: what a rank's compression leaves out is added to its next gradient (error feedback), so it arrives later, not
never. That memory differs by rank and is part of the checkpoint, beside the warm start and the step count: a resumed
run compresses as the uninterrupted one does. At another world size every rank starts from the mean of the errors, which
keeps their sum over the ranks.

T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression" (2019).
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lockstep.training.config import Number, Positive
from lockstep.training.parallel.world import World
from lockstep.training.sync.ddp import Ddp, DdpOptions

_CALLBACK = "Got the following error when running the callback: RuntimeError: "


class PowerSgdOptions(DdpOptions):
    rank: Positive = 2
    """Rank of the approximation: bytes and accuracy rise with it."""
    start: int = Field(default=100, ge=2)
    """Steps that send whole gradients first; about a tenth of the run. At least 2."""
    error_feedback: bool = True
    """Add to the next gradient what compression left out of this one."""
    warm_start: bool = True
    """Begin each approximation with the last one."""
    min_rate: Number = Field(default=2.0, ge=1)
    """Send a matrix whole where compression would save less than this factor."""


class PowerSgd(Ddp):
    Options = PowerSgdOptions
    has_memory = True
    one_model = True

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:
        if example is None:  # a later warm-up would change the start of the approximation
            raise self.refuse("needs an example batch from the start", "hand one to replicate(model, example=…)")
        if (
            world.device.type != "cuda" and torch.cuda.is_available()
        ):  # torch's hook then waits for the device, as for a GPU
            raise self.refuse(
                "cannot compress on the CPU while GPUs are visible", "set device=cuda, or CUDA_VISIBLE_DEVICES="
            )
        # Gradients are read as matrices. Convolutions follow the layout of their images, whatever that of their weights.
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        scalars = [name for name, p in model.named_parameters() if p.requires_grad and p.ndim == 0]
        if scalars:
            raise self.refuse(
                f"cannot take a parameter without dimensions, and {scalars[0]} is one", "give it the shape [1]"
            )
        options = self.options
        self._state = PowerSGDState(
            None, matrix_approximation_rank=options.rank, start_powerSGD_iter=options.start,
            min_compression_rate=options.min_rate, use_error_feedback=options.error_feedback,
            warm_start=options.warm_start,
        )  # fmt: skip
        network = super().wrap(model, world, example)
        self._step_bytes = 0  # `_compress` counts
        return network

    def _warm_up(self, *args: Any, **named: Any) -> None:
        weak = weakref.WeakMethod(self._compress)  # DDP's reducer holds it; a strong one would keep the strategy alive

        def compress(state, bucket):  # type: ignore[no-untyped-def] # torch compares annotations with its classes
            method = weak()
            if method is None:
                raise RuntimeError("the powersgd strategy is gone: keep it, or its optimizer, as long as its network")
            return method(state, bucket)

        self.network.register_comm_hook(self._state, compress)
        super()._warm_up(*args, **named)
        self._state.iter = self.bytes_sent = 0  # the pass of the warm-up does not count

    def _compress(self, state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        before, compresses = state.total_numel_after_compression, state.iter >= state.start_powerSGD_iter
        # torch's hook starts its second and third collective from callbacks, whose order among several buckets differs
        # by rank. So each bucket is waited for before the next one starts.
        since = self.watch.now()
        try:
            done = powerSGD_hook(state, bucket).wait()
        except RuntimeError as error:  # torch puts its own words before the cause, once for each callback
            if type(error) is not RuntimeError:
                raise
            raise RuntimeError(str(error).replace(_CALLBACK, "")) from error
        self.watch.waited(since)
        sent = state.total_numel_after_compression - before if compresses else bucket.buffer().numel()
        if self.world.size > 1:
            self.bytes_sent += sent * bucket.buffer().element_size()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(done[0] if isinstance(done, list) else done)
        return future

    def gradients_rescaled(self, factor: float) -> None:
        for error in self._state.error_dict.values():
            error.mul_(factor)

    def forget_nonfinite(self) -> None:
        """A gradient that is not finite has made the error and the factors of its bucket non-finite: they start over."""
        memories = (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict)
        for index in list(self._state.p_memory_dict):
            bad = [not bool(torch.isfinite(memory[index]).all()) for memory in memories if index in memory]
            for memory in memories if any(bad) else ():
                memory.pop(index, None)

    def state_dict(self) -> dict[str, Any]:
        state = self._state
        algorithm, keys, position, has_gauss, cached = cast(tuple[Any, ...], state.rng.get_state())
        return {
            "step": state.iter, "errors": dict(state.error_dict), "p": dict(state.p_memory_dict),
            "q": dict(state.q_memory_dict),
            "rng": [str(algorithm), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        current, device = self._state, self.world.device
        current.iter = state["step"]
        # Copies: a tensor from a file lies at any address, and matrix products differ in their last bits by alignment.
        current.error_dict, current.p_memory_dict, current.q_memory_dict = (
            {index: tensor.to(device, copy=True) for index, tensor in state[name].items()}
            for name in ("errors", "p", "q")
        )
        algorithm, keys, position, has_gauss, cached = state["rng"]
        current.rng.set_state((algorithm, keys.numpy().astype("uint32"), position, has_gauss, cached))

    def merged_state(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        errors = {
            index: torch.stack([state["errors"][index].double() for state in states]).mean(0).to(error.dtype)
            for index, error in states[0]["errors"].items()
        }
        return {**states[0], "errors": errors}
