"""`kvledger compare`: its options, and a comparison of targets as JSON or for a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from kvledger.commands import Shell, add_rules_option, add_trace_argument, chosen_rules, shown_path
from kvledger.compare import compare
from kvledger.replay import TargetFactory
from kvledger.report.compared import comparison_lines
from kvledger.report.painted import bars_for, painted
from kvledger.schema import show
from kvledger.targets import TARGETS

SAME, DIFFERENT = 0, 1


def add_compare(commands: Any, shell: Shell) -> None:
    """Add `kvledger compare`."""
    parser = commands.add_parser(
        "compare",
        allow_abbrev=False,
        help="run a trace on several targets and show where they first differ",
        description="Run a trace on several targets and show where they first differ: the decision, the figures and "
        "promises of each, both verdicts. What a target cannot show is not compared, and is said not to be shown.",
        epilog="Exit status: 0 they agree; 1 they differ; 2 bad input, or the trace asks a target for what it does "
        "not model.",
    )
    add_trace_argument(parser)
    parser.add_argument(
        "--targets",
        type=_targets(shell),
        required=True,
        metavar="A,B",
        help=f"two targets or more; the first is held against each other one: {', '.join(TARGETS)}, or "
        "package.module:attribute",
    )
    add_rules_option(parser, shell)
    parser.add_argument("--json", action="store_true", help="print the comparison as a JSON object")
    parser.add_argument("--all-rounds", action="store_true", help="leave no round out of the table")

    def run(options: argparse.Namespace) -> int:
        trace = shell.read(options.traces[0])
        source = "<stdin>" if options.traces[0] == "-" else options.traces[0]
        comparison = compare(trace, options.targets, chosen_rules(options), source=shown_path(options.traces[0]))
        if options.json:
            shell.write(json.dumps(comparison.document(), indent=2) + "\n")
        else:
            lines = comparison_lines(comparison, source, bars_for(sys.stdout), all_rounds=options.all_rounds)
            shell.write(painted(lines, sys.stdout))
        return SAME if comparison.same else DIFFERENT

    parser.set_defaults(run=run)


def _targets(shell: Shell) -> Callable[[str], dict[str, TargetFactory]]:
    """`A,B` as targets by the names they were given."""

    def parse(text: str) -> dict[str, TargetFactory]:
        names = text.split(",")
        if len(names) < 2:  # noqa: PLR2004 - a comparison has two sides
            raise argparse.ArgumentTypeError(f"{show(text)} is one target; name two or more, with a comma between")
        if not all(names):
            raise argparse.ArgumentTypeError(f"{show(text)} names no target beside a comma")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise argparse.ArgumentTypeError(f"{show(twice)} is there twice")
        return {name: shell.target(name) for name in names}

    return parse
