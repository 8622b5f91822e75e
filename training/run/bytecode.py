"""What functions and classes of a script are, read and set, from their frames and bytecode."""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import gc
import inspect
import itertools
import re
import sys
import types
import zlib
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from .undo import codes_of, root_of

PLAIN = (type(None), bool, int, complex, str, bytes, enum.Enum)
_ENDS = ("POP_TOP", "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "YIELD_VALUE")
"""Instructions that end a statement."""
_COLLECTS = ("POP_TOP", "STORE_SUBSCR")
"""Instructions that end a statement which drops its value, as `a.append(1)` does, or sets an item."""
_LOCAL, _CONSTANT = "~", "="
_WITH_KIND = (type, types.FunctionType, types.BuiltinFunctionType, nn.Module)
_NO_SCRIPT = ("lockstep", "tqdm", "rich", "alive_progress", "progressbar", "fastprogress")
"""Packages whose running functions belong to no script: Lockstep and progress bars, through which a loop may go over its batches."""


class Kind(str):
    """A text that tells functions, classes and modules without numbers apart."""


def kind_of(value: Any) -> Kind | None:
    """Returns a text for a function, a class, or a module without numbers; None: the value is another one."""
    kind = type(value)
    if kind in (functools.partial, types.MethodType):
        return kind_of(innermost(value))
    if not issubclass(kind, _WITH_KIND):
        return None
    value = unwrapped(value)
    if issubclass(kind, nn.Module) and not (has_no_parameter(value) and next(value.buffers(), None) is None):
        return None
    about, code = kind if issubclass(kind, nn.Module) else value, code_of(value)
    name = f"{getattr(about, '__module__', '')}.{getattr(about, '__qualname__', '')}"
    constants = [] if code is None else [one for one in code.co_consts if issubclass(type(one), (*PLAIN, float))]
    return Kind(f"{name} {'' if code is None else zlib.crc32(code.co_code)} {constants} {code and code.co_names}")


def has_no_parameter(module: nn.Module) -> bool:
    return "_parameters" in vars(module) and next(module.parameters(), None) is None


def has_parameters(value: Any) -> bool:
    """Returns whether a value is a module, constructed, with parameters."""
    return issubclass(type(value), nn.Module) and "_parameters" in vars(value) and not has_no_parameter(value)


def code_of(function: Any) -> types.CodeType | None:
    """Returns the code of a function, also of one that is bound, partial or wrapped; None: a callable object may raise anything."""
    function = unwrapped(innermost(function))
    return function.__code__ if type(function) is types.FunctionType else None


def innermost(function: Any) -> Any:
    """Returns the function inside partial and bound ones."""
    while type(function) in (functools.partial, types.MethodType):
        function = function.func if type(function) is functools.partial else function.__func__
    return function


def unwrapped(value: Any) -> Any:
    """Returns the function that a function wraps, or another value as it is."""
    if type(value) is types.FunctionType and "__wrapped__" in vars(value):
        with contextlib.suppress(ValueError):  # it wraps itself
            return inspect.unwrap(value)
    return value


def running() -> Iterator[types.FrameType]:
    """Yields the frames of the running functions, innermost first, without ours, and those of Python and of progress bars."""
    frame = sys._getframe().f_back
    while frame is not None:
        root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if root not in _NO_SCRIPT and root not in sys.stdlib_module_names:  # such as `runpy`, or a debugger
            yield frame
        frame = frame.f_back


def spaces(of: Collection[types.CodeType] = ()) -> Iterator[dict[str, Any]]:
    """Yields the variables of the running functions, innermost first.

    Args:
        of: the functions; (): all.
    """
    of_modules = set[int]()  # several functions have the variables of one module
    for frame in (one for one in running() if not of or one.f_code in of):
        values = frame.f_locals
        for space in (values, frame.f_globals):
            if id(space) not in of_modules:
                yield {**space}
            if space is frame.f_globals:
                of_modules.add(id(space))
        # Before Python 3.13 a function's frame keeps this copy of its variables, and with it all that they name. A third reference is the
        # script's own, from `locals()`.
        is_copy = type(values) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.gettrace() is None
        if is_copy and sys.getrefcount(values) <= 3:
            values.clear()


def variables_of(function: Any) -> list[Any]:
    """Returns the values of the variables outside a function that it may read; []: it is a callable object."""
    function = unwrapped(function)
    if type(function) is not types.FunctionType:
        return []
    names = {name for code in codes_of(function.__code__) for name in code.co_names}
    space = function.__globals__
    return [*gc.get_referents(*(function.__closure__ or ())), *(space[name] for name in names & space.keys())]


def reads(code: types.CodeType | None, name: str, uses: bool = False) -> bool:
    """Returns whether the code reads a variable outside it, or the attribute of one, and assigns no part of it.

    Args:
        name: such as "scale", "self.scale", or ".scale", of any object.
        uses: whether a statement counts only if it uses what it reads: it neither sets an item nor drops its value, as `a.append(1)` does.
    """
    read = {one for loaded, _ in _statements(code, uses) for one in loaded}
    first, *attributes = re.sub(r"\[.*?\]", "", name).split(".")
    # The code's own variables, such as its arguments, count only as holders of attributes.
    has_first = not first or first in read or (bool(attributes) and f"{_LOCAL}{first}" in read)
    return has_first and {f".{one}" for one in attributes} <= read and not stored(code) & {first, *attributes}


def uses(code: types.CodeType | None, name: str, collects: bool) -> bool:
    """Returns whether the code uses a variable outside it, in another statement than one that sets it.

    Args:
        collects: whether a statement does not count that sets an item or drops its value, as `a.append(1)` does.
    """
    return any(name in loaded and name not in _stored(end) for loaded, end in _statements(code, collects))


def stored(code: types.CodeType | None) -> set[str]:
    """Returns the variables and attributes that the code sets."""
    return {name for _, end in _statements(code) for name in _stored(end)}


def _stored(end: dis.Instruction) -> tuple[str, ...]:
    """Returns the names that an instruction stores. Python 3.13 stores two at once, or stores one and loads one."""
    if not end.opname.startswith("STORE_"):
        return ()
    names = end.argval if type(end.argval) is tuple else (end.argval,)
    return names[:1] if end.opname == "STORE_FAST_LOAD_FAST" else names


def returns(code: types.CodeType) -> bool:
    """Returns whether a function returns a value."""
    steps = [*dis.get_instructions(code)]
    ends = [before for before, one in itertools.pairwise(steps) if one.opname == "RETURN_VALUE"]
    return any(before.opname != "LOAD_CONST" or before.argval is not None for before in ends)


@functools.cache
def set_anew(kind: Any) -> set[str]:
    """Returns the attributes that methods other than constructors set, and never from themselves: what they hold lasts for one call, or can
    be computed again. The attributes of torch itself never count, so its many methods are not read."""
    kinds = [one for one in kind.__mro__ if root_of(one) not in ("torch", "builtins")]
    methods = [function for one in kinds for name, function in vars(one).items() if name != "__init__"]
    statements = [statement for function in methods for statement in _statements(code_of(function))]
    stores = [(loaded, end.argval) for loaded, end in statements if end.opname == "STORE_ATTR"]
    # `getattr` reads an attribute by a constant.
    lasting = {name for loaded, name in stores if {f".{name}", f"{_CONSTANT}{name}"} & loaded}
    return {name for _, name in stores} - lasting


@functools.cache
def _statements(code: types.CodeType | None, uses: bool = False) -> list[tuple[set[str], dis.Instruction]]:
    """Returns (names and constants that it loads, last instruction) of each statement in a function, or part of one that ends in a jump.
    A variable of the code itself has `_LOCAL` before its name, a constant `_CONSTANT`, an attribute a dot.

    Args:
        uses: whether to leave out statements that do not use what they load (`_COLLECTS`).
    """
    statements, loaded, last = list[tuple[set[str], dis.Instruction]](), set[str](), set[str]()
    codes = [] if code is None else [*codes_of(code)]
    cells = {name for inner in codes for name in inner.co_cellvars}
    for step in (step for inner in codes for step in dis.get_instructions(inner)):
        if step.opname.startswith("LOAD_"):
            names = step.argval if type(step.argval) is tuple else [step.argval]  # Python 3.13 loads two at once
            kind = step.opname.rpartition("_")[2]
            is_local = "_FAST" in step.opname or step.argval in cells
            before = {"ATTR": ".", "METHOD": ".", "CONST": _CONSTANT}.get(kind, _LOCAL if is_local else "")
            loaded.update(f"{before}{name}" for name in names)
        elif step.opname in _ENDS or step.opname.startswith("STORE_") or "JUMP" in step.opname:
            if step.opname == "STORE_ATTR" and len(loaded) == 1:  # the object alone: `a.x, a.y = a.y, a.x` stores two
                loaded |= last
            if not (uses and step.opname in _COLLECTS):
                statements.append((loaded, step))
            last = loaded if step.opname.startswith("STORE_") else set()
            loaded = {f"{_LOCAL}{step.argval[1]}"} if step.opname == "STORE_FAST_LOAD_FAST" else set()
    return statements
