"""README and the tutorials in a clone of the repository: their commands run as printed (tests/printed.py)."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkout import copy_to, environment
from tests.events import status_of
from tests.printed import NEEDS, PAGES, Reader, blocks, marked, pages, programs
from tests.processes import PYTHON, ROOT, Result, poll
from tests.terminal import at_a_terminal, drained, until_shown

pytestmark = pytest.mark.promise("printed")
BOUND = 180
CTRL_C = b"\x03"
PROMPT = b"$ " if os.getuid() else b"# "


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_names_what_it_needs(page: str) -> None:
    """Each command stands in a shell block, because no other block is run. A command uses each file."""
    commands = [command for block in blocks(page) for command in block.commands]
    assert {need for _, need in commands} <= {"", *NEEDS}
    for block in blocks(page):
        assert block.title or block.language in ("sh", "text"), (
            f"neither commands, nor their output, nor a file: {block}"
        )
        assert block.language != "text" or not block.text.startswith(("lockstep ", "make ", "torchrun ", "python "))
        assert not block.title or any(block.title.split(".")[0] in command for command, _ in commands), block


def test_a_need_that_names_a_test_is_met_by_it() -> None:
    for need, path in NEEDS.items():
        assert any(need in block.text for page in PAGES for block in blocks(page)), f"no page has ({need})"
        text = (ROOT / path).read_text(encoding="utf-8") if path else f'"{need}"'
        assert f'"{need}"' in text, f"{path} does not run ({need})"


class Here(Reader):
    def run(self, command: str) -> Result:
        done = super().run(command)
        # The logs of the local jobs say why a job failed.
        for log in sorted((self.folder.parent / "home/lockstep").glob("local/*/log.txt")) if done.code else ():
            done.output += f"\n{log.parent.name}:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}"
        return done

    def type_keys(self, command: str, *keys: tuple[bytes, bytes | Callable[[], bytes]]) -> tuple[int, str]:
        """Types the command at a terminal, and each of `keys` after the text before it appears."""
        words = f"cd {shlex.quote(str(self.folder))} && exec {command}"
        with at_a_terminal(["bash", "-c", words], self.env) as (process, fd, _):
            screen = b""
            for text, key in keys:
                screen += until_shown(fd, text, BOUND)
                os.write(fd, key if isinstance(key, bytes) else key())

            def has_ended() -> bool:
                nonlocal screen
                screen += drained(fd)
                return process.poll() is not None

            poll(has_ended, BOUND, f"the end of {command} after {screen!r}")
            return process.returncode, (screen + drained(fd)).decode(errors="replace")


@pytest.fixture
def here(tmp_path: Path) -> Here:
    folder = copy_to(tmp_path / "lockstep")
    return Here(folder, environment(folder, tmp_path / "home", PYTHONWARNINGS="ignore"))


@pytest.mark.parametrize("page", pages(""))
def test_what_the_page_prints(page: str, here: Here) -> None:
    here.reads(page)


def test_two_terminals_as_the_tutorials_print_them(here: Here) -> None:
    """A run trains after `make shell`. Another terminal shows it until Ctrl-C; then Ctrl-C saves and ends the run."""
    shell, command = marked("by hand", "docs/tutorials/train-in-two-minutes.md")
    (top,) = marked("during a run", "docs/tutorials/watch-it.md")
    assert shell == "make shell"
    plain = Here(here.folder, {**here.env, "PATH": os.defpath, "SHELL": "/bin/sh"})
    code, screen = plain.type_keys(shell, (PROMPT, b"command -v lockstep; exit\r"))
    assert code == 0 and str(Path(here.env["VENV"]) / "bin/lockstep") in screen, screen

    def watch() -> bytes:
        code, table = here.type_keys(top.replace("runs/a", "runs/longer"), (b"IMAGES/S", CTRL_C))
        assert code in (0, 130, -signal.SIGINT) and "RANK" in table and "Traceback" not in table, (code, table)
        return CTRL_C

    # With so many epochs the run does not end before `top` shows it.
    code, screen = here.type_keys(command.replace("epochs=20", "epochs=2000"), (b"    1       12", watch))
    assert code == 75, screen
    status = status_of(here.folder / "runs/longer")
    assert status["code"] == 75 and status["step"] >= 12
    assert re.search(rf"SIGINT\s.*step\s+{status['step']}:", screen, re.DOTALL), (status, screen)


WORDS = {
    "the early stop of own-training": f"{PYTHON} early.py",
    "the job of jobs": f"{PYTHON} job.py",
    "own_loop": "torchrun --standalone --nproc-per-node 2 examples/own_loop.py",
    "own_code": "lockstep submit local examples/own_code/job.yaml --wait 600",
}


@pytest.mark.nightly
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_program_of_another_page_runs(words: str, here: Here) -> None:
    """Programs that pages show, and examples that pages name, run."""
    for name, page in (("early.py", "docs/own-training.md"), ("job.py", "docs/jobs.md")):
        (program,) = programs(page)
        (here.folder / name).write_text(program, encoding="utf-8")
    here.after(words, here.run(words))
