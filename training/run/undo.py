"""Undoes the changes of a call of a script's function: to tensors, and to the variables, attributes, lists and dictionaries that it
reaches. It restores the states of the generators, too.

    undo = Undo(function)   # raises `Unsafe` if the function reaches an iterator, a file, a thread, a logger or an unknown package
    with undo.calls():
        function(x, y)
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import re
import sys
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import generators
from ..parallel.packing import storage
from ..resilience.closeness import BATCH_STATISTICS

_MOST, _ITEMS, _MOST_BYTES = 30_000, 1000, 1 << 27
"""Limits: objects to inspect, items of a container, bytes to copy of arrays and of tensors that a call writes to."""
_OUTSIDE = {
    "_contextvars", "_csv", "_io", "_queue", "_thread", "asyncio", "concurrent", "contextvars", "csv", "http", "io", "logging",
    "multiprocessing", "queue", "shelve", "socket", "sqlite3", "subprocess", "threading", "urllib",
}  # fmt: skip
"""Python's packages whose objects reach beyond this process, have a position that a call moves, or belong to several threads."""
_KNOWN = re.compile(
    "PIL|accelerate|datasets|einops|lockstep|numpy|peft|scipy|sklearn|timm|torch|torchvision|transformers|triton"
)
"""Installed packages that a call may use. Other packages may report, or keep a state that `Undo` does not see."""
_CONTAINERS: tuple[type[Any], ...] = (OrderedDict, dict, list, deque, set, tuple, frozenset)
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.Tensor}
"""Types of immutable values, and tensors, whose writes `Watching` sees."""
_WRITES = {"input", "open", "print", "stderr", "stdout", "system", "write", "write_bytes", "write_text"}
_OF_SESSION = {"event", "log", "print", "stop", "summary", "values"}
"""Attributes of a session through which a call makes changes that cannot be undone."""
_HOLDERS = (functools.partial, types.MethodType, types.BuiltinFunctionType, staticmethod, classmethod, property)
"""Types of immutable objects that hold a function or an object."""


class Unsafe(Exception):
    """A function reaches an object whose changes cannot be undone."""


class Watching(TorchDispatchMode):
    """Watcher of each torch operation in the block. It runs no collective, and copies a tensor before the first write to it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collective: str | None = None
        """The last collective that was called, which raised `Unsafe`; None: none was called."""
        self.is_low = False
        """Whether a result has floating-point numbers of 16 bits or less."""
        self._made: set[int | None] = {None}
        """The memory of the block's results, whose writes need no undoing."""
        self._written: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        """(memory, offset, shape, strides, dtype) → (tensor, copy from before the first write)."""
        self._bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self.collective = func._opname.strip("_")
            raise Unsafe(self.collective)
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.note(args[place] if place < len(args) else kwargs.get(argument.name))
        results = func(*args, **kwargs)
        if not any(result.alias_info for result in func._schema.returns):
            for result in results if isinstance(results, (list, tuple)) else [results]:
                if isinstance(result, torch.Tensor):
                    self._made.add(storage(result))
                    self.is_low |= result.is_floating_point() and result.element_size() < 4
        return results

    def note(self, written: Any) -> None:
        """Copies a tensor, or each of several, before a write to it."""
        for tensor in written if isinstance(written, (list, tuple)) else [written]:
            if not isinstance(tensor, torch.Tensor) or (memory := storage(tensor)) in self._made:
                continue
            place = memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
            if place not in self._written:
                self._bytes = _added(self._bytes, tensor.nbytes)
                self._written[place] = tensor.detach(), tensor.clone()

    @torch.no_grad()
    def undo(self) -> None:
        """Restores the tensors that the block has written to."""
        for tensor, before in reversed(self._written.values()):
            tensor.copy_(before)
        self._written.clear()


