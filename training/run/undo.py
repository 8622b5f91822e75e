"""Undoes what a call of a script's function changes: tensors that it writes to, and the variables, attributes, lists and dictionaries that
it reaches. Its generators draw again what they drew, and what it prints is lost.

    undo = Undo(function)   # raises `Unsafe` if the function reaches an iterator, a file or a logger
    with undo:
        function(x, y)
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import generators
from ..parallel.packing import storage
from ..resilience.closeness import BATCH_STATISTICS

_MOST, _ITEMS, _MOST_BYTES = 200_000, 100, 1 << 24
"""Objects that are looked at, items of a list, bytes of an array."""
_OUTSIDE = {
    "_csv", "_io", "_queue", "aim", "asyncio", "clearml", "comet_ml", "concurrent", "csv", "dvclive", "gym", "gymnasium", "http", "io",
    "logging", "loguru", "mlflow", "multiprocessing", "neptune", "queue", "requests", "shelve", "socket", "sqlite3", "subprocess",
    "swanlab", "tensorboard", "tensorboardX", "trackio", "urllib", "wandb",
}  # fmt: skip
"""Packages whose objects reach beyond this process, or have an order that a call moves."""
_KNOWN = {
    "PIL",
    "accelerate",
    "datasets",
    "einops",
    "numpy",
    "peft",
    "scipy",
    "sklearn",
    "timm",
    "torch",
    "torchvision",
    "transformers",
}
"""Packages whose other objects a call may use: it does not move them."""
_REPORTS = {"log", "event", "print", "stop"}
"""Methods of a session that a call does not take back."""


class Unsafe(Exception):
    """The function reaches what cannot be undone."""


class Watching(TorchDispatchMode):
    """Sees each operation inside: makes no collective, and notes a tensor's contents before the first write to it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collective: str | None = None
        """The first collective that was called."""
        self.is_low = False
        """Some result has 16 bits or less."""
        self._made: set[int | None] = {None}
        """The memory of results."""
        self._written: dict[int | None, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self.collective = func._opname.strip("_")
            raise Unsafe(self.collective)
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._note(args[place] if place < len(args) else kwargs.get(argument.name))
        results = func(*args, **kwargs)
        if not any(result.alias_info for result in func._schema.returns):
            for result in results if isinstance(results, (list, tuple)) else [results]:
                if isinstance(result, torch.Tensor):
                    self._made.add(storage(result))
                    self.is_low |= result.is_floating_point() and result.element_size() < 4
        return results

    def _note(self, written: Any) -> None:
        for tensor in written if isinstance(written, (list, tuple)) else [written]:
            if isinstance(tensor, torch.Tensor) and (memory := storage(tensor)) not in self._made:
                self._written.setdefault(memory, []).append((tensor, tensor.clone()))

    @torch.no_grad()
    def undo(self) -> None:
        """Puts back what was written to."""
        for writes in self._written.values():
            for tensor, before in reversed(writes):
                tensor.copy_(before)
        self._written.clear()


class Undo:
    """Everything that a call of the function may change, as it is now."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.modules: list[nn.Module] = []
        self.watching = Watching()
        self._put_back: list[Callable[[], None]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._names: set[str] = set()
        self._seen: dict[int, Any] = {}
        self._waiting: list[Any] = [function]
        has_session = False
        while self._waiting:
            value = self._waiting.pop()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            has_session |= type(value).__name__ == "Session" and type(value).__module__.startswith("lockstep.")
            if len(self._seen) > _MOST:
                raise Unsafe("too many objects")
            self._look(value)
        if has_session and self._names & _REPORTS:
            raise Unsafe("the session's log")

    @property
    def drew(self) -> bool:
        """Whether a generator of the script's has drawn since."""
        return any(
            generators.comparable(generators.state_of(one)) != generators.comparable(state)
            for one, state in self._generators
        )

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            _eager(),
            torch.no_grad(),
        ):
            warnings.simplefilter("ignore")
            caches = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)  # else a weight that is cast without a gradient is used by the step
            try:
                with self.watching:
                    yield
            finally:
                torch.set_autocast_cache_enabled(caches)

    def __enter__(self) -> Undo:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._inside())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        self.watching.undo()
        for put_back in self._put_back:
            put_back()
        for generator, state in self._generators:
            generators.set_state(generator, state)

    def _look(self, value: Any) -> None:
        kind = type(value)
        root = (kind.__module__ or "").partition(".")[0]
        if isinstance(value, nn.Module):
            self._look_at_module(value)
        elif isinstance(value, torch.Tensor):
            self._keep(
                functools.partial(_put_back_tensor, value, value.requires_grad, value.grad if value.is_leaf else None)
            )
        elif kind is np.ndarray:
            self._look_at_array(value)
        elif generators.is_generator(value):
            self._generators.append((value, generators.state_of(value)))
        elif isinstance(value, functools.partial):
            self._waiting += [value.func, *value.args, *value.keywords.values()]
        elif kind is types.MethodType:
            self._waiting += [value.__self__, value.__func__]
        elif kind is types.FunctionType:
            self._look_at_function(value)
        elif kind is types.ModuleType or isinstance(value, type):
            if (value.__name__ if kind is types.ModuleType else value.__module__).partition(".")[0] in _OUTSIDE:
                raise Unsafe(value.__name__)
        elif kind in (dict, OrderedDict, defaultdict, Counter):
            self._keep_dict(value)
            self._waiting += [one for _, one in zip(range(_ITEMS), value.values())]
        elif kind in (list, deque, set):
            self._keep(functools.partial(_put_back_items, value, list(value)))
            self._waiting += [one for _, one in zip(range(_ITEMS), value)]
        elif isinstance(value, (tuple, frozenset)):
            self._waiting += [one for _, one in zip(range(_ITEMS), value)]
        elif hasattr(kind, "__next__") or root in _OUTSIDE or kind.__module__.startswith("torch.utils.tensorboard"):
            raise Unsafe(kind.__name__)
        elif kind is types.BuiltinFunctionType:
            self._waiting.append(value.__self__)
        elif _is_of_script(root):
            self._look_at_object(value)
        elif root not in _KNOWN and root not in sys.stdlib_module_names and root != "lockstep":
            raise Unsafe(kind.__name__)

    def _keep(self, put_back: Callable[[], None]) -> None:
        self._put_back.append(put_back)

    def _keep_dict(self, value: dict[Any, Any]) -> None:
        self._keep(functools.partial(_put_back_dict, value, dict(value)))

    def _look_at_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        for name, buffer in module._buffers.items():
            if name in BATCH_STATISTICS and buffer is not None:  # torch does not say that batch norm writes to them
                self._keep(functools.partial(_put_back_statistics, buffer, buffer.clone()))
        if _is_of_script(type(module).__module__.partition(".")[0]):
            self._look_at_object(module)
            return
        self._keep_dict(vars(module))
        plain = (dict, OrderedDict, list, set, deque)
        self._waiting += [value for value in vars(module).values() if type(value) in plain]

    def _look_at_object(self, value: Any) -> None:
        """Of a class that the script defines: its attributes, and what its methods reach."""
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            self._keep_dict(attributes)
            self._waiting += attributes.values()
        for kind in type(value).__mro__:
            if _is_of_script(kind.__module__.partition(".")[0]):
                self._waiting += [one for one in vars(kind).values() if type(one) is types.FunctionType]

    def _look_at_array(self, array: np.ndarray[Any, Any]) -> None:
        if array.flags.writeable and array.nbytes <= _MOST_BYTES:
            self._keep(functools.partial(_put_back_array, array, array.copy()))

    def _look_at_function(self, function: types.FunctionType) -> None:
        """What its closure, its defaults and its global names hold. Of a library's function, what it wraps."""
        root = function.__globals__.get("__name__", "").partition(".")[0]
        if root in _OUTSIDE:
            raise Unsafe(function.__name__)
        cells = [cell for cell in function.__closure__ or () if not _is_empty(cell)]
        if not _is_of_script(root):
            inner = [cell.cell_contents for cell in cells]
            self._waiting += [one for one in inner if isinstance(one, (types.FunctionType, nn.Module))]
            return
        for cell in cells:
            self._keep(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
        self._waiting += [cell.cell_contents for cell in cells]
        self._waiting += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        names = set(_names(function.__code__))
        if names & {"open", "input"}:
            raise Unsafe("a file")
        self._names |= names
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            self._keep(functools.partial(function.__globals__.__setitem__, name, value))
            self._waiting.append(value)
            if type(value) is types.ModuleType and _is_of_script(value.__name__.partition(".")[0]):
                self._waiting += [vars(value)[one] for one in names & vars(value).keys()]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


@functools.cache
def _is_of_script(root: str) -> bool:
    """Whether a package is neither Python's, nor installed, nor ours."""
    if root in sys.stdlib_module_names or root in ("lockstep", "builtins"):
        return root == "__main__"
    where = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" not in where and "dist-packages" not in where


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Inside, what was compiled runs as it was written: other shapes are not compiled anew."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager


def _put_back_tensor(tensor: torch.Tensor, requires_grad: bool, grad: torch.Tensor | None) -> None:
    if tensor.is_leaf:
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if tensor.grad is not grad:
            tensor.grad = grad


@torch.no_grad()
def _put_back_statistics(now: torch.Tensor, before: torch.Tensor) -> None:
    if not torch.equal(now, before):
        now.copy_(before)


def _put_back_dict(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    if len(now) != len(before) or any(now.get(key, now) is not value for key, value in before.items()):
        now.clear()
        now.update(before)


def _put_back_items(now: Any, before: list[Any]) -> None:
    if len(now) != len(before) or any(one is not other for one, other in zip(now, before)):
        now.clear()
        (now.update if isinstance(now, set) else now.extend)(before)


def _put_back_array(now: np.ndarray[Any, Any], before: np.ndarray[Any, Any]) -> None:
    if now.tobytes() != before.tobytes():
        now[...] = before
