"""The commands outside a job, at 1,024 ranks and 1,000 jobs: what they look at is counted, and what they show is bounded."""

from __future__ import annotations

import io
from pathlib import Path

import prometheus_client.parser
import pytest
from rich.console import Console

from lockstep.jobs.cli import top
from lockstep.jobs.cli.ranks import Reader, judge
from lockstep.jobs.local import processes
from lockstep.jobs.local.backend import LocalBackend
from tests import large_run

RANKS = 1024
SLOW = 700


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_run.run_directory(tmp_path_factory.mktemp("large") / "run", RANKS, 10, slow=SLOW)


def test_of_a_thousand_ranks_the_parser_sees_what_is_shown(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[int] = []
    parse = prometheus_client.parser.text_string_to_metric_families

    def counted(text: str) -> object:
        lines.append(text.count("\n"))
        return parse(text)

    monkeypatch.setattr(prometheus_client.parser, "text_string_to_metric_families", counted)
    read = Reader(large).read()
    assert len(read) == RANKS == len(lines) and max(lines) <= 16
    assert read[5].values["step"] == 100 and read[5].values["loss"] == 1.25
    assert [rank.rank for rank in judge({}, read) if rank.straggler] == [SLOW]


@pytest.mark.parametrize("height", [24, 50])
def test_the_live_table_fits_the_terminal_and_has_the_straggler(large: Path, height: int) -> None:
    ranks = judge({}, Reader(large).read())
    output = io.StringIO()
    Console(file=output, width=130, height=height).print(top.picture(large, ranks, 130, height))
    shown = output.getvalue().rstrip("\n").split("\n")
    (slow,) = [line for line in shown if "STRAGGLER" in line]
    assert len(shown) <= height and slow.split()[0] == str(SLOW)
    assert f"{RANKS - (height - top.AROUND)} more ranks" in output.getvalue()


def test_few_ranks_are_all_shown(large: Path) -> None:
    ranks = judge({}, Reader(large).read())[:10]
    assert top.fitting(ranks, 10) == ranks


def test_a_list_of_a_thousand_jobs_looks_through_no_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large_run.local_jobs(tmp_path / "home", 1000)
    looks: list[str] = []
    monkeypatch.setattr(processes, "_of", lambda look, job, _: looks.append(job) or [])
    rows = LocalBackend(tmp_path / "home" / "local").list()
    assert len(rows) == 1000 and {row.state for row in rows} == {"succeeded"} and not looks
