"""Runs a command in a rank's container by `kubectl exec`, which brings channels, terminal and protocols."""

from __future__ import annotations

import os
import re
import shutil
import threading

from lockstep.training import files
from lockstep.training.contract import UserError

from ..process import CHUNK, Streams, run
from ..status import Unreachable

_ENDED = "command terminated with exit code "
"""Line by which kubectl reports that the exit code is the command's and not kubectl's."""
_NOT_STARTED = re.compile(
    r"\(NotFound\)|\(Forbidden\)|executing command in container|container not found|cannot exec into"
)
"""Errors after which no command runs in the container."""


def in_pod(words: list[str], pod: str, streams: Streams) -> int:
    """Runs `kubectl exec` with the command, which runs in the pod. Returns the command's exit code.

    Raises:
        UserError: there is no kubectl, or the command cannot be started.
        Unreachable: the connection was lost before the command had ended.
    """
    if shutil.which(words[0]) is None:
        raise UserError(f"{words[0]} is not on PATH, and runs the command in the pod: install it, then try again")

    source, target = os.pipe()
    end = bytearray()

    def copy() -> None:
        while data := os.read(source, CHUNK):
            end[:] = (end + data)[-4096:]
            files.write_all(streams.stderr, data)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        code = run(words, Streams(streams.stdin, streams.stdout, target))
    finally:
        os.close(target)
        thread.join()
        os.close(source)
    why = (end.decode(errors="replace").strip().splitlines() or [f"kubectl ended with {code}"])[-1]
    if code == 0 or why.endswith(f"{_ENDED}{code}"):
        return code
    if _NOT_STARTED.search(why):
        raise UserError(f"cannot run a command in {pod}; for the rights see deploy/k8s/components/debug")
    raise Unreachable(f"the connection to {pod} was lost: the command may still run there")
