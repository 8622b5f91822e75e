"""Records what a CUDA graph would, on a CPU: the operators of a body, on the very tensors that they were called with.

Python code is not part of a recording: a replay calls the operators again on the same memory, whatever the objects of the
program refer to by then. As under CUDA, recording leaves all memory as it was, and a look at a value is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_LOOKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default)


class OperatorRecorder(TorchDispatchMode):
    """`recorder(body)` records it and gives back what replays it; `replays` counts the replays of all recordings."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0
        self._calls: list[Callable[[], Any]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        self._calls, self._before = [], {}
        random = torch.get_rng_state()
        try:
            with self:
                body()
        finally:
            torch.set_rng_state(random)
            for storage, kept in self._before.values():
                storage.copy_(kept)
        calls = self._calls

        @torch.no_grad()
        def replay() -> None:
            self.replays += 1
            for call in calls:
                call()

        return replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            raise RuntimeError("operation not permitted when stream is capturing")
        if func.namespace == "c10d":
            assert func is torch.ops.c10d.allreduce_.default, f"the recorder does not know {func}"
            (tensors,) = args[:1]
            self._keep(tensors)
            self._calls.append(lambda: [dist.all_reduce(tensor) for tensor in tensors])
            return func(*args, **kwargs)
        arguments = [*zip(func._schema.arguments, args)]
        arguments += [
            (argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs
        ]
        written = [value for argument, value in arguments if argument.alias_info and argument.alias_info.is_write]
        self._keep(written)
        if func is torch.ops.aten.native_batch_norm.default:
            self._keep(args[3:5])  # the running statistics, of which its schema says nothing
        found = func(*args, **kwargs)
        if written:
            self._calls.append(lambda: func(*args, **kwargs))
        elif not any(returned.alias_info for returned in func._schema.returns):  # a view stays where it is
            self._calls.append(lambda: self._again(func, args, kwargs, found))
        return found

    @staticmethod
    def _again(func: Any, args: Any, kwargs: Any, found: Any) -> None:
        for old, new in zip(_tensors(found), _tensors(func(*args, **kwargs)), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.detach().copy_(new)

    def _keep(self, values: Any) -> None:
        for tensor in _tensors(values):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._before:
                self._before[storage.data_ptr()] = storage, storage.clone()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
