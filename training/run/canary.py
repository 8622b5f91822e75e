"""Whether this machine computes what the run has computed before: same bits are a matter of threads, instruction set and libraries, too.

At the first step of a run under `sync.name=exact`, what each network is called with in the first part of the batch is kept, for good. With
every checkpoint goes a digest of what comes of it under the weights of that checkpoint: outputs, and the gradients of a fixed
linear function of them; and of a few operations on fixed numbers, as optimizers use them. At a start every rank computes the digest
anew. Another digest means other bits from here on, and the start is refused.

It is a proof by example, and shows what differs in the arithmetic of this network. It does not show what a script computes by itself.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lockstep.training.checkpoint.generators import Drawing
from lockstep.training.contract import UserError
from lockstep.training.data import trees
from lockstep.training.models.arithmetic import kept_buffers, put_back
from lockstep.training.parallel.exchange import all_gather_trees, broadcast_tree, named, split
from lockstep.training.run.context import RunContext
from lockstep.training.run.replica import Replica

MOST_BYTES = 64 << 20
"""Of what is kept of the calls of one network."""


class Canary:
    """Of one attempt. All ranks call the same methods in the same order."""

    def __init__(self, run: RunContext, replica: Replica) -> None:
        self.run, self.replica = run, replica
        self._checked = False
        self._calls: dict[str, Any] = run.state.canary.get("calls", {})
        self._hooks = [] if self._calls else [self._keep_calls(name, network) for name, network in self._networks()]

    def _networks(self) -> Iterator[tuple[str, nn.Module]]:
        return iter(self.replica.named_networks.items())

    def _keep_calls(self, name: str, network: nn.Module) -> Any:
        """Keeps what the network is called with next."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in self._calls or not torch.is_grad_enabled():
                return
            kind = self.run.world.device.type
            dtype = (
                str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else None
            )
            call = {"args": list(args), "kwargs": kwargs, "autocast": dtype}
            try:
                _, tensors = split(call)
            except TypeError as error:
                self.run.console.warn(
                    f"the network {name} is called with what no checkpoint can hold ({error}): a start on a machine that computes other "
                    "bits is not refused"
                )
                self._calls[name] = None
                return
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            self._calls[name] = (
                None if size > MOST_BYTES else trees.mapped(call, lambda tensor: tensor.detach().clone())
            )

        return network.register_forward_pre_hook(hook, with_kwargs=True)

    def before_step(self) -> None:
        """Before the first step of an attempt that resumes, every rank computes what the checkpoint's digest is of. Raises `UserError`
        on all ranks where one computes something else. Collective."""
        if self.run.state.canary and not self._checked:
            self._compare(self.run.state.canary)

    def after_step(self) -> None:
        """After the first step of a run, every rank computes what rank 0 does. Raises `UserError` on all ranks. Collective."""
        if self._checked:
            return
        for hook in self._hooks:
            hook.remove()
        self._calls = broadcast_tree(self._calls if self.run.world.leader else None, self.run.world)
        self._compare(None)

    def _compare(self, saved: dict[str, Any] | None) -> None:
        self._checked = True
        found = all_gather_trees([self.digest(), surroundings(self.run.world.device)], self.run.world)
        expected, about = (saved["digest"], saved["surroundings"]) if saved is not None else found[0]
        other = [rank for rank, (digest, _) in enumerate(found) if digest != expected]
        if not other:
            return
        now = found[other[0]][1]
        different = ", ".join(
            f"{name}: {about.get(name)} → {now[name]}" for name in now if about.get(name) != now[name]
        )
        than = "before" if saved is not None else "rank 0"
        error = UserError(
            f"rank {named(other)} computes other bits than {than}, and under sync.name=exact a run would end in other weights "
            f"({different or 'nothing that is known differs'}): undo the difference, or start over in another run directory"
        )
        error.shared = True
        raise error

    def renew(self) -> None:
        """Before a save: the digest under the weights that are saved."""
        if self.run.world.leader:
            self.run.state.canary = {
                "calls": self._calls, "digest": self.digest(), "surroundings": surroundings(self.run.world.device)
            }  # fmt: skip

    def digest(self) -> str:
        """sha256 of what this rank computes. Leaves no trace in buffers, generators and gradients."""
        found, device = hashlib.sha256(arithmetic(self.run.world.device)), self.run.world.device
        before = kept_buffers(self.replica.model)
        with Drawing(device, every=True) as drawing:
            for name, network in self._networks():
                call = self._calls.get(name)
                if call is not None:
                    drawing.begin(0)
                    for tensor in _outputs_and_gradients(network, trees.to_device(call, device), device):
                        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        put_back(self.replica.model, before)
        return found.hexdigest()


def _outputs_and_gradients(network: nn.Module, call: dict[str, Any], device: torch.device) -> list[torch.Tensor]:
    dtype = call["autocast"]
    with (
        torch.autocast(device.type, getattr(torch, dtype or "bfloat16"), enabled=dtype is not None),
        torch.enable_grad(),
    ):
        output = network(*call["args"], **call["kwargs"])
    outputs: list[torch.Tensor] = []
    trees.mapped(output, outputs.append)
    floating = [one for one in outputs if one.requires_grad]
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if not floating:
        return outputs
    functions = [(one.float().flatten() * _numbers(one.numel(), device)).sum() for one in floating]
    gradients = torch.autograd.grad(torch.stack(functions).sum(), parameters, allow_unused=True)
    return [*outputs, *(gradient for gradient in gradients if gradient is not None)]


def _numbers(count: int, device: torch.device) -> torch.Tensor:
    """Fixed numbers from −1 to 1."""
    return torch.arange(count, device=device).mul_(7919).remainder_(2003).float().div_(1001).sub_(1)


def arithmetic(device: torch.device) -> bytes:
    """What a few operations give on fixed numbers: sums over many elements, whose order follows from threads and instruction set;
    what optimizers do; numbers below float32's normal range."""
    x, y = _numbers(300_007, device), _numbers(300_007, device).flip(0)
    small = torch.full((8,), 1e-20, device=device)
    square = x[: 256 * 256].view(256, 256)
    found = [
        x.sum(), torch.linalg.vector_norm(x), x.exp().mean(), torch.addcdiv(x, y, y.abs() + 0.1, value=-0.37),
        torch.addcmul(x, y, y, value=0.11), torch.lerp(x, y, 0.9), torch.softmax(square, 1), square @ square.T, small * small,
    ]  # fmt: skip
    return b"".join(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in found)


def surroundings(device: torch.device) -> dict[str, Any]:
    """What bits depend on, as far as it can be asked for: to name what differs."""
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA", "not set"),
        "MKL_ENABLE_INSTRUCTIONS": os.environ.get("MKL_ENABLE_INSTRUCTIONS", "not set"),
        "oneDNN": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "numbers below the normal range": "kept"
        if float(torch.tensor(1e-20) * torch.tensor(1e-20))
        else "flushed to zero",
    }
