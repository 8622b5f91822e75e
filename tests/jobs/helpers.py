"""`lockstep` without a new process for each command, and a local backend without a launcher that loads torch."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.jobs.cli.main import main
from lockstep.jobs.local.backend import LocalBackend
from lockstep.jobs.spec.model import JobSpec


def lockstep(folder: Path, *words: str, encoding: str = "utf-8", **env: str) -> subprocess.CompletedProcess[str]:
    """What `lockstep WORDS` prints in `folder`, and the code that it ends with."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in env.items():
            patch.setenv(name, value)
        for name, stream in zip(("stdout", "stderr"), streams):
            patch.setattr(sys, name, stream)
        patch.setattr(sys, "argv", ["lockstep", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        for stream in streams:
            stream.flush()
    out, err = (stream.detach().getvalue().decode(encoding) for stream in streams)  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(words, int(ended.value.code or 0), out, err)


class Bare(LocalBackend):
    """Runs a job's command itself, for what is about records and supervisors: a launcher takes seconds to begin."""

    @staticmethod
    def _command(spec: JobSpec, run_dir: str) -> list[str]:
        return [sys.executable if word == "python" else word for word in spec.command or ()]
