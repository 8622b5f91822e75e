"""What a source gives, and how one is downloaded."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training.contract import UserError


@dataclass(frozen=True, slots=True)
class Raw:
    """A data set in memory: (samples, int64 labels [n]) of both splits.

    Samples are uint8 images [n, h, w, c], or float32 feature vectors [n, f].
    """

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    classes: list[str]


def download(dataset: Callable[..., Any], name: str, root: Path, files: str) -> None:
    """Lets a class of torchvision download its files to `root`. Raises `UserError` that says where to put `files` instead."""
    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        dataset(str(root), download=True)
    except (OSError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"no {name} below {root}, and the download failed ({reason}): put {files} there, or point data.root at them"
        ) from None
    finally:
        socket.setdefaulttimeout(previous)
