"""CUDA tensors whose operators are computed by the CPU's kernels, on the memory that the stand-in calls a device's.

A dispatch mode sees every operator below autograd and autocast, as a GPU would get it. It reads the devices of the
arguments, makes the CPU's views of their memory, computes there, and returns tensors of torch's own CUDA allocator. Views
and allocations are left to torch's CUDA code. While a stream is captured, and with STANDIN_LATE, an operator becomes work
that the stand-in runs later: at a launch of the graph, or when the host waits.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.processes import ROOT

OURS = ROOT / "lockstep" / "training"
"""Where the code that runs is imported from: a link to the folder `training`."""

ATEN = torch.ops.aten
LEFT_TO_TORCH = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "set_", "detach", "alias", "lift_fresh",
    "_unsafe_view", "_reshape_alias", "record_stream", "is_pinned", "_pin_memory", "_local_scalar_dense", "is_same_size",
}  # fmt: skip
"""Operators that allocate, view or ask: torch's CUDA code runs them over the stand-in."""
WAITS = {"nonzero", "masked_select", "_unique2", "unique_dim", "equal", "_linalg_eigh", "multinomial"}
"""Operators whose CUDA kernels make the host wait: it has to know the size, or the value."""
INDEXED = {"index", "index_put_", "index_put", "_index_put_impl_"}
TAKES_SEVERAL_DEVICES = {"copy_", "_to_copy", *INDEXED}
IN_FLOAT32 = {"mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "_adaptive_avg_pool2d"}
"""Half precision: a GPU multiplies it and sums in float32. Which kernels a CPU has for that depends on the processor."""
STEP = {
    ("loop.py", "step"),
    ("attempt.py", "step_done"),
    ("batches.py", "_loaded"),
    ("batches.py", "_read"),
    ("pytree.py", "to_device"),
    ("step.py", "begin_batch"),
    ("step.py", "take"),
    ("step.py", "backward"),
    ("step.py", "update"),
}
"""The functions of the loop that belong to a step: a wait of the host in one of them costs time at every step."""


class WrongDevice(RuntimeError):
    """An operator got tensors of several devices: torch's CUDA code would refuse them."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator: its overload, name, arguments, device and stream."""

    overload: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    stream: torch.cuda.Stream

    def tensors(self) -> list[torch.Tensor]:
        return _tensors((self.args, self.kwargs))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the CPU's view of a CUDA tensor's memory."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    flat = flat[: len(flat) // tensor.dtype.itemsize * tensor.dtype.itemsize].view(tensor.dtype)
    return torch.as_strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset())


