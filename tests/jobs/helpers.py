"""`lockstep` without a new process for each command."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from tests import product
from tests.processes import PYTHON, clean_env


def lockstep(folder: Path, *words: str, encoding: str = "utf-8", **env: str) -> subprocess.CompletedProcess[str]:
    """Returns the output and the exit code of `lockstep WORDS` in `folder`."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in env.items():
            patch.setenv(name, value)
        for name, stream in zip(("stdout", "stderr"), streams):
            patch.setattr(sys, name, stream)
        patch.setattr(sys, "argv", ["lockstep", *words])
        with pytest.raises(SystemExit) as exit_error:
            product.command_line()
        for stream in streams:
            stream.flush()
    out, err = (stream.detach().getvalue().decode(encoding) for stream in streams)  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(words, int(exit_error.value.code or 0), out, err)


def top(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `lockstep top WORDS` in a new process, because `top` replaces its process."""
    command = [PYTHON, "-m", "lockstep", "top", *words]
    return subprocess.run(command, cwd=folder, env=clean_env(), capture_output=True, text=True, timeout=120)
