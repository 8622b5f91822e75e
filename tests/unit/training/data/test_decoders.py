"""The processes that decode images: one that ends or hangs costs its image alone, and none outlives who asked."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from lockstep.training.data import decoders
from lockstep.training.data.decoders import Decoders, Item
from tests.pictures import pixels
from tests.processes import ROOT, clean_env, poll, processes


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


def test_a_signal_to_the_whole_group_costs_no_image(tmp_path: Path) -> None:
    """What ends a job is told to all of its processes: the rank decides what follows."""
    picture = tmp_path / "a.png"
    Image.fromarray(pixels(0)).save(picture)
    item = Item(picture, 0, "a", "PNG")
    with Decoders(8, 8, 1) as running:
        assert [type(result) for _, result in running.decode([item])] == [bytes]
        process = running._processes[0]._process
        assert process is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            process.send_signal(number)
        assert [type(result) for _, result in running.decode([item] * 40)] == [bytes] * 40
        assert process.poll() is None


def test_decoders_end_with_whoever_asks_them(tmp_path: Path) -> None:
    """Also where it is killed."""
    program = (
        "import os, sys, time\nfrom pathlib import Path\nfrom lockstep.training.data.decoders import Decoders, Item\n"
        "running = Decoders(4, 4, 1)\nlist(running.decode([Item(Path('x'), 0, 'x')]))\n"
        "print(running._processes[0]._process.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=clean_env(), timeout=60
    )
    pid = int(done.stdout)
    poll(lambda: pid not in [one for one, state, *_ in processes() if state != "Z"], 20, "its end")
