"""The plugin as a user meets it: runs of pytest in a folder of their own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_scheduler"
TWICE = """
TestAgain = state_machine(Target, shard=1).TestCase
"""
HEALTHY = """
from kvledger.testing import state_machine

TestNode = state_machine().TestCase
"""


@pytest.fixture
def faulty(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with the example's scheduler and its test, which fails."""
    for name in ("scheduler.py", "test_scheduler.py"):
        (pytester.path / name).write_text((EXAMPLE / name).read_text())
    return pytester


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)


def test_a_failure_is_its_explanation(faulty: pytest.Pytester) -> None:
    result = run(faulty)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "promises-covered is broken. Shrunk from * events to 3 in * replays.",
            "promise*A's tail of 5 tokens, made in round 1*",
            "spent by*B: chunk 4",
            "fixture: *tests/regressions/test_scheduler.Target/promises-covered-*.json",
            "* kvledger *",
            "target Target: * examples, * rounds in 1 tests",
            "reached: *truncated*",
            "not asked, for the target cannot show it: *no-use-after-free*",
        ]
    )
    result.stdout.no_fnmatch_line("*avoided by*")  # no switch of the rules reaches it
    result.stdout.no_fnmatch_line("reached: *cached*")
    result.stdout.no_fnmatch_line("reached: *held*")
    result.stdout.no_fnmatch_line("*Failing test case*")
    result.stdout.no_fnmatch_line("*Traceback*")
    (fixture,) = (faulty.path / "tests" / "regressions" / "test_scheduler.Target").glob("*.json")
    assert json.loads(fixture.read_text())["expect"] == {"tail-reserved": "ok"}, "what it must give, not what it gives"


def test_verbose_keeps_the_lines_of_hypothesis(faulty: pytest.Pytester) -> None:
    result = run(faulty, "-v", "--kvledger-save=found")
    result.stdout.fnmatch_lines(["*state.act(*", "*promises-covered is broken*"])
    assert [path.suffix for path in (faulty.path / "found").iterdir()] == [".json"]


def test_workers_agree_and_two_failures_of_a_kind_are_one_fixture(faulty: pytest.Pytester) -> None:
    source = faulty.path / "test_scheduler.py"
    source.write_text(source.read_text() + TWICE)
    result = run(faulty, "-n2", "--kvledger-save=found", "--junitxml=junit.xml", "--kvledger-report=page.html")
    result.assert_outcomes(failed=2)
    assert len(list((faulty.path / "found").iterdir())) == 1
    result.stdout.fnmatch_lines(
        ["target Target: * rounds in 2 tests", "fixture: *", "report: page.promises-covered-*.html"]
    )
    (page,) = (path.read_text() for path in faulty.path.glob("page.*.html"))
    assert page.startswith("<!doctype html>")
    assert "A's tail" in re.sub(r"<[^>]*>", "", page).replace("&#x27;", "'"), "drawn on the scheduler that failed"
    names = {element.get("name") for element in ElementTree.parse(faulty.path / "junit.xml").iter("property")}
    assert {"kvledger_examples", "kvledger_rounds", "kvledger_branches", "kvledger_fixture"} <= names


def test_observations_are_counted_on_request(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(HEALTHY)
    result = run(pytester, "--kvledger-observe")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["by Hypothesis's observations:", "*  met whole", "*  move submit_long", "*  test cases passed"]
    )


def test_another_target_and_other_rules_by_option(faulty: pytest.Pytester) -> None:
    faulty.makepyfile(test_node=HEALTHY)
    result = run(faulty, "test_node.py", "--kvledger-target=test_scheduler:Target", "--kvledger-save=found")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["target Target: *"])
    result = run(faulty, "test_node.py", "--kvledger-rules=aligned", "--kvledger-save=found")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["promise*A's tail*no entry of the*", "avoided by*reserve_tail true"])


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--kvledger-target=nobody", "*kvledger: 'nobody' is neither one of node, sglang, vllm, vllm-align nor *"),
        ("--kvledger-target=no_such_module:Thing", "*kvledger: 'no_such_module:Thing': No module named*"),
        ("--kvledger-target=json:dumps_", "*kvledger: 'json:dumps_': module 'json' has no attribute*"),
        ("--kvledger-target=decimal:Decimal", "*kvledger: 'decimal:Decimal' does not make a kvledger target*"),
        ("--kvledger-rules=best", "*kvledger: 'best' is none of upstream, aligned, tail-reserved"),
    ],
)
def test_a_bad_option_is_one_line(pytester: pytest.Pytester, option: str, words: str) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = run(pytester, option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([words])
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


def test_a_run_without_machines_says_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = run(pytester)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*kvledger *")


def test_loading_the_plugin_loads_nothing_heavy() -> None:
    code = "import sys, kvledger.testing.pytest_plugin; print({'hypothesis', 'rich', 'torch'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"


def test_what_cannot_be_saved_does_not_end_the_session(faulty: pytest.Pytester) -> None:
    (faulty.path / "file").write_text("")
    result = run(faulty, "--kvledger-save=file")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["promises-covered is broken: *", "fixture not written: file: *"])
    result = run(faulty, "--kvledger-save=found", "--kvledger-report=no/page.html")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["report not written: no/page.promises-covered-*.html: No such file or directory"])
