"""README and the tutorials, read by who has cloned the repository: their commands run as they print them (tests/printed.py)."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkout import copy_to, environment
from tests.printed import NEEDS, PAGES, Reader, blocks, marked, pages, programs
from tests.processes import PYTHON, ROOT, Result, poll
from tests.terminal import at_a_terminal, drained, until_shown

pytestmark = pytest.mark.promise("printed")
BOUND = 180
CTRL_C = b"\x03"
PROMPT = b"$ " if os.getuid() else b"# "


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_names_what_it_needs(page: str) -> None:
    """What looks like a command stands in a shell block: elsewhere it would not be run. A command uses each file."""
    printed = [each for block in blocks(page) for each in block.commands]
    assert {need for _, need in printed} <= {"", *NEEDS}
    for block in blocks(page):
        assert block.title or block.language in ("sh", "text"), (
            f"neither commands, nor their output, nor a file: {block}"
        )
        assert block.language != "text" or not block.text.startswith(("lockstep ", "make ", "torchrun ", "python "))
        assert not block.title or any(block.title.split(".")[0] in command for command, _ in printed), block


def test_a_need_that_names_a_test_is_met_by_it() -> None:
    for need, path in NEEDS.items():
        assert any(need in block.text for page in PAGES for block in blocks(page)), f"no page has ({need})"
        text = (ROOT / path).read_text(encoding="utf-8") if path else f'"{need}"'
        assert f'"{need}"' in text, f"{path} does not run ({need})"


class Here(Reader):
    def run(self, command: str) -> Result:
        done = super().run(command)
        # What the local jobs have printed says why one ended as it did.
        for log in sorted((self.folder.parent / "home/lockstep").glob("local/*/log.txt")) if done.code else ():
            done.output += f"\n{log.parent.name}:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}"
        return done

    def typed(self, command: str, *keys: tuple[bytes, bytes | Callable[[], bytes]]) -> tuple[int, str]:
        """Types the command at a terminal, and each of `keys` when what stands before it is shown."""
        words = f"cd {shlex.quote(str(self.folder))} && exec {command}"
        with at_a_terminal(["bash", "-c", words], self.env) as (process, ours, _):
            shown = b""
            for awaited, key in keys:
                shown += until_shown(ours, awaited, BOUND)
                os.write(ours, key if isinstance(key, bytes) else key())

            def ended() -> bool:
                nonlocal shown
                shown += drained(ours)
                return process.poll() is not None

            poll(ended, BOUND, f"the end of {command} after {shown!r}")
            return process.returncode, (shown + drained(ours)).decode(errors="replace")


@pytest.fixture
def here(tmp_path: Path) -> Here:
    folder = copy_to(tmp_path / "lockstep")
    return Here(folder, environment(folder, tmp_path / "home", PYTHONWARNINGS="ignore"))


@pytest.mark.parametrize("page", pages(""))
def test_what_the_page_prints(page: str, here: Here) -> None:
    here.reads(page)


def test_two_terminals_as_the_tutorials_print_them(here: Here) -> None:
    """`make shell`; a run; after an epoch another terminal shows it, until Ctrl-C; then Ctrl-C ends the run, saved."""
    shell, command = marked("by hand", "docs/tutorials/train-in-two-minutes.md")
    (top,) = marked("during a run", "docs/tutorials/watch-it.md")
    assert shell == "make shell"
    plain = Here(here.folder, {**here.env, "PATH": os.defpath, "SHELL": "/bin/sh"})
    code, shown = plain.typed(shell, (PROMPT, b"command -v lockstep; exit\r"))
    assert code == 0 and str(Path(here.env["VENV"]) / "bin/lockstep") in shown, shown

    def watched() -> bytes:
        code, table = here.typed(top.replace("runs/a", "runs/longer"), (b"IMAGES/S", CTRL_C))
        assert code in (0, 130, -signal.SIGINT) and "RANK" in table and "Traceback" not in table, (code, table)
        return CTRL_C

    # So many epochs that the run does not end before it is looked at.
    code, shown = here.typed(command.replace("epochs=20", "epochs=2000"), (b"    1       12", watched))
    assert code == 75, shown
    status = json.loads((here.folder / "runs/longer/status.json").read_text())
    assert status["code"] == 75 and status["step"] >= 12
    assert re.search(rf"SIGINT\s.*step\s+{status['step']}:", shown, re.DOTALL), (status, shown)


WORDS = {
    "the early stop of own-training": f"{PYTHON} early.py",
    "the job of jobs": f"{PYTHON} job.py",
    "own_loop": "torchrun --standalone --nproc-per-node 2 examples/own_loop.py",
    "own_code": "lockstep submit local examples/own_code/job.yaml --wait 600",
}


@pytest.mark.nightly
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_program_of_another_page_runs(words: str, here: Here) -> None:
    """Whole programs that pages show, and examples that they name."""
    for name, page in (("early.py", "docs/own-training.md"), ("job.py", "docs/jobs.md")):
        (program,) = programs(page)
        (here.folder / name).write_text(program, encoding="utf-8")
    here.after(words, here.run(words))
