"""Builds the stand-in once for each version of its sources and of torch, in a folder of the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from filelock import FileLock

from tests.processes import require

WRITTEN_FOR = "2.15.0+cu132"
"""The torch whose calls the stand-in answers. Another build makes other calls: README.md says how to move to it.
constraints.txt has the same for pip."""
SOURCES = Path(__file__).parent / "standin"
SITE = Path(torch.__file__).parents[1]
HEADERS = [
    SITE / "nvidia" / "cu13" / "include",
    SITE / "nvidia" / "nccl" / "include",
    SITE / "triton" / "backends" / "nvidia" / "include",
]
"""NVIDIA's headers, as they come with torch's wheels."""
FLAGS = ["-O1", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1"]


def stand_in() -> Path:
    """The library to preload. Skips the test where it cannot be built; in CI that is a failure."""
    require(
        torch.__version__ == WRITTEN_FOR,
        f"the stand-in was written for torch {WRITTEN_FOR}, this is {torch.__version__}",
    )
    require(shutil.which("g++"), "g++ is not installed: it builds the stand-in for CUDA")
    sources = sorted(SOURCES.glob("*.cpp"))
    content = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))
    identity = hashlib.sha256(content + " ".join([torch.__version__, *FLAGS]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
    folder = cache / f"standin-{identity}"
    library = folder / "libcuda.so.1"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "standin.lock", timeout=300):
        if not library.exists():
            folder.mkdir(exist_ok=True)
            parts = folder / "part.so"
            includes = [word for path in HEADERS for word in ("-isystem", str(path))]
            command = ["g++", *FLAGS, *includes, "-o", str(parts), *map(str, sources), "-ldl", "-lpthread"]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            assert result.returncode == 0, result.stderr
            parts.rename(library)
    return library