class Undo:
    """The present state of everything that a call of the function may change.

    Args:
        batch: the arguments of the function, which it may change, too.

    Raises:
        Unsafe: a change of the function could not be undone.
    """

    def __init__(self, function: Callable[..., Any], batch: Any = None) -> None:
        self.modules: list[nn.Module] = []
        self.watching = Watching()
        self._put_back: list[Callable[[], object]] = []
        self._generators: list[tuple[Any, Any]] = []
        self.names: set[str] = set()
        """Global names and attributes in the code of the script's functions."""
        self._bytes = 0
        self._seen: dict[int, Any] = {}
        hooks = nn.modules.module
        self._waiting: list[Any] = [function, batch, hooks._global_forward_hooks, hooks._global_forward_pre_hooks]
        has_session = False
        while self._waiting:
            value = self._waiting.pop()
            if id(value) in self._seen or type(value) in _PLAIN - {torch.Tensor}:
                continue
            self._seen[id(value)] = value
            has_session |= type(value).__name__ == "Session" and type(value).__module__.startswith("lockstep.")
            if len(self._seen) > _MOST:
                raise Unsafe("too many objects")
            self._look(value)
        if self.names & _WRITES or (has_session and self.names & _OF_SESSION):
            raise Unsafe("a file, or the session's log")

    def reaches(self, things: Iterable[Any]) -> bool:
        """Returns whether the function reaches one of these objects."""
        return any(id(thing) in self._seen for thing in things)

    @property
    def drew(self) -> bool:
        """Whether a generator of the script has drawn since the construction."""
        return any(generators.comparable_state(one) != generators.comparable(state) for one, state in self._generators)

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Undoes, at the end of the block, the changes of the function's calls in it."""
        with contextlib.ExitStack() as after:  # the last one first, and each, even if another one fails
            after.callback(self.watching.undo)
            for put_back in self._put_back:
                after.callback(put_back)
            after.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)  # else a weight that is cast without a gradient is used by the step
            if "torch._dynamo" in sys.modules:  # compiled functions run eagerly, so that other shapes compile nothing
                after.enter_context(torch.compiler.set_stance("force_eager"))
            with warnings.catch_warnings(), torch.no_grad(), self.watching:
                warnings.simplefilter("ignore")
                yield

    def _look(self, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, nn.Module):
            self._look_at_module(value)
        elif issubclass(kind, torch.Tensor):
            grad = value.grad if value.is_leaf else None
            self._keep(_put_back_tensor, value, value.detach(), value.requires_grad, grad)
        elif issubclass(kind, np.ndarray):
            if value.flags.writeable:
                self._bytes = _added(self._bytes, value.nbytes)
                self._keep(np.copyto, value, value.copy())
        elif generators.is_generator(value):
            self._generators.append((value, generators.state_of(value)))
            self._keep(generators.set_state, *self._generators[-1])
        elif hasattr(kind, "__next__") or kind in (bytearray, memoryview) or _is_outside(value):
            raise Unsafe(kind.__name__)
        elif kind is types.FunctionType:
            self._look_at_function(value)
        elif issubclass(kind, type):
            if is_of_script(root_of(value)):
                self._keep(_put_back_class, value, dict(vars(value)))
                self._waiting += [*value.__mro__, *vars(value).values()]
        elif kind is types.CellType:
            for contents in gc.get_referents(value):  # none where the variable has no value yet
                self._keep(setattr, value, "cell_contents", contents)
                self._waiting.append(contents)
        elif kind in _HOLDERS:
            self._waiting += gc.get_referents(value)
        elif not issubclass(kind, types.ModuleType) and not kind.__module__.startswith("lockstep."):
            self._look_at_object(value)

    def _keep(self, put_back: Callable[..., object], *arguments: Any) -> None:
        self._put_back.append(functools.partial(put_back, *arguments))

    def _keep_dict(self, value: dict[Any, Any], base: type[Any] = dict) -> None:
        self._keep(_put_back_dict, value, dict(base.items(value)), base)

    def _look_at_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        for name, buffer in module._buffers.items():
            if name in BATCH_STATISTICS and buffer is not None:  # torch does not say that batch norm writes to them
                self.watching.note(buffer)
        if is_of_script(root_of(module)):
            self._look_at_object(module)
            return
        self._keep_dict(vars(module))
        self._waiting += [value for value in vars(module).values() if type(value) in _CONTAINERS]

    def _look_at_object(self, value: Any) -> None:
        """Inspects the items and attributes of an object, and its classes."""
        kind = type(value)
        base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
        if base is not None:
            self._look_at_items(value, base)
        with contextlib.suppress(AttributeError):  # it has none
            attributes = object.__getattribute__(value, "__dict__")
            if type(attributes) is dict:
                self._keep_dict(attributes)
                self._waiting += attributes.values()
        if is_of_script(root_of(value)):
            self._waiting += kind.__mro__
            members = {type(one) for base in kind.__mro__ for one in vars(base).values()}
            if types.MemberDescriptorType in members and not issubclass(kind, tuple):
                raise Unsafe("__slots__")

    def _look_at_items(self, value: Any, base: Any) -> None:
        items = [*(base.values(value) if issubclass(base, dict) else base.__iter__(value))]
        if issubclass(base, dict):
            self._keep_dict(value, base)
        elif base not in (tuple, frozenset):
            self._keep(_put_back_items, value, items, base)
        if len(items) > _ITEMS and any(type(one) not in _PLAIN for one in items[:_ITEMS]):
            raise Unsafe("a long container")
        self._waiting += items[:_ITEMS]

    def _look_at_function(self, function: types.FunctionType) -> None:
        """Inspects the closure, the defaults, the attributes and the global names of a function; of a library's function those it wraps."""
        cells = function.__closure__ or ()
        if not is_of_script(root_of(function)):
            inner = gc.get_referents(*cells)
            self._waiting += [one for one in inner if isinstance(one, (types.FunctionType, nn.Module))]
            return
        self._waiting += [*cells, function.__defaults__, function.__kwdefaults__, function.__dict__]
        codes = [*codes_of(function.__code__)]
        names = {name for code in codes for name in code.co_names}
        self.names |= names
        used = [function.__globals__[name] for name in names & function.__globals__.keys()]
        imports = [one for code in codes for one in dis.get_instructions(code) if one.opname == "IMPORT_NAME"]
        used += [sys.modules[one.argval] for one in imports if one.argval in sys.modules]
        self._waiting += used
        for space in [function.__globals__, *(vars(one) for one in used if type(one) is types.ModuleType)]:
            if is_of_script(str(space.get("__name__")).partition(".")[0]):
                kept = {name: space[name] for name in names & space.keys()}
                self._keep(space.update, kept)
                self._waiting += kept.values()


