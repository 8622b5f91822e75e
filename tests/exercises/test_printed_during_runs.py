"""What the documentation prints for a second terminal, while a run trains, and for a person who presses Ctrl-C.

(during a run): one local job trains meanwhile, and all pages look at it. (by hand): the keys come from a real terminal.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkout import copy_to, environment
from tests.printed import PAGES, Reader, marked
from tests.processes import poll, started
from tests.terminal import at_a_terminal, drained, until_shown

BOUND = 180
DURING, BY_HAND = "during a run", "by hand"
CTRL_C = b"\x03"
PROMPT = b"$ " if os.getuid() else b"# "


class Here(Reader):
    """A clone in which the commands are typed."""

    def said(self, command: str) -> str:
        done = self.run(command)
        assert done.code == 0, f"{command}\n{done.output}"
        return done.output

    def typed(self, command: str, *keys: tuple[bytes, bytes]) -> tuple[int, str]:
        """Types the command at a terminal, and each of `keys` when what stands before it is shown."""
        words = f"cd {shlex.quote(str(self.folder))} && exec {command}"
        with at_a_terminal(["bash", "-c", words], self.env) as (process, ours, _):
            shown = b""
            for awaited, key in keys:
                shown += until_shown(ours, awaited, BOUND)
                os.write(ours, key)

            def ended() -> bool:
                nonlocal shown
                shown += drained(ours)
                return process.poll() is not None

            poll(ended, BOUND, f"the end of {command} after {shown!r}")
            return process.returncode, (shown + drained(ours)).decode(errors="replace")

    def endpoint(self, run_dir: str, rank: int) -> dict[str, int]:
        """Where a rank serves, and its process, once it has done a step."""
        events, file = (self.folder / run_dir / name for name in ("events.jsonl", f"endpoints/rank-{rank:05}.json"))
        poll(lambda: events.exists() and '"epoch"' in events.read_text(), BOUND, f"an epoch of {run_dir}")
        found: dict[str, int] = json.loads(file.read_text())
        return found


@pytest.fixture
def here(tmp_path: Path) -> Here:
    folder = copy_to(tmp_path / "lockstep")
    return Here(folder, environment(folder, tmp_path / "home"))


@pytest.fixture
def job(here: Here) -> Iterator[Here]:
    """The local job `smoke`, which trains until the test is over."""
    here.said("lockstep submit local job.yaml --set overrides.epochs=2000 --set grace_seconds=10")
    yield here
    here.said("lockstep cancel local smoke")


def shows(*expected: str) -> Callable[[Here, str], None]:
    """The command ends well, and has printed what these patterns find."""

    def check(here: Here, command: str) -> None:
        output = here.said(command)
        assert all(re.search(one, output, re.MULTILINE) for one in expected), f"{command}\n{output}"

    return check


def follows(here: Here, command: str) -> None:
    """What there is, then what comes: until Ctrl-C."""
    printed = here.folder / "followed"
    with started(["bash", "-c", f"exec {command} > {printed}"], here.env, cwd=here.folder) as process:
        poll(lambda: printed.exists() and printed.stat().st_size, BOUND, "what is there")
        there = printed.stat().st_size
        poll(lambda: printed.stat().st_size > there, BOUND, "a line that comes later")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=BOUND)
    lines = [line for line in printed.read_text().splitlines(keepends=True) if line.endswith("\n")]
    assert len(lines) > 1 and all(json.loads(line)["event"] for line in lines), lines


def is_live(here: Here, command: str) -> None:
    """A table of both ranks at a terminal, which Ctrl-C ends."""
    code, shown = here.typed(command, (b"\n", b""), (b"IMAGES/S", CTRL_C))
    assert code in (0, 130, -signal.SIGINT) and "RANK" in shown and "Traceback" not in shown, (code, shown)


def is_a_shell(here: Here, command: str) -> None:
    code, shown = here.typed(command, (PROMPT, b"echo I am $RANK of $WORLD_SIZE; exit 3\r"))
    assert code == 3 and "I am 1 of 2" in shown, (code, shown)


def sends_a_file(here: Here, command: str) -> None:
    (here.folder / "notes.txt").write_bytes(bytes(range(256)))
    here.said(f"{{ {command}; }} > back")  # tee prints it, too
    assert {(here.folder / name).read_bytes() for name in ("there", "back")} == {bytes(range(256))}


CHECKS = {
    r"lockstep top \S+$": is_live,
    r"curl ": shows(r'^training_step\{.*rank="0".*\} [1-9]', r"^training_step_duration_seconds_bucket"),
    r"lockstep logs .* -f$": follows,
    r"lockstep logs ": shows(r'"event": "epoch"'),
    r"lockstep exec .* sh$": is_a_shell,
    r"lockstep exec .* tee ": sends_a_file,
    r"lockstep stacks ": shows(r"^rank 1 .*\[process \d+, step \d+\]$", r"^  \S*[Tt]hread .*most recent call first"),
}
"""What is asserted of a command, by how it begins."""


@pytest.mark.nightly
def test_what_pages_print_for_a_second_terminal(job: Here) -> None:
    first = job.endpoint("runs/jobs/smoke", 0)
    own = {
        "runs/a": "runs/jobs/smoke",  # one run for all pages
        "NAME": "smoke",  # which the reader fills in
        "9470": str(first["port"]),  # other tests may have taken that port
        "/tmp/notes": str(job.folder / "there"),  # which goes with the test
    }
    used = set()
    for command in [command for page in PAGES for command in marked(DURING, page)]:
        typed = command
        for printed, here in own.items():
            typed = typed.replace(printed, here)
        pattern = next(pattern for pattern in CHECKS if re.match(pattern, typed))
        used.add(pattern)
        CHECKS[pattern](job, typed)
    assert used == CHECKS.keys(), f"no page prints what begins so: {CHECKS.keys() - used}"


def test_ctrl_c_as_the_tutorial_prints_it(here: Here) -> None:
    """`make shell`, and a run that is stopped in the middle, at the terminal, after an epoch."""
    shell, command = marked(BY_HAND, "docs/tutorials/train-in-two-minutes.md")
    assert shell == "make shell"
    plain = Here(here.folder, {**here.env, "PATH": os.defpath, "SHELL": "/bin/sh"})
    code, shown = plain.typed(shell, (PROMPT, b"command -v lockstep; exit\r"))
    assert code == 0 and str(Path(here.env["VENV"]) / "bin/lockstep") in shown, shown
    code, shown = here.typed(command, (b"    1       12", CTRL_C))
    assert code == 75, shown
    status = json.loads((here.folder / "runs/longer/status.json").read_text())
    assert status["code"] == 75 and status["step"] >= 12
    assert re.search(rf"SIGINT\s.*step\s+{status['step']}:", shown, re.DOTALL), (status, shown)
