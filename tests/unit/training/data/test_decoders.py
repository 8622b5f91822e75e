"""The processes that decode images: one that ends or hangs costs its image alone, and none outlives who asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.training.data import decoders
from lockstep.training.data.decoders import Decoders, Item


def test_a_file_that_ends_or_holds_up_its_decoder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next ones get a new process, and so does one whose process ended once."""
    program = tmp_path / "decoder.py"
    program.write_text(
        "import os, sys, time, json\nos.write(1, b'R')\n"
        "for line in sys.stdin.buffer:\n"
        "    path = json.loads(line)['path']\n"
        "    if 'kill' in path: os.kill(os.getpid(), 11)\n"
        "    if 'once' in path and not os.path.exists('seen'): open('seen', 'w'); os.kill(os.getpid(), 9)\n"
        "    if 'wait' in path: time.sleep(600)\n"
        "    os.write(1, b'P' + bytes(12))\n"
    )
    monkeypatch.setattr(decoders, "_PROGRAM", [str(program)])
    monkeypatch.setattr(decoders, "_ROOT", tmp_path)
    monkeypatch.setattr(decoders, "SECONDS", 0.5)
    items = [Item(Path(name), 0, name) for name in ("a", "kill", "b", "wait", "once", "c")]
    with Decoders(2, 2, 1) as running:
        results = [result for _, result in running.decode(items)]
        processes = [one._process for one in running._processes]
    assert [type(result) for result in results] == [bytes, str, bytes, str, bytes, bytes]
    assert "signal 11" in str(results[1]) and "takes longer" in str(results[3])
    assert all(process is not None and process.poll() is not None for process in processes)