def _added(before: int, more: int) -> int:
    if before + more > _MOST_BYTES:
        raise Unsafe("too much memory")
    return before + more


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a function's code, and the code of the functions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from codes_of(inner)


def root_of(value: Any) -> str:
    """Returns the top-level package of a module, a class, a function, or of an object's class."""
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        name = value.__name__
    elif kind is types.FunctionType:
        name = value.__globals__.get("__name__")
    else:
        name = (value if issubclass(kind, type) else kind).__module__
    return str(name).partition(".")[0]


def _is_outside(value: Any) -> bool:
    root = root_of(value)
    if root in _OUTSIDE or type(value).__module__.startswith(("torch.utils.tensorboard", "torch.profiler")):
        return True
    return not (_KNOWN.fullmatch(root) or root in sys.stdlib_module_names or is_of_script(root))


@functools.cache
def is_of_script(root: str) -> bool:
    """Returns whether a package is neither Python's, nor installed, nor ours."""
    if root in sys.stdlib_module_names or root in ("lockstep", "builtins"):
        return root == "__main__"
    where = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" not in where and "dist-packages" not in where


@torch.no_grad()
def _put_back_tensor(
    tensor: torch.Tensor, before: torch.Tensor, requires_grad: bool, grad: torch.Tensor | None
) -> None:
    if storage(tensor) != storage(before) or tensor.shape != before.shape:
        tensor.data = before
    if tensor.is_leaf:
        tensor.requires_grad_(requires_grad)
        tensor.grad = grad


def _put_back_dict(now: Any, before: dict[Any, Any], base: Any) -> None:
    """Restores a dictionary by the methods of `base`, since its own class may override them."""
    if [*base.keys(now)] != [*before]:
        base.clear(now)
        base.update(now, before)
    for key, value in before.items():
        if base.get(now, key, now) is not value:
            base.__setitem__(now, key, value)


def _put_back_items(now: Any, before: list[Any], base: Any) -> None:
    if base.__len__(now) == len(before) and all(one is other for one, other in zip(base.__iter__(now), before)):
        return
    base.clear(now)
    (base.update if base is set else base.extend)(now, before)


def _put_back_class(kind: type[Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if vars(kind).get(name, kind) is not value:
            setattr(kind, name, value)
    for name in vars(kind).keys() - before.keys():
        if name[:2] != "__":
            delattr(kind, name)
