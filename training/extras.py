"""The extras of pyproject.toml: which package comes with which extra, and the error message for a missing one.

Standard library only. A command imports such a package where it needs it; dispatching alone needs none.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
from collections.abc import Iterator

from .contract import UserError

DISTRIBUTION = "lockstep-torch"
"""The name that pip knows; `lockstep` on the public index is another project."""
EXTRAS = {
    "train": ("torch", "torchvision", "numpy", "safetensors", "sklearn", "PIL"),
    "k8s": ("kubernetes", "urllib3"),
    "slurm": ("submitit",),
    "cloud": ("obstore",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
"""Extra → what it lets one import."""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raises `UserError` for a missing package of an extra: one line that says how to install it.

    An installed package that cannot be imported is another error. There `name` is a module of the package itself, such
    as `torch._C`, or there is none.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise as_user_error(error) from None


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Lets Python collect no garbage during an import of torch. There is hardly any, and to look for it takes a seventh of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def as_user_error(error: ModuleNotFoundError) -> UserError:
    """Returns the error of `explained` for a missing package. Raises the given error if the package belongs to no extra."""
    if error.name not in _EXTRA_OF:
        raise error
    return _missing(error.name)


def require(package: str) -> None:
    """Raises `UserError` where the package of an extra is not installed. Imports nothing."""
    if importlib.util.find_spec(package) is None:
        raise _missing(package)


_EXTRA_OF = {package: extra for extra, packages in EXTRAS.items() for package in packages}


def _missing(package: str) -> UserError:
    install = f"run pip install '{DISTRIBUTION}[{_EXTRA_OF[package]}]'"
    return UserError(f"this needs Lockstep's extra [{_EXTRA_OF[package]}], and {package} is not installed: {install}")
