"""Prints what a test has counted below the results, also where a worker of xdist ran it: its own output goes nowhere."""

from __future__ import annotations

import pytest

COUNTS = "counts"
"""The property of a test (`record_property`) that is printed: a list of (number, what)."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("passed", []):
        for found in (value for name, value in report.user_properties if name == COUNTS):
            terminalreporter.section(report.nodeid.rpartition("::")[2])
            for number, what in found:
                terminalreporter.write_line(f"{number:5} {what}")
