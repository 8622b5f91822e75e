"""Runs a command in a rank's container by `kubectl exec`, which brings channels, terminal and protocols."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Sequence

from lockstep.training.contract import UserError

from ..process import CHUNK, Streams, exec_command, run
from ..status import Unreachable

_ENDED = b"command terminated with exit code "
"""Line by which kubectl reports that the exit code is the command's and not kubectl's."""
_NOT_STARTED = re.compile(r"\(NotFound\)|executing command in container|container not found|cannot exec into")
"""Errors after which no command runs in the container."""


def beside(
    kubectl: Sequence[str], pod: str, container: str, rank: int, command: list[str], run_dir: str, streams: Streams
) -> int:
    """Runs the command in the container. Returns the command's exit code.

    Args:
        kubectl: the program with the flags that say where the cluster is.

    Raises:
        UserError: there is no kubectl, or the command cannot be started.
        Unreachable: the connection was lost before the command had ended.
    """
    if shutil.which(kubectl[0]) is None:
        raise UserError(f"{kubectl[0]} is not on PATH, and runs the command in the pod: install it, then try again")

    words = [*kubectl, "exec", "--stdin", *(["--tty"] if streams.terminal else []), pod]
    words += ["--container", container, "--", *exec_command("python", rank, command, run_dir)]
    errors = _Errors(streams.stderr)
    try:
        code = run(words, Streams(streams.stdin, streams.stdout, errors.target))
    finally:
        errors.close()
    if code == 0 or errors.text.rstrip().endswith(f"{_ENDED.decode()}{code}"):
        return code
    raise _failed(pod, (errors.text.strip().splitlines() or [f"kubectl ended with {code}"])[-1][:500])


class _Errors:
    """Copies kubectl's standard error to ours, except for the line with the command's exit code."""

    def __init__(self, ours: int) -> None:
        self.ours, self.text = ours, ""
        self._source, self.target = os.pipe()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self.target)
        self._thread.join()
        os.close(self._source)

    def _copy(self) -> None:
        held = b""
        while data := os.read(self._source, CHUNK):
            self.text = (self.text + data.decode(errors="replace"))[-4096:]
            held += data
            start = held.rfind(b"\n", 0, -1) + 1
            last = held[start:]
            if not (last.startswith(_ENDED) or _ENDED.startswith(last)):
                start = len(held)
            self._write(held[:start])
            held = held[start:]
        if not held.startswith(_ENDED):
            self._write(held)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.ours, data) :]


def _failed(pod: str, why: str) -> UserError:
    if "(Forbidden)" in why:
        return UserError(f"not allowed: {why}; ask for the rights in deploy/k8s/components/debug")
    if "error dialing backend" in why:
        return Unreachable(f"the node of {pod} does not answer: {why}")
    if _NOT_STARTED.search(why):
        return UserError(f"cannot run a command in {pod}: {why}")
    return Unreachable(f"the connection to {pod} was lost: the command may still run there ({why})")
