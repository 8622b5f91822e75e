"""The extras of pyproject.toml: which package comes with which, and what to tell who lacks one.

Standard library only. A command imports such a package where it needs it; dispatching alone needs none.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from training.contract import UserError

EXTRAS = {
    "train": ("torch", "torchvision", "numpy", "safetensors", "sklearn", "matplotlib", "PIL"),
    "parquet": ("pyarrow",),
    "k8s": ("kubernetes", "urllib3"),
    "slurm": ("submitit",),
}
"""Extra → what it lets one import."""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """A missing package of an extra as one line that says how to install it.

    A package that is installed and cannot be imported is another error: there `name` is a module of its own, as
    `torch._C`, or there is none.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA_OF:
            raise
        raise _missing(error.name) from None


def require(package: str) -> None:
    """Raises `UserError` where the package of an extra is not installed. Imports nothing."""
    if importlib.util.find_spec(package) is None:
        raise _missing(package)


_EXTRA_OF = {package: extra for extra, packages in EXTRAS.items() for package in packages}


def _missing(package: str) -> UserError:
    extra = _EXTRA_OF[package]
    # By path: on the public index the name lockstep is somebody else's.
    return UserError(
        f"this needs Lockstep's extra [{extra}], and {package} is not installed: "
        f"run pip install '.[{extra}]' in Lockstep's checkout"
    )