class Emulation(TorchDispatchMode):
    """While it is entered, CUDA operators are computed.

    The attribute `counts` has the waits of the host, and copies between host and device, by the project's calling functions.
    `failures` holds the errors of operators that ran later: a GPU has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, collections.Counter[str]] = {
            "step": collections.Counter(),
            "else": collections.Counter(),
        }
        self.failures: list[str] = []
        self._bodies: dict[int, Callable[[], None]] = {}
        self._lib = ctypes.CDLL(None)  # the stand-in is preloaded, so its functions are this process's
        self._lib.standin_submit.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_char_p]
        self._lib.standin_captures.argtypes = self._lib.standin_reach.argtypes = [ctypes.c_void_p]
        self._compute = ctypes.CFUNCTYPE(None, ctypes.c_long)(self._run)
        self._on_wait = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda what: self._note(what.decode()))
        self._lib.standin_compute_with(self._compute)
        self._lib.standin_on_synchronisation(self._on_wait)

    def write(self, path: Path) -> None:
        """Writes the counts and failures as JSON."""
        contexts = [device for device in range(torch.cuda.device_count()) if self._lib.standin_context(device)]
        path.write_text(json.dumps({**self.counts, "failures": self.failures, "contexts": contexts}))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented  # they come back with the tensors that they hold
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if fake or any(kind.__name__ == "FakeTensor" for kind in types):
            return func(*args, **kwargs)  # DTensor asks for shapes
        tensors = _tensors((args, kwargs))
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if not any(tensor.is_cuda for tensor in tensors) and (target is None or target.type != "cuda"):
            # The run on the CPU is the other side: which kernel it has for half precision depends on the processor.
            return _called(func, func.overloadpacket.__name__, args, kwargs)
        if target is not None and target.type == "meta":
            return func(*args, **kwargs)  # there is nothing to compute
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional"):
            return func(*args, **kwargs)
        if func.namespace not in ("aten", "prims"):
            return self._foreign(func, name, args, kwargs)
        if name in LEFT_TO_TORCH or func.is_view:
            return func(*args, **kwargs)
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
        if target is not None:
            device = target
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        stream = torch.cuda.current_stream(device if device.type == "cuda" else None)
        call = Call(func, name, args, kwargs, device, stream)
        self._check_devices(call)
        waits = self._crossing(call) or self._looks_at_values(call)
        later = self._lib.standin_late() or self._lib.standin_captures(stream.cuda_stream)
        result = self._later(call) if later else self._now(call)
        if waits:
            self._check(torch.cuda.current_stream(stream.device).cuda_stream, "cudaStreamSynchronize")
        return result

    def _foreign(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator of another namespace (torch's FSDP has some), whose CUDA implementation calls emulated operators."""
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CUDA) and name != "record_grad_output_stream":
            with self:
                return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
        return func(*args, **kwargs)

    def _check_devices(self, call: Call) -> None:
        """As torch's CUDA operators do: one device, except for numbers without a dimension from the host."""
        if call.name in TAKES_SEVERAL_DEVICES:
            return
        devices = {tensor.device for tensor in call.tensors() if tensor.is_cuda or tensor.dim() > 0}
        if len(devices) > 1:
            raise WrongDevice(f"{call.name} of tensors on {', '.join(sorted(map(str, devices)))}")

    def _crossing(self, call: Call) -> bool:
        """Returns whether the call copies between host and device and makes the host wait."""
        if call.name not in ("copy_", "_to_copy"):
            return False
        source = call.args[1] if call.name == "copy_" else call.args[0]
        target = call.args[0].device if call.name == "copy_" else call.device
        if source.device.type == target.type:
            return False
        host = source if source.device.type == "cpu" else call.args[0] if call.name == "copy_" else None
        pinned = host is not None and host.device.type == "cpu" and host.is_pinned()
        non_blocking = bool(
            call.kwargs.get("non_blocking") or (call.name == "copy_" and len(call.args) > 2 and call.args[2])
        )
        words = ["copy", f"{source.device.type}->{target.type}", "pinned" if pinned else "pageable"]
        self._note(" ".join([*words, *([] if non_blocking else ["blocking"])]))
        return not non_blocking

    def _looks_at_values(self, call: Call) -> bool:
        if call.name in WAITS:
            return True
        if call.name not in INDEXED:
            return False
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in call.args[1])

    def _now(self, call: Call) -> Any:
        """Computes the operator at once, after the earlier work of its stream."""
        self._lib.standin_reach(call.stream.cuda_stream)
        with _drawing(_seed_of(call)):
            result = _compute(call, host_view)
        self._submit(call, 0)
        return _given_back(call, result, keep=True)

    def _later(self, call: Call) -> Any:
        """Returns the result's shapes now, from zeros; the stream computes the numbers later."""
        with torch.random.fork_rng(devices=[]):
            scratch: dict[int, torch.Tensor] = {}
            shapes = _compute(call, lambda tensor: scratch.setdefault(id(tensor), _zeros(tensor)))
        result = _given_back(call, shapes, keep=False)
        seed = None if self._lib.standin_captures(call.stream.cuda_stream) else _seed_of(call)
        # A GPU reads addresses: nothing of Python's tensors is kept alive for it.
        views = {id(tensor): host_view(tensor) for tensor in call.tensors() if tensor.is_cuda}
        args, kwargs = _replaced(call, lambda tensor: views[id(tensor)])
        if call.name in ("copy_", "_to_copy") and not self._lib.standin_captures(call.stream.cuda_stream):
            source = 1 if call.name == "copy_" else 0
            if not call.args[source].is_cuda and not call.args[source].is_pinned():
                args[source] = call.args[source].clone()  # pageable memory is read at the call
        places = [
            [host_view(tensor) if tensor.is_cuda else tensor for tensor in _tensors(value)] if _is_new(kind) else []
            for kind, value in zip(call.overload._schema.returns, _outputs(call, result))
        ]

        def body() -> None:
            with _drawing(seed):
                outputs = _outputs(call, _called(call.overload, call.name, args, kwargs))
            for place, tensor in (
                (a, b) for some, value in zip(places, outputs) for a, b in zip(some, _tensors(value))
            ):
                if place.numel():
                    place.copy_(tensor)

        number = len(self._bodies) + 1
        self._bodies[number] = body
        self._submit(call, number)
        return result

    def _submit(self, call: Call, number: int) -> None:
        error = self._lib.standin_submit(call.stream.cuda_stream, number, call.name.encode())
        if error:
            raise RuntimeError(f"CUDA error {error} in {call.name}")

    def _check(self, stream: int, what: str) -> None:
        """Makes the host wait, as the operator does. CUDA reports whether it may."""
        error = self._lib.cudaStreamSynchronize(ctypes.c_void_p(stream))
        if error == 900:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")

    def _run(self, number: int) -> None:
        try:
            with torch.no_grad():
                self._bodies[number]()
        except BaseException:
            self.failures.append(traceback.format_exc())

    def _note(self, what: str) -> None:
        """Counts a wait or a copy for the project's innermost function on the stack."""
        places: list[str] = []
        in_step = False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(OURS):
                in_step = in_step or (path.name, frame.f_code.co_name) in STEP
                places.append(f"{path.relative_to(OURS)}:{frame.f_code.co_name}")
            frame = frame.f_back
        if places:  # not torch's own threads
            self.counts["step" if in_step else "else"][f"{what} by {places[0]}"] += 1


