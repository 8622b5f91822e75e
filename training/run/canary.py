"""Whether this machine computes what the run has computed before: same bits are a matter of threads, instruction set and libraries, too.

At the first step of a run under `sync.name=exact`, what each network is called with in the first part of the batch is kept, for good. With
every checkpoint goes a digest of what comes of it under the weights of that checkpoint: outputs, and the gradients of a fixed
linear function of them; and of a few operations on fixed numbers, as optimizers use them. At a start every rank computes the digests
anew. Other bits would follow from another one, and the start is refused.

It is a proof by example, and shows what differs in the arithmetic of this network. It does not show what a script computes by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.generators import Drawing
from ..contract import UserError, named
from ..data import trees
from ..data.batches import Part
from ..models.arithmetic import kept_buffers, put_back
from ..parallel.exchange import all_gather_trees, split, tensor_bytes
from .context import RunContext
from .replica import Replica

MOST_BYTES = 64 << 20
"""Of what is kept of the calls of one network."""


class Canary:
    """Of one attempt. All ranks call the same methods in the same order."""

    def __init__(self, run: RunContext, replica: Replica) -> None:
        self.run, self.replica = run, replica
        self._checked = False
        self._calls: dict[str, Any] = run.state.canary.get("calls", {})
        """Network → what it was called with, and in which modes its modules were; None: that cannot be kept."""
        named = {} if self._calls else replica.networks
        self._hooks = [self._keep_call(name, network) for name, network in named.items()]

    def _keep_call(self, name: str, network: nn.Module) -> Any:
        """Keeps what the network is called with next."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in self._calls or not torch.is_grad_enabled():
                return
            kind = self.run.world.device.type
            half = (
                str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if torch.is_autocast_enabled(kind) else None
            )
            modes = [module.training for module in network.modules()]
            call = {"args": list(args), "kwargs": kwargs, "autocast": half, "modes": modes}
            try:
                size = sum(tensor.numel() * tensor.element_size() for tensor in split(call)[1].values())
                problem = f"it has {size} bytes, more than {MOST_BYTES}" if size > MOST_BYTES else None
            except TypeError as error:
                problem = str(error)
            self._calls[name] = trees.mapped(call, lambda tensor: tensor.detach().clone()) if problem is None else None
            if problem is not None:
                self.run.console.warn(
                    f"what the network {name} is called with cannot be kept ({problem}): a machine on which it computes other bits may "
                    "not be noticed"
                )

        return network.register_forward_pre_hook(hook, with_kwargs=True)

    def before_step(self) -> None:
        """Before the first step of an attempt that resumes. Raises `UserError` on all ranks where one computes other bits than the
        checkpoint says. Collective."""
        if self.run.state.canary and not self._checked:
            self._compare(self.run.state.canary)

    def check_alone(self) -> None:
        """Of a rank that others have admitted: ends this process where it computes other bits, as they go on without it then."""
        self._checked = True
        saved = self.run.state.canary
        if saved and [*self._digests()] != [saved["arithmetic"], saved["networks"]]:
            self.run.console.warn("this process computes other bits than the others, which go on without it")
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, part: Part) -> None:
        """After the first step of a run. Raises `UserError` on all ranks where one computes other bits than the others. Collective."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        has_first = bool(part.parts) and part.first == 0
        every = all_gather_trees(self._calls if has_first else {}, self.run.world)
        self._calls = next(filter(None, every), {})
        if self.run.world.size > 1:
            self._compare(None)

    def _compare(self, saved: dict[str, Any] | None) -> None:
        self._checked = True
        mine = [*self._digests(), surroundings(self.run.world.device)]
        every = all_gather_trees(mine, self.run.world)
        of_arithmetic, of_networks, about = every[0] if saved is None else [saved[name] for name in _KEPT]
        other = [rank for rank, found in enumerate(every) if found[:2] != [of_arithmetic, of_networks]]
        if not other:
            return
        arithmetic, networks, now = every[other[0]]
        different = ", ".join(
            f"{name}: {about.get(name)} → {now[name]}" for name in now if about.get(name) != now[name]
        )
        if not different and arithmetic == of_arithmetic and all(found[1] == networks for found in every):
            if self.run.world.leader:
                self.run.console.warn(
                    "the network computes other bits than when the checkpoint was saved, though nothing of the machine is known to "
                    "differ: a forward pass that depends on what no checkpoint holds, such as an attribute that the script changes, is not "
                    "the same after a resume unless the script sets it again"
                )
            return
        than = "the run before" if saved is not None else "rank 0"
        error = UserError(
            f"rank {named(other)} computes other bits than {than}, so that the run would end in other weights "
            f"({different or 'nothing that is known differs'}): undo the difference, or start over in another run directory"
        )
        error.shared = True
        raise error

    def renew(self) -> None:
        """Before a save: the digests under the weights that are saved."""
        if self.run.world.leader or self.run.world.live is not None:  # any rank may be the one that writes it
            digests = (*self._digests(), surroundings(self.run.world.device))
            self.run.state.canary = {"calls": self._calls, **dict(zip(_KEPT, digests, strict=True))}

    def _digests(self) -> tuple[str, str]:
        """sha256 of the arithmetic and of what the networks compute on this rank. Leaves no trace in buffers, generators, gradients."""
        found, device = hashlib.sha256(), self.run.world.device
        before = kept_buffers(self.replica.model)
        with Drawing(device, every=True) as drawing:
            for name, network in self.replica.networks.items():
                if (call := self._calls.get(name)) is not None:
                    drawing.begin(0)
                    with _in_modes(network, call["modes"]):
                        # In memory of its own: some kernels choose another algorithm by where a tensor begins.
                        call = trees.mapped(call, lambda tensor: tensor.to(device, copy=True))
                        for tensor in _outputs_and_gradients(network, call, device):
                            dense = tensor.to_dense() if tensor.is_sparse else tensor
                            found.update(tensor_bytes(dense).numpy().tobytes())
        put_back(self.replica.model, before)
        return hashlib.sha256(arithmetic(device)).hexdigest(), found.hexdigest()


_KEPT = ("arithmetic", "networks", "surroundings")


@contextlib.contextmanager
def _in_modes(network: nn.Module, modes: list[bool]) -> Iterator[None]:
    """The modules train, or do not, as they did; every parameter gets a gradient. A script may have changed both since then."""
    modules, parameters = list(network.modules()), list(network.parameters())
    before = [module.training for module in modules], [parameter.requires_grad for parameter in parameters]
    try:
        for module, mode in zip(modules, modes):
            module.training = mode
        for parameter in parameters:
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        yield
    finally:
        for module, mode in zip(modules, before[0]):
            module.training = mode
        for parameter, trained in zip(parameters, before[1]):
            parameter.requires_grad_(trained)


def _outputs_and_gradients(network: nn.Module, call: dict[str, Any], device: torch.device) -> list[torch.Tensor]:
    dtype = call["autocast"]
    with (
        torch.autocast(device.type, getattr(torch, dtype or "bfloat16"), enabled=dtype is not None),
        torch.enable_grad(),
    ):
        output = network(*call["args"], **call["kwargs"])
    outputs = trees.leaves(output)
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
    return b"".join(tensor_bytes(tensor).numpy().tobytes() for tensor in found)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def surroundings(device: torch.device) -> dict[str, Any]:
    """What bits depend on, as far as it can be asked for: to name what differs."""
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA", "not set"),
        "MKL_ENABLE_INSTRUCTIONS": os.environ.get("MKL_ENABLE_INSTRUCTIONS", "not set"),
        "oneDNN": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
        "numbers below the normal range": "kept"
        if float(torch.tensor(1e-20) * torch.tensor(1e-20))
        else "flushed to zero",
    }
