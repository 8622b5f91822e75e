from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.training.contract import UserError, say, to_stderr, user_errors
from tests.processes import PYTHON, clean_env, run


@pytest.mark.promise("bad-input")
@pytest.mark.parametrize(
    ("env", "speaks"),
    [
        ({}, True), ({"SLURM_PROCID": "1"}, False), ({"OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "3"}, True),
        ({"RANK": "0", "SLURM_PROCID": "1"}, True), ({"PMI_RANK": "2"}, False),
    ],
)  # fmt: skip
def test_an_error_of_all_ranks_is_printed_once(
    env: dict[str, str], speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also under srun and mpiexec."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    error = UserError("nobody has data")
    error.shared = True
    with pytest.raises(SystemExit) as exit_info, user_errors():
        raise error
    assert exit_info.value.code == 2 and ("nobody has data" in capsys.readouterr().err) == speaks


def test_a_warning_does_not_enter_the_output_where_standard_error_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program reads the output of a run that was started with `2>&-`."""
    monkeypatch.setattr("sys.stderr", None)
    to_stderr("warning: rank 0")
    say("an answer")
    assert capsys.readouterr().out == "an answer\n"


def test_standard_error_that_was_full_for_a_moment_has_the_next_lines(tmp_path: Path) -> None:
    """Python keeps what a full disk has not taken, and writes it with the next line."""
    code = (
        "import os, sys; from lockstep.training.contract import to_stderr\n"
        "for path, line in (('/dev/full', 'one'), (sys.argv[1], 'two')):\n"
        "    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)\n"
        "    to_stderr(line)\n"
    )
    done = run([PYTHON, "-c", code, str(tmp_path / "errors")], clean_env())
    assert done.code == 0 and (tmp_path / "errors").read_text() == "one\ntwo\n", done