def _seed_of(call: Call) -> int | None:
    """Returns the position of an operator's CUDA generator, which advances as a launch advances it. None if the operator draws
    nothing.

    The numbers are not a GPU's. In a capture torch keeps the position in the graph, and advances it at a launch by the kernels'
    requests. No kernel requests any here, so there the CPU's generator draws.
    """
    if torch.Tag.nondeterministic_seeded not in call.overload.tags or call.device.type != "cuda":
        return None
    generators = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, torch.Generator)]
    generator = generators[0] if generators else torch.cuda.default_generators[call.device.index]
    place = generator.initial_seed(), generator.get_offset()
    generator.set_offset(place[1] + 4)
    return hash(place) % 2**63


@contextlib.contextmanager
def _drawing(seed: int | None) -> Iterator[None]:
    """Seeds the CPU's generator in place of the GPU's, and restores it afterwards. None: changes nothing."""
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield


def _replaced(call: Call, view: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
    """Returns the arguments for the CPU's operator."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return view(value) if value.is_cuda else value
        if isinstance(value, torch.Generator) and value.device.type == "cuda":
            return None
        return torch.device("cpu") if isinstance(value, torch.device) else value

    args, kwargs = tree_map(convert, list(call.args)), tree_map(convert, dict(call.kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    return args, kwargs


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()


def _compute(call: Call, view: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return _called(call.overload, call.name, *_replaced(call, view))


def _called(overload: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "cudnn_batch_norm":
        x, weight, bias, mean, variance, training, momentum, epsilon = args
        out = ATEN.native_batch_norm(x, weight, bias, mean, variance, training, momentum, epsilon)
        return (*out, torch.empty(0, dtype=torch.uint8))
    if name == "cudnn_batch_norm_backward":
        x, grad, weight, mean, variance, saved_mean, saved_variance, epsilon, _ = args
        return ATEN.native_batch_norm_backward(
            grad, x, weight, mean, variance, saved_mean, saved_variance, True, epsilon, [True, True, True]
        )
    kinds = {tensor.dtype for tensor in _tensors(args)}
    if name in IN_FLOAT32 and len(kinds) == 1 and (kind := kinds.pop()) in (torch.float16, torch.bfloat16):
        wide = tree_map(lambda value: value.float() if isinstance(value, torch.Tensor) else value, args)
        return tree_map(
            lambda value: value.to(kind) if isinstance(value, torch.Tensor) else value, overload(*wide, **kwargs)
        )
    return overload(*args, **kwargs)


def _outputs(call: Call, result: Any) -> list[Any]:
    """Returns one output for each that the schema names."""
    several = isinstance(result, (tuple, list)) and len(call.overload._schema.returns) != 1
    return list(result) if several else [result]


def _is_new(kind: Any) -> bool:
    """Returns whether the schema promises a new tensor here, not a written argument."""
    return kind.alias_info is None or not kind.alias_info.is_write


def _given_back(call: Call, result: Any, keep: bool) -> Any:
    """Returns new outputs in tensors of torch's allocator, with the numbers if `keep`, and written arguments themselves."""
    returns = call.overload._schema.returns
    outputs = []
    for kind, value in zip(returns, _outputs(call, result)):
        if _is_new(kind):
            outputs.append(
                tree_map(lambda leaf: _new(leaf, call.device, keep) if isinstance(leaf, torch.Tensor) else leaf, value)
            )
        else:
            outputs.append(_written(call, kind))
    return result if not returns else outputs[0] if len(returns) == 1 else tuple(outputs)


def _written(call: Call, kind: Any) -> Any:
    for number, parameter in enumerate(call.overload._schema.arguments):
        written = parameter.alias_info is not None and parameter.alias_info.is_write
        if written and parameter.alias_info.before_set & kind.alias_info.before_set:
            return call.kwargs[parameter.name] if parameter.name in call.kwargs else call.args[number]
    raise AssertionError(call.overload)


def _new(tensor: torch.Tensor, device: torch.device, keep: bool) -> torch.Tensor:
    if device.type == "cpu":
        return tensor
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if keep and tensor.numel():
        host_view(copy).copy_(tensor)
    return copy
