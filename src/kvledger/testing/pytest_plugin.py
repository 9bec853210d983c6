"""The pytest plugin: options for what is under test, failures as explanations, and a summary of what was met.

Nothing heavy is imported when pytest loads this; the machine is looked at only if a test has imported it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from kvledger.node import PrefillNode
from kvledger.replay import TargetFactory
from kvledger.rules import named_rules
from kvledger.targets import find_target
from kvledger.testing.fixtures import folder_name
from kvledger.testing.session import PROFILES, SESSION

PROPERTY = "kvledger"
"""The report property that carries a test's tally to the summary, from whichever worker ran it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """What is under test, for how long, and where findings go."""
    group = parser.getgroup("kvledger", "kvledger: schedulers under test")
    group.addoption("--kvledger-target", metavar="NAME", help="a registered target, or package.module:attribute")
    group.addoption("--kvledger-rules", metavar="PRESET", help="search under this preset instead of the tests' own")
    group.addoption("--kvledger-profile", choices=PROFILES, default="dev", help="how long to search (default: dev)")
    group.addoption(
        "--kvledger-save",
        metavar="DIR",
        help="where failing traces go (default: tests/regressions)",
    )
    group.addoption("--kvledger-report", metavar="FILE", help="draw each failing trace, as FILE.<fixture>.html")
    group.addoption(
        "--kvledger-observe", action="store_true", help="count moves and branches by Hypothesis's own records"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Resolve the options once, before tests are collected."""
    try:
        SESSION.target = find_target(config.getoption("--kvledger-target") or "node")
        rules = config.getoption("--kvledger-rules")
        if rules:
            named_rules(rules)
        SESSION.rules = rules
    except ValueError as error:
        raise pytest.UsageError(f"kvledger: {error}") from None
    SESSION.profile = config.getoption("--kvledger-profile")
    SESSION.observe = config.getoption("--kvledger-observe")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Tally the examples that a test runs, whoever wrote it."""
    machine = sys.modules.get("kvledger.testing.machine")
    if machine is None:
        return (yield)
    from kvledger.testing.tally import Tally

    tally = Tally()
    try:
        with machine.observing(tally.add), tally.observations(SESSION.observe):
            return (yield)
    finally:
        if tally.examples:
            item.user_properties += tally.properties()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A broken invariant is saved as a fixture and explained; Hypothesis's own lines stay behind -v."""
    report = yield
    machine = sys.modules.get("kvledger.testing.machine")
    if machine is None or call.excinfo is None or not isinstance(call.excinfo.value, machine.InvariantBroken):
        return report
    from kvledger.testing.failure import explain_unrepeatable

    run = call.excinfo.value.machine
    invariant = run.monitor.broken[0].invariant
    target = run.under_test.target
    folder = _save_folder(item.config, target)
    try:
        failure = explain_unrepeatable(run.trace(), invariant, folder, target)
    except OSError as error:
        report.longrepr = (
            f"{invariant} is broken: {call.excinfo.value}\nfixture not written: {folder}: {error.strerror}"
        )
        return report
    found = [("kvledger_fixture", str(failure.path)), ("kvledger_invariant", failure.invariant)]
    found += _drawn(failure.path, target, item.config.getoption("--kvledger-report"))
    report.user_properties += found
    item.user_properties += found  # JUnit's properties are those of the teardown, which is reported later
    if item.config.getoption("verbose") < 1:
        report.longrepr = "\n".join(failure.lines)
        report.sections = []
    else:
        report.sections.append(("kvledger", "\n".join(failure.lines)))
    return report


def _drawn(fixture: Path, target: TargetFactory, page: str | None) -> list[tuple[str, str]]:
    """Draw a fixture where its target is at hand: a worker cannot send a scheduler to the summary."""
    if page is None:
        return []
    from kvledger.report.html import page as html_page
    from kvledger.report.recording import record
    from kvledger.saving import write_whole
    from kvledger.trace import load

    path = Path(page).with_suffix(f".{fixture.stem}.html")
    try:
        write_whole(path, [html_page([record(load(fixture), None, target=target, source=str(fixture))])])
    except OSError as error:
        return [("kvledger_report_failed", f"{path}: {error.strerror}")]
    return [("kvledger_report", str(path))]


def _save_folder(config: pytest.Config, target: TargetFactory) -> Path:
    """Fixtures of another scheduler keep apart: what replays ours would run them on the wrong one."""
    folder = config.getoption("--kvledger-save")
    if folder:
        return Path(folder)
    regressions: Path = config.rootpath / "tests" / "regressions"
    return regressions if target is PrefillNode else regressions / folder_name(target)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Sum up the tallies that came with the reports, from all workers."""
    reports = [report for group in ("passed", "failed") for report in terminalreporter.stats.get(group, [])]
    properties = [pair for report in reports if report.when == "call" for pair in report.user_properties]
    tallies = [json.loads(value) for name, value in properties if name == PROPERTY]
    if not tallies:
        return
    fixtures = sorted({value for name, value in properties if name == "kvledger_fixture"})
    terminalreporter.section("kvledger")
    for line in _summary_lines(tallies, fixtures):
        terminalreporter.write_line(line)
    for name in ("kvledger_report", "kvledger_report_failed"):
        for value in sorted({value for found, value in properties if found == name}):
            terminalreporter.write_line(f"report{' not written' if name.endswith('failed') else ''}: {value}")


def _summary_lines(tallies: list[dict[str, Any]], fixtures: Iterable[str]) -> Iterable[str]:
    reached: Counter[str] = Counter()
    observed: Counter[str] = Counter()
    for tally in tallies:
        reached.update(tally["reached"])
        observed.update(tally["observed"])
    examples, rounds = (sum(tally[key] for tally in tallies) for key in ("examples", "rounds"))
    skipped = sorted({name for tally in tallies for name in tally["skipped"]})
    targets = sorted({tally["target"] for tally in tallies})
    yield f"target {', '.join(targets)}: {examples:,} examples, {rounds:,} rounds in {len(tallies)} tests"
    yield "reached: " + (", ".join(f"{branch} {count:,}" for branch, count in reached.most_common()) or "nothing")
    if skipped:
        yield f"not asked, for the target cannot show it: {', '.join(skipped)}"
    if observed:
        yield "by Hypothesis's observations:"
        yield from (f"  {count:>9,}  {what}" for what, count in sorted(observed.items()))
    for path in fixtures:
        yield f"fixture: {path}"
