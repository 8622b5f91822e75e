from __future__ import annotations

import pytest

from lockstep.training.contract import UserError, say, user_errors


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
    say("warning: rank 0", error=True)
    say("an answer")
    assert capsys.readouterr().out == "an answer\n"
