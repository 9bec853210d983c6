"""Prints the kill matrix when the session ends, whichever worker hunted what."""

from __future__ import annotations

import pytest

from tests.mutants.hunt import Hunt
from tests.mutants.matrix import matrix_lines
from tests.mutants.registry import MUTANTS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    hunts = [
        Hunt(**found)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, found in report.user_properties
        if name == "hunt" and isinstance(found, dict)
    ]
    if hunts:
        terminalreporter.section("kill matrix")
        for line in matrix_lines(sorted(hunts, key=lambda hunt: list(MUTANTS).index(hunt.mutant))):
            terminalreporter.write_line(line)
