"""`lockstep evaluate` and the like: the commands of `python -m lockstep.training` under the name that people have typed."""

from __future__ import annotations

import re
from pathlib import Path

from tests import product
from tests.processes import PYTHON, clean_env, run

LOCKSTEP = [PYTHON, "-c", product.PROGRAM]


def test_words_help_and_exit_codes_pass_through_under_the_name_that_was_typed(tmp_path: Path) -> None:
    done = run([*LOCKSTEP, "settings", "smoke", "--set", "lr=0.25", "epochs=3"], clean_env(), 60)
    assert done.code == 0 and "optim.lr = 0.25 " in done.output and "epochs = 3 " in done.output
    for words, said in (
        (["evaluate", str(tmp_path / "none")], "there is no such run"),
        (["report"], "lockstep report --help"),
    ):
        wrong = run([*LOCKSTEP, *words], clean_env(), 60)
        assert wrong.code == 2 and wrong.output.startswith("error: ") and said in wrong.output, wrong.output
    own = run([PYTHON, "-m", "lockstep.training", "evaluate", "--help"], clean_env(COLUMNS="200"))
    done = run([*LOCKSTEP, "evaluate", "--help"], clean_env(COLUMNS="200"))
    assert done.code == 0 and done.output.startswith("usage: lockstep evaluate")
    assert own.output.replace("python -m lockstep.training", "lockstep").split() == done.output.split()
    listed = run([*LOCKSTEP, "--help"], clean_env(COLUMNS="200"), 60).output
    assert {"evaluate", "export", "report", "run", "settings"} <= set(re.findall(r"^  (\w+) ", listed, re.MULTILINE))
