"""`lockstep evaluate` and the like: the commands of `python -m lockstep.training` under the name that people have typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.training.cli import COMMANDS, INSIDE
from tests.processes import PYTHON, ROOT, clean_env, run
from tests.ranks import training

LOCKSTEP = [PYTHON, "-c", "from lockstep.jobs.cli.main import main; main()"]
SHARED = [name for name in COMMANDS if name not in INSIDE]


@pytest.mark.parametrize("name", SHARED)
def test_the_help_is_the_commands_own_under_the_name_that_was_typed(name: str) -> None:
    done = run([*LOCKSTEP, name, "--help"], clean_env(COLUMNS="200"), 60)
    assert done.code == 0 and done.output.startswith(f"usage: lockstep {name}")
    own = training(name, "--help", env=clean_env(COLUMNS="200"))
    assert _plain(own.output) == _plain(done.output)


def _plain(text: str) -> str:
    """Without the program's name, whose length moves the ends of lines."""
    return " ".join(text.replace("python -m lockstep.training", "lockstep").split())


def test_words_and_exit_codes_pass_through(tmp_path: Path) -> None:
    done = run([*LOCKSTEP, "settings", "smoke", "--set", "lr=0.25", "epochs=3"], clean_env(), 60)
    assert done.code == 0 and "optim.lr = 0.25 " in done.output and "epochs = 3 " in done.output
    for words, said in (
        (["evaluate", str(tmp_path / "none")], "there is no such run"),
        (["report"], "lockstep report --help"),
    ):
        wrong = run([*LOCKSTEP, *words], clean_env(), 60)
        assert wrong.code == 2 and wrong.output.startswith("error: ") and said in wrong.output, wrong.output


def test_all_are_listed() -> None:
    listed = run([*LOCKSTEP, "--help"], clean_env(COLUMNS="200"), 60).output
    assert all(f"  {name} " in listed for name in SHARED) and (ROOT / "training/cli.py").exists()
