"""`kvledger shrink` and `kvledger fixture`: make a failing trace small, and keep it as a regression."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from typing import Any

from kvledger.report.saving import write_whole
from kvledger.rules import PRESETS
from kvledger.shrink import NothingToShrink, Shrunk, shrink
from kvledger.targets import TARGETS
from kvledger.testing.failure import explain_failure
from kvledger.trace import Trace, dumps

Read = Callable[[str], Trace]
OneOf = Callable[[Collection[str]], Callable[[str], str]]


def add_shrink(commands: Any, *, read: Read, write: Callable[[str], None], one_of: OneOf) -> None:
    """Add the command; the arguments are the command line's own reader, printer and type of names."""
    parser = commands.add_parser(
        "shrink",
        allow_abbrev=False,
        help="make a failing trace as small as it gets",
        description="Make a failing trace as small as it gets, with the same invariant broken.",
        epilog="Exit status: 0 it is small; 1 the trace breaks nothing; 2 bad input.",
    )
    _add_common(parser, one_of)
    parser.add_argument("-o", metavar="FILE", dest="output", help="write it there instead of on standard output")

    def run(options: argparse.Namespace) -> int:
        trace = read(options.trace)
        try:
            shrunk = _shrink(trace, options)
        except NothingToShrink as error:
            print(f"kvledger: shrink: {error}", file=sys.stderr)
            return 1
        if options.output is None:
            write(dumps(shrunk.trace))
        else:
            write_whole(options.output, [dumps(shrunk.trace)])
        print(_effort(trace, shrunk), file=sys.stderr)
        return 0

    parser.set_defaults(run=run)


def add_fixture(commands: Any, *, read: Read, write: Callable[[str], None], one_of: OneOf) -> None:
    """Add the command; the arguments are the command line's own reader, printer and type of names."""
    parser = commands.add_parser(
        "fixture",
        allow_abbrev=False,
        help="shrink and explain a failing trace, and keep it as a regression",
        description="Shrink and explain a failing trace, and keep it with what every preset makes of it.",
        epilog="Exit status: 0 it is kept (already, perhaps); 1 the trace breaks nothing; 2 bad input.",
    )
    _add_common(parser, one_of)
    parser.add_argument("--save", metavar="DIR", default="tests/regressions", help="where (default: tests/regressions)")

    def run(options: argparse.Namespace) -> int:
        trace = read(options.trace)
        if options.rules is not None:
            trace = trace.with_rules(options.rules)
        try:
            failure = explain_failure(trace, options.save, TARGETS[options.target])
        except NothingToShrink as error:
            print(f"kvledger: fixture: {error}", file=sys.stderr)
            return 1
        write("\n".join(failure.lines) + "\n")
        return 0

    parser.set_defaults(run=run)


def _add_common(parser: argparse.ArgumentParser, one_of: OneOf) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a kvledger-trace/1 file; - is standard input")
    parser.add_argument("--rules", type=one_of(PRESETS), metavar="NAME", help="under this preset, not the trace's own")
    parser.add_argument(
        "--target", type=one_of(TARGETS), default="node", metavar="NAME", help="the scheduler under test"
    )


def _shrink(trace: Trace, options: argparse.Namespace) -> Shrunk:
    rules = PRESETS[options.rules] if options.rules else None
    return shrink(trace, rules=rules, target=TARGETS[options.target])


def _effort(trace: Trace, shrunk: Shrunk) -> str:
    """What was tried, as a counter."""
    tried = ", ".join(f"{name} {count:,}" for name, count in shrunk.tried.items() if count)
    limit = "; a limit ended it, it may not be the smallest" if shrunk.limited else ""
    return (
        f"{shrunk.invariant}: {len(trace.events)} events to {len(shrunk.trace.events)} in {shrunk.evaluations:,} "
        f"replays, {shrunk.seconds:.1f} s{limit} ({tried})"
    )
