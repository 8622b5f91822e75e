"""The processes that decode images: one that ends or hangs costs its image alone, and none outlives who asked."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.training.data import decoders
from lockstep.training.data.decoders import Decoders, Item


def test_a_file_that_ends_or_holds_up_its_decoder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next ones get a new process, and so does one whose process ended once."""
    program = tmp_path / "decoder.py"
    program.write_text(
        "import os, resource, time\nfrom pathlib import Path\nfrom lockstep.training.data import decoders\n"
        "def decoded(data, *_):\n"
        "    if b'kill' in data: os.kill(os.getpid(), 11)\n"
        "    if b'once' in data and not os.path.exists(data): Path(os.fsdecode(data)).touch(); os.kill(os.getpid(), 9)\n"
        "    if b'wait' in data: time.sleep(600)\n"
        "    if b'term' in data: os.kill(os.getpid(), 15)\n"
        "    if b'time' in data: raise ValueError(resource.getrlimit(resource.RLIMIT_CPU)[0])\n"
        "    return bytes(9 << 30)[:12] if b'fill' in data else bytes(12)\n"
        "decoders.decoded, decoders._content, decoders.DECODE_SECONDS = decoded, lambda path, _: bytes(path), 5\n"
        "decoders._main(2, 2)\n"
    )
    monkeypatch.setattr(decoders, "_PROGRAM", [str(program)])
    monkeypatch.setattr(decoders, "DECODE_SECONDS", 0.5)
    items = [Item(tmp_path / name, 0, name) for name in ("a", "kill", "b", "wait", "once", "fill", "time", "term")]
    with Decoders(2, 2, 1) as running:
        results = [result for _, result in running.decode(items)]
        processes = [one._process for one in running._processes]
    assert [type(result) for result in results] == [bytes, str, bytes, str, bytes, str, str, bytes]
    assert "signal 11" in str(results[1]) and "takes longer" in str(results[3])
    assert "not enough memory" in str(results[5]) and int(str(results[6])) < 10
    assert all(process is not None and process.poll() is not None for process in processes)


def test_leaving_while_a_process_starts_does_not_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, left, real = threading.Event(), threading.Event(), subprocess.Popen

    def held(*arguments: Any, **more: Any) -> Any:
        reached.set()
        assert left.wait(60)
        return real(*arguments, **more)

    monkeypatch.setattr(subprocess, "Popen", held)
    monkeypatch.setattr(decoders, "_PROGRAM", ["-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(decoders, "DECODER_START_SECONDS", 30)
    with Decoders(2, 2, 1) as running:
        running._threads.submit(running._decode, [Item(tmp_path / "a", 0, "a")])
        assert reached.wait(60)
        threading.Timer(0.05, left.set).start()
        began = time.monotonic()
    assert time.monotonic() - began < 20
